//! This replica's own membership.

use tidewatch_cluster::leader::Timings;
use tokio::time::Instant;

/// A membership Lease that this replica holds.
#[derive(Debug)]
pub(super) struct Session {
    /// Number of the Lease.
    pub(super) number: u8,
    /// The resourceVersion of the last write; `None` when the Lease must be read before it is written.
    pub(super) version: Option<String>,
    /// The resourceVersion of the last successful write.
    pub(super) written: String,
    /// Beginning of the first write since the watch last delivered the newest one.
    pub(super) undelivered: Option<Instant>,
    /// End of all fences of this replica, unless another write succeeds.
    pub(super) until: Instant,
    /// Time of the next renewal.
    pub(super) due: Instant,
    /// True once the Lease says that this replica leaves.
    pub(super) is_leaving: bool,
    /// True once this replica may claim shards.
    pub(super) is_admitted: bool,
}

impl Session {
    /// A membership since a write that began at `began`.
    pub(super) fn new(number: u8, version: String, began: Instant, timings: &Timings) -> Self {
        Self {
            number,
            version: Some(version.clone()),
            written: version,
            undelivered: Some(began),
            until: began + timings.valid,
            due: began + timings.renew,
            is_leaving: false,
            is_admitted: false,
        }
    }

    /// Records a successful renewal.
    pub(super) fn renewed(&mut self, version: String, began: Instant, timings: &Timings) {
        let undelivered = self.undelivered.or(Some(began));
        let renewed = Self::new(self.number, version, began, timings);
        *self = Self { is_leaving: self.is_leaving, is_admitted: self.is_admitted, undelivered, ..renewed };
    }

    /// Takes the resourceVersion of a record of the watch.
    pub(super) fn delivered(&mut self, version: &str) {
        if self.written == version {
            self.undelivered = None;
        }
    }

    /// Records a renewal without a known result: the Lease is read before the next one.
    pub(super) fn uncertain(&mut self, due: Instant) {
        (self.version, self.due) = (None, due);
    }
}
