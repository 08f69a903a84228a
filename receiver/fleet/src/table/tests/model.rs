//! Simulation of contract v3: a model agent, a network that loses, delays and duplicates, and the real runtime tables of two
//! replicas, between which the runtime's shard moves. Every event that the agent forgets was reconciled by the holder of
//! the shard, no reconcile of a released shard settles anything, and without further faults everything settles without a
//! false digest mismatch.

mod agent;

use std::collections::BTreeMap;

use agent::{Agent, Body, Request, Response, World};
use futures::FutureExt as _;
use proptest::prelude::*;
use serde_json::json;
use tidewatch_api::{
    identity::Instance,
    plan::{Plan, Work},
};
use tidewatch_cluster::{error_class::ErrorClass, leader::WriteFence};
use tidewatch_contract::event::Reason;
use tokio::time;

use super::super::*;
use crate::queue::{Priority, WorkSet};

/// A reconcile that has read and not ended yet.
struct Reconcile {
    job: Job,
    read: BTreeMap<&'static str, u64>,
}

struct Simulation {
    world: World,
    agent: Agent,
    clock: tokio::runtime::Runtime,
    metrics: Metrics,
    tables: [RuntimeTable; 2],
    /// Replica that holds the shard.
    holder: usize,
    instance: u64,
    epochs: u64,
    tick: u64,
    started: Instant,
    with_b: bool,
    requests: Vec<Request>,
    responses: Vec<Response>,
    /// At most one of each replica; that of the former holder is cancelled and may still run.
    reconciles: [Option<Reconcile>; 2],
    observed: BTreeMap<(Work, &'static str), u64>,
    /// Work that is paused and has not been enqueued since.
    paused: WorkSet,
}

/// Tables of two replicas that hold no shard.
fn tables(seed: u64, metrics: &Metrics) -> [RuntimeTable; 2] {
    let settings = Settings { slots: 4, seed, ..Settings::default() };
    [0, 1].map(|_| RuntimeTable::new(ShardCount::default(), settings, metrics.clone()))
}

fn id() -> RuntimeId {
    "r-1".parse().unwrap()
}

/// Shard of the runtime.
fn shard() -> ShardId {
    ShardCount::default().of_runtime(&id())
}

const KEY: fn() -> KymaKey = || KymaKey::new("ns", "kyma");

fn work_of(watch: &str) -> &'static [Work] {
    if watch == "a" { &[Work::Kyma] } else { &[Work::Kyma, Work::Catalog] }
}

fn plan_of(with_b: bool) -> Arc<Plan> {
    let watch = |name: &str| json!({"name": name, "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": work_of(name)});
    let watches: Vec<_> = ["a", "b"].into_iter().take(1 + usize::from(with_b)).map(watch).collect();
    Arc::new(Plan::parse(&json!({"revision": with_b.to_string(), "watches": watches}).to_string()).unwrap())
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Change(bool, u8),
    Send,
    Timeout,
    Heartbeat,
    /// Delivers one request; `corrupt` makes one of its events unreadable, `keep` leaves a copy in the network.
    Deliver {
        at: usize,
        corrupt: Option<usize>,
        keep: bool,
    },
    /// A request arrives at the replica that does not hold the shard.
    DeliverElsewhere(usize),
    Lose(usize),
    Respond(usize),
    LoseResponse(usize),
    Begin,
    End(u8),
    /// A reconcile that was cancelled by the release of its shard ends.
    EndCancelled(u8),
    RestartAgent,
    RestartReceiver,
    /// The holder releases the shard, and the other replica, or the same, acquires it.
    HandOver {
        to: usize,
    },
    PlanReceiver(bool),
    PlanAgent,
    Wait(u8),
}

