//! State of the rollout of one moved channel or mandatory version, and the rollout that follows it after a move. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tidewatch_kit::digest::short_digest;
use tidewatch_rollout::Ring;

use crate::catalog::{
    RolloutSlot,
    target::{ChannelTarget, VersionSource},
};

/// Maximum number of earlier versions in a rollout.
const MAX_EARLIER: usize = 8;

/// Source of the versions that rollouts bring: a channel of a module, or its mandatory version.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RolloutKey {
    /// Name of the module.
    pub module: String,
    /// Name of the channel; `None` for the mandatory version.
    pub channel: Option<String>,
}

impl RolloutKey {
    /// Key of the rollout of a module's channel, or of its mandatory version.
    pub fn new(module: &str, source: VersionSource<'_>) -> Self {
        let channel = match source {
            VersionSource::Channel(channel) => Some(channel.to_owned()),
            VersionSource::Mandatory => None,
        };
        Self { module: module.to_owned(), channel }
    }
}

/// Rollout of the version that a channel or the field `mandatory` points to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// Name of the module.
    pub module: String,
    /// Name of the channel; absent for the mandatory version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    /// Version of every runtime in the end.
    pub version: String,
    /// Time of the move to it, in Unix seconds.
    pub moved: i64,
    /// Identifier of the move.
    pub change: String,
    /// Versions before it, the oldest first: one that all runtimes had, then those whose rollouts did not end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<EarlierVersion>,
    /// Moves that this one reverts: the runtimes that they upgraded may be downgraded.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub reverts: BTreeSet<String>,
    /// Progress; absent once every runtime gets the version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
}

/// Version that a channel pointed to before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlierVersion {
    /// The version.
    pub version: String,
    /// Move whose rollout did not end; absent if every runtime got the version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
}

/// Progress of a rollout through the rings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Ring whose runtimes get the version; absent before the first one. Number 0 has the runtimes before the first ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<Ring>,
    /// Start of the ring, in Unix seconds.
    pub since: i64,
    /// Number of confirmations so far.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub confirmations: u32,
    /// Number of failed runtimes that were confirmed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub confirmed_failures: usize,
    /// Number of failed runtimes at the halt.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failures_at_halt: usize,
    /// Reason of the halt; absent unless halted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub halted: Option<String>,
}

fn is_zero<N: Default + PartialEq>(number: &N) -> bool {
    *number == N::default()
}

impl Rollout {
    /// Returns the rollout after a move to `target`, if a rollout was recorded before. A move back to an earlier version
    /// reverts the moves since then; if all runtimes had that version, they get it at once.
    fn after(before: &Self, target: &ChannelTarget, moved: i64) -> Self {
        let key = before.key();
        let mut next = Self::begun(&key, target, moved);
        let current = EarlierVersion {
            version: before.version.clone(),
            change: before.progress.as_ref().map(|_| before.change.clone()),
        };
        // Those before a version that all runtimes have are over.
        let mut earlier = if current.change.is_some() { before.earlier.clone() } else { Vec::new() };
        earlier.push(current);
        if let Some(at) = earlier.iter().position(|earlier| earlier.version == target.version) {
            let reverted = earlier.drain(at..).collect::<Vec<_>>();
            next.reverts = reverted.iter().skip(1).filter_map(|earlier| earlier.change.clone()).collect();
            if reverted.first().is_some_and(|first| first.change.is_none()) {
                next.progress = None;
            } else {
                next.reverts.extend(reverted.first().and_then(|first| first.change.clone()));
            }
        }
        if earlier.len() > MAX_EARLIER {
            // The first one stays: it is the one that every runtime had.
            earlier.remove(1);
        }
        next.earlier = earlier;
        next
    }

    /// Returns the rollout of a moved source; `before` is the recorded one. `has_reached_all` tells of a move without a
    /// recorded rollout whether every runtime has the version.
    pub fn of_move(key: &RolloutKey, before: Option<&Self>, target: &ChannelTarget, has_reached_all: bool) -> Self {
        let moved = target.since.unwrap_or_default();
        if let Some(before) = before {
            return Self::after(before, target, moved);
        }
        let mut begun = Self::begun(key, target, moved);
        begun.earlier.extend(target.from.clone().map(|version| EarlierVersion { version, change: None }));
        if has_reached_all {
            begun.progress = None;
        }
        begun
    }

