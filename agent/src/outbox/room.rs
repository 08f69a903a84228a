//! What becomes of single objects when there is no room for all of them, and how another manager is told of them all the same.

use std::sync::Arc;

use tidewatch_shared::digest::Digest;

use super::{EVENTS_PER_REQUEST, Outbox, What, mailbox::WHOLE};
use crate::index::Index;

impl Outbox {
    /// Something in a watch moved, and it moved objects that nobody can name: whoever knows objects only is told as much.
    pub(crate) fn mark_unnamed(&mut self, watch: &str, at: i64) {
        let forward = self.boxes.get(watch).is_some_and(|mailbox| mailbox.facts().forward);
        self.mark(watch, WHOLE, if forward { What::Unnamed } else { What::Whole }, Digest::ZERO, at);
    }

    /// Every object of a watch that is there is to be told, though it has not changed: [`Self::sweep`] marks them.
    pub(crate) fn tell_all(&mut self, watch: &str, at: i64) {
        if let Some(mailbox) = self.boxes.get_mut(watch) {
            mailbox.tell_all(at);
        }
    }

    /// Watches of which objects are to be marked.
    pub(crate) fn sweeping(&self) -> Vec<Arc<str>> {
        self.boxes.iter().filter(|(_, mailbox)| mailbox.is_sweeping()).map(|(name, _)| name.clone()).collect()
    }

    /// Marks the next objects of a watch that are to be told, at most so many.
    pub(crate) fn sweep(&mut self, watch: &str, room: usize, index: &Index) {
        if let Some(mailbox) = self.boxes.get_mut(watch) {
            mailbox.sweep(room.min(EVENTS_PER_REQUEST), index);
        }
    }

    /// Makes one `watch.changed` of single objects, because there are too many of them. Of a watch that goes to another manager first of
    /// those that came and went unheard, and only if more than `keep` are left also of the others.
    pub(crate) fn collapse(&mut self, watch: &str, keep: usize, at: i64) {
        if self.boxes.get_mut(watch).is_some_and(|mailbox| mailbox.forget_unheard(keep)) {
            self.metrics.collapsed.inc();
            return self.mark_whole(watch, at);
        }
        self.forget_objects(watch, keep, at);
    }

    /// Replaces all that is known of single objects by one `watch.changed`. Of a watch that goes to another manager those that are there
    /// will be told again, and at most `keep` of those that went are kept.
    pub(crate) fn forget_objects(&mut self, watch: &str, keep: usize, at: i64) {
        let Some(mailbox) = self.boxes.get_mut(watch) else { return };
        let forgotten = mailbox.forget_objects(keep, at);
        if forgotten.any {
            self.metrics.collapsed.inc();
        }
        if forgotten.unnamed { self.mark_unnamed(watch, at) } else { self.mark_whole(watch, at) }
    }

    /// The same for a watch whose objects nobody knows any more.
    pub(crate) fn give_up(&mut self, watch: &str, at: i64) {
        if self.boxes.get_mut(watch).is_some_and(|mailbox| mailbox.give_up_objects(at)) {
            self.metrics.collapsed.inc();
        }
        self.mark_unnamed(watch, at);
    }
}
