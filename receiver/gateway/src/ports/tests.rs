//! Real TLS on loopback: admission, refusals, ends of connections.

mod abuse;
mod ends;
mod idle;
mod large_heads;
mod proxied;
mod raw;
mod revoked;
mod starting;
pub(super) mod testing;

use std::time::SystemTime;

use bytes::Bytes;
use futures::stream;
use http::{Request, Response, StatusCode, Version, header};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig,
    version::{TLS12, TLS13},
};
use rustls_pki_types::ServerName;
use serde_json::Value;
use tidewatch_api::identity::RuntimeId;
use tidewatch_kit::tls::{self, Identity};
use tidewatch_trust::{Ca, RUNTIME_VALIDITY, SERVER_VALIDITY, ServerIdentity, TrustBundle};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use self::testing::{Agent, RecordingIntake, RequestSpec, ca, domain, settings};
use super::*;

/// Upper bound of waits; only a failing test reaches it.
const PATIENCE: Duration = Duration::from_secs(30);

fn unix_now() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    i64::try_from(now.as_secs()).unwrap()
}

/// A running gateway, and the CA that its clients must chain to.
struct TestGateway {
    ca: Ca,
    address: SocketAddr,
    authority: String,
    intake: RecordingIntake,
    metrics: PortMetrics,
    tls: Arc<ArcSwap<ServerConfig>>,
    shutdown: CancellationToken,
    served: JoinHandle<()>,
}

impl TestGateway {
    async fn start(change: impl FnOnce(&mut Settings)) -> Self {
        Self::with(None, |settings, _| change(settings)).await
    }

    /// `handshake` are the roots that the handshake demands, if they differ from the CA.
    async fn with(handshake: Option<TrustBundle>, change: impl FnOnce(&mut Settings, &Ca)) -> Self {
        let ca = ca(unix_now());
        let names = ["kcp.test".try_into().unwrap()];
        let server = ca.make_server(&names, unix_now(), SERVER_VALIDITY).unwrap().identity().unwrap();
        let tls = match handshake {
            Some(proxies) => ServerIdentity::new(&server, &proxies).unwrap().behind_proxy(),
            None => ServerIdentity::new(&server, &ca.trust_bundle()).unwrap(),
        }
        .config;
        let mut settings = Settings { authorities: vec!["kcp.test:0".parse().unwrap()], ..settings() };
        let intake = RecordingIntake::default();
        settings.departures = Some(Arc::new(intake.clone()));
        change(&mut settings, &ca);
        let metrics = testing::metrics();
        let tls = Arc::new(ArcSwap::new(tls));
        let served_tls = tls.clone();
        let port = metrics.port.clone();
        let handler = |settings: &Settings| Arc::new(V3Handler::new(settings, intake.clone(), metrics));
        let listening = Gateway::bind(settings, served_tls, handler).await.unwrap();
        let address = listening.address();
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(listening.run(shutdown.clone()));
        let authority = format!("kcp.test:{}", address.port());
        Self { ca, address, authority, intake, metrics: port, tls, shutdown, served }
    }

    fn client(&self, identity: &Identity) -> ClientConfig {
        let mut config = tls::client(Some(identity), self.ca.trust_bundle().store().unwrap()).unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        config
    }

    fn agent(&self, runtime: &str) -> Agent {
        Agent::new(&self.ca, runtime, unix_now())
    }

