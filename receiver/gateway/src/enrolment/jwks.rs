//! Public keys of a runtime's token issuer (JWK Set, RFC 7517), and the verification of signatures.

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;
use thiserror::Error;

use super::token::{Algorithm, Token, TokenError};

/// Largest set, in bytes. A key of 4,096 bits takes less than a thousand.
pub const MAX_BYTES: usize = 64 << 10;
/// Keys of one set; an API server has the signing key and those that it still accepts.
const MAX_KEYS: usize = 32;
/// Keys of one id; more only cost time, since each is tried.
const MAX_KEYS_PER_ID: usize = 2;
/// Longest RSA modulus in bytes: 4,096 bits. A verification with 8,192 bits takes four times as long.
const MAX_MODULUS: usize = 512;
/// The only RSA exponent in use, 65537, big-endian. Longer ones only cost time.
const EXPONENT: [u8; 3] = [1, 0, 1];
/// Length of a coordinate on P-256 in bytes.
const COORDINATE: usize = 32;

/// Reason for which bytes are not a key set.
#[derive(Debug, Error)]
pub enum ParseKeySetError {
    /// More than [`MAX_BYTES`].
    #[error("the keys are larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// Not JSON, or not in the format of RFC 7517, section 5.
    #[error("the keys are not readable")]
    Json(#[from] serde_json::Error),
    /// More than 32 keys, which no API server has.
    #[error("there are more than {MAX_KEYS} keys")]
    TooMany,
}

/// The usable keys of one runtime; others are left out.
#[derive(Debug, Default)]
pub struct KeySet(Vec<(String, Key)>);

#[derive(Debug)]
enum Key {
    /// A modulus; the exponent is [`EXPONENT`].
    Rsa(Vec<u8>),
    /// An uncompressed point.
    P256(Vec<u8>),
}

#[derive(Deserialize)]
struct KeySetDocument {
    keys: Vec<Jwk>,
}

#[derive(Deserialize)]
struct Jwk {
    kty: String,
    #[serde(default)]
    kid: String,
    #[serde(rename = "use")]
    purpose: Option<String>,
    #[serde(default)]
    crv: String,
    #[serde(default)]
    n: String,
    #[serde(default)]
    e: String,
    #[serde(default)]
    x: String,
    #[serde(default)]
    y: String,
}

impl KeySet {
    /// Parses a key set.
    ///
    /// # Errors
    /// [`ParseKeySetError`]. An unusable key is no error, but left out.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseKeySetError> {
        if bytes.len() > MAX_BYTES {
            return Err(ParseKeySetError::TooLarge);
        }
        let KeySetDocument { keys } = serde_json::from_slice(bytes)?;
        if keys.len() > MAX_KEYS {
            return Err(ParseKeySetError::TooMany);
        }
        let mut usable: Vec<(String, Key)> = Vec::new();
        for jwk in keys {
            let Some(key) = Key::of(&jwk) else { continue };
            if usable.iter().filter(|(kid, _)| *kid == jwk.kid).count() < MAX_KEYS_PER_ID {
                usable.push((jwk.kid, key));
            }
        }
        Ok(Self(usable))
    }

    /// True if the set has a key with this id.
    pub fn has(&self, kid: &str) -> bool {
        self.0.iter().any(|(name, _)| name == kid)
    }

    /// Verifies a token with the key that it names.
    ///
    /// # Errors
    /// [`TokenError::Key`] when the set has no key with that id, and [`TokenError::Signature`].
    pub fn verify(&self, token: &Token<'_>) -> Result<(), TokenError> {
        let mut named = self.0.iter().filter(|(name, _)| *name == token.kid).peekable();
        if named.peek().is_none() {
            return Err(TokenError::Key);
        }
        let verifies = named.any(|(_, key)| key.verifies(token));
        if verifies { Ok(()) } else { Err(TokenError::Signature) }
    }
}

impl Key {
    fn of(jwk: &Jwk) -> Option<Self> {
        if jwk.purpose.as_deref().is_some_and(|purpose| purpose != "sig") {
            return None;
        }
        let bytes = |text: &str| URL_SAFE_NO_PAD.decode(text).ok();
        match (&*jwk.kty, &*jwk.crv) {
            ("RSA", _) => {
                let number = |text| {
                    let bytes = bytes(text)?;
                    let first = bytes.iter().position(|byte| *byte != 0)?;
                    Some(bytes[first..].to_vec())
                };
                let modulus = number(&jwk.n)?;
                let exponent = number(&jwk.e)?;
                (modulus.len() <= MAX_MODULUS && exponent == EXPONENT).then_some(Self::Rsa(modulus))
            }
            ("EC", "P-256") => {
                let x = bytes(&jwk.x)?;
                let y = bytes(&jwk.y)?;
                (x.len() == COORDINATE && y.len() == COORDINATE).then(|| Self::P256([&[4][..], &x, &y].concat()))
            }
            _ => None,
        }
    }

