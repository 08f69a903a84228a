//! What contract v2 takes out of the core: one event at a time.

use tokio::time::Instant;

use super::{Core, State};
use crate::{
    clock,
    outbox::{Next, Opens, Single},
};

impl Core {
    /// When the next event of contract v2 may be sent; `None` when there is nothing to send, or each manager has one under way.
    pub(crate) fn single_due(&self, now: Instant, opens: Opens<'_>) -> Option<Instant> {
        self.with(|state| {
            if state.outbox.single_due(now, opens).is_none_or(|due| due > now) {
                state.sweep();
            }
            state.outbox.single_due(now, opens)
        })
    }

    /// The next event of contract v2, which is under way until it is said what became of it; `None` when nothing is due.
    pub(crate) fn single(&self, now: Instant, opens: Opens<'_>) -> Option<Single> {
        self.with(|state| {
            loop {
                state.sweep();
                let State { outbox, watches, .. } = state;
                let coarse = |watch: &str| watches.get(watch).is_some_and(|watched| watched.index.is_coarse());
                match outbox.single(now, opens, &coarse)? {
                    Next::Event(single) => return Some(single),
                    Next::Whole(watch) => state.outbox.tell_all(&watch, clock::unix_millis()),
                }
            }
        })
    }

    /// A manager has taken its event of contract v2.
    pub(crate) fn single_taken(&self, manager: &str) {
        self.with(|state| state.outbox.single_taken(manager));
    }

    /// A manager did not take its event of contract v2 now.
    pub(crate) fn single_failed(&self, manager: &str) {
        self.with(|state| state.outbox.single_failed(manager));
    }

    /// A manager refused its event of contract v2.
    pub(crate) fn single_refused(&self, manager: &str, now: Instant) {
        self.with(|state| state.outbox.single_refused(manager, now));
    }

    /// Whether a watch of the plan is for this manager.
    pub(crate) fn is_manager(&self, manager: &str) -> bool {
        self.with(|state| state.outbox.is_manager(manager))
    }
}
