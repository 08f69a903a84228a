//! Replicas, and clients of their ports.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Version, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use rustls::{ClientConfig, ServerConfig};
use tidewatch_api::{
    identity::{Instance, RuntimeId},
    replica::ReplicaName,
    shard::{ShardCount, ShardId},
};
use tidewatch_contract::{certificate::RuntimeCertificate, v2::Event};
use tidewatch_fleet::peers::Responders;
use tidewatch_kit::{
    metrics::Registry,
    tls::{self, Identity},
};
use tidewatch_trust::{
    Authority, Ca, RUNTIME_VALIDITY, ReplicaCertificate, ReplicaMetrics, ReplicaSource, ReplicaTls, SERVER_VALIDITY,
    ServerIdentity, Trust, TrustBundle, testing::fixed_authority,
};
use tokio::{net::TcpStream, runtime::Handle, sync::watch, task::JoinSet, time::timeout};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use crate::{
    enrolment::{
        Revocations,
        tests::testing::{Fixture, unix_now},
    },
    ports::{
        Gateway, Metrics, PortMetrics, Settings, V3Handler,
        enrol::{self, EnrolmentHandler},
        metrics::{ReasonLabel, RefusalLabels},
        refusal::Refusal,
        relayed::{self, RelayHandler, RelayedHandlers},
        tests::testing::{AUTHORITY, Agent, RecordingIntake, RequestSpec, ca, domain, settings},
        v2::{self, CallerVerifier, V2Handler, V2Intake},
    },
    relay::{self, Answers, Deadlines, Holder, Holders, Relay, Replica, ReplicaPeers, Tcp},
};

/// Upper bound of waits; only a failing test reaches it.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// The CA of all replicas and agents, and the holders of the runtimes. Runtimes that are not named are nowhere.
pub(super) struct Fleet {
    pub(super) ca: Ca,
    pub(super) authority: Authority,
    /// Trust that the replicas follow.
    trust: watch::Sender<Arc<Trust>>,
    pub(super) enrolment: Fixture,
    places: Places,
    addresses: Arc<Mutex<HashMap<String, SocketAddr>>>,
    served: Served,
    fleet_holder: Arc<Mutex<Option<String>>>,
    /// Replica that does not serve contract v2.
    pub(super) without_v2: Option<&'static str>,
}

/// Shards of each replica.
type Served = Arc<Mutex<HashMap<String, Vec<(ShardId, Instance)>>>>;

/// Name of the replica of each runtime.
type Places = Arc<Mutex<HashMap<RuntimeId, String>>>;

/// What one replica knows of the holders and of the others. The fleet has four shards.
struct KnownHolders {
    own: String,
    places: Places,
    addresses: Arc<Mutex<HashMap<String, SocketAddr>>>,
    fleet_holder: Arc<Mutex<Option<String>>>,
    asked: Arc<AtomicUsize>,
}

impl KnownHolders {
    fn replica(&self, name: &str) -> Option<Arc<Replica>> {
        let address = self.addresses.lock().get(name).copied()?;
        Some(Arc::new(Replica { name: name.parse().unwrap(), address }))
    }

    fn place(&self, name: &str) -> Holder {
        if name == self.own { Holder::Here } else { self.replica(name).map_or(Holder::Unknown, Holder::At) }
    }
}

impl Holders for KnownHolders {
    fn shards(&self) -> ShardCount {
        ShardCount::new(4).unwrap()
    }

    fn holder(&self, runtime: &RuntimeId) -> Holder {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match self.places.lock().get(runtime).map(String::as_str) {
            None => Holder::Unknown,
            Some("everywhere") => Holder::Here,
            // Each takes the other one for the holder.
            Some("other") => self.place(if self.own == "one" { "two" } else { "one" }),
            Some(name) => self.place(name),
        }
    }

    fn fleet_holder(&self) -> Holder {
        self.fleet_holder.lock().as_deref().map_or(Holder::Unknown, |name| self.place(name))
    }

    fn replicas(&self) -> Vec<Arc<Replica>> {
        let names: Vec<_> = self.addresses.lock().keys().filter(|name| **name != self.own).cloned().collect();
        names.iter().filter_map(|name| self.replica(name)).collect()
    }
}

impl Fleet {
    pub(super) fn new() -> Self {
        let ca = ca(unix_now());
        let copy = Ca::from_pem(ca.certificate_pem().as_bytes(), ca.key_pem().as_bytes()).unwrap();
        let authority = fixed_authority(copy, domain(), RUNTIME_VALIDITY);
        let trust = watch::Sender::new(authority.trust().borrow().clone());
        Self {
            ca,
            authority,
            trust,
            enrolment: Fixture::limited(Some(20)),
            places: Places::default(),
            addresses: Arc::default(),
            served: Served::default(),
            fleet_holder: Arc::default(),
            without_v2: None,
        }
    }

