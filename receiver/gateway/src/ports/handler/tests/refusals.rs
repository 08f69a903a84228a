//! Table of refusals with status, kind and counted reason, and without any echo of input. Refusals during the
//! handshake, and those only a proxy can cause, are in the gateway's tests over real TLS.

use std::{io, sync::Arc};

use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use parking_lot::Mutex;
use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, KeyPair, SanType, date_time_ymd};
use rustls_pki_types::PrivatePkcs8KeyDer;
use tidewatch_api::identity::Epoch;
use tidewatch_contract::problem::{Kind, Problem};
use tidewatch_kit::tls::Identity;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use super::*;
use crate::ports::metrics::RefusalLabels;

type Sent = Request<BoxBody<Bytes, io::Error>>;

/// Occurs in every body, path and field that the client chooses, and must not occur in a response or log.
const MARKER: &str = "sesame-0123456789";
const RIGHT: [&str; 1] = ["spiffe://kyma.local/runtime/r-1"];

struct Case {
    name: &'static str,
    intake: RecordingIntake,
    settings: Settings,
    agent: Agent,
    /// Requests in their order; only the last one is refused.
    requests: Vec<Sent>,
    status: u16,
    kind: Kind,
    reason: &'static str,
    waits: bool,
}

/// An agent with this self-signed leaf. Verifying the chain is the handshake's task.
fn leaf(uris: &[&str], name: &str, usage: &[ExtendedKeyUsagePurpose], years: (i32, i32)) -> Agent {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
    params.extended_key_usages = usage.to_vec();
    (params.not_before, params.not_after) = (date_time_ymd(years.0, 1, 1), date_time_ymd(years.1, 1, 1));
    let key = KeyPair::generate().unwrap();
    let chain = vec![params.self_signed(&key).unwrap().der().clone()];
    let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
    Agent::with(Identity { chain, key }, "r-1".parse().unwrap())
}

fn good() -> Agent {
    leaf(&RIGHT, "r-1", &[ExtendedKeyUsagePurpose::ClientAuth], (2020, 2090))
}

fn now() -> i64 {
    Now::read().unix
}

fn marked(agent: &Agent) -> Value {
    let mut batch = agent.batch();
    batch[0]["data"]["uid"] = json!(MARKER);
    batch
}

fn sent(request: Request<Vec<u8>>) -> Sent {
    request.map(|body| Full::from(body).map_err(|never| match never {}).boxed())
}

/// A valid request, changed after signing.
fn changed(agent: &Agent, counter: u64, change: impl FnOnce(&mut Request<Vec<u8>>)) -> Sent {
    let body = marked(agent).to_string();
    let mut request = agent.sign(&RequestSpec { created: now(), ..RequestSpec::events(body.as_bytes(), counter) });
    change(&mut request);
    sent(request)
}

fn signed(agent: &Agent, counter: u64, body: &Value) -> Sent {
    let body = body.to_string();
    sent(agent.sign(&RequestSpec { created: now(), ..RequestSpec::events(body.as_bytes(), counter) }))
}

impl Case {
    fn new(name: &'static str, status: u16, kind: Kind, reason: &'static str) -> Self {
        let agent = good();
        let settings = settings();
        let requests = vec![changed(&agent, 1, |_| {})];
        let waits = matches!(status, 404 | 409 | 429 | 503) && reason != "route";
        Self { name, intake: RecordingIntake::default(), settings, agent, requests, status, kind, reason, waits }
    }

    fn agent(mut self, agent: Agent) -> Self {
        self.requests = vec![changed(&agent, 1, |_| {})];
        Self { agent, ..self }
    }

    fn change(mut self, change: impl FnOnce(&mut Request<Vec<u8>>)) -> Self {
        self.requests = vec![changed(&self.agent, 1, change)];
        self
    }

    fn batch(mut self, change: impl FnOnce(&mut Value)) -> Self {
        let mut batch = marked(&self.agent);
        change(&mut batch);
        self.requests = vec![signed(&self.agent, 1, &batch)];
        self
    }

    fn input(self, from: &'static str, to: &'static str) -> Self {
        self.change(|request| {
            let text = request.headers()[SIGNATURE_INPUT].to_str().unwrap();
            assert!(text.contains(from), "{text}");
            let text = text.replacen(from, to, 1).parse().unwrap();
            request.headers_mut().insert(SIGNATURE_INPUT, text);
        })
    }

    fn created(mut self, offset: i64) -> Self {
        let body = marked(&self.agent).to_string();
        let spec = RequestSpec { created: now() + offset, ..RequestSpec::events(body.as_bytes(), 1) };
        self.requests = vec![sent(self.agent.sign(&spec))];
        self
    }

    fn requests(mut self, make: impl FnOnce(&Agent) -> Vec<Sent>) -> Self {
        self.requests = make(&self.agent);
        self
    }

