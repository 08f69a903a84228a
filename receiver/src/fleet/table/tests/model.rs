//! The rules of contract v3 as a game: an agent of the test's own, a network that loses, delays and doubles, and the real state of the hub.
//! Whatever happens, an event that the agent forgets was worked on, and in quiet times everything comes to rest without a false alarm.

mod agent;

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;
use tidewatch_shared::{event::Reason, plan::Work};

use agent::{Agent, Answer, Body, Request, World};

use super::super::*;
use crate::base::class::Class;

/// A pass that has read and not yet ended.
struct Pass {
    wanted: Wanted,
    begun: Begun,
    read: BTreeMap<&'static str, u64>,
}

struct Game {
    world: World,
    agent: Agent,
    state: State,
    instance: u64,
    epochs: u64,
    tick: u64,
    now: Instant,
    /// When `b` last left the receiver's plan: what was sent before is settled by that.
    left: u64,
    with_b: bool,
    requests: Vec<Request>,
    answers: Vec<Answer>,
    passes: Vec<Pass>,
    known: BTreeMap<(Work, &'static str), u64>,
    differing: u64,
    /// What was paused and not woken since.
    paused: Works,
}

const KEY: fn() -> KymaKey = || KymaKey::new("ns", "kyma");

fn stands_for(watch: &str) -> &'static [Work] {
    if watch == "a" { &[Work::Kyma] } else { &[Work::Kyma, Work::Catalog] }
}

fn plan_of(with_b: bool) -> Arc<Plan> {
    let watch = |name: &str| json!({"name": name, "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": stands_for(name)});
    let watches: Vec<_> = ["a", "b"].into_iter().take(1 + usize::from(with_b)).map(watch).collect();
    Arc::new(Plan::parse(&json!({"revision": with_b.to_string(), "watches": watches}).to_string()).unwrap())
}

#[derive(Clone, Copy, Debug)]
enum Move {
    Change(bool, u8),
    Send,
    GiveUp,
    Beat,
    /// Delivers one request; `spoil` makes one of its events unreadable on the way, `keep` leaves a copy behind.
    Deliver {
        at: usize,
        spoil: Option<usize>,
        keep: bool,
    },
    Lose(usize),
    Hear(usize),
    LoseAnswer(usize),
    Begin,
    End(u8),
    RestartAgent,
    RestartReceiver,
    PlanReceiver(bool),
    PlanAgent,
    Wait(u8),
}

fn moves() -> impl Strategy<Value = Move> {
    let at = 0usize..4;
    let spoil = prop_oneof![5 => Just(None), 1 => (0usize..3).prop_map(Some)];
    prop_oneof![
        6 => (any::<bool>(), 0u8..3).prop_map(|(b, object)| Move::Change(b, object)),
        8 => Just(Move::Send),
        2 => Just(Move::GiveUp),
        3 => Just(Move::Beat),
        10 => (at.clone(), spoil, prop::bool::weighted(0.2)).prop_map(|(at, spoil, keep)| Move::Deliver { at, spoil, keep }),
        2 => at.clone().prop_map(Move::Lose),
        8 => at.clone().prop_map(Move::Hear),
        2 => at.prop_map(Move::LoseAnswer),
        6 => Just(Move::Begin),
        6 => (0u8..6).prop_map(Move::End),
        1 => Just(Move::RestartAgent),
        1 => Just(Move::RestartReceiver),
        1 => any::<bool>().prop_map(Move::PlanReceiver),
        1 => Just(Move::PlanAgent),
        2 => (1u8..10).prop_map(Move::Wait),
    ]
}

impl Game {
    fn new() -> Self {
        let mut game = Self {
            world: World::default(),
            agent: Agent::new(1, &["a", "b"]),
            state: State::new(4, 1),
            instance: 0,
            epochs: 1,
            tick: 0,
            now: Instant::now(),
            left: 0,
            with_b: true,
            requests: Vec::new(),
            answers: Vec::new(),
            passes: Vec::new(),
            known: BTreeMap::new(),
            differing: 0,
            paused: Works::EMPTY,
        };
        game.restart_receiver();
        game
    }

