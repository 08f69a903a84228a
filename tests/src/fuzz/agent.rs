//! What an agent reads of others: the answers of the receiver, and what the API server of its runtime says.

mod conversation;
mod reception;
mod watched;

use std::sync::LazyLock;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use jiff::Timestamp;
use serde_json::Value;
use tidewatch_agent::{
    config::Endpoint,
    identity::{Credentials, Load, Material},
    link::{Answer, Verdict, judge},
    reading::{self, ConfigReading, Heard},
};
use tidewatch_shared::{
    certificate::{to_pem, trust_revision},
    enrolment::{CertificateAnswer, MAX_ANSWER_BYTES, TrustAnswer},
    identity::TrustDomain,
    plan::{self, Plan},
    problem::Problem,
    tls,
};

use super::seeds;

pub use conversation::answers;
pub use watched::watch;

static DOMAIN: LazyLock<TrustDomain> = LazyLock::new(|| "kyma.local".parse().expect("this is a trust domain"));
/// Bytes of what is wrong with a ConfigMap, at most, in words: they stand in every heartbeat.
const WORDS: usize = 4 << 10;
/// Bytes of a trust bundle of the settings, at most.
const BUNDLE: usize = 64 << 10;

/// An answer that is no success: status, header fields one a line, an empty line, and the body. Each consequence has its own statuses,
/// and is one that the agent can bear.
pub fn refusal(data: &[u8]) {
    let Some(answer) = answer(data) else { return };
    let status = answer.status.as_u16();
    match judge(&answer, seeds::NOW) {
        Verdict::Split => assert_eq!(status, 400),
        Verdict::TooLarge(_) => assert_eq!(status, 413),
        Verdict::NewEpoch | Verdict::Certificate => assert_eq!(status, 401),
        Verdict::Clock { offset } => {
            assert!(status == 401 && answer.headers.contains_key(header::DATE));
            let theirs = seeds::NOW.checked_add(offset).map(Timestamp::from_second);
            assert!(matches!(theirs, Some(Ok(_))), "no clock shows {offset} s from now");
        }
        Verdict::Told(wait) => {
            assert!(!wait.is_zero(), "a hot loop");
            assert!(!matches!(status, 400 | 401 | 403 | 413) && answer.headers.contains_key(header::RETRY_AFTER));
        }
        Verdict::BackOff => assert!(!matches!(status, 400 | 413)),
    }
    if !matches!(status, 401 | 413) {
        let bare = Answer { status: answer.status, headers: answer.headers.clone(), body: Bytes::new() };
        assert_eq!(judge(&bare, seeds::NOW), judge(&answer, seeds::NOW), "only the status steers");
    }
    if let Ok(problem) = serde_json::from_slice::<Problem>(&answer.body) {
        let written = serde_json::to_vec(&problem).expect("a problem is JSON");
        let again: Problem = serde_json::from_slice(&written).expect("it was just written");
        assert_eq!((again.kind(), &again), (problem.kind(), &problem));
    }
}

fn answer(data: &[u8]) -> Option<Answer> {
    let mut lines = data.split(|byte| *byte == b'\n');
    let status = StatusCode::from_bytes(lines.next()?).ok().filter(|status| !status.is_success())?;
    let mut headers = HeaderMap::new();
    for line in lines.by_ref().take_while(|line| !line.is_empty()) {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        // What a client strips (RFC 9110, section 5.5).
        headers.append(name, HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?);
    }
    let body = lines.collect::<Vec<_>>().join(&b'\n');
    Some(Answer { status, headers, body: body.into() })
}

/// The answer to a request for a certificate: bounded, what is read survives being written and read, and what becomes an identity of it
/// names a runtime and has not ended.
pub fn certificate_answer(data: &[u8]) {
    let Ok(read) = CertificateAnswer::parse(data) else { return };
    assert!(data.len() <= MAX_ANSWER_BYTES && !read.chain.is_empty() && !read.trust_bundle.is_empty());
    let written = serde_json::to_vec(&read).expect("an answer is JSON");
    assert_eq!(CertificateAnswer::parse(&written).ok().as_ref(), Some(&read), "nothing grows by being written");
    if let Ok(made) = identity(read) {
        assert!(made.not_after > seeds::NOW, "a certificate that has ended");
        assert_eq!(DOMAIN.runtime_of(&DOMAIN.uri(&made.runtime)), Some(made.runtime));
        assert!(made.certificate.fingerprint.len() == 64 && made.trust_revision.len() == 16);
    }
}

