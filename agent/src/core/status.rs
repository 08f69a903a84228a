//! What `status` shows of index and outbox. Looks and changes nothing.

use tidewatch_shared::{
    heartbeat::WatchState,
    identity::{Epoch, Instance, RuntimeId},
};
use tokio::time::Instant;

use super::Core;
use crate::status::Answered;

/// Index and outbox at one instant.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) runtime: RuntimeId,
    pub(crate) epoch: Epoch,
    pub(crate) sequence: u64,
    /// Every event up to here was accepted.
    pub(crate) accepted: u64,
    /// Which receiver answered last.
    pub(crate) instance: Option<Instance>,
    /// A heartbeat was made.
    pub(crate) beats: bool,
    /// What was said to the last one that was answered.
    pub(crate) heartbeat: Option<Answered>,
    pub(crate) plan_revision: Option<String>,
    pub(crate) plan_error: Option<String>,
    pub(crate) waiting: usize,
    pub(crate) parked: usize,
    pub(crate) unsettled: usize,
    /// Times that the receiver lacked something that had been sent.
    pub(crate) gaps: u64,
    /// Watches that it asked to be told anew.
    pub(crate) resends: u64,
    /// Without their digests.
    pub(crate) watches: Vec<WatchState>,
}

impl Core {
    /// What there is to tell people.
    pub(crate) fn account(&self, now: Instant) -> Account {
        self.with(|state| {
            let (outbox, heard) = (&state.outbox, &state.heard);
            let (runtime, epoch, sequence, instance) = outbox.whereabouts();
            Account {
                runtime: runtime.clone(),
                epoch,
                sequence,
                accepted: outbox.accepted(),
                instance,
                beats: heard.made,
                heartbeat: heard.told(epoch, now),
                plan_revision: state.plan_revision.clone(),
                plan_error: state.plan_error.clone(),
                waiting: outbox.waiting(),
                parked: outbox.parked(),
                unsettled: outbox.unsettled(),
                gaps: outbox.gaps(),
                resends: heard.resends,
                watches: state.watches.iter().map(|(name, watched)| watched.state(name, None, now)).collect(),
            }
        })
    }
}
