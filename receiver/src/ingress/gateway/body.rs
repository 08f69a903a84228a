//! Reading bodies: bounded for each request, and for all of them together.

use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use http::{Version, header, request::Parts};
use http_body::Body;
use http_body_util::BodyExt;
use tidewatch_shared::event::MAX_BODY_BYTES;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::refusal::Refusal;

/// Bytes of one permit of the [`Budget`]: semaphores count to less than bodies do.
const UNIT: usize = 1 << 10;

/// Bytes of a refused body that are read and thrown away: more than a body may have, so that who has just passed the limit hears so.
const LEFTOVER: usize = 2 * MAX_BODY_BYTES;
/// How long that may take.
const LEFTOVER_DEADLINE: Duration = Duration::from_secs(2);

/// What became of the rest of a refused body.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Discarded {
    /// Bytes that were read and thrown away.
    pub(super) bytes: usize,
    /// Something is left, so that the connection has to end.
    pub(super) is_over: bool,
}

/// Reads what is left of a refused body over HTTP/1.1, within bounds: a server that closes over unread bytes resets the connection, and
/// the answer that tells why may be lost with it (RFC 9112, section 9.6). Over HTTP/2 a body is no other request's concern, and nothing is
/// read.
///
/// Nor is anything read in vain: of a body that is too long or has been `slow` already, or of one that is sent only when it is
/// asked for and was not (RFC 9110, section 10.1.1), which shows by as much being left as was `announced`.
pub(super) async fn discard<B: Body>(parts: &Parts, mut body: Pin<&mut B>, announced: u64, is_slow: bool) -> Discarded {
    if parts.version >= Version::HTTP_2 || body.is_end_stream() {
        return Discarded { bytes: 0, is_over: false };
    }
    let left = body.size_hint().lower();
    let is_held_back = parts.headers.contains_key(header::EXPECT) && left == announced;
    if is_slow || is_held_back || left > LEFTOVER as u64 {
        return Discarded { bytes: 0, is_over: true };
    }
    let mut bytes = 0;
    let reading = async {
        while bytes <= LEFTOVER {
            // That it broke off is the peer's doing.
            let Some(Ok(frame)) = body.frame().await else { return true };
            bytes += frame.data_ref().map_or(0, Buf::remaining);
        }
        false
    };
    let is_over = timeout(LEFTOVER_DEADLINE, reading).await != Ok(true);
    Discarded { bytes, is_over }
}

/// Memory for all bodies that are being read or judged. What a sender announces costs nothing, only what it sends; and nobody
/// waits for room, because those who wait would be held up by those who are slow.
#[derive(Clone)]
pub(super) struct Budget(Arc<Semaphore>);

/// A body as it was sent, with its share of the budget.
pub(super) struct Whole {
    bytes: Vec<u8>,
    /// Given back when the body is dropped.
    share: Option<OwnedSemaphorePermit>,
}

impl Budget {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new((bytes / UNIT).min(Semaphore::MAX_PERMITS))))
    }

    /// Reads a body of at most `limit` bytes, and counts all that came of it, however it ends. The caller sets the deadline.
    pub(super) async fn read<B>(&self, mut body: Pin<&mut B>, limit: usize, came: &mut usize) -> Result<Whole, Refusal>
    where
        B: Body<Data = Bytes>,
    {
        let mut whole = Whole { bytes: Vec::new(), share: None };
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| Refusal::Broken)?.into_data() else {
                // Trailers are not signed; nothing reads them.
                continue;
            };
            *came = came.saturating_add(data.len());
            if data.len() > limit - whole.bytes.len() {
                return Err(Refusal::TooLarge(limit));
            }
            self.share(&mut whole, data.len())?;
            whole.bytes.extend_from_slice(&data);
        }
        Ok(whole)
    }

    fn share(&self, whole: &mut Whole, more: usize) -> Result<(), Refusal> {
        let held = whole.bytes.len().div_ceil(UNIT);
        let wanted = (whole.bytes.len() + more).div_ceil(UNIT);
        let missing = u32::try_from(wanted - held).map_err(|_| Refusal::Busy)?;
        let permit = self.0.clone().try_acquire_many_owned(missing).map_err(|_| Refusal::Busy)?;
        match &mut whole.share {
            Some(share) => share.merge(permit),
            none => *none = Some(permit),
        }
        Ok(())
    }
}

impl std::ops::Deref for Whole {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
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

