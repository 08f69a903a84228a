//! Reading bodies: bounded for each request, and for all of them together.

use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::refusal::Refusal;

/// Bytes of one permit of the [`Budget`]: semaphores count to less than bodies do.
const UNIT: usize = 1 << 10;

/// Bytes of a refused body that are read and thrown away.
const LEFTOVER: usize = 1 << 20;
/// How long that may take.
const LEFTOVER_DEADLINE: Duration = Duration::from_secs(2);

/// Reads what is left of a refused body over HTTP/1.1, within bounds. A server that closes over unread bytes resets the connection, and
/// the answer that tells why may be lost with it (RFC 9112, section 9.6).
pub(super) async fn discard<B: Body>(mut body: Pin<&mut B>) {
    let mut read = 0;
    let reading = async {
        while read <= LEFTOVER {
            let Some(Ok(frame)) = body.frame().await else { return };
            read += frame.data_ref().map_or(0, Buf::remaining);
        }
    };
    // Then the connection ends.
    let _ = timeout(LEFTOVER_DEADLINE, reading).await;
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

    /// Reads a body of at most `limit` bytes. The caller sets the deadline.
    pub(super) async fn read<B>(&self, mut body: Pin<&mut B>, limit: usize) -> Result<Whole, Refusal>
    where
        B: Body<Data = Bytes>,
    {
        let mut whole = Whole { bytes: Vec::new(), share: None };
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| Refusal::Broken)?.into_data() else {
                // Trailers are not signed; nothing reads them.
                continue;
            };
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

    use futures::stream;
    use http_body::Frame;
    use http_body_util::StreamBody;

    use super::*;

    async fn read(budget: &Budget, pieces: &[usize], limit: usize) -> Result<Whole, Refusal> {
        let frames: Vec<_> =
            pieces.iter().map(|length| Ok::<_, std::io::Error>(Frame::data(vec![7; *length].into()))).collect();
        budget.read(pin!(StreamBody::new(stream::iter(frames))), limit).await
    }

    #[tokio::test]
    async fn a_body_may_reach_its_limit_and_not_pass_it() {
        let budget = Budget::new(1 << 20);
        assert_eq!(read(&budget, &[60, 0, 40], 100).await.ok().unwrap().len(), 100);
        assert_eq!(read(&budget, &[60, 41], 100).await.err(), Some(Refusal::TooLarge(100)));
        assert_eq!(read(&budget, &[101], 100).await.err(), Some(Refusal::TooLarge(100)));
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
}
