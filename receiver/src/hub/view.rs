//! A summary of one Kyma for logs, metrics and tests.

use std::time::Duration;

use tidewatch_shared::identity::RuntimeId;

use crate::{
    fleet::{EpochView, PathState},
    key::KymaKey,
    queue::Works,
};

/// What is known of one Kyma and its runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Which Kyma.
    pub key: KymaKey,
    /// Its runtime id, if it has one.
    pub runtime: Option<RuntimeId>,
    /// Whether another Kyma has the same runtime id.
    pub ambiguous: bool,
    /// Whether its path is proven.
    pub path: PathState,
    /// How long ago the last heartbeat came that counted.
    pub last_seen: Option<Duration>,
    /// The agent's version, as it said.
    pub agent_version: Option<String>,
    /// Objects that waited in the agent at the last heartbeat.
    pub waiting: u64,
    /// Events that it could not send.
    pub parked: u64,
    /// Its epochs, in the order in which they came; at most four.
    pub epochs: Vec<EpochView>,
    /// What is wanted of it, now or after its backoff.
    pub wanted: Works,
    /// Whether it is in work.
    pub in_work: bool,
}
