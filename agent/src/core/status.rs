//! What `status` shows of index and outbox. Looks and changes nothing.

use tidewatch_shared::{
    heartbeat::WatchState,
    identity::{Epoch, Instance, RuntimeId},
};
use tokio::time::Instant;

use super::Core;

/// Index and outbox at one instant.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) runtime: RuntimeId,
    pub(crate) epoch: Epoch,
    pub(crate) sequence: u64,
    /// Which receiver answered last.
    pub(crate) instance: Option<Instance>,
    pub(crate) plan_revision: Option<String>,
    pub(crate) plan_error: Option<String>,
    pub(crate) waiting: usize,
    pub(crate) parked: usize,
    pub(crate) unsettled: usize,
    /// Without their digests.
    pub(crate) watches: Vec<WatchState>,
}

impl Core {
    /// What there is to tell people.
    pub(crate) fn account(&self, now: Instant) -> Account {
        self.with(|state| {
            let outbox = &state.outbox;
            let (runtime, epoch, sequence, instance) = outbox.whereabouts();
            Account {
                runtime: runtime.clone(),
                epoch,
                sequence,
                instance,
                plan_revision: state.plan_revision.clone(),
                plan_error: state.plan_error.clone(),
                waiting: outbox.waiting(),
                parked: outbox.parked(),
                unsettled: outbox.unsettled(),
                watches: state.watches.iter().map(|(name, watched)| watched.state(name, None, now)).collect(),
            }
        })
    }
}
