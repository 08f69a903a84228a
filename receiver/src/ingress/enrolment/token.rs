//! Tokens of Kubernetes ServiceAccounts (JWT, RFC 7519 and RFC 7515), as far as enrolment judges them before it asks anybody.
//!
//! Read by hand: two algorithms, one form, limits on everything. Whether the account and the pod still exist is not for us to know;
//! the runtime's own API server says so in a TokenReview.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::Deserialize;
use thiserror::Error;
use tidewatch_shared::{
    enrolment::MAX_TOKEN_BYTES,
    names::{AGENT_OBJECT, SKR_NAMESPACE, TOKEN_AUDIENCE},
};

/// Clocks of an API server and of this receiver may differ by so many seconds.
const LEEWAY_SECONDS: i64 = 60;
/// Characters of a key's name; those of Kubernetes have 43.
const MAX_KID: usize = 256;
/// Audiences of one token.
const MAX_AUDIENCES: usize = 16;
/// Bytes of a signature: RSA with 8,192 bits.
const MAX_SIGNATURE: usize = 1_024;

/// Why a token proves nothing.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum InvalidToken {
    /// None, more than one, or not a bearer's.
    #[error("the request needs exactly one bearer token")]
    Missing,
    /// Not a signed token of Kubernetes' shape.
    #[error("the token is not readable")]
    Malformed,
    /// Another algorithm than RS256 and ES256; above all none.
    #[error("the token's algorithm is not taken")]
    Algorithm,
    /// Meant for somebody else.
    #[error("the token is meant for another audience")]
    Audience,
    /// Its time has passed.
    #[error("the token has expired")]
    Expired,
    /// Its time has not come.
    #[error("the token is not valid yet")]
    NotYet,
    /// Not that of the agent.
    #[error("the token is that of another account")]
    Account,
    /// Of no pod.
    #[error("the token is not bound to a pod")]
    Unbound,
    /// The runtime's issuer has no such key.
    #[error("the token's key is none of the runtime's")]
    Key,
    /// The signature does not verify.
    #[error("the token's signature does not verify")]
    Signature,
    /// The runtime's API server does not know it, for our audience.
    #[error("the runtime's API server does not know the token")]
    Unauthenticated,
    /// The runtime's API server says that it is somebody else's.
    #[error("the runtime's API server says that the token is that of another account or pod")]
    Other,
}

impl InvalidToken {
    /// The reason as metrics and logs name it.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Missing => "token-missing",
            Self::Malformed => "token-malformed",
            Self::Algorithm => "token-algorithm",
            Self::Audience => "token-audience",
            Self::Expired => "token-expired",
            Self::NotYet => "token-not-yet",
            Self::Account => "token-account",
            Self::Unbound => "token-unbound",
            Self::Key => "token-key",
            Self::Signature => "token-signature",
            Self::Unauthenticated => "token-unauthenticated",
            Self::Other => "token-other",
        }
    }
}

/// How a token is signed (RFC 7518, section 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    /// RSASSA-PKCS1-v1_5 with SHA-256.
    Rs256,
    /// ECDSA with P-256 and SHA-256.
    Es256,
}

/// A token that says the right things. Its signature is not yet verified.
#[derive(Debug)]
pub struct Token<'a> {
    pub(super) algorithm: Algorithm,
    /// The name of the key.
    pub(super) kid: String,
    /// What is signed, as it stands.
    pub(super) signed: &'a str,
    pub(super) signature: Vec<u8>,
    /// The uid of the pod that it is bound to.
    pub(super) pod: String,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: String,
    /// Extensions that must be understood; none is.
    #[serde(default)]
    crit: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct Claims {
    aud: Audience,
    exp: i64,
    #[serde(default)]
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
    #[serde(default)]
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
    /// Reads a token and judges what it says, at a time in Unix seconds.
    ///
    /// # Errors
    /// [`InvalidToken`].
    pub fn read(text: &'a str, now: i64) -> Result<Self, InvalidToken> {
        if text.len() > MAX_TOKEN_BYTES {
            return Err(InvalidToken::Malformed);
        }
        let (signed, signature) = text.rsplit_once('.').ok_or(InvalidToken::Malformed)?;
        let (header, claims) = signed.split_once('.').ok_or(InvalidToken::Malformed)?;
        let header: Header = part(header)?;
        let algorithm = match &*header.alg {
            "RS256" => Algorithm::Rs256,
            "ES256" => Algorithm::Es256,
            _ => return Err(InvalidToken::Algorithm),
        };
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| InvalidToken::Malformed)?;
        if header.crit.is_some()
            || header.kid.is_empty()
            || header.kid.len() > MAX_KID
            || signature.len() > MAX_SIGNATURE
        {
            return Err(InvalidToken::Malformed);
        }
        let pod = part::<Claims>(claims)?.judge(now)?;
        Ok(Self { algorithm, kid: header.kid, signed, signature, pod })
    }
}

