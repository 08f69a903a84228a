//! Decides when a candidate may acquire the Lease. Pure: record and time are arguments.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

/// Upper bound of the time that a candidate waits for a Lease, whatever its duration.
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
    #[must_use]
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

/// Next step of a candidate: it writes its identity into the Lease that was read, or creates it, unless it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(super) enum Decision {
    /// The Lease has no holder.
    Free,
    /// An earlier write of this candidate succeeded although its response was lost.
    Ours,
    /// The Lease's holder ran in this candidate's place, which runs one receiver at a time.
    Predecessor,
    /// The Lease was not renewed in time.
    Expired,
    /// Poll again. Without a renewal, the Lease expires at this instant.
    Wait(Instant),
}

/// State of one candidate.
#[derive(Debug)]
pub(super) struct Election {
    /// Identity of this candidate, unique also against its own successor.
    pub(super) identity: String,
    place: Option<String>,
    default_duration: Duration,
    observed: Option<Observation>,
}

impl Election {
    /// `default_duration` applies to a Lease without a duration. `place` never runs two candidates concurrently.
    pub(super) fn new(instance: &str, place: Option<&str>, host: &str, default_duration: Duration) -> Self {
        let identity = format!("{}_{instance}", place.unwrap_or(host));
        Self { identity, place: place.map(str::to_owned), default_duration, observed: None }
    }

    /// Evaluates the record that was just read; `None` when there is no Lease.
    pub(super) fn observe(&mut self, record: Option<LeaseRecord>, now: Instant) -> Decision {
        let Some(record) = record else {
            self.observed = None;
            return Decision::Free;
        };
        let Some(holder) = record.holder.as_deref() else { return Decision::Free };
        if holder == self.identity {
            return Decision::Ours;
        }
        if ran_in(holder, self.place.as_deref()) {
            return Decision::Predecessor;
        }
        let observed = match &mut self.observed {
            Some(observed) => {
                observed.update(record, now);
                observed
            }
            observed @ None => observed.insert(Observation::new(record, now)),
        };
        let expires = observed.expires(self.default_duration);
        if now >= expires { Decision::Expired } else { Decision::Wait(expires) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);
    const LEASE: Duration = Duration::from_secs(15);

    fn held_by(by: &str, renewed: i64) -> Option<LeaseRecord> {
        Some(LeaseRecord {
            holder: Some(by.to_owned()),
            duration: Some(LEASE),
            renewed: Some(Timestamp::from_second(renewed).unwrap()),
            transitions: 1,
        })
    }

    #[test]
    fn free_own_and_predecessors_leases_are_acquired_at_once() {
        let now = Instant::now();
        let mut election = Election::new("2", Some("pod"), "host", LEASE);
        assert_eq!(election.identity, "pod_2");
        assert_eq!(election.observe(None, now), Decision::Free);
        assert_eq!(election.observe(Some(LeaseRecord::default()), now), Decision::Free);
        assert_eq!(election.observe(held_by("pod_2", 1), now), Decision::Ours);
        assert_eq!(election.observe(held_by("pod_1", 1), now), Decision::Predecessor);
        assert_eq!(election.observe(held_by("pod", 1), now), Decision::Wait(now + LEASE));
        assert_eq!(election.observe(held_by("pod-2_1", 1), now), Decision::Wait(now + LEASE));
    }

    #[test]
    fn without_a_place_even_the_same_host_waits() {
        let now = Instant::now();
        let mut election = Election::new("2", None, "host", LEASE);
        assert_eq!(election.observe(held_by("host_1", 1), now), Decision::Wait(now + LEASE));
    }

    #[test]
    fn lease_expires_by_the_observers_clock_since_the_last_change() {
        let start = Instant::now();
        let mut election = Election::new("2", None, "host", S);
        // The holder's clock is a century off, which does not matter.
        assert_eq!(election.observe(held_by("other_1", -1_000_000_000), start), Decision::Wait(start + LEASE));
        assert_eq!(
            election.observe(held_by("other_1", -1_000_000_000), start + LEASE - S),
            Decision::Wait(start + LEASE)
        );
        let renewed = start + LEASE - S;
        assert_eq!(election.observe(held_by("other_1", 4_000_000_000), renewed), Decision::Wait(renewed + LEASE));
        assert_eq!(election.observe(held_by("other_1", 4_000_000_000), renewed + LEASE), Decision::Expired);
        // A new holder gets its full duration.
        let later = renewed + LEASE;
        assert_eq!(election.observe(held_by("third_1", 4_000_000_000), later), Decision::Wait(later + LEASE));
    }

    #[test]
    fn wait_for_any_record_is_bounded() {
        let start = Instant::now();
        let mut election = Election::new("2", None, "host", S);
        let endless = || Some(LeaseRecord { duration: Some(Duration::MAX), ..held_by("other_1", 1).unwrap() });
        assert_eq!(election.observe(endless(), start), Decision::Wait(start + MAX_LEASE_DURATION));
        let silent = Some(LeaseRecord { duration: None, ..held_by("other_1", 2).unwrap() });
        assert_eq!(election.observe(silent, start), Decision::Wait(start + S));
    }
}
