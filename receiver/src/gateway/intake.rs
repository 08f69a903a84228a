//! What leaves the gateway, and where it goes.

use tidewatch_shared::{
    event::Received,
    exchange::{EventsAnswer, HeartbeatAnswer},
    heartbeat::Heartbeat,
    identity::{Epoch, RuntimeId},
};

use crate::hub::{Hub, Unplaced};

/// Something that a runtime has said and signed. Only the gateway makes it, after certificate, signature and nonce were checked,
/// so whoever holds one holds the proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified<T> {
    runtime: RuntimeId,
    created: i64,
    said: T,
}

impl<T> Verified<T> {
    pub(super) const fn new(runtime: RuntimeId, created: i64, said: T) -> Self {
        Self { runtime, created, said }
    }

    /// Who said it.
    #[must_use]
    pub fn runtime(&self) -> &RuntimeId {
        &self.runtime
    }

    /// Takes it apart: who, when by the signer's clock (Unix seconds), what.
    #[must_use]
    pub fn into_parts(self) -> (RuntimeId, i64, T) {
        (self.runtime, self.created, self.said)
    }
}

/// The events of one request, all of one epoch and one runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The epoch of the signature's nonce and of every event.
    pub epoch: Epoch,
    /// At least one; each an event, or the name and reason of what is refused.
    pub events: Vec<Received>,
}

/// Who takes what was verified. Answers at once: nothing is awaited between a request and its answer.
pub trait Intake: Send + Sync + 'static {
    /// Records events and marks their work wanted, in one step.
    ///
    /// # Errors
    /// [`Unplaced`].
    fn events(&self, batch: Verified<Batch>) -> Result<EventsAnswer, Unplaced>;

    /// Records a heartbeat at a time in Unix seconds. Its epoch is that of the signature's nonce.
    ///
    /// # Errors
    /// [`Unplaced`].
    fn heartbeat(&self, heartbeat: Verified<Heartbeat>, now: i64) -> Result<HeartbeatAnswer, Unplaced>;
}

impl Intake for Hub {
    fn events(&self, batch: Verified<Batch>) -> Result<EventsAnswer, Unplaced> {
        let (runtime, created, Batch { epoch, events }) = batch.into_parts();
        Self::events(self, &runtime, epoch, created, events)
    }

    fn heartbeat(&self, heartbeat: Verified<Heartbeat>, now: i64) -> Result<HeartbeatAnswer, Unplaced> {
        let (runtime, created, heartbeat) = heartbeat.into_parts();
        Self::heartbeat(self, &runtime, created, heartbeat, now)
    }
}
