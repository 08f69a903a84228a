//! Status of index and outbox.

use serde::{Deserialize, Serialize};
use tidewatch_shared::{
    heartbeat::WatchState,
    identity::{Epoch, Instance},
};
use tokio::time::Instant;

use super::{Core, EventPath, LastHeartbeat};
use crate::outbox::EpochState;

/// Status of the runtime's watches and events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Runtime {
    /// ID of the runtime.
    pub id: String,
    /// Current epoch of the sequences.
    pub epoch: Epoch,
    /// Last sequence assigned to an event.
    pub sequence: u64,
    /// Sequence of this epoch up to which all events were accepted.
    pub accepted: u64,
    /// Receiver instance that answered last.
    pub instance: Option<Instance>,
    /// The event path by this agent's own evidence; the condition `EventPath` has the receiver's.
    pub path: EventPath,
    /// Response to the last answered heartbeat; absent before.
    pub heartbeat: Option<LastHeartbeat>,
    /// Revision of the plan in force.
    pub plan_revision: Option<String>,
    /// Error of the newest plan or settings, or of reading them.
    pub plan_error: Option<String>,
    /// Events waiting to be sent.
    pub waiting: usize,
    /// Parked events, which cannot be sent.
    pub parked: usize,
    /// Sent events that are not settled.
    pub unsettled: usize,
    /// Number of times since start that the receiver had lost accepted events; each causes a resend of all unsettled
    /// events.
    pub gaps: u64,
    /// Resends since start that the receiver requested, counted per watch.
    pub resends: u64,
    /// State of each watch of the plan.
    pub watches: Vec<WatchState>,
}

impl Core {
    /// The status at `now`; `canary` is the age of the canary in seconds.
    pub(crate) fn snapshot(&self, now: Instant, canary: Option<u64>) -> Runtime {
        self.with(|state| {
            let (outbox, heartbeats) = (&state.outbox, &state.heartbeats);
            let EpochState { epoch, sequence, accepted, .. } = outbox.epoch_state;
            let mut runtime = Runtime {
                id: outbox.runtime.as_str().to_owned(),
                epoch,
                sequence,
                accepted,
                instance: outbox.instance,
                path: EventPath::unknown(),
                heartbeat: heartbeats.last_response(epoch, now),
                plan_revision: state.plan_revision.clone(),
                plan_error: state.plan_error.clone(),
                waiting: outbox.waiting(),
                parked: outbox.parked(),
                unsettled: outbox.unsettled(),
                gaps: outbox.gaps(),
                resends: heartbeats.resends,
                watches: state.watch_states(now, |_| None),
            };
            runtime.path = EventPath::of(&runtime, heartbeats.sent, canary);
            runtime
        })
    }
}
