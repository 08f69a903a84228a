//! Revocation list: fingerprints of leaves, and runtimes, which may not enrol either.
//!
//! The list is a ConfigMap in the receiver's namespace: each key is a fingerprint (hex SHA-256 of the leaf, as in logs
//! and heartbeats) or a runtime id; its value is the reason, for operators. A value that begins with
//! `issued-before=<time>` (RFC 3339) revokes only the runtime's certificates that were issued before that time, so that
//! its agent can enrol again.
//!
//! The receiver itself refuses leaves as well, until they expire: a leaf that two agent processes use, and one whose
//! sender could not prove to be the agent's pod. Their rightful agent enrols again with its token.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use parking_lot::RwLock;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::certificate::Leaf;
use tokio::sync::watch;

use super::Metrics;

/// Name of the ConfigMap in the receiver's namespace.
pub const CONFIG_MAP: &str = "tidewatch-revocations";
/// Hex digits of a fingerprint: one more than the longest runtime id, so that no key is both.
const FINGERPRINT: usize = 64;
/// Start of a value that revokes only older certificates of a runtime.
const ISSUED_BEFORE: &str = "issued-before=";
/// Leaves of one runtime that the receiver itself refuses; beyond it the oldest entry is dropped. Each one costs an
/// enrolment or a detected fork.
const MAX_REFUSED_LEAVES: usize = 8;

/// Reason for which the receiver itself refuses a leaf. The name is the label of metrics and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum LeafRefusal {
    /// Two agent processes use it, or an agent process beside the one that uses it.
    Fork,
    /// A renewal with it carried a token that is not one of the agent's pod in this runtime.
    Token,
}

/// The current list; clones share it.
#[derive(Clone, Debug)]
pub struct Revocations(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    revoked: RwLock<Revoked>,
    /// Time by which notBefore of an issued certificate precedes its issuance.
    backdate: Duration,
    /// Counts the changes.
    changes: watch::Sender<u64>,
    metrics: Metrics,
}

#[derive(Debug, Default)]
struct Revoked {
    list: RevocationList,
    /// Leaves that the receiver itself refuses, by runtime, with their ends of validity in Unix seconds.
    refused: HashMap<RuntimeId, Vec<(String, i64)>>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct RevocationList {
    leaves: HashSet<String>,
    runtimes: HashMap<RuntimeId, Scope>,
    malformed: usize,
}

/// Certificates of a runtime that are revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// All, and no further one is issued.
    All,
    /// Those issued before a time, in Unix seconds.
    IssuedBefore(i64),
}

impl Scope {
    fn of(value: &str) -> Option<Self> {
        let Some(rest) = value.trim_start().strip_prefix(ISSUED_BEFORE) else { return Some(Self::All) };
        let time = rest.split(|end: char| end.is_whitespace() || end == ',').next()?.parse::<Timestamp>().ok();
        time.map(|time| Self::IssuedBefore(time.as_second()))
    }
}

impl Default for Revocations {
    fn default() -> Self {
        Self::new(Metrics::default(), Duration::ZERO)
    }
}

impl Revocations {
    /// An empty list. `backdate` is the time by which notBefore of an issued certificate precedes its issuance.
    pub fn new(metrics: Metrics, backdate: Duration) -> Self {
        Self(Arc::new(Inner { revoked: RwLock::default(), backdate, changes: watch::Sender::new(0), metrics }))
    }

    /// Refuses a leaf until it expires (Unix seconds), and closes its connections.
    pub fn refuse_leaf(&self, runtime: &RuntimeId, fingerprint: String, not_after: i64, reason: LeafRefusal) {
        let now = Timestamp::now().as_second();
        let mut revoked = self.0.revoked.write();
        let refused = &mut revoked.refused;
        refused.retain(|_, leaves| {
            leaves.retain(|(_, not_after)| *not_after >= now);
            !leaves.is_empty()
        });
        let leaves = refused.entry(runtime.clone()).or_default();
        if leaves.iter().any(|(known, _)| *known == fingerprint) {
            return;
        }
        if leaves.len() >= MAX_REFUSED_LEAVES {
            leaves.remove(0);
        }
        leaves.push((fingerprint.clone(), not_after));
        drop(revoked);
        let reason: &'static str = reason.into();
        tracing::warn!(%runtime, fingerprint, reason, "A certificate is refused from now on; the rightful agent enrols again");
        self.0.metrics.refused_leaf(reason);
        self.notify_changed();
    }

    /// Replaces the list by the ConfigMap; `None` revokes nothing. Malformed keys are skipped one by one.
    pub fn set(&self, map: Option<&ConfigMap>) {
        let list = map.map(RevocationList::of).unwrap_or_default();
        let RevocationList { leaves, runtimes, malformed } = &list;
        self.0.metrics.revoked(leaves.len(), runtimes.len(), *malformed);
        if self.0.revoked.read().list == list {
            return;
        }
        tracing::info!(leaves = leaves.len(), runtimes = runtimes.len(), malformed, "The list of revocations changed");
        self.0.revoked.write().list = list;
        self.notify_changed();
    }

    /// True if a certificate is revoked: the list has its fingerprint or its runtime, or the receiver itself refuses it.
    pub fn covers_leaf(&self, runtime: &RuntimeId, leaf: &Leaf) -> bool {
        let Revoked { list, refused } = &*self.0.revoked.read();
        let is_runtime_revoked = list.runtimes.get(runtime).is_some_and(|scope| match scope {
            Scope::All => true,
            Scope::IssuedBefore(time) => {
                leaf.not_before.saturating_add(self.0.backdate.as_secs().cast_signed()) < *time
            }
        });
        let is_refused = |leaves: &Vec<(String, i64)>| leaves.iter().any(|(refused, _)| *refused == leaf.fingerprint);
        is_runtime_revoked || list.leaves.contains(&leaf.fingerprint) || refused.get(runtime).is_some_and(is_refused)
    }

