//! Backoff of the retransmission after the receiver has lost its state, e.g. because its instances alternate.

use std::time::Duration;

use tokio::time::Instant;

/// Delay after the second loss in a row.
const FIRST: Duration = Duration::from_secs(1);
/// Longest delay, and part of the calm time after which the backoff resets.
const CAP: Duration = Duration::from_secs(60);

/// Exponential backoff: none for the first loss, then 1 s doubling to 60 s. It resets once no loss occurs for the
/// current delay plus 60 s.
#[derive(Debug, Default)]
pub(super) struct ResendBackoff {
    last: Option<Instant>,
    wait: Duration,
    /// Time before which no batch is sent; `None` without a delay.
    pub(super) until: Option<Instant>,
}

impl ResendBackoff {
    /// Records a loss: another instance has answered, or the receiver lacks events that it had accepted.
    pub(super) fn trigger(&mut self, now: Instant) {
        let calm = self.last.is_none_or(|last| now.duration_since(last) > self.wait + CAP);
        self.wait = if calm {
            Duration::ZERO
        } else if self.wait.is_zero() {
            FIRST
        } else {
            (self.wait * 2).min(CAP)
        };
        self.last = Some(now);
        self.until = (!self.wait.is_zero()).then(|| now + self.wait);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_loss_has_no_delay_and_later_ones_double_it() {
        let mut resend_backoff = ResendBackoff::default();
        let mut now = Instant::now();
        let mut waits = Vec::new();
        for _ in 0..9 {
            resend_backoff.trigger(now);
            let until = resend_backoff.until.unwrap_or(now);
            waits.push(until.duration_since(now).as_secs());
            now = until;
        }
        assert_eq!(waits, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        resend_backoff.trigger(now + CAP * 3);
        assert_eq!(resend_backoff.until, None);
    }
}
