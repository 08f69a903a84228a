//! ConfigMap in KCP with the state of the rollouts, one key for each, replaced only at the resourceVersion that was read.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ObjectMeta;
use tidewatch_api::names::annotation;

use crate::catalog::{
    confirmations,
    rollout::{Rollout, RolloutKey, StoredRollouts, data_key},
};

/// Rollouts by the channel or mandatory version.
pub type Rollouts = BTreeMap<RolloutKey, Rollout>;

/// ConfigMap as last read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Rollouts whose state can be parsed.
    pub rollouts: Rollouts,
    /// Values that cannot be parsed, by key. They are kept until they are corrected or deleted.
    pub invalid: BTreeMap<String, String>,
    /// Identifiers of the halts that operators confirm.
    pub confirmed: BTreeSet<String>,
    /// Metadata, whose other parts a write preserves; `None` if the ConfigMap does not exist.
    metadata: Option<Box<ObjectMeta>>,
}

impl Snapshot {
    /// Reads a ConfigMap; `None` if it does not exist.
    #[must_use]
    pub fn of(map: Option<&ConfigMap>) -> Self {
        let Some(map) = map else { return Self::default() };
        let StoredRollouts { rollouts, invalid } = StoredRollouts::of(Some(map));
        let confirmed = map.metadata.annotations.as_ref().and_then(|all| all.get(annotation::CONFIRM));
        let confirmed = confirmed.map(|text| confirmations(text)).unwrap_or_default();
        let metadata = Some(Box::new(ObjectMeta { managed_fields: None, ..map.metadata.clone() }));
        Self { rollouts, invalid, confirmed, metadata }
    }

    /// resourceVersion; empty if the ConfigMap does not exist.
    pub fn version(&self) -> &str {
        let version = self.metadata.as_ref().and_then(|metadata| metadata.resource_version.as_deref());
        version.unwrap_or_default()
    }

    /// Returns whether the state of a rollout is stored and cannot be parsed.
    pub fn is_invalid(&self, key: &RolloutKey) -> bool {
        self.invalid.contains_key(&data_key(key))
    }

    /// Metadata, `None` without a ConfigMap, and data of the ConfigMap with these rollouts, without the confirmations that
    /// they used.
    pub fn replaced_by(&self, rollouts: &Rollouts) -> (Option<ObjectMeta>, BTreeMap<String, String>) {
        let waiting: BTreeSet<_> = rollouts.values().filter_map(Rollout::confirmation).collect();
        let left: Vec<_> = self.confirmed.intersection(&waiting).map(String::as_str).collect();
        let mut metadata = self.metadata.as_deref().cloned();
        if let Some(annotations) = metadata.as_mut().and_then(|metadata| metadata.annotations.as_mut()) {
            if left.is_empty() {
                annotations.remove(annotation::CONFIRM);
            } else {
                annotations.insert(annotation::CONFIRM.to_owned(), left.join(","));
            }
        }
        let valid = rollouts.iter().map(|(key, rollout)| (data_key(key), to_text(rollout)));
        (metadata, self.invalid.clone().into_iter().chain(valid).collect())
    }
}

fn to_text(rollout: &Rollout) -> String {
    serde_json::to_string(rollout).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::catalog::rollout::Progress;

    fn rollout(module: &str, channel: Option<&str>, halted: Option<&str>) -> Rollout {
        let progress = Some(Progress { halted: halted.map(str::to_owned), ..Progress::default() });
        Rollout {
            module: module.to_owned(),
            channel: channel.map(str::to_owned),
            version: "1.1.0".to_owned(),
            moved: 7,
            change: format!("of-{module}"),
            earlier: Vec::new(),
            reverts: BTreeSet::new(),
            progress,
        }
    }

    fn all(rollouts: &[Rollout]) -> Rollouts {
        rollouts.iter().map(|rollout| (rollout.key(), rollout.clone())).collect()
    }

    fn map(snapshot: &Snapshot, rollouts: &Rollouts) -> ConfigMap {
        let (metadata, data) = snapshot.replaced_by(rollouts);
        ConfigMap { metadata: metadata.unwrap_or_default(), data: Some(data), ..ConfigMap::default() }
    }

    #[test]
    fn rollouts_round_trip_and_invalid_ones_are_kept() {
        let rollouts = all(&[
            rollout("keda", Some("fast"), None),
            rollout("keda", None, Some("2 of 9")),
            rollout("keda", Some("mandatory"), None),
        ]);
        let mut map = map(&Snapshot::default(), &rollouts);
        assert_eq!(map.data.as_ref().unwrap().keys().collect::<Vec<_>>(), ["keda", "keda_fast", "keda_mandatory"]);
        let text = map.data.as_ref().unwrap()["keda_fast"].clone();
        // Under the key of another rollout it would take its place.
        map.data.as_mut().unwrap().extend([("nats_fast".to_owned(), text), ("x".to_owned(), "{".to_owned())]);
        let read = Snapshot::of(Some(&map));
        assert_eq!((&read.rollouts, read.invalid.len()), (&rollouts, 2));
        let nats = RolloutKey { module: "nats".to_owned(), channel: Some("fast".to_owned()) };
        assert!(read.is_invalid(&nats) && !read.rollouts.contains_key(&nats));
        assert_eq!(read.replaced_by(&rollouts).1, map.data.unwrap());
    }

    #[test]
    fn confirmation_is_kept_until_it_is_used() {
        let halted = rollout("keda", Some("fast"), Some("2 of 9"));
        let mut map = map(&Snapshot::default(), &all(std::slice::from_ref(&halted)));
        map.metadata.annotations = Some(
            [(annotation::CONFIRM, "of-keda-1, other-1"), ("theirs", "x")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
        );
        let read = Snapshot::of(Some(&map));
        assert_eq!(read.confirmed.len(), 2);
        let confirm = |rollout: &Rollout| {
            let (metadata, _) = read.replaced_by(&all(std::slice::from_ref(rollout)));
            let annotations = metadata.unwrap().annotations.unwrap();
            (annotations.get(annotation::CONFIRM).cloned(), annotations["theirs"].clone())
        };
        assert_eq!(confirm(&halted), (Some("of-keda-1".to_owned()), "x".to_owned()));
        assert_eq!(confirm(&rollout("keda", Some("fast"), None)), (None, "x".to_owned()));
    }

    #[test]
    fn value_of_another_form_is_invalid() {
        let map = |value: serde_json::Value| {
            let data = Some(BTreeMap::from([("keda_fast".to_owned(), value.to_string())]));
            Snapshot::of(Some(&ConfigMap { data, ..ConfigMap::default() }))
        };
        let valid = serde_json::to_value(rollout("keda", Some("fast"), None)).unwrap();
        assert!(map(valid.clone()).invalid.is_empty());
        for (member, value) in [
            ("version", json!(1)),
            ("moved", json!("now")),
            ("progress", json!({"since": 1, "ring": {"number": 1, "through": "xyz"}})),
            ("progress", json!({"since": 1, "ring": {"number": -1, "through": "00"}})),
        ] {
            let mut bad = valid.clone();
            bad[member] = value;
            assert_eq!(map(bad).invalid.len(), 1, "{member}");
        }
    }
}
