//! Components that make Deployments ready without machines: controller manager, and, where the test bed's kubelet does
//! not run, scheduler, kwok and one node.

use std::{path::PathBuf, time::Duration};

use k8s_openapi::{
    api::core::v1::{Node, ServiceAccount},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::{Api, api::PostParams};
use tokio::time::timeout;

use super::{
    binaries::{Binaries, BinariesError, Tool},
    cluster::{Cluster, ClusterError},
    credentials::{ClusterUser, files},
};
use crate::process::{Process, ProcessError, Program};

const READY: Duration = Duration::from_secs(120);
const PROBE: Duration = Duration::from_secs(5);
/// Name of the one node.
pub const NODE: &str = "node-1";
/// The controllers that modules rely on; the others only cost memory.
const CONTROLLERS: &str = "deployment-controller,replicaset-controller,statefulset-controller,daemonset-controller,\
    job-controller,ttl-after-finished-controller,garbage-collector-controller,namespace-controller,\
    serviceaccount-controller,serviceaccount-token-controller,clusterrole-aggregation-controller,\
    root-ca-certificate-publisher-controller";

/// Failure of the workloads.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadsError {
    /// A binary is missing.
    #[error("find the binaries")]
    Binaries(#[from] BinariesError),
    /// A process did not start, or its effect did not show.
    #[error("start the workloads")]
    Start(#[from] ProcessError),
    /// The kubeconfig or a client failed.
    #[error("reach the cluster")]
    Cluster(#[source] Box<ClusterError>),
    /// The node was refused.
    #[error("create the node")]
    Node(#[source] Box<kube::Error>),
}

/// The running processes.
#[derive(Debug)]
pub(crate) struct Workloads {
    _controller_manager: Process,
    _scheduler_and_kwok: Option<(Process, Process)>,
}

impl Workloads {
    /// Starts the controller manager and waits until it has created an account; with `simulate_pods` also scheduler and kwok,
    /// and waits until the node is ready.
    pub(crate) async fn start(
        cluster: &Cluster,
        binaries: &Binaries,
        simulate_pods: bool,
    ) -> Result<Self, WorkloadsError> {
        let reach = |e| WorkloadsError::Cluster(Box::new(e));
        let kubeconfig = cluster.write_kubeconfig(ClusterUser::Workloads).map_err(reach)?;
        let client = cluster.client().await.map_err(reach)?;
        let program = |tool: Tool, binary: PathBuf| {
            Program::new(
                format!("{} of {}", tool.file(), cluster.name()),
                binary,
                cluster.dir().join(format!("{}.log", tool.file())),
            )
            .arg(format!("--kubeconfig={}", kubeconfig.display()))
        };
        let file = |flag: &str, file: &str| format!("--{flag}={}", cluster.dir().join(file).display());
        let manager = program(Tool::KubeControllerManager, binaries.get(Tool::KubeControllerManager).await?)
            .arg(file("service-account-private-key-file", files::ISSUER_KEY))
            .arg(file("root-ca-file", files::CA))
            .arg(format!("--controllers={CONTROLLERS}"))
            .args(["--leader-elect=false", "--secure-port=0"]);
        let manager = Process::start(manager)?;
        let scheduler_and_kwok = if simulate_pods {
            let scheduler = program(Tool::KubeScheduler, binaries.get(Tool::KubeScheduler).await?)
                .args(["--leader-elect=false", "--secure-port=0"]);
            let kwok = program(Tool::Kwok, binaries.get(Tool::Kwok).await?).arg("--manage-all-nodes");
            let nodes = Api::<Node>::all(client.clone());
            let node = nodes.create(&PostParams::default(), &node()).await;
            node.map_err(|e| WorkloadsError::Node(Box::new(e)))?;
            let scheduler = Process::start(scheduler)?;
            let kwok = Process::start(kwok)?;
            kwok.until(READY, || node_ready(nodes.clone())).await?;
            Some((scheduler, kwok))
        } else {
            None
        };
        let accounts = Api::<ServiceAccount>::default_namespaced(client);
        manager.until(READY, || account_made(accounts.clone())).await?;
        Ok(Self { _controller_manager: manager, _scheduler_and_kwok: scheduler_and_kwok })
    }
}

async fn account_made(accounts: Api<ServiceAccount>) -> Result<(), String> {
    match timeout(PROBE, accounts.get("default")).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(late) => Err(late.to_string()),
    }
}

async fn node_ready(nodes: Api<Node>) -> Result<(), String> {
    let node = timeout(PROBE, nodes.get(NODE)).await.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
    let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
    match conditions.iter().find(|condition| condition.type_ == "Ready") {
        Some(ready) if ready.status == "True" => Ok(()),
        _ => Err(format!("{NODE} is not Ready")),
    }
}

/// A node with capacity for all pods of a test.
fn node() -> Node {
    let capacity: std::collections::BTreeMap<_, _> = [("cpu", "256"), ("memory", "1Ti"), ("pods", "5000")]
        .into_iter()
        .map(|(resource, amount)| (resource.to_owned(), Quantity(amount.to_owned())))
        .collect();
    let mut node = Node::default();
    node.metadata.name = Some(NODE.to_owned());
    node.metadata.annotations = Some([("kwok.x-k8s.io/node".to_owned(), "fake".to_owned())].into());
    node.metadata.labels = Some(
        [("kubernetes.io/hostname", NODE), ("kubernetes.io/os", "linux")].map(|(k, v)| (k.into(), v.into())).into(),
    );
    let status = node.status.get_or_insert_default();
    status.allocatable = Some(capacity.clone());
    status.capacity = Some(capacity);
    node
}
