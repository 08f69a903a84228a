//! Contract v2, the incumbent's, as bytes: path, body, and the certificate that a proxy forwards.
//!
//! Reading is lenient where the incumbent's listener is, and writing is exactly what its agent writes, so that either half can be
//! exchanged alone. An event names an object and nothing of its state; whoever takes it reads the truth itself.

mod forwarded;

use rustls_pki_types::CertificateDer;
use serde::Serialize;
use serde_json::{Map, Value};
use thiserror::Error;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::{certificate::fingerprint, identity::RuntimeId};

pub use forwarded::{ReadForwarded, forward, forwarded};

/// Content type of a body.
pub const CONTENT_TYPE: &str = "application/json";
/// Bytes of a body, at most.
pub const MAX_BODY_BYTES: usize = 16 << 10;
/// Bytes of a forwarded certificate's header value, at most.
pub const MAX_FORWARDED_BYTES: usize = 32 << 10;

/// The bytes are no event.
#[derive(Debug, Error)]
pub enum ParseEvent {
    /// Not JSON.
    #[error("the body is not JSON")]
    Json(#[from] serde_json::Error),
    /// JSON of another shape.
    #[error("the body is not an event: {0} is not what it should be")]
    Shape(&'static str),
}

/// An object that changed, by name. Empty parts stay empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Event {
    /// Its namespace, empty for cluster-scoped objects.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// API group, empty for the core group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Kind.
    pub kind: String,
}

impl Event {
    /// Reads a body. Members in any letter case, as the incumbent's decoder takes them; what is missing counts as empty, and unknown
    /// members are ignored.
    ///
    /// # Errors
    /// [`ParseEvent`].
    pub fn parse(body: &[u8]) -> Result<Self, ParseEvent> {
        let Value::Object(body) = serde_json::from_slice(body)? else { return Err(ParseEvent::Shape("the whole")) };
        let watched = object(&body, "watched")?;
        let kind = object(&body, "watchedGvk")?;
        Ok(Self {
            namespace: text(&watched, "namespace")?,
            name: text(&watched, "name")?,
            group: text(&kind, "group")?,
            version: text(&kind, "version")?,
            kind: text(&kind, "kind")?,
        })
    }

    /// The body as the incumbent's agent writes it, byte by byte: capitalised members of `watched`, in this order, and its encoder's
    /// escapes.
    #[must_use]
    pub fn to_body(&self) -> String {
        #[derive(Serialize)]
        #[serde(rename_all = "PascalCase")]
        struct Watched<'a> {
            namespace: &'a str,
            name: &'a str,
        }
        #[derive(Serialize)]
        struct Kind<'a> {
            group: &'a str,
            version: &'a str,
            kind: &'a str,
        }
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Wire<'a> {
            watched: Watched<'a>,
            watched_gvk: Kind<'a>,
        }
        let Self { namespace, name, group, version, kind } = self;
        let wire = Wire { watched: Watched { namespace, name }, watched_gvk: Kind { group, version, kind } };
        let body = serde_json::to_string(&wire).expect("texts always serialize");
        // Go's encoder keeps these out of JSON that may stand in HTML. They can only stand within texts here.
        let escaped = |c| matches!(c, '<' | '>' | '&' | '\u{2028}' | '\u{2029}');
        if !body.contains(escaped) {
            return body;
        }
        let mut written = String::with_capacity(body.len() + 16);
        for c in body.chars() {
            if escaped(c) { written.push_str(&format!("\\u{:04x}", u32::from(c))) } else { written.push(c) }
        }
        written
    }
}

/// The member of an object in any letter case; of several the last counts.
fn member<'a>(object: &'a Map<String, Value>, name: &str) -> &'a Value {
    let mut found = object.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value);
    found.next_back().unwrap_or(&Value::Null)
}

fn object(parent: &Map<String, Value>, name: &'static str) -> Result<Map<String, Value>, ParseEvent> {
    match member(parent, name) {
        Value::Object(object) => Ok(object.clone()),
        Value::Null => Ok(Map::new()),
        _ => Err(ParseEvent::Shape(name)),
    }
}

fn text(parent: &Map<String, Value>, name: &'static str) -> Result<String, ParseEvent> {
    match member(parent, name) {
        Value::String(text) => Ok(text.clone()),
        Value::Null => Ok(String::new()),
        _ => Err(ParseEvent::Shape(name)),
    }
}

/// Whether a text may stand as a manager in a path: 1 to 253 letters, digits, '-', '.' or '_', and not dots alone.
#[must_use]
pub fn is_manager(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    (1..=253).contains(&text.len()) && text.bytes().all(allowed) && text.bytes().any(|byte| byte != b'.')
}

/// `/v2/<manager>/event`.
#[must_use]
pub fn path(manager: &str) -> String {
    format!("/v2/{manager}/event")
}

/// The manager of a path; `None` when it is not exactly `/v2/<manager>/event`.
#[must_use]
pub fn manager_of(path: &str) -> Option<&str> {
    path.strip_prefix("/v2/")?.strip_suffix("/event").filter(|manager| is_manager(manager))
}

/// Why a certificate names no caller.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ReadCaller {
    /// Not X.509.
    #[error("the certificate is not readable")]
    Unreadable,
    /// More than one common name, so nobody knows which is meant.
    #[error("the certificate has more than one common name")]
    Several,
    /// No common name, or an empty one.
    #[error("the certificate's common name is empty")]
    Empty,
    /// A common name that no runtime can have.
    #[error("the certificate's common name is no runtime id")]
    NotId,
}

/// Who speaks v2: whom a certificate's common name says, whatever its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Which runtime.
    pub runtime: RuntimeId,
    /// Its leaf.
    pub leaf: CertificateDer<'static>,
    /// Its fingerprint, as [`fingerprint`] makes it.
    pub fingerprint: String,
    /// Start of validity, in Unix seconds.
    pub not_before: i64,
    /// End of validity, in Unix seconds.
    pub not_after: i64,
}

impl Caller {
    /// Reads a leaf whose chain was verified, or is to be.
    ///
    /// # Errors
    /// [`ReadCaller`].
    pub fn read(leaf: &CertificateDer<'_>) -> Result<Self, ReadCaller> {
        let Ok(([], certificate)) = X509Certificate::from_der(leaf) else { return Err(ReadCaller::Unreadable) };
        let mut names = certificate.subject().iter_common_name();
        let (name, more) = (names.next(), names.next());
        if more.is_some() {
            return Err(ReadCaller::Several);
        }
        let name = name.map_or(Ok(""), |name| name.as_str()).map_err(|_| ReadCaller::NotId)?;
        if name.is_empty() {
            return Err(ReadCaller::Empty);
        }
        let validity = certificate.validity();
        Ok(Self {
            runtime: name.parse().map_err(|_| ReadCaller::NotId)?,
            leaf: leaf.clone().into_owned(),
            fingerprint: fingerprint(leaf),
            not_before: validity.not_before.timestamp(),
            not_after: validity.not_after.timestamp(),
        })
    }
}

#[cfg(test)]
mod tests;
