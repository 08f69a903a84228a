//! What the hosts of a simulation share with who watches them: the truth, what was recorded of it, and who lives.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use tidewatch_agent::{
    identity::{Credentials, Material},
    telemetry::Metrics as AgentMetrics,
};
use tidewatch_receiver::{
    forward::Delivery,
    gateway,
    hub::{self, Hub, Job, Settings},
    pki::{CA_VALIDITY, Ca, RUNTIME_VALIDITY, SERVER_VALIDITY, ServerIdentity},
    queue::{Class, Outcome},
};
use tidewatch_shared::{
    identity::{Instance, TrustDomain},
    metrics::Registry,
    plan::Work,
};
use tidewatch_tests::landscape::now;
use tokio::time::{Duration, Instant};

use crate::{
    agent::{Agent, SMALL},
    cluster::{Cluster, Deed, Name, PlanId, WATCHES},
    receiver::{Handing, REQUEST_DEADLINE, Reading, Records, kyma, routes, runtime},
};

/// The name of the receiver, whoever stands behind it.
pub(crate) const RECEIVER: &str = "receiver";
pub(crate) const PORT: u16 = 8443;
const HEARTBEAT: Duration = Duration::from_secs(2);

/// A stage; clones are the same.
#[derive(Clone)]
pub(crate) struct Stage(Arc<Shared>);

struct Shared {
    pub(crate) identities: Identities,
    gateway: gateway::Metrics,
    hub: hub::Metrics,
    agent: AgentMetrics,
    registry: Registry,
    /// Which host stands behind the receiver's name.
    current: Arc<AtomicUsize>,
    play: Mutex<Play>,
}

/// Who may speak.
pub(crate) struct Identities {
    pub(crate) domain: TrustDomain,
    pub(crate) server: ServerIdentity,
    pub(crate) agent: Arc<Credentials>,
}

struct Play {
    cluster: Cluster,
    records: Records,
    tick: u64,
    lives: u64,
    agent: Option<Agent>,
    hubs: Vec<Option<Hub>>,
}

impl Identities {
    fn new() -> Self {
        let (domain, now): (TrustDomain, _) = ("kyma.local".parse().unwrap(), now());
        let ca = Ca::generate("test root", now, CA_VALIDITY).unwrap();
        let server = ca.make_server(&[RECEIVER.parse().unwrap()], now, SERVER_VALIDITY).unwrap();
        let server = ServerIdentity::new(&server.identity().unwrap(), &ca.trust_bundle()).unwrap();
        let leaf = ca.make_runtime(&runtime(), &domain, now, RUNTIME_VALIDITY).unwrap();
        let address = format!("https://{RECEIVER}:{PORT}").parse().unwrap();
        let (chain, key, bundle) = (leaf.chain.into(), leaf.key.into(), ca.certificate_pem().into());
        let agent = Arc::new(Credentials::new(&Material { chain, key, bundle }, &domain, address, now).unwrap());
        Self { domain, server, agent }
    }
}

impl Stage {
    pub(crate) fn new(receivers: usize) -> Self {
        let mut registry = Registry::default();
        let (gateway, hub) = (gateway::Metrics::register(&mut registry), hub::Metrics::register(&mut registry));
        let (cluster, records) = (Cluster::new(), Records::default());
        let hubs = (0..receivers).map(|_| None).collect();
        let play = Mutex::new(Play { cluster, records, tick: 0, lives: 0, agent: None, hubs });
        let (agent, current) = (AgentMetrics::default(), Arc::default());
        Self(Arc::new(Shared { identities: Identities::new(), gateway, hub, agent, registry, current, play }))
    }

    fn play(&self) -> MutexGuard<'_, Play> {
        self.0.play.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn identities(&self) -> &Identities {
        &self.0.identities
    }

    pub(crate) fn gateway_metrics(&self) -> gateway::Metrics {
        self.0.gateway.clone()
    }

    pub(crate) fn agent_metrics(&self) -> AgentMetrics {
        self.0.agent.clone()
    }

    pub(crate) fn current(&self) -> Arc<AtomicUsize> {
        self.0.current.clone()
    }

    /// Another host stands behind the receiver's name.
    pub(crate) fn alternate(&self) {
        self.0.current.fetch_add(1, Ordering::Relaxed);
    }

    /// Somebody changes an object.
    pub(crate) fn act(&self, resource: usize, name: Name, deed: Deed) {
        let mut play = self.play();
        play.tick += 1;
        let Play { cluster, agent, tick, .. } = &mut *play;
        let said = cluster.act(resource, name, deed, *tick);
        if let Some(agent) = agent {
            agent.hear_streams(said);
        }
    }

    /// An agent starts, and forgets whoever was before.
    pub(crate) fn agent_starts(&self) -> tidewatch_agent::core::Core {
        let mut play = self.play();
        play.lives += 1;
        let agent = Agent::start(play.lives, SMALL, &PlanId::ALL.plan(0), self.agent_metrics());
        let core = agent.core();
        play.agent = Some(agent);
        core
    }