    fn settings(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }

    fn unplaced(mut self, unplaced: PlacementError) -> Self {
        self.intake.unplaced = Some(unplaced);
        self
    }

    async fn check(self) -> Vec<String> {
        let Self { name, intake, settings, agent, requests, status, kind, reason, waits } = self;
        let mut secrets = vec![MARKER.to_owned()];
        let metrics = metrics();
        let handler = V3Handler::new(&settings, intake, metrics.clone());
        let peer = peer(&handler, &agent);
        let refused = |route| metrics.port.refused.get_or_create(&RefusalLabels { route, reason }).get();
        let mut last = None;
        for request in requests {
            let text = |field| request.headers().get(field).and_then(|value| value.to_str().ok()).map(str::to_owned);
            secrets.extend([SIGNATURE, SIGNATURE_INPUT].into_iter().filter_map(text));
            last = Some(handler.handle(request, &peer).await.0);
        }
        let (head, body) = last.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let problem: Problem = serde_json::from_slice(&body).unwrap();
        assert_eq!((head.status.as_u16(), problem.status, problem.kind()), (status, status, kind), "{name}");
        assert_eq!(refused("events") + refused("heartbeat") + refused("other"), 1, "{name}: counted as {reason}");
        assert_eq!(head.headers[header::CONTENT_TYPE], "application/problem+json", "{name}");
        let wait = head.headers.get(header::RETRY_AFTER).map(|wait| wait.to_str().unwrap().parse::<u64>().unwrap());
        assert_eq!(wait.map(|wait| (1..=300).contains(&wait)), waits.then_some(true), "{name}: {wait:?}");
        assert_eq!(head.headers.contains_key(header::DATE), kind == Kind::Clock, "{name}");
        let shown = format!("{head:?} {}", String::from_utf8(body.to_vec()).unwrap());
        assert!(secrets.iter().all(|secret| !shown.contains(secret)), "{name} echoes: {shown}");
        secrets
    }
}

fn set(name: &'static str, value: &'static str) -> impl FnOnce(&mut Request<Vec<u8>>) {
    move |request| drop(request.headers_mut().insert(HeaderName::from_static(name), value.parse().unwrap()))
}

fn add(name: &'static str, value: &'static str) -> impl FnOnce(&mut Request<Vec<u8>>) {
    move |request| assert!(request.headers_mut().append(HeaderName::from_static(name), value.parse().unwrap()))
}

fn remove(name: &'static str) -> impl FnOnce(&mut Request<Vec<u8>>) {
    move |request| drop(request.headers_mut().remove(name))
}

fn uri(text: &'static str) -> impl FnOnce(&mut Request<Vec<u8>>) {
    move |request| *request.uri_mut() = text.parse().unwrap()
}

fn identities() -> Vec<Case> {
    use ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    let case = |name, agent| Case::new(name, 403, Kind::Other, "identity").agent(agent);
    let two = [RIGHT[0], "spiffe://kyma.local/runtime/r-2"];
    let times = |name, years| {
        Case::new(name, 401, Kind::Certificate, "certificate").agent(leaf(&RIGHT, "r-1", &[ClientAuth], years))
    };
    vec![
        case("another common name", leaf(&RIGHT, "r-2", &[ClientAuth], (2020, 2090))),
        case("no clientAuth", leaf(&RIGHT, "r-1", &[ServerAuth], (2020, 2090))),
        case("no usage", leaf(&RIGHT, "r-1", &[], (2020, 2090))),
        case("two names", leaf(&two, "r-1", &[ClientAuth], (2020, 2090))),
        case("no name", leaf(&[], "r-1", &[ClientAuth], (2020, 2090))),
        case("a foreign trust domain", leaf(&["spiffe://evil/runtime/r-1"], "r-1", &[ClientAuth], (2020, 2090))),
        times("an expired certificate on an open connection", (2020, 2021)),
        times("a certificate that is not yet valid", (2089, 2090)),
    ]
}

fn heads() -> Vec<Case> {
    let case = |name, status, reason| Case::new(name, status, Kind::Other, reason);
    let get = |request: &mut Request<Vec<u8>>| *request.method_mut() = Method::GET;
    vec![
        case("no such route", 404, "route").change(uri("/v3/sesame-0123456789")),
        case("another method", 405, "method").change(get),
        case("a query", 400, "query").change(uri("/v3/events?sesame-0123456789")),
        case("a content encoding", 400, "encoding").change(set("content-encoding", "gzip")),
        case("a transfer encoding", 411, "length").change(set("transfer-encoding", "chunked")),
        case("no host", 400, "host").change(remove("host")),
        case("two hosts", 400, "host").change(add("host", AUTHORITY)),
        case("host and authority differ", 400, "host").change(uri("https://sesame-0123456789/v3/events")),
        case("another authority", 421, "authority").change(set("host", "sesame-0123456789")),
        case("another content type", 415, "content-type").change(set("content-type", "text/sesame-0123456789")),
        case("a length above the limit", 413, "too-large").change(set("content-length", "1048577")),
    ]
}

