//! Workers on the queue of the Manifests, with reconciles of the tests.

use std::{future::pending, time::Duration};

use futures::FutureExt as _;
use http::Method;
use tidewatch_api::{key::Key, plan::Plan};
use tidewatch_cluster::charge;
use tidewatch_fleet::{
    Tenure, WRITES,
    manifest_queue::{self, ManifestJob},
    queue::WorkSet,
    table,
};
use tidewatch_kit::metrics::Registry;
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::{sleep, timeout},
};

use super::*;

/// Step of a reconcile, with the name of its Manifest.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Begun(String),
    Forgotten(String),
}

/// Reconciles that panic or hang, by the name of the Manifest, and succeed otherwise.
struct Fake {
    queue: ManifestQueue,
    seen: UnboundedSender<Seen>,
}

impl Controller for Fake {
    const KIND: &'static str = "Manifest";

    type Job = ManifestJob;

    fn next(&self) -> impl Future<Output = ManifestJob> + Send {
        self.queue.next()
    }

    fn view(job: &ManifestJob) -> JobView<'_> {
        Manifests::view(job)
    }

    async fn reconcile(&self, job: &ManifestJob) -> ReconcileOutcome {
        self.seen.send(Seen::Begun(job.key.name.clone())).unwrap();
        match job.key.name.as_str() {
            "panics" => panic!("as the test wants"),
            "hangs" => pending().await,
            _ => ReconcileOutcome::ended(job.queued.work),
        }
    }

    fn forget(&self, job: &ManifestJob) {
        self.seen.send(Seen::Forgotten(job.key.name.clone())).unwrap();
    }

    fn done(&self, job: ManifestJob, outcome: ReconcileOutcome) {
        self.queue.done(job, outcome);
    }
}

fn key<K>(name: &str) -> Key<K> {
    Key::new("ns", name)
}

/// Queue with these Manifests, each of a Kyma of its own with the same name.
fn queue(names: &[&str]) -> ManifestQueue {
    let metrics = manifest_queue::Metrics::register(&mut Registry::default());
    let queue = ManifestQueue::new(manifest_queue::Settings::default(), metrics, Box::new(|_| Tenure::open()));
    names.iter().for_each(|name| queue.insert(key(name), key(name)));
    queue
}

struct Fixture {
    queue: ManifestQueue,
    workers: Workers,
    shutdown: CancellationToken,
    seen: UnboundedReceiver<Seen>,
}

impl Fixture {
    /// Enqueues these Manifests for one worker.
    fn start(names: &[&str]) -> Self {
        let (queue, (sender, seen)) = (queue(names), unbounded_channel());
        names.iter().for_each(|name| queue.enqueue(&key(name), Priority::User, false));
        let mut workers = Workers::default();
        let shutdown = CancellationToken::new();
        let synced = CancellationToken::new();
        synced.cancel();
        workers.start(Fake { queue: queue.clone(), seen: sender }, 1, &synced, &shutdown);
        Self { queue, workers, shutdown, seen }
    }

    async fn next(&mut self) -> Seen {
        timeout(Duration::from_secs(60), self.seen.recv()).await.expect("a reconcile begins").expect("a worker runs")
    }

    async fn end(mut self) {
        self.shutdown.cancel();
        self.workers.drained().await;
        assert_eq!(self.seen.recv().await, None);
    }
}

fn begun(name: &str) -> Seen {
    Seen::Begun(name.to_owned())
}

#[tokio::test(start_paused = true)]
async fn panic_ends_its_reconcile_alone_and_is_retried() {
    let mut fixture = Fixture::start(&["panics", "works"]);
    assert_eq!([fixture.next().await, fixture.next().await], [begun("panics"), begun("works")]);
    assert_eq!(fixture.next().await, begun("panics"));
    fixture.queue.remove(&key("panics"));
    fixture.end().await;
}

#[tokio::test(start_paused = true)]
async fn removed_manifest_ends_its_reconcile_at_once_and_is_forgotten() {
    let mut fixture = Fixture::start(&["hangs", "works"]);
    assert_eq!(fixture.next().await, begun("hangs"));
    fixture.queue.remove(&key("hangs"));
    let forgotten = Seen::Forgotten("hangs".to_owned());
    assert_eq!([fixture.next().await, fixture.next().await], [forgotten, begun("works")]);
    fixture.end().await;
}

/// Reconciles that write, and write again after their shard was released.
struct Releasing {
    fleet: RuntimeTable,
    written: UnboundedSender<[bool; 3]>,
}

impl Controller for Releasing {
    const KIND: &'static str = "Kyma";

    type Job = Job;

    fn next(&self) -> impl Future<Output = Job> + Send {
        self.fleet.next()
    }

    fn view(job: &Job) -> JobView<'_> {
        JobView { counts_as_reconcile: true, ..Kymas::view(job) }
    }

    async fn reconcile(&self, job: &Job) -> ReconcileOutcome {
        // The fence of a client whose process may write.
        let process = WriteFence::default();
        let may_write = || process.check(&Method::PATCH).is_ok();
        let before = may_write();
        self.fleet.held().into_iter().for_each(|shard| drop(self.fleet.release(shard)));
        self.written.send([before, may_write(), process.check(&Method::GET).is_ok()]).unwrap();
        ReconcileOutcome::ended(job.queued.work)
    }

    fn forget(&self, _: &Job) {}

    fn done(&self, job: Job, outcome: ReconcileOutcome) {
        self.fleet.done(job, outcome);
    }
}

