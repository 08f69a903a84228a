//! A receiver without shards, as older versions are: it takes its Lease when it is free or lapsed, renews it, and writes
//! while its fence is open.

use std::time::Duration;

use tidewatch_cluster::leader::{LeaseRecord, Observation};

use super::{
    super::{super::record::Record, LeaseId, Outcome},
    api::ApiServer,
    node::{Clock, Millis, timings},
};

#[derive(Debug)]
pub(super) struct Unsharded {
    pub(super) is_running: bool,
    clock: Clock,
    starts: u64,
    observed: Option<Observation>,
    /// The resourceVersion while it holds the Lease.
    held: Option<String>,
    renewed: Millis,
    /// End of its fence in real time.
    pub(super) until: Millis,
    pub(super) was_active: bool,
}

impl Unsharded {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            is_running: false,
            clock,
            starts: 0,
            observed: None,
            held: None,
            renewed: 0,
            until: 0,
            was_active: false,
        }
    }

    pub(super) fn start(&mut self) {
        (self.is_running, self.observed, self.held) = (true, None, None);
        self.starts += 1;
    }

    /// Ends it: with `releases`, the Lease is given back, after the last request.
    pub(super) fn stop(&mut self, releases: bool, api: &mut ApiServer, now: Millis) {
        self.until = self.until.min(now);
        self.is_running = false;
        if let (true, Some(version)) = (releases, self.held.take()) {
            let mut record = api.get(LeaseId::Unsharded).clone();
            record.lease.holder = None;
            api.swap(LeaseId::Unsharded, &version, record);
        }
    }

    /// Polls and renews once a second.
    pub(super) fn tick(&mut self, api: &mut ApiServer, now: Millis) {
        let timings = timings();
        if self.held.is_some() && now < self.renewed + 5_000 {
            return;
        }
        let record = api.get(LeaseId::Unsharded).clone();
        let me = format!("unsharded_{}", self.starts);
        let at = self.clock.at(now);
        let is_lapsed = match &mut self.observed {
            Some(observed) => {
                observed.update(record.lease.clone(), at);
                at >= observed.expires(Duration::from_secs(15))
            }
            None => {
                self.observed = Some(Observation::new(record.lease.clone(), at));
                false
            }
        };
        let holder = record.holder();
        if holder.is_some() && holder != Some(&*me) && !is_lapsed {
            self.held = None;
            return;
        }
        let seconds = i64::try_from(now).unwrap();
        let lease = LeaseRecord {
            holder: Some(me),
            duration: Some(timings.lease),
            renewed: Some(jiff::Timestamp::from_millisecond(seconds).unwrap()),
            transitions: record.lease.transitions + 1,
        };
        let version = record.version.clone();
        if let Outcome::Written(version) = api.swap(LeaseId::Unsharded, &version, Record { lease, ..record }) {
            (self.held, self.renewed, self.was_active) = (Some(version), now, true);
            self.until = self.clock.real(at + timings.valid);
        }
    }
}