    fn restart_receiver(&mut self) {
        self.instance += 1;
        self.passes.clear();
        self.paused = Works::EMPTY;
        self.state = State::new(4, self.instance);
        self.state.synced = true;
        self.state.place(KEY(), Some("r-1".parse().unwrap()), plan_of(self.with_b), self.now);
        // Every start verifies everything. Only what a watch settled by leaving the plan needs it: with the process, the memory that it
        // was never worked on is gone. Elsewhere the agent alone must be enough.
        if self.left > 0 {
            self.state.queue.want(&KEY(), Wanted::new(Works::ALL_KNOWN, Priority::Verification), self.now);
        }
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
        let Request { epoch, created, known, number, body } = request;
        let answer = match body {
            Body::Events(events) => {
                let recorded = self.state.events(&id, epoch, created, events, None, self.now).unwrap().recorded;
                self.differing += recorded.tally.differing;
                let run = Some((recorded.accepted, recorded.since));
                Answer {
                    epoch,
                    known,
                    number,
                    instance: self.instance,
                    settled: recorded.settled,
                    run,
                    refused: recorded.refused,
                    resend: Vec::new(),
                }
            }
            Body::Beat(beat) => {
                let beat = self.state.heartbeat(&id, created, &beat, None, self.now).unwrap().beat;
                self.differing += beat.differing;
                let (settled, resend) = (beat.settled, beat.resend);
                Answer {
                    epoch,
                    known,
                    number,
                    instance: self.instance,
                    settled,
                    run: None,
                    refused: Vec::new(),
                    resend,
                }
            }
        };
        self.answers.push(answer);
    }

    fn hear(&mut self, at: usize) {
        if at >= self.answers.len() {
            return;
        }
        let answer = self.answers.remove(at);
        let epoch = self.epoch();
        for forgotten in self.agent.hear(answer, epoch) {
            if forgotten.watch == "b" && forgotten.tick <= self.left {
                continue;
            }
            for work in stands_for(forgotten.watch) {
                let known = self.known.get(&(*work, forgotten.watch)).copied().unwrap_or(0);
                assert!(known >= forgotten.version, "{work:?} never saw {} {}", forgotten.watch, forgotten.version);
            }
        }
    }

    fn begin(&mut self) -> bool {
        let Some((_, wanted, begun)) = self.state.begin(self.now) else { return false };
        assert!(self.passes.is_empty(), "one at a time");
        self.passes.push(Pass { wanted, begun, read: self.world.versions.clone() });
        true
    }

    fn end(&mut self, how: u8) {
        let Some(Pass { wanted, begun, read }) = self.passes.pop() else { return };
        let catalog = Works::of(&[Work::Catalog]);
        let outcome = match how {
            0 => Outcome::failed(wanted.works, Class::Ours),
            1 => Outcome {
                ended: wanted.works.minus(catalog),
                ..Outcome::failed(wanted.works.both(catalog), Class::Refused)
            },
            2 => Outcome::ended(wanted.works.minus(catalog)),
            3 => Outcome::default(),
            4 => Outcome {
                ended: wanted.works.minus(catalog),
                put_off: wanted.works.both(catalog),
                class: Some(Class::Refused),
                ..Outcome::default()
            },
            _ => Outcome::ended(wanted.works),
        };
        for work in outcome.ended.iter() {
            for (watch, version) in &read {
                let known = self.known.entry((work, watch)).or_default();
                *known = (*known).max(*version);
            }
        }
        self.paused |= wanted.works.minus(outcome.ended | outcome.failed | outcome.put_off);
        self.state.finish(&KEY(), &wanted, &begun, &outcome, self.now, self.now);
    }

