//! A receiver with its two ports, the API server's Secret, and an enroller between them.

use std::{
    collections::VecDeque,
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, Ordering},
    },
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rustls::ServerConfig;
use serde_json::{Value, json};
use tidewatch_shared::{
    certificate::{Leaf, trust_revision},
    enrolment::{CERTIFICATES_PATH, CertificateRequest},
    event::parse_batch,
    exchange::{EVENTS_PATH, HEARTBEAT_PATH},
    identity::Instance,
    names::{CHAIN_KEY, IDENTITY_SECRET, PRIVATE_KEY_KEY},
    problem::{Kind, Problem},
    signature::{CONTENT_DIGEST, Message, SIGNATURE, SIGNATURE_INPUT, Signed, verify},
    tls,
};
use tokio::{
    net::TcpListener,
    sync::mpsc,
    task::{AbortHandle, JoinHandle},
};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::{
    identity::{Renewals, errands::errands, tests::TestCa},
    kubernetes::{Body, Lane, Transport},
    telemetry::Readiness,
};

/// A request that came through the handshake; on the event port its signature was verified against the leaf that was shown.
pub(super) struct Asked {
    pub(super) path: String,
    /// On the enrolment port.
    pub(super) token: Option<String>,
    /// On the event port.
    pub(super) fingerprint: Option<String>,
    pub(super) body: Bytes,
    pub(super) headers: HeaderMap,
}

impl Asked {
    pub(super) fn request(&self) -> CertificateRequest {
        CertificateRequest::parse(&self.body).unwrap()
    }
}

pub(super) type Reply = (u16, String);

/// What is answered to requests for certificates, in turn; then they are signed.
pub(super) type Replies = VecDeque<Box<dyn FnOnce(&Receiver, &Asked) -> Reply + Send>>;

/// The receiver of a test.
pub(super) struct Receiver {
    pub(super) ca: TestCa,
    /// Life of what it issues, in seconds.
    pub(super) seconds: AtomicI64,
    pub(super) replies: Mutex<Replies>,
    told: mpsc::UnboundedSender<Result<Asked, String>>,
}

pub(super) fn problem(status: u16, kind: Kind) -> Reply {
    (status, serde_json::to_string(&Problem::new(kind, "title", status, "these words")).unwrap())
}

impl Receiver {
    pub(super) fn issue(&self, asked: &Asked) -> Reply {
        let CertificateRequest { runtime, request } = asked.request();
        self.chain(&self.ca.sign(&request, runtime.as_str(), self.seconds.load(Ordering::Relaxed), false))
    }

    pub(super) fn chain(&self, chain: &str) -> Reply {
        let bundle = self.ca.pem();
        let revision = trust_revision(&tls::certificates(bundle.as_bytes()).unwrap());
        (200, json!({"chain": chain, "trustBundle": bundle, "trustRevision": revision}).to_string())
    }

    fn answer(&self, asked: &Asked) -> Reply {
        let instance = Instance::new(1).to_string();
        match asked.path.as_str() {
            CERTIFICATES_PATH => {
                let reply = self.replies.lock().unwrap().pop_front();
                reply.map_or_else(|| self.issue(asked), |reply| reply(self, asked))
            }
            HEARTBEAT_PATH => (
                200,
                json!({"instance": instance, "settled": {}, "heartbeatSeconds": 30, "serverTime": ""}).to_string(),
            ),
            EVENTS_PATH => {
                let accepted = parse_batch(&asked.body).unwrap().last().unwrap().as_ref().unwrap().id.sequence;
                let body = json!({"instance": instance, "accepted": accepted, "since": 1, "settled": {}, "refused": [],
                                  "heartbeatSeconds": 30});
                (202, body.to_string())
            }
            path => panic!("{path}"),
        }
    }

    async fn serve(self: Arc<Self>, listener: TcpListener, config: ServerConfig) {
        let acceptor = TlsAcceptor::from(Arc::new(config));
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, receiver) = (acceptor.clone(), self.clone());
            tokio::spawn(async move {
                let stream = match acceptor.accept(stream).await {
                    Ok(stream) => stream,
                    Err(error) => return drop(receiver.told.send(Err(error.to_string()))),
                };
                let chain = stream.get_ref().1.peer_certificates();
                let leaf = chain.map(|chain| Arc::new(Leaf::read(&chain[0]).unwrap()));
                let service = service_fn(|request| receiver.clone().take(request, leaf.clone()));
                let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
            });
        }
    }

    async fn take(
        self: Arc<Self>,
        request: Request<Incoming>,
        leaf: Option<Arc<Leaf>>,
    ) -> Result<Response<Full<Bytes>>, Infallible> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        if let Some(leaf) = &leaf {
            check(&head, &body, leaf);
        }
        let token = head.headers.get(header::AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned());
        let fingerprint = leaf.map(|leaf| leaf.fingerprint.clone());
        let asked = Asked { path: head.uri.path().to_owned(), token, fingerprint, body, headers: head.headers };
        let (status, body) = self.answer(&asked);
        let _ = self.told.send(Ok(asked));
        let mut response = Response::new(Full::from(body));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        Ok(response)
    }
}

