//! List and watch, as often as it takes: the loop that all watches share, with what differs between them in a [`Sink`].
//!
//! The loop is our own because bookmarks must count as signs of life, a silent watch must be opened again, a rebuild must be
//! possible from outside, and every page and line must have a limit.

mod body;
mod discovery;
mod object;
mod planned;
mod reader;
mod supervisor;
mod target;

use std::{sync::Arc, time::Duration};

use serde::de::DeserializeOwned;
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, sleep, timeout},
};

pub(crate) use body::{Buffer, Page};
pub use discovery::Served;
pub(crate) use discovery::{find, preferred_of};
pub(crate) use object::{Named, NamedMetadata, Versioned};
pub(crate) use planned::Planned;
pub(crate) use reader::{Listed, Reader};
pub(crate) use supervisor::supervise;
pub(crate) use target::Target;

use crate::{
    backoff::Backoff,
    canary::Sightings,
    kubernetes::{Call, Lane},
    random,
    telemetry::Metrics,
};
use body::Lines;
use reader::End;

/// Objects of one page.
const PAGE: usize = 50;
/// Bytes of one page. When 50 objects are larger, the page is halved.
const PAGE_BYTES: usize = 2 << 20;
/// A server closes a watch between these times, and it is opened again.
const WATCH_SECONDS: (u64, u64) = (180, 290);
/// Bookmarks come about once a minute: silence for longer means that nobody is there.
const SILENCE: Duration = Duration::from_secs(100);
const BACKOFF: Duration = Duration::from_millis(500);
const BACKOFF_CAP: Duration = Duration::from_secs(30);
/// An API server that tells us to wait is obeyed up to here.
const TOLD_CAP: Duration = Duration::from_secs(120);
/// A watch that ends sooner is a failure, or it would be opened again in a hot loop.
const TOO_SHORT: Duration = Duration::from_secs(5);
/// If it had something to say it is opened again after this time at most: there may be more of it.
const NEWS_CAP: Duration = Duration::from_secs(1);
/// The least that is waited after a failure.
const LEAST: Duration = Duration::from_millis(50);
/// Those who were told the same wait come back spread over this part of it, and never before.
const SPREAD: u32 = 8;
/// For a whole list: what its pages go on from is kept by API servers for five to fifteen minutes.
const LIST: Duration = Duration::from_secs(900);
/// A server that answers so often in a row, but not with anything of use, is asked for a list: perhaps this version is what it
/// cannot serve.
const USELESS: u32 = 5;
/// After so many watches in a row that ended without a word, not even a bookmark, it is asked for a list too: what it says nothing of
/// may have changed all the same.
const MUTE: u32 = 2;

/// What a kind of watch does with what it is told. Every call is synchronous: the loop alone waits.
pub(crate) trait Sink {
    /// An object as far as this watch reads it.
    type Item: DeserializeOwned + Versioned;

    /// What to list and watch, found out anew before each list.
    async fn target(&mut self, lane: &Lane) -> Result<Target, Call>;
    /// A list begins; what an earlier one that broke off has told counts for nothing.
    fn begin(&mut self);
    /// A page of the list. False if no further pages are wanted.
    fn page(&mut self, items: Vec<Self::Item>) -> bool;
    /// All pages were told; the watch goes on from this resource version.
    fn complete(&mut self, version: &str);
    /// An object is there.
    fn present(&mut self, item: Self::Item);
    /// An object left.
    fn gone(&mut self, item: Self::Item);
    /// A bookmark: nothing changed up to this resource version.
    fn bookmark(&mut self, version: &str);
    /// The list or the watch does not work; it will be tried again.
    fn failed(&mut self, why: &Call);
    /// A watch is open.
    fn opened(&mut self) {}
}

/// What all loops share.
#[derive(Clone)]
pub(crate) struct Shared {
    /// Permits for pages: two at a time, because a page with managed fields is what costs an agent its memory.
    pub(crate) pages: Arc<Semaphore>,
    /// The one permit of those whose last list hung, so that they keep none but each other waiting.
    pub(crate) slow: Arc<Semaphore>,
    /// Counts the rebuilds of all watches that were ordered.
    pub(crate) rebuild: watch::Receiver<u64>,
    /// How far each watch has seen.
    pub(crate) sightings: Sightings,
    /// Namespace of the agent's own objects.
    pub(crate) namespace: Arc<str>,
    /// Counters.
    pub(crate) metrics: Metrics,
}

/// One list and watch loop.
struct Loop<S> {
    lane: Lane,
    shared: Shared,
    reader: Reader<S>,
    backoff: Backoff,
    /// Of watches that had something to say and ended at once: a server of which that is so is no failing one.
    news: Backoff,
    page: usize,
    /// The API server let the last list hang: one kind's conversion webhook is enough.
    slow: bool,
}

/// Lists and watches for ever.
pub(crate) async fn run<S: Sink>(lane: Lane, shared: Shared, sink: S) {
    let reader = Reader::new(sink, shared.sightings.enter());
    let [backoff, news] = [(); 2].map(|()| Backoff::new(BACKOFF));
    let mut watching = Loop { lane, shared, reader, backoff, news, page: PAGE, slow: false };
    let mut why = "start";
    loop {
        watching.shared.rebuild.mark_unchanged();
        watching.shared.metrics.listed(why);
        let listed = timeout(LIST, watching.list()).await;
        // One that was long, but never hung, is no reason to wait for those who do.
        watching.slow = matches!(listed, Ok(Err(Call::Deadline)));
        match listed.unwrap_or(Err(Call::Deadline)) {
            Ok((target, version)) => why = watching.watch(&target, version).await,
            Err(error) => {
                why = "retry";
                watching.wait_after(&error, Wait::Failure).await;
            }
        }
    }
}

