//! Role of the replica that runs the tasks of the whole fleet, such as the rotation of the CA.
//!
//! Each task runs in every replica, and follows the state that is stored in KCP. It decides and writes only within
//! [`FleetRole::run`], under the fence of the role.

use std::sync::Arc;

use tokio::sync::{RwLock, watch};

use super::{WriteFence, fenced};

/// The role. Clones share it.
#[derive(Clone, Debug)]
pub struct FleetRole(Arc<Inner>);

/// Reports changes of the role. It misses none that comes after its creation.
#[derive(Debug)]
pub struct RoleChanges {
    changes: watch::Receiver<Option<WriteFence>>,
    /// Has the sender, so that it lives.
    _role: FleetRole,
}

impl RoleChanges {
    /// Waits until the role was acquired or given back since the last call. Cancel safe.
    pub async fn next(&mut self) {
        // The sender lives.
        let _ = self.changes.changed().await;
    }
}

#[derive(Debug)]
struct Inner {
    fence: watch::Sender<Option<WriteFence>>,
    /// Locked for reading by each running decision.
    running: RwLock<()>,
}

impl FleetRole {
    /// The role of a replica that does not hold it yet.
    pub fn released() -> Self {
        Self(Arc::new(Inner { fence: watch::Sender::new(None), running: RwLock::default() }))
    }

    /// The role of a process that is the only one.
    pub fn held(fence: WriteFence) -> Self {
        let role = Self::released();
        role.acquire(fence);
        role
    }

    /// Takes the role.
    pub fn acquire(&self, fence: WriteFence) {
        self.0.fence.send_replace(Some(fence));
    }

    /// Ends the role: no decision begins any more.
    pub fn end(&self) {
        self.0.fence.send_replace(None);
    }

    /// Gives the role back. When this returns, no decision runs any more. Cancel safe: no new one begins in any case.
    pub async fn release(&self) {
        self.end();
        drop(self.0.running.write().await);
    }

    /// True while this replica holds the role.
    pub fn is_held(&self) -> bool {
        self.0.fence.borrow().as_ref().is_some_and(WriteFence::is_open)
    }

    /// Changes of the role from now on.
    pub fn changes(&self) -> RoleChanges {
        RoleChanges { changes: self.0.fence.subscribe(), _role: self.clone() }
    }

    /// Runs a decision and its writes while this replica holds the role; returns `None` without polling it if it does not.
    pub async fn run<F: Future>(&self, decision: F) -> Option<F::Output> {
        let _running = self.0.running.read().await;
        let fence = self.0.fence.borrow().clone().filter(WriteFence::is_open)?;
        Some(fenced(fence, decision).await)
    }
}

#[cfg(test)]
mod tests {
    use std::future;

    use futures::FutureExt as _;
    use http::Method;

    use super::*;

    #[tokio::test]
    async fn decisions_run_under_the_fence_of_the_role_while_it_is_held() {
        let role = FleetRole::released();
        let own = WriteFence::closed();
        let fence = WriteFence::default();
        let write = async || own.check(&Method::PATCH).is_ok();
        assert_eq!((role.run(write()).await, role.is_held()), (None, false));
        role.acquire(fence.clone());
        assert_eq!((role.run(write()).await, role.is_held()), (Some(true), true));
        fence.close();
        assert_eq!((role.run(write()).await, role.is_held()), (None, false));
    }

    #[test]
    fn no_change_of_the_role_is_missed() {
        let role = FleetRole::released();
        let mut changes = role.changes();
        assert_eq!(changes.next().now_or_never(), None);
        role.acquire(WriteFence::default());
        assert_eq!(changes.next().now_or_never(), Some(()), "between two calls");
        assert_eq!(changes.next().now_or_never(), None);
        assert!(role.release().now_or_never().is_some());
        assert_eq!(changes.next().now_or_never(), Some(()));
    }

    #[test]
    fn release_waits_for_running_decisions_and_permits_no_new_one() {
        let role = FleetRole::held(WriteFence::default());
        let mut running = Box::pin(role.run(future::pending::<()>()));
        assert!(running.as_mut().now_or_never().is_none());
        let mut release = Box::pin(role.release());
        assert!(release.as_mut().now_or_never().is_none());
        assert!(!role.is_held());
        drop(running);
        assert!(release.as_mut().now_or_never().is_some());
        assert_eq!(role.run(async {}).now_or_never(), Some(None));
    }
}