    pub(crate) fn agent_dies(&self) {
        self.play().agent = None;
    }

    /// One step of one watch of the agent.
    pub(crate) fn agent_steps(&self, watch: usize) {
        let mut play = self.play();
        play.tick += 1;
        let Play { cluster, agent, tick, .. } = &mut *play;
        if let Some(agent) = agent {
            agent.list(cluster, watch, false, *tick);
            agent.feed(watch);
        }
    }

    /// A watch of the agent ends.
    pub(crate) fn break_off(&self, watch: usize) {
        if let Some(agent) = &mut self.play().agent {
            agent.break_off(watch);
        }
    }

    /// A receiver starts on a host.
    pub(crate) fn receiver_starts(&self, host: usize) -> Hub {
        let mut play = self.play();
        play.lives += 1;
        let settings = Settings {
            heartbeat: HEARTBEAT,
            request_deadline: REQUEST_DEADLINE,
            slots: 4,
            seed: play.lives,
            ..Settings::default()
        };
        let hub = Hub::new(Instance::new(play.lives), settings, self.0.hub.clone(), Instant::now());
        let plan = PlanId::ALL.plan(0);
        hub.set_routes(routes(&plan));
        hub.place(kyma(), Some(runtime()), Arc::new(plan));
        play.hubs[host] = Some(hub.clone());
        hub
    }

    pub(crate) fn receiver_dies(&self, host: usize) {
        self.play().hubs[host] = None;
    }

    /// A pass reads.
    pub(crate) fn read(&self, job: &Job, forgetful: bool) -> Reading {
        let mut play = self.play();
        play.tick += 1;
        Reading {
            read: play.cluster.truth(),
            drift: job.wanted.drift.clone(),
            forgetful,
            plan: PlanId::ALL,
            tick: play.tick,
        }
    }

    /// A pass ends: it records what it has read, unless somebody else has read later.
    pub(crate) fn record(&self, job: &Job, reading: &Reading) -> Outcome {
        let mut play = self.play();
        let works = job.wanted.works;
        let late = play.records.conflicts(works, reading);
        play.records.end(works.minus(late), reading);
        if late.is_empty() {
            return Outcome::ended(works);
        }
        Outcome { ended: works.minus(late), ..Outcome::failed(late, Class::Refused) }
    }

    /// Another manager is told, and looks.
    pub(crate) fn hand(&self, delivery: Delivery) -> Handing {
        let mut play = self.play();
        play.tick += 1;
        Handing::new(delivery, &play.cluster.truth(), play.tick)
    }

    /// It has taken what it was told.
    pub(crate) fn handed(&self, handing: &Handing) {
        self.play().records.hand(handing);
    }

    /// What keeps it all from being at rest, with the truth recorded; `None` when nothing does.
    pub(crate) fn unrest(&self) -> Option<String> {
        let play = self.play();
        let Some(agent) = &play.agent else { return Some("no agent".to_owned()) };
        let figures = agent.figures();
        if figures.waiting + figures.unsettled + figures.parked > 0 {
            return Some(format!("{figures:?}"));
        }
        let views: Vec<_> = play.hubs.iter().flatten().map(|hub| hub.view().remove(0)).collect();
        // What is asked of an earlier life of the agent, because it speaks to another receiver since, nobody hears.
        let epoch = agent.epoch();
        let asks =
            views.iter().find(|view| view.epochs.iter().any(|known| known.epoch == epoch && !known.resend.is_empty()));
        if let Some(view) = views.iter().find(|view| !view.wanted.is_empty() || view.in_work).or(asks) {
            return Some(format!("{view:?}"));
        }
        let truth = play.cluster.truth();
        for (at, watch) in WATCHES.iter().enumerate() {
            if !agent.is_up_to_date(at) {
                return Some(format!("{} is not listed", watch.name));
            }
            for (name, _) in agent.objects(at) {
                let (handed, there) = (play.records.handed(at, name), truth[at].get(&name).copied());
                if handed != there {
                    return Some(format!(
                        "{name} of {}: the manager found {handed:?} instead of {there:?}",
                        watch.name
                    ));
                }
            }
            for work in PlanId::ALL.works(at).iter().filter(|work| **work != Work::Forward) {
                let known = play.records.known.get(&(*work, at));
                if known != Some(&truth[at]) {
                    return Some(format!("{work:?} of {}: {known:?} instead of {:?}", watch.name, truth[at]));
                }
            }
        }
        None
    }

    /// One counter of the receivers, all lives together.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        let page = self.0.registry.encode().unwrap();
        let value = |line: &str| line.rsplit(' ').next().and_then(|value| value.parse::<u64>().ok());
        page.lines().filter(|line| line.starts_with(name)).filter_map(value).sum()
    }
}