    /// A fleet whose agents may have certificates of these roots, too.
    pub(super) fn trusting(roots: &TrustBundle) -> Self {
        let fleet = Self::new();
        fleet.set_roots(fleet.ca.trust_bundle().with(roots));
        fleet
    }

    /// Assigns a runtime to a replica.
    pub(super) fn place(&self, runtime: &str, replica: &str) {
        self.places.lock().insert(runtime.parse().unwrap(), replica.to_owned());
    }

    /// Forgets the holder of a runtime.
    pub(super) fn displace(&self, runtime: &str) {
        self.places.lock().remove(&runtime.parse().unwrap());
    }

    /// Gives shards to a replica, beside or instead of those of others.
    pub(super) fn serve(&self, replica: &str, shards: &[u16]) {
        let shards = shards.iter().map(|shard| (ShardCount::default().shard(*shard).unwrap(), Instance::new(1)));
        self.served.lock().insert(replica.to_owned(), shards.collect());
    }

    /// Gives the role that runs the fleet-wide tasks to a replica.
    pub(super) fn appoint(&self, replica: Option<&str>) {
        *self.fleet_holder.lock() = replica.map(str::to_owned);
    }

    /// Sets the address under which a replica is known.
    pub(super) fn announce(&self, replica: &str, address: SocketAddr) {
        self.addresses.lock().insert(replica.to_owned(), address);
    }

    /// An agent of a runtime that this replica holds.
    pub(super) fn agent(&self, runtime: &str, replica: &str) -> Agent {
        self.place(runtime, replica);
        Agent::new(&self.ca, runtime, unix_now())
    }

    pub(super) async fn tls(&self, replica: &str) -> ReplicaTls {
        self.certificate(replica).await.0
    }

    async fn certificate(&self, replica: &str) -> (ReplicaTls, ReplicaCertificate) {
        let name = replica.parse().unwrap();
        let source = ReplicaSource::Issuer(self.authority.clone());
        let trust = self.trust.subscribe();
        let metrics = ReplicaMetrics::default();
        ReplicaCertificate::open(name, domain(), source, trust, metrics).await.unwrap()
    }

    /// Sets the roots of the replicas, which follow them with their next refresh.
    pub(super) fn set_roots(&self, clients: TrustBundle) {
        self.trust.send_modify(|trust| *trust = Arc::new(Trust { clients, ..Trust::clone(trust) }));
    }

    /// Starts two replicas, `one` and `two`.
    pub(super) async fn two() -> (Self, Running, Running) {
        let fleet = Self::new();
        let one = fleet.start("one", |_| {}).await;
        let two = fleet.start("two", |_| {}).await;
        (fleet, one, two)
    }

    pub(super) async fn start(&self, name: &str, change: impl FnOnce(&mut Settings)) -> Running {
        self.start_with(name, Deadlines::default(), change).await
    }

