//! Computes the next step of an upgrade, without side effects.
//!
//! A stage ends when it has lasted long enough, fewer runtimes of its share are pending than may fail, and too few have
//! failed. A large fleet always has pending runtimes, if only new ones, so waiting for all of them would never end.
//! Failures are compared with those of runtimes that still have another image: a fault that both have is not the
//! image's, and the upgrade only waits.

use super::{
    Image, UpgradeState,
    state::{ImageDecision, Ongoing},
};
use crate::{
    base::key::KymaKey,
    controllers::rings::{Candidate, Ring, Rings, Share, next_ring, rank_through},
};

/// Maximum number of runtimes in a message.
const MAX_NAMED: usize = 5;

/// Assessment of a runtime with its current image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Assessment {
    /// The event path is proven.
    Proven,
    /// The evidence is incomplete, or the runtime does not have its image yet.
    Pending,
    /// The path has not been proven within the deadline.
    Failing,
    /// The runtime is no evidence for or against the image: it was unwell before, or could not be upgraded in time.
    Unfit,
}

/// A runtime that counts: neither away, nor paused, nor being deleted.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) kyma: KymaKey,
    /// Position in the order of the upgrade; see [`crate::controllers::rings::rank`].
    pub(super) rank: u64,
    /// Observed image, `None` if it has not been observed yet.
    pub(super) image: Option<Image>,
    pub(super) assessment: Assessment,
}

/// All runtimes as assessed.
#[derive(Clone, Debug, Default)]
pub(super) struct Fleet {
    pub(super) members: Vec<Member>,
    /// Number of runtimes that do not count.
    pub(super) excluded: usize,
}

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

/// Number of runtimes by image and assessment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Proven with the target image.
    pub(super) proven: usize,
    /// With the target image, or assigned to it, and not assessed yet.
    pub(super) pending: usize,
    /// Failing with the target image.
    pub(super) failing: usize,
    /// Unfit, with either image.
    pub(super) unfit: usize,
    /// With another image, not failing.
    pub(super) waiting: usize,
    /// Failing with another image.
    pub(super) failing_before: usize,
    /// With the target image and not unfit.
    upgraded: usize,
}

impl Counts {
    pub(super) fn of(state: &UpgradeState, members: &[Member]) -> Self {
        let mut counts = Self::default();
        for member in members {
            let has = member.image.as_ref() == Some(&state.target);
            let gets = has || state.image_for_rank(member.rank) == ImageDecision::Use(state.target.clone());
            let place = match (member.assessment, gets) {
                (Assessment::Unfit, _) => &mut counts.unfit,
                (Assessment::Proven, true) if has => &mut counts.proven,
                (Assessment::Failing, true) if has => &mut counts.failing,
                (_, true) => &mut counts.pending,
                (Assessment::Failing, false) => &mut counts.failing_before,
                (_, false) => &mut counts.waiting,
            };
            *place += 1;
            counts.upgraded += usize::from(has && member.assessment != Assessment::Unfit);
        }
        counts
    }

    fn exceeds_max_failures(&self, max_failures: Share) -> bool {
        self.failing >= self.failures_to_halt(max_failures)
    }

    /// Failing runtimes that halt the upgrade: a share, and at least three, or all if fewer are upgraded. A single
    /// runtime must not be able to halt the upgrade of a fleet.
    fn failures_to_halt(&self, max_failures: Share) -> usize {
        max_failures.ceiling_of(self.upgraded).max(self.upgraded.clamp(1, MIN_FAILURES))
    }

    /// Returns whether the pending runtimes could still change the decision: there are as many as may fail, or none is
    /// proven.
    fn is_undecided(&self, max_failures: Share) -> bool {
        self.pending > 0 && (self.proven == 0 || self.pending >= self.failures_to_halt(max_failures))
    }

    /// Returns whether upgraded runtimes fail more often than the others.
    const fn upgraded_fare_worse(&self) -> bool {
        let others = self.waiting + self.failing_before;
        self.failing * others > self.failing_before * self.upgraded || others == 0
    }
}

/// Failing runtimes that halt an upgrade, at least.
const MIN_FAILURES: usize = 3;

/// Returns the next state of the upgrade; `None` if it does not change.
pub(super) fn step(state: &UpgradeState, fleet: &Fleet, criteria: Criteria<'_>) -> Option<UpgradeState> {
    let ongoing = state.ongoing.as_ref()?;
    let members = &fleet.members;
    let becomes = |ongoing| state.becoming(ongoing, criteria.now);
    if members.is_empty() {
        // If every runtime is away, the upgrade waits: returning runtimes must not all try a new image first.
        return (fleet.excluded == 0).then(|| becomes(None));
    }
    let Some(stage) = ongoing.stage else { return begin(state, ongoing, members, criteria) };
    if ongoing.halted.is_some() {
        return criteria.confirmed.then(|| becomes(Some(Ongoing { halted: None, ..ongoing.clone() })));
    }
    let counts = Counts::of(state, members);
    if !criteria.confirmed && counts.exceeds_max_failures(criteria.max_failures) {
        let reason = counts.upgraded_fare_worse().then(|| halt_reason(state, &counts, members))?;
        return Some(becomes(Some(Ongoing { halted: Some(reason), ..ongoing.clone() })));
    }
    if counts.is_undecided(criteria.max_failures) {
        return None;
    }
    if stage.through == u64::MAX {
        return Some(becomes(None));
    }
    let next = if counts.proven == 0 && !criteria.confirmed {
        // No runtime of the share is evidence, so the stage extends to more runtimes.
        let (_, share) = criteria.stages.from(stage.number).next()?;
        let through = rank_through(share, &order(members)).filter(|through| *through > stage.through)?;
        Ring { through, ..stage }
    } else if criteria.now < state.since.saturating_add(criteria.pause) {
        return None;
    } else {
        next_ring(stage.number + 1, stage.through, &order(members), criteria.stages)?
    };
    Some(becomes(Some(Ongoing { stage: Some(next), ..ongoing.clone() })))
}

/// Starts the first stage once few runtimes are pending. If the previous image is unknown, every image must be observed
/// first.
fn begin(state: &UpgradeState, ongoing: &Ongoing, members: &[Member], criteria: Criteria<'_>) -> Option<UpgradeState> {
    let pending = || members.iter().filter(|member| member.assessment == Assessment::Pending);
    let unseen = ongoing.previous.is_none() && pending().any(|member| member.image.is_none());
    if unseen || pending().count() >= criteria.max_failures.ceiling_of(members.len()) {
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
    let stage = next_ring(1, 0, &order(members), criteria.stages)?;
    Some(state.becoming(Some(Ongoing { previous, stage: Some(stage), halted: None }), criteria.now))
}

fn order(members: &[Member]) -> Vec<Candidate> {
    let candidate = |member: &Member| {
        let is_evidence = member.assessment == Assessment::Proven;
        Candidate { rank: member.rank, is_evidence }
    };
    members.iter().map(candidate).collect()
}

fn halt_reason(state: &UpgradeState, counts: &Counts, members: &[Member]) -> String {
    let failing = members
        .iter()
        .filter(|member| member.assessment == Assessment::Failing && member.image.as_ref() == Some(&state.target));
    let mut names: Vec<_> = failing.map(|member| member.kyma.to_string()).collect();
    names.sort_unstable();
    let more = if names.len() > MAX_NAMED { ", …" } else { "" };
    names.truncate(MAX_NAMED);
    let Counts { failing, upgraded, .. } = counts;
    format!("{failing} of {upgraded} upgraded runtimes are not proven: {}{more}", names.join(", "))
}

#[cfg(test)]
mod tests;
