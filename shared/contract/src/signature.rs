//! HTTP Message Signatures (RFC 9421) in one closed profile, over Digest Fields (RFC 9530).
//!
//! One signature, label `tidewatch`, over exactly five components in a fixed order, with exactly six parameters. Both
//! header fields must be their own canonical serialisation (RFC 9651, section 4.1): nothing can be duplicated, added or
//! hidden in white space, and the received bytes are the signed bytes.

mod verify;

use aws_lc_rs::{
    digest,
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use rustls_pki_types::PrivateKeyDer;
use sfv::{BareItem, DictSerializer, Dictionary, Item, ListEntry, Parser};
use thiserror::Error;
use tidewatch_api::identity::Epoch;

pub use verify::{SignedRequest, VerifiedSignature, VerifyError, verify};

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

/// The value of `Content-Digest` for a body.
#[must_use]
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

/// Parses a dictionary that is its own canonical serialisation, which excludes duplicate keys and parameters.
fn canonical(header: &str) -> Option<Dictionary> {
    let dictionary: Dictionary = Parser::new(header).parse().ok()?;
    let mut serializer = DictSerializer::new();
    serializer.members(&dictionary);
    (serializer.finish()? == header).then_some(dictionary)
}
