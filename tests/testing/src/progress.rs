//! Progress lines on stderr, past the capture of the test harness.

use std::{
    io::Write as _,
    time::{Duration, Instant},
};

/// Interval of progress lines of a long step.
const INTERVAL: Duration = Duration::from_secs(15);

/// Writes one line to stderr. Errors are ignored: a closed stderr must not end a run.
pub fn print_line(line: &str) {
    if cfg!(test) {
        // Unit tests run fake builds; their lines belong into the captured output.
        eprintln!("{line}");
    } else {
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    }
}

/// A step that may take minutes: prints a line when it begins, every 15 s, and at its end with its duration.
#[derive(Debug)]
pub struct Step {
    name: String,
    began: Instant,
    last_printed: Instant,
}

impl Step {
    /// Begins the step and prints its name.
    #[must_use]
    pub fn begin(name: impl Into<String>) -> Self {
        let name = name.into();
        print_line(&format!("{name} ..."));
        let now = Instant::now();
        Self { name, began: now, last_printed: now }
    }

    /// Prints a progress line if 15 s have passed; to be called often during the step.
    pub fn tick(&mut self) {
        if self.last_printed.elapsed() >= INTERVAL {
            self.last_printed = Instant::now();
            print_line(&format!("{} ... {} s", self.name, self.began.elapsed().as_secs()));
        }
    }

    /// Prints that the step is done, and its duration.
    pub fn done(self) {
        print_line(&format!("{}: done in {} s", self.name, self.began.elapsed().as_secs()));
    }
}
