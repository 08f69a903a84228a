//! State that the hosts of a simulation share with the test: the cluster, the records, and the running agent and
//! receivers.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use parking_lot::{Mutex, MutexGuard};
use tidewatch_agent::{
    identity::{Credentials, KeyMaterial},
    telemetry::Metrics as AgentMetrics,
};
use tidewatch_api::{
    identity::{Instance, TrustDomain},
    plan::Work,
};
use tidewatch_cluster::{error_class::ErrorClass, leader::WriteFence};
use tidewatch_fleet::{
    forward::Delivery,
    queue::ReconcileOutcome,
    table::{self, Job, RuntimeTable, Settings},
};
use tidewatch_gateway::ports;
use tidewatch_kit::metrics::Registry;
use tidewatch_testing::landscape::now;
use tidewatch_trust::{CA_VALIDITY, Ca, RUNTIME_VALIDITY, SERVER_VALIDITY, ServerIdentity};
use tokio::time::{Duration, Instant};

use crate::{
    agent::{Agent, SMALL_CAP},
    cluster::{Cluster, Mutation, Name, PlanId, WATCHES},
    receiver::{PendingDelivery, REQUEST_DEADLINE, ReconcileInput, Records, kyma, routes, runtime},
};

/// DNS name of the receiver, whichever host serves it.
pub(crate) const RECEIVER: &str = "receiver";
pub(crate) const PORT: u16 = 8443;
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Shared state of a simulation; clones refer to the same state.
#[derive(Clone)]
pub(crate) struct SharedState(Arc<Inner>);

struct Inner {
    pub(crate) identities: Identities,
    gateway: ports::Metrics,
    fleet: table::Metrics,
    agent: AgentMetrics,
    registry: Registry,
    /// Index of the host that serves the receiver's name, modulo the number of hosts.
    current: Arc<AtomicUsize>,
    state: Mutex<State>,
}

/// TLS identities of both sides.
pub(crate) struct Identities {
    pub(crate) domain: TrustDomain,
    pub(crate) server: ServerIdentity,
    pub(crate) agent: Arc<Credentials>,
}

struct State {
    cluster: Cluster,
    records: Records,
    tick: u64,
    incarnations: u64,
    agent: Option<Agent>,
    tables: Vec<Option<RuntimeTable>>,
}

impl Identities {
    fn new() -> Self {
        let (domain, now): (TrustDomain, _) = ("kyma.local".parse().unwrap(), now());
        let ca = Ca::generate("test root", now, CA_VALIDITY).unwrap();
        let server = ca.make_server(&[RECEIVER.try_into().unwrap()], now, SERVER_VALIDITY).unwrap();
        let server = ServerIdentity::new(&server.identity().unwrap(), &ca.trust_bundle()).unwrap();
        let leaf = ca.make_runtime(&runtime(), &domain, now, RUNTIME_VALIDITY).unwrap();
        let address = format!("https://{RECEIVER}:{PORT}").parse().unwrap();
        let chain = leaf.chain.into();
        let key = leaf.key.into();
        let bundle = ca.certificate_pem().into();
        let agent = Arc::new(Credentials::new(&KeyMaterial { chain, key, bundle }, &domain, address, now).unwrap());
        Self { domain, server, agent }
    }
}

