//! What is to be told: bounded, in order, and the same thing twice as one Event with a count.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use tokio::time::Instant;

use super::news::News;

/// News that wait to be told.
const WAITING: usize = 1_000;
/// Events that are remembered.
const REMEMBERED: usize = 4_096;
/// The same news within this time of the last are told by the same Event; API servers keep Events for an hour.
const SERIES: Duration = Duration::from_secs(1_800);

/// See the module.
#[derive(Default)]
pub(super) struct Board {
    waiting: VecDeque<News>,
    told: HashMap<u64, Told>,
    hasher: RandomState,
    written: u64,
}

struct Told {
    name: String,
    count: i32,
    last: Instant,
}

/// What to write.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Write {
    /// What it tells.
    pub(super) news: News,
    /// The number of this write, which tells Events of one object apart.
    pub(super) number: u64,
    /// The Event that has told it before, and how often it is told now.
    pub(super) again: Option<(String, i32)>,
}

impl Board {
    /// False if there is no room, and it is forgotten.
    pub(super) fn post(&mut self, news: News) -> bool {
        let room = self.waiting.len() < WAITING;
        if room {
            self.waiting.push_back(news);
        }
        room
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The next thing to write.
    pub(super) fn next(&mut self, now: Instant) -> Option<Write> {
        let news = self.waiting.pop_front()?;
        self.written += 1;
        let told = self.told.get_mut(&self.hasher.hash_one(&news)).filter(|told| now - told.last < SERIES);
        let again = told.map(|told| {
            (told.count, told.last) = (told.count.saturating_add(1), now);
            (told.name.clone(), told.count)
        });
        Some(Write { news, number: self.written, again })
    }

    /// An Event of this name tells these news now.
    pub(super) fn told(&mut self, news: &News, name: String, now: Instant) {
        if self.told.len() >= REMEMBERED {
            self.told.retain(|_, told| now - told.last < SERIES);
        }
        if self.told.len() >= REMEMBERED {
            // Whoever comes again gets a new Event.
            self.told.clear();
        }
        self.told.insert(self.hasher.hash_one(news), Told { name, count: 1, last: now });
    }

    /// The Event that has told these news is not there any more.
    pub(super) fn forget(&mut self, news: &News) {
        self.told.remove(&self.hasher.hash_one(news));
    }
}
