//! Runtime table: the state of the runtimes, for each shard that this process holds under one lock, and the queue of the work on
//! all of them. An event is recorded and its work enqueued in one step under the lock of its shard, and a reconcile takes its
//! work together with a snapshot of the accepted sequences.
//!
//! In memory and non-blocking; only [`RuntimeTable::next`], [`RuntimeTable::next_delivery`] and
//! [`RuntimeTable::forward_health_changed`] wait. The table is an instance without statics: a process, or a test, can hold several.

mod agenda;
mod directory;
mod enqueue;
mod forward;
mod forwarded;
mod heartbeat_interval;
mod job;
mod kymas;
mod metrics;
mod module_reports;
mod modules;
mod placement;
mod rate_share;
mod runtime_report;
mod shards;
mod shared;
mod silence;
mod stamps;
mod state;
mod traces;
mod trust;
mod view;
mod walk;

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, OnceLock},
    time::Duration,
};

use jiff::Timestamp;
use parking_lot::{Mutex, MutexGuard};
use thiserror::Error;
use tidewatch_api::{
    identity::RuntimeId,
    key::KymaKey,
    shard::{ShardCount, ShardId},
};
use tidewatch_contract::{
    exchange::{EventsResponse, HeartbeatResponse, RefusedEvent},
    heartbeat::Heartbeat,
};
use tidewatch_kit::{metrics::ResultLabel, variant::VariantName as _};
use tokio::{
    sync::{Notify, broadcast},
    time::Instant,
};

pub use heartbeat_interval::HeartbeatInterval;
pub use job::Job;
pub use metrics::Metrics;
pub use runtime_report::RuntimeReport;
pub use trust::TrustAnnouncement;

use crate::{EventBatch, HeartbeatStatus, Verified, due::next_due, queue::ReconcileOutcome};
use agenda::Enqueued;
use directory::Directory;
use job::Started;
use shared::Shared;
use state::{Ended, EventsReply, HeartbeatReply};
use trust::TrustAnnouncer;
#[cfg(any(test, feature = "testing"))]
use {tidewatch_api::identity::Instance, tidewatch_cluster::leader::WriteFence};

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
            max_heartbeats_per_second: 60,
            away_after: Duration::from_secs(2 * 3_600),
            request_deadline: Duration::from_secs(20),
            slots: 16,
            seed: RandomState::new().hash_one(()),
        }
    }
}

/// Error of a request that belongs to no single Kyma of the shards that are held. The name is the error in metrics.
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
    settings: Settings,
    metrics: Metrics,
    shared: Arc<Shared>,
    notify: Notify,
    forward: forward::Wakeups,
    /// Wakes a worker of the Manifests, which takes reports.
    report_added: OnceLock<Box<dyn Fn() + Send + Sync>>,
    departures: broadcast::Sender<RuntimeId>,
    trust: Mutex<TrustAnnouncer>,
    /// Time of the next Kyma of [`RuntimeTable::enqueue_paced`].
    pace: Mutex<Option<Instant>>,
    /// Held while Kymas change their places, and shards their holders.
    placing: Mutex<()>,
    directory: Mutex<Directory>,
    slots: Box<[shards::Slot]>,
    /// Number of times that the lock of a shard was acquired.
    #[cfg(test)]
    locked: std::sync::atomic::AtomicUsize,
}

/// Departures that a slow subscriber may be behind; beyond it, it has to look at all runtimes.
const DEPARTURES: usize = 256;

impl RuntimeTable {
    /// Creates a runtime table of so many shards, none of which is held.
    pub fn new(shards: ShardCount, settings: Settings, metrics: Metrics) -> Self {
        Self(Arc::new(Inner {
            settings,
            metrics,
            shared: Arc::new(Shared::new(shards, &settings)),
            notify: Notify::new(),
            forward: forward::Wakeups::default(),
            report_added: OnceLock::new(),
            departures: broadcast::Sender::new(DEPARTURES),
            trust: Mutex::default(),
            pace: Mutex::default(),
            placing: Mutex::default(),
            directory: Mutex::new(Directory::new(shards)),
            slots: Inner::slots(shards),
            #[cfg(test)]
            locked: Default::default(),
        }))
    }

