//! Runtime table: state of all runtimes and the work queue under one lock. An event is recorded and its work enqueued
//! in one step, and a reconcile takes its work together with a snapshot of the accepted sequences.
//!
//! In memory and non-blocking; only [`RuntimeTable::next`], [`RuntimeTable::next_delivery`] and
//! [`RuntimeTable::forward_health_changed`] wait. The table is an instance without statics: a process, or a test, can
//! hold several.

mod forward;
mod heartbeat_interval;
mod job;
mod metrics;
mod runtime_trust;
mod stamps;
mod state;
mod traces;
mod trust;
mod view;

use std::{
    hash::{BuildHasher as _, RandomState},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use thiserror::Error;
use tidewatch_shared::{
    exchange::{EventsResponse, HeartbeatResponse},
    heartbeat::Heartbeat,
    identity::{Instance, RuntimeId},
    plan::{Plan, Work},
};
use tokio::{sync::Notify, time, time::Instant};

pub use heartbeat_interval::HeartbeatInterval;
pub use job::Job;
pub use metrics::Metrics;
pub use runtime_trust::RuntimeTrust;
pub use trust::TrustAnnouncement;
pub(crate) use view::PathReport;
pub use view::{PathView, RuntimeView};

use crate::{
    base::key::KymaKey,
    fleet::{
        self, EventBatch, Inherited, PathState, Runtime, Verified,
        queue::{DelayReason, Drift, Priority, QueuedWork, ReconcileOutcome, WorkSet},
    },
};
use heartbeat_interval::HeartbeatPacing;
use job::ReconcileStart;
use state::{EventsReply, HeartbeatReply, State};

/// Repairs the agent's installation without trusting any cache.
const REPAIR: QueuedWork = QueuedWork { work: WorkSet::INSTALLER, priority: Priority::Catalog, drift: Drift::All };
/// Verifies the runtime without trusting any cache.
const VERIFICATION: QueuedWork =
    QueuedWork { work: WorkSet::RUNTIME, priority: Priority::Verification, drift: Drift::All };

/// Settings of the runtime table.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Heartbeat interval; responses announce it in whole seconds.
    pub heartbeat: Duration,
    /// Maximum rate of heartbeats of all runtimes, per second: the interval grows with their number, up to an hour.
    pub max_heartbeats_per_second: u32,
    /// Silence after which a runtime with an unreachable API server is away.
    pub away_after: Duration,
    /// Upper bound of one request to a runtime or to KCP; after it, the writes of the previous lease holder have
    /// landed.
    pub request_deadline: Duration,
    /// Number of workers that call [`RuntimeTable::next`]; a quarter of them serves slow and unreachable runtimes.
    pub slots: usize,
    /// Seed of the jitter. Not for secrets.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        let HeartbeatPacing { heartbeat, per_second, away_after } = HeartbeatPacing::default();
        Self {
            heartbeat,
            max_heartbeats_per_second: per_second,
            away_after,
            request_deadline: Duration::from_secs(20),
            slots: 16,
            seed: RandomState::new().hash_one(()),
        }
    }
}

/// Error of a request that belongs to no single Kyma.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum PlacementError {
    /// KCP's caches have not synced, so the runtime's Kyma is not known yet; 503.
    #[error("the receiver is starting")]
    NotSynced,
    /// No Kyma has this runtime id; 404.
    #[error("the runtime is not known")]
    Unknown,
    /// More than one Kyma has this runtime id; 409.
    #[error("more than one Kyma has this runtime id")]
    Ambiguous,
}

impl PlacementError {
    /// The error in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotSynced => "not-synced",
            Self::Unknown => "unknown",
            Self::Ambiguous => "ambiguous",
        }
    }
}

/// Table of all runtimes: path state, accepted and settled events, and queued work. Clones share one state.
#[derive(Clone)]
pub struct RuntimeTable(Arc<Inner>);

