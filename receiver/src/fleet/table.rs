//! Runtime table: state of all runtimes and the work queue under one lock. An event is recorded and its work enqueued
//! in one step, and a reconcile takes its work together with a snapshot of the accepted sequences.
//!
//! In memory and non-blocking; only [`RuntimeTable::next`], [`RuntimeTable::next_delivery`],
//! [`RuntimeTable::next_module_report`] and [`RuntimeTable::forward_health_changed`] wait. The table is an instance without statics: a process, or a test, can
//! hold several.

mod enqueue;
mod forward;
mod heartbeat_interval;
mod job;
mod kymas;
mod metrics;
mod modules;
mod runtime_trust;
mod signature_clock;
mod silence;
mod stamps;
mod state;
mod traces;
mod trust;
mod view;

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use thiserror::Error;
use tidewatch_shared::{
    exchange::{EventsResponse, HeartbeatResponse, RefusedEvent},
    heartbeat::Heartbeat,
    identity::{Instance, RuntimeId},
    metrics::ResultLabel,
    plan::Plan,
    variant::VariantName as _,
};
use tokio::{
    sync::{Notify, broadcast},
    time::Instant,
};

pub use heartbeat_interval::HeartbeatInterval;
pub use job::Job;
pub use metrics::Metrics;
pub use runtime_trust::RuntimeTrust;
pub use trust::TrustAnnouncement;
pub(crate) use view::PathReport;
pub use view::{PathView, RuntimeView};

use crate::{
    base::key::KymaKey,
    fleet::{self, EventBatch, Verified, due::next_due, queue::ReconcileOutcome},
};
use state::{EventsReply, HeartbeatReply, State};

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
        Self {
            heartbeat: Duration::from_secs(30),
            max_heartbeats_per_second: 200,
            away_after: Duration::from_secs(2 * 3_600),
            request_deadline: Duration::from_secs(20),
            slots: 16,
            seed: RandomState::new().hash_one(()),
        }
    }
}

/// Error of a request that belongs to no single Kyma. The name is the error in metrics.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum PlacementError {
    /// KCP's caches have not synced, so the runtime's Kyma is not known yet; 503.
    #[error("the receiver is starting")]
    NotSynced,
    /// Another replica holds the shard of the runtime, or none does; 503.
    #[error("the runtime is served by another replica")]
    Elsewhere,
    /// No Kyma has this runtime id; 404.
    #[error("the runtime is not known")]
    Unknown,
    /// More than one Kyma has this runtime id; 409.
    #[error("more than one Kyma has this runtime id")]
    Ambiguous,
}

/// Table of all runtimes: path state, accepted and settled events, and queued work. Clones share one state.
#[derive(Clone)]
pub struct RuntimeTable(Arc<Inner>);

struct Inner {
    instance: Instance,
    started: Instant,
    metrics: Metrics,
    interval: HeartbeatInterval,
    notify: Notify,
    forward: forward::Wakeups,
    reports: modules::ReportAdded,
    departures: broadcast::Sender<RuntimeId>,
    state: Mutex<State>,
    /// Number of times that the lock was acquired.
    #[cfg(test)]
    locked: std::sync::atomic::AtomicUsize,
}

/// Departures that a slow subscriber may be behind; beyond it, it has to look at all runtimes.
const DEPARTURES: usize = 256;

impl RuntimeTable {
    /// Creates an empty runtime table; `started` is the start of this process.
    #[must_use]
    pub fn new(instance: Instance, settings: Settings, metrics: Metrics, started: Instant) -> Self {
        let state = State::new(settings);
        Self(Arc::new(Inner {
            instance,
            started,
            metrics,
            interval: HeartbeatInterval::new(state.interval()),
            notify: Notify::new(),
            forward: forward::Wakeups::default(),
            reports: modules::ReportAdded::default(),
            departures: broadcast::Sender::new(DEPARTURES),
            state: Mutex::new(state),
            #[cfg(test)]
            locked: Default::default(),
        }))
    }

