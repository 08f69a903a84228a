//! Bounded queue of Events, in which each object has a share. Equal Events within half an hour become one Event with a
//! series count.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use tokio::time::Instant;

use super::event_diff::{PendingEvent, Regarding};

/// Maximum number of pending Events.
const CAPACITY: usize = 2_000;
/// Events of one object that are accepted at once, enough for a Kyma with all its modules. A user can select 500 modules, and
/// cause an Event for each; thirty such users fill half of the queue.
const BURST: u32 = 32;
/// Interval of the Events of one object beyond them: 100 objects then take the whole rate of the writes.
const INTERVAL: Duration = Duration::from_secs(5);
/// Objects without debt are forgotten when there are this many, or twice as many as after the last time.
const PRUNE_AT: usize = 1_024;
/// Maximum number of written Events that are remembered for a series.
const MAX_REMEMBERED: usize = 4_096;
/// Longest interval between two equal Events of one series; API servers delete Events after an hour by default.
const SERIES: Duration = Duration::from_secs(1_800);

/// See the module documentation.
#[derive(Default)]
pub(super) struct EventQueue {
    pub(super) pending: VecDeque<PendingEvent>,
    /// Written Events by the hash of their content.
    published: HashMap<u64, Published>,
    hasher: RandomState,
    /// Number of the last write.
    number: u64,
    shares: Shares,
}

/// Time at which all Events of an object so far are paid for (GCRA's theoretical arrival time).
#[derive(Default)]
struct Shares {
    paid: HashMap<u64, Instant>,
    prune_at: usize,
}

/// Reason for which an Event is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DropReason {
    /// The queue is full.
    Full,
    /// The object has used up its share.
    Share,
}

struct Published {
    name: String,
    count: i32,
    last: Instant,
}

/// Next write.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct EventWrite {
    /// Content of the Event.
    pub(super) event: PendingEvent,
    /// Number of this write, which distinguishes the names of Events about one object.
    pub(super) number: u64,
    /// Name and new count of the existing Event, if this write continues its series.
    pub(super) series: Option<(String, i32)>,
}

impl EventQueue {
    /// Appends an Event, or drops it.
    ///
    /// # Errors
    /// [`DropReason`].
    pub(super) fn post(&mut self, event: PendingEvent, now: Instant) -> Result<(), DropReason> {
        if !self.shares.charge(self.hasher.hash_one(share_key(&event.regarding)), now) {
            return Err(DropReason::Share);
        }
        if self.pending.len() >= CAPACITY {
            return Err(DropReason::Full);
        }
        self.pending.push_back(event);
        Ok(())
    }

    /// Removes the first Event and returns its write.
    pub(super) fn next(&mut self, now: Instant) -> Option<EventWrite> {
        let event = self.pending.pop_front()?;
        self.number += 1;
        let published = self.published.get_mut(&self.hasher.hash_one(&event));
        let series = published.filter(|published| now - published.last < SERIES).map(|published| {
            (published.count, published.last) = (published.count.saturating_add(1), now);
            (published.name.clone(), published.count)
        });
        Some(EventWrite { event, number: self.number, series })
    }

    /// Records the name of a created Event, for later writes of its series.
    pub(super) fn published(&mut self, event: &PendingEvent, name: String, now: Instant) {
        if self.published.len() >= MAX_REMEMBERED {
            self.published.retain(|_, published| now - published.last < SERIES);
        }
        if self.published.len() >= MAX_REMEMBERED {
            // Later equal Events begin a new series.
            self.published.clear();
        }
        self.published.insert(self.hasher.hash_one(event), Published { name, count: 1, last: now });
    }

    /// Ends the series of an Event after a failed write; the Event may not exist.
    pub(super) fn forget(&mut self, event: &PendingEvent) {
        self.published.remove(&self.hasher.hash_one(event));
    }
}

impl Shares {
    /// Charges one Event of an object; returns false if its share is used up.
    fn charge(&mut self, object: u64, now: Instant) -> bool {
        if self.paid.len() >= self.prune_at.max(PRUNE_AT) {
            self.paid.retain(|_, paid| *paid > now);
            self.prune_at = self.paid.len().saturating_mul(2);
        }
        let paid = self.paid.entry(object).or_insert(now);
        let is_allowed = paid.saturating_duration_since(now) <= INTERVAL * (BURST - 1);
        if is_allowed {
            *paid = (*paid).max(now) + INTERVAL;
        }
        is_allowed
    }
}

/// The object without its uid: one that is deleted and created again has no new share.
fn share_key(Regarding { kind, namespace, name, uid: _ }: &Regarding) -> (&str, &str, &str) {
    (kind, namespace, name)
}
