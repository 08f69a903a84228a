//! Work queue of the Manifests, beside that of the Kymas in the [runtime table](super::table): workers, lock and priorities
//! of its own, so that a slow module never delays a user's change of a Kyma.
//!
//! In memory and non-blocking; only [`ManifestQueue::next`] waits. Bounded by the number of Manifests.

mod job;
mod layer_waits;
mod metrics;
mod settling;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use tidewatch_api::key::{KymaKey, ManifestKey};
use tidewatch_cluster::runtime_access::CONCURRENT_CALLERS;
use tidewatch_kit::random::rotate;
use tidewatch_oci::registry::{Change, LayerKey};
use tokio::{
    sync::Notify,
    time::{Instant, MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

pub use job::ManifestJob;
pub use metrics::Metrics;

use self::{layer_waits::LayerWaits, settling::Settling};
use super::{
    due::next_due,
    queue::{DelayReason, Drift, Priority, Queue, QueuedWork, ReconcileOutcome, WorkSet},
    report::{ModuleReport, ReportedEvents},
    table::RuntimeTable,
    tenure::Tenures,
};

/// Interval at which the ages of the metrics are updated.
const AGES_INTERVAL: Duration = Duration::from_secs(1);

/// Settings of the queue.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Number of workers that call [`ManifestQueue::next`]; a quarter of them serves slow and unreachable runtimes.
    pub slots: usize,
    /// Seed of the jitter. Not for secrets.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { slots: 16, seed: RandomState::new().hash_one(()) }
    }
}

/// Queue of the Manifests. Clones share one state.
#[derive(Clone)]
pub struct ManifestQueue(Arc<Inner>);

struct Inner {
    /// Tenures of the Kymas' shards.
    tenures: Tenures,
    metrics: Metrics,
    notify: Notify,
    reports: OnceLock<Reports>,
    /// Held while reports are taken: the later of two reports of one runtime is never added first, or it would settle the
    /// events of the earlier one.
    taking: Mutex<()>,
    state: Mutex<State>,
}

/// Returns the Manifests that a report concerns, each with the objects to read again.
type Affected = Box<dyn Fn(&ModuleReport) -> Vec<(ManifestKey, Drift)> + Send + Sync>;

/// The reports of changed module objects.
struct Reports {
    table: RuntimeTable,
    affected: Affected,
}

struct State {
    queue: Queue<ManifestKey, KymaKey>,
    waits: LayerWaits,
    settling: Settling,
    /// Reconciles in progress of registered Manifests; bounded by the number of workers.
    running: HashMap<ManifestKey, CancellationToken>,
}

/// Makes the work of a Manifest. With `verify`, the reconcile reads every object again instead of trusting its caches.
const fn work(priority: Priority, verify: bool) -> QueuedWork {
    QueuedWork { work: WorkSet::MANIFEST, priority, drift: if verify { Drift::All } else { Drift::None } }
}

impl ManifestQueue {
    /// Creates an empty queue. The tenure of a Kyma's shard permits the writes of its Manifests' reconciles.
    pub fn new(settings: Settings, metrics: Metrics, tenures: Tenures) -> Self {
        let state = State {
            queue: Queue::with_groups(settings.slots, CONCURRENT_CALLERS, settings.seed),
            waits: LayerWaits::default(),
            settling: Settling::default(),
            running: HashMap::new(),
        };
        let state = Mutex::new(state);
        Self(Arc::new(Inner {
            tenures,
            metrics,
            notify: Notify::new(),
            reports: OnceLock::new(),
            taking: Mutex::default(),
            state,
        }))
    }

    /// Registers a Manifest of a Kyma, or moves it to another Kyma; enqueues nothing. Only registered Manifests can be
    /// enqueued.
    pub fn insert(&self, key: ManifestKey, kyma: KymaKey) {
        self.with(|state, now| {
            if let Some(before) = state.queue.group(&key).filter(|before| **before != kyma).cloned() {
                state.settling.remove(&before, &key);
            }
            state.queue.insert_into(key, kyma, now);
        });
    }

    /// Removes a Manifest with its work, and cancels its reconcile.
    pub fn remove(&self, key: &ManifestKey) {
        self.with(|state, _| state.remove(key));
    }

    /// Removes the Manifests of Kymas with their work, and cancels their reconciles: another replica serves their runtimes.
    pub fn remove_kymas(&self, kymas: &[KymaKey]) {
        for kyma in kymas {
            self.with(|state, _| {
                state.queue.members(kyma).iter().for_each(|key| state.remove(key));
                state.settling.forget(kyma);
            });
        }
    }