    fn plan_receiver(&mut self, with_b: bool) {
        if self.with_b && !with_b {
            self.left = self.tick;
        }
        self.with_b = with_b;
        self.state.place(KEY(), Some("r-1".parse().unwrap()), plan_of(with_b), self.now);
    }

    /// The agent takes the plan that the receiver has.
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

    fn play(&mut self, step: Move) {
        self.tick += 1;
        match step {
            Move::Change(b, object) => self.change(if b { "b" } else { "a" }, object),
            Move::Send => self.requests.extend(self.agent.request(&self.world, self.tick)),
            Move::GiveUp => self.agent.in_flight = None,
            Move::Beat => {
                let beat = self.agent.beat(self.tick);
                self.requests.push(beat);
            }
            Move::Deliver { at, spoil, keep } if at < self.requests.len() => {
                let mut request = self.requests[at].clone();
                if !keep {
                    self.requests.remove(at);
                }
                if let (Some(spoil), Body::Events(events)) = (spoil, &mut request.body)
                    && let Some(event @ Ok(_)) = events.get_mut(spoil)
                {
                    *event = Err((event.as_ref().unwrap().id, Reason::TooLarge));
                }
                self.deliver(request);
            }
            Move::Lose(at) if at < self.requests.len() => drop(self.requests.remove(at)),
            Move::Hear(at) => self.hear(at),
            Move::LoseAnswer(at) if at < self.answers.len() => drop(self.answers.remove(at)),
            Move::Begin => drop(self.begin()),
            Move::End(how) => self.end(how),
            Move::RestartAgent => {
                let epoch = self.epoch();
                self.agent = Agent::new(epoch, &["a"]);
                self.plan_agent();
            }
            Move::RestartReceiver => self.restart_receiver(),
            Move::PlanReceiver(with_b) => self.plan_receiver(with_b),
            Move::PlanAgent => self.plan_agent(),
            Move::Wait(seconds) => self.now += Duration::from_secs(seconds.into()),
            Move::Deliver { .. } | Move::Lose(_) | Move::LoseAnswer(_) => {}
        }
    }

    /// Nothing fails any more; whatever is under way arrives.
    fn rest(&mut self) {
        self.plan_receiver(true);
        self.plan_agent();
        // Whoever ends a pause changes something in KCP, and that wakes.
        let woken = Wanted::new(self.paused, Priority::Verification);
        self.state.queue.want(&KEY(), woken, self.now);
        for _ in 0..20 {
            self.tick += 1;
            self.agent.in_flight = None;
            self.requests.extend(self.agent.request(&self.world, self.tick));
            let beat = self.agent.beat(self.tick);
            self.requests.push(beat);
            for request in std::mem::take(&mut self.requests) {
                self.deliver(request);
            }
            while !self.answers.is_empty() {
                self.hear(0);
            }
            self.now += Duration::from_secs(3_600);
            self.end(9);
            while self.begin() {
                self.end(9);
            }
        }
        assert!(self.agent.sent.is_empty() && self.agent.waiting.is_empty(), "something is never settled");
        for watch in ["a", "b"] {
            let version = self.world.versions.get(watch).copied().unwrap_or(0);
            for work in stands_for(watch) {
                assert!(
                    self.known.get(&(*work, watch)).copied().unwrap_or(0) >= version,
                    "{work:?} of {watch} is behind"
                );
            }
        }
        let wanted = self.state.queue.wanted(&KEY());
        assert!(wanted.is_empty() && !self.state.queue.in_work(&KEY()), "no rest: {wanted:?}");
        assert_eq!(self.differing, 0, "a false alarm");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, max_shrink_iters: 50_000, ..ProptestConfig::default() })]
    #[test]
    fn no_change_is_lost_and_all_comes_to_rest(moves in prop::collection::vec(moves(), 1..150)) {
        let mut game = Game::new();
        for step in moves {
            game.play(step);
        }
        game.rest();
    }
}