    async fn connect(&self, config: ClientConfig) -> std::io::Result<TlsStream<TcpStream>> {
        let tcp = TcpStream::connect(self.address).await?;
        let name = ServerName::try_from("kcp.test").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, tcp).await
    }

    /// With TLS 1.3 the client may finish its handshake first; a refusal by the server then shows at the first read.
    async fn is_refused(&self, config: ClientConfig) -> bool {
        match self.connect(config).await {
            Ok(mut stream) => stream.read(&mut [0]).await.is_err(),
            Err(_) => true,
        }
    }

    async fn http2(&self, agent: &Agent) -> http2::SendRequest<Full<Bytes>> {
        let stream = self.connect(self.client(&agent.identity)).await.unwrap();
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    async fn http1(&self, agent: &Agent) -> TlsStream<TcpStream> {
        let mut config = self.client(&agent.identity);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        self.connect(config).await.unwrap()
    }

    async fn open(&self, agent: &Agent, is_http2: bool) -> Sender {
        if is_http2 {
            return Sender::Http2(self.http2(agent).await);
        }
        let (sender, connection) = http1::handshake(TokioIo::new(self.http1(agent).await)).await.unwrap();
        tokio::spawn(connection);
        Sender::Http1(sender)
    }

    /// Sends a request of an agent and asserts that it is accepted.
    async fn send_accepted(&self, sender: &mut Sender, agent: &Agent, counter: u64) -> Response<Bytes> {
        let response = sender.send(self.request(agent, counter, sender.is_http2())).await.unwrap();
        assert_eq!(response.status(), StatusCode::ACCEPTED);
        response
    }

    fn request(&self, agent: &Agent, counter: u64, is_http2: bool) -> Request<Full<Bytes>> {
        let body = agent.batch().to_string();
        let spec = RequestSpec {
            authority: &self.authority,
            created: unix_now(),
            ..RequestSpec::events(body.as_bytes(), counter)
        };
        let (mut parts, body) = agent.sign(&spec).into_parts();
        if is_http2 {
            parts.headers.remove(header::HOST);
            parts.version = Version::HTTP_2;
            parts.uri = format!("https://{}{}", self.authority, parts.uri.path()).parse().unwrap();
        }
        Request::from_parts(parts, Full::from(body))
    }

    async fn stop(self) {
        self.shutdown.cancel();
        timeout(PATIENCE, self.served).await.unwrap().unwrap();
        assert_eq!(self.metrics.connections.get(), 0);
    }
}

/// An agent's connection in one of the two protocols.
enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

impl Sender {
    fn is_http2(&self) -> bool {
        matches!(self, Self::Http2(_))
    }

    /// Sends a request once the connection is ready, and reads the whole response.
    async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Bytes>> {
        let response = match self {
            Self::Http1(sender) => {
                sender.ready().await?;
                sender.send_request(request).await?
            }
            Self::Http2(sender) => sender.send_request(request).await?,
        };
        let (parts, body) = response.into_parts();
        Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
    }

    async fn is_ready(&mut self) -> bool {
        match self {
            Self::Http1(sender) => sender.ready().await.is_ok(),
            Self::Http2(sender) => sender.ready().await.is_ok(),
        }
    }