impl<S: Sink> Loop<S> {
    async fn list(&mut self) -> Result<(Target, String), Call> {
        let target = self.reader.sink.target(&self.lane).await?;
        self.reader.begin();
        let mut token = String::new();
        loop {
            let page = match self.page(&target, &token).await {
                Err(Call::TooLarge { .. }) if self.page > 1 => {
                    self.page = self.page.div_ceil(2).min(self.page - 1);
                    continue;
                }
                page => page?,
            };
            match self.reader.page(page, &token)? {
                Listed::Whole(version) => return Ok((target, version)),
                Listed::Part(next) => token = next,
            }
        }
    }

    async fn page(&self, target: &Target, token: &str) -> Result<Page<S::Item>, Call> {
        // Nobody closes the semaphore; without a permit the page is read all the same.
        let pages = if self.slow { &self.shared.slow } else { &self.shared.pages };
        let _permit = pages.acquire().await.ok();
        let bytes = self.lane.get(&target.list(self.page, token), target.list_accept(), PAGE_BYTES).await?;
        Page::read(&bytes)
    }

    /// Watches until only a list helps; says why.
    async fn watch(&mut self, target: &Target, mut version: String) -> &'static str {
        let (mut useless, mut mute) = (0, 0);
        loop {
            let begun = Instant::now();
            let mut heard = false;
            let mut rebuild = self.shared.rebuild.clone();
            let ended = tokio::select! {
                ended = self.follow(target, &mut version, &mut heard) => ended,
                Ok(()) = rebuild.changed() => return "rebuild",
            };
            let went_back = matches!(ended, Ok(End::Backwards));
            let calm = begun.elapsed() >= TOO_SHORT && (heard || ended.is_ok());
            let wait = Wait::of(&ended, heard);
            mute = match (heard, calm) {
                (true, _) => u32::from(matches!(ended, Ok(End::Silent))),
                (false, true) => mute + 1,
                (false, false) => mute,
            };
            if (calm || heard) && !went_back {
                useless = 0;
            }
            if wait == Wait::News {
                self.backoff.reset();
            }
            if calm && !went_back {
                self.backoff.reset();
                self.news.reset();
            } else if ended.as_ref().err().is_none_or(Call::is_gone) {
                // To try again at once could go on like this for ever.
                let time = self.backoff_time(wait);
                self.wait(time).await;
            }
            match ended {
                Ok(End::Reopen | End::Silent) if mute >= MUTE => {
                    self.wait_after(&Call::Silent, Wait::Failure).await;
                    return "silent";
                }
                Ok(End::Reopen | End::Silent) => {}
                Ok(End::Gone) => return "gone",
                Ok(End::Backwards) => return "backwards",
                Err(error) if error.is_gone() => return "gone",
                Err(error) => {
                    useless += u32::from(!heard && error.was_answered());
                    let refused = error.status().is_some_and(|status| status.is_client_error());
                    self.wait_after(&error, wait).await;
                    if refused && error.retry_after().is_none() {
                        // Forbidden or no longer served: what may be watched has to be found out again.
                        return "refused";
                    }
                    if useless >= USELESS {
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

    async fn follow(&mut self, target: &Target, version: &mut String, heard: &mut bool) -> Result<End, Call> {
        let (least, most) = WATCH_SECONDS;
        let seconds = least + random::below(most - least + 1);
        let body = self.lane.open(&target.watch(version, seconds), target.item_accept()).await?;
        self.reader.sink.opened();
        let mut lines = Lines::new(body);
        loop {
            let Ok(line) = timeout(SILENCE, lines.next()).await else {
                self.shared.metrics.silent.inc();
                return Ok(End::Silent);
            };
            let Some(line) = line? else { return Ok(End::Reopen) };
            if let Some(end) = self.reader.line(line, version)? {
                return Ok(end);
            }
            *heard = true;
        }
    }

    /// `wait` is for when nobody said how long.
    async fn wait_after(&mut self, error: &Call, wait: Wait) {
        self.reader.sink.failed(error);
        self.shared.metrics.watch_failed(error);
        // At once, again and again, would be a hot loop.
        let told = error.retry_after().filter(|told| !told.is_zero()).map(|told| told.min(TOLD_CAP));
        let time = told.map_or_else(|| self.backoff_time(wait), |told| told + random::up_to(told / SPREAD));
        self.wait(time).await;
    }

    fn backoff_time(&mut self, wait: Wait) -> Duration {
        // Half of the ceiling at least would be no full jitter, but nothing at all would be a hot loop.
        match wait {
            // The cap is not that of the ceiling: drawn below a low one, a wait would be half of what it may be, for ever.
            Wait::News => self.news.fail(BACKOFF_CAP).clamp(LEAST, NEWS_CAP),
            Wait::Failure => self.backoff.fail(BACKOFF_CAP).max(LEAST),
        }
    }

    /// A rebuild does not wait for a backoff.
    async fn wait(&mut self, time: Duration) {
        let mut rebuild = self.shared.rebuild.clone();
        tokio::select! {
            () = sleep(time) => {}
            Ok(()) = rebuild.changed() => {}
        }
    }
}

/// What is waited for, and so for how long at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// The next words of a watch that had something to say and ended.
    News,
    /// Better times.
    Failure,
}

impl Wait {
    /// After a watch: for news if there were some, unless a list comes next, which costs more than another watch.
    fn of(ended: &Result<End, Call>, heard: bool) -> Self {
        let lists = match ended {
            Ok(end) => matches!(end, End::Gone | End::Backwards),
            Err(error) => error.status().is_some_and(|status| status.is_client_error()),
        };
        if heard && !lists { Self::News } else { Self::Failure }
    }
}

#[cfg(test)]
mod tests;
