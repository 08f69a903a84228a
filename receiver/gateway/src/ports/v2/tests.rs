//! Golden requests and responses, in memory, with generated certificates.

mod limits;

use std::{collections::BTreeMap, fs, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use http::{HeaderMap, Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, SanType, date_time_ymd,
};
use rustls_pki_types::{CertificateDer, ServerName};
use serde::Deserialize;
use tidewatch_api::identity::RuntimeId;
use tidewatch_cluster::testing::Folder;
use tidewatch_contract::{
    certificate::{RuntimeCertificate, fingerprint},
    forwarded::FORWARDED_CLIENT_CERT,
    v2::{Event, forwarded_header},
};
use tidewatch_kit::{
    metrics::Registry,
    tls::{self, Identity},
};
use tidewatch_trust::{PemIdentity, ProxyIdentity, SERVER_VALIDITY, ServerIdentity, TrustBundle};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    enrolment::Revocations,
    ports::{
        Gateway, Now,
        refusal::{HttpResponse, Refusal},
        service::Service,
        tests::testing,
    },
};

/// Upper bound of waits; only a failing test reaches it.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
struct Golden {
    about: String,
    #[serde(default = "post")]
    method: String,
    path: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    body: String,
    #[serde(default = "once")]
    times: usize,
    #[serde(default = "runtime")]
    caller: String,
    answer: u16,
    #[serde(default)]
    taken: Option<String>,
}

fn post() -> String {
    "POST".into()
}

fn once() -> usize {
    1
}

fn runtime() -> String {
    "runtime".into()
}

/// A CA like lifecycle-manager's, which issues leaves without URI and extended key usage.
struct Root {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Root {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().der().clone();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    fn bundle(&self) -> TrustBundle {
        TrustBundle::of(vec![self.certificate.clone()])
    }

    fn leaf(&self, name: &str, uri: Option<&str>, last_year: i32) -> CertificateDer<'static> {
        self.signed(&KeyPair::generate().unwrap(), name, uri, last_year)
    }

    /// A leaf of a runtime with its key.
    fn identity(&self, name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        Identity { chain: vec![self.signed(&key, name, None, 2090)], key: key.into() }
    }

    fn signed(&self, key: &KeyPair, name: &str, uri: Option<&str>, last_year: i32) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        if !name.is_empty() {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.subject_alt_names = uri.map(|uri| SanType::URI(uri.try_into().unwrap())).into_iter().collect();
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(last_year, 1, 1);
        params.signed_by(key, &self.issuer).unwrap().der().clone()
    }
}

/// A known manager that never responds.
const HUNG_MANAGER: &str = "hung";

#[derive(Clone, Default)]
struct RecordingIntake(Arc<Mutex<Vec<String>>>);

impl V2Intake for RecordingIntake {
    fn is_manager(&self, manager: &str) -> bool {
        ["lifecycle-manager", "other", HUNG_MANAGER].contains(&manager)
    }

    fn is_starting(&self, runtime: &RuntimeId) -> bool {
        runtime.as_str() == "r-2"
    }

    async fn take(&self, manager: &str, caller: &RuntimeCertificate, event: Event) -> Result<(), Refusal> {
        if caller.runtime.as_str() == "r-3" {
            return Err(Refusal::Superseded);
        }
        if manager == HUNG_MANAGER {
            return std::future::pending().await;
        }
        let Event { namespace, name, group, version, kind } = event;
        let event = format!("{} {manager} {group}/{version}/{kind} {namespace}/{name}", caller.runtime);
        self.0.lock().push(event);
        Ok(())
    }
}

struct Fixture {
    direct: V2Handler<RecordingIntake>,
    proxied: V2Handler<RecordingIntake>,
    intake: RecordingIntake,
    leaves: BTreeMap<&'static str, CertificateDer<'static>>,
    registry: Registry,
}

impl Fixture {
    fn new() -> Self {
        let clients = Root::new();
        let proxies = Root::new();
        let others = Root::new();
        let identity = "spiffe://proxy";
        let proxy = Proxy { roots: proxies.bundle(), identity: identity.parse().unwrap() };
        let leaves = BTreeMap::from([
            ("runtime", clients.leaf("r-1", None, 2090)),
            ("early", clients.leaf("r-2", None, 2090)),
            ("superseded", clients.leaf("r-3", None, 2090)),
            ("nameless", clients.leaf("", Some("spiffe://a/b"), 2090)),
            ("expired", clients.leaf("r-1", None, 2021)),
            ("foreign", others.leaf("r-1", None, 2090)),
            ("proxy", proxies.leaf("proxy", Some(identity), 2090)),
            ("impostor", proxies.leaf("r-1", Some("spiffe://other"), 2090)),
        ]);
        let mut registry = Registry::default();
        let intake = RecordingIntake::default();
        let settings = settings("127.0.0.1:0".parse().unwrap(), testing::domain());
        let metrics = Metrics::register(registry.sub_registry_with_prefix("watcher_listener"));
        let handler = |proxy| {
            let callers = CallerVerifier::new(clients.bundle(), proxy).unwrap();
            V2Handler::new(&settings, callers, intake.clone(), metrics.clone(), testing::metrics().port)
        };
        Self { direct: handler(None), proxied: handler(Some(proxy)), intake, leaves, registry }
    }

