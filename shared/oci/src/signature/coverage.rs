//! Contents that a verified signature covers. The places of the contents are not signed, so a content is trusted only if it
//! has the digest of its resource.

use super::{SignatureError, algorithm::HashAlgorithm};
use crate::{
    descriptor::{AccessType, Descriptor, LocalBlob, RAW_MANIFEST, Resource, ResourceDigest},
    excerpt::Excerpt,
};

/// Normalisation of a blob: its bytes as stored.
const BLOB: &str = "genericBlobDigest/v1";
/// Normalisations of an image: its manifest or index; the second one is legacy.
const IMAGE: [&str; 2] = ["ociArtifactDigest/v1", "ociArtefactDigest/v1"];
/// Hash algorithm and value of a resource that the signer left out.
const NO_DIGEST: &str = "NO-DIGEST";
/// Normalisation of a resource that the signer left out.
const EXCLUDED: &str = "EXCLUDE-FROM-SIGNATURE";

/// A component descriptor of which only covered contents are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Covered {
    /// The descriptor. Its images are those with a covered digest, pinned to it.
    pub descriptor: Descriptor,
    /// Digest that the content of [`RAW_MANIFEST`] must have; none if its place is this digest.
    pub raw_manifest: Option<ContentDigest>,
}

/// Digest of a content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentDigest {
    hash: HashAlgorithm,
    value: String,
}

impl ContentDigest {
    /// Compares a content with the digest.
    ///
    /// # Errors
    /// It is another content.
    pub fn verify(&self, content: &[u8]) -> Result<(), SignatureError> {
        let actual = self.hash.digest(content).to_string();
        match actual == self.value {
            true => Ok(()),
            false => Err(SignatureError::resource(
                RAW_MANIFEST,
                format!("has the digest {actual} instead of the signed one"),
            )),
        }
    }
}

/// Digest of a resource that the signature shall not cover (OCM specification, *Signing*).
pub fn excluded() -> ResourceDigest {
    ResourceDigest {
        hash_algorithm: NO_DIGEST.to_owned(),
        normalisation_algorithm: EXCLUDED.to_owned(),
        value: NO_DIGEST.to_owned(),
    }
}

/// Returns true for a resource that the signer left out.
pub fn is_excluded(digest: &ResourceDigest) -> bool {
    *digest == excluded()
}

/// Selects the contents that the verified signature of a component descriptor covers. Images that the signer left out are
/// not in the result, so the references in the signed manifest stay.
///
/// # Errors
/// A resource has no digest, the digest of a used one is not known, or its place leads to another content.
pub fn cover(mut descriptor: Descriptor) -> Result<Covered, SignatureError> {
    let mut images = Vec::new();
    let mut raw_manifest = None;
    for resource in &descriptor.resources {
        let Some(digest) = &resource.digest else {
            match AccessType::of(&resource.access) {
                AccessType::None => continue,
                _ => {
                    return Err(SignatureError::resource(
                        &resource.name,
                        "has no digest, so the signature does not cover it",
                    ));
                }
            }
        };
        if let Some(blob) = descriptor.raw_manifest.as_ref().filter(|_| resource.name == RAW_MANIFEST) {
            raw_manifest = content(digest, blob)?;
        } else if let Some(image) = resource.image.as_ref().filter(|_| !is_excluded(digest)) {
            images.push(pinned(resource, image, digest)?);
        }
    }
    descriptor.images = images;
    Ok(Covered { descriptor, raw_manifest })
}

/// The digest that a blob must have, or none if its reference is this digest.
fn content(digest: &ResourceDigest, blob: &LocalBlob) -> Result<Option<ContentDigest>, SignatureError> {
    let refused = |problem: String| SignatureError::resource(RAW_MANIFEST, problem);
    if is_excluded(digest) {
        return Err(refused("is excluded from the signature".to_owned()));
    }
    let hash = checked(RAW_MANIFEST, digest, &[BLOB])?;
    let value = digest.value.clone();
    match (hash, &blob.digests[..]) {
        (HashAlgorithm::Sha256, [only]) if only.hex() == value => Ok(None),
        (HashAlgorithm::Sha256, [only]) => {
            Err(refused(format!("has the digest {} instead of the signed one", only.hex())))
        }
        _ => Ok(Some(ContentDigest { hash, value })),
    }
}

/// The reference of an image with its signed digest.
fn pinned(resource: &Resource, image: &str, digest: &ResourceDigest) -> Result<String, SignatureError> {
    let hash = checked(&resource.name, digest, &IMAGE)?;
    let signed = format!("{}:{}", hash.prefix(), digest.value);
    match image.split_once('@') {
        None => Ok(format!("{image}@{signed}")),
        Some((_, own)) if own == signed => Ok(image.to_owned()),
        Some(_) => Err(SignatureError::resource(
            &resource.name,
            format!("refers to {} instead of the signed digest", Excerpt::of(image)),
        )),
    }
}

/// The hash algorithm of a digest that is of one of these normalisations.
fn checked(name: &str, digest: &ResourceDigest, normalisations: &[&str]) -> Result<HashAlgorithm, SignatureError> {
    let ResourceDigest { hash_algorithm, normalisation_algorithm, value } = digest;
    let refused =
        |problem: &str, text: &str| SignatureError::resource(name, format!("{problem} {}", Excerpt::of(text)));
    if !normalisations.contains(&normalisation_algorithm.as_str()) {
        return Err(refused("has a digest of the unknown normalisation", normalisation_algorithm));
    }
    let hash: HashAlgorithm =
        hash_algorithm.parse().map_err(|_| refused("has a digest of the unknown hash algorithm", hash_algorithm))?;
    if hash.is_digest(value) { Ok(hash) } else { Err(refused("has a malformed digest", value)) }
}