fn signatures() -> Vec<Case> {
    let profile = |name| Case::new(name, 401, Kind::Signature, "signature-profile");
    let other = good();
    let by_another = changed(&other, 1, |_| {});
    let keyid = Case::new("signed by another", 401, Kind::Signature, "signature-keyid").requests(|_| vec![by_another]);
    let tampered =
        Case::new("a tampered body", 401, Kind::Signature, "digest").change(|request| request.body_mut().push(b' '));
    let both = Case::new("a tampered body with its digest", 401, Kind::Signature, "signature").change(|request| {
        request.body_mut().push(b' ');
        let digest = signature::content_digest(request.body());
        request.headers_mut().insert(CONTENT_DIGEST, digest.parse().unwrap());
    });
    let replay = Case::new("replayed", 401, Kind::Replay, "replay")
        .requests(|agent| (0..2).map(|_| changed(agent, 7, |_| {})).collect());
    vec![
        keyid,
        tampered,
        both,
        replay,
        profile("unsigned").change(remove(SIGNATURE)),
        profile("no parameters").change(remove(SIGNATURE_INPUT)),
        profile("no digest").change(remove(CONTENT_DIGEST)),
        profile("two signatures").change(add(SIGNATURE, "tidewatch=:AA==:")),
        profile("another tag").input("tidewatch-v3", "tidewatch-v2"),
        profile("another label").input("tidewatch=", "sig1="),
        profile("two labels").input("tidewatch=", "a=(), tidewatch="),
        profile("another algorithm").input("ecdsa-p256-sha256", "ed25519"),
        profile("one component more").input("\"content-digest\"", "\"content-digest\" \"date\""),
        profile("one component less").input("\"@method\" ", ""),
        profile("one parameter more").input(";tag=", ";extra=1;tag="),
        profile("a parameter twice").input(";created=", ";created=1;created="),
        Case::new("too old", 401, Kind::Clock, "clock").created(-62),
        Case::new("from the future", 401, Kind::Clock, "clock").created(65),
    ]
}

fn bodies() -> Vec<Case> {
    let case = |name, status, reason| Case::new(name, status, Kind::Other, reason);
    let whole = |body: String| {
        move |agent: &Agent| {
            vec![sent(agent.sign(&RequestSpec { created: now(), ..RequestSpec::events(body.as_bytes(), 1) }))]
        }
    };
    let streamed = |end: Option<io::Error>| {
        move |agent: &Agent| {
            let (parts, _) = changed(agent, 1, |_| {}).into_parts();
            let first = futures::stream::iter([Ok(Frame::data(Bytes::from_static(b"[")))]);
            let body = match end {
                Some(error) => {
                    let then = futures::stream::iter([Err(error)]);
                    StreamBody::new(futures::StreamExt::chain(first, then)).boxed()
                }
                None => StreamBody::new(futures::StreamExt::chain(first, futures::stream::pending())).boxed(),
            };
            vec![Request::from_parts(parts, body)]
        }
    };
    let one = json!({"id": format!("{EPOCH}-1")});
    vec![
        case("a body above the limit", 413, "too-large").settings(|settings| settings.max_body = 10),
        case("too many events", 413, "too-many-events").batch(|batch| *batch = Value::Array(vec![one; MAX_EVENTS + 1])),
        case("not JSON", 400, "malformed").requests(whole(format!("[{MARKER}"))),
        case("no event", 400, "malformed").requests(whole("[]".to_owned())),
        case("an event without a name", 400, "malformed").requests(whole(format!("[{{\"{MARKER}\":1}}]"))),
        case("another runtime's event", 403, "source").batch(|batch| batch[0]["source"] = json!("/runtimes/r-2")),
        case("another epoch's event", 403, "source").batch(|batch| batch[0]["id"] = json!("00000000000000ff-1")),
        case("a slow body", 408, "slow")
            .settings(|settings| settings.body_deadline = Duration::from_millis(10))
            .requests(streamed(None)),
        case("a body that breaks off", 400, "broken").requests(streamed(Some(io::Error::other(MARKER)))),
    ]
}

