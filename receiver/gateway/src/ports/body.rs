//! Reads request bodies, within a limit for each and a memory budget for all.

use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use http::{Version, header, request::Parts};
use http_body::Body;
use http_body_util::BodyExt;
use tidewatch_contract::event::MAX_BODY_BYTES;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::refusal::Refusal;

/// Bytes per permit of the [`BodyBudget`]: a semaphore has fewer permits than a budget may have bytes.
const UNIT: usize = 1 << 10;

/// Bytes of a body that is small. Heartbeats and nearly all requests of events are; only one larger body of a runtime is
/// in memory at a time, so that a hundred runtimes that hold bodies back leave room for all others.
pub(super) const SMALL_BODY: usize = 64 << 10;

/// Bytes of a refused body that are discarded at most: above the limit of a body, so that a client that barely exceeds
/// it gets its response.
const MAX_DISCARD_BYTES: usize = 2 * MAX_BODY_BYTES;
/// Deadline of discarding.
const DISCARD_DEADLINE: Duration = Duration::from_secs(2);

/// Result of [`discard`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Discarded {
    /// Bytes discarded.
    pub(super) bytes: usize,
    /// True if bytes are left, so that the connection cannot be reused.
    pub(super) must_close: bool,
}

/// Reads and discards the rest of a refused body over HTTP/1.1, within bounds: a server that closes a connection with
/// unread bytes resets it, and the response with the reason may be lost (RFC 9112, section 9.6). Over HTTP/2 a body
/// affects no other request, and nothing is read.
///
/// Nothing is read either of a body that is too long or already exceeded its deadline (`is_slow`), or of one that the
/// client holds back until a `100 Continue` that was not sent (RFC 9110, section 10.1.1), recognised by as many bytes
/// left as were `announced`.
pub(super) async fn discard<B: Body>(parts: &Parts, mut body: Pin<&mut B>, announced: u64, is_slow: bool) -> Discarded {
    if parts.version >= Version::HTTP_2 || body.is_end_stream() {
        return Discarded { bytes: 0, must_close: false };
    }
    let left = body.size_hint().lower();
    let is_held_back = parts.headers.contains_key(header::EXPECT) && left == announced;
    if is_slow || is_held_back || left > MAX_DISCARD_BYTES as u64 {
        return Discarded { bytes: 0, must_close: true };
    }
    let mut bytes = 0;
    let reading = async {
        while bytes <= MAX_DISCARD_BYTES {
            // An error is the client's doing: it has closed the connection by itself.
            let Some(Ok(frame)) = body.frame().await else { return true };
            bytes += frame.data_ref().map_or(0, Buf::remaining);
        }
        false
    };
    let must_close = timeout(DISCARD_DEADLINE, reading).await != Ok(true);
    Discarded { bytes, must_close }
}

/// Memory budget of all bodies that are being read or processed. Only received bytes count, not announced ones. No
/// request waits for budget, as it would wait for slow clients.
#[derive(Clone)]
pub(super) struct BodyBudget(Arc<Semaphore>);

/// A complete body with its share of the budget, which is released on drop.
pub(super) struct BufferedBody {
    pub(super) bytes: Vec<u8>,
    share: Option<OwnedSemaphorePermit>,
}

impl BufferedBody {
    /// Splits it into its bytes and its share of the budget, which must be kept as long as they.
    pub(super) fn into_parts(self) -> (Bytes, Option<OwnedSemaphorePermit>) {
        (self.bytes.into(), self.share)
    }
}

