//! State that the hosts share with the test: the runtime clusters, the records of reconciles, the writes on their way, and
//! which replica may write for which shard.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::FutureExt as _;
use parking_lot::{Mutex, MutexGuard};
use tidewatch_agent::{
    core::Core,
    identity::{Credentials, KeyMaterial},
    telemetry::Metrics as AgentMetrics,
};
use tidewatch_api::{
    identity::{Instance, RuntimeId, TrustDomain},
    key::KymaKey,
    leases::Unit,
    plan::{Plan, Work},
    shard::ShardId,
};
use tidewatch_cluster::leader::WriteFence;
use tidewatch_fleet::{
    queue::WorkSet,
    shards::{self as ownership, HoldersHandle},
    table::{self, Job, RuntimeTable},
};
use tidewatch_gateway::{
    ports::{self, PortMetrics},
    relay,
};
use tidewatch_kit::metrics::Registry;
use tidewatch_testing::landscape::now;
use tidewatch_trust::{
    CA_VALIDITY, Ca, REPLICA_VALIDITY, RUNTIME_VALIDITY, ReplicaCertificate, ReplicaFiles, ReplicaMetrics,
    ReplicaSource, ReplicaTls, SERVER_VALIDITY, ServerIdentity, Trust,
};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{
    REPLICAS, REQUEST_DEADLINE, RUNTIMES, Rng,
    control_plane::{ControlPlane, KcpLink},
    gate::Gate,
    shards,
};
use crate::{
    agent::{Agent, SMALL_CAP},
    cluster::{Cluster, Mutation, Name, PlanId, WATCHES},
    receiver::{ReconcileInput, Records},
    simulation::shared_state::{PORT, RECEIVER},
};

/// Watches of the agents: all but the forwarded one.
const PLAN: PlanId = PlanId(0b0_0111);
/// Longest time from the head of a request to the end of its body.
const MAX_BODY_TIME: Duration = Duration::from_secs(12);
const HEARTBEAT: Duration = Duration::from_secs(2);

/// TLS identities, the same in all simulations.
pub(crate) struct Identities {
    pub(crate) domain: TrustDomain,
    pub(crate) server: ServerIdentity,
    pub(crate) agents: Vec<Arc<Credentials>>,
    pub(crate) replicas: Vec<ReplicaTls>,
}

impl Identities {
    pub(crate) fn get() -> &'static Self {
        static IDENTITIES: OnceLock<Identities> = OnceLock::new();
        IDENTITIES.get_or_init(Self::new)
    }

    fn new() -> Self {
        let (domain, now): (TrustDomain, _) = ("kyma.local".parse().unwrap(), now());
        let ca = Ca::generate("test root", now, CA_VALIDITY).unwrap();
        let server = ca.make_server(&[RECEIVER.try_into().unwrap()], now, SERVER_VALIDITY).unwrap();
        let server = ServerIdentity::new(&server.identity().unwrap(), &ca.trust_bundle()).unwrap();
        let agent = |runtime: usize| {
            let leaf = ca.make_runtime(&runtime_id(runtime), &domain, now, RUNTIME_VALIDITY).unwrap();
            let address = format!("https://{RECEIVER}:{PORT}").parse().unwrap();
            let chain = leaf.chain.into();
            let key = leaf.key.into();
            let bundle = ca.certificate_pem().into();
            Arc::new(Credentials::new(&KeyMaterial { chain, key, bundle }, &domain, address, now).unwrap())
        };
        let agents = (0..RUNTIMES).map(agent).collect();
        let replicas = REPLICAS.iter().map(|name| replica_tls(&ca, name, &domain)).collect();
        Self { domain, server, agents, replicas }
    }
}

fn replica_tls(ca: &Ca, name: &str, domain: &TrustDomain) -> ReplicaTls {
    let name = name.parse().unwrap();
    let leaf = ca.make_replica(&name, domain, now(), REPLICA_VALIDITY).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let files = ReplicaFiles {
        certificate: file("tls.crt", &leaf.chain),
        key: file("tls.key", &leaf.key),
        roots: file("ca.crt", ca.certificate_pem()),
    };
    let agents = ca.trust_bundle();
    let clients = ca.trust_bundle();
    let (_keep, trust) = tokio::sync::watch::channel(Arc::new(Trust { agents, clients, issuer: None }));
    let source = ReplicaSource::Files(files);
    let metrics = ReplicaMetrics::default();
    // With files it waits for nothing.
    let opened = ReplicaCertificate::open(name, domain.clone(), source, trust, metrics).now_or_never();
    opened.unwrap().unwrap().0
}

