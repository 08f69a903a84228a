//! Decoding of list pages and watch lines, with size limits and without retaining unused fields.

use std::{fmt, marker::PhantomData, sync::Arc};

use http::StatusCode;
use http_body_util::BodyExt;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, SeqAccess, Visitor},
};
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::object::VERSION;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventType {
    Present,
    Deleted,
    Bookmark,
    Error,
}

/// One watch line; its object is decoded once its type is known.
#[derive(Debug, Deserialize)]
pub(super) struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// The part of a `Status` that determines the error.
#[derive(Debug, Deserialize)]
pub(super) struct Status {
    #[serde(default)]
    pub(super) code: u16,
}

impl From<Status> for ApiError {
    fn from(status: Status) -> Self {
        let status = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self::Status { status, retry_after: None }
    }
}

impl<'a> Line<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, ApiError> {
        serde_json::from_slice(bytes).map_err(ApiError::Parse)
    }

    pub(super) fn kind(&self) -> Result<EventType, ApiError> {
        match self.kind {
            "ADDED" | "MODIFIED" => Ok(EventType::Present),
            "DELETED" => Ok(EventType::Deleted),
            "BOOKMARK" => Ok(EventType::Bookmark),
            "ERROR" => Ok(EventType::Error),
            _ => Err(ApiError::Parse(serde::de::Error::custom("unknown type of a watch event"))),
        }
    }

    pub(super) fn item<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        serde_json::from_str(self.object.get()).map_err(ApiError::Parse)
    }

    /// The object's resourceVersion; nothing else of the object is decoded.
    pub(super) fn version(&self) -> Result<&str, ApiError> {
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
        let object: Versioned<'_> = serde_json::from_str(self.object.get()).map_err(ApiError::Parse)?;
        Ok(object.metadata.version)
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use futures::stream;
    use http::{Request, Response};
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};
    use tokio::{
        sync::mpsc,
        task::JoinSet,
        time::{sleep, timeout},
    };

    use super::*;
    use crate::{
        connection::tests::{Harness, harness_with},
        kubernetes::{CONNECTION_SETTINGS, WATCHES_PER_CLIENT},
        watch::object::Object,
    };

    fn body(bytes: impl Into<Bytes>) -> Body {
        Full::from(bytes.into()).map_err(Into::into).boxed_unsync()
    }

    fn lines(body: Body) -> Lines {
        Lines::new(body, Arc::new(Semaphore::new(1)))
    }

    #[tokio::test(start_paused = true)]
    async fn large_lines_of_all_watches_take_turns() {
        let large = Arc::new(Semaphore::new(2));
        let open = || {
            let (send, receive) = mpsc::unbounded_channel::<Bytes>();
            let frames = stream::unfold(receive, async |mut receive| {
                let frame = receive.recv().await?;
                Some((Ok(Frame::data(frame)), receive))
            });
            (send, Lines::new(StreamBody::new(frames).boxed_unsync(), large.clone()))
        };
        let arrives = async |lines: &mut Lines| {
            let line = timeout(Duration::from_secs(1), lines.next()).await.ok()?;
            line.unwrap().map(<[u8]>::len)
        };
        let [mut first, mut second, mut third] = [(); 3].map(|()| open());
        let part = Bytes::from(vec![b'x'; KEPT_BYTES + 1]);
        for (send, lines) in [&mut first, &mut second, &mut third] {
            send.send(part.clone()).unwrap();
            assert_eq!(arrives(lines).await, None);
            send.send(Bytes::from_static(b"x\n")).unwrap();
        }
        assert_eq!(arrives(&mut third.1).await, None, "two lines of others are incomplete");
        for (_, lines) in [&mut first, &mut second] {
            assert_eq!(arrives(lines).await, Some(KEPT_BYTES + 2));
        }
        assert_eq!(arrives(&mut third.1).await, None, "their permits last until they wait for the next line");
        first.0.send(Bytes::from_static(b"small\n")).unwrap();
        assert_eq!(arrives(&mut first.1).await, Some(5));
        assert_eq!(arrives(&mut third.1).await, Some(KEPT_BYTES + 2));
    }

    #[tokio::test(start_paused = true)]
    async fn large_lines_that_wait_do_not_block_their_connection() {
        const LINE: usize = 200 << 10;
        let Harness { connection, mut opened, .. } = harness_with(true, CONNECTION_SETTINGS);
        tokio::spawn(async move {
            let mut server = h2::server::handshake(opened.recv().await.unwrap()).await.unwrap();
            while let Some(Ok((request, mut respond))) = server.accept().await {
                let is_watch = request.uri().path() == "/watch";
                let mut body = vec![b'x'; if is_watch { LINE } else { 7 }];
                body.push(b'\n');
                respond.send_response(Response::new(()), false).unwrap().send_data(body.into(), true).unwrap();
            }
        });
        let get = async |path: &str| {
            let request = Request::get(format!("https://kcp:1{path}")).body(Bytes::new()).unwrap();
            connection.send(request).await.unwrap().into_body().boxed_unsync()
        };
        let large = Arc::new(Semaphore::new(2));
        let others = large.clone().acquire_many_owned(2).await.unwrap();
        let mut watches = JoinSet::new();
        for _ in 0..WATCHES_PER_CLIENT {
            let mut lines = Lines::new(get("/watch").await, large.clone());
            watches.spawn(async move { lines.next().await.unwrap().map(<[u8]>::len) });
        }
        // Until the server cannot send more to any of them.
        sleep(Duration::from_secs(1)).await;
        assert!(watches.try_join_next().is_none(), "the lines of others are incomplete");
        let page = timeout(Duration::from_secs(10), async { get("/list").await.collect().await.unwrap().to_bytes() });
        assert_eq!(page.await.expect("lists are answered while watches wait").len(), 8);
        drop(others);
        let lines = timeout(Duration::from_secs(10), watches.join_all()).await.expect("each line arrives");
        assert_eq!(lines, [Some(LINE); WATCHES_PER_CLIENT]);
    }

    #[tokio::test]
    async fn lines_end_where_they_end_and_not_where_frames_do() {
        let mut lines = lines(body("{\"a\":1}\n\n{}\nhalf"));
        assert_eq!(lines.next().await.unwrap().unwrap(), b"{\"a\":1}");
        assert_eq!(lines.next().await.unwrap().unwrap(), b"");
        assert_eq!(lines.next().await.unwrap().unwrap(), b"{}");
        assert!(lines.next().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn line_size_is_limited() {
        let mut lines = lines(body(vec![b'x'; LINE_BYTES + 1]));
        assert!(matches!(lines.next().await, Err(ApiError::TooLarge { .. })));
    }

    #[test]
    fn number_of_objects_in_a_page_is_limited() {
        let page = |items: usize| {
            let items = vec!["{\"metadata\":{}}"; items].join(",");
            Page::<Object>::read(format!(r#"{{"metadata":{{"resourceVersion":"7"}},"items":[{items}]}}"#).as_bytes())
        };
        assert_eq!(page(ITEMS).unwrap().items.len(), ITEMS);
        assert!(matches!(page(ITEMS + 1), Err(ApiError::Parse(_))));
    }

    #[test]
    fn page_without_items_is_read() {
        for text in [r#"{"metadata":{"resourceVersion":"7"}}"#, r#"{"metadata":{"resourceVersion":"7"},"items":null}"#]
        {
            let page: Page<u8> = serde_json::from_str(text).unwrap();
            assert_eq!((page.items.len(), page.metadata.version.as_str()), (0, "7"));
        }
    }
}
