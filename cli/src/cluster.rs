//! The client of KCP, from a kubeconfig.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use clap::Args;
use k8s_openapi::NamespaceResourceScope;
use kube::{Api, Client, Config, Resource};
use tidewatch_api::names;
use tidewatch_cluster::{client, runtime_access::ListLimits};
use tokio::time::timeout;

/// Deadline of one call or request, including the connection and the response.
const DEADLINE: Duration = Duration::from_secs(30);
/// Limits of one list: more Kymas than one KCP has, and more versions than a runtime can hold.
pub(crate) const LIST_LIMITS: ListLimits =
    ListLimits { page: 500, pages: 1_000, objects: 200_000, bytes: 1 << 30, deadline: Duration::from_secs(120) };

/// Flags that select KCP and the receiver's namespace in it.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct ClusterFlags {
    /// Kubeconfig of the control plane; defaults to the one of kubectl, otherwise to the pod's service account
    #[arg(long, env = "TIDEWATCH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Namespace of the receiver, its Kymas and its catalog in the control plane
    #[arg(short, long, env = "TIDEWATCH_NAMESPACE", default_value = names::KCP_NAMESPACE)]
    pub namespace: String,
}

impl ClusterFlags {
    /// Builds the client. Its connections are HTTP/1.1, as port-forwards require.
    pub(crate) async fn client(&self) -> Result<Client> {
        let inferred = async { Config::infer().await.context("find the control plane") };
        let config = client::config(self.kubeconfig.as_deref(), inferred).await?;
        Client::try_from(config).context("build the client of the control plane")
    }

    /// Objects of a kind in the namespace.
    pub(crate) fn api<K>(&self, client: &Client) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(client.clone(), &self.namespace)
    }
}

/// Bounds one call by [`DEADLINE`].
pub(crate) async fn within_deadline<T, E>(call: impl Future<Output = Result<T, E>>) -> Result<T>
where
    anyhow::Error: From<E>,
{
    Ok(timeout(DEADLINE, call).await.with_context(|| format!("no response within {DEADLINE:?}"))??)
}