fn steps() -> impl Strategy<Value = Step> {
    let at = 0usize..4;
    let corrupt = prop_oneof![5 => Just(None), 1 => (0usize..3).prop_map(Some)];
    prop_oneof![
        6 => (any::<bool>(), 0u8..3).prop_map(|(b, object)| Step::Change(b, object)),
        8 => Just(Step::Send),
        2 => Just(Step::Timeout),
        3 => Just(Step::Heartbeat),
        10 => (at.clone(), corrupt, prop::bool::weighted(0.2)).prop_map(|(at, corrupt, keep)| Step::Deliver { at, corrupt, keep }),
        1 => at.clone().prop_map(Step::DeliverElsewhere),
        2 => at.clone().prop_map(Step::Lose),
        8 => at.clone().prop_map(Step::Respond),
        2 => at.prop_map(Step::LoseResponse),
        6 => Just(Step::Begin),
        6 => (0u8..6).prop_map(Step::End),
        2 => (0u8..6).prop_map(Step::EndCancelled),
        1 => Just(Step::RestartAgent),
        1 => Just(Step::RestartReceiver),
        2 => (0usize..2).prop_map(|to| Step::HandOver { to }),
        1 => any::<bool>().prop_map(Step::PlanReceiver),
        1 => Just(Step::PlanAgent),
        2 => (1u8..10).prop_map(Step::Wait),
    ]
}

impl Simulation {
    fn new() -> Self {
        let clock = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let handle = clock.handle().clone();
        let _entered = handle.enter();
        let metrics = Metrics::register(&mut tidewatch_kit::metrics::Registry::default());
        let started = Instant::now();
        let mut simulation = Self {
            world: World::default(),
            agent: Agent::new(1, &["a", "b"]),
            tables: tables(1, &metrics),
            holder: 0,
            metrics,
            instance: 1,
            epochs: 1,
            tick: 0,
            started,
            with_b: true,
            requests: Vec::new(),
            responses: Vec::new(),
            reconciles: [None, None],
            observed: BTreeMap::new(),
            paused: WorkSet::EMPTY,
            clock,
        };
        simulation.acquire();
        simulation
    }

    fn table(&self) -> &RuntimeTable {
        &self.tables[self.holder]
    }

    /// The holder acquires the shard, as a new instance.
    fn acquire(&mut self) {
        let shard = shard();
        self.table().acquire(shard, Instance::new(self.instance), &WriteFence::default(), Instant::now());
        self.place();
        self.table().set_shard_synced(shard);
        self.paused = WorkSet::EMPTY;
        // A real acquisition verifies everything. Here the events of the agent alone must suffice.
    }

    fn place(&self) {
        // Each replica observes the Kymas of all shards.
        for table in &self.tables {
            table.place(KEY(), "uid", Some(id()), plan_of(self.with_b));
        }
    }

    fn restart_receiver(&mut self) {
        self.instance += 1;
        self.reconciles = [None, None];
        self.tables = tables(self.instance, &self.metrics);
        self.acquire();
    }

    fn hand_over(&mut self, to: usize) {
        let released = self.table().release(shard());
        assert_eq!(released, [KEY()]);
        for reconcile in self.reconciles.iter().flatten() {
            assert!(reconcile.job.start.cancellation.is_cancelled() && !reconcile.job.start.tenure.fence.is_open());
        }
        self.instance += 1;
        self.holder = to;
        self.acquire();
    }

    /// Wall clock of the receiver, without steps.
    fn unix(&self) -> i64 {
        self.started.elapsed().as_secs().try_into().unwrap()
    }

    fn wait(&self, duration: Duration) {
        self.clock.block_on(time::advance(duration));
    }

    fn epoch(&mut self) -> u64 {
        self.epochs += 1;
        self.epochs
    }

    fn change(&mut self, watch: &'static str, object: u8) {
        let version = self.world.versions.entry(watch).or_default();
        *version += 1;
        self.world.objects.insert((watch, object), *version);
        if self.agent.watches.contains(&watch) {
            self.agent.waiting.insert((watch, Some(object)));
        }
    }

