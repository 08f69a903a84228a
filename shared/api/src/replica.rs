//! Names of replicas, and their identities in certificates.

use std::{fmt, str::FromStr};

use thiserror::Error;

use crate::identity::TrustDomain;

/// Name of a replica, for example `tidewatch-replica-0`: a DNS label (RFC 1123).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaName(String);

/// The text is no name of a replica.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "the name of a replica has 1 to 63 lower-case letters, digits or '-', and starts and ends with a letter or digit"
)]
pub struct ParseReplicaNameError;

impl ReplicaName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// URI in the subject alternative names of the replica's certificate.
    pub fn uri(&self, domain: &TrustDomain) -> String {
        format!("spiffe://{domain}/replica/{self}")
    }

    /// The replica that a URI of this trust domain identifies; `None` for any other URI.
    pub fn of_uri(uri: &str, domain: &TrustDomain) -> Option<Self> {
        let path = uri.strip_prefix("spiffe://")?.strip_prefix(&*domain.to_string())?;
        path.strip_prefix("/replica/")?.parse().ok()
    }
}

impl FromStr for ReplicaName {
    type Err = ParseReplicaNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let (Some(&first), Some(&last)) = (text.as_bytes().first(), text.as_bytes().last()) else {
            return Err(ParseReplicaNameError);
        };
        let is_valid = text.len() <= 63
            && is_alphanumeric(first)
            && is_alphanumeric(last)
            && text.bytes().all(|byte| is_alphanumeric(byte) || byte == b'-');
        is_valid.then(|| Self(text.to_owned())).ok_or(ParseReplicaNameError)
    }
}

impl fmt::Display for ReplicaName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uri_identifies_exactly_one_replica_of_the_trust_domain() {
        let (name, domain): (ReplicaName, TrustDomain) =
            ("tidewatch-replica-0".parse().unwrap(), "kyma.local".parse().unwrap());
        let uri = name.uri(&domain);
        assert_eq!(uri, "spiffe://kyma.local/replica/tidewatch-replica-0");
        assert_eq!(ReplicaName::of_uri(&uri, &domain), Some(name));
        for other in [
            "spiffe://kyma.local/runtime/tidewatch-replica-0",
            "spiffe://kyma.locals/replica/a",
            "spiffe://other/replica/a",
            "spiffe://kyma.local/replica/",
            "spiffe://kyma.local/replica/a/b",
            "spiffe://kyma.local/replica/A",
            "https://kyma.local/replica/a",
        ] {
            assert_eq!(ReplicaName::of_uri(other, &domain), None, "{other}");
        }
    }

    #[test]
    fn names_are_dns_labels() {
        let longest = "a".repeat(63);
        for good in ["a", "0", "a-0", &longest] {
            assert_eq!(good.parse::<ReplicaName>().unwrap().as_str(), good);
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a_b", "a/b", &"a".repeat(64)] {
            assert_eq!(bad.parse::<ReplicaName>(), Err(ParseReplicaNameError), "{bad}");
        }
    }
}
