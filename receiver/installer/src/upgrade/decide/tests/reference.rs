//! Decision on a list of all runtimes, by which the decision on summaries is judged.

use super::*;
use crate::upgrade::members::{Fleet, Member};

/// Returns the next state of the upgrade; `None` if it does not change.
pub(super) fn step(state: &UpgradeState, fleet: &Fleet, criteria: Criteria<'_>) -> Option<UpgradeState> {
    let ongoing = state.ongoing.as_ref()?;
    let members = &fleet.members;
    let becomes = |ongoing| state.becoming(ongoing, criteria.now);
    if members.is_empty() {
        // If every runtime is away, the upgrade waits: returning runtimes must not all try a new image first.
        return (fleet.excluded.is_empty()).then(|| becomes(None));
    }
    let Some(ring) = ongoing.ring else { return begin(state, ongoing, members, criteria) };
    if ongoing.halted.is_some() {
        return criteria.is_confirmed.then(|| becomes(Some(Ongoing { halted: None, ..ongoing.clone() })));
    }
    let counts = Counts::of(state, members);
    if !criteria.is_confirmed && counts.exceeds_max_failures(criteria.rules.max_failures) {
        let reason = counts.upgraded_fare_worse().then(|| halt_reason(state, &counts, members))?;
        return Some(becomes(Some(Ongoing { halted: Some(reason), ..ongoing.clone() })));
    }
    if counts.is_undecided(criteria.rules.max_failures) {
        return None;
    }
    if ring.through == u64::MAX {
        return Some(becomes(None));
    }
    let next = if counts.proven == 0 && !criteria.is_confirmed {
        // No runtime of the share is evidence, so the ring extends to more runtimes.
        let (_, share) = criteria.rules.rings.from(ring.number).next()?;
        let through = order(members).rank_through(share).filter(|through| *through > ring.through)?;
        Ring { through, ..ring }
    } else if criteria.now < state.since.saturating_add(PAUSE) {
        return None;
    } else {
        order(members).next_ring(ring.number + 1, ring.through, &criteria.rules.rings)?
    };
    Some(becomes(Some(Ongoing { ring: Some(next), ..ongoing.clone() })))
}

/// Begins the first ring once few runtimes are pending. If the previous image is unknown, every image must be observed
/// first.
fn begin(state: &UpgradeState, ongoing: &Ongoing, members: &[Member], criteria: Criteria<'_>) -> Option<UpgradeState> {
    let pending = || members.iter().filter(|member| member.standing == Standing::Pending);
    let unseen = ongoing.previous.is_none() && pending().any(|member| member.image.is_none());
    if unseen || pending().count() >= criteria.rules.max_failures.ceiling_of(members.len()) {
        return None;
    }
    let mut previous = ongoing.previous.clone();
    if previous.is_none() {
        let images = members.iter().filter_map(|member| member.image.as_ref());
        let mut images = images.filter(|image| **image != state.target);
        let Some(first) = images.next() else { return Some(state.becoming(None, criteria.now)) };
        // If all other runtimes have the same image, it is the previous image.
        previous = images.all(|other| other == first).then(|| first.clone());
    }
    let ring = order(members).next_ring(1, 0, &criteria.rules.rings)?;
    Some(state.becoming(Some(Ongoing { previous, ring: Some(ring), halted: None }), criteria.now))
}

fn order(members: &[Member]) -> Order {
    let candidate = |member: &Member| {
        let is_evidence = member.standing == Standing::Proven;
        Candidate { rank: member.rank, is_evidence }
    };
    members.iter().map(candidate).collect()
}

fn halt_reason(state: &UpgradeState, counts: &Counts, members: &[Member]) -> String {
    let failing = members
        .iter()
        .filter(|member| member.standing == Standing::Failing && member.image.as_ref() == Some(&state.target));
    let mut names: Vec<_> = failing.map(|member| member.kyma.to_string()).collect();
    names.sort_unstable();
    let more = if names.len() > MAX_NAMED { ", …" } else { "" };
    names.truncate(MAX_NAMED);
    let Counts { failing, upgraded, .. } = counts;
    format!("{failing} of {upgraded} upgraded runtimes are not proven: {}{more}", names.join(", "))
}