    fn deliver(&mut self, request: Request, to: usize) -> Result<(), PlacementError> {
        let Request { epoch, created, accepted, number, body } = request;
        let now_unix = self.unix();
        let table = &self.tables[to];
        let (answered, run, settled, refused, resend) = match body {
            Body::Events(events) => {
                let batch = Verified::unchecked(&id(), epoch, created, EventBatch { events, traceparent: None });
                let response = table.events(batch, now_unix)?;
                let run = Some((response.accepted, response.since));
                let refused =
                    response.refused.into_iter().map(|refused| (refused.id.parse().unwrap(), refused.reason)).collect();
                (response.instance, run, response.settled, refused, Vec::new())
            }
            Body::Heartbeat(heartbeat) => {
                let response = table.heartbeat(Verified::unchecked(&id(), epoch, created, *heartbeat), now_unix)?;
                (response.instance, None, response.settled, Vec::new(), response.resend)
            }
        };
        let instance = self.instance;
        assert_eq!(answered, Instance::new(instance), "an agent sees the instance of its shard only");
        self.responses.push(Response { epoch, accepted, number, instance, settled, run, refused, resend });
        Ok(())
    }

    fn receive(&mut self, at: usize) {
        if at >= self.responses.len() {
            return;
        }
        let response = self.responses.remove(at);
        let epoch = self.epoch();
        for forgotten in self.agent.receive(response, epoch) {
            for work in work_of(forgotten.watch) {
                let observed = self.observed.get(&(*work, forgotten.watch)).copied().unwrap_or(0);
                assert!(observed >= forgotten.version, "{work:?} never saw {} {}", forgotten.watch, forgotten.version);
            }
        }
    }

    fn begin(&mut self) -> bool {
        let Some(job) = self.table().next().now_or_never() else { return false };
        assert!(self.reconciles[self.holder].is_none(), "one at a time, although the shard was released in between");
        self.reconciles[self.holder] = Some(Reconcile { job, read: self.world.versions.clone() });
        true
    }

    fn end(&mut self, at: usize, how: u8) {
        let Some(Reconcile { job, read }) = self.reconciles[at].take() else { return };
        let queued = job.queued.clone();
        let catalog = WorkSet::of(&[Work::Catalog]);
        let outcome = match how {
            0 => ReconcileOutcome::failed(queued.work, ErrorClass::Ours),
            1 => ReconcileOutcome {
                ended: queued.work.minus(catalog),
                ..ReconcileOutcome::failed(queued.work.both(catalog), ErrorClass::Refused)
            },
            2 => ReconcileOutcome::ended(queued.work.minus(catalog)),
            3 => ReconcileOutcome::default(),
            4 => ReconcileOutcome {
                ended: queued.work.minus(catalog),
                deferred: queued.work.both(catalog),
                class: Some(ErrorClass::Refused),
                ..ReconcileOutcome::default()
            },
            _ => ReconcileOutcome::ended(queued.work),
        };
        // Nothing that a reconcile of a released shard finds is recorded: its writes are refused.
        let is_recorded = job.start.tenure.fence.is_open();
        for work in outcome.ended.iter().filter(|_| is_recorded) {
            for (watch, version) in &read {
                let observed = self.observed.entry((work, watch)).or_default();
                *observed = (*observed).max(*version);
            }
        }
        if is_recorded {
            self.paused |= queued.work.minus(outcome.ended | outcome.failed | outcome.deferred);
        }
        self.tables[at].done(job, outcome);
    }

    fn plan_receiver(&mut self, with_b: bool) {
        self.with_b = with_b;
        self.place();
    }

    /// The agent adopts the receiver's plan.
    fn plan_agent(&mut self) {
        let had = self.agent.watches.contains(&"b");
        self.agent.watches.retain(|watch| *watch == "a");
        if self.with_b {
            self.agent.watches.push("b");
            if !had {
                self.agent.waiting.insert(("b", None));
            }
        } else {
            self.agent.waiting.retain(|(watch, _)| *watch == "a");
        }
    }

