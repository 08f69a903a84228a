use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body_util::{BodyExt, Full};
use hyper::{
    body::{Bytes, Incoming},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use parking_lot::Mutex;
use serde_json::json;
use tidewatch_api::plan::Plan;
use tidewatch_kit::tls;
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinHandle,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::{
    canary::CanaryState,
    connection::ExchangeError,
    core::WatchId,
    identity::{Credentials, tests::TestCa},
    index::{ObjectState, Version},
    telemetry::Readiness,
};

/// A request as lifecycle-manager's listener receives it.
struct ObservedRequest {
    path: String,
    headers: HeaderMap,
    body: Bytes,
    at: Instant,
    reply: Reply,
}

struct Harness {
    core: Core,
    seen: mpsc::UnboundedReceiver<ObservedRequest>,
    tasks: Vec<JoinHandle<()>>,
    readiness: Readiness,
    /// One watch per manager.
    ids: BTreeMap<&'static str, WatchId>,
}

impl Drop for Harness {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Harness {
    async fn next(&mut self) -> ObservedRequest {
        timeout(EVENT_TIMEOUT, self.seen.recv()).await.expect("a request").unwrap()
    }

    async fn name(&mut self) -> String {
        self.next().await.name()
    }

    fn change(&self, name: &str, version: u64) {
        self.change_for(OURS, name, version);
    }

    fn change_for(&self, manager: &str, name: &str, version: u64) {
        self.core.present(self.ids[manager], &format!("ns/{name}"), seen(version), Instant::now());
    }
}

impl ObservedRequest {
    fn name(&self) -> String {
        v2::Event::parse(&self.body).unwrap().name
    }

    fn manager(&self) -> &str {
        v2::manager_of(&self.path).unwrap()
    }
}

fn seen(version: u64) -> ObjectState {
    ObjectState { uid: "u".into(), version: Version::Number(version), generation: None, metadata: 0 }
}

/// Status and `Retry-After` of a response; `None` for no response.
type Reply = Option<(u16, Option<&'static str>)>;

/// Responses by manager.
type Script = Arc<Mutex<dyn FnMut(&str) -> Reply + Send>>;

const TAKEN: Reply = Some((200, None));

/// Responds with these statuses first, then with 200.
async fn start(alpn: &[&[u8]], objects: &[&str], replies: &[(u16, Option<&'static str>)]) -> Harness {
    let mut replies: VecDeque<_> = replies.iter().copied().collect();
    start_for(alpn, &[(OURS, objects)], move |_| replies.pop_front().or(TAKEN)).await
}

/// Starts a link for the objects of each manager.
async fn start_for(
    alpn: &[&[u8]],
    managers: &[(&'static str, &[&str])],
    script: impl FnMut(&str) -> Reply + Send + 'static,
) -> Harness {
    let ca = TestCa::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (chain, key) = ca.server();
    let roots = tls::roots(&tls::certificates(ca.pem().as_bytes()).unwrap()).unwrap();
    let mut config = tls::server(&tls::Identity::from_pem(&chain, &key).unwrap(), roots).unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let (publish, seen) = mpsc::unbounded_channel();
    let server =
        tokio::spawn(serve(listener, TlsAcceptor::from(Arc::new(config)), Arc::new(Mutex::new(script)), publish));

    let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
    let ids = follow(&core, managers);
    let readiness = Readiness::default();
    // The server verifies the client certificate, as lifecycle-manager's listener does.
    let material = ca.legacy("r-1");
    let receiver = format!("https://{address}").parse().unwrap();
    let parts = LinkParts {
        dial: Dialer::tcp(),
        core: core.clone(),
        credentials: watch::channel(Some(Arc::new(Credentials::v2(receiver)(&material, 1_800_000_000).ok().unwrap())))
            .1,
        canary_state: CanaryState::default(),
        interval: watch::Sender::new(Duration::from_secs(30)),
        pending: readiness.pending("receiver"),
        metrics: Metrics::default(),
    };
    let sender = tokio::spawn(V2Sender::new(parts).run(CancellationToken::new()));
    Harness { core, seen, tasks: vec![server, sender], readiness, ids }
}

/// A plan with one watch per manager.
fn plan<'a>(managers: impl IntoIterator<Item = &'a str>) -> Plan {
    let watch = |manager: &str| {
        json!({"name": manager, "group": "g", "version": "v1", "resource": "things", "field": "spec",
               "manager": manager, "work": ["kyma"]})
    };
    let watches: Vec<_> = managers.into_iter().map(watch).collect();
    Plan::parse(&json!({"revision": "1", "watches": watches}).to_string()).unwrap()
}

/// Follows one watch per manager, with these objects.
fn follow(core: &Core, managers: &[(&'static str, &[&str])]) -> BTreeMap<&'static str, WatchId> {
    let started = core.follow(&plan(managers.iter().map(|(manager, _)| *manager))).started;
    let id = |manager: &str| started.iter().find(|started| started.planned.manager == manager).unwrap().id;
    let ids: BTreeMap<_, _> = managers.iter().map(|(manager, _)| (*manager, id(manager))).collect();
    for (manager, objects) in managers {
        let id = ids[manager];
        let objects = objects.iter().map(|name| (format!("ns/{name}").into(), seen(1)));
        core.described(id, "v1", "Thing", false);
        core.list_begun(id);
        core.listed(id, objects.collect(), Instant::now());
        core.list_complete(id, Instant::now());
    }
    ids
}

async fn serve(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    script: Script,
    publish: mpsc::UnboundedSender<ObservedRequest>,
) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let acceptor = acceptor.clone();
        let script = script.clone();
        let publish = publish.clone();
        tokio::spawn(async move {
            let stream = acceptor.accept(stream).await.unwrap();
            let service = service_fn(move |request| response(request, script.clone(), publish.clone()));
            let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn response(
    request: Request<Incoming>,
    script: Script,
    publish: mpsc::UnboundedSender<ObservedRequest>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    assert_eq!(head.method, http::Method::POST);
    let path = head.uri.path().to_owned();
    let reply = (script.lock())(v2::manager_of(&path).unwrap());
    let _ = publish.send(ObservedRequest { path, headers: head.headers, body, at: Instant::now(), reply });
    let Some((status, wait)) = reply else { return std::future::pending().await };
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    if let Some(wait) = wait {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(wait));
    }
    Ok(response)
}

const BOTH: &[&[u8]] = &[b"h2", b"http/1.1"];
/// Timeout for an expected event; only a failing test reaches it.
const EVENT_TIMEOUT: Duration = Duration::from_secs(30);
const OURS: &str = "lifecycle-manager";
const OTHER: &str = "other";

#[tokio::test]
async fn each_object_is_one_unsigned_request_in_lifecycle_managers_form() {
    for alpn in [BOTH, &BOTH[1..]] {
        let mut harness = start(alpn, &["a", "b"], &[]).await;
        assert!(harness.readiness.missing().is_empty(), "a quiet runtime must become ready");
        let first = harness.next().await;
        assert_eq!(first.path, "/v2/lifecycle-manager/event");
        assert_eq!(first.headers[header::CONTENT_TYPE], "application/json");
        assert!(!first.headers.contains_key("signature") && !first.headers.contains_key("signature-input"));
        let body =
            br#"{"watched":{"Namespace":"ns","Name":"a"},"watchedGvk":{"group":"g","version":"v1","kind":"Thing"}}"#;
        assert_eq!(&first.body[..], &body[..]);
        assert_eq!(harness.name().await, "b");
        // An accepted event is removed, so the next one is the next change.
        harness.change("a", 2);
        assert_eq!(harness.name().await, "a");
    }
}

#[tokio::test]
async fn failed_or_limited_event_is_retried_until_accepted() {
    let replies = [(500, None), (503, None), (429, Some("1")), (408, None), (500, None), (502, None)];
    let mut harness = start(BOTH, &["a"], &replies).await;
    let mut times = Vec::new();
    for _ in 0..=replies.len() {
        let request = harness.next().await;
        assert_eq!(v2::Event::parse(&request.body).unwrap().name, "a");
        times.push(request.at);
    }
    assert!(times[3] - times[2] >= Duration::from_secs(1), "Retry-After is respected");
    harness.change("b", 1);
    assert_eq!(harness.name().await, "b");
    assert_eq!(harness.core.figures().parked, 0);
}

#[tokio::test]
async fn refused_event_delays_no_other() {
    let mut harness = start_for(BOTH, &[(OURS, &["b", "c"]), (OTHER, &["a"])], |manager| match manager {
        OTHER => Some((400, None)),
        _ => TAKEN,
    })
    .await;
    let mut names = Vec::new();
    while names.len() < 7 {
        names.push(harness.name().await);
    }
    names.sort();
    assert_eq!(names, ["a", "a", "a", "a", "a", "b", "c"], "each of the others once");
    harness.change_for(OTHER, "d", 1);
    assert_eq!(harness.name().await, "d", "what is parked is not tried now");
    assert_eq!(harness.core.figures().parked, 1);
}

/// The other manager's next request; until then the first manager gets every change.
async fn next_of_other(harness: &mut Harness, version: &mut u64) -> ObservedRequest {
    loop {
        let request = harness.next().await;
        if request.manager() == OTHER {
            return request;
        }
        *version += 1;
        harness.change(&request.name(), *version);
    }
}

#[tokio::test]
async fn failing_manager_delays_no_other_and_recovers() {
    for wait in [None, Some("2")] {
        let well = Arc::new(AtomicBool::new(false));
        let is_well = well.clone();
        let managers: &[(_, &[&str])] = &[(OTHER, &["x", "y"]), (OURS, &["a"])];
        let mut harness = start_for(BOTH, managers, move |manager| match manager {
            OTHER if !is_well.load(Ordering::Relaxed) => Some((503, wait)),
            _ => TAKEN,
        })
        .await;
        let mut version = 1;
        let first = next_of_other(&mut harness, &mut version).await;
        // It keeps failing while the first manager gets all changes.
        let before = version;
        while version < before + 10 {
            let request = harness.next().await;
            if request.manager() == OURS {
                version += 1;
                harness.change("a", version);
            }
        }
        well.store(true, Ordering::Relaxed);
        let mut names = BTreeSet::new();
        while names.len() < 2 {
            let request = next_of_other(&mut harness, &mut version).await;
            if wait.is_some() {
                assert!(request.at - first.at >= Duration::from_secs(2), "Retry-After is respected");
            }
            if request.reply == TAKEN {
                assert!(names.insert(request.name()), "no event is sent twice");
            }
        }
        assert!(names.iter().eq(["x", "y"]), "{names:?}");
    }
}

#[tokio::test]
async fn hanging_manager_delays_no_other() {
    for alpn in [BOTH, &BOTH[1..]] {
        let managers: &[(_, &[&str])] = &[(OTHER, &["x", "y"]), (OURS, &["a"])];
        let mut harness = start_for(alpn, managers, |manager| if manager == OTHER { None } else { TAKEN }).await;
        let first = BTreeSet::from([harness.name().await, harness.name().await]);
        assert_eq!(first, BTreeSet::from(["a", "x"].map(str::to_owned)));
        for version in 2..5 {
            harness.change("a", version);
            assert_eq!(harness.name().await, "a");
        }
    }
}

/// A sender that is not running.
fn idle(managers: &[(&'static str, &[&str])]) -> V2Sender {
    let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
    follow(&core, managers);
    V2Sender::new(LinkParts {
        dial: Dialer::tcp(),
        core,
        credentials: watch::channel(None).1,
        canary_state: CanaryState::default(),
        interval: watch::Sender::new(Duration::from_secs(30)),
        pending: Readiness::default().pending("receiver"),
        metrics: Metrics::default(),
    })
}

#[tokio::test(start_paused = true)]
async fn connect_failures_share_one_backoff_and_a_single_probe() {
    let connect_failed = || Err(RequestError::Send(ExchangeError::Connect("nobody listens".into())));
    let mut sender = idle(&[(OURS, &["a", "b"]), (OTHER, &["x"])]);
    let begin = |sender: &mut V2Sender| sender.core.single(Instant::now(), &|_, due| due).unwrap().manager;
    // Until a delay above zero milliseconds is drawn.
    let (due, now) = loop {
        for manager in [begin(&mut sender), begin(&mut sender)] {
            sender.react(CompletedRequest { manager, response: connect_failed() });
        }
        let now = Instant::now();
        if let Some(due) = sender.due(now, 0).filter(|due| *due > now) {
            break (due, now);
        }
    };
    sender.react(CompletedRequest { manager: OURS.to_owned(), response: connect_failed() });
    assert_eq!(sender.due(now, 0), Some(due), "those who failed together are one failure");
    assert_eq!((sender.due(due, 0), sender.due(due, 1)), (Some(due), None), "one at a time");
    assert_eq!(sender.managers.len(), 0, "it was none of theirs");
    let manager = begin(&mut sender);
    sender.react(CompletedRequest { manager, response: Err(RequestError::Deadline) });
    assert_eq!(
        (sender.due(now, 1), sender.managers.len()),
        (Some(now), 1),
        "there is somebody: that manager alone waits"
    );
}

#[test]
fn retry_timers_are_bounded_by_the_managers_of_the_plan() {
    let mut sender = idle(&[(OURS, &["a"]), (OTHER, &["x"])]);
    for manager in [OURS, OTHER] {
        sender.failed(manager.to_owned(), Instant::now(), None);
    }
    assert_eq!(sender.managers.len(), 2);
    sender.core.follow(&plan([OURS]));
    sender.failed(OURS.to_owned(), Instant::now(), None);
    assert_eq!(sender.managers.len(), 1);
}

#[test]
fn only_transient_failures_are_retried_forever() {
    for (status, expected) in [
        (200, Disposition::Accepted),
        (202, Disposition::Accepted),
        (400, Disposition::Rejected),
        (401, Disposition::Rejected),
        (404, Disposition::Rejected),
        (413, Disposition::Rejected),
        (408, Disposition::Retry),
        (429, Disposition::Retry),
        (302, Disposition::Retry),
        (500, Disposition::Retry),
        (503, Disposition::Retry),
    ] {
        assert_eq!(disposition(StatusCode::from_u16(status).unwrap()), expected, "{status}");
    }
}
