//! Tokens of Kubernetes ServiceAccounts (JWT, RFC 7519 and RFC 7515), as far as enrolment checks them without a call.
//!
//! Parsed by hand: two algorithms, one form, limits on everything. The existence of account and pod is left to the
//! TokenReview of the runtime's own API server.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;
use thiserror::Error;
use tidewatch_api::names::{AGENT_OBJECT, SKR_NAMESPACE};
use tidewatch_contract::enrolment::MAX_TOKEN_BYTES;

/// Tolerated clock difference between an API server and this receiver, in seconds.
const LEEWAY_SECONDS: i64 = 60;
/// Longest key id; those of Kubernetes have 43 characters.
const MAX_KID: usize = 256;
/// Limit of audiences of one token.
const MAX_AUDIENCES: usize = 16;
/// Longest signature, in bytes: RSA with 8,192 bits.
const MAX_SIGNATURE: usize = 1_024;

/// Reason for which a token is rejected. The name is the label of metrics and logs.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(prefix = "token-", serialize_all = "kebab-case")]
pub enum TokenError {
    /// No token, more than one, or not a bearer token.
    #[error("the request needs exactly one bearer token")]
    Missing,
    /// Not a signed Kubernetes token.
    #[error("the token is not readable")]
    Malformed,
    /// An algorithm other than RS256 and ES256, in particular `none`.
    #[error("the token's algorithm is not supported")]
    Algorithm,
    /// Another audience.
    #[error("the token is meant for another audience")]
    Audience,
    /// Expired.
    #[error("the token has expired")]
    Expired,
    /// Not valid yet.
    #[error("the token is not valid yet")]
    NotYet,
    /// Not the agent's account.
    #[error("the token is that of another account")]
    Account,
    /// Not bound to a pod.
    #[error("the token is not bound to a pod")]
    Unbound,
    /// The runtime's issuer has no such key.
    #[error("the token's key is none of the runtime's")]
    Key,
    /// The runtime's issuer had no such key when its keys were read, within the last minute. It may have a new one.
    #[error("the token's key was none of the runtime's within the last minute")]
    RecentKey,
    /// The signature does not verify.
    #[error("the token's signature does not verify")]
    Signature,
    /// The runtime's API server does not authenticate it for the receiver's audience.
    #[error("the runtime's API server does not know the token")]
    Unauthenticated,
    /// The runtime's API server attributes it to another account or pod.
    #[error("the runtime's API server attributes the token to another account or pod")]
    Other,
}

impl TokenError {
    /// True if the token is not one of the runtime's agent: its sender holds a certificate that it should not have. An
    /// expired or unreadable token, or one of a key that the runtime may have by now, proves nothing.
    pub(super) const fn is_foreign(self) -> bool {
        match self {
            Self::Account | Self::Unbound | Self::Key | Self::Signature | Self::Unauthenticated | Self::Other => true,
            Self::Missing
            | Self::Malformed
            | Self::Algorithm
            | Self::Audience
            | Self::Expired
            | Self::NotYet
            | Self::RecentKey => false,
        }
    }
}

/// Signature algorithm of a token (RFC 7518, section 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumString)]
#[strum(serialize_all = "UPPERCASE")]
pub(super) enum Algorithm {
    /// RSASSA-PKCS1-v1_5 with SHA-256.
    Rs256,
    /// ECDSA with P-256 and SHA-256.
    Es256,
}

/// A token with valid claims. Its signature is not verified yet.
#[derive(Debug)]
pub struct Token<'a> {
    pub(super) algorithm: Algorithm,
    /// Key id.
    pub(super) kid: String,
    /// The signed part, as received.
    pub(super) signed: &'a str,
    pub(super) signature: Vec<u8>,
    /// UID of the pod that it is bound to.
    pub(super) pod: String,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: String,
    /// Extensions that must be understood; none is supported.
    crit: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct Claims {
    aud: Audience,
    exp: i64,
    nbf: Option<i64>,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Kubernetes,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
struct Kubernetes {
    namespace: String,
    serviceaccount: Named,
    pod: Option<Bound>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct Bound {
    uid: String,
}

impl<'a> Token<'a> {
    /// Parses a token and checks its claims for an audience, at a time in Unix seconds.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn read(text: &'a str, audience: &str, now: i64) -> Result<Self, TokenError> {
        if text.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        let (signed, signature) = text.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let (header, claims) = signed.split_once('.').ok_or(TokenError::Malformed)?;
        let header: Header = part(header)?;
        let algorithm = header.alg.parse().map_err(|_| TokenError::Algorithm)?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| TokenError::Malformed)?;
        if header.crit.is_some()
            || header.kid.is_empty()
            || header.kid.len() > MAX_KID
            || signature.len() > MAX_SIGNATURE
        {
            return Err(TokenError::Malformed);
        }
        let pod = part::<Claims>(claims)?.evaluate(audience, now)?;
        Ok(Self { algorithm, kid: header.kid, signed, signature, pod })
    }
}

