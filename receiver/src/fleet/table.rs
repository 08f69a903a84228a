//! Fleet and queue in one lock: an event is recorded and its work wanted in one step, and a pass takes what is wanted together with a
//! snapshot of what is accepted.
//!
//! Everything here is in memory and answers at once; only [`Hub::next`] waits.

mod follower;
mod forward;
mod job;
mod metrics;
mod pace;
mod stamps;
mod state;
mod traces;
mod trust;
mod view;

use std::{
    hash::{BuildHasher as _, RandomState},
    io,
    path::Path,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use rustls_pki_types::CertificateDer;
use thiserror::Error;
use tidewatch_shared::{
    certificate::KeyId,
    event,
    exchange::{EventsResponse, HeartbeatResponse},
    heartbeat::Heartbeat,
    identity::{Epoch, Instance, RuntimeId},
    plan::{Plan, Work},
};
use tokio::{sync::Notify, time, time::Instant};

pub use follower::Follower;
pub use job::Job;
pub use metrics::Metrics;
pub use pace::Interval;
pub use trust::Told;
pub(crate) use view::Stand;
pub use view::View;

use crate::{
    base::key::KymaKey,
    fleet::{
        self, Inherited, PathState, Runtime,
        queue::{Drift, Later, Outcome, Priority, Wanted, Works},
    },
};
use job::Begun;
use pace::Pace;
use stamps::Stamps;
use state::{Heard, State};

/// What the installer made, as if nobody knew anything.
const REPAIR: Wanted = Wanted { works: Works::INSTALLER, priority: Priority::Catalog, drift: Drift::All };
/// Everything, as if nobody knew anything.
const VERIFICATION: Wanted = Wanted { works: Works::RUNTIME, priority: Priority::Verification, drift: Drift::All };

/// How the hub is set.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The wanted heartbeat interval; answers say it in whole seconds.
    pub heartbeat: Duration,
    /// Heartbeats of all runtimes in one second, at most: the interval grows with their number, up to an hour.
    pub max_heartbeats_per_second: u32,
    /// A runtime that says nothing for so long, and cannot be reached either, is called away.
    pub away_after: Duration,
    /// One request to a runtime or to KCP takes no longer: what a dead predecessor began has landed by then.
    pub request_deadline: Duration,
    /// How many workers call [`Hub::next`]; a quarter of them serves runtimes that could not be reached.
    pub slots: usize,
    /// Any number; jitter is drawn from it. Not for secrets.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        let Pace { heartbeat, per_second, away_after } = Pace::default();
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

/// What comes beside the events of one request.
#[derive(Debug, Default)]
pub struct Beside<'a> {
    /// The certificate that the runtime showed. Without one nothing goes to other managers: they must be told who speaks.
    pub leaf: Option<&'a CertificateDer<'static>>,
    /// The `traceparent` of the request, as far as traces are exported.
    pub traceparent: Option<String>,
}

/// Who is alive, what is accepted and settled, and who is worked on next. Clones share one state.
#[derive(Clone)]
pub struct Hub(Arc<Inner>);

struct Inner {
    instance: Instance,
    settings: Settings,
    started: Instant,
    metrics: Metrics,
    interval: Interval,
    notify: Notify,
    forward: forward::Notes,
    state: Mutex<State>,
}

impl Hub {
    /// Makes an empty hub; `started` is when this process began.
    #[must_use]
    pub fn new(instance: Instance, settings: Settings, metrics: Metrics, started: Instant) -> Self {
        let mut state = State::new(settings.slots, settings.seed);
        let Settings { heartbeat, max_heartbeats_per_second: per_second, away_after, .. } = settings;
        state.pace = Pace { heartbeat, per_second, away_after };
        let interval = Interval::default();
        interval.set(state.interval());
        let (notify, state) = (Notify::new(), Mutex::new(state));
        let forward = forward::Notes::default();
        Self(Arc::new(Inner { instance, settings, started, metrics, interval, notify, forward, state }))
    }

