//! Interface between the gateway and the table of runtimes.

use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::{
    exchange::{EventsResponse, HeartbeatResponse},
    heartbeat::Heartbeat,
};
use tidewatch_fleet::{
    EventBatch, Verified,
    table::{PlacementError, RuntimeTable},
};
use tokio::time::Instant;

/// Consumer of verified input. It is synchronous: a request awaits nothing between verification and response.
pub trait Intake: Send + Sync + 'static {
    /// Records events at a time in Unix seconds and enqueues their work, in one step.
    ///
    /// # Errors
    /// [`PlacementError`].
    fn events(&self, batch: Verified<EventBatch>, now: i64) -> Result<EventsResponse, PlacementError>;

    /// Records a heartbeat at a time in Unix seconds. Its epoch is that of the signature's nonce.
    ///
    /// # Errors
    /// [`PlacementError`].
    fn heartbeat(&self, heartbeat: Verified<Heartbeat>, now: i64) -> Result<HeartbeatResponse, PlacementError>;

    /// Records that a runtime closed or lost its last connection, or that a heartbeat over one is overdue. Nothing
    /// arrived after `since`.
    fn connection_lost(&self, _: &RuntimeId, _since: Instant) {}
}

impl Intake for RuntimeTable {
    fn events(&self, batch: Verified<EventBatch>, now: i64) -> Result<EventsResponse, PlacementError> {
        Self::events(self, batch, now)
    }

    fn heartbeat(&self, heartbeat: Verified<Heartbeat>, now: i64) -> Result<HeartbeatResponse, PlacementError> {
        Self::heartbeat(self, heartbeat, now)
    }

    fn connection_lost(&self, runtime: &RuntimeId, since: Instant) {
        Self::connection_lost(self, runtime, since);
    }
}
