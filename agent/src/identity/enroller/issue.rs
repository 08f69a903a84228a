//! Requests a certificate and checks the response, before the certificate is validated.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
    time::Duration,
};

use aws_lc_rs::error::Unspecified;
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use thiserror::Error;
use tidewatch_api::identity::TrustDomain;
use tidewatch_contract::{
    enrolment::{self, CertificateRequest, CertificateResponse, MAX_TOKEN_BYTES, ParseEnrolmentError, RenewalRequest},
    problem::Problem,
};
use tidewatch_kit::tls::{self, TlsConfigError};
use tokio::time::Instant;

use crate::{
    clock,
    core::Core,
    identity::{
        Client, CredentialsError, PostRequest, correct_clock,
        request::{self, KeyAndRequest},
    },
    receiver::{self, BufferedResponse, Dialer, RefusalAction, RequestError},
    settings::Settings,
    telemetry::{Metrics, RequestOutcome, Route},
};

/// Maximum number of characters of the receiver's error detail that is logged.
const WORDS: usize = 200;

/// Reason for which no certificate was obtained.
#[derive(Debug, Error)]
pub(super) enum CertificateError {
    #[error("the token could not be read")]
    Token(#[source] io::Error),
    #[error("the token file contains no valid token")]
    NoToken,
    #[error("key and certificate request could not be generated")]
    KeyAndRequest(#[source] Unspecified),
    #[error("the certificate request could not be encoded")]
    Write(#[source] ParseEnrolmentError),
    #[error("the trust bundle is invalid")]
    Tls(#[from] TlsConfigError),
    #[error("the certificate request failed")]
    RequestError(#[from] RequestError),
    #[error("the receiver refused the certificate request: {status}, {message}")]
    Refused {
        status: StatusCode,
        message: String,
        /// The receiver's `Retry-After`.
        retry_after: Option<Duration>,
        /// The receiver refused the client certificate that was presented.
        certificate: bool,
    },
    #[error("the receiver's response could not be parsed")]
    BufferedResponse(#[source] ParseEnrolmentError),
    #[error("the issued certificate is invalid")]
    Unusable(#[source] CredentialsError),
}

impl CertificateError {
    /// True if the receiver refused the client certificate that was presented.
    pub(super) fn is_about_certificate(&self) -> bool {
        match self {
            Self::Refused { certificate, .. } => *certificate,
            Self::RequestError(error) => error.is_about_certificate(),
            _ => false,
        }
    }

    /// True if no connection was established.
    pub(super) fn is_connect(&self) -> bool {
        matches!(self, Self::RequestError(error) if error.is_connect())
    }

    /// The receiver's `Retry-After`, if it sent one.
    pub(super) const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// True if a certificate was issued but is invalid.
    pub(super) const fn is_unusable(&self) -> bool {
        matches!(self, Self::BufferedResponse(_) | Self::Unusable(_))
    }
}

/// An issued chain with the key that was generated for it; not validated yet.
pub(super) struct IssuedCertificate {
    pub(super) chain: Vec<u8>,
    pub(super) key: Vec<u8>,
    /// The receiver's clock at the time of its response, in Unix seconds, if it sent a `Date`: its certificates are
    /// judged by its clock, not by the local one.
    pub(super) unix: Option<i64>,
}

/// Requests a certificate with a token, over a connection that only a server trusted by the bundle can terminate.
pub(super) async fn enrol(
    settings: &Settings,
    domain: &TrustDomain,
    token: &Path,
    dial: &Dialer,
    metrics: &Metrics,
) -> Result<IssuedCertificate, CertificateError> {
    let authorization = authorization(token)?;
    let roots = tls::roots(&tls::certificates(&settings.bundle)?)?;
    let tls = clock::with_wall_clock(tls::client(None, roots)?);
    let (generate, certificate) = request(settings, domain)?;
    let body = certificate.to_json().map_err(CertificateError::Write)?.into();
    let begun = Instant::now();
    let response = receiver::enrol(dial, tls, &settings.enrolment, authorization, body).await;
    metrics.requested(Route::Enrolment, RequestOutcome::of(&response), begun.elapsed());
    read(&response?, generate)
}

/// Requests a certificate with the current identity and the token. The receiver responds when its issuer does, which may
/// take long or fail, so the caller passes a client of its own. A refusal that corrects the clock is followed by one retry.
pub(super) async fn renew(
    settings: &Settings,
    domain: &TrustDomain,
    token: &Path,
    client: &Client,
    core: &Core,
    metrics: &Metrics,
) -> Result<IssuedCertificate, CertificateError> {
    let (generate, certificate) = request(settings, domain)?;
    let renewal = RenewalRequest { certificate, token: Some(read_token(token)?) };
    let body: Bytes = renewal.to_json().map_err(CertificateError::Write)?.into();
    let post = || {
        let request = PostRequest {
            path: enrolment::CERTIFICATES_PATH,
            content_type: enrolment::CONTENT_TYPE,
            body: body.clone(),
            nonce: core.nonce(),
        };
        client.post(metrics, Route::Renewal, request)
    };
    let mut response = post().await?;
    if let RefusalAction::Clock { offset } = receiver::classify_refusal(&response, clock::unix_seconds()) {
        correct_clock(metrics, offset);
        response = post().await?;
    }
    read(&response, generate)
}

fn request(settings: &Settings, domain: &TrustDomain) -> Result<(KeyAndRequest, CertificateRequest), CertificateError> {
    let generate = request::generate(&settings.runtime, domain).map_err(CertificateError::KeyAndRequest)?;
    let certificate = CertificateRequest { runtime: settings.runtime.clone(), request: generate.request.clone() };
    Ok((generate, certificate))
}

fn read(response: &BufferedResponse, generate: KeyAndRequest) -> Result<IssuedCertificate, CertificateError> {
    if response.status != StatusCode::OK {
        return Err(refusal(response));
    }
    let CertificateResponse { chain, .. } =
        CertificateResponse::parse(&response.body).map_err(CertificateError::BufferedResponse)?;
    let unix = receiver::date(&response.headers, &header::DATE);
    Ok(IssuedCertificate { chain: chain.into_bytes(), key: generate.key.into_bytes(), unix })
}

fn refusal(response: &BufferedResponse) -> CertificateError {
    let action = receiver::classify_refusal(response, clock::unix_seconds());
    let problem = serde_json::from_slice::<Problem>(&response.body).ok();
    let message =
        problem.map_or_else(|| "no detail".to_owned(), |problem| problem.detail.chars().take(WORDS).collect());
    let retry_after = if let RefusalAction::RetryAfter(wait) = action { Some(wait) } else { None };
    CertificateError::Refused {
        status: response.status,
        message,
        retry_after,
        certificate: action == RefusalAction::Certificate,
    }
}

/// Value of the `Authorization` header.
fn authorization(token: &Path) -> Result<HeaderValue, CertificateError> {
    let value = format!("Bearer {}", read_token(token)?);
    let mut value = HeaderValue::try_from(value).map_err(|_| CertificateError::NoToken)?;
    value.set_sensitive(true);
    Ok(value)
}

/// Reads the token. The file is read each time, because the kubelet renews it.
fn read_token(path: &Path) -> Result<String, CertificateError> {
    let mut token = Vec::new();
    let limit = MAX_TOKEN_BYTES as u64 + 1;
    let read =
        File::open(path).and_then(|file| file.take(limit).read_to_end(&mut token)).map_err(CertificateError::Token)?;
    token.truncate(token.trim_ascii_end().len());
    if read > MAX_TOKEN_BYTES || token.is_empty() || !token.iter().all(u8::is_ascii_graphic) {
        return Err(CertificateError::NoToken);
    }
    String::from_utf8(token).map_err(|_| CertificateError::NoToken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_must_be_a_valid_header_value() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        assert!(matches!(authorization(&file), Err(CertificateError::Token(_))));
        std::fs::write(&file, "a.b.c\n").unwrap();
        let value = authorization(&file).unwrap();
        assert_eq!((value.as_bytes(), value.is_sensitive()), (&b"Bearer a.b.c"[..], true));
        for bad in [String::new(), "\n".to_owned(), "a\nb".to_owned(), "x".repeat(MAX_TOKEN_BYTES + 1)] {
            std::fs::write(&file, bad).unwrap();
            assert!(matches!(authorization(&file), Err(CertificateError::NoToken)));
        }
    }
}
