//! The enrolment port: table of refusals with their counters, and real TLS.

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
use tidewatch_contract::{
    certificate::labelled_pem,
    enrolment::{CERTIFICATES_PATH, CertificateRequest, CertificateResponse, TRUST_PATH, TrustResponse},
};
use tidewatch_kit::{metrics::Registry, tls};
use tidewatch_trust::{CA_VALIDITY, Ca, SERVER_VALIDITY, ServerIdentity};
use tokio::{net::TcpStream, task::JoinSet};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::*;
use crate::{
    enrolment::tests::testing::{
        Behavior, Fixture, Issuer, claims, domain, honest_request, key, place, request_for, unix_now,
    },
    ports::{Gateway, Peer, PortMetrics, service::Service},
};

/// Upper bound of waits; only a failing test reaches it.
const PATIENCE: Duration = Duration::from_secs(30);

struct Port {
    enrolment: Fixture,
    handler: EnrolmentHandler,
    registry: Registry,
}

impl Port {
    fn new(enrolment: Fixture) -> Self {
        let mut registry = Registry::default();
        let metrics = PortMetrics::register(&mut registry);
        let handler = EnrolmentHandler::new(
            &settings("127.0.0.1:0".parse().unwrap(), domain()),
            enrolment.enrolments.clone(),
            metrics,
        );
        Self { enrolment, handler, registry }
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> (u16, Value, bool) {
        let from: IpAddr = "192.0.2.1".parse().unwrap();
        let (response, is_last) = self.handler.handle(request, &Peer::Client(Some(from))).await;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap(), is_last)
    }

    fn refusals(&self, reason: &str) -> usize {
        let text = self.registry.encode().unwrap();
        let named = format!("reason=\"{reason}\"");
        let lines = text.lines().filter(|line| line.starts_with("requests_refused_total") && line.contains(&named));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap()).sum()
    }

    /// Asserts that the request is refused with this status and counted by this reason, and that the response echoes
    /// none of it.
    async fn is_refused(&self, request: Request<Full<Bytes>>, status: u16, reason: &str) {
        let before = self.refusals(reason);
        let (actual, problem, is_last) = self.send(request).await;
        assert_eq!((actual, self.refusals(reason)), (status, before + 1), "{reason}: {problem}");
        assert!(is_last, "{reason}");
        assert_eq!(problem["status"], json!(status));
        let text = problem.to_string();
        assert!(!text.contains("r-1") && !text.contains("eyJ"), "{text}");
    }
}

fn request(token: &str, request: &CertificateRequest) -> Request<Full<Bytes>> {
    let body = request.to_json().unwrap();
    Request::post(CERTIFICATES_PATH)
        .header(header::HOST, "kcp.test:8444")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::CONTENT_LENGTH, body.len())
        .header(header::AUTHORIZATION, format!("Bearer {token}"))
        .body(Full::from(body))
        .unwrap()
}

/// A certificate request of which a byte was changed after signing.
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
async fn agent_enrols_and_any_client_gets_the_trust_bundle() {
    let port = Port::new(Fixture::new());
    let (status, response, is_last) = port.send(request(&port.enrolment.first.token(), &honest_request("r-1"))).await;
    let response = CertificateResponse::parse(response.to_string().as_bytes()).unwrap();
    assert_eq!((status, is_last), (200, false));
    let (status, trust, _) = port.send(Request::get(TRUST_PATH).body(Full::default()).unwrap()).await;
    let trust = TrustResponse::parse(trust.to_string().as_bytes()).unwrap();
    assert_eq!(
        (status, trust.trust_bundle, trust.trust_revision),
        (200, response.trust_bundle, response.trust_revision)
    );
}

#[tokio::test]
async fn invalid_tokens_are_refused() {
    let port = Port::new(Fixture::new());
    let issuer = port.enrolment.first.issuer();
    let now = unix_now();
    let with = |path: &str, value: Value| {
        let mut claims = claims(now);
        *claims.pointer_mut(path).unwrap() = value;
        issuer.sign(&claims)
    };
    for (case, token, status, reason) in [
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
        ("unknown key", Issuer::p256("z").sign(&claims(now)), 401, "token-recent-key"),
        ("garbage", "eyJ.eyJ.eyJ".to_owned(), 401, "token-malformed"),
        ("too long", "a".repeat(9_000), 401, "token-malformed"),
    ] {
        port.is_refused(request(&token, &honest_request("r-1")), status, reason).await;
        assert_eq!(port.enrolment.first.call_counts().1, 0, "{case}: the runtime was contacted");
    }
    assert_eq!(port.enrolment.first.call_counts().0, 1);
    // A token of one runtime for the certificate of another.
    port.is_refused(request(&port.enrolment.first.token(), &honest_request("r-2")), 401, "token-key").await;
    port.enrolment.first.set_review(json!({"authenticated": false}));
    port.is_refused(request(&port.enrolment.first.token(), &honest_request("r-1")), 401, "token-unauthenticated").await;
    port.enrolment.first.set_review(
        json!({"authenticated": true, "audiences": ["spiffe://kyma.local/tidewatch"], "user": {"username": "x"}}),
    );
    port.is_refused(request(&port.enrolment.first.token(), &honest_request("r-1")), 403, "token-other").await;
}

