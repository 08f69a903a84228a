//! Decides when a Lease has expired. Pure: record and time are arguments.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

/// Upper bound of the time that an observer waits for a Lease, whatever its duration.
const MAX_LEASE_DURATION: Duration = Duration::from_secs(300);

/// The relevant fields of a Lease. Equal records mean that the Lease was not renewed in between.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseRecord {
    /// Identity of the holder; `None` when the Lease was released.
    pub holder: Option<String>,
    /// Validity after each renewal.
    pub duration: Option<Duration>,
    /// The holder's wall clock at the last renewal. Compared for equality only.
    pub renewed: Option<Timestamp>,
    /// Number of changes of the holder.
    pub transitions: i32,
}

/// The record of a Lease as an observer last read it, and since when it has not changed on the observer's clock.
#[derive(Clone, Debug)]
pub struct Observation {
    /// The record as last read.
    pub record: LeaseRecord,
    /// Time of the first read of this record.
    pub since: Instant,
}

impl Observation {
    /// Observes a record for the first time.
    pub fn new(record: LeaseRecord, now: Instant) -> Self {
        Self { record, since: now }
    }

    /// Takes the record that was just read. Returns true if it differs from the one before.
    pub fn update(&mut self, record: LeaseRecord, now: Instant) -> bool {
        let changed = self.record != record;
        if changed {
            *self = Self::new(record, now);
        }
        changed
    }

    /// Time at which the Lease has lapsed unless its record changes before. `default` applies to a Lease without a
    /// duration.
    pub fn expires(&self, default: Duration) -> Instant {
        self.since + self.record.duration.unwrap_or(default).min(MAX_LEASE_DURATION)
    }
}

/// Returns true if a holder ran in this place, which runs one process at a time.
pub fn ran_in(holder: &str, place: Option<&str>) -> bool {
    place.is_some() && holder.rsplit_once('_').map(|(place, _)| place) == place
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);
    const LEASE: Duration = Duration::from_secs(15);

    fn renewed(at: i64) -> LeaseRecord {
        LeaseRecord {
            holder: Some("other_1".to_owned()),
            duration: Some(LEASE),
            renewed: Some(Timestamp::from_second(at).unwrap()),
            transitions: 1,
        }
    }

    #[test]
    fn only_a_holder_of_the_same_place_is_a_predecessor() {
        assert!(ran_in("pod_1", Some("pod")));
        assert!(!ran_in("pod", Some("pod")));
        assert!(!ran_in("pod-2_1", Some("pod")));
        assert!(!ran_in("host_1", None), "without a place even the same host waits");
    }

    #[test]
    fn lease_expires_by_the_observers_clock_since_the_last_change() {
        let start = Instant::now();
        // The holder's clock is a century off, which does not matter.
        let mut observed = Observation::new(renewed(-1_000_000_000), start);
        assert!(!observed.update(renewed(-1_000_000_000), start + LEASE - S));
        assert_eq!(observed.expires(S), start + LEASE);
        assert!(observed.update(renewed(4_000_000_000), start + LEASE - S));
        assert_eq!(observed.expires(S), start + LEASE - S + LEASE);
        // A new holder gets its full duration.
        let later = start + LEASE * 2;
        let by_another = LeaseRecord { holder: Some("third_1".to_owned()), ..renewed(4_000_000_000) };
        assert!(observed.update(by_another, later));
        assert_eq!(observed.expires(S), later + LEASE);
    }

    #[test]
    fn wait_for_any_record_is_bounded() {
        let start = Instant::now();
        let endless = LeaseRecord { duration: Some(Duration::MAX), ..renewed(1) };
        assert_eq!(Observation::new(endless, start).expires(S), start + MAX_LEASE_DURATION);
        let silent = LeaseRecord { duration: None, ..renewed(2) };
        assert_eq!(Observation::new(silent, start).expires(S), start + S);
    }
}
