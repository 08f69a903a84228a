//! Real TLS on loopback: who gets in, what is refused on the way, how connections end.

mod abuse;
mod ends;
mod large_heads;
mod proxied;
mod raw;
mod revoked;
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
use rustls_pki_types::{PrivateKeyDer, ServerName};
use serde_json::Value;
use tidewatch_shared::{
    identity::RuntimeId,
    tls::{self, Identity},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use self::testing::{Agent, Recorder, Say, ca, domain, settings};
use super::*;
use crate::pki::{Ca, RUNTIME_VALIDITY, SERVER_VALIDITY, ServerIdentity, TrustBundle};

/// How long a test waits for what must come; only a failure reaches it.
const PATIENCE: Duration = Duration::from_secs(30);

fn unix_now() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    i64::try_from(now.as_secs()).unwrap()
}

/// A gateway that serves, and the CA that its clients must chain to.
struct Bed {
    ca: Ca,
    address: SocketAddr,
    authority: String,
    intake: Recorder,
    metrics: Metrics,
    tls: Arc<ArcSwap<ServerConfig>>,
    shutdown: CancellationToken,
    served: JoinHandle<()>,
}

impl Bed {
    async fn start(change: impl FnOnce(&mut Settings)) -> Self {
        Self::with(None, |settings, _| change(settings)).await
    }

    /// The handshake may demand others than those whom the CA issues for.
    async fn with(handshake: Option<TrustBundle>, change: impl FnOnce(&mut Settings, &Ca)) -> Self {
        let ca = ca(unix_now());
        let names = ["kcp.test".parse().unwrap()];
        let server = ca.make_server(&names, unix_now(), SERVER_VALIDITY).unwrap().identity().unwrap();
        let tls = match handshake {
            Some(proxies) => ServerIdentity::new(&server, &proxies).unwrap().behind_proxy(),
            None => ServerIdentity::new(&server, &ca.trust_bundle()).unwrap(),
        }
        .config();
        let mut settings = Settings { authorities: vec!["kcp.test:0".parse().unwrap()], ..settings() };
        change(&mut settings, &ca);
        let (intake, metrics) = (Recorder::default(), testing::metrics());
        let tls = Arc::new(ArcSwap::new(tls));
        let served_tls = tls.clone();
        let gateway = Gateway::bind(settings, served_tls, intake.clone(), metrics.clone()).await.unwrap();
        let (address, shutdown) = (gateway.address(), CancellationToken::new());
        let served = tokio::spawn(gateway.run(shutdown.clone()));
        let authority = format!("kcp.test:{}", address.port());
        Self { ca, address, authority, intake, metrics, tls, shutdown, served }
    }