    async fn send(&self, caller: &str, request: Request<Full<bytes::Bytes>>) -> HttpResponse {
        let handler = if ["proxy", "impostor"].contains(&caller) { &self.proxied } else { &self.direct };
        handler.handle(request, &handler.identify(&[self.leaves[caller].clone()], None)).await.0
    }

    fn metric(&self, name: &str) -> f64 {
        let page = self.registry.encode().unwrap();
        let values = page.lines().filter(|line| line.starts_with(name) && line.contains("server_name=\"listener\""));
        values.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }
}

#[tokio::test]
async fn golden_requests_get_golden_responses() {
    let golden: Vec<Golden> =
        serde_json::from_str(include_str!("../../../../../tests/golden/v2/received.json")).unwrap();
    let fixture = Fixture::new();
    let mut refused = 0.0;
    let mut too_large = 0.0;
    let mut unverified = 0.0;
    let all = golden.len();
    for golden in golden {
        let Golden { about, method, path, headers, body, times, caller, answer: expected, taken } = golden;
        let mut request = Request::builder().method(method.parse::<Method>().unwrap()).uri(path);
        for (name, mut value) in headers {
            for (leaf, der) in &fixture.leaves {
                value = value.replace(&format!("{{{leaf}}}"), &forwarded_header(der));
            }
            request = request.header(name, value);
        }
        let request = request.body(Full::new(bytes::Bytes::from(body.repeat(times)))).unwrap();
        let response = fixture.send(&caller, request).await;
        assert_eq!(response.status(), expected, "{about}");
        refused += f64::from(u8::from(expected != 200));
        too_large += f64::from(u8::from(expected == 413));
        unverified += f64::from(u8::from(expected == 401 || caller == "nameless" || about.contains("common name")));
        let content_type = response.headers().get(header::CONTENT_TYPE).cloned();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        if expected == 200 {
            assert!(body.is_empty() && content_type.is_none(), "{about}");
        } else {
            assert_eq!(content_type.unwrap(), "application/problem+json", "{about}");
            assert!(!String::from_utf8_lossy(&body).contains("secret-input"), "{about}: the input is never echoed");
        }
        assert_eq!(std::mem::take(&mut *fixture.intake.0.lock()), Vec::from_iter(taken), "{about}");
    }
    assert_eq!(fixture.metric("watcher_listener_requests_total"), all as f64);
    assert_eq!(fixture.metric("watcher_listener_request_errors_total"), refused);
    assert_eq!(fixture.metric("watcher_listener_exceeding_size_limit_requests_total"), too_large);
    assert_eq!(fixture.metric("watcher_listener_failed_verification_requests_total"), unverified);
    assert_eq!(fixture.metric("watcher_listener_inflight_requests"), 0.0);
}

#[tokio::test]
async fn requests_of_a_revoked_runtime_or_leaf_are_refused() {
    let fixture = Fixture::new();
    let revocations = Revocations::default();
    let settings =
        Settings { revocations: revocations.clone(), ..settings("127.0.0.1:0".parse().unwrap(), testing::domain()) };
    let callers = CallerVerifier::new(TrustBundle::of(vec![fixture.leaves["runtime"].clone()]), None).unwrap();
    let metrics = Metrics::register(&mut Registry::default());
    let handler = V2Handler::new(&settings, callers, fixture.intake.clone(), metrics, testing::metrics().port);
    let leaf = fingerprint(&fixture.leaves["runtime"]);
    let body = r#"{"watched":{"Namespace":"a","Name":"b"},"watchedGvk":{"group":"g","version":"v","kind":"K"}}"#;
    for (keys, expected) in [(vec![], 200), (vec!["r-2"], 200), (vec!["r-1"], 401), (vec![&*leaf], 401)] {
        let data: BTreeMap<_, _> = keys.into_iter().map(|key| (key, "lost")).collect();
        revocations.set(Some(&serde_json::from_value(serde_json::json!({"data": data})).unwrap()));
        let request = Request::post("/v2/lifecycle-manager/event").body(Full::new(body.into())).unwrap();
        let response = handler.handle(request, &handler.identify(&[fixture.leaves["runtime"].clone()], None)).await.0;
        assert_eq!(response.status(), expected);
    }
}

