//! The queue of the Manifests through its public interface.

mod reports;

use futures::FutureExt as _;
use tidewatch_cluster::{error_class::ErrorClass, limits::REQUEST_DEADLINE};
use tidewatch_kit::metrics::Registry;
use tidewatch_oci::{component::ComponentVersion, digest::Digest, layer::LayerKind, registry::Key};
use tokio::time::timeout;

use super::*;
use crate::Tenure;

const S: Duration = Duration::from_secs(1);

/// Queue of a process that started long ago.
fn queue(slots: usize) -> ManifestQueue {
    queue_with(slots, Box::new(|_| Tenure::open()))
}

fn queue_since(slots: usize, started: Instant) -> ManifestQueue {
    queue_with(slots, Box::new(move |_| Tenure::since(started)))
}

fn queue_with(slots: usize, tenures: Tenures) -> ManifestQueue {
    let settings = Settings { slots, seed: 1 };
    ManifestQueue::new(settings, Metrics::register(&mut Registry::default()), tenures)
}

fn kyma(name: &str) -> KymaKey {
    KymaKey::new("kcp-system", name)
}

fn manifest(kyma: &str, module: usize) -> ManifestKey {
    ManifestKey::new("kcp-system", format!("{kyma}-{module:03}"))
}

/// Registers so many Manifests of a Kyma.
fn register(queue: &ManifestQueue, of: &str, count: usize) {
    (0..count).for_each(|module| queue.insert(manifest(of, module), kyma(of)));
}

/// The next job, if one is ready.
fn next(queue: &ManifestQueue) -> Option<ManifestJob> {
    queue.next().now_or_never()
}

/// All ready jobs.
fn all(queue: &ManifestQueue) -> Vec<ManifestJob> {
    std::iter::from_fn(|| next(queue)).collect()
}

fn names(jobs: &[ManifestJob]) -> Vec<&str> {
    jobs.iter().map(|job| job.key.name.as_str()).collect()
}

/// Returns true if the reconcile reads every object again instead of trusting its caches.
fn verifies(job: &ManifestJob) -> bool {
    job.queued.drift == Drift::All
}

fn end(queue: &ManifestQueue, job: ManifestJob) {
    let work = job.queued.work;
    queue.done(job, ReconcileOutcome::ended(work));
}

fn layer(content: &[u8]) -> LayerKey {
    LayerKey { repository: "r".into(), digests: [Digest::of(content)].into(), kind: LayerKind::Plain }
}

fn changed(layer: LayerKey) -> Change {
    Change::Key(Key::Layer(layer))
}

/// Checks that nothing is kept.
fn check_empty(queue: &ManifestQueue) {
    let state = queue.0.state.lock();
    assert!(state.queue.is_empty() && state.waits.is_empty() && state.running.is_empty());
}

#[tokio::test(start_paused = true)]
async fn runtime_with_many_manifests_has_two_slots_and_takes_turns_with_others() {
    let queue = queue(16);
    register(&queue, "large", 100);
    register(&queue, "small", 1);
    queue.enqueue_kyma(&kyma("large"), Priority::User, false);
    queue.enqueue_kyma(&kyma("small"), Priority::User, false);
    let mut jobs = all(&queue);
    assert_eq!(names(&jobs), ["large-000", "large-001", "small-000"], "the other 98 are held");
    assert_eq!((queue.0.metrics.at("held"), queue.0.metrics.at("in-work")), (98, 3));

    // A freed slot of the runtime goes to its next Manifest, behind other runtimes that are ready.
    end(&queue, jobs.remove(2));
    queue.enqueue_kyma(&kyma("small"), Priority::User, false);
    end(&queue, jobs.remove(0));
    jobs.extend(all(&queue));
    assert_eq!(names(&jobs), ["large-001", "small-000", "large-002"]);

    let mut taken = BTreeSet::from(["large-000".to_owned()]);
    loop {
        assert!(jobs.iter().filter(|job| job.kyma == kyma("large")).count() <= 2);
        let Some(job) = jobs.pop() else { break };
        taken.insert(job.key.name.clone());
        end(&queue, job);
        jobs.extend(all(&queue));
    }
    assert_eq!(taken.len(), 101, "each Manifest had its turn");
    assert_eq!(queue.0.metrics.at("held"), 0);
}

