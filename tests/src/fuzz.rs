//! Invariants of the parsers of untrusted bytes, for any input: bytes from runtimes, proxies, registries and configuration,
//! and the responses and watch events that an agent reads. Each function here is the body of a fuzz target in `tests/fuzz`, and
//! of a short run on stable in this crate's own tests. A violated invariant panics.

mod agent;
mod module;
mod seeds;

use std::sync::LazyLock;

use serde_json::Value;
use tidewatch_api::{
    names::GROUP,
    plan::{self, Plan, carries_secrets},
};
use tidewatch_cluster::runtime_access::kubeconfig::RuntimeKubeconfig;
use tidewatch_contract::{
    enrolment::{CertificateRequest, MAX_REQUEST_BYTES, MAX_TOKEN_BYTES},
    event::{self, MAX_EVENTS, Received},
    forwarded,
    heartbeat::{self, Heartbeat},
    signature::{Message, SignedRequest, WINDOW_SECONDS, verify},
    v2,
};
use tidewatch_gateway::enrolment::{KeySet, MAX_KEY_SET_BYTES, Token};
use tidewatch_trust::SigningRequest;

pub use agent::{agent_config, answers, certificate_answer, discovery, refusal, trust_answer, watch};
pub use module::{descriptor, layer};
pub use seeds::seeds;

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of its file in `tests/fuzz/fuzz_targets` and of its corpus folder.
    pub name: &'static str,
    /// Panics when an invariant is violated.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: [Target; 22] = [
    Target { name: "signature", run: signature },
    Target { name: "client_cert", run: client_cert },
    Target { name: "xfcc", run: xfcc },
    Target { name: "events", run: events },
    Target { name: "heartbeat", run: heartbeat },
    Target { name: "v2_event", run: v2_event },
    Target { name: "v2_forwarded", run: v2_forwarded },
    Target { name: "plan", run: plan },
    Target { name: "kubeconfig", run: kubeconfig },
    Target { name: "agent_kubeconfig", run: agent_kubeconfig },
    Target { name: "token", run: token },
    Target { name: "token_keys", run: token_keys },
    Target { name: "certificate_request", run: certificate_request },
    Target { name: "answers", run: answers },
    Target { name: "refusal", run: refusal },
    Target { name: "certificate_answer", run: certificate_answer },
    Target { name: "trust_answer", run: trust_answer },
    Target { name: "watch", run: watch },
    Target { name: "discovery", run: discovery },
    Target { name: "agent_config", run: agent_config },
    Target { name: "descriptor", run: descriptor },
    Target { name: "layer", run: layer },
];

/// The three fields of a signature, one per line, for a request with a known signature: verification accepts only the
/// signed fields, apart from the signature's own bytes, and only within their time window.
pub fn signature(data: &[u8]) {
    static GOOD: LazyLock<seeds::Signed> = LazyLock::new(seeds::signed);
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut lines = text.splitn(3, '\n');
    let mut line = || lines.next().unwrap_or_default();
    let content_digest = line();
    let signature_input = line();
    let signature = line();
    let good = &*GOOD;
    let message =
        Message { method: "POST", authority: "kcp.test", path: "/v3/events", content_type: "application/json" };
    let signed = SignedRequest { message, content_digest, signature_input, signature, body: seeds::BODY };
    for offset in [0, WINDOW_SECONDS, WINDOW_SECONDS + 1, i64::MAX - seeds::NOW] {
        if let Ok(verified) = verify(&signed, &good.leaf, seeds::NOW + offset) {
            assert!(offset <= WINDOW_SECONDS, "a signature was accepted after its time window");
            assert_eq!(
                (content_digest, signature_input),
                (&*good.headers.content_digest, &*good.headers.signature_input)
            );
            assert_eq!(verified.created, seeds::NOW);
        }
    }
}

/// A `Client-Cert` field: encoding the parsed certificate yields the same field.
pub fn client_cert(data: &[u8]) {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some(certificate) = forwarded::parse_client_cert(text) {
        assert!(text.len() <= forwarded::MAX_BYTES);
        assert_eq!(format!(":{}:", STANDARD.encode(&certificate)), text);
    }
}

/// An `X-Forwarded-Client-Cert` field: the parsed certificate survives encoding and parsing.
pub fn xfcc(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some(certificate) = forwarded::parse_xfcc(text) {
        assert!(text.len() <= forwarded::MAX_BYTES);
        assert!(text.to_ascii_lowercase().matches("cert=").count() >= 1);
        // The re-encoded field is longer, and may exceed the limit.
        if let Some(again) = forwarded::parse_xfcc(&seeds::xfcc(&certificate)) {
            assert_eq!(again, certificate);
        }
    }
}

/// A batch of events: bounded, and each event's id and subject survive formatting and parsing.
pub fn events(data: &[u8]) {
    let Ok(received) = event::parse_batch(data) else { return };
    assert!(received.len() <= MAX_EVENTS);
    for received in received {
        let (Received::Ok(event::Event { id, .. }) | Received::Err((id, _))) = &received;
        assert_eq!(id.to_string().parse(), Ok(*id));
        if let Ok(event) = received {
            assert!(!event.watch.is_empty() && !event.source.as_str().is_empty());
            if let event::Payload::Object(object) = event.payload {
                assert!(!object.subject.name.is_empty());
                assert_eq!(object.subject.to_string().parse(), Ok(object.subject));
            }
        }
    }
}

