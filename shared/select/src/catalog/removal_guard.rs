//! Guard against mass removal. Pure.
//!
//! It compares the `state` of all modules with the last accepted one, which may come from an earlier process. Each part that
//! the change takes from too many runtimes (`losses`) is held until it is confirmed (`held`); the rest of the change goes on.
//! The state also records since when a channel points to its version, which is the start of its roll-out.

mod held;
mod losses;
mod lost;
mod state;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tidewatch_kit::digest::short_digest;

pub use held::{HeldRemoval, HeldRemovals, Part};
pub use lost::{LossCause, LostReleases};
pub use state::{Audience, ModuleState, Releases};

use self::losses::Losses;

/// Percentage of the runtimes above which a removal waits for a confirmation, by default.
pub const DEFAULT_LIMIT_PERCENT: u8 = 5;

/// Maximum number of runtimes that may lose something without the percentage limit.
pub(crate) const MAX_UNGUARDED_RUNTIMES: usize = 3;

/// Decision on a change of the releases.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GuardDecision {
    /// New accepted state; held parts keep their previous state.
    pub accepted: Releases,
    /// Held removals.
    pub held: HeldRemovals,
    /// Confirmations without which a removal would be held.
    pub used: BTreeSet<String>,
}

/// Limits, confirmations and time by which a change is decided.
#[derive(Clone, Copy, Debug)]
pub struct RemovalPolicy<'a> {
    /// Percentage of runtimes that may lose something by one change.
    pub percent: u8,
    /// Identifiers of the confirmed removals.
    pub confirmed: &'a BTreeSet<String>,
    /// Current time in Unix seconds.
    pub now: i64,
}

/// Decides on the change from the `accepted` state to the `next`, part by part. It holds each part that more than `percent`
/// of all runtimes, and more than [`MAX_UNGUARDED_RUNTIMES`], would lose, and all other parts together if the runtimes that
/// lose any of them are as many, unless the policy has its confirmation. Without an accepted state everything is accepted.
/// `kymas` are the labels of all Kymas.
pub fn evaluate<'a>(
    accepted: Option<&Releases>,
    next: Releases,
    kymas: impl IntoIterator<Item = &'a BTreeMap<String, String>>,
    policy: RemovalPolicy<'_>,
) -> GuardDecision {
    evaluate_beyond(MAX_UNGUARDED_RUNTIMES, accepted, next, kymas, policy)
}

/// Compares the `accepted` state with the `next`, in a replica that does not decide: each part that a runtime would lose is held,
/// until the replica that decides has accepted its removal.
pub fn hold_all<'a>(
    accepted: &Releases,
    next: Releases,
    kymas: impl IntoIterator<Item = &'a BTreeMap<String, String>>,
    now: i64,
) -> GuardDecision {
    let policy = RemovalPolicy { percent: 0, confirmed: &BTreeSet::new(), now };
    evaluate_beyond(0, Some(accepted), next, kymas, policy)
}