/// Queue of a shard whose tenure is replaced.
fn queue_of_shard(slots: usize) -> (ManifestQueue, Arc<Mutex<Tenure>>) {
    let tenure = Arc::new(Mutex::new(Tenure::open()));
    let current = tenure.clone();
    (queue_with(slots, Box::new(move |_| current.lock().clone())), tenure)
}

#[tokio::test(start_paused = true)]
async fn manifests_that_are_due_while_their_shard_is_drained_are_reconciled_once_it_is_acquired_again() {
    let (queue, tenure) = queue_of_shard(16);
    register(&queue, "a", 2);
    tenure.lock().drain();
    queue.enqueue_kyma(&kyma("a"), Priority::User, false);
    assert!(next(&queue).is_none());
    assert_eq!(queue.0.metrics.at("in-work"), 0);
    check_empty(&queue);

    *tenure.lock() = Tenure::open();
    register(&queue, "a", 2);
    queue.enqueue_kyma(&kyma("a"), Priority::User, false);
    assert_eq!(names(&all(&queue)), ["a-000", "a-001"]);
}

#[tokio::test(start_paused = true)]
async fn slow_manifests_that_are_due_while_their_shard_is_drained_keep_no_slot_of_the_slow_lane() {
    // Four slots, of which one is for slow runtimes.
    let (queue, tenure) = queue_of_shard(4);
    let make_slow = async |of: &str| {
        register(&queue, of, 1);
        queue.enqueue_kyma(&kyma(of), Priority::User, false);
        let job = next(&queue).unwrap();
        tokio::time::advance(60 * S).await;
        end(&queue, job);
        queue.enqueue_kyma(&kyma(of), Priority::User, false);
    };
    make_slow("a").await;
    tenure.lock().drain();
    assert!(next(&queue).is_none());

    *tenure.lock() = Tenure::open();
    make_slow("b").await;
    assert_eq!(names(&all(&queue)), ["b-000"]);
}

#[tokio::test(start_paused = true)]
async fn single_worker_alternates_between_runtimes() {
    let queue = queue(1);
    for of in ["a", "b"] {
        register(&queue, of, 6);
        queue.enqueue_kyma(&kyma(of), Priority::Catalog, false);
    }
    let taken: Vec<_> = std::iter::from_fn(|| {
        let job = next(&queue)?;
        let kyma = job.kyma.name.clone();
        end(&queue, job);
        Some(kyma)
    })
    .collect();
    assert_eq!(taken.concat(), "aabbaabbaabb");
}

#[tokio::test(start_paused = true)]
async fn change_of_a_user_precedes_the_verification_of_its_runtime() {
    let queue = queue(16);
    register(&queue, "a", 10);
    queue.enqueue_kyma(&kyma("a"), Priority::Verification, true);
    queue.enqueue(&manifest("a", 7), Priority::User, false);
    queue.enqueue(&manifest("a", 9), Priority::User, false);
    let jobs = all(&queue);
    assert_eq!(names(&jobs), ["a-007", "a-009"]);
    assert!(jobs.iter().all(verifies), "the verification is not lost");
}

