//! Access of contract v2: one event per request.

use tokio::time::Instant;

use super::{Core, State};
use crate::{
    clock,
    outbox::{NextSingle, NotBefore, SingleEvent},
};

impl Core {
    /// Earliest time of the next event; `None` if there is nothing to send, or every manager has an event in flight.
    pub(crate) fn single_due(&self, now: Instant, not_before: NotBefore<'_>) -> Option<Instant> {
        self.with(|state| {
            if state.outbox.single_due(now, not_before).is_none_or(|due| due > now) {
                state.sweep_paced(now);
            }
            state.outbox.single_due(now, not_before).into_iter().chain(state.sweep_due(now)).min()
        })
    }

    /// Takes the next event, which is in flight until its outcome is reported; `None` if nothing is due.
    pub(crate) fn single(&self, now: Instant, not_before: NotBefore<'_>) -> Option<SingleEvent> {
        self.with(|state| {
            loop {
                state.sweep_paced(now);
                let State { outbox, watches, .. } = state;
                let coarse = |watch: &str| watches.get(watch).is_some_and(|watched| watched.index.is_coarse());
                match outbox.single(now, not_before, &coarse)? {
                    NextSingle::Event(single) => return Some(single),
                    NextSingle::Expand(watch) => state.outbox.resend_all(&watch, clock::unix_millis()),
                }
            }
        })
    }

    /// A manager accepted its event.
    pub(crate) fn single_accepted(&self, manager: &str) {
        self.with(|state| state.outbox.single_accepted(manager));
    }

    /// A manager's event failed and will be retried.
    pub(crate) fn single_failed(&self, manager: &str) {
        self.with(|state| state.outbox.single_failed(manager));
    }

    /// A manager refused its event.
    pub(crate) fn single_refused(&self, manager: &str, now: Instant) {
        self.with(|state| state.outbox.single_refused(manager, now));
    }

    /// Reports whether a watch of the plan is for this manager.
    pub(crate) fn is_manager(&self, manager: &str) -> bool {
        self.with(|state| state.outbox.is_manager(manager))
    }
}
