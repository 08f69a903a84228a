//! Shards that are acquired and released, Kymas that move between them, and the fairness between shards.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use tidewatch_cluster::leader::WriteFence;
use tidewatch_kit::metrics::Registry;

use super::*;

const SHARDS: u16 = 4;

fn shards() -> ShardCount {
    ShardCount::new(SHARDS).unwrap()
}

/// Table without shards, and the registry of its metrics.
fn unheld(slots: usize) -> (RuntimeTable, Registry) {
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    (RuntimeTable::new(shards(), Settings { slots, seed: 1, ..Settings::default() }, metrics), registry)
}

/// Acquires a shard without Kymas, so long ago that no reconcile is repeated. Returns the fence of its Lease.
fn acquire(fleet: &RuntimeTable, shard: ShardId, instance: u64) -> WriteFence {
    let fence = WriteFence::default();
    fleet.acquire(shard, Instance::new(instance), &fence, Instant::now() - Settings::default().request_deadline);
    fleet.set_shard_synced(shard);
    fence
}

/// Table that holds all shards.
fn held(slots: usize) -> RuntimeTable {
    let (fleet, _) = unheld(slots);
    shards().shards().for_each(|shard| drop(acquire(&fleet, shard, 1)));
    fleet
}

/// Shard of a runtime.
fn shard_of(n: u32) -> ShardId {
    shards().of_runtime(&id(n))
}

/// The first numbers of runtimes in the shard of runtime 0, and the first of another shard.
fn neighbours_and_stranger() -> ([u32; 2], u32) {
    let here = |n: &u32| shard_of(*n) == shard_of(0);
    let mut neighbours = (0..).filter(here);
    ([neighbours.next().unwrap(), neighbours.next().unwrap()], (0..).find(|n| !here(n)).unwrap())
}

#[tokio::test(start_paused = true)]
async fn process_speaks_for_shards_with_an_open_fence_whose_kymas_are_placed() {
    let (fleet, _) = unheld(4);
    let all: Vec<_> = shards().shards().collect();
    let fence = acquire(&fleet, all[1], 5);
    acquire(&fleet, all[3], 6);
    fleet.acquire(all[2], Instance::new(7), &WriteFence::default(), Instant::now());
    assert_eq!(fleet.served(), [(all[1], Instance::new(5)), (all[3], Instance::new(6))], "2 is not synced");
    fence.close();
    fleet.set_shard_synced(all[2]);
    assert_eq!(fleet.served(), [(all[2], Instance::new(7)), (all[3], Instance::new(6))], "1 has lapsed");
    fleet.release(all[3]);
    assert_eq!(fleet.served(), [(all[2], Instance::new(7))]);
}

