//! What the parsers of others' bytes must hold, whatever the bytes are: of what runtimes, proxies and configuration send, and of what an
//! agent is answered and told. Each function here is the body of a fuzz target
//! in `tests/fuzz`, and of a short run on stable in this crate's own tests. A broken promise is a panic.

mod agent;
mod seeds;

use std::sync::LazyLock;

use serde_json::Value;
use tidewatch_receiver::{
    enrolment::{Keys, MAX_KEYS_BYTES, Token},
    pki::Request,
    runtime_access::kubeconfig::RuntimeKubeconfig,
};
use tidewatch_shared::{
    enrolment::{CertificateRequest, MAX_REQUEST_BYTES, MAX_TOKEN_BYTES},
    event::{self, MAX_EVENTS, Received},
    forwarded,
    heartbeat::{self, Heartbeat},
    plan::{self, Plan, carries_secrets},
    signature::{Message, Signed, WINDOW_SECONDS, verify},
    v2,
};

pub use agent::{agent_config, answers, certificate_answer, discovery, refusal, trust_answer, watch};
pub use seeds::seeds;

/// A target by its name.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// As the file in `tests/fuzz/fuzz_targets` and the folder of its corpus are called.
    pub name: &'static str,
    /// Panics when a promise is broken.
    pub run: fn(&[u8]),
}

/// Every target.
pub const TARGETS: [Target; 20] = [
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
];

/// The three fields of a signature, one a line, for a request whose signature is known: nothing but the very fields that were
/// signed is taken, apart from the signature's own bytes, and only within their time.
pub fn signature(data: &[u8]) {
    static GOOD: LazyLock<seeds::Signed> = LazyLock::new(seeds::signed);
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut lines = text.splitn(3, '\n');
    let mut line = || lines.next().unwrap_or_default();
    let (content_digest, signature_input, signature) = (line(), line(), line());
    let good = &*GOOD;
    let message =
        Message { method: "POST", authority: "kcp.test", path: "/v3/events", content_type: "application/json" };
    let signed = Signed { message, content_digest, signature_input, signature, body: seeds::BODY };
    for offset in [0, WINDOW_SECONDS, WINDOW_SECONDS + 1, i64::MAX - seeds::NOW] {
        if let Ok(verified) = verify(&signed, &good.leaf, seeds::NOW + offset) {
            assert!(offset <= WINDOW_SECONDS, "a signature held for too long");
            assert_eq!(
                (content_digest, signature_input),
                (&*good.headers.content_digest, &*good.headers.signature_input)
            );
            assert_eq!(verified.created, seeds::NOW);
        }
    }
}

/// A `Client-Cert` field: what is read is written the same way.
pub fn client_cert(data: &[u8]) {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(certificate) = forwarded::parse_client_cert(text) {
        assert!(text.len() <= forwarded::MAX_BYTES);
        assert_eq!(format!(":{}:", STANDARD.encode(&certificate)), text);
    }
}

/// An `X-Forwarded-Client-Cert` field: what is read, written plainly, is read again.
pub fn xfcc(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(certificate) = forwarded::parse_xfcc(text) {
        assert!(text.len() <= forwarded::MAX_BYTES);
        assert!(text.to_ascii_lowercase().matches("cert=").count() >= 1);
        // Written anew it takes more room, and may have too much for the limit.
        if let Ok(again) = forwarded::parse_xfcc(&seeds::xfcc(&certificate)) {
            assert_eq!(again, certificate);
        }
    }
}

/// A batch of events: bounded, and each event is what its name says.
pub fn events(data: &[u8]) {
    let Ok(received) = event::parse_batch(data) else { return };
    assert!(received.len() <= MAX_EVENTS);
    for received in received {
        let (Received::Ok(event::Event { id, .. }) | Received::Err((id, _))) = &received;
        assert_eq!(id.to_string().parse(), Ok(*id));
        if let Ok(event) = received {
            assert!(!event.watch.is_empty() && !event.source.as_str().is_empty());
            if let event::What::Object(object) = event.what {
                assert!(!object.subject.name.is_empty());
                assert_eq!(object.subject.to_string().parse(), Ok(object.subject));
            }
        }
    }
}