    fn apply(&mut self, step: Step) {
        self.tick += 1;
        match step {
            Step::Change(b, object) => self.change(if b { "b" } else { "a" }, object),
            Step::Send => self.requests.extend(self.agent.request(&self.world, self.tick)),
            Step::Timeout => self.agent.in_flight = None,
            Step::Heartbeat => {
                let heartbeat = self.agent.heartbeat(self.tick);
                self.requests.push(heartbeat);
            }
            Step::Deliver { at, corrupt, keep } if at < self.requests.len() => {
                let mut request = self.requests[at].clone();
                if !keep {
                    self.requests.remove(at);
                }
                if let (Some(corrupt), Body::Events(events)) = (corrupt, &mut request.body)
                    && let Some(event @ Ok(_)) = events.get_mut(corrupt)
                {
                    *event = Err((event.as_ref().unwrap().id, Reason::TooLarge));
                }
                self.deliver(request, self.holder).unwrap();
            }
            Step::DeliverElsewhere(at) if at < self.requests.len() => {
                let refused = self.deliver(self.requests[at].clone(), 1 - self.holder);
                assert_eq!(refused, Err(PlacementError::Elsewhere));
            }
            Step::Lose(at) if at < self.requests.len() => drop(self.requests.remove(at)),
            Step::Respond(at) => self.receive(at),
            Step::LoseResponse(at) if at < self.responses.len() => drop(self.responses.remove(at)),
            Step::Begin => drop(self.begin()),
            Step::End(how) => self.end(self.holder, how),
            Step::EndCancelled(how) => self.end(1 - self.holder, how),
            Step::RestartAgent => {
                let epoch = self.epoch();
                self.agent = Agent::new(epoch, &["a"]);
                self.plan_agent();
            }
            Step::RestartReceiver => self.restart_receiver(),
            Step::HandOver { to } => self.hand_over(to),
            Step::PlanReceiver(with_b) => self.plan_receiver(with_b),
            Step::PlanAgent => self.plan_agent(),
            Step::Wait(seconds) => self.wait(Duration::from_secs(seconds.into())),
            Step::Deliver { .. } | Step::DeliverElsewhere(_) | Step::Lose(_) | Step::LoseResponse(_) => {}
        }
    }

    /// Runs without faults until everything in flight has arrived, and asserts that all is settled.
    fn settle(&mut self) {
        self.plan_receiver(true);
        self.plan_agent();
        // The end of a pause is a change in KCP, which enqueues the work.
        self.table().enqueue(&KEY(), self.paused, Priority::Verification);
        self.end(1 - self.holder, 9);
        for _ in 0..20 {
            self.tick += 1;
            self.agent.in_flight = None;
            self.requests.extend(self.agent.request(&self.world, self.tick));
            let heartbeat = self.agent.heartbeat(self.tick);
            self.requests.push(heartbeat);
            for request in std::mem::take(&mut self.requests) {
                self.deliver(request, self.holder).unwrap();
            }
            while !self.responses.is_empty() {
                self.receive(0);
            }
            self.wait(Duration::from_secs(3_600));
            self.end(self.holder, 9);
            while self.begin() {
                self.end(self.holder, 9);
            }
        }
        assert!(self.agent.sent.is_empty() && self.agent.waiting.is_empty(), "an event is never settled");
        for watch in ["a", "b"] {
            let version = self.world.versions.get(watch).copied().unwrap_or(0);
            for work in work_of(watch) {
                assert!(
                    self.observed.get(&(*work, watch)).copied().unwrap_or(0) >= version,
                    "{work:?} of {watch} is behind"
                );
            }
        }
        let view = self.table().views().remove(0);
        assert!(view.queued.is_empty() && !view.in_progress, "work remains: {view:?}");
        assert!(self.tables[1 - self.holder].views().is_empty());
        assert_eq!(self.metrics.differing.get(), 0, "false digest mismatch");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, max_shrink_iters: 50_000, ..ProptestConfig::default() })]
    #[test]
    fn no_change_is_lost_and_everything_settles(steps in prop::collection::vec(steps(), 1..150)) {
        let mut simulation = Simulation::new();
        let clock = simulation.clock.handle().clone();
        let _entered = clock.enter();
        for step in steps {
            simulation.apply(step);
        }
        simulation.settle();
    }
}
