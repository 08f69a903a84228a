//! Content digests of the OCI image specification: SHA-256 only.

use std::{fmt, str::FromStr};

use aws_lc_rs::digest::{SHA256, digest};
use serde::{Serialize, Serializer};
use thiserror::Error;
use tidewatch_kit::hex;

const PREFIX: &str = "sha256:";

/// Digest of a blob or of a manifest: `sha256:` and 64 lower-case hexadecimal digits (OCI image specification,
/// *Digests*).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

/// Reference to a blob by its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BlobReference {
    /// Media type; may be empty.
    pub media_type: String,
    /// Digest of the content.
    pub digest: Digest,
    /// Bytes of the content.
    pub size: u64,
}

/// A text that is not a digest of the supported algorithm.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("not a digest of the form sha256:<64 lower-case hexadecimal digits>")]
pub struct DigestError;

impl Digest {
    /// Computes the digest of a content.
    pub fn of(content: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, content).as_ref());
        Self(bytes)
    }

    /// The 64 hexadecimal digits, without the algorithm.
    pub fn hex(&self) -> String {
        hex::encode(&self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let bytes = text.strip_prefix(PREFIX).and_then(hex::decode).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or(DigestError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_ABC: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn digest_equals_the_published_test_vector() {
        // FIPS 180-4, example "abc".
        assert_eq!(Digest::of(b"abc").to_string(), OF_ABC);
    }

    #[test]
    fn only_the_canonical_spelling_is_a_digest() {
        assert_eq!(OF_ABC.parse(), Ok(Digest::of(b"abc")));
        let upper = OF_ABC.to_uppercase();
        for bad in ["", "sha256:", &OF_ABC[7..], &OF_ABC[..70], &upper, "sha512:ab", "sha256:../../etc/passwd"] {
            assert_eq!(bad.parse::<Digest>(), Err(DigestError), "{bad}");
        }
        let multibyte = format!("sha256:{}", "é".repeat(32));
        assert_eq!(multibyte.parse::<Digest>(), Err(DigestError));
    }
}
