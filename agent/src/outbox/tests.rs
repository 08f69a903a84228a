use std::{collections::HashMap, num::NonZeroI64, time::Duration};

use proptest::prelude::*;
use tidewatch_api::names::OWN_MANAGER;
use tidewatch_contract::{
    event::{Change, Event, Payload, parse_batch},
    exchange::RefusedEvent,
};

use super::{refusal::PARKED_RETRY, *};
use crate::index::{ObjectState, Version};

const ONE: Instance = Instance::new(1);
const TWO: Instance = Instance::new(2);
const W: &str = "kyma";

fn info(forward: bool) -> WatchInfo {
    WatchInfo {
        watch: W.into(),
        group: "operator.kyma-project.io".into(),
        version: "v1beta2".into(),
        resource: "kymas".into(),
        kind: "Kyma".into(),
        manager: OWN_MANAGER.into(),
        forward,
    }
}

fn outbox(forward: bool) -> Outbox {
    let mut next = 0;
    let random_bits = move || {
        next += 1;
        next
    };
    let mut outbox = Outbox::new("r-1".parse().unwrap(), Box::new(random_bits), Metrics::default());
    outbox.open(W.into(), info(forward));
    outbox
}

fn object(version: u64, change: Change, part: u128) -> Update {
    let seen =
        ObjectState { uid: "u".into(), version: Version::Number(version), generation: NonZeroI64::new(1), metadata: 0 };
    Update::Object { seen, change, part: Digest::new(part) }
}

fn mark(outbox: &mut Outbox, key: &str, before: u128, after: u128) {
    outbox.mark(W, key, object(1, Change::Spec, after), Digest::new(before), 0);
}

const NOTHING: Digests<'static> = &|_| None;

fn send(outbox: &mut Outbox, now: Instant) -> Option<(Batch, Vec<Event>)> {
    let batch = outbox.request(now, NOTHING)?;
    let events = parse_batch(&batch.body).unwrap().into_iter().map(Result::unwrap).collect();
    Some((batch, events))
}

fn sequences(events: &[Event]) -> Vec<u64> {
    events.iter().map(|event| event.id.sequence).collect()
}

fn response(instance: Instance, since: u64, accepted: u64) -> EventsResponse {
    EventsResponse { instance, accepted, since, settled: Settled::new(), refused: Vec::new(), heartbeat_seconds: 30 }
}

fn settle(n: u64) -> Settled {
    Settled::from([(W.to_owned(), n)])
}

fn refuse(batch: &Batch, sequence: u64, reason: Reason) -> Vec<RefusedEvent> {
    vec![RefusedEvent { id: EventId { epoch: batch.epoch, sequence }.to_string(), reason }]
}

#[test]
fn newest_state_wins_and_a_sent_object_can_wait_again() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    assert_eq!(outbox.due(now), None);
    mark(&mut outbox, "ns/a", 0, 1);
    mark(&mut outbox, "ns/a", 1, 2);
    assert_eq!((outbox.waiting(), outbox.due(now)), (1, Some(now)));
    let (batch, events) = send(&mut outbox, now).unwrap();
    assert_eq!((events.len(), events[0].delta), (1, Digest::new(2)));
    mark(&mut outbox, "ns/a", 2, 5);
    assert_eq!((outbox.waiting(), outbox.unsettled()), (1, 1));
    outbox.apply_response(now, batch.epoch, &response(ONE, 1, 1));
    // A watermark never affects waiting entries.
    outbox.apply_heartbeat_response(now, batch.epoch, ONE, Some(1), &settle(1));
    assert_eq!((outbox.waiting(), outbox.unsettled()), (1, 0));
    let (_, events) = send(&mut outbox, now).unwrap();
    assert_eq!((sequences(&events), events[0].delta), (vec![2], Digest::new(3)));
}

#[test]
fn retry_carries_the_same_events_and_a_new_nonce() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    mark(&mut outbox, "ns/a", 0, 1);
    let (first, _) = send(&mut outbox, now).unwrap();
    mark(&mut outbox, "ns/b", 0, 1);
    let (second, _) = send(&mut outbox, now).unwrap();
    assert_eq!(first.body, second.body);
    assert!(second.again && !first.again && second.nonce.counter > first.nonce.counter);
}

