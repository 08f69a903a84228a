//! When a version to which a channel has moved is a Kyma's to have: pure.

use std::time::Duration;

use jiff::Timestamp;

use super::facts::{self, Pointer};

/// When a Kyma has its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It has come, or there is none: nobody saw the channel move.
    Now,
    /// It comes after so long.
    After(Duration),
    /// Whether the channel may point there is not decided yet, or is held. Whoever decides wakes who follows it.
    Undecided,
}

impl Turn {
    /// Of a Kyma (its uid), a module and the version to which the release meta points; `accepted` is where the channel points as far as that
    /// was decided on.
    pub(super) fn of(
        (kyma_uid, module, version): (&str, &str, &str),
        accepted: Option<&Pointer>,
        window: Duration,
        now: Timestamp,
    ) -> Self {
        let Some(accepted) = accepted else { return Self::Now };
        if accepted.version != version {
            return Self::Undecided;
        }
        let Some(since) = accepted.since.and_then(|since| Timestamp::from_second(since).ok()) else { return Self::Now };
        // A clock that was set back makes nobody wait for longer than from now.
        let passed = Duration::try_from(now.duration_since(since)).unwrap_or_default();
        match facts::delay(kyma_uid, module, version, window).saturating_sub(passed) {
            Duration::ZERO => Self::Now,
            rest => Self::After(rest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(300);

    fn turn(pointer: Option<&Pointer>, second: i64) -> Turn {
        Turn::of(("uid", "keda", "2.0.0"), pointer, WINDOW, Timestamp::from_second(second).unwrap())
    }

    #[test]
    fn a_turn_comes_when_its_delay_has_passed_since_the_channel_moved() {
        let moved = |since| Pointer { version: "2.0.0".to_owned(), beta: false, internal: false, since };
        let delay = facts::delay("uid", "keda", "2.0.0", WINDOW);
        let last = i64::try_from(delay.as_secs()).unwrap();
        assert!(last > 1, "or this test says nothing");
        assert_eq!(turn(Some(&moved(Some(1_000))), 1_000), Turn::After(delay));
        assert_eq!(turn(Some(&moved(Some(1_000))), 1_001), Turn::After(delay - Duration::from_secs(1)));
        assert!(matches!(turn(Some(&moved(Some(1_000))), 1_000 + last), Turn::After(rest) if rest.as_secs() == 0));
        assert_eq!(turn(Some(&moved(Some(1_000))), 1_001 + last), Turn::Now);
        assert_eq!(turn(Some(&moved(Some(1_000))), 1), Turn::After(delay), "the clock was set back");
        assert_eq!(turn(Some(&moved(None)), 1), Turn::Now, "nobody saw it move");
        assert_eq!(turn(None, 1), Turn::Now, "nothing is known of the channel");
        let elsewhere = Pointer { version: "1.0.0".to_owned(), ..moved(Some(1)) };
        assert_eq!(turn(Some(&elsewhere), 1_000_000), Turn::Undecided);
    }
}