#[tokio::test]
async fn only_the_connection_of_a_revoked_leaf_is_closed() {
    let clients = Root::new();
    let ca = testing::ca(Now::read().unix);
    let now = Now::read().unix;
    let revocations = Revocations::default();
    let server = ca.make_server(&["kcp.test".try_into().unwrap()], now, SERVER_VALIDITY).unwrap().identity().unwrap();
    let server = ServerIdentity::new(&server, &clients.bundle()).unwrap();
    let settings =
        Settings { revocations: revocations.clone(), ..settings("127.0.0.1:0".parse().unwrap(), testing::domain()) };
    let tls = Arc::new(ArcSwap::new(server.config));
    let callers = CallerVerifier::new(clients.bundle(), None).unwrap();
    let metrics = Metrics::register(&mut Registry::default());
    let port = testing::metrics().port;
    let handler =
        |settings: &Settings| Arc::new(V2Handler::new(settings, callers, RecordingIntake::default(), metrics, port));
    let gateway = Gateway::bind(settings, tls, handler).await.unwrap();
    let address = gateway.address();
    let shutdown = CancellationToken::new();
    let served = tokio::spawn(gateway.run(shutdown.clone()));
    let connect = async |identity: &Identity| {
        let config = tls::client(Some(identity), ca.trust_bundle().store().unwrap()).unwrap();
        let tcp = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from("kcp.test").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        (sender, tokio::spawn(connection))
    };
    let send = async |sender: &mut http1::SendRequest<Full<bytes::Bytes>>| {
        let request = Request::post("/v2/lifecycle-manager/event").header(header::HOST, "kcp.test");
        let mut response = sender.send_request(request.body(Full::new("{}".into())).unwrap()).await.unwrap();
        while response.frame().await.is_some() {}
        response.status()
    };
    let [old, new] = [clients.identity("r-1"), clients.identity("r-1")];
    let ((mut first, ended), (mut second, _other)) = (connect(&old).await, connect(&new).await);
    assert_eq!((send(&mut first).await.as_u16(), send(&mut second).await.as_u16()), (200, 200));
    let data = BTreeMap::from([(fingerprint(&old.chain[0]), "lost")]);
    revocations.set(Some(&serde_json::from_value(serde_json::json!({"data": data})).unwrap()));
    let ended = tokio::time::timeout(PATIENCE, ended).await;
    assert!(ended.is_ok(), "the idle connection is closed");
    assert_eq!(send(&mut second).await, 200, "another certificate of the same runtime stays valid");
    drop(second);
    shutdown.cancel();
    served.await.unwrap();
}

#[test]
fn handshake_behind_a_proxy_trusts_the_proxy_roots_alone() {
    let clients = Root::new();
    let proxies = Root::new();
    let proxy = Proxy { roots: proxies.bundle(), identity: "proxy.test".parse().unwrap() };
    assert_eq!(CallerVerifier::new(clients.bundle(), None).unwrap().bundle(), clients.bundle());
    assert_eq!(CallerVerifier::new(clients.bundle(), Some(proxy)).unwrap().bundle(), proxies.bundle());
}

/// Certificate files of this port.
trait Certificates {
    fn put_server(&self, pair: &PemIdentity);
    fn put_clients(&self, root: &Root);
    fn open(&self, proxy: Option<ProxyIdentity>, metrics: &tidewatch_trust::Metrics) -> TlsFiles;
}

impl Certificates for Folder {
    fn put_server(&self, pair: &PemIdentity) {
        self.put("chain", &pair.chain);
        self.put("key", &pair.key);
    }

    fn put_clients(&self, root: &Root) {
        self.put("clients", &root.bundle().to_pem());
    }

    /// Opens the files, with those of a proxy if one is given.
    fn open(&self, proxy: Option<ProxyIdentity>, metrics: &tidewatch_trust::Metrics) -> TlsFiles {
        let path = |name| Some(self.0.join(name));
        let flags = Flags {
            v2_max_connections: 64,
            v2: true,
            v2_address: "127.0.0.1:0".parse().unwrap(),
            v2_client_ca: path("clients"),
            v2_tls_cert: None,
            v2_tls_key: None,
            v2_proxy_ca: proxy.as_ref().and_then(|_| path("proxies")),
            v2_proxy_identity: proxy,
        };
        TlsFiles::open(&flags, path("chain").as_ref(), path("key").as_ref(), metrics.clone()).unwrap()
    }
}