#[test]
fn another_instance_receives_unsettled_events_again_in_a_new_epoch() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    for key in ["ns/a", "ns/b"] {
        mark(&mut outbox, key, 0, 1);
        let (batch, events) = send(&mut outbox, now).unwrap();
        outbox.apply_response(now, batch.epoch, &response(ONE, 1, events[0].id.sequence));
    }
    let epoch = outbox.heartbeat().0.epoch;
    outbox.apply_heartbeat_response(now, epoch, ONE, Some(1), &settle(1));
    outbox.apply_heartbeat_response(now, epoch, TWO, Some(1), &settle(2));
    assert_ne!(outbox.heartbeat().0.epoch, epoch);
    // The watermark of the other instance belongs to an epoch that has ended.
    assert_eq!((outbox.waiting(), outbox.unsettled()), (1, 0));
    let (_, events) = send(&mut outbox, now).unwrap();
    let Update::Object { .. } = object(1, Change::Spec, 0) else { unreachable!() };
    assert_eq!(sequences(&events), [1]);
    assert_eq!(events[0].delta, Digest::ZERO);
}

#[test]
fn alternating_instances_cause_backoff() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    mark(&mut outbox, "ns/a", 0, 1);
    for instance in [ONE, TWO, ONE] {
        let epoch = outbox.heartbeat().0.epoch;
        outbox.apply_heartbeat_response(now, epoch, instance, Some(1), &Settled::new());
    }
    assert!(outbox.request(now, NOTHING).is_none());
    let due = outbox.due(now).unwrap();
    assert_eq!(due, now + Duration::from_secs(1));
    assert!(outbox.request(due, NOTHING).is_some());
}

#[test]
fn lost_events_are_sent_again_in_a_new_epoch() {
    for (since, accepted) in [(1, 1), (2, 2), (3, 3)] {
        let mut outbox = outbox(false);
        let now = Instant::now();
        for (key, accepted) in [("ns/a", 1), ("ns/b", 2)] {
            mark(&mut outbox, key, 0, 1);
            let (batch, _) = send(&mut outbox, now).unwrap();
            outbox.apply_response(now, batch.epoch, &response(ONE, 1, accepted));
        }
        mark(&mut outbox, "ns/c", 0, 1);
        let (batch, _) = send(&mut outbox, now).unwrap();
        outbox.apply_response(now, batch.epoch, &response(ONE, since, accepted));
        assert_ne!(outbox.heartbeat().0.epoch, batch.epoch, "{since} {accepted}");
        assert_eq!((outbox.waiting(), outbox.unsettled()), (3, 0));
    }
}

#[test]
fn event_of_a_watch_unknown_to_the_receiver_is_delayed_and_gets_a_new_sequence() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    mark(&mut outbox, "ns/a", 0, 1);
    let (batch, _) = send(&mut outbox, now).unwrap();
    let refused = refuse(&batch, 1, Reason::UnknownWatch);
    outbox.apply_response(now, batch.epoch, &EventsResponse { refused, ..response(ONE, 1, 1) });
    assert!(outbox.request(now, NOTHING).is_none());
    let due = outbox.due(now).unwrap();
    assert!(due > now && due <= now + Duration::from_secs(2));
    let (again, events) = send(&mut outbox, due).unwrap();
    assert_eq!((again.epoch, sequences(&events), events[0].delta), (batch.epoch, vec![2], Digest::ZERO));
    // A new plan ends the delay.
    let refused = refuse(&again, 2, Reason::UnknownWatch);
    outbox.apply_response(due, again.epoch, &EventsResponse { refused, ..response(ONE, 1, 2) });
    outbox.plan_changed();
    assert_eq!(outbox.due(due), Some(due));
}

