//! Access of the admin listener to the fleet: this replica, and the others through it.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures::FutureExt as _;
use serde::{Serialize, de::DeserializeOwned};
use tidewatch_api::identity::Instance;
use tidewatch_cluster::leader::FleetRole;
use tidewatch_contract::admin::{
    Receiver,
    fleet::Report,
    rotation::{RotationProgress, RotationRequest, RotationResponse},
    shards::ShardsReport,
};
use tidewatch_fleet::{
    peers::{AskError, Peers, Responders, Topic},
    table::RuntimeTable,
};
use tidewatch_trust::{RotationError, RotationHandle};
use tokio::{task::spawn_blocking, time::Instant};

use super::{
    report,
    shards::{self, CurrentHolders},
};

/// Access to the fleet and to CA rotations, inactive until this receiver works on runtimes. Clones share one state.
#[derive(Clone)]
pub struct FleetHandle(Arc<Inner>);

struct Inner {
    instance: Instance,
    started: Instant,
    active: OnceLock<ActiveFleet>,
}

/// Parts of an active receiver that the admin listener reads.
pub struct ActiveFleet {
    /// Runtimes of this replica.
    pub table: RuntimeTable,
    /// CA rotations.
    pub rotations: RotationHandle,
    /// Role of the replica that runs the fleet-wide tasks.
    pub role: FleetRole,
    /// All replicas.
    pub peers: Arc<dyn Peers>,
    /// Holders of the shards.
    pub holders: CurrentHolders,
}

impl FleetHandle {
    /// Makes the handle of a receiver that is not active yet. Reports show the instance of the process.
    #[must_use]
    pub fn new(instance: Instance) -> Self {
        Self(Arc::new(Inner { instance, started: Instant::now(), active: OnceLock::new() }))
    }

    /// Connects the parts of the receiver that became active, and lets `responders` answer other replicas from them. Only the
    /// first call has an effect: a process becomes active once.
    pub fn activate(&self, active: ActiveFleet, responders: &Responders) {
        let table = active.table.clone();
        let rotations = active.rotations.clone();
        let role = active.role.clone();
        if self.0.active.set(active).is_err() {
            return;
        }
        responders.set(Topic::Report, Arc::new(move |_| answer_report(table.clone()).boxed()));
        let progress = rotations.progress.clone();
        let held = role.clone();
        let respond = move || if_held(&held, || write(&progress.borrow().as_deref()));
        responders.set(Topic::RotationProgress, Arc::new(move |_| std::future::ready(respond()).boxed()));
        let respond = move |question: Bytes| answer_rotation(rotations.clone(), role.clone(), question).boxed();
        responders.set(Topic::RotateCa, Arc::new(respond));
    }

    /// Progress of the CA rotation, as the replica with the fleet role knows it; `None` without a built-in CA, and while this
    /// receiver is inactive.
    pub(super) async fn rotation(&self) -> Result<Option<RotationProgress>, AskError> {
        let Some(ActiveFleet { rotations, role, peers, .. }) = self.0.active.get() else { return Ok(None) };
        if role.is_held() {
            return Ok(rotations.progress.borrow().as_deref().cloned());
        }
        read(&peers.ask_fleet_holder(Topic::RotationProgress, Bytes::new()).await?)
    }

    /// Requests a CA rotation of the replica with the fleet role; `None` while this receiver is inactive.
    pub(super) async fn rotate(
        &self,
        request: RotationRequest,
    ) -> Result<Option<Result<RotationResponse, RotationError>>, AskError> {
        let Some(ActiveFleet { rotations, role, peers, .. }) = self.0.active.get() else { return Ok(None) };
        if role.is_held() {
            return Ok(Some(rotations.request(request).await));
        }
        Ok(Some(read(&peers.ask_fleet_holder(Topic::RotateCa, write(&request)?).await?)?))
    }

    /// Report of the fleet now, from the answers of all replicas; without runtimes while this receiver is inactive.
    pub(super) async fn report(&self) -> Result<Report, AskError> {
        let receiver = self.receiver();
        let Some(ActiveFleet { peers, .. }) = self.0.active.get() else {
            return Ok(report::report(receiver, Vec::new()));
        };
        let answers = peers.ask_all(Topic::Report, Bytes::new()).await?;
        // Thousands of runtimes take some hundred milliseconds, in which this thread runs nothing else.
        let merged = spawn_blocking(|| report::merge(receiver, answers)).await;
        merged.ok().and_then(Result::ok).ok_or(AskError::Unavailable)
    }

    /// Report of the shards, as this replica knows them.
    pub(super) fn shards(&self) -> ShardsReport {
        let active = self.0.active.get();
        let ownership =
            active.map(|ActiveFleet { table, holders, .. }| shards::ownership(holders(), table.kymas_by_shard()));
        ShardsReport { receiver: self.receiver(), ownership }
    }

    fn receiver(&self) -> Receiver {
        report::receiver(self.0.instance, self.0.started.elapsed(), self.0.active.get().is_some())
    }
}

/// Lists the runtimes of this replica, on a thread of its own: the caller's may be one that serves agents.
async fn answer_report(table: RuntimeTable) -> Result<Bytes, AskError> {
    spawn_blocking(move || write(&table.views())).await.map_err(|_| AskError::Unavailable)?
}

/// Requests a rotation for another replica.
async fn answer_rotation(rotations: RotationHandle, role: FleetRole, question: Bytes) -> Result<Bytes, AskError> {
    let request: RotationRequest = read(&question)?;
    if !role.is_held() {
        return Err(AskError::NoFleetHolder);
    }
    write(&rotations.request(request).await)
}

/// Answers in the replica with the fleet role alone.
fn if_held(role: &FleetRole, answer: impl FnOnce() -> Result<Bytes, AskError>) -> Result<Bytes, AskError> {
    if role.is_held() { answer() } else { Err(AskError::NoFleetHolder) }
}

fn write(value: &impl Serialize) -> Result<Bytes, AskError> {
    serde_json::to_vec(value).map(Bytes::from).map_err(|_| AskError::Unavailable)
}

/// Reads an answer; one that is malformed comes from another version.
fn read<T: DeserializeOwned>(answer: &[u8]) -> Result<T, AskError> {
    serde_json::from_slice(answer).map_err(|_| AskError::Unavailable)
}

#[cfg(test)]
mod tests;
