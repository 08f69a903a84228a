//! Computes the next step of a rollout, and the runtimes that get the version now. Pure.
//!
//! At most as many runtimes are between admission and assessment as may still fail: a version harms no more runtimes than
//! the limit, however many a ring has. A ring ends when each of its runtimes that can be upgraded has been, one at least
//! is proven, and the pause has passed.

use std::collections::BTreeSet;

use jiff::Timestamp;
use tidewatch_rollout::{Candidate, Criteria, Order, Ring, first_names};

use super::members::{Block, LAST_FIRST, Member, Standing, count};
use crate::catalog::rollout::{Progress, Rollout};

/// Result of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Next state; `None` if it does not change.
    pub next: Option<Rollout>,
    /// Uids of the Kymas that get the version now.
    pub admitted: BTreeSet<String>,
    /// State or event that the rollout waits for, for an operator; `None` while it upgrades runtimes.
    pub waits_for: Option<String>,
}

/// Computes the next step of a rollout in progress. `admitted` are the Kymas that the last step admitted.
pub fn step(rollout: &Rollout, members: &[Member], admitted: &BTreeSet<String>, criteria: Criteria<'_>) -> Step {
    let Some(progress) = &rollout.progress else { return Step::default() };
    let becomes = |progress| Step { next: Some(rollout.with(progress)), ..Step::default() };
    let max_failures = criteria.rules.max_failures;
    let limit = max_failures.ceiling_of(members.len());
    let failing = count(members, Standing::Failing);
    if progress.halted.is_some() {
        if criteria.is_confirmed {
            return becomes(Some(confirmed(progress, failing, criteria.now)));
        }
        let waits_for = rollout.confirmation().map(|id| format!("the confirmation {id}"));
        return Step { waits_for, ..Step::default() };
    }
    let new_failures = failing.saturating_sub(progress.confirmed_failures);
    if new_failures >= limit {
        return becomes(Some(halted(progress, members)));
    }
    let Some(ring) = progress.ring else {
        return match first_ring(members, criteria) {
            Some(ring) => becomes(Some(Progress { ring: Some(ring), since: criteria.now, ..progress.clone() })),
            None => becomes(None),
        };
    };
    let within = || members.iter().filter(|member| member.rank <= ring.through);
    let upgrading = count(members, Standing::Upgrading);
    // Those that are not assessed yet may all fail.
    let places = (limit - new_failures).saturating_sub(upgrading + count(members, Standing::Lost));
    let admitted = admit(within(), admitted, places);
    let is_busy = within().any(|member| matches!(member.standing, Standing::Waiting { .. } | Standing::Upgrading));
    if is_busy {
        // Late runtimes are tried again and again.
        let has_late = || count(members, Standing::Blocked(Block::Late)) > 0;
        let is_stuck = upgrading == 0 && (admitted.is_empty() || has_late());
        let waits_for = is_stuck.then(|| waits_for(members));
        return Step { admitted, waits_for, ..Step::default() };
    }
    let upgraded = count(members, Standing::Proven) + failing;
    if !ring.is_last() && max_failures.is_exceeded_by(new_failures, upgraded) {
        return becomes(Some(halted(progress, members)));
    }
    if !members.iter().any(|member| matches!(member.standing, Standing::Waiting { .. } | Standing::Blocked(_))) {
        return becomes(None);
    }
    let next = if ring.is_last() {
        None
    } else if within().any(|member| member.standing == Standing::Proven) {
        if let Some(until) = criteria.pause_until(progress.since) {
            let until = Timestamp::from_second(until).unwrap_or_default();
            return Step { waits_for: Some(format!("the end of the pause at {until}")), ..Step::default() };
        }
        let next = order(members).next_ring(ring.number + 1, ring.through, &criteria.rules.rings);
        next.map(|ring| Progress { ring: Some(ring), since: criteria.now, ..progress.clone() })
    } else {
        // Without evidence, the ring extends to the first runtime that may be evidence.
        let order = Some(order(members)).filter(Order::has_evidence);
        let extended = order.and_then(|order| order.extended(ring, &criteria.rules.rings));
        extended.map(|ring| Progress { ring: Some(ring), ..progress.clone() })
    };
    match next {
        Some(next) => becomes(Some(next)),
        None => Step { waits_for: Some(waits_for(members)), ..Step::default() },
    }
}