    /// Enqueues a reconcile of a Manifest. Unknown Manifests are ignored.
    pub fn enqueue(&self, key: &ManifestKey, priority: Priority, verify: bool) {
        self.with(|state, now| state.queue.enqueue(key, work(priority, verify), now));
    }

    /// Enqueues a reconcile of each Manifest that a report affects, which reads these objects again. Unknown Manifests
    /// are ignored.
    fn report(&self, affected: Vec<(ManifestKey, Drift)>, events: ReportedEvents) {
        self.with(|state, now| {
            let known = |(key, _): &(ManifestKey, Drift)| state.queue.group(key) == Some(&events.kyma);
            let affected: Vec<_> = affected.into_iter().filter(known).collect();
            state.settling.add(affected.iter().map(|(key, _)| key.clone()).collect(), events);
            for (key, drift) in affected {
                let work = QueuedWork { work: WorkSet::MANIFEST, priority: Priority::User, drift };
                state.queue.enqueue(&key, work, now);
            }
        });
    }

    /// Returns true if a reconcile of a Manifest is queued that has not begun, and is not a retry.
    pub fn is_queued(&self, key: &ManifestKey) -> bool {
        self.0.state.lock().queue.is_due(key, Instant::now())
    }

    /// Lets the workers take the reports of a table from now on. `affected` returns the Manifests that a report concerns, each
    /// with the objects to read again. Until then, reports wait; only the first call has an effect.
    pub fn connect_reports(
        &self,
        table: &RuntimeTable,
        affected: impl Fn(&ModuleReport) -> Vec<(ManifestKey, Drift)> + Send + Sync + 'static,
    ) {
        let _ = self.0.reports.set(Reports { table: table.clone(), affected: Box::new(affected) });
        let queue = self.clone();
        table.on_module_report(Box::new(move || queue.0.notify.notify_one()));
        // Reports may wait already.
        self.0.notify.notify_one();
    }

    /// Takes all reports, unless another worker does.
    fn take_reports(&self) {
        let Some(Reports { table, affected }) = self.0.reports.get() else { return };
        // A report that was added while this worker held the lock may have woken another one in vain.
        while table.has_module_reports()
            && let Some(_taking) = self.0.taking.try_lock()
        {
            while let Some(report) = table.take_module_report() {
                self.report(affected(&report), report.events);
            }
        }
    }

    /// Enqueues a reconcile of each Manifest of a Kyma.
    pub fn enqueue_kyma(&self, kyma: &KymaKey, priority: Priority, verify: bool) {
        self.with(|state, now| {
            for key in state.queue.members(kyma) {
                state.queue.enqueue(&key, work(priority, verify), now);
            }
        });
    }

    /// Enqueues a reconcile of these Manifests, this many per second; Manifests that already wait keep their turn. Unknown
    /// Manifests are ignored.
    pub fn enqueue_paced(&self, mut keys: Vec<ManifestKey>, per_second: u32) {
        rotate(&mut keys);
        self.with(|state, now| state.queue.enqueue_paced(&keys, &work(Priority::Catalog, false), per_second, now));
    }

    /// Resumes all paused work at once, each at its own priority.
    pub fn unpause(&self) {
        self.with(|state, now| state.queue.unpark_all(now));
    }

    /// Cancels the reconciles of the Manifests of a Kyma and drops their work: another controller may manage the Kyma now.
    /// The Manifests stay registered.
    pub fn cancel_kyma(&self, kyma: &KymaKey) {
        self.with(|state, now| {
            for key in state.queue.members(kyma) {
                state.remove(&key);
                state.queue.insert_into(key, kyma.clone(), now);
            }
        });
    }

    /// Returns true while a reconcile of a Manifest of a Kyma is in progress, also one that was cancelled and has not ended.
    pub fn is_working(&self, kyma: &KymaKey) -> bool {
        let state = self.0.state.lock();
        state.queue.members(kyma).iter().any(|key| state.queue.in_progress(key))
    }

    /// Records that a Manifest waits for a change of a layer's lookup, instead of any other layer. Unknown Manifests are
    /// ignored. To miss no change, the lookup is repeated afterwards.
    pub fn wait_for_layer(&self, key: &ManifestKey, layer: LayerKey) {
        let state = &mut *self.0.state.lock();
        if state.queue.contains(key) {
            state.waits.wait(key, layer);
        }
    }