impl BodyBudget {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new((bytes / UNIT).min(Semaphore::MAX_PERMITS))))
    }

    /// Reads a body of at most `limit` bytes. Adds all received bytes to `received`, also on errors. The caller sets
    /// the deadline. `begin_large` is called once, before the body exceeds [`SMALL_BODY`].
    pub(super) async fn read<B: Body<Data = Bytes>>(
        &self,
        mut body: Pin<&mut B>,
        limit: usize,
        received: &mut usize,
        begin_large: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<BufferedBody, Refusal> {
        let mut begin_large = Some(begin_large);
        let mut buffered = BufferedBody { bytes: Vec::new(), share: None };
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| Refusal::BodyAborted)?.into_data() else {
                // Trailers are not signed, and are ignored.
                continue;
            };
            *received = received.saturating_add(data.len());
            if data.len() > limit - buffered.bytes.len() {
                return Err(Refusal::TooLarge(limit));
            }
            if buffered.bytes.len() + data.len() > SMALL_BODY
                && let Some(begin) = begin_large.take()
            {
                begin()?;
            }
            self.reserve(&mut buffered, data.len())?;
            buffered.bytes.extend_from_slice(&data);
        }
        Ok(buffered)
    }

    fn reserve(&self, body: &mut BufferedBody, more: usize) -> Result<(), Refusal> {
        let reserved = body.bytes.len().div_ceil(UNIT);
        let needed = (body.bytes.len() + more).div_ceil(UNIT);
        let missing = u32::try_from(needed - reserved).map_err(|_| Refusal::Busy)?;
        let permit = self.0.clone().try_acquire_many_owned(missing).map_err(|_| Refusal::Busy)?;
        match &mut body.share {
            Some(share) => share.merge(permit),
            none => *none = Some(permit),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::{FutureExt, StreamExt, stream};
    use http::Request;
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};

    use super::*;

    async fn read(budget: &BodyBudget, pieces: &[usize], limit: usize) -> Result<BufferedBody, Refusal> {
        let frames: Vec<_> =
            pieces.iter().map(|length| Ok::<_, std::io::Error>(Frame::data(vec![7; *length].into()))).collect();
        let mut received = 0;
        let result = budget.read(pin!(StreamBody::new(stream::iter(frames))), limit, &mut received, || Ok(())).await;
        assert!(result.is_err() || received == pieces.iter().sum::<usize>(), "all bytes were counted");
        result
    }

    #[tokio::test]
    async fn body_may_reach_its_limit_and_not_exceed_it() {
        let budget = BodyBudget::new(1 << 20);
        assert_eq!(read(&budget, &[60, 0, 40], 100).await.ok().unwrap().bytes.len(), 100);
        assert_eq!(read(&budget, &[60, 41], 100).await.err(), Some(Refusal::TooLarge(100)));
        assert_eq!(read(&budget, &[101], 100).await.err(), Some(Refusal::TooLarge(100)));
    }

    #[tokio::test]
    async fn received_bytes_are_counted_also_of_an_incomplete_body() {
        let budget = BodyBudget::new(1 << 20);
        let mut received = 0;
        let piece = || Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(&[0; 60])));
        let stuck = pin!(StreamBody::new(stream::iter([piece(), piece()]).chain(stream::pending())));
        assert!(budget.read(stuck, 200, &mut received, || Ok(())).now_or_never().is_none());
        assert_eq!(received, 120);
        let long = pin!(StreamBody::new(stream::iter([piece(), piece()])));
        assert_eq!(budget.read(long, 100, &mut received, || Ok(())).await.err(), Some(Refusal::TooLarge(100)));
        assert_eq!(received, 240, "excess bytes count as well");
    }

    #[tokio::test]
    async fn all_bodies_share_a_budget() {
        let budget = BodyBudget::new(3 * UNIT);
        let reserved = read(&budget, &[UNIT, 1], 1 << 20).await.ok().unwrap();
        assert_eq!(read(&budget, &[UNIT, 1], 1 << 20).await.err(), Some(Refusal::Busy));
        assert!(read(&budget, &[10, 20], 1 << 20).await.is_ok());
        drop(reserved);
        assert!(read(&budget, &[UNIT; 3], 1 << 20).await.is_ok());
    }

    fn parts(version: Version, expects: bool) -> Parts {
        let request = Request::post("/").version(version);
        let request = if expects { request.header(header::EXPECT, "100-continue") } else { request };
        request.body(()).unwrap().into_parts().0
    }

    #[tokio::test(start_paused = true)]
    async fn rest_of_a_refused_body_is_discarded_within_bounds() {
        let discarded = |bytes, must_close| Discarded { bytes, must_close };
        let old = Version::HTTP_11;
        let new = Version::HTTP_2;
        for (case, version, expects, length, announced, is_slow, expected) in [
            ("a body", old, false, 500_000, 500_000, false, discarded(500_000, false)),
            ("none", old, false, 0, 0, true, discarded(0, false)),
            (
                "the longest",
                old,
                false,
                MAX_DISCARD_BYTES,
                MAX_DISCARD_BYTES,
                false,
                discarded(MAX_DISCARD_BYTES, false),
            ),
            ("too long", old, false, MAX_DISCARD_BYTES + 1, MAX_DISCARD_BYTES + 1, false, discarded(0, true)),
            ("slow", old, false, 5, 9, true, discarded(0, true)),
            ("held back until 100 Continue", old, true, 9, 9, false, discarded(0, true)),
            ("sent after 100 Continue", old, true, 5, 9, false, discarded(5, false)),
            ("over HTTP/2", new, false, 9, 9, true, discarded(0, false)),
        ] {
            let body = pin!(Full::<Bytes>::from(vec![b' '; length]));
            assert_eq!(discard(&parts(version, expects), body, announced as u64, is_slow).await, expected, "{case}");
        }

        let piece = || Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(&[0; 1 << 10])));
        let endless = pin!(StreamBody::new(stream::repeat_with(piece)));
        assert_eq!(
            discard(&parts(old, false), endless, 0, false).await,
            discarded(MAX_DISCARD_BYTES + (1 << 10), true)
        );
        let stuck = pin!(StreamBody::new(stream::iter([piece()]).chain(stream::pending())));
        assert_eq!(discard(&parts(old, false), stuck, 0, false).await, discarded(1 << 10, true));
        let broken = pin!(StreamBody::new(stream::iter([piece(), Err(std::io::ErrorKind::BrokenPipe.into())])));
        assert_eq!(discard(&parts(old, false), broken, 0, false).await, discarded(1 << 10, false));
    }
}
