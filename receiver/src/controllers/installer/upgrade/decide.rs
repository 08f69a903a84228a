//! What comes next in an upgrade, purely.
//!
//! A stage goes on when it has lasted long enough, fewer in its share are awaited than may fail, and too few have failed. In a large fleet
//! somebody is always awaited, if only because he is new: waiting for everybody would be waiting for ever. Who has failed is judged beside
//! those who still have the other image: what they suffer from too is not the image's fault, and only waited for.

use super::{
    Image, Rollout,
    flags::{Share, Stages},
    rollout::{Decided, Progress, Stage, Under},
};
use crate::base::key::KymaKey;

/// Runtimes that a text names, at most.
const NAMED: usize = 5;

/// How a runtime stands with the image that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its event path is proven.
    Proven,
    /// Nobody can say yet, or it does not have yet what it is to get.
    Pending,
    /// It was not proven for longer than it may take.
    Failing,
    /// It tells nothing about the image: it was not well before, or could not be given it in time.
    Unfit,
}

/// A runtime that counts: neither away, nor paused, nor being deleted.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) kyma: KymaKey,
    /// Its place in the order; see [`super::rollout::rank`].
    pub(super) rank: u64,
    /// The image that it has; `None` when nobody has looked yet.
    pub(super) image: Option<Image>,
    pub(super) standing: Standing,
}

/// All that is known of the runtimes.
#[derive(Clone, Debug, Default)]
pub(super) struct Fleet {
    pub(super) members: Vec<Member>,
    /// Those that do not count.
    pub(super) others: usize,
}

/// By what an upgrade is judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    pub(super) stages: &'a Stages,
    /// Seconds.
    pub(super) pause: i64,
    pub(super) max_failures: Share,
    /// An operator said that it shall go on whatever fails.
    pub(super) confirmed: bool,
    /// Unix seconds.
    pub(super) now: i64,
}

/// How many stand how; those that have the image already, and the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// Proven with the image.
    pub(super) proven: usize,
    /// With it, or about to get it: awaited.
    pub(super) pending: usize,
    /// Failed with it.
    pub(super) failing: usize,
    /// They tell nothing.
    pub(super) unfit: usize,
    /// Well with another image.
    pub(super) waiting: usize,
    /// Failing with another image.
    pub(super) failing_before: usize,
    /// Those that have the image and tell something.
    upgraded: usize,
}

impl Count {
    pub(super) fn of(rollout: &Rollout, members: &[Member]) -> Self {
        let mut count = Self::default();
        for member in members {
            let has = member.image.as_ref() == Some(&rollout.target);
            let gets = has || rollout.image_at_rank(member.rank) == Decided::Is(rollout.target.clone());
            let place = match (member.standing, gets) {
                (Standing::Unfit, _) => &mut count.unfit,
                (Standing::Proven, true) if has => &mut count.proven,
                (Standing::Failing, true) if has => &mut count.failing,
                (_, true) => &mut count.pending,
                (Standing::Failing, false) => &mut count.failing_before,
                (_, false) => &mut count.waiting,
            };
            *place += 1;
            count.upgraded += usize::from(has && member.standing != Standing::Unfit);
        }
        count
    }

    fn too_many(&self, max_failures: Share) -> bool {
        self.failing >= max_failures.ceiling_of(self.upgraded)
    }

    /// Whether what those will show who are still awaited may decide: so many of them, or nobody else who tells anything good.
    fn is_open(&self, max_failures: Share) -> bool {
        self.pending > 0 && (self.proven == 0 || self.pending >= max_failures.ceiling_of(self.upgraded))
    }

    /// Whether those that have the image do worse than the others.
    const fn is_worse(&self) -> bool {
        let others = self.waiting + self.failing_before;
        self.failing * others > self.failing_before * self.upgraded || others == 0
    }
}