    /// Sets runtime id and plan of a Kyma. Another runtime id resets the runtime's state. Enqueues only work that
    /// becomes unsettled by a new plan.
    pub fn place(&self, key: KymaKey, runtime: Option<RuntimeId>, plan: Arc<Plan>) {
        self.with(|state, now| state.place(key, runtime, plan, now));
    }

    /// Returns true if a Kyma was placed with an equal plan; `None` for an unknown Kyma.
    #[must_use]
    pub fn has_plan(&self, key: &KymaKey, plan: &Plan) -> Option<bool> {
        self.lock().kymas.get(key).map(|entry| entry.runtime.plan_revision() == plan.revision())
    }

    /// Removes a Kyma.
    pub fn remove(&self, key: &KymaKey) {
        self.with(|state, _| {
            state.remove(key);
            self.update_target_metrics(state);
        });
    }

    /// Continues a path from reason and message of the condition `EventPath` in KCP until the runtime's next request.
    /// Restores only state that a new process cannot observe at once; the use of contract v3 is restored permanently.
    pub fn inherit(&self, key: &KymaKey, reason: &str, message: &str) {
        let (inherited, used_v3) = (reason.parse().ok(), fleet::condition_shows_v3(reason, message));
        if inherited.is_some() || used_v3 {
            self.with(|state, _| {
                if let Some(entry) = state.kymas.get_mut(key) {
                    entry.runtime.inherit(inherited, used_v3);
                }
            });
        }
    }

    /// Declares KCP's caches synced; from now on a runtime without Kyma is [`PlacementError::Unknown`].
    pub fn set_synced(&self) {
        self.with(|state, _| state.synced = true);
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
        self.with(|state, _| state.stamps = stamps);
        Ok(())
    }

