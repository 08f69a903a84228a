//! Single decisions, and moves of whole landscapes with an API server that answers at once.

mod model;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use tidewatch_api::shard::ShardCount;

use self::model::{ApiServer, timings};
use super::{super::record::Record, *};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(15);
/// A holder's duration and the time that a change takes.
const TAKE_OVER: Duration = Duration::from_secs(20);

/// Settings of a replica that shares this number of units: shards, and the fleet role.
fn settings(name: &str, units: u16) -> Settings {
    let shards = ShardCount::new(units - 1).unwrap();
    Settings { identity: format!("{name}_1"), place: None, shards, is_alone: false, timings: timings() }
}

/// Settings of a replica that shares the shard and the fleet role with no other one.
fn alone(name: &str) -> Settings {
    Settings { is_alone: true, ..settings(name, 2) }
}

struct Replica {
    settings: Settings,
    ownership: Ownership,
    cursor: usize,
    held: BTreeSet<Unit>,
    last: Step,
    ended: Vec<EndReason>,
}

/// Replicas that exchange messages without delay.
struct Landscape {
    api: ApiServer,
    replicas: BTreeMap<String, Replica>,
    start: Instant,
    now: Instant,
    acquired: usize,
    /// Acknowledges hand-overs at once.
    stops: bool,
}

impl Landscape {
    fn new(units: u16) -> Self {
        let api = ApiServer::new(ShardCount::new(units - 1).unwrap());
        let now = Instant::now();
        Self { api, replicas: BTreeMap::new(), start: now, now, acquired: 0, stops: true }
    }

    fn with(units: u16, names: &[&str]) -> Self {
        let mut landscape = Self::new(units);
        names.iter().for_each(|name| landscape.start(settings(name, units)));
        landscape.run(LEASE * 3);
        landscape
    }

    fn start(&mut self, settings: Settings) {
        let mut ownership = Ownership::new(settings.clone(), 1, self.now);
        ownership.observe_all(self.api.all(), self.now);
        let name = settings.identity.split('_').next().unwrap().to_owned();
        let cursor = self.api.log.len();
        let held = BTreeSet::new();
        let last = Step::default();
        let ended = Vec::new();
        self.replicas.insert(name, Replica { settings, ownership, cursor, held, last, ended });
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += SECOND / 4;
            let names: Vec<_> = self.replicas.keys().cloned().collect();
            for name in names {
                self.step(&name);
            }
        }
    }

    fn step(&mut self, name: &str) {
        self.deliver(name);
        self.decide(name);
        self.send(name);
    }

    /// The watch delivers all changes.
    fn deliver(&mut self, name: &str) {
        let replica = self.replicas.get_mut(name).unwrap();
        for (id, record) in &self.api.log[replica.cursor..] {
            replica.ownership.observe(*id, Some(record.clone()), self.now);
        }
        replica.cursor = self.api.log.len();
    }

    fn decide(&mut self, name: &str) {
        let replica = self.replicas.get_mut(name).unwrap();
        let step = replica.ownership.step(self.now);
        for effect in &step.effects {
            match effect {
                Effect::Acquired(unit) => {
                    self.acquired += 1;
                    assert!(replica.held.insert(*unit));
                }
                Effect::HandOver(unit) if self.stops => replica.ownership.stopped(*unit),
                Effect::HandOver(_) => {}
                Effect::Ended(unit, reason) => {
                    assert!(replica.held.remove(unit));
                    replica.ended.push(*reason);
                }
            }
        }
        replica.last = step;
    }

    /// Sends the writes of the last decision.
    fn send(&mut self, name: &str) {
        let wall = Timestamp::UNIX_EPOCH + SignedDuration::try_from(self.now - self.start).unwrap();
        let replica = self.replicas.get_mut(name).unwrap();
        for write in &replica.last.writes {
            let outcome = self.api.write(write, &replica.settings, wall);
            replica.ownership.finished(write.id, outcome, self.now);
        }
    }

    fn replica(&mut self, name: &str) -> &mut Replica {
        self.replicas.get_mut(name).unwrap()
    }

    fn shares(&self) -> Vec<usize> {
        let mut shares: Vec<_> = self.replicas.values().map(|replica| replica.held.len()).collect();
        shares.sort_unstable();
        shares
    }

    fn refusal(&mut self, name: &str) -> Option<Refusal> {
        self.replica(name).last.refusal
    }

    fn edit(&mut self, id: LeaseId, change: impl FnOnce(&mut Record)) {
        let mut record = self.api.get(id).clone();
        change(&mut record);
        let version = record.version.clone();
        assert!(matches!(self.api.swap(id, &version, record), Outcome::Written(_)));
    }
}