#[test]
fn refused_event_is_replaced_by_a_watch_event_with_the_same_sequence() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    mark(&mut outbox, "ns/a", 0, 1);
    mark(&mut outbox, "ns/b", 0, 2);
    let (batch, _) = send(&mut outbox, now).unwrap();
    let refused = refuse(&batch, 1, Reason::TooLarge);
    outbox.apply_response(now, batch.epoch, &EventsResponse { refused, ..response(ONE, 1, 0) });
    let (again, events) = send(&mut outbox, now).unwrap();
    assert_eq!(again.epoch, batch.epoch);
    assert_eq!((sequences(&events), events[0].delta), (vec![1], Digest::new(1)));
    assert_eq!(events[0].payload, tidewatch_contract::event::Payload::Watch);
    // If the replacement is refused as well, it is parked, and a new epoch closes the gap.
    let refused = refuse(&again, 1, Reason::Malformed);
    outbox.apply_response(now, again.epoch, &EventsResponse { refused, ..response(ONE, 1, 0) });
    assert_eq!(outbox.parked(), 1);
    let (last, events) = send(&mut outbox, now).unwrap();
    assert!(last.epoch != batch.epoch && sequences(&events) == [1] && events.len() == 1);
    outbox.plan_changed();
    assert_eq!((outbox.parked(), outbox.waiting()), (0, 1));
}

#[test]
fn refused_event_of_a_forwarded_watch_is_parked() {
    let mut outbox = outbox(true);
    let now = Instant::now();
    mark(&mut outbox, "ns/a", 0, 1);
    let (batch, _) = send(&mut outbox, now).unwrap();
    let refused = refuse(&batch, 1, Reason::TooLarge);
    outbox.apply_response(now, batch.epoch, &EventsResponse { refused, ..response(ONE, 1, 0) });
    assert_eq!((outbox.parked(), outbox.waiting()), (1, 0));
    // It changes again while parked: the newest state wins, and nothing is sent.
    mark(&mut outbox, "ns/a", 1, 2);
    assert_eq!((outbox.parked(), outbox.waiting(), outbox.due(now)), (1, 0, None));
    let epoch = outbox.heartbeat().0.epoch;
    outbox.apply_heartbeat_response(now, epoch, TWO, Some(1), &Settled::new());
    assert_eq!((outbox.parked(), outbox.waiting()), (0, 1));
}

#[test]
fn unnamed_event_carries_the_kind_and_stays_unnamed_until_sent() {
    let mut outbox = outbox(true);
    let now = Instant::now();
    outbox.mark_unnamed(W, 0);
    outbox.mark_watch(W, 0);
    let (batch, events) = send(&mut outbox, now).unwrap();
    let Payload::Unnamed { subject, kind } = &events[0].payload else { panic!("unnamed") };
    assert_eq!((subject.to_string().as_str(), kind.as_str()), ("operator.kyma-project.io/v1beta2/kymas//", "Kyma"));
    // The event is refused while its watch is unknown, and the watch is listed meanwhile.
    outbox.mark_watch(W, 0);
    let refused = refuse(&batch, 1, Reason::UnknownWatch);
    outbox.apply_response(now, batch.epoch, &EventsResponse { refused, ..response(ONE, 1, 1) });
    outbox.plan_changed();
    assert!(matches!(send(&mut outbox, now).unwrap().1[0].payload, Payload::Unnamed { .. }));
}

#[test]
fn watermark_of_a_heartbeat_does_not_settle_lost_events() {
    let mut outbox = outbox(true);
    let now = Instant::now();
    for key in ["ns/a", "ns/b"] {
        mark(&mut outbox, key, 0, 1);
        let (batch, events) = send(&mut outbox, now).unwrap();
        outbox.apply_response(now, batch.epoch, &response(ONE, 1, events[0].id.sequence));
    }
    // The receiver loses both, accepts a third event, and its response is lost.
    mark(&mut outbox, "ns/c", 0, 1);
    let (batch, _) = send(&mut outbox, now).unwrap();
    outbox.apply_heartbeat_response(now, batch.epoch, ONE, Some(3), &settle(3));
    assert_eq!((outbox.waiting(), outbox.unsettled()), (3, 0));
    assert_ne!(outbox.heartbeat().0.epoch, batch.epoch);
    // A receiver that began at this sequence has lost none of the remaining events.
    let (batch, events) = send(&mut outbox, now).unwrap();
    assert_eq!(events.len(), 3);
    outbox.apply_response(now, batch.epoch, &response(ONE, 1, 3));
    outbox.apply_heartbeat_response(now, batch.epoch, ONE, Some(1), &settle(3));
    assert_eq!((outbox.waiting(), outbox.unsettled()), (0, 0));
}

