//! What the core holds has bounds, whatever users do: per watch, and over all watches together.

use std::collections::BTreeMap;

use super::{State, Watched};

impl State {
    /// Objects that come and go under ever new names must not fill the outbox while nobody takes its events.
    pub(super) fn bound(&mut self, name: &str, at: i64) {
        if self.outbox.dirty(name) > self.cap {
            self.outbox.collapse(name, at);
        }
        while self.outbox.dirty_in_all() > self.total {
            let Some(dirtiest) = self.outbox.dirtiest().filter(|name| self.outbox.dirty(name) > 1) else { return };
            self.outbox.collapse(&dirtiest, at);
        }
    }

    /// All watches together must not hold too much. False if this one has been given up for it.
    pub(super) fn thin(&mut self, name: &str, at: i64) -> bool {
        let objects =
            |watches: &BTreeMap<_, Watched>| watches.values().map(|watched| watched.index.len()).sum::<usize>();
        while objects(&self.watches) > self.total {
            let Some((largest, watched)) = self.watches.iter_mut().max_by_key(|(_, watched)| watched.index.len())
            else {
                break;
            };
            watched.index.give_up();
            self.outbox.collapse(largest, at);
        }
        self.watches.get(name).is_some_and(|watched| !watched.index.is_coarse())
    }
}
