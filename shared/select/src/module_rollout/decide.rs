//! Computes the next step of a rollout, and the runtimes that get the version now. Pure.
//!
//! At most as many runtimes are between admission and assessment as may still fail: a version harms no more runtimes than
//! the limit, however many a ring has. A ring ends when each of its runtimes that can be upgraded has been, one at least
//! is proven, and the pause has passed.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use tidewatch_rollout::{Candidate, Order, Ring};

use super::members::{Block, LAST_CANARY, Member, Standing};
use crate::catalog::rollout::{Progress, Rollout, RolloutPolicy};

/// Maximum number of runtimes in a message.
const MAX_NAMED: usize = 5;

/// Parameters of a step.
#[derive(Clone, Copy, Debug)]
pub struct Criteria<'a> {
    /// Rules of the rings.
    pub policy: &'a RolloutPolicy,
    /// An operator confirmed that the rollout continues after its halt.
    pub is_confirmed: bool,
    /// Current time in Unix seconds.
    pub now: i64,
}

/// Number of runtimes by standing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of [`Standing::Waiting`].
    pub waiting: usize,
    /// Numbers of [`Standing::Blocked`] by cause.
    pub blocked: BTreeMap<Block, usize>,
    /// Number of [`Standing::Upgrading`].
    pub upgrading: usize,
    /// Number of [`Standing::Lost`].
    pub lost: usize,
    /// Number of [`Standing::Proven`].
    pub proven: usize,
    /// Number of [`Standing::Failing`].
    pub failing: usize,
    /// Number of [`Standing::Unfit`].
    pub unfit: usize,
}

impl Counts {
    /// Counts the members of a rollout.
    #[must_use]
    pub fn of<'m>(members: impl IntoIterator<Item = &'m Member>) -> Self {
        let mut counts = Self::default();
        for member in members {
            *match member.standing {
                Standing::Waiting { .. } => &mut counts.waiting,
                Standing::Blocked(block) => counts.blocked.entry(block).or_default(),
                Standing::Upgrading => &mut counts.upgrading,
                Standing::Lost => &mut counts.lost,
                Standing::Proven => &mut counts.proven,
                Standing::Failing => &mut counts.failing,
                Standing::Unfit => &mut counts.unfit,
            } += 1;
        }
        counts
    }

    /// Adds the counts of another rollout.
    pub fn add(&mut self, other: &Self) {
        for (sum, number) in [
            (&mut self.waiting, other.waiting),
            (&mut self.upgrading, other.upgrading),
            (&mut self.lost, other.lost),
            (&mut self.proven, other.proven),
            (&mut self.failing, other.failing),
            (&mut self.unfit, other.unfit),
        ] {
            *sum += number;
        }
        for (block, number) in &other.blocked {
            *self.blocked.entry(*block).or_default() += number;
        }
    }

    /// Number of runtimes that do not have the version.
    fn lacking(&self) -> usize {
        self.waiting + self.blocked.values().sum::<usize>()
    }
}

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
    let counts = Counts::of(members);
    let limit = criteria.policy.max_failures.ceiling_of(members.len());
    if progress.halted.is_some() {
        if criteria.is_confirmed {
            return becomes(Some(confirmed(progress, &counts, criteria.now)));
        }
        let waits_for = rollout.confirmation().map(|id| format!("the confirmation {id}"));
        return Step { waits_for, ..Step::default() };
    }
    let new_failures = counts.failing.saturating_sub(progress.confirmed_failures);
    if new_failures >= limit {
        return becomes(Some(halted(progress, &counts, members)));
    }
    let Some(ring) = progress.ring else {
        return match first_ring(members, criteria.policy) {
            Some(ring) => becomes(Some(Progress { ring: Some(ring), since: criteria.now, ..progress.clone() })),
            None => becomes(None),
        };
    };
    let within = || members.iter().filter(|member| member.rank <= ring.through);
    // Those that are not assessed yet may all fail.
    let places = (limit - new_failures).saturating_sub(counts.upgrading + counts.lost);
    let admitted = admit(within(), admitted, places);
    let is_busy = within().any(|member| matches!(member.standing, Standing::Waiting { .. } | Standing::Upgrading));
    if is_busy {
        // Late runtimes are tried again and again.
        let is_stuck = counts.upgrading == 0 && (admitted.is_empty() || counts.blocked.contains_key(&Block::Late));
        let waits_for = is_stuck.then(|| waits_for(&counts));
        return Step { admitted, waits_for, ..Step::default() };
    }
    let upgraded = counts.proven + counts.failing;
    let is_last = ring.through == u64::MAX;
    if !is_last && criteria.policy.max_failures.is_exceeded_by(new_failures, upgraded) {
        return becomes(Some(halted(progress, &counts, members)));
    }
    if counts.lacking() == 0 {
        return becomes(None);
    }
    let next = if is_last {
        None
    } else if within().any(|member| member.standing == Standing::Proven) {
        let until = progress.since.saturating_add(seconds(criteria.policy));
        if criteria.now < until {
            let until = Timestamp::from_second(until).unwrap_or_default();
            return Step { waits_for: Some(format!("the end of the pause at {until}")), ..Step::default() };
        }
        let next = order(members).next_ring(ring.number + 1, ring.through, &criteria.policy.rings);
        next.map(|ring| Progress { ring: Some(ring), since: criteria.now, ..progress.clone() })
    } else {
        extended(ring, members, criteria.policy).map(|ring| Progress { ring: Some(ring), ..progress.clone() })
    };
    match next {
        Some(next) => becomes(Some(next)),
        None => Step { waits_for: Some(waits_for(&counts)), ..Step::default() },
    }
}

