//! List pages and watch lines: decoded with size limits and without retaining unused fields, and fed into a [`Sink`]. Pages
//! and lines are arguments of the [`Reader`], and its result is the next step; the reader does no IO.

use std::{fmt, marker::PhantomData, sync::Arc};

use http::StatusCode;
use http_body_util::BodyExt;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, SeqAccess, Visitor},
};
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    Sink,
    object::{Named, VERSION, Versioned},
    watermarks::Watermark,
};
use crate::kubernetes::{ApiError, Body};

/// Maximum number of objects in one page. Servers that ignore the requested number return more of them, but 2 MiB hold fewer
/// real ones; of empty ones they could hold a hundred thousand.
const ITEMS: usize = 10_000;
/// Maximum size of one watch line in bytes: an object is at most 1.5 MiB in etcd, managed fields included.
const LINE_BYTES: usize = 2 << 20;
/// Capacity in bytes above which an empty buffer is freed, after a large line has grown it.
const KEPT_BYTES: usize = 16 << 10;

/// One page of a list.
#[derive(Debug, Deserialize)]
pub(crate) struct Page<T> {
    pub(super) metadata: PageMeta,
    #[serde(default = "Vec::new", deserialize_with = "items", bound(deserialize = "T: Deserialize<'de>"))]
    pub(super) items: Vec<T>,
}

/// Reads at most [`ITEMS`] items. `null` is an empty list, because some servers encode no items so.
fn items<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct Items<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
        type Value = Vec<T>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list of objects")
        }

        fn visit_unit<E>(self) -> Result<Vec<T>, E> {
            Ok(Vec::new())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = list.next_element()? {
                if items.len() == ITEMS {
                    return Err(A::Error::custom(format_args!("page with more than {ITEMS} objects")));
                }
                items.push(item);
            }
            Ok(items)
        }
    }
    deserializer.deserialize_any(Items(PhantomData))
}

#[derive(Debug, Deserialize)]
pub(super) struct PageMeta {
    #[serde(rename = "resourceVersion", default)]
    pub(super) version: String,
    #[serde(rename = "continue", default)]
    pub(super) token: String,
}

impl<T: DeserializeOwned> Page<T> {
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, ApiError> {
        serde_json::from_slice(bytes).map_err(ApiError::Parse)
    }
}

impl PageMeta {
    /// The resourceVersion to watch from. An absent one is an error, since the watch would start at an arbitrary point.
    pub(super) fn version(&self) -> Result<&str, ApiError> {
        let missing = || {
            ApiError::Parse(serde::de::Error::custom("list without a resourceVersion, or with one that is too long"))
        };
        (1..=VERSION).contains(&self.version.len()).then_some(&*self.version).ok_or_else(missing)
    }
}

/// Type of a watch line.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum EventType {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

/// One watch line; its object is decoded once its type is known.
#[derive(Debug, Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: EventType,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// The part of a `Status` that determines the error.
#[derive(Debug, Deserialize)]
struct Status {
    #[serde(default)]
    code: u16,
}

impl From<Status> for ApiError {
    fn from(status: Status) -> Self {
        let status = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self::Status { status, retry_after: None }
    }
}

impl<'a> Line<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, ApiError> {
        serde_json::from_slice(bytes).map_err(ApiError::Parse)
    }

    fn item<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        serde_json::from_str(self.object.get()).map_err(ApiError::Parse)
    }
}

/// Splits a body into lines.
pub(super) struct Lines {
    body: Body,
    buffer: LineBuffer,
    /// Permits of all watches to buffer a line above [`KEPT_BYTES`]; API servers may send such lines to all of them at the
    /// same time.
    large: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
}

/// Bytes received so far, split into lines.
#[derive(Default)]
pub(crate) struct LineBuffer {
    bytes: Vec<u8>,
    /// Offset behind the lines already returned.
    consumed: usize,
    /// Offset up to which no further line end was found.
    scanned: usize,
}

impl Lines {
    pub(super) fn new(body: Body, large: Arc<Semaphore>) -> Self {
        Self { body, buffer: LineBuffer::default(), large, permit: None }
    }

    /// The next line without its end; `None` at the end of the body. A last line without a line end is incomplete and
    /// is dropped.
    pub(super) async fn next(&mut self) -> Result<Option<&[u8]>, ApiError> {
        while !self.buffer.has_line() {
            if self.buffer.bytes.len() <= KEPT_BYTES {
                self.permit = None;
            } else if self.permit.is_none() {
                // The semaphore is never closed; if it were, the line would be read without a permit.
                self.permit = self.large.clone().acquire_owned().await.ok();
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            let Ok(data) = frame.map_err(ApiError::Body)?.into_data() else { continue };
            self.buffer.push(&data)?;
        }
        Ok(self.buffer.line())
    }
}

impl LineBuffer {
    /// Appends bytes. [`ApiError::TooLarge`] if the buffer would exceed [`LINE_BYTES`], so that a line can no longer
    /// fit.
    pub(crate) fn push(&mut self, data: &[u8]) -> Result<(), ApiError> {
        if self.bytes.len() + data.len() > LINE_BYTES {
            return Err(ApiError::TooLarge { limit: LINE_BYTES });
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }

    /// Takes the next line without its end; `None` if no complete line is buffered.
    pub(crate) fn line(&mut self) -> Option<&[u8]> {
        if !self.has_line() {
            return None;
        }
        let start = self.consumed;
        let end = self.scanned;
        (self.consumed, self.scanned) = (end + 1, end + 1);
        Some(&self.bytes[start..end])
    }

    /// True if a complete line is buffered. If not, returned lines are freed before more bytes are awaited.
    fn has_line(&mut self) -> bool {
        let end = self.bytes[self.scanned..].iter().position(|byte| *byte == b'\n');
        self.scanned = end.map_or(self.bytes.len(), |end| self.scanned + end);
        if end.is_none() {
            self.drop_consumed();
        }
        end.is_some()
    }

    /// Frees the returned lines, once for all lines of a frame.
    fn drop_consumed(&mut self) {
        self.bytes.drain(..self.consumed);
        self.scanned -= self.consumed;
        self.consumed = 0;
        if self.bytes.is_empty() && self.bytes.capacity() > KEPT_BYTES {
            self.bytes = Vec::new();
        }
    }
}

/// Reason for the end of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchEnd {
    /// Ended normally: reopen it from the last resourceVersion.
    Reopen,
    /// No line for too long: reopen it from the last resourceVersion.
    Silent,
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
        match line.kind {
            EventType::Error => return Err(line.item::<Status>()?.into()),
            EventType::Bookmark => {
                let item: Named = line.item()?;
                if !self.advance(version, item.version())? {
                    return Ok(Some(WatchEnd::Backwards));
                }
                self.sink.bookmark(version);
            }
            kind @ (EventType::Added | EventType::Modified | EventType::Deleted) => {
                let item: S::Item = line.item()?;
                if !self.advance(version, item.version())? {
                    return Ok(Some(WatchEnd::Backwards));
                }
                match kind {
                    EventType::Deleted => self.sink.gone(item),
                    _ => self.sink.present(item),
                }
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

#[cfg(test)]
mod tests;
