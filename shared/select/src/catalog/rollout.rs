//! Roll-out of a moved channel, or of a mandatory version: each Kyma that follows it gets the new version after a stable,
//! jittered delay, or with its ring.
//!
//! `policy` holds the rules of the rings, `record` the state of a rollout, `stored` its form in KCP, and `board` shares the
//! rollouts with the reconciles. The task `module_rollout` of the receiver drives them.

mod board;
mod policy;
mod record;
mod stored;

use std::time::Duration;

use aws_lc_rs::digest;
use jiff::Timestamp;

pub use policy::{FirstRuntimes, ParseFirstRuntimesError, RolloutFlags};
pub use record::{EarlierVersion, Progress, Rollout, RolloutKey};

pub use board::{BoardEntry, RolloutBoard};
pub use policy::{InvalidPolicyError, RolloutPolicy};
pub use record::RolloutMark;
pub use stored::{Rollouts, StoredRollouts, accepted_targets, data_key};

use super::target::ChannelTarget;

/// Time within which a moved channel reaches the Kymas that follow it, by default.
pub const DEFAULT_MAX_DELAY: Duration = Duration::from_secs(300);
/// Runtimes per second that a change of the catalog enqueues at most, by default.
pub const DEFAULT_SYNC_RATE: u32 = 200;

/// Slot of one Kyma in a roll-out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RolloutSlot {
    /// The delay has passed, or there is none because no move was observed.
    Now,
    /// The slot begins after this time.
    After(Duration),
    /// The ring of the Kyma has not begun, or its rollout has halted. Its begin enqueues the Kyma.
    Ring,
    /// The removal guard has not decided on the move yet, or holds it, or its rollout is not recorded yet. The decision
    /// enqueues the Kymas that follow the channel.
    Undecided,
}

impl RolloutSlot {
    /// Computes the slot of a Kyma (its uid) for a module and the version that the release meta points to; `accepted`
    /// is the accepted target of the channel or mandatory version.
    pub fn of(
        kyma_uid: &str,
        module: &str,
        version: &str,
        accepted: Option<&ChannelTarget>,
        window: Duration,
        now: Timestamp,
    ) -> Self {
        let Some(accepted) = accepted else { return Self::Now };
        if accepted.version != version {
            return Self::Undecided;
        }
        let Some(since) = accepted.since.and_then(|since| Timestamp::from_second(since).ok()) else { return Self::Now };
        // If the clock was set back, the slot is at most one full delay away.
        let passed = Duration::try_from(now.duration_since(since)).unwrap_or_default();
        match delay(kyma_uid, module, version, window).saturating_sub(passed) {
            Duration::ZERO => Self::Now,
            rest => Self::After(rest),
        }
    }
}

/// Delay after a channel's move until a Kyma gets the version: spread over `window` by a hash, and always the same for
/// the same Kyma, module and version, so no per-Kyma state is needed.
pub fn delay(kyma_uid: &str, module: &str, version: &str, window: Duration) -> Duration {
    let text = format!("{kyma_uid}\n{module}\n{version}");
    let hash = digest::digest(&digest::SHA256, text.as_bytes());
    let prefix = hash.as_ref().first_chunk().map_or(0, |prefix| u64::from_be_bytes(*prefix));
    let millis = u64::try_from(window.as_millis()).unwrap_or(u64::MAX).max(1);
    Duration::from_millis(prefix % millis)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::target::VisibilityLabels;

    const WINDOW: Duration = Duration::from_secs(300);

    fn slot(target: Option<&ChannelTarget>, second: i64) -> RolloutSlot {
        RolloutSlot::of("uid", "keda", "2.0.0", target, WINDOW, Timestamp::from_second(second).unwrap())
    }

    #[test]
    fn slot_arrives_once_the_delay_since_the_move_has_passed() {
        let moved = |since| ChannelTarget {
            version: "2.0.0".to_owned(),
            labels: VisibilityLabels::default(),
            since,
            from: None,
        };
        let delay = delay("uid", "keda", "2.0.0", WINDOW);
        let last = i64::try_from(delay.as_secs()).unwrap();
        assert!(last > 1, "the delay must be longer than the clock step of this test");
        assert_eq!(slot(Some(&moved(Some(1_000))), 1_000), RolloutSlot::After(delay));
        assert_eq!(slot(Some(&moved(Some(1_000))), 1_001), RolloutSlot::After(delay - Duration::from_secs(1)));
        assert!(
            matches!(slot(Some(&moved(Some(1_000))), 1_000 + last), RolloutSlot::After(rest) if rest.as_secs() == 0)
        );
        assert_eq!(slot(Some(&moved(Some(1_000))), 1_001 + last), RolloutSlot::Now);
        assert_eq!(slot(Some(&moved(Some(1_000))), 1), RolloutSlot::After(delay), "the clock was set back");
        assert_eq!(slot(Some(&moved(None)), 1), RolloutSlot::Now, "the move was not observed");
        assert_eq!(slot(None, 1), RolloutSlot::Now, "the channel has no accepted target");
        let elsewhere = ChannelTarget { version: "1.0.0".to_owned(), ..moved(Some(1)) };
        assert_eq!(slot(Some(&elsewhere), 1_000_000), RolloutSlot::Undecided);
    }

    #[test]
    fn delays_are_spread_over_the_window_and_stable() {
        let window = Duration::from_secs(300);
        let delays: Vec<_> = (0..1_000).map(|n| delay(&format!("uid-{n}"), "keda", "1.0.0", window)).collect();
        assert!(delays.iter().all(|delay| *delay < window));
        for part in 0..10 {
            let inside = |delay: &&Duration| (window / 10 * part..window / 10 * (part + 1)).contains(*delay);
            assert!((50..200).contains(&delays.iter().filter(inside).count()), "{part}");
        }
        assert_eq!(delay("uid-1", "keda", "1.0.0", window), delays[1]);
        assert_ne!(delay("uid-1", "keda", "1.0.1", window), delays[1]);
        assert_eq!(delay("uid-1", "keda", "1.0.0", Duration::ZERO), Duration::ZERO);
    }
}