fn limits() -> Vec<Case> {
    let case = |name, status, reason| Case::new(name, status, Kind::Other, reason);
    let many = |count: u64| move |agent: &Agent| (1..=count).map(|counter| changed(agent, counter, |_| {})).collect();
    let epochs = |agent: &Agent| {
        let body = marked(agent).to_string();
        let spec = RequestSpec { created: now(), ..RequestSpec::events(body.as_bytes(), 1) };
        (1..=17).map(|epoch| sent(agent.sign(&RequestSpec { epoch: Epoch::new(epoch), ..spec }))).collect()
    };
    vec![
        case("too fast", 429, "rate")
            .settings(|settings| (settings.limits.per_second, settings.limits.burst) = (1, 1))
            .requests(many(2)),
        case("too many at once", 429, "concurrency").settings(|settings| settings.limits.in_flight = 0),
        case("does not wait", 429, "flood")
            .settings(|settings| (settings.limits.in_flight, settings.limits.strikes) = (0, 0))
            .requests(many(2)),
        case("too many epochs", 429, "epochs").requests(epochs),
        case("no fixture for the body", 503, "busy").settings(|settings| settings.body_budget = 0),
        case("no fixture for the runtime", 503, "busy").settings(|settings| settings.limits.runtimes = 0),
        case("not synced", 503, "not-synced").unplaced(PlacementError::NotSynced),
        case("a runtime of another replica", 503, "elsewhere").unplaced(PlacementError::Elsewhere),
        case("an unknown runtime", 404, "unknown-runtime").unplaced(PlacementError::Unknown),
        case("an ambiguous runtime", 409, "ambiguous-runtime").unplaced(PlacementError::Ambiguous),
    ]
}

/// Collects all log output.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn each_refusal_has_its_status_kind_and_counter_and_echoes_no_input() {
    let log = Log::default();
    // The prefix of all crates of Tidewatch.
    let filter = EnvFilter::new("tidewatch=trace");
    // With a second dispatcher alive, `tracing` does not cache a callsite as disabled when another test's thread
    // reaches it first.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(log.clone()).finish();
    let _captures = tracing::subscriber::set_default(subscriber);
    let mut secrets = Vec::new();
    for case in [identities(), heads(), signatures(), bodies(), limits()].into_iter().flatten() {
        secrets.extend(case.check().await);
    }
    let logged = String::from_utf8(log.0.lock().clone()).unwrap();
    assert!(logged.matches("Request refused").count() > 50, "{logged}");
    for secret in secrets {
        assert!(!logged.contains(&secret), "{secret} is logged");
    }
}

#[tokio::test]
async fn lagging_receiver_sheds_some_requests_and_serves_others() {
    let agent = good();
    let settings = Settings { lag_limit: Duration::from_millis(1), ..settings() };
    let intake = RecordingIntake::default();
    let metrics = metrics();
    let handler = V3Handler::new(&settings, intake.clone(), metrics.clone());
    let peer = peer(&handler, &agent);
    for _ in 0..2 {
        handler.port.shedder.observe(Duration::from_millis(8));
    }
    for counter in 1..=200 {
        let (response, _) = handler.handle(changed(&agent, counter, |_| {}), &peer).await;
        assert!([202, 503].contains(&response.status().as_u16()));
        assert_eq!(response.status() == 503, response.headers().contains_key(header::RETRY_AFTER));
    }
    let refused = metrics.port.refused.get_or_create(&RefusalLabels { route: "events", reason: "late" }).get();
    assert!(refused > 50 && intake.count() > 10, "{refused} {}", intake.count());
}

/// Requests within the rate of a runtime, each of which costs the receiver a verification.
#[tokio::test]
async fn runtime_that_repeats_invalid_requests_is_blocked() {
    type Make = fn(&Agent, u64) -> Sent;
    let cases: [(&str, Make); 4] = [
        ("replay", |agent, _| changed(agent, 1, |_| {})),
        ("digest", |agent, counter| changed(agent, counter, set(CONTENT_DIGEST, "sha-256=:AAAA:"))),
        ("malformed", |agent, counter| signed(agent, counter, &json!({}))),
        ("method", |agent, counter| changed(agent, counter, |request| *request.method_mut() = Method::GET)),
    ];
    for (name, make) in cases {
        let agent = good();
        let mut settings = settings();
        settings.limits.strikes = 10;
        let handler = V3Handler::new(&settings, RecordingIntake::default(), metrics());
        let peer = peer(&handler, &agent);
        for counter in 1..=9 {
            assert_ne!(handler.handle(make(&agent, counter), &peer).await.0.status(), 429, "{name}: {counter}");
            let valid = handler.handle(changed(&agent, 100 + counter, |_| {}), &peer).await.0;
            assert_eq!(valid.status(), 202, "{name}: a few of them do no harm between valid ones");
        }
        let mut sent = 0;
        while handler.handle(make(&agent, 200), &peer).await.0.status() != 429 {
            sent += 1;
            assert!(sent < 20, "{name}: never blocked");
        }
        let (response, must_close) = handler.handle(changed(&agent, 300, |_| {}), &peer).await;
        assert_eq!((response.status().as_u16(), must_close), (429, true), "{name}");
    }
}
