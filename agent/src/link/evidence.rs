//! Heartbeats between the regular ones, sent when the evidence differs from that of the last accepted heartbeat, and when
//! the connection was lost: the next receiver, or the same after a restart, hears of the runtime at once.

use std::time::Duration;

use tokio::time::Instant;

use crate::core::Evidence;

/// Delay between a change of the evidence and its heartbeat: changes often come together, and some revert at once.
const DEBOUNCE: Duration = Duration::from_millis(500);
/// Shortest time between a heartbeat and an extra one.
const SPACING: Duration = Duration::from_secs(2);
/// Number of extra heartbeats in a row. Each regular heartbeat admits one more, so extra heartbeats at most double the
/// load of a fleet in the long run.
const BURST: u32 = 4;

/// Decides when the next heartbeat is due.
#[derive(Debug, Default)]
pub(super) struct ExtraHeartbeats {
    /// Evidence and time of the last accepted heartbeat.
    reported: Option<(Evidence, Instant)>,
    /// Time since which the current evidence differs.
    differs_since: Option<Instant>,
    /// Time of the heartbeat that a lost connection causes, until a request is accepted.
    reconnect: Option<Instant>,
    /// Extra heartbeats that the regular ones have not made up for yet.
    spent: u32,
}

impl ExtraHeartbeats {
    /// The time of the next heartbeat: `regular`, or earlier if the evidence changed.
    pub(super) fn due(&mut self, current: &Evidence, regular: Instant, now: Instant) -> Instant {
        let Some((reported, at)) = &self.reported else { return regular };
        let changed = if reported == current {
            self.differs_since = None;
            None
        } else {
            let since = *self.differs_since.get_or_insert(now);
            Some((since + DEBOUNCE).max(*at + SPACING))
        };
        let extra = changed.into_iter().chain(self.reconnect).filter(|_| self.spent < BURST);
        extra.fold(regular, Instant::min)
    }

    /// The connection ended without an announcement: a heartbeat at this time opens another one, unless an earlier request
    /// does.
    pub(super) fn connection_lost(&mut self, at: Instant) {
        self.reconnect.get_or_insert(at);
    }

    /// A request was accepted, so there is a connection.
    pub(super) const fn connected(&mut self) {
        self.reconnect = None;
    }

    /// A heartbeat with this evidence was accepted; `regular` is the time at which it was due without the evidence.
    pub(super) fn accepted(&mut self, evidence: Evidence, regular: Instant, sent: Instant) {
        let is_extra = sent < regular;
        self.spent = if is_extra { (self.spent + 1).min(BURST) } else { self.spent.saturating_sub(1) };
        (self.reported, self.differs_since) = (Some((evidence, sent)), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);
    const S: Duration = Duration::from_secs(1);

    fn evidence(is_listed: bool) -> Evidence {
        Evidence { plan_revision: None, is_plan_refused: false, is_listed, is_canary_fresh: true, is_incomplete: false }
    }

    #[test]
    fn unchanged_evidence_causes_no_extra_heartbeat() {
        let mut extra = ExtraHeartbeats::default();
        let now = Instant::now();
        assert_eq!(extra.due(&evidence(true), now, now), now, "the first one");
        extra.accepted(evidence(true), now, now);
        let regular = now + INTERVAL;
        assert_eq!(extra.due(&evidence(true), regular, now + S), regular);
        assert!(extra.due(&evidence(false), regular, now + S * 9) < regular);
        assert_eq!(extra.due(&evidence(true), regular, now + S * 9), regular, "it reverted before it was sent");
    }

    #[test]
    fn changed_evidence_is_debounced_and_spaced() {
        let mut extra = ExtraHeartbeats::default();
        let now = Instant::now();
        let regular = now + INTERVAL;
        extra.accepted(evidence(false), now, now);
        assert_eq!(extra.due(&evidence(true), regular, now), now + SPACING);
        let mut later = ExtraHeartbeats::default();
        later.accepted(evidence(false), now, now);
        let changed = now + S * 10;
        assert_eq!(later.due(&evidence(true), regular, changed), changed + DEBOUNCE);
        assert_eq!(later.due(&evidence(true), regular, changed + S), changed + DEBOUNCE, "since the first difference");
        let mut end = ExtraHeartbeats::default();
        end.accepted(evidence(false), now, now);
        assert_eq!(end.due(&evidence(true), regular, regular), regular, "never later than the regular one");
    }

    #[test]
    fn lost_connection_causes_one_heartbeat_unless_a_request_is_accepted_before() {
        let mut extra = ExtraHeartbeats::default();
        let now = Instant::now();
        extra.accepted(evidence(true), now, now);
        let regular = now + INTERVAL;
        extra.connection_lost(now + S * 2);
        extra.connection_lost(now + S * 5);
        assert_eq!(extra.due(&evidence(true), regular, now + S), now + S * 2, "the first of several losses counts");
        extra.connected();
        assert_eq!(extra.due(&evidence(true), regular, now + S), regular);
    }

    #[test]
    fn connections_that_end_again_and_again_at_most_double_the_heartbeats() {
        let mut extra = ExtraHeartbeats::default();
        let start = Instant::now();
        let mut now = start;
        let mut regular = start;
        let mut sent = 0;
        while now < start + INTERVAL * 100 {
            if extra.due(&evidence(true), regular, now) <= now {
                extra.accepted(evidence(true), regular, now);
                extra.connected();
                (regular, sent) = (now + INTERVAL, sent + 1);
                extra.connection_lost(now + S);
            }
            now += Duration::from_millis(100);
        }
        assert!((100..=200 + BURST).contains(&sent), "{sent}");
    }

    #[test]
    fn flapping_evidence_at_most_doubles_the_heartbeats() {
        let mut extra = ExtraHeartbeats::default();
        let start = Instant::now();
        let mut now = start;
        let mut regular = start;
        let mut sent = 0;
        let mut listed = true;
        while now < start + INTERVAL * 100 {
            // The evidence differs from the last heartbeat at each step.
            let due = extra.due(&evidence(listed), regular, now);
            if due <= now {
                extra.accepted(evidence(listed), regular, now);
                (regular, sent, listed) = (now + INTERVAL, sent + 1, !listed);
            }
            now += Duration::from_millis(100);
        }
        assert!((100..=200 + BURST).contains(&sent), "{sent}");
    }
}
