//! What makes a Deployment ready where no machine runs pods: controller manager, and where nobody else plays kubelet, scheduler, kwok
//! and one node.

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
    credentials::{Person, files},
};
use crate::process::{Process, ProcessError, Program};

const READY: Duration = Duration::from_secs(120);
const PROBE: Duration = Duration::from_secs(5);
/// Name of the one node.
pub const NODE: &str = "node-1";
/// The controllers that modules count on; the others cost memory only.
const CONTROLLERS: &str = "deployment-controller,replicaset-controller,statefulset-controller,daemonset-controller,\
    job-controller,garbage-collector-controller,namespace-controller,serviceaccount-controller,\
    root-ca-certificate-publisher-controller";

/// Why the workloads do not run.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadsError {
    /// A binary is missing.
    #[error("find the binaries")]
    Binaries(#[from] BinariesError),
    /// A process does not start, or its effect did not show.
    #[error("start the workloads")]
    Start(#[from] ProcessError),
    /// The kubeconfig or a client.
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
    _pretenders: Option<(Process, Process)>,
}

impl Workloads {
    /// Starts the controller manager and waits until it has made an account; with `pretend` also scheduler and kwok, until the node is
    /// ready.
    pub(crate) async fn start(cluster: &Cluster, binaries: &Binaries, pretend: bool) -> Result<Self, WorkloadsError> {
        let reach = |e| WorkloadsError::Cluster(Box::new(e));
        let kubeconfig = cluster.write_kubeconfig(Person::Workloads).map_err(reach)?;
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
        let pretenders = if pretend {
            let scheduler = program(Tool::KubeScheduler, binaries.get(Tool::KubeScheduler).await?)
                .args(["--leader-elect=false", "--secure-port=0"]);
            let kwok = program(Tool::Kwok, binaries.get(Tool::Kwok).await?).arg("--manage-all-nodes");
            let nodes = Api::<Node>::all(client.clone());
            let node = nodes.create(&PostParams::default(), &node()).await;
            node.map_err(|e| WorkloadsError::Node(Box::new(e)))?;
            let (scheduler, kwok) = (Process::start(scheduler)?, Process::start(kwok)?);
            kwok.until(READY, || node_ready(nodes.clone())).await?;
            Some((scheduler, kwok))
        } else {
            None
        };
        let accounts = Api::<ServiceAccount>::default_namespaced(client);
        manager.until(READY, || account_made(accounts.clone())).await?;
        Ok(Self { _controller_manager: manager, _pretenders: pretenders })
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

/// A node with room for everything.
fn node() -> Node {
    let room: std::collections::BTreeMap<_, _> = [("cpu", "256"), ("memory", "1Ti"), ("pods", "5000")]
        .into_iter()
        .map(|(what, amount)| (what.to_owned(), Quantity(amount.to_owned())))
        .collect();
    let mut node = Node::default();
    node.metadata.name = Some(NODE.to_owned());
    node.metadata.annotations = Some([("kwok.x-k8s.io/node".to_owned(), "fake".to_owned())].into());
    node.metadata.labels = Some(
        [("kubernetes.io/hostname", NODE), ("kubernetes.io/os", "linux")].map(|(k, v)| (k.into(), v.into())).into(),
    );
    let status = node.status.get_or_insert_default();
    status.allocatable = Some(room.clone());
    status.capacity = Some(room);
    node
}
