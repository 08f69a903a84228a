//! Simulation of contract v3: a model agent, a network that loses, delays and duplicates, and the real state of the
//! runtime table. Every event that the agent forgets was reconciled, and without further faults everything settles
//! without a false digest mismatch.

mod agent;

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;
use tidewatch_shared::{event::Reason, plan::Work};

use agent::{Agent, Body, Request, Response, World};

use super::super::{job::ReconcileStart, *};
use crate::{
    base::error_class::ErrorClass,
    fleet::queue::{Priority, QueuedWork, WorkSet},
};

/// A reconcile that has read and not ended yet.
struct Reconcile {
    queued: QueuedWork,
    start: ReconcileStart,
    read: BTreeMap<&'static str, u64>,
}

struct Simulation {
    world: World,
    agent: Agent,
    state: State,
    instance: u64,
    epochs: u64,
    tick: u64,
    started: Instant,
    now: Instant,
    with_b: bool,
    requests: Vec<Request>,
    responses: Vec<Response>,
    reconciles: Vec<Reconcile>,
    observed: BTreeMap<(Work, &'static str), u64>,
    differing: u64,
    /// Work that is paused and has not been enqueued since.
    paused: WorkSet,
}

fn settings(seed: u64) -> Settings {
    Settings { slots: 4, seed, ..Settings::default() }
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
    Lose(usize),
    Respond(usize),
    LoseResponse(usize),
    Begin,
    End(u8),
    RestartAgent,
    RestartReceiver,
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
        2 => at.clone().prop_map(Step::Lose),
        8 => at.clone().prop_map(Step::Respond),
        2 => at.prop_map(Step::LoseResponse),
        6 => Just(Step::Begin),
        6 => (0u8..6).prop_map(Step::End),
        1 => Just(Step::RestartAgent),
        1 => Just(Step::RestartReceiver),
        1 => any::<bool>().prop_map(Step::PlanReceiver),
        1 => Just(Step::PlanAgent),
        2 => (1u8..10).prop_map(Step::Wait),
    ]
}

impl Simulation {
    fn new() -> Self {
        let mut simulation = Self {
            world: World::default(),
            agent: Agent::new(1, &["a", "b"]),
            state: State::new(settings(1)),
            instance: 0,
            epochs: 1,
            tick: 0,
            started: Instant::now(),
            now: Instant::now(),
            with_b: true,
            requests: Vec::new(),
            responses: Vec::new(),
            reconciles: Vec::new(),
            observed: BTreeMap::new(),
            differing: 0,
            paused: WorkSet::EMPTY,
        };
        simulation.restart_receiver();
        simulation
    }

    fn restart_receiver(&mut self) {
        self.instance += 1;
        self.reconciles.clear();
        self.paused = WorkSet::EMPTY;
        self.state = State::new(settings(self.instance));
        self.state.synced = true;
        self.state.place(KEY(), Some("r-1".parse().unwrap()), plan_of(self.with_b), self.now);
        // A real start verifies everything. Here the events of the agent alone must suffice.
    }

