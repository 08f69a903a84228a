//! Whose certificates hold no longer: fingerprints of leaves, and runtimes, which may not enrol either.
//!
//! The list is a ConfigMap of the receiver's namespace: each key is a fingerprint (hex SHA-256 of the leaf, as logs and heartbeats have
//! it) or a runtime id, its value is the reason, for people.

use std::{collections::HashSet, sync::Arc};

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::ConfigMap;
use tidewatch_shared::{certificate::RuntimeCertificate, identity::RuntimeId};
use tokio::sync::watch;

use super::Metrics;

/// Name of the ConfigMap in the receiver's namespace.
pub const CONFIG_MAP: &str = "tidewatch-revocations";
/// Hex digits of a fingerprint: one more than a runtime id may have, so that no key is both.
const FINGERPRINT: usize = 64;

/// The list as it stands; clones share it.
#[derive(Clone, Debug)]
pub struct Revocations(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    list: ArcSwap<List>,
    /// Counts what may end a connection: a change of the list, and Kymas that are gone.
    moved: watch::Sender<u64>,
    metrics: Metrics,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct List {
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
        Self(Arc::new(Inner { list: ArcSwap::default(), moved: watch::Sender::new(0), metrics }))
    }

    /// Takes the ConfigMap as it is now; `None` if there is none, which revokes nothing. Keys that are neither are refused one by one.
    pub fn set(&self, map: Option<&ConfigMap>) {
        let list = map.map(List::of).unwrap_or_default();
        let List { leaves, runtimes, malformed } = &list;
        self.0.metrics.revoked(leaves.len(), runtimes.len(), *malformed);
        if **self.0.list.load() == list {
            return;
        }
        tracing::info!(leaves = leaves.len(), runtimes = runtimes.len(), malformed, "The list of revocations changed");
        self.0.list.store(Arc::new(list));
        self.moved();
    }

    /// Whether a certificate holds no longer: it, or its runtime, stands in the list.
    #[must_use]
    pub fn cover(&self, certificate: &RuntimeCertificate) -> bool {
        self.cover_leaf(&certificate.runtime, &certificate.leaf.fingerprint)
    }

    /// The same, of a runtime and a fingerprint as logs have it.
    #[must_use]
    pub fn cover_leaf(&self, runtime: &RuntimeId, fingerprint: &str) -> bool {
        let list = self.0.list.load();
        list.leaves.contains(fingerprint) || list.runtimes.contains(runtime)
    }

    /// Whether a runtime may have no certificate.
    #[must_use]
    pub fn names_runtime(&self, runtime: &RuntimeId) -> bool {
        self.0.list.load().runtimes.contains(runtime)
    }

    /// Says that a Kyma is gone, or has another runtime id: whoever keeps connections looks which may stay.
    pub fn moved(&self) {
        self.0.moved.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Told whenever connections may have to end.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.0.moved.subscribe()
    }
}

impl List {
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
    fn leaves_and_runtimes_are_told_apart_and_the_rest_is_refused_one_by_one() {
        let revocations = Revocations::default();
        let mut moved = revocations.watch();
        let (leaf, other) = ("AB".repeat(32), "cd".repeat(32));
        let [a, b] = ["r-1", "r-2"].map(|id| id.parse::<RuntimeId>().unwrap());
        let bad = [".", "-r", &"a".repeat(65), &"g".repeat(64)];
        revocations.set(Some(&map(&[&[&*leaf, "r-1"][..], &bad].concat())));
        assert!(moved.has_changed().unwrap());
        moved.mark_unchanged();
        let (lower, list) = (leaf.to_ascii_lowercase(), revocations.0.list.load_full());
        assert_eq!((list.leaves.len(), list.runtimes.len(), list.malformed), (1, 1, bad.len()));
        assert!(revocations.cover_leaf(&b, &lower) && revocations.cover_leaf(&a, &other));
        assert!(!revocations.cover_leaf(&b, &other));
        assert!(revocations.names_runtime(&a) && !revocations.names_runtime(&b), "a lost leaf may be replaced");

        revocations.set(Some(&map(&[&[&*lower, "r-1"][..], &bad].concat())));
        assert!(!moved.has_changed().unwrap(), "nothing changed");
        revocations.set(None);
        assert!(moved.has_changed().unwrap() && !revocations.cover_leaf(&a, &lower));
    }
}
