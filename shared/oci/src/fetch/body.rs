//! Response bodies, bounded in bytes and in time.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::{BodyExt as _, combinators::UnsyncBoxBody};
use prometheus_client::metrics::counter::Counter;
use tokio::time::{Instant, timeout_at};
use tower::BoxError;

use super::error::{FetchError, Stage};

/// Time in which a body must make progress.
const WINDOW: Duration = Duration::from_secs(10);
/// Bytes that each window must bring.
const MIN_PROGRESS: usize = 16 << 10;

/// Body of a response below the client.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Expected length of a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Declared by a manifest or a pointer.
    Exactly(u64),
    /// Undeclared, with a limit.
    AtMost(u64),
}

impl Size {
    /// Returns an error if this many bytes are too many.
    fn admit(self, bytes: u64) -> Result<(), FetchError> {
        match self {
            Self::Exactly(expected) if bytes > expected => Err(FetchError::SizeMismatch { expected, actual: bytes }),
            Self::AtMost(limit) if bytes > limit => Err(FetchError::TooLarge { limit }),
            Self::Exactly(_) | Self::AtMost(_) => Ok(()),
        }
    }

    /// Checks the length of a whole content.
    ///
    /// # Errors
    /// [`FetchError::SizeMismatch`] and [`FetchError::TooLarge`].
    pub(crate) fn verify(self, bytes: u64) -> Result<(), FetchError> {
        match self {
            Self::Exactly(expected) if bytes != expected => Err(FetchError::SizeMismatch { expected, actual: bytes }),
            Self::Exactly(_) | Self::AtMost(_) => self.admit(bytes),
        }
    }
}

/// Reads a whole body, and counts its bytes. Each [`WINDOW`] must bring [`MIN_PROGRESS`] bytes or the end.
pub(super) async fn read(mut body: Body, size: Size, received: Option<&Counter>) -> Result<Bytes, FetchError> {
    size.admit(body.size_hint().lower())?;
    let mut content = BytesMut::new();
    let mut window = Instant::now() + WINDOW;
    let mut begin = 0;
    loop {
        let frame = timeout_at(window, body.frame()).await;
        if let Ok(frame) = frame {
            let Some(frame) = frame else { break };
            let frame = frame.map_err(|error| FetchError::transport(error.as_ref()))?;
            if let Ok(chunk) = frame.into_data() {
                if let Some(received) = received {
                    received.inc_by(chunk.len() as u64);
                }
                size.admit((content.len() + chunk.len()) as u64)?;
                content.extend_from_slice(&chunk);
            }
        }
        let now = Instant::now();
        if now >= window {
            if content.len() - begin < MIN_PROGRESS {
                return Err(FetchError::Timeout { stage: Stage::Progress, after: WINDOW });
            }
            (window, begin) = (now + WINDOW, content.len());
        }
    }
    size.verify(content.len() as u64).map(|()| content.freeze())
}