    /// Says which runtime a Kyma is and which plan that runtime has: a new Kyma, or a change of either. Another runtime id forgets
    /// what was known of the one before. Wants nothing by itself but what a new plan leaves unsettled.
    pub fn place(&self, key: KymaKey, runtime: Option<RuntimeId>, plan: Arc<Plan>) {
        let now = Instant::now();
        self.with(|state| state.place(key, runtime, plan, now));
    }

    /// Forgets a Kyma.
    pub fn remove(&self, key: &KymaKey) {
        self.with(|state| {
            state.remove(key);
            self.tell_targets(state);
        });
    }

    /// Wants works of a Kyma because of something in KCP. An unknown Kyma is ignored.
    pub fn want(&self, key: &KymaKey, works: Works, priority: Priority) {
        let now = Instant::now();
        self.with(|state| state.queue.want(key, Wanted::new(works, priority), now));
    }

    /// Wants a Kyma reconciled and everything that we wrote to its runtime compared with what is there, as verification. An unknown
    /// Kyma is ignored.
    pub fn verify(&self, key: &KymaKey) {
        let now = Instant::now();
        self.with(|state| state.queue.want(key, VERIFICATION, now));
    }

    /// Wants what was installed in a runtime compared with what is there. An unknown Kyma is ignored.
    pub fn repair(&self, key: &KymaKey) {
        let now = Instant::now();
        self.with(|state| state.queue.want(key, REPAIR, now));
    }

    /// A runtime let go of its last connection, or lost it, or missed a heartbeat over one: nothing came over it since then.
    pub fn closed(&self, runtime: &RuntimeId, since: Instant) {
        self.lock().closed(runtime, since);
    }

    /// Those over whose connection nothing came for so long and who were not heard of since; each is told once for each end.
    #[must_use]
    pub fn lost(&self, after: Duration) -> Vec<KymaKey> {
        let now = Instant::now();
        self.lock().lost(after, now)
    }

    /// Those whose agents said since they were told before that they miss something of their own: a Lease or a Secret. Each is told
    /// again no sooner than after `again`.
    #[must_use]
    pub fn incomplete(&self, again: Duration) -> Vec<KymaKey> {
        let now = Instant::now();
        self.lock().incomplete(again, now)
    }

    /// As [`Self::verify`], at a random time within `spread`.
    pub fn verify_within(&self, key: &KymaKey, spread: Duration) {
        let now = Instant::now();
        self.with(|state| {
            let at = now + state.queue.jitter(spread);
            state.queue.want_later(key, Later::Spread, at, VERIFICATION, now);
        });
    }

    /// Wants at once all that was paused, each at its own priority.
    pub fn unpause(&self) {
        let now = Instant::now();
        self.with(|state| state.queue.unpark_all(now));
    }

    /// Continues the path of a runtime as its condition `EventPath` in KCP tells it, until something is heard of it. Only what a new
    /// process cannot see at once is continued; that the agent has spoken contract v3 stays.
    pub fn inherit(&self, key: &KymaKey, reason: &str, message: &str) {
        let (inherited, spoke_v3) = (Inherited::of(reason), fleet::has_spoken_v3(reason, message));
        if inherited.is_some() || spoke_v3 {
            self.with(|state| state.inherit(key, inherited, spoke_v3));
        }
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
    ) -> Result<EventsResponse, Unplaced> {
        self.events_with(runtime, epoch, created, events, Beside::default())
    }