#[test]
fn refused_batch_is_bisected_until_the_refused_event_is_isolated() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    for n in 0..8 {
        mark(&mut outbox, &format!("ns/{n}"), 0, 1);
    }
    let mut accepted = 0;
    let mut watch_entries = 0;
    let mut requests = 0;
    while let Some((batch, events)) = send(&mut outbox, now) {
        requests += 1;
        assert!(requests < 20);
        let is_bad = |event: &Event| matches!(&event.payload, tidewatch_contract::event::Payload::Object(o) if o.subject.name == "5");
        if events.iter().any(is_bad) {
            outbox.refused_whole(now, batch.epoch);
            continue;
        }
        watch_entries +=
            events.iter().filter(|event| event.payload == tidewatch_contract::event::Payload::Watch).count();
        accepted = events.last().unwrap().id.sequence;
        outbox.apply_response(now, batch.epoch, &response(ONE, 1, accepted));
    }
    assert_eq!((accepted, watch_entries, outbox.parked()), (8, 1, 0));
}

#[test]
fn event_parked_by_a_refused_batch_is_retried_with_its_newest_state() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    mark(&mut outbox, "ns/a", 0, 1);
    for is_watch in [false, true] {
        let (batch, events) = send(&mut outbox, now).unwrap();
        assert_eq!(events[0].payload == Payload::Watch, is_watch);
        assert!(outbox.refused_whole(now, batch.epoch));
    }
    assert_eq!((outbox.parked(), outbox.waiting()), (1, 0));
    mark(&mut outbox, "ns/a", 1, 7);
    let due = outbox.due(now).expect("a parked event is due for a retry");
    assert!(due > now && due <= now + PARKED_RETRY && send(&mut outbox, now).is_none());
    // A new event does not wait for the retry.
    mark(&mut outbox, "ns/b", 0, 1);
    let (batch, events) = send(&mut outbox, now).unwrap();
    outbox.apply_response(now, batch.epoch, &EventsResponse { settled: settle(1), ..response(ONE, 1, 1) });
    assert_eq!((events.len(), outbox.due(now)), (1, Some(due)));
    let (batch, events) = send(&mut outbox, due).unwrap();
    assert!(matches!(&events[0].payload, Payload::Object(object) if object.subject.name == "a"));
    assert_eq!((events.len(), events[0].delta), (1, Digest::new(6)));
    outbox.apply_response(due, batch.epoch, &EventsResponse { settled: settle(2), ..response(ONE, 1, 2) });
    assert_eq!((outbox.parked(), outbox.waiting(), outbox.unsettled(), outbox.due(due)), (0, 0, 0, None));
}

#[test]
fn event_refused_by_id_stays_parked_while_others_are_retried() {
    let mut outbox = outbox(true);
    let now = Instant::now();
    mark(&mut outbox, "ns/a", 0, 1);
    let (batch, _) = send(&mut outbox, now).unwrap();
    let refused = refuse(&batch, 1, Reason::TooLarge);
    outbox.apply_response(now, batch.epoch, &EventsResponse { refused, ..response(ONE, 1, 0) });
    mark(&mut outbox, "ns/b", 0, 1);
    outbox.mark_watch(W, 0);
    while let Some((batch, _)) = send(&mut outbox, now) {
        outbox.refused_whole(now, batch.epoch);
    }
    assert_eq!((outbox.parked(), outbox.sent_digest(W, &|_| Some(Digest::ZERO))), (3, None));
    let due = outbox.due(now).unwrap();
    for sequence in 1..=2 {
        let (batch, events) = send(&mut outbox, due).unwrap();
        assert_eq!((sequences(&events), outbox.parked()), (vec![sequence], 1));
        outbox.apply_response(
            due,
            batch.epoch,
            &EventsResponse { settled: settle(sequence), ..response(ONE, 1, sequence) },
        );
    }
    assert_eq!((outbox.parked(), outbox.waiting(), outbox.due(due)), (1, 0, None));
    outbox.plan_changed();
    assert_eq!((outbox.parked(), outbox.waiting()), (0, 1));
}

