//! Events that the receiver refuses, by name or with the whole request.

use std::{collections::BTreeMap, time::Duration};

use tidewatch_api::identity::Epoch;
use tidewatch_contract::{
    digest::Digest,
    event::{EventId, Reason},
    exchange::EventsResponse,
};
use tokio::time::Instant;

use super::{
    AnnouncedLimits, DirtySet, EpochReason, Outbox,
    dirty_set::WATCH_KEY,
    entry::{Entry, Parking, Update},
    in_flight::{self, SequencedEvent},
};
use crate::random;

/// Longest delay before events parked by a refusal of the whole request are retried; the shortest is half of it. The
/// retry is needed because the event may be valid: a proxy, too, can refuse every request for a while.
pub(super) const PARKED_RETRY: Duration = Duration::from_secs(300);

impl Outbox {
    /// Replaces a refused event by a `watch.changed` with the same sequence and delta. If that is impossible, parks the
    /// event and returns false; the caller then begins a new epoch.
    pub(super) fn replace(&mut self, event: SequencedEvent, parking: Parking, again: &mut Vec<SequencedEvent>) -> bool {
        let Some(dirty_set) = self.watches.get_mut(&event.watch) else {
            // Its watch has left the plan, so nothing can take over its sequence; a new epoch closes the gap.
            return false;
        };
        if event.is_watch || dirty_set.info.forward {
            dirty_set.park(&event.key, event.sequence, parking);
            return false;
        }
        let id = EventId { epoch: self.epoch_state.epoch, sequence: event.sequence };
        let waiting = Entry::new(Update::Watch, Digest::ZERO, event.since);
        let text = in_flight::encode(&self.runtime, id, &dirty_set.info, WATCH_KEY, &waiting, event.delta);
        again.push(SequencedEvent { is_watch: true, text, ..event });
        true
    }

    /// Handles a request that was too large (413). Limits announced by the receiver hold from now on; without an
    /// announcement, the limit becomes half of the refused body. Returns the result of [`Self::refused_whole`].
    pub(crate) fn too_large(&mut self, now: Instant, epoch: Epoch, announced: AnnouncedLimits) -> bool {
        let sent = self
            .in_flight
            .as_ref()
            .filter(|in_flight| in_flight.outstanding > 1)
            .map(|in_flight| in_flight.body().len());
        if epoch == self.epoch_state.epoch {
            self.limits.lower(announced, sent);
        }
        self.refused_whole(now, epoch)
    }

    /// Handles a request that was refused as a whole (400, 413) by bisection: the next request has half as many events,
    /// until the refused one is isolated. True once it is; it is then replaced, or parked for a limited time.
    pub(crate) fn refused_whole(&mut self, now: Instant, epoch: Epoch) -> bool {
        let ours = epoch == self.epoch_state.epoch;
        let Some(mut in_flight) = ours.then(|| self.in_flight.take()).flatten() else { return false };
        if in_flight.outstanding > 1 {
            self.batch_limit = in_flight.outstanding.div_ceil(2);
            self.in_flight = Some(in_flight);
            return false;
        }
        let mut again = Vec::new();
        let replaced =
            in_flight.take_answered().into_iter().all(|event| self.replace(event, Parking::Temporary, &mut again));
        in_flight.prepend(again);
        self.in_flight = in_flight.non_empty();
        if !replaced {
            self.park_until(now);
            self.begin_epoch(EpochReason::Parked);
        }
        true
    }

    /// Schedules the retry of the parked events, unless one is scheduled already, which then covers all of them.
    pub(super) fn park_until(&mut self, now: Instant) {
        self.parked_until.get_or_insert_with(|| now + PARKED_RETRY / 2 + random::up_to(PARKED_RETRY / 2));
    }

    /// Enqueues the events parked for a limited time once their delay has passed.
    pub(super) fn unpark(&mut self, now: Instant) {
        if self.parked_until.is_some_and(|until| until <= now) {
            self.parked_until = None;
            self.watches.values_mut().for_each(DirtySet::unpark);
        }
    }
}

/// Refused sequences of an response with their reasons; ids of other epochs are ignored.
pub(super) fn by_sequence(epoch: Epoch, response: &EventsResponse) -> BTreeMap<u64, Reason> {
    let known = |text: &str| text.parse::<EventId>().ok().filter(|id| id.epoch == epoch);
    response.refused.iter().filter_map(|refused| Some((known(&refused.id)?.sequence, refused.reason))).collect()
}
