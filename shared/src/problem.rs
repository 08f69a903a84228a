//! Problem Details (RFC 9457): how every refusal looks on the wire. The input is never echoed.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Content type of a problem.
pub const CONTENT_TYPE: &str = "application/problem+json";
/// Every `type` begins with this.
const PREFIX: &str = "https://kyma-project.io/tidewatch/problems/";

/// The kinds of refusal that an agent tells apart by more than the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// 401: the signature's time lies outside the window; the `Date` header has the receiver's.
    Clock,
    /// 401: the nonce was used.
    Replay,
    /// 401: the signature is missing, off the profile, or does not verify.
    Signature,
    /// 401: the certificate is expired, revoked, or of an unknown issuer.
    Certificate,
    /// Anything that the status alone tells.
    Other,
}

impl Kind {
    const NAMED: [(Self, &'static str); 4] = [
        (Self::Clock, "clock"),
        (Self::Replay, "replay"),
        (Self::Signature, "signature"),
        (Self::Certificate, "certificate"),
    ];
}

/// A problem as JSON spells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// A URI that names the kind.
    #[serde(rename = "type")]
    pub uri: Cow<'static, str>,
    /// The kind in words.
    pub title: Cow<'static, str>,
    /// The HTTP status.
    pub status: u16,
    /// What this request did wrong, in fixed words.
    #[serde(default)]
    pub detail: Cow<'static, str>,
}

impl Problem {
    /// Makes a problem of fixed words.
    #[must_use]
    pub fn new(kind: Kind, title: &'static str, status: u16, detail: &'static str) -> Self {
        let uri = match Kind::NAMED.iter().find(|(named, _)| *named == kind) {
            Some((_, name)) => Cow::Owned(format!("{PREFIX}{name}")),
            None => Cow::Borrowed("about:blank"),
        };
        Self { uri, title: title.into(), status, detail: detail.into() }
    }

    /// The kind that the URI names.
    #[must_use]
    pub fn kind(&self) -> Kind {
        let name = self.uri.strip_prefix(PREFIX);
        Kind::NAMED.iter().find(|(_, named)| name == Some(*named)).map_or(Kind::Other, |(kind, _)| *kind)
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
