//! Writes of a status, each only if it differs from the stored one.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use thiserror::Error;
use tidewatch_shared::{
    api::{Kyma, KymaStatus},
    names::{GROUP, SKR_KYMA, SKR_NAMESPACE, VERSION, field_manager},
};

use super::{
    Findings, compute, compute_conditions,
    condition::{Conditions, is_anothers, is_ours_alone, without_installer},
    for_runtime, same,
};

/// A status could not be written.
#[derive(Debug, Error)]
pub enum WriteStatusError {
    /// The request to the control plane.
    #[error("write the status of the Kyma in the control plane")]
    ControlPlane(#[source] kube::Error),
    /// The request to the runtime cluster.
    #[error("write the status of the Kyma in the runtime")]
    Runtime(#[source] kube::Error),
}

/// Writes statuses of Kymas in the control plane, each only if it differs from the stored one.
pub(crate) struct StatusWriter {
    pub(crate) kcp: Client,
    /// If false, the condition about the agent's installation is removed.
    pub(crate) installs_agents: bool,
}

impl StatusWriter {
    /// Writes the status that follows from the findings, and takes over into `kyma` what the control plane stores. Fails
    /// with a conflict if the Kyma was written since it was read.
    pub(crate) async fn write(&self, kyma: &mut Kyma, findings: &Findings) -> Result<(), WriteStatusError> {
        self.apply(kyma, |old, now| compute(old, findings, now)).await
    }

    /// As [`Self::write`], for a reconcile that did not look at the modules: see [`compute_conditions`].
    pub(crate) async fn write_conditions(
        &self,
        kyma: &mut Kyma,
        conditions: &Conditions,
    ) -> Result<(), WriteStatusError> {
        self.apply(kyma, |old, now| compute_conditions(old, conditions, now)).await
    }

    async fn apply(
        &self,
        kyma: &mut Kyma,
        compute: impl FnOnce(&KymaStatus, &Time) -> KymaStatus,
    ) -> Result<(), WriteStatusError> {
        let mut old = kyma.status.clone().unwrap_or_default();
        let mut known = old.clone();
        if !self.installs_agents {
            without_installer(&mut known);
        }
        let new = compute(&known, &Time(Timestamp::now()));
        old.conditions.get_or_insert_default().retain(|condition| !is_anothers(condition));
        if same(&old, &new) {
            return Ok(());
        }
        let namespace = kyma.namespace().unwrap_or_default();
        let body = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Kyma", "status": new, "metadata": {
            "name": kyma.name_any(), "namespace": namespace, "resourceVersion": kyma.resource_version().unwrap_or_default(),
        }});
        let params = PatchParams::apply(field_manager::LIFECYCLE).force();
        let written = self.api(&namespace).patch_status(&kyma.name_any(), &params, &Patch::Apply(&body)).await;
        let written = written.map_err(WriteStatusError::ControlPlane)?;
        kyma.status = written.status.or(Some(new));
        kyma.metadata.resource_version = written.metadata.resource_version;
        Ok(())
    }

    /// Removes the conditions that the incumbent does not know from the status of the KCP Kyma, because no controller would update them
    /// after a hand-back. Returns the Kyma as stored.
    pub(crate) async fn withdraw(&self, kyma: Kyma) -> Result<Kyma, WriteStatusError> {
        let all = kyma.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let (ours, kept): (Vec<_>, Vec<_>) = all.partition(|condition| is_ours_alone(condition));
        if ours.is_empty() {
            return Ok(kyma);
        }
        let patch = json!({
            "metadata": {"resourceVersion": kyma.resource_version().unwrap_or_default()}, "status": {"conditions": kept},
        });
        let params = PatchParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PatchParams::default() };
        let api = self.api(&kyma.namespace().unwrap_or_default());
        let written = api.patch_status(&kyma.name_any(), &params, &Patch::Merge(&patch)).await;
        written.map_err(WriteStatusError::ControlPlane)
    }

    fn api(&self, namespace: &str) -> Api<Kyma> {
        Api::namespaced(self.kcp.clone(), namespace)
    }
}

/// Writes the status of the KCP Kyma to the runtime cluster's Kyma if that differs. A Kyma that the user is deleting is
/// left unchanged.
pub(crate) async fn write_runtime(client: &Client, runtime: &Kyma, kcp: &Kyma) -> Result<(), WriteStatusError> {
    let new = for_runtime(kcp.status.clone().unwrap_or_default());
    let old = runtime.status.clone().unwrap_or_default();
    if same(&old, &new) || runtime.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let mut shown = runtime.clone();
    shown.metadata.managed_fields = None;
    shown.status = Some(new);
    let params = PostParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PostParams::default() };
    let api: Api<Kyma> = Api::namespaced(client.clone(), SKR_NAMESPACE);
    let written = api.replace_status(SKR_KYMA, &params, &shown).await;
    written.map_err(WriteStatusError::Runtime).map(drop)
}
