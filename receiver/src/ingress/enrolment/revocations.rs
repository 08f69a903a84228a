//! Revocation list: fingerprints of leaves, and runtimes, which may not enrol either.
//!
//! The list is a ConfigMap in the receiver's namespace: each key is a fingerprint (hex SHA-256 of the leaf, as in logs
//! and heartbeats) or a runtime id; its value is the reason, for operators.

use std::{collections::HashSet, sync::Arc};

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::ConfigMap;
use tidewatch_shared::identity::RuntimeId;
use tokio::sync::watch;

use super::Metrics;

/// Name of the ConfigMap in the receiver's namespace.
pub const CONFIG_MAP: &str = "tidewatch-revocations";
/// Hex digits of a fingerprint: one more than the longest runtime id, so that no key is both.
const FINGERPRINT: usize = 64;

/// The current list; clones share it.
#[derive(Clone, Debug)]
pub struct Revocations(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    list: ArcSwap<RevocationList>,
    /// Counts events that may end a connection: a change of the list, and Kymas that are gone.
    changes: watch::Sender<u64>,
    metrics: Metrics,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct RevocationList {
    leaves: HashSet<String>,
    runtimes: HashSet<RuntimeId>,
    malformed: usize,
}

impl Default for Revocations {
    fn default() -> Self {
        Self::new(Metrics::default())
    }
}

impl Revocations {
    /// An empty list.
    #[must_use]
    pub fn new(metrics: Metrics) -> Self {
        Self(Arc::new(Inner { list: ArcSwap::default(), changes: watch::Sender::new(0), metrics }))
    }

    /// Replaces the list by the ConfigMap; `None` revokes nothing. Malformed keys are skipped one by one.
    pub fn set(&self, map: Option<&ConfigMap>) {
        let list = map.map(RevocationList::of).unwrap_or_default();
        let RevocationList { leaves, runtimes, malformed } = &list;
        self.0.metrics.revoked(leaves.len(), runtimes.len(), *malformed);
        if **self.0.list.load() == list {
            return;
        }
        tracing::info!(leaves = leaves.len(), runtimes = runtimes.len(), malformed, "The list of revocations changed");
        self.0.list.store(Arc::new(list));
        self.notify_changed();
    }

    /// True if a certificate is revoked: the list has its fingerprint, in lower-case hex, or its runtime.
    #[must_use]
    pub fn covers_leaf(&self, runtime: &RuntimeId, fingerprint: &str) -> bool {
        let list = self.0.list.load();
        list.leaves.contains(fingerprint) || list.runtimes.contains(runtime)
    }

    /// True if the runtime itself is revoked.
    #[must_use]
    pub fn revokes_runtime(&self, runtime: &RuntimeId) -> bool {
        self.0.list.load().runtimes.contains(runtime)
    }

    /// Notifies that a Kyma is gone, or has another runtime id, so that connections are checked again.
    pub fn notify_changed(&self) {
        self.0.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Changes whenever connections may have to end.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }
}

impl RevocationList {
    /// A ConfigMap has at most 1 MiB, which bounds the list.
    fn of(map: &ConfigMap) -> Self {
        let mut list = Self::default();
        for key in map.data.iter().flatten().map(|(key, _)| key) {
            if key.len() == FINGERPRINT && key.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                list.leaves.insert(key.to_ascii_lowercase());
            } else if let Ok(runtime) = key.parse() {
                list.runtimes.insert(runtime);
            } else {
                list.malformed += 1;
                tracing::warn!(key, "A revocation names neither a fingerprint nor a runtime");
            }
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(keys: &[&str]) -> ConfigMap {
        let data: serde_json::Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), json!("stolen"))).collect();
        serde_json::from_value(json!({"data": data})).unwrap()
    }

    #[test]
    fn leaves_runtimes_and_malformed_keys_are_distinguished() {
        let revocations = Revocations::default();
        let mut changes = revocations.watch();
        let (leaf, other) = ("AB".repeat(32), "cd".repeat(32));
        let [a, b] = ["r-1", "r-2"].map(|id| id.parse::<RuntimeId>().unwrap());
        let bad = [".", "-r", &"a".repeat(65), &"g".repeat(64)];
        revocations.set(Some(&map(&[&[&*leaf, "r-1"][..], &bad].concat())));
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        let (lower, list) = (leaf.to_ascii_lowercase(), revocations.0.list.load_full());
        assert_eq!((list.leaves.len(), list.runtimes.len(), list.malformed), (1, 1, bad.len()));
        assert!(revocations.covers_leaf(&b, &lower) && revocations.covers_leaf(&a, &other));
        assert!(!revocations.covers_leaf(&b, &other));
        assert!(revocations.revokes_runtime(&a) && !revocations.revokes_runtime(&b), "a lost leaf may be replaced");

        revocations.set(Some(&map(&[&[&*lower, "r-1"][..], &bad].concat())));
        assert!(!changes.has_changed().unwrap(), "nothing changed");
        revocations.set(None);
        assert!(changes.has_changed().unwrap() && !revocations.covers_leaf(&a, &lower));
    }
}