    /// Returns the Manifests that wait for a changed lookup, which wait no longer.
    #[must_use]
    pub fn take_waiting(&self, change: &Change) -> BTreeSet<ManifestKey> {
        self.0.state.lock().waits.take(change)
    }

    /// Waits for the next Manifest to reconcile: fair between the runtimes, by priority, none in backoff or in progress, and
    /// at most two of one runtime at a time. Cancel safe.
    pub async fn next(&self) -> ManifestJob {
        let begin = || {
            self.take_reports();
            let (job, earliest) = self.with(|state, now| (state.begin(&self.0.tenures, now), state.queue.earliest()));
            // The worker that leaves with work may have been the one waiting for that time.
            if job.is_some() && earliest.is_some() {
                self.0.notify.notify_one();
            }
            (job, earliest)
        };
        let mut job = next_due(&self.0.notify, begin).await;
        job.queue = Some(self.clone());
        job
    }

    /// Ends a reconcile: requeues failed work and work enqueued meanwhile.
    #[expect(clippy::needless_pass_by_value, reason = "an ended job and its outcome must not be used again")]
    pub fn done(&self, mut job: ManifestJob, outcome: ReconcileOutcome) {
        job.end(&outcome);
    }

    /// Updates the metrics that change with time alone, for ever.
    pub async fn observe_ages(self) -> &'static str {
        let mut ticks = interval(AGES_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let now = ticks.tick().await;
            self.0.metrics.observe_ages(&self.0.state.lock().queue, now);
        }
    }

    fn finish(&self, job: &ManifestJob, outcome: &ReconcileOutcome) {
        self.0.metrics.reconciled(outcome);
        self.with(|state, now| {
            state.running.remove(&job.key);
            state.queue.finish(&job.key, &job.queued, outcome, now);
            if !outcome.ended.minus(outcome.failed).is_empty() {
                state.settling.reconciled(&job.kyma, &job.key, job.reports_before);
            }
            if let Some(safe) = job.tenure.safe.filter(|safe| job.since < *safe) {
                // A last write of the previous holder may land after it.
                let again = work(Priority::Catalog, true);
                state.queue.enqueue_after(&job.key, DelayReason::StartupGrace, safe, again, now);
            }
        });
    }

    /// Runs one step under the lock, with the time just before it. Wakes a waiting worker if work is ready or the
    /// earliest due time became earlier.
    fn with<T>(&self, step: impl FnOnce(&mut State, Instant) -> T) -> T {
        let now = Instant::now();
        let mut state = self.0.state.lock();
        let result = step(&mut state, now);
        let needs_worker = state.queue.needs_worker();
        let settled = state.settling.take();
        self.0.metrics.queue(&state.queue);
        drop(state);
        if let Some(Reports { table, .. }) = self.0.reports.get() {
            settled.iter().for_each(|events| table.modules_settled(events));
        }
        if needs_worker {
            self.0.notify.notify_one();
        }
        result
    }
}

impl State {
    fn remove(&mut self, key: &ManifestKey) {
        if let Some(cancellation) = self.running.remove(key) {
            cancellation.cancel();
        }
        self.waits.forget(key);
        if let Some(kyma) = self.queue.group(key).cloned() {
            self.settling.remove(&kyma, key);
        }
        self.queue.remove(key);
    }

    /// Takes the next Manifest to reconcile. The job has no queue yet, so that it may be dropped under the lock.
    fn begin(&mut self, tenures: &Tenures, now: Instant) -> Option<ManifestJob> {
        let (kyma, tenure, in_progress) = loop {
            let key = self.queue.first(now)?;
            let kyma = self.queue.group(&key)?.clone();
            let tenure = tenures(&kyma);
            if let Some(in_progress) = tenure.begin() {
                break (kyma, tenure, in_progress);
            }
            // The next holder of its shard reconciles it.
            self.remove(&key);
        };
        let (key, queued) = self.queue.take(now)?;
        let cancellation = CancellationToken::new();
        self.running.insert(key.clone(), cancellation.clone());
        Some(ManifestJob {
            time_limit: self.queue.time_limit(&key),
            key,
            kyma,
            tenure,
            queued,
            cancellation,
            since: now,
            reports_before: self.settling.count(),
            _in_progress: in_progress,
            queue: None,
        })
    }
}
