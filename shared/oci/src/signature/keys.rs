//! Trusted public keys by name.

use std::{collections::BTreeMap, fmt};

use aws_lc_rs::signature::RsaParameters;
use thiserror::Error;
use tidewatch_kit::hex;
use x509_parser::{
    oid_registry::OID_PKCS1_RSAENCRYPTION,
    pem::Pem,
    prelude::{FromDer as _, X509Certificate},
    x509::SubjectPublicKeyInfo,
};

use super::algorithm::{HashAlgorithm, HashValue, SignatureAlgorithm};
use crate::excerpt::Excerpt;

/// Permitted sizes of a key, in bits.
const BITS: std::ops::RangeInclusive<u32> = 2_048..=8_192;
/// Maximum number of keys of one name.
const MAX_KEYS_OF_NAME: usize = 16;
/// Endings of files that are not part of a key's name.
const ENDINGS: [&str; 3] = [".pem", ".pub", ".crt"];

/// An RSA key that verifies signatures.
#[derive(Clone, PartialEq, Eq)]
pub struct PublicKey {
    /// `RSAPublicKey` (RFC 8017) in DER.
    der: Vec<u8>,
    bits: u32,
}

/// Keys by the name that their signatures have; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentKeys(BTreeMap<String, Vec<PublicKey>>);

/// Files that do not contain usable keys.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KeyError {
    /// There is no file.
    #[error("there is no file with a public key")]
    Empty,
    /// One file is not usable.
    #[error("the file {file}: {problem}")]
    File {
        /// Name of the file.
        file: Excerpt,
        /// Mistake.
        problem: KeyProblem,
    },
}

/// Mistake in a file with keys.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KeyProblem {
    /// The file is not PEM.
    #[error("it is not PEM")]
    Pem,
    /// It has no block with a key.
    #[error("it has no block PUBLIC KEY, RSA PUBLIC KEY or CERTIFICATE")]
    NoKey,
    /// It has a private key, which a verifier must not have.
    #[error("it has a block {0}, which is not a public key")]
    Block(Excerpt),
    /// The block is not an RSA key.
    #[error("it has a key that is not an RSA key")]
    NotRsa,
    /// The key is too small or too large.
    #[error("it has a key of {0} bits; 2048 to 8192 are permitted")]
    Bits(u32),
    /// There are too many keys of a name.
    #[error("there are more than {MAX_KEYS_OF_NAME} keys of its name")]
    TooMany,
}

impl ComponentKeys {
    /// Parses files by name. A file has one or several keys in PEM, and its name without the ending `.pem`, `.pub` or `.crt`
    /// is that of their signatures.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn parse(files: &BTreeMap<String, Vec<u8>>) -> Result<Self, KeyError> {
        let mut keys = BTreeMap::<String, Vec<PublicKey>>::new();
        for (file, content) in files {
            let refused = |problem| KeyError::File { file: Excerpt::of(file), problem };
            let of_name = keys.entry(name_of_file(file).to_owned()).or_default();
            of_name.extend(PublicKey::parse_all(content).map_err(refused)?);
            if of_name.len() > MAX_KEYS_OF_NAME {
                return Err(refused(KeyProblem::TooMany));
            }
        }
        if keys.is_empty() { Err(KeyError::Empty) } else { Ok(Self(keys)) }
    }

    /// Keys of a name.
    pub fn get(&self, name: &str) -> Option<&[PublicKey]> {
        self.0.get(name).map(Vec::as_slice)
    }

    /// Names of all keys, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// Name of the signatures that the keys of a file verify.
pub fn name_of_file(file: &str) -> &str {
    let stem = ENDINGS.iter().find_map(|ending| file.strip_suffix(ending));
    stem.filter(|stem| !stem.is_empty()).unwrap_or(file)
}

impl PublicKey {
    /// Parses the keys of a file in PEM.
    fn parse_all(pem: &[u8]) -> Result<Vec<Self>, KeyProblem> {
        let blocks = Pem::iter_from_buffer(pem).take(MAX_KEYS_OF_NAME + 1);
        let keys = blocks.map(|block| {
            let block = block.map_err(|_| KeyProblem::Pem)?;
            Self::parse(&block.label, &block.contents)
        });
        let keys: Vec<_> = keys.collect::<Result<_, _>>()?;
        if keys.is_empty() { Err(KeyProblem::NoKey) } else { Ok(keys) }
    }

    fn parse(label: &str, der: &[u8]) -> Result<Self, KeyProblem> {
        match label {
            "RSA PUBLIC KEY" => Self::of(der),
            "PUBLIC KEY" => {
                let (rest, info) = SubjectPublicKeyInfo::from_der(der).map_err(|_| KeyProblem::NotRsa)?;
                if rest.is_empty() { Self::of_info(&info) } else { Err(KeyProblem::NotRsa) }
            }
            "CERTIFICATE" => {
                let (_, certificate) = X509Certificate::from_der(der).map_err(|_| KeyProblem::NotRsa)?;
                Self::of_info(certificate.public_key())
            }
            other => Err(KeyProblem::Block(Excerpt::of(other))),
        }
    }

    fn of_info(info: &SubjectPublicKeyInfo<'_>) -> Result<Self, KeyProblem> {
        match info.algorithm.algorithm == OID_PKCS1_RSAENCRYPTION {
            true => Self::of(&info.subject_public_key.data),
            false => Err(KeyProblem::NotRsa),
        }
    }

    fn of(der: &[u8]) -> Result<Self, KeyProblem> {
        let bits = RsaParameters::public_modulus_len(der).map_err(|_| KeyProblem::NotRsa)?;
        if BITS.contains(&bits) { Ok(Self { der: der.to_owned(), bits }) } else { Err(KeyProblem::Bits(bits)) }
    }

    /// Returns true if this key made the signature of a hash.
    pub(super) fn verify(&self, algorithm: SignatureAlgorithm, hash: &HashValue, signature: &[u8]) -> bool {
        algorithm.verify(&self.der, hash, signature)
    }
}

/// Shows the beginning of the key's SHA-256.
impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hash = HashAlgorithm::Sha256.digest(&self.der);
        write!(f, "PublicKey({} bits, {})", self.bits, hex::encode(&hash.digest().as_ref()[..8]))
    }
}
