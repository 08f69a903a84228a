//! Workers, changes of Kymas, and moves of shards on several threads at once: no Kyma is reconciled twice at a time, no work is
//! lost, and no thread waits for another one for ever.

use std::{
    collections::HashSet,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
};

use parking_lot::Mutex;
use tidewatch_cluster::leader::WriteFence;
use tidewatch_kit::{metrics::Registry, random::Random};
use tokio::runtime::{Builder, Runtime};

use super::*;

const KYMAS: u32 = 8;
const WORKERS: u64 = 4;
/// Steps of each thread that changes Kymas.
const CHANGES: usize = 20_000;
/// Steps of the thread that moves shards.
const MOVES: usize = 2_000;

/// A table with four shards, and the executor of its timers.
struct Fixture {
    executor: Runtime,
    shards: ShardCount,
    fleet: RuntimeTable,
    metrics: Registry,
    running: Mutex<HashSet<KymaKey>>,
    ended: AtomicUsize,
}

impl Fixture {
    fn new() -> Self {
        let shards = ShardCount::new(4).unwrap();
        let mut metrics = Registry::default();
        let settings = Settings { slots: 4, seed: 1, ..Settings::default() };
        let fleet = RuntimeTable::new(shards, settings, Metrics::register(&mut metrics));
        let executor = Builder::new_current_thread().enable_time().build().unwrap();
        Self { executor, shards, fleet, metrics, running: Mutex::default(), ended: AtomicUsize::default() }
    }

    fn place(&self, n: u32, runtime: Option<u32>) {
        self.fleet.place(key(n), &format!("uid-{n}"), runtime.map(id), plan("1"));
    }

    fn acquire(&self, shard: ShardId) {
        self.fleet.acquire(shard, Instance::new(1), &WriteFence::default(), Instant::now());
        self.fleet.set_shard_synced(shard);
        (0..KYMAS).for_each(|n| self.place(n, Some(n)));
    }

    /// Runs the next reconcile. Returns false if none is due.
    fn reconcile(&self, outcome: impl FnOnce(WorkSet) -> ReconcileOutcome) -> bool {
        let Some(job) = self.fleet.next().now_or_never() else { return false };
        assert!(self.running.lock().insert(job.key.clone()), "two reconciles of {}", job.key);
        thread::yield_now();
        self.running.lock().remove(&job.key);
        let outcome = outcome(job.queued.work);
        self.fleet.done(job, outcome);
        self.ended.fetch_add(1, Relaxed);
        true
    }

    fn change(&self, random: &mut Random) {
        let n = u32::try_from(random.up_to(u64::from(KYMAS) - 1)).unwrap();
        match random.up_to(11) {
            0 => self.place(n, Some(KYMAS + n)),
            1 => self.fleet.remove(&key(n)),
            2 => self.place(n, None),
            3 => self.fleet.verify_within(&key(n), Duration::from_millis(3)),
            4..=7 => drop(send(&self.fleet, n, 1)),
            _ => self.fleet.enqueue(&key(n), work(), Priority::User),
        }
    }

    fn move_shard(&self, random: &mut Random) {
        let shard = self.shards.shard(u16::try_from(random.up_to(3)).unwrap()).unwrap();
        match random.up_to(2) {
            0 => drop(self.fleet.release(shard)),
            1 => drop(self.fleet.drain(shard).now_or_never()),
            _ => self.acquire(shard),
        }
        thread::yield_now();
    }
}

#[test]
fn threads_lose_no_work_and_reconcile_no_kyma_twice() {
    let fixture = &Fixture::new();
    fixture.shards.shards().for_each(|shard| fixture.acquire(shard));
    let changing = &AtomicUsize::new(3);
    thread::scope(|scope| {
        for seed in 0..WORKERS {
            scope.spawn(move || {
                let _entered = fixture.executor.enter();
                let mut random = Random::new(seed);
                while changing.load(Relaxed) > 0 {
                    fixture.reconcile(|work| match random.up_to(4) {
                        0 => ReconcileOutcome::failed(work, ErrorClass::Ours),
                        1 => ReconcileOutcome::default(),
                        _ => ReconcileOutcome::ended(work),
                    });
                }
            });
        }
        let spawn = |seed, steps, step: fn(&Fixture, &mut Random)| {
            scope.spawn(move || {
                let _entered = fixture.executor.enter();
                let mut random = Random::new(seed);
                (0..steps).for_each(|_| step(fixture, &mut random));
                changing.fetch_sub(1, Relaxed);
            });
        };
        spawn(10, CHANGES, Fixture::change);
        spawn(11, CHANGES, Fixture::change);
        spawn(12, MOVES, Fixture::move_shard);
    });

    let _entered = fixture.executor.enter();
    fixture.shards.shards().for_each(|shard| fixture.acquire(shard));
    (0..KYMAS).for_each(|n| fixture.fleet.enqueue(&key(n), work(), Priority::User));
    let before = fixture.ended.load(Relaxed);
    let has_work = || fixture.fleet.views().iter().any(|view| !view.queued.is_empty() || view.in_progress);
    // Failed work backs off for seconds.
    let deadline = Instant::now() + Duration::from_secs(120);
    while (fixture.reconcile(ReconcileOutcome::ended) || has_work()) && Instant::now() < deadline {
        thread::yield_now();
    }
    assert!(!has_work(), "{:?}", fixture.fleet.views());
    assert!(fixture.ended.load(Relaxed) - before >= 8, "each Kyma is reconciled once more");
    assert_eq!(fixture.fleet.views().len(), 8);
    let page = fixture.metrics.encode().unwrap();
    let queued = page.lines().filter(|line| line.starts_with("queue_kymas{") && !line.contains("waiting"));
    queued.for_each(|line| assert!(line.ends_with(" 0"), "{line}"));
}
