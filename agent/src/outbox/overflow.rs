//! Overflow: replaces entries of single objects by one `watch.changed`, and still informs the manager of a forwarded
//! watch of every object.

use std::sync::Arc;

use tidewatch_contract::digest::Digest;

use super::{EVENTS_PER_REQUEST, Outbox, Update, dirty_set::WATCH_KEY};
use crate::index::Index;

impl Outbox {
    /// Enqueues a `watch.changed` that covers objects with unknown names. For a forwarded watch it is marked
    /// as unnamed, because its manager understands single objects only.
    pub(crate) fn mark_unnamed(&mut self, watch: &str, at: i64) {
        let forward = self.watches.get(watch).is_some_and(|dirty_set| dirty_set.info.forward);
        self.mark(watch, WATCH_KEY, if forward { Update::Unnamed } else { Update::Watch }, Digest::ZERO, at);
    }

    /// Starts a sweep, which sends an event for every existing object of a watch although it has not changed;
    /// [`Self::sweep`] enqueues them.
    pub(crate) fn resend_all(&mut self, watch: &str, at: i64) {
        if let Some(dirty_set) = self.watches.get_mut(watch) {
            dirty_set.sweep.begin(at);
        }
    }

    /// Watches with a sweep under way.
    pub(crate) fn sweeping(&self) -> Vec<Arc<str>> {
        let sweeping = self.watches.iter().filter(|(_, dirty_set)| dirty_set.sweep.is_under_way());
        sweeping.map(|(name, _)| name.clone()).collect()
    }

    /// Enqueues the next objects of a watch's sweep, at most `room` and at most one request's worth.
    pub(crate) fn sweep(&mut self, watch: &str, room: usize, index: &Index) {
        if let Some(dirty_set) = self.watches.get_mut(watch) {
            dirty_set.sweep(room.min(EVENTS_PER_REQUEST), index);
        }
    }

    /// Collapses the entries of a watch into one `watch.changed`, because there are too many. For a forwarded watch,
    /// deletions of objects of which no event was ever sent are dropped first, and the rest only if more than `keep`
    /// entries are left.
    pub(crate) fn collapse(&mut self, watch: &str, keep: usize, at: i64) {
        if self.watches.get_mut(watch).is_some_and(|dirty_set| dirty_set.drop_unannounced(keep)) {
            self.metrics.collapsed.inc();
            return self.mark_watch(watch, at);
        }
        self.drop_objects(watch, keep, at);
    }

    /// Replaces all entries of single objects by one `watch.changed`. For a forwarded watch, existing objects are
    /// enqueued again by a sweep, and at most `keep` deletions stay.
    pub(crate) fn drop_objects(&mut self, watch: &str, keep: usize, at: i64) {
        let Some(dirty_set) = self.watches.get_mut(watch) else { return };
        let forgotten = dirty_set.drop_objects(keep, at);
        if forgotten.any {
            self.metrics.collapsed.inc();
        }
        if forgotten.unnamed { self.mark_unnamed(watch, at) } else { self.mark_watch(watch, at) }
    }

    /// Notes that a watch is not coarse any more.
    pub(crate) fn end_coarse(&mut self, watch: &str) {
        if let Some(dirty_set) = self.watches.get_mut(watch) {
            dirty_set.end_coarse();
        }
    }

    /// Replaces all entries of single objects by one `watch.changed`, unnamed for a forwarded watch, because the names
    /// of the objects are no longer known.
    pub(crate) fn go_coarse(&mut self, watch: &str, at: i64) {
        if self.watches.get_mut(watch).is_some_and(|dirty_set| dirty_set.drop_all_objects(at)) {
            self.metrics.collapsed.inc();
        }
        self.mark_unnamed(watch, at);
    }
}
