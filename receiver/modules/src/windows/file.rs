//! Follows the file of the policy: a policy is taken into use, also with mistakes; otherwise the last good one stays.

use std::{
    fs::File,
    io::{self, Read as _},
    path::PathBuf,
};

use jiff::Timestamp;
use thiserror::Error;
use tidewatch_api::plan::Work;
use tidewatch_fleet::{
    queue::WorkSet,
    recorder::{EventRecorder, PendingEvent, Regarding},
    table::RuntimeTable,
};
use tidewatch_kit::{
    clock::ClockSteps,
    error_levels,
    last_good::{FILE_POLL_INTERVAL, LastGood},
};
use tidewatch_select::windows::{MAX_BYTES, PolicyError};
use tokio::time::{self, Instant, MissedTickBehavior};

use super::MaintenanceWindows;

/// Reason for which the file is not taken into use.
#[derive(Debug, Error)]
enum PolicyFileError {
    /// The file is not readable.
    #[error("read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the read.
        source: io::Error,
    },
    /// The file was read before, and does not exist any more.
    #[error("{0} is gone")]
    Gone(PathBuf),
    /// The content is not a policy.
    #[error("{path}")]
    Policy {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        source: PolicyError,
    },
}

/// The file of the policy.
pub struct PolicyFile {
    path: PathBuf,
    windows: MaintenanceWindows,
    /// Content of the file; `None` if it has not existed yet.
    contents: LastGood<Option<Vec<u8>>>,
    /// The last read failed, which was reported.
    is_unreadable: bool,
    recorder: EventRecorder,
    lease: Regarding,
    clock: ClockSteps,
}

impl PolicyFile {
    /// Reads the file for the first time; it may also be created later, or be invalid: an upgrade that requires a downtime
    /// then waits. Events about the file regard the Lease of the fleet role in `namespace`.
    pub fn open(path: PathBuf, windows: MaintenanceWindows, recorder: EventRecorder, namespace: &str) -> Self {
        let contents = LastGood::new("Maintenance windows", None);
        let lease = Regarding::lease(namespace);
        let clock = ClockSteps::new(Timestamp::now(), Instant::now());
        let mut file = Self { path, windows, contents, is_unreadable: false, recorder, lease, clock };
        if !file.reload() {
            let path = file.path.display();
            tracing::info!(%path, "No policy of maintenance windows is in use");
        }
        file
    }

    /// Polls the file and the system's clock forever. The Kymas that wait for a window are enqueued, up to `per_second` of the
    /// fleet, when the policy or the clock changes.
    pub async fn run(mut self, fleet: RuntimeTable, per_second: u32) -> &'static str {
        let mut poll = time::interval(FILE_POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            poll.tick().await;
            let has_stepped = self.clock.step(Timestamp::now(), Instant::now()).is_some();
            if self.reload() || has_stepped {
                let waiting = self.windows.waiting();
                tracing::info!(has_stepped, kymas = waiting.len(), "Maintenance windows are determined again");
                // Those of this replica wait here.
                fleet.enqueue_paced(waiting, WorkSet::of(&[Work::Kyma]), fleet.share_of_rate(per_second));
            }
        }
    }

    /// Reads the file, and takes it into use if it has changed and is valid. Returns true if it did.
    pub(super) fn reload(&mut self) -> bool {
        let read = self.read();
        match &read {
            Err(error) if !self.is_unreadable => self.report(error),
            _ => {}
        }
        self.is_unreadable = read.is_err();
        let exists = read.as_ref().is_ok_and(Option::is_some);
        let mut is_current = read.as_ref().is_ok_and(|contents| contents == self.contents.in_use());
        let changed = self.contents.changed(read);
        let is_taken = changed.is_some_and(|contents| {
            let applied = self.apply(contents.as_deref()).inspect_err(|error| self.report(error));
            is_current = applied.is_ok();
            self.contents.record(contents, applied.map_err(anyhow::Error::new));
            is_current
        });
        self.windows.0.metrics.read(exists, is_current);
        is_taken
    }

    /// Reads at most one byte more than a policy may have. `None` if the file does not exist.
    fn read(&self) -> Result<Option<Vec<u8>>, PolicyFileError> {
        let limit = u64::try_from(MAX_BYTES).unwrap_or(u64::MAX).saturating_add(1);
        let mut contents = Vec::new();
        let read = File::open(&self.path).and_then(|file| file.take(limit).read_to_end(&mut contents));
        match read {
            Ok(_) => Ok(Some(contents)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(PolicyFileError::Read { path: self.path.clone(), source }),
        }
    }

    fn apply(&self, contents: Option<&[u8]>) -> Result<(), PolicyFileError> {
        let path = || self.path.clone();
        let contents = contents.ok_or_else(|| PolicyFileError::Gone(path()))?;
        let policy = self.windows.parse(contents).map_err(|source| PolicyFileError::Policy { path: path(), source })?;
        let path = self.path.display();
        tracing::info!(%path, rules = policy.rules(), "Maintenance windows are in use");
        let mistakes = policy.mistakes();
        if !mistakes.is_empty() {
            tracing::warn!(%path, count = mistakes.count(), %mistakes, "Maintenance windows have mistakes");
            let note = format!("{path} is in use, with mistakes, which affect only their rule or window: {mistakes}");
            self.post("MaintenanceWindowsPartlyRead", note);
        }
        self.windows.set(policy);
        Ok(())
    }

    /// Posts an Event about a file that is not taken into use.
    fn report(&self, error: &PolicyFileError) {
        let cause = error_levels::line(error);
        let note = format!("the file is not taken into use, windows that were read before stay: {cause}");
        self.post("MaintenanceWindowsRefused", note);
    }

    fn post(&self, reason: &'static str, note: String) {
        self.recorder.publish(vec![PendingEvent::warning(self.lease.clone(), reason, note)]);
    }
}

#[cfg(test)]
mod tests;
