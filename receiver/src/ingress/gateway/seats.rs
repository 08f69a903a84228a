//! How many connections one runtime holds. The newest is the one that its agent uses; what is beyond the cap is what a cut
//! network left behind, or somebody who hoards, and the oldest goes. Also whose connections they are, so that those of a runtime or a
//! certificate can be ended.

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
    taken: HashMap<RuntimeId, VecDeque<Taken>>,
}

struct Taken {
    number: u64,
    /// The fingerprint of its certificate.
    leaf: Option<String>,
    gone: CancellationToken,
    out: CancellationToken,
}

/// One connection's seat; given back when dropped.
pub(super) struct Seat {
    seats: Arc<Seats>,
    runtime: RuntimeId,
    number: u64,
    /// Cancelled when the runtime has taken too many seats after this one.
    pub(super) gone: CancellationToken,
    /// Cancelled when whoever has it may speak no longer.
    pub(super) out: CancellationToken,
}

impl Seats {
    /// Takes a seat, with the fingerprint of the certificate; the oldest seat of that runtime goes when it would have more than `most`.
    pub(super) fn take(self: &Arc<Self>, runtime: &RuntimeId, leaf: Option<&str>, most: usize) -> Seat {
        let mut table = self.lock();
        table.next += 1;
        let (number, gone, out) = (table.next, CancellationToken::new(), CancellationToken::new());
        let taken = table.taken.entry(runtime.clone()).or_default();
        // Nearly always the only one.
        taken.reserve_exact(1);
        taken.push_back(Taken { number, leaf: leaf.map(str::to_owned), gone: gone.clone(), out: out.clone() });
        if taken.len() > most.max(1)
            && let Some(oldest) = taken.pop_front()
        {
            oldest.gone.cancel();
        }
        Seat { seats: self.clone(), runtime: runtime.clone(), number, gone, out }
    }

    /// Ends the connections of those who are out, by runtime and fingerprint.
    pub(super) fn end(&self, is_out: impl Fn(&RuntimeId, Option<&str>) -> bool) {
        let table = self.lock();
        for (runtime, taken) in &table.taken {
            taken.iter().filter(|taken| is_out(runtime, taken.leaf.as_deref())).for_each(|taken| taken.out.cancel());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// Gives it back; whether the runtime has no other.
    pub(super) fn leave(self) -> bool {
        self.give_back()
    }

    fn give_back(&self) -> bool {
        let mut table = self.seats.lock();
        let Some(taken) = table.taken.get_mut(&self.runtime) else { return true };
        taken.retain(|taken| taken.number != self.number);
        let was_last = taken.is_empty();
        if was_last {
            table.taken.remove(&self.runtime);
        }
        was_last
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_seat_goes_and_the_table_forgets() {
        let seats = Arc::<Seats>::default();
        let (a, b) = ("r-1".parse().unwrap(), "r-2".parse().unwrap());
        let first = seats.take(&a, None, 2);
        let second = seats.take(&a, None, 2);
        let other = seats.take(&b, None, 2);
        assert!(!first.gone.is_cancelled());
        let third = seats.take(&a, None, 2);
        assert!(first.gone.is_cancelled() && !second.gone.is_cancelled() && !other.gone.is_cancelled());
        drop(first);
        drop(third);
        let fourth = seats.take(&a, None, 2);
        assert!(!second.gone.is_cancelled(), "a seat that was given back is free");
        assert!(!second.leave() && fourth.leave(), "whoever goes last knows");
        drop(other);
        assert!(seats.lock().taken.is_empty());
    }

    #[test]
    fn who_is_out_is_found_by_runtime_and_by_certificate() {
        let seats = Arc::<Seats>::default();
        let (a, b) = ("r-1".parse().unwrap(), "r-2".parse().unwrap());
        let [old, new, other] = [(&a, "x"), (&a, "y"), (&b, "z")].map(|(id, leaf)| seats.take(id, Some(leaf), 4));
        let out = || [&old, &new, &other].map(|seat| seat.out.is_cancelled());
        seats.end(|_, leaf| leaf == Some("x"));
        assert_eq!(out(), [true, false, false]);
        seats.end(|runtime, _| *runtime == b);
        assert_eq!(out(), [true, false, true]);
        assert!(!old.gone.is_cancelled());
    }
}
