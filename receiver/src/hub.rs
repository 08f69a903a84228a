//! Fleet and queue in one lock: an event is recorded and its work wanted in one step, and a pass takes what is wanted together with a
//! snapshot of what is accepted.
//!
//! Everything here is in memory and answers at once; only [`Hub::next`] waits.

mod job;
mod metrics;
mod stamps;
mod state;
mod view;

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
    path::Path,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use thiserror::Error;
use tidewatch_shared::{
    event,
    exchange::{EventsAnswer, HeartbeatAnswer},
    heartbeat::Heartbeat,
    identity::{Epoch, Instance, RuntimeId},
    plan::{Plan, Work},
};
use tokio::{sync::Notify, time, time::Instant};

pub use job::Job;
pub use metrics::Metrics;
pub use view::View;

use crate::{
    fleet::PathState,
    key::KymaKey,
    queue::{Drift, Outcome, Priority, Wanted, Works},
};
use job::Begun;
use stamps::Stamps;
use state::State;

/// How the hub is set.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The wanted heartbeat interval; answers say it in whole seconds.
    pub heartbeat: Duration,
    /// One request to a runtime or to KCP takes no longer: what a dead predecessor began has landed by then.
    pub request_deadline: Duration,
    /// How many workers call [`Hub::next`]; a quarter of them serves runtimes that could not be reached.
    pub slots: usize,
    /// Any number; jitter is drawn from it. Not for secrets.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(30),
            request_deadline: Duration::from_secs(20),
            slots: 16,
            seed: RandomState::new().hash_one(()),
        }
    }
}

/// Why a runtime cannot be served now.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Unplaced {
    /// The caches of KCP have not synced, so nobody knows; 503.
    #[error("the receiver is starting")]
    NotSynced,
    /// No Kyma has this runtime id; 404.
    #[error("the runtime is not known")]
    Unknown,
    /// More than one Kyma has this runtime id; 409.
    #[error("more than one Kyma has this runtime id")]
    Ambiguous,
}

impl Unplaced {
    /// The reason as metrics and logs name it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotSynced => "not-synced",
            Self::Unknown => "unknown",
            Self::Ambiguous => "ambiguous",
        }
    }
}

/// Who is alive, what is accepted and settled, and who is worked on next. Clones share one state.
#[derive(Clone)]
pub struct Hub(Arc<Inner>);

struct Inner {
    instance: Instance,
    settings: Settings,
    started: Instant,
    metrics: Metrics,
    notify: Notify,
    state: Mutex<State>,
}

impl Hub {
    /// Makes an empty hub; `started` is when this process began.
    #[must_use]
    pub fn new(instance: Instance, settings: Settings, metrics: Metrics, started: Instant) -> Self {
        let state = Mutex::new(State::new(settings.slots, settings.seed));
        Self(Arc::new(Inner { instance, settings, started, metrics, notify: Notify::new(), state }))
    }

    /// Says which runtime a Kyma is and which plan that runtime has: a new Kyma, or a change of either. Another runtime id forgets
    /// what was known of the one before. Wants nothing by itself but what a new plan leaves unsettled.
    pub fn place(&self, key: KymaKey, runtime: Option<RuntimeId>, plan: Arc<Plan>) {
        let now = Instant::now();
        self.with(|state| state.place(key, runtime, plan, now));
    }

    /// Forgets a Kyma.
    pub fn remove(&self, key: &KymaKey) {
        self.with(|state| state.remove(key));
    }

    /// Wants works of a Kyma because of something in KCP. An unknown Kyma is ignored.
    pub fn want(&self, key: &KymaKey, works: Works, priority: Priority) {
        let now = Instant::now();
        self.with(|state| state.queue.want(key, Wanted::new(works, priority), now));
    }

    /// Wants everything that we wrote to a runtime compared with what is there, as verification. An unknown Kyma is ignored.
    pub fn want_drift_all(&self, key: &KymaKey) {
        let now = Instant::now();
        let wanted = Wanted { works: Works::of(&[Work::Catalog]), priority: Priority::Verification, drift: Drift::All };
        self.with(|state| state.queue.want(key, wanted, now));
    }

    /// From now on an unknown runtime is called unknown.
    pub fn set_synced(&self) {
        self.with(|state| state.synced = true);
    }

    /// Appends one line to a file for every event that makes a Kyma wanted, for measurements: nanoseconds since 1970 on a clock that
    /// is monotonic within this process, runtime id, watch, change, resource version, when the agent saw it. The file is written by a thread of its own; lines that
    /// it cannot keep up with are dropped and counted.
    ///
    /// # Errors
    /// The file cannot be opened, or the thread cannot start.
    pub fn set_stamps(&self, path: &Path) -> io::Result<()> {
        let stamps = Stamps::append(path, self.0.metrics.dropped_stamps())?;
        self.with(|state| state.stamps = Some(stamps));
        Ok(())
    }

