//! The port: the whole table of refusals, each with its count, and real TLS.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderName, Method, Request, Version, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use rustls_pki_types::{CertificateSigningRequestDer, ServerName, pem::PemObject as _};
use serde_json::{Value, json};
use tidewatch_shared::{
    certificate::labelled_pem,
    enrolment::{CERTIFICATES_PATH, CertificateRequest, CertificateResponse, TRUST_PATH, TrustResponse},
    metrics::Registry,
    tls,
};
use tokio::{net::TcpStream, task::JoinSet};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::*;
use crate::{
    ingress::enrolment::tests::testing::{
        Issuer, Mood, Room, asked, claims, domain, key, place, request_for, unix_now,
    },
    pki::{CA_VALIDITY, Ca, SERVER_VALIDITY, ServerIdentity},
};

/// How long a test waits for what must come; only a failure reaches it.
const PATIENCE: Duration = Duration::from_secs(30);

struct Port {
    room: Room,
    desk: Desk,
    registry: Registry,
}

impl Port {
    fn new(room: Room) -> Self {
        let mut registry = Registry::default();
        let metrics = Metrics::register_port(&mut registry);
        let desk = Desk::new(&settings("127.0.0.1:0".parse().unwrap(), domain()), room.enrolments.clone(), metrics);
        Self { room, desk, registry }
    }

    async fn say(&self, request: Request<Full<Bytes>>) -> (u16, Value, bool) {
        let from: IpAddr = "192.0.2.1".parse().unwrap();
        let (answer, is_last) = self.desk.answer(request, Some(from)).await;
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap(), is_last)
    }

    fn refusals(&self, reason: &str) -> usize {
        let text = self.registry.encode().unwrap();
        let named = format!("reason=\"{reason}\"");
        let lines = text.lines().filter(|line| line.starts_with("requests_refused_total") && line.contains(&named));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap()).sum()
    }

    /// The request is refused with a status, for a reason, and that is counted; nothing of it is echoed.
    async fn is_refused(&self, request: Request<Full<Bytes>>, status: u16, reason: &str) {
        let before = self.refusals(reason);
        let (said, problem, is_last) = self.say(request).await;
        assert_eq!((said, self.refusals(reason)), (status, before + 1), "{reason}: {problem}");
        assert!(is_last, "{reason}");
        assert_eq!(problem["status"], json!(status));
        let text = problem.to_string();
        assert!(!text.contains("r-1") && !text.contains("eyJ"), "{text}");
    }
}

fn request(token: &str, asked: &CertificateRequest) -> Request<Full<Bytes>> {
    let body = asked.to_json().unwrap();
    Request::post(CERTIFICATES_PATH)
        .header(header::HOST, "kcp.test:8444")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::CONTENT_LENGTH, body.len())
        .header(header::AUTHORIZATION, format!("Bearer {token}"))
        .body(Full::from(body))
        .unwrap()
}

/// A request of which a letter was changed after it was signed.
fn tampered() -> String {
    let good = request_for(&KeyPair::generate().unwrap(), |params| {
        params.distinguished_name.push(rcgen::DnType::CommonName, "another");
    });
    let mut der = CertificateSigningRequestDer::from_pem_slice(good.as_bytes()).unwrap().to_vec();
    let at = der.windows(7).position(|part| part == b"another").unwrap();
    der[at] = b'A';
    labelled_pem("CERTIFICATE REQUEST", &der)
}

#[tokio::test]
async fn an_agent_enrols_and_anyone_learns_what_to_trust() {
    let port = Port::new(Room::new());
    let (status, answer, is_last) = port.say(request(&port.room.first.token(), &asked("r-1"))).await;
    let answer = CertificateResponse::parse(answer.to_string().as_bytes()).unwrap();
    assert_eq!((status, is_last), (200, false));
    let (status, trust, _) = port.say(Request::get(TRUST_PATH).body(Full::default()).unwrap()).await;
    let trust = TrustResponse::parse(trust.to_string().as_bytes()).unwrap();
    assert_eq!((status, trust.trust_bundle, trust.trust_revision), (200, answer.trust_bundle, answer.trust_revision));
}