struct Inner {
    instance: Instance,
    settings: Settings,
    started: Instant,
    metrics: Metrics,
    interval: HeartbeatInterval,
    notify: Notify,
    forward: forward::Wakeups,
    state: Mutex<State>,
}

impl RuntimeTable {
    /// Creates an empty runtime table; `started` is the start of this process.
    #[must_use]
    pub fn new(instance: Instance, settings: Settings, metrics: Metrics, started: Instant) -> Self {
        let mut state = State::new(settings.slots, settings.seed);
        let Settings { heartbeat, max_heartbeats_per_second: per_second, away_after, .. } = settings;
        state.pace = HeartbeatPacing { heartbeat, per_second, away_after };
        let interval = HeartbeatInterval::new(state.interval());
        let (notify, state) = (Notify::new(), Mutex::new(state));
        let forward = forward::Wakeups::default();
        Self(Arc::new(Inner { instance, settings, started, metrics, interval, notify, forward, state }))
    }

    /// Sets runtime id and plan of a Kyma. Another runtime id resets the runtime's state. Enqueues only work that
    /// becomes unsettled by a new plan.
    pub fn place(&self, key: KymaKey, runtime: Option<RuntimeId>, plan: Arc<Plan>) {
        let now = Instant::now();
        self.with(|state| state.place(key, runtime, plan, now));
    }

    /// Removes a Kyma.
    pub fn remove(&self, key: &KymaKey) {
        self.with(|state| {
            state.remove(key);
            self.update_target_metrics(state);
        });
    }

    /// Enqueues work of a Kyma after a change in KCP. Unknown Kymas are ignored.
    pub fn enqueue(&self, key: &KymaKey, work: WorkSet, priority: Priority) {
        let now = Instant::now();
        self.with(|state| state.queue.enqueue(key, QueuedWork::new(work, priority), now));
    }

    /// Enqueues a verification: a reconcile of the Kyma that compares every object written to its runtime. Unknown
    /// Kymas are ignored.
    pub fn verify(&self, key: &KymaKey) {
        let now = Instant::now();
        self.with(|state| state.queue.enqueue(key, VERIFICATION, now));
    }

    /// Enqueues a comparison of the agent's installation. Unknown Kymas are ignored.
    pub fn repair(&self, key: &KymaKey) {
        let now = Instant::now();
        self.with(|state| state.queue.enqueue(key, REPAIR, now));
    }

    /// Notes that a runtime closed or lost its last connection, or that a heartbeat over one is overdue; nothing
    /// arrived over it after `since`.
    pub fn connection_lost(&self, runtime: &RuntimeId, since: Instant) {
        self.lock().connection_lost(runtime, since);
    }

    /// Kymas with a connection lost for this long and no request since; each lost connection is reported once.
    #[must_use]
    pub fn lost(&self, after: Duration) -> Vec<KymaKey> {
        let now = Instant::now();
        self.lock().lost(after, now)
    }

    /// Kymas with agents that reported, since the last call that returned them, that an object of their installation is
    /// missing: a Lease or a Secret. Each is returned at most once per `again`.
    #[must_use]
    pub fn incomplete(&self, again: Duration) -> Vec<KymaKey> {
        let now = Instant::now();
        self.lock().incomplete(again, now)
    }

    /// Same as [`Self::verify`], at a random time within `spread`.
    pub fn verify_within(&self, key: &KymaKey, spread: Duration) {
        let now = Instant::now();
        self.with(|state| {
            let at = now + state.queue.jitter(spread);
            state.queue.enqueue_after(key, DelayReason::Spread, at, VERIFICATION, now);
        });
    }

    /// Resumes all paused work at once, each at its own priority.
    pub fn unpause(&self) {
        let now = Instant::now();
        self.with(|state| state.queue.unpark_all(now));
    }

