//! Contract v2, that of lifecycle-manager: path, body, and the certificate that a proxy forwards.
//!
//! Parsing is as lenient as lifecycle-manager's listener. Writing reproduces the bytes of runtime-watcher's agent, as
//! managers of forwarded events expect them. An event names an object without its state: the consumer reads the current state itself.

mod forwarded;
mod wire;

use rustls_pki_types::CertificateDer;
use serde::Serialize;
use thiserror::Error;

use crate::certificate::{self, Leaf, RuntimeCertificate};

use self::wire::{Wire, is_field};
pub use forwarded::{forwarded_header, parse_forwarded};

/// Content type of a body.
pub const CONTENT_TYPE: &str = "application/json";
/// Limit of a body in bytes.
pub const MAX_BODY_BYTES: usize = 16 << 10;
/// Limit of the header value of a forwarded certificate, in bytes.
pub const MAX_FORWARDED_BYTES: usize = 32 << 10;

/// The reference to an object that changed. Empty parts are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Event {
    /// Namespace; empty for cluster-scoped objects.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// API group; empty for the core group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Kind.
    pub kind: String,
}

impl Event {
    /// Parses a body. Like lifecycle-manager's decoder, it matches member names case-insensitively, treats absent members and
    /// null as empty, ignores unknown members, and lets a later member overwrite an earlier one of the same name. `None` if
    /// the body is not JSON, or if it or a member has the wrong type.
    pub fn parse(body: &[u8]) -> Option<Self> {
        let Wire::Object(body) = serde_json::from_slice(body).ok()? else { return None };
        let mut event = Self::default();
        let Self { namespace, name, group, version, kind } = &mut event;
        for (key, value) in body {
            if is_field(&key, "watched") {
                assign(value, &mut [("namespace", namespace), ("name", name)])?;
            } else if is_field(&key, "watchedgvk") {
                assign(value, &mut [("group", group), ("version", version), ("kind", kind)])?;
            }
        }
        Some(event)
    }

    /// Writes the body byte by byte as runtime-watcher's agent does: capitalised members of `watched`, in this order, and
    /// the escapes of Go's JSON encoder.
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
        // Go's encoder escapes these characters, so that JSON can be embedded in HTML. They occur only within strings
        // here.
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

/// Assigns the members of an object to fields; `None` if a value has the wrong type.
fn assign(value: Wire, fields: &mut [(&'static str, &mut String)]) -> Option<()> {
    let members = match value {
        Wire::Object(members) => members,
        Wire::Null => return Some(()),
        Wire::Text(_) | Wire::Other => return None,
    };
    for (key, value) in members {
        let Some((_, field)) = fields.iter_mut().find(|(name, _)| is_field(&key, name)) else { continue };
        match value {
            Wire::Text(text) => **field = text,
            Wire::Null => {}
            Wire::Object(_) | Wire::Other => return None,
        }
    }
    Some(())
}

/// True if a text is valid as the manager in a path: 1 to 253 letters, digits, '-', '.' or '_', and not dots alone.
pub fn is_manager(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    (1..=253).contains(&text.len()) && text.bytes().all(allowed) && text.bytes().any(|byte| byte != b'.')
}

/// The path of a manager's events: `/v2/<manager>/event`.
pub fn path(manager: &str) -> String {
    format!("/v2/{manager}/event")
}

/// The manager in a path; `None` unless the path is exactly `/v2/<manager>/event`.
pub fn manager_of(path: &str) -> Option<&str> {
    path.strip_prefix("/v2/")?.strip_suffix("/event").filter(|manager| is_manager(manager))
}

/// The error of reading the caller from a certificate.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ReadCallerError {
    /// Not X.509.
    #[error("the certificate is not readable")]
    Unreadable,
    /// More than one common name, which is ambiguous.
    #[error("the certificate has more than one common name")]
    Several,
    /// No common name, or an empty one.
    #[error("the certificate's common name is empty")]
    Empty,
    /// The common name is not a runtime id.
    #[error("the certificate's common name is not a runtime id")]
    NotId,
}

/// Reads the caller of a request from its leaf: v2 identifies it by the common name, and accepts any type of key. The chain
/// is verified separately.
///
/// # Errors
/// [`ReadCallerError`].
pub fn read_caller(leaf: &CertificateDer<'_>) -> Result<RuntimeCertificate, ReadCallerError> {
    let certificate = certificate::parse(leaf).map_err(|_| ReadCallerError::Unreadable)?;
    let mut names = certificate.subject().iter_common_name();
    let name = names.next();
    let more = names.next();
    if more.is_some() {
        return Err(ReadCallerError::Several);
    }
    let name = name.map_or(Ok(""), |name| name.as_str()).map_err(|_| ReadCallerError::NotId)?;
    if name.is_empty() {
        return Err(ReadCallerError::Empty);
    }
    let runtime = name.parse().map_err(|_| ReadCallerError::NotId)?;
    Ok(RuntimeCertificate { runtime, leaf: Leaf::of(&certificate, leaf) })
}

#[cfg(test)]
mod tests;
