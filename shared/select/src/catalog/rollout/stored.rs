//! Rollouts as the ConfigMap in KCP stores them, one key for each, and the accepted targets that they follow. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;

use super::{
    DEFAULT_MAX_DELAY,
    record::{Rollout, RolloutKey},
};
use crate::catalog::{releases::Ledger, target::ChannelTarget};

/// Content of the ConfigMap.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredRollouts {
    /// Rollouts whose state can be parsed.
    pub rollouts: BTreeMap<RolloutKey, Rollout>,
    /// Values that cannot be parsed, by key.
    pub invalid: BTreeMap<String, String>,
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
        stored
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
