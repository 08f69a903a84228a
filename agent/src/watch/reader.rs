//! Feeds list pages and watch lines into a [`Sink`]. Free of I/O: pages and lines are arguments, the next step is the
//! result.

use serde::de::Error as _;

use super::{
    Sink,
    object::{VERSION, Versioned},
    watermarks::Watermark,
    wire::{EventType, Line, Page, Status},
};
use crate::kubernetes::ApiError;

/// Reason for the end of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchEnd {
    /// Ended normally: reopen it from the last resourceVersion.
    Reopen,
    /// No line for too long: reopen it from the last resourceVersion.
    Silent,
    /// The resourceVersion has expired (410 Gone): relist.
    Expired,
    /// resourceVersions decreased, so the observed state belongs to a discarded history (e.g. of a restored etcd):
    /// relist.
    Backwards,
}

/// Progress of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListProgress {
    /// Complete; the watch continues from this resourceVersion.
    Complete(String),
    /// More pages follow; this is the continue token.
    More(String),
}

/// Sink of one watch, with the newest resourceVersion it has observed.
pub(crate) struct Reader<S> {
    pub(crate) sink: S,
    watermark: Watermark,
}

impl<S: Sink> Reader<S> {
    pub(crate) const fn new(sink: S, watermark: Watermark) -> Self {
        Self { sink, watermark }
    }

    /// The API server does not serve the kind; see [`Sink::not_served`].
    pub(super) fn not_served(&mut self, is_confirmed: bool) {
        if is_confirmed {
            self.watermark.forget();
        }
        self.sink.not_served(is_confirmed);
    }

    /// Processes a page of a list; `token` is the continue token it was requested with, empty for the first page.
    pub(crate) fn page(&mut self, page: Page<S::Item>, token: &str) -> Result<ListProgress, ApiError> {
        let version = page.metadata.version()?;
        let more = self.sink.page(page.items);
        if !more || page.metadata.token.is_empty() {
            self.watermark.listed(version);
            self.sink.complete(version);
            return Ok(ListProgress::Complete(page.metadata.version));
        }
        if page.metadata.token == token {
            return Err(ApiError::Parse(serde_json::Error::custom("list repeats its continue token")));
        }
        Ok(ListProgress::More(page.metadata.token))
    }

    /// Processes a watch line; `Some` if it ends the watch. The resourceVersion advances only once the line has been
    /// decoded, so that an undecodable line is requested again.
    pub(crate) fn line(&mut self, line: &[u8], version: &mut String) -> Result<Option<WatchEnd>, ApiError> {
        let line = Line::read(line)?;
        match line.kind()? {
            EventType::Error => {
                let status: Status = line.item()?;
                return match status.code {
                    410 => Ok(Some(WatchEnd::Expired)),
                    _ => Err(status.into()),
                };
            }
            EventType::Bookmark => {
                if !self.advance(version, line.version()?)? {
                    return Ok(Some(WatchEnd::Backwards));
                }
                self.sink.bookmark(version);
            }
            kind @ (EventType::Present | EventType::Deleted) => {
                let item: S::Item = line.item()?;
                if !self.advance(version, item.version())? {
                    return Ok(Some(WatchEnd::Backwards));
                }
                if kind == EventType::Present { self.sink.present(item) } else { self.sink.gone(item) }
            }
        }
        Ok(None)
    }

    /// Advances the resourceVersion; false if it decreased. Versions that are not numbers are not compared.
    fn advance(&self, version: &mut String, next: &str) -> Result<bool, ApiError> {
        if next.is_empty() || next.len() > VERSION {
            let unfit = "object without a resourceVersion, or with one that is too long";
            return Err(ApiError::Parse(serde_json::Error::custom(unfit)));
        }
        if let (Ok(old), Ok(new)) = (version.parse::<u64>(), next.parse::<u64>())
            && new < old
        {
            return Ok(false);
        }
        version.clear();
        version.push_str(next);
        self.watermark.seen(next);
        Ok(true)
    }
}
