//! How soon everything is sent again when instances of the receiver alternate.

use std::time::Duration;

use tokio::time::Instant;

const FIRST: Duration = Duration::from_secs(1);
const CAP: Duration = Duration::from_secs(60);

/// The first time at once, then with waits that double to 60 s; calm for longer than that begins anew.
#[derive(Debug, Default)]
pub(super) struct Pace {
    last: Option<Instant>,
    wait: Duration,
    until: Option<Instant>,
}

impl Pace {
    /// Another instance has answered.
    pub(super) fn strike(&mut self, now: Instant) {
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

    /// Nothing is sent before; `None` for at once.
    pub(super) const fn until(&self) -> Option<Instant> {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_once_then_doubling_until_it_is_calm() {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..9 {
            pace.strike(now);
            let until = pace.until().unwrap_or(now);
            waits.push(until.duration_since(now).as_secs());
            now = until;
        }
        assert_eq!(waits, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        pace.strike(now + CAP * 3);
        assert_eq!(pace.until(), None);
    }
}