#[tokio::test]
async fn invalid_certificate_requests_are_refused() {
    let port = Port::new(Fixture::new());
    let token = || port.enrolment.first.token();
    let weak = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let asks = |request: String| CertificateRequest { runtime: "r-1".parse().unwrap(), request };
    port.is_refused(request(&token(), &asks(request_for(&weak, |_| {}))), 400, "request-key").await;
    port.is_refused(request(&token(), &asks("nothing".to_owned())), 400, "request-malformed").await;
    port.is_refused(request(&token(), &asks(tampered())), 400, "request-signature").await;
    let ca = |params: &mut CertificateParams| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let greedy = request_for(&KeyPair::generate().unwrap(), ca);
    port.is_refused(request(&token(), &asks(greedy)), 400, "request-ca").await;
    assert_eq!(port.enrolment.first.call_counts().1, 0, "a refused request causes no token review");
    port.is_refused(request(&token(), &honest_request("r-9")), 404, "unknown-runtime").await;
    port.enrolment.revocations.set(Some(&serde_json::from_value(json!({"data": {"r-1": ""}})).unwrap()));
    port.is_refused(request(&token(), &honest_request("r-1")), 403, "revoked").await;
    port.enrolment.revocations.set(None);
    place(&port.enrolment.fleet, "k-3", "r-1");
    port.is_refused(request(&token(), &honest_request("r-1")), 409, "ambiguous-runtime").await;
    port.enrolment.fleet.remove(&key("k-3"));
    place(&port.enrolment.fleet, "k-5", "r-5");
    port.is_refused(request(&token(), &honest_request("r-5")), 503, "no-access").await;
    port.enrolment.first.set_behavior(Behavior::Failing(500));
    port.is_refused(request(&token(), &honest_request("r-1")), 503, "unreachable").await;
    let bytes = |body: &'static [u8]| request(&token(), &honest_request("r-1")).map(|_| Full::from(body));
    port.is_refused(bytes(b"{"), 400, "malformed").await;
    port.is_refused(bytes(br#"{"runtime": "../x", "request": "y"}"#), 400, "malformed").await;
    port.is_refused(bytes(&[b' '; (16 << 10) + 1]), 413, "too-large").await;
}

#[tokio::test]
async fn enrolments_are_rate_limited_by_runtime_and_address() {
    let port = Port::new(Fixture::new());
    let token = port.enrolment.first.token();
    for _ in 0..10 {
        assert_eq!(port.send(request(&token, &honest_request("r-1"))).await.0, 200);
    }
    port.is_refused(request(&token, &honest_request("r-1")), 429, "certificates-rate").await;
    let limited = Port::new(Fixture::limited(Some(1)));
    assert_eq!(limited.send(request(&limited.enrolment.first.token(), &honest_request("r-1"))).await.0, 200);
    limited.is_refused(request(&limited.enrolment.first.token(), &honest_request("r-1")), 429, "address-rate").await;
}

#[tokio::test]
async fn invalid_heads_are_refused() {
    let port = Port::new(Fixture::new());
    let good = || request(&port.enrolment.first.token(), &honest_request("r-1"));
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
    let (response, _) = port.handler.handle(by(Method::POST, at(TRUST_PATH)), &Peer::Client(None)).await;
    assert_eq!(response.headers()[header::ALLOW], "GET");
    assert_eq!(port.enrolment.first.call_counts(), (0, 0));
}

/// Starts a port, and returns its address and the root of its certificate.
async fn served(enrolment: &Fixture, change: impl FnOnce(&mut Settings)) -> (SocketAddr, Ca, CancellationToken) {
    let ca = Ca::generate("server root", unix_now(), CA_VALIDITY).unwrap();
    let server = ca.make_server(&["kcp.test".try_into().unwrap()], unix_now(), SERVER_VALIDITY).unwrap();
    let identity = ServerIdentity::new(&server.identity().unwrap(), &ca.trust_bundle()).unwrap();
    let tls = Arc::new(ArcSwap::new(identity.config_for_enrolment()));
    let metrics = PortMetrics::register(&mut Registry::default());
    let mut settings = settings("127.0.0.1:0".parse().unwrap(), domain());
    change(&mut settings);
    let gateway = Gateway::bind(settings, tls, |settings| {
        Arc::new(EnrolmentHandler::new(settings, enrolment.enrolments.clone(), metrics))
    })
    .await
    .unwrap();
    let address = gateway.address();
    let shutdown = CancellationToken::new();
    tokio::spawn(gateway.run(shutdown.clone()));
    (address, ca, shutdown)
}

async fn connect(address: SocketAddr, protocol: &[u8], roots: &Ca) -> io::Result<TokioIo<TlsStream<TcpStream>>> {
    let mut config = tls::client(None, roots.trust_bundle().store().unwrap()).unwrap();
    config.alpn_protocols = vec![protocol.to_vec()];
    let tcp = TcpStream::connect(address).await?;
    let name = ServerName::try_from("kcp.test").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, tcp).await.map(TokioIo::new)
}

/// Enrols over a separate connection, waiting for a slot if necessary.
async fn enrols(address: SocketAddr, ca: &Ca, token: &str) -> u16 {
    let (mut sender, connection) = http1::handshake(connect(address, b"http/1.1", ca).await.unwrap()).await.unwrap();
    let _open = AbortOnDropHandle::new(tokio::spawn(connection));
    sender.send_request(request(token, &honest_request("r-1"))).await.unwrap().status().as_u16()
}

/// Connections beyond the limit wait in the kernel's backlog: none is refused, and none is served before a slot is
/// free.
#[tokio::test]
async fn clients_beyond_the_connection_limit_wait_and_are_served() {
    let enrolment = Fixture::new();
    let (address, ca, shutdown) = served(&enrolment, |settings| settings.max_connections = 1).await;
    let (mut first, connection) = http1::handshake(connect(address, b"http/1.1", &ca).await.unwrap()).await.unwrap();
    let open = AbortOnDropHandle::new(tokio::spawn(connection));
    let ca = Arc::new(ca);
    let mut others = JoinSet::new();
    for _ in 0..3 {
        let ca = ca.clone();
        let token = enrolment.first.token();
        others.spawn(async move { enrols(address, &ca, &token).await });
    }
    for _ in 0..50 {
        first.ready().await.unwrap();
        let mut response =
            first.send_request(Request::get(TRUST_PATH).body(Full::<Bytes>::default()).unwrap()).await.unwrap();
        assert_eq!(response.status(), 200);
        while response.frame().await.is_some() {}
        assert!(others.try_join_next().is_none(), "the only slot is taken");
    }
    drop((first, open));
    let served = tokio::time::timeout(PATIENCE, others.join_all()).await.unwrap();
    assert_eq!(served, [200; 3]);
    shutdown.cancel();
}

/// The wait is bounded, because a silent connection has to release its slot.
#[tokio::test]
async fn silent_connection_loses_its_slot_to_waiting_clients() {
    let enrolment = Fixture::new();
    let short_deadline = |settings: &mut Settings| {
        settings.max_connections = 1;
        // The served client has the same deadline, key generation and request included.
        settings.head_deadline = Duration::from_secs(2);
    };
    let (address, ca, shutdown) = served(&enrolment, short_deadline).await;
    let silent = connect(address, b"http/1.1", &ca).await.unwrap();
    let token = enrolment.first.token();
    assert_eq!(tokio::time::timeout(PATIENCE, enrols(address, &ca, &token)).await.unwrap(), 200);
    drop(silent);
    shutdown.cancel();
}

#[tokio::test]
async fn enrolment_works_without_a_client_certificate_over_both_http_versions() {
    let enrolment = Fixture::new();
    let (address, ca, shutdown) = served(&enrolment, |_| {}).await;
    let connect = async |protocol: &[u8], roots: &Ca| connect(address, protocol, roots).await;
    let (mut sender, connection) = http1::handshake(connect(b"http/1.1", &ca).await.unwrap()).await.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(request(&enrolment.first.token(), &honest_request("r-1"))).await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (200, Version::HTTP_11));

    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), connect(b"h2", &ca).await.unwrap()).await.unwrap();
    let ended = tokio::spawn(connection);
    let mut again = request(&enrolment.first.token(), &honest_request("r-1"));
    *again.uri_mut() = "https://kcp.test:8444/v3/certificates".parse().unwrap();
    again.headers_mut().remove(header::HOST);
    let response = sender.send_request(again).await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (200, Version::HTTP_2));
    let mut forged = request("x.y.z", &honest_request("r-1"));
    *forged.uri_mut() = "https://kcp.test:8444/v3/certificates".parse().unwrap();
    forged.headers_mut().remove(header::HOST);
    assert_eq!(sender.send_request(forged).await.unwrap().status(), 401);
    tokio::time::timeout(Duration::from_secs(30), ended).await.unwrap().unwrap().unwrap();

    let stranger = Ca::generate("other root", unix_now(), CA_VALIDITY).unwrap();
    assert!(connect(b"http/1.1", &stranger).await.is_err(), "a forged bundle trusts no server");
    shutdown.cancel();
}
