mod renewal;

use std::{
    collections::{BTreeSet, VecDeque},
    convert::Infallible,
    net::SocketAddr,
    sync::Arc,
};

use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tidewatch_api::{identity::Instance, plan::Plan};
use tidewatch_contract::{
    certificate::Leaf,
    enrolment::{self, CERTIFICATES_PATH},
    event::{Payload, Received, parse_batch},
    heartbeat::Heartbeat,
    problem::{Kind, Problem},
    signature::{CONTENT_DIGEST, Message, Nonce, SIGNATURE, SIGNATURE_INPUT, SignedRequest, verify},
};
use tidewatch_kit::tls;
use tokio::{net::TcpListener, sync::mpsc, task::JoinHandle, time::timeout};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::{
    core::WatchId,
    identity::tests::TestCa,
    index::{ObjectState, Version},
    telemetry::Readiness,
};

/// A request as received, with verified signature.
struct ObservedRequest {
    path: String,
    nonce: Nonce,
    body: Bytes,
    created: i64,
    connection: SocketAddr,
    at: Instant,
}

impl ObservedRequest {
    fn events(&self) -> Vec<Received> {
        parse_batch(&self.body).unwrap()
    }

    fn watch_events(&self) -> usize {
        self.events().iter().filter(|event| event.as_ref().is_ok_and(|event| event.payload == Payload::Watch)).count()
    }

    fn last(&self) -> u64 {
        self.events().last().unwrap().as_ref().unwrap().id.sequence
    }
}

/// Status, headers and body of a response.
type Reply = (u16, HeaderMap, Value);

/// Responds to one request; `None` accepts events and heartbeats.
type Script = Box<dyn FnMut(&ObservedRequest) -> Option<Reply> + Send>;

struct Fixture {
    core: Core,
    credentials: Arc<Credentials>,
    seen: mpsc::UnboundedReceiver<ObservedRequest>,
    /// Makes the receiver drop its connections.
    kill: watch::Sender<()>,
    /// Closed connections.
    ended: mpsc::UnboundedReceiver<SocketAddr>,
    link: JoinHandle<()>,
    server: JoinHandle<()>,
    readiness: Readiness,
    interval: watch::Receiver<Duration>,
    canary_state: CanaryState,
    /// A completely listed watch, with nothing waiting but its `watch.changed`.
    id: WatchId,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.link.abort();
        self.server.abort();
    }
}

fn accepted(instance: u64, seen: &ObservedRequest) -> Reply {
    let instance = Instance::new(instance).to_string();
    if seen.path == HEARTBEAT_PATH {
        let body = json!({"instance": instance, "settled": {}, "heartbeatSeconds": 7, "serverTime": ""});
        return (200, HeaderMap::new(), body);
    }
    let body = json!({"instance": instance, "accepted": seen.last(), "since": 1, "settled": {}, "refused": [], "heartbeatSeconds": 7});
    (202, HeaderMap::new(), body)
}

