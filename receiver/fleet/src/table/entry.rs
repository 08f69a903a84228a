//! One Kyma of the table.

use tidewatch_api::identity::RuntimeId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{PathState, Runtime};

/// A Kyma and the state of its runtime.
pub(super) struct Entry {
    pub(super) id: Option<RuntimeId>,
    /// Distinguishes successive Kymas of one name: a reconcile of an earlier one settles nothing.
    pub(super) generation: u64,
    pub(super) runtime: Runtime,
    /// Path state at the last [`RuntimeTable::changed_paths`](super::RuntimeTable::changed_paths).
    pub(super) reported_path: Option<PathState>,
    /// Time from which no write of the replica that served the Kyma before can land.
    pub(super) safe: Option<Instant>,
    /// Acceptance time of the oldest event that no reconcile has started with.
    pub(super) accepted: Option<Instant>,
    /// The agent has caused work since the last reconcile began.
    pub(super) has_new_reports: bool,
    /// Cancelled when the Kyma is removed.
    pub(super) cancellation: CancellationToken,
}

impl Entry {
    /// Records that an event was accepted whose work is enqueued.
    pub(super) fn accept(&mut self, now: Instant) {
        self.accepted.get_or_insert(now);
        self.has_new_reports = true;
    }
}
