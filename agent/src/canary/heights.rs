//! How far each watch has seen, for comparing with a renewal of the Lease: an etcd that was restored goes back behind them all.
//!
//! Resource versions of one etcd are one sequence. A kind may be kept elsewhere, though (another etcd for Events, an aggregated
//! API server); its versions say nothing. Such a watch is found out by itself: it is still ahead when it was listed anew.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

/// Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Heights(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    ids: u64,
    watches: BTreeMap<u64, Watch>,
}

#[derive(Default)]
struct Watch {
    /// The newest resource version that it has told.
    version: u64,
    /// That, when the renewal was sent that is to be compared.
    marked: u64,
    trust: Trust,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Trust {
    #[default]
    Full,
    /// It was ahead of a renewal, and has not been listed since.
    Suspect,
    /// It was ahead, and has been listed since.
    Listed,
    /// It was still ahead: its versions are of another sequence.
    Foreign,
}

/// One watch's place; it is given up by dropping it.
pub(crate) struct Height {
    heights: Heights,
    id: u64,
}

impl Heights {
    fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn enter(&self) -> Height {
        let id = self.with(|state| {
            state.ids += 1;
            state.watches.insert(state.ids, Watch::default());
            state.ids
        });
        Height { heights: self.clone(), id }
    }

    /// A renewal is about to be sent: what is seen from now on may be newer than it.
    pub(super) fn mark(&self) {
        self.with(|state| state.watches.values_mut().for_each(|watch| watch.marked = watch.version));
    }

    /// The renewal got this version. True if a watch was further before it was sent.
    pub(super) fn are_above(&self, version: u64) -> bool {
        self.with(|state| {
            let mut above = false;
            for watch in state.watches.values_mut() {
                above |= watch.judge(version);
            }
            above
        })
    }
}

impl Watch {
    fn judge(&mut self, version: u64) -> bool {
        let ahead = self.marked > version;
        self.trust = match (self.trust, ahead) {
            (Trust::Foreign, _) | (Trust::Listed, true) => Trust::Foreign,
            (_, true) => Trust::Suspect,
            (_, false) => Trust::Full,
        };
        self.trust == Trust::Suspect
    }
}

impl Height {
    /// A watch event or bookmark told this version.
    pub(crate) fn seen(&self, version: &str) {
        self.set(version, |_| {});
    }

    /// A complete list told this version; it may be lower than what was seen before.
    pub(crate) fn listed(&self, version: &str) {
        self.set(version, |watch| {
            if watch.trust == Trust::Suspect {
                watch.trust = Trust::Listed;
            }
        });
    }

    fn set(&self, version: &str, also: impl FnOnce(&mut Watch)) {
        let Ok(version) = version.parse() else { return };
        self.heights.with(|state| {
            if let Some(watch) = state.watches.get_mut(&self.id) {
                watch.version = version;
                also(watch);
            }
        });
    }
}

impl Drop for Height {
    fn drop(&mut self) {
        self.heights.with(|state| state.watches.remove(&self.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn renewed(heights: &Heights, version: u64) -> bool {
        heights.mark();
        heights.are_above(version)
    }

    #[test]
    fn a_watch_that_was_further_than_a_renewal_tells_of_a_restored_etcd() {
        let heights = Heights::default();
        let (kymas, _quiet) = (heights.enter(), heights.enter());
        kymas.listed("90");
        assert!(!renewed(&heights, 100));
        kymas.seen("105");
        assert!(renewed(&heights, 103));
        // Not listed yet: it goes on being a reason. Then it is well again.
        assert!(renewed(&heights, 104));
        kymas.listed("104");
        assert!(!renewed(&heights, 106));
        kymas.seen("200");
        assert!(renewed(&heights, 150), "a second time");
    }

    #[test]
    fn what_is_seen_after_a_renewal_was_sent_is_no_evidence() {
        let heights = Heights::default();
        let kymas = heights.enter();
        kymas.listed("90");
        heights.mark();
        kymas.seen("101");
        assert!(!heights.are_above(100));
    }

    #[test]
    fn a_sequence_of_another_store_is_found_out_after_one_rebuild() {
        let heights = Heights::default();
        let (foreign, ours) = (heights.enter(), heights.enter());
        foreign.listed("5000");
        ours.listed("50");
        assert!(renewed(&heights, 60));
        foreign.listed("5001");
        ours.listed("61");
        for version in 62..70 {
            assert!(!renewed(&heights, version));
        }
        ours.seen("80");
        assert!(renewed(&heights, 70), "the others still count");
    }

    #[test]
    fn a_watch_that_ended_is_forgotten() {
        let heights = Heights::default();
        let gone = heights.enter();
        gone.seen("100");
        drop(gone);
        assert!(!renewed(&heights, 1));
        let opaque = heights.enter();
        opaque.seen("abc");
        assert!(!renewed(&heights, 1));
    }
}