/// A heartbeat: bounded, and what is read survives being written and read.
pub fn heartbeat(data: &[u8]) {
    let Ok(read) = Heartbeat::parse(data) else { return };
    assert!(read.watches.len() <= heartbeat::MAX_WATCHES);
    let written = serde_json::to_vec(&read).expect("a heartbeat is JSON");
    assert_eq!(Heartbeat::parse(&written).ok(), Some(read));
}

/// A token of whoever enrols: bounded, of one form, and good for its own time alone.
pub fn token(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if Token::read(text, seeds::NOW).is_ok() {
        let is_form = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        assert!(text.len() <= MAX_TOKEN_BYTES && text.bytes().all(is_form) && text.matches('.').count() == 2);
        assert!(Token::read(text, i64::MAX).is_err(), "a token holds for ever");
    }
}

/// The keys that a runtime's API server says its tokens are signed with: bounded, and none vouches for what nobody has signed.
pub fn token_keys(data: &[u8]) {
    static UNSIGNED: LazyLock<String> = LazyLock::new(seeds::token);
    let Ok(keys) = Keys::parse(data) else { return };
    assert!(data.len() <= MAX_KEYS_BYTES);
    let token = Token::read(&UNSIGNED, seeds::NOW).expect("the seed is a token");
    assert!(keys.verify(&token).is_err(), "a key vouches for a token without a signature");
}

/// The body of a request for a certificate, and the PKCS#10 in it: bounded, and what is read survives being written and read.
pub fn certificate_request(data: &[u8]) {
    let Ok(read) = CertificateRequest::parse(data) else { return };
    assert!(data.len() <= MAX_REQUEST_BYTES);
    let written = read.to_json().expect("nothing grows by being written");
    assert_eq!(CertificateRequest::parse(&written).ok().as_ref(), Some(&read));
    // Whatever stands there is read without a panic; what is taken has its own signature.
    let _ = Request::from_pem(read.request.as_bytes());
}

/// The body of a v2 event: what is read survives being written as the incumbent's agent writes it.
pub fn v2_event(data: &[u8]) {
    let Ok(read) = v2::Event::parse(data) else { return };
    assert_eq!(v2::Event::parse(read.to_body().as_bytes()).ok(), Some(read));
}

/// The certificate that a v2 listener is forwarded: what is read survives being forwarded.
pub fn v2_forwarded(data: &[u8]) {
    let Ok(leaf) = v2::forwarded(data) else { return };
    assert!(data.len() <= v2::MAX_FORWARDED_BYTES);
    let _ = v2::Caller::read(&leaf);
    let again = v2::forward(&leaf);
    if again.len() <= v2::MAX_FORWARDED_BYTES {
        assert_eq!(v2::forwarded(again.as_bytes()).ok().as_deref(), Some(&*leaf));
    }
}

/// A plan: bounded, without kinds that carry secrets, and what is read survives being written and read.
pub fn plan(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(read) = Plan::parse(text) else { return };
    assert!(read.watches().len() <= plan::MAX_WATCHES);
    for watch in read.watches() {
        assert!(!carries_secrets(&watch.group, &watch.resource));
    }
    let written = serde_json::to_string(&read).expect("a plan is JSON");
    assert_eq!(Plan::parse(&written).ok(), Some(read));
}

/// A kubeconfig of an access Secret: one https server, and nothing that is shown has a credential in it.
pub fn kubeconfig(data: &[u8]) {
    match RuntimeKubeconfig::parse(data) {
        Ok(read) => {
            assert_eq!(read.server.scheme_str(), Some("https"));
            assert!(!format!("{:?}", read.credentials).contains(seeds::TOKEN));
        }
        Err(refusal) => assert!(!format!("{refusal} {refusal:?}").contains(seeds::TOKEN)),
    }
}

/// The agent's own kubeconfig. It is its operator's and may name files, which are not read here.
pub fn agent_kubeconfig(data: &[u8]) {
    let names_files = serde_json::from_slice::<Value>(data).is_ok_and(|config| {
        let mut users = config["users"].as_array().into_iter().flatten();
        users.any(|user| ["client-certificate", "client-key"].iter().any(|key| user["user"][key].is_string()))
    });
    if !names_files {
        let _ = tidewatch_agent::is_kubeconfig(data);
    }
}

#[cfg(test)]
mod tests;
