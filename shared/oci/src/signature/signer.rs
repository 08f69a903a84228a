//! Signs component descriptors, for the program that packs modules.

use std::fmt;

use aws_lc_rs::{
    rsa::KeyPair,
    signature::{RSA_PKCS1_SHA256, RSA_PKCS1_SHA512, RSA_PSS_SHA256, RSA_PSS_SHA512, RsaEncoding},
};
use rustls_pki_types::{PrivateKeyDer, pem::PemObject as _};
use serde_json::{Value, json};
use thiserror::Error;
use tidewatch_kit::hex;

use super::{
    algorithm::{HashAlgorithm, SignatureAlgorithm},
    normal::Normalisation,
};
use crate::descriptor::{DescriptorError, Document};

/// Algorithms of a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Method {
    /// Normal form.
    pub normalisation: Normalisation,
    /// Hash of the normal form.
    pub hash: HashAlgorithm,
    /// Signature of the hash.
    pub algorithm: SignatureAlgorithm,
}

/// The algorithms that all OCM tools verify.
impl Default for Method {
    fn default() -> Self {
        Self { normalisation: Normalisation::V3, hash: HashAlgorithm::Sha256, algorithm: SignatureAlgorithm::Pkcs1 }
    }
}

/// An RSA key that signs. `Debug` does not show it.
pub struct SigningKey(KeyPair);

/// A private key or a component descriptor that cannot be used to sign.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SignError {
    /// The file has no private key in PEM.
    #[error("there is no block PRIVATE KEY or RSA PRIVATE KEY in PEM without encryption")]
    Pem,
    /// The key is another one, or of another size.
    #[error("not an RSA key of 2048 to 8192 bits")]
    Key,
    /// The component descriptor has no normal form.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The library failed.
    #[error("the signature failed")]
    Sign,
}

impl SigningKey {
    /// Parses a private key: PKCS #8 or PKCS #1 in PEM, without encryption.
    ///
    /// # Errors
    /// [`SignError::Pem`] and [`SignError::Key`].
    pub fn from_pem(pem: &[u8]) -> Result<Self, SignError> {
        let pair = match PrivateKeyDer::from_pem_slice(pem).map_err(|_| SignError::Pem)? {
            PrivateKeyDer::Pkcs8(der) => KeyPair::from_pkcs8(der.secret_pkcs8_der()),
            PrivateKeyDer::Pkcs1(der) => KeyPair::from_der(der.secret_pkcs1_der()),
            _ => return Err(SignError::Key),
        };
        pair.map(Self).map_err(|_| SignError::Key)
    }

    /// Makes the entry of `signatures` for a component descriptor, with the signature in hexadecimal digits.
    ///
    /// # Errors
    /// [`SignError::Descriptor`] and [`SignError::Sign`].
    pub fn sign(&self, document: &Document, name: &str, method: Method) -> Result<Value, SignError> {
        let Method { normalisation, hash, algorithm } = method;
        let hash_name = hash.name();
        let digest = hash.digest(normalisation.normal_form(document)?.as_bytes());
        let encoding: &'static dyn RsaEncoding = match (algorithm, hash) {
            (SignatureAlgorithm::Pkcs1, HashAlgorithm::Sha256) => &RSA_PKCS1_SHA256,
            (SignatureAlgorithm::Pkcs1, HashAlgorithm::Sha512) => &RSA_PKCS1_SHA512,
            (SignatureAlgorithm::Pss, HashAlgorithm::Sha256) => &RSA_PSS_SHA256,
            (SignatureAlgorithm::Pss, HashAlgorithm::Sha512) => &RSA_PSS_SHA512,
        };
        let mut signature = vec![0; self.0.public_modulus_len()];
        self.0.sign_digest(encoding, digest.digest(), &mut signature).map_err(|_| SignError::Sign)?;
        Ok(json!({
            "name": name,
            "digest": {
                "hashAlgorithm": hash_name,
                "normalisationAlgorithm": normalisation.to_string(),
                "value": digest.to_string(),
            },
            "signature": {
                "algorithm": algorithm.to_string(),
                "mediaType": algorithm.media_type(),
                "value": hex::encode(&signature),
            },
        }))
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey(..)")
    }
}
