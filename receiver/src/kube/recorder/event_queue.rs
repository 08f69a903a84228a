//! Bounded queue of Events. Equal Events within half an hour become one Event with a series count.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use tokio::time::Instant;

use super::event_diff::PendingEvent;

/// Maximum number of pending Events.
const CAPACITY: usize = 1_000;
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
    /// Appends an Event; returns false if the queue is full, and drops it.
    pub(super) fn post(&mut self, event: PendingEvent) -> bool {
        let has_room = self.pending.len() < CAPACITY;
        if has_room {
            self.pending.push_back(event);
        }
        has_room
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