/// First ring: the canaries, if there are any. `None` without runtimes.
fn first_ring(members: &[Member], policy: &RolloutPolicy) -> Option<Ring> {
    if members.iter().any(|member| member.rank <= LAST_CANARY) {
        return Some(Ring { number: 0, through: LAST_CANARY });
    }
    if members.is_empty() { None } else { order(members).next_ring(1, 0, &policy.rings) }
}

/// Extends a ring without evidence to the first runtime that may be evidence.
fn extended(ring: Ring, members: &[Member], policy: &RolloutPolicy) -> Option<Ring> {
    let order = order(members);
    if !order.has_evidence() {
        return None;
    }
    let (_, share) = policy.rings.from(ring.number.max(1)).next()?;
    let through = order.rank_through(share).filter(|through| *through > ring.through)?;
    Some(Ring { through, ..ring })
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

fn confirmed(progress: &Progress, counts: &Counts, now: i64) -> Progress {
    Progress {
        since: now,
        confirmations: progress.confirmations + 1,
        // A process that started since the halt does not know yet which runtimes were not ready in time.
        confirmed_failures: counts.failing.max(progress.failures_at_halt).max(progress.confirmed_failures),
        failures_at_halt: 0,
        halted: None,
        ..progress.clone()
    }
}

fn halted(progress: &Progress, counts: &Counts, members: &[Member]) -> Progress {
    let failing = members.iter().filter(|member| member.standing == Standing::Failing);
    let mut names: Vec<_> = failing.map(|member| member.kyma.to_string()).collect();
    names.sort_unstable();
    let more = if names.len() > MAX_NAMED { ", …" } else { "" };
    names.truncate(MAX_NAMED);
    let failing = counts.failing;
    let upgraded = counts.proven + counts.failing + counts.upgrading;
    let names = names.join(", ");
    let reason = format!("{failing} of {upgraded} upgraded runtimes are no longer healthy: {names}{more}");
    Progress { halted: Some(reason), failures_at_halt: failing, ..progress.clone() }
}

/// The runtimes that a rollout waits for.
fn waits_for(counts: &Counts) -> String {
    let blocked = counts.blocked.iter().map(|(block, count)| {
        let reason = match block {
            Block::Access => "cannot be reached",
            Block::Paused => "are paused",
            Block::Window => "wait for a maintenance window",
            Block::Late => "were not upgraded in time",
        };
        format!("{count} that {reason}")
    });
    let lost = (counts.lost > 0).then(|| format!("{} upgraded ones that cannot be reached", counts.lost));
    let blocked: Vec<_> = blocked.chain(lost).collect();
    if blocked.is_empty() {
        return "a runtime that can prove the version".to_owned();
    }
    format!("runtimes: {}", blocked.join(", "))
}

fn seconds(policy: &RolloutPolicy) -> i64 {
    i64::try_from(policy.pause.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