    /// Verifies a signature. The key determines the algorithm, never the token.
    fn verifies(&self, token: &Token<'_>) -> bool {
        let signed = token.signed.as_bytes();
        match (self, token.algorithm) {
            (Self::Rsa(modulus), Algorithm::Rs256) => RsaPublicKeyComponents { n: &modulus[..], e: &EXPONENT[..] }
                .verify(&RSA_PKCS1_2048_8192_SHA256, signed, &token.signature)
                .is_ok(),
            (Self::P256(point), Algorithm::Es256) => {
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).verify(signed, &token.signature).is_ok()
            }
            (Self::Rsa(_) | Self::P256(_), _) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::enrolment::tests::testing::{AUDIENCE, Issuer, NOW, claims};

    #[test]
    fn each_algorithm_verifies_only_with_its_own_key() {
        let issuers = [Issuer::rsa("a"), Issuer::p256("b")];
        let set = KeySet::parse(Issuer::set(&issuers).to_string().as_bytes()).unwrap();
        for (issuer, algorithm) in issuers.iter().zip([Algorithm::Rs256, Algorithm::Es256]) {
            let text = issuer.sign(&claims(NOW));
            let token = Token::read(&text, AUDIENCE, NOW).unwrap();
            assert_eq!((token.algorithm, set.verify(&token)), (algorithm, Ok(())));
            let mut tampered = Token::read(&text, AUDIENCE, NOW).unwrap();
            tampered.signature[5] ^= 1;
            assert_eq!(set.verify(&tampered), Err(TokenError::Signature));
        }
        let impostor = Issuer::rsa("a").sign(&claims(NOW));
        assert_eq!(set.verify(&Token::read(&impostor, AUDIENCE, NOW).unwrap()), Err(TokenError::Signature));
        let renamed = Issuer::rsa("b").sign(&claims(NOW));
        assert_eq!(
            set.verify(&Token::read(&renamed, AUDIENCE, NOW).unwrap()),
            Err(TokenError::Signature),
            "another algorithm"
        );
        let unknown = Issuer::p256("c").sign(&claims(NOW));
        assert_eq!(set.verify(&Token::read(&unknown, AUDIENCE, NOW).unwrap()), Err(TokenError::Key));
    }

    #[test]
    fn key_sets_are_bounded_and_other_kinds_are_left_out() {
        let good = Issuer::p256("a").jwk();
        let parse = |set: serde_json::Value| KeySet::parse(set.to_string().as_bytes());
        let with = |member: &str, value: &str| {
            let mut key = good.clone();
            key[member] = json!(value);
            key
        };
        let odd = [with("kty", "oct"), with("crv", "P-384"), with("use", "enc"), with("x", "AAAA"), with("y", "=")];
        let odd = odd.into_iter().chain([json!({"kty": "RSA", "kid": "a", "n": "AAAA", "e": "AQAB"})]);
        assert!(!parse(json!({"keys": odd.collect::<Vec<_>>()})).unwrap().has("a"));
        assert!(parse(json!({"keys": [good]})).unwrap().has("a"));
        let large = |bytes: usize, e: &str| {
            let n = URL_SAFE_NO_PAD.encode(vec![0xff; bytes]);
            json!({"kty": "RSA", "kid": "a", "n": n, "e": e})
        };
        assert!(parse(json!({"keys": [large(512, "AQAB")]})).unwrap().has("a"));
        for costly in [large(1_024, "AQAB"), large(512, "_____w"), large(512, "Aw")] {
            assert!(!parse(json!({"keys": [costly]})).unwrap().has("a"));
        }
        assert_eq!(parse(json!({"keys": vec![large(512, "AQAB"); MAX_KEYS]})).unwrap().0.len(), MAX_KEYS_PER_ID);
        assert!(matches!(parse(json!({"keys": vec![good; MAX_KEYS + 1]})), Err(ParseKeySetError::TooMany)));
        assert!(matches!(KeySet::parse(&vec![b' '; MAX_BYTES + 1]), Err(ParseKeySetError::TooLarge)));
        assert!(matches!(parse(json!([])), Err(ParseKeySetError::Json(_))));
        let large = json!({"kty": "RSA", "kid": "a", "n": URL_SAFE_NO_PAD.encode([1; 2_000]), "e": "AQAB"});
        assert!(!parse(json!({"keys": [large]})).unwrap().has("a"));
    }
}
