//! Token issuer of a runtime: one signing key for each runtime, its JWKS, and token reviews.
//!
//! There is one account, the agent's, in one pod that has always existed.

use aws_lc_rs::{
    error::Unspecified,
    rand::SystemRandom,
    signature::{
        ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _, UnparsedPublicKey,
    },
};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use http::StatusCode;
use serde_json::{Value, json};
use tidewatch_api::names::{AGENT_OBJECT, SKR_NAMESPACE};

use crate::landscape::now;

/// Path of an API server's token keys.
pub(super) const KEYS: &str = "/openid/v1/jwks";
/// Path of token reviews.
const REVIEWS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
const KEY: &str = "fake";
const POD: &str = "00000000-0000-4000-8000-00000000000a";
/// Audience of a receiver with the default trust domain.
const AUDIENCE: &str = "spiffe://kyma.local/tidewatch";
/// Lifetime of a token in seconds, the kubelet's default.
const VALIDITY_SECONDS: i64 = 3_600;

/// See the module.
pub(super) struct Issuer(EcdsaKeyPair);

impl Issuer {
    /// An issuer with a new P-256 key.
    pub(super) fn new() -> Result<Self, Unspecified> {
        Ok(Self(EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING)?))
    }

    /// A projected token of the agent for the receiver's audience, valid for an hour.
    pub(super) fn token(&self) -> Result<String, Unspecified> {
        let signed = compact(&json!({"alg": "ES256", "kid": KEY, "typ": "JWT"}), &claims());
        let signature = self.0.sign(&SystemRandom::new(), signed.as_bytes())?;
        Ok(format!("{signed}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature)))
    }

    /// The response at a path; `None` if it has nothing to do with tokens.
    pub(super) fn answer(&self, path: &str, body: &[u8]) -> Option<(StatusCode, Value)> {
        match path {
            KEYS => Some((StatusCode::OK, self.keys())),
            REVIEWS => Some((StatusCode::CREATED, self.review(&serde_json::from_slice(body).unwrap_or_default()))),
            _ => None,
        }
    }

    fn keys(&self) -> Value {
        // An uncompressed point: a prefix byte, and two coordinates.
        let (x, y) = self.0.public_key().as_ref()[1..].split_at(32);
        let [x, y] = [x, y].map(|part| BASE64_URL_SAFE_NO_PAD.encode(part));
        json!({"keys": [{"kty": "EC", "use": "sig", "alg": "ES256", "kid": KEY, "crv": "P-256", "x": x, "y": y}]})
    }

    fn review(&self, review: &Value) -> Value {
        let spec = &review["spec"];
        let has_audience = spec["audiences"].as_array().is_some_and(|wanted| wanted.iter().any(|one| one == AUDIENCE));
        let is_valid = has_audience && spec["token"].as_str().is_some_and(|token| self.has_signed(token));
        let status = if is_valid {
            json!({"authenticated": true, "audiences": [AUDIENCE],
                "user": {"username": user(), "extra": {"authentication.kubernetes.io/pod-uid": [POD]}}})
        } else {
            json!({"authenticated": false, "error": "the token is not good"})
        };
        json!({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "metadata": {}, "spec": {}, "status": status})
    }

    fn has_signed(&self, token: &str) -> bool {
        let Some((signed, signature)) = token.rsplit_once('.') else { return false };
        let Ok(signature) = BASE64_URL_SAFE_NO_PAD.decode(signature) else { return false };
        let claims = signed.split_once('.').and_then(|(_, claims)| BASE64_URL_SAFE_NO_PAD.decode(claims).ok());
        let claims: Value = claims.and_then(|claims| serde_json::from_slice(&claims).ok()).unwrap_or_default();
        let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, self.0.public_key().as_ref());
        claims["exp"].as_i64().is_some_and(|end| end > now()) && public.verify(signed.as_bytes(), &signature).is_ok()
    }
}

/// Claims of a projected token of the agent that is valid from now on.
pub(super) fn claims() -> Value {
    let now = now();
    json!({
        "aud": [AUDIENCE], "exp": now + VALIDITY_SECONDS, "iat": now, "nbf": now,
        "iss": "https://kubernetes.default.svc", "sub": user(),
        "kubernetes.io": {
            "namespace": SKR_NAMESPACE, "serviceaccount": {"name": AGENT_OBJECT, "uid": POD},
            "pod": {"name": AGENT_OBJECT, "uid": POD},
        },
    })
}

/// Header and claims as they are signed (RFC 7515, section 5.1).
pub(super) fn compact(header: &Value, claims: &Value) -> String {
    [header, claims].map(|part| BASE64_URL_SAFE_NO_PAD.encode(part.to_string())).join(".")
}

/// Returns true for the paths of token keys and reviews.
pub(super) fn is_token_path(path: &str) -> bool {
    path == KEYS || path == REVIEWS
}

fn user() -> String {
    format!("system:serviceaccount:{SKR_NAMESPACE}:{AGENT_OBJECT}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reviewed(issuer: &Issuer, token: &str, audience: &str) -> Value {
        let body = json!({"spec": {"token": token, "audiences": [audience]}}).to_string();
        let (status, review) = issuer.answer(REVIEWS, body.as_bytes()).expect("a review");
        assert_eq!(status, StatusCode::CREATED);
        review["status"]["authenticated"].clone()
    }

    #[test]
    fn issuer_accepts_only_its_own_tokens() {
        let one = Issuer::new().expect("a key");
        let other = Issuer::new().expect("a key");
        let token = one.token().expect("a token");
        assert_eq!(reviewed(&one, &token, AUDIENCE), json!(true));
        assert_eq!(reviewed(&other, &token, AUDIENCE), json!(false));
        assert_eq!(reviewed(&one, &token, "another"), json!(false));
        assert_eq!(reviewed(&one, "x.y.z", AUDIENCE), json!(false));
        assert_ne!(one.keys(), other.keys());
        assert!(one.answer("/api/v1/namespaces", b"").is_none());
    }
}
