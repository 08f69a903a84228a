//! When a route may be tried again.

use std::time::Duration;

use tokio::time::Instant;

use crate::{backoff::Backoff, random};

const BASE: Duration = Duration::from_millis(200);
/// While the receiver cannot be connected to: soon there when it is back.
const CONNECT_CAP: Duration = Duration::from_secs(15);
/// While it answers, but not well.
const ERROR_CAP: Duration = Duration::from_secs(60);
/// Nobody may tell us to be silent for longer.
const TOLD_CAP: Duration = Duration::from_secs(300);
/// Those who were told the same wait come back spread over this part of it, and never before.
const SPREAD: u32 = 8;

/// One route's way back to trying.
#[derive(Debug)]
pub(crate) struct Gate {
    backoff: Backoff,
    until: Option<Instant>,
    why: Closed,
}

/// Why a gate was closed last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closed {
    /// The connection did not work, and nothing else.
    Connecting,
    /// A request failed or was refused.
    Failed,
    /// The receiver said how long.
    Told,
}

impl Default for Gate {
    fn default() -> Self {
        Self { backoff: Backoff::new(BASE), until: None, why: Closed::Failed }
    }
}

impl Gate {
    /// The first moment at or after `due` at which a request may leave.
    pub(crate) fn opens(&self, due: Instant) -> Instant {
        self.until.map_or(due, |until| until.max(due))
    }

    /// Whether something went wrong, and nothing went well since.
    pub(super) const fn is_shut(&self) -> bool {
        self.until.is_some()
    }

    /// A request was taken.
    pub(crate) const fn open(&mut self) {
        self.backoff.reset();
        self.until = None;
    }

    /// The other route's request was taken, so there is a connection.
    pub(super) const fn connected(&mut self) {
        if matches!(self.why, Closed::Connecting) {
            self.open();
        }
    }

    /// There is another identity, or other roots: what failed with the old ones is tried again, but nobody comes back before they
    /// were told.
    pub(crate) const fn renewed(&mut self) {
        if !matches!(self.why, Closed::Told) {
            self.open();
        }
    }

    /// A request failed.
    pub(crate) fn fail(&mut self, now: Instant, connecting: bool) {
        let wait = self.backoff.fail(if connecting { CONNECT_CAP } else { ERROR_CAP });
        (self.until, self.why) = (Some(now + wait), if connecting { Closed::Connecting } else { Closed::Failed });
    }

    /// The receiver says how long to wait; what comes up meanwhile is coalesced.
    pub(crate) fn told(&mut self, now: Instant, wait: Duration) {
        let wait = wait.min(TOLD_CAP);
        (self.until, self.why) = (Some(now + wait + random::up_to(wait / SPREAD)), Closed::Told);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_opens_what_only_waited_for_one() {
        let now = Instant::now();
        let (mut failed, mut told) = (Gate::default(), Gate::default());
        failed.fail(now, true);
        told.told(now, Duration::from_secs(7));
        assert!(failed.opens(now) <= now + CONNECT_CAP);
        failed.connected();
        told.connected();
        assert_eq!(failed.opens(now), now);
        told.renewed();
        let seven = now + Duration::from_secs(7);
        assert!((seven..seven + Duration::from_secs(1)).contains(&told.opens(now)));
        told.told(now, Duration::MAX);
        assert!((now + TOLD_CAP..=now + TOLD_CAP + TOLD_CAP / SPREAD).contains(&told.opens(now)));
    }

    #[test]
    fn another_identity_is_tried_at_once() {
        let now = Instant::now();
        let mut gate = Gate::default();
        while gate.opens(now) == now {
            gate.fail(now, false);
        }
        gate.renewed();
        assert_eq!(gate.opens(now), now);
    }
}