    /// Continues a path from reason and message of the condition `EventPath` in KCP until the runtime's next request.
    /// Restores only state that a new process cannot observe at once; the use of contract v3 is restored permanently.
    pub fn inherit(&self, key: &KymaKey, reason: &str, message: &str) {
        let (inherited, used_v3) = (Inherited::of(reason), fleet::condition_shows_v3(reason, message));
        if inherited.is_some() || used_v3 {
            self.with(|state| state.inherit(key, inherited, used_v3));
        }
    }

    /// Declares KCP's caches synced; from now on a runtime without Kyma is [`PlacementError::Unknown`].
    pub fn set_synced(&self) {
        self.with(|state| state.synced = true);
    }

    /// Appends one line per event that enqueues work to a file, for measurements: Unix time in nanoseconds (monotonic
    /// within this process), runtime id, watch, change, resourceVersion, and the time at which the agent observed the
    /// change. A thread of its own writes the file; lines that it cannot keep up with are dropped, counted and logged.
    ///
    /// # Errors
    /// The file cannot be opened, or the thread cannot start.
    #[cfg(feature = "stamps")]
    pub fn set_stamps(&self, path: &std::path::Path) -> std::io::Result<()> {
        let stamps = stamps::Stamps::append(path)?;
        self.with(|state| state.stamps = stamps);
        Ok(())
    }

    /// Records a verified request of events and enqueues their work, in one step. Events of another epoch than the signature's
    /// are refused as malformed.
    ///
    /// # Errors
    /// [`PlacementError`]; nothing was recorded.
    pub fn events(&self, batch: Verified<EventBatch>) -> Result<EventsResponse, PlacementError> {
        let now = Instant::now();
        // The first event represents the request.
        let first = batch.payload.events.iter().flatten().next();
        let seen = first.and_then(|event| event.time.as_deref()?.parse::<Timestamp>().ok());
        let result = self.with(|state| {
            let reply = state.events(batch, now)?;
            self.record_outbox_changes(state, &reply.forwarded);
            Ok(reply)
        });
        let EventsReply { recorded, enqueued, .. } = self.count_error(result)?;
        log_received(enqueued);
        self.0.metrics.events(&recorded);
        if let Some(after) = seen.and_then(|seen| Duration::try_from(Timestamp::now().duration_since(seen)).ok()) {
            self.0.metrics.accepted(after);
        }
        Ok(EventsResponse {
            instance: self.0.instance,
            accepted: recorded.accepted,
            since: recorded.since,
            refused: recorded.refused(),
            settled: recorded.settled,
            heartbeat_seconds: self.heartbeat_seconds(),
        })
    }

    /// Records a verified heartbeat. `now_unix` is the current time in Unix seconds.
    ///
    /// # Errors
    /// [`PlacementError`]; nothing was recorded.
    #[expect(clippy::needless_pass_by_value, reason = "a verified heartbeat is recorded once")]
    pub fn heartbeat(
        &self,
        heartbeat: Verified<Heartbeat>,
        now_unix: i64,
    ) -> Result<HeartbeatResponse, PlacementError> {
        let now = Instant::now();
        let result = self.with(|state| state.heartbeat(&heartbeat, now));
        let HeartbeatReply { record, plan_revision, trust_revision, renew } = self.count_error(result)?;
        self.0.metrics.renewal_requested(renew);
        self.0.metrics.heartbeat(&record);
        if record.differing > 0 {
            let (runtime, differing, resend) = (heartbeat.runtime(), record.differing, &record.resend);
            tracing::warn!(%runtime, differing, ?resend, "Digests of watches differ");
        }
        Ok(HeartbeatResponse {
            instance: self.0.instance,
            settled: record.settled,
            since: Some(record.since),
            heartbeat_seconds: self.heartbeat_seconds(),
            plan_revision: Some(plan_revision),
            trust_revision,
            server_time: rfc3339(now_unix),
            resend: record.resend,
            renew,
        })
    }

