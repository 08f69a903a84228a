//! Assesses the runtimes of a rollout, as input for its decisions. Pure.

use std::{collections::HashMap, time::Duration};

use tidewatch_api::{
    State,
    facts::{KymaFacts, ManifestFacts},
    key::KymaKey,
    selection::SelectedVersion,
    selectors::KymaSelector,
};
use tokio::time::Instant;

use crate::{
    catalog::{
        RolloutMark,
        rollout::{Rollout, RolloutKey},
    },
    versions::core_version,
};

/// Bit of the rank of all runtimes but those before the first ring.
const IN_RINGS: u64 = 1 << 63;
/// Highest rank of a runtime before the first ring.
pub(crate) const LAST_FIRST: u64 = IN_RINGS - 1;

/// Reason for which a runtime cannot be upgraded now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Block {
    /// Its API server cannot be reached.
    #[strum(serialize = "unreachable")]
    Access,
    /// Nothing is written to it.
    Paused,
    /// The version requires a downtime, and its maintenance window is not open.
    Window,
    /// It was admitted and has not been upgraded in time.
    Late,
}

/// Standing of a runtime in a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Standing {
    /// It has another version and can be upgraded.
    Waiting {
        /// The module is ready, or in a warning state.
        healthy: bool,
    },
    /// It has another version and cannot be upgraded now.
    Blocked(Block),
    /// It has the version, and is not assessed yet.
    Upgrading,
    /// It has the version, and could not be assessed in time because it cannot be reached.
    Lost,
    /// The module is ready with the version.
    Proven,
    /// The module was healthy before, and is not with the version.
    Failing,
    /// It has the version and is no evidence for or against it: the module was unhealthy before, or was not upgraded by
    /// this rollout.
    Unfit,
}

/// A runtime of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Key of the Kyma.
    pub kyma: KymaKey,
    /// Uid of the Kyma.
    pub uid: String,
    /// Position in the order of the rollout; see [`rank`].
    pub rank: u64,
    /// Standing in the rollout.
    pub standing: Standing,
}

/// Number of members with this standing.
pub fn count(members: &[Member], standing: Standing) -> usize {
    members.iter().filter(|member| member.standing == standing).count()
}

/// Observation of a module in one runtime, from the caches of KCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The Manifest has the version of the rollout, or a newer one that it keeps.
    pub has_version: bool,
    /// Rollout by which the module got its version.
    pub mark: Option<RolloutMark>,
    /// The layer that the Manifest names is applied, so that the state is that of its version.
    pub is_synced: bool,
    /// The module is ready, or in a warning state.
    pub is_healthy: bool,
    /// The module is in an error state.
    pub is_error: bool,
    /// The Manifest is not reconciled, by a label.
    pub is_skipped: bool,
    /// Reason for which nothing can be upgraded.
    pub block: Option<Block>,
}

impl Observation {
    /// Observes a module in a rollout. The label that stops a Manifest counts unless the selector turns it around.
    pub fn of(manifest: &ManifestFacts<'_>, rollout: &Rollout, block: Option<Block>, selector: &KymaSelector) -> Self {
        let version = manifest.version;
        let mark = manifest.mark.and_then(RolloutMark::of_text);
        let is_reverted = mark.as_ref().is_some_and(|mark| rollout.reverts.contains(&mark.change));
        // A channel does not downgrade a module, except by a move back.
        let is_newer = || version.and_then(core_version) > core_version(&rollout.version);
        let keeps = rollout.channel.is_some() && !is_reverted;
        Self {
            has_version: version == Some(&rollout.version) || keeps && is_newer(),
            mark,
            is_synced: manifest.flags.is_synced,
            is_healthy: manifest.is_healthy(),
            is_error: manifest.flags.state == Some(State::Error),
            is_skipped: manifest.flags.is_skipped && !selector.selects_skipped(),
            block,
        }
    }
}

/// Returns whether a managed module, which is not being removed, follows the channel or mandatory version of a rollout. A pin
/// may be refused: the Manifest then keeps the channel that it no longer follows.
pub fn follows<'a>(manifest: &ManifestFacts<'_>, kyma: impl Into<KymaFacts<'a>>, key: &RolloutKey) -> bool {
    let is_pinned = || matches!(kyma.into().selected(&key.module), Some(SelectedVersion::Version(_)));
    let follows = match &key.channel {
        Some(channel) => manifest.channel == Some(channel) && !is_pinned(),
        None => manifest.flags.is_mandatory,
    };
    follows && !manifest.flags.is_unmanaged && !manifest.flags.is_deleting
}

