//! Bytes that an agent reads: the receiver's responses, and the lists and watch events of its runtime's API server.

mod receiver_peer;
mod responses;
mod watch_stream;

use std::sync::LazyLock;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use jiff::Timestamp;
use serde_json::Value;
use tidewatch_agent::{
    config::Endpoint,
    identity::{Credentials, CredentialsError, KeyMaterial},
    receiver::{BufferedResponse, RefusalAction, classify_refusal},
    testing::{self, ConfigDecoder, Decoded},
};
use tidewatch_api::{
    identity::TrustDomain,
    plan::{self, Plan},
};
use tidewatch_contract::{
    certificate::{to_pem, trust_revision},
    enrolment::{CertificateResponse, MAX_RESPONSE_BYTES, TrustResponse},
    problem::Problem,
};
use tidewatch_kit::tls;

use super::seeds;

pub use responses::answers;
pub use watch_stream::watch;

static DOMAIN: LazyLock<TrustDomain> = LazyLock::new(|| "kyma.local".parse().expect("this is a trust domain"));
/// Most bytes of a ConfigMap's error text, which every heartbeat carries.
const MAX_ERROR_BYTES: usize = 4 << 10;
/// Most bytes of the trust bundle in the settings.
const MAX_BUNDLE_BYTES: usize = 64 << 10;

/// An error response: status, header fields one per line, an empty line, and the body. Each reaction of the agent
/// belongs to certain statuses, and none makes it loop or sets an impossible clock.
pub fn refusal(data: &[u8]) {
    let Some(response) = response(data) else { return };
    let status = response.status.as_u16();
    match classify_refusal(&response, seeds::NOW) {
        RefusalAction::Split => assert_eq!(status, 400),
        RefusalAction::TooLarge(_) => assert_eq!(status, 413),
        RefusalAction::NewEpoch | RefusalAction::Certificate => assert_eq!(status, 401),
        RefusalAction::Clock { offset } => {
            assert!(status == 401 && response.headers.contains_key(header::DATE));
            let theirs = seeds::NOW.checked_add(offset).map(Timestamp::from_second);
            assert!(matches!(theirs, Some(Ok(_))), "no clock shows {offset} s from now");
        }
        RefusalAction::RetryAfter(wait) => {
            assert!(!wait.is_zero(), "a hot loop");
            assert!(!matches!(status, 400 | 401 | 403 | 413) && response.headers.contains_key(header::RETRY_AFTER));
        }
        RefusalAction::BackOff => assert!(!matches!(status, 400 | 413)),
    }
    if !matches!(status, 401 | 413) {
        let bare = BufferedResponse { status: response.status, headers: response.headers.clone(), body: Bytes::new() };
        assert_eq!(
            classify_refusal(&bare, seeds::NOW),
            classify_refusal(&response, seeds::NOW),
            "only the status steers"
        );
    }
    if let Ok(problem) = serde_json::from_slice::<Problem>(&response.body) {
        let written = serde_json::to_vec(&problem).expect("a problem is JSON");
        let again: Problem = serde_json::from_slice(&written).expect("it was just written");
        assert_eq!((again.kind(), &again), (problem.kind(), &problem));
    }
}

fn response(data: &[u8]) -> Option<BufferedResponse> {
    let mut lines = data.split(|byte| *byte == b'\n');
    let status = StatusCode::from_bytes(lines.next()?).ok().filter(|status| !status.is_success())?;
    let mut headers = HeaderMap::new();
    for line in lines.by_ref().take_while(|line| !line.is_empty()) {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        // Clients strip this white space (RFC 9110, section 5.5).
        headers.append(name, HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?);
    }
    let body = lines.collect::<Vec<_>>().join(&b'\n');
    Some(BufferedResponse { status, headers, body: body.into() })
}

/// The response to a certificate request: bounded, it survives serialising and parsing, and an identity made from it
/// names a runtime and has not expired.
pub fn certificate_answer(data: &[u8]) {
    let Ok(read) = CertificateResponse::parse(data) else { return };
    assert!(data.len() <= MAX_RESPONSE_BYTES && !read.chain.is_empty() && !read.trust_bundle.is_empty());
    let written = serde_json::to_vec(&read).expect("an response is JSON");
    assert_eq!(CertificateResponse::parse(&written).ok().as_ref(), Some(&read), "nothing grows by being written");
    if let Ok(made) = identity(read) {
        assert!(made.not_after > seeds::NOW, "an expired certificate was accepted");
        assert_eq!(DOMAIN.runtime_of(&DOMAIN.uri(&made.runtime)), Some(made.runtime));
        assert!(made.certificate.fingerprint.len() == 64 && made.trust_revision.len() == 16);
    }
}

