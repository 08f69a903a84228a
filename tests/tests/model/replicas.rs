//! Simulation of several active replicas: the product's elector, follower, runtime table, gateway, relay and relay port in each,
//! agents that connect to any of them, and a control plane with the Leases. Real TLS and signatures over a simulated network;
//! replicas that die, stop, hang, start, lose the control plane or each other, and whose wall clocks jump by hours.
//!
//! At every time at most one replica may write to a runtime, writes on their way included. Once the faults end, each shard has
//! a holder within the duration of a Lease and five seconds, every event is settled, and no change is lost.

mod control_plane;
mod gate;
mod network;
mod replica;
mod shared_state;

use std::{
    hash::{BuildHasher as _, RandomState},
    panic::resume_unwind,
    time::Duration,
};

use jiff::SignedDuration;
use tidewatch_agent::{
    canary::CanaryState,
    link::{Link, LinkParts},
    receiver::Dialer,
    telemetry::Readiness,
};
use tidewatch_api::shard::ShardCount;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use turmoil::{Builder, Sim};

use self::{
    control_plane::KcpNetwork,
    network::Balancer,
    shared_state::{Identities, SharedState, rng},
};
use crate::{
    cluster::{Mutation, NAMES, RESOURCES, WATCHES},
    schedules::env_override,
    simulation::{Rng, transport::Connector},
};

/// Number of seeds in one run; `TIDEWATCH_SEEDS` overrides it.
const SEEDS: u64 = 100;
/// Threads that run them.
const THREADS: usize = 2;
const REPLICAS: &[&str] = &["replica-0", "replica-1", "replica-2"];
const AGENTS: &[&str] = &["agent-0", "agent-1", "agent-2"];
const RUNTIMES: usize = AGENTS.len();
const NAMESPACE: &str = "kcp-system";
const LEASE: Duration = Duration::from_secs(15);
/// Upper bound of a request to a runtime.
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);
/// A write that left at the last moment lands within the part of the Lease's duration that is reserved for it.
const MAX_WRITE_LATENCY: Duration = Duration::from_millis(2_900);
/// Simulated time during which faults are injected.
const FAULT_PHASE: Duration = Duration::from_secs(90);
/// Time within which each unit must have a holder after the last fault.
const OWNERSHIP_LIMIT: Duration = LEASE.saturating_add(Duration::from_secs(5));
/// Longest time without a holder after that, while units move to replicas that have none.
const MOVE_LIMIT: Duration = Duration::from_secs(5);
/// Simulated time within which everything must converge.
const CONVERGENCE_LIMIT: Duration = Duration::from_secs(300);
/// Time for which the state must stay converged: longer than the last write of a dead replica may take.
const STABLE_PERIOD: Duration = REQUEST_DEADLINE.saturating_add(Duration::from_secs(3));
/// Maximum message latency of a slow network, in milliseconds. The last fault has its effect for that time: a replica may
/// get the Leases so late.
const SLOW_MILLIS: u64 = 4_000;
/// Longest jump of a wall clock, in milliseconds: a day.
const MAX_JUMP_MILLIS: u64 = 86_400_000;
/// Maximum message latency of a healthy network.
const LATENCY: Duration = Duration::from_millis(50);
const TICK: Duration = Duration::from_millis(25);

fn shards() -> ShardCount {
    ShardCount::new(6).unwrap()
}

/// Runs an agent: its link, and its core fed by the watches of a cluster.
async fn run_agent(shared: SharedState, runtime: usize, mut rng: Rng) -> turmoil::Result {
    let (core, current) = shared.start_agent(runtime);
    let (_keep, credentials) = watch::channel(Some(Identities::get().agents[runtime].clone()));
    let parts = LinkParts {
        dial: Dialer::over(Balancer(Connector { hosts: REPLICAS, current })),
        core,
        credentials,
        enroller: None,
        canary_state: CanaryState::default(),
        interval: watch::Sender::new(Duration::from_secs(2)),
        pending: Readiness::default().pending("receiver"),
        metrics: shared.metrics().agent.clone(),
    };
    tokio::spawn(Link::new(parts).run(CancellationToken::new()));
    loop {
        sleep(rng.millis(200)).await;
        shared.step_watches(runtime);
    }
}

/// The running simulation.
struct Simulation<'a> {
    sim: Sim<'a>,
    shared: SharedState,
    rng: Rng,
    /// Replicas that hang, and the times at which they continue.
    hanging: Vec<(Duration, usize)>,
}

