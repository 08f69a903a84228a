//! List and watch loop shared by all watches; each kind of watch consumes its objects through a [`Sink`].
//!
//! The loop replaces a ready-made reflector for four reasons: bookmarks must count as liveness, a silent watch must be
//! reopened, a relist must be possible on demand, and every page and every line must have a size limit.

mod absence;
mod built_in;
mod definitions;
mod discovery;
mod group;
mod object;
mod planned;
mod single;
mod supervisor;
mod target;
mod watermarks;
mod wire;

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use serde::de::DeserializeOwned;
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

pub use built_in::{BUILT_IN_KINDS, BuiltIn};
use definitions::Definitions;
pub(crate) use discovery::Discovery;
pub use discovery::ServedResource;
pub(crate) use object::Named;
pub(crate) use single::{Single, SingleObject};
pub(crate) use supervisor::{PlanState, supervise};
pub(crate) use target::Target;
pub(crate) use watermarks::Watermarks;
pub(crate) use wire::{ListProgress, Page, Reader};
#[cfg(feature = "testing")]
pub(crate) use {
    discovery::{find_resource, versions_of},
    planned::PlannedSink,
    wire::LineBuffer,
};

use crate::{
    backoff::Backoff,
    kubernetes::{ApiClient, ApiError},
    random,
    telemetry::Metrics,
};
use absence::Absence;
use object::Versioned;
use wire::{Lines, WatchEnd};

/// Number of objects per page.
const PAGE: usize = 50;
/// Maximum size of a page in bytes. If 50 objects exceed it, the page size is halved, for the rest of the list or until
/// [`GOOD_PAGES`] pages in a row did not exceed it.
const PAGE_BYTES: usize = 2 << 20;
/// Number of pages after which a halved page size is doubled. Otherwise a few large objects at the begin of a list could
/// make it last longer than the API server keeps its version.
const GOOD_PAGES: u32 = 4;
/// Range of the `timeoutSeconds` of a watch, in seconds: the server closes the watch after that time and the agent
/// reopens it.
const WATCH_SECONDS: (u64, u64) = (180, 290);
/// Longest time without a line before a watch counts as silent. API servers send a bookmark about once a minute.
const SILENCE: Duration = Duration::from_secs(100);
/// First ceiling of the backoff (full jitter) after a failed list or watch.
const BACKOFF: Duration = Duration::from_millis(500);
/// Highest ceiling of that backoff.
const BACKOFF_CAP: Duration = Duration::from_secs(30);
/// Longest `Retry-After` of an API server that is respected.
const RETRY_AFTER_CAP: Duration = Duration::from_secs(120);
/// Shortest normal duration of a watch. One that ends sooner counts as failed, since reopening it at once would be a
/// hot loop.
const MIN_WATCH_TIME: Duration = Duration::from_secs(5);
/// Longest delay before a watch is reopened that ended early but delivered lines, because more of them may follow.
const REOPEN_CAP: Duration = Duration::from_secs(1);
/// Shortest delay after a failure.
const MIN_WAIT: Duration = Duration::from_millis(50);
/// Jitter on top of a `Retry-After`, as a fraction of it: clients that received the same value return spread over this
/// part of it, and never early.
const SPREAD: u32 = 8;
/// Deadline of a whole list: API servers honour continue tokens for five to fifteen minutes.
const LIST_TIMEOUT: Duration = Duration::from_secs(900);
/// Number of consecutive unusable answers of a watch after which the loop relists, because the server may be unable to
/// serve that resourceVersion.
const UNUSABLE_LIMIT: u32 = 5;
/// Number of consecutive watches without a single line, not even a bookmark, after which the loop relists: objects may
/// have changed unobserved.
const SILENT_LIMIT: u32 = 2;

/// Consumer of one kind of watch. All calls but [`Sink::target`] and [`Sink::redefined`] are synchronous: only the loop waits. The
/// watches of the plan have the [`planned::PlannedSink`]; [`supervise`] starts their loops.
pub(crate) trait Sink {
    /// The part of an object that this watch deserializes.
    type Item: DeserializeOwned + Versioned;

