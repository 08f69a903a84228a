//! Response bodies, bounded in bytes and in time.

use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::{BodyExt as _, combinators::UnsyncBoxBody};
use tokio::time::{Instant, timeout_at};
use tower::BoxError;

use super::{
    Limits,
    error::{FetchError, Stage},
};

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

/// Reads a whole body. `received` is called with the length of each chunk.
///
/// Each window of [`Limits::window`] must bring [`Limits::progress`] bytes or the end.
pub(super) async fn read(
    mut body: Body,
    size: Size,
    limits: &Limits,
    received: impl Fn(usize),
) -> Result<Bytes, FetchError> {
    size.admit(body.size_hint().lower())?;
    let mut content = BytesMut::new();
    let mut window = Instant::now() + limits.window;
    let mut begin = 0;
    loop {
        let frame = timeout_at(window, body.frame()).await;
        if let Ok(frame) = frame {
            let Some(frame) = frame else { break };
            let frame = frame.map_err(|error| FetchError::boxed(&error, limits.connect))?;
            if let Ok(chunk) = frame.into_data() {
                received(chunk.len());
                size.admit((content.len() + chunk.len()) as u64)?;
                content.extend_from_slice(&chunk);
            }
        }
        let now = Instant::now();
        if now >= window {
            if content.len() - begin < limits.progress {
                return Err(FetchError::Timeout { stage: Stage::Progress, after: limits.window });
            }
            (window, begin) = (now + limits.window, content.len());
        }
    }
    size.verify(content.len() as u64).map(|()| content.freeze())
}
