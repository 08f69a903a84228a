//! HTTP Message Signatures (RFC 9421) in one closed profile, over Digest Fields (RFC 9530).
//!
//! One signature, label `tidewatch`, over exactly five components in a fixed order, with exactly six parameters. Both
//! header fields must be their own canonical serialisation (RFC 9651, section 4.1): nothing can be duplicated, added or
//! hidden in white space, and the received bytes are the signed bytes. The receiver verifies them before it parses the body.

use aws_lc_rs::{
    constant_time::verify_slices_are_equal,
    digest,
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, UnparsedPublicKey},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use rustls_pki_types::PrivateKeyDer;
use sfv::{BareItem, DictSerializer, Dictionary, Item, ListEntry, Parser};
use thiserror::Error;
use tidewatch_api::identity::Epoch;

use crate::certificate::Leaf;

/// Header field of the signature parameters.
pub const SIGNATURE_INPUT: &str = "signature-input";
/// Header field of the signature.
pub const SIGNATURE: &str = "signature";
/// Header field of the digest of the body.
pub const CONTENT_DIGEST: &str = "content-digest";

/// Maximum difference of `created` from the receiver's clock, and maximum lifetime of a signature, in seconds.
pub const WINDOW_SECONDS: i64 = 60;

const LABEL: &str = "tidewatch";
const TAG: &str = "tidewatch-v3";
const ALGORITHM: &str = "ecdsa-p256-sha256";
const COMPONENTS: [&str; 5] = ["@method", "@authority", "@path", "content-type", "content-digest"];

/// The error of signing a request.
#[derive(Debug, Error)]
pub enum SignError {
    /// The key is not a P-256 key in PKCS#8 or SEC1.
    #[error("the key is not a P-256 key in PKCS#8 or SEC1")]
    Key,
    /// The key is an RSA key.
    #[error("the key is an RSA key in PKCS#1; signatures need a P-256 key in PKCS#8 or SEC1")]
    Rsa,
    /// The crypto library failed.
    #[error("the request could not be signed")]
    Make,
}

/// The error of verifying a request (status 401).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerifyError {
    /// A field is missing, duplicated, not canonical, or outside of the profile.
    Profile,
    /// `keyid` does not identify the certificate of the connection.
    KeyId,
    /// `created` differs too much from the receiver's clock, or the signature has expired.
    Clock,
    /// The body does not match `Content-Digest`.
    Digest,
    /// The signature does not verify.
    Signature,
}

/// The nonce of a signature: `<epoch>-<counter>`, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nonce {
    /// The epoch of the agent's sequences.
    pub epoch: Epoch,
    /// The number of the request in that epoch.
    pub counter: u64,
}

/// The signed components of a request, without the body.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// HTTP method.
    pub method: &'a str,
    /// `Host` or `:authority`, lower case, with port where it is not the default.
    pub authority: &'a str,
    /// Path without query.
    pub path: &'a str,
    /// `Content-Type`.
    pub content_type: &'a str,
}

/// The three header values of a signed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headers {
    /// Value of [`CONTENT_DIGEST`].
    pub content_digest: String,
    /// Value of [`SIGNATURE_INPUT`].
    pub signature_input: String,
    /// Value of [`SIGNATURE`].
    pub signature: String,
}

/// A received request with its three header values.
#[derive(Clone, Copy, Debug)]
pub struct SignedRequest<'a> {
    /// The signed components.
    pub message: Message<'a>,
    /// Value of `Content-Digest`.
    pub content_digest: &'a str,
    /// Value of `Signature-Input`.
    pub signature_input: &'a str,
    /// Value of `Signature`.
    pub signature: &'a str,
    /// The raw body.
    pub body: &'a [u8],
}

/// The parameters of a valid signature, which only [`verify`] constructs: holding one proves that a signature was
/// checked, and it is not `Clone`, so it vouches for one request. The nonce has not been checked for reuse: the
/// receiver's replay window does that.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifiedSignature {
    /// Time of signing in Unix seconds, by the signer's clock.
    pub created: i64,
    /// Never reused by an honest signer.
    pub nonce: Nonce,
}

