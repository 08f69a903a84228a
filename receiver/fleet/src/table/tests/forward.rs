//! Simulation of forwarding with a model agent, lost responses, failing managers, small queues, routes that disappear
//! and return, and restarts of both sides. The agent never forgets an object that its manager has not seen in its current state; without further faults
//! the managers have seen all objects and nothing is left.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use tidewatch_contract::event::{Change, Event, EventId, Object, Received};
use tidewatch_kit::metrics::Registry;

use super::*;
use crate::forward::{Delivery, DeliveryOutcome, Limits, Outbox, Routes, Service, Target};

const OBJECTS: usize = 6;
const WATCH: &str = "f";
/// Events per request: fewer than there are objects.
const BATCH: usize = 3;

fn forward_plan() -> Arc<Plan> {
    let watch = json!({"name": WATCH, "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["forward"]});
    Arc::new(Plan::parse(&json!({"revision": "1", "watches": [watch]}).to_string()).unwrap())
}

fn receiver(instance: u64, limits: Limits) -> RuntimeTable {
    counted(&mut Registry::default(), instance, limits)
}

fn counted(registry: &mut Registry, instance: u64, limits: Limits) -> RuntimeTable {
    let metrics = Metrics::register(registry);
    let settings = Settings { seed: instance, ..Settings::default() };
    let fleet = RuntimeTable::alone(instance, settings, metrics);
    *fleet.0.shared.outbox() = Outbox::new(limits, instance);
    fleet.set_routes(routes());
    fleet.place(key(0), "", Some(id(0)), forward_plan());
    fleet.set_synced();
    fleet
}

fn routes() -> Routes {
    let target = Target::new("m", Service::new("s", "n", 1).unwrap()).unwrap();
    [(WATCH.to_owned(), target)].into_iter().collect()
}

fn batch(epoch: u64, events: Vec<Received>) -> Verified<EventBatch> {
    let batch = EventBatch { events, traceparent: None };
    Verified::unchecked(&id(0), Epoch::new(epoch), 1, batch).with_leaf(vec![0x30].into())
}

/// Contract v3 rules of the agent that determine which events it keeps.
#[derive(Default)]
struct Agent {
    epoch: u64,
    sequence: u64,
    instance: Option<Instance>,
    waiting: BTreeSet<usize>,
    relist_pending: bool,
    /// Unsettled events by sequence; `None` is the watch as a whole.
    sent: BTreeMap<u64, Option<usize>>,
    in_flight: Vec<u64>,
}

impl Agent {
    fn renew_epoch(&mut self) {
        self.epoch += 1;
        self.sequence = 0;
        self.in_flight.clear();
        for (_, object) in std::mem::take(&mut self.sent) {
            match object {
                Some(object) => drop(self.waiting.insert(object)),
                None => self.relist_pending = true,
            }
        }
    }

    /// Restarts the agent, which lists and sends everything again.
    fn restart(&mut self) {
        self.renew_epoch();
        self.instance = None;
        self.relist_pending = true;
        self.waiting = (0..OBJECTS).collect();
    }

    fn request(&mut self) -> Option<Vec<Received>> {
        if self.in_flight.is_empty() {
            let whole = std::mem::take(&mut self.relist_pending).then_some(None);
            let objects: Vec<_> = self.waiting.iter().copied().take(BATCH).collect();
            for object in whole.into_iter().chain(objects.into_iter().map(Some)) {
                self.sequence += 1;
                self.sent.retain(|_, sent| *sent != object);
                self.sent.insert(self.sequence, object);
                self.in_flight.push(self.sequence);
                if let Some(object) = object {
                    self.waiting.remove(&object);
                }
            }
        }
        let events: Vec<_> = self.in_flight.iter().map(|sequence| Ok(self.event(*sequence))).collect();
        (!events.is_empty()).then_some(events)
    }

    fn event(&self, sequence: u64) -> Event {
        let payload = match self.sent.get(&sequence).copied().flatten() {
            Some(object) => Payload::Object(Object {
                subject: format!("g/v1/things/ns/o{object}").parse().unwrap(),
                kind: "Thing".into(),
                uid: String::new(),
                resource_version: String::new(),
                generation: None,
                change: Change::Spec,
            }),
            None => Payload::Watch,
        };
        let id = EventId { epoch: Epoch::new(self.epoch), sequence };
        Event {
            id,
            source: super::id(0),
            watch: WATCH.into(),
            payload,
            delta: Digest::ZERO,
            time: None,
            traceparent: None,
        }
    }

    fn receive(&mut self, epoch: u64, response: &EventsResponse) {
        if epoch != self.epoch {
            return;
        }
        if self.instance.replace(response.instance).is_some_and(|before| before != response.instance) {
            return self.renew_epoch();
        }
        self.in_flight.clear();
        for refused in &response.refused {
            let refused: EventId = refused.id.parse().unwrap();
            match self.sent.remove(&refused.sequence) {
                Some(Some(object)) => drop(self.waiting.insert(object)),
                Some(None) => self.relist_pending = true,
                None => {}
            }
        }
        self.settle(response.settled.get(WATCH).copied().unwrap_or(0));
    }

    fn settle(&mut self, settled: u64) {
        self.sent.retain(|sequence, _| *sequence > settled);
        self.in_flight.retain(|sequence| *sequence > settled);
    }
}

struct Simulation {
    fleet: RuntimeTable,
    limits: Limits,
    instances: u64,
    agent: Agent,
    versions: [u64; OBJECTS],
    seen: [u64; OBJECTS],
    deliveries: Vec<Delivery>,
    last: Option<(u64, Vec<Received>)>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Change(usize),
    /// Sends a request. `comes`: the request arrives; `delivered`: its response arrives; `again`: an earlier request
    /// arrives once more after it.
    Send {
        comes: bool,
        delivered: bool,
        again: bool,
    },
    /// Response to a heartbeat: settled watermarks, and watches to send again.
    Heartbeat,
    /// Takes a delivery; with `early` the manager reads the object at once.
    Take {
        early: bool,
    },
    End(usize, u8),
    RestartAgent,
    RestartReceiver,
    /// The Watcher is replaced, or is invalid for a moment; the agent does not notice.
    FlapRoute,
}

fn steps() -> impl Strategy<Value = Step> {
    let coin = any::<bool>;
    prop_oneof![
        6 => (0..OBJECTS).prop_map(Step::Change),
        8 => (prop::bool::weighted(0.9), prop::bool::weighted(0.7), prop::bool::weighted(0.1))
            .prop_map(|(comes, delivered, again)| Step::Send { comes, delivered, again }),
        3 => Just(Step::Heartbeat),
        6 => coin().prop_map(|early| Step::Take { early }),
        6 => (0..8usize, 0..8u8).prop_map(|(at, how)| Step::End(at, how)),
        1 => Just(Step::RestartAgent),
        1 => Just(Step::RestartReceiver),
        1 => Just(Step::FlapRoute),
    ]
}

impl Simulation {
    fn new(per_watch: usize) -> Self {
        let limits = Limits { per_service: 16, per_watch, parked: 2 };
        let mut agent = Agent::default();
        agent.restart();
        Self {
            fleet: receiver(1, limits),
            limits,
            instances: 1,
            agent,
            versions: [1; OBJECTS],
            seen: [0; OBJECTS],
            deliveries: Vec::new(),
            last: None,
        }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Change(object) => {
                self.versions[object] += 1;
                self.agent.waiting.insert(object);
            }
            Step::Send { comes, delivered, again } => self.send(comes, delivered, again),
            Step::Heartbeat => self.heartbeat(),
            Step::Take { early } => {
                let later = Instant::now() + Duration::from_secs(3_600);
                let taken = self.fleet.0.shared.outbox().take(later);
                if let Some(delivery) = taken {
                    if early {
                        self.observe(&delivery);
                    }
                    self.deliveries.push(delivery);
                }
            }
            Step::End(at, how) => self.end(at, how),
            Step::RestartAgent => self.agent.restart(),
            Step::RestartReceiver => {
                self.instances += 1;
                self.fleet = receiver(self.instances, self.limits);
                self.deliveries.clear();
            }
            Step::FlapRoute => {
                self.fleet.set_routes([].into_iter().collect());
                self.fleet.set_routes(routes());
            }
        }
    }

    fn observe(&mut self, delivery: &Delivery) {
        let object: usize = delivery.event.name.strip_prefix('o').unwrap().parse().unwrap();
        self.seen[object] = self.versions[object];
    }

    fn send(&mut self, comes: bool, delivered: bool, again: bool) {
        let old = self.last.clone().filter(|_| again);
        let epoch = self.agent.epoch;
        let Some(events) = self.agent.request() else { return };
        if comes {
            let response = self.post(epoch, events.clone());
            if delivered {
                self.agent.receive(epoch, &response);
            }
            self.last = Some((epoch, events));
        }
        if let Some((epoch, events)) = old {
            self.post(epoch, events);
        }
    }

    fn post(&self, epoch: u64, events: Vec<Received>) -> EventsResponse {
        self.fleet.events(batch(epoch, events), 1).unwrap()
    }

    fn heartbeat(&mut self) {
        let instance = Instance::new(self.instances);
        if self.agent.instance.replace(instance).is_some_and(|before| before != instance) {
            return self.agent.renew_epoch();
        }
        let settled = self.post(self.agent.epoch, Vec::new()).settled.get(WATCH).copied();
        self.agent.settle(settled.unwrap_or(0));
        let epochs = self.fleet.views().remove(0).epochs;
        let mine = epochs.iter().find(|view| view.epoch == Epoch::new(self.agent.epoch));
        if mine.is_some_and(|view| view.resend.iter().any(|watch| watch == WATCH)) {
            self.agent.relist_pending = true;
            self.agent.waiting = (0..OBJECTS).collect();
        }
    }

    fn end(&mut self, at: usize, how: u8) {
        if self.deliveries.is_empty() {
            return;
        }
        let delivery = self.deliveries.remove(at % self.deliveries.len());
        let outcome = match how {
            0 => DeliveryOutcome::Failed(None),
            1 => {
                // The event arrived, but its response is lost.
                self.observe(&delivery);
                DeliveryOutcome::Failed(Some(Duration::from_secs(1)))
            }
            2 | 3 => DeliveryOutcome::Refused(404),
            _ => {
                self.observe(&delivery);
                DeliveryOutcome::Delivered
            }
        };
        self.fleet.forwarded(&delivery, outcome);
    }

    /// Asserts that the agent keeps every object that the manager has not seen in its current state.
    fn check(&self) {
        for object in 0..OBJECTS {
            let kept =
                self.agent.waiting.contains(&object) || self.agent.sent.values().any(|sent| *sent == Some(object));
            assert!(kept || self.seen[object] == self.versions[object], "o{object} is forgotten");
        }
        assert!(self.fleet.0.shared.outbox().objects(routes().of(WATCH).unwrap()) <= self.limits.per_watch);
    }

    fn settle(&mut self) {
        for _ in 0..200 {
            self.send(true, true, false);
            self.apply(Step::Take { early: false });
            self.end(0, 5);
            self.heartbeat();
            self.check();
        }
        assert_eq!(self.seen, self.versions);
        assert!(self.agent.waiting.is_empty() && self.agent.sent.is_empty(), "events are never settled");
        assert_eq!(self.fleet.views()[0].queued, [], "forwarding enqueues no reconcile");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn every_manager_receives_the_last_state_of_every_object(
        per_watch in 1..=OBJECTS,
        steps in prop::collection::vec(steps(), 0..120),
    ) {
        let mut simulation = Simulation::new(per_watch);
        for step in steps {
            simulation.apply(step);
            simulation.check();
        }
        simulation.settle();
    }
}

#[tokio::test]
async fn unnamed_objects_are_forwarded_without_a_name_and_settled_on_delivery() {
    let limits = Limits { per_service: 9, per_watch: 9, parked: 9 };
    let simulation = Simulation { fleet: receiver(1, limits), ..Simulation::new(1) };
    let event = |payload| Event { payload, ..simulation.agent.event(1) };
    let unnamed = Payload::Unnamed { subject: "g/v1/things//".parse().unwrap(), kind: "Thing".into() };
    assert!(simulation.post(1, vec![Ok(event(unnamed))]).settled.is_empty());
    let delivery = simulation.fleet.next_delivery().await;
    let body = r#"{"watched":{"Namespace":"","Name":""},"watchedGvk":{"group":"g","version":"v1","kind":"Thing"}}"#;
    assert_eq!(delivery.event.to_body(), body);
    simulation.fleet.forwarded(&delivery, DeliveryOutcome::Delivered);
    assert_eq!(simulation.post(1, Vec::new()).settled[WATCH], 1);
}

#[tokio::test]
async fn forwarded_event_is_due_at_once_and_settled_on_delivery() {
    let fleet = receiver(1, Limits::default());
    let mut agent = Agent::default();
    agent.restart();
    agent.waiting = BTreeSet::from([0]);
    assert!(fleet.next_delivery().now_or_never().is_none());
    let waiter = tokio::spawn({
        let fleet = fleet.clone();
        async move { fleet.next_delivery().await }
    });
    tokio::task::yield_now().await;
    let events = agent.request().unwrap();
    let response = fleet.events(batch(agent.epoch, events), 1).unwrap();
    assert!(response.refused.is_empty() && response.settled.is_empty());
    let delivery = waiter.await.unwrap();
    assert_eq!((delivery.runtime(), delivery.watch(), &*delivery.event.kind), (&id(0), WATCH, "Thing"));
    fleet.forwarded(&delivery, DeliveryOutcome::Delivered);
    assert_eq!(fleet.events(batch(agent.epoch, Vec::new()), 1).unwrap().settled[WATCH], 2);
    assert!(fleet.next().now_or_never().is_none(), "no reconcile is queued");
}

#[tokio::test]
async fn returning_route_requests_what_was_dropped_with_it() {
    let mut simulation = Simulation::new(OBJECTS);
    simulation.agent.relist_pending = false;
    simulation.agent.waiting = BTreeSet::from([0]);
    simulation.send(true, true, false);
    simulation.apply(Step::FlapRoute);
    // An object that changes later must not settle the one that was dropped.
    simulation.apply(Step::Change(1));
    simulation.send(true, true, false);
    let delivery = simulation.fleet.next_delivery().await;
    assert_eq!(delivery.event.name, "o1");
    simulation.fleet.forwarded(&delivery, DeliveryOutcome::Delivered);
    assert!(simulation.post(simulation.agent.epoch, Vec::new()).settled.is_empty());
    simulation.settle();
    assert_eq!(simulation.fleet.views()[0].epochs[0].resend, Vec::<String>::new());
}

#[tokio::test]
async fn removed_target_has_no_metrics() {
    let mut registry = Registry::default();
    let fleet = counted(&mut registry, 1, Limits::default());
    let mut agent = Agent::default();
    agent.restart();
    fleet.events(batch(agent.epoch, agent.request().unwrap()), 1).unwrap();
    let delivery = fleet.next_delivery().await;
    let is_counted = || registry.encode().unwrap().contains(r#"manager="m""#);
    assert!(is_counted());
    // The delivery is in flight.
    fleet.set_routes([].into_iter().collect());
    assert!(!is_counted());
    fleet.forwarded(&delivery, DeliveryOutcome::Delivered);
    assert!(!is_counted());
}

#[test]
fn without_a_certificate_nothing_is_forwarded() {
    let fleet = receiver(1, Limits::default());
    let mut agent = Agent::default();
    agent.restart();
    let batch = EventBatch { events: agent.request().unwrap(), traceparent: None };
    let response = fleet.events(Verified::unchecked(&id(0), Epoch::new(agent.epoch), 1, batch), 1).unwrap();
    assert_eq!(response.refused.len(), BATCH);
}
