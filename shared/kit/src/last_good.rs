//! Files that are polled: valid content is taken into use, otherwise the last good content stays. Each fault is logged once.

use std::{
    fs, io, mem,
    path::{Path, PathBuf},
    time::Duration,
};

use thiserror::Error;

/// Reads after which rejected content is tried again, if that costs more than a look at the clock.
pub const RETRY_READS: u8 = 12;

/// Interval between two reads of the files.
pub const FILE_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// A file is not readable.
#[derive(Debug, Error)]
#[error("read {path}")]
pub struct ReadFileError {
    path: PathBuf,
    source: io::Error,
}

/// Reads a file.
///
/// # Errors
/// [`ReadFileError`].
pub fn read_file(path: impl AsRef<Path>) -> Result<Vec<u8>, ReadFileError> {
    let path = path.as_ref();
    fs::read(path).map_err(|source| ReadFileError { path: path.to_owned(), source })
}

/// Tracks which content of files is in use, and which was rejected.
pub struct LastGood<C> {
    /// Name of the files in log messages, plural.
    label: &'static str,
    in_use: C,
    /// Content that was rejected and logged.
    rejected: Option<C>,
    /// Attempts at rejected content; `None` if it stays rejected.
    retry: Option<Retry>,
    unreadable: bool,
}

struct Retry {
    /// Reads between two attempts.
    interval: u8,
    /// Reads until the next attempt.
    left: u8,
}

impl<C: PartialEq> LastGood<C> {
    /// Starts with content that is in use.
    pub const fn new(label: &'static str, in_use: C) -> Self {
        Self { label, in_use, rejected: None, retry: None, unreadable: false }
    }

    /// Tries rejected content again after this many reads, such as a certificate that is not valid yet.
    #[must_use]
    pub fn retrying(self, interval: u8) -> Self {
        Self { retry: Some(Retry { interval, left: interval }), ..self }
    }

    /// Content in use.
    pub const fn in_use(&self) -> &C {
        &self.in_use
    }

    /// Returns content for the caller to try: it is not in use, and was not rejected already, or is due to be tried again.
    pub fn changed<E: std::error::Error + 'static>(&mut self, read: Result<C, E>) -> Option<C> {
        match read {
            Ok(contents) => {
                self.unreadable = false;
                let is_due = self.rejected.as_ref() != Some(&contents) || self.is_retry_due();
                (contents != self.in_use && is_due).then_some(contents)
            }
            // While the symlink of a mounted volume is being swapped, reads fail; the next poll succeeds.
            Err(error) => {
                if !mem::replace(&mut self.unreadable, true) {
                    crate::log_error!(warn, &error, "{} are not readable", self.label);
                }
                None
            }
        }
    }

    /// Records the result of trying changed content. Returns true if this content is rejected for the first time.
    pub fn record(&mut self, contents: C, result: anyhow::Result<()>) -> bool {
        match result {
            Ok(()) => {
                self.in_use = contents;
                self.rejected = None;
                false
            }
            Err(error) => {
                let is_new = self.rejected.as_ref() != Some(&contents);
                if is_new {
                    tracing::error!(
                        error = format!("{error:#}"),
                        "{} are refused; the last good ones stay",
                        self.label
                    );
                }
                self.rejected = Some(contents);
                if let Some(retry) = &mut self.retry {
                    retry.left = retry.interval;
                }
                is_new
            }
        }
    }

    /// Counts a read of rejected content.
    fn is_retry_due(&mut self) -> bool {
        let Some(retry) = &mut self.retry else { return false };
        retry.left = retry.left.saturating_sub(1);
        retry.left == 0
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn read(content: &str) -> io::Result<String> {
        Ok(content.to_owned())
    }

    #[test]
    fn rejected_content_is_tried_again_only_where_it_may_become_valid() {
        for (retries, expected) in [(false, vec![0]), (true, vec![0, 12, 24])] {
            let files = LastGood::new("Files", "good".to_owned());
            let mut files = if retries { files.retrying(RETRY_READS) } else { files };
            let mut tried = Vec::new();
            for poll in 0..30 {
                assert_eq!(files.changed(read("good")), None);
                if let Some(content) = files.changed(read("bad")) {
                    tried.push(poll);
                    files.record(content, Err(anyhow::anyhow!("not yet")));
                }
            }
            assert_eq!(tried, expected);
            assert_eq!(files.changed(read("better")).as_deref(), Some("better"));
            files.record("better".to_owned(), Ok(()));
            assert_eq!((files.changed(read("better")), files.in_use().as_str()), (None, "better"));
        }
    }
}
