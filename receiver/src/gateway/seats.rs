//! How many connections one runtime holds. The newest is the one that its agent uses; what is beyond the cap is what a cut
//! network left behind, or somebody who hoards, and the oldest goes.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tidewatch_shared::identity::RuntimeId;
use tokio_util::sync::CancellationToken;

/// The seats of all runtimes. Bounded by the connections there are.
#[derive(Default)]
pub(super) struct Seats(Mutex<Table>);

#[derive(Default)]
struct Table {
    next: u64,
    taken: HashMap<RuntimeId, VecDeque<(u64, CancellationToken)>>,
}

/// One connection's seat; given back when dropped.
pub(super) struct Seat {
    seats: Arc<Seats>,
    runtime: RuntimeId,
    number: u64,
    /// Cancelled when the runtime has taken too many seats after this one.
    pub(super) gone: CancellationToken,
}

impl Seats {
    /// Takes a seat; the oldest seat of that runtime goes when it would have more than `most`.
    pub(super) fn take(self: &Arc<Self>, runtime: &RuntimeId, most: usize) -> Seat {
        let mut table = self.lock();
        table.next += 1;
        let (number, gone) = (table.next, CancellationToken::new());
        let taken = table.taken.entry(runtime.clone()).or_default();
        taken.push_back((number, gone.clone()));
        if taken.len() > most.max(1)
            && let Some((_, oldest)) = taken.pop_front()
        {
            oldest.cancel();
        }
        Seat { seats: self.clone(), runtime: runtime.clone(), number, gone }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut table = self.seats.lock();
        let Some(taken) = table.taken.get_mut(&self.runtime) else { return };
        taken.retain(|(number, _)| *number != self.number);
        if taken.is_empty() {
            table.taken.remove(&self.runtime);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_seat_goes_and_the_table_forgets() {
        let seats = Arc::<Seats>::default();
        let (a, b) = ("r-1".parse().unwrap(), "r-2".parse().unwrap());
        let first = seats.take(&a, 2);
        let second = seats.take(&a, 2);
        let other = seats.take(&b, 2);
        assert!(!first.gone.is_cancelled());
        let third = seats.take(&a, 2);
        assert!(first.gone.is_cancelled() && !second.gone.is_cancelled() && !other.gone.is_cancelled());
        drop(first);
        drop(third);
        let fourth = seats.take(&a, 2);
        assert!(!second.gone.is_cancelled(), "a seat that was given back is free");
        drop((second, fourth, other));
        assert!(seats.lock().taken.is_empty());
    }
}