#[tokio::test(start_paused = true)]
async fn held_manifest_occupies_no_worker_and_its_wait_is_visible() {
    let queue = queue(4);
    register(&queue, "a", 3);
    queue.enqueue_kyma(&kyma("a"), Priority::User, false);
    let jobs = all(&queue);
    // Time passes only while no task is busy.
    assert!(timeout(600 * S, queue.next()).await.is_err());
    queue.0.metrics.observe_ages(&queue.0.state.lock().queue, Instant::now());
    assert!((queue.0.metrics.oldest(Priority::User) - 600.0).abs() < f64::EPSILON, "the third");
    jobs.into_iter().for_each(|job| end(&queue, job));
    assert_eq!(names(&all(&queue)), ["a-002"]);
}

#[tokio::test(start_paused = true)]
async fn unreachable_runtime_is_slow_for_all_its_manifests() {
    let queue = queue(8);
    for of in 0..20 {
        register(&queue, &format!("away-{of:02}"), 2);
        queue.enqueue(&manifest(&format!("away-{of:02}"), 0), Priority::User, false);
    }
    for job in all(&queue) {
        let work = job.queued.work;
        queue.done(job, ReconcileOutcome::failed(work, ErrorClass::Transport));
    }
    // The other Manifest of each has not failed.
    (0..20).for_each(|of| queue.enqueue(&manifest(&format!("away-{of:02}"), 1), Priority::User, false));
    register(&queue, "here", 1);
    queue.enqueue_kyma(&kyma("here"), Priority::User, false);
    let jobs = all(&queue);
    assert_eq!(names(&jobs), ["away-00-001", "away-01-001", "here-000"], "a quarter of the slots is for slow runtimes");
    assert!(jobs[0].time_limit > jobs[2].time_limit);
}

#[tokio::test(start_paused = true)]
async fn removed_manifest_cancels_its_job_and_is_not_reconciled_again() {
    let queue = queue(4);
    register(&queue, "a", 2);
    queue.enqueue_kyma(&kyma("a"), Priority::User, false);
    let jobs = all(&queue);
    queue.remove(&manifest("a", 0));
    assert_eq!(jobs.iter().map(|job| job.cancellation.is_cancelled()).collect::<Vec<_>>(), [true, false]);
    // Another one of that name does not begin before the cancelled reconcile has ended.
    register(&queue, "a", 1);
    queue.enqueue(&manifest("a", 0), Priority::User, false);
    assert!(next(&queue).is_none());
    jobs.into_iter().for_each(|job| queue.done(job, ReconcileOutcome::default()));
    let job = next(&queue).unwrap();
    assert_eq!((job.key.name.as_str(), job.cancellation.is_cancelled()), ("a-000", false));
    queue.remove(&manifest("a", 0));
    drop(job);
    assert!(next(&queue).is_none());
}

#[tokio::test(start_paused = true)]
async fn deselected_kyma_cancels_its_jobs_and_keeps_its_manifests() {
    let queue = queue(4);
    register(&queue, "a", 3);
    register(&queue, "b", 1);
    for of in ["a", "b"] {
        queue.enqueue_kyma(&kyma(of), Priority::User, false);
    }
    let jobs = all(&queue);
    queue.cancel_kyma(&kyma("a"));
    let cancelled: Vec<_> = jobs.iter().map(|job| (job.kyma.name.as_str(), job.cancellation.is_cancelled())).collect();
    assert_eq!(cancelled, [("a", true), ("a", true), ("b", false)]);
    jobs.into_iter().for_each(|job| queue.done(job, ReconcileOutcome::default()));
    assert!(next(&queue).is_none(), "the third has no work any more");
    queue.enqueue_kyma(&kyma("a"), Priority::User, true);
    assert_eq!(names(&all(&queue)), ["a-000", "a-001"], "it is selected again");
}

