//! What lists and watches say, read with limits and without keeping what is not of use.

use http::StatusCode;
use http_body_util::BodyExt;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::object::VERSION;
use crate::kubernetes::{Body, Call};

/// Bytes of one line of a watch: an object is at most 1.5 MiB in etcd, and its managed fields are part of that.
const LINE_BYTES: usize = 2 << 20;
/// A buffer that a large line has grown is given back.
const KEPT_BYTES: usize = 16 << 10;

/// A page of a list.
#[derive(Debug, Deserialize)]
pub(crate) struct Page<T> {
    pub(super) metadata: PageMeta,
    #[serde(default = "Vec::new", deserialize_with = "null_is_empty", bound(deserialize = "T: Deserialize<'de>"))]
    pub(super) items: Vec<T>,
}

/// Some servers write `null` for no items.
fn null_is_empty<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    Option::<Vec<T>>::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[derive(Debug, Deserialize)]
pub(super) struct PageMeta {
    #[serde(rename = "resourceVersion", default)]
    pub(super) version: String,
    #[serde(rename = "continue", default)]
    pub(super) token: String,
}

impl<T: DeserializeOwned> Page<T> {
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, Call> {
        serde_json::from_slice(bytes).map_err(Call::Parse)
    }
}

impl PageMeta {
    /// Where a watch goes on. Without one it would begin anywhere.
    pub(super) fn version(&self) -> Result<&str, Call> {
        let missing = || Call::Parse(serde::de::Error::custom("a list without a resource version, or with a long one"));
        (1..=VERSION).contains(&self.version.len()).then_some(&*self.version).ok_or_else(missing)
    }
}

/// What a line of a watch is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Present,
    Gone,
    Bookmark,
    Error,
}

/// A line of a watch; its object is read when it is known what it is.
#[derive(Debug, Deserialize)]
pub(super) struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// The part of a `Status` that decides.
#[derive(Debug, Deserialize)]
pub(super) struct Status {
    #[serde(default)]
    pub(super) code: u16,
}

impl From<Status> for Call {
    fn from(status: Status) -> Self {
        let status = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self::Status { status, retry_after: None }
    }
}

impl<'a> Line<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, Call> {
        serde_json::from_slice(bytes).map_err(Call::Parse)
    }

    pub(super) fn kind(&self) -> Result<Kind, Call> {
        match self.kind {
            "ADDED" | "MODIFIED" => Ok(Kind::Present),
            "DELETED" => Ok(Kind::Gone),
            "BOOKMARK" => Ok(Kind::Bookmark),
            "ERROR" => Ok(Kind::Error),
            _ => Err(Call::Parse(serde::de::Error::custom("a watch event of an unknown type"))),
        }
    }

    pub(super) fn item<T: DeserializeOwned>(&self) -> Result<T, Call> {
        serde_json::from_str(self.object.get()).map_err(Call::Parse)
    }

    pub(super) fn status(&self) -> Result<Status, Call> {
        self.item()
    }

    /// The object's resource version; nothing else of it is read.
    pub(super) fn version(&self) -> Result<&str, Call> {
        #[derive(Deserialize)]
        struct Versioned<'a> {
            #[serde(borrow)]
            metadata: Meta<'a>,
        }
        #[derive(Deserialize)]
        struct Meta<'a> {
            #[serde(rename = "resourceVersion")]
            version: &'a str,
        }
        let object: Versioned<'_> = serde_json::from_str(self.object.get()).map_err(Call::Parse)?;
        Ok(object.metadata.version)
    }
}

/// The lines of a body.
pub(super) struct Lines {
    body: Body,
    buffer: Buffer,
}

/// Bytes as they come, and the lines in them.
#[derive(Default)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    /// What was given out already.
    consumed: usize,
    /// Up to here there is no end of another line.
    scanned: usize,
}

impl Lines {
    pub(super) const fn new(body: Body) -> Self {
        Self { body, buffer: Buffer::new() }
    }

    /// The next line without its end; `None` at the end of the body. A last line without an end is half a line.
    pub(super) async fn next(&mut self) -> Result<Option<&[u8]>, Call> {
        while !self.buffer.has_line() {
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            let Ok(data) = frame.map_err(Call::Body)?.into_data() else { continue };
            self.buffer.push(&data)?;
        }
        Ok(self.buffer.line())
    }
}

impl Buffer {
    pub(crate) const fn new() -> Self {
        Self { bytes: Vec::new(), consumed: 0, scanned: 0 }
    }

    /// More bytes. They are refused when what they would be a part of may be no line any more.
    pub(crate) fn push(&mut self, data: &[u8]) -> Result<(), Call> {
        if self.bytes.len() + data.len() > LINE_BYTES {
            return Err(Call::TooLarge { limit: LINE_BYTES });
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }

    /// Takes the next line, without its end; `None` when there is none that has one.
    pub(crate) fn line(&mut self) -> Option<&[u8]> {
        if !self.has_line() {
            return None;
        }
        let (start, end) = (self.consumed, self.scanned);
        (self.consumed, self.scanned) = (end + 1, end + 1);
        Some(&self.bytes[start..end])
    }

    /// Nothing that was given out is held while more is waited for.
    fn has_line(&mut self) -> bool {
        let end = self.bytes[self.scanned..].iter().position(|byte| *byte == b'\n');
        self.scanned = end.map_or(self.bytes.len(), |end| self.scanned + end);
        if end.is_none() {
            self.drop_consumed();
        }
        end.is_some()
    }

    /// Many lines may come in one frame: what was given out is dropped once for all of them.
    fn drop_consumed(&mut self) {
        self.bytes.drain(..self.consumed);
        self.scanned -= self.consumed;
        self.consumed = 0;
        if self.bytes.is_empty() && self.bytes.capacity() > KEPT_BYTES {
            self.bytes = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::Full;

    use super::*;

    fn body(bytes: impl Into<Bytes>) -> Body {
        Full::from(bytes.into()).map_err(Into::into).boxed_unsync()
    }

    #[tokio::test]
    async fn lines_end_where_they_end_and_not_where_frames_do() {
        let mut lines = Lines::new(body("{\"a\":1}\n\n{}\nhalf"));
        assert_eq!(lines.next().await.unwrap().unwrap(), b"{\"a\":1}");
        assert_eq!(lines.next().await.unwrap().unwrap(), b"");
        assert_eq!(lines.next().await.unwrap().unwrap(), b"{}");
        assert!(lines.next().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_line_has_a_limit() {
        let mut lines = Lines::new(body(vec![b'x'; LINE_BYTES + 1]));
        assert!(matches!(lines.next().await, Err(Call::TooLarge { .. })));
    }

    #[test]
    fn a_page_may_have_no_items() {
        for text in [r#"{"metadata":{"resourceVersion":"7"}}"#, r#"{"metadata":{"resourceVersion":"7"},"items":null}"#]
        {
            let page: Page<u8> = serde_json::from_str(text).unwrap();
            assert_eq!((page.items.len(), page.metadata.version.as_str()), (0, "7"));
        }
    }
}