    /// Creates the table of a process that is the only one, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn alone(instance: u64, settings: Settings, metrics: Metrics) -> Self {
        Self::holding_all(settings, metrics, Instance::new(instance), &WriteFence::default(), Instant::now())
    }

    /// Continues a path from reason and message of the condition `EventPath` in KCP until the runtime's next request.
    /// Restores only state that a new process cannot observe at once; the use of contract v3 is restored permanently.
    pub fn inherit(&self, key: &KymaKey, reason: &str, message: &str) {
        let inherited = reason.parse().ok();
        let used_v3 = crate::condition_shows_v3(reason, message);
        if inherited.is_some() || used_v3 {
            self.with_kyma(key, |state, _| {
                if let Some(entry) = state.kymas.get_mut(key) {
                    entry.runtime.inherit(inherited, used_v3);
                }
            });
        }
    }

    /// Declares KCP's caches synced and the Kymas of all held shards placed; from now on a runtime of these shards without
    /// Kyma is [`PlacementError::Unknown`].
    pub fn set_synced(&self) {
        self.held().into_iter().for_each(|shard| self.set_shard_synced(shard));
    }

    /// Declares all Kymas of a shard placed that was acquired after KCP's caches had synced.
    pub fn set_shard_synced(&self, shard: ShardId) {
        self.with(shard, |state, _| state.synced = true);
    }

    /// Appends one line per event that enqueues work to a file, for measurements: Unix time in nanoseconds (monotonic
    /// within this process), runtime id, watch, change, resourceVersion, and the time at which the agent observed the
    /// change. A thread of its own writes the file; lines that it cannot keep up with are dropped, counted and logged.
    ///
    /// # Errors
    /// The file cannot be opened, or the thread cannot start.
    #[cfg(feature = "stamps")]
    pub fn set_stamps(&self, path: &std::path::Path) -> std::io::Result<()> {
        let _ = self.0.shared.stamps.set(stamps::Stamps::append(path)?);
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
        let shard = self.shard_of(Some(batch.runtime()), "");
        let result = self.with(shard, |state, now| {
            let reply = state.events(batch, now_unix, now)?;
            self.record_outbox_changes(&reply.forwarded);
            Ok((reply, state.instance))
        });
        let (EventsReply { recorded, enqueued, .. }, instance) =
            self.count_error(result.unwrap_or(Err(PlacementError::Elsewhere)))?;
        log_received(enqueued);
        self.0.metrics.events(&recorded);
        if let Some(after) = seen.and_then(|seen| Duration::try_from(Timestamp::now().duration_since(seen)).ok()) {
            self.0.metrics.accepted.observe(after.as_secs_f64());
        }
        Ok(EventsResponse {
            instance,
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
        let result = self.with_runtime(heartbeat.runtime(), |state, now| {
            Ok((state.heartbeat(&heartbeat, now_unix, now)?, state.instance))
        });
        let (HeartbeatReply { record, plan_revision }, instance) = self.count_error(result)?;
        let is_counted = record.status == HeartbeatStatus::Counted;
        let (trust_revision, renew) = {
            let mut trust = self.trust();
            let renew = is_counted && trust.requests_renewal(heartbeat.authority.as_ref(), Instant::now());
            (trust.revision(), renew)
        };
        self.0.metrics.renewals.inc_by(renew.into());
        self.0.metrics.heartbeat(&record);
        if record.differing > 0 {
            let runtime = heartbeat.runtime();
            let differing = record.differing;
            let resend = record.resend.join(", ");
            tracing::warn!(%runtime, differing, resend, "Digests of watches differ");
        }
        Ok(HeartbeatResponse {
            instance,
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
        let result = self.with_runtime(runtime, |state, now| state.legacy_event(runtime, now));
        log_received(self.count_error(result)?);
        Ok(())
    }

    /// Returns the Kyma of a runtime.
    ///
    /// # Errors
    /// [`PlacementError`].
    pub fn kyma_of(&self, runtime: &RuntimeId) -> Result<KymaKey, PlacementError> {
        self.lock(self.shard_of(Some(runtime), "")).as_ref().ok_or(PlacementError::Elsewhere)?.key_of(runtime)
    }

    /// Returns true if it is certain that no Kyma has this runtime id; false for a runtime of another replica.
    pub fn is_unknown(&self, runtime: &RuntimeId) -> bool {
        self.kyma_of(runtime) == Err(PlacementError::Unknown)
    }

    /// Reports each runtime id that no Kyma has any more, from now on.
    pub fn departures(&self) -> broadcast::Receiver<RuntimeId> {
        self.0.departures.subscribe()
    }

    /// Number of runtimes with a Kyma in the shards that are held.
    pub fn runtimes(&self) -> usize {
        let of = |shard| self.lock(shard).as_ref().map_or(0, |state| state.runtimes.len());
        self.held().into_iter().map(of).sum()
    }

    /// Sets the trust bundle and issuer that heartbeats announce from now on.
    pub fn announce_trust(&self, announcement: TrustAnnouncement) {
        self.trust().announcement = Some(announcement);
    }

    /// Returns true if the runtime has used contract v3, with this process or, according to its Kyma, with an earlier
    /// one.
    pub fn has_used_v3(&self, runtime: &RuntimeId) -> bool {
        let slot = self.lock(self.shard_of(Some(runtime), ""));
        let Some(state) = slot.as_ref() else { return false };
        let keys = state.runtimes.get(runtime).into_iter().flatten();
        keys.filter_map(|key| state.kymas.get(key)).any(|entry| entry.runtime.used_v3)
    }

    /// Same as [`Self::has_used_v3`] for the runtime of a Kyma.
    pub fn kyma_has_used_v3(&self, key: &KymaKey) -> bool {
        self.with_kyma(key, |state, _| state.kymas.get(key).is_some_and(|entry| entry.runtime.used_v3)).unwrap_or(false)
    }

    /// Heartbeat interval announced to agents; it follows the number of runtimes of the fleet, those of other replicas included.
    pub fn heartbeat_interval(&self) -> HeartbeatInterval {
        self.0.shared.interval.clone()
    }

    /// Waits for the next Kyma to reconcile, of all shards that are held: fair, by priority, none in backoff or in progress.
    /// Cancel safe.
    pub async fn next(&self) -> Job {
        let begin = || {
            let started = self.begin();
            let earliest = self.0.shared.queue().earliest();
            // The worker that leaves with work may have been the one waiting for that time.
            if started.is_some() && earliest.is_some() {
                self.0.notify.notify_one();
            }
            (started, earliest)
        };
        Job::new(self.clone(), next_due(&self.0.notify, begin).await)
    }

    /// Takes the next Kyma to reconcile. Looks again if another worker was faster, or the Kyma has left its shard.
    fn begin(&self) -> Option<Started> {
        loop {
            let first = self.0.shared.queue().first(Instant::now())?;
            if let Some(Some(started)) = self.with_kyma(&first, |state, now| state.begin(&first, now)) {
                return Some(started);
            }
        }
    }

    /// Ends a reconcile: settles the events whose work ended, and requeues failed work and work enqueued meanwhile. [`Job::end`]
    /// calls [`Self::finish`], once also if the job is dropped later.
    #[expect(clippy::needless_pass_by_value, reason = "an ended job and its outcome must not be used again")]
    pub fn done(&self, mut job: Job, outcome: ReconcileOutcome) {
        job.end(&outcome);
    }

    fn count_error<T>(&self, result: Result<T, PlacementError>) -> Result<T, PlacementError> {
        result.inspect_err(|error| {
            self.0.metrics.placement_errors.get_or_create(&ResultLabel { result: error.as_str() }).inc();
        })
    }

    /// Ends a reconcile. If its Kyma has left the shard, or the shard was released, it only frees its place in the queue.
    fn finish(&self, job: &Job, outcome: &ReconcileOutcome) {
        self.0.metrics.reconciled(outcome);
        let shard = job.start.tenure.shard;
        let ended = shard.and_then(|shard| self.with(shard, |state, now| state.finish(job, outcome, now))?);
        match ended {
            Some(Ended { settled_after: Some(after) }) => self.0.metrics.settled.observe(after.as_secs_f64()),
            Some(Ended { settled_after: None }) => {}
            None => {
                self.0.shared.queue().discard(&job.key, Instant::now());
                self.publish(Vec::new());
            }
        }
    }

    fn trust(&self) -> MutexGuard<'_, TrustAnnouncer> {
        self.0.trust.lock()
    }

    fn heartbeat_seconds(&self) -> u32 {
        u32::try_from(self.0.shared.interval.get().as_secs()).unwrap_or(u32::MAX).max(1)
    }
}

/// Logs an event with lifecycle-manager's line, which dashboards search for. At info level at most once per reconcile: an
/// event that joins queued work is logged at debug level.
fn log_received(received: Option<Enqueued>) {
    match received {
        Some(Enqueued { kyma, is_new: true }) => tracing::info!("event received from SKR, adding {kyma} to queue"),
        Some(Enqueued { kyma, is_new: false }) => tracing::debug!("event received from SKR, {kyma} is in the queue"),
        None => {}
    }
}

fn rfc3339(unix_seconds: i64) -> String {
    Timestamp::from_second(unix_seconds).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

#[cfg(test)]
pub(crate) mod tests;