    /// Records an event of contract v2, which identifies no object, and enqueues all work of the runtime in the same
    /// step.
    ///
    /// # Errors
    /// [`PlacementError`]; nothing was recorded.
    pub fn legacy_event(&self, runtime: &RuntimeId) -> Result<(), PlacementError> {
        let now = Instant::now();
        let result = self.with(|state| state.legacy_event(runtime, now));
        log_received(Some(self.count_error(result)?));
        Ok(())
    }

    /// Returns the Kyma of a runtime.
    ///
    /// # Errors
    /// [`PlacementError`].
    pub fn kyma_of(&self, runtime: &RuntimeId) -> Result<KymaKey, PlacementError> {
        self.lock().key_of(runtime)
    }

    /// Returns true if it is certain that no Kyma has this runtime id.
    #[must_use]
    pub fn is_unknown(&self, runtime: &RuntimeId) -> bool {
        self.kyma_of(runtime) == Err(PlacementError::Unknown)
    }

    /// Sets the trust bundle and issuer that heartbeats announce from now on.
    pub fn announce_trust(&self, announcement: TrustAnnouncement) {
        self.lock().trust.set(announcement);
    }

    /// Trust state of each served runtime, in no order.
    #[must_use]
    pub fn runtime_trust(&self) -> Vec<RuntimeTrust> {
        self.lock().runtime_trust(self.0.started, Instant::now())
    }

    /// Path state of each served runtime, in no order.
    #[must_use]
    pub(crate) fn path_reports(&self) -> Vec<PathReport> {
        self.lock().path_reports(self.0.started, Instant::now())
    }

    /// Enqueues work of every Kyma, spread to about this many Kymas per second.
    pub fn enqueue_all(&self, work: WorkSet, priority: Priority, per_second: u32) {
        let now = Instant::now();
        self.with(|state| state.enqueue_all(work, priority, per_second, now));
    }

    /// Enqueues work of these Kymas after a change in KCP, this many per second; Kymas that already wait keep their
    /// turn. Unknown Kymas are ignored.
    pub fn enqueue_paced(&self, keys: Vec<KymaKey>, work: WorkSet, per_second: u32) {
        if !keys.is_empty() {
            let now = Instant::now();
            self.with(|state| state.enqueue_paced(keys, work, per_second, now));
        }
    }

    /// Enqueues a reconcile of a Kyma after a delay, for the rollout of a version. The earliest of several delays
    /// applies.
    pub fn roll_out(&self, key: &KymaKey, after: Duration) {
        let now = Instant::now();
        let queued = QueuedWork::new(WorkSet::of(&[Work::Kyma]), Priority::Catalog);
        self.with(|state| state.queue.enqueue_after(key, DelayReason::Rollout, now + after, queued, now));
    }

    /// Returns true if the runtime has used contract v3, with this process or, according to its Kyma, with an earlier
    /// one.
    #[must_use]
    pub fn has_used_v3(&self, runtime: &RuntimeId) -> bool {
        self.lock().has_used_v3(runtime)
    }

    /// Same as [`Self::has_used_v3`] for the runtime of a Kyma.
    #[must_use]
    pub fn kyma_has_used_v3(&self, key: &KymaKey) -> bool {
        self.lock().runtime(key).is_some_and(Runtime::has_used_v3)
    }

    /// Heartbeat interval announced to agents; it follows the number of runtimes.
    #[must_use]
    pub fn heartbeat_interval(&self) -> HeartbeatInterval {
        self.0.interval.clone()
    }

    /// Waits for the next Kyma to reconcile: fair, by priority, none in backoff or in progress. Cancel safe.
    pub async fn next(&self) -> Job {
        loop {
            let mut wakeup = pin!(self.0.notify.notified());
            // Registered before the check, so that no enqueue in between is missed.
            wakeup.as_mut().enable();
            let now = Instant::now();
            let (start, earliest) = self.with(|state| (state.begin(now), state.queue.earliest()));
            match (start, earliest) {
                (Some(start), earliest) => {
                    // The worker that leaves with work may have been the one waiting for that time.
                    if earliest.is_some() {
                        self.0.notify.notify_one();
                    }
                    return Job::new(self.clone(), start);
                }
                (None, None) => wakeup.await,
                (None, Some(at)) => {
                    // Check again after a timeout as well as after a notification.
                    let _ = time::timeout_at(at, wakeup).await;
                }
            }
        }
    }