    fn begun(key: &RolloutKey, target: &ChannelTarget, moved: i64) -> Self {
        Self {
            module: key.module.clone(),
            channel: key.channel.clone(),
            version: target.version.clone(),
            moved,
            change: change_id(key, &target.version, moved),
            earlier: Vec::new(),
            reverts: BTreeSet::new(),
            progress: Some(Progress { since: moved, ..Progress::default() }),
        }
    }

    /// Channel or field of the release meta.
    pub fn key(&self) -> RolloutKey {
        RolloutKey { module: self.module.clone(), channel: self.channel.clone() }
    }

    /// Returns whether this is the rollout of the accepted target.
    pub fn is_of(&self, target: &ChannelTarget) -> bool {
        self.version == target.version && Some(self.moved) == target.since
    }

    /// Returns the rollout with this progress.
    pub fn with(&self, progress: Option<Progress>) -> Self {
        Self { progress, ..self.clone() }
    }

    /// Version before the move, if it is known.
    pub fn previous(&self) -> Option<&str> {
        self.earlier.last().map(|earlier| earlier.version.as_str())
    }

    /// Reason of the halt.
    pub fn halted(&self) -> Option<&str> {
        self.progress.as_ref()?.halted.as_deref()
    }

    /// Identifier that a confirmation of the current halt names; `None` unless halted.
    pub fn confirmation(&self) -> Option<String> {
        let progress = self.progress.as_ref().filter(|progress| progress.halted.is_some())?;
        Some(format!("{}-{}", self.change, progress.confirmations + 1))
    }

    /// Number of the ring, from 1; 0 for the runtimes before the first one. `None` before the first ring, and once every runtime gets the
    /// version.
    pub fn ring(&self) -> Option<u32> {
        Some(self.progress.as_ref()?.ring?.number)
    }
}

/// First five bytes of the SHA-256 of a move, in hex.
fn change_id(key: &RolloutKey, version: &str, moved: i64) -> String {
    let channel = key.channel.as_deref().unwrap_or_default();
    let text = format!("{}\n{channel}\n{version}\n{moved}", key.module);
    short_digest(text.as_bytes(), 5)
}

/// Rollout by which a module got its version, as an annotation of its Manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutMark {
    /// See [`Rollout::change`].
    pub change: String,
    /// The module was ready, or in a warning state, when it was upgraded.
    pub healthy: bool,
}

impl RolloutMark {
    /// Parses the annotation; a malformed one counts as absent.
    pub fn parse(annotations: &BTreeMap<String, String>) -> Option<Self> {
        Self::of_text(annotations.get(tidewatch_api::names::annotation::ROLLOUT)?)
    }