/// The agent's identity from a response to a request with the seeds' key.
fn identity(
    CertificateResponse { chain, trust_bundle, .. }: CertificateResponse,
) -> Result<Credentials, CredentialsError> {
    static RECEIVER: LazyLock<Endpoint> = LazyLock::new(|| "https://kcp.test".parse().expect("this is an address"));
    let chain = chain.into_bytes();
    let bundle = trust_bundle.into_bytes();
    let material = KeyMaterial { chain, key: seeds::IDENTITY.key.as_str().into(), bundle };
    Credentials::new(&material, &DOMAIN, RECEIVER.clone(), seeds::NOW)
}

/// The agent's trust bundle, in responses and in the settings: bounded, it survives serialising and parsing, and
/// neither order nor duplicates make another revision.
pub fn trust_answer(data: &[u8]) {
    let Ok(read) = TrustResponse::parse(data) else { return };
    assert!(data.len() <= MAX_RESPONSE_BYTES && !read.trust_bundle.is_empty());
    let written = serde_json::to_vec(&read).expect("an response is JSON");
    assert_eq!(TrustResponse::parse(&written).ok().as_ref(), Some(&read), "nothing grows by being written");
    let Ok(roots) = tls::certificates(read.trust_bundle.as_bytes()) else { return };
    let pem: String = roots.iter().map(|root| to_pem(root)).collect();
    assert_eq!(tls::certificates(pem.as_bytes()).ok().as_ref(), Some(&roots));
    let others: Vec<_> = roots.iter().rev().chain(&roots).cloned().collect();
    assert_eq!(trust_revision(&others), trust_revision(&roots));
    if let Ok(store) = tls::roots(&roots) {
        assert_eq!(store.len(), roots.len(), "a bundle is taken whole or not at all");
    }
}

/// The agent's ConfigMap: a page of a list, then lines of a watch. A refused line changes nothing, the last good plan
/// and settings stay, and the error text is short.
pub fn agent_config(data: &[u8]) {
    let mut config = ConfigDecoder::new("kyma-system");
    let mut listed = false;
    let mut plan = None;
    let mut settings = None;
    for line in data.split(|byte| *byte == b'\n') {
        let before = config.error();
        let outcome = if listed { config.line(line) } else { config.page(line) };
        listed = if listed { outcome != Decoded::Relist } else { outcome == Decoded::Accepted };
        let new_plan = config.plan();
        let new_settings = config.settings();
        let error = config.error();
        let kept = (new_plan == plan, new_settings == settings);
        match &error {
            _ if outcome != Decoded::Accepted => {
                assert!(kept == (true, true) && error == before, "a refused line changed the state")
            }
            Some(text) => assert!(text.len() <= MAX_ERROR_BYTES && (kept.0 || kept.1), "{text}"),
            None => {}
        }
        assert!(new_plan.is_some() || plan.is_none(), "the last good plan stays");
        assert!(new_settings.is_some() || settings.is_none(), "the last good settings stay");
        (plan, settings) = (new_plan, new_settings);
    }
    if let Some(plan) = plan {
        assert!(plan.watches().len() <= plan::MAX_WATCHES);
        let written = serde_json::to_string(&*plan).expect("a plan is JSON");
        assert_eq!(Plan::parse(&written).ok(), Some((*plan).clone()));
    }
    if let Some(settings) = settings {
        for endpoint in [&settings.receiver, &settings.enrolment] {
            assert_eq!(format!("https://{}", endpoint.authority()).parse().as_ref(), Ok(endpoint));
        }
        assert_eq!(settings.runtime.as_str().parse().as_ref(), Ok(&settings.runtime));
        assert!(settings.bundle.len() <= MAX_BUNDLE_BYTES);
        assert!(tls::certificates(&settings.bundle).is_ok_and(|roots| !roots.is_empty()));
    }
}

/// Discovery documents of a group and of its version: names are bounded, and the JSON's formatting does not matter.
pub fn discovery(data: &[u8]) {
    let preferred = testing::preferred_version(data);
    let served = testing::served(data, "v1", "kymas");
    if let Some(served) = &served {
        assert!(served.version == "v1" && served.kind.len() <= 253);
    }
    // Duplicate members are refused where they matter; anywhere else the last one wins.
    if let Ok(value) = serde_json::from_slice::<Value>(data).map(|value| value.to_string().into_bytes()) {
        assert!(preferred.is_none() || testing::preferred_version(&value) == preferred);
        assert!(served.is_none() || testing::served(&value, "v1", "kymas") == served);
    }
}

#[cfg(test)]
mod tests;
