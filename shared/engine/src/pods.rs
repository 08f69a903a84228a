//! Pods of managers that are not ready. The caller watches them until the manager is ready.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use parking_lot::Mutex;
use tidewatch_api::key::{KymaKey, ManifestKey};
use tokio::sync::Notify;

/// Selection of the pods of one manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSelection {
    /// Namespace of the manager and of its pods.
    pub namespace: String,
    /// Label selector, in the syntax of a list request.
    pub selector: String,
}

/// Selections of pods by Manifest; bounded by their number. Clones share one state. A new process begins without
/// them.
#[derive(Clone, Debug, Default)]
pub(super) struct PodSelections {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    selections: HashMap<ManifestKey, PodSelection>,
    /// Clusters with changed selections.
    changed: BTreeSet<KymaKey>,
}

impl PodSelections {
    pub(super) fn of(&self, manifest: &ManifestKey) -> Option<PodSelection> {
        self.state.lock().selections.get(manifest).cloned()
    }

    /// Replaces the selection of a Manifest; a difference changes what the caller watches in its cluster.
    pub(super) fn set(&self, manifest: &ManifestKey, cluster: &KymaKey, selection: Option<PodSelection>) {
        let mut state = self.state.lock();
        if state.selections.get(manifest) == selection.as_ref() {
            return;
        }
        match selection {
            Some(selection) => drop(state.selections.insert(manifest.clone(), selection)),
            None => drop(state.selections.remove(manifest)),
        }
        state.changed.insert(cluster.clone());
        self.changed.notify_one();
    }

    /// Drops the selection of a Manifest that is gone.
    pub(super) fn forget(&self, manifest: &ManifestKey) {
        self.state.lock().selections.remove(manifest);
    }

    /// Waits for the next cluster with changed selections.
    pub(super) async fn next_changed(&self) -> KymaKey {
        loop {
            let changed = self.changed.notified();
            if let Some(cluster) = self.state.lock().changed.pop_first() {
                return cluster;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn only_a_different_selection_changes_the_plan() {
        let selections = PodSelections::default();
        let manifest = ManifestKey::new("ns", "m");
        let cluster = KymaKey::new("ns", "k");
        let of = |selector: &str| Some(PodSelection { namespace: "kyma-system".into(), selector: selector.into() });
        for (selection, is_change) in
            [(None, false), (of("a=b"), true), (of("a=b"), false), (of("a=c"), true), (None, true), (None, false)]
        {
            selections.set(&manifest, &cluster, selection.clone());
            assert_eq!(selections.of(&manifest), selection);
            let next = || selections.next_changed().now_or_never();
            assert_eq!((next().is_some(), next()), (is_change, None), "{selection:?}");
        }
        selections.set(&manifest, &cluster, of("a=b"));
        selections.forget(&manifest);
        assert_eq!(selections.of(&manifest), None);
    }
}
