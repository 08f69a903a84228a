//! The messages of certificate enrolment and renewal.
//!
//! Both use the same response and prove the identity by a projected service account token: on the enrolment port in the
//! header, on the event port as a member of the request, which the certificate that is being renewed signs.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tidewatch_api::identity::RuntimeId;

/// `POST`, a certificate request: with a token on the enrolment port, signed on the event port.
pub const CERTIFICATES_PATH: &str = "/v3/certificates";
/// `GET` on the enrolment port, without authentication: the trust bundle for agents.
pub const TRUST_PATH: &str = "/v3/trust";
/// Content type of requests and responses.
pub const CONTENT_TYPE: &str = "application/json";
/// Limit of a request's body in bytes. A P-256 certificate request with names takes less than 1,000 in PEM.
pub const MAX_REQUEST_BYTES: usize = 16 << 10;
/// Limit of a response's body in bytes: a chain and a trust bundle of 64 KiB, which is the limit of the agent's
/// settings, with the overhead of JSON.
pub const MAX_RESPONSE_BYTES: usize = 128 << 10;
/// Limit of a token in bytes. Kubernetes' tokens have about 1,000.
pub const MAX_TOKEN_BYTES: usize = 8 << 10;

/// The error of parsing or writing a message.
#[derive(Debug, Error)]
pub enum ParseEnrolmentError {
    /// More than [`MAX_REQUEST_BYTES`] or [`MAX_RESPONSE_BYTES`].
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    /// Not JSON of the expected shape.
    #[error("the body is not valid JSON of its shape")]
    Json(#[from] serde_json::Error),
    /// A required member is empty.
    #[error("{0} is empty")]
    Empty(&'static str),
}

/// The request for a certificate of a runtime. Its PKCS#10 content is not parsed here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateRequest {
    /// The runtime that the certificate is requested for.
    pub runtime: RuntimeId,
    /// The certificate request, PKCS#10 in PEM.
    pub request: String,
}

/// The request that renews a certificate. The token proves that the sender still is the agent's pod in its runtime;
/// the certificate alone would let a stolen one be renewed for ever.
#[derive(Serialize, Deserialize)]
pub struct RenewalRequest {
    /// The request for the new certificate.
    #[serde(flatten)]
    pub certificate: CertificateRequest,
    /// The projected token of the agent's pod; `None` from agents that renew with their certificate alone, which a
    /// receiver refuses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

impl RenewalRequest {
    /// Parses the body of a request.
    ///
    /// # Errors
    /// [`ParseEnrolmentError`].
    pub fn parse(body: &[u8]) -> Result<Self, ParseEnrolmentError> {
        let request: Self = parse(body, MAX_REQUEST_BYTES)?;
        if let Some(token) = &request.token {
            require("the token", token)?;
        }
        require("the certificate request", &request.certificate.request)?;
        Ok(request)
    }

    /// Writes the body of a request.
    ///
    /// # Errors
    /// [`ParseEnrolmentError::TooLarge`]; requests that an agent builds do not fail otherwise.
    pub fn to_json(&self) -> Result<Vec<u8>, ParseEnrolmentError> {
        to_json(self)
    }
}

impl CertificateRequest {
    /// Parses the body of a request.
    ///
    /// # Errors
    /// [`ParseEnrolmentError`].
    pub fn parse(body: &[u8]) -> Result<Self, ParseEnrolmentError> {
        let request: Self = parse(body, MAX_REQUEST_BYTES)?;
        require("the certificate request", &request.request)?;
        Ok(request)
    }

    /// Writes the body of a request.
    ///
    /// # Errors
    /// [`ParseEnrolmentError::TooLarge`]; requests that an agent builds do not fail otherwise.
    pub fn to_json(&self) -> Result<Vec<u8>, ParseEnrolmentError> {
        to_json(self)
    }
}

/// The response `200` to a [`CertificateRequest`]. The agent must still check that chain, key and runtime match its
/// request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateResponse {
    /// The certificate chain in PEM, leaf first.
    pub chain: String,
    /// The trust bundle for agents, in PEM.
    pub trust_bundle: String,
    /// The revision of the trust bundle ([`crate::certificate::trust_revision`]).
    pub trust_revision: String,
}

impl CertificateResponse {
    /// Parses the body of a response.
    ///
    /// # Errors
    /// [`ParseEnrolmentError`].
    pub fn parse(body: &[u8]) -> Result<Self, ParseEnrolmentError> {
        let response: Self = parse(body, MAX_RESPONSE_BYTES)?;
        require("the chain", &response.chain)?;
        require("the trust bundle", &response.trust_bundle)?;
        Ok(response)
    }
}

/// The response `200` to `GET /v3/trust`. A client without a trust bundle cannot authenticate it: it is meant for
/// operators and their tools.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrustResponse {
    /// The trust bundle for agents, in PEM.
    pub trust_bundle: String,
    /// The revision of the trust bundle.
    pub trust_revision: String,
}

