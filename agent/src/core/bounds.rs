//! What the core holds has bounds, whatever users do: per watch, and over all watches together.

use std::collections::BTreeMap;

use super::{State, Watched};

impl State {
    /// Objects that come and go under ever new names must not fill the outbox while nobody takes its events. Half of what it may hold is
    /// left to those that went, so that each collapse makes room for as many changes again.
    pub(super) fn bound(&mut self, name: &str, at: i64) {
        if self.outbox.dirty(name) > self.cap {
            self.outbox.collapse(name, self.cap / 2, at);
        }
        while self.outbox.dirty_in_all() > self.total {
            let Some(dirtiest) = self.outbox.dirtiest() else { return };
            let dirty = self.outbox.dirty(&dirtiest);
            self.outbox.collapse(&dirtiest, dirty / 2, at);
            if self.outbox.dirty(&dirtiest) >= dirty {
                return;
            }
        }
    }

    /// Marks objects that are to be told though they have not changed, as far as there is room: half of what may be held, so that what
    /// does change finds the other half.
    pub(super) fn sweep(&mut self) {
        let half = |most: usize, dirty: usize| (most / 2).max(1).saturating_sub(dirty);
        for name in self.outbox.sweeping() {
            let Some(watched) = self.watches.get(&name) else { continue };
            let in_all = half(self.total, self.outbox.dirty_in_all());
            self.outbox.sweep(&name, half(self.cap, self.outbox.dirty(&name)).min(in_all), &watched.index);
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
            watched.lost = true;
            self.outbox.give_up(largest, at);
        }
        self.watches.get(name).is_some_and(|watched| !watched.index.is_coarse())
    }
}