    pub(super) async fn start_with(
        &self,
        name: &str,
        deadlines: Deadlines,
        change: impl FnOnce(&mut Settings),
    ) -> Running {
        let asked = Arc::<AtomicUsize>::default();
        let holders = KnownHolders {
            own: name.to_owned(),
            places: self.places.clone(),
            addresses: self.addresses.clone(),
            fleet_holder: self.fleet_holder.clone(),
            asked: asked.clone(),
        };
        let mut registry = Registry::default();
        let (tls, certificate) = self.certificate(name).await;
        let relay_metrics = relay::Metrics::register(&mut registry);
        let (relay, reporter) = Relay::new(Tcp, holders, tls.clone(), relay_metrics, deadlines, Handle::current());
        let server = self.ca.make_server(&["kcp.test".try_into().unwrap()], unix_now(), SERVER_VALIDITY).unwrap();
        let clients = self.trust.borrow().clients.clone();
        let server = ServerIdentity::new(&server.identity().unwrap(), &clients).unwrap();
        let revocations = Revocations::new(crate::enrolment::Metrics::register(&mut registry), Duration::ZERO);
        let mut common = Settings {
            relay: Some(relay.clone()),
            revocations: revocations.clone(),
            enrolments: Some(self.enrolment.enrolments.clone()),
            ..settings()
        };
        change(&mut common);
        let intake = RecordingIntake::default();
        let metrics = Metrics::register(&mut registry);
        let v2_intake = RecordingV2::default();
        let port = metrics.port.clone();
        let mut tasks = JoinSet::new();
        let shutdown = CancellationToken::new();

        let mut events = None;
        let gateway = Gateway::bind(common.clone(), Arc::new(ArcSwap::new(server.config.clone())), |settings| {
            let handler = Arc::new(V3Handler::new(settings, intake.clone(), metrics));
            events = Some(handler.clone());
            handler
        });
        let gateway = gateway.await.unwrap();
        let event_address = gateway.address();
        tasks.spawn(gateway.run(shutdown.clone()));

        let mut enrolment = None;
        let enrolment_settings =
            Settings { relay: Some(relay.clone()), ..enrol::settings("127.0.0.1:0".parse().unwrap(), domain()) };
        let gateway =
            Gateway::bind(enrolment_settings, Arc::new(ArcSwap::new(server.config_for_enrolment())), |settings| {
                let metrics = PortMetrics::register(&mut Registry::default());
                let handler = Arc::new(EnrolmentHandler::new(settings, self.enrolment.enrolments.clone(), metrics));
                enrolment = Some(handler.clone());
                handler
            });
        let gateway = gateway.await.unwrap();
        let enrolment_address = gateway.address();
        tasks.spawn(gateway.run(shutdown.clone()));

        let mut v2_handler = None;
        let v2_settings = Settings {
            relay: Some(relay.clone()),
            revocations: revocations.clone(),
            lag_limit: common.lag_limit,
            ..v2::settings("127.0.0.1:0".parse().unwrap(), domain())
        };
        let callers = CallerVerifier::new(clients, None).unwrap();
        let gateway = Gateway::bind(v2_settings, Arc::new(ArcSwap::new(server.config.clone())), |settings| {
            let metrics = v2::Metrics::register(&mut Registry::default());
            let shared = PortMetrics::register(&mut Registry::default());
            let handler = Arc::new(V2Handler::new(settings, callers, v2_intake.clone(), metrics, shared));
            v2_handler = (self.without_v2 != Some(name)).then(|| handler.clone());
            handler
        });
        let gateway = gateway.await.unwrap();
        let v2_address = gateway.address();
        tasks.spawn(gateway.run(shutdown.clone()));

        let responders = Responders::default();
        let served = self.served.clone();
        let own = name.to_owned();
        let served = Arc::new(move || served.lock().get(&own).cloned().unwrap_or_default());
        let appointed = self.fleet_holder.clone();
        let is_fleet_holder =
            Arc::new(move |replica: &ReplicaName| appointed.lock().as_deref() == Some(replica.as_str()));
        let answers = Answers::new(responders.clone(), served, is_fleet_holder, deadlines);
        let peers = ReplicaPeers::new(relay.clone(), answers.clone());
        let handlers = RelayedHandlers { events: events.unwrap(), v2: v2_handler, enrolment, answers };
        let relay_port = PortMetrics::register(&mut Registry::default());
        let relay_metrics = relay_port.clone();
        let relay_tls = tls.clone();
        let relay_settings =
            Settings { lag_limit: common.lag_limit, ..relayed::settings("127.0.0.1:0".parse().unwrap(), domain()) };
        let gateway = Gateway::bind(relay_settings, tls.server.clone(), |settings| {
            Arc::new(RelayHandler::new(settings, handlers, relay_tls, relay_metrics))
        });
        let gateway = gateway.await.unwrap();
        let relay_address = gateway.address();
        self.announce(name, relay_address);
        tasks.spawn(gateway.run(shutdown.clone()));
        tasks.spawn(reporter.run(shutdown.clone()));
        Running {
            event_address,
            enrolment_address,
            v2_address,
            relay_address,
            intake,
            v2_intake,
            port,
            relay_port,
            registry,
            revocations,
            tls,
            certificate,
            asked,
            responders,
            peers,
            shutdown,
            tasks,
        }
    }
}

/// A running replica.
pub(super) struct Running {
    pub(super) event_address: SocketAddr,
    pub(super) enrolment_address: SocketAddr,
    pub(super) v2_address: SocketAddr,
    pub(super) relay_address: SocketAddr,
    pub(super) intake: RecordingIntake,
    pub(super) v2_intake: RecordingV2,
    pub(super) port: PortMetrics,
    pub(super) relay_port: PortMetrics,
    pub(super) registry: Registry,
    pub(super) revocations: Revocations,
    pub(super) tls: ReplicaTls,
    /// Keeps `tls` up to date.
    pub(super) certificate: ReplicaCertificate,
    pub(super) asked: Arc<AtomicUsize>,
    pub(super) responders: Responders,
    pub(super) peers: ReplicaPeers,
    shutdown: CancellationToken,
    tasks: JoinSet<()>,
}

