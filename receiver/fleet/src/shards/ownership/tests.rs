//! Single decisions, and moves of whole landscapes with an API server that answers at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use tidewatch_api::shard::ShardCount;
use tidewatch_cluster::leader::Timings;

use super::{
    super::record::Record,
    model::{ApiServer, timings},
    *,
};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(15);
/// A holder's duration and the time that a change takes.
const TAKE_OVER: Duration = Duration::from_secs(20);

/// Settings of a replica that shares this number of units: shards, and the fleet role.
fn settings(name: &str, units: u16) -> Settings {
    let shards = ShardCount::new(units - 1).unwrap();
    Settings { identity: format!("{name}_1"), place: None, shards, timings: timings() }
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
        let wall = Timestamp::UNIX_EPOCH + SignedDuration::try_from(self.now - self.start).unwrap();
        let replica = self.replicas.get_mut(name).unwrap();
        for (id, record) in &self.api.log[replica.cursor..] {
            replica.ownership.observe(*id, Some(record.clone()), self.now);
        }
        replica.cursor = self.api.log.len();
        let step = replica.ownership.step(self.now);
        for effect in &step.effects {
            match effect {
                Effect::Acquired(unit) => {
                    self.acquired += 1;
                    assert!(replica.held.insert(*unit));
                }
                Effect::HandOver(unit, _) if self.stops => replica.ownership.stopped(*unit),
                Effect::HandOver(..) => {}
                Effect::Ended(unit, reason) => {
                    assert!(replica.held.remove(unit));
                    replica.ended.push(*reason);
                }
            }
        }
        for write in &step.writes {
            let outcome = self.api.write(write, &replica.settings, wall);
            replica.ownership.finished(write.id, outcome, self.now);
        }
        replica.last = step;
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

#[test]
fn unsharded_receiver_excludes_shards() {
    let mut landscape = Landscape::new(3);
    let held = |record: &mut Record, renewed: i64| {
        record.lease.holder = Some("host_1".to_owned());
        record.lease.duration = Some(LEASE);
        record.lease.renewed = Some(Timestamp::from_second(renewed).unwrap());
    };
    landscape.edit(LeaseId::Unsharded, |record| held(record, 0));
    landscape.start(settings("a", 3));
    for n in 0..5 {
        landscape.run(SECOND * 10);
        assert_eq!((landscape.shares(), landscape.refusal("a")), (vec![0], Some(Refusal::UnshardedActive)));
        landscape.edit(LeaseId::Unsharded, |record| held(record, n + 1));
    }
    // It is killed: its Lease lapses.
    landscape.run(LEASE + SECOND * 2);
    assert_eq!((landscape.shares(), landscape.refusal("a")), (vec![3], None));
    let record = landscape.api.get(LeaseId::Unsharded);
    assert_eq!((record.holder(), record.shards.as_deref()), (Some("tidewatch-shards-2"), Some("2")));
    // One takes it by force.
    landscape.edit(LeaseId::Unsharded, |record| held(record, 100));
    landscape.run(SECOND);
    assert_eq!(landscape.replica("a").ended, [EndReason::Unsharded; 3]);
}

#[test]
fn lease_of_the_unsharded_receiver_is_renewed_by_one_replica_at_a_time() {
    let mut landscape = Landscape::with(24, &["a", "b", "c"]);
    let before = landscape.api.log.len();
    landscape.run(LEASE * 20);
    let count = |id: fn(&LeaseId) -> bool| landscape.api.log[before..].iter().filter(|(it, _)| id(it)).count();
    let own = count(|id| *id == LeaseId::Unsharded);
    let members = count(|id| matches!(id, LeaseId::Member(_)));
    assert!((50..=180).contains(&own) && (165..=180).contains(&members), "{own} {members}");
    assert_eq!(count(|id| matches!(id, LeaseId::Unit(_))), 0, "the Lease of a shard is written when it moves");
}

#[test]
fn longer_lease_lasts_from_the_first_renewal_of_replicas_that_take_over_the_lock() {
    let mut landscape = Landscape::with(24, &["a", "b", "c"]);
    assert_eq!(landscape.shares(), [8, 8, 8]);
    // All are stopped, and started again with twice the duration, while the lock still has the former.
    landscape.replicas.clear();
    for name in ["a", "b", "c"] {
        let identity = format!("{name}_2");
        let timings = Timings::of(LEASE * 2);
        landscape.start(Settings { identity, timings, ..settings(name, 24) });
    }
    landscape.run(LEASE * 6);
    assert_eq!(landscape.api.get(LeaseId::Unsharded).lease.duration, Some(LEASE * 2));
    assert_eq!(landscape.shares(), [8, 8, 8]);
    let acquired = landscape.acquired;
    landscape.run(LEASE * 40);
    assert_eq!((landscape.shares(), landscape.acquired), (vec![8, 8, 8], acquired), "no fence ends");

    // One with the former duration does not shorten it.
    landscape.start(settings("d", 24));
    landscape.run(LEASE * 20);
    assert_eq!(landscape.api.get(LeaseId::Unsharded).lease.duration, Some(LEASE * 2));
    assert!(landscape.replicas.values().all(|replica| !replica.ended.contains(&EndReason::Expired)));
}

#[test]
fn replica_with_another_number_of_shards_takes_no_share() {
    let mut landscape = Landscape::with(24, &["a", "b"]);
    landscape.start(settings("c", 49));
    landscape.run(LEASE * 4);
    assert_eq!((landscape.shares(), landscape.acquired), (vec![0, 12, 12], 24));
    assert_eq!(landscape.refusal("c"), Some(Refusal::UnshardedActive));
    let is_member = |number: u8| landscape.api.get(LeaseId::Member(number)).holder() == Some("c_1");
    assert!(!(0..8).any(is_member));
}

#[test]
fn every_refusal_has_a_reason() {
    let mut landscape = Landscape::new(3);
    landscape.edit(LeaseId::Unsharded, |record| record.shards = Some("4".to_owned()));
    landscape.start(settings("a", 3));
    landscape.run(LEASE * 2);
    assert_eq!((landscape.shares(), landscape.refusal("a")), (vec![0], Some(Refusal::OtherCount)));
    landscape.edit(LeaseId::Unsharded, |record| record.shards = None);
    landscape.run(SECOND * 2);
    assert_eq!((landscape.shares(), landscape.refusal("a")), (vec![3], None));

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
    let mut ownership = Ownership::new(settings("a", 3), 1, landscape.now);
    let step = ownership.step(landscape.now);
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
