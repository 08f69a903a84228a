//! What of an object matters to those whom it concerns. Equal essences wake nobody.

use std::collections::{BTreeMap, HashMap};

use kube::{ResourceExt, core::Resource};
use tidewatch_shared::api::{Kyma, ModuleReleaseMeta};

use crate::{key::KymaKey, kyma::is_our_note};

/// Essences of one kind, by name.
pub(super) struct Essences<E>(HashMap<KymaKey, E>);

/// How an essence moved.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Moved<E> {
    /// It was not known before.
    New,
    /// It was another one.
    From(E),
}

impl<E: PartialEq> Essences<E> {
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    /// Takes the object as it is now; `None` if nothing that matters moved.
    pub(super) fn apply(&mut self, key: KymaKey, essence: E) -> Option<Moved<E>> {
        match self.0.insert(key.clone(), essence) {
            None => Some(Moved::New),
            Some(old) if Some(&old) == self.0.get(&key) => None,
            Some(old) => Some(Moved::From(old)),
        }
    }

    pub(super) fn delete(&mut self, key: &KymaKey) -> Option<E> {
        self.0.remove(key)
    }
}

/// Key of any namespaced object.
pub(super) fn key_of<K: Resource>(object: &K) -> KymaKey {
    KymaKey::new(object.namespace().unwrap_or_default(), object.name_any())
}

/// Metadata and generation: what a user or another controller of KCP decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decided {
    generation: Option<i64>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    deleting: bool,
}

impl Decided {
    pub(super) fn of<K: Resource>(object: &K) -> Self {
        let mut annotations = object.annotations().clone();
        // Ours: written by the very passes that they would wake.
        annotations.retain(|key, _| !is_our_note(key));
        Self {
            generation: object.meta().generation,
            labels: object.labels().clone(),
            annotations,
            deleting: object.meta().deletion_timestamp.is_some(),
        }
    }

    /// Whether labels differ, which decide what a Kyma may see.
    pub(super) fn labels_moved(&self, other: &Self) -> bool {
        self.labels != other.labels
    }
}

/// A release meta: what decides on it, and where its channels point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Release {
    pub(super) decided: Decided,
    pub(super) channels: BTreeMap<String, String>,
}

impl Release {
    pub(super) fn of(meta: &ModuleReleaseMeta) -> Self {
        let channels = meta.spec.channels.iter().flatten();
        let channels = channels.map(|entry| (entry.channel.clone(), entry.version.clone())).collect();
        Self { decided: Decided::of(meta), channels }
    }

    /// Channels that came, went or point elsewhere.
    pub(super) fn moved_channels(&self, old: &Self) -> Vec<String> {
        let names = self.channels.keys().chain(old.channels.keys());
        let mut moved: Vec<_> =
            names.filter(|name| self.channels.get(*name) != old.channels.get(*name)).cloned().collect();
        moved.sort_unstable();
        moved.dedup();
        moved
    }
}

/// The modules that a Kyma follows, as its status tells: it lists every module of its runtime's spec, resolved or not.
pub(super) fn follows(kyma: &Kyma, module: &str, channels: Option<&[String]>) -> bool {
    let modules = kyma.status.iter().flat_map(|status| status.modules());
    modules.filter(|status| status.name == module).any(|status| match (channels, status.channel.as_deref()) {
        (Some(channels), Some(channel)) => channels.iter().any(|moved| moved == channel),
        // A module without a channel failed to resolve: any movement may be what it waits for.
        _ => true,
    })
}
