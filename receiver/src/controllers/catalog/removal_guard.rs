//! Guard against mass removal. Pure.
//!
//! It compares the `state` of all modules with the last accepted one, which may come from an earlier process. A change that
//! takes something from too many runtimes is held until it is confirmed; every removal is, while that state is `lost`. The
//! state also records since when a channel points to its version, which is the start of its roll-out.

mod lost;
mod state;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use aws_lc_rs::digest;
use serde::{Deserialize, Serialize};
use tidewatch_shared::{
    hex,
    names::{RELEASES, annotation},
};

pub use lost::{LossCause, LostReleases};
pub use state::{Audience, ChannelTarget, ModuleState, Releases, VisibilityLabels};

/// Maximum number of runtimes that may lose something without the percentage limit.
pub const MAX_UNGUARDED_RUNTIMES: usize = 3;

/// Returns a predicate on a Kyma's labels: whether the change takes a channel or version of the module from it, or
/// uninstalls a mandatory module, or replaces its component. The comparison is done once per combination of visibility
/// labels, since there are thousands of Kymas.
fn loses_access(before: &ModuleState, now: &ModuleState) -> impl Fn(&BTreeMap<String, String>) -> bool + use<> {
    let (admitted, admits) = (before.audience.admits(), now.audience.admits());
    let is_replaced = before.component.is_some() && before.component != now.component;
    // Every Kyma has a mandatory module.
    let everywhere = before.mandatory.is_some() && (now.mandatory.is_none() || is_replaced);
    let loss = |labels| {
        let ((channels, versions), later) = (before.visible_to(labels), now.visible_to(labels));
        // The loss of a Kyma that is no longer admitted, and of one that still is.
        let some = is_replaced || !channels.is_subset(&later.0) || !versions.is_subset(&later.1);
        (!channels.is_empty(), some)
    };
    // Indexed by the labels `beta` and `internal`.
    let losses = [false, true].map(|beta| [false, true].map(|internal| loss(VisibilityLabels { beta, internal })));
    move |labels| {
        let VisibilityLabels { beta, internal } = VisibilityLabels::of(Some(labels));
        let (all, some) = losses[usize::from(beta)][usize::from(internal)];
        everywhere || (all && admitted(labels) && (some || !admits(labels)))
    }
}

/// Removal that waits for a confirmation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldRemoval {
    /// Identifier of the change, derived from its content; a confirmation names it.
    pub change: String,
    /// Modules that would be removed, or would lose channels or versions.
    pub modules: BTreeSet<String>,
    /// Number of runtimes that would lose something.
    pub runtimes: usize,
    /// Number of all runtimes.
    pub of: usize,
}

impl fmt::Display for HeldRemoval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { change, modules, runtimes, of } = self;
        let modules = modules.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        write!(
            f,
            "a removal of {modules}, of some of its channels or versions, or of its component, from {runtimes} of {of} runtimes waits until the \
             annotation {} of the ConfigMap {RELEASES} says {change}",
            annotation::CONFIRM
        )
    }
}

/// Decision on a change of the releases.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GuardDecision {
    /// New accepted state; held modules keep their previous state.
    pub accepted: Releases,
    /// Held removal, if any.
    pub held: Option<HeldRemoval>,
    /// The change exceeded the limit and was let through by its confirmation.
    pub confirmation_used: bool,
}

/// Decides on the change from the `accepted` state to the `next`. It holds the modules concerned if more than `percent`
/// of all runtimes, and more than [`MAX_UNGUARDED_RUNTIMES`], would lose a module, a channel or a version, unless
/// `confirmed` names this change. Without an accepted state everything is accepted. `kymas` are the labels of all
/// Kymas.
#[must_use]
pub fn evaluate<'a>(
    accepted: Option<&Releases>,
    mut next: Releases,
    kymas: impl IntoIterator<Item = &'a BTreeMap<String, String>>,
    policy: RemovalPolicy<'_>,
) -> GuardDecision {
    let Some(before) = accepted else { return GuardDecision { accepted: next, held: None, confirmation_used: false } };
    for (module, state) in &mut next {
        state.carry_over_times(before.get(module), policy.now);
    }
    let (mandatory, channels, versions) = Default::default();
    let removed = ModuleState { audience: Audience::Excluded, component: None, mandatory, channels, versions };
    let is_changed = |(module, state): &(&String, &ModuleState)| {
        next.get(*module).is_none_or(|next| next.without_times() != state.without_times())
    };
    let changed = before.iter().filter(is_changed);
    let changed: Vec<_> =
        changed.map(|(module, state)| (module, loses_access(state, next.get(module).unwrap_or(&removed)))).collect();
    let (mut runtimes, mut of, mut modules) = (0, 0, BTreeSet::new());
    for labels in kymas {
        of += 1;
        let lost: Vec<_> = changed.iter().filter(|(_, loses)| loses(labels)).map(|(module, _)| *module).collect();
        runtimes += usize::from(!lost.is_empty());
        modules.extend(lost.into_iter().cloned());
    }
    let held = HeldRemoval { change: change_id(before, &next, &modules), modules, runtimes, of };
    let limit = (of.saturating_mul(policy.percent.into()) / 100).max(MAX_UNGUARDED_RUNTIMES);
    let is_few = runtimes <= limit;
    if is_few || policy.confirmed == Some(held.change.as_str()) {
        return GuardDecision { accepted: next, held: None, confirmation_used: !is_few };
    }
    let kept = before.iter().filter(|(module, _)| held.modules.contains(*module));
    next.extend(kept.map(|(module, state)| (module.clone(), state.clone())));
    GuardDecision { accepted: next, held: Some(held), confirmation_used: false }
}

/// Limits and time by which a change is decided.
#[derive(Clone, Copy, Debug)]
pub struct RemovalPolicy<'a> {
    /// Percentage of runtimes that may lose something by one change.
    pub percent: u8,
    /// Identifier of the confirmed change.
    pub confirmed: Option<&'a str>,
    /// Current time in Unix seconds.
    pub now: i64,
}

fn change_id(before: &Releases, now: &Releases, modules: &BTreeSet<String>) -> String {
    let of = |releases: &Releases, module: &str| releases.get(module).map(ModuleState::without_times);
    let changes: Vec<_> = modules.iter().map(|module| (module, of(before, module), of(now, module))).collect();
    identifier(&changes)
}

/// First five bytes of the SHA-256 in hex.
fn identifier(content: &impl Serialize) -> String {
    let text = serde_json::to_vec(content).expect("module states are plain data with string keys");
    hex::encode(&digest::digest(&digest::SHA256, &text).as_ref()[..5])
}

#[cfg(test)]
mod tests;