    async fn read(budget: &Budget, pieces: &[usize], limit: usize) -> Result<Whole, Refusal> {
        let frames: Vec<_> =
            pieces.iter().map(|length| Ok::<_, std::io::Error>(Frame::data(vec![7; *length].into()))).collect();
        let mut came = 0;
        let result = budget.read(pin!(StreamBody::new(stream::iter(frames))), limit, &mut came).await;
        assert!(result.is_err() || came == pieces.iter().sum::<usize>(), "all that is taken was counted");
        result
    }

    #[tokio::test]
    async fn a_body_may_reach_its_limit_and_not_pass_it() {
        let budget = Budget::new(1 << 20);
        assert_eq!(read(&budget, &[60, 0, 40], 100).await.ok().unwrap().len(), 100);
        assert_eq!(read(&budget, &[60, 41], 100).await.err(), Some(Refusal::TooLarge(100)));
        assert_eq!(read(&budget, &[101], 100).await.err(), Some(Refusal::TooLarge(100)));
    }

    #[tokio::test]
    async fn what_came_is_counted_even_if_nobody_waits_for_the_rest() {
        let (budget, mut came) = (Budget::new(1 << 20), 0);
        let piece = || Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(&[0; 60])));
        let stuck = pin!(StreamBody::new(stream::iter([piece(), piece()]).chain(stream::pending())));
        assert!(budget.read(stuck, 200, &mut came).now_or_never().is_none());
        assert_eq!(came, 120);
        let long = pin!(StreamBody::new(stream::iter([piece(), piece()])));
        assert_eq!(budget.read(long, 100, &mut came).await.err(), Some(Refusal::TooLarge(100)));
        assert_eq!(came, 240, "what is too much has come all the same");
    }

    #[tokio::test]
    async fn all_bodies_together_are_bounded() {
        let budget = Budget::new(3 * UNIT);
        let held = read(&budget, &[UNIT, 1], 1 << 20).await.ok().unwrap();
        assert_eq!(read(&budget, &[UNIT, 1], 1 << 20).await.err(), Some(Refusal::Busy));
        assert!(read(&budget, &[10, 20], 1 << 20).await.is_ok());
        drop(held);
        assert!(read(&budget, &[UNIT; 3], 1 << 20).await.is_ok());
    }

    fn parts(version: Version, expects: bool) -> Parts {
        let request = Request::post("/").version(version);
        let request = if expects { request.header(header::EXPECT, "100-continue") } else { request };
        request.body(()).unwrap().into_parts().0
    }

    #[tokio::test(start_paused = true)]
    async fn the_rest_of_a_refused_body_is_read_within_bounds_and_never_in_vain() {
        let discarded = |bytes, is_over| Discarded { bytes, is_over };
        let (old, new) = (Version::HTTP_11, Version::HTTP_2);
        for (case, version, expects, length, announced, is_slow, expected) in [
            ("a body", old, false, 500_000, 500_000, false, discarded(500_000, false)),
            ("none", old, false, 0, 0, true, discarded(0, false)),
            ("the longest", old, false, LEFTOVER, LEFTOVER, false, discarded(LEFTOVER, false)),
            ("too long", old, false, LEFTOVER + 1, LEFTOVER + 1, false, discarded(0, true)),
            ("slow", old, false, 5, 9, true, discarded(0, true)),
            ("not asked for", old, true, 9, 9, false, discarded(0, true)),
            ("asked for", old, true, 5, 9, false, discarded(5, false)),
            ("a stream's", new, false, 9, 9, true, discarded(0, false)),
        ] {
            let body = pin!(Full::<Bytes>::from(vec![b' '; length]));
            assert_eq!(discard(&parts(version, expects), body, announced as u64, is_slow).await, expected, "{case}");
        }

        let piece = || Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(&[0; 1 << 10])));
        let endless = pin!(StreamBody::new(stream::repeat_with(piece)));
        assert_eq!(discard(&parts(old, false), endless, 0, false).await, discarded(LEFTOVER + (1 << 10), true));
        let stuck = pin!(StreamBody::new(stream::iter([piece()]).chain(stream::pending())));
        assert_eq!(discard(&parts(old, false), stuck, 0, false).await, discarded(1 << 10, true));
        let broken = pin!(StreamBody::new(stream::iter([piece(), Err(std::io::ErrorKind::BrokenPipe.into())])));
        assert_eq!(discard(&parts(old, false), broken, 0, false).await, discarded(1 << 10, false));
    }
}