#[test]
fn announced_limits_hold_until_another_instance_answers() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    for n in 0..10 {
        mark(&mut outbox, &format!("ns/{n}"), 0, 1);
    }
    let (batch, events) = send(&mut outbox, now).unwrap();
    assert_eq!(events.len(), 10);
    let found = outbox.too_large(now, batch.epoch, AnnouncedLimits { max_bytes: None, max_events: Some(3) });
    assert!(!found);
    let mut sizes = Vec::new();
    while let Some((batch, events)) = send(&mut outbox, now) {
        sizes.push(events.len());
        outbox.apply_response(now, batch.epoch, &response(ONE, 1, events.last().unwrap().id.sequence));
    }
    assert_eq!(sizes, [3, 3, 3, 1]);
    let epoch = outbox.heartbeat().0.epoch;
    outbox.apply_heartbeat_response(now, epoch, TWO, Some(1), &Settled::new());
    assert_eq!(send(&mut outbox, now).unwrap().1.len(), 10);
}

#[test]
fn request_size_is_bounded_and_watches_are_served_in_turn() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    outbox.open("other".into(), WatchInfo { watch: "other".into(), ..info(false) });
    for n in 0..EVENTS_PER_REQUEST * 2 {
        mark(&mut outbox, &format!("ns/{n}"), 0, 1);
    }
    outbox.mark_watch("other", 0);
    let (first, events) = send(&mut outbox, now).unwrap();
    assert_eq!(events.len(), EVENTS_PER_REQUEST);
    outbox.apply_response(now, first.epoch, &response(ONE, 1, EVENTS_PER_REQUEST as u64));
    let (_, events) = send(&mut outbox, now).unwrap();
    assert_eq!(events[0].watch, "other");
}

#[test]
fn sent_digest_exists_once_the_watch_event_of_the_list_is_sent() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    let digests: Digests<'_> = &|_| Some(Digest::new(100));
    outbox.mark_watch(W, 0);
    assert_eq!(outbox.sent_digest(W, digests), None);
    let batch = outbox.request(now, digests).unwrap();
    let Ok(event) = parse_batch(&batch.body).unwrap().remove(0) else { panic!("well-formed") };
    assert_eq!((event.delta, outbox.sent_digest(W, digests)), (Digest::new(100), Some(Digest::new(100))));
    mark(&mut outbox, "ns/a", 40, 60);
    assert_eq!(outbox.sent_digest(W, digests), Some(Digest::new(80)));
    assert_eq!(outbox.sent_digest(W, NOTHING), None);
}

#[test]
fn delta_of_a_reopened_watch_is_relative_to_its_last_sent_digest() {
    let mut outbox = outbox(false);
    let now = Instant::now();
    outbox.mark_watch(W, 0);
    let batch = outbox.request(now, &|_| Some(Digest::new(7))).unwrap();
    outbox.apply_response(now, batch.epoch, &response(ONE, 1, 1));
    outbox.close(W);
    outbox.open(W.into(), info(false));
    outbox.mark_watch(W, 0);
    let batch = outbox.request(now, &|_| Some(Digest::new(9))).unwrap();
    let Ok(event) = parse_batch(&batch.body).unwrap().remove(0) else { panic!("well-formed") };
    assert_eq!(event.delta, Digest::new(2));
}

/// Model of one watch, an agent and a receiver, in which answers are lost and receivers restart.
struct World {
    outbox: Outbox,
    now: Instant,
    objects: HashMap<u8, u128>,
    /// Number of changes; the receiver must have reconciled the newest one in the end.
    changes: u64,
    receiver: Receiver,
    /// Newest change as of the start of the last recorded reconcile.
    reconciled: u64,
}

#[derive(Default)]
struct Receiver {
    instance: u64,
    epoch: Option<Epoch>,
    since: u64,
    accepted: u64,
    settled: u64,
    digest: Option<Digest>,
}

impl Receiver {
    fn take(&mut self, events: &[Event]) {
        for event in events {
            if self.epoch != Some(event.id.epoch) {
                *self = Self { epoch: Some(event.id.epoch), instance: self.instance, ..Self::default() };
                self.since = event.id.sequence;
                self.accepted = event.id.sequence - 1;
            }
            if event.id.sequence == self.accepted + 1 {
                self.accepted += 1;
                self.digest = self.digest.map(|digest| digest + event.delta);
            } else {
                assert!(event.id.sequence <= self.accepted, "the sequence has no gap");
            }
        }
    }