fn check(head: &http::request::Parts, body: &[u8], leaf: &Leaf) {
    let header = |name: &str| head.headers[name].to_str().unwrap();
    let authority = head.uri.authority().map_or_else(|| header("host").to_owned(), ToString::to_string);
    let (path, content_type) = (head.uri.path(), header("content-type"));
    let message = Message { method: head.method.as_str(), authority: &authority, path, content_type };
    let (content_digest, signature_input, signature) =
        (header(CONTENT_DIGEST), header(SIGNATURE_INPUT), header(SIGNATURE));
    let signed = Signed { message, content_digest, signature_input, signature, body };
    verify(&signed, leaf, clock::unix_seconds()).unwrap();
}

/// Version, chain and key.
type Secret = (u64, Vec<u8>, Vec<u8>);

/// The API server, as far as it has the one Secret: version and data.
#[derive(Clone)]
pub(super) struct Store {
    secret: Arc<Mutex<Option<Secret>>>,
    publish: watch::Sender<Stored>,
    /// Statuses of the next writes, before the Secret is looked at.
    pub(super) refuse: Arc<Mutex<VecDeque<u16>>>,
}

impl Store {
    pub(super) fn new() -> Self {
        let store =
            Self { secret: Arc::default(), publish: watch::Sender::new(Stored::Unknown), refuse: Arc::default() };
        store.put(b"", b"");
        store
    }

    /// Somebody writes it.
    pub(super) fn put(&self, chain: &[u8], key: &[u8]) {
        let mut secret = self.secret.lock().unwrap();
        let version = secret.as_ref().map_or(1, |(version, ..)| version + 1);
        *secret = Some((version, chain.to_vec(), key.to_vec()));
        let (version, chain, key) = (version.to_string(), chain.to_vec(), key.to_vec());
        self.publish.send_replace(Stored::There(Arc::new(Content { version, chain, key })));
    }

    /// Somebody deletes it.
    pub(super) fn delete(&self) {
        *self.secret.lock().unwrap() = None;
        self.publish.send_replace(Stored::Missing);
    }

    pub(super) fn content(&self) -> (Vec<u8>, Vec<u8>) {
        self.secret.lock().unwrap().clone().map(|(_, chain, key)| (chain, key)).unwrap_or_default()
    }

    fn patch(&self, path: &str, patch: &Value) -> u16 {
        assert!(path.starts_with(&format!("/api/v1/namespaces/ns/secrets/{IDENTITY_SECRET}?")), "{path}");
        if let Some(status) = self.refuse.lock().unwrap().pop_front() {
            return status;
        }
        let version = self.secret.lock().unwrap().as_ref().map(|(version, ..)| version.to_string());
        let decode = |key: &str| STANDARD.decode(patch["data"][key].as_str().unwrap()).unwrap();
        match version {
            None => 404,
            Some(version) if patch["metadata"]["resourceVersion"] != version => 409,
            Some(_) => {
                self.put(&decode(CHAIN_KEY), &decode(PRIVATE_KEY_KEY));
                200
            }
        }
    }
}

impl Transport for Store {
    fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> BoxFuture<'static, Result<Response<Body>, Box<dyn std::error::Error + Send + Sync>>> {
        let store = self.clone();
        Box::pin(async move {
            let path = request.uri().to_string();
            let body = request.into_body().collect().await?.to_bytes();
            let status = store.patch(&path, &serde_json::from_slice(&body)?);
            let body = Full::<Bytes>::from("{}").map_err(|never| match never {}).boxed_unsync();
            Ok(Response::builder().status(status).body(body)?)
        })
    }
}

/// An enroller at work.
pub(super) struct Bench {
    pub(super) receiver: Arc<Receiver>,
    pub(super) enrolment: SocketAddr,
    pub(super) events: SocketAddr,
    asked: mpsc::UnboundedReceiver<Result<Asked, String>>,
    pub(super) store: Store,
    pub(super) settings: watch::Sender<Option<Arc<Settings>>>,
    pub(super) token: tempfile::NamedTempFile,
    servers: Vec<AbortHandle>,
}

