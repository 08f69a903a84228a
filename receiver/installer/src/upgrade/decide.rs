//! Computes the next step of an upgrade, without side effects.
//!
//! A stage ends when it has lasted long enough, fewer runtimes of its share are pending than may fail, and too few have
//! failed. A large fleet always has pending runtimes, if only new ones, so waiting for all of them would never end.
//! Failures are compared with those of runtimes that still have another image: a fault that both have is not the
//! image's, and the upgrade only waits.

use super::{
    UpgradeState,
    state::Ongoing,
    summary::{Counts, MAX_NAMED, Summary},
};
use tidewatch_rollout::{Ring, Rings, Share};

/// Parameters of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Criteria<'a> {
    pub(super) stages: &'a Rings,
    /// Shortest duration of a stage in seconds.
    pub(super) pause: i64,
    pub(super) max_failures: Share,
    /// An operator confirmed that the upgrade continues in spite of failures.
    pub(super) confirmed: bool,
    /// Current time in Unix seconds.
    pub(super) now: i64,
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The state does not change.
    Wait,
    /// The next state.
    Become(UpgradeState),
    /// The step depends on the order of the runtimes, which the summary lacks.
    NeedsOrder,
}

impl From<Option<UpgradeState>> for Step {
    fn from(next: Option<UpgradeState>) -> Self {
        next.map_or(Self::Wait, Self::Become)
    }
}

/// Computes the next step of the upgrade from the summary of all runtimes.
pub(super) fn step(state: &UpgradeState, fleet: &Summary, criteria: Criteria<'_>) -> Step {
    let Some(ongoing) = &state.ongoing else { return Step::Wait };
    let becomes = |ongoing| Step::Become(state.becoming(ongoing, criteria.now));
    if fleet.members == 0 {
        // If every runtime is away, the upgrade waits: returning runtimes must not all try a new image first.
        return if fleet.excluded == 0 { becomes(None) } else { Step::Wait };
    }
    let Some(stage) = ongoing.stage else { return begin(state, ongoing, fleet, criteria) };
    if ongoing.halted.is_some() {
        return match criteria.confirmed {
            true => becomes(Some(Ongoing { halted: None, ..ongoing.clone() })),
            false => Step::Wait,
        };
    }
    let counts = &fleet.counts;
    if !criteria.confirmed && counts.exceeds_max_failures(criteria.max_failures) {
        if !counts.upgraded_fare_worse() {
            return Step::Wait;
        }
        return becomes(Some(Ongoing { halted: Some(halt_reason(counts, fleet)), ..ongoing.clone() }));
    }
    if counts.is_undecided(criteria.max_failures) {
        return Step::Wait;
    }
    if stage.through == u64::MAX {
        return becomes(None);
    }
    let lacks_evidence = counts.proven == 0 && !criteria.confirmed;
    if !lacks_evidence && criteria.now < state.since.saturating_add(criteria.pause) {
        return Step::Wait;
    }
    let Some(order) = &fleet.order else { return Step::NeedsOrder };
    let next = if lacks_evidence {
        // No runtime of the share is evidence, so the stage extends to more runtimes.
        let share = criteria.stages.from(stage.number).next().map(|(_, share)| share);
        let through = share.and_then(|share| order.rank_through(share)).filter(|through| *through > stage.through);
        through.map(|through| Ring { through, ..stage })
    } else {
        order.next_ring(stage.number + 1, stage.through, criteria.stages)
    };
    next.map(|next| state.becoming(Some(Ongoing { stage: Some(next), ..ongoing.clone() }), criteria.now)).into()
}

/// Starts the first stage once few runtimes are pending. If the previous image is unknown, every image must be observed
/// first.
fn begin(state: &UpgradeState, ongoing: &Ongoing, fleet: &Summary, criteria: Criteria<'_>) -> Step {
    let is_unseen = ongoing.previous.is_none() && fleet.unseen > 0;
    if is_unseen || fleet.assessing >= criteria.max_failures.ceiling_of(fleet.members) {
        return Step::Wait;
    }
    let mut previous = ongoing.previous.clone();
    if previous.is_none() {
        let mut others = fleet.others.iter();
        let Some(first) = others.next() else { return Step::Become(state.becoming(None, criteria.now)) };
        // If all other runtimes have the same image, it is the previous image.
        previous = others.next().is_none().then(|| first.as_str().into());
    }
    let Some(order) = &fleet.order else { return Step::NeedsOrder };
    let stage = order.next_ring(1, 0, criteria.stages);
    let begun = stage.map(|stage| Ongoing { previous, stage: Some(stage), halted: None });
    begun.map(|begun| state.becoming(Some(begun), criteria.now)).into()
}

fn halt_reason(Counts { failing, upgraded, .. }: &Counts, fleet: &Summary) -> String {
    let names: Vec<_> = fleet.failing.iter().map(String::as_str).collect();
    let more = if *failing > MAX_NAMED { ", …" } else { "" };
    format!("{failing} of {upgraded} upgraded runtimes are not proven: {}{more}", names.join(", "))
}

#[cfg(test)]
mod tests;