impl Claims {
    /// Returns the UID of the pod if all claims are valid.
    fn evaluate(self, audience: &str, now: i64) -> Result<String, TokenError> {
        let is_ours = |named: &String| named == audience;
        let is_for_us = match &self.aud {
            Audience::One(audience) => is_ours(audience),
            Audience::Many(audiences) => audiences.len() <= MAX_AUDIENCES && audiences.iter().any(is_ours),
        };
        if !is_for_us {
            return Err(TokenError::Audience);
        }
        if self.exp.saturating_add(LEEWAY_SECONDS) <= now {
            return Err(TokenError::Expired);
        }
        if self.nbf.is_some_and(|begin| begin.saturating_sub(LEEWAY_SECONDS) > now) {
            return Err(TokenError::NotYet);
        }
        let Kubernetes { namespace, serviceaccount, pod } = self.kubernetes;
        if namespace != SKR_NAMESPACE || serviceaccount.name != AGENT_OBJECT {
            return Err(TokenError::Account);
        }
        pod.map(|pod| pod.uid).filter(|uid| !uid.is_empty()).ok_or(TokenError::Unbound)
    }
}

fn part<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, TokenError> {
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| TokenError::Malformed)?;
    // serde rejects duplicate members, which two parsers might read differently.
    serde_json::from_slice(&bytes).map_err(|_| TokenError::Malformed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::enrolment::tests::testing::{AUDIENCE, NOW, claims};

    fn token(header: &Value, claims: &Value) -> String {
        let [header, claims] = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part.to_string()));
        format!("{header}.{claims}.AAAA")
    }

    fn header() -> Value {
        json!({"alg": "RS256", "kid": "k", "typ": "JWT"})
    }

    fn with(path: &str, value: Value) -> Result<String, TokenError> {
        let mut claims = claims(NOW);
        let (parent, member) = path.rsplit_once('/').unwrap();
        claims.pointer_mut(parent).unwrap()[member] = value;
        Token::read(&token(&header(), &claims), AUDIENCE, NOW).map(|token| token.pod)
    }

    #[test]
    fn agent_token_is_accepted() {
        let text = token(&header(), &claims(NOW));
        let read = Token::read(&text, AUDIENCE, NOW).unwrap();
        assert_eq!((read.algorithm, &*read.kid, &*read.pod), (Algorithm::Rs256, "k", "pod-uid"));
        assert_eq!((read.signed, &*read.signature), (text.strip_suffix(".AAAA").unwrap(), &[0, 0, 0][..]));
        assert!(with("/aud", json!(AUDIENCE)).is_ok());
        assert!(with("/aud", json!(["other", AUDIENCE])).is_ok());
        assert!(with("/nbf", Value::Null).is_ok());
    }

    #[test]
    fn invalid_claims_are_refused() {
        use TokenError as I;
        for (path, value, expected) in [
            ("/aud", json!(["https://kubernetes.default.svc"]), I::Audience),
            ("/aud", json!([]), I::Audience),
            ("/aud", json!(vec![AUDIENCE; 17]), I::Audience),
            ("/aud", json!(1), I::Malformed),
            ("/exp", json!(NOW - 60), I::Expired),
            ("/exp", json!("later"), I::Malformed),
            ("/exp", json!(i64::MIN), I::Expired),
            ("/nbf", json!(NOW + 61), I::NotYet),
            ("/kubernetes.io/namespace", json!("default"), I::Account),
            ("/kubernetes.io/serviceaccount/name", json!("default"), I::Account),
            ("/kubernetes.io/pod", Value::Null, I::Unbound),
            ("/kubernetes.io/pod", json!({"uid": ""}), I::Unbound),
            ("/kubernetes.io", Value::Null, I::Malformed),
        ] {
            assert_eq!(with(path, value.clone()), Err(expected), "{path}: {value}");
        }
        assert!(with("/exp", json!(NOW - 59)).is_ok());
        assert!(with("/nbf", json!(NOW + 60)).is_ok());
    }

    #[test]
    fn malformed_tokens_are_refused() {
        use TokenError as I;
        let read = |text: &str| Token::read(text, AUDIENCE, NOW).err();
        for algorithm in ["none", "HS256", "RS512", "ES384", "rs256", ""] {
            assert_eq!(read(&token(&json!({"alg": algorithm, "kid": "k"}), &claims(NOW))), Some(I::Algorithm));
        }
        for header in [
            json!({"alg": "RS256"}),
            json!({"alg": "RS256", "kid": ""}),
            json!({"alg": "RS256", "kid": "k", "crit": []}),
        ] {
            assert_eq!(read(&token(&header, &claims(NOW))), Some(I::Malformed), "{header}");
        }
        let good = token(&header(), &claims(NOW));
        let twice = URL_SAFE_NO_PAD.encode(claims(NOW).to_string().replacen("\"exp\":", "\"exp\":1,\"exp\":", 1));
        let twice = format!("{}.{twice}.AAAA", good.split('.').next().unwrap());
        for text in [
            "",
            ".",
            "..",
            "a.b",
            &format!("{good}="),
            &format!("{good}.x"),
            &format!(" {good}"),
            &twice,
            &"a".repeat(9_000),
        ] {
            assert_eq!(read(text), Some(I::Malformed), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "[A-Za-z0-9_.-]{0,300}", header in "[ -~]{0,80}", claims in "[ -~]{0,200}") {
            prop_assert!(Token::read(&text, AUDIENCE, NOW).is_err());
            let [header, claims] = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part));
            let text = format!("{header}.{claims}.AAAA");
            prop_assert!(Token::read(&text, AUDIENCE, NOW).is_err());
        }
    }
}