#[tokio::test]
async fn tokens_that_prove_nothing() {
    let port = Port::new(Room::new());
    let issuer = port.room.first.issuer();
    let now = unix_now();
    let with = |path: &str, value: Value| {
        let mut claims = claims(now);
        *claims.pointer_mut(path).unwrap() = value;
        issuer.sign(&claims)
    };
    for (what, token, status, reason) in [
        ("account", with("/kubernetes.io/serviceaccount/name", json!("default")), 403, "token-account"),
        ("namespace", with("/kubernetes.io/namespace", json!("default")), 403, "token-account"),
        ("unbound", with("/kubernetes.io/pod", Value::Null), 403, "token-unbound"),
        ("audience", with("/aud", json!(["https://kubernetes.default.svc"])), 401, "token-audience"),
        ("expired", with("/exp", json!(now - 61)), 401, "token-expired"),
        ("early", with("/nbf", json!(now + 90)), 401, "token-not-yet"),
        ("unsigned", issuer.sign_as(&json!({"alg": "none", "kid": "a"}), &claims(now)), 401, "token-algorithm"),
        ("symmetric", issuer.sign_as(&json!({"alg": "HS256", "kid": "a"}), &claims(now)), 401, "token-algorithm"),
        ("other algorithm", issuer.sign_as(&json!({"alg": "RS256", "kid": "a"}), &claims(now)), 401, "token-signature"),
        ("cluster", Issuer::p256("a").sign(&claims(now)), 401, "token-signature"),
        ("unknown key", Issuer::p256("z").sign(&claims(now)), 401, "token-key"),
        ("garbage", "eyJ.eyJ.eyJ".to_owned(), 401, "token-malformed"),
        ("too long", "a".repeat(9_000), 401, "token-malformed"),
    ] {
        port.is_refused(request(&token, &asked("r-1")), status, reason).await;
        assert_eq!(port.room.first.asked().1, 0, "{what}: the runtime was asked");
    }
    assert_eq!(port.room.first.asked().0, 1);
    // A token of one runtime for the certificate of another.
    port.is_refused(request(&port.room.first.token(), &asked("r-2")), 401, "token-key").await;
    port.room.first.set_review(json!({"authenticated": false}));
    port.is_refused(request(&port.room.first.token(), &asked("r-1")), 401, "token-unauthenticated").await;
    port.room.first.set_review(json!({"authenticated": true, "audiences": ["tidewatch"], "user": {"username": "x"}}));
    port.is_refused(request(&port.room.first.token(), &asked("r-1")), 403, "token-other").await;
}

