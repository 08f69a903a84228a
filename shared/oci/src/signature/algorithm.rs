//! Hash and signature algorithms, and the encodings of signatures.

use std::fmt;

use aws_lc_rs::{
    digest::{self, SHA256, SHA512},
    signature::{
        RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256, RSA_PSS_2048_8192_SHA512,
        RsaParameters, RsaPssSaltLength, VerificationAlgorithm as _,
    },
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use strum::{Display, EnumString};
use tidewatch_kit::hex;

/// Media type of a PKCS #1 v1.5 signature in hexadecimal digits.
const HEX_PKCS1: &str = "application/vnd.ocm.signature.rsa";
/// Media type of a PSS signature in hexadecimal digits.
const HEX_PSS: &str = "application/vnd.ocm.signature.rsa.pss";
/// Media type of a signature in PEM.
const PEM: &str = "application/x-pem-file";
/// First line of a signature in PEM.
const BEGIN: &str = "-----BEGIN SIGNATURE-----";
/// Last line of a signature in PEM.
const END: &str = "-----END SIGNATURE-----";
/// Salt lengths that signers use: the longest one (Go, OpenSSL), or that of the digest.
const SALTS: [RsaPssSaltLength; 2] = [RsaPssSaltLength::Max, RsaPssSaltLength::Digest];

/// Hash algorithm, by its names in component descriptors, of which the second ones are legacy.
#[derive(Clone, Copy, Debug, EnumString, PartialEq, Eq)]
pub enum HashAlgorithm {
    /// SHA-256.
    #[strum(serialize = "SHA-256", serialize = "sha256")]
    Sha256,
    /// SHA-512.
    #[strum(serialize = "SHA-512", serialize = "sha512")]
    Sha512,
}

impl HashAlgorithm {
    /// Hashes a content.
    pub fn digest(self, content: &[u8]) -> HashValue {
        let algorithm = match self {
            Self::Sha256 => &SHA256,
            Self::Sha512 => &SHA512,
        };
        HashValue { algorithm: self, digest: digest::digest(algorithm, content) }
    }

    /// Name in component descriptors.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "SHA-256",
            Self::Sha512 => "SHA-512",
        }
    }

    /// Returns true for the digits of a digest of this algorithm.
    pub(super) fn is_digest(self, digits: &str) -> bool {
        let bytes = match self {
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        };
        hex::decode(digits).is_some_and(|digest| digest.len() == bytes)
    }

    /// Name in a content digest (OCI image specification, *Digests*).
    pub(super) const fn prefix(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }
}

/// Hash of a content. It is displayed as lower-case hexadecimal digits.
#[derive(Clone, Copy, Debug)]
pub struct HashValue {
    algorithm: HashAlgorithm,
    digest: digest::Digest,
}

impl HashValue {
    /// The hash for the signature algorithms.
    pub const fn digest(&self) -> &digest::Digest {
        &self.digest
    }
}

impl fmt::Display for HashValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.digest.as_ref()))
    }
}

/// Signature algorithm (RFC 8017). Keys have 2,048 to 8,192 bits.
#[derive(Clone, Copy, Debug, Display, EnumString, PartialEq, Eq)]
pub enum SignatureAlgorithm {
    /// RSASSA-PKCS1-v1_5.
    #[strum(serialize = "RSASSA-PKCS1-V1_5")]
    Pkcs1,
    /// RSASSA-PSS, with a salt of the digest's or of the maximum length.
    #[strum(serialize = "RSASSA-PSS")]
    Pss,
}

impl SignatureAlgorithm {
    /// The algorithm and the encoding of a signature, if it is known and they fit together.
    pub(super) fn of(algorithm: &str, media_type: &str) -> Option<(Self, Encoding)> {
        let algorithm: Self = algorithm.parse().ok()?;
        match media_type {
            PEM => Some((algorithm, Encoding::Pem)),
            _ => (media_type == algorithm.media_type()).then_some((algorithm, Encoding::Hex)),
        }
    }

    /// Media type of a signature in hexadecimal digits.
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Pkcs1 => HEX_PKCS1,
            Self::Pss => HEX_PSS,
        }
    }

    /// Verifies a signature of a hash with a public key (RFC 8017, `RSAPublicKey`).
    pub(super) fn verify(self, key: &[u8], hash: &HashValue, signature: &[u8]) -> bool {
        let holds = |parameters: &RsaParameters| parameters.verify_digest_sig(key, &hash.digest, signature).is_ok();
        let with_salt =
            |parameters: fn(RsaPssSaltLength) -> RsaParameters| SALTS.iter().any(|salt| holds(&parameters(*salt)));
        match (self, hash.algorithm) {
            (Self::Pkcs1, HashAlgorithm::Sha256) => holds(&RSA_PKCS1_2048_8192_SHA256),
            (Self::Pkcs1, HashAlgorithm::Sha512) => holds(&RSA_PKCS1_2048_8192_SHA512),
            (Self::Pss, HashAlgorithm::Sha256) => with_salt(|salt| RSA_PSS_2048_8192_SHA256.with_pss_salt_length(salt)),
            (Self::Pss, HashAlgorithm::Sha512) => with_salt(|salt| RSA_PSS_2048_8192_SHA512.with_pss_salt_length(salt)),
        }
    }
}

/// Encoding of a signature.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
pub enum Encoding {
    /// Lower-case hexadecimal digits.
    #[strum(to_string = "hexadecimal digits")]
    Hex,
    /// A block SIGNATURE, which certificates may follow.
    #[strum(to_string = "a PEM block SIGNATURE")]
    Pem,
}

impl Encoding {
    /// Decodes a signature.
    pub(super) fn decode(self, text: &str) -> Option<Vec<u8>> {
        match self {
            Self::Hex => hex::decode(text),
            Self::Pem => {
                let (_, block) = text.split_once(BEGIN)?;
                let (block, _) = block.split_once(END)?;
                // Headers, as in `Signature Algorithm: RSASSA-PSS`.
                let lines = block.lines().map(str::trim).filter(|line| !line.contains(':'));
                BASE64_STANDARD.decode(lines.collect::<String>()).ok()
            }
        }
    }
}