#[test]
fn shares_are_equal_and_a_change_moves_no_more_than_it_must() {
    let mut landscape = Landscape::with(24, &["a", "b"]);
    assert_eq!((landscape.shares(), landscape.acquired), (vec![12, 12], 24));
    landscape.start(settings("c", 24));
    landscape.run(LEASE * 3);
    assert_eq!((landscape.shares(), landscape.acquired), (vec![8, 8, 8], 32));
    // An orderly stop.
    let now = landscape.now;
    landscape.replica("b").ownership.leave(now);
    landscape.run(SECOND * 2);
    assert!(landscape.replica("b").ownership.has_left());
    landscape.replicas.remove("b");
    assert_eq!((landscape.shares(), landscape.acquired), (vec![12, 12], 40));
    // A crash.
    landscape.replicas.remove("a");
    landscape.run(TAKE_OVER);
    assert_eq!((landscape.shares(), landscape.acquired), (vec![24], 52));
}

#[test]
fn replica_that_starts_again_and_again_moves_nothing() {
    let mut landscape = Landscape::with(24, &["a", "b"]);
    for n in 0..20 {
        landscape.start(Settings { identity: format!("c_{n}"), ..settings("c", 24) });
        landscape.run(SECOND * 10);
        landscape.replicas.remove("c");
        landscape.run(SECOND * 2);
    }
    assert_eq!((landscape.shares(), landscape.acquired), (vec![12, 12], 24));
}

#[test]
fn predecessor_in_the_same_place_is_replaced_at_once() {
    let in_place = |n: u32| Settings { identity: format!("a_{n}"), place: Some("a".to_owned()), ..settings("a", 4) };
    let mut landscape = Landscape::new(4);
    landscape.start(in_place(1));
    landscape.run(SECOND * 3);
    assert_eq!(landscape.shares(), [4]);
    landscape.start(in_place(2));
    landscape.run(SECOND * 3);
    assert_eq!((landscape.shares(), landscape.acquired), (vec![4], 8));
}

#[test]
fn shard_is_handed_over_only_when_its_work_has_stopped() {
    let mut landscape = Landscape::with(2, &["a"]);
    landscape.stops = false;
    landscape.start(settings("b", 2));
    landscape.run(LEASE + SECOND);
    let stopping = |landscape: &mut Landscape| {
        let holds = &landscape.replica("a").ownership.holds;
        holds.iter().find(|(_, hold)| hold.phase != Phase::Active).map(|(unit, _)| *unit)
    };
    let unit = stopping(&mut landscape).unwrap();
    landscape.run(SECOND * 8);
    assert_eq!(landscape.shares(), [0, 2], "still held, and its fence open");
    landscape.replica("a").ownership.stopped(unit);
    landscape.run(SECOND);
    assert_eq!((landscape.shares(), landscape.replica("a").ended.clone()), (vec![1, 1], vec![EndReason::HandedOver]));

    // The deadline closes the fence, and the shard is released when the last request has arrived.
    let now = landscape.now;
    landscape.replica("b").ownership.leave(now);
    landscape.run(SECOND * 11);
    assert_eq!(landscape.replica("b").ended, [EndReason::HandOverTimeout]);
    assert_eq!(landscape.shares(), [0, 1]);
    landscape.run(SECOND * 3);
    assert_eq!(landscape.shares(), [0, 2]);
    assert!(landscape.replica("b").ownership.has_left());
}

