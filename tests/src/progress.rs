//! Lines for the person who waits. They go straight to stderr, past the capture of the test harness.

use std::{
    io::Write as _,
    time::{Duration, Instant},
};

/// How often a long step says that it is still going on.
const INTERVAL: Duration = Duration::from_secs(15);

/// Writes one line to stderr. A stderr that is gone is no reason to fail.
pub fn say(line: &str) {
    if cfg!(test) {
        // What the unit tests pretend to build is no news.
        eprintln!("{line}");
    } else {
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    }
}

/// A step that may take minutes: says when it begins, every 15 s that it goes on, and how long it took.
#[derive(Debug)]
pub struct Step {
    what: String,
    began: Instant,
    said: Instant,
}

impl Step {
    /// Begins the step and says so.
    #[must_use]
    pub fn begin(what: impl Into<String>) -> Self {
        let what = what.into();
        say(&format!("{what} ..."));
        let now = Instant::now();
        Self { what, began: now, said: now }
    }

    /// To be called often while the step goes on; writes a line now and then.
    pub fn tick(&mut self) {
        if self.said.elapsed() >= INTERVAL {
            self.said = Instant::now();
            say(&format!("{} ... {} s", self.what, self.began.elapsed().as_secs()));
        }
    }

    /// Says that the step is done and how long it took.
    pub fn done(self) {
        say(&format!("{}: done in {} s", self.what, self.began.elapsed().as_secs()));
    }
}
