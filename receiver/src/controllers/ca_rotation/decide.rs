//! The order of a rotation, purely: who has not followed yet, and which phase comes next.
//!
//! Every phase is stored before it takes effect, and what takes effect follows from what is stored alone, so that a receiver that
//! ends anywhere is continued by the next one.

use std::time::Duration;

use crate::{
    fleet::{PathState, hub::Follower},
    pki::{
        Behind, Pki,
        stored::{Phase, Root, Stored},
    },
};

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing, yet.
    Stay,
    /// A new root is made and goes to everybody.
    Spread,
    /// The new root signs the agents' leaves.
    Reissue,
    /// It signs everything, and the old one leaves the agents' bundles.
    Retire,
    /// The old root is forgotten.
    Settle,
    /// The roots have ended: a new one at once. Nothing that holds hangs on the old ones.
    Replace,
}

/// By what a rotation is judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    /// How long a runtime's leaf holds.
    pub(super) leaf: Duration,
    /// The age at which a root is replaced by itself.
    pub(super) age: Duration,
    /// The revision of the bundle that agents are to have in this phase.
    pub(super) revision: &'a str,
}

/// Why a runtime holds the phase up; `None` when it does not.
pub(super) fn behind(stored: &Stored, terms: Terms<'_>, follower: &Follower, now: i64) -> Option<Behind> {
    use crate::fleet::Unproven::{Away, LegacyAgent};
    let is_away = matches!(follower.path, PathState::Unproven(Away | LegacyAgent));
    // Whose leaf must have ended enrols again, with whatever root there is then.
    if is_away || follower.silent >= terms.leaf {
        return None;
    }
    let (wanted, leaves_end) = match &stored.phase {
        Phase::Steady { .. } => return None,
        Phase::Spread { .. } => (None, i64::MAX),
        Phase::Reissue { next, leaves_end, .. } => (Some(&next.id), *leaves_end),
        Phase::Retire { root, leaves_end, .. } => (Some(&root.id), *leaves_end),
    };
    if follower.trust_revision.is_none() && follower.authority.is_none() {
        return Some(Behind::Unheard);
    }
    if follower.trust_revision.as_deref() != Some(terms.revision) {
        return Some(Behind::Bundle);
    }
    let hangs = wanted.is_some() && follower.authority.as_ref() != wanted && now < leaves_end;
    hangs.then_some(Behind::Certificate)
}

/// Which phase comes next. `ordered` is whether a rotation was asked for; during one that changes nothing.
pub(super) fn step(stored: &Stored, terms: Terms<'_>, followers: &[Follower], ordered: bool, now: i64) -> Next {
    if stored.has_ended(now) {
        return Next::Replace;
    }
    let on = match &stored.phase {
        Phase::Steady { root } => {
            let is_old = now.saturating_sub(root.ca.made_at()) >= seconds(terms.age);
            return if ordered || is_old { Next::Spread } else { Next::Stay };
        }
        Phase::Spread { .. } => Next::Reissue,
        Phase::Reissue { .. } => Next::Retire,
        Phase::Retire { .. } => Next::Settle,
    };
    // What an old root has signed does not hold longer than that root.
    let is_over = match &stored.phase {
        Phase::Spread { root, .. } | Phase::Reissue { root, .. } => root.ca.not_after() <= now,
        Phase::Steady { .. } | Phase::Retire { .. } => false,
    };
    let waited = now.saturating_sub(stored.since);
    let is_forced = stored.force_after.is_some_and(|after| waited >= i64::from(after));
    let all_follow = || !followers.iter().any(|follower| behind(stored, terms, follower, now).is_some());
    if is_over || is_forced || all_follow() { on } else { Next::Stay }
}

/// The content after a step; `None` for [`Next::Stay`], and for a step that does not follow from this phase. `make` makes a root.
///
/// # Errors
/// Whatever `make` says.
pub(super) fn after(
    stored: &Stored,
    next: Next,
    leaf: Duration,
    force_after: Option<u32>,
    now: i64,
    make: impl FnOnce() -> Result<Root, Pki>,
) -> Result<Option<Stored>, Pki> {
    let phase = match (next, stored.phase.clone()) {
        (Next::Spread, Phase::Steady { root }) => Phase::Spread { root, next: make()? },
        (Next::Reissue, Phase::Spread { root, next }) => {
            // A leaf that is being issued by the old root at this moment ends no later, give or take a clock.
            let leaves_end = now.saturating_add(seconds(leaf)).saturating_add(GRACE);
            Phase::Reissue { root, next, leaves_end }
        }
        (Next::Retire, Phase::Reissue { root, next, leaves_end }) => {
            Phase::Retire { root: next, old: root.ca.trust_bundle(), leaves_end }
        }
        (Next::Settle, Phase::Retire { root, .. }) => Phase::Steady { root },
        (Next::Replace, _) => Phase::Steady { root: make()? },
        (Next::Stay | Next::Spread | Next::Reissue | Next::Retire | Next::Settle, _) => return Ok(None),
    };
    let force_after = match &phase {
        Phase::Steady { .. } => None,
        _ => force_after.or(stored.force_after),
    };
    Ok(Some(Stored { phase, since: now, force_after }))
}

/// Seconds for what was under way when the issuer changed.
const GRACE: i64 = 60;

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
