//! What contract v2 takes out of the core: one event at a time.

use tokio::time::Instant;

use super::{Core, State};
use crate::{
    clock,
    outbox::{Next, Single},
};

impl Core {
    /// When the next event of contract v2 may be sent; `None` when there is nothing to send.
    pub(crate) fn single_due(&self, now: Instant) -> Option<Instant> {
        self.with(|state| {
            if state.outbox.is_free() && state.outbox.single_due(now).is_none_or(|due| due > now) {
                state.sweep();
            }
            state.outbox.single_due(now)
        })
    }

    /// The next event of contract v2, or the same once more if it has not ended; `None` when nothing is due.
    pub(crate) fn single(&self, now: Instant) -> Option<Single> {
        self.with(|state| {
            loop {
                if state.outbox.is_free() {
                    state.sweep();
                }
                let State { outbox, watches, .. } = state;
                match outbox
                    .single(now, &|watch| watches.get(watch).is_some_and(|watched| watched.index.is_coarse()))?
                {
                    Next::Event(single) => return Some(single),
                    Next::Whole(watch) => state.outbox.tell_all(&watch, clock::unix_millis()),
                }
            }
        })
    }

    /// The event of contract v2 that is under way was taken.
    pub(crate) fn single_taken(&self) {
        self.with(|state| state.outbox.single_taken());
    }

    /// The event of contract v2 that is under way was refused.
    pub(crate) fn single_refused(&self, now: Instant) {
        self.with(|state| state.outbox.single_refused(now));
    }
}