    /// Collection to list and watch; resolved again before each list.
    async fn target(&mut self, client: &ApiClient) -> Result<Target, ApiError>;
    /// Starts a list; the pages of an earlier list that was aborted are void.
    fn begin(&mut self) {}
    /// Consumes one page of the list. False if no further pages are needed.
    fn page(&mut self, items: Vec<Self::Item>) -> bool {
        items.into_iter().for_each(|item| self.present(item));
        true
    }
    /// Ends the list; the watch continues from this resourceVersion.
    fn complete(&mut self, _version: &str) {}
    /// Consumes an added or modified object.
    fn present(&mut self, item: Self::Item);
    /// Consumes an object that was deleted or has left the selection.
    fn gone(&mut self, item: Self::Item);
    /// Consumes a bookmark: all changes up to this resourceVersion have been delivered.
    fn bookmark(&mut self, _version: &str) {}
    /// Reports that the list or the watch failed; it will be retried.
    fn failed(&mut self, why: &ApiError);
    /// Reports that the API server does not serve the kind; it will be looked up again. Unless that is confirmed, it may
    /// be about to serve it.
    fn not_served(&mut self, _is_confirmed: bool) {}
    /// Waits until the definition of the kind changes, after the last call of [`Sink::target`].
    fn redefined(&mut self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
    /// Reports that a watch is open.
    fn opened(&mut self) {}
    /// True if a watch that ends should be followed by a list, because single objects are not tracked.
    fn needs_list(&mut self) -> bool {
        false
    }
}

/// State shared by all loops.
#[derive(Clone)]
pub(crate) struct WatchContext {
    /// Permits for reading pages: two at a time, because pages with managed fields dominate the memory of an agent.
    pub(crate) pages: Arc<Semaphore>,
    /// Permits for watch lines above 16 KiB while they are incomplete.
    pub(crate) large_lines: Arc<Semaphore>,
    /// Single permit of the loops with a timed-out last list, so that they delay only each other.
    pub(crate) slow: Arc<Semaphore>,
    /// Number of relists ordered for all watches.
    pub(crate) rebuild: watch::Receiver<u64>,
    /// Newest resourceVersion that each watch has observed.
    pub(crate) watermarks: Watermarks,
    /// Lookups of kinds.
    pub(crate) discovery: Discovery,
    /// Namespace of the agent's own objects.
    pub(crate) namespace: Arc<str>,
    /// Counters.
    pub(crate) metrics: Metrics,
}

/// One list and watch loop.
struct ListWatch<S> {
    /// Client over `Https` (both in `kubernetes::client`), which sends over a `Connection`.
    client: ApiClient,
    shared: WatchContext,
    reader: Reader<S>,
    backoff: Backoff,
    /// Backoff of watches that deliver lines and end early; kept apart from failures, because such a server is working.
    reopens: Backoff,
    /// A single object exceeded the limit of a page in the last list.
    too_large: bool,
    /// The last list timed out, e.g. because of the conversion webhook of one kind.
    slow: bool,
    /// Lookups that missed the kind.
    absence: Absence,
    /// The last watch was answered with 404. The lookup that follows finds the cause.
    missing: bool,
}

/// Lists and watches until cancelled.
pub(crate) async fn run<S: Sink>(client: ApiClient, shared: WatchContext, sink: S) {
    let reader = Reader::new(sink, shared.watermarks.register());
    let backoff = Backoff::default();
    let reopens = Backoff::default();
    let absence = Absence::default();
    let too_large = false;
    let slow = false;
    let missing = false;
    let mut watching = ListWatch { client, shared, reader, backoff, reopens, too_large, slow, absence, missing };
    let mut why = "start";
    loop {
        watching.shared.rebuild.mark_unchanged();
        watching.shared.metrics.listed(why);
        let listed = timeout(LIST_TIMEOUT, watching.list()).await;
        // A list that exceeds its deadline page by page does not use the slow permit, which is for lists with a single
        // request that hangs.
        watching.slow = matches!(listed, Ok(Err(ApiError::Deadline)));
        match listed.unwrap_or(Err(ApiError::Deadline)) {
            Ok((target, version)) => {
                watching.absence.reset();
                why = watching.watch(&target, version).await;
            }
            Err(error) => {
                why = "retry";
                watching.wait_after_list(&error).await;
            }
        }
    }
}

impl<S: Sink> ListWatch<S> {
    async fn list(&mut self) -> Result<(Target, String), ApiError> {
        let target = self.reader.sink.target(&self.client).await?;
        self.reader.sink.begin();
        let mut token = String::new();
        let mut size = if self.too_large { 1 } else { PAGE };
        let mut good = 0;
        self.too_large = false;
        loop {
            let page = match self.page(&target, &token, size).await {
                Err(ApiError::TooLarge { .. }) if size > 1 => {
                    (size, good) = (size.div_ceil(2).min(size - 1), 0);
                    continue;
                }
                page => page.inspect_err(|error| self.too_large = matches!(error, ApiError::TooLarge { .. }))?,
            };
            good += 1;
            if good == GOOD_PAGES {
                (size, good) = ((size * 2).min(PAGE), 0);
            }
            match self.reader.page(page, &token)? {
                ListProgress::Complete(version) => return Ok((target, version)),
                ListProgress::More(next) => token = next,
            }
        }
    }

