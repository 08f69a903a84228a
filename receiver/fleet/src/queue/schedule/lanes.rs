//! Lanes and turns that several queues share, so that together they serve their workers as one queue would.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use super::PRIORITY_ROTATION;
use crate::queue::Priority;

/// Lane of a runtime. Runtimes that the last reconcile could not reach, that were slow, or whose reconciles take more than
/// their share of time, wait in a lane of their own, so that they cannot occupy all slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Lane {
    #[default]
    Normal,
    Slow,
}

impl Lane {
    pub(super) const ALL: [Self; 2] = [Self::Normal, Self::Slow];
}

/// Tickets, turns of the priorities, slots of the slow lane, and counters of all queues of one set of workers.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// Tickets order the entries of all queues by their waiting time.
    tickets: AtomicU64,
    turns: [AtomicUsize; 2],
    slow_running: AtomicUsize,
    slow_slots: usize,
    coalesced: AtomicU64,
    busy: AtomicU64,
}

/// Slot of the slow lane, free again when it is dropped.
#[derive(Debug)]
pub(crate) struct SlowSlot(Arc<Lanes>);

impl Drop for SlowSlot {
    fn drop(&mut self) {
        self.0.slow_running.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Ticket of the first ready entry by lane and priority, of one queue.
pub(crate) type Heads = [[Option<u64>; 3]; 2];

impl Lanes {
    /// Lanes for this number of workers, of which a quarter, at least one, serves the slow lane.
    pub(crate) fn new(slots: usize) -> Arc<Self> {
        Arc::new(Self {
            tickets: AtomicU64::default(),
            turns: Default::default(),
            slow_running: AtomicUsize::default(),
            slow_slots: (slots / 4).max(1),
            coalesced: AtomicU64::default(),
            busy: AtomicU64::default(),
        })
    }

    /// Next ticket; later ones are higher.
    pub(super) fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// Occupies a slot of the slow lane; `None` if all are occupied.
    pub(super) fn slow_slot(self: &Arc<Self>) -> Option<SlowSlot> {
        let more = |running| (running < self.slow_slots).then_some(running + 1);
        let occupied = self.slow_running.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        occupied.is_ok().then(|| SlowSlot(self.clone()))
    }

    /// Passes the turn of a lane on after an entry was taken from it.
    pub(super) fn pass_turn(&self, lane: Lane) {
        self.turns[lane as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Lane and priority to serve next, by the first ticket of each: each lane's priority has its turn, and of the two lanes
    /// the entry that has waited longer is served. `None` if no entry with a free slot is ready.
    pub(crate) fn choose(&self, first: impl Fn(Lane, Priority) -> Option<u64>) -> Option<(Lane, Priority, u64)> {
        let has_slow_slot = self.slow_running.load(Ordering::Acquire) < self.slow_slots;
        let open = Lane::ALL.into_iter().filter(|lane| *lane == Lane::Normal || has_slow_slot);
        let candidates = open.filter_map(|lane| {
            let turn = self.turns[lane as usize].load(Ordering::Relaxed) % PRIORITY_ROTATION.len();
            PRIORITY_ROTATION[turn]
                .into_iter()
                .find_map(|priority| first(lane, priority).map(|ticket| (lane, priority, ticket)))
        });
        candidates.min_by_key(|(_, _, ticket)| *ticket)
    }

    pub(super) fn count_coalesced(&self) {
        self.coalesced.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_busy(&self) {
        self.busy.fetch_add(1, Ordering::Relaxed);
    }

    /// Enqueues that merged into work already queued.
    pub(crate) fn coalesced(&self) -> u64 {
        self.coalesced.load(Ordering::Relaxed)
    }

    /// Reconciles after which their runtime had used up its share of time.
    pub(crate) fn busy(&self) -> u64 {
        self.busy.load(Ordering::Relaxed)
    }
}
