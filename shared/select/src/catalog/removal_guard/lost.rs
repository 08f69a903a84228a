//! Hold of every removal while it is lost which state was accepted. Pure.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use tidewatch_api::names::{RELEASES, annotation};

use super::{GuardDecision, RemovalPolicy, identifier, state::Releases};

/// Hold of every removal, because it is lost which state was accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostReleases {
    /// Identifier of the current state of all modules; a confirmation that names it accepts that state.
    pub change: String,
    /// Cause of the loss.
    pub cause: LossCause,
}

/// Cause of the loss of the accepted state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum LossCause {
    /// The ConfigMap does not exist, or lacks the state.
    Missing,
    /// The state cannot be parsed.
    Unreadable,
}

impl LostReleases {
    /// Decides without knowledge of the accepted state: `next` is accepted if a confirmation names it. All of its channels
    /// count as moved then, since it is not known since when they point to their versions.
    ///
    /// # Errors
    /// The hold, if there is no such confirmation.
    pub fn decide(mut next: Releases, cause: LossCause, policy: RemovalPolicy<'_>) -> Result<GuardDecision, Self> {
        let states: BTreeMap<_, _> = next.iter().map(|(module, state)| (module, state.without_times())).collect();
        let change = identifier(&states);
        if !policy.confirmed.contains(&change) {
            return Err(Self { change, cause });
        }
        next.values_mut().for_each(|state| state.carry_over_times(None, policy.now));
        Ok(GuardDecision { accepted: next, used: [change].into(), ..GuardDecision::default() })
    }
}

impl fmt::Display for LostReleases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { change, cause } = self;
        write!(
            f,
            "the accepted releases in the ConfigMap {RELEASES} are {cause}: every removal waits until they are restored, or until \
             the annotation {} names {change}, which accepts the catalog as it is",
            annotation::CONFIRM
        )
    }
}
