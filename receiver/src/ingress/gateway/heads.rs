//! How long the head of a request of HTTP/1.1 may take, from its first byte to its last. The rest between two requests is not
//! limited here: that is what `life` is for.
//!
//! Bytes that come while a request is in flight are its body, or a head that was sent before its turn. Of such a head the time begins with
//! the first byte that comes after the answer was taken; if none does, the connection is one that rests.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

use super::life::Life;

/// See the module. A head that comes in one piece, as nearly all do, costs no timer.
pub(super) struct Heads {
    life: Arc<Life>,
    deadline: Duration,
    /// How many requests had begun when bytes came of the next one.
    partial: Option<u64>,
    late: Option<Pin<Box<Sleep>>>,
}

impl Heads {
    /// Of the connection with this life.
    pub(super) const fn new(life: Arc<Life>, deadline: Duration) -> Self {
        Self { life, deadline, partial: None, late: None }
    }

    /// Takes note of bytes that came: of a head, unless a request is in flight. The end of all has none.
    pub(super) fn read(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let head = self.life.resting();
        if head != self.partial {
            // The time that runs, if any does, is that of a head before.
            (self.partial, self.late) = (head, None);
        }
    }

    /// Ready when a head has begun, is not whole, and its time is over. To be asked when no more bytes are there.
    pub(super) fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.partial.is_none() || self.partial != self.life.resting() {
            (self.partial, self.late) = (None, None);
            return Poll::Pending;
        }
        let deadline = self.deadline;
        self.late.get_or_insert_with(|| Box::pin(sleep(deadline))).as_mut().poll(context)
    }
}
