//! The fence: until when this process may write. Every client that writes asks it right before a request leaves, so that a process
//! that was frozen writes nothing when it goes on, whichever of its threads wakes first.

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    thread,
    time::{Duration, Instant},
};

use futures::future::{Either, MapErr, Ready, TryFutureExt as _, ready};
use http::{Method, Request};
use thiserror::Error;
use tower::{BoxError, Layer, Service};

/// It has not begun.
const SHUT: u64 = 0;
/// It is over, and never begins again.
const OVER: u64 = 1;
/// There is no end.
const ALWAYS: u64 = u64::MAX;
/// The guard looks at least so often, for an end that came early.
const LOOK: Duration = Duration::from_secs(1);

/// A write was refused because this process may not write (any more).
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("this receiver is not the active one")]
pub struct Lapsed;

/// See the module. Clones are the same fence.
#[derive(Clone)]
pub struct Fence(Arc<Inner>);

struct Inner {
    base: Instant,
    /// Nanoseconds after `base`, or one of the constants.
    until: AtomicU64,
}

impl Default for Fence {
    /// One that lets everything through, for a process that is alone by other means.
    fn default() -> Self {
        Self::at(ALWAYS)
    }
}

impl Fence {
    /// One that lets nothing through yet.
    #[must_use]
    pub fn shut() -> Self {
        Self::at(SHUT)
    }

    fn at(until: u64) -> Self {
        // In the past, so that no time is below the constants.
        let now = Instant::now();
        let base = now.checked_sub(Duration::from_secs(1)).unwrap_or(now);
        Self(Arc::new(Inner { base, until: AtomicU64::new(until) }))
    }

    fn nanos(&self, at: Instant) -> u64 {
        let nanos = at.saturating_duration_since(self.0.base).as_nanos();
        u64::try_from(nanos).unwrap_or(ALWAYS - 1).clamp(OVER + 1, ALWAYS - 1)
    }

    /// Whether a write may leave now.
    #[must_use]
    pub fn holds(&self) -> bool {
        match self.0.until.load(Ordering::Acquire) {
            SHUT | OVER => false,
            ALWAYS => true,
            until => self.nanos(Instant::now()) < until,
        }
    }

    /// Opens it, or moves its end. False, and nothing moves, when it has ended already.
    pub(super) fn extend(&self, until: Instant) -> bool {
        let (now, until) = (self.nanos(Instant::now()), self.nanos(until));
        let moved = |current| (current == SHUT || now < current).then_some(until);
        self.0.until.fetch_update(Ordering::AcqRel, Ordering::Acquire, moved).is_ok()
    }

    /// Ends it for good.
    pub fn close(&self) {
        self.0.until.store(OVER, Ordering::Release);
    }

    /// Watches the end on a thread of its own, which no blocked runtime can hold up, and calls `ended` when it comes by itself.
    /// After [`Fence::close`] it is not called.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn guard(&self, ended: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let fence = self.clone();
        let watch = move || loop {
            let now = fence.nanos(Instant::now());
            match fence.0.until.load(Ordering::Acquire) {
                OVER => return,
                SHUT | ALWAYS => thread::sleep(LOOK),
                until if now < until => thread::sleep(Duration::from_nanos(until - now).min(LOOK)),
                _ => return ended(),
            }
        };
        thread::Builder::new().name("lease".to_owned()).spawn(watch).map(drop)
    }

    /// Puts it before a client's requests.
    #[must_use]
    pub fn layer(&self) -> FenceLayer {
        FenceLayer(self.clone())
    }

    /// Whether a request may leave now: what only reads always may.
    ///
    /// # Errors
    /// [`Lapsed`].
    pub fn check(&self, method: &Method) -> Result<(), Lapsed> {
        if matches!(*method, Method::GET | Method::HEAD) || self.holds() { Ok(()) } else { Err(Lapsed) }
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").field("holds", &self.holds()).finish()
    }
}

/// See [`Fence::layer`].
#[derive(Clone, Debug)]
pub struct FenceLayer(Fence);

impl<S> Layer<S> for FenceLayer {
    type Service = Fenced<S>;

    fn layer(&self, inner: S) -> Fenced<S> {
        Fenced { inner, fence: self.0.clone() }
    }
}

/// A client's service behind a [`Fence`].
#[derive(Clone, Debug)]
pub struct Fenced<S> {
    inner: S,
    fence: Fence,
}

impl<S, B> Service<Request<B>> for Fenced<S>
where
    S: Service<Request<B>>,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = Either<MapErr<S::Future, fn(S::Error) -> BoxError>, Ready<Result<S::Response, BoxError>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        match self.fence.check(request.method()) {
            Ok(()) => Either::Left(self.inner.call(request).map_err(Into::into)),
            Err(lapsed) => Either::Right(ready(Err(lapsed.into()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tower::{ServiceExt as _, service_fn};

    use super::*;

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn it_opens_moves_and_never_opens_again() {
        let fence = Fence::shut();
        assert!(!fence.holds() && fence.extend(Instant::now() + SOON) && fence.holds());
        assert!(fence.extend(Instant::now() + SOON * 2) && fence.holds());
        fence.close();
        assert!(!fence.extend(Instant::now() + SOON) && !fence.holds());
        assert!(Fence::default().holds());
    }

    #[test]
    fn an_end_that_came_by_itself_is_told_and_is_final() {
        let fence = Fence::shut();
        let (tell, told) = mpsc::channel();
        fence.guard(move || tell.send(()).unwrap_or_default()).unwrap();
        assert!(fence.extend(Instant::now() + Duration::from_millis(20)));
        told.recv_timeout(SOON).unwrap();
        assert!(!fence.holds() && !fence.extend(Instant::now() + SOON));
    }

    #[test]
    fn an_orderly_end_is_not_told() {
        let fence = Fence::shut();
        let (tell, told) = mpsc::channel();
        fence.extend(Instant::now() + SOON);
        fence.guard(move || tell.send(()).unwrap_or_default()).unwrap();
        fence.close();
        // The guard ends and drops what it would have called.
        assert_eq!(told.recv_timeout(SOON), Err(mpsc::RecvTimeoutError::Disconnected));
    }

    #[tokio::test]
    async fn writes_are_refused_and_reads_are_not() {
        let fence = Fence::shut();
        let inner = service_fn(async |request: Request<()>| Ok::<_, BoxError>(request.method().clone()));
        let ask = async |method: Method| {
            let request = Request::builder().method(method).body(()).unwrap();
            fence.layer().layer(inner).oneshot(request).await
        };
        assert!(ask(Method::GET).await.is_ok());
        for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
            assert!(ask(method).await.unwrap_err().is::<Lapsed>());
        }
        fence.extend(Instant::now() + SOON);
        assert!(ask(Method::PATCH).await.is_ok());
    }
}