    /// The same with what came beside the events.
    ///
    /// # Errors
    /// [`Unplaced`]; then nothing was recorded.
    pub fn events_with(
        &self,
        runtime: &RuntimeId,
        epoch: Epoch,
        created: i64,
        events: Vec<event::Received>,
        beside: Beside<'_>,
    ) -> Result<EventsResponse, Unplaced> {
        let now = Instant::now();
        // One of each request will do.
        let seen = events.iter().flatten().next().and_then(|event| event.time.as_deref()?.parse::<Timestamp>().ok());
        let Beside { leaf, traceparent } = beside;
        let taken = self.with(|state| {
            let taken = state.events(runtime, epoch, created, events, leaf, now)?;
            if let (Some(traceparent), Some((key, _))) = (traceparent, &taken.received) {
                state.traces.add(key, traceparent);
            }
            self.tell_forwarded(state, &taken.forwarded);
            Ok(taken)
        });
        let taken = taken.inspect_err(|unplaced| self.0.metrics.unplaced(*unplaced))?;
        log_received(taken.received);
        let recorded = taken.recorded;
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

    /// Takes a verified heartbeat. `created` (unix seconds) is that of the request's signature, `now_unix` the time of this process.
    ///
    /// # Errors
    /// [`Unplaced`]; then nothing was taken.
    pub fn heartbeat(
        &self,
        runtime: &RuntimeId,
        created: i64,
        heartbeat: Heartbeat,
        now_unix: i64,
    ) -> Result<HeartbeatResponse, Unplaced> {
        self.heartbeat_with(runtime, created, heartbeat, None, now_unix)
    }

    /// The same with the key that signed the certificate which the runtime showed.
    ///
    /// # Errors
    /// [`Unplaced`]; then nothing was taken.
    #[expect(clippy::needless_pass_by_value, reason = "a heartbeat that was taken is used up")]
    pub fn heartbeat_with(
        &self,
        runtime: &RuntimeId,
        created: i64,
        heartbeat: Heartbeat,
        authority: Option<&KeyId>,
        now_unix: i64,
    ) -> Result<HeartbeatResponse, Unplaced> {
        let now = Instant::now();
        let heard = self.with(|state| state.heartbeat(runtime, created, &heartbeat, authority, now));
        let heard = heard.inspect_err(|unplaced| self.0.metrics.unplaced(*unplaced))?;
        let Heard { beat, plan_revision, trust_revision, renew } = heard;
        self.0.metrics.renewal_asked(renew);
        self.0.metrics.heartbeat(&beat);
        if beat.differing > 0 {
            let (differing, asked) = (beat.differing, &beat.resend);
            tracing::warn!(%runtime, differing, ?asked, "Digests of watches do not agree");
        }
        Ok(HeartbeatResponse {
            instance: self.0.instance,
            settled: beat.settled,
            since: Some(beat.since),
            heartbeat_seconds: self.heartbeat_seconds(),
            plan_revision: Some(plan_revision),
            trust_revision,
            server_time: rfc3339(now_unix),
            resend: beat.resend,
            renew,
        })
    }

    /// Takes an event in contract v2: something happened in that runtime, nobody says what. Wants all its work, in the same step.
    ///
    /// # Errors
    /// [`Unplaced`]; then nothing was taken.
    pub fn legacy_event(&self, runtime: &RuntimeId) -> Result<(), Unplaced> {
        let now = Instant::now();
        let taken = self.with(|state| state.legacy_event(runtime, now));
        let received = taken.inspect_err(|unplaced| self.0.metrics.unplaced(*unplaced))?;
        log_received(Some(received));
        Ok(())
    }

    /// The one Kyma of a runtime.
    ///
    /// # Errors
    /// [`Unplaced`].
    pub fn placed(&self, runtime: &RuntimeId) -> Result<KymaKey, Unplaced> {
        self.lock().key_of(runtime)
    }

    /// Whether no Kyma has that runtime id, for certain.
    #[must_use]
    pub fn is_unknown(&self, runtime: &RuntimeId) -> bool {
        self.placed(runtime) == Err(Unplaced::Unknown)
    }

    /// From now on heartbeats are told this of roots and certificates.
    pub fn tell_trust(&self, told: Told) {
        self.lock().trust.tell(told);
    }

    /// What is known of the identity of each runtime that is served, in no order.
    #[must_use]
    pub fn followers(&self) -> Vec<Follower> {
        self.lock().followers(self.0.started, Instant::now())
    }

    /// How the path of each runtime that is served stands, in no order.
    #[must_use]
    pub(crate) fn stands(&self) -> Vec<Stand> {
        self.lock().stands(self.0.started, Instant::now())
    }

    /// Wants works of every Kyma, about so many Kymas a second.
    pub fn want_all(&self, works: Works, priority: Priority, per_second: u32) {
        let now = Instant::now();
        self.with(|state| state.want_all(works, priority, per_second, now));
    }

    /// Wants works of these Kymas because of something in KCP, so many Kymas a second, in turn: those who wait for their turn
    /// already keep it. Unknown Kymas are ignored.
    pub fn want_paced(&self, keys: Vec<KymaKey>, works: Works, per_second: u32) {
        if !keys.is_empty() {
            let now = Instant::now();
            self.with(|state| state.want_paced(keys, works, per_second, now));
        }
    }

    /// Wants a Kyma reconciled after a time, because a version is rolled out. Of several the soonest counts.
    pub fn roll_out(&self, key: &KymaKey, after: Duration) {
        let now = Instant::now();
        let wanted = Wanted::new(Works::of(&[Work::Kyma]), Priority::Catalog);
        self.with(|state| state.queue.want_later(key, Later::RollOut, now + after, wanted, now));
    }

    /// Whether this process took a request in contract v3 of this runtime, or its Kyma tells that an earlier one did.
    #[must_use]
    pub fn speaks_v3(&self, runtime: &RuntimeId) -> bool {
        self.lock().speaks_v3(runtime)
    }

    /// The same of a Kyma's runtime.
    #[must_use]
    pub fn has_spoken_v3(&self, key: &KymaKey) -> bool {
        self.lock().runtime(key).is_some_and(Runtime::speaks_v3)
    }

    /// The heartbeat interval that agents are told now: it follows the number of runtimes.
    #[must_use]
    pub fn heartbeat_interval(&self) -> Interval {
        self.0.interval.clone()
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
        let state = self.lock();
        let terms = state.terms(self.0.started);
        state.runtime(key).map(|runtime| runtime.path(terms, now))
    }

    /// Kymas whose path is not as when this was last asked; all of them the first time. Metrics that move with the time alone are
    /// brought up to date with it. For one caller, about once a second.
    #[must_use]
    pub fn moved_paths(&self) -> Vec<(KymaKey, PathState)> {
        let (started, now) = (self.0.started, Instant::now());
        let mut sum = metrics::Sum::default();
        let mut state = self.lock();
        let moved = state.moved_paths(started, now, &mut sum);
        self.0.metrics.aged(&state.queue, now);
        drop(state);
        self.0.metrics.summed(&sum);
        moved
    }

    /// A summary of each Kyma, in no order.
    #[must_use]
    pub fn view(&self) -> Vec<View> {
        self.lock().view(self.0.started, Instant::now())
    }

    fn finish(&self, key: &KymaKey, wanted: &Wanted, begun: &Begun, outcome: &Outcome) {
        let now = Instant::now();
        let safe = self.0.started + self.0.settings.request_deadline;
        self.0.metrics.pass(outcome);
        let accepted = self.with(|state| state.finish(key, wanted, begun, outcome, safe, now));
        if let Some(accepted) = accepted {
            self.0.metrics.settled(now.saturating_duration_since(accepted));
        }
    }

    /// One step. Somebody who waits looks again if there is something to take, or if the time to wait for is an earlier one.
    fn with<T>(&self, step: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let before = state.queue.earliest();
        let result = step(&mut state);
        let sooner = state.queue.earliest().is_some_and(|at| before.is_none_or(|before| at < before));
        let tell = sooner || state.queue.has_ready();
        self.0.metrics.queue(&state.queue);
        self.0.interval.set(state.interval());
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
        u32::try_from(self.0.interval.get().as_secs()).unwrap_or(u32::MAX).max(1)
    }
}

/// The incumbent's line for an event, which dashboards and people look for. At most one at this level for each pass: what joins a
/// Kyma that is wanted already is told to those who look closer.
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