#[tokio::test(start_paused = true)]
async fn kyma_is_working_until_the_last_job_ends_also_if_it_is_cancelled() {
    let queue = queue(4);
    register(&queue, "a", 2);
    register(&queue, "b", 1);
    queue.enqueue_kyma(&kyma("a"), Priority::User, false);
    let is_working = || ["a", "b"].map(|of| queue.is_working(&kyma(of)));
    assert_eq!(is_working(), [false, false], "nothing has begun");
    let mut jobs = all(&queue);
    assert_eq!((jobs.len(), is_working()), (2, [true, false]));
    end(&queue, jobs.remove(0));
    assert_eq!(is_working(), [true, false]);
    queue.cancel_kyma(&kyma("a"));
    assert_eq!(is_working(), [true, false], "the cancelled one has not ended");
    end(&queue, jobs.remove(0));
    assert_eq!(is_working(), [false, false]);
}

#[tokio::test(start_paused = true)]
async fn moved_manifest_belongs_to_its_new_kyma() {
    let queue = queue(8);
    register(&queue, "a", 4);
    queue.enqueue_kyma(&kyma("a"), Priority::User, false);
    let jobs = all(&queue);
    assert_eq!(names(&jobs), ["a-000", "a-001"]);
    // One that is held, and one that runs.
    queue.insert(manifest("a", 2), kyma("b"));
    queue.insert(manifest("a", 0), kyma("b"));
    let moved = all(&queue);
    assert_eq!((names(&moved), &moved[0].kyma), (vec!["a-002"], &kyma("b")));
    queue.enqueue_kyma(&kyma("b"), Priority::User, false);
    jobs.into_iter().for_each(|job| end(&queue, job));
    let last = all(&queue);
    assert_eq!(names(&last), ["a-003", "a-000"]);
    assert_eq!(last[1].kyma, kyma("b"));
}