pub(crate) fn runtime_id(runtime: usize) -> RuntimeId {
    format!("r-{runtime}").parse().unwrap()
}

pub(crate) fn kyma(runtime: usize) -> KymaKey {
    KymaKey::new("ns", format!("kyma-{runtime}"))
}

/// Index of a Kyma's runtime.
pub(crate) fn runtime_of(kyma: &KymaKey) -> usize {
    kyma.name.strip_prefix("kyma-").unwrap().parse().unwrap()
}

/// The unit of a runtime.
pub(crate) fn unit_of(runtime: usize) -> Unit {
    Unit::Shard(shards().of_runtime(&runtime_id(runtime)))
}

/// Metrics of all incarnations of all hosts of a simulation.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub(crate) gateway: ports::Metrics,
    pub(crate) relay_port: PortMetrics,
    pub(crate) relay: relay::Metrics,
    pub(crate) fleet: table::Metrics,
    pub(crate) shards: ownership::Metrics,
    pub(crate) agent: AgentMetrics,
}

/// One runtime cluster, and its agent.
struct Runtime {
    cluster: Cluster,
    records: Records,
    agent: Option<Agent>,
    /// Host that a new connection of the agent goes to, modulo the number of hosts.
    next_replica: Arc<AtomicUsize>,
}

/// One incarnation of a replica.
struct Replica {
    table: RuntimeTable,
    stop: CancellationToken,
    holders: HoldersHandle,
    /// Acquisitions whose fences may be open.
    fences: BTreeMap<Instance, (Unit, WriteFence)>,
    /// Times at which it last was the holder of units, by the Leases that it has observed.
    own: BTreeMap<Unit, Duration>,
}

/// A write of a replica to a runtime, on its way.
struct Write {
    replica: usize,
    runtime: usize,
    works: WorkSet,
    input: ReconcileInput,
    latency: Duration,
    landed: oneshot::Sender<()>,
}

/// The replicas with an open fence of a unit, and the time at which there was one last.
#[derive(Default)]
struct Writers {
    open: BTreeMap<usize, Instance>,
    last: Duration,
}

struct State {
    runtimes: Vec<Runtime>,
    replicas: Vec<Option<Replica>>,
    writers: BTreeMap<Unit, Writers>,
    /// Instances of all acquisitions so far.
    instances: BTreeSet<Instance>,
    elapsed: Duration,
    tick: u64,
    incarnations: u64,
    violation: Option<String>,
}

/// Shared state of a simulation; clones refer to the same state.
#[derive(Clone)]
pub(crate) struct SharedState(Arc<Inner>);

struct Inner {
    pub(crate) metrics: Metrics,
    registry: Registry,
    kcp: ControlPlane,
    links: Vec<KcpLink>,
    gates: Vec<Gate>,
    writes: mpsc::UnboundedSender<Write>,
    arriving: Mutex<Option<mpsc::UnboundedReceiver<Write>>>,
    state: Mutex<State>,
}