/// Reason for which nothing can be upgraded in a runtime. `is_stopped`: nothing is written to it; `awaits_window`: the
/// version has to wait for its maintenance window.
pub fn block<'a>(
    kyma: impl Into<KymaFacts<'a>>,
    is_stopped: bool,
    awaits_window: impl FnOnce() -> bool,
) -> Option<Block> {
    if is_stopped {
        return Some(Block::Paused);
    }
    if kyma.into().lacks_access() {
        return Some(Block::Access);
    }
    awaits_window().then_some(Block::Window)
}

/// Position of a Kyma in the order of a rollout: those before the first ring, then the others, effectively random, and equal in
/// every process.
pub fn rank(module: &str, version: &str, kyma_uid: &str, is_first: bool) -> u64 {
    let rank = tidewatch_rollout::rank(&format!("{module}\n{version}"), kyma_uid) >> 1;
    if is_first { rank } else { rank | IN_RINGS }
}

/// Times since when runtimes are in their state, by Kyma. A new process grants every runtime the full deadline.
#[derive(Debug, Default)]
pub struct Times {
    rows: HashMap<KymaKey, Row>,
}

#[derive(Debug, Default)]
struct Row {
    /// Start of the time in which the runtime was admitted and did not have the version.
    admitted: Option<Instant>,
    /// Start of the time in which the runtime had the version and was not assessed.
    upgrading: Option<Instant>,
    /// End of the time in which the runtime counts as late.
    late_until: Option<Instant>,
}

impl Times {
    /// Retains only these Kymas.
    pub fn retain(&mut self, keep: impl Fn(&KymaKey) -> bool) {
        self.rows.retain(|key, _| keep(key));
    }

    /// Assesses a runtime in the rollout of a move.
    pub fn assess(
        &mut self,
        key: &KymaKey,
        change: &str,
        is_admitted: bool,
        observation: &Observation,
        deadline: Duration,
        now: Instant,
    ) -> Standing {
        let row = self.rows.entry(key.clone()).or_default();
        if observation.has_version {
            (row.admitted, row.late_until) = (None, None);
            row.upgraded(change, observation, deadline, now)
        } else {
            row.upgrading = None;
            row.waiting(is_admitted, observation, deadline, now)
        }
    }
}

impl Row {
    fn upgraded(&mut self, change: &str, observation: &Observation, deadline: Duration, now: Instant) -> Standing {
        let Some(mark) = observation.mark.as_ref().filter(|mark| mark.change == change) else { return Standing::Unfit };
        if observation.is_synced && observation.is_healthy {
            self.upgrading = None;
            return Standing::Proven;
        }
        if !mark.healthy || observation.is_skipped {
            return Standing::Unfit;
        }
        // The state of a runtime that cannot be reached says nothing about the version.
        let is_known = !matches!(observation.block, Some(Block::Access | Block::Paused));
        if observation.is_error && is_known {
            return Standing::Failing;
        }
        let since = *self.upgrading.get_or_insert(now);
        match (now >= since + deadline, is_known) {
            (false, _) => Standing::Upgrading,
            (true, true) => Standing::Failing,
            (true, false) => Standing::Lost,
        }
    }

