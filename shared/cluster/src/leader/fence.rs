//! Write fence: the time until which this process may write. Every client that writes checks it right before a request
//! leaves, so that a process that was frozen writes nothing when it resumes, whichever of its threads wakes first.
//!
//! The writes of a reconcile that [`fenced`] runs need the fence of its shard. All others need that of their client.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use http::{Method, Request};
use thiserror::Error;
use tokio::{task_local, time};
use tower::filter::{AsyncFilterLayer, AsyncPredicate};

task_local! {
    /// Fence of the current reconcile.
    static RECONCILE: WriteFence;
}

/// Runs a reconcile whose writes need this fence, instead of those of their clients: a receiver loses its shards one by one.
pub async fn fenced<F: Future>(fence: WriteFence, reconcile: F) -> F::Output {
    RECONCILE.scope(fence, reconcile).await
}

/// Fence of the current reconcile, for writes that outlive it; `None` outside of one.
pub fn reconcile_fence() -> Option<WriteFence> {
    RECONCILE.try_with(Clone::clone).ok()
}

/// Not opened yet.
const UNOPENED: u64 = 0;
/// Closed for good.
const CLOSED: u64 = 1;
/// Open without end.
const UNBOUNDED: u64 = u64::MAX;

/// Time on the executor's clock: that of the system, except in simulations.
fn now() -> Instant {
    time::Instant::now().into_std()
}

/// A write was refused because this process may not write, or no longer, or not for the runtimes of this shard.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("this receiver is not the active one")]
pub struct NotLeaderError;

/// Deadline of all writes. Clones share it.
#[derive(Clone, Debug)]
pub struct WriteFence(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    base: Instant,
    /// Nanoseconds after `base`, or one of the constants.
    until: AtomicU64,
    /// A fence that is needed as well.
    parent: Option<WriteFence>,
}

impl Default for WriteFence {
    /// An open fence, for a process that is the only writer by other means.
    fn default() -> Self {
        Self::at(UNBOUNDED, None)
    }
}

impl WriteFence {
    /// A fence that is not open yet.
    pub fn closed() -> Self {
        Self::at(UNOPENED, None)
    }

    /// A fence that is open while this one is, until it is closed itself.
    pub fn child(&self) -> Self {
        Self::at(UNBOUNDED, Some(self.clone()))
    }

    fn at(until: u64, parent: Option<Self>) -> Self {
        // In the past, so that no time is below the constants.
        let now = now();
        let base = now.checked_sub(Duration::from_secs(1)).unwrap_or(now);
        Self(Arc::new(Inner { base, until: AtomicU64::new(until), parent }))
    }

    fn nanos(&self, at: Instant) -> u64 {
        let nanos = at.saturating_duration_since(self.0.base).as_nanos();
        u64::try_from(nanos).unwrap_or(UNBOUNDED - 1).clamp(CLOSED + 1, UNBOUNDED - 1)
    }

    /// True if a write may leave now.
    pub fn is_open(&self) -> bool {
        let is_open = match self.0.until.load(Ordering::Acquire) {
            UNOPENED | CLOSED => false,
            UNBOUNDED => true,
            until => self.nanos(now()) < until,
        };
        is_open && self.0.parent.as_ref().is_none_or(Self::is_open)
    }

    /// Opens the fence, or moves its end. Returns false, without any change, when it has ended already.
    pub fn extend(&self, until: Instant) -> bool {
        let now = self.nanos(now());
        let until = self.nanos(until);
        let moved = |current| (current == UNOPENED || now < current).then_some(until);
        self.0.until.fetch_update(Ordering::AcqRel, Ordering::Acquire, moved).is_ok()
    }

    /// Closes the fence for good.
    pub fn close(&self) {
        self.0.until.store(CLOSED, Ordering::Release);
    }

    /// Layer that puts the fence in front of a client's requests.
    pub fn layer<B>(
        &self,
    ) -> AsyncFilterLayer<impl AsyncPredicate<Request<B>, Request = Request<B>, Future: Send> + Clone + use<B>>
    where
        B: Send + 'static,
    {
        let fence = self.clone();
        // kube calls the service in a task of its own, and polls the response in that of the reconcile.
        AsyncFilterLayer::new(move |request: Request<B>| {
            let fence = fence.clone();
            async move { fence.check(request.method()).map(|()| request) }
        })
    }

    /// Checks that a request may leave now; reads always may. In a reconcile that `fenced` runs, its fence is checked instead
    /// of this one.
    ///
    /// # Errors
    /// [`NotLeaderError`].
    pub fn check(&self, method: &Method) -> Result<(), NotLeaderError> {
        let is_open = || RECONCILE.try_with(Self::is_open).unwrap_or_else(|_| self.is_open());
        if matches!(*method, Method::GET | Method::HEAD) || is_open() { Ok(()) } else { Err(NotLeaderError) }
    }
}

#[cfg(test)]
mod tests {
    use tower::{BoxError, Layer as _, ServiceBuilder, ServiceExt as _, buffer::Buffer, service_fn};

    use super::*;

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn fence_opens_extends_and_never_reopens() {
        let fence = WriteFence::closed();
        assert!(!fence.is_open() && fence.extend(Instant::now() + SOON) && fence.is_open());
        assert!(fence.extend(Instant::now() + SOON * 2) && fence.is_open());
        fence.close();
        assert!(!fence.extend(Instant::now() + SOON) && !fence.is_open());
        assert!(WriteFence::default().is_open());
    }

    #[test]
    fn expiry_is_final() {
        let fence = WriteFence::closed();
        fence.extend(Instant::now());
        assert!(!fence.is_open() && !fence.extend(Instant::now() + SOON));
    }

    #[tokio::test]
    async fn writes_are_refused_and_reads_are_not() {
        let fence = WriteFence::closed();
        let inner = service_fn(async |request: Request<()>| Ok::<_, BoxError>(request.method().clone()));
        let send = async |method: Method| {
            let request = Request::builder().method(method).body(()).unwrap();
            fence.layer().layer(inner).oneshot(request).await
        };
        assert!(send(Method::GET).await.is_ok());
        for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
            assert!(send(method).await.unwrap_err().is::<NotLeaderError>());
        }
        fence.extend(Instant::now() + SOON);
        assert!(send(Method::PATCH).await.is_ok());
    }

    #[test]
    fn child_is_open_while_its_parent_is_until_it_is_closed() {
        let parent = WriteFence::closed();
        let one = parent.child();
        let other = parent.child();
        assert!(!one.is_open());
        assert!(parent.extend(Instant::now() + SOON) && one.is_open() && other.is_open());
        one.close();
        assert!(!one.is_open() && other.is_open() && parent.is_open());
        parent.close();
        assert!(!other.is_open());
    }

    #[tokio::test]
    async fn writes_of_a_reconcile_need_its_fence_alone_behind_a_buffer() {
        let own = WriteFence::closed();
        let shard = WriteFence::default();
        let inner = service_fn(async |_: Request<()>| Ok::<_, BoxError>(()));
        let client = Buffer::new(ServiceBuilder::new().layer(own.layer()).service(inner), 8);
        let send = || {
            let request = Request::builder().method(Method::PATCH).body(()).unwrap();
            client.clone().oneshot(request)
        };
        assert!(send().await.is_err(), "outside of a reconcile");
        assert!(fenced(shard.clone(), send()).await.is_ok());
        let own = own.clone();
        let released = shard.clone();
        let after_release = fenced(shard, async {
            assert!(send().await.is_ok());
            released.close();
            send().await
        });
        assert!(after_release.await.unwrap_err().is::<NotLeaderError>());
        drop(own);
    }
}
