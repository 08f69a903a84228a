//! Pure decisions of a rotation: the stragglers of a phase, and the next transition, which depends on the number of stragglers of the
//! fleet.
//!
//! Every phase is stored before it takes effect, and follows from the stored state alone, so that another receiver continues after a
//! crash at any point.

use std::time::Duration;

use tidewatch_contract::admin::rotation::StragglerReason;
use tidewatch_fleet::{PathState, table::RuntimeReport};
use tidewatch_trust::{
    PkiError,
    ca_state::{CaState, Phase, Root},
};

/// Allowance for leaves that the old root was issuing when the issuer changed, in seconds.
const GRACE: i64 = 60;

/// Transition of a CA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transition {
    /// No transition yet.
    Wait,
    /// To the phase that follows the current one.
    Next,
    /// Replaces expired roots at once: no valid certificate depends on them.
    Replace,
}

/// Returns the reason for which the phase waits for a runtime; `None` if it does not. `revision` is that of the bundle that agents
/// confirm in this phase.
pub(super) fn straggler_reason(
    state: &CaState,
    leaf_validity: Duration,
    revision: &str,
    follower: &RuntimeReport,
    now: i64,
) -> Option<StragglerReason> {
    use tidewatch_fleet::Unproven::{Away, LegacyAgent};
    let is_away = matches!(follower.path, PathState::Unproven(Away | LegacyAgent));
    // An agent that was silent for the validity of its leaf enrols again, with the root of that time.
    if is_away || follower.silent >= leaf_validity {
        return None;
    }
    let (required, leaves_end) = match &state.phase {
        Phase::Steady => return None,
        Phase::Spread { .. } => (None, i64::MAX),
        Phase::Reissue { leaves_end, .. } | Phase::Retire { leaves_end, .. } => (Some(&state.target().id), *leaves_end),
    };
    if follower.trust_revision.is_none() && follower.authority.is_none() {
        return Some(StragglerReason::Unheard);
    }
    if follower.trust_revision.as_deref() != Some(revision) {
        return Some(StragglerReason::Bundle);
    }
    let has_old_leaf = required.is_some() && follower.authority.as_ref() != required && now < leaves_end;
    has_old_leaf.then_some(StragglerReason::Certificate)
}

/// Returns the next transition. `waiting_for` is the number of runtimes of the fleet that the phase waits for; `None` if it is
/// unknown, which only an expired root and `force_after` do not wait for. `requested` begins a rotation, and so does a root of
/// `max_root_age`; while one is under way neither has an effect.
pub(super) fn next_transition(
    state: &CaState,
    max_root_age: Duration,
    waiting_for: Option<usize>,
    requested: bool,
    now: i64,
) -> Transition {
    if state.has_expired(now) {
        return Transition::Replace;
    }
    // No certificate outlives the root that signed it, so an expired old root ends the wait.
    let is_expired = || state.root.ca.not_after() <= now;
    let waited = now.saturating_sub(state.since);
    let is_forced = state.force_after.is_some_and(|after| waited >= i64::from(after));
    let is_due = match &state.phase {
        Phase::Steady => requested || now.saturating_sub(state.root.ca.generated_at()) >= seconds(max_root_age),
        Phase::Spread { .. } | Phase::Reissue { .. } => is_expired() || is_forced || waiting_for == Some(0),
        Phase::Retire { .. } => is_forced || waiting_for == Some(0),
    };
    if is_due { Transition::Next } else { Transition::Wait }
}

/// Returns the state after a transition; `None` for [`Transition::Wait`]. `generate` generates a root.
///
/// # Errors
/// The error of `generate`.
pub(super) fn apply_transition(
    state: &CaState,
    transition: Transition,
    leaf_validity: Duration,
    force_after: Option<u32>,
    now: i64,
    generate: impl FnOnce() -> Result<Root, PkiError>,
) -> Result<Option<CaState>, PkiError> {
    use Transition::{Next, Replace, Wait};
    let root = state.root.clone();
    let (root, phase) = match (transition, state.phase.clone()) {
        (Wait, _) => return Ok(None),
        (Replace, _) => (generate()?, Phase::Steady),
        (Next, Phase::Steady) => (root, Phase::Spread { next: generate()? }),
        (Next, Phase::Spread { next }) => {
            // A leaf that the old root issues right now expires by then, clock differences included.
            let leaves_end = now.saturating_add(seconds(leaf_validity)).saturating_add(GRACE);
            (root, Phase::Reissue { next, leaves_end })
        }
        (Next, Phase::Reissue { next, leaves_end }) => {
            (next, Phase::Retire { old: root.ca.trust_bundle(), leaves_end })
        }
        (Next, Phase::Retire { .. }) => (root, Phase::Steady),
    };
    let force_after = match &phase {
        Phase::Steady => None,
        _ => force_after.or(state.force_after),
    };
    Ok(Some(CaState { root, phase, since: now, force_after }))
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