    fn waiting(&mut self, is_admitted: bool, observation: &Observation, deadline: Duration, now: Instant) -> Standing {
        if let Some(block) = observation.block {
            self.admitted = None;
            return Standing::Blocked(block);
        }
        if self.late_until.is_some_and(|until| now < until) {
            return Standing::Blocked(Block::Late);
        }
        self.admitted = is_admitted.then(|| self.admitted.unwrap_or(now));
        if self.admitted.is_some_and(|since| now >= since + deadline) {
            (self.admitted, self.late_until) = (None, Some(now + deadline));
            return Standing::Blocked(Block::Late);
        }
        Standing::Waiting { healthy: observation.is_healthy && !observation.is_skipped }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tidewatch_api::{
        Kyma, Manifest,
        names::{annotation, label},
    };

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(100);

    fn mark(healthy: bool) -> Option<RolloutMark> {
        Some(RolloutMark { change: "c".to_owned(), healthy })
    }

    /// A ready module with the version.
    fn upgraded() -> Observation {
        Observation {
            has_version: true,
            mark: mark(true),
            is_synced: true,
            is_healthy: true,
            is_error: false,
            is_skipped: false,
            block: None,
        }
    }

    fn waiting() -> Observation {
        Observation { has_version: false, mark: None, ..upgraded() }
    }

    fn first(observation: &Observation) -> Standing {
        Times::default().assess(&key(), "c", false, observation, DEADLINE, Instant::now())
    }

    fn key() -> KymaKey {
        KymaKey::new("ns", "k")
    }

    #[test]
    fn pinned_module_follows_no_rollout_of_a_channel() {
        let kyma = |pin: Option<&str>| -> Kyma {
            serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": "k", "annotations": {"version.operator.kyma-project.io/keda": pin.unwrap_or_default()}},
                "spec": {"channel": "fast", "modules": if pin.is_some() { json!([{"name": "keda"}]) } else { json!([]) }}}))
            .unwrap()
        };
        let manifest = |labels: Value| -> Manifest {
            serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
                "metadata": {"name": "m", "labels": labels},
                "spec": {"remote": true, "version": "1.0.0", "install": {"name": "i", "source": {}}}}))
            .unwrap()
        };
        let fast = manifest(json!({label::CHANNEL: "fast"}));
        let mandatory = manifest(json!({label::MANDATORY_MODULE: "true"}));
        let check = |manifest: &Manifest, pin: Option<&str>, channel: Option<&str>| {
            let key = RolloutKey { module: "keda".to_owned(), channel: channel.map(str::to_owned) };
            follows(&ManifestFacts::from(manifest), &kyma(pin), &key)
        };
        assert!(check(&fast, None, Some("fast")) && !check(&fast, None, Some("regular")));
        for pin in ["1.0.0", "0.9.0", "latest"] {
            assert!(!check(&fast, Some(pin), Some("fast")), "{pin}");
            assert!(check(&mandatory, Some(pin), None), "{pin}");
        }
    }

    #[test]
    fn module_that_is_removed_or_unmanaged_follows_no_rollout() {
        let kyma: Kyma =
            serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k"}, "spec": {"channel": "fast"}}))
            .unwrap();
        let key = RolloutKey { module: "keda".to_owned(), channel: Some("fast".to_owned()) };
        for (member, value, expected) in [
            ("annotations", json!({}), true),
            ("annotations", json!({annotation::UNMANAGED: "true"}), false),
            ("deletionTimestamp", json!("2026-01-01T00:00:00Z"), false),
        ] {
            let mut manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
                "metadata": {"name": "m", "labels": {label::CHANNEL: "fast"}},
                "spec": {"remote": true, "version": "1.0.0", "install": {"name": "i", "source": {}}}});
            manifest["metadata"][member] = value;
            let manifest: Manifest = serde_json::from_value(manifest).unwrap();
            assert_eq!(follows(&ManifestFacts::from(&manifest), &kyma, &key), expected, "{member}");
        }
    }

    #[test]
    fn standing_follows_from_the_version_and_the_state() {
        let failed = Observation { is_healthy: false, is_error: true, ..upgraded() };
        for (observation, standing) in [
            (upgraded(), Standing::Proven),
            (Observation { is_synced: false, ..upgraded() }, Standing::Upgrading),
            (failed.clone(), Standing::Failing),
            (Observation { is_synced: false, ..failed.clone() }, Standing::Failing),
            (Observation { mark: mark(false), ..failed.clone() }, Standing::Unfit),
            (Observation { mark: mark(false), ..upgraded() }, Standing::Proven),
            (Observation { mark: None, ..failed.clone() }, Standing::Unfit),
            (Observation { mark: None, ..upgraded() }, Standing::Unfit),
            (Observation { is_skipped: true, ..failed.clone() }, Standing::Unfit),
            (Observation { block: Some(Block::Access), ..failed.clone() }, Standing::Upgrading),
            (Observation { block: Some(Block::Paused), ..failed.clone() }, Standing::Upgrading),
            (Observation { block: Some(Block::Window), ..failed }, Standing::Failing),
            (waiting(), Standing::Waiting { healthy: true }),
            (Observation { is_healthy: false, ..waiting() }, Standing::Waiting { healthy: false }),
            (Observation { block: Some(Block::Window), ..waiting() }, Standing::Blocked(Block::Window)),
        ] {
            assert_eq!(first(&observation), standing, "{observation:?}");
        }
        let of_another =
            Observation { mark: Some(RolloutMark { change: "d".to_owned(), healthy: true }), ..upgraded() };
        assert_eq!(first(&of_another), Standing::Unfit);
    }

    #[test]
    fn newer_version_is_kept_unless_the_move_reverts_it() {
        let has_version = |installed: &str, channel: Option<&str>, reverts: &[&str]| {
            let rollout = serde_json::from_value(serde_json::json!({
                "module": "keda", "channel": channel, "version": "1.1.0", "moved": 7, "change": "d", "reverts": reverts
            }))
            .unwrap();
            let manifest: Manifest = serde_json::from_value(serde_json::json!({
                "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
                "metadata": {"name": "m", "annotations": {annotation::ROLLOUT: mark(true).unwrap().to_text()}},
                "spec": {"remote": true, "version": installed, "install": {"name": "raw-manifest", "source": {}}}
            }))
            .unwrap();
            Observation::of(&(&manifest).into(), &rollout, None, &KymaSelector::default()).has_version
        };
        for (installed, channel, reverts, expected) in [
            ("1.1.0", Some("fast"), &[][..], true),
            ("1.0.0", Some("fast"), &[], false),
            ("1.2.0", Some("fast"), &[], true),
            ("1.2.0", Some("fast"), &["c"], false),
            ("1.2.0", None, &[], false),
            ("latest", Some("fast"), &[], false),
        ] {
            assert_eq!(has_version(installed, channel, reverts), expected, "{installed} {channel:?} {reverts:?}");
        }
    }

    #[test]
    fn skip_label_of_a_manifest_counts_unless_the_selector_names_it() {
        let rollout = serde_json::from_value(serde_json::json!({
            "module": "keda", "channel": "fast", "version": "1.1.0", "moved": 7, "change": "d", "reverts": []
        }))
        .unwrap();
        let manifest: Manifest = serde_json::from_value(serde_json::json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "labels": {label::SKIP_RECONCILIATION: "true"}},
            "spec": {"remote": true, "version": "1.1.0", "install": {"name": "raw-manifest", "source": {}}}
        }))
        .unwrap();
        let named = format!("{}=true", label::SKIP_RECONCILIATION);
        for (selector, expected) in [("", true), ("a=b", true), (named.as_str(), false)] {
            let selector = KymaSelector::new(selector);
            let observation = Observation::of(&(&manifest).into(), &rollout, None, &selector);
            assert_eq!(observation.is_skipped, expected, "{selector:?}");
        }
    }

    #[test]
    fn upgraded_module_has_a_deadline() {
        let mut times = Times::default();
        let start = Instant::now();
        let progressing = Observation { is_healthy: false, ..upgraded() };
        let unreachable = Observation { block: Some(Block::Access), ..progressing.clone() };
        let mut at = |observation: &Observation, after: Duration| {
            times.assess(&key(), "c", true, observation, DEADLINE, start + after)
        };
        assert_eq!(at(&progressing, Duration::ZERO), Standing::Upgrading);
        assert_eq!(at(&progressing, DEADLINE - Duration::from_secs(1)), Standing::Upgrading);
        assert_eq!(at(&progressing, DEADLINE), Standing::Failing);
        assert_eq!(at(&unreachable, DEADLINE), Standing::Lost, "nothing is known about it");
        assert_eq!(at(&upgraded(), DEADLINE), Standing::Proven);
        assert_eq!(at(&progressing, DEADLINE), Standing::Upgrading, "a restart has a deadline of its own");
        assert_eq!(at(&waiting(), DEADLINE), Standing::Waiting { healthy: true });
        assert_eq!(at(&progressing, DEADLINE * 2), Standing::Upgrading, "so has another upgrade");
    }

    #[test]
    fn admitted_runtime_that_is_not_upgraded_in_time_is_late_for_a_while() {
        let mut times = Times::default();
        let start = Instant::now();
        let mut at = |is_admitted: bool, after: Duration| {
            times.assess(&key(), "c", is_admitted, &waiting(), DEADLINE, start + after)
        };
        assert_eq!(at(true, Duration::ZERO), Standing::Waiting { healthy: true });
        assert_eq!(at(true, DEADLINE), Standing::Blocked(Block::Late));
        assert_eq!(at(false, DEADLINE * 2 - Duration::from_secs(1)), Standing::Blocked(Block::Late));
        assert_eq!(at(false, DEADLINE * 2), Standing::Waiting { healthy: true }, "it is tried again");
        assert_eq!(at(true, DEADLINE * 2), Standing::Waiting { healthy: true });
    }

    #[test]
    fn time_of_an_admitted_runtime_begins_again_after_a_block_and_after_an_upgrade() {
        let start = Instant::now();
        let blocked = Observation { block: Some(Block::Access), ..waiting() };
        for between in [blocked, upgraded()] {
            let mut times = Times::default();
            let mut at = |observation: &Observation, after: Duration| {
                times.assess(&key(), "c", true, observation, DEADLINE, start + after)
            };
            at(&waiting(), Duration::ZERO);
            at(&between, DEADLINE / 2);
            assert_eq!(at(&waiting(), DEADLINE), Standing::Waiting { healthy: true }, "{between:?}");
            assert_eq!(at(&waiting(), DEADLINE * 2), Standing::Blocked(Block::Late), "{between:?}");
            at(&upgraded(), DEADLINE * 2);
            assert_eq!(at(&waiting(), DEADLINE * 2), Standing::Waiting { healthy: true }, "it is late no longer");
        }
    }

    #[test]
    fn first_runtimes_come_before_the_rings() {
        let rank = |uid: &str, is_first| rank("keda", "1.1.0", uid, is_first);
        let all = |is_first| (0..50).map(move |n| rank(&format!("u-{n}"), is_first));
        assert!(all(true).max() <= Some(LAST_FIRST) && all(false).min() > Some(LAST_FIRST));
        assert_ne!(rank("u-1", false), super::rank("keda", "1.2.0", "u-1", false), "each version has another order");
    }
}