    /// Waits until the connection has ended.
    async fn ends(&mut self) {
        timeout(PATIENCE, async {
            while self.is_ready().await {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the connection ends");
    }
}

async fn problem(response: Response<hyper::body::Incoming>) -> (StatusCode, Value) {
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap())
}

/// Reads until the server ends the connection.
async fn rest(mut stream: TlsStream<TcpStream>) -> String {
    let mut bytes = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("the server ends the connection");
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn events_arrive_over_http2_and_http1() {
    let gateway = TestGateway::start(|_| {}).await;
    let agent = gateway.agent("r-1");
    let mut sender = gateway.http2(&agent).await;
    for counter in 1..=2 {
        let response = sender.send_request(gateway.request(&agent, counter, true)).await.unwrap();
        assert_eq!((response.status(), response.version()), (StatusCode::ACCEPTED, Version::HTTP_2));
    }
    let (mut sender, connection) = http1::handshake(TokioIo::new(gateway.http1(&agent).await)).await.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(gateway.request(&agent, 3, false)).await.unwrap();
    assert_eq!((response.status(), response.version()), (StatusCode::ACCEPTED, Version::HTTP_11));
    assert_eq!(gateway.intake.count(), 3);
    gateway.stop().await;
}

#[tokio::test]
async fn replayed_tampered_and_late_requests_are_refused_on_the_wire() {
    let gateway = TestGateway::start(|_| {}).await;
    let agent = gateway.agent("r-1");
    let mut sender = gateway.http2(&agent).await;
    let request = gateway.request(&agent, 1, true);
    assert_eq!(sender.send_request(request.clone()).await.unwrap().status(), StatusCode::ACCEPTED);
    let (status, problem_body) = problem(sender.send_request(request.clone()).await.unwrap()).await;
    assert_eq!((status.as_u16(), problem_body["type"].as_str().unwrap().ends_with("/replay")), (401, true));
    let tampered = request.map(|_| Full::from("[]"));
    let (status, problem_body) = problem(sender.send_request(tampered).await.unwrap()).await;
    assert_eq!((status.as_u16(), problem_body["type"].as_str().unwrap().ends_with("/signature")), (401, true));

    let body = agent.batch().to_string();
    let created = unix_now() - 120;
    let spec = RequestSpec { authority: &gateway.authority, created, ..RequestSpec::events(body.as_bytes(), 2) };
    let (mut parts, body) = agent.sign(&spec).into_parts();
    parts.headers.remove(header::HOST);
    parts.uri = format!("https://{}/v3/events", gateway.authority).parse().unwrap();
    let response = sender.send_request(Request::from_parts(parts, Full::from(body))).await.unwrap();
    assert!(response.headers().contains_key(header::DATE));
    let (status, problem_body) = problem(response).await;
    assert_eq!((status.as_u16(), problem_body["type"].as_str().unwrap().ends_with("/clock")), (401, true));
    assert_eq!(gateway.intake.count(), 1);
    gateway.stop().await;
}

#[tokio::test]
async fn handshake_without_a_valid_certificate_fails() {
    let gateway = TestGateway::start(|_| {}).await;
    let now = unix_now();
    let runtime = "r-1".parse().unwrap();
    let roots = || gateway.ca.trust_bundle().store().unwrap();
    let leaf = |now, validity| gateway.ca.make_runtime(&runtime, &domain(), now, validity).unwrap().identity().unwrap();
    let none = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots())
        .with_no_client_auth();
    let good = gateway.agent("r-1").identity;
    let old_protocol = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&TLS12])
        .unwrap()
        .with_root_certificates(roots())
        .with_client_auth_cert(good.chain.clone(), good.key.clone_key())
        .unwrap();
    let server = gateway.ca.make_server(&["kcp.test".try_into().unwrap()], now, SERVER_VALIDITY).unwrap();
    let another_alpn = |mut config: ClientConfig| {
        config.alpn_protocols = vec![b"spdy".to_vec()];
        config
    };
    for (config, reason) in [
        (none, "no-certificate"),
        (old_protocol, "incompatible"),
        (gateway.client(&Agent::new(&ca(now), "r-1", now).identity), "unknown-issuer"),
        (gateway.client(&leaf(now - 500, Duration::from_secs(60))), "expired"),
        (gateway.client(&leaf(now + 3_600, RUNTIME_VALIDITY)), "not-yet-valid"),
        (gateway.client(&server.identity().unwrap()), "purpose"),
        (another_alpn(gateway.client(&good)), "protocol"),
    ] {
        assert!(gateway.is_refused(config).await, "{reason}");
        let failed = gateway.metrics.handshakes_failed.get_or_create(&metrics::ReasonLabel { reason }).get();
        assert_eq!(failed, 1, "{reason}");
    }
    let agent = gateway.agent("r-1");
    let response = gateway.http2(&agent).await.send_request(gateway.request(&agent, 1, true)).await.unwrap();
    assert_eq!(response.status(), StatusCode::ACCEPTED, "other clients are unaffected");
    gateway.stop().await;
}

#[tokio::test]
async fn certificate_of_a_foreign_trust_domain_gets_one_403_and_the_connection_ends() {
    let gateway = TestGateway::start(|_| {}).await;
    let runtime: RuntimeId = "r-1".parse().unwrap();
    let leaf = gateway.ca.make_runtime(&runtime, &"other".parse().unwrap(), unix_now(), RUNTIME_VALIDITY).unwrap();
    let agent = Agent::with(leaf.identity().unwrap(), runtime);
    for is_http2 in [true, false] {
        let mut sender = gateway.open(&agent, is_http2).await;
        let response = sender.send(gateway.request(&agent, 1, is_http2)).await.unwrap();
        assert_eq!(response.status(), StatusCode::FORBIDDEN);
        assert_eq!(response.headers().get(header::CONNECTION).is_none(), is_http2, "HTTP/2 knows no such field");
        sender.ends().await;
    }
    assert_eq!(gateway.intake.count(), 0);
    gateway.stop().await;
}

