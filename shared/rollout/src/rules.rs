//! Rules of a staged change, and parts of its messages.

use std::{collections::BTreeSet, time::Duration};

use super::{Rings, Share};

/// Maximum number of runtimes in a message.
pub const MAX_NAMED: usize = 5;

/// Rules of a change.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// Shares of the rings.
    pub rings: Rings,
    /// Minimum duration of a ring.
    pub pause: Duration,
    /// Time after which an upgraded runtime that is not proven has failed.
    pub deadline: Duration,
    /// Share of the runtimes that may fail.
    pub max_failures: Share,
}

/// Parameters of a step.
#[derive(Clone, Copy, Debug)]
pub struct Criteria<'a> {
    /// Rules of the change.
    pub rules: &'a Rules,
    /// An operator confirmed that the change continues in spite of its failures.
    pub is_confirmed: bool,
    /// Current time in Unix seconds.
    pub now: i64,
}

impl Criteria<'_> {
    /// End of the pause of a ring since this time; `None` if it has passed.
    pub fn pause_until(&self, since: i64) -> Option<i64> {
        let pause = i64::try_from(self.rules.pause.as_secs()).unwrap_or(i64::MAX);
        Some(since.saturating_add(pause)).filter(|until| self.now < *until)
    }
}

/// The first [`MAX_NAMED`] names of `count` runtimes, for a message.
pub fn first_names(names: &BTreeSet<String>, count: usize) -> String {
    let first: Vec<_> = names.iter().take(MAX_NAMED).map(String::as_str).collect();
    let more = if count > MAX_NAMED { ", …" } else { "" };
    format!("{}{more}", first.join(", "))
}