impl SharedState {
    pub(crate) fn new(receivers: usize) -> Self {
        let mut registry = Registry::default();
        let gateway = ports::Metrics::register(registry.sub_registry_with_prefix("gateway"));
        let fleet = table::Metrics::register(&mut registry);
        let cluster = Cluster::new();
        let records = Records::default();
        let tables = (0..receivers).map(|_| None).collect();
        let state = Mutex::new(State { cluster, records, tick: 0, incarnations: 0, agent: None, tables });
        let agent = AgentMetrics::default();
        let current = Arc::default();
        Self(Arc::new(Inner { identities: Identities::new(), gateway, fleet, agent, registry, current, state }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    pub(crate) fn identities(&self) -> &Identities {
        &self.0.identities
    }

    pub(crate) fn gateway_metrics(&self) -> ports::Metrics {
        self.0.gateway.clone()
    }

    pub(crate) fn agent_metrics(&self) -> AgentMetrics {
        self.0.agent.clone()
    }

    pub(crate) fn current(&self) -> Arc<AtomicUsize> {
        self.0.current.clone()
    }

    /// Moves the receiver's name to the next host.
    pub(crate) fn switch_receiver(&self) {
        self.0.current.fetch_add(1, Ordering::Relaxed);
    }

    /// Changes an object in the cluster.
    pub(crate) fn mutate(&self, resource: usize, name: Name, mutation: Mutation) {
        let mut state = self.state();
        state.tick += 1;
        let State { cluster, agent, tick, .. } = &mut *state;
        let events = cluster.mutate(resource, name, mutation, *tick);
        if let Some(agent) = agent {
            agent.push_watch_events(events);
        }
    }

    /// Starts an agent in place of its predecessor.
    pub(crate) fn start_agent(&self) -> tidewatch_agent::core::Core {
        let mut state = self.state();
        state.incarnations += 1;
        let agent = Agent::start(runtime(), state.incarnations, SMALL_CAP, &PlanId::ALL.plan(0), self.agent_metrics());
        let core = agent.core();
        state.agent = Some(agent);
        core
    }

    pub(crate) fn crash_agent(&self) {
        self.state().agent = None;
    }

    /// Runs one step of one watch of the agent.
    pub(crate) fn step_watch(&self, watch: usize) {
        let mut state = self.state();
        state.tick += 1;
        let State { cluster, agent, tick, .. } = &mut *state;
        if let Some(agent) = agent {
            agent.list(cluster, watch, false, *tick);
            agent.deliver_watch_event(watch);
        }
    }

    /// Ends a watch of the agent.
    pub(crate) fn break_watch(&self, watch: usize) {
        if let Some(agent) = &mut self.state().agent {
            agent.break_watch(watch);
        }
    }

    /// Starts a receiver on a host.
    pub(crate) fn start_receiver(&self, host: usize) -> RuntimeTable {
        let mut state = self.state();
        state.incarnations += 1;
        let settings = Settings {
            heartbeat: HEARTBEAT,
            request_deadline: REQUEST_DEADLINE,
            slots: 4,
            seed: state.incarnations,
            ..Settings::default()
        };
        let fleet = RuntimeTable::holding_all(
            settings,
            self.0.fleet.clone(),
            Instance::new(state.incarnations),
            &WriteFence::default(),
            Instant::now(),
        );
        let plan = PlanId::ALL.plan(0);
        fleet.set_routes(routes(&plan));
        fleet.place(kyma(), "", Some(runtime()), Arc::new(plan));
        state.tables[host] = Some(fleet.clone());
        fleet
    }

    pub(crate) fn crash_receiver(&self, host: usize) {
        self.state().tables[host] = None;
    }

    /// Takes the snapshot of a reconcile.
    pub(crate) fn read_cluster(&self, job: &Job, cold_cache: bool) -> ReconcileInput {
        let mut state = self.state();
        state.tick += 1;
        ReconcileInput {
            snapshot: state.cluster.snapshot(),
            drift: job.queued.drift.clone(),
            cold_cache,
            plan: PlanId::ALL,
            tick: state.tick,
        }
    }

    /// Ends a reconcile: records its snapshot, except for work with a later record.
    pub(crate) fn record_reconcile(&self, job: &Job, input: &ReconcileInput) -> ReconcileOutcome {
        let mut state = self.state();
        let works = job.queued.work;
        let late = state.records.conflicts(works, input);
        state.records.record_end(works.minus(late), input);
        if late.is_empty() {
            return ReconcileOutcome::ended(works);
        }
        ReconcileOutcome { ended: works.minus(late), ..ReconcileOutcome::failed(late, ErrorClass::Refused) }
    }

    /// Takes the snapshot that another manager reads when the event arrives.
    pub(crate) fn begin_delivery(&self, delivery: Delivery) -> PendingDelivery {
        let mut state = self.state();
        state.tick += 1;
        PendingDelivery::new(delivery, &state.cluster.snapshot(), state.tick)
    }

    /// Records an event that the manager has accepted.
    pub(crate) fn record_delivery(&self, pending: &PendingDelivery) {
        self.state().records.record_delivery(pending);
    }

    /// Describes the first reason for which the simulation has not converged; `None` if everything is idle and the
    /// records match the cluster.
    pub(crate) fn divergence(&self) -> Option<String> {
        let state = self.state();
        let Some(agent) = &state.agent else { return Some("no agent is running".to_owned()) };
        let stats = agent.stats();
        if stats.waiting + stats.unsettled + stats.parked > 0 {
            return Some(format!("{stats:?}"));
        }
        let views: Vec<_> = state.tables.iter().flatten().map(|fleet| fleet.views().remove(0)).collect();
        // Requests for an earlier epoch do not count: they remain at a receiver that the agent no longer contacts.
        let epoch = agent.epoch();
        let requested =
            views.iter().find(|view| view.epochs.iter().any(|entry| entry.epoch == epoch && !entry.resend.is_empty()));
        if let Some(view) = views.iter().find(|view| !view.queued.is_empty() || view.in_progress).or(requested) {
            return Some(format!("{view:?}"));
        }
        let snapshot = state.cluster.snapshot();
        for (at, watch) in WATCHES.iter().enumerate() {
            if !agent.is_up_to_date(at) {
                return Some(format!("watch {} is not up to date", watch.name));
            }
            for (name, _) in agent.reported_objects(at) {
                let delivered = state.records.delivered(at, name);
                let expected = snapshot[at].get(&name).copied();
                if delivered != expected {
                    return Some(format!(
                        "{name} of {}: the manager observed {delivered:?} instead of {expected:?}",
                        watch.name
                    ));
                }
            }
            for work in PlanId::ALL.works(at).iter().filter(|work| **work != Work::Forward) {
                let recorded = state.records.recorded.get(&(*work, at));
                if recorded != Some(&snapshot[at]) {
                    return Some(format!(
                        "{work:?} of {}: recorded {recorded:?} instead of {:?}",
                        watch.name, snapshot[at]
                    ));
                }
            }
        }
        None
    }

    /// Returns the sum of a counter over all labels and incarnations of the receivers.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        let page = self.0.registry.encode().unwrap();
        let value = |line: &str| line.rsplit(' ').next().and_then(|value| value.parse::<u64>().ok());
        page.lines().filter(|line| line.starts_with(name)).filter_map(value).sum()
    }
}
