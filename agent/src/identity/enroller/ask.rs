//! Asking for a certificate, and what an answer is worth before anything is made of it.

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
use tidewatch_shared::{
    enrolment::{CertificateAnswer, CertificateRequest, MAX_TOKEN_BYTES, ParseEnrolment},
    identity::TrustDomain,
    problem::Problem,
    tls::{self, TlsConfig},
};
use tokio::time::{Instant, timeout};

use crate::{
    clock,
    identity::{
        Load,
        errands::Errands,
        request::{self, Born},
    },
    link::{self, Answer, Dial, Fault, Verdict},
    settings::Settings,
    telemetry::{Metrics, Outcome, Route},
};

/// Until the link has had a renewal carried: the request that it had under way before, and two tries at most.
const CARRIED: Duration = Duration::from_secs(50);
/// Characters of the receiver's words that are told on.
const WORDS: usize = 200;

/// Why no certificate was to be had.
#[derive(Debug, Error)]
pub(super) enum Ask {
    #[error("the token could not be read")]
    Token(#[source] io::Error),
    #[error("the token's file has no token in it")]
    NoToken,
    #[error("key and request could not be made")]
    Born(#[source] Unspecified),
    #[error("the request could not be written")]
    Write(#[source] ParseEnrolment),
    #[error("the trust bundle is not usable")]
    Tls(#[from] TlsConfig),
    #[error("the receiver could not be asked for a certificate")]
    Fault(#[from] Fault),
    #[error("the receiver gives no certificate: {status}, {words}")]
    Refused {
        status: StatusCode,
        words: String,
        /// How long to wait.
        told: Option<Duration>,
        /// It has no use for the certificate that was shown.
        certificate: bool,
    },
    #[error("the renewal was not carried in time")]
    NotCarried,
    #[error("the receiver's answer is not readable")]
    Answer(#[source] ParseEnrolment),
    #[error("what the receiver has issued is refused")]
    Unusable(#[source] Load),
}

impl Ask {
    /// The receiver has no use for the certificate that was shown.
    pub(super) fn is_about_certificate(&self) -> bool {
        match self {
            Self::Refused { certificate, .. } => *certificate,
            Self::Fault(fault) => fault.is_about_certificate(),
            _ => false,
        }
    }

    /// There was no connection.
    pub(super) fn is_connect(&self) -> bool {
        matches!(self, Self::Fault(fault) if fault.is_connect())
    }

    /// How long to wait, when the receiver says it.
    pub(super) const fn told(&self) -> Option<Duration> {
        match self {
            Self::Refused { told, .. } => *told,
            _ => None,
        }
    }

    /// Something was issued, but nothing that can be used.
    pub(super) const fn is_unusable(&self) -> bool {
        matches!(self, Self::Answer(_) | Self::Unusable(_))
    }
}

/// A chain that was issued for a key that was made for it. Not validated yet.
pub(super) struct Fresh {
    pub(super) chain: Vec<u8>,
    pub(super) key: Vec<u8>,
    /// The receiver's clock when it answered, in Unix seconds, if it told: its certificates are judged by its time, not by ours.
    pub(super) unix: Option<i64>,
}

/// With a token, over a connection that only whoever the bundle names can end.
pub(super) async fn with_token(
    settings: &Settings,
    domain: &TrustDomain,
    token: &Path,
    dial: &Dial,
    metrics: &Metrics,
) -> Result<Fresh, Ask> {
    let authorization = authorization(token)?;
    let roots = tls::roots(&tls::certificates(&settings.bundle)?)?;
    let tls = clock::judge_by(tls::client_without_identity(roots)?);
    let (born, body) = body(settings, domain)?;
    let begun = Instant::now();
    let answer = link::enrol(dial, tls, &settings.enrolment, authorization, body).await;
    metrics.requested(Route::Enrolment, Outcome::of(&answer), begun.elapsed());
    read(&answer?, born)
}

/// With the identity that there is, beside what the link sends.
pub(super) async fn by_link(settings: &Settings, domain: &TrustDomain, errands: &Errands) -> Result<Fresh, Ask> {
    let (born, body) = body(settings, domain)?;
    let carried = timeout(CARRIED, errands.carry(body)).await;
    let answer = carried.ok().flatten().ok_or(Ask::NotCarried)??;
    read(&answer, born)
}

fn body(settings: &Settings, domain: &TrustDomain) -> Result<(Born, Bytes), Ask> {
    let born = request::born(&settings.runtime, domain).map_err(Ask::Born)?;
    let wire = CertificateRequest { runtime: settings.runtime.clone(), request: born.request.clone() };
    let body = wire.to_json().map_err(Ask::Write)?.into();
    Ok((born, body))
}

fn read(answer: &Answer, born: Born) -> Result<Fresh, Ask> {
    if answer.status != StatusCode::OK {
        return Err(refusal(answer));
    }
    let CertificateAnswer { chain, .. } = CertificateAnswer::parse(&answer.body).map_err(Ask::Answer)?;
    let unix = link::date(&answer.headers, &header::DATE);
    Ok(Fresh { chain: chain.into_bytes(), key: born.key.into_bytes(), unix })
}

fn refusal(answer: &Answer) -> Ask {
    let verdict = link::judge(answer, clock::unix_seconds());
    let problem = serde_json::from_slice::<Problem>(&answer.body).ok();
    let words = problem.map_or_else(|| "no words".to_owned(), |problem| problem.detail.chars().take(WORDS).collect());
    let told = if let Verdict::Told(wait) = verdict { Some(wait) } else { None };
    Ask::Refused { status: answer.status, words, told, certificate: verdict == Verdict::Certificate }
}

/// The value of `Authorization`; the token is read anew, because Kubernetes renews it.
fn authorization(token: &Path) -> Result<HeaderValue, Ask> {
    let mut value = b"Bearer ".to_vec();
    let most = MAX_TOKEN_BYTES as u64 + 1;
    let read = File::open(token).and_then(|file| file.take(most).read_to_end(&mut value)).map_err(Ask::Token)?;
    value.truncate(value.trim_ascii_end().len());
    if read > MAX_TOKEN_BYTES || value.len() <= b"Bearer ".len() {
        return Err(Ask::NoToken);
    }
    let mut value = HeaderValue::from_maybe_shared(Bytes::from(value)).map_err(|_| Ask::NoToken)?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_what_a_header_may_have() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        assert!(matches!(authorization(&file), Err(Ask::Token(_))));
        std::fs::write(&file, "a.b.c\n").unwrap();
        let value = authorization(&file).unwrap();
        assert_eq!((value.as_bytes(), value.is_sensitive()), (&b"Bearer a.b.c"[..], true));
        for bad in [String::new(), "\n".to_owned(), "a\nb".to_owned(), "x".repeat(MAX_TOKEN_BYTES + 1)] {
            std::fs::write(&file, bad).unwrap();
            assert!(matches!(authorization(&file), Err(Ask::NoToken)));
        }
    }
}