impl Simulation<'_> {
    fn new(seed: u64) -> Self {
        let shared = SharedState::new(seed);
        let mut sim = Builder::new()
            .rng_seed(seed)
            .tick_duration(TICK)
            .simulation_duration(FAULT_PHASE + CONVERGENCE_LIMIT + CONVERGENCE_LIMIT)
            .min_message_latency(Duration::from_millis(1))
            .max_message_latency(LATENCY)
            // A replica that hangs accepts no connection.
            .tcp_capacity(1_024)
            .build();
        sim.host("control-plane", {
            let shared = shared.clone();
            move || shared.kcp().clone().run()
        });
        sim.host("runtimes", {
            let shared = shared.clone();
            move || shared.clone().run_writes()
        });
        for (at, name) in REPLICAS.iter().enumerate() {
            let shared = shared.clone();
            sim.host(*name, move || {
                let rng = rng(seed, at, &shared);
                replica::run(shared.clone(), at, rng)
            });
        }
        for (at, name) in AGENTS.iter().enumerate() {
            let shared = shared.clone();
            sim.host(*name, move || {
                let rng = rng(seed, REPLICAS.len() + at, &shared);
                run_agent(shared.clone(), at, rng)
            });
        }
        Self { sim, shared, rng: Rng(seed), hanging: Vec::new() }
    }

    fn step(&mut self) -> Result<(), String> {
        let elapsed = self.sim.elapsed();
        let gates = &self.shared;
        self.hanging.retain(|(until, at)| {
            let is_hanging = elapsed < *until;
            if !is_hanging {
                gates.gate(*at).open();
            }
            is_hanging
        });
        self.sim.step().map_err(|error| error.to_string())?;
        self.shared.set_elapsed(self.sim.elapsed());
        self.shared.violation().map_or(Ok(()), Err)
    }

    fn mutate_random_object(&mut self) {
        let shared = &self.shared;
        let rng = &mut self.rng;
        let name = u8::try_from(rng.below(NAMES.into())).unwrap();
        let mutation = Mutation::ALL[rng.index(Mutation::ALL.len())];
        shared.mutate(rng.index(RUNTIMES), rng.index(RESOURCES.len()), name, mutation);
    }

    /// Injects one fault, or ends some.
    fn inject_fault(&mut self) {
        let Self { sim, shared, rng, hanging } = self;
        let at = rng.index(REPLICAS.len());
        let agent = rng.index(AGENTS.len());
        let replica = REPLICAS[at];
        let other = REPLICAS[(at + 1 + rng.index(REPLICAS.len() - 1)) % REPLICAS.len()];
        match rng.below(28) {
            0 | 1 => {
                shared.ended(at);
                sim.crash(replica);
            }
            2 | 3 => shared.stop_replica(at),
            4..=6 => self.start(at),
            7..=11 => {
                shared.gate(at).close();
                hanging.push((sim.elapsed() + rng.millis(25_000), at));
            }
            12 => shared.link(at).set(KcpNetwork::Cut),
            13 => shared.link(at).set(KcpNetwork::LostResponses),
            14 => shared.link(at).set(KcpNetwork::CutWatches),
            15 => shared.link(at).set_max_latency(rng.millis(SLOW_MILLIS)),
            16 => shared.link(at).repair(),
            17 => sim.partition(replica, other),
            18 => sim.partition_oneway(replica, other),
            19 => sim.set_link_max_message_latency(replica, other, rng.millis(SLOW_MILLIS)),
            20 => sim.partition(AGENTS[agent], replica),
            21 => shared.rebalance(agent),
            22 => {
                shared.crash_agent(agent);
                sim.crash(AGENTS[agent]);
                sim.bounce(AGENTS[agent]);
            }
            23 => shared.break_watch(agent, rng.index(WATCHES.len())),
            24 => shared.link(at).jump(SignedDuration::try_from(rng.millis(MAX_JUMP_MILLIS)).unwrap()),
            25 => shared.link(at).jump(-SignedDuration::try_from(rng.millis(MAX_JUMP_MILLIS)).unwrap()),
            _ => self.repair_network(),
        }
    }

    /// Starts a replica that has ended or died.
    fn start(&mut self, at: usize) {
        if !self.shared.is_running(at) {
            self.shared.gate(at).open();
            self.sim.crash(REPLICAS[at]);
            self.sim.bounce(REPLICAS[at]);
        }
    }

    fn repair_network(&mut self) {
        let Self { sim, shared, .. } = self;
        let repair = |from: &str, to: &str| {
            sim.set_link_max_message_latency(from, to, LATENCY);
            // Repairs each direction separately as well: `repair` alone does not undo a one-way partition.
            sim.repair_oneway(from, to);
            sim.repair_oneway(to, from);
            sim.repair(from, to);
        };
        for (at, replica) in REPLICAS.iter().enumerate() {
            shared.link(at).repair();
            REPLICAS[at + 1..].iter().for_each(|other| repair(replica, other));
            AGENTS.iter().for_each(|agent| repair(agent, replica));
        }
    }

    /// Ends all faults. Some replicas stay away, but one runs.
    fn end_faults(&mut self) {
        self.repair_network();
        let first = self.rng.index(REPLICAS.len());
        for (at, replica) in REPLICAS.iter().enumerate() {
            self.shared.gate(at).open();
            if at == first && self.shared.is_stopping(at) {
                self.shared.ended(at);
                self.sim.crash(*replica);
            }
            if at == first || self.rng.below(2) == 0 {
                self.start(at);
            }
        }
    }

    fn run(&mut self) -> Result<(), String> {
        while self.sim.elapsed() < FAULT_PHASE {
            self.step()?;
            if self.rng.below(20) == 0 {
                self.mutate_random_object();
            }
            if self.rng.below(60) == 0 {
                self.inject_fault();
            }
        }
        self.end_faults();
        // The converged state must last: heartbeats continue, and the verifications after an acquisition end.
        let ended = self.sim.elapsed() + Duration::from_millis(SLOW_MILLIS);
        let mut since = ended;
        while self.sim.elapsed() < ended + OWNERSHIP_LIMIT || self.sim.elapsed() < since + STABLE_PERIOD {
            self.step()?;
            let elapsed = self.sim.elapsed();
            if elapsed >= ended + OWNERSHIP_LIMIT
                && let Some(unit) = self.shared.unheld(MOVE_LIMIT)
            {
                return Err(format!("{unit} has no holder {:?} after the last fault", elapsed - ended));
            }
            let divergence = self.shared.divergence();
            if divergence.is_some() {
                since = elapsed;
            }
            if elapsed >= ended + CONVERGENCE_LIMIT {
                return Err(format!("no stable convergence within {CONVERGENCE_LIMIT:?}: {divergence:?}"));
            }
        }
        match self.shared.counter("fleet_digest_differences_total") {
            0 => Ok(()),
            found => Err(format!("{found} digest differences without a lost change")),
        }
    }
}