    /// Ends a reconcile: settles ended work and requeues failed work and work enqueued meanwhile.
    #[expect(clippy::needless_pass_by_value, reason = "an ended job and its outcome must not be used again")]
    pub fn done(&self, mut job: Job, outcome: ReconcileOutcome) {
        if let Some(start) = job.take() {
            self.finish(&job.key, &job.queued, &start, &outcome);
        }
    }

    /// Path state of a Kyma's runtime; `None` for an unknown Kyma.
    #[must_use]
    pub fn path(&self, key: &KymaKey, now: Instant) -> Option<PathState> {
        let state = self.lock();
        let thresholds = state.thresholds(self.0.started);
        state.runtime(key).map(|runtime| runtime.path(thresholds, now))
    }

    /// Kymas with a path that changed since the last call; all of them at the first call. Also updates metrics that
    /// change with time alone. Supports one caller, about once per second.
    #[must_use]
    pub fn changed_paths(&self) -> Vec<(KymaKey, PathState)> {
        let (started, now) = (self.0.started, Instant::now());
        let mut totals = metrics::FleetTotals::default();
        let mut state = self.lock();
        let changed = state.changed_paths(started, now, &mut totals);
        self.0.metrics.observe_ages(&state.queue, now);
        drop(state);
        self.0.metrics.set_totals(&totals);
        changed
    }

    /// Summary of each Kyma, in no order.
    #[must_use]
    pub fn views(&self) -> Vec<RuntimeView> {
        self.lock().views(self.0.started, Instant::now())
    }

    fn count_error<T>(&self, result: Result<T, PlacementError>) -> Result<T, PlacementError> {
        result.inspect_err(|error| self.0.metrics.placement_failed(*error))
    }

    fn finish(&self, key: &KymaKey, queued: &QueuedWork, start: &ReconcileStart, outcome: &ReconcileOutcome) {
        let now = Instant::now();
        let safe = self.0.started + self.0.settings.request_deadline;
        self.0.metrics.reconciled(outcome);
        let accepted = self.with(|state| state.finish(key, queued, start, outcome, safe, now));
        if let Some(accepted) = accepted {
            self.0.metrics.settled(now.saturating_duration_since(accepted));
        }
    }

    /// Runs one step under the lock. Wakes a waiting worker if work is ready or the earliest due time moved forward.
    fn with<T>(&self, step: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let before = state.queue.earliest();
        let result = step(&mut state);
        let sooner = state.queue.earliest().is_some_and(|at| before.is_none_or(|before| at < before));
        let wake = sooner || state.queue.has_ready();
        self.0.metrics.queue(&state.queue);
        self.0.interval.set(state.interval());
        drop(state);
        if wake {
            self.0.notify.notify_one();
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave a partial change that a later event or reconcile would not repair.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heartbeat_seconds(&self) -> u32 {
        u32::try_from(self.0.interval.get().as_secs()).unwrap_or(u32::MAX).max(1)
    }
}

/// Logs an event with the incumbent's line, which dashboards search for. At info level at most once per reconcile: an
/// event that joins queued work is logged at debug level.
fn log_received(received: Option<(KymaKey, bool)>) {
    match received {
        Some((key, true)) => tracing::info!("event received from SKR, adding {key} to queue"),
        Some((key, false)) => tracing::debug!("event received from SKR, {key} is in the queue"),
        None => {}
    }
}

fn rfc3339(unix_seconds: i64) -> String {
    Timestamp::from_second(unix_seconds).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

#[cfg(test)]
mod tests;
