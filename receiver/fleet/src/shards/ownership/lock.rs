//! The Lease of the unsharded receiver, which all sharded replicas keep alive together: while they do, an older binary
//! waits, and while an older binary holds it, no shard is held.
//!
//! An older binary acquires it when it has not changed for its duration. So no fence may outlive the *commit* of the last
//! renewal by more than the valid part of that duration. An own renewal was committed after its request left. A renewal
//! of another replica is bounded by the order of the watch: it was committed after the last own write that the watch
//! delivered before it.

use std::time::Duration;

use tidewatch_cluster::leader::Timings;
use tokio::time::Instant;

use super::super::record::Record;

/// What this replica knows of the last renewal by a sharded replica.
#[derive(Debug, Default)]
pub(super) struct Lock {
    /// The last renewal was not committed before this time.
    renewed: Option<Instant>,
    /// Duration in the last record of another replica, or that of this one after its own write, which records no shorter one.
    duration: Option<Duration>,
    /// The resourceVersion that the last own write replaced: the view may still show it.
    replaced: Option<String>,
    /// Last successful own write: its resourceVersion, and the time at which it began.
    written: Option<(String, Instant)>,
}

impl Lock {
    /// End of all fences, unless there is another renewal; `None` if no renewal is known.
    pub(super) fn until(&self, timings: &Timings) -> Option<Instant> {
        Some(self.renewed? + Timings::of(self.duration.unwrap_or(timings.lease).min(timings.lease)).valid)
    }

    /// Last known renewal: not committed before this time.
    pub(super) fn renewed(&self) -> Option<Instant> {
        self.renewed
    }

    /// Records a successful own write that began at `began` and replaced a resourceVersion.
    pub(super) fn written(&mut self, version: String, replaced: Option<String>, began: Instant, timings: &Timings) {
        self.renewed = self.renewed.max(Some(began));
        self.duration = Some(timings.lease);
        (self.replaced, self.written) = (replaced, Some((version, began)));
    }

    /// Takes a record that the watch delivered after the own write that began at `anchor`; `is_renewal` if the fields
    /// changed that another receiver compares. Returns the beginning of the own write that this record is, if it is one.
    pub(super) fn observe(
        &mut self,
        record: &Record,
        holder: &str,
        is_renewal: bool,
        anchor: Option<Instant>,
    ) -> Option<Instant> {
        if let Some((version, began)) = &self.written
            && *version == record.version
        {
            return Some(*began);
        }
        if record.holder() == Some(holder) {
            if is_renewal {
                self.renewed = self.renewed.max(anchor);
                self.duration = record.lease.duration;
            }
        } else if self.replaced.as_ref() != Some(&record.version) {
            // Another receiver holds it, or none.
            *self = Self::default();
        }
        None
    }

    /// Forgets the last renewal: the Lease was deleted.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }
}