    fn response(&self) -> EventsResponse {
        EventsResponse {
            settled: settle(self.settled),
            ..response(Instance::new(self.instance), self.since, self.accepted)
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Change(u8),
    /// An object changes unobserved, and the next list detects it.
    Relist(u8),
    Send {
        arrives: bool,
        answered: bool,
    },
    Heartbeat {
        answered: bool,
    },
    Work,
    Restart,
}

impl World {
    fn new() -> Self {
        let receiver = Receiver { instance: 1, ..Receiver::default() };
        let objects = HashMap::new();
        Self { outbox: outbox(false), now: Instant::now(), objects, changes: 0, receiver, reconciled: 0 }
    }

    fn digest(&self) -> Digest {
        self.objects.values().fold(Digest::ZERO, |sum, part| sum + Digest::new(*part))
    }

    fn alter(&mut self, key: u8) -> (u128, u128) {
        self.changes += 1;
        let after = u128::from(self.changes) << 8 | u128::from(key);
        (self.objects.insert(key, after).unwrap_or(0), after)
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Change(key) => {
                let (before, after) = self.alter(key);
                mark(&mut self.outbox, &format!("ns/{key}"), before, after);
            }
            Step::Relist(key) => {
                self.alter(key + 100);
                self.outbox.mark_watch(W, 0);
            }
            Step::Send { arrives, answered } => self.send(arrives, answered),
            Step::Heartbeat { answered } => self.heartbeat(answered),
            Step::Work => {
                // Snapshot, reconcile, record; a receiver without unsettled events does nothing.
                if self.receiver.settled < self.receiver.accepted {
                    self.receiver.settled = self.receiver.accepted;
                    self.reconciled = self.changes;
                }
            }
            Step::Restart => self.receiver = Receiver { instance: self.receiver.instance + 1, ..Receiver::default() },
        }
    }

    fn send(&mut self, arrives: bool, answered: bool) {
        let digest = self.digest();
        let Some(batch) = self.outbox.request(self.now, &|_| Some(digest)) else { return };
        if arrives {
            let events: Vec<_> = parse_batch(&batch.body).unwrap().into_iter().map(Result::unwrap).collect();
            self.receiver.take(&events);
            if answered {
                self.outbox.apply_response(self.now, batch.epoch, &self.receiver.response());
            }
        }
    }

    fn heartbeat(&mut self, answered: bool) {
        let (numbers, _) = self.outbox.heartbeat();
        let digest = self.digest();
        let sent = self.outbox.sent_digest(W, &|_| Some(digest));
        let receiver = &mut self.receiver;
        if receiver.epoch == Some(numbers.epoch) && receiver.accepted == numbers.sequence {
            if let (Some(expected), Some(sent)) = (receiver.digest, sent) {
                assert_eq!(sent, expected, "the digest of what was sent");
            }
            receiver.digest = receiver.digest.or(sent);
        }
        if answered {
            let ours = receiver.epoch == Some(numbers.epoch);
            let settled = if ours { settle(receiver.settled) } else { Settled::new() };
            self.outbox.apply_heartbeat_response(
                self.now,
                numbers.epoch,
                Instance::new(receiver.instance),
                Some(receiver.since.max(1)),
                &settled,
            );
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u8..4).prop_map(Step::Change),
        1 => (0u8..4).prop_map(Step::Relist),
        5 => (any::<bool>(), any::<bool>()).prop_map(|(arrives, answered)| Step::Send { arrives, answered }),
        3 => any::<bool>().prop_map(|answered| Step::Heartbeat { answered }),
        3 => Just(Step::Work),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn no_schedule_of_faults_loses_a_change_or_prevents_convergence(steps in prop::collection::vec(step(), 0..60)) {
        let mut world = World::new();
        for step in steps {
            world.now += Duration::from_millis(100);
            world.step(step);
        }
        for _ in 0..6 {
            world.now += Duration::from_secs(300);
            world.step(Step::Heartbeat { answered: true });
            world.step(Step::Send { arrives: true, answered: true });
            world.step(Step::Work);
        }
        world.step(Step::Heartbeat { answered: true });
        prop_assert_eq!((world.outbox.waiting(), world.outbox.unsettled(), world.outbox.parked()), (0, 0, 0));
        prop_assert_eq!(world.reconciled, world.changes);
    }
}
