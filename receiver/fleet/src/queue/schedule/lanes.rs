//! Lanes of a queue, and the turns of the priorities in each of them.

use super::PRIORITY_ROTATION;
use crate::queue::Priority;

/// Lane of a runtime. Runtimes that the last reconcile could not reach, that were slow, or whose reconciles take more than
/// their share of time, wait in a lane of their own, so that they cannot occupy all slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Lane {
    #[default]
    Normal,
    Slow,
}

impl Lane {
    const ALL: [Self; 2] = [Self::Normal, Self::Slow];
}

/// Turns of the priorities, and slots of the slow lane.
#[derive(Debug)]
pub(super) struct Lanes {
    turns: [usize; 2],
    slow_running: usize,
    slow_slots: usize,
}

impl Lanes {
    /// Lanes for this number of workers, of which a quarter, at least one, serves the slow lane.
    pub(super) fn new(slots: usize) -> Self {
        Self { turns: [0; 2], slow_running: 0, slow_slots: (slots / 4).max(1) }
    }

    /// Lane and priority to serve next, by the first ticket of each: each lane's priority has its turn, and of the two lanes
    /// the entry that has waited longer is served. `None` if no entry with a free slot is ready.
    pub(super) fn choose(&self, first: impl Fn(Lane, Priority) -> Option<u64>) -> Option<(Lane, Priority)> {
        let has_slow_slot = self.slow_running < self.slow_slots;
        let open = Lane::ALL.into_iter().filter(|lane| *lane == Lane::Normal || has_slow_slot);
        let candidates = open.filter_map(|lane| {
            PRIORITY_ROTATION[self.turns[lane as usize]]
                .into_iter()
                .find_map(|priority| first(lane, priority).map(|ticket| (ticket, lane, priority)))
        });
        candidates.min_by_key(|(ticket, ..)| *ticket).map(|(_, lane, priority)| (lane, priority))
    }

    /// Begins the reconcile of an entry of a lane, whose turn passes on.
    pub(super) fn begin(&mut self, lane: Lane) {
        let turn = &mut self.turns[lane as usize];
        *turn = (*turn + 1) % PRIORITY_ROTATION.len();
        self.slow_running += usize::from(lane == Lane::Slow);
    }

    /// Ends such a reconcile, which frees its slot.
    pub(super) fn end(&mut self, lane: Lane) {
        self.slow_running -= usize::from(lane == Lane::Slow);
    }
}
