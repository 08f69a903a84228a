//! Classes of failures, and how long a retry waits for each.

use std::time::Duration;

use super::random::Random;

/// Error classes; they decide how long to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// The runtime could not be reached, or did not answer in time.
    Transport,
    /// The runtime did not accept our credentials, or there are none. A changed Secret wakes the Kyma at once.
    Auth,
    /// The runtime or KCP refused a request: conflict, quota, admission.
    Refused,
    /// What the user wrote cannot be done. Their next change wakes the Kyma at once.
    User,
    /// KCP failed, or we did.
    Ours,
}

impl Class {
    /// The class as metrics and logs name it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Transport => "transport",
            Self::Auth => "auth",
            Self::Refused => "refused",
            Self::User => "user",
            Self::Ours => "ours",
        }
    }

    /// Upper bound of the first wait, and of every wait.
    const fn bounds(self) -> (Duration, Duration) {
        let (first, cap) = match self {
            Self::Transport => (1, 300),
            Self::Auth => (5, 600),
            Self::Refused => (1, 300),
            Self::User => (10, 600),
            Self::Ours => (1, 60),
        };
        (Duration::from_secs(first), Duration::from_secs(cap))
    }

    /// Full jitter: anything between [`MIN_WAIT`] and a bound that doubles with each failure in a row, up to the cap.
    pub(crate) fn wait(self, failures: u32, random: &mut Random) -> Duration {
        let (first, cap) = self.bounds();
        let bound = first.saturating_mul(2u32.saturating_pow(failures.saturating_sub(1))).min(cap);
        let millis = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
        Duration::from_millis(random.up_to(millis)).max(MIN_WAIT)
    }
}

/// No failing Kyma is worked on again sooner.
pub(crate) const MIN_WAIT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_cap_and_never_vanish() {
        let mut random = Random::new(7);
        for class in [Class::Transport, Class::Auth, Class::Refused, Class::User, Class::Ours] {
            let (first, cap) = class.bounds();
            let mut longest = Duration::ZERO;
            for failures in 1..200 {
                let wait = class.wait(failures, &mut random);
                assert!((MIN_WAIT..=cap).contains(&wait), "{class:?} {failures}");
                assert!(failures > 1 || wait <= first);
                longest = longest.max(wait);
            }
            assert!(longest > cap / 2, "{class:?} spreads up to its cap");
        }
        assert_eq!(Class::Ours.wait(3, &mut Random::new(1)), Class::Ours.wait(3, &mut Random::new(1)));
    }
}
