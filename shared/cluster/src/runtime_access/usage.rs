//! Use of a client of a runtime.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

/// Time of the last request to a runtime, and the permits of its pending requests.
pub(super) struct Usage {
    pub(super) permits: Arc<Semaphore>,
    concurrent: usize,
    last: Mutex<Instant>,
}

impl Usage {
    pub(super) fn new(concurrent: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(concurrent)), concurrent, last: Mutex::new(Instant::now()) }
    }

    /// Records a use now.
    pub(super) fn touch(&self) {
        *self.last.lock() = Instant::now();
    }

    /// Time of the last use; `None` while a request is pending.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let last = *self.last.lock();
        (self.permits.available_permits() == self.concurrent).then_some(last)
    }
}