/// One life of an agent.
pub(super) struct Life {
    pub(super) current: Current,
    pub(super) renewals: Option<Renewals>,
    pub(super) standing: Standing,
    pub(super) readiness: Readiness,
    pub(super) metrics: Metrics,
    pub(super) running: JoinHandle<Stop>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.servers.iter().for_each(AbortHandle::abort);
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.running.abort();
    }
}

pub(super) const TOKEN: &str = "header.claims.a-secret-signature";

impl Bench {
    pub(super) async fn new(replies: Replies) -> Self {
        let ca = TestCa::new();
        let (tell, asked) = mpsc::unbounded_channel();
        let (chain, key) = ca.server();
        let identity = tls::Identity::from_pem(&chain, &key).unwrap();
        let roots = tls::roots(&tls::certificates(ca.pem().as_bytes()).unwrap()).unwrap();
        let replies = Mutex::new(replies);
        let receiver = Arc::new(Receiver { ca, seconds: 3_600.into(), replies, told: tell });
        let (mut servers, mut addresses) = (Vec::new(), Vec::new());
        for config in [tls::server_without_clients(&identity).unwrap(), tls::server(&identity, roots).unwrap()] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            addresses.push(listener.local_addr().unwrap());
            servers.push(tokio::spawn(receiver.clone().serve(listener, config)).abort_handle());
        }
        let token = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(token.path(), TOKEN).unwrap();
        let (enrolment, events) = (addresses[0], addresses[1]);
        let bench = Self {
            receiver,
            enrolment,
            events,
            asked,
            store: Store::new(),
            settings: watch::Sender::new(None),
            token,
            servers,
        };
        bench.settings.send_replace(Some(Arc::new(bench.says())));
        bench
    }

    /// What the ConfigMap says at first.
    pub(super) fn says(&self) -> Settings {
        let address = |address: SocketAddr| format!("https://{address}").parse().unwrap();
        Settings {
            receiver: address(self.events),
            enrolment: address(self.enrolment),
            runtime: "r-1".parse().unwrap(),
            bundle: self.receiver.ca.pem().into_bytes(),
        }
    }

    pub(super) fn say(&self, change: impl FnOnce(&mut Settings)) {
        let mut settings = self.says();
        change(&mut settings);
        self.settings.send_replace(Some(Arc::new(settings)));
    }

    pub(super) fn start(&self) -> Life {
        self.start_with(self.store.publish.subscribe())
    }

    /// With what a watch of the Secret tells.
    pub(super) fn start_with(&self, stored: watch::Receiver<Stored>) -> Life {
        let (standing, readiness, metrics) = (Standing::default(), Readiness::default(), Metrics::default());
        let (renewals, errands) = errands(standing.clone());
        let (enroller, current) = Enroller::new(Tools {
            domain: "kyma.local".parse().unwrap(),
            token: self.token.path().to_owned(),
            dial: Dial::tcp(),
            settings: self.settings.subscribe(),
            stored,
            vault: Vault::new(Lane::new(self.store.clone()), "ns"),
            errands,
            standing: standing.clone(),
            pending: Some(readiness.guard("identity")),
            metrics: metrics.clone(),
        });
        let running = tokio::spawn(enroller.run());
        Life { current, renewals: Some(renewals), standing, readiness, metrics, running }
    }

    /// The next request, or the next handshake that failed.
    pub(super) async fn asked(&mut self) -> Result<Asked, String> {
        self.asked.recv().await.unwrap()
    }

    /// What the next heartbeat says of the certificate.
    pub(super) async fn heartbeat(&mut self) -> Value {
        loop {
            let asked = self.asked().await.unwrap();
            if asked.path == HEARTBEAT_PATH {
                return serde_json::from_slice::<Value>(&asked.body).unwrap()["certificate"].clone();
            }
        }
    }

    /// What has been asked until now.
    pub(super) fn all_asked(&mut self) -> Vec<Result<Asked, String>> {
        std::iter::from_fn(|| self.asked.try_recv().ok()).collect()
    }
}

impl Life {
    /// The first identity, or the next one.
    pub(super) async fn next(&mut self) -> Arc<Credentials> {
        self.current.changed().await.unwrap();
        self.current.borrow_and_update().clone().unwrap()
    }
}

/// Waits for what other tasks bring about.
pub(super) async fn until(what: impl Fn() -> bool) {
    let waiting = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("it comes to that");
}