    async fn page(&self, target: &Target, token: &str, size: usize) -> Result<Page<S::Item>, ApiError> {
        // The semaphore is never closed; if it were, the page would be read without a permit.
        let pages = if self.slow { &self.shared.slow } else { &self.shared.pages };
        let _permit = pages.acquire().await.ok();
        let bytes = self.client.get(&target.list(size, token), target.list_accept(), PAGE_BYTES).await?;
        Page::read(&bytes)
    }

    /// Watches until a relist is required; returns the reason, as a label for metrics.
    async fn watch(&mut self, target: &Target, mut version: String) -> &'static str {
        let mut unusable = 0;
        let mut silent = 0;
        loop {
            let begun = Instant::now();
            let mut received = false;
            let mut rebuild = self.shared.rebuild.clone();
            let ended = tokio::select! {
                ended = self.follow(target, &mut version, &mut received) => ended,
                Ok(()) = rebuild.changed() => return "rebuild",
            };
            let went_back = matches!(ended, Ok(WatchEnd::Backwards));
            let is_expected = ended.as_ref().err().is_none_or(ApiError::is_gone);
            let calm = begun.elapsed() >= MIN_WATCH_TIME && (received || is_expected);
            let wait = Wait::of(&ended, received);
            silent = match (received, calm) {
                (true, _) => u32::from(matches!(ended, Ok(WatchEnd::Silent))),
                (false, true) => silent + 1,
                (false, false) => silent,
            };
            if (calm || received) && !went_back {
                unusable = 0;
            }
            if wait == Wait::Reopen {
                self.backoff.reset();
            }
            if calm && !went_back {
                self.backoff.reset();
                self.reopens.reset();
            } else if is_expected {
                // Without this delay, a server that ends every watch early would cause a hot loop.
                let time = self.backoff_time(wait);
                self.wait(time).await;
            }
            match ended {
                Ok(WatchEnd::Reopen | WatchEnd::Silent) if silent >= SILENT_LIMIT => {
                    self.wait_after(&ApiError::Silent, Wait::Failure).await;
                    return "silent";
                }
                Ok(WatchEnd::Reopen) if self.reader.sink.needs_list() => return "coarse",
                Ok(WatchEnd::Reopen | WatchEnd::Silent) => {}
                Ok(WatchEnd::Backwards) => return "backwards",
                Err(error) if error.is_gone() => return "gone",
                Err(error) if is_temporary(&error) => self.wait_after_watch(&error, wait).await,
                Err(error) => {
                    unusable += u32::from(!received && error.was_answered());
                    let refused = error.status().is_some_and(|status| status.is_client_error());
                    self.wait_after_watch(&error, wait).await;
                    if refused {
                        // No longer served: discovery has to run again, as part of a list.
                        return "refused";
                    }
                    if unusable >= UNUSABLE_LIMIT {
                        return "useless";
                    }
                }
            }
            if self.shared.rebuild.has_changed().unwrap_or(false) {
                return "rebuild";
            }
            self.shared.metrics.reopened.inc();
        }
    }

    async fn follow(
        &mut self,
        target: &Target,
        version: &mut String,
        received: &mut bool,
    ) -> Result<WatchEnd, ApiError> {
        let (least, most) = WATCH_SECONDS;
        let seconds = least + random::below(most - least + 1);
        let body = self.client.open(&target.watch(version, seconds), target.item_accept()).await?;
        self.missing = false;
        self.reader.sink.opened();
        let mut lines = Lines::new(body, self.shared.large_lines.clone());
        loop {
            let Ok(line) = timeout(SILENCE, lines.next()).await else {
                self.shared.metrics.silent.inc();
                return Ok(WatchEnd::Silent);
            };
            let Some(line) = line? else { return Ok(WatchEnd::Reopen) };
            if let Some(end) = self.reader.line(line, version)? {
                return Ok(end);
            }
            *received = true;
        }
    }