#[tokio::test(start_paused = true)]
async fn kymas_are_counted_by_shard_whether_it_is_held_or_not() {
    let (fleet, _) = unheld(4);
    acquire(&fleet, shard_of(0), 1);
    (0..20).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    let expected = shards().shards().map(|shard| (0..20).filter(|n| shard_of(*n) == shard).count());
    assert_eq!(fleet.kymas_by_shard(), expected.collect::<Vec<_>>());
    fleet.remove(&key(0));
    assert_eq!(fleet.kymas_by_shard().iter().sum::<usize>(), 19);
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_shard_that_is_not_held_have_no_effect() {
    let (fleet, registry) = unheld(4);
    let ([here, _], elsewhere) = neighbours_and_stranger();
    acquire(&fleet, shard_of(here), 5);
    [here, elsewhere].into_iter().for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    assert_eq!(send(&fleet, here, 1).map(|response| response.instance), Ok(Instance::new(5)));
    assert_eq!(send(&fleet, elsewhere, 1), Err(PlacementError::Elsewhere));
    let heartbeat = json!({"epoch": EPOCH, "sequence": 1, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": "1",
        "certificate": {"notAfter": "", "fingerprint": ""}, "watches": []});
    let heartbeat = Verified::unchecked(&id(elsewhere), EPOCH, 1, serde_json::from_value(heartbeat).unwrap());
    assert_eq!(fleet.heartbeat(heartbeat, 1), Err(PlacementError::Elsewhere));
    assert_eq!(fleet.legacy_event(&id(elsewhere)), Err(PlacementError::Elsewhere));
    assert_eq!(fleet.kyma_of(&id(elsewhere)), Err(PlacementError::Elsewhere));
    assert!(!fleet.is_unknown(&id(elsewhere)) && !fleet.has_used_v3(&id(elsewhere)));
    fleet.connection_lost(&id(elsewhere), Instant::now());
    fleet.enqueue(&key(elsewhere), work(), Priority::User);
    assert!(fleet.is_elsewhere(&key(elsewhere)) && !fleet.is_elsewhere(&key(here)) && !fleet.is_elsewhere(&key(99)));
    assert_eq!((fleet.runtimes(), fleet.views().len(), fleet.lost(Duration::ZERO).len()), (1, 1, 0));
    assert_eq!(fleet.next().await.key, key(here));
    assert!(fleet.next().now_or_never().is_none());
    assert!(registry.encode().unwrap().contains(r#"fleet_unplaced_total{result="elsewhere"} 3"#));
}

#[tokio::test(start_paused = true)]
async fn release_ends_all_of_a_shard_and_nothing_of_another() {
    let (fleet, registry) = unheld(4);
    let ([one, two], other) = neighbours_and_stranger();
    let fences = [one, other].map(|n| acquire(&fleet, shard_of(n), 1));
    [one, two, other].into_iter().for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    let mut departures = fleet.departures();
    [one, two, other].into_iter().for_each(|n| drop(send(&fleet, n, 1).unwrap()));
    let jobs = [fleet.next().await, fleet.next().await, fleet.next().await];
    let state = |job: &Job| (job.start.cancellation.is_cancelled(), job.start.tenure.fence.is_open());
    assert_eq!(jobs.each_ref().map(state), [(false, true); 3]);
    [one, two, other].into_iter().for_each(|n| drop(send(&fleet, n, 2).unwrap()));
    let places = || {
        let page = registry.encode().unwrap();
        ["user", "in-work"].map(|place| {
            let line = page.lines().find_map(|line| line.strip_prefix(&format!(r#"queue_kymas{{where="{place}"}} "#)));
            line.unwrap_or_else(|| panic!("{page}")).parse::<i64>().unwrap()
        })
    };
    assert_eq!(places(), [0, 3]);
    let mut released = fleet.release(shard_of(one));
    released.sort();
    let mut expected = vec![key(one), key(two)];
    expected.sort();
    assert_eq!(released, expected);
    assert_eq!(jobs.each_ref().map(state), [(true, false), (true, false), (false, true)]);
    assert!(fences.iter().all(WriteFence::is_open), "those of the Leases stay open");
    assert_eq!(places(), [0, 3], "the cancelled ones occupy workers until they end");
    for job in jobs {
        fleet.done(job, ReconcileOutcome::ended(work()));
    }
    assert_eq!(places(), [1, 0], "only the other shard has work");
    assert_eq!(fleet.next().await.key, key(other));
    assert!(fleet.next().now_or_never().is_none() && departures.try_recv().is_err());
    assert_eq!(send(&fleet, one, 2), Err(PlacementError::Elsewhere));
    assert!(fleet.release(shard_of(one)).is_empty(), "not held any more");
}

#[tokio::test(start_paused = true)]
async fn job_of_a_released_shard_settles_nothing_of_its_next_tenure() {
    let (fleet, _) = unheld(4);
    let shard = shard_of(0);
    acquire(&fleet, shard, 1);
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    send(&fleet, 0, 1).unwrap();
    let job = fleet.next().await;
    fleet.release(shard);
    acquire(&fleet, shard, 2);
    assert_eq!(send(&fleet, 0, 1), Err(PlacementError::Unknown), "its Kymas are placed anew");
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    assert_eq!(send(&fleet, 0, 1).unwrap().instance, Instance::new(2));
    assert!(fleet.next().now_or_never().is_none(), "the cancelled reconcile has not ended");
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert!(send_heartbeat(&fleet, 0, 1).settled.is_empty());
    let job = fleet.next().now_or_never().unwrap();
    assert!(!job.start.cancellation.is_cancelled() && job.start.tenure.fence.is_open());
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert_eq!(send_heartbeat(&fleet, 0, 2).settled["w"], 1);
}

#[tokio::test(start_paused = true)]
async fn failure_in_a_released_shard_enqueues_nothing_in_its_next_tenure() {
    let (fleet, _) = unheld(4);
    let shard = shard_of(0);
    let hour = Duration::from_secs(3_600);
    acquire(&fleet, shard, 1);
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    fleet.enqueue(&key(0), work(), Priority::User);
    let job = fleet.next().await;
    fleet.release(shard);
    // Had the reconcile begun in this tenure, it would be repeated.
    fleet.acquire(shard, Instance::new(2), &WriteFence::default(), Instant::now());
    fleet.set_shard_synced(shard);
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    let outcome = ReconcileOutcome {
        ended: WorkSet::of(&[Work::Kyma]),
        requeue_after: Some(hour),
        rest: Some(hour),
        follow_up: WorkSet::STATUS,
        ..ReconcileOutcome::failed(WorkSet::of(&[Work::Catalog]), ErrorClass::Transport)
    };
    fleet.done(job, outcome);
    assert!(time::timeout(hour * 2, fleet.next()).await.is_err());
    fleet.enqueue(&key(0), work(), Priority::Verification);
    let job = fleet.next().now_or_never().unwrap();
    assert_eq!((job.queued.work, fleet.views()[0].failures), (work(), 0), "neither failures nor a rest");
}

#[tokio::test(start_paused = true)]
async fn shard_that_is_drained_has_no_work() {
    let fleet = held(4);
    let ([one, two], other) = neighbours_and_stranger();
    [one, two, other].into_iter().for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    fleet.roll_out(&key(two), Duration::from_secs(60));
    send(&fleet, one, 1).unwrap();
    let job = fleet.next().await;
    let mut drain = Box::pin(fleet.drain(shard_of(one)));
    assert!(drain.as_mut().now_or_never().is_none(), "a reconcile is in progress");
    [one, two, other].into_iter().for_each(|n| drop(send(&fleet, n, 2).unwrap()));
    let others = fleet.next().await;
    assert_eq!(others.key, key(other));
    [job, others].into_iter().for_each(|job| fleet.done(job, ReconcileOutcome::ended(work())));
    assert!(drain.as_mut().now_or_never().is_some());
    assert_eq!(send_heartbeat(&fleet, one, 1).settled["w"], 1, "it began before");
    // A change of a Kyma meanwhile is for the next holder, too.
    fleet.place(key(one), "", None, plan("1"));
    fleet.place(key(one), "", Some(id(one)), plan("1"));
    fleet.enqueue(&key(one), work(), Priority::User);
    assert!(time::timeout(Duration::from_secs(3_600), fleet.next()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn acquired_shard_answers_as_starting_until_its_kymas_are_placed() {
    let (fleet, _) = unheld(4);
    fleet.set_synced();
    fleet.acquire(shard_of(0), Instance::new(1), &WriteFence::default(), Instant::now());
    assert_eq!(send(&fleet, 0, 1), Err(PlacementError::NotSynced));
    fleet.set_shard_synced(shard_of(0));
    assert_eq!(send(&fleet, 0, 1), Err(PlacementError::Unknown));
}

#[tokio::test(start_paused = true)]
async fn kyma_that_moves_is_reconciled_after_its_former_reconcile_has_ended() {
    let fleet = held(8);
    let ([here, _], there) = neighbours_and_stranger();
    let mut departures = fleet.departures();
    fleet.place(key(0), "uid", Some(id(here)), plan("1"));
    send(&fleet, here, 1).unwrap();
    let job = fleet.next().await;
    fleet.enqueue(&key(0), work(), Priority::User);
    fleet.place(key(0), "uid", Some(id(there)), plan("1"));
    assert!(job.start.cancellation.is_cancelled(), "its runtime is another one now");
    assert_eq!(departures.try_recv(), Ok(id(here)));
    assert_eq!(send(&fleet, here, 2), Err(PlacementError::Unknown));
    send(&fleet, there, 1).unwrap();
    assert!(fleet.next().now_or_never().is_none(), "two reconciles of one Kyma");
    // It moves on, back, and gets a job there, before the end of the first one is noticed.
    fleet.done(job, ReconcileOutcome::ended(work()));
    let job = fleet.next().now_or_never().unwrap();
    fleet.place(key(0), "uid", None, plan("1"));
    fleet.place(key(0), "uid", Some(id(here)), plan("1"));
    fleet.enqueue(&key(0), work(), Priority::User);
    assert!(fleet.next().now_or_never().is_none());
    fleet.remove(&key(0));
    fleet.place(key(0), "uid", Some(id(there)), plan("1"));
    send(&fleet, there, 2).unwrap();
    assert!(fleet.next().now_or_never().is_none(), "a new Kyma of that name waits as well");
    fleet.done(job, ReconcileOutcome::ended(work()));
    let job = fleet.next().now_or_never().unwrap();
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert_eq!(send(&fleet, there, 2).unwrap().settled["w"], 2);
}

#[tokio::test(start_paused = true)]
async fn kyma_of_another_replica_is_reconciled_again_once_the_writes_there_have_landed() {
    let (fleet, _) = unheld(4);
    let ([elsewhere, _], here) = neighbours_and_stranger();
    acquire(&fleet, shard_of(here), 1);
    fleet.place(key(0), "uid", Some(id(elsewhere)), plan("1"));
    fleet.place(key(0), "uid", Some(id(here)), plan("1"));
    let start = Instant::now();
    send(&fleet, here, 1).unwrap();
    fleet.done(fleet.next().await, ReconcileOutcome::ended(work()));
    let job = fleet.next().await;
    assert_eq!((start.elapsed(), &job.queued.drift), (Settings::default().request_deadline, &Drift::All));
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert!(time::timeout(Duration::from_secs(3_600), fleet.next()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn users_change_is_next_although_other_shards_are_full_of_verifications() {
    let fleet = held(4);
    let ([here, _], there) = neighbours_and_stranger();
    let kymas: Vec<_> = (0..400).filter(|n| shard_of(*n) == shard_of(here)).collect();
    for n in &kymas {
        fleet.place(key(*n), "", Some(id(*n)), plan("1"));
        fleet.enqueue(&key(*n), work(), Priority::Verification);
    }
    fleet.place(key(there), "", Some(id(there)), plan("1"));
    for sequence in 1..=20 {
        send(&fleet, there, sequence).unwrap();
        // One turn of eight is that of a verification, of whichever shard.
        let jobs = [fleet.next().await, fleet.next().await];
        assert!(jobs.iter().any(|job| job.key == key(there)), "{jobs:?}");
        for job in jobs {
            let again = job.queued.clone();
            fleet.done(job, ReconcileOutcome::ended(work()));
            if again.priority == Priority::Verification {
                kymas.iter().for_each(|n| fleet.enqueue(&key(*n), work(), Priority::Verification));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn shards_are_served_in_the_order_of_their_requests() {
    let fleet = held(4);
    (0..200).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    (0..200).for_each(|n| drop(send(&fleet, n, 1).unwrap()));
    for n in 0..200 {
        assert_eq!(fleet.next().await.key, key(n), "as with one queue");
    }
}

#[tokio::test(start_paused = true)]
async fn slow_runtimes_of_all_shards_share_a_quarter_of_the_workers() {
    let fleet = held(8);
    (0..40).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    (0..40).for_each(|n| fleet.enqueue(&key(n), work(), Priority::User));
    for _ in 0..40 {
        let job = fleet.next().await;
        fleet.done(job, ReconcileOutcome::failed(work(), ErrorClass::Transport));
    }
    time::advance(Duration::from_secs(3_600)).await;
    let ready = || std::iter::from_fn(|| fleet.next().now_or_never()).collect::<Vec<_>>();
    let slow = ready();
    assert_eq!(slow.len(), 2, "{slow:?}");
    // The reconcile of a released shard occupies its slot until it has ended.
    let shard = slow[0].start.tenure.shard.unwrap();
    fleet.release(shard);
    assert!(ready().is_empty() || slow[1].start.tenure.shard == Some(shard));
    let waiting = fleet.next();
    drop(slow);
    assert!(time::timeout(Duration::from_secs(1), waiting).await.is_ok(), "a worker is woken for the free slot");
}

#[tokio::test(start_paused = true)]
async fn rates_and_the_heartbeat_interval_are_those_of_the_whole_fleet() {
    let (fleet, _) = unheld(400);
    let settings = Settings { max_heartbeats_per_second: 1, ..Settings::default() };
    let small = RuntimeTable::new(shards(), settings, Metrics::register(&mut Registry::default()));
    acquire(&fleet, shard_of(0), 1);
    for table in [&fleet, &small] {
        (0..100).for_each(|n| table.place(key(n), "", Some(id(n)), plan("1")));
    }
    assert_eq!(small.heartbeat_interval().get(), Duration::from_secs(100), "although no shard is held");
    let mine = (0..100).filter(|n| shard_of(*n) == shard_of(0)).count();
    assert_eq!(fleet.runtimes(), mine);
    // The turns of all others pass unused.
    let start = Instant::now();
    let catalog = WorkSet::of(&[Work::Catalog]);
    fleet.enqueue_paced((0..100).map(key).collect(), catalog, 10);
    for _ in 0..mine {
        fleet.done(fleet.next().await, ReconcileOutcome::ended(catalog));
    }
    assert!(start.elapsed() > Duration::from_secs(5), "{:?} for {mine} of 100 Kymas", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn unused_turns_of_several_changes_do_not_add_up() {
    let (fleet, _) = unheld(400);
    acquire(&fleet, shard_of(0), 1);
    (0..100).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    let catalog = WorkSet::of(&[Work::Catalog]);
    let change = || fleet.enqueue_paced((0..100).map(key).collect(), catalog, 10);
    for _ in 0..30 {
        change();
        tokio::time::advance(Duration::from_secs(1)).await;
        while let Some(job) = fleet.next().now_or_never() {
            fleet.done(job, ReconcileOutcome::ended(catalog));
        }
    }
    change();
    let start = Instant::now();
    for _ in 0..fleet.runtimes() {
        fleet.done(fleet.next().await, ReconcileOutcome::ended(catalog));
    }
    assert!(start.elapsed() <= Duration::from_secs(20), "{:?}, for two times 100 turns", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn walks_return_the_kymas_of_all_shards_in_order() {
    let fleet = held(4);
    let mut keys: Vec<_> = (0..300).map(key).collect();
    (0..300).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    keys.sort();
    let views: Vec<_> = fleet.views().into_iter().map(|view| KymaKey::new(view.namespace, view.kyma)).collect();
    assert_eq!(views, keys);
    assert_eq!(fleet.runtime_reports().into_iter().map(|report| report.kyma).collect::<Vec<_>>(), keys);
    assert_eq!(fleet.changed_paths().into_iter().map(|(key, _)| key).collect::<Vec<_>>(), keys);
}

#[tokio::test(start_paused = true)]
async fn request_and_worker_lock_one_shard_alone() {
    let fleet = held(4);
    (0..100).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    fleet.verify_within(&key(1), Duration::from_secs(60));
    let before = fleet.0.locked.load(Ordering::Relaxed);
    let locked = || fleet.0.locked.load(Ordering::Relaxed) - before;
    send(&fleet, 0, 1).unwrap();
    assert_eq!(locked(), 1);
    let job = fleet.next().await;
    assert_eq!(locked(), 2);
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert_eq!(locked(), 3);
    assert!(fleet.next().now_or_never().is_none());
    assert_eq!(locked(), 3, "no shard has work");
}

/// A step of the model of hand-overs.
#[derive(Clone, Debug)]
enum Step {
    /// Places a Kyma with one of three runtime ids, or without.
    Place(u32, Option<u32>),
    Remove(u32),
    Enqueue(u32),
    Acquire(u16),
    Release(u16),
    Drain(u16),
    Take,
    /// Ends a job.
    End(usize, bool),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Step> {
    let kyma = 0..4u32;
    prop_oneof![
        6 => (kyma.clone(), prop::option::of(0..3u32)).prop_map(|(n, id)| Step::Place(n, id.map(|id| 3 * n + id))),
        1 => kyma.clone().prop_map(Step::Remove),
        8 => kyma.prop_map(Step::Enqueue),
        3 => (0..SHARDS).prop_map(Step::Acquire),
        2 => (0..SHARDS).prop_map(Step::Release),
        1 => (0..SHARDS).prop_map(Step::Drain),
        8 => Just(Step::Take),
        5 => (0..4usize, any::<bool>()).prop_map(|(at, ends)| Step::End(at, ends)),
        1 => (0..60u64).prop_map(Step::Wait),
    ]
}

/// Fleet of which the shards move, and its jobs.
struct HandOvers {
    clock: tokio::runtime::Runtime,
    fleet: RuntimeTable,
    jobs: Vec<Job>,
    placed: BTreeMap<u32, Option<u32>>,
    /// Shards that are held and drained.
    drained: BTreeSet<ShardId>,
}

impl HandOvers {
    fn place(&mut self, n: u32, runtime: Option<u32>) {
        self.fleet.place(key(n), &format!("uid-{n}"), runtime.map(id), plan("1"));
        self.placed.insert(n, runtime);
    }

    /// Acquires a shard and places its Kymas, as the watch of Kymas does.
    fn acquire(&mut self, shard: ShardId) {
        acquire(&self.fleet, shard, 1);
        self.drained.remove(&shard);
        for (n, runtime) in self.placed.clone() {
            self.place(n, runtime);
        }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Place(n, runtime) => self.place(n, runtime),
            Step::Remove(n) => {
                self.fleet.remove(&key(n));
                self.placed.remove(&n);
            }
            Step::Enqueue(n) => self.fleet.enqueue(&key(n), work(), Priority::User),
            Step::Acquire(shard) => self.acquire(shards().shard(shard).unwrap()),
            Step::Release(shard) => {
                let shard = shards().shard(shard).unwrap();
                self.fleet.release(shard);
                self.drained.remove(&shard);
            }
            Step::Drain(shard) => {
                let shard = shards().shard(shard).unwrap();
                let _ = self.fleet.drain(shard).now_or_never();
                self.drained.extend(self.fleet.held().contains(&shard).then_some(shard));
            }
            Step::Take => self.take(),
            Step::End(at, ends) if at < self.jobs.len() => {
                let job = self.jobs.swap_remove(at);
                if ends {
                    self.fleet.done(job, ReconcileOutcome::ended(work()));
                }
            }
            Step::End(..) => {}
            Step::Wait(seconds) => self.clock.block_on(time::advance(Duration::from_secs(seconds))),
        }
        self.check();
    }

    fn take(&mut self) {
        let Some(job) = self.fleet.next().now_or_never() else { return };
        assert!(self.jobs.iter().all(|other| other.key != job.key), "two reconciles of {}", job.key);
        assert!(job.start.tenure.fence.is_open() && !job.start.cancellation.is_cancelled());
        assert!(!self.drained.contains(&job.start.tenure.shard.unwrap()), "{} belongs to the next holder", job.key);
        self.jobs.push(job);
    }

    fn check(&self) {
        let held = self.fleet.held();
        for job in &self.jobs {
            let n = job.key.name.strip_prefix("kyma-").unwrap().parse::<u32>().unwrap();
            let now =
                self.placed.get(&n).map(|runtime| self.fleet.shard_of(runtime.map(id).as_ref(), &format!("uid-{n}")));
            let shard = job.start.tenure.shard.unwrap();
            let is_open = job.start.tenure.fence.is_open();
            assert!(held.contains(&shard) || !is_open, "a reconcile of a released shard may write");
            if now != Some(shard) || !is_open {
                assert!(job.start.cancellation.is_cancelled(), "{job:?} runs although its Kyma has moved");
            }
        }
    }

    /// Everything that is enqueued now is reconciled once the jobs have ended.
    fn settle(&mut self) {
        for shard in shards().shards() {
            if self.drained.contains(&shard) || !self.fleet.held().contains(&shard) {
                self.acquire(shard);
            }
        }
        let mut waiting: BTreeSet<_> = self.placed.keys().map(|n| key(*n)).collect();
        waiting.iter().for_each(|key| self.fleet.enqueue(key, work(), Priority::User));
        self.jobs.clear();
        for _ in 0..20 {
            self.clock.block_on(time::advance(Duration::from_secs(600)));
            while let Some(job) = self.fleet.next().now_or_never() {
                waiting.remove(&job.key);
                self.fleet.done(job, ReconcileOutcome::ended(work()));
            }
        }
        assert!(waiting.is_empty(), "never reconciled: {waiting:?}");
        assert!(self.fleet.views().iter().all(|view| !view.in_progress && view.queued.is_empty()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_two_reconciles_of_a_kyma_run_and_none_is_lost(steps in prop::collection::vec(steps(), 1..120)) {
        let clock = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let handle = clock.handle().clone();
        let _entered = handle.enter();
        let (fleet, registry) = unheld(16);
        let mut model = HandOvers { clock, fleet, jobs: Vec::new(), placed: BTreeMap::new(), drained: BTreeSet::new() };
        for step in steps {
            model.apply(step);
        }
        model.settle();
        let page = registry.encode().unwrap();
        for line in page.lines().filter(|line| line.starts_with("queue_kymas{")) {
            prop_assert!(line.ends_with(" 0"), "{}", line);
        }
    }
}