#[tokio::test]
async fn requests_that_get_nothing() {
    let port = Port::new(Room::new());
    let token = || port.room.first.token();
    let weak = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let asks = |request: String| CertificateRequest { runtime: "r-1".parse().unwrap(), request };
    port.is_refused(request(&token(), &asks(request_for(&weak, |_| {}))), 400, "request-key").await;
    port.is_refused(request(&token(), &asks("nothing".to_owned())), 400, "request-malformed").await;
    port.is_refused(request(&token(), &asks(tampered())), 400, "request-signature").await;
    let ca = |params: &mut CertificateParams| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let greedy = request_for(&KeyPair::generate().unwrap(), ca);
    port.is_refused(request(&token(), &asks(greedy)), 400, "request-ca").await;
    assert_eq!(port.room.first.asked().1, 0, "whoever asks in vain costs its runtime nothing");
    port.is_refused(request(&token(), &asked("r-9")), 404, "unknown-runtime").await;
    port.room.revocations.set(Some(&serde_json::from_value(json!({"data": {"r-1": ""}})).unwrap()));
    port.is_refused(request(&token(), &asked("r-1")), 403, "revoked").await;
    port.room.revocations.set(None);
    place(&port.room.hub, "k-3", "r-1");
    port.is_refused(request(&token(), &asked("r-1")), 409, "ambiguous-runtime").await;
    port.room.hub.remove(&key("k-3"));
    place(&port.room.hub, "k-5", "r-5");
    port.is_refused(request(&token(), &asked("r-5")), 503, "no-access").await;
    port.room.first.set_mood(Mood::Failing(500));
    port.is_refused(request(&token(), &asked("r-1")), 503, "unreachable").await;
    let bytes = |body: &'static [u8]| request(&token(), &asked("r-1")).map(|_| Full::from(body));
    port.is_refused(bytes(b"{"), 400, "malformed").await;
    port.is_refused(bytes(br#"{"runtime": "../x", "request": "y"}"#), 400, "malformed").await;
    port.is_refused(bytes(&[b' '; (16 << 10) + 1]), 413, "too-large").await;
}

#[tokio::test]
async fn a_runtime_asks_for_so_many_and_no_more() {
    let port = Port::new(Room::new());
    let token = port.room.first.token();
    for _ in 0..10 {
        assert_eq!(port.say(request(&token, &asked("r-1"))).await.0, 200);
    }
    port.is_refused(request(&token, &asked("r-1")), 429, "certificates-rate").await;
    let limited = Port::new(Room::limited(Some(1)));
    assert_eq!(limited.say(request(&limited.room.first.token(), &asked("r-1"))).await.0, 200);
    limited.is_refused(request(&limited.room.first.token(), &asked("r-1")), 429, "address-rate").await;
}

#[tokio::test]
async fn heads_are_judged_by_themselves() {
    let port = Port::new(Room::new());
    let good = || request(&port.room.first.token(), &asked("r-1"));
    let with = |name: HeaderName, value: &'static str| {
        let mut request = good();
        request.headers_mut().insert(name, value.parse().unwrap());
        request
    };
    let at = |path: &'static str| {
        let mut request = good();
        *request.uri_mut() = path.parse().unwrap();
        request
    };
    let by = |method: Method, mut request: Request<Full<Bytes>>| {
        *request.method_mut() = method;
        request
    };
    let without = |name: HeaderName| {
        let mut request = good();
        request.headers_mut().remove(name);
        request
    };
    let mut twice = good();
    twice.headers_mut().append(header::AUTHORIZATION, "Bearer x".parse().unwrap());
    for (request, status, reason) in [
        (at("/v3/events"), 404, "route"),
        (at("/v3/certificates/"), 404, "route"),
        (at("/v3/certificates?x"), 400, "query"),
        (by(Method::GET, good()), 405, "method"),
        (by(Method::POST, at(TRUST_PATH)), 405, "method"),
        (with(header::CONTENT_ENCODING, "gzip"), 400, "encoding"),
        (with(header::TRANSFER_ENCODING, "chunked"), 411, "length"),
        (with(header::CONTENT_TYPE, "text/plain"), 415, "content-type"),
        (with(header::CONTENT_LENGTH, "16385"), 413, "too-large"),
        (with(header::AUTHORIZATION, "Basic eyJ"), 401, "token-missing"),
        (with(header::AUTHORIZATION, "Bearer "), 401, "token-missing"),
        (without(header::AUTHORIZATION), 401, "token-missing"),
        (twice, 401, "token-missing"),
    ] {
        port.is_refused(request, status, reason).await;
    }
    let (answer, _) = port.desk.answer(by(Method::POST, at(TRUST_PATH)), None).await;
    assert_eq!(answer.headers()[header::ALLOW], "GET");
    assert_eq!(port.room.first.asked(), (0, 0));
}

/// A port that serves, and the root of its certificate.
async fn served(room: &Room, change: impl FnOnce(&mut Settings)) -> (SocketAddr, Ca, CancellationToken) {
    let ca = Ca::generate("server root", unix_now(), CA_VALIDITY).unwrap();
    let server = ca.make_server(&["kcp.test".parse().unwrap()], unix_now(), SERVER_VALIDITY).unwrap();
    let identity = ServerIdentity::new(&server.identity().unwrap(), &ca.trust_bundle()).unwrap();
    let tls = Arc::new(ArcSwap::new(identity.config_for_enrolment()));
    let metrics = Metrics::register_port(&mut Registry::default());
    let mut settings = settings("127.0.0.1:0".parse().unwrap(), domain());
    change(&mut settings);
    let gateway = Gateway::bind_enrolment(settings, tls, room.enrolments.clone(), metrics).await.unwrap();
    let (address, shutdown) = (gateway.address(), CancellationToken::new());
    tokio::spawn(gateway.run(shutdown.clone()));
    (address, ca, shutdown)
}

async fn connect(address: SocketAddr, protocol: &[u8], roots: &Ca) -> io::Result<TokioIo<TlsStream<TcpStream>>> {
    let mut config = tls::client_without_client_auth(roots.trust_bundle().store().unwrap()).unwrap();
    config.alpn_protocols = vec![protocol.to_vec()];
    let tcp = TcpStream::connect(address).await?;
    let name = ServerName::try_from("kcp.test").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, tcp).await.map(TokioIo::new)
}

