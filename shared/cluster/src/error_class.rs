//! Error classes and the backoff of each.

use std::time::Duration;

use tidewatch_kit::random::Random;

/// Class of a failed reconcile; it determines the backoff. The name is the value of the label `class` in metrics and
/// logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum ErrorClass {
    /// The runtime was unreachable, did not respond in time, or has a certificate that is not trusted.
    Transport,
    /// The runtime refused the receiver's credentials, or there are none. A changed access Secret enqueues the Kyma at
    /// once.
    Auth,
    /// The runtime or KCP refused a request: quota, admission.
    Refused,
    /// Another writer changed the object between read and write: the retry reads it again.
    Conflict,
    /// The user's spec cannot be applied. The user's next change enqueues the Kyma at once.
    User,
    /// KCP failed, or the receiver has a defect.
    Ours,
}

impl ErrorClass {
    /// Upper bound of the first delay, and of all delays.
    const fn bounds(self) -> (Duration, Duration) {
        let seconds = Duration::from_secs;
        match self {
            Self::Transport | Self::Refused => (seconds(1), seconds(300)),
            Self::Auth => (seconds(5), seconds(600)),
            Self::Conflict => (MIN_DELAY, seconds(60)),
            Self::User => (seconds(10), seconds(600)),
            Self::Ours => (seconds(1), seconds(60)),
        }
    }

    /// Delay of the next retry, with full jitter: between [`MIN_DELAY`] and a bound that doubles with each consecutive
    /// failure, up to the cap.
    pub fn delay(self, failures: u32, random: &mut Random) -> Duration {
        let (first, cap) = self.bounds();
        random.backoff(first, cap, failures).max(MIN_DELAY)
    }
}

/// Shortest delay between two reconciles of a failing Kyma.
pub const MIN_DELAY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_cap_and_stay_above_the_minimum() {
        use ErrorClass::{Auth, Conflict, Ours, Refused, Transport, User};
        let mut random = Random::new(7);
        for class in [Transport, Auth, Refused, Conflict, User, Ours] {
            let (first, cap) = class.bounds();
            let mut longest = Duration::ZERO;
            for failures in 1..200 {
                let delay = class.delay(failures, &mut random);
                assert!((MIN_DELAY..=cap).contains(&delay), "{class:?} {failures}");
                assert!(failures > 1 || delay <= first);
                longest = longest.max(delay);
            }
            assert!(longest > cap / 2, "{class:?} spreads up to its cap");
        }
        assert_eq!(ErrorClass::Ours.delay(3, &mut Random::new(1)), ErrorClass::Ours.delay(3, &mut Random::new(1)));
    }
}
