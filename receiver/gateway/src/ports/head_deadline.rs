//! Deadline of an HTTP/1.1 request's head, from its first byte to its last. The time between two requests is limited by
//! `lifecycle`.
//!
//! Bytes that arrive while a request is in flight belong to its body or to a pipelined head. The deadline of a
//! pipelined head starts with the first bytes after the response was read; if none arrive, the connection counts as
//! idle.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

use super::lifecycle::ConnectionLifecycle;

/// Deadline of the current head. A head that arrives in one piece, as nearly all do, costs no timer.
pub(super) struct HeadDeadline {
    lifecycle: Arc<ConnectionLifecycle>,
    deadline: Duration,
    /// Count of requests before the head of which bytes have arrived.
    partial: Option<u64>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl HeadDeadline {
    pub(super) const fn new(lifecycle: Arc<ConnectionLifecycle>, deadline: Duration) -> Self {
        Self { lifecycle, deadline, partial: None, timer: None }
    }

    /// Records received bytes, which belong to a head unless a request is in flight. End of stream has none.
    pub(super) fn read(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let head = self.lifecycle.requests_if_idle();
        if head != self.partial {
            // A running timer belongs to an earlier head.
            (self.partial, self.timer) = (head, None);
        }
    }

    /// Ready when the deadline of an incomplete head has passed. Must be polled when no more bytes are available.
    pub(super) fn poll_elapsed(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.partial.is_none() || self.partial != self.lifecycle.requests_if_idle() {
            (self.partial, self.timer) = (None, None);
            return Poll::Pending;
        }
        let deadline = self.deadline;
        self.timer.get_or_insert_with(|| Box::pin(sleep(deadline))).as_mut().poll(context)
    }
}