/// Enrols over a connection of its own, which it may have to wait for.
async fn enrols(address: SocketAddr, ca: &Ca, token: &str) -> u16 {
    let (mut sender, connection) = http1::handshake(connect(address, b"http/1.1", ca).await.unwrap()).await.unwrap();
    let _open = AbortOnDropHandle::new(tokio::spawn(connection));
    sender.send_request(request(token, &asked("r-1"))).await.unwrap().status().as_u16()
}

/// More than the port takes at once are taken by the system, and wait there: nobody is refused, and nobody is served before there is
/// room for him.
#[tokio::test]
async fn whoever_comes_when_all_places_are_taken_waits_and_is_served_in_his_turn() {
    let room = Room::new();
    let (address, ca, shutdown) = served(&room, |settings| settings.max_connections = 1).await;
    let (mut first, connection) = http1::handshake(connect(address, b"http/1.1", &ca).await.unwrap()).await.unwrap();
    let open = AbortOnDropHandle::new(tokio::spawn(connection));
    let ca = Arc::new(ca);
    let mut others = JoinSet::new();
    for _ in 0..3 {
        let (ca, token) = (ca.clone(), room.first.token());
        others.spawn(async move { enrols(address, &ca, &token).await });
    }
    for _ in 0..50 {
        first.ready().await.unwrap();
        let mut answer =
            first.send_request(Request::get(TRUST_PATH).body(Full::<Bytes>::default()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), 200);
        while answer.frame().await.is_some() {}
        assert!(others.try_join_next().is_none(), "the only place is taken");
    }
    drop((first, open));
    let served = tokio::time::timeout(PATIENCE, others.join_all()).await.unwrap();
    assert_eq!(served, [200; 3]);
    shutdown.cancel();
}

/// The wait is bounded by how long anybody may keep a place: whoever takes one and says nothing has to leave it.
#[tokio::test]
async fn whoever_keeps_a_place_and_says_nothing_loses_it_to_those_who_wait() {
    let room = Room::new();
    let hasty = |settings: &mut Settings| {
        settings.max_connections = 1;
        // Whoever is served has as long, key and request included.
        settings.head_deadline = Duration::from_secs(2);
    };
    let (address, ca, shutdown) = served(&room, hasty).await;
    let silent = connect(address, b"http/1.1", &ca).await.unwrap();
    let token = room.first.token();
    assert_eq!(tokio::time::timeout(PATIENCE, enrols(address, &ca, &token)).await.unwrap(), 200);
    drop(silent);
    shutdown.cancel();
}

#[tokio::test]
async fn over_tls_without_a_client_certificate_in_both_versions() {
    let room = Room::new();
    let (address, ca, shutdown) = served(&room, |_| {}).await;
    let connect = async |protocol: &[u8], roots: &Ca| connect(address, protocol, roots).await;
    let (mut sender, connection) = http1::handshake(connect(b"http/1.1", &ca).await.unwrap()).await.unwrap();
    tokio::spawn(connection);
    let answer = sender.send_request(request(&room.first.token(), &asked("r-1"))).await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.version()), (200, Version::HTTP_11));

    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), connect(b"h2", &ca).await.unwrap()).await.unwrap();
    let ended = tokio::spawn(connection);
    let mut again = request(&room.first.token(), &asked("r-1"));
    *again.uri_mut() = "https://kcp.test:8444/v3/certificates".parse().unwrap();
    again.headers_mut().remove(header::HOST);
    let answer = sender.send_request(again).await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.version()), (200, Version::HTTP_2));
    let mut forged = request("x.y.z", &asked("r-1"));
    *forged.uri_mut() = "https://kcp.test:8444/v3/certificates".parse().unwrap();
    forged.headers_mut().remove(header::HOST);
    assert_eq!(sender.send_request(forged).await.unwrap().status(), 401);
    tokio::time::timeout(Duration::from_secs(30), ended).await.unwrap().unwrap().unwrap();

    let stranger = Ca::generate("other root", unix_now(), CA_VALIDITY).unwrap();
    assert!(connect(b"http/1.1", &stranger).await.is_err(), "a forged bundle finds no server");
    shutdown.cancel();
}
