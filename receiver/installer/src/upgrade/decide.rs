//! Computes the next step of an upgrade, without side effects.
//!
//! A ring ends when it has lasted long enough, fewer runtimes of its share are pending than may fail, and too few have
//! failed. A large fleet always has pending runtimes, if only new ones, so waiting for all of them would never end.
//! Failures are compared with those of runtimes that still have another image: a fault that both have is not the
//! image's, and the upgrade only waits.

use tidewatch_rollout::{Criteria, first_names};

use super::{
    UpgradeState,
    state::Ongoing,
    summary::{Counts, Summary},
};

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

/// Computes the next step of the upgrade from the summary of all runtimes.
pub(super) fn step(state: &UpgradeState, fleet: &Summary, criteria: Criteria<'_>) -> Step {
    let Some(ongoing) = &state.ongoing else { return Step::Wait };
    let becomes = |ongoing| Step::Become(state.becoming(ongoing, criteria.now));
    if fleet.members == 0 {
        // If every runtime is away, the upgrade waits: returning runtimes must not all try a new image first.
        return if fleet.excluded == 0 { becomes(None) } else { Step::Wait };
    }
    let Some(ring) = ongoing.ring else { return begin(state, ongoing, fleet, criteria) };
    if ongoing.halted.is_some() {
        return match criteria.is_confirmed {
            true => becomes(Some(Ongoing { halted: None, ..ongoing.clone() })),
            false => Step::Wait,
        };
    }
    let counts = &fleet.counts;
    let max_failures = criteria.rules.max_failures;
    if !criteria.is_confirmed && counts.exceeds_max_failures(max_failures) {
        if !counts.upgraded_fare_worse() {
            return Step::Wait;
        }
        return becomes(Some(Ongoing { halted: Some(halt_reason(fleet)), ..ongoing.clone() }));
    }
    if counts.is_undecided(max_failures) {
        return Step::Wait;
    }
    if ring.is_last() {
        return becomes(None);
    }
    let lacks_evidence = counts.proven == 0 && !criteria.is_confirmed;
    if !lacks_evidence && criteria.pause_until(state.since).is_some() {
        return Step::Wait;
    }
    let Some(order) = &fleet.order else { return Step::NeedsOrder };
    let rings = &criteria.rules.rings;
    let next = match lacks_evidence {
        true => order.extended(ring, rings),
        false => order.next_ring(ring.number + 1, ring.through, rings),
    };
    next.map_or(Step::Wait, |next| becomes(Some(Ongoing { ring: Some(next), ..ongoing.clone() })))
}

/// Begins the first ring once few runtimes are pending. If the previous image is unknown, every image must be observed
/// first.
fn begin(state: &UpgradeState, ongoing: &Ongoing, fleet: &Summary, criteria: Criteria<'_>) -> Step {
    let is_unseen = ongoing.previous.is_none() && fleet.unseen > 0;
    if is_unseen || fleet.assessing >= criteria.rules.max_failures.ceiling_of(fleet.members) {
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
    let Some(ring) = order.next_ring(1, 0, &criteria.rules.rings) else { return Step::Wait };
    let begun = Ongoing { previous, ring: Some(ring), halted: None };
    Step::Become(state.becoming(Some(begun), criteria.now))
}

fn halt_reason(fleet: &Summary) -> String {
    let Counts { failing, upgraded, .. } = fleet.counts;
    format!("{failing} of {upgraded} upgraded runtimes are not proven: {}", first_names(&fleet.failing, failing))
}

#[cfg(test)]
mod tests;