#[test]
fn replica_without_the_api_server_ends_its_shards_before_others_take_them() {
    let mut landscape = Landscape::with(4, &["a", "b"]);
    let begun = landscape.now;
    // No step of `a` reaches the API server.
    let mut cut = landscape.replicas.remove("a").unwrap();
    let mut ended = None;
    while landscape.shares() != [4] {
        landscape.run(SECOND / 4);
        let step = cut.ownership.step(landscape.now);
        for write in step.writes {
            cut.ownership.finished(write.id, Outcome::Failed, landscape.now);
        }
        if step.effects.iter().any(|effect| matches!(effect, Effect::Ended(_, EndReason::Expired))) {
            ended = Some(landscape.now);
        }
        assert!(landscape.now < begun + TAKE_OVER);
    }
    assert!(ended.unwrap() + SECOND * 2 < landscape.now);
    // It finds out, and becomes a member again.
    cut.held.clear();
    landscape.replicas.insert("a".to_owned(), cut);
    landscape.run(LEASE * 3);
    assert_eq!(landscape.shares(), [2, 2]);
}

#[test]
fn frozen_replica_acquires_anew_with_another_fence() {
    let mut landscape = Landscape::with(2, &["a"]);
    // Nobody takes over meanwhile.
    landscape.now += SECOND * 14;
    landscape.run(SECOND);
    assert_eq!(landscape.replica("a").ended, [EndReason::Expired; 2]);
    landscape.run(SECOND);
    assert_eq!((landscape.shares(), landscape.acquired), (vec![2], 4));
}

/// The second one stands by until the first one has ended, in order or not.
#[test]
fn replica_that_shares_with_none_takes_over_from_one_that_ended() {
    let mut landscape = Landscape::new(2);
    ["a", "b"].into_iter().for_each(|name| landscape.start(alone(name)));
    landscape.run(LEASE * 4);
    assert_eq!((landscape.shares(), landscape.acquired), (vec![0, 2], 2), "of two that started together one is first");
    let [first, second] = if landscape.replica("a").held.is_empty() { ["b", "a"] } else { ["a", "b"] };
    assert_eq!((landscape.refusal(first), landscape.refusal(second)), (None, Some(Refusal::Standby)));
    landscape.replicas.remove(first);
    landscape.run(LEASE / 2);
    assert_eq!(landscape.shares(), [0], "the membership of the first has not lapsed");
    landscape.run(TAKE_OVER - LEASE / 2);
    assert_eq!(landscape.shares(), [2]);

    landscape.start(Settings { identity: "c_2".to_owned(), ..alone("c") });
    landscape.run(LEASE * 2);
    assert_eq!(landscape.shares(), [0, 2]);
    let now = landscape.now;
    landscape.replica(second).ownership.leave(now);
    landscape.run(SECOND * 2);
    assert!(landscape.replica(second).ownership.has_left());
    assert_eq!((landscape.replica("c").held.len(), landscape.refusal("c")), (2, None));
}

#[test]
fn renewals_are_those_of_the_memberships_alone() {
    let mut landscape = Landscape::with(24, &["a", "b", "c"]);
    let before = landscape.api.log.len();
    landscape.run(LEASE * 20);
    let writes = &landscape.api.log[before..];
    let members = writes.iter().filter(|(id, _)| matches!(id, LeaseId::Member(_))).count();
    assert!((165..=180).contains(&members), "{members}");
    assert_eq!(writes.len(), members, "the Lease of a shard is written when it moves");
}

#[test]
fn rivals_wait_until_all_replicas_have_ended() {
    let others = [settings("c", 49), alone("c")];
    for other in others {
        let waits = if other.is_alone { Refusal::Standby } else { Refusal::OtherCount };
        let mut landscape = Landscape::new(49);
        ["a", "b"].into_iter().for_each(|name| landscape.start(settings(name, 24)));
        landscape.run(LEASE * 3);
        landscape.start(other.clone());
        landscape.run(LEASE * 4);
        assert_eq!((landscape.shares(), landscape.acquired), (vec![0, 12, 12], 24));
        assert_eq!(landscape.refusal("c"), Some(waits));
        let is_member = |number: u8| landscape.api.get(LeaseId::Member(number)).holder() == Some("c_1");
        assert!(!(0..8).any(is_member));

        // One ends in order, and the other one is killed.
        let now = landscape.now;
        landscape.replica("a").ownership.leave(now);
        landscape.run(SECOND * 2);
        landscape.replicas.remove("a");
        assert_eq!((landscape.shares(), landscape.refusal("c")), (vec![0, 24], Some(waits)));
        landscape.replicas.remove("b");
        landscape.run(TAKE_OVER);
        assert_eq!((landscape.shares(), landscape.refusal("c")), (vec![other.units()], None));

        // The way back is the same.
        landscape.start(settings("a", 24));
        landscape.run(LEASE * 2);
        assert_eq!((landscape.shares(), landscape.refusal("a")), (vec![0, other.units()], Some(Refusal::OtherCount)));
    }
}