#[cfg(any(test, feature = "testing"))]
impl VerifiedSignature {
    /// Stands for a signature that was not checked.
    pub const fn unchecked(created: i64, nonce: Nonce) -> Self {
        Self { created, nonce }
    }
}

/// Signs requests with the key of a leaf certificate.
pub struct Signer {
    key: EcdsaKeyPair,
    fingerprint: String,
    random: SystemRandom,
}

impl Signer {
    /// Creates a signer from a leaf's key and the leaf's fingerprint ([`crate::certificate::fingerprint`]).
    ///
    /// # Errors
    /// [`SignError::Key`] and [`SignError::Rsa`].
    pub fn new(key: &PrivateKeyDer<'_>, fingerprint: String) -> Result<Self, SignError> {
        if matches!(key, PrivateKeyDer::Pkcs1(_)) {
            return Err(SignError::Rsa);
        }
        let key = EcdsaKeyPair::from_private_key_der(&ECDSA_P256_SHA256_FIXED_SIGNING, key.secret_der())
            .map_err(|_| SignError::Key)?;
        Ok(Self { key, fingerprint, random: SystemRandom::new() })
    }

    /// Signs a request; `now` is the time in Unix seconds.
    ///
    /// # Errors
    /// [`SignError::Make`].
    pub fn sign(&self, message: &Message<'_>, body: &[u8], nonce: Nonce, now: i64) -> Result<Headers, SignError> {
        let parameters = Parameters {
            created: now,
            expires: now + WINDOW_SECONDS,
            nonce: format!("{}-{}", nonce.epoch, nonce.counter),
            keyid: self.fingerprint.clone(),
        };
        let content_digest = content_digest(body);
        let inner_list = parameters.inner_list();
        let base = signature_base(message, &content_digest, &inner_list);
        let signature = self.key.sign(&self.random, base.as_bytes()).map_err(|_| SignError::Make)?;
        Ok(Headers {
            content_digest,
            signature_input: format!("{LABEL}={inner_list}"),
            signature: format!("{LABEL}=:{}:", STANDARD.encode(signature.as_ref())),
        })
    }
}

/// Verifies a request against the leaf of its connection; `now` is the time in Unix seconds.
///
/// # Errors
/// [`VerifyError`]. The time is checked after the signature, so that unauthenticated requests cannot probe the
/// receiver's clock.
pub fn verify(signed: &SignedRequest<'_>, leaf: &Leaf, now: i64) -> Result<VerifiedSignature, VerifyError> {
    let (parameters, inner_list) = read_input(signed.signature_input).ok_or(VerifyError::Profile)?;
    let signature = read_signature(signed.signature).ok_or(VerifyError::Profile)?;
    let nonce = read_nonce(&parameters.nonce).ok_or(VerifyError::Profile)?;
    if parameters.keyid != leaf.fingerprint {
        return Err(VerifyError::KeyId);
    }
    let digest = content_digest(signed.body);
    if verify_slices_are_equal(digest.as_bytes(), signed.content_digest.as_bytes()).is_err() {
        return Err(VerifyError::Digest);
    }
    let base = signature_base(&signed.message, signed.content_digest, inner_list);
    UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, &leaf.public_key)
        .verify(base.as_bytes(), &signature)
        .map_err(|_| VerifyError::Signature)?;
    let lifetime = parameters.expires.saturating_sub(parameters.created);
    if !(1..=WINDOW_SECONDS).contains(&lifetime) {
        return Err(VerifyError::Profile);
    }
    if (parameters.created - now).abs() > WINDOW_SECONDS || parameters.expires < now {
        return Err(VerifyError::Clock);
    }
    Ok(VerifiedSignature { created: parameters.created, nonce })
}

