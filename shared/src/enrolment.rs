//! How an agent asks for its certificate, and what it gets.
//!
//! Enrolment and renewal say the same and are answered the same. What proves the runtime differs: on the enrolment port a projected
//! token, on the event port the certificate that is renewed, and the signature of the request.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::identity::RuntimeId;

/// `POST`, a certificate request: on the enrolment port with a token, on the event port signed.
pub const CERTIFICATES_PATH: &str = "/v3/certificates";
/// `GET`, on the enrolment port: what agents shall trust. Anyone may ask.
pub const TRUST_PATH: &str = "/v3/trust";
/// Content type of requests and answers.
pub const CONTENT_TYPE: &str = "application/json";
/// Bytes of the body of a request, at most: a P-256 request with names has less than a thousand, in PEM.
pub const MAX_REQUEST_BYTES: usize = 16 << 10;
/// Bytes of the body of an answer, at most: a chain, and a trust bundle of the 64 KiB that an agent takes from its settings, with what
/// JSON adds to both.
pub const MAX_ANSWER_BYTES: usize = 128 << 10;
/// Bytes of a token, at most. Those of Kubernetes have about a thousand.
pub const MAX_TOKEN_BYTES: usize = 8 << 10;

/// Why bytes are no request or no answer.
#[derive(Debug, Error)]
pub enum ParseEnrolment {
    /// More than [`MAX_REQUEST_BYTES`] or [`MAX_ANSWER_BYTES`].
    #[error("it is larger than {0} bytes")]
    TooLarge(usize),
    /// Not JSON of this shape.
    #[error("it is not readable")]
    Json(#[from] serde_json::Error),
    /// The runtime is no runtime id.
    #[error("it names no runtime")]
    Runtime(#[from] crate::identity::ParseIdentity),
    /// Something that must be there is empty.
    #[error("{0} is empty")]
    Empty(&'static str),
}

/// Asks for the certificate of a runtime. The request inside is not parsed here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateRequest {
    /// For which runtime.
    pub runtime: RuntimeId,
    /// PKCS#10 in PEM.
    pub request: String,
}

#[derive(Serialize, Deserialize)]
struct Wire<'a> {
    #[serde(borrow)]
    runtime: std::borrow::Cow<'a, str>,
    #[serde(borrow)]
    request: std::borrow::Cow<'a, str>,
}

impl CertificateRequest {
    /// Reads a request's body.
    ///
    /// # Errors
    /// [`ParseEnrolment`].
    pub fn parse(body: &[u8]) -> Result<Self, ParseEnrolment> {
        let Wire { runtime, request } = read(body, MAX_REQUEST_BYTES)?;
        filled("the certificate request", &request)?;
        Ok(Self { runtime: RuntimeId::from_str(&runtime)?, request: request.into_owned() })
    }

    /// As the body of a request.
    ///
    /// # Errors
    /// [`ParseEnrolment::TooLarge`]; of what an agent makes itself, nothing else fails.
    pub fn to_json(&self) -> Result<Vec<u8>, ParseEnrolment> {
        let body =
            serde_json::to_vec(&Wire { runtime: self.runtime.as_str().into(), request: (&*self.request).into() })?;
        if body.len() > MAX_REQUEST_BYTES { Err(ParseEnrolment::TooLarge(MAX_REQUEST_BYTES)) } else { Ok(body) }
    }
}

/// The answer `200` to a [`CertificateRequest`]. Whoever gets it still checks that chain, key and runtime are its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateAnswer {
    /// Leaf first, in PEM.
    pub chain: String,
    /// What agents shall trust, in PEM.
    pub trust_bundle: String,
    /// The revision of that bundle ([`crate::certificate::trust_revision`]).
    pub trust_revision: String,
}

impl CertificateAnswer {
    /// Reads an answer's body.
    ///
    /// # Errors
    /// [`ParseEnrolment`].
    pub fn parse(body: &[u8]) -> Result<Self, ParseEnrolment> {
        let answer: Self = read(body, MAX_ANSWER_BYTES)?;
        filled("the chain", &answer.chain)?;
        filled("the trust bundle", &answer.trust_bundle)?;
        Ok(answer)
    }
}