impl TrustResponse {
    /// Parses the body of a response.
    ///
    /// # Errors
    /// [`ParseEnrolmentError`].
    pub fn parse(body: &[u8]) -> Result<Self, ParseEnrolmentError> {
        let response: Self = parse(body, MAX_RESPONSE_BYTES)?;
        require("the trust bundle", &response.trust_bundle)?;
        Ok(response)
    }
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8], limit: usize) -> Result<T, ParseEnrolmentError> {
    if body.len() > limit {
        return Err(ParseEnrolmentError::TooLarge(limit));
    }
    Ok(serde_json::from_slice(body)?)
}

fn to_json(request: &impl Serialize) -> Result<Vec<u8>, ParseEnrolmentError> {
    let body = serde_json::to_vec(request)?;
    if body.len() > MAX_REQUEST_BYTES { Err(ParseEnrolmentError::TooLarge(MAX_REQUEST_BYTES)) } else { Ok(body) }
}

fn require(name: &'static str, text: &str) -> Result<(), ParseEnrolmentError> {
    if text.trim().is_empty() { Err(ParseEnrolmentError::Empty(name)) } else { Ok(()) }
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
    fn a_renewal_carries_the_token() {
        let certificate = CertificateRequest { runtime: "r-1".parse().unwrap(), request: "-----BEGIN\n".to_owned() };
        for token in [None, Some("a.b.c".to_owned())] {
            let renewal = RenewalRequest { certificate: certificate.clone(), token };
            let read = RenewalRequest::parse(&renewal.to_json().unwrap()).unwrap();
            assert_eq!((read.certificate, read.token), (renewal.certificate, renewal.token));
        }
        let twice = br#"{"runtime": "r-1", "runtime": "r-2", "request": "x", "token": "a.b.c"}"#;
        assert!(RenewalRequest::parse(twice).is_err());
        assert!(RenewalRequest::parse(br#"{"runtime": "../r-1", "request": "x", "token": "a.b.c"}"#).is_err());
        assert!(RenewalRequest::parse(br#"{"runtime": "r-1", "request": "x", "token": ""}"#).is_err());
        assert!(RenewalRequest::parse(br#"{"runtime": "r-1", "request": "", "token": "a.b.c"}"#).is_err());
        let renewal = RenewalRequest { certificate, token: Some("x".repeat(MAX_REQUEST_BYTES)) };
        assert!(matches!(renewal.to_json(), Err(ParseEnrolmentError::TooLarge(MAX_REQUEST_BYTES))));
    }

    #[test]
    fn malformed_requests_are_rejected() {
        use ParseEnrolmentError as P;
        for (body, expected) in [
            (&b""[..], "Json"),
            (b"[]", "Json"),
            (br#"{"runtime": "r-1"}"#, "Json"),
            (br#"{"runtime": "r-1", "request": 1}"#, "Json"),
            (br#"{"runtime": "../r-1", "request": "x"}"#, "Json"),
            (br#"{"runtime": "r-1", "runtime": "r-2", "request": "x"}"#, "Json"),
            (br#"{"runtime": "r-1", "request": " "}"#, "Empty"),
            (&[b' '; MAX_REQUEST_BYTES + 1], "TooLarge"),
        ] {
            let actual = match CertificateRequest::parse(body).unwrap_err() {
                P::TooLarge(_) => "TooLarge",
                P::Json(_) => "Json",
                P::Empty(_) => "Empty",
            };
            assert_eq!(actual, expected, "{}", String::from_utf8_lossy(body).trim());
        }
        let long = CertificateRequest { runtime: "r-1".parse().unwrap(), request: "x".repeat(MAX_REQUEST_BYTES) };
        assert!(matches!(long.to_json(), Err(P::TooLarge(MAX_REQUEST_BYTES))));
    }

    #[test]
    fn responses_survive_the_wire() {
        let response = CertificateResponse { chain: "a".into(), trust_bundle: "b".into(), trust_revision: "c".into() };
        let body = serde_json::to_vec(&response).unwrap();
        assert!(String::from_utf8_lossy(&body).contains("\"trustBundle\""));
        assert_eq!(CertificateResponse::parse(&body).unwrap(), response);
        assert_eq!(TrustResponse::parse(&body).unwrap().trust_bundle, "b");
        assert!(CertificateResponse::parse(br#"{"chain": "", "trustBundle": "b", "trustRevision": "c"}"#).is_err());
        assert!(CertificateResponse::parse(&[b' '; MAX_RESPONSE_BYTES + 1]).is_err());
    }

    #[test]
    fn a_response_holds_the_largest_accepted_trust_bundle() {
        let pem = |bytes: usize| format!("{}\n", "x".repeat(64)).repeat(bytes / 65);
        let response =
            CertificateResponse { chain: pem(16 << 10), trust_bundle: pem(64 << 10), trust_revision: "c".into() };
        assert_eq!(CertificateResponse::parse(&serde_json::to_vec(&response).unwrap()).unwrap(), response);
    }
}
