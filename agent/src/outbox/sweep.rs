//! Sends an event for every object of a forwarded watch, in key order and as capacity permits: its manager understands
//! single objects only, and the index knows their names.
//!
//! The sweep is circular. If it is restarted before it has ended, it continues at its current position, so that no
//! object starves.

use std::sync::Arc;

use tidewatch_contract::event::Change;

use super::entry::{Entry, Update};
use crate::index::Index;

/// Position of the sweep of one watch.
#[derive(Debug, Default)]
pub(super) struct Sweep {
    /// Last key taken, in this round or an earlier one.
    at: Arc<str>,
    round: Option<Round>,
}

#[derive(Debug)]
struct Round {
    /// Last key of the round.
    stop: Arc<str>,
    /// The round has passed the end of the key space and restarted at the first key.
    wrapped: bool,
    /// Time at which the objects became dirty, in Unix milliseconds.
    since: i64,
}

impl Sweep {
    /// Starts a round over every object, regardless of an earlier round. An unfinished round keeps its start time.
    pub(super) fn begin(&mut self, at: i64) {
        let since = self.round.take().map_or(at, |round| round.since);
        self.round = Some(Round { stop: self.at.clone(), wrapped: false, since });
    }

    /// Ends the round without its remaining objects.
    pub(super) fn end(&mut self) {
        self.round = None;
    }

    /// True while objects may be left.
    pub(super) const fn is_under_way(&self) -> bool {
        self.round.is_some()
    }

    /// Takes the next objects to enqueue, at most `room`.
    pub(super) fn take(&mut self, room: usize, index: &Index) -> Vec<(Arc<str>, Entry)> {
        let mut swept: Vec<(Arc<str>, Entry)> = Vec::new();
        while let Some(round) = &mut self.round
            && swept.len() < room
        {
            let since = round.since;
            let up_to = round.wrapped.then_some(&*round.stop);
            let next = index.after(&self.at, up_to).take(room - swept.len());
            swept.extend(next.map(|(key, seen, part)| {
                let update = Update::Object { seen: seen.clone(), change: Change::Status, part };
                (Arc::from(key), Entry::new(update, part, since))
            }));
            if swept.len() == room {
                break;
            }
            if round.wrapped {
                self.round = None;
            } else {
                round.wrapped = true;
                self.at = Arc::default();
            }
        }
        if let Some((last, _)) = swept.last() {
            self.at = last.clone();
        }
        swept
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroI64;

    use tidewatch_api::plan::Field;
    use tidewatch_contract::digest::ObjectHasher;

    use super::*;
    use crate::index::{ChangeRule, ObjectState, Version};

    fn index(keys: &[&str]) -> Index {
        let hasher = Arc::new(ObjectHasher::new(&"r-1".parse().unwrap()));
        let mut index = Index::new(hasher, ChangeRule { field: Field::Spec, every_version: false }, 100);
        for key in keys {
            let seen = ObjectState {
                uid: "u".into(),
                version: Version::Number(1),
                generation: NonZeroI64::new(1),
                metadata: 0,
            };
            index.apply(key, seen);
        }
        index
    }

    fn take(sweep: &mut Sweep, room: usize, index: &Index) -> Vec<String> {
        sweep.take(room, index).into_iter().map(|(key, _)| key.to_string()).collect()
    }

    #[test]
    fn sweep_takes_every_object_once_and_ends() {
        let mut sweep = Sweep::default();
        let index = index(&["n/a", "n/b", "n/c"]);
        assert!(take(&mut sweep, 9, &index).is_empty());
        sweep.begin(0);
        assert!(take(&mut sweep, 0, &index).is_empty() && sweep.is_under_way());
        assert_eq!(take(&mut sweep, 2, &index), ["n/a", "n/b"]);
        assert_eq!(take(&mut sweep, 2, &index), ["n/c"]);
        assert!(!sweep.is_under_way());
    }

    #[test]
    fn restarted_sweep_continues_at_its_position_and_covers_all() {
        let mut sweep = Sweep::default();
        let all = index(&["n/a", "n/b", "n/c", "n/d"]);
        for round in [["n/a", "n/b"], ["n/c", "n/d"], ["n/a", "n/b"]] {
            sweep.begin(0);
            assert_eq!(take(&mut sweep, 2, &all), round);
        }
        sweep.begin(0);
        // The object at the current position is deleted meanwhile, and another one is created.
        let other = index(&["n/a", "n/aa", "n/c"]);
        assert_eq!(take(&mut sweep, 9, &other), ["n/c", "n/a", "n/aa"]);
        assert!(!sweep.is_under_way());
        let since = |sweep: &mut Sweep| sweep.take(1, &other)[0].1.since;
        sweep.begin(5);
        sweep.begin(7);
        assert_eq!(since(&mut sweep), 5, "a restart keeps the start time");
    }
}