    /// Parses the value of the annotation.
    pub(crate) fn of_text(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// Value of the annotation.
    pub fn to_text(&self) -> String {
        let Self { change, healthy } = self;
        serde_json::json!({"change": change, "healthy": healthy}).to_string()
    }
}

/// Slot of a Kyma in a rollout with rings; `rollout` is the recorded one.
pub(super) fn slot(
    rollout: Option<&Rollout>,
    target: &ChannelTarget,
    is_admitted: impl FnOnce() -> bool,
) -> RolloutSlot {
    match rollout.filter(|rollout| rollout.is_of(target)) {
        None => RolloutSlot::Undecided,
        Some(rollout) if rollout.progress.is_none() || is_admitted() => RolloutSlot::Now,
        Some(_) => RolloutSlot::Ring,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::target::VisibilityLabels;

    fn key() -> RolloutKey {
        RolloutKey { module: "keda".to_owned(), channel: Some("fast".to_owned()) }
    }

    fn to(version: &str, since: i64, from: Option<&str>) -> ChannelTarget {
        ChannelTarget {
            version: version.to_owned(),
            labels: VisibilityLabels::default(),
            since: Some(since),
            from: from.map(str::to_owned),
        }
    }

    fn earlier(rollout: &Rollout) -> Vec<(&str, bool)> {
        rollout.earlier.iter().map(|earlier| (earlier.version.as_str(), earlier.change.is_some())).collect()
    }

    fn moved(before: &Rollout, version: &str, at: i64) -> Rollout {
        Rollout::of_move(&key(), Some(before), &to(version, at, Some(&before.version)), false)
    }

    #[test]
    fn move_back_reverts_the_moves_since_the_version() {
        let first = Rollout::of_move(&key(), None, &to("1.0.0", 10, None), true);
        assert_eq!((first.progress.clone(), earlier(&first)), (None, vec![]), "it has reached every runtime");
        let second = moved(&first, "1.1.0", 20);
        assert_eq!((earlier(&second), second.previous()), (vec![("1.0.0", false)], Some("1.0.0")));
        assert!(second.progress.is_some() && second.reverts.is_empty());
        let third = moved(&second, "1.2.0", 30);
        assert_eq!(earlier(&third), [("1.0.0", false), ("1.1.0", true)]);

        let back = moved(&third, "1.0.0", 40);
        assert_eq!((back.progress.clone(), earlier(&back)), (None, vec![]), "every runtime had it");
        assert_eq!(back.reverts, [&second, &third].map(|it| it.change.clone()).into());

        let half = moved(&third, "1.1.0", 40);
        assert!(half.progress.is_some(), "its rollout had not ended");
        assert_eq!((earlier(&half), half.reverts.contains(&third.change)), (vec![("1.0.0", false)], true));
        assert_ne!(half.change, second.change, "another move");

        let complete = moved(&second.with(None), "1.0.0", 40);
        assert_eq!(earlier(&complete), [("1.1.0", false)]);
        assert!(complete.progress.is_some() && complete.reverts.is_empty(), "a rollout that ended is not reverted");
    }

    #[test]
    fn move_without_a_recorded_rollout_is_rolled_out_unless_every_runtime_has_the_version() {
        let of = |reached| Rollout::of_move(&key(), None, &to("1.1.0", 1_000, Some("1.0.0")), reached);
        assert!(of(false).progress.is_some() && of(true).progress.is_none());
        assert_eq!(earlier(&of(false)), [("1.0.0", false)]);
    }

    #[test]
    fn earlier_versions_are_bounded_and_keep_the_first() {
        let mut rollout = Rollout::of_move(&key(), None, &to("1.0.0", 10, None), true);
        for n in 1..20 {
            rollout = moved(&rollout, &format!("1.{n}.0"), 10 + n);
        }
        assert_eq!((rollout.earlier.len(), earlier(&rollout)[0]), (MAX_EARLIER, ("1.0.0", false)));
    }

    #[test]
    fn slot_waits_for_the_recorded_rollout_of_the_accepted_target() {
        let target = to("1.1.0", 1_000, Some("1.0.0"));
        let rollout = Rollout::of_move(&key(), None, &target, false);
        assert_eq!(slot(None, &target, || true), RolloutSlot::Undecided);
        assert_eq!(slot(Some(&rollout), &to("1.2.0", 1_001, None), || true), RolloutSlot::Undecided);
        assert_eq!(slot(Some(&rollout), &to("1.1.0", 1_001, None), || true), RolloutSlot::Undecided, "another move");
        assert_eq!(slot(Some(&rollout), &target, || false), RolloutSlot::Ring);
        assert_eq!(slot(Some(&rollout), &target, || true), RolloutSlot::Now);
        assert_eq!(slot(Some(&rollout.with(None)), &target, || false), RolloutSlot::Now);
    }

    #[test]
    fn rollout_and_mark_round_trip_through_json() {
        let mut rollout = Rollout::of_move(&key(), None, &to("1.1.0", 1_000, Some("1.0.0")), false);
        let ring = Some(Ring { number: 3, through: u64::MAX });
        let halted = Some("2 of 9".to_owned());
        rollout.progress =
            Some(Progress { ring, since: 9, confirmations: 1, confirmed_failures: 2, failures_at_halt: 3, halted });
        let text = serde_json::to_string(&rollout).unwrap();
        assert!(text.contains("ffffffffffffffff"), "a number of 64 bits is no number of JSON: {text}");
        assert_eq!(serde_json::from_str::<Rollout>(&text).unwrap(), rollout);
        assert_eq!(rollout.confirmation().unwrap(), format!("{}-2", rollout.change));
        let mark = RolloutMark { change: "c".to_owned(), healthy: true };
        let annotations = |text: String| BTreeMap::from([(tidewatch_api::names::annotation::ROLLOUT.to_owned(), text)]);
        assert_eq!(RolloutMark::parse(&annotations(mark.to_text())), Some(mark));
        assert_eq!(RolloutMark::parse(&annotations("{".to_owned())), None);
    }
}
