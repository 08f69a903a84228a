//! Who may take the Lease, and when. Pure: it is told what was read and what time it is.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

/// No Lease is waited for longer, whatever it says.
const LONGEST: Duration = Duration::from_secs(300);

/// What a Lease says, as far as it matters here. Two that are equal say that nothing was renewed meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    /// Who has it; `None` when it was given back.
    pub(super) holder: Option<String>,
    /// For how long, after each renewal.
    pub(super) duration: Option<Duration>,
    /// The holder's wall clock at the last renewal. Only compared for being the same.
    pub(super) renewed: Option<Timestamp>,
    /// How often it went from one holder to another.
    pub(super) transitions: i32,
}

/// What a candidate does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Write itself into the Lease that was read, or make it.
    Take(Why),
    /// Look again. If nothing changes, the Lease expires then.
    Wait(Instant),
}

/// Why a Lease may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// Nobody has it.
    Free,
    /// An earlier write of ours landed although its answer was lost.
    Ours,
    /// Its holder ran where we run now, where there is one at a time.
    Predecessor,
    /// It was not renewed.
    Expired,
}

/// One candidate's memory.
#[derive(Debug)]
pub(super) struct Election {
    me: String,
    place: Option<String>,
    own: Duration,
    seen: Option<(Record, Instant)>,
}

impl Election {
    /// `own` is how long a Lease holds that does not say it. `place` never runs two candidates at a time.
    pub(super) fn new(instance: &str, place: Option<&str>, host: &str, own: Duration) -> Self {
        let me = format!("{}_{instance}", place.unwrap_or(host));
        Self { me, place: place.map(str::to_owned), own, seen: None }
    }

    /// The identity of this candidate: no other has it, nor has its own successor.
    pub(super) fn me(&self) -> &str {
        &self.me
    }

    /// Judges what was just read; `None` when there is no Lease.
    pub(super) fn look(&mut self, record: Option<Record>, now: Instant) -> Step {
        let Some(record) = record else {
            self.seen = None;
            return Step::Take(Why::Free);
        };
        let Some(holder) = record.holder.as_deref() else { return Step::Take(Why::Free) };
        if holder == self.me {
            return Step::Take(Why::Ours);
        }
        let from = holder.rsplit_once('_').map(|(place, _)| place);
        if self.place.is_some() && from == self.place.as_deref() {
            return Step::Take(Why::Predecessor);
        }
        let duration = record.duration.unwrap_or(self.own).min(LONGEST);
        let since = match &self.seen {
            Some((seen, since)) if *seen == record => *since,
            _ => {
                self.seen = Some((record, now));
                now
            }
        };
        let expires = since + duration;
        if now >= expires { Step::Take(Why::Expired) } else { Step::Wait(expires) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);
    const LEASE: Duration = Duration::from_secs(15);

    fn held(by: &str, renewed: i64) -> Option<Record> {
        Some(Record {
            holder: Some(by.to_owned()),
            duration: Some(LEASE),
            renewed: Some(Timestamp::from_second(renewed).unwrap()),
            transitions: 1,
        })
    }

    #[test]
    fn what_is_free_or_ours_or_left_behind_is_taken_at_once() {
        let now = Instant::now();
        let mut election = Election::new("2", Some("pod"), "host", LEASE);
        assert_eq!(election.me(), "pod_2");
        assert_eq!(election.look(None, now), Step::Take(Why::Free));
        assert_eq!(election.look(Some(Record::default()), now), Step::Take(Why::Free));
        assert_eq!(election.look(held("pod_2", 1), now), Step::Take(Why::Ours));
        assert_eq!(election.look(held("pod_1", 1), now), Step::Take(Why::Predecessor));
        assert_eq!(election.look(held("pod", 1), now), Step::Wait(now + LEASE));
        assert_eq!(election.look(held("pod-2_1", 1), now), Step::Wait(now + LEASE));
    }

    #[test]
    fn without_a_place_even_the_same_host_is_waited_for() {
        let now = Instant::now();
        let mut election = Election::new("2", None, "host", LEASE);
        assert_eq!(election.look(held("host_1", 1), now), Step::Wait(now + LEASE));
    }

    #[test]
    fn it_expires_by_our_clock_since_the_record_last_changed() {
        let start = Instant::now();
        let mut election = Election::new("2", None, "host", S);
        // Renewed in another century: no matter.
        assert_eq!(election.look(held("other_1", -1_000_000_000), start), Step::Wait(start + LEASE));
        assert_eq!(election.look(held("other_1", -1_000_000_000), start + LEASE - S), Step::Wait(start + LEASE));
        let renewed = start + LEASE - S;
        assert_eq!(election.look(held("other_1", 4_000_000_000), renewed), Step::Wait(renewed + LEASE));
        assert_eq!(election.look(held("other_1", 4_000_000_000), renewed + LEASE), Step::Take(Why::Expired));
        // Another holder, seen for the first time, has its whole time.
        let later = renewed + LEASE;
        assert_eq!(election.look(held("third_1", 4_000_000_000), later), Step::Wait(later + LEASE));
    }

    #[test]
    fn no_record_can_be_waited_for_without_end() {
        let start = Instant::now();
        let mut election = Election::new("2", None, "host", S);
        let endless = || Some(Record { duration: Some(Duration::MAX), ..held("other_1", 1).unwrap() });
        assert_eq!(election.look(endless(), start), Step::Wait(start + LONGEST));
        let silent = Some(Record { duration: None, ..held("other_1", 2).unwrap() });
        assert_eq!(election.look(silent, start), Step::Wait(start + S));
    }
}
