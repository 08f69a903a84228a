//! Status of index and outbox.

use tidewatch_contract::admin::agent::Runtime;
use tokio::time::Instant;

use super::{Core, event_path};
use crate::outbox::EpochState;

impl Core {
    /// The status at `now`; `canary` is the age of the canary in seconds.
    pub(crate) fn snapshot(&self, now: Instant, canary: Option<u64>) -> Runtime {
        self.with(|state| {
            let outbox = &state.outbox;
            let heartbeats = &state.heartbeats;
            let EpochState { epoch, sequence, accepted, .. } = outbox.epoch_state;
            let mut runtime = Runtime {
                id: outbox.runtime.as_str().to_owned(),
                epoch,
                sequence,
                accepted,
                instance: outbox.instance,
                path: event_path::unknown(),
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
            runtime.path = event_path::evaluate(&runtime, heartbeats.sent, canary);
            runtime
        })
    }
}