    /// True if the runtime itself is revoked, so that it gets no certificate.
    pub fn revokes_runtime(&self, runtime: &RuntimeId) -> bool {
        self.0.revoked.read().list.runtimes.get(runtime) == Some(&Scope::All)
    }

    fn notify_changed(&self) {
        self.0.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Changes whenever certificates were revoked or restored.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }
}

impl RevocationList {
    /// A ConfigMap has at most 1 MiB, which bounds the list.
    fn of(map: &ConfigMap) -> Self {
        let mut list = Self::default();
        for (key, value) in map.data.iter().flatten() {
            if key.len() == FINGERPRINT && key.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                list.leaves.insert(key.to_ascii_lowercase());
            } else if let Ok(runtime) = key.parse() {
                let scope = Scope::of(value).unwrap_or_else(|| {
                    list.malformed += 1;
                    tracing::warn!(key, "The time of a revocation is not readable; the runtime is revoked completely");
                    Scope::All
                });
                list.runtimes.insert(runtime, scope);
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
    use crate::enrolment::tests::testing::certificate;

    fn named(fingerprint: &str, not_before: i64) -> Leaf {
        Leaf { not_before, ..certificate("r-1", fingerprint).leaf }
    }

    fn map(keys: &[&str]) -> ConfigMap {
        let data: serde_json::Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), json!("stolen"))).collect();
        serde_json::from_value(json!({"data": data})).unwrap()
    }

    #[test]
    fn leaves_runtimes_and_malformed_keys_are_distinguished() {
        let revocations = Revocations::default();
        let mut changes = revocations.watch();
        let leaf = "AB".repeat(32);
        let other = "cd".repeat(32);
        let [a, b] = ["r-1", "r-2"].map(|id| id.parse::<RuntimeId>().unwrap());
        let bad = [".", "-r", &"a".repeat(65), &"g".repeat(64)];
        revocations.set(Some(&map(&[&[&*leaf, "r-1"][..], &bad].concat())));
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        let lower = leaf.to_ascii_lowercase();
        let revoked = revocations.0.revoked.read();
        let RevocationList { leaves, runtimes, malformed } = &revoked.list;
        assert_eq!((leaves.len(), runtimes.len(), *malformed), (1, 1, bad.len()));
        drop(revoked);
        let [lower, other] = [&lower, &other].map(|fingerprint| named(fingerprint, 0));
        assert!(revocations.covers_leaf(&b, &lower) && revocations.covers_leaf(&a, &other));
        assert!(!revocations.covers_leaf(&b, &other));
        assert!(revocations.revokes_runtime(&a) && !revocations.revokes_runtime(&b), "a lost leaf may be replaced");

        revocations.set(Some(&map(&[&[&*lower.fingerprint, "r-1"][..], &bad].concat())));
        assert!(!changes.has_changed().unwrap(), "nothing changed");
        revocations.set(None);
        assert!(changes.has_changed().unwrap() && !revocations.covers_leaf(&a, &lower));
    }

    #[test]
    fn certificates_issued_before_a_time_are_revoked_and_later_ones_are_not() {
        let revocations = Revocations::new(Metrics::default(), Duration::from_secs(600));
        let runtime: RuntimeId = "r-1".parse().unwrap();
        let covers = |not_before| revocations.covers_leaf(&runtime, &named("f", not_before));
        let set = |value: &str| {
            let map = json!({"data": {"r-1": value}});
            revocations.set(Some(&serde_json::from_value(map).unwrap()));
        };
        let time = "2026-01-01T00:00:00Z".parse::<Timestamp>().unwrap().as_second();
        for value in ["issued-before=2026-01-01T00:00:00Z", " issued-before=2026-01-01T01:00:00+01:00, case 4711"] {
            set(value);
            assert!(covers(time - 601) && !covers(time - 600), "{value}");
            assert!(!revocations.revokes_runtime(&runtime), "it may enrol again");
        }
        for value in ["issued-before=yesterday", "issued-before="] {
            set(value);
            assert!(covers(i64::MAX) && revocations.revokes_runtime(&runtime), "fails closed");
        }
    }

    #[test]
    fn refused_leaves_are_bounded_and_forgotten_when_they_expire() {
        let revocations = Revocations::default();
        let now = Timestamp::now().as_second();
        let [a, b] = ["r-1", "r-2"].map(|id| id.parse::<RuntimeId>().unwrap());
        let refuse =
            |leaf: usize, not_after| revocations.refuse_leaf(&a, leaf.to_string(), not_after, LeafRefusal::Fork);
        let covers = |runtime, name: usize| revocations.covers_leaf(runtime, &named(&name.to_string(), now));
        let mut changes = revocations.watch();
        (0..=MAX_REFUSED_LEAVES).for_each(|leaf| refuse(leaf, now + 1_000));
        assert!(changes.has_changed().unwrap());
        assert!(!covers(&a, 0) && (1..=MAX_REFUSED_LEAVES).all(|leaf| covers(&a, leaf)), "the oldest is dropped");
        assert!(!covers(&b, 1));
        changes.mark_unchanged();
        refuse(1, now + 1_000);
        assert!(!changes.has_changed().unwrap(), "known");
        revocations.refuse_leaf(&b, "x".to_owned(), now - 1, LeafRefusal::Token);
        refuse(100, now + 1_000);
        assert!(!revocations.0.revoked.read().refused.contains_key(&b), "expired");
    }
}
