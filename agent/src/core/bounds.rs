//! Bounds memory under any churn: limits per watch and over all watches.

use super::State;
use crate::index::Index;

impl State {
    /// Bounds unsettled events under churn: beyond the limit those of the watch collapse into one `watch.changed`. At
    /// most half of the limit remains as deletions, so each collapse makes room for as many further changes.
    pub(super) fn bound_events(&mut self, name: &str, at: i64) {
        if self.outbox.dirty(name) > self.cap {
            self.outbox.collapse(name, self.cap / 2, at);
        }
        while self.outbox.total_dirty() > self.total || self.outbox.bytes() > self.bytes {
            let Some(dirtiest) = self.outbox.dirtiest() else { return };
            let dirty = self.outbox.dirty(&dirtiest);
            self.outbox.collapse(&dirtiest, dirty / 2, at);
            if self.outbox.dirty(&dirtiest) >= dirty {
                return;
            }
        }
    }

    /// Enqueues unchanged objects that are due for a resend, up to half of the limits; the other half is left to
    /// changes.
    pub(super) fn sweep(&mut self) {
        let half = |limit: usize, dirty: usize| (limit / 2).max(1).saturating_sub(dirty);
        for name in self.outbox.sweeping() {
            let Some(watched) = self.watches.get(&name) else { continue };
            if self.outbox.bytes() > self.bytes / 2 {
                return;
            }
            let in_all = half(self.total, self.outbox.total_dirty());
            self.outbox.sweep(&name, half(self.cap, self.outbox.dirty(&name)).min(in_all), &watched.index);
        }
    }

    /// Bounds the objects of all watches: the largest watch goes coarse. Returns false if `name` is coarse.
    pub(super) fn bound_objects(&mut self, name: &str, at: i64) -> bool {
        while self.has_too_many_objects() {
            let Some((largest, watched)) = self.watches.iter_mut().max_by_key(|(_, watched)| watched.index.bytes())
            else {
                break;
            };
            watched.index.go_coarse();
            watched.lost = true;
            self.outbox.go_coarse(largest, at);
        }
        self.watches.get(name).is_some_and(|watched| !watched.index.is_coarse())
    }

    fn has_too_many_objects(&self) -> bool {
        let indexes = || self.watches.values().map(|watched| &watched.index);
        indexes().map(Index::len).sum::<usize>() > self.total || indexes().map(Index::bytes).sum::<usize>() > self.bytes
    }
}
