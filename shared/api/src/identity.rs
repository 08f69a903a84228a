//! Identities: runtime ids, trust domains, and the random tokens that distinguish the epochs of an agent and the
//! instances of a receiver.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;
use tidewatch_kit::hex;

/// The error of parsing an identity.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ParseIdentityError {
    /// Not a runtime id, which is limited to the syntax of label values, because it is the value of the label
    /// `kyma-project.io/runtime-id`.
    #[error("a runtime id has 1 to 63 letters, digits, '-', '_' or '.', and starts and ends with a letter or digit")]
    RuntimeId,
    /// Not a trust domain (SPIFFE ID standard, section 2.1).
    #[error("a trust domain has 1 to 255 lower-case letters, digits, '-', '_' or '.'")]
    TrustDomain,
    /// Not a token of an [`Epoch`] or an [`Instance`].
    #[error("a token is 16 lower-case hex digits")]
    Token,
}

/// The id of one runtime: the value of the label `kyma-project.io/runtime-id`, at most 63 characters.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuntimeId(String);

impl RuntimeId {
    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RuntimeId {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        let bytes = text.as_bytes();
        let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else {
            return Err(ParseIdentityError::RuntimeId);
        };
        let valid = bytes.len() <= 63
            && first.is_ascii_alphanumeric()
            && last.is_ascii_alphanumeric()
            && bytes.iter().copied().all(inner);
        valid.then(|| Self(text.to_owned())).ok_or(ParseIdentityError::RuntimeId)
    }
}

/// The trust domain of the SPIFFE ids in certificates, for example `kyma.local`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TrustDomain(String);

impl TrustDomain {
    /// The URI of a runtime in the subject alternative names of a certificate.
    pub fn uri(&self, runtime: &RuntimeId) -> String {
        format!("spiffe://{self}/runtime/{runtime}")
    }

    /// The audience of the service account tokens by which agents enrol at this control plane. No API server accepts it,
    /// nor does a control plane of another trust domain.
    pub fn token_audience(&self) -> String {
        format!("spiffe://{self}/tidewatch")
    }

    /// The runtime that a URI of this trust domain identifies; `None` for any other URI.
    pub fn runtime_of(&self, uri: &str) -> Option<RuntimeId> {
        uri.strip_prefix("spiffe://")?.strip_prefix(&*self.0)?.strip_prefix("/runtime/")?.parse().ok()
    }
}

impl FromStr for TrustDomain {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
        let valid = (1..=255).contains(&text.len()) && text.bytes().all(allowed);
        valid.then(|| Self(text.to_owned())).ok_or(ParseIdentityError::TrustDomain)
    }
}

/// Implements the JSON form of an identity, which is its text.
macro_rules! serde_as_text {
    ($name:ident) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    };
}

serde_as_text!(RuntimeId);

/// Defines a token of 64 random bits, written as 16 lower-case hex digits.
macro_rules! token {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u64);

        impl $name {
            /// Creates the token from 64 random bits; the caller owns the source of randomness.
            pub const fn new(random: u64) -> Self {
                Self(random)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdentityError;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                hex::decode_u64(text).map(Self).ok_or(ParseIdentityError::Token)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        serde_as_text!($name);
    };
}

token! {
    /// The epoch of an agent's sequences: drawn at process start, and whenever the receiver's instance changes.
    Epoch
}

token! {
    /// The instance of a receiver process: drawn at its start, independent of pod and host names.
    Instance
}

impl fmt::Display for RuntimeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for RuntimeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_ids_are_label_values() {
        for good in ["a", "0a1b2c3d-0000-4000-8000-000000000000", "A_b.c-9"] {
            assert_eq!(good.parse::<RuntimeId>().unwrap().as_str(), good);
        }
        for bad in ["", "-a", "a-", "a/b", "a b", "ä", &"a".repeat(64)] {
            assert_eq!(bad.parse::<RuntimeId>(), Err(ParseIdentityError::RuntimeId), "{bad}");
        }
    }

    #[test]
    fn a_uri_names_a_runtime_of_its_own_domain_only() {
        let domain: TrustDomain = "kyma.local".parse().unwrap();
        let runtime: RuntimeId = "r-1".parse().unwrap();
        assert_eq!(domain.runtime_of(&domain.uri(&runtime)), Some(runtime));
        for foreign in [
            "spiffe://kyma.local.evil/runtime/r-1",
            "spiffe://other/runtime/r-1",
            "https://kyma.local/runtime/r-1",
            "spiffe://kyma.local/runtime/r-1/x",
            "spiffe://kyma.local/runtime/",
        ] {
            assert_eq!(domain.runtime_of(foreign), None, "{foreign}");
        }
    }
}
