//! Files that are read again and again: what is good is taken into use, else the last good content stays; each fault is said once.

use std::{error::Error, mem, time::Duration};

use super::Metrics;

/// How often files are read.
pub(crate) const POLL: Duration = Duration::from_secs(5);

/// See the module.
pub(crate) struct Latest<C> {
    /// For the log, in the plural: which files.
    what: &'static str,
    used: C,
    /// Was refused and said.
    refused: Option<C>,
    unreadable: bool,
}

impl<C: PartialEq> Latest<C> {
    /// This content is in use.
    pub(crate) const fn new(what: &'static str, used: C) -> Self {
        Self { what, used, refused: None, unreadable: false }
    }

    /// What is in use.
    pub(crate) const fn used(&self) -> &C {
        &self.used
    }

    /// What was read, if it is to be tried: it is not in use, and was not refused.
    pub(crate) fn news<E: Error + 'static>(&mut self, read: Result<C, E>) -> Option<C> {
        match read {
            Ok(contents) => {
                self.unreadable = false;
                (contents != self.used && self.refused.as_ref() != Some(&contents)).then_some(contents)
            }
            // A folder that is just being swapped reads well at the next look.
            Err(error) => {
                if !mem::replace(&mut self.unreadable, true) {
                    tracing::warn!(error = &error as &dyn Error, "{} are not readable", self.what);
                }
                None
            }
        }
    }

    /// Takes note of what became of such a content.
    pub(crate) fn tried(&mut self, contents: C, result: anyhow::Result<()>, metrics: &Metrics) {
        metrics.reloaded(result.is_ok());
        match result {
            Ok(()) => (self.used, self.refused) = (contents, None),
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "{} are refused; the last good ones stay", self.what);
                self.refused = Some(contents);
            }
        }
    }
}