impl Claims {
    /// The uid of the pod, if everything is as it should be.
    fn judge(self, now: i64) -> Result<String, InvalidToken> {
        let is_ours = |audience: &String| audience == TOKEN_AUDIENCE;
        let meant = match &self.aud {
            Audience::One(audience) => is_ours(audience),
            Audience::Many(audiences) => audiences.len() <= MAX_AUDIENCES && audiences.iter().any(is_ours),
        };
        if !meant {
            return Err(InvalidToken::Audience);
        }
        if self.exp.saturating_add(LEEWAY_SECONDS) <= now {
            return Err(InvalidToken::Expired);
        }
        if self.nbf.is_some_and(|begin| begin.saturating_sub(LEEWAY_SECONDS) > now) {
            return Err(InvalidToken::NotYet);
        }
        let Kubernetes { namespace, serviceaccount, pod } = self.kubernetes;
        if namespace != SKR_NAMESPACE || serviceaccount.name != AGENT_OBJECT {
            return Err(InvalidToken::Account);
        }
        pod.map(|pod| pod.uid).filter(|uid| !uid.is_empty()).ok_or(InvalidToken::Unbound)
    }
}

fn part<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, InvalidToken> {
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| InvalidToken::Malformed)?;
    // Members that stand twice are refused: two readers might take another one each.
    serde_json::from_slice(&bytes).map_err(|_| InvalidToken::Malformed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::ingress::enrolment::tests::testing::{NOW, claims};

    fn token(header: &Value, claims: &Value) -> String {
        let [header, claims] = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part.to_string()));
        format!("{header}.{claims}.AAAA")
    }

    fn header() -> Value {
        json!({"alg": "RS256", "kid": "k", "typ": "JWT"})
    }

    fn with(path: &str, value: Value) -> Result<String, InvalidToken> {
        let mut claims = claims(NOW);
        let (parent, member) = path.rsplit_once('/').unwrap();
        claims.pointer_mut(parent).unwrap()[member] = value;
        Token::read(&token(&header(), &claims), NOW).map(|token| token.pod)
    }

    #[test]
    fn the_agents_token_is_read() {
        let text = token(&header(), &claims(NOW));
        let read = Token::read(&text, NOW).unwrap();
        assert_eq!((read.algorithm, &*read.kid, &*read.pod), (Algorithm::Rs256, "k", "pod-uid"));
        assert_eq!((read.signed, &*read.signature), (text.strip_suffix(".AAAA").unwrap(), &[0, 0, 0][..]));
        assert!(with("/aud", json!("tidewatch")).is_ok());
        assert!(with("/aud", json!(["other", "tidewatch"])).is_ok());
        assert!(with("/nbf", Value::Null).is_ok());
    }

    #[test]
    fn what_it_must_not_say() {
        use InvalidToken as I;
        for (path, value, why) in [
            ("/aud", json!(["https://kubernetes.default.svc"]), I::Audience),
            ("/aud", json!([]), I::Audience),
            ("/aud", json!(vec!["tidewatch"; 17]), I::Audience),
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
            assert_eq!(with(path, value.clone()), Err(why), "{path}: {value}");
        }
        assert!(with("/exp", json!(NOW - 59)).is_ok());
        assert!(with("/nbf", json!(NOW + 60)).is_ok());
    }

    #[test]
    fn what_is_no_token_of_ours() {
        use InvalidToken as I;
        let read = |text: &str| Token::read(text, NOW).err();
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
        fn nothing_makes_it_panic(text in "[A-Za-z0-9_.-]{0,300}", header in "[ -~]{0,80}", claims in "[ -~]{0,200}") {
            prop_assert!(Token::read(&text, NOW).is_err());
            let [header, claims] = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part));
            let text = format!("{header}.{claims}.AAAA");
            prop_assert!(Token::read(&text, NOW).is_err());
        }
    }
}
