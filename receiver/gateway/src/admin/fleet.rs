//! Access of the admin listener to the fleet: this replica, and the others through it.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures::FutureExt as _;
use tidewatch_api::{identity::Instance, shard::ShardCount};
use tidewatch_cluster::leader::FleetRole;
use tidewatch_contract::admin::{
    Receiver,
    fleet::Report,
    rotation::{RotationProgress, RotationRequest, RotationResponse},
    shards::ShardsReport,
};
use tidewatch_fleet::{
    evidence::{Replicas, decode, encode},
    peers::{AskError, Topic},
    shards::HoldersHandle,
    table::RuntimeTable,
};
use tidewatch_trust::{RotationError, RotationHandle};
use tokio::{task::spawn_blocking, time::Instant};

use super::{report, shards};

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
    /// All replicas, whose questions it answers.
    pub replicas: Replicas,
    /// Holders of the shards.
    pub holders: HoldersHandle,
    /// Number of shards.
    pub shards: ShardCount,
}

impl FleetHandle {
    /// Makes the handle of a receiver that is not active yet. Reports show the instance of the process.
    pub fn new(instance: Instance) -> Self {
        Self(Arc::new(Inner { instance, started: Instant::now(), active: OnceLock::new() }))
    }

    /// Connects the parts of the receiver that became active, and answers other replicas from them. Only the first call has an
    /// effect: a process becomes active once.
    pub fn activate(&self, active: ActiveFleet) {
        let table = active.table.clone();
        let rotations = active.rotations.clone();
        let Replicas { role, responders, .. } = active.replicas.clone();
        if self.0.active.set(active).is_err() {
            return;
        }
        responders.set(Topic::Report, Arc::new(move |_| answer_report(table.clone()).boxed()));
        let progress = rotations.progress.clone();
        let held = role.clone();
        let respond = move || if_held(&held, || encode(Topic::RotationProgress, &progress.borrow().as_deref()));
        responders.set(Topic::RotationProgress, Arc::new(move |_| std::future::ready(respond()).boxed()));
        let respond = move |question: Bytes| answer_rotation(rotations.clone(), role.clone(), question).boxed();
        responders.set(Topic::RotateCa, Arc::new(respond));
    }

    /// Progress of the CA rotation, as the replica with the fleet role knows it; `None` without a built-in CA, and while this
    /// receiver is inactive.
    pub(super) async fn rotation(&self) -> Result<Option<RotationProgress>, AskError> {
        let Some(ActiveFleet { rotations, replicas, .. }) = self.0.active.get() else { return Ok(None) };
        if replicas.role.is_held() {
            return Ok(rotations.progress.borrow().as_deref().cloned());
        }
        replicas.ask_fleet_holder(Topic::RotationProgress, &()).await
    }

    /// Requests a CA rotation of the replica with the fleet role; `None` while this receiver is inactive.
    pub(super) async fn rotate(
        &self,
        request: RotationRequest,
    ) -> Result<Option<Result<RotationResponse, RotationError>>, AskError> {
        let Some(ActiveFleet { rotations, replicas, .. }) = self.0.active.get() else { return Ok(None) };
        if replicas.role.is_held() {
            return Ok(Some(rotations.request(request).await));
        }
        replicas.ask_fleet_holder(Topic::RotateCa, &request).await.map(Some)
    }

    /// Report of the fleet now, from the answers of all replicas; without runtimes while this receiver is inactive.
    pub(super) async fn report(&self) -> Result<Report, AskError> {
        let receiver = self.receiver();
        let Some(ActiveFleet { replicas, .. }) = self.0.active.get() else {
            return Ok(report::report(receiver, Vec::new()));
        };
        let answers = replicas.peers.ask_all(Topic::Report, Bytes::new()).await?;
        // Thousands of runtimes take some hundred milliseconds, in which this thread runs nothing else.
        let merged = spawn_blocking(|| report::merge(receiver, answers)).await;
        merged.ok().and_then(Result::ok).ok_or(AskError::Unavailable)
    }

    /// Report of the shards, as this replica knows them.
    pub(super) fn shards(&self) -> ShardsReport {
        let ownership = self.0.active.get().map(|ActiveFleet { table, holders, shards, .. }| {
            shards::ownership(&holders.current(), *shards, table.kymas_by_shard())
        });
        ShardsReport { receiver: self.receiver(), ownership }
    }

    fn receiver(&self) -> Receiver {
        report::receiver(self.0.instance, self.0.started.elapsed(), self.0.active.get().is_some())
    }
}

/// Lists the runtimes of this replica, on a thread of its own: the caller's may be one that serves agents.
async fn answer_report(table: RuntimeTable) -> Result<Bytes, AskError> {
    spawn_blocking(move || encode(Topic::Report, &table.views())).await.map_err(|_| AskError::Unavailable)?
}

/// Requests a rotation for another replica.
async fn answer_rotation(rotations: RotationHandle, role: FleetRole, question: Bytes) -> Result<Bytes, AskError> {
    let request: RotationRequest = decode(Topic::RotateCa, &question)?;
    if !role.is_held() {
        return Err(AskError::NoFleetHolder);
    }
    encode(Topic::RotateCa, &rotations.request(request).await)
}

/// Answers in the replica with the fleet role alone.
fn if_held(role: &FleetRole, answer: impl FnOnce() -> Result<Bytes, AskError>) -> Result<Bytes, AskError> {
    if role.is_held() { answer() } else { Err(AskError::NoFleetHolder) }
}

#[cfg(test)]
mod tests;
