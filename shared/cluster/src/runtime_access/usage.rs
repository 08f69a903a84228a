//! Use of a client of a runtime.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

/// Time of the last request to a runtime, and the permits of its pending requests.
///
/// The first request goes alone: a client that does not know yet whether the runtime speaks HTTP/2 opens a connection for
/// each request that it has no connection for. If its connection takes too long, those that waited for it fail with it.
pub(super) struct Usage {
    pub(super) permits: Arc<Semaphore>,
    /// Permits once the runtime has responded.
    concurrent: usize,
    state: Mutex<State>,
}

struct State {
    last: Instant,
    /// When a connection last took too long.
    given_up: Option<Instant>,
    /// Permits, those of pending requests included.
    permits: usize,
}

impl Usage {
    pub(super) fn new(concurrent: usize) -> Self {
        let permits = concurrent.min(1);
        let state = Mutex::new(State { last: Instant::now(), given_up: None, permits });
        Self { permits: Arc::new(Semaphore::new(permits)), concurrent, state }
    }

    /// Records a use now.
    pub(super) fn touch(&self) {
        self.state.lock().last = Instant::now();
    }

    /// Records a response: from now on, requests share its connection.
    pub(super) fn opened(&self) {
        let mut state = self.state.lock();
        self.permits.add_permits(self.concurrent - state.permits);
        state.permits = self.concurrent;
    }

    /// Records that a connection took too long.
    pub(super) fn gave_up(&self) {
        self.state.lock().given_up = Some(Instant::now());
    }

    /// Returns true if a connection took too long since then.
    pub(super) fn has_given_up_since(&self, start: Instant) -> bool {
        self.state.lock().given_up.is_some_and(|at| at > start)
    }

    /// Time of the last use; `None` while a request is pending.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let state = self.state.lock();
        (self.permits.available_permits() == state.permits).then_some(state.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_wait_for_the_first_response_and_leave_the_client_idle() {
        let usage = Usage::new(3);
        let request = || usage.permits.clone().try_acquire_owned();
        assert!(usage.idle_since().is_some(), "it was never used");
        let first = request().unwrap();
        assert!(usage.idle_since().is_none() && request().is_err());
        drop(first);
        let second = request().expect("the first one failed");
        usage.opened();
        usage.opened();
        let others = [request().unwrap(), request().unwrap()];
        assert!(request().is_err(), "the limit holds");
        drop((second, others));
        assert!(usage.idle_since().is_some());
    }
}
