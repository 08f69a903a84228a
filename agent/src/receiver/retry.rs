//! Earliest time of the next request on a route.

use std::time::Duration;

use tokio::time::Instant;

use crate::{backoff::Backoff, random};

/// First ceiling of the backoff (full jitter).
const FIRST: Duration = Duration::from_millis(200);
/// Backoff cap while connects fail: a refused connect costs little, and a restarted receiver is found within it.
const CONNECT_CAP: Duration = Duration::from_secs(5);
/// Backoff cap while requests fail on a working connection.
const ERROR_CAP: Duration = Duration::from_secs(60);
/// Upper bound of a `Retry-After`.
const RETRY_AFTER_CAP: Duration = Duration::from_secs(300);
/// Jitter after a `Retry-After`, as a fraction of it; added to it, never subtracted.
const SPREAD: u32 = 8;

/// Backoff of one route.
#[derive(Debug, Default)]
pub(crate) struct RetryTimer {
    backoff: Backoff,
    until: Option<Instant>,
    reason: WaitReason,
}

/// Cause of the current delay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum WaitReason {
    /// Only the connect failed.
    Connecting,
    /// A request failed or was refused.
    #[default]
    Failed,
    /// The receiver sent a `Retry-After`.
    RetryAfter,
}

impl RetryTimer {
    /// Earliest time at or after `due` for a request.
    pub(crate) fn not_before(&self, due: Instant) -> Instant {
        self.until.map_or(due, |until| until.max(due))
    }

    /// A request was accepted.
    pub(crate) const fn reset(&mut self) {
        self.backoff.reset();
        self.until = None;
    }

    /// A request on another route was accepted, so connects work again.
    pub(crate) const fn connected(&mut self) {
        if matches!(self.reason, WaitReason::Connecting) {
            self.reset();
        }
    }

    /// Identity or trust bundle changed: failures with the old one are retried at once, but a `Retry-After` stays in
    /// force.
    pub(crate) const fn credentials_changed(&mut self) {
        if !matches!(self.reason, WaitReason::RetryAfter) {
            self.reset();
        }
    }

    /// A request failed.
    pub(crate) fn fail(&mut self, now: Instant, connecting: bool) {
        let wait = self.backoff.fail(FIRST, if connecting { CONNECT_CAP } else { ERROR_CAP });
        (self.until, self.reason) =
            (Some(now + wait), if connecting { WaitReason::Connecting } else { WaitReason::Failed });
    }

    /// The receiver sent a `Retry-After`; changes in the meantime are coalesced.
    pub(crate) fn retry_after(&mut self, now: Instant, wait: Duration) {
        let wait = wait.min(RETRY_AFTER_CAP);
        (self.until, self.reason) = (Some(now + wait + random::up_to(wait / SPREAD)), WaitReason::RetryAfter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn successful_connect_ends_connect_backoff_only() {
        let now = Instant::now();
        let mut failed = RetryTimer::default();
        let mut limited = RetryTimer::default();
        failed.fail(now, true);
        limited.retry_after(now, Duration::from_secs(7));
        assert!(failed.not_before(now) <= now + CONNECT_CAP);
        failed.connected();
        limited.connected();
        assert_eq!(failed.not_before(now), now);
        limited.credentials_changed();
        let seven = now + Duration::from_secs(7);
        assert!((seven..seven + Duration::from_secs(1)).contains(&limited.not_before(now)));
        limited.retry_after(now, Duration::MAX);
        assert!(
            (now + RETRY_AFTER_CAP..=now + RETRY_AFTER_CAP + RETRY_AFTER_CAP / SPREAD)
                .contains(&limited.not_before(now))
        );
    }

    #[test]
    fn changed_identity_is_retried_at_once() {
        let now = Instant::now();
        let mut timer = RetryTimer::default();
        while timer.not_before(now) == now {
            timer.fail(now, false);
        }
        timer.credentials_changed();
        assert_eq!(timer.not_before(now), now);
    }
}
