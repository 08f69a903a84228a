//! Read-only view of index and outbox for `status`.

use tidewatch_shared::{
    heartbeat::WatchState,
    identity::{Epoch, Instance, RuntimeId},
};
use tokio::time::Instant;

use super::{Core, LastHeartbeat};

/// Index and outbox at one instant.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) runtime: RuntimeId,
    pub(crate) epoch: Epoch,
    pub(crate) sequence: u64,
    /// Sequence up to which all events were accepted.
    pub(crate) accepted: u64,
    /// Receiver instance that answered last.
    pub(crate) instance: Option<Instance>,
    /// A heartbeat has been sent.
    pub(crate) heartbeat_sent: bool,
    /// The last answered heartbeat.
    pub(crate) heartbeat: Option<LastHeartbeat>,
    pub(crate) plan_revision: Option<String>,
    pub(crate) plan_error: Option<String>,
    pub(crate) waiting: usize,
    pub(crate) parked: usize,
    pub(crate) unsettled: usize,
    /// Number of times that the receiver had lost accepted events.
    pub(crate) gaps: u64,
    /// Resends that the receiver requested.
    pub(crate) resends: u64,
    /// State of each watch, without digests.
    pub(crate) watches: Vec<WatchState>,
}

impl Core {
    /// The state at `now`.
    pub(crate) fn snapshot(&self, now: Instant) -> Snapshot {
        self.with(|state| {
            let (outbox, heartbeats) = (&state.outbox, &state.heartbeats);
            let (runtime, epoch, sequence, instance) = outbox.position();
            Snapshot {
                runtime: runtime.clone(),
                epoch,
                sequence,
                accepted: outbox.accepted(),
                instance,
                heartbeat_sent: heartbeats.sent,
                heartbeat: heartbeats.last_response(epoch, now),
                plan_revision: state.plan_revision.clone(),
                plan_error: state.plan_error.clone(),
                waiting: outbox.waiting(),
                parked: outbox.parked(),
                unsettled: outbox.unsettled(),
                gaps: outbox.gaps(),
                resends: heartbeats.resends,
                watches: state.watches.iter().map(|(name, watched)| watched.state(name, None, now)).collect(),
            }
        })
    }
}