/// What the upgrade becomes now; `None` while it stays as it is.
pub(super) fn step(rollout: &Rollout, fleet: &Fleet, terms: Terms<'_>) -> Option<Rollout> {
    let Progress::Under(under) = &rollout.progress else { return None };
    let members = &fleet.members;
    let become_ = |progress| Some(Rollout { since: terms.now, progress, ..rollout.clone() });
    if members.is_empty() {
        // All are away: they come back together, and are not to be the first to try an image.
        return if fleet.others == 0 { become_(Progress::Done) } else { None };
    }
    let Some(stage) = &under.stage else { return first(rollout, under, members, terms).and_then(become_) };
    if under.halted.is_some() {
        let goes_on = || Progress::Under(Under { halted: None, ..under.clone() });
        return if terms.confirmed { become_(goes_on()) } else { None };
    }
    let count = Count::of(rollout, members);
    if !terms.confirmed && count.too_many(terms.max_failures) {
        let why = count.is_worse().then(|| why(rollout, &count, members))?;
        return become_(Progress::Under(Under { halted: Some(why), ..under.clone() }));
    }
    if count.is_open(terms.max_failures) {
        return None;
    }
    if stage.through == u64::MAX {
        return become_(Progress::Done);
    }
    if count.proven == 0 && !terms.confirmed {
        // Nobody in the share can tell anything: others must.
        let (_, share) = terms.stages.from(stage.number).next()?;
        let through = through(share, members).filter(|through| *through > stage.through)?;
        return become_(Progress::Under(Under { stage: Some(Stage { through, ..*stage }), ..under.clone() }));
    }
    if terms.now < rollout.since.saturating_add(terms.pause) {
        return None;
    }
    let next = next(stage.number + 1, stage.through, members, terms.stages)?;
    become_(Progress::Under(Under { stage: Some(next), ..under.clone() }))
}

/// The first stage, as soon as it is known of most who may be in it; and of all what they have, where that tells what others get.
fn first(rollout: &Rollout, under: &Under, members: &[Member], terms: Terms<'_>) -> Option<Progress> {
    let pending = || members.iter().filter(|member| member.standing == Standing::Pending);
    let unseen = under.previous.is_none() && pending().any(|member| member.image.is_none());
    if unseen || pending().count() >= terms.max_failures.ceiling_of(members.len()) {
        return None;
    }
    let others = || members.iter().filter(|member| member.image.as_ref() != Some(&rollout.target));
    let mut previous = under.previous.clone();
    if previous.is_none() {
        let mut known = others().filter_map(|member| member.image.as_ref());
        let one = known.next();
        if one.is_none() {
            return Some(Progress::Done);
        }
        // Where all the others have the same, that is what they are to have.
        previous = one.filter(|one| known.all(|other| other == *one)).cloned();
    }
    let stage = next(1, 0, members, terms.stages)?;
    Some(Progress::Under(Under { previous, stage: Some(stage), halted: None }))
}

/// The first stage from this one on in which somebody is new.
fn next(number: u32, before: u64, members: &[Member], stages: &Stages) -> Option<Stage> {
    let mut stages = stages.from(number).map(|(number, share)| (number, share, through(share, members)));
    let stage = stages.find(|(_, share, through)| share.is_whole() || through.is_some_and(|through| through > before));
    stage.map(|(number, share, through)| Stage {
        number,
        through: through.filter(|_| !share.is_whole()).unwrap_or(u64::MAX),
    })
}

/// The rank up to which a share goes: so far that somebody in it can tell something, if anybody can.
fn through(share: Share, members: &[Member]) -> Option<u64> {
    let mut order: Vec<_> = members.iter().map(|member| (member.rank, member.standing)).collect();
    order.sort_unstable_by_key(|(rank, _)| *rank);
    let last = share.floor_of(order.len()).min(order.len()).checked_sub(1)?;
    let can_tell = |(_, standing): &(u64, Standing)| *standing == Standing::Proven;
    let at = order.iter().position(can_tell).map_or(last, |first| last.max(first));
    order.get(at).map(|(rank, _)| *rank)
}

fn why(rollout: &Rollout, count: &Count, members: &[Member]) -> String {
    let failing = members
        .iter()
        .filter(|member| member.standing == Standing::Failing && member.image.as_ref() == Some(&rollout.target));
    let mut names: Vec<_> = failing.map(|member| member.kyma.to_string()).collect();
    names.sort_unstable();
    let more = if names.len() > NAMED { ", …" } else { "" };
    names.truncate(NAMED);
    let Count { failing, upgraded, .. } = count;
    format!("{failing} of {upgraded} upgraded runtimes are not proven: {}{more}", names.join(", "))
}

#[cfg(test)]
mod tests;
