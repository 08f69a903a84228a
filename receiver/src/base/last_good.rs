//! Files that are polled: valid content is taken into use, otherwise the last good content stays. Each fault is logged once.

use std::{mem, time::Duration};

use super::error_levels;

/// Interval between two reads of the files.
pub(crate) const FILE_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Tracks which content of files is in use, and which was rejected.
pub(crate) struct LastGood<C> {
    /// Name of the files in log messages, plural.
    label: &'static str,
    in_use: C,
    /// Content that was rejected and logged.
    rejected: Option<C>,
    unreadable: bool,
}

impl<C: PartialEq> LastGood<C> {
    /// Starts with content that is in use.
    pub(crate) const fn new(label: &'static str, in_use: C) -> Self {
        Self { label, in_use, rejected: None, unreadable: false }
    }

    /// Content in use.
    pub(crate) const fn in_use(&self) -> &C {
        &self.in_use
    }

    /// Returns content that is neither in use nor rejected already, for the caller to try.
    pub(crate) fn changed<E: std::error::Error + 'static>(&mut self, read: Result<C, E>) -> Option<C> {
        match read {
            Ok(contents) => {
                self.unreadable = false;
                (contents != self.in_use && self.rejected.as_ref() != Some(&contents)).then_some(contents)
            }
            // While the symlink of a mounted volume is being swapped, reads fail; the next poll succeeds.
            Err(error) => {
                if !mem::replace(&mut self.unreadable, true) {
                    tracing::warn!(
                        error = error_levels::own(&error),
                        cause = error_levels::cause(&error),
                        "{} are not readable",
                        self.label
                    );
                }
                None
            }
        }
    }

    /// Records the result of trying changed content.
    pub(crate) fn record(&mut self, contents: C, result: anyhow::Result<()>) {
        match result {
            Ok(()) => (self.in_use, self.rejected) = (contents, None),
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "{} are refused; the last good ones stay", self.label);
                self.rejected = Some(contents);
            }
        }
    }
}
