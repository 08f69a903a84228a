//! Places in the queues of one service, counted by runtime. Pure.

use std::collections::BTreeMap;

use tidewatch_api::identity::RuntimeId;

/// Part of the free places that one runtime may hold.
const SHARE: usize = 16;

/// Number of queued objects of each runtime.
#[derive(Debug, Default)]
pub(super) struct Shares {
    total: usize,
    by_runtime: BTreeMap<RuntimeId, usize>,
}

impl Shares {
    /// Objects of all runtimes.
    pub(super) const fn total(&self) -> usize {
        self.total
    }

    /// True if a runtime may queue one more object: it may hold a sixteenth of the free places. So there always are free
    /// ones, however many runtimes have many changes, and a runtime with few changes finds one.
    pub(super) fn admits(&self, runtime: &RuntimeId, capacity: usize) -> bool {
        let own = self.by_runtime.get(runtime).copied().unwrap_or(0);
        own < capacity.saturating_sub(self.total).div_ceil(SHARE)
    }

    /// Records that a queue of a runtime has `after` objects instead of `before`.
    pub(super) fn change(&mut self, runtime: &RuntimeId, before: usize, after: usize) {
        if before == after {
            return;
        }
        self.total = (self.total + after).saturating_sub(before);
        let own = (self.by_runtime.get(runtime).copied().unwrap_or(0) + after).saturating_sub(before);
        if own == 0 {
            self.by_runtime.remove(runtime);
        } else {
            self.by_runtime.insert(runtime.clone(), own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: usize) -> RuntimeId {
        format!("r-{number}").parse().unwrap()
    }

    /// Queues objects of one runtime until it is refused; returns their number.
    fn fill(shares: &mut Shares, runtime: &RuntimeId, capacity: usize) -> usize {
        (0..)
            .take_while(|_| {
                let admitted = shares.admits(runtime, capacity);
                shares.change(runtime, 0, usize::from(admitted));
                admitted
            })
            .count()
    }

    #[test]
    fn thirty_noisy_runtimes_leave_places_for_a_thousand_quiet_ones() {
        const CAPACITY: usize = 65_536;
        let mut shares = Shares::default();
        for number in 0..30 {
            fill(&mut shares, &id(number), CAPACITY);
        }
        assert!(shares.total() < CAPACITY - 10_000, "{}", shares.total());
        for number in 100..1_100 {
            let runtime = id(number);
            for _ in 0..10 {
                assert!(shares.admits(&runtime, CAPACITY), "{number}");
                shares.change(&runtime, 0, 1);
            }
        }
        assert!((0..30).all(|number| !shares.admits(&id(number), CAPACITY)));
    }

    #[test]
    fn capacity_is_never_exceeded_and_released_places_are_reused() {
        const CAPACITY: usize = 1_600;
        let mut shares = Shares::default();
        let alone = fill(&mut shares, &id(0), CAPACITY);
        assert!((90..=100).contains(&alone), "{alone}");
        for number in 1..2_000 {
            fill(&mut shares, &id(number), CAPACITY);
        }
        assert_eq!(shares.total(), CAPACITY);
        for number in 0..2_000 {
            let own = shares.by_runtime.get(&id(number)).copied().unwrap_or(0);
            shares.change(&id(number), own, 0);
        }
        assert_eq!((shares.total(), shares.by_runtime.len()), (0, 0));
        assert_eq!(fill(&mut shares, &id(1), CAPACITY), alone);
    }
}