/// First ring: the runtimes before all others, if there are any. `None` without runtimes.
fn first_ring(members: &[Member], criteria: Criteria<'_>) -> Option<Ring> {
    if members.iter().any(|member| member.rank <= LAST_FIRST) {
        return Some(Ring { number: 0, through: LAST_FIRST });
    }
    if members.is_empty() { None } else { order(members).next_ring(1, 0, &criteria.rules.rings) }
}

fn order(members: &[Member]) -> Order {
    let candidate = |member: &Member| {
        let is_evidence = matches!(member.standing, Standing::Proven | Standing::Waiting { .. });
        Candidate { rank: member.rank, is_evidence }
    };
    members.iter().map(candidate).collect()
}

/// Admits runtimes in their order. Those whose module is healthy take one of the `places` each; the others cannot be
/// harmed. Runtimes that were admitted before keep their place.
fn admit<'m>(
    within: impl Iterator<Item = &'m Member>,
    before: &BTreeSet<String>,
    mut places: usize,
) -> BTreeSet<String> {
    let waiting = within.filter_map(|member| match member.standing {
        Standing::Waiting { healthy } => Some((!before.contains(&member.uid), member.rank, healthy, &member.uid)),
        _ => None,
    });
    let mut waiting: Vec<_> = waiting.collect();
    waiting.sort_unstable();
    let mut admitted = BTreeSet::new();
    for (_, _, healthy, uid) in waiting {
        if healthy && places == 0 {
            continue;
        }
        places -= usize::from(healthy);
        admitted.insert(uid.clone());
    }
    admitted
}

fn confirmed(progress: &Progress, failing: usize, now: i64) -> Progress {
    Progress {
        since: now,
        confirmations: progress.confirmations + 1,
        // A process that started since the halt does not know yet which runtimes were not ready in time.
        confirmed_failures: failing.max(progress.failures_at_halt).max(progress.confirmed_failures),
        failures_at_halt: 0,
        halted: None,
        ..progress.clone()
    }
}

fn halted(progress: &Progress, members: &[Member]) -> Progress {
    let failing = members.iter().filter(|member| member.standing == Standing::Failing);
    let names: BTreeSet<_> = failing.map(|member| member.kyma.to_string()).collect();
    let failing = count(members, Standing::Failing);
    let names = first_names(&names, failing);
    let upgraded = failing + count(members, Standing::Proven) + count(members, Standing::Upgrading);
    let reason = format!("{failing} of {upgraded} upgraded runtimes are no longer healthy: {names}");
    Progress { halted: Some(reason), failures_at_halt: failing, ..progress.clone() }
}

/// The runtimes that a rollout waits for.
fn waits_for(members: &[Member]) -> String {
    let causes = [
        (Standing::Blocked(Block::Access), "that cannot be reached"),
        (Standing::Blocked(Block::Paused), "that are paused"),
        (Standing::Blocked(Block::Window), "that wait for a maintenance window"),
        (Standing::Blocked(Block::Late), "that were not upgraded in time"),
        (Standing::Lost, "upgraded ones that cannot be reached"),
    ];
    let counted = causes.map(|(standing, cause)| (count(members, standing), cause));
    let present = counted.into_iter().filter(|(count, _)| *count > 0);
    let causes: Vec<_> = present.map(|(count, cause)| format!("{count} {cause}")).collect();
    if causes.is_empty() {
        return "a runtime that can prove the version".to_owned();
    }
    format!("runtimes: {}", causes.join(", "))
}

#[cfg(test)]
mod tests;
