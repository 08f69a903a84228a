use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{Arc, Mutex},
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
};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::{
    canary::Sightings,
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
}

struct Bench {
    core: Core,
    seen: mpsc::UnboundedReceiver<Arrived>,
    tasks: Vec<JoinHandle<()>>,
    readiness: Readiness,
    id: WatchId,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Bench {
    async fn name(&mut self) -> String {
        let arrived = self.seen.recv().await.unwrap();
        v2::Event::parse(&arrived.body).unwrap().name
    }

    fn change(&self, name: &str, version: u64) {
        let seen = Seen { uid: "u".into(), version: Version::Number(version), generation: None, metadata: 0 };
        self.core.present(self.id, &format!("ns/{name}"), seen, Instant::now());
    }
}

/// Answers with these statuses first, then with 200.
async fn start(alpn: &[&[u8]], objects: &[&str], replies: &[(u16, Option<&'static str>)]) -> Bench {
    let ca = TestCa::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (chain, key) = ca.server();
    let roots = tls::roots(&tls::certificates(ca.pem().as_bytes()).unwrap()).unwrap();
    let mut config = tls::server(&tls::Identity::from_pem(&chain, &key).unwrap(), roots).unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let (tell, seen) = mpsc::unbounded_channel();
    let replies = Arc::new(Mutex::new(replies.iter().copied().collect::<VecDeque<_>>()));
    let server = tokio::spawn(serve(listener, TlsAcceptor::from(Arc::new(config)), replies, tell));

    let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
    let plan = json!({"revision": "1", "watches": [{"name": "w", "group": "g", "version": "v1", "resource": "things",
                      "field": "spec", "manager": "lifecycle-manager", "work": ["kyma"]}]});
    let id = core.follow(&Plan::parse(&plan.to_string()).unwrap()).started[0].id;
    core.described(id, "v1", "Thing", false);
    let bench_seen = |version| Seen { uid: "u".into(), version, generation: None, metadata: 0 };
    core.list_begun(id);
    core.listed(
        id,
        objects.iter().map(|name| (format!("ns/{name}").into(), bench_seen(Version::Number(1)))).collect(),
        Instant::now(),
    );
    core.list_complete(id, Instant::now());
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
    Bench { core, seen, tasks: vec![server, poster], readiness, id }
}

type Replies = Arc<Mutex<VecDeque<(u16, Option<&'static str>)>>>;

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, replies: Replies, tell: mpsc::UnboundedSender<Arrived>) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (acceptor, replies, tell) = (acceptor.clone(), replies.clone(), tell.clone());
        tokio::spawn(async move {
            let stream = acceptor.accept(stream).await.unwrap();
            let service = service_fn(move |request| answer(request, replies.clone(), tell.clone()));
            let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    replies: Replies,
    tell: mpsc::UnboundedSender<Arrived>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let (status, wait) = replies.lock().unwrap().pop_front().unwrap_or((200, None));
    assert_eq!(head.method, http::Method::POST);
    let _ = tell.send(Arrived { path: head.uri.path().to_owned(), headers: head.headers, body, at: Instant::now() });
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    if let Some(wait) = wait {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(wait));
    }
    Ok(response)
}

const BOTH: &[&[u8]] = &[b"h2", b"http/1.1"];

#[tokio::test]
async fn each_object_is_one_unsigned_request_in_the_incumbents_form() {
    for alpn in [BOTH, &BOTH[1..]] {
        let mut bench = start(alpn, &["a", "b"], &[]).await;
        assert!(bench.readiness.pending().is_empty(), "a quiet runtime must become ready");
        let first = bench.seen.recv().await.unwrap();
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
        let arrived = bench.seen.recv().await.unwrap();
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
    let refused = [(400, None); 5];
    let mut bench = start(BOTH, &["a", "b"], &refused).await;
    for _ in refused {
        assert_eq!(bench.name().await, "a");
    }
    assert_eq!(bench.name().await, "b");
    assert_eq!(bench.core.figures().parked, 1);
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