/// Counts of what simulations have seen: without them, their checks prove little.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    events: u64,
    relayed: u64,
    handed_over: u64,
    expired: u64,
    /// Leases that were written with a wrong time.
    wrong_times: u64,
}

impl Seen {
    fn with(self, other: Self) -> Self {
        Self {
            events: self.events + other.events,
            relayed: self.relayed + other.relayed,
            handed_over: self.handed_over + other.handed_over,
            expired: self.expired + other.expired,
            wrong_times: self.wrong_times + other.wrong_times,
        }
    }
}

fn simulate(seed: u64) -> Seen {
    let mut simulation = Simulation::new(seed);
    if let Err(error) = simulation.run() {
        panic!("TIDEWATCH_SEED={seed}: {error}");
    }
    let counter = |name| simulation.shared.counter(name);
    Seen {
        events: counter("fleet_events_total"),
        relayed: counter("relay_relay_requests_total"),
        handed_over: counter("shards_ended_total{reason=\"handed-over\"}"),
        expired: counter("shards_ended_total{reason=\"expired\"}"),
        wrong_times: (0..REPLICAS.len()).map(|at| simulation.shared.link(at).written_with_error()).sum(),
    }
}

#[test]
fn replicas_share_runtimes_over_faulty_network() {
    if let Some(seed) = env_override("TIDEWATCH_SEED") {
        simulate(seed);
        return;
    }
    let seeds: u64 = env_override("TIDEWATCH_SEEDS").unwrap_or(SEEDS);
    let first = RandomState::new().hash_one(seeds);
    let run = move |thread: u64| {
        let seeds = (thread..seeds).step_by(THREADS).map(|at| first.wrapping_add(at) >> 1);
        seeds.map(simulate).fold(Seen::default(), Seen::with)
    };
    let seen = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS as u64).map(|thread| scope.spawn(move || run(thread))).collect();
        let seen = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        seen.fold(Seen::default(), Seen::with)
    });
    let Seen { events, relayed, handed_over, expired, wrong_times } = seen;
    let is_enough = [events, relayed, handed_over, expired, wrong_times].iter().all(|count| *count >= seeds / 2);
    assert!(seeds < SEEDS || is_enough, "too little was simulated: {seen:?}");
}