fn problem(kind: Kind, status: u16, headers: &[(header::HeaderName, &'static str)]) -> Reply {
    let headers = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect();
    (status, headers, serde_json::to_value(Problem::new(kind, "title", status, "detail")).unwrap())
}

/// Status of a request that gets no response.
const NEVER: u16 = 0;

fn never() -> Reply {
    (NEVER, HeaderMap::new(), Value::Null)
}

async fn start(alpn: &[&[u8]], script: Script) -> Fixture {
    let ca = TestCa::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (credentials, leaf) = ca.credentials("r-1", address);
    let (chain, key) = ca.server();
    let roots = tls::roots(&tls::certificates(ca.pem().as_bytes()).unwrap()).unwrap();
    let mut config = tls::server(&tls::Identity::from_pem(&chain, &key).unwrap(), roots).unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let ((publish, seen), (end, ended)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
    let (kill, killed) = watch::channel(());
    let receiver = Arc::new(Receiver {
        authority: address.to_string(),
        leaf,
        script: Mutex::new(script),
        publish,
        end,
        kill: killed,
    });
    let server = tokio::spawn(serve(listener, TlsAcceptor::from(Arc::new(config)), receiver));

    let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
    let plan = json!({"revision": "1", "watches": [{"name": "w", "group": "g", "version": "v1", "resource": "things",
                      "field": "spec", "manager": "m", "work": ["kyma"]}]});
    let id = core.follow(&Plan::parse(&plan.to_string()).unwrap()).started[0].id;
    core.list_begun(id);
    core.list_complete(id, Instant::now());
    let interval = watch::Sender::new(Duration::from_secs(30));
    let readiness = Readiness::default();
    let subscribed = interval.subscribe();
    let canary_state = CanaryState::default();
    let parts = LinkParts {
        dial: Dialer::tcp(),
        core: core.clone(),
        credentials: watch::channel(Some(credentials.clone())).1,
        enroller: None,
        canary_state: canary_state.clone(),
        interval,
        pending: readiness.pending("receiver"),
        metrics: Metrics::default(),
    };
    let link = tokio::spawn(Link::new(parts).run(CancellationToken::new()));
    Fixture { core, credentials, seen, kill, ended, link, server, readiness, interval: subscribed, canary_state, id }
}

/// The receiver of a test.
struct Receiver {
    authority: String,
    leaf: Leaf,
    script: Mutex<Script>,
    publish: mpsc::UnboundedSender<ObservedRequest>,
    end: mpsc::UnboundedSender<SocketAddr>,
    kill: watch::Receiver<()>,
}

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, receiver: Arc<Receiver>) {
    loop {
        let (stream, connection) = listener.accept().await.unwrap();
        let acceptor = acceptor.clone();
        let receiver = receiver.clone();
        tokio::spawn(async move {
            let stream = acceptor.accept(stream).await.unwrap();
            let service = service_fn(|request| response(request, connection, receiver.clone()));
            let mut kill = receiver.kill.clone();
            kill.mark_unchanged();
            let serving = auto::Builder::new(TokioExecutor::new());
            tokio::select! {
                _ = serving.serve_connection(TokioIo::new(stream), service) => {}
                Ok(()) = kill.changed() => {}
            }
            let _ = receiver.end.send(connection);
        });
    }
}

async fn response(
    request: Request<Incoming>,
    connection: SocketAddr,
    receiver: Arc<Receiver>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let header = |name: &str| head.headers[name].to_str().unwrap();
    let path = head.uri.path();
    let authority = receiver.authority.as_str();
    let host = head.uri.authority().map_or_else(|| header("host").to_owned(), ToString::to_string);
    assert_eq!(host, authority);
    let message = Message { method: head.method.as_str(), authority, path, content_type: header("content-type") };
    let content_digest = header(CONTENT_DIGEST);
    let signature_input = header(SIGNATURE_INPUT);
    let signature = header(SIGNATURE);
    let signed = SignedRequest { message, content_digest, signature_input, signature, body: &body };
    // The verifier uses the signer's time; tests of the window are elsewhere.
    let created = signature_input.split("created=").nth(1).unwrap().split(';').next().unwrap().parse().unwrap();
    let verified = verify(&signed, &receiver.leaf, created).unwrap();
    let at = Instant::now();
    let request =
        ObservedRequest { path: path.to_owned(), nonce: verified.nonce, body: body.clone(), created, connection, at };
    let reply = (receiver.script.lock())(&request);
    let (status, headers, body) = reply.unwrap_or_else(|| accepted(1, &request));
    let _ = receiver.publish.send(request);
    if status == NEVER {
        std::future::pending::<()>().await;
    }
    let mut response = Response::new(Full::from(body.to_string()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response.headers_mut().extend(headers);
    Ok(response)
}

impl Fixture {
    /// Sends a renewal, as the enroller does.
    fn renew(&self) -> impl Future<Output = Result<BufferedResponse, RequestError>> + use<> {
        let client = Client::new(&Dialer::tcp(), self.credentials.clone());
        let request = PostRequest {
            path: CERTIFICATES_PATH,
            content_type: enrolment::CONTENT_TYPE,
            body: "a request".into(),
            nonce: self.core.nonce(),
        };
        async move { client.post(&Metrics::default(), Route::Renewal, request).await }
    }

    /// The next request to a path.
    async fn next(&mut self, path: &str) -> ObservedRequest {
        loop {
            let seen = self.seen.recv().await.unwrap();
            if seen.path == path {
                return seen;
            }
        }
    }

    fn change(&self, name: &str) {
        self.change_to(name, 1);
    }

    fn change_to(&self, name: &str, version: u64) {
        let seen = ObjectState { uid: "u".into(), version: Version::Number(version), generation: None, metadata: 0 };
        self.core.present(self.id, &format!("ns/{name}"), seen, Instant::now());
    }
}

/// Responds to event batches with these replies first.
fn events(replies: Vec<Reply>) -> Script {
    let mut replies = VecDeque::from(replies);
    Box::new(move |seen| if seen.path == EVENTS_PATH { replies.pop_front() } else { None })
}

/// More requests than a link with backoff sends.
const MANY: usize = 40;

/// In the receiver's order of preference, which decides.
const BOTH: &[&[u8]] = &[b"http/1.1", b"h2"];

#[tokio::test]
async fn events_and_heartbeats_share_one_connection_without_batch_delay() {
    for alpn in [BOTH, &BOTH[1..]] {
        let mut fixture = start(alpn, events(Vec::new())).await;
        let heartbeat = fixture.next(HEARTBEAT_PATH).await;
        let first = fixture.next(EVENTS_PATH).await;
        assert_eq!((first.events().len(), first.watch_events()), (1, 1));
        fixture.change("a");
        let second = fixture.next(EVENTS_PATH).await;
        assert_eq!((second.events().len(), second.last()), (1, 2));
        assert_eq!(heartbeat.connection, second.connection);
        assert!(heartbeat.nonce.counter < first.nonce.counter && first.nonce.counter < second.nonce.counter);
        assert!(fixture.readiness.missing().is_empty());
        assert_eq!(*fixture.interval.borrow(), Duration::from_secs(7));
    }
}

#[test]
fn heartbeats_have_jitter_and_leave_at_steps_of_the_wall_clock() {
    let interval = Duration::from_secs(30);
    let now = Duration::from_nanos(1_764_259_200_123_456_789);
    let pauses: Vec<_> = (0..200).map(|_| pause_after(interval, now)).collect();
    for pause in &pauses {
        assert!((27_000..33_250).contains(&pause.as_millis()), "{pause:?}");
        assert_eq!((now + *pause).as_nanos() % 250_000_000, 0, "{pause:?}");
    }
    let first = pauses.iter().min().unwrap();
    let last = pauses.iter().max().unwrap();
    // All 200 within half of the range have a probability below 2^-190.
    assert!(*last - *first > interval / 10, "{first:?} to {last:?}");
}

/// Accepts every request and sets the heartbeat interval to an hour.
fn hourly() -> Script {
    Box::new(|seen| {
        let (status, headers, mut body) = accepted(1, seen);
        body["heartbeatSeconds"] = json!(3_600);
        Some((status, headers, body))
    })
}

#[tokio::test]
async fn changed_evidence_causes_a_heartbeat_before_the_next_regular_one() {
    let mut fixture = start(BOTH, hourly()).await;
    let heartbeat = |seen: &ObservedRequest| Heartbeat::parse(&seen.body).unwrap();
    let first = fixture.next(HEARTBEAT_PATH).await;
    assert_eq!(heartbeat(&first).canary, None);
    fixture.canary_state.come_back(Instant::now());
    let second = timeout(Duration::from_secs(60), fixture.next(HEARTBEAT_PATH)).await.expect("the canary came back");
    assert!(heartbeat(&second).canary.is_some() && second.at - first.at >= Duration::from_secs(1));
    fixture.core.set_error(fixture.id, Some("403".to_owned()));
    let third = timeout(Duration::from_secs(60), fixture.next(HEARTBEAT_PATH)).await.expect("the watch failed");
    assert_eq!(heartbeat(&third).watches[0].error.as_deref(), Some("403"));
    fixture.core.set_error(fixture.id, None);
    let fourth = timeout(Duration::from_secs(60), fixture.next(HEARTBEAT_PATH)).await.expect("the watch recovered");
    assert_eq!(heartbeat(&fourth).watches[0].error, None);
}

#[tokio::test]
async fn lost_connection_is_replaced_before_the_next_regular_heartbeat() {
    for alpn in [BOTH, &BOTH[1..]] {
        let mut fixture = start(alpn, hourly()).await;
        let first = fixture.next(HEARTBEAT_PATH).await;
        let events = fixture.next(EVENTS_PATH).await;
        assert_eq!(first.connection, events.connection);
        fixture.kill.send_replace(());
        assert_eq!(fixture.ended.recv().await, Some(first.connection));
        let second =
            timeout(Duration::from_secs(60), fixture.next(HEARTBEAT_PATH)).await.expect("the connection was lost");
        assert_ne!(second.connection, first.connection);
    }
}

#[tokio::test]
async fn retry_after_is_respected_and_changes_are_coalesced() {
    let limited = problem(Kind::Other, 429, &[(header::RETRY_AFTER, "1")]);
    let mut fixture = start(BOTH, events(vec![limited])).await;
    let first = fixture.next(EVENTS_PATH).await;
    for _ in 0..3 {
        fixture.change("a");
    }
    let second = fixture.next(EVENTS_PATH).await;
    assert!(second.at - first.at >= Duration::from_secs(1));
    assert_eq!(first.body, second.body);
    assert_ne!(first.nonce, second.nonce);
    assert_eq!(fixture.next(EVENTS_PATH).await.events().len(), 1);
}

#[tokio::test]
async fn wrong_clock_is_corrected_from_the_response() {
    let wrong = problem(Kind::Clock, 401, &[(header::DATE, "Tue, 01 Jan 2999 00:00:00 GMT")]);
    let mut fixture = start(BOTH, events(vec![wrong])).await;
    let first = fixture.next(EVENTS_PATH).await;
    let second = fixture.next(EVENTS_PATH).await;
    assert_eq!(first.body, second.body);
    let expected = 32_472_144_000;
    assert!((expected..expected + 60).contains(&second.created), "{}", second.created);
}

#[tokio::test]
async fn unsettled_events_are_resent_to_another_instance_in_a_new_epoch() {
    let mut requests = 0;
    let script: Script = Box::new(move |seen| {
        requests += usize::from(seen.path == EVENTS_PATH);
        Some(accepted(if requests < 2 { 1 } else { 2 }, seen))
    });
    let mut fixture = start(BOTH, script).await;
    let first = fixture.next(EVENTS_PATH).await;
    fixture.change("a");
    let second = fixture.next(EVENTS_PATH).await;
    assert_eq!(second.nonce.epoch, first.nonce.epoch);
    let third = fixture.next(EVENTS_PATH).await;
    assert_ne!(third.nonce.epoch, first.nonce.epoch);
    assert_eq!((third.events().len(), third.watch_events(), third.last()), (2, 1, 2));
}

#[tokio::test]
async fn oversized_batch_is_split() {
    let script: Script = Box::new(|seen| {
        let too_large = seen.path == EVENTS_PATH && seen.events().len() > 2;
        too_large.then(|| problem(Kind::Other, 413, &[]))
    });
    let mut fixture = start(BOTH, script).await;
    for n in 0..7 {
        fixture.change(&n.to_string());
    }
    let mut last = 0;
    while last < 8 {
        let seen = fixture.next(EVENTS_PATH).await;
        if seen.events().len() <= 2 {
            last = seen.last();
        }
    }
}

#[tokio::test]
async fn announced_limit_applies_to_later_batches() {
    let script: Script = Box::new(|seen| {
        let too_large = seen.path == EVENTS_PATH && seen.body.len() > 1_500;
        too_large.then(|| (413, HeaderMap::new(), json!({"status": 413, "maxBytes": 1_500})))
    });
    let mut fixture = start(BOTH, script).await;
    let mut refused = 0;
    for round in 0..3 {
        for n in 0..20 {
            fixture.change(&format!("{round} {n}"));
        }
        let mut last = 0;
        while last < (round + 1) * 20 {
            let seen = fixture.next(EVENTS_PATH).await;
            refused += u32::from(seen.body.len() > 1_500);
            if seen.body.len() <= 1_500 {
                last = seen.last();
            }
        }
    }
    assert_eq!(refused, 1);
}

#[tokio::test]
async fn clock_changed_after_a_correction_is_corrected_again() {
    let wrong = |date| problem(Kind::Clock, 401, &[(header::DATE, date)]);
    let replies = vec![wrong("Tue, 01 Jan 2999 00:00:00 GMT"), wrong("Tue, 01 Jan 2030 00:00:00 GMT")];
    let mut fixture = start(BOTH, events(replies)).await;
    for _ in 0..2 {
        fixture.next(EVENTS_PATH).await;
    }
    let expected = 1_893_456_000;
    let third = fixture.next(EVENTS_PATH).await;
    assert!((expected..expected + 60).contains(&third.created), "{}", third.created);
}

#[tokio::test]
async fn event_refused_alone_is_parked_and_the_next_one_is_sent() {
    let refuse_all: Script = Box::new(|seen| {
        let events =
            seen.path == EVENTS_PATH && seen.events().iter().flatten().all(|event| event.payload == Payload::Watch);
        events.then(|| problem(Kind::Other, 400, &[]))
    });
    let mut fixture = start(BOTH, refuse_all).await;
    let first = fixture.next(EVENTS_PATH).await;
    assert_eq!((first.events().len(), first.watch_events()), (1, 1));
    fixture.change("a");
    let seen = fixture.next(EVENTS_PATH).await;
    assert_eq!((seen.events().len(), seen.watch_events()), (1, 0));
    assert_eq!(fixture.core.plain_heartbeat().parked, 1);
}

#[tokio::test]
async fn general_refusal_by_a_proxy_loses_no_change() {
    // The `watch.changed` is accepted. Then another instance answers, which rejects every event, until the change is
    // parked.
    let mut requests = 0;
    let script: Script = Box::new(move |seen| {
        requests += usize::from(seen.path == EVENTS_PATH);
        (seen.path == EVENTS_PATH && (2..4).contains(&requests)).then(|| (400, HeaderMap::new(), Value::Null))
    });
    let mut fixture = start(BOTH, script).await;
    fixture.next(EVENTS_PATH).await;
    fixture.change("a");
    for watch_events in [0, 1] {
        assert_eq!(fixture.next(EVENTS_PATH).await.watch_events(), watch_events);
    }
    while fixture.core.figures().parked == 0 {
        tokio::task::yield_now().await;
    }
    // A new epoch sends accepted and unsettled events again.
    assert_eq!(fixture.next(EVENTS_PATH).await.watch_events(), 1);
    fixture.change_to("a", 2);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(300)).await;
    tokio::time::resume();
    let again = timeout(Duration::from_secs(30), fixture.next(EVENTS_PATH)).await.expect("it is tried again");
    let Ok(event) = again.events().remove(0) else { panic!("well-formed") };
    assert!(matches!(&event.payload, Payload::Object(object) if object.resource_version == "2"), "{event:?}");
    while fixture.core.figures().parked > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn refused_nonce_starts_a_new_epoch_once() {
    let mut fixture = start(BOTH, events(vec![problem(Kind::Replay, 401, &[])])).await;
    let first = fixture.next(EVENTS_PATH).await;
    let second = fixture.next(EVENTS_PATH).await;
    assert_ne!(first.nonce.epoch, second.nonce.epoch);
    assert_eq!(second.watch_events(), 1);
}

#[tokio::test]
async fn repeated_refusals_cause_one_epoch_and_backoff() {
    let date = [(header::DATE, "Tue, 01 Jan 2999 00:00:00 GMT")];
    for (kind, headers) in [(Kind::Replay, &[][..]), (Kind::Signature, &[]), (Kind::Clock, &date)] {
        let headers = headers.to_vec();
        let mut fixture = start(BOTH, Box::new(move |_| Some(problem(kind, 401, &headers)))).await;
        let mut epochs = BTreeSet::new();
        let expected = if kind == Kind::Clock { 1 } else { 2 };
        let begun = async {
            while epochs.len() < expected {
                epochs.insert(fixture.seen.recv().await.unwrap().nonce.epoch.to_string());
            }
        };
        timeout(Duration::from_secs(60), begun).await.expect("each of its epochs");
        let spinning = async {
            for _ in 0..MANY {
                epochs.insert(fixture.seen.recv().await.unwrap().nonce.epoch.to_string());
            }
        };
        // Delays of up to 0.2, 0.4, 0.8 seconds and so on allow a handful of requests per route.
        assert!(timeout(Duration::from_secs(1), spinning).await.is_err(), "{kind:?}: {MANY} requests");
        assert_eq!(epochs.len(), expected, "{kind:?}");
    }
}

#[tokio::test]
async fn renewal_delays_no_event_and_closes_its_connection() {
    for alpn in [BOTH, &BOTH[1..]] {
        let mut issued = 0;
        let script: Script = Box::new(move |seen| match seen.path.as_str() {
            CERTIFICATES_PATH => {
                issued += 1;
                Some(if issued == 1 { never() } else { problem(Kind::Other, 503, &[]) })
            }
            HEARTBEAT_PATH => {
                let (status, headers, mut body) = accepted(1, seen);
                body["heartbeatSeconds"] = json!(1);
                Some((status, headers, body))
            }
            _ => None,
        });
        let mut fixture = start(alpn, script).await;
        let first = fixture.next(EVENTS_PATH).await;
        let hangs = tokio::spawn(fixture.renew());
        let renewal = fixture.next(CERTIFICATES_PATH).await;
        fixture.change("a");
        let event = fixture.next(EVENTS_PATH).await;
        let heartbeat = fixture.next(HEARTBEAT_PATH).await;
        assert!(!hangs.is_finished(), "they came after it");
        assert_eq!((event.connection, heartbeat.connection), (first.connection, first.connection));

        // A cancelled renewal may be followed by another.
        hangs.abort();
        assert!(fixture.renew().await.is_ok());
        let reconnected = fixture.next(CERTIFICATES_PATH).await;
        assert_ne!(reconnected.connection, renewal.connection);
        let ended = [fixture.ended.recv().await.unwrap(), fixture.ended.recv().await.unwrap()];
        assert!(ended.contains(&renewal.connection) && ended.contains(&reconnected.connection));
        fixture.change("b");
        assert_eq!(fixture.next(EVENTS_PATH).await.connection, first.connection);
    }
}

#[tokio::test]
async fn unreachable_receiver_is_retried() {
    let mut fixture =
        start(BOTH, events(vec![problem(Kind::Other, 500, &[]), problem(Kind::Certificate, 401, &[])])).await;
    for _ in 0..2 {
        fixture.next(EVENTS_PATH).await;
    }
    assert_eq!(fixture.next(EVENTS_PATH).await.watch_events(), 1);
}
