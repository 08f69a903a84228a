//! Newest resourceVersion that each watch has observed, compared with renewals of the canary Lease: a restored etcd
//! falls behind all of them.
//!
//! The resourceVersions of one etcd form one sequence. A kind may be stored elsewhere, though (a separate etcd for
//! Events, an aggregated API server), and its versions are then not comparable. Such a watch is detected by itself: it
//! is still ahead after a relist.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;

/// Watermarks of all watches; clones share them.
#[derive(Clone, Default)]
pub(crate) struct Watermarks(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    ids: u64,
    watches: BTreeMap<u64, Watch>,
}

#[derive(Default)]
struct Watch {
    /// Newest resourceVersion observed.
    version: u64,
    /// That version as of the request of the renewal to compare.
    marked: u64,
    trust: Trust,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Trust {
    #[default]
    Full,
    /// Was ahead of a renewal, and has not relisted since.
    Suspect,
    /// Was ahead of a renewal, and has relisted since.
    Relisted,
    /// Was ahead again after a relist: its versions belong to another sequence and are ignored from now on.
    Foreign,
}

/// Registration of one watch; ends on drop.
pub(crate) struct Watermark {
    watermarks: Watermarks,
    id: u64,
}

impl Watermarks {
    fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        work(&mut self.0.lock())
    }

    pub(crate) fn register(&self) -> Watermark {
        let id = self.with(|state| {
            state.ids += 1;
            state.watches.insert(state.ids, Watch::default());
            state.ids
        });
        Watermark { watermarks: self.clone(), id }
    }

    /// Records the current versions just before a renewal is sent: versions observed later may be newer than the
    /// renewal.
    pub(crate) fn mark(&self) {
        self.with(|state| state.watches.values_mut().for_each(|watch| watch.marked = watch.version));
    }

    /// Compares an answered renewal; true if a comparable watch was ahead of it before the request.
    pub(crate) fn any_above(&self, version: u64) -> bool {
        self.with(|state| {
            let mut above = false;
            for watch in state.watches.values_mut() {
                above |= watch.compare(version);
            }
            above
        })
    }
}

impl Watch {
    /// Compares an answered renewal; true if this watch was ahead of it and is comparable.
    fn compare(&mut self, version: u64) -> bool {
        let ahead = self.marked > version;
        self.trust = match (self.trust, ahead) {
            (Trust::Foreign, _) | (Trust::Relisted, true) => Trust::Foreign,
            (_, true) => Trust::Suspect,
            (_, false) => Trust::Full,
        };
        self.trust == Trust::Suspect
    }
}

impl Watermark {
    /// Records the resourceVersion of a watch event or bookmark.
    pub(crate) fn seen(&self, version: &str) {
        self.set(version, |_| {});
    }

    /// Records the resourceVersion of a complete list, which may be lower than an earlier one.
    pub(crate) fn listed(&self, version: &str) {
        self.set(version, |watch| {
            if watch.trust == Trust::Suspect {
                watch.trust = Trust::Relisted;
            }
        });
    }

    /// Forgets what was observed: the watch has ended, and will not relist if renewals are behind it.
    pub(crate) fn forget(&self) {
        self.watermarks.with(|state| state.watches.insert(self.id, Watch::default()));
    }

    fn set(&self, version: &str, also: impl FnOnce(&mut Watch)) {
        let Ok(version) = version.parse() else { return };
        self.watermarks.with(|state| {
            if let Some(watch) = state.watches.get_mut(&self.id) {
                watch.version = version;
                also(watch);
            }
        });
    }
}

impl Drop for Watermark {
    fn drop(&mut self) {
        self.watermarks.with(|state| state.watches.remove(&self.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_watch_is_behind_every_renewal() {
        let watermarks = Watermarks::default();
        let ended = watermarks.register();
        let open = watermarks.register();
        ended.listed("50");
        open.listed("30");
        watermarks.mark();
        ended.forget();
        assert!(!watermarks.any_above(40));
        watermarks.mark();
        assert!(!watermarks.any_above(40) && watermarks.any_above(20));
    }

    fn renewed(watermarks: &Watermarks, version: u64) -> bool {
        watermarks.mark();
        watermarks.any_above(version)
    }

    #[test]
    fn watch_ahead_of_a_renewal_indicates_a_restored_etcd() {
        let watermarks = Watermarks::default();
        let kymas = watermarks.register();
        let _quiet = watermarks.register();
        kymas.listed("90");
        assert!(!renewed(&watermarks, 100));
        kymas.seen("105");
        assert!(renewed(&watermarks, 103));
        // The watch has not relisted yet and counts again. After the relist it does not.
        assert!(renewed(&watermarks, 104));
        kymas.listed("104");
        assert!(!renewed(&watermarks, 106));
        kymas.seen("200");
        assert!(renewed(&watermarks, 150), "restored a second time");
    }

    #[test]
    fn versions_observed_after_the_request_are_not_compared() {
        let watermarks = Watermarks::default();
        let kymas = watermarks.register();
        kymas.listed("90");
        watermarks.mark();
        kymas.seen("101");
        assert!(!watermarks.any_above(100));
    }

    #[test]
    fn foreign_sequence_is_detected_after_one_rebuild() {
        let watermarks = Watermarks::default();
        let foreign = watermarks.register();
        let ours = watermarks.register();
        foreign.listed("5000");
        ours.listed("50");
        assert!(renewed(&watermarks, 60));
        foreign.listed("5001");
        ours.listed("61");
        for version in 62..70 {
            assert!(!renewed(&watermarks, version));
        }
        ours.seen("80");
        assert!(renewed(&watermarks, 70), "the others still count");
    }

    #[test]
    fn ended_watch_is_removed() {
        let watermarks = Watermarks::default();
        let gone = watermarks.register();
        gone.seen("100");
        drop(gone);
        assert!(!renewed(&watermarks, 1));
        let opaque = watermarks.register();
        opaque.seen("abc");
        assert!(!renewed(&watermarks, 1));
    }
}