/// As [`evaluate`], with the number of runtimes that may lose something without the percentage limit.
fn evaluate_beyond<'a>(
    unguarded: usize,
    accepted: Option<&Releases>,
    mut next: Releases,
    kymas: impl IntoIterator<Item = &'a BTreeMap<String, String>>,
    policy: RemovalPolicy<'_>,
) -> GuardDecision {
    let Some(before) = accepted else { return GuardDecision { accepted: next, ..GuardDecision::default() } };
    for (module, state) in &mut next {
        state.carry_over_times(before.get(module), policy.now);
    }
    let removed = ModuleState::default();
    let after = |module: &str| next.get(module).unwrap_or(&removed);
    let changed = before.iter().filter(|(module, state)| after(module).without_times() != state.without_times());
    let changed: Vec<_> = changed.map(|(module, state)| (module, Losses::between(state, after(module)))).collect();
    let tally = Tally::of(&changed, kymas);
    let limit = (tally.of.saturating_mul(policy.percent.into()) / 100).max(unguarded);
    let removals = tally.counts.iter().map(|((module, part), runtimes)| HeldRemoval {
        change: part_id(part, module, &before[*module], after(module)),
        module: (*module).to_owned(),
        part: (*part).clone(),
        runtimes: *runtimes,
        of: tally.of,
    });
    // Parts that few runtimes lose are many removals together, for example of a list that comes back empty.
    let (large, small): (Vec<_>, Vec<_>) = removals.partition(|removal| removal.runtimes > limit);
    let is_confirmed = |removal: &HeldRemoval| policy.confirmed.contains(&removal.change);
    let (mut confirmed, mut held): (Vec<_>, Vec<_>) = large.into_iter().partition(is_confirmed);
    if tally.losing_any(&small) > limit {
        let (further, rest): (Vec<_>, Vec<_>) = small.into_iter().partition(is_confirmed);
        confirmed.extend(further);
        if tally.losing_any(&rest) > limit {
            held.extend(rest);
        }
    }
    // A module that is held as a whole keeps its parts: their confirmations take effect with its own.
    let is_kept = |of: &HeldRemoval| held.iter().any(|held| held.module == of.module && held.part == Part::Module);
    let (kept, confirmed): (Vec<_>, Vec<_>) = confirmed.into_iter().partition(is_kept);
    held.extend(kept);
    let used = confirmed.into_iter().map(|removal| removal.change).collect();
    held.sort_by(|a, b| (&a.module, &a.part).cmp(&(&b.module, &b.part)));
    let runtimes = tally.losing_any(&held);
    let of = tally.of;
    for removal in &held {
        let state = next.entry(removal.module.clone()).or_default();
        state.keep(&removal.part, &before[&removal.module]);
    }
    let modules = held.iter().map(|removal| removal.module.clone()).collect();
    GuardDecision { accepted: next, held: HeldRemovals { modules, removals: held, runtimes, of }, used }
}

/// Numbers of runtimes by what they lose.
struct Tally<'a> {
    /// Number of all runtimes.
    of: usize,
    /// Number of runtimes that lose each part.
    counts: BTreeMap<(&'a str, &'a Part), usize>,
    /// Number of runtimes by all that they lose: few combinations, since visibility has few classes.
    combinations: BTreeMap<Vec<(&'a str, &'a Part)>, usize>,
}

impl<'a> Tally<'a> {
    fn of<'k>(
        changed: &'a [(&'a String, Losses)],
        kymas: impl IntoIterator<Item = &'k BTreeMap<String, String>>,
    ) -> Self {
        let mut tally = Self { of: 0, counts: BTreeMap::new(), combinations: BTreeMap::new() };
        for labels in kymas {
            tally.of += 1;
            let lost =
                changed.iter().flat_map(|(module, losses)| losses.of(labels).map(|part| (module.as_str(), part)));
            let lost: Vec<_> = lost.collect();
            if !lost.is_empty() {
                *tally.combinations.entry(lost).or_default() += 1;
            }
        }
        for (lost, runtimes) in &tally.combinations {
            for part in lost {
                *tally.counts.entry(*part).or_default() += runtimes;
            }
        }
        tally
    }

    /// Number of runtimes that lose any of these parts.
    fn losing_any(&self, removals: &[HeldRemoval]) -> usize {
        let parts: BTreeSet<_> = removals.iter().map(|removal| (removal.module.as_str(), &removal.part)).collect();
        let losing = self.combinations.iter().filter(|(lost, _)| lost.iter().any(|part| parts.contains(part)));
        losing.map(|(_, runtimes)| runtimes).sum()
    }
}

/// Identifier of the removal of a part, which changes with the removal itself and with nothing else.
fn part_id(part: &Part, module: &str, before: &ModuleState, now: &ModuleState) -> String {
    let target = |state: &ModuleState, channel: &str| state.without_times().channels.remove(channel);
    match part {
        Part::Module => identifier(&(part, module, before.access(), now.access())),
        Part::Component => identifier(&(part, module, &before.component, &now.component)),
        Part::Channel(channel) => identifier(&(part, module, target(before, channel), target(now, channel))),
        Part::Version(version) => identifier(&(part, module, before.versions.get(version), now.versions.get(version))),
    }
}

/// First five bytes of the SHA-256 in hex.
fn identifier(content: &impl Serialize) -> String {
    let text = serde_json::to_vec(content).expect("module states are plain data with string keys");
    short_digest(&text, 5)
}

#[cfg(test)]
mod tests;
