//! Problem Details (RFC 9457), the body of every rejection. Problems never echo input.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr};
use tidewatch_kit::variant::VariantName as _;

/// Content type of a problem.
pub const CONTENT_TYPE: &str = "application/problem+json";
/// Prefix of every `type`.
const PREFIX: &str = "https://kyma-project.io/tidewatch/problems/";

/// The kinds of rejection to which an agent reacts differently, beyond the status. The name is the end of the `type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum Kind {
    /// 401: the signature's time is outside the window; the `Date` header has the receiver's time.
    Clock,
    /// 401: the nonce was already used.
    Replay,
    /// 401: the signature is missing, violates the profile, or does not verify.
    Signature,
    /// 401: the certificate is expired, revoked, or of an unknown issuer.
    Certificate,
    /// Any kind that the status alone identifies.
    Other,
}

/// A problem in its JSON form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// A URI that identifies the kind.
    #[serde(rename = "type")]
    pub uri: Cow<'static, str>,
    /// The kind in human-readable form.
    pub title: Cow<'static, str>,
    /// The HTTP status.
    pub status: u16,
    /// The reason for this rejection, a fixed text.
    #[serde(default)]
    pub detail: Cow<'static, str>,
}

impl Problem {
    /// Creates a problem of fixed texts.
    pub fn new(kind: Kind, title: &'static str, status: u16, detail: &'static str) -> Self {
        let uri = match kind {
            Kind::Other => Cow::Borrowed("about:blank"),
            named => Cow::Owned(format!("{PREFIX}{}", named.as_str())),
        };
        Self { uri, title: title.into(), status, detail: detail.into() }
    }

    /// The kind that the URI identifies.
    pub fn kind(&self) -> Kind {
        self.uri.strip_prefix(PREFIX).and_then(|name| name.parse().ok()).unwrap_or(Kind::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_survives_the_wire() {
        for kind in [Kind::Clock, Kind::Replay, Kind::Signature, Kind::Certificate, Kind::Other] {
            let text = serde_json::to_string(&Problem::new(kind, "title", 401, "detail")).unwrap();
            assert_eq!(serde_json::from_str::<Problem>(&text).unwrap().kind(), kind);
        }
    }
}