    /// Wall clock of the receiver, without steps.
    fn unix(&self) -> i64 {
        self.now.saturating_duration_since(self.started).as_secs().try_into().unwrap()
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

    fn deliver(&mut self, request: Request) {
        let id: RuntimeId = "r-1".parse().unwrap();
        let Request { epoch, created, accepted, number, body } = request;
        let now_unix = self.unix();
        let response = match body {
            Body::Events(events) => {
                let batch = Verified::unchecked(&id, epoch, created, EventBatch { events, traceparent: None });
                let recorded = self.state.events(batch, now_unix, self.now).unwrap().recorded;
                self.differing += recorded.counts.differing;
                let run = Some((recorded.accepted, recorded.since));
                Response {
                    epoch,
                    accepted,
                    number,
                    instance: self.instance,
                    settled: recorded.settled,
                    run,
                    refused: recorded.refused,
                    resend: Vec::new(),
                }
            }
            Body::Heartbeat(heartbeat) => {
                let heartbeat = self
                    .state
                    .heartbeat(&Verified::unchecked(&id, epoch, created, *heartbeat), now_unix, self.now)
                    .unwrap()
                    .record;
                self.differing += heartbeat.differing;
                let (settled, resend) = (heartbeat.settled, heartbeat.resend);
                Response {
                    epoch,
                    accepted,
                    number,
                    instance: self.instance,
                    settled,
                    run: None,
                    refused: Vec::new(),
                    resend,
                }
            }
        };
        self.responses.push(response);
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
        let Some((_, queued, start)) = self.state.begin(self.now) else { return false };
        assert!(self.reconciles.is_empty(), "one at a time");
        self.reconciles.push(Reconcile { queued, start, read: self.world.versions.clone() });
        true
    }

    fn end(&mut self, how: u8) {
        let Some(Reconcile { queued, start, read }) = self.reconciles.pop() else { return };
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
        for work in outcome.ended.iter() {
            for (watch, version) in &read {
                let observed = self.observed.entry((work, watch)).or_default();
                *observed = (*observed).max(*version);
            }
        }
        self.paused |= queued.work.minus(outcome.ended | outcome.failed | outcome.deferred);
        self.state.finish(&KEY(), &queued, &start, &outcome, self.now, self.now);
    }

    fn plan_receiver(&mut self, with_b: bool) {
        self.with_b = with_b;
        self.state.place(KEY(), Some("r-1".parse().unwrap()), plan_of(with_b), self.now);
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
                self.deliver(request);
            }
            Step::Lose(at) if at < self.requests.len() => drop(self.requests.remove(at)),
            Step::Respond(at) => self.receive(at),
            Step::LoseResponse(at) if at < self.responses.len() => drop(self.responses.remove(at)),
            Step::Begin => drop(self.begin()),
            Step::End(how) => self.end(how),
            Step::RestartAgent => {
                let epoch = self.epoch();
                self.agent = Agent::new(epoch, &["a"]);
                self.plan_agent();
            }
            Step::RestartReceiver => self.restart_receiver(),
            Step::PlanReceiver(with_b) => self.plan_receiver(with_b),
            Step::PlanAgent => self.plan_agent(),
            Step::Wait(seconds) => self.now += Duration::from_secs(seconds.into()),
            Step::Deliver { .. } | Step::Lose(_) | Step::LoseResponse(_) => {}
        }
    }

    /// Runs without faults until everything in flight has arrived, and asserts that all is settled.
    fn settle(&mut self) {
        self.plan_receiver(true);
        self.plan_agent();
        // The end of a pause is a change in KCP, which enqueues the work.
        let resumed = QueuedWork::new(self.paused, Priority::Verification);
        self.state.queue.enqueue(&KEY(), resumed, self.now);
        for _ in 0..20 {
            self.tick += 1;
            self.agent.in_flight = None;
            self.requests.extend(self.agent.request(&self.world, self.tick));
            let heartbeat = self.agent.heartbeat(self.tick);
            self.requests.push(heartbeat);
            for request in std::mem::take(&mut self.requests) {
                self.deliver(request);
            }
            while !self.responses.is_empty() {
                self.receive(0);
            }
            self.now += Duration::from_secs(3_600);
            self.end(9);
            while self.begin() {
                self.end(9);
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
        let queued = self.state.queue.queued(&KEY());
        assert!(queued.is_empty() && !self.state.queue.in_progress(&KEY()), "work remains: {queued:?}");
        assert_eq!(self.differing, 0, "false digest mismatch");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, max_shrink_iters: 50_000, ..ProptestConfig::default() })]
    #[test]
    fn no_change_is_lost_and_everything_settles(steps in prop::collection::vec(steps(), 1..150)) {
        let mut simulation = Simulation::new();
        for step in steps {
            simulation.apply(step);
        }
        simulation.settle();
    }
}
