//! Delivery under contract v2: one request per event, and an event is settled once its manager has accepted it.
//!
//! The dirty set is the same as under contract v3. Features that v2 lacks are left out: there are no deltas and no
//! watermarks, and since v2 addresses objects only, a `watch.changed` is expanded into one event for each existing
//! object.
//!
//! One event is in flight per manager, so no manager waits for the response of another, and the older event of an object
//! has completed before its newer one is sent. An event that was not accepted waits again, behind the others.

use std::sync::Arc;

use tidewatch_contract::v2::{self, Event};
use tokio::time::Instant;

use super::{
    Outbox, Update, WatchInfo,
    dirty_set::{DirtySet, Parking},
    entry::Attempts,
};

/// Number of refusals after which an event is parked.
const TRIES: u8 = 5;

/// Returns the earliest time, at or after the given one, at which a request to a manager is permitted.
pub(crate) type NotBefore<'a> = &'a dyn Fn(&str, Instant) -> Instant;

/// One event to send in a request of its own.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SingleEvent {
    /// Manager that the event is for.
    pub(crate) manager: String,
    /// Body of the request.
    pub(crate) event: Event,
    /// True if the event has been sent before.
    pub(crate) again: bool,
}

/// Next step of the delivery.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextSingle {
    /// Send this event.
    Event(SingleEvent),
    /// Enqueue all objects of this watch.
    Expand(Arc<str>),
}

/// Identity of an event in flight.
#[derive(Debug)]
pub(super) struct SingleInFlight {
    watch: Arc<str>,
    key: Arc<str>,
    sequence: u64,
}

impl Outbox {
    /// Earliest time of the next event; `None` when there is nothing to send, or when every manager with waiting events
    /// has one in flight.
    pub(crate) fn single_due(&self, now: Instant, not_before: NotBefore<'_>) -> Option<Instant> {
        let waiting = self.watches.values().filter_map(|dirty_set| self.due_single(dirty_set, now, not_before));
        waiting.chain(self.parked_until.filter(|_| self.parked() > 0)).min()
    }

    fn due_single(&self, dirty_set: &DirtySet, now: Instant, not_before: NotBefore<'_>) -> Option<Instant> {
        let manager = &*dirty_set.info.manager;
        let due = dirty_set.due(now).filter(|_| !self.singles.contains_key(manager))?;
        Some(not_before(manager, due))
    }

    /// Takes the next event, which is in flight until its result is reported; `None` when nothing is due. For a watch
    /// without known object names, as `coarse` decides, the event carries no name.
    pub(crate) fn single(
        &mut self,
        now: Instant,
        not_before: NotBefore<'_>,
        coarse: &dyn Fn(&str) -> bool,
    ) -> Option<NextSingle> {
        self.unpark(now);
        loop {
            let is_due =
                |name: &Arc<str>| self.due_single(&self.watches[name], now, not_before).is_some_and(|due| due <= now);
            let watch = self.round_robin().into_iter().find(is_due)?;
            self.served = Some(watch.clone());
            let dirty_set = self.watches.get_mut(&watch)?;
            let (key, waiting) = dirty_set.next()?;
            if waiting.update == Update::Watch && !coarse(&watch) {
                return Some(NextSingle::Expand(watch));
            }
            let again = waiting.attempts.again;
            if !again {
                self.metrics.sequenced(waiting.update.as_str(), waiting.since);
            }
            self.epoch_state.sequence += 1;
            let sequence = self.epoch_state.sequence;
            dirty_set.sent(key.clone(), sequence, waiting);
            let manager = dirty_set.info.manager.clone();
            if v2::is_manager(&manager) {
                let event = event(&dirty_set.info, &key);
                self.singles.insert(manager.clone(), SingleInFlight { watch, key, sequence });
                return Some(NextSingle::Event(SingleEvent { manager: manager.into(), event, again }));
            }
            // The name of this manager cannot be a path segment of a request.
            dirty_set.park(&key, sequence, Parking::Temporary);
            self.park_until(now);
        }
    }

    /// True if a watch of the plan is for this manager.
    pub(crate) fn is_manager(&self, manager: &str) -> bool {
        self.watches.values().any(|dirty_set| &*dirty_set.info.manager == manager)
    }

    /// Settles the event in flight of a manager, which has accepted it.
    pub(crate) fn single_accepted(&mut self, manager: &str) {
        let Some(SingleInFlight { watch, sequence, .. }) = self.singles.remove(manager) else { return };
        if let Some(dirty_set) = self.watches.get_mut(&watch) {
            dirty_set.settle(sequence, |since| {
                self.metrics.accepted(since);
                self.metrics.settled(since);
            });
        }
    }

    /// Enqueues the event in flight of a manager again, after a failure that is not the event's fault.
    pub(crate) fn single_failed(&mut self, manager: &str) {
        self.requeue_single(manager, 0);
    }

    /// Enqueues the event in flight of a manager again, which has refused it; after [`TRIES`] refusals the event is
    /// parked.
    pub(crate) fn single_refused(&mut self, manager: &str, now: Instant) {
        if self.requeue_single(manager, 1) {
            self.park_until(now);
        }
    }

    /// Enqueues the event again, unless its watch has left the plan or the entry was dropped on overflow. True if it is
    /// parked instead.
    fn requeue_single(&mut self, manager: &str, refusals: u8) -> bool {
        let Some(SingleInFlight { watch, key, sequence }) = self.singles.remove(manager) else { return false };
        let Some(dirty_set) = self.watches.get_mut(&watch) else { return false };
        let refusals = dirty_set.change_unsettled(&key, sequence, |waiting| {
            let before = waiting.attempts.refusals;
            waiting.attempts = Attempts { again: true, refusals: before.saturating_add(refusals) };
            waiting.attempts.refusals
        });
        let Some(refusals) = refusals else { return false };
        // In v2, an invalid event cannot be distinguished from a misconfigured listener.
        let is_parked = refusals >= TRIES;
        if is_parked {
            dirty_set.park(&key, sequence, Parking::Temporary);
        } else {
            dirty_set.requeue(&key, sequence);
        }
        is_parked
    }
}

fn event(info: &WatchInfo, key: &str) -> Event {
    let (namespace, name) = key.split_once('/').unwrap_or_default();
    let [namespace, name, group, version, kind] =
        [namespace, name, &*info.group, &*info.version, &*info.kind].map(str::to_owned);
    Event { namespace, name, group, version, kind }
}

#[cfg(test)]
mod tests;