#[tokio::test(start_paused = true)]
async fn reconcile_writes_nothing_after_the_release_of_its_shard() {
    let metrics = table::Metrics::register(&mut Registry::default());
    let fleet = RuntimeTable::alone(1, table::Settings::default(), metrics);
    fleet.place(key("a"), "uid", None, Arc::new(Plan::new("1".into(), Vec::new()).unwrap()));
    fleet.enqueue(&key("a"), WorkSet::RUNTIME, Priority::User);
    let mut workers = Workers::default();
    let shutdown = CancellationToken::new();
    let synced = CancellationToken::new();
    synced.cancel();
    let (written, mut seen) = unbounded_channel();
    workers.start(Releasing { fleet, written }, 1, &synced, &shutdown);
    assert_eq!(seen.recv().await, Some([true, false, true]));
    shutdown.cancel();
    workers.drained().await;
}

/// Reconciles whose runtimes change again before each ends, and cause large writes, if their names begin with `hostile`.
/// Sends the name and the cost of each.
struct Toggled {
    queue: ManifestQueue,
    costs: UnboundedSender<(String, u64)>,
}

impl Controller for Toggled {
    const KIND: &'static str = "Manifest";

    type Job = ManifestJob;

    fn next(&self) -> impl Future<Output = ManifestJob> + Send {
        self.queue.next()
    }

    fn view(job: &ManifestJob) -> JobView<'_> {
        Manifests::view(job)
    }

    async fn reconcile(&self, job: &ManifestJob) -> ReconcileOutcome {
        sleep(Duration::from_millis(20)).await;
        let is_hostile = job.key.name.starts_with("hostile");
        // Half a MiB, and a small status.
        let cost = if is_hostile { 128 } else { 2 };
        charge(cost);
        if is_hostile {
            self.queue.enqueue(&job.key, Priority::User, false);
        }
        self.costs.send((job.key.name.clone(), cost)).unwrap();
        ReconcileOutcome::ended(job.queued.work)
    }

    fn forget(&self, _: &ManifestJob) {}

    fn done(&self, job: ManifestJob, outcome: ReconcileOutcome) {
        self.queue.done(job, outcome);
    }
}

#[tokio::test(start_paused = true)]
async fn thirty_hostile_runtimes_cause_no_more_writes_than_their_shares_and_delay_no_other() {
    const MINUTES: u64 = 30;
    let name = |kind: &str, n: u64| format!("{kind}-{n}");
    let hostile: Vec<_> = (0..30).map(|n| name("hostile", n)).collect();
    let good: Vec<_> = (0..100).map(|n| name("good", n)).collect();
    let names: Vec<_> = hostile.iter().chain(&good).map(String::as_str).collect();
    let (queue, (costs, mut seen)) = (queue(&names), unbounded_channel());
    let mut workers = Workers::default();
    let shutdown = CancellationToken::new();
    let synced = CancellationToken::new();
    synced.cancel();
    workers.start(Toggled { queue: queue.clone(), costs }, 16, &synced, &shutdown);
    hostile.iter().for_each(|name| queue.enqueue(&key(name), Priority::User, false));
    let mut total = 0;
    for minute in 0..MINUTES {
        good.iter().for_each(|name| queue.enqueue(&key(name), Priority::User, false));
        sleep(Duration::from_secs(60)).await;
        let mut reconciled = 0;
        while let Ok((name, cost)) = seen.try_recv() {
            match name.starts_with("hostile") {
                true => total += cost,
                false => reconciled += 1,
            }
        }
        assert_eq!(reconciled, good.len(), "minute {minute}");
    }
    let allowed = 30 * (u64::from(WRITES.burst) + MINUTES * 60 * 4 + 128);
    assert!(total <= allowed && total > allowed / 2, "{total} of {allowed}");
    shutdown.cancel();
    workers.drained().await;
}

#[test]
fn verified_kyma_verifies_its_manifests() {
    let queue = queue(&["a"]);
    let ended = |work| ReconcileOutcome::ended(work);
    let queued = |work, drift| QueuedWork { work, priority: Priority::User, drift };
    for (queued, outcome, is_verified) in [
        (queued(WorkSet::RUNTIME, Drift::All), ended(WorkSet::RUNTIME), true),
        (queued(WorkSet::RUNTIME, Drift::None), ended(WorkSet::RUNTIME), false),
        // Only the agent's installation was repaired.
        (queued(WorkSet::INSTALLER, Drift::All), ended(WorkSet::INSTALLER), false),
        // Paused, or failed: it is verified when the repeated reconcile has ended.
        (queued(WorkSet::RUNTIME, Drift::All), ReconcileOutcome::default(), false),
        (queued(WorkSet::RUNTIME, Drift::All), ReconcileOutcome::failed(WorkSet::RUNTIME, ErrorClass::Ours), false),
    ] {
        verify_modules(&queue, &key("a"), &queued, &outcome);
        let job = queue.next().now_or_never();
        assert_eq!(
            job.as_ref().map(|job| (job.queued.drift == Drift::All, job.queued.priority)),
            is_verified.then_some((true, Priority::Verification))
        );
        job.into_iter().for_each(|job| queue.done(job, ended(WorkSet::MANIFEST)));
    }
}