#[tokio::test]
async fn body_above_the_limit_is_refused_with_and_without_a_length() {
    let gateway = TestGateway::start(|settings| settings.max_body = 10_000).await;
    let agent = gateway.agent("r-1");
    let mut sender = gateway.http2(&agent).await;
    let (mut parts, _) = gateway.request(&agent, 1, true).into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    let pieces = || (0..20).map(|_| Ok::<_, std::io::Error>(Frame::data(Bytes::from(vec![b' '; 1_000]))));
    let without = Request::from_parts(parts.clone(), StreamBody::new(stream::iter(pieces())).boxed());
    let stream = gateway.connect(gateway.client(&agent.identity)).await.unwrap();
    let (mut streaming, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let (status, problem_body) = problem(streaming.send_request(without).await.unwrap()).await;
    assert_eq!((status, &problem_body["maxBytes"]), (StatusCode::PAYLOAD_TOO_LARGE, &10_000.into()));

    let with = Request::from_parts(parts, Full::from(vec![b' '; 10_001]));
    let (status, _) = problem(sender.send_request(with).await.unwrap()).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let response = sender.send_request(gateway.request(&agent, 1, true)).await.unwrap();
    assert_eq!(response.status(), StatusCode::ACCEPTED);

    // Over HTTP/1.1 the response is not lost behind an unread body, and the connection stays usable.
    let (mut sender, connection) = http1::handshake(TokioIo::new(gateway.http1(&agent).await)).await.unwrap();
    tokio::spawn(connection);
    let (parts, _) = gateway.request(&agent, 2, false).into_parts();
    let with = Request::from_parts(parts, Full::from(vec![b' '; 500_000]));
    let (status, problem_body) = problem(sender.send_request(with).await.unwrap()).await;
    assert_eq!((status, &problem_body["maxBytes"]), (StatusCode::PAYLOAD_TOO_LARGE, &10_000.into()));
    sender.ready().await.unwrap();
    let response = sender.send_request(gateway.request(&agent, 2, false)).await.unwrap();
    assert_eq!(response.status(), StatusCode::ACCEPTED);

    let mut chunked = gateway.http1(&agent).await;
    let head = head(&gateway.request(&agent, 3, false), "transfer-encoding: chunked");
    chunked.write_all(head.as_bytes()).await.unwrap();
    assert!(rest(chunked).await.starts_with("HTTP/1.1 411 "));
    gateway.stop().await;
}

/// Over HTTP/1.1 the rest of a refused body is read, which costs as much as reading an accepted one.
#[tokio::test]
async fn refused_body_is_charged_like_an_accepted_one() {
    let gateway = TestGateway::start(|settings| {
        let limits = &mut settings.limits;
        (limits.per_second, limits.burst, limits.bytes_per_request) = (1, 1_000, 1_000);
    })
    .await;
    let agent = gateway.agent("r-1");
    let other = gateway.agent("r-2");
    let mut sender = gateway.open(&agent, false).await;
    gateway.send_accepted(&mut sender, &agent, 1).await;
    for _ in 0..2 {
        let (mut parts, _) = gateway.request(&agent, 2, false).into_parts();
        parts.headers.remove(header::CONTENT_TYPE);
        let refused = sender.send(Request::from_parts(parts, Full::from(vec![b' '; 900_000]))).await.unwrap();
        assert_eq!(refused.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }
    let response = sender.send(gateway.request(&agent, 2, false)).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let mut others = gateway.open(&other, false).await;
    gateway.send_accepted(&mut others, &other, 1).await;
    gateway.stop().await;
}

/// Each gateway has a single short deadline, which must be the one that applies.
#[tokio::test]
async fn slow_client_is_disconnected_over_http1() {
    let short = Duration::from_millis(100);
    let gateway = TestGateway::start(|settings| settings.handshake_deadline = short).await;
    let mut silent = TcpStream::connect(gateway.address).await.unwrap();
    let ended = timeout(PATIENCE, silent.read(&mut [0])).await.unwrap();
    assert!(matches!(ended, Ok(0) | Err(_)), "a handshake that never begins");
    gateway.stop().await;

    let gateway = TestGateway::start(|settings| settings.head_deadline = short).await;
    let agent = gateway.agent("r-1");
    let mut slow_head = gateway.http1(&agent).await;
    slow_head.write_all(b"POST /v3/events HTTP/1.1\r\nhost: ").await.unwrap();
    assert!(!rest(slow_head).await.contains("HTTP/1.1 2"));
    let mut no_preface = gateway.connect(gateway.client(&agent.identity)).await.unwrap();
    no_preface.write_all(b"PRI * HTTP/2.0").await.unwrap();
    rest(no_preface).await;
    gateway.stop().await;

    let gateway = TestGateway::start(|settings| settings.body_deadline = short).await;
    let agent = gateway.agent("r-1");
    let mut slow_body = gateway.http1(&agent).await;
    let head = head(&gateway.request(&agent, 1, false), "content-length: 100");
    slow_body.write_all(format!("{head}[").as_bytes()).await.unwrap();
    assert!(rest(slow_body).await.starts_with("HTTP/1.1 408 "));
    assert_eq!(gateway.intake.count(), 0);
    gateway.stop().await;
}

#[tokio::test]
async fn new_tls_configuration_applies_from_the_next_connection_on() {
    let gateway = TestGateway::start(|_| {}).await;
    let old = gateway.agent("r-1");
    let next_ca = ca(unix_now());
    let new = Agent::new(&next_ca, "r-2", unix_now());
    let mut open = gateway.http2(&old).await;
    assert!(gateway.is_refused(gateway.client(&new.identity)).await);
    let server = gateway.ca.make_server(&["kcp.test".try_into().unwrap()], unix_now(), SERVER_VALIDITY).unwrap();
    let server = server.identity().unwrap();
    gateway.tls.store(ServerIdentity::new(&server, &next_ca.trust_bundle()).unwrap().config);
    let response = gateway.http2(&new).await.send_request(gateway.request(&new, 1, true)).await.unwrap();
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    assert!(gateway.is_refused(gateway.client(&old.identity)).await);
    let response = open.send_request(gateway.request(&old, 1, true)).await.unwrap();
    assert_eq!(response.status(), StatusCode::ACCEPTED, "an open connection lives until its maximum age");
    gateway.stop().await;
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_for_a_slot() {
    let gateway = TestGateway::start(|settings| settings.max_connections = 1).await;
    let first = gateway.agent("r-1");
    let second = gateway.agent("r-2");
    let mut held = gateway.http2(&first).await;
    assert!(held.send_request(gateway.request(&first, 1, true)).await.unwrap().status().is_success());
    let mut waiting = Box::pin(gateway.http2(&second));
    let is_waiting = futures::poll!(&mut waiting).is_pending();
    assert!(is_waiting && gateway.metrics.connections.get() == 1);
    assert_eq!(gateway.metrics.accepts_paused.get_or_create(&metrics::ReasonLabel { reason: "connections" }).get(), 1);
    drop(held);
    let mut sender = timeout(PATIENCE, waiting).await.unwrap();
    assert!(sender.send_request(gateway.request(&second, 1, true)).await.unwrap().status().is_success());
    gateway.stop().await;
}

#[tokio::test]
async fn shutdown_completes_a_request_in_flight_and_accepts_no_connection() {
    let gateway = TestGateway::start(|_| {}).await;
    let agent = gateway.agent("r-1");
    let mut stream = gateway.http1(&agent).await;
    let (parts, body) = gateway.request(&agent, 1, false).into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let head = head(&Request::from_parts(parts, Full::default()), &format!("content-length: {}", body.len()));
    stream.write_all(head.as_bytes()).await.unwrap();
    // The server has the head once it counts the request.
    let path = metrics::RouteLabel { route: "events" };
    timeout(PATIENCE, async {
        while gateway.metrics.begun.get_or_create(&path).get() == 0 {
            tokio::task::yield_now().await
        }
    })
    .await
    .unwrap();
    gateway.shutdown.cancel();
    timeout(PATIENCE, async {
        while TcpStream::connect(gateway.address).await.is_ok() {
            tokio::task::yield_now().await
        }
    })
    .await
    .unwrap();
    stream.write_all(&body).await.unwrap();
    assert!(rest(stream).await.starts_with("HTTP/1.1 202 "));
    gateway.stop().await;
}

/// A request's head in HTTP/1.1 with a further field.
fn head(request: &Request<Full<Bytes>>, more: &str) -> String {
    let mut text = format!("POST {} HTTP/1.1\r\n", request.uri().path());
    for (name, value) in request.headers() {
        text.push_str(&format!("{name}: {}\r\n", value.to_str().unwrap()));
    }
    text + more + "\r\n\r\n"
}