    /// Records a verified request of events and wants their work, in one step. `epoch` and `created` (unix seconds) are those of the
    /// request's signature; every event must name that epoch.
    ///
    /// # Errors
    /// [`Unplaced`]; then nothing was recorded.
    pub fn events(
        &self,
        runtime: &RuntimeId,
        epoch: Epoch,
        created: i64,
        events: Vec<event::Received>,
    ) -> Result<EventsAnswer, Unplaced> {
        let now = Instant::now();
        let recorded = self.with(|state| state.events(runtime, epoch, created, events, now));
        let recorded = recorded.inspect_err(|unplaced| self.0.metrics.unplaced(*unplaced))?;
        self.0.metrics.events(&recorded);
        Ok(EventsAnswer {
            instance: self.0.instance,
            accepted: recorded.accepted,
            since: recorded.since,
            refused: recorded.refused(),
            settled: recorded.settled,
            heartbeat_seconds: self.heartbeat_seconds(),
        })
    }

    /// Takes a verified heartbeat. `created` (unix seconds) is that of the request's signature, `now_unix` the time of this process.
    /// The trust revision is the gateway's to fill in.
    ///
    /// # Errors
    /// [`Unplaced`]; then nothing was taken.
    pub fn heartbeat(
        &self,
        runtime: &RuntimeId,
        created: i64,
        heartbeat: Heartbeat,
        now_unix: i64,
    ) -> Result<HeartbeatAnswer, Unplaced> {
        let now = Instant::now();
        let beat = self.with(|state| state.heartbeat(runtime, created, &heartbeat, now));
        let (beat, plan_revision) = beat.inspect_err(|unplaced| self.0.metrics.unplaced(*unplaced))?;
        self.0.metrics.heartbeat(&beat);
        if beat.differing > 0 {
            tracing::warn!(%runtime, watches = ?beat.resend, "Digests of watches do not agree");
        }
        Ok(HeartbeatAnswer {
            instance: self.0.instance,
            settled: beat.settled,
            heartbeat_seconds: self.heartbeat_seconds(),
            plan_revision: Some(plan_revision),
            trust_revision: None,
            server_time: rfc3339(now_unix),
            resend: beat.resend,
        })
    }

    /// Waits for the next Kyma to work on: by priority, fair between them, none in backoff, and none that is already in work. Dropping
    /// the future loses nothing.
    pub async fn next(&self) -> Job {
        loop {
            let mut told = pin!(self.0.notify.notified());
            // Registered before looking, so that no want falls between.
            told.as_mut().enable();
            let now = Instant::now();
            let (begun, earliest) = self.with(|state| (state.begin(now), state.queue.earliest()));
            match (begun, earliest) {
                (Some(begun), earliest) => {
                    // Whoever leaves with work may have been the one to wait for that time.
                    if earliest.is_some() {
                        self.0.notify.notify_one();
                    }
                    return Job::new(self.clone(), begun);
                }
                (None, None) => told.await,
                (None, Some(at)) => {
                    // Whichever it was, time or word, look again.
                    let _ = time::timeout_at(at, told).await;
                }
            }
        }
    }

    /// Ends a pass: settles what ended, and wants again what failed or came in meanwhile.
    #[expect(clippy::needless_pass_by_value, reason = "a pass that has ended is used up, as is its outcome")]
    pub fn done(&self, mut job: Job, outcome: Outcome) {
        if let Some(begun) = job.take() {
            self.finish(&job.key, &job.wanted, &begun, &outcome);
        }
    }

    /// Whether the path from a runtime is proven; `None` for an unknown Kyma.
    #[must_use]
    pub fn path(&self, key: &KymaKey, now: Instant) -> Option<PathState> {
        let (started, interval) = (self.0.started, self.0.settings.heartbeat);
        self.lock().runtime(key).map(|runtime| runtime.path(started, interval, now))
    }

    /// A summary of each Kyma, in no order.
    #[must_use]
    pub fn view(&self) -> Vec<View> {
        let (started, interval, now) = (self.0.started, self.0.settings.heartbeat, Instant::now());
        self.lock().view(started, interval, now)
    }

    fn finish(&self, key: &KymaKey, wanted: &Wanted, begun: &Begun, outcome: &Outcome) {
        let now = Instant::now();
        let safe = self.0.started + self.0.settings.request_deadline;
        self.0.metrics.pass(outcome);
        self.with(|state| state.finish(key, wanted, begun, outcome, safe, now));
    }

    /// One step. Somebody who waits looks again if there is something to take, or if the time to wait for is an earlier one.
    fn with<T>(&self, step: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let before = state.queue.earliest();
        let result = step(&mut state);
        let sooner = state.queue.earliest().is_some_and(|at| before.is_none_or(|before| at < before));
        let tell = sooner || state.queue.has_ready();
        self.0.metrics.queue(&state.queue);
        drop(state);
        if tell {
            self.0.notify.notify_one();
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave it half changed in a way that a later event or pass would not repair.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heartbeat_seconds(&self) -> u32 {
        u32::try_from(self.0.settings.heartbeat.as_secs()).unwrap_or(u32::MAX).max(1)
    }
}

fn rfc3339(unix_seconds: i64) -> String {
    jiff::Timestamp::from_second(unix_seconds).unwrap_or(jiff::Timestamp::UNIX_EPOCH).to_string()
}

#[cfg(test)]
mod tests;