/// A heartbeat: bounded, and it survives serialising and parsing.
pub fn heartbeat(data: &[u8]) {
    let Some(read) = Heartbeat::parse(data) else { return };
    assert!(read.watches.len() <= heartbeat::MAX_WATCHES);
    let written = serde_json::to_vec(&read).expect("a heartbeat is JSON");
    assert_eq!(Heartbeat::parse(&written), Some(read));
}

/// A token for enrolment: bounded, of the JWT form, and valid for a limited time only.
pub fn token(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if Token::read(text, seeds::AUDIENCE, seeds::NOW).is_ok() {
        let is_form = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        assert!(text.len() <= MAX_TOKEN_BYTES && text.bytes().all(is_form) && text.matches('.').count() == 2);
        assert!(Token::read(text, seeds::AUDIENCE, i64::MAX).is_err(), "a token never expires");
    }
}

/// Token keys of a runtime's API server: bounded, and no key verifies an unsigned token.
pub fn token_keys(data: &[u8]) {
    static UNSIGNED: LazyLock<String> = LazyLock::new(seeds::token);
    let Ok(keys) = KeySet::parse(data) else { return };
    assert!(data.len() <= MAX_KEY_SET_BYTES);
    let token = Token::read(&UNSIGNED, seeds::AUDIENCE, seeds::NOW).expect("the seed is a token");
    assert!(keys.verify(&token).is_err(), "a key verified an unsigned token");
}

/// The body of a certificate request, and the PKCS#10 in it: bounded, and it survives serialising and parsing.
pub fn certificate_request(data: &[u8]) {
    let Ok(read) = CertificateRequest::parse(data) else { return };
    assert!(data.len() <= MAX_REQUEST_BYTES);
    let written = read.to_json().expect("nothing grows by being written");
    assert_eq!(CertificateRequest::parse(&written).ok().as_ref(), Some(&read));
    // Any content is parsed without a panic; an accepted request has a valid signature of its own.
    let _ = SigningRequest::from_pem(read.request.as_bytes());
}

/// The body of a v2 event: it survives serialising as runtime-watcher's agent does, and parsing.
pub fn v2_event(data: &[u8]) {
    let Some(read) = v2::Event::parse(data) else { return };
    assert_eq!(v2::Event::parse(read.to_body().as_bytes()), Some(read));
}

/// The certificate that is forwarded to a v2 listener: it survives forwarding.
pub fn v2_forwarded(data: &[u8]) {
    let Some(leaf) = v2::parse_forwarded(data) else { return };
    assert!(data.len() <= v2::MAX_FORWARDED_BYTES);
    let _ = v2::read_caller(&leaf);
    let again = v2::forwarded_header(&leaf);
    if again.len() <= v2::MAX_FORWARDED_BYTES {
        assert_eq!(v2::parse_forwarded(again.as_bytes()).as_deref(), Some(&*leaf));
    }
}

/// A plan: bounded, without kinds that carry secrets, `*` only for groups outside Kubernetes and Tidewatch, and it survives
/// serialising and parsing.
pub fn plan(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(read) = Plan::parse(text) else { return };
    assert!(read.watches().len() <= plan::MAX_WATCHES);
    for watch in read.watches() {
        assert!(!carries_secrets(&watch.group, &watch.resource));
        assert!(!watch.group.contains('*') && (watch.resource == "*" || !watch.resource.contains('*')));
        if watch.resource == "*" {
            let labels: Vec<&str> = watch.group.split('.').collect();
            assert!(labels.len() > 1 && watch.group != GROUP);
            assert!(!matches!(labels[..], [.., "k8s" | "kubernetes", "io"]), "{}", watch.group);
            assert!(["secrets", "tokenreviews", "*"].iter().all(|resource| watch.of_resource(resource).is_err()));
        }
    }
    let written = serde_json::to_string(&read).expect("a plan is JSON");
    assert_eq!(Plan::parse(&written).ok(), Some(read));
}

/// A kubeconfig of an access Secret: one https server, and no credential in any debug or error text.
pub fn kubeconfig(data: &[u8]) {
    match RuntimeKubeconfig::parse(data) {
        Ok(read) => {
            assert_eq!(read.server.scheme_str(), Some("https"));
            assert!(!format!("{:?}", read.credentials).contains(seeds::TOKEN));
        }
        Err(refusal) => assert!(!format!("{refusal} {refusal:?}").contains(seeds::TOKEN)),
    }
}

/// The agent's own kubeconfig. It is written by its operator and may name files, which are not read here.
pub fn agent_kubeconfig(data: &[u8]) {
    let names_files = serde_json::from_slice::<Value>(data).is_ok_and(|config| {
        let mut users = config["users"].as_array().into_iter().flatten();
        users.any(|user| ["client-certificate", "client-key"].iter().any(|key| user["user"][key].is_string()))
    });
    if !names_files {
        let _ = tidewatch_agent::testing::is_kubeconfig(data);
    }
}

#[cfg(test)]
mod tests;