/// Returns the fingerprint of the server certificate if a client with this identity is admitted.
async fn admitted(files: &TlsFiles, identity: &Identity, servers: &TrustBundle) -> Option<String> {
    let (client, server) = tokio::io::duplex(1 << 16);
    let config = Arc::new(tls::client(Some(identity), servers.store().unwrap()).unwrap());
    let accept = TlsAcceptor::from(files.tls.load_full()).accept(server);
    let connect = TlsConnector::from(config).connect(ServerName::try_from("kcp.test").unwrap(), client);
    let (accepted, connected) = tokio::join!(accept, connect);
    accepted.ok()?;
    Some(fingerprint(&connected.ok()?.get_ref().1.peer_certificates()?[0]))
}

#[tokio::test]
async fn changed_files_are_applied_as_a_whole_or_the_last_good_ones_stay() {
    const DAY: i64 = 86_400;
    let folder = Folder::new("v2-files");
    let now = Now::read().unix;
    let metrics = tidewatch_trust::Metrics::default();
    let [old, new] = [Root::new(), Root::new()];
    let [agent, newer] = [old.identity("r-1"), new.identity("r-1")];
    let ca = testing::ca(now - 50 * DAY);
    let make = |at| ca.make_server(&["kcp.test".try_into().unwrap()], at, SERVER_VALIDITY).unwrap();
    let [first, second] = [make(now), make(now)];
    folder.put_server(&first);
    folder.put_clients(&old);
    let mut files = folder.open(None, &metrics);
    let shown = admitted(&files, &agent, &ca.trust_bundle()).await.unwrap();
    assert_eq!(admitted(&files, &newer, &ca.trust_bundle()).await, None);

    for text in ["garbage", ""] {
        folder.put("clients", text);
        files.reload(now);
        files.reload(now);
        folder.put_clients(&old);
    }
    folder.put("key", &second.key);
    files.reload(now);
    folder.put_server(&make(now - 40 * DAY));
    folder.put_clients(&new);
    files.reload(now);
    fs::remove_file(folder.0.join("chain")).unwrap();
    files.reload(now);
    assert_eq!(
        admitted(&files, &agent, &ca.trust_bundle()).await.as_ref(),
        Some(&shown),
        "the roots are not applied without the rest"
    );
    assert_eq!(admitted(&files, &newer, &ca.trust_bundle()).await, None);

    folder.put_server(&second);
    files.reload(now);
    assert_eq!(admitted(&files, &agent, &ca.trust_bundle()).await, None);
    assert!(admitted(&files, &newer, &ca.trust_bundle()).await.is_some_and(|other| other != shown));
    let mut registry = Registry::default();
    metrics.register_in(&mut registry);
    let page = registry.encode().unwrap();
    for line in ["pki_file_reloads_total{outcome=\"refused\"} 4", "pki_file_reloads_total{outcome=\"taken\"} 1"] {
        assert!(page.lines().any(|known| known == line), "each is counted once: {page}");
    }
}

#[test]
fn forwarded_certificate_is_verified_by_the_current_roots() {
    let folder = Folder::new("v2-proxied");
    let now = Now::read().unix;
    let [old, new, proxies] = [Root::new(), Root::new(), Root::new()];
    folder.put_server(&testing::ca(now).make_server(&["kcp.test".try_into().unwrap()], now, SERVER_VALIDITY).unwrap());
    folder.put_clients(&old);
    folder.put("proxies", &proxies.bundle().to_pem());
    let mut files = folder.open(Some("spiffe://proxy".parse().unwrap()), &tidewatch_trust::Metrics::default());
    let callers = files.callers.clone();
    let peer = callers.identify(&[proxies.leaf("proxy", Some("spiffe://proxy"), 2090)]);
    let leaves = [old.leaf("r-1", None, 2090), new.leaf("r-1", None, 2090)];
    let is_accepted = || {
        leaves.each_ref().map(|leaf| {
            let mut headers = HeaderMap::new();
            headers.insert(FORWARDED_CLIENT_CERT, forwarded_header(leaf).parse().unwrap());
            callers.sender(&peer, &headers, now).is_ok()
        })
    };
    assert_eq!(is_accepted(), [true, false]);
    folder.put_clients(&new);
    files.reload(now);
    assert_eq!(is_accepted(), [false, true]);
    assert_eq!(callers.bundle(), proxies.bundle());
}