    fn client(&self, identity: &Identity) -> ClientConfig {
        let mut config = tls::client(identity, self.ca.trust_bundle().store().unwrap()).unwrap();
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

    /// A handshake that the server refuses shows at the client's first read, since TLS 1.3 lets the client finish first.
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

    /// Sends a request of an agent, which must be taken.
    async fn says(&self, sender: &mut Sender, agent: &Agent, counter: u64) -> Response<Bytes> {
        let answer = sender.send(self.request(agent, counter, sender.is_http2())).await.unwrap();
        assert_eq!(answer.status(), StatusCode::ACCEPTED);
        answer
    }

    fn request(&self, agent: &Agent, counter: u64, is_http2: bool) -> Request<Full<Bytes>> {
        let body = agent.batch().to_string();
        let say = Say { authority: &self.authority, created: unix_now(), ..Say::events(body.as_bytes(), counter) };
        let (mut parts, body) = agent.sign(&say).into_parts();
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

/// An agent's connection, in one of the two protocols.
enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

impl Sender {
    fn is_http2(&self) -> bool {
        matches!(self, Self::Http2(_))
    }

    /// Sends a request when the answer before was read, and reads the whole answer.
    async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Bytes>> {
        let answer = match self {
            Self::Http1(sender) => {
                sender.ready().await?;
                sender.send_request(request).await?
            }
            Self::Http2(sender) => sender.send_request(request).await?,
        };
        let (parts, body) = answer.into_parts();
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

async fn problem(answer: Response<hyper::body::Incoming>) -> (StatusCode, Value) {
    let status = answer.status();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap())
}

/// All that the server says until it ends the connection.
async fn rest(mut stream: TlsStream<TcpStream>) -> String {
    let mut bytes = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("the server ends the connection");
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn events_arrive_over_http2_and_http1() {
    let bed = Bed::start(|_| {}).await;
    let agent = bed.agent("r-1");
    let mut sender = bed.http2(&agent).await;
    for counter in 1..=2 {
        let answer = sender.send_request(bed.request(&agent, counter, true)).await.unwrap();
        assert_eq!((answer.status(), answer.version()), (StatusCode::ACCEPTED, Version::HTTP_2));
    }
    let (mut sender, connection) = http1::handshake(TokioIo::new(bed.http1(&agent).await)).await.unwrap();
    tokio::spawn(connection);
    let answer = sender.send_request(bed.request(&agent, 3, false)).await.unwrap();
    assert_eq!((answer.status(), answer.version()), (StatusCode::ACCEPTED, Version::HTTP_11));
    assert_eq!(bed.intake.count(), 3);
    bed.stop().await;
}

#[tokio::test]
async fn a_replay_a_tampered_body_and_a_late_one_are_refused_on_the_wire() {
    let bed = Bed::start(|_| {}).await;
    let agent = bed.agent("r-1");
    let mut sender = bed.http2(&agent).await;
    let request = bed.request(&agent, 1, true);
    assert_eq!(sender.send_request(request.clone()).await.unwrap().status(), StatusCode::ACCEPTED);
    let (status, told) = problem(sender.send_request(request.clone()).await.unwrap()).await;
    assert_eq!((status.as_u16(), told["type"].as_str().unwrap().ends_with("/replay")), (401, true));
    let tampered = request.map(|_| Full::from("[]"));
    let (status, told) = problem(sender.send_request(tampered).await.unwrap()).await;
    assert_eq!((status.as_u16(), told["type"].as_str().unwrap().ends_with("/signature")), (401, true));

    let body = agent.batch().to_string();
    let created = unix_now() - 120;
    let say = Say { authority: &bed.authority, created, ..Say::events(body.as_bytes(), 2) };
    let (mut parts, body) = agent.sign(&say).into_parts();
    parts.headers.remove(header::HOST);
    parts.uri = format!("https://{}/v3/events", bed.authority).parse().unwrap();
    let answer = sender.send_request(Request::from_parts(parts, Full::from(body))).await.unwrap();
    assert!(answer.headers().contains_key(header::DATE));
    let (status, told) = problem(answer).await;
    assert_eq!((status.as_u16(), told["type"].as_str().unwrap().ends_with("/clock")), (401, true));
    assert_eq!(bed.intake.count(), 1);
    bed.stop().await;
}

#[tokio::test]
async fn without_a_good_certificate_nobody_gets_in() {
    let bed = Bed::start(|_| {}).await;
    let (now, runtime) = (unix_now(), "r-1".parse().unwrap());
    let roots = || bed.ca.trust_bundle().store().unwrap();
    let leaf = |now, validity| bed.ca.make_runtime(&runtime, &domain(), now, validity).unwrap().identity().unwrap();
    let none = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots())
        .with_no_client_auth();
    let good = bed.agent("r-1").identity;
    let old_protocol = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&TLS12])
        .unwrap()
        .with_root_certificates(roots())
        .with_client_auth_cert(good.chain.clone(), PrivateKeyDer::Pkcs8(good.key.clone_key()))
        .unwrap();
    let server = bed.ca.make_server(&["kcp.test".parse().unwrap()], now, SERVER_VALIDITY).unwrap();
    let another_alpn = |mut config: ClientConfig| {
        config.alpn_protocols = vec![b"spdy".to_vec()];
        config
    };
    for (config, reason) in [
        (none, "no-certificate"),
        (old_protocol, "incompatible"),
        (bed.client(&Agent::new(&ca(now), "r-1", now).identity), "unknown-issuer"),
        (bed.client(&leaf(now - 500, Duration::from_secs(60))), "expired"),
        (bed.client(&leaf(now + 3_600, RUNTIME_VALIDITY)), "not-yet-valid"),
        (bed.client(&server.identity().unwrap()), "purpose"),
        (another_alpn(bed.client(&good)), "protocol"),
    ] {
        assert!(bed.is_refused(config).await, "{reason}");
        let failed = bed.metrics.handshakes_failed.get_or_create(&metrics::Why { reason }).get();
        assert_eq!(failed, 1, "{reason}");
    }
    let agent = bed.agent("r-1");
    let answer = bed.http2(&agent).await.send_request(bed.request(&agent, 1, true)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED, "nobody else is disturbed");
    bed.stop().await;
}

#[tokio::test]
async fn a_certificate_that_names_no_runtime_of_ours_is_told_so_once() {
    let bed = Bed::start(|_| {}).await;
    let runtime: RuntimeId = "r-1".parse().unwrap();
    let leaf = bed.ca.make_runtime(&runtime, &"other".parse().unwrap(), unix_now(), RUNTIME_VALIDITY).unwrap();
    let agent = Agent::with(leaf.identity().unwrap(), runtime);
    for is_http2 in [true, false] {
        let mut sender = bed.open(&agent, is_http2).await;
        let answer = sender.send(bed.request(&agent, 1, is_http2)).await.unwrap();
        assert_eq!(answer.status(), StatusCode::FORBIDDEN);
        assert_eq!(answer.headers().get(header::CONNECTION).is_none(), is_http2, "HTTP/2 knows no such field");
        sender.ends().await;
    }
    assert_eq!(bed.intake.count(), 0);
    bed.stop().await;
}

#[tokio::test]
async fn bodies_above_the_limit_are_refused_with_and_without_a_length() {
    let bed = Bed::start(|settings| settings.max_body = 10_000).await;
    let agent = bed.agent("r-1");
    let mut sender = bed.http2(&agent).await;
    let (mut parts, _) = bed.request(&agent, 1, true).into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    let pieces = || (0..20).map(|_| Ok::<_, std::io::Error>(Frame::data(Bytes::from(vec![b' '; 1_000]))));
    let without = Request::from_parts(parts.clone(), StreamBody::new(stream::iter(pieces())).boxed());
    let stream = bed.connect(bed.client(&agent.identity)).await.unwrap();
    let (mut streaming, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let (status, told) = problem(streaming.send_request(without).await.unwrap()).await;
    assert_eq!((status, &told["maxBytes"]), (StatusCode::PAYLOAD_TOO_LARGE, &10_000.into()));

    let with = Request::from_parts(parts, Full::from(vec![b' '; 10_001]));
    let (status, _) = problem(sender.send_request(with).await.unwrap()).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let answer = sender.send_request(bed.request(&agent, 1, true)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED);

    // Nor does the refusal get lost behind a body that nobody read, and the connection lives.
    let (mut sender, connection) = http1::handshake(TokioIo::new(bed.http1(&agent).await)).await.unwrap();
    tokio::spawn(connection);
    let (parts, _) = bed.request(&agent, 2, false).into_parts();
    let with = Request::from_parts(parts, Full::from(vec![b' '; 500_000]));
    let (status, told) = problem(sender.send_request(with).await.unwrap()).await;
    assert_eq!((status, &told["maxBytes"]), (StatusCode::PAYLOAD_TOO_LARGE, &10_000.into()));
    sender.ready().await.unwrap();
    let answer = sender.send_request(bed.request(&agent, 2, false)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED);

    let mut chunked = bed.http1(&agent).await;
    let head = head(&bed.request(&agent, 3, false), "transfer-encoding: chunked");
    chunked.write_all(head.as_bytes()).await.unwrap();
    assert!(rest(chunked).await.starts_with("HTTP/1.1 411 "));
    bed.stop().await;
}

/// Over HTTP/1.1, what is left of a refused body is read, and that is work like any other.
#[tokio::test]
async fn a_refused_body_costs_its_runtime_as_much_as_one_that_is_taken() {
    let bed = Bed::start(|settings| {
        let limits = &mut settings.limits;
        (limits.per_second, limits.burst, limits.bytes_per_request) = (1, 1_000, 1_000);
    })
    .await;
    let (agent, other) = (bed.agent("r-1"), bed.agent("r-2"));
    let mut sender = bed.open(&agent, false).await;
    bed.says(&mut sender, &agent, 1).await;
    for _ in 0..2 {
        let (mut parts, _) = bed.request(&agent, 2, false).into_parts();
        parts.headers.remove(header::CONTENT_TYPE);
        let refused = sender.send(Request::from_parts(parts, Full::from(vec![b' '; 900_000]))).await.unwrap();
        assert_eq!(refused.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }
    let answer = sender.send(bed.request(&agent, 2, false)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS);
    let mut others = bed.open(&other, false).await;
    bed.says(&mut others, &other, 1).await;
    bed.stop().await;
}

/// Each bed has one short deadline, so that the one that is meant cuts.
#[tokio::test]
async fn who_is_slow_is_cut_off() {
    let short = Duration::from_millis(100);
    let bed = Bed::start(|settings| settings.handshake_deadline = short).await;
    let mut silent = TcpStream::connect(bed.address).await.unwrap();
    let ended = timeout(PATIENCE, silent.read(&mut [0])).await.unwrap();
    assert!(matches!(ended, Ok(0) | Err(_)), "a handshake that never begins");
    bed.stop().await;

    let bed = Bed::start(|settings| settings.head_deadline = short).await;
    let agent = bed.agent("r-1");
    let mut slow_head = bed.http1(&agent).await;
    slow_head.write_all(b"POST /v3/events HTTP/1.1\r\nhost: ").await.unwrap();
    assert!(!rest(slow_head).await.contains("HTTP/1.1 2"));
    let mut no_preface = bed.connect(bed.client(&agent.identity)).await.unwrap();
    no_preface.write_all(b"PRI * HTTP/2.0").await.unwrap();
    rest(no_preface).await;
    bed.stop().await;

    let bed = Bed::start(|settings| settings.body_deadline = short).await;
    let agent = bed.agent("r-1");
    let mut slow_body = bed.http1(&agent).await;
    let head = head(&bed.request(&agent, 1, false), "content-length: 100");
    slow_body.write_all(format!("{head}[").as_bytes()).await.unwrap();
    assert!(rest(slow_body).await.starts_with("HTTP/1.1 408 "));
    assert_eq!(bed.intake.count(), 0);
    bed.stop().await;
}

#[tokio::test]
async fn a_new_configuration_holds_from_the_next_connection_on() {
    let bed = Bed::start(|_| {}).await;
    let (old, next_ca) = (bed.agent("r-1"), ca(unix_now()));
    let new = Agent::new(&next_ca, "r-2", unix_now());
    let mut open = bed.http2(&old).await;
    assert!(bed.is_refused(bed.client(&new.identity)).await);
    let server = bed.ca.make_server(&["kcp.test".parse().unwrap()], unix_now(), SERVER_VALIDITY).unwrap();
    let server = server.identity().unwrap();
    bed.tls.store(ServerIdentity::new(&server, &next_ca.trust_bundle()).unwrap().config());
    let answer = bed.http2(&new).await.send_request(bed.request(&new, 1, true)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED);
    assert!(bed.is_refused(bed.client(&old.identity)).await);
    let answer = open.send_request(bed.request(&old, 1, true)).await.unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED, "what is open lives until its age");
    bed.stop().await;
}

#[tokio::test]
async fn connections_beyond_the_cap_wait_for_a_place() {
    let bed = Bed::start(|settings| settings.max_connections = 1).await;
    let (first, second) = (bed.agent("r-1"), bed.agent("r-2"));
    let mut held = bed.http2(&first).await;
    assert!(held.send_request(bed.request(&first, 1, true)).await.unwrap().status().is_success());
    let mut waiting = Box::pin(bed.http2(&second));
    let is_waiting = futures::poll!(&mut waiting).is_pending();
    assert!(is_waiting && bed.metrics.connections.get() == 1);
    assert_eq!(bed.metrics.accepts_paused.get_or_create(&metrics::Why { reason: "connections" }).get(), 1);
    drop(held);
    let mut sender = timeout(PATIENCE, waiting).await.unwrap();
    assert!(sender.send_request(bed.request(&second, 1, true)).await.unwrap().status().is_success());
    bed.stop().await;
}

#[tokio::test]
async fn shutdown_lets_a_request_in_flight_end_and_takes_no_other() {
    let bed = Bed::start(|_| {}).await;
    let agent = bed.agent("r-1");
    let mut stream = bed.http1(&agent).await;
    let (parts, body) = bed.request(&agent, 1, false).into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let head = head(&Request::from_parts(parts, Full::default()), &format!("content-length: {}", body.len()));
    stream.write_all(head.as_bytes()).await.unwrap();
    // The server holds the head once it counts the request as one of this runtime.
    let path = metrics::Path { route: "events" };
    timeout(PATIENCE, async {
        while bed.metrics.begun.get_or_create(&path).get() == 0 {
            tokio::task::yield_now().await
        }
    })
    .await
    .unwrap();
    bed.shutdown.cancel();
    timeout(PATIENCE, async {
        while TcpStream::connect(bed.address).await.is_ok() {
            tokio::task::yield_now().await
        }
    })
    .await
    .unwrap();
    stream.write_all(&body).await.unwrap();
    assert!(rest(stream).await.starts_with("HTTP/1.1 202 "));
    bed.stop().await;
}

/// A request's head as it goes over HTTP/1.1, with one field more.
fn head(request: &Request<Full<Bytes>>, more: &str) -> String {
    let mut text = format!("POST {} HTTP/1.1\r\n", request.uri().path());
    for (name, value) in request.headers() {
        text.push_str(&format!("{name}: {}\r\n", value.to_str().unwrap()));
    }
    text + more + "\r\n\r\n"
}
