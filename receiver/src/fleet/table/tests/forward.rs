//! Forwarding as a game: an agent of the test's own, answers that get lost, managers that fail, queues that are too small, restarts of
//! both sides. An object that its manager has not seen as it is now is never forgotten by the agent, and in quiet times all have been
//! seen and nothing is left.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use tidewatch_shared::{
    event::{Change, Event, EventId, Object, Received},
    metrics::Registry,
};

use super::*;
use crate::fleet::forward::{Delivery, Limits, Outbox, Outcome, Routes, Service, Target};

const OBJECTS: usize = 6;
const WATCH: &str = "f";
/// Events of one request: fewer than there are objects.
const BATCH: usize = 3;

fn forward_plan() -> Arc<Plan> {
    let watch = json!({"name": WATCH, "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["forward"]});
    Arc::new(Plan::parse(&json!({"revision": "1", "watches": [watch]}).to_string()).unwrap())
}

fn receiver(instance: u64, limits: Limits) -> Hub {
    counted(&mut Registry::default(), instance, limits)
}

fn counted(registry: &mut Registry, instance: u64, limits: Limits) -> Hub {
    let metrics = Metrics::register(registry);
    let settings = Settings { seed: instance, ..Settings::default() };
    let hub = Hub::new(Instance::new(instance), settings, metrics, Instant::now());
    hub.lock().outbox = Outbox::new(limits, instance);
    hub.set_routes(routes());
    hub.place(key(0), Some(id(0)), forward_plan());
    hub.set_synced();
    hub
}

fn routes() -> Routes {
    let target = Target::new("m", Service::new("s", "n", 1).unwrap()).unwrap();
    [(WATCH.to_owned(), target)].into_iter().collect()
}

/// The agent's rules of contract v3, as far as they decide what it keeps.
#[derive(Default)]
struct Agent {
    epoch: u64,
    sequence: u64,
    instance: Option<Instance>,
    waiting: BTreeSet<usize>,
    waits_whole: bool,
    /// Unsettled events by sequence; `None` is the watch as a whole.
    sent: BTreeMap<u64, Option<usize>>,
    in_flight: Vec<u64>,
}

impl Agent {
    fn begin_anew(&mut self) {
        self.epoch += 1;
        self.sequence = 0;
        self.in_flight.clear();
        for (_, object) in std::mem::take(&mut self.sent) {
            match object {
                Some(object) => drop(self.waiting.insert(object)),
                None => self.waits_whole = true,
            }
        }
    }

    /// A list: whatever was known before, everything is told.
    fn restart(&mut self) {
        self.begin_anew();
        self.instance = None;
        self.waits_whole = true;
        self.waiting = (0..OBJECTS).collect();
    }

    fn request(&mut self) -> Option<Vec<Received>> {
        if self.in_flight.is_empty() {
            let whole = std::mem::take(&mut self.waits_whole).then_some(None);
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

    fn hear(&mut self, epoch: u64, answer: &EventsResponse) {
        if epoch != self.epoch {
            return;
        }
        if self.instance.replace(answer.instance).is_some_and(|before| before != answer.instance) {
            return self.begin_anew();
        }
        self.in_flight.clear();
        for refused in &answer.refused {
            let refused: EventId = refused.id.parse().unwrap();
            match self.sent.remove(&refused.sequence) {
                Some(Some(object)) => drop(self.waiting.insert(object)),
                Some(None) => self.waits_whole = true,
                None => {}
            }
        }
        self.settle(answer.settled.get(WATCH).copied().unwrap_or(0));
    }

    fn settle(&mut self, settled: u64) {
        self.sent.retain(|sequence, _| *sequence > settled);
        self.in_flight.retain(|sequence| *sequence > settled);
    }
}

struct Game {
    hub: Hub,
    limits: Limits,
    instances: u64,
    agent: Agent,
    truth: [u64; OBJECTS],
    seen: [u64; OBJECTS],
    deliveries: Vec<Delivery>,
    last: Option<(u64, Vec<Received>)>,
}

#[derive(Clone, Copy, Debug)]
enum Move {
    Change(usize),
    /// A request, with whether it comes, whether its answer comes, and whether an old one comes again behind it.
    Send {
        comes: bool,
        heard: bool,
        again: bool,
    },
    /// The answer of a heartbeat: what is settled, alone.
    Beat,
    /// One is taken; the manager may look at once.
    Take {
        early: bool,
    },
    End(usize, u8),
    RestartAgent,
    RestartReceiver,
}

fn moves() -> impl Strategy<Value = Move> {
    let coin = any::<bool>;
    prop_oneof![
        6 => (0..OBJECTS).prop_map(Move::Change),
        8 => (prop::bool::weighted(0.9), prop::bool::weighted(0.7), prop::bool::weighted(0.1))
            .prop_map(|(comes, heard, again)| Move::Send { comes, heard, again }),
        3 => Just(Move::Beat),
        6 => coin().prop_map(|early| Move::Take { early }),
        6 => (0..8usize, 0..8u8).prop_map(|(at, how)| Move::End(at, how)),
        1 => Just(Move::RestartAgent),
        1 => Just(Move::RestartReceiver),
    ]
}

impl Game {
    fn new(per_watch: usize) -> Self {
        let limits = Limits { per_service: 16, per_watch, parked: 2 };
        let mut agent = Agent::default();
        agent.restart();
        Self {
            hub: receiver(1, limits),
            limits,
            instances: 1,
            agent,
            truth: [1; OBJECTS],
            seen: [0; OBJECTS],
            deliveries: Vec::new(),
            last: None,
        }
    }

    fn play(&mut self, play: Move) {
        match play {
            Move::Change(object) => {
                self.truth[object] += 1;
                self.agent.waiting.insert(object);
            }
            Move::Send { comes, heard, again } => self.send(comes, heard, again),
            Move::Beat => self.beat(),
            Move::Take { early } => {
                let later = Instant::now() + Duration::from_secs(3_600);
                let taken = self.hub.lock().outbox.take(later);
                if let Some(delivery) = taken {
                    if early {
                        self.look(&delivery);
                    }
                    self.deliveries.push(delivery);
                }
            }
            Move::End(at, how) => self.end(at, how),
            Move::RestartAgent => self.agent.restart(),
            Move::RestartReceiver => {
                self.instances += 1;
                self.hub = receiver(self.instances, self.limits);
                self.deliveries.clear();
            }
        }
    }

    fn look(&mut self, delivery: &Delivery) {
        let object: usize = delivery.event.name.strip_prefix('o').unwrap().parse().unwrap();
        self.seen[object] = self.truth[object];
    }

    fn send(&mut self, comes: bool, heard: bool, again: bool) {
        let old = self.last.clone().filter(|_| again);
        let epoch = self.agent.epoch;
        let Some(events) = self.agent.request() else { return };
        if comes {
            let answer = self.give(epoch, events.clone());
            if heard {
                self.agent.hear(epoch, &answer);
            }
            self.last = Some((epoch, events));
        }
        if let Some((epoch, events)) = old {
            self.give(epoch, events);
        }
    }

    fn give(&self, epoch: u64, events: Vec<Received>) -> EventsResponse {
        let leaf = vec![0x30].into();
        self.hub
            .events_with(&id(0), Epoch::new(epoch), 1, events, Beside { leaf: Some(&leaf), ..Beside::default() })
            .unwrap()
    }

    fn beat(&mut self) {
        let instance = Instance::new(self.instances);
        if self.agent.instance.replace(instance).is_some_and(|before| before != instance) {
            return self.agent.begin_anew();
        }
        let view = self.hub.view().remove(0);
        let epoch = view.epochs.iter().find(|view| view.epoch == Epoch::new(self.agent.epoch));
        let settled = epoch.and_then(|epoch| epoch.settled.get(WATCH).copied());
        self.agent.settle(settled.unwrap_or(0));
    }

    fn end(&mut self, at: usize, how: u8) {
        if self.deliveries.is_empty() {
            return;
        }
        let delivery = self.deliveries.remove(at % self.deliveries.len());
        let outcome = match how {
            0 => Outcome::Failed(None),
            1 => {
                // It came, and the answer got lost.
                self.look(&delivery);
                Outcome::Failed(Some(Duration::from_secs(1)))
            }
            2 | 3 => Outcome::Refused(404),
            _ => {
                self.look(&delivery);
                Outcome::Delivered
            }
        };
        self.hub.forwarded(&delivery, outcome);
    }

    /// What the manager has not seen as it is now, the agent still has.
    fn check(&self) {
        for object in 0..OBJECTS {
            let kept =
                self.agent.waiting.contains(&object) || self.agent.sent.values().any(|sent| *sent == Some(object));
            assert!(kept || self.seen[object] == self.truth[object], "o{object} is forgotten");
        }
        assert!(self.hub.lock().outbox.objects(routes().of(WATCH).unwrap()) <= self.limits.per_watch);
    }

    fn come_to_rest(&mut self) {
        for _ in 0..200 {
            self.send(true, true, false);
            self.play(Move::Take { early: false });
            self.end(0, 5);
            self.beat();
            self.check();
        }
        assert_eq!(self.seen, self.truth);
        assert!(self.agent.waiting.is_empty() && self.agent.sent.is_empty(), "work that never ends");
        assert_eq!(self.hub.view()[0].wanted, Works::EMPTY, "no pass is wanted for other managers");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn every_manager_ends_with_the_last_state_of_every_object(
        per_watch in 1..=OBJECTS,
        game in prop::collection::vec(moves(), 0..120),
    ) {
        let mut state = Game::new(per_watch);
        for play in game {
            state.play(play);
            state.check();
        }
        state.come_to_rest();
    }
}

#[tokio::test]
async fn objects_that_nobody_can_name_are_told_without_a_name_and_settled_with_their_delivery() {
    let limits = Limits { per_service: 9, per_watch: 9, parked: 9 };
    let game = Game { hub: receiver(1, limits), ..Game::new(1) };
    let event = |payload| Event { payload, ..game.agent.event(1) };
    let unnamed = Payload::Unnamed { subject: "g/v1/things//".parse().unwrap(), kind: "Thing".into() };
    assert!(game.give(1, vec![Ok(event(unnamed))]).settled.is_empty());
    let delivery = game.hub.next_delivery().await;
    let body = r#"{"watched":{"Namespace":"","Name":""},"watchedGvk":{"group":"g","version":"v1","kind":"Thing"}}"#;
    assert_eq!(delivery.event.to_body(), body);
    game.hub.forwarded(&delivery, Outcome::Delivered);
    assert_eq!(game.hub.view()[0].epochs[0].settled[WATCH], 1);
}

#[tokio::test]
async fn what_is_put_is_due_at_once_and_settled_with_its_delivery() {
    let hub = receiver(1, Limits::default());
    let mut agent = Agent::default();
    agent.restart();
    agent.waiting = BTreeSet::from([0]);
    assert!(hub.next_delivery().now_or_never().is_none());
    let waiter = tokio::spawn({
        let hub = hub.clone();
        async move { hub.next_delivery().await }
    });
    tokio::task::yield_now().await;
    let events = agent.request().unwrap();
    let beside = Beside { leaf: Some(&vec![0x30].into()), ..Beside::default() };
    let answer = hub.events_with(&id(0), Epoch::new(agent.epoch), 1, events, beside).unwrap();
    assert!(answer.refused.is_empty());
    let delivery = waiter.await.unwrap();
    assert_eq!((delivery.runtime(), delivery.watch(), &*delivery.event.kind), (&id(0), WATCH, "Thing"));
    assert_eq!(hub.view()[0].epochs[0].settled.get(WATCH), None);
    hub.forwarded(&delivery, Outcome::Delivered);
    assert_eq!(hub.view()[0].epochs[0].settled.get(WATCH), Some(&2));
    assert!(hub.next().now_or_never().is_none(), "no pass is wanted");
}

#[tokio::test]
async fn a_target_that_nobody_names_any_more_is_counted_no_more() {
    let mut registry = Registry::default();
    let hub = counted(&mut registry, 1, Limits::default());
    let mut agent = Agent::default();
    agent.restart();
    let beside = Beside { leaf: Some(&vec![0x30].into()), ..Beside::default() };
    hub.events_with(&id(0), Epoch::new(agent.epoch), 1, agent.request().unwrap(), beside).unwrap();
    let delivery = hub.next_delivery().await;
    let is_counted = || registry.encode().unwrap().contains(r#"manager="m""#);
    assert!(is_counted());
    // It is on its way.
    hub.set_routes([].into_iter().collect());
    assert!(!is_counted());
    hub.forwarded(&delivery, Outcome::Delivered);
    assert!(!is_counted());
}

#[test]
fn without_a_certificate_nothing_goes_to_other_managers() {
    let hub = receiver(1, Limits::default());
    let mut agent = Agent::default();
    agent.restart();
    let answer = hub.events(&id(0), Epoch::new(agent.epoch), 1, agent.request().unwrap()).unwrap();
    assert_eq!(answer.refused.len(), BATCH);
}
