//! The view of the ring rollouts in text and JSON.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;
use tidewatch_kit::table;
use tidewatch_select::module_rollout::members::{Member, Standing};

/// Ring rollouts of KCP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutsView {
    /// Rollouts by module and channel.
    pub rollouts: Vec<RolloutView>,
    /// Invalid states and rules.
    pub invalid: Vec<InvalidView>,
    /// The maintenance windows are known; otherwise no runtime counts as blocked by its window.
    pub windows_known: bool,
}

/// One rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutView {
    /// Name of the module.
    pub module: String,
    /// Name of the channel; absent for the mandatory version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    /// Version before the move, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Version of every runtime in the end.
    pub to: String,
    /// Identifier of the move.
    pub change: String,
    /// Time of the move.
    pub moved: String,
    /// State.
    pub state: RolloutState,
    /// Number of the ring, from 1; 0 has the runtimes before the first one. Absent before the first one, and when complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ring: Option<u32>,
    /// Number of rings; absent if neither the annotations nor the flags name any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rings: Option<usize>,
    /// Number of runtimes by standing; absent when complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtimes: Option<RuntimeCounts>,
    /// State or event that it waits for; absent while it upgrades runtimes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Reason of the halt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Confirmation that continues a halted rollout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirmation: Option<String>,
    /// The confirmation is given.
    pub confirmed: bool,
}

/// State of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RolloutState {
    /// The first ring has not begun.
    NotStarted,
    /// The runtimes of a ring get the version.
    InRing,
    /// Too many upgraded modules failed: it waits for a confirmation.
    Halted,
    /// Every runtime gets the version.
    Complete,
}

/// Number of runtimes by standing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeCounts {
    /// The module is ready with the version.
    pub proven: usize,
    /// They have the version, and are not assessed yet.
    pub upgrading: usize,
    /// The module was healthy before, and is not with the version.
    pub failing: usize,
    /// They have another version and can be upgraded.
    pub waiting: usize,
    /// They have another version and cannot be upgraded now, by reason.
    pub blocked: BTreeMap<&'static str, usize>,
    /// They have the version and are no evidence for or against it.
    pub unfit: usize,
}

/// An invalid state or rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InvalidView {
    /// Object, and key in it.
    pub place: String,
    /// The mistake, and its effect.
    pub message: String,
}

impl RuntimeCounts {
    pub(super) fn of(members: &[Member]) -> Self {
        let mut counts = Self::default();
        for member in members {
            *match member.standing {
                Standing::Waiting { .. } => &mut counts.waiting,
                Standing::Blocked(block) => counts.blocked.entry(block.into()).or_default(),
                // Without a memory no runtime is known to be lost.
                Standing::Upgrading | Standing::Lost => &mut counts.upgrading,
                Standing::Proven => &mut counts.proven,
                Standing::Failing => &mut counts.failing,
                Standing::Unfit => &mut counts.unfit,
            } += 1;
        }
        counts
    }
}

/// Source of the version in a sentence.
pub(super) fn source(channel: Option<&str>) -> String {
    channel.map_or_else(|| "as its mandatory version".to_owned(), |channel| format!("in the channel {channel}"))
}

/// Ring in a sentence.
pub(super) fn ring(number: Option<u32>) -> String {
    match number {
        None => "the first ring".to_owned(),
        Some(0) => "the ring of the canaries".to_owned(),
        Some(number) => format!("ring {number}"),
    }
}

impl RolloutView {
    fn state(&self) -> String {
        let rings = self.rings.map(|rings| format!(" of {rings}")).unwrap_or_default();
        let ring = ring(self.ring);
        match self.state {
            RolloutState::NotStarted => "not started".to_owned(),
            RolloutState::InRing => format!("in {ring}{rings}"),
            RolloutState::Halted => format!("halted in {ring}{rings}"),
            RolloutState::Complete => "complete".to_owned(),
        }
    }

    fn row(&self) -> [String; 12] {
        let counts = self.runtimes.as_ref();
        let number = |of: fn(&RuntimeCounts) -> usize| counts.map_or_else(|| "-".to_owned(), |it| of(it).to_string());
        let blocked = counts.map(|counts| counts.blocked.iter().map(|(block, count)| format!("{count} {block}")));
        let blocked = blocked.map(|blocked| blocked.collect::<Vec<_>>().join(", "));
        [
            self.module.clone(),
            self.channel.clone().unwrap_or_else(|| "mandatory".to_owned()),
            format!("{} → {}", self.from.as_deref().unwrap_or("?"), self.to),
            self.change.clone(),
            self.state(),
            number(|counts| counts.proven),
            number(|counts| counts.upgrading),
            number(|counts| counts.failing),
            number(|counts| counts.waiting),
            blocked.map_or_else(|| "-".to_owned(), |text| if text.is_empty() { "0".to_owned() } else { text }),
            number(|counts| counts.unfit),
            self.waits_for.clone().unwrap_or_else(|| "-".to_owned()),
        ]
    }

    /// Paragraph about a halted rollout: reason, and the ways on.
    fn halt(&self) -> Option<String> {
        let reason = self.reason.as_ref()?;
        let id = self.confirmation.as_ref()?;
        let module = &self.module;
        let source = source(self.channel.as_deref());
        let state = self.state();
        let mut text = format!("{module} {source} has {state}: {reason}\n");
        if self.confirmed {
            text.push_str("  it is confirmed, and continues with the active receiver\n");
        } else {
            text.push_str(&format!("  to continue: tidewatch rollout confirm {id}\n"));
        }
        if let Some(from) = &self.from {
            text.push_str(&format!("  to revert: move it back to {from}\n"));
        }
        Some(text)
    }
}

impl fmt::Display for RolloutsView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rollouts.is_empty() {
            f.write_str("no ring rollout is in progress\n")?;
        } else {
            let head = [
                "MODULE",
                "CHANNEL",
                "VERSIONS",
                "CHANGE",
                "STATE",
                "PROVEN",
                "UPGRADING",
                "FAILING",
                "WAITING",
                "BLOCKED",
                "UNFIT",
                "WAITS FOR",
            ];
            f.write_str(&table::aligned(head, self.rollouts.iter().map(RolloutView::row).collect()))?;
        }
        for halt in self.rollouts.iter().filter_map(RolloutView::halt) {
            f.write_str("\n")?;
            halt.lines().try_for_each(|line| writeln!(f, "{}", table::sanitize(line)))?;
        }
        let mut notes: Vec<_> =
            self.invalid.iter().map(|InvalidView { place, message }| format!("{place}: {message}")).collect();
        let in_progress = || self.rollouts.iter().filter(|rollout| rollout.state != RolloutState::Complete);
        if in_progress().any(|rollout| rollout.rings.is_none()) {
            notes.push("the rings of a module are not known: give the receiver's --module-rollout-rings".to_owned());
        }
        if !self.windows_known && in_progress().next().is_some() {
            notes.push(
                "the maintenance windows are not known: runtimes that wait for one count as waiting, unless \
                 --maintenance-window-policy names the policy"
                    .to_owned(),
            );
        }
        let separator = if notes.is_empty() { "" } else { "\n" };
        f.write_str(separator)?;
        notes.iter().try_for_each(|note| writeln!(f, "{}", table::sanitize(note)))
    }
}
