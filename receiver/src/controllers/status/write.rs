//! Writes of a status, each only if it differs from the stored one.

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
#[derive(Clone)]
pub(crate) struct StatusWriter {
    kcp: Client,
    installs_agents: bool,
}

impl StatusWriter {
    /// Without `installs_agents` the condition about the agent's installation is removed.
    pub(crate) const fn new(kcp: Client, installs_agents: bool) -> Self {
        Self { kcp, installs_agents }
    }

    /// Writes the status that follows from the findings. Fails with a conflict if the Kyma was written since it was read. Returns the
    /// status and the resourceVersion as stored.
    pub(crate) async fn write(
        &self,
        kyma: &Kyma,
        findings: &Findings,
        now: &Time,
    ) -> Result<(KymaStatus, Option<String>), WriteStatusError> {
        self.apply(kyma, |old| compute(old, findings, now)).await
    }

    /// As [`Self::write`], for a reconcile that did not look at the modules: see [`compute_conditions`].
    pub(crate) async fn write_conditions(
        &self,
        kyma: &Kyma,
        conditions: &Conditions,
        now: &Time,
    ) -> Result<(KymaStatus, Option<String>), WriteStatusError> {
        self.apply(kyma, |old| compute_conditions(old, conditions, now)).await
    }

    async fn apply(
        &self,
        kyma: &Kyma,
        compute: impl FnOnce(&KymaStatus) -> KymaStatus,
    ) -> Result<(KymaStatus, Option<String>), WriteStatusError> {
        let old = kyma.status.clone().unwrap_or_default();
        let mut known = old.clone();
        if !self.installs_agents {
            without_installer(&mut known);
        }
        let new = compute(&known);
        let mut ours = old.clone();
        ours.conditions.get_or_insert_default().retain(|condition| !is_anothers(condition));
        if same(&ours, &new) {
            return Ok((old, kyma.resource_version()));
        }
        let namespace = kyma.namespace().unwrap_or_default();
        let body = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Kyma", "status": new, "metadata": {
            "name": kyma.name_any(), "namespace": namespace, "resourceVersion": kyma.resource_version().unwrap_or_default(),
        }});
        let params = PatchParams::apply(field_manager::LIFECYCLE).force();
        let written = self.api(&namespace).patch_status(&kyma.name_any(), &params, &Patch::Apply(&body)).await;
        let written = written.map_err(WriteStatusError::ControlPlane)?;
        let version = written.resource_version();
        Ok((written.status.unwrap_or(new), version))
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

/// Writes the status of the runtime cluster's Kyma if it differs. A Kyma that the user is deleting is left unchanged.
pub(crate) async fn write_runtime(client: &Client, kyma: &Kyma, status: &KymaStatus) -> Result<(), WriteStatusError> {
    let new = for_runtime(status);
    let old = kyma.status.clone().unwrap_or_default();
    if same(&old, &new) || kyma.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    let mut shown = kyma.clone();
    shown.metadata.managed_fields = None;
    shown.status = Some(new);
    let params = PostParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PostParams::default() };
    let api: Api<Kyma> = Api::namespaced(client.clone(), SKR_NAMESPACE);
    let written = api.replace_status(SKR_KYMA, &params, &shown).await;
    written.map_err(WriteStatusError::Runtime).map(drop)
}