    /// Reports why a list failed, and waits. A missing kind is no failure of its watch.
    async fn wait_after_list(&mut self, error: &ApiError) {
        match error {
            ApiError::NotServed(_) => {
                let is_confirmed = self.absence.observe();
                self.reader.not_served(is_confirmed);
                self.wait_for_kind(self.absence.delay()).await;
            }
            ApiError::Unwatchable(_) => {
                self.absence.reset();
                self.report(error);
                self.wait_for_kind(absence::spread(absence::SLOWEST)).await;
            }
            error => {
                self.absence.reset();
                self.wait_after(error, Wait::Failure).await;
            }
        }
    }

    /// Reports why a watch failed, and waits.
    async fn wait_after_watch(&mut self, error: &ApiError, wait: Wait) {
        match error.status() {
            // Usually the kind was removed, which is not an error.
            Some(StatusCode::NOT_FOUND) if !std::mem::replace(&mut self.missing, true) => {
                let time = self.backoff_time(wait);
                self.wait(time).await;
            }
            // Contradicts discovery. Another list would be followed by the same answer.
            Some(StatusCode::METHOD_NOT_ALLOWED) => {
                self.report(error);
                self.wait_for_kind(absence::spread(absence::SLOWEST)).await;
            }
            _ => self.wait_after(error, wait).await,
        }
    }

    fn report(&mut self, error: &ApiError) {
        self.reader.sink.failed(error);
        self.shared.metrics.watch_failed(error.kind());
    }

    /// Waits for a time, until the definition of the kind changes, or until a relist is ordered.
    async fn wait_for_kind(&mut self, time: Duration) {
        let mut rebuild = self.shared.rebuild.clone();
        let end = Instant::now() + time;
        // Limits the rate of lookups when a definition changes constantly.
        sleep(random::up_to(BACKOFF).max(MIN_WAIT)).await;
        tokio::select! {
            () = sleep_until(end) => {}
            () = self.reader.sink.redefined() => self.absence.redefined(),
            Ok(()) = rebuild.changed() => {}
        }
    }

    /// Reports a failure and waits: for the `Retry-After` of the server plus jitter, else for the backoff of `wait`.
    async fn wait_after(&mut self, error: &ApiError, wait: Wait) {
        self.report(error);
        match retry_after(error) {
            // An ordered relist waits for it as well.
            Some(delay) => sleep(delay).await,
            None => {
                let time = self.backoff_time(wait);
                self.wait(time).await;
            }
        }
    }

    fn backoff_time(&mut self, wait: Wait) -> Duration {
        // Full jitter may draw zero, which would be a hot loop, hence the minimum; half of the ceiling as the minimum
        // would no longer be full jitter.
        match wait {
            // Clamps the drawn delay instead of lowering the ceiling: under a low ceiling the mean delay would remain
            // half of the maximum.
            Wait::Reopen => self.reopens.fail(BACKOFF, BACKOFF_CAP).clamp(MIN_WAIT, REOPEN_CAP),
            Wait::Failure => self.backoff.fail(BACKOFF, BACKOFF_CAP).max(MIN_WAIT),
        }
    }

    /// Waits for a time, or until a relist is ordered, which does not wait for a backoff.
    async fn wait(&mut self, time: Duration) {
        let mut rebuild = self.shared.rebuild.clone();
        tokio::select! {
            () = sleep(time) => {}
            Ok(()) = rebuild.changed() => {}
        }
    }
}

/// The `Retry-After` of a response plus jitter. Zero is ignored, because it would cause a hot loop.
fn retry_after(error: &ApiError) -> Option<Duration> {
    let delay = error.retry_after().filter(|delay| !delay.is_zero())?.min(RETRY_AFTER_CAP);
    Some(delay + random::up_to(delay / SPREAD))
}

/// True for a response that does not concern the resourceVersion: denied, overloaded or failing. The watch is tried again at
/// the same version, because a list would cost such a server more; a restored etcd is detected by the canary.
fn is_temporary(error: &ApiError) -> bool {
    let Some(status) = error.status() else { return false };
    let is_denied = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
    is_denied || status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error() || error.retry_after().is_some()
}

/// Kind of a delay, which determines its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// Before reopening a watch that delivered lines and ended early.
    Reopen,
    /// After a failure.
    Failure,
}

impl Wait {
    /// Delay after a watch: the short one if it delivered lines, unless a relist comes next, which costs more than
    /// another watch.
    fn of(ended: &Result<WatchEnd, ApiError>, received: bool) -> Self {
        let lists = match ended {
            Ok(end) => *end == WatchEnd::Backwards,
            Err(error) => error.status().is_some_and(|status| status.is_client_error()),
        };
        if received && !lists { Self::Reopen } else { Self::Failure }
    }
}

#[cfg(test)]
mod tests;
