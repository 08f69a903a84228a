//! When a route may be tried again.

use std::time::Duration;

use tokio::time::Instant;

use crate::backoff::Backoff;

const BASE: Duration = Duration::from_millis(200);
/// While the receiver cannot be connected to: soon there when it is back.
const CONNECT_CAP: Duration = Duration::from_secs(15);
/// While it answers, but not well.
const ERROR_CAP: Duration = Duration::from_secs(60);
/// Nobody may tell us to be silent for longer.
const TOLD_CAP: Duration = Duration::from_secs(3_600);

/// One route's way back to trying.
#[derive(Debug)]
pub(super) struct Gate {
    backoff: Backoff,
    until: Option<Instant>,
    /// It is closed because the connection did not work, and for nothing else.
    connecting: bool,
}

impl Default for Gate {
    fn default() -> Self {
        Self { backoff: Backoff::new(BASE), until: None, connecting: false }
    }
}

impl Gate {
    /// The first moment at or after `due` at which a request may leave.
    pub(super) fn opens(&self, due: Instant) -> Instant {
        self.until.map_or(due, |until| until.max(due))
    }

    /// A request was taken.
    pub(super) const fn open(&mut self) {
        self.backoff.reset();
        (self.until, self.connecting) = (None, false);
    }

    /// The other route's request was taken, so there is a connection.
    pub(super) const fn connected(&mut self) {
        if self.connecting {
            self.open();
        }
    }

    /// A request failed.
    pub(super) fn fail(&mut self, now: Instant, connecting: bool) {
        let wait = self.backoff.fail(if connecting { CONNECT_CAP } else { ERROR_CAP });
        (self.until, self.connecting) = (Some(now + wait), connecting);
    }

    /// The receiver says how long to wait; what comes up meanwhile is coalesced.
    pub(super) fn told(&mut self, now: Instant, wait: Duration) {
        (self.until, self.connecting) = (Some(now + wait.min(TOLD_CAP)), false);
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
        assert_eq!(told.opens(now), now + Duration::from_secs(7));
        told.told(now, Duration::MAX);
        assert_eq!(told.opens(now), now + TOLD_CAP);
    }
}