impl Running {
    pub(super) async fn stop(mut self) {
        self.shutdown.cancel();
        let ended = async { while self.tasks.join_next().await.transpose().unwrap().is_some() {} };
        timeout(PATIENCE, ended).await.unwrap();
    }

    /// Value of a series of the relay's metrics.
    pub(super) fn metric(&self, series: &str) -> u64 {
        let text = self.registry.encode().unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().unwrap())
    }

    /// Requests of events that the event port refused for this reason.
    pub(super) fn refused(&self, reason: &'static str) -> u64 {
        self.port.refused.get_or_create(&RefusalLabels { route: "events", reason }).get()
    }

    /// Connections to the relay port that failed in the handshake for this reason.
    pub(super) fn handshakes_failed(&self, reason: &'static str) -> u64 {
        self.relay_port.handshakes_failed.get_or_create(&ReasonLabel { reason }).get()
    }

    /// Opens a connection of an agent to the event port.
    pub(super) async fn connect(&self, fleet: &Fleet, agent: &Agent) -> Sender {
        Sender::open(self.event_address, client(fleet, &agent.identity)).await.unwrap()
    }

    /// Sends a request of an agent over a connection of its own.
    pub(super) async fn send(&self, fleet: &Fleet, agent: &Agent, request: Request<Full<Bytes>>) -> Response<Bytes> {
        self.connect(fleet, agent).await.send(request).await.unwrap()
    }
}

/// TLS of a client with a certificate.
pub(super) fn client(fleet: &Fleet, identity: &Identity) -> ClientConfig {
    let mut config = tls::client(Some(identity), fleet.ca.trust_bundle().store().unwrap()).unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

/// A client's connection over HTTP/2.
pub(super) struct Sender(pub(super) http2::SendRequest<Full<Bytes>>);

impl Sender {
    pub(super) async fn open(address: SocketAddr, config: ClientConfig) -> std::io::Result<Self> {
        let tcp = TcpStream::connect(address).await?;
        let stream = TlsConnector::from(Arc::new(config)).connect("kcp.test".try_into().unwrap(), tcp).await?;
        let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(std::io::Error::other)?;
        tokio::spawn(connection);
        Ok(Self(sender))
    }

    pub(super) async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Bytes>> {
        let (parts, body) = self.0.send_request(request).await?.into_parts();
        Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
    }

    /// Waits until the connection has ended.
    pub(super) async fn ends(&mut self) {
        let ended = async {
            while self.0.ready().await.is_ok() {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, ended).await.expect("the connection ends");
    }
}

/// A valid request of events.
pub(super) fn events(agent: &Agent, counter: u64) -> Request<Full<Bytes>> {
    let body = agent.batch().to_string();
    signed(agent, &RequestSpec { created: unix_now(), ..RequestSpec::events(body.as_bytes(), counter) })
}

/// A signed request in the form of HTTP/2.
pub(super) fn signed(agent: &Agent, spec: &RequestSpec<'_>) -> Request<Full<Bytes>> {
    let (mut parts, body) = agent.sign(spec).into_parts();
    parts.headers.remove(header::HOST);
    parts.version = Version::HTTP_2;
    parts.uri = format!("https://{AUTHORITY}{}", parts.uri.path()).parse().unwrap();
    Request::from_parts(parts, Full::from(body))
}

/// Status, fields and body of a response, without the fields that differ from one to the next.
pub(super) fn answer(response: &Response<Bytes>) -> (StatusCode, Vec<(String, String)>, Vec<u8>) {
    let mut fields: Vec<_> = fields(response.headers()).collect();
    fields.sort();
    (response.status(), fields, response.body().to_vec())
}

fn fields(headers: &HeaderMap) -> impl Iterator<Item = (String, String)> {
    headers.iter().map(|(name, value)| {
        // Waits are jittered, and times move.
        let varies = *name == header::DATE || *name == header::RETRY_AFTER;
        (name.to_string(), if varies { String::new() } else { value.to_str().unwrap().to_owned() })
    })
}

/// Records events of contract v2.
#[derive(Clone, Default)]
pub(super) struct RecordingV2(pub(super) Arc<Mutex<Vec<String>>>);

impl V2Intake for RecordingV2 {
    fn is_manager(&self, manager: &str) -> bool {
        manager == "lifecycle-manager"
    }

    async fn take(&self, _: &str, caller: &RuntimeCertificate, event: Event) -> Result<(), Refusal> {
        self.0.lock().push(format!("{} {}", caller.runtime, event.name));
        Ok(())
    }
}

/// The TLS configuration of a listener.
pub(super) fn listening(tls: &ReplicaTls) -> Arc<ServerConfig> {
    tls.server.load_full()
}
