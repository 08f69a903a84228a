//! One replica: its decision, its clocks, its fences, and its link to the API server.

use std::{collections::BTreeMap, time::Duration};

use jiff::{SignedDuration, Timestamp};
use tidewatch_api::leases::Unit;
use tidewatch_cluster::leader::Timings;
use tokio::time::Instant;

use super::super::super::{Effect, EndReason, Ownership, Settings};

/// Milliseconds since the start of the schedule.
pub(super) type Millis = u64;

/// A monotonic clock that runs faster or slower than real time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    base: Instant,
    /// Microseconds that pass in a millisecond.
    rate: u64,
}

impl Clock {
    pub(super) fn new(base: Instant, rate: u64) -> Self {
        Self { base, rate }
    }

    pub(super) fn at(&self, time: Millis) -> Instant {
        self.base + Duration::from_micros(time * self.rate)
    }

    /// Real time at which the clock shows a time, rounded up.
    pub(super) fn real(&self, at: Instant) -> Millis {
        let micros = u64::try_from(at.saturating_duration_since(self.base).as_micros()).unwrap();
        micros.div_ceil(self.rate)
    }
}

/// A fence, and how long requests that passed it may be on their way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fence {
    /// End in real time.
    pub(super) until: Millis,
    /// True if all work had ended when the fence was closed.
    pub(super) is_quiet: bool,
}

/// State of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Process {
    Down,
    Running,
    /// Executes nothing, and resumes later.
    Paused,
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) process: Process,
    /// Number of starts: messages of an earlier process are ignored.
    pub(super) incarnation: u64,
    pub(super) settings: Settings,
    pub(super) clock: Clock,
    /// Error of the wall clock.
    pub(super) wall: i64,
    pub(super) is_partitioned: bool,
    pub(super) ownership: Ownership,
    /// Changes of the log that it has been delivered.
    pub(super) cursor: usize,
    /// Results and other input that waits while the process is paused.
    pub(super) fences: BTreeMap<Unit, Fence>,
    /// Number of the write in flight of each Lease, so that a late response is recognised.
    pub(super) serial: u64,
    pub(super) in_flight: BTreeMap<super::super::LeaseId, u64>,
}

impl Node {
    pub(super) fn new(settings: Settings, clock: Clock) -> Self {
        let ownership = Ownership::new(settings.clone(), 1, clock.at(0));
        Self {
            process: Process::Down,
            incarnation: 0,
            settings,
            clock,
            wall: 0,
            is_partitioned: false,
            ownership,
            cursor: 0,
            fences: BTreeMap::new(),
            serial: 0,
            in_flight: BTreeMap::new(),
        }
    }

    /// Starts a new process.
    pub(super) fn start(&mut self, index: usize, now: Millis) {
        self.incarnation += 1;
        self.process = Process::Running;
        self.settings.identity = format!("replica-{index}_{}", self.incarnation);
        self.ownership = Ownership::new(self.settings.clone(), now + 7, self.clock.at(now));
        self.in_flight.clear();
        self.cursor = 0;
    }

    /// Ends the process: its fences end now.
    pub(super) fn kill(&mut self, now: Millis) {
        self.process = Process::Down;
        self.fences.values_mut().for_each(|fence| fence.until = fence.until.min(now));
    }

    pub(super) fn wall(&self, now: Millis) -> Timestamp {
        let millis = i64::try_from(now).unwrap() + self.wall;
        Timestamp::from_second(1_800_000_000).unwrap().checked_add(SignedDuration::from_millis(millis)).unwrap()
    }

    /// Applies changes to the fences; returns those that opened.
    pub(super) fn apply(&mut self, effects: &[Effect], until: Option<Instant>, now: Millis) -> Vec<Unit> {
        let mut opened = Vec::new();
        let until = until.map(|until| self.clock.real(until));
        for effect in effects {
            match effect {
                Effect::Acquired(unit) => {
                    let until = until.unwrap_or(now);
                    self.fences.insert(*unit, Fence { until, is_quiet: false });
                    opened.push(*unit);
                }
                Effect::HandOver(_) => {}
                Effect::Ended(unit, reason) => {
                    if let Some(fence) = self.fences.get_mut(unit) {
                        fence.until = fence.until.min(now);
                        fence.is_quiet = *reason == EndReason::HandedOver;
                    }
                }
            }
        }
        let Some(until) = until else { return opened };
        for fence in self.fences.values_mut().filter(|fence| now < fence.until) {
            fence.until = until;
        }
        opened
    }
}

/// Durations of all replicas.
pub(in crate::shards::ownership) fn timings() -> Timings {
    Timings::of(Duration::from_secs(15))
}