/// What the agent makes of an answer to a request with the key that is known.
fn identity(CertificateAnswer { chain, trust_bundle, .. }: CertificateAnswer) -> Result<Credentials, Load> {
    static RECEIVER: LazyLock<Endpoint> = LazyLock::new(|| "https://kcp.test".parse().expect("this is an address"));
    let (chain, bundle) = (chain.into_bytes(), trust_bundle.into_bytes());
    let material = Material { chain, key: seeds::PAPERS.key.as_str().into(), bundle };
    Credentials::new(&material, &DOMAIN, RECEIVER.clone(), seeds::NOW)
}

/// What agents shall trust, as it is told and as it stands in the settings: bounded, what is read survives being written and read, and
/// neither order nor doubles are another bundle.
pub fn trust_answer(data: &[u8]) {
    let Ok(read) = TrustAnswer::parse(data) else { return };
    assert!(data.len() <= MAX_ANSWER_BYTES && !read.trust_bundle.is_empty());
    let written = serde_json::to_vec(&read).expect("an answer is JSON");
    assert_eq!(TrustAnswer::parse(&written).ok().as_ref(), Some(&read), "nothing grows by being written");
    let Ok(roots) = tls::certificates(read.trust_bundle.as_bytes()) else { return };
    let pem: String = roots.iter().map(|root| to_pem(root)).collect();
    assert_eq!(tls::certificates(pem.as_bytes()).ok().as_ref(), Some(&roots));
    let others: Vec<_> = roots.iter().rev().chain(&roots).cloned().collect();
    assert_eq!(trust_revision(&others), trust_revision(&roots));
    if let Ok(store) = tls::roots(&roots) {
        assert_eq!(store.len(), roots.len(), "a bundle is taken whole or not at all");
    }
}

/// The agent's ConfigMap: a page of a list, then lines of a watch. What is refused changes nothing, the last good plan and settings
/// stay, and what is wrong is told in few words.
pub fn agent_config(data: &[u8]) {
    let mut config = ConfigReading::new("kyma-system");
    let (mut listed, mut plan, mut settings) = (false, None, None);
    for line in data.split(|byte| *byte == b'\n') {
        let before = config.error();
        let heard = if listed { config.line(line) } else { config.page(line) };
        listed = if listed { heard != Heard::Relist } else { heard == Heard::Taken };
        let (new_plan, new_settings, error) = (config.plan(), config.settings(), config.error());
        let kept = (new_plan == plan, new_settings == settings);
        match &error {
            _ if heard != Heard::Taken => assert!(kept == (true, true) && error == before, "what is refused tells"),
            Some(words) => assert!(words.len() <= WORDS && (kept.0 || kept.1), "{words}"),
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
        assert!(settings.bundle.len() <= BUNDLE);
        assert!(tls::certificates(&settings.bundle).is_ok_and(|roots| !roots.is_empty()));
    }
}

/// The documents of discovery, of a group and of its version: names are bounded, and how JSON is written is nothing to them.
pub fn discovery(data: &[u8]) {
    let preferred = reading::preferred_version(data);
    let served = reading::served(data, "v1", "kymas");
    if let Some(served) = &served {
        assert!(served.version == "v1" && served.kind.len() <= 253);
    }
    // Doubled members are refused where they count; anywhere else the last one is as good as the first.
    if let Ok(value) = serde_json::from_slice::<Value>(data).map(|value| value.to_string().into_bytes()) {
        assert!(preferred.is_none() || reading::preferred_version(&value) == preferred);
        assert!(served.is_none() || reading::served(&value, "v1", "kymas") == served);
    }
}

#[cfg(test)]
mod tests;
