//! `status`: the agent of one runtime, through a port-forward in the runtime's cluster.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::Request;
use http_body_util::Full;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, ResourceExt as _, api::ListParams};
use tidewatch_api::{
    key::KymaKey,
    names::{SKR_NAMESPACE, label},
    selectors,
};
use tidewatch_cluster::{
    leader::WriteFence,
    runtime_access::{AccessSecret, Cidr, ListLimits, Metrics, RuntimeAccess, Settings, list_map},
};
use tidewatch_contract::admin::agent::{DEFAULT_PORT, STATUS_PATH, Status};
use tidewatch_kit::system_roots::SystemRoots;

use crate::{
    block_on,
    cluster::{ClusterFlags, LIST_LIMITS, within_deadline},
    exit, output, port_forward,
};

/// Limit of a response in bytes, above the status of 500 watches with long names and errors.
const MAX_RESPONSE_BYTES: usize = 4 << 20;

/// Arguments of `status`.
#[derive(Clone, Debug, Args)]
pub struct StatusCommand {
    /// Name of the Kyma in the control plane
    pub kyma: String,

    /// Print the agent's JSON unchanged
    #[arg(long)]
    pub json: bool,

    /// Control plane with the Kyma and its access Secret.
    #[command(flatten)]
    pub cluster: ClusterFlags,

    /// Networks in which runtimes are allowed although they are refused by default, as for the receiver
    #[arg(long, env = "TIDEWATCH_ALLOW_RUNTIME_ADDRESSES", value_delimiter = ',', value_name = "CIDR")]
    pub allow_runtime_addresses: Vec<Cidr>,

    /// Further networks in which no runtime is allowed, as for the receiver
    #[arg(long, env = "TIDEWATCH_DENY_RUNTIME_ADDRESSES", value_delimiter = ',', value_name = "CIDR")]
    pub deny_runtime_addresses: Vec<Cidr>,
}

impl StatusCommand {
    pub(crate) fn run(&self) -> Result<u8> {
        let body = block_on(self.fetch())?;
        let status: Status = serde_json::from_slice(&body).context("parse the response")?;
        let text = if self.json { body } else { status.page().into() };
        output::write(&text)?;
        Ok(exit::SUCCESS)
    }

    async fn fetch(&self) -> Result<Bytes> {
        let access = self.access().await?;
        let key = self.key();
        let pods: Api<Pod> = Api::namespaced(access.client(&key)?, SKR_NAMESPACE);
        // runtime-watcher's agent has the first label as well.
        let selector = format!("{},{}={}", selectors::agent_pods(), label::PART_OF, label::PART_OF_TIDEWATCH);
        let selected = ListParams::default().labels(&selector);
        let listed = list_map(&pods, &selected, &ListLimits::default(), |pod| pod).await;
        let pod = running_pod(&listed.with_context(|| format!("list the pods in {SKR_NAMESPACE} of the runtime"))?)?;
        let pods: Api<Pod> = Api::namespaced(access.upgrade_client(&key)?, SKR_NAMESPACE);
        let request = Request::get(STATUS_PATH).body(Full::default())?;
        let response = port_forward::send(&pods, &pod, DEFAULT_PORT, request, MAX_RESPONSE_BYTES);
        within_deadline(response).await.with_context(|| format!("query the agent: pod {SKR_NAMESPACE}/{pod}"))
    }

    fn key(&self) -> KymaKey {
        KymaKey::new(&*self.cluster.namespace, &*self.kyma)
    }

    /// Access to the runtime under the receiver's rules, without the permission to write.
    async fn access(&self) -> Result<RuntimeAccess> {
        let secrets: Api<Secret> = self.cluster.api(&self.cluster.client().await?);
        let selected = ListParams::default().labels(&format!("{}={}", label::KYMA_NAME, self.kyma));
        let secrets = list_map(&secrets, &selected, &LIST_LIMITS, |secret| Arc::new(AccessSecret::from(secret))).await;
        let secrets = secrets.with_context(|| format!("list the access Secrets in {}", self.cluster.namespace))?;
        let settings = Settings {
            allow: self.allow_runtime_addresses.clone(),
            deny: self.deny_runtime_addresses.clone(),
            system_roots: SystemRoots::load(),
            fence: WriteFence::closed(),
            ..Settings::default()
        };
        let access = RuntimeAccess::new(settings, Metrics::default());
        access.set_secrets(&self.key(), secrets);
        Ok(access)
    }
}

/// Name of the agent's pod that runs and is not being deleted.
fn running_pod(pods: &[Pod]) -> Result<String> {
    let phase = |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
    let is_running = |pod: &&Pod| phase(pod) == "Running" && pod.metadata.deletion_timestamp.is_none();
    if let Some(pod) = pods.iter().find(is_running) {
        return Ok(pod.name_any());
    }
    let phases: Vec<_> = pods.iter().map(|pod| format!("{} {}", pod.name_any(), phase(pod))).collect();
    if phases.is_empty() {
        bail!("the runtime has no agent pod in {SKR_NAMESPACE}");
    }
    bail!("no agent pod of the runtime is running: {}", phases.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, phase: &str, deleted: &Value) -> Pod {
        let metadata = json!({"name": name, "deletionTimestamp": deleted});
        serde_json::from_value(json!({"metadata": metadata, "status": {"phase": phase}})).unwrap()
    }

    #[test]
    fn running_pod_is_neither_pending_nor_deleted() {
        let deleted = json!("2026-01-01T00:00:00Z");
        let pending = pod("a", "Pending", &Value::Null);
        let old = pod("b", "Running", &deleted);
        let new = pod("c", "Running", &Value::Null);
        assert_eq!(running_pod(&[pending.clone(), old.clone(), new]).unwrap(), "c");
        let error = running_pod(&[pending, old]).unwrap_err().to_string();
        assert_eq!(error, "no agent pod of the runtime is running: a Pending, b Running");
        assert!(running_pod(&[]).unwrap_err().to_string().contains("has no agent pod"));
    }
}
