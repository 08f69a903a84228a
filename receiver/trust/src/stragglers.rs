//! Runtimes that delay a rotation for longer than expected, as reported by the conditions of the Kymas. Pure.
//!
//! Every runtime is a straggler for a moment: when a phase begins, and after a start of this receiver until its first
//! heartbeat. Such moments are not reported.

use std::{collections::HashMap, time::Duration};

use tidewatch_api::key::KymaKey;
use tidewatch_contract::admin::rotation::StragglerReason;
use tokio::time::Instant;

/// Base allowance, independent of the number of runtimes: distributing bundles, and renewals that agents jitter.
const SETTLING: Duration = Duration::from_secs(10);
/// Heartbeat intervals within which a healthy agent has reported its bundle and its certificate.
const INTERVALS: u32 = 3;

/// Time within which a runtime must follow a phase; grows with the fleet, since `per_second` limits distribution and
/// renewals.
pub fn overdue_after(interval: Duration, runtimes: usize, per_second: u32) -> Duration {
    let spread = u64::try_from(runtimes).unwrap_or(u64::MAX) / u64::from(per_second.max(1));
    SETTLING + interval * INTERVALS + Duration::from_secs(spread)
}

/// State of a runtime in the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowState {
    /// The rotation does not wait for it.
    UpToDate,
    /// The rotation waits for it, within the allowance.
    Pending,
    /// The rotation waits for it beyond the allowance.
    Overdue(StragglerReason),
}

/// Stragglers of the last reconcile. Bounded by the number of Kymas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stragglers(HashMap<KymaKey, FollowState>);

impl Stragglers {
    /// State of one Kyma's runtime.
    pub fn of(&self, kyma: &KymaKey) -> FollowState {
        self.0.get(kyma).copied().unwrap_or(FollowState::UpToDate)
    }
}

/// Since when each runtime is a straggler without interruption. Bounded by the number of Kymas.
#[derive(Default)]
pub struct StragglerTracker(HashMap<KymaKey, Instant>);

impl StragglerTracker {
    /// Replaces the stragglers, and marks those that are overdue.
    pub fn update(
        &mut self,
        behind: impl IntoIterator<Item = (KymaKey, StragglerReason)>,
        overdue_after: Duration,
        now: Instant,
    ) -> Stragglers {
        let behind: HashMap<_, _> = behind.into_iter().collect();
        self.0.retain(|kyma, _| behind.contains_key(kyma));
        let track = |(kyma, behind): (KymaKey, StragglerReason)| {
            let since = *self.0.entry(kyma.clone()).or_insert(now);
            let is_overdue = now.saturating_duration_since(since) >= overdue_after;
            (kyma, if is_overdue { FollowState::Overdue(behind) } else { FollowState::Pending })
        };
        Stragglers(behind.into_iter().map(track).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn key(name: &str) -> KymaKey {
        KymaKey::new("kcp-system", name)
    }

    #[test]
    fn uninterrupted_straggler_becomes_overdue() {
        let mut tracker = StragglerTracker::default();
        let begun = Instant::now();
        let mut at = |seconds: u32, behind: &[(&str, StragglerReason)]| {
            let behind = behind.iter().map(|(name, behind)| (key(name), *behind));
            let found = tracker.update(behind, 10 * S, begun + seconds * S);
            ["a", "b"].map(|name| found.of(&key(name)))
        };
        use FollowState::{Overdue, Pending, UpToDate};
        use StragglerReason::{Bundle, Certificate, Unheard};
        assert_eq!(at(0, &[("a", Unheard), ("b", Unheard)]), [Pending, Pending]);
        assert_eq!(at(9, &[("a", Bundle)]), [Pending, UpToDate], "one that followed in time is never named");
        assert_eq!(at(10, &[("a", Bundle)]), [Overdue(Bundle), UpToDate]);
        assert_eq!(at(11, &[("a", Certificate), ("b", Bundle)]), [Overdue(Certificate), Pending], "the next phase");
        assert_eq!(at(20, &[("b", Bundle)]), [UpToDate, Pending]);
        assert_eq!(at(21, &[("a", Bundle), ("b", Bundle)]), [Pending, Overdue(Bundle)], "it had followed meanwhile");
        assert_eq!(at(22, &[]), [UpToDate, UpToDate]);
    }

    #[test]
    fn allowance_grows_with_the_fleet() {
        assert_eq!(overdue_after(30 * S, 3, 20), 100 * S);
        assert_eq!(overdue_after(30 * S, 5_000, 20), 350 * S);
        assert_eq!(overdue_after(S, 5_000, 0), 5_013 * S);
    }
}
