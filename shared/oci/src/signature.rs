//! Signatures of component descriptors (OCM specification, *Signing*). Pure.
//!
//! A signature covers the digest of a normal form of the component descriptor, which contains the digests of the
//! resources, and neither their places nor other signatures.
//!
//! | module | responsibility |
//! |---|---|
//! | `canonical` | canonical JSON |
//! | `normal` | normal forms of component descriptors |
//! | `algorithm` | hash and signature algorithms, and the encodings of signatures |
//! | `keys` | trusted public keys by name |
//! | `coverage` | contents that a verified signature covers |
//! | `signer` | signatures for the program that packs modules |

mod algorithm;
mod canonical;
mod coverage;
mod keys;
mod normal;
mod signer;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use strum::IntoStaticStr;
use thiserror::Error;
use tidewatch_kit::variant::VariantName as _;

use super::{
    descriptor::{DescriptorError, Document, MemberError, Object},
    excerpt::Excerpt,
};
pub use algorithm::{Encoding, HashAlgorithm, SignatureAlgorithm};
pub use coverage::{ContentDigest, Covered, cover, excluded, is_excluded};
pub use keys::{ComponentKeys, KeyError, KeyProblem, PublicKey, name_of_file};
pub use normal::Normalisation;
pub use signer::{Method, SignError, SigningKey};

/// Maximum number of signatures of a component descriptor.
pub const MAX_SIGNATURES: usize = 32;
/// Names in an error.
const MAX_NAMES: usize = 5;

/// Reason why a component descriptor is not trusted. Texts are bounded. The variants' names are metric labels.
#[derive(Clone, Debug, PartialEq, Eq, Error, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum SignatureError {
    /// There is no signature.
    #[error("it has no signature; expected is one of {expected}")]
    NoSignature {
        /// Names of the trusted keys.
        expected: String,
    },
    /// No signature has the name of a trusted key.
    #[error("its signatures {found} are not of a trusted key; expected is one of {expected}")]
    UnknownKey {
        /// Names of the signatures.
        found: String,
        /// Names of the trusted keys.
        expected: String,
    },
    /// The component descriptor has more signatures than [`MAX_SIGNATURES`].
    #[error("it has more than {MAX_SIGNATURES} signatures")]
    TooMany,
    /// A signature, or a member that it covers, is malformed.
    #[error(transparent)]
    Malformed(#[from] DescriptorError),
    /// The normal form is not known.
    #[error("the signature {name} uses the unknown normalisation {algorithm}")]
    Normalisation {
        /// Name of the signature.
        name: Excerpt,
        /// Algorithm of the normal form.
        algorithm: Excerpt,
    },
    /// The hash algorithm is not known.
    #[error("the signature {name} uses the unknown hash algorithm {algorithm}")]
    Hash {
        /// Name of the signature.
        name: Excerpt,
        /// Hash algorithm.
        algorithm: Excerpt,
    },
    /// The signature algorithm is not known, or its encoding does not fit.
    #[error("the signature {name} uses the unknown algorithm {algorithm} with the media type {media_type}")]
    Algorithm {
        /// Name of the signature.
        name: Excerpt,
        /// Signature algorithm.
        algorithm: Excerpt,
        /// Media type of the signature.
        media_type: Excerpt,
    },
    /// The value is not of the encoding that its media type names.
    #[error("the value of the signature {name} is not {encoding}")]
    Encoding {
        /// Name of the signature.
        name: Excerpt,
        /// Expected encoding.
        encoding: Encoding,
    },
    /// The content was changed after it was signed.
    #[error("the signature {name} is of another content: the digest is {actual} instead of {signed}")]
    Digest {
        /// Name of the signature.
        name: Excerpt,
        /// Digest of the normal form.
        actual: String,
        /// Digest in the signature.
        signed: Excerpt,
    },
    /// No key of this name made the signature.
    #[error("the signature {name} was not made with the trusted key of this name")]
    Mismatch {
        /// Name of the signature.
        name: Excerpt,
    },
    /// A resource is not protected, or its content is another one.
    #[error("the resource {name} {problem}")]
    Resource {
        /// Name of the resource.
        name: Excerpt,
        /// The problem, as a predicate.
        problem: String,
    },
}

impl SignatureError {
    /// Metric label, from a closed set.
    pub fn reason(&self) -> &'static str {
        self.as_str()
    }

    fn resource(name: &str, problem: impl Into<String>) -> Self {
        Self::Resource { name: Excerpt::of(name), problem: problem.into() }
    }
}