/// A frozen rival still has shards that nobody else would claim.
#[test]
fn membership_of_a_rival_ends_before_shards_are_claimed() {
    let mut landscape = Landscape::with(24, &["a"]);
    let frozen = landscape.replicas.remove("a").unwrap();
    landscape.start(settings("b", 2));
    landscape.run(TAKE_OVER);
    assert_eq!(landscape.shares(), [2]);
    let is_named = |number: u8| landscape.api.get(LeaseId::Member(number)).holder() == Some("a_1");
    assert!(!(0..8).any(is_named));
    // It resumes, and has not heard of that.
    landscape.replicas.insert("a".to_owned(), frozen);
    for _ in 0..5 {
        landscape.decide("a");
        landscape.send("a");
        assert!(landscape.replica("a").held.is_empty());
    }
    landscape.run(LEASE * 2);
    assert_eq!((landscape.shares(), landscape.refusal("a")), (vec![0, 2], Some(Refusal::OtherCount)));
}

/// They join by different Leases: none claims before it knows that it is first.
#[test]
fn of_rivals_that_join_at_the_same_time_one_is_admitted() {
    let mut landscape = Landscape::new(24);
    let both = ["a", "b"];
    landscape.start(settings("a", 24));
    landscape.start(settings("b", 8));
    for _ in 0..3 {
        both.into_iter().for_each(|name| landscape.decide(name));
        both.into_iter().for_each(|name| landscape.send(name));
    }
    let members = (0..8).filter_map(|number| landscape.api.get(LeaseId::Member(number)).holder().map(str::to_owned));
    assert_eq!(members.collect::<BTreeSet<_>>().len(), 2, "both have joined");
    assert_eq!((landscape.shares(), landscape.refusal("a")), (vec![0, 0], Some(Refusal::Unconfirmed)));
    landscape.run(LEASE * 4);
    assert_eq!(landscape.shares().into_iter().filter(|share| *share > 0).count(), 1);
}

#[test]
fn every_refusal_has_a_reason() {
    // All membership Leases are taken.
    let names: Vec<_> = (0..8).map(|n| format!("r{n}")).collect();
    let mut full = Landscape::with(3, &names.iter().map(String::as_str).collect::<Vec<_>>());
    full.start(settings("late", 3));
    full.run(LEASE * 2);
    assert_eq!(full.refusal("late"), Some(Refusal::NoMembership));

    // An installation with fewer Leases than shards: those that exist are held.
    let mut small = Landscape::new(2);
    small.start(settings("a", 3));
    small.run(SECOND * 3);
    assert_eq!((small.shares(), small.refusal("a")), (vec![2], Some(Refusal::LeaseMissing)));

    // Nothing is decided before the first list.
    let mut ownership = Ownership::new(settings("a", 3), 1, small.now);
    let step = ownership.step(small.now);
    assert!(step.writes.is_empty() && step.effects.is_empty());
}

#[test]
fn shard_that_another_writer_takes_is_lost() {
    let mut landscape = Landscape::with(2, &["a"]);
    let unit = Unit::Shard(ShardCount::ONE.shard(0).unwrap());
    landscape.edit(LeaseId::Unit(unit), |record| record.lease.holder = Some("stranger_1".to_owned()));
    landscape.run(SECOND / 4);
    assert_eq!(landscape.replica("a").ended, [EndReason::Taken]);
    // No membership names the stranger.
    landscape.run(SECOND);
    assert_eq!(landscape.shares(), [2], "the shard and the fleet role");
}