#[tokio::test(start_paused = true)]
async fn dropped_job_counts_as_failed_and_is_repeated() {
    let queue = queue(4);
    register(&queue, "a", 1);
    queue.enqueue(&manifest("a", 0), Priority::Catalog, true);
    drop(next(&queue).unwrap());
    assert_eq!(queue.0.metrics.reconciles("ours"), 1);
    assert!(next(&queue).is_none(), "it backs off");
    let start = Instant::now();
    let job = queue.next().await;
    assert!(start.elapsed() <= S && verifies(&job) && job.queued.priority == Priority::Catalog);
    end(&queue, job);
    assert_eq!((queue.0.metrics.reconciles("ours"), queue.0.metrics.reconciles("ended")), (1, 1));
    assert!(queue.next().now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn paused_manifest_resumes_at_the_end_of_the_pause() {
    let queue = queue(4);
    register(&queue, "a", 1);
    queue.enqueue(&manifest("a", 0), Priority::User, true);
    queue.done(next(&queue).unwrap(), ReconcileOutcome::default());
    assert!(next(&queue).is_none());
    queue.unpause();
    assert!(verifies(&next(&queue).unwrap()));
}

#[tokio::test(start_paused = true)]
async fn early_reconcile_is_repeated_once_writes_of_the_previous_lease_holder_have_landed() {
    let queue = queue_since(4, Instant::now());
    register(&queue, "a", 1);
    queue.enqueue(&manifest("a", 0), Priority::User, false);
    end(&queue, next(&queue).unwrap());
    let start = Instant::now();
    let job = queue.next().await;
    assert_eq!((start.elapsed(), verifies(&job)), (REQUEST_DEADLINE, true));
    end(&queue, job);
    assert!(timeout(600 * S, queue.next()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn changed_layer_returns_the_manifests_that_wait_for_it_once() {
    let queue = queue(4);
    register(&queue, "a", 3);
    for module in 0..2 {
        queue.wait_for_layer(&manifest("a", module), layer(b"1"));
    }
    queue.wait_for_layer(&manifest("a", 2), layer(b"2"));
    // It was upgraded meanwhile.
    queue.wait_for_layer(&manifest("a", 1), layer(b"2"));
    let component = ComponentVersion::new("example.org/m", "1.0.0").unwrap();
    assert!(queue.take_waiting(&Change::Key(Key::Descriptor(component))).is_empty());
    assert_eq!(queue.take_waiting(&changed(layer(b"1"))), [manifest("a", 0)].into());
    assert!(queue.take_waiting(&changed(layer(b"1"))).is_empty());
    queue.wait_for_layer(&manifest("a", 0), layer(b"3"));
    assert_eq!(queue.take_waiting(&Change::All).len(), 3);
    assert!(queue.take_waiting(&Change::All).is_empty());
}

#[tokio::test(start_paused = true)]
async fn paced_manifests_are_due_one_after_the_other() {
    let queue = queue(4);
    register(&queue, "a", 1);
    register(&queue, "b", 1);
    queue.enqueue_paced(vec![manifest("a", 0), manifest("b", 0), manifest("unknown", 0)], 2);
    let start = Instant::now();
    end(&queue, queue.next().await);
    end(&queue, queue.next().await);
    assert!([S / 2, S].contains(&start.elapsed()), "the unknown one has a turn, too");
}

#[tokio::test(start_paused = true)]
async fn removed_manifests_leave_nothing_behind() {
    let queue = queue(4);
    register(&queue, "a", 50);
    queue.enqueue_kyma(&kyma("a"), Priority::User, false);
    let mut jobs = all(&queue);
    for module in 0..50 {
        queue.wait_for_layer(&manifest("a", module), layer(&[u8::try_from(module).unwrap()]));
    }
    end(&queue, jobs.remove(0));
    for module in 0..50 {
        queue.remove(&manifest("a", module));
    }
    // By a reconcile that was cancelled meanwhile.
    queue.wait_for_layer(&jobs[0].key, layer(b"late"));
    queue.enqueue(&jobs[0].key, Priority::User, false);
    drop(jobs);
    check_empty(&queue);
    assert_eq!(["user", "held", "waiting", "in-work"].map(|place| queue.0.metrics.at(place)), [0; 4]);
}

#[tokio::test(start_paused = true)]
async fn each_ready_manifest_wakes_a_waiting_worker() {
    let queue = queue(4);
    register(&queue, "a", 2);
    let workers: Vec<_> = (0..2)
        .map(|_| {
            let queue = queue.clone();
            tokio::spawn(async move { queue.next().await.key.clone() })
        })
        .collect();
    tokio::task::yield_now().await;
    queue.enqueue_kyma(&kyma("a"), Priority::User, false);
    let mut taken = BTreeSet::new();
    for worker in workers {
        taken.insert(worker.await.unwrap());
    }
    assert_eq!(taken.len(), 2);
}

/// Starts a worker, which waits for one Manifest.
async fn worker(queue: &ManifestQueue) -> tokio::task::JoinHandle<ManifestJob> {
    let queue = queue.clone();
    let worker = tokio::spawn(async move { queue.next().await });
    tokio::task::yield_now().await;
    worker
}

#[tokio::test(start_paused = true)]
async fn waiting_worker_learns_of_a_retry() {
    let queue = queue(4);
    register(&queue, "a", 1);
    queue.enqueue(&manifest("a", 0), Priority::User, false);
    let job = next(&queue).unwrap();
    let worker = worker(&queue).await;
    let work = job.queued.work;
    queue.done(job, ReconcileOutcome::failed(work, ErrorClass::Ours));
    assert_eq!(timeout(60 * S, worker).await.unwrap().unwrap().key, manifest("a", 0));
}

#[tokio::test(start_paused = true)]
async fn worker_that_leaves_with_work_has_another_one_wait_for_what_is_due_later() {
    let queue = queue(4);
    register(&queue, "a", 2);
    let workers = [worker(&queue).await, worker(&queue).await];
    queue.enqueue_paced((0..2).map(|module| manifest("a", module)).collect(), 1);
    let mut jobs = Vec::new();
    for worker in workers {
        jobs.push(timeout(60 * S, worker).await.expect("it is woken").unwrap());
    }
    assert_ne!(jobs[0].key, jobs[1].key);
}
