//! All objects of a watch that goes to another manager are told, in their turn and as there is room: contract v2 knows objects only, and
//! the index has their names already.
//!
//! It goes round. One that begins anew before it has ended goes on where it stands, so that no object starves.

use std::sync::Arc;

use tidewatch_shared::digest::Digest;

use crate::index::{Index, Seen};

/// How far it is.
#[derive(Debug, Default)]
pub(super) struct Sweep {
    /// The key that was told last, in this round or in one before.
    at: Arc<str>,
    round: Option<Round>,
}

#[derive(Debug)]
struct Round {
    /// The last key of it.
    stop: Arc<str>,
    /// It has come to the end of all keys and begun from the first.
    wrapped: bool,
    /// When the objects had to be told, in Unix milliseconds.
    since: i64,
}

/// One object to tell.
#[derive(Debug)]
pub(super) struct Swept {
    pub(super) key: Arc<str>,
    pub(super) seen: Seen,
    /// Its part of the digest.
    pub(super) part: Digest,
    /// When it had to be told, in Unix milliseconds.
    pub(super) since: i64,
}

impl Sweep {
    /// From now on every object is to be told, whatever was told before.
    pub(super) fn begin(&mut self, at: i64) {
        let since = self.round.take().map_or(at, |round| round.since);
        self.round = Some(Round { stop: self.at.clone(), wrapped: false, since });
    }

    /// Nothing is left to tell.
    pub(super) fn end(&mut self) {
        self.round = None;
    }

    /// Whether something may be left to tell.
    pub(super) const fn is_under_way(&self) -> bool {
        self.round.is_some()
    }

    /// The next objects, at most so many.
    pub(super) fn take(&mut self, room: usize, index: &Index) -> Vec<Swept> {
        let mut swept = Vec::new();
        while let Some(round) = &mut self.round
            && swept.len() < room
        {
            let (since, up_to) = (round.since, round.wrapped.then_some(&*round.stop));
            let next = index.behind(&self.at, up_to).take(room - swept.len());
            swept.extend(next.map(|(key, seen, part)| Swept { key: key.into(), seen: seen.clone(), part, since }));
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
        if let Some(last) = swept.last() {
            self.at = last.key.clone();
        }
        swept
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroI64;

    use tidewatch_shared::{digest::ObjectHasher, plan::Field};

    use super::*;
    use crate::index::{Rule, Version};

    fn index(keys: &[&str]) -> Index {
        let hasher = Arc::new(ObjectHasher::new(&"r-1".parse().unwrap()));
        let mut index = Index::new(hasher, Rule { field: Field::Spec, every_version: false }, 100);
        for key in keys {
            let seen =
                Seen { uid: "u".into(), version: Version::Number(1), generation: NonZeroI64::new(1), metadata: 0 };
            index.apply(key, seen);
        }
        index
    }

    fn take(sweep: &mut Sweep, room: usize, index: &Index) -> Vec<String> {
        sweep.take(room, index).into_iter().map(|swept| swept.key.to_string()).collect()
    }

    #[test]
    fn a_round_tells_every_object_once_and_ends() {
        let (mut sweep, index) = (Sweep::default(), index(&["n/a", "n/b", "n/c"]));
        assert!(take(&mut sweep, 9, &index).is_empty());
        sweep.begin(0);
        assert!(take(&mut sweep, 0, &index).is_empty() && sweep.is_under_way());
        assert_eq!(take(&mut sweep, 2, &index), ["n/a", "n/b"]);
        assert_eq!(take(&mut sweep, 2, &index), ["n/c"]);
        assert!(!sweep.is_under_way());
    }

    #[test]
    fn one_that_begins_anew_goes_on_where_it_stands_and_tells_all() {
        let (mut sweep, all) = (Sweep::default(), index(&["n/a", "n/b", "n/c", "n/d"]));
        for round in [["n/a", "n/b"], ["n/c", "n/d"], ["n/a", "n/b"]] {
            sweep.begin(0);
            assert_eq!(take(&mut sweep, 2, &all), round);
        }
        sweep.begin(0);
        // What it stood at is gone meanwhile, and something else came.
        let other = index(&["n/a", "n/aa", "n/c"]);
        assert_eq!(take(&mut sweep, 9, &other), ["n/c", "n/a", "n/aa"]);
        assert!(!sweep.is_under_way());
        let since = |sweep: &mut Sweep| sweep.take(1, &other)[0].since;
        sweep.begin(5);
        sweep.begin(7);
        assert_eq!(since(&mut sweep), 5, "late is late");
    }
}
