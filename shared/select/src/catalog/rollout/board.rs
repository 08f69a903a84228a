//! Shared state between reconciles and the task of the ring rollouts: the recorded rollouts, and the runtimes that get a
//! version now.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use arc_swap::{ArcSwap, ArcSwapOption};
use tidewatch_api::key::KymaKey;
use tokio::sync::Notify;

use super::record::{self, Rollout, RolloutKey, RolloutMark};
use crate::catalog::{
    RolloutSlot,
    target::{ChannelTarget, VersionSource},
};

/// Ring rollouts; clones share the state. The default has none.
#[derive(Clone, Debug, Default)]
pub struct RolloutBoard(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    entries: ArcSwap<BTreeMap<RolloutKey, BoardEntry>>,
    /// `None` until the task has evaluated the rollouts.
    halts: ArcSwapOption<HashMap<KymaKey, String>>,
    moved: Notify,
}

/// One rollout on the board.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoardEntry {
    /// The recorded rollout.
    pub rollout: Rollout,
    /// Uids of the Kymas that get the version now.
    pub admitted: Arc<HashSet<String>>,
}

impl RolloutBoard {
    /// Slot of a Kyma, by its uid, for the version that a module's release meta points to; `target` is the accepted one.
    pub fn slot(
        &self,
        kyma_uid: &str,
        module: &str,
        source: VersionSource<'_>,
        version: &str,
        target: &ChannelTarget,
    ) -> RolloutSlot {
        if target.version != version {
            return RolloutSlot::Undecided;
        }
        if target.since.is_none() {
            return RolloutSlot::Now;
        }
        let entries = self.0.entries.load();
        let entry = entries.get(&RolloutKey::new(module, source));
        let is_admitted = || entry.is_some_and(|entry| entry.admitted.contains(kyma_uid));
        record::slot(entry.map(|entry| &entry.rollout), target, is_admitted)
    }

    /// Returns the identifier of the move in progress that brings this version.
    pub fn change(&self, module: &str, source: VersionSource<'_>, version: &str) -> Option<String> {
        let entries = self.0.entries.load();
        let rollout = &entries.get(&RolloutKey::new(module, source))?.rollout;
        (rollout.version == version && rollout.progress.is_some()).then(|| rollout.change.clone())
    }

    /// Returns whether the move to a version reverts the one that upgraded a module with this mark.
    pub fn reverts(&self, module: &str, source: VersionSource<'_>, version: &str, mark: &RolloutMark) -> bool {
        let entries = self.0.entries.load();
        let entry = entries.get(&RolloutKey::new(module, source));
        entry.is_some_and(|BoardEntry { rollout, .. }| {
            rollout.version == version && rollout.reverts.contains(&mark.change)
        })
    }

    /// Messages for the Kymas that failed in halted rollouts; `None` until the rollouts have been evaluated.
    pub fn halts(&self) -> Option<Arc<HashMap<KymaKey, String>>> {
        self.0.halts.load_full()
    }

    /// Publishes the rollouts.
    pub fn publish(&self, entries: BTreeMap<RolloutKey, BoardEntry>) {
        if **self.0.entries.load() != entries {
            self.0.entries.store(Arc::new(entries));
        }
    }

    /// Publishes the Kymas that failed in halted rollouts, with a message for each.
    pub fn publish_halts(&self, halts: HashMap<KymaKey, String>) {
        if self.0.halts.load().as_deref() != Some(&halts) {
            self.0.halts.store(Some(Arc::new(halts)));
        }
    }

    /// Wakes the task of the rollouts: a channel or mandatory version has moved, or the rules have changed.
    pub fn notify_moved(&self) {
        self.0.moved.notify_one();
    }

    /// Waits for [`RolloutBoard::notify_moved`].
    pub async fn moved(&self) {
        self.0.moved.notified().await;
    }
}

#[cfg(test)]
impl RolloutBoard {
    /// Board with one rollout, which admits no Kyma.
    pub fn with(rollout: Rollout) -> Self {
        let board = Self::default();
        let entry = BoardEntry { rollout, admitted: Arc::default() };
        board.publish(BTreeMap::from([(entry.rollout.key(), entry)]));
        board
    }
}