    /// Records a verified request of events and enqueues their work, in one step. Events of another epoch than the signature's
    /// are refused as malformed. `now_unix` is the current time in Unix seconds.
    ///
    /// # Errors
    /// [`PlacementError`]; nothing was recorded.
    pub fn events(&self, batch: Verified<EventBatch>, now_unix: i64) -> Result<EventsResponse, PlacementError> {
        // The first event represents the request.
        let first = batch.payload.events.iter().flatten().next();
        let seen = first.and_then(|event| event.time.as_deref()?.parse::<Timestamp>().ok());
        let result = self.with(|state, now| {
            let reply = state.events(batch, now_unix, now)?;
            self.record_outbox_changes(state, &reply.forwarded);
            Ok(reply)
        });
        let EventsReply { recorded, enqueued, .. } = self.count_error(result)?;
        log_received(enqueued);
        self.0.metrics.events(&recorded);
        if let Some(after) = seen.and_then(|seen| Duration::try_from(Timestamp::now().duration_since(seen)).ok()) {
            self.0.metrics.accepted.observe(after.as_secs_f64());
        }
        Ok(EventsResponse {
            instance: self.0.instance,
            accepted: recorded.accepted,
            since: recorded.since,
            refused: recorded
                .refused
                .into_iter()
                .map(|(id, reason)| RefusedEvent { id: id.to_string(), reason })
                .collect(),
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
        let result = self.with(|state, now| state.heartbeat(&heartbeat, now_unix, now));
        let HeartbeatReply { record, plan_revision, trust_revision, renew } = self.count_error(result)?;
        self.0.metrics.renewals.inc_by(renew.into());
        self.0.metrics.heartbeat(&record);
        if record.differing > 0 {
            let (runtime, differing, resend) = (heartbeat.runtime(), record.differing, record.resend.join(", "));
            tracing::warn!(%runtime, differing, resend, "Digests of watches differ");
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
        let result = self.with(|state, now| state.legacy_event(runtime, now));
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

    /// Reports each runtime id that no Kyma has any more, from now on.
    #[must_use]
    pub fn departures(&self) -> broadcast::Receiver<RuntimeId> {
        self.0.departures.subscribe()
    }

    /// Number of runtimes with a Kyma.
    #[must_use]
    pub fn runtimes(&self) -> usize {
        self.lock().runtimes.len()
    }

    /// Sets the trust bundle and issuer that heartbeats announce from now on.
    pub fn announce_trust(&self, announcement: TrustAnnouncement) {
        self.lock().trust.announcement = Some(announcement);
    }

    /// Returns true if the runtime has used contract v3, with this process or, according to its Kyma, with an earlier
    /// one.
    #[must_use]
    pub fn has_used_v3(&self, runtime: &RuntimeId) -> bool {
        let state = self.lock();
        let keys = state.runtimes.get(runtime).into_iter().flatten();
        keys.filter_map(|key| state.kymas.get(key)).any(|entry| entry.runtime.used_v3)
    }

    /// Same as [`Self::has_used_v3`] for the runtime of a Kyma.
    #[must_use]
    pub fn kyma_has_used_v3(&self, key: &KymaKey) -> bool {
        self.lock().kymas.get(key).is_some_and(|entry| entry.runtime.used_v3)
    }

    /// Heartbeat interval announced to agents; it follows the number of runtimes.
    #[must_use]
    pub fn heartbeat_interval(&self) -> HeartbeatInterval {
        self.0.interval.clone()
    }

    /// Waits for the next Kyma to reconcile: fair, by priority, none in backoff or in progress. Cancel safe.
    pub async fn next(&self) -> Job {
        let begin = || {
            let (start, earliest) = self.with(|state, now| (state.begin(now), state.queue.earliest()));
            // The worker that leaves with work may have been the one waiting for that time.
            if start.is_some() && earliest.is_some() {
                self.0.notify.notify_one();
            }
            (start, earliest)
        };
        Job::new(self.clone(), next_due(&self.0.notify, begin).await)
    }

    /// Ends a reconcile: settles ended work and requeues failed work and work enqueued meanwhile.
    #[expect(clippy::needless_pass_by_value, reason = "an ended job and its outcome must not be used again")]
    pub fn done(&self, mut job: Job, outcome: ReconcileOutcome) {
        job.end(&outcome);
    }

    fn count_error<T>(&self, result: Result<T, PlacementError>) -> Result<T, PlacementError> {
        result.inspect_err(|error| {
            self.0.metrics.placement_errors.get_or_create(&ResultLabel { result: error.as_str() }).inc();
        })
    }

    fn finish(&self, job: &Job, outcome: &ReconcileOutcome) {
        self.0.metrics.reconciled(outcome);
        let settled_after = self.with(|state, now| {
            let safe = self.0.started + state.settings.request_deadline;
            let accepted = state.finish(&job.key, &job.queued, &job.start, outcome, safe, now)?;
            Some(now.saturating_duration_since(accepted))
        });
        if let Some(after) = settled_after {
            self.0.metrics.settled.observe(after.as_secs_f64());
        }
    }

    /// Runs one step under the lock, with the time just before it. Wakes a waiting worker if work is ready or the
    /// earliest due time moved forward.
    fn with<T>(&self, step: impl FnOnce(&mut State, Instant) -> T) -> T {
        let now = Instant::now();
        let mut state = self.lock();
        let before = state.queue.earliest();
        let result = step(&mut state, now);
        let sooner = state.queue.earliest().is_some_and(|at| before.is_none_or(|before| at < before));
        let wake = sooner || state.queue.has_ready();
        self.0.metrics.queue(&state.queue);
        self.0.interval.set(state.interval());
        let is_reported = std::mem::take(&mut state.reports.has_new);
        let departed = std::mem::take(&mut state.departed);
        drop(state);
        for runtime in departed {
            // Without an open port there is no receiver.
            let _ = self.0.departures.send(runtime);
        }
        if is_reported {
            self.0.reports.0.notify_one();
        }
        if wake {
            self.0.notify.notify_one();
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        #[cfg(test)]
        self.0.locked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
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