impl From<MemberError> for SignatureError {
    fn from(error: MemberError) -> Self {
        Self::Malformed(error.into())
    }
}

/// Verifies the signatures of a component descriptor, and returns the name of the first one that a trusted key of the same
/// name made. Others need not be valid: they may be of other parties.
///
/// # Errors
/// [`SignatureError`], of the first signature with the name of a trusted key if there is one.
pub fn verify(document: &Document, keys: &ComponentKeys) -> Result<String, SignatureError> {
    let signatures = signatures(document)?;
    let mut first = None;
    for signature in &signatures {
        let Some(keys) = keys.get(signature.name) else { continue };
        match signature.verify(document, keys) {
            Ok(()) => return Ok(signature.name.to_owned()),
            Err(error) => {
                first.get_or_insert(error);
            }
        }
    }
    let expected = names(keys.names());
    Err(first.unwrap_or_else(|| match signatures.is_empty() {
        true => SignatureError::NoSignature { expected },
        false => {
            SignatureError::UnknownKey { found: names(signatures.iter().map(|signature| signature.name)), expected }
        }
    }))
}

/// Result of the verification of one signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignatureResult {
    /// Name of the signature.
    pub name: String,
    /// Its verification; `None` without a key of its name.
    pub result: Option<Result<(), SignatureError>>,
}

/// Verifies every signature of a component descriptor.
///
/// # Errors
/// The signatures are malformed.
pub fn results(document: &Document, keys: &ComponentKeys) -> Result<Vec<SignatureResult>, SignatureError> {
    let result = |signature: &Signature<'_>| {
        let keys = keys.get(signature.name);
        let result = keys.map(|keys| signature.verify(document, keys));
        SignatureResult { name: signature.name.to_owned(), result }
    };
    Ok(signatures(document)?.iter().map(result).collect())
}

/// A signature as the component descriptor has it.
struct Signature<'a> {
    name: &'a str,
    digest: Object<'a>,
    signature: Object<'a>,
}

fn signatures<'a>(document: &'a Document) -> Result<Vec<Signature<'a>>, SignatureError> {
    let signatures = document.root()?.objects("signatures")?;
    if signatures.len() > MAX_SIGNATURES {
        return Err(SignatureError::TooMany);
    }
    let signature = |from: Object<'a>| -> Result<_, SignatureError> {
        Ok(Signature { name: from.text("name")?, digest: from.object("digest")?, signature: from.object("signature")? })
    };
    signatures.into_iter().map(signature).collect()
}

impl Signature<'_> {
    /// Verifies against keys of its name. The signature is of the digest itself, not of the text that names it.
    fn verify(&self, document: &Document, keys: &[PublicKey]) -> Result<(), SignatureError> {
        let name = || Excerpt::of(self.name);
        let normalisation = self.digest.text("normalisationAlgorithm")?;
        let Ok(normalisation) = normalisation.parse::<Normalisation>() else {
            return Err(SignatureError::Normalisation { name: name(), algorithm: Excerpt::of(normalisation) });
        };
        let hash = self.digest.text("hashAlgorithm")?;
        let Ok(hash) = hash.parse::<HashAlgorithm>() else {
            return Err(SignatureError::Hash { name: name(), algorithm: Excerpt::of(hash) });
        };
        let algorithm = self.signature.text("algorithm")?;
        let media_type = self.signature.text("mediaType")?;
        let Some((algorithm, encoding)) = SignatureAlgorithm::of(algorithm, media_type) else {
            let algorithm = Excerpt::of(algorithm);
            let media_type = Excerpt::of(media_type);
            return Err(SignatureError::Algorithm { name: name(), algorithm, media_type });
        };
        let Some(value) = encoding.decode(self.signature.text("value")?) else {
            return Err(SignatureError::Encoding { name: name(), encoding });
        };
        let digest = hash.digest(normalisation.normal_form(document)?.as_bytes());
        let actual = digest.to_string();
        let signed = self.digest.text("value")?;
        if actual != signed {
            return Err(SignatureError::Digest { name: name(), actual, signed: Excerpt::of(signed) });
        }
        match keys.iter().any(|key| key.verify(algorithm, &digest, &value)) {
            true => Ok(()),
            false => Err(SignatureError::Mismatch { name: name() }),
        }
    }
}

/// Names in an error, at most [`MAX_NAMES`].
fn names<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let count = names.len();
    let mut text: Vec<_> = names.take(MAX_NAMES).map(|name| Excerpt::of(name).to_string()).collect();
    if count > MAX_NAMES {
        text.push("…".to_owned());
    }
    text.join(", ")
}