/// The value of `Content-Digest` for a body.
pub fn content_digest(body: &[u8]) -> String {
    format!("sha-256=:{}:", STANDARD.encode(digest::digest(&digest::SHA256, body).as_ref()))
}

/// The variable parameters; algorithm and tag are fixed.
#[derive(Debug, PartialEq, Eq)]
struct Parameters {
    created: i64,
    expires: i64,
    nonce: String,
    keyid: String,
}

impl Parameters {
    /// Writes the inner list with its parameters (RFC 9421, section 2.3). No value of the profile needs escaping.
    fn inner_list(&self) -> String {
        let Self { created, expires, nonce, keyid } = self;
        let components = COMPONENTS.map(|name| format!("\"{name}\"")).join(" ");
        format!(
            "({components});created={created};expires={expires};nonce=\"{nonce}\";alg=\"{ALGORITHM}\";keyid=\"{keyid}\";tag=\"{TAG}\""
        )
    }
}

/// Writes the signature base (RFC 9421, section 2.5). `inner_list` is the text in the header field.
fn signature_base(message: &Message<'_>, content_digest: &str, inner_list: &str) -> String {
    let Message { method, authority, path, content_type } = message;
    let values = [method, authority, path, content_type, content_digest];
    let mut base = String::with_capacity(512);
    for (name, value) in COMPONENTS.iter().zip(values) {
        base.push_str(&format!("\"{name}\": {value}\n"));
    }
    base.push_str(&format!("\"@signature-params\": {inner_list}"));
    base
}

/// Parses `Signature-Input` according to the profile, with parameters in any order; `None` for anything else. Returns
/// the text of the inner list as received.
fn read_input(header: &str) -> Option<(Parameters, &str)> {
    let dictionary = canonical(header)?;
    let (key, ListEntry::InnerList(list)) = dictionary.iter().next()? else { return None };
    if key.as_str() != LABEL || dictionary.len() != 1 || list.items.len() != COMPONENTS.len() || list.params.len() != 6
    {
        return None;
    }
    let named = list.items.iter().zip(COMPONENTS).all(|(item, name)| {
        item.params.is_empty() && item.bare_item.as_string().is_some_and(|text| text.as_str() == name)
    });
    let string = |name: &str| Some(list.params.get(name)?.as_string()?.as_str());
    let integer = |name: &str| Some(i64::from(list.params.get(name)?.as_integer()?));
    if !named || string("alg")? != ALGORITHM || string("tag")? != TAG {
        return None;
    }
    let parameters = Parameters {
        created: integer("created")?,
        expires: integer("expires")?,
        nonce: string("nonce")?.to_owned(),
        keyid: string("keyid")?.to_owned(),
    };
    Some((parameters, header.strip_prefix(LABEL)?.strip_prefix('=')?))
}

/// Parses `Signature`: exactly one byte sequence under the label of the profile.
fn read_signature(header: &str) -> Option<Vec<u8>> {
    let dictionary = canonical(header)?;
    let (key, ListEntry::Item(Item { bare_item: BareItem::ByteSequence(bytes), params })) = dictionary.iter().next()?
    else {
        return None;
    };
    (key.as_str() == LABEL && dictionary.len() == 1 && params.is_empty()).then(|| bytes.clone())
}

fn read_nonce(text: &str) -> Option<Nonce> {
    let (epoch, counter) = text.split_once('-')?;
    let canonical = !counter.is_empty() && counter.bytes().all(|byte| byte.is_ascii_digit());
    let counter = canonical.then(|| counter.parse().ok()).flatten()?;
    Some(Nonce { epoch: epoch.parse().ok()?, counter })
}

/// Parses a dictionary that is its own canonical serialisation, which excludes duplicate keys and parameters.
fn canonical(header: &str) -> Option<Dictionary> {
    let dictionary: Dictionary = Parser::new(header).parse().ok()?;
    let mut serializer = DictSerializer::new();
    serializer.members(&dictionary);
    (serializer.finish()? == header).then_some(dictionary)
}

#[cfg(test)]
mod tests;
