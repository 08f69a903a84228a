//! Summaries of runtimes: all that a step of an upgrade depends on. The summary of all runtimes is the merge of those of any
//! parts of them, so each replica summarizes the runtimes of its shards.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tidewatch_rollout::{Candidate, MAX_NAMED, Order, Share};

use super::{
    ImageDecision, UpgradeState,
    members::{Fleet, Member, Standing},
};

/// Other images that a summary names: more than one means that there is no common one.
const MAX_OTHERS: usize = 2;
/// Failing runtimes that halt an upgrade, at least.
const MIN_FAILURES: usize = 3;

/// Summary of some runtimes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Summary {
    pub(super) counts: Counts,
    /// Number of runtimes that count.
    pub(super) members: usize,
    /// Number of runtimes that do not count.
    pub(super) excluded: usize,
    /// Runtimes with incomplete evidence of their current image.
    pub(super) assessing: usize,
    /// Those of them whose image has not been observed.
    pub(super) unseen: usize,
    /// Images other than the target; at most [`MAX_OTHERS`].
    pub(super) others: BTreeSet<String>,
    /// Names of runtimes that fail with the target image; the first [`MAX_NAMED`].
    pub(super) failing: BTreeSet<String>,
    /// `None` unless it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) order: Option<Order>,
}

impl Summary {
    /// Summarizes runtimes that were assessed for a state, with their order on request.
    pub(super) fn of(state: &UpgradeState, fleet: &Fleet, with_order: bool) -> Self {
        let Fleet { members, excluded } = fleet;
        let pending = || members.iter().filter(|member| member.standing == Standing::Pending);
        let images = members.iter().filter_map(|member| member.image.as_ref());
        let fails =
            |member: &&Member| member.standing == Standing::Failing && member.image.as_ref() == Some(&state.target);
        let candidate = |member: &Member| {
            let is_evidence = member.standing == Standing::Proven;
            Candidate { rank: member.rank, is_evidence }
        };
        let mut summary = Self {
            counts: Counts::of(state, members),
            members: members.len(),
            excluded: excluded.len(),
            assessing: pending().count(),
            unseen: pending().filter(|member| member.image.is_none()).count(),
            others: images.filter(|image| **image != state.target).map(|image| image.to_string()).collect(),
            failing: members.iter().filter(fails).map(|member| member.kyma.to_string()).collect(),
            order: with_order.then(|| members.iter().map(candidate).collect()),
        };
        summary.limit();
        summary
    }

    /// Merges the summaries of all replicas. `None` without any: nothing is known then.
    pub(super) fn merged(parts: impl IntoIterator<Item = Self>) -> Option<Self> {
        parts.into_iter().reduce(|mut sum, part| {
            sum.counts.add(&part.counts);
            sum.members += part.members;
            sum.excluded += part.excluded;
            sum.assessing += part.assessing;
            sum.unseen += part.unseen;
            sum.others.extend(part.others);
            sum.failing.extend(part.failing);
            sum.order = sum.order.zip(part.order).map(|(mut order, other)| {
                order.merge(other);
                order
            });
            sum.limit();
            sum
        })
    }

    fn limit(&mut self) {
        while self.others.len() > MAX_OTHERS {
            self.others.pop_last();
        }
        while self.failing.len() > MAX_NAMED {
            self.failing.pop_last();
        }
    }
}

/// Number of runtimes by image and standing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
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
    pub(super) upgraded: usize,
}

impl Counts {
    pub(super) fn of(state: &UpgradeState, members: &[Member]) -> Self {
        let mut counts = Self::default();
        for member in members {
            let has = member.image.as_ref() == Some(&state.target);
            let gets = has || state.image_for_rank(member.rank) == ImageDecision::Use(state.target.clone());
            let place = match (member.standing, gets) {
                (Standing::Unfit, _) => &mut counts.unfit,
                (Standing::Proven, true) if has => &mut counts.proven,
                (Standing::Failing, true) if has => &mut counts.failing,
                (_, true) => &mut counts.pending,
                (Standing::Failing, false) => &mut counts.failing_before,
                (_, false) => &mut counts.waiting,
            };
            *place += 1;
            counts.upgraded += usize::from(has && member.standing != Standing::Unfit);
        }
        counts
    }

    fn add(&mut self, other: &Self) {
        for (sum, number) in [
            (&mut self.proven, other.proven),
            (&mut self.pending, other.pending),
            (&mut self.failing, other.failing),
            (&mut self.unfit, other.unfit),
            (&mut self.waiting, other.waiting),
            (&mut self.failing_before, other.failing_before),
            (&mut self.upgraded, other.upgraded),
        ] {
            *sum += number;
        }
    }

    pub(super) fn exceeds_max_failures(&self, max_failures: Share) -> bool {
        self.failing >= self.failures_to_halt(max_failures)
    }

    /// Failing runtimes that halt the upgrade: a share, and at least three, or all if fewer are upgraded. A single
    /// runtime must not be able to halt the upgrade of a fleet.
    fn failures_to_halt(&self, max_failures: Share) -> usize {
        max_failures.ceiling_of(self.upgraded).max(self.upgraded.clamp(1, MIN_FAILURES))
    }

    /// Returns whether the pending runtimes could still change the decision: there are as many as may fail, or none is
    /// proven.
    pub(super) fn is_undecided(&self, max_failures: Share) -> bool {
        self.pending > 0 && (self.proven == 0 || self.pending >= self.failures_to_halt(max_failures))
    }

    /// Returns whether upgraded runtimes fail more often than the others.
    pub(super) const fn upgraded_fare_worse(&self) -> bool {
        let others = self.waiting + self.failing_before;
        self.failing * others > self.failing_before * self.upgraded || others == 0
    }
}
