//! Rollouts as the ConfigMap in KCP stores them, one key for each, and the accepted targets that they follow. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::ConfigMap;
use tidewatch_api::names::annotation;

use super::{
    DEFAULT_MAX_DELAY,
    record::{Rollout, RolloutKey},
};
use crate::catalog::{confirmations, releases::Ledger, target::ChannelTarget};

/// Rollouts by the channel or mandatory version.
pub type Rollouts = BTreeMap<RolloutKey, Rollout>;

/// Content of the ConfigMap.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredRollouts {
    /// Rollouts whose state can be parsed.
    pub rollouts: Rollouts,
    /// Values that cannot be parsed, by key. They are kept until they are corrected or deleted.
    pub invalid: BTreeMap<String, String>,
    /// Identifiers of the halts that operators confirm.
    pub confirmed: BTreeSet<String>,
}

impl StoredRollouts {
    /// Parses the ConfigMap; `None` has no rollouts.
    pub fn of(map: Option<&ConfigMap>) -> Self {
        let mut stored = Self::default();
        for (key, text) in map.and_then(|map| map.data.as_ref()).into_iter().flatten() {
            match serde_json::from_str::<Rollout>(text) {
                Ok(rollout) if data_key(&rollout.key()) == *key => {
                    stored.rollouts.insert(rollout.key(), rollout);
                }
                Ok(_) | Err(_) => drop(stored.invalid.insert(key.clone(), text.clone())),
            }
        }
        let annotations = map.and_then(|map| map.metadata.annotations.as_ref());
        let confirmed = annotations.and_then(|all| all.get(annotation::CONFIRM));
        stored.confirmed = confirmed.map(|text| confirmations(text)).unwrap_or_default();
        stored
    }

    /// Data of the ConfigMap with these rollouts.
    pub fn data(&self, rollouts: &Rollouts) -> BTreeMap<String, String> {
        let to_text = |rollout| serde_json::to_string(rollout).unwrap_or_default();
        let valid = rollouts.iter().map(|(key, rollout)| (data_key(key), to_text(rollout)));
        self.invalid.clone().into_iter().chain(valid).collect()
    }

    /// Annotation with the confirmations that these rollouts have not used; `None` without any.
    pub fn unused_confirmations(&self, rollouts: &Rollouts) -> Option<String> {
        let waiting: BTreeSet<_> = rollouts.values().filter_map(Rollout::confirmation).collect();
        let unused: Vec<_> = self.confirmed.intersection(&waiting).map(String::as_str).collect();
        (!unused.is_empty()).then(|| unused.join(","))
    }

    /// Returns whether the state of a rollout is stored and cannot be parsed.
    pub fn is_invalid(&self, key: &RolloutKey) -> bool {
        self.invalid.contains_key(&data_key(key))
    }

    /// Returns the rollout of an accepted target at `now`, in Unix seconds, and whether it is recorded. `None` if its recorded
    /// state is invalid, or no move was observed. A move without a record counts as complete after the default delay of a
    /// roll-out.
    pub fn of_target(&self, key: &RolloutKey, target: &ChannelTarget, now: i64) -> Option<(Rollout, bool)> {
        let since = target.since.filter(|_| !self.is_invalid(key))?;
        let window = i64::try_from(DEFAULT_MAX_DELAY.as_secs()).unwrap_or(i64::MAX);
        Some(match self.rollouts.get(key) {
            Some(recorded) if recorded.is_of(target) => (recorded.clone(), true),
            recorded => (Rollout::of_move(key, recorded, target, now >= since.saturating_add(window)), false),
        })
    }
}

/// Key of a rollout in the ConfigMap: `<module>_<channel>`, or `<module>` for a mandatory version. Names of modules have
/// no underscore.
pub fn data_key(key: &RolloutKey) -> String {
    match &key.channel {
        Some(channel) => format!("{}_{channel}", key.module),
        None => key.module.clone(),
    }
}

/// Accepted targets of the channels and mandatory versions in the ConfigMap of releases.
pub fn accepted_targets(releases: Option<&ConfigMap>) -> BTreeMap<RolloutKey, ChannelTarget> {
    let mut ledger = Ledger::default();
    let _ = ledger.observe(releases);
    let accepted = ledger.accepted.unwrap_or_default();
    let targets = accepted.iter().flat_map(|(module, state)| {
        state.targets().map(|(source, target)| (RolloutKey::new(module, source), target.clone()))
    });
    targets.collect()
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

    fn map(stored: &StoredRollouts, rollouts: &Rollouts) -> ConfigMap {
        ConfigMap { data: Some(stored.data(rollouts)), ..ConfigMap::default() }
    }

    #[test]
    fn rollouts_round_trip_and_invalid_ones_are_kept() {
        let rollouts = all(&[
            rollout("keda", Some("fast"), None),
            rollout("keda", None, Some("2 of 9")),
            rollout("keda", Some("mandatory"), None),
        ]);
        let mut map = map(&StoredRollouts::default(), &rollouts);
        assert_eq!(map.data.as_ref().unwrap().keys().collect::<Vec<_>>(), ["keda", "keda_fast", "keda_mandatory"]);
        let text = map.data.as_ref().unwrap()["keda_fast"].clone();
        // Under the key of another rollout it would take its place.
        map.data.as_mut().unwrap().extend([("nats_fast".to_owned(), text), ("x".to_owned(), "{".to_owned())]);
        let read = StoredRollouts::of(Some(&map));
        assert_eq!((&read.rollouts, read.invalid.len()), (&rollouts, 2));
        let nats = RolloutKey { module: "nats".to_owned(), channel: Some("fast".to_owned()) };
        assert!(read.is_invalid(&nats) && !read.rollouts.contains_key(&nats));
        assert_eq!(read.data(&rollouts), map.data.unwrap());
    }

    #[test]
    fn confirmation_is_kept_until_it_is_used() {
        let halted = rollout("keda", Some("fast"), Some("2 of 9"));
        let mut map = map(&StoredRollouts::default(), &all(std::slice::from_ref(&halted)));
        let annotations = [(annotation::CONFIRM.to_owned(), "of-keda-1, other-1".to_owned())];
        map.metadata.annotations = Some(annotations.into());
        let read = StoredRollouts::of(Some(&map));
        assert_eq!(read.confirmed.len(), 2);
        let unused = |rollout: &Rollout| read.unused_confirmations(&all(std::slice::from_ref(rollout)));
        assert_eq!(unused(&halted).as_deref(), Some("of-keda-1"));
        assert_eq!(unused(&rollout("keda", Some("fast"), None)), None);
    }

    #[test]
    fn value_of_another_form_is_invalid() {
        let map = |value: serde_json::Value| {
            let data = Some(BTreeMap::from([("keda_fast".to_owned(), value.to_string())]));
            StoredRollouts::of(Some(&ConfigMap { data, ..ConfigMap::default() }))
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