/// The answer `200` to `GET /v3/trust`. Whoever asks does not know yet whether to believe it: it is for people and their tools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrustAnswer {
    /// What agents shall trust, in PEM.
    pub trust_bundle: String,
    /// The revision of that bundle.
    pub trust_revision: String,
}

impl TrustAnswer {
    /// Reads an answer's body.
    ///
    /// # Errors
    /// [`ParseEnrolment`].
    pub fn parse(body: &[u8]) -> Result<Self, ParseEnrolment> {
        let answer: Self = read(body, MAX_ANSWER_BYTES)?;
        filled("the trust bundle", &answer.trust_bundle)?;
        Ok(answer)
    }
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8], most: usize) -> Result<T, ParseEnrolment> {
    if body.len() > most {
        return Err(ParseEnrolment::TooLarge(most));
    }
    Ok(serde_json::from_slice(body)?)
}

fn filled(what: &'static str, text: &str) -> Result<(), ParseEnrolment> {
    if text.trim().is_empty() { Err(ParseEnrolment::Empty(what)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_survives_the_wire_and_unknown_members_are_ignored() {
        let request = CertificateRequest { runtime: "r-1".parse().unwrap(), request: "-----BEGIN\n".to_owned() };
        assert_eq!(CertificateRequest::parse(&request.to_json().unwrap()).unwrap(), request);
        let more = br#"{"runtime": "r-1", "request": "-----BEGIN\n", "later": {"a": 1}}"#;
        assert_eq!(CertificateRequest::parse(more).unwrap(), request);
    }

    #[test]
    fn what_is_no_request_is_refused() {
        use ParseEnrolment as P;
        for (body, why) in [
            (&b""[..], "Json"),
            (b"[]", "Json"),
            (br#"{"runtime": "r-1"}"#, "Json"),
            (br#"{"runtime": "r-1", "request": 1}"#, "Json"),
            (br#"{"runtime": "../r-1", "request": "x"}"#, "Runtime"),
            (br#"{"runtime": "r-1", "request": " "}"#, "Empty"),
            (&[b' '; MAX_REQUEST_BYTES + 1], "TooLarge"),
        ] {
            let said = match CertificateRequest::parse(body).unwrap_err() {
                P::TooLarge(_) => "TooLarge",
                P::Json(_) => "Json",
                P::Runtime(_) => "Runtime",
                P::Empty(_) => "Empty",
            };
            assert_eq!(said, why, "{}", String::from_utf8_lossy(body).trim());
        }
        let long = CertificateRequest { runtime: "r-1".parse().unwrap(), request: "x".repeat(MAX_REQUEST_BYTES) };
        assert!(matches!(long.to_json(), Err(P::TooLarge(MAX_REQUEST_BYTES))));
    }

    #[test]
    fn answers_survive_the_wire() {
        let answer = CertificateAnswer { chain: "a".into(), trust_bundle: "b".into(), trust_revision: "c".into() };
        let body = serde_json::to_vec(&answer).unwrap();
        assert!(String::from_utf8_lossy(&body).contains("\"trustBundle\""));
        assert_eq!(CertificateAnswer::parse(&body).unwrap(), answer);
        assert_eq!(TrustAnswer::parse(&body).unwrap().trust_bundle, "b");
        assert!(CertificateAnswer::parse(br#"{"chain": "", "trustBundle": "b", "trustRevision": "c"}"#).is_err());
        assert!(CertificateAnswer::parse(&[b' '; MAX_ANSWER_BYTES + 1]).is_err());
    }

    #[test]
    fn the_largest_trust_bundle_that_an_agent_takes_comes_with_a_certificate() {
        let pem = |bytes: usize| format!("{}\n", "x".repeat(64)).repeat(bytes / 65);
        let answer =
            CertificateAnswer { chain: pem(16 << 10), trust_bundle: pem(64 << 10), trust_revision: "c".into() };
        assert_eq!(CertificateAnswer::parse(&serde_json::to_vec(&answer).unwrap()).unwrap(), answer);
    }
}
