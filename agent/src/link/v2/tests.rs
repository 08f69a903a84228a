use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    convert::Infallible,
    sync::{
        Arc, Mutex,
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
use serde_json::json;
use tidewatch_shared::{plan::Plan, tls};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinHandle,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::{
    canary::Sightings,
    connection::Speak,
    core::WatchId,
    identity::{Credentials, tests::TestCa},
    index::{Seen, Version},
    telemetry::Readiness,
};

/// A request as the incumbent's listener sees it.
struct Arrived {
    path: String,
    headers: HeaderMap,
    body: Bytes,
    at: Instant,
    reply: Reply,
}

struct Bench {
    core: Core,
    seen: mpsc::UnboundedReceiver<Arrived>,
    tasks: Vec<JoinHandle<()>>,
    readiness: Readiness,
    /// One watch for each manager.
    ids: BTreeMap<&'static str, WatchId>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Bench {
    async fn next(&mut self) -> Arrived {
        timeout(PATIENCE, self.seen.recv()).await.expect("a request").unwrap()
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

impl Arrived {
    fn name(&self) -> String {
        v2::Event::parse(&self.body).unwrap().name
    }

    fn manager(&self) -> &str {
        v2::manager_of(&self.path).unwrap()
    }
}

fn seen(version: u64) -> Seen {
    Seen { uid: "u".into(), version: Version::Number(version), generation: None, metadata: 0 }
}

/// A status, and what `Retry-After` says. `None` is no answer at all.
type Reply = Option<(u16, Option<&'static str>)>;

/// How the events of a manager are answered.
type Script = Arc<Mutex<dyn FnMut(&str) -> Reply + Send>>;

const TAKEN: Reply = Some((200, None));

/// Answers with these statuses first, then with 200.
async fn start(alpn: &[&[u8]], objects: &[&str], replies: &[(u16, Option<&'static str>)]) -> Bench {
    let mut replies: VecDeque<_> = replies.iter().copied().collect();
    start_for(alpn, &[(OURS, objects)], move |_| replies.pop_front().or(TAKEN)).await
}

/// With the objects of each manager.
async fn start_for(
    alpn: &[&[u8]],
    managers: &[(&'static str, &[&str])],
    script: impl FnMut(&str) -> Reply + Send + 'static,
) -> Bench {
    let ca = TestCa::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (chain, key) = ca.server();
    let roots = tls::roots(&tls::certificates(ca.pem().as_bytes()).unwrap()).unwrap();
    let mut config = tls::server(&tls::Identity::from_pem(&chain, &key).unwrap(), roots).unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let (tell, seen) = mpsc::unbounded_channel();
    let server = tokio::spawn(serve(listener, TlsAcceptor::from(Arc::new(config)), Arc::new(Mutex::new(script)), tell));

    let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
    let ids = follow(&core, managers);
    let readiness = Readiness::default();
    // Its client certificate is verified by the server, as the incumbent's listener would have it verified.
    let material = ca.legacy("r-1");
    let receiver = format!("https://{address}").parse().unwrap();
    let parts = Parts {
        dial: Dial::tcp(),
        core: core.clone(),
        credentials: watch::channel(Some(Arc::new(Credentials::v2(receiver)(&material, 1_800_000_000).ok().unwrap())))
            .1,
        sightings: Sightings::default(),
        interval: watch::Sender::new(Duration::from_secs(30)),
        pending: readiness.guard("receiver"),
        metrics: Metrics::default(),
    };
    let poster = tokio::spawn(Poster::new(parts).run(CancellationToken::new()));
    Bench { core, seen, tasks: vec![server, poster], readiness, ids }
}

/// A watch for each manager.
fn plan<'a>(managers: impl IntoIterator<Item = &'a str>) -> Plan {
    let watch = |manager: &str| {
        json!({"name": manager, "group": "g", "version": "v1", "resource": "things", "field": "spec",
               "manager": manager, "work": ["kyma"]})
    };
    let watches: Vec<_> = managers.into_iter().map(watch).collect();
    Plan::parse(&json!({"revision": "1", "watches": watches}).to_string()).unwrap()
}

/// Follows a watch for each manager, with these objects.
fn follow(core: &Core, managers: &[(&'static str, &[&str])]) -> BTreeMap<&'static str, WatchId> {
    let started = core.follow(&plan(managers.iter().map(|(manager, _)| *manager))).started;
    let id = |manager: &str| started.iter().find(|started| started.planned.manager == manager).unwrap().id;
    let ids: BTreeMap<_, _> = managers.iter().map(|(manager, _)| (*manager, id(manager))).collect();
    for (manager, objects) in managers {
        let (id, objects) = (ids[manager], objects.iter().map(|name| (format!("ns/{name}").into(), seen(1))));
        core.described(id, "v1", "Thing", false);
        core.list_begun(id);
        core.listed(id, objects.collect(), Instant::now());
        core.list_complete(id, Instant::now());
    }
    ids
}

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, script: Script, tell: mpsc::UnboundedSender<Arrived>) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (acceptor, script, tell) = (acceptor.clone(), script.clone(), tell.clone());
        tokio::spawn(async move {
            let stream = acceptor.accept(stream).await.unwrap();
            let service = service_fn(move |request| answer(request, script.clone(), tell.clone()));
            let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    script: Script,
    tell: mpsc::UnboundedSender<Arrived>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    assert_eq!(head.method, http::Method::POST);
    let path = head.uri.path().to_owned();
    let reply = (script.lock().unwrap())(v2::manager_of(&path).unwrap());
    let _ = tell.send(Arrived { path, headers: head.headers, body, at: Instant::now(), reply });
    let Some((status, wait)) = reply else { return std::future::pending().await };
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    if let Some(wait) = wait {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(wait));
    }
    Ok(response)
}

const BOTH: &[&[u8]] = &[b"h2", b"http/1.1"];
/// How long a test waits for what must come; only a failure reaches it.
const PATIENCE: Duration = Duration::from_secs(30);
const OURS: &str = "lifecycle-manager";
const OTHER: &str = "other";

#[tokio::test]
async fn each_object_is_one_unsigned_request_in_the_incumbents_form() {
    for alpn in [BOTH, &BOTH[1..]] {
        let mut bench = start(alpn, &["a", "b"], &[]).await;
        assert!(bench.readiness.pending().is_empty(), "a quiet runtime must become ready");
        let first = bench.next().await;
        assert_eq!(first.path, "/v2/lifecycle-manager/event");
        assert_eq!(first.headers[header::CONTENT_TYPE], "application/json");
        assert!(!first.headers.contains_key("signature") && !first.headers.contains_key("signature-input"));
        let body =
            br#"{"watched":{"Namespace":"ns","Name":"a"},"watchedGvk":{"group":"g","version":"v1","kind":"Thing"}}"#;
        assert_eq!(&first.body[..], &body[..]);
        assert_eq!(bench.name().await, "b");
        // What was taken is forgotten, so what comes next is the next change.
        bench.change("a", 2);
        assert_eq!(bench.name().await, "a");
    }
}

#[tokio::test]
async fn a_listener_that_fails_or_limits_gets_the_same_event_until_it_takes_it() {
    let replies = [(500, None), (503, None), (429, Some("1")), (408, None), (500, None), (502, None)];
    let mut bench = start(BOTH, &["a"], &replies).await;
    let mut times = Vec::new();
    for _ in 0..=replies.len() {
        let arrived = bench.next().await;
        assert_eq!(v2::Event::parse(&arrived.body).unwrap().name, "a");
        times.push(arrived.at);
    }
    assert!(times[3] - times[2] >= Duration::from_secs(1), "told to wait");
    bench.change("b", 1);
    assert_eq!(bench.name().await, "b");
    assert_eq!(bench.core.figures().parked, 0);
}

#[tokio::test]
async fn an_event_that_is_refused_stops_no_other() {
    let mut bench = start_for(BOTH, &[(OURS, &["b", "c"]), (OTHER, &["a"])], |manager| match manager {
        OTHER => Some((400, None)),
        _ => TAKEN,
    })
    .await;
    let mut names = Vec::new();
    while names.len() < 7 {
        names.push(bench.name().await);
    }
    names.sort();
    assert_eq!(names, ["a", "a", "a", "a", "a", "b", "c"], "each of the others once");
    bench.change_for(OTHER, "d", 1);
    assert_eq!(bench.name().await, "d", "what is parked is not tried now");
    assert_eq!(bench.core.figures().parked, 1);
}

/// The other manager's next request; until then ours is told every change.
async fn next_of_other(bench: &mut Bench, version: &mut u64) -> Arrived {
    loop {
        let arrived = bench.next().await;
        if arrived.manager() == OTHER {
            return arrived;
        }
        *version += 1;
        bench.change(&arrived.name(), *version);
    }
}

#[tokio::test]
async fn a_manager_that_fails_delays_no_other_and_is_told_when_it_is_well() {
    for wait in [None, Some("2")] {
        let well = Arc::new(AtomicBool::new(false));
        let is_well = well.clone();
        let managers: &[(_, &[&str])] = &[(OTHER, &["x", "y"]), (OURS, &["a"])];
        let mut bench = start_for(BOTH, managers, move |manager| match manager {
            OTHER if !is_well.load(Ordering::Relaxed) => Some((503, wait)),
            _ => TAKEN,
        })
        .await;
        let mut version = 1;
        let first = next_of_other(&mut bench, &mut version).await;
        // It goes on failing, and ours is told all the while.
        let before = version;
        while version < before + 10 {
            let arrived = bench.next().await;
            if arrived.manager() == OURS {
                version += 1;
                bench.change("a", version);
            }
        }
        well.store(true, Ordering::Relaxed);
        let mut told = BTreeSet::new();
        while told.len() < 2 {
            let arrived = next_of_other(&mut bench, &mut version).await;
            if wait.is_some() {
                assert!(arrived.at - first.at >= Duration::from_secs(2), "told to wait");
            }
            if arrived.reply == TAKEN {
                assert!(told.insert(arrived.name()), "none is told twice");
            }
        }
        assert!(told.iter().eq(["x", "y"]), "{told:?}");
    }
}

#[tokio::test]
async fn a_manager_that_never_answers_delays_no_other() {
    for alpn in [BOTH, &BOTH[1..]] {
        let managers: &[(_, &[&str])] = &[(OTHER, &["x", "y"]), (OURS, &["a"])];
        let mut bench = start_for(alpn, managers, |manager| if manager == OTHER { None } else { TAKEN }).await;
        let first = BTreeSet::from([bench.name().await, bench.name().await]);
        assert_eq!(first, BTreeSet::from(["a", "x"].map(str::to_owned)));
        for version in 2..5 {
            bench.change("a", version);
            assert_eq!(bench.name().await, "a");
        }
    }
}

/// A poster that runs nowhere.
fn idle(managers: &[(&'static str, &[&str])]) -> Poster {
    let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
    follow(&core, managers);
    Poster::new(Parts {
        dial: Dial::tcp(),
        core,
        credentials: watch::channel(None).1,
        sightings: Sightings::default(),
        interval: watch::Sender::new(Duration::from_secs(30)),
        pending: Readiness::default().guard("receiver"),
        metrics: Metrics::default(),
    })
}

#[tokio::test(start_paused = true)]
async fn that_nobody_can_be_connected_to_is_one_wait_for_all_and_one_finds_out_when_it_is_over() {
    let unconnected = || Err(Fault::Send(Speak::Open("nobody listens".into())));
    let mut poster = idle(&[(OURS, &["a", "b"]), (OTHER, &["x"])]);
    let begin = |poster: &mut Poster| poster.core.single(Instant::now(), &|_, due| due).unwrap().manager;
    // Until a wait was drawn that is none of zero milliseconds.
    let (due, now) = loop {
        for manager in [begin(&mut poster), begin(&mut poster)] {
            poster.react(Ended { manager, answer: unconnected() });
        }
        let now = Instant::now();
        if let Some(due) = poster.due(now, 0).filter(|due| *due > now) {
            break (due, now);
        }
    };
    poster.react(Ended { manager: OURS.to_owned(), answer: unconnected() });
    assert_eq!(poster.due(now, 0), Some(due), "those who failed together are one failure");
    assert_eq!((poster.due(due, 0), poster.due(due, 1)), (Some(due), None), "one at a time");
    assert_eq!(poster.managers.len(), 0, "it was none of theirs");
    let manager = begin(&mut poster);
    poster.react(Ended { manager, answer: Err(Fault::Deadline) });
    assert_eq!(
        (poster.due(now, 1), poster.managers.len()),
        (Some(now), 1),
        "there is somebody: that manager alone waits"
    );
}

#[test]
fn waits_are_kept_of_no_more_managers_than_the_plan_has() {
    let mut poster = idle(&[(OURS, &["a"]), (OTHER, &["x"])]);
    for manager in [OURS, OTHER] {
        poster.failed(manager.to_owned(), Instant::now(), None);
    }
    assert_eq!(poster.managers.len(), 2);
    poster.core.follow(&plan([OURS]));
    poster.failed(OURS.to_owned(), Instant::now(), None);
    assert_eq!(poster.managers.len(), 1);
}

#[test]
fn only_what_a_retry_may_help_is_retried_for_ever() {
    for (status, expected) in [
        (200, Meaning::Taken),
        (202, Meaning::Taken),
        (400, Meaning::Refused),
        (401, Meaning::Refused),
        (404, Meaning::Refused),
        (413, Meaning::Refused),
        (408, Meaning::Later),
        (429, Meaning::Later),
        (302, Meaning::Later),
        (500, Meaning::Later),
        (503, Meaning::Later),
    ] {
        assert_eq!(meaning(StatusCode::from_u16(status).unwrap()), expected, "{status}");
    }
}