impl SharedState {
    pub(crate) fn new(seed: u64) -> Self {
        let mut registry = Registry::default();
        let metrics = Metrics {
            gateway: ports::Metrics::register(registry.sub_registry_with_prefix("gateway")),
            relay_port: PortMetrics::register(registry.sub_registry_with_prefix("relay_port")),
            relay: relay::Metrics::register(registry.sub_registry_with_prefix("relay")),
            fleet: table::Metrics::register(&mut registry),
            shards: ownership::Metrics::register(&mut registry),
            agent: AgentMetrics::default(),
        };
        let runtime = |at: usize| Runtime {
            cluster: Cluster::new(),
            records: Records::default(),
            agent: None,
            next_replica: Arc::new(AtomicUsize::new(at)),
        };
        let state = State {
            runtimes: (0..RUNTIMES).map(runtime).collect(),
            replicas: REPLICAS.iter().map(|_| None).collect(),
            writers: shards()
                .shards()
                .map(Unit::Shard)
                .chain([Unit::Fleet])
                .map(|unit| (unit, Writers::default()))
                .collect(),
            instances: BTreeSet::new(),
            elapsed: Duration::ZERO,
            tick: 0,
            incarnations: 0,
            violation: None,
        };
        let (writes, arriving) = mpsc::unbounded_channel();
        Self(Arc::new(Inner {
            metrics,
            registry,
            kcp: ControlPlane::new(),
            links: (0..REPLICAS.len()).map(|at| KcpLink::new(seed ^ ((at as u64 + 1) << 32))).collect(),
            gates: REPLICAS.iter().map(|_| Gate::default()).collect(),
            writes,
            arriving: Mutex::new(Some(arriving)),
            state: Mutex::new(state),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    pub(crate) fn kcp(&self) -> &ControlPlane {
        &self.0.kcp
    }

    pub(crate) fn link(&self, replica: usize) -> &KcpLink {
        &self.0.links[replica]
    }

    pub(crate) fn gate(&self, replica: usize) -> &Gate {
        &self.0.gates[replica]
    }

    /// Takes the time after each step.
    pub(crate) fn set_elapsed(&self, elapsed: Duration) {
        let mut state = self.state();
        state.elapsed = elapsed;
        for writers in state.writers.values_mut().filter(|writers| !writers.open.is_empty()) {
            writers.last = elapsed;
        }
    }

    /// The first violation of an invariant.
    pub(crate) fn violation(&self) -> Option<String> {
        self.state().violation.clone()
    }

    // Runtimes and agents.

    /// Changes an object in a runtime.
    pub(crate) fn mutate(&self, runtime: usize, resource: usize, name: Name, mutation: Mutation) {
        let mut state = self.state();
        state.tick += 1;
        let tick = state.tick;
        let Runtime { cluster, agent, .. } = &mut state.runtimes[runtime];
        let events = cluster.mutate(resource, name, mutation, tick);
        if let Some(agent) = agent {
            agent.push_watch_events(events);
        }
    }

    /// Starts an agent in place of its predecessor.
    pub(crate) fn start_agent(&self, runtime: usize) -> (Core, Arc<AtomicUsize>) {
        let mut state = self.state();
        state.incarnations += 1;
        let id = runtime_id(runtime);
        let metrics = self.0.metrics.agent.clone();
        let agent = Agent::start(id, state.incarnations, SMALL_CAP, &PLAN.plan(0), metrics);
        let core = agent.core();
        state.runtimes[runtime].agent = Some(agent);
        (core, state.runtimes[runtime].next_replica.clone())
    }

    pub(crate) fn crash_agent(&self, runtime: usize) {
        self.state().runtimes[runtime].agent = None;
    }

    /// Lets the next connection of an agent go to another replica.
    pub(crate) fn rebalance(&self, runtime: usize) {
        self.state().runtimes[runtime].next_replica.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs one step of all watches of an agent.
    pub(crate) fn step_watches(&self, runtime: usize) {
        let mut state = self.state();
        state.tick += 1;
        let tick = state.tick;
        let Runtime { cluster, agent, .. } = &mut state.runtimes[runtime];
        for watch in 0..WATCHES.len() {
            if let Some(agent) = agent {
                agent.list(cluster, watch, false, tick);
                agent.deliver_watch_event(watch);
            }
        }
    }

    /// Ends a watch of an agent.
    pub(crate) fn break_watch(&self, runtime: usize, watch: usize) {
        if let Some(agent) = &mut self.state().runtimes[runtime].agent {
            agent.break_watch(watch);
        }
    }

    // Replicas.

    /// Starts a replica, which holds nothing yet. Returns its own instance too.
    pub(crate) fn start_replica(
        &self,
        replica: usize,
        holders: HoldersHandle,
    ) -> (RuntimeTable, CancellationToken, Instance) {
        let mut state = self.state();
        state.incarnations += 1;
        let settings = table::Settings {
            heartbeat: HEARTBEAT,
            request_deadline: REQUEST_DEADLINE,
            slots: 4,
            seed: state.incarnations,
            ..table::Settings::default()
        };
        let table = RuntimeTable::new(shards(), settings, self.0.metrics.fleet.clone());
        (0..RUNTIMES).for_each(|runtime| place(&table, runtime));
        let stop = CancellationToken::new();
        let (fences, own) = Default::default();
        state.replicas[replica] = Some(Replica { table: table.clone(), stop: stop.clone(), holders, fences, own });
        (table, stop, Instance::new(state.incarnations))
    }

    /// The replica has ended or died: it sends nothing any more.
    pub(crate) fn ended(&self, replica: usize) {
        let mut state = self.state();
        state.replicas[replica] = None;
        for writers in state.writers.values_mut() {
            writers.open.remove(&replica);
        }
    }

    pub(crate) fn is_running(&self, replica: usize) -> bool {
        self.state().replicas[replica].is_some()
    }

    /// Begins the orderly end of a replica.
    pub(crate) fn stop_replica(&self, replica: usize) {
        if let Some(replica) = &self.state().replicas[replica] {
            replica.stop.cancel();
        }
    }

    /// True if the replica is to end.
    pub(crate) fn is_stopping(&self, replica: usize) -> bool {
        self.state().replicas[replica].as_ref().is_some_and(|replica| replica.stop.is_cancelled())
    }

    /// Records the acquisition of a unit.
    pub(crate) fn acquired(&self, replica: usize, unit: Unit, instance: Instance, fence: &WriteFence) {
        let mut state = self.state();
        if !state.instances.insert(instance) {
            state.violate(format!("{unit} has been acquired by {} with a used instance", REPLICAS[replica]));
        }
        if let Some(replica) = &mut state.replicas[replica] {
            replica.fences.insert(instance, (unit, fence.clone()));
        }
        drop(state);
        self.observe_fences(replica);
    }

    /// Determines which fences of a replica are open. Must run on its host, whose clock they are measured by.
    pub(crate) fn observe_fences(&self, at: usize) {
        let mut state = self.state();
        let State { replicas, writers, violation, elapsed, .. } = &mut *state;
        let Some(replica) = &mut replicas[at] else { return };
        let holders = replica.holders.current();
        let is_own = |shard: &ShardId| holders.get(*shard).is_some_and(|holder| holder.is_own);
        replica.own.extend(shards().shards().filter(is_own).map(|shard| (Unit::Shard(shard), *elapsed)));
        replica.fences.retain(|_, (_, fence)| fence.is_open());
        for writers in writers.values_mut() {
            writers.open.remove(&at);
        }
        for (instance, (unit, _)) in &replica.fences {
            let writers = writers.entry(*unit).or_default();
            writers.open.insert(at, *instance);
            if writers.open.len() > 1 {
                let names: Vec<_> = writers.open.keys().map(|at| REPLICAS[*at]).collect();
                violation.get_or_insert(format!("the fences of {unit} are open in {names:?}"));
            }
        }
    }

    /// Records a request that reaches the runtime table of a replica.
    pub(crate) fn received(&self, at: usize, runtime: &RuntimeId) {
        let mut state = self.state();
        let shard = shards().of_runtime(runtime);
        let elapsed = state.elapsed;
        let Some(replica) = &state.replicas[at] else { return };
        let is_own = replica.holders.current().get(shard).is_some_and(|holder| holder.is_own);
        // The holder is looked up before the body is read.
        let was_own = replica.own.get(&Unit::Shard(shard)).is_some_and(|own| *own + MAX_BODY_TIME >= elapsed);
        if !is_own && !was_own {
            let replica = REPLICAS[at];
            state.violate(format!(
                "a request of {runtime} reached the runtime table of {replica}, which does not hold it"
            ));
        }
    }

    // Reconciles.

    /// Takes the snapshot of a reconcile.
    pub(crate) fn read_runtime(&self, job: &Job, cold_cache: bool) -> ReconcileInput {
        let mut state = self.state();
        state.tick += 1;
        let snapshot = state.runtimes[runtime_of(&job.key)].cluster.snapshot();
        let tick = state.tick;
        ReconcileInput { snapshot, drift: job.queued.drift.clone(), cold_cache, plan: PLAN, tick }
    }

    /// Sends the write of a reconcile. The result is that of its response.
    pub(crate) fn write(
        &self,
        replica: usize,
        job: &Job,
        input: ReconcileInput,
        latency: Duration,
    ) -> oneshot::Receiver<()> {
        let (landed, response) = oneshot::channel();
        let runtime = runtime_of(&job.key);
        let works = job.queued.work;
        let _ = self.0.writes.send(Write { replica, runtime, works, input, latency, landed });
        response
    }

    /// Applies the writes, each after its latency, even if its replica has stopped or died meanwhile.
    pub(crate) async fn run_writes(self) -> turmoil::Result {
        let mut arriving = self.0.arriving.lock().take().unwrap();
        while let Some(write) = arriving.recv().await {
            let shared = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(write.latency).await;
                shared.land(write);
            });
        }
        Ok(())
    }

    fn land(&self, Write { replica, runtime, works, input, landed, .. }: Write) {
        let mut state = self.state();
        let unit = unit_of(runtime);
        let other = state.writers[&unit].open.keys().find(|writer| **writer != replica).copied();
        if let Some(other) = other {
            let late = REPLICAS[replica];
            let other = REPLICAS[other];
            state.violate(format!("a write of {late} to runtime {runtime} landed while the fence of {other} is open"));
        }
        state.runtimes[runtime].records.record_end(works, &input);
        let _ = landed.send(());
    }

    // Checks.

    /// The first unit without an open fence for longer than this.
    pub(crate) fn unheld(&self, limit: Duration) -> Option<Unit> {
        let state = self.state();
        let is_unheld = |writers: &Writers| writers.open.is_empty() && writers.last + limit < state.elapsed;
        state.writers.iter().find(|(_, writers)| is_unheld(writers)).map(|(unit, _)| *unit)
    }

    /// Describes the first reason for which the simulation has not converged; `None` if everything is idle, each replica
    /// knows all holders, and the records match the clusters.
    pub(crate) fn divergence(&self) -> Option<String> {
        let state = self.state();
        for (at, replica) in state.replicas.iter().enumerate() {
            if replica.as_ref().is_some_and(|replica| !replica.holders.current().are_complete(shards())) {
                return Some(format!("{} does not know all holders", REPLICAS[at]));
            }
        }
        (0..RUNTIMES).find_map(|runtime| state.runtime_divergence(runtime))
    }

    /// Returns the sum of a counter over all labels, hosts and incarnations.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        let page = self.0.registry.encode().unwrap();
        let value = |line: &str| line.rsplit(' ').next().and_then(|value| value.parse::<u64>().ok());
        page.lines().filter(|line| line.starts_with(name)).filter_map(value).sum()
    }
}

impl State {
    fn violate(&mut self, text: String) {
        self.violation.get_or_insert(text);
    }

    fn runtime_divergence(&self, at: usize) -> Option<String> {
        let Runtime { cluster, records, agent, .. } = &self.runtimes[at];
        let Some(agent) = agent else { return Some(format!("no agent is running in runtime {at}")) };
        let stats = agent.stats();
        if stats.waiting + stats.unsettled + stats.parked > 0 {
            return Some(format!("runtime {at}: {stats:?}"));
        }
        let unit = unit_of(at);
        let Some((holder, _)) = self.writers[&unit].open.first_key_value() else {
            return Some(format!("{unit} of runtime {at} has no holder"));
        };
        let name = kyma(at).name.clone();
        let views = self.replicas[*holder].as_ref().map(|replica| replica.table.views()).unwrap_or_default();
        let Some(view) = views.into_iter().find(|view| view.kyma == name) else {
            return Some(format!("{} does not know {name}", REPLICAS[*holder]));
        };
        let epoch = agent.epoch();
        let is_requested = view.epochs.iter().any(|entry| entry.epoch == epoch && !entry.resend.is_empty());
        if !view.queued.is_empty() || view.in_progress || is_requested || !view.unsettled.is_empty() {
            return Some(format!("{}: {view:?}", REPLICAS[*holder]));
        }
        let snapshot = cluster.snapshot();
        for (watch, planned) in WATCHES.iter().enumerate().filter(|(watch, _)| PLAN.has(*watch)) {
            if !agent.is_up_to_date(watch) {
                return Some(format!("watch {} of runtime {at} is not up to date", planned.name));
            }
            for work in PLAN.works(watch).iter().filter(|work| **work != Work::Forward) {
                let recorded = records.recorded.get(&(*work, watch));
                if recorded != Some(&snapshot[watch]) {
                    let expected = &snapshot[watch];
                    return Some(format!(
                        "{work:?} of {} in runtime {at}: recorded {recorded:?} instead of {expected:?}",
                        planned.name
                    ));
                }
            }
        }
        None
    }
}

/// Places a runtime as the cache of Kymas does, in whichever shard and replica.
pub(crate) fn place(table: &RuntimeTable, runtime: usize) {
    static THE_PLAN: OnceLock<Arc<Plan>> = OnceLock::new();
    let plan = THE_PLAN.get_or_init(|| Arc::new(PLAN.plan(0))).clone();
    table.place(kyma(runtime), "", Some(runtime_id(runtime)), plan);
}

/// Generator of one incarnation of a host.
pub(crate) fn rng(seed: u64, host: usize, shared: &SharedState) -> Rng {
    Rng(seed ^ ((host as u64) << 40) ^ (shared.state().incarnations << 20))
}
