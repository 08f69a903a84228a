//! Test fixture of an enroller: a receiver with its two ports and an API server with the agent's Secret.

use std::{
    collections::VecDeque,
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use parking_lot::Mutex;
use rustls::ServerConfig;
use serde_json::{Value, json};
use tidewatch_api::{
    identity::Instance,
    names::{CHAIN_KEY, IDENTITY_SECRET, PRIVATE_KEY_KEY},
};
use tidewatch_contract::{
    certificate::{Leaf, trust_revision},
    enrolment::{CERTIFICATES_PATH, CertificateRequest},
    event::parse_batch,
    exchange::{EVENTS_PATH, HEARTBEAT_PATH},
    problem::{Kind, Problem},
    signature::{CONTENT_DIGEST, Message, SIGNATURE, SIGNATURE_INPUT, SignedRequest, verify},
};
use tidewatch_kit::tls;
use tokio::{
    net::TcpListener,
    sync::mpsc,
    task::{AbortHandle, JoinHandle},
};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::{
    identity::{EnrollerHandle, tests::TestCa},
    kubernetes::{ApiClient, Body, Transport},
    telemetry::Readiness,
};

/// A request that passed the handshake; on the event port its signature has been verified against the presented leaf.
pub(crate) struct ObservedRequest {
    pub(crate) path: String,
    /// On the enrolment port.
    pub(crate) token: Option<String>,
    /// On the event port.
    pub(crate) fingerprint: Option<String>,
    pub(crate) body: Bytes,
    pub(crate) headers: HeaderMap,
}

impl ObservedRequest {
    pub(crate) fn request(&self) -> CertificateRequest {
        CertificateRequest::parse(&self.body).unwrap()
    }
}

pub(crate) type Reply = (u16, String);

/// Refuses a certificate request for the time being.
pub(crate) fn unavailable(_: &Receiver, _: &ObservedRequest) -> Reply {
    problem(503, Kind::Other)
}

/// Replies to certificate requests, in order; later requests are signed.
pub(crate) type Replies = VecDeque<Box<dyn FnOnce(&Receiver, &ObservedRequest) -> Reply + Send>>;

/// Receiver of a test.
pub(crate) struct Receiver {
    pub(crate) ca: TestCa,
    /// Validity of issued certificates, in seconds.
    pub(crate) seconds: AtomicI64,
    pub(crate) replies: Mutex<Replies>,
    /// `Date` of the responses.
    pub(crate) date: Mutex<Option<HeaderValue>>,
    /// Offset of its clock in seconds.
    pub(crate) clock_offset: AtomicI64,
    logged: mpsc::UnboundedSender<Result<ObservedRequest, String>>,
}

pub(crate) fn problem(status: u16, kind: Kind) -> Reply {
    (status, serde_json::to_string(&Problem::new(kind, "title", status, "these words")).unwrap())
}

impl Receiver {
    pub(crate) fn issue(&self, observed: &ObservedRequest) -> Reply {
        let CertificateRequest { runtime, request } = observed.request();
        self.chain(&self.ca.sign(&request, runtime.as_str(), self.seconds.load(Ordering::Relaxed), false))
    }

    pub(crate) fn chain(&self, chain: &str) -> Reply {
        let bundle = self.ca.pem();
        let revision = trust_revision(&tls::certificates(bundle.as_bytes()).unwrap());
        (200, json!({"chain": chain, "trustBundle": bundle, "trustRevision": revision}).to_string())
    }

    fn response(&self, observed: &ObservedRequest) -> Reply {
        let instance = Instance::new(1).to_string();
        match observed.path.as_str() {
            CERTIFICATES_PATH => {
                let reply = self.replies.lock().pop_front();
                reply.map_or_else(|| self.issue(observed), |reply| reply(self, observed))
            }
            HEARTBEAT_PATH => (
                200,
                json!({"instance": instance, "settled": {}, "heartbeatSeconds": 30, "serverTime": ""}).to_string(),
            ),
            EVENTS_PATH => {
                let accepted = parse_batch(&observed.body).unwrap().last().unwrap().as_ref().unwrap().id.sequence;
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
            let acceptor = acceptor.clone();
            let receiver = self.clone();
            tokio::spawn(async move {
                let stream = match acceptor.accept(stream).await {
                    Ok(stream) => stream,
                    Err(error) => return drop(receiver.logged.send(Err(error.to_string()))),
                };
                let chain = stream.get_ref().1.peer_certificates();
                let leaf = chain.map(|chain| Arc::new(Leaf::read(&chain[0]).unwrap()));
                let service = service_fn(|request| receiver.clone().take(request, leaf.clone()));
                let mut serving = auto::Builder::new(TokioExecutor::new());
                serving.http1().auto_date_header(false).http2().auto_date_header(false);
                let _ = serving.serve_connection(TokioIo::new(stream), service).await;
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
            check(&head, &body, leaf, clock::unix_seconds() + self.clock_offset.load(Ordering::Relaxed));
        }
        let token = head.headers.get(header::AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned());
        let fingerprint = leaf.map(|leaf| leaf.fingerprint.clone());
        let observed =
            ObservedRequest { path: head.uri.path().to_owned(), token, fingerprint, body, headers: head.headers };
        let (status, body) = self.response(&observed);
        let _ = self.logged.send(Ok(observed));
        let mut response = Response::new(Full::from(body));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        response.headers_mut().extend(self.date.lock().clone().map(|date| (header::DATE, date)));
        Ok(response)
    }
}

fn check(head: &http::request::Parts, body: &[u8], leaf: &Leaf, now: i64) {
    let header = |name: &str| head.headers[name].to_str().unwrap();
    let authority = head.uri.authority().map_or_else(|| header("host").to_owned(), ToString::to_string);
    let path = head.uri.path();
    let content_type = header("content-type");
    let message = Message { method: head.method.as_str(), authority: &authority, path, content_type };
    let content_digest = header(CONTENT_DIGEST);
    let signature_input = header(SIGNATURE_INPUT);
    let signature = header(SIGNATURE);
    let signed = SignedRequest { message, content_digest, signature_input, signature, body };
    verify(&signed, leaf, now).unwrap();
}

/// Version, chain and key.
type Secret = (u64, Vec<u8>, Vec<u8>);

/// API server with the agent's Secret: version and data.
#[derive(Clone)]
pub(crate) struct Store {
    secret: Arc<Mutex<Option<Secret>>>,
    publish: watch::Sender<Stored>,
    /// Statuses of the next writes, which leave the Secret as it is.
    pub(crate) refuse: Arc<Mutex<VecDeque<u16>>>,
}

impl Store {
    pub(crate) fn new() -> Self {
        let store =
            Self { secret: Arc::default(), publish: watch::Sender::new(Stored::Unknown), refuse: Arc::default() };
        store.put(b"", b"");
        store
    }

    /// Writes the Secret, as another client.
    pub(crate) fn put(&self, chain: &[u8], key: &[u8]) {
        let mut secret = self.secret.lock();
        let version = secret.as_ref().map_or(1, |(version, ..)| version + 1);
        *secret = Some((version, chain.to_vec(), key.to_vec()));
        let version = version.to_string();
        let chain = chain.to_vec();
        let key = key.to_vec();
        self.publish.send_replace(Stored::Present(Arc::new(Content { version, chain, key })));
    }

    /// Deletes the Secret, as another client.
    pub(crate) fn delete(&self) {
        *self.secret.lock() = None;
        self.publish.send_replace(Stored::Missing);
    }

    pub(crate) fn content(&self) -> (Vec<u8>, Vec<u8>) {
        self.secret.lock().clone().map(|(_, chain, key)| (chain, key)).unwrap_or_default()
    }

    fn patch(&self, path: &str, patch: &Value) -> u16 {
        assert!(path.starts_with(&format!("/api/v1/namespaces/ns/secrets/{IDENTITY_SECRET}?")), "{path}");
        if let Some(status) = self.refuse.lock().pop_front() {
            return status;
        }
        let version = self.secret.lock().as_ref().map(|(version, ..)| version.to_string());
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

/// Environment of the enrollers of one test.
pub(crate) struct Fixture {
    pub(crate) receiver: Arc<Receiver>,
    pub(crate) enrolment: SocketAddr,
    pub(crate) events: SocketAddr,
    observed: mpsc::UnboundedReceiver<Result<ObservedRequest, String>>,
    pub(crate) store: Store,
    pub(crate) settings: watch::Sender<Option<Arc<Settings>>>,
    pub(crate) token: tempfile::NamedTempFile,
    servers: Vec<AbortHandle>,
}

/// One agent process.
pub(crate) struct RunningEnroller {
    pub(crate) current: CurrentCredentials,
    /// The link's end of its channel.
    pub(crate) handle: Option<EnrollerHandle>,
    pub(crate) core: Core,
    pub(crate) identity_status: IdentityStatus,
    pub(crate) readiness: Readiness,
    pub(crate) metrics: Metrics,
    pub(crate) running: JoinHandle<IdentityStop>,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.servers.iter().for_each(AbortHandle::abort);
    }
}

impl Drop for RunningEnroller {
    fn drop(&mut self) {
        self.running.abort();
    }
}

pub(crate) const TOKEN: &str = "header.claims.a-secret-signature";

impl Fixture {
    pub(crate) async fn new(replies: Replies) -> Self {
        let ca = TestCa::new();
        let (sender, observed) = mpsc::unbounded_channel();
        let (chain, key) = ca.server();
        let identity = tls::Identity::from_pem(&chain, &key).unwrap();
        let roots = tls::roots(&tls::certificates(ca.pem().as_bytes()).unwrap()).unwrap();
        let replies = Mutex::new(replies);
        let receiver = Arc::new(Receiver {
            ca,
            seconds: 3_600.into(),
            replies,
            date: Mutex::default(),
            clock_offset: 0.into(),
            logged: sender,
        });
        let mut servers = Vec::new();
        let mut addresses = Vec::new();
        for config in [tls::server_without_client_auth(&identity).unwrap(), tls::server(&identity, roots).unwrap()] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            addresses.push(listener.local_addr().unwrap());
            servers.push(tokio::spawn(receiver.clone().serve(listener, config)).abort_handle());
        }
        let token = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(token.path(), TOKEN).unwrap();
        let enrolment = addresses[0];
        let events = addresses[1];
        let fixture = Self {
            receiver,
            enrolment,
            events,
            observed,
            store: Store::new(),
            settings: watch::Sender::new(None),
            token,
            servers,
        };
        fixture.settings.send_replace(Some(Arc::new(fixture.default_settings())));
        fixture
    }

    /// Initial settings of the ConfigMap.
    pub(crate) fn default_settings(&self) -> Settings {
        let address = |address: SocketAddr| format!("https://{address}").parse().unwrap();
        Settings {
            receiver: address(self.events),
            enrolment: address(self.enrolment),
            runtime: "r-1".parse().unwrap(),
            bundle: self.receiver.ca.pem().into_bytes(),
        }
    }

    pub(crate) fn configure(&self, change: impl FnOnce(&mut Settings)) {
        let mut settings = self.default_settings();
        change(&mut settings);
        self.settings.send_replace(Some(Arc::new(settings)));
    }

    pub(crate) fn start(&self) -> RunningEnroller {
        self.start_with(self.store.publish.subscribe())
    }

    /// Starts an enroller with the given content of the Secret.
    pub(crate) fn start_with(&self, stored: watch::Receiver<Stored>) -> RunningEnroller {
        let identity_status = IdentityStatus::default();
        let readiness = Readiness::default();
        let metrics = Metrics::default();
        let core = Core::new("r-1".parse().unwrap(), 1_000_000, metrics.clone());
        let (handle, demands) = EnrollerHandle::new(identity_status.clone());
        let (enroller, current) = Enroller::new(EnrollerParts {
            domain: "kyma.local".parse().unwrap(),
            token: self.token.path().to_owned(),
            dial: Dialer::tcp(),
            settings: self.settings.subscribe(),
            stored,
            secret_writer: SecretWriter::new(ApiClient::new(self.store.clone()), "ns"),
            demands,
            core: Arc::new(core.clone().into()),
            identity_status: identity_status.clone(),
            pending: Some(readiness.pending("identity")),
            metrics: metrics.clone(),
        });
        let running = tokio::spawn(enroller.run());
        RunningEnroller { current, handle: Some(handle), core, identity_status, readiness, metrics, running }
    }

    /// The next request, or the next failed handshake.
    pub(crate) async fn next_request(&mut self) -> Result<ObservedRequest, String> {
        self.observed.recv().await.unwrap()
    }

    /// State of the certificate in the next heartbeat.
    pub(crate) async fn heartbeat(&mut self) -> Value {
        loop {
            let observed = self.next_request().await.unwrap();
            if observed.path == HEARTBEAT_PATH {
                return serde_json::from_slice::<Value>(&observed.body).unwrap()["certificate"].clone();
            }
        }
    }

    /// All requests received so far.
    pub(crate) fn requests(&mut self) -> Vec<Result<ObservedRequest, String>> {
        std::iter::from_fn(|| self.observed.try_recv().ok()).collect()
    }
}

impl RunningEnroller {
    /// Forwards a demand, as the link does.
    pub(crate) fn notify(&self, notice: CertificateNotice, fingerprint: &str) {
        self.handle.as_ref().unwrap().notify(notice, fingerprint);
    }

    /// Credentials of the first identity, or of the next one.
    pub(crate) async fn next(&mut self) -> Arc<Credentials> {
        self.current.changed().await.unwrap();
        self.current.borrow_and_update().clone().unwrap()
    }
}

/// Waits for a condition that other tasks bring about.
pub(crate) async fn until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("the condition holds in time");
}
