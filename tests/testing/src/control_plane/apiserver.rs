//! One kube-apiserver.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::{
    audit,
    credentials::{ClusterUser, Credentials, files},
    etcd::port_taken,
};
use crate::{
    ports,
    process::{Process, ProcessError, Program, Signal},
};

/// 3 s suffice on a quiet machine; twenty servers that start at once on two cores need much longer.
const READY: Duration = Duration::from_secs(180);
const PROBE: Duration = Duration::from_secs(5);
/// Attempts with another port when a process took the one that was free a moment ago.
const PORT_TRIES: usize = 5;
/// Time for which a restarted server waits for its old port.
const OLD_PORT: Duration = Duration::from_secs(20);
/// Namespaces that the API server creates right after it is ready, and that tests rely on.
const NAMESPACES: [&str; 2] = ["default", "kube-system"];

/// Failure of an API server.
#[derive(Debug, thiserror::Error)]
pub enum ApiServerError {
    /// No free port.
    #[error("find a free port")]
    Port(#[source] io::Error),
    /// Its files cannot be written.
    #[error("write the API server's files")]
    Files(#[source] io::Error),
    /// It did not start, ended, or did not become ready.
    #[error("start the API server of {0}")]
    Start(String, #[source] ProcessError),
    /// A signal could not be sent.
    #[error("send a signal to the API server of {0}")]
    Signal(String, #[source] ProcessError),
    /// No client can be made from its kubeconfig.
    #[error("make a client for {0}")]
    Client(String, #[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Set of admission plugins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// For an API server without controller manager: nothing creates the accounts that the ServiceAccount plugin
    /// requires, or removes the taint of a new node.
    ApiOnly,
    /// For a controller manager, and kwok's nodes.
    Workloads,
    /// For a controller manager; the kubelet of the test bed also binds pods.
    Kubelet,
}

impl Admission {
    fn disabled(self) -> &'static str {
        match self {
            Self::ApiOnly => "TaintNodesByCondition,ServiceAccount",
            Self::Workloads | Self::Kubelet => "TaintNodesByCondition",
        }
    }
}

/// Settings of an API server; constant over its restarts.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The binary.
    pub binary: PathBuf,
    /// Name of the cluster, and its key prefix in etcd.
    pub name: String,
    /// Its folder for certificates and logs.
    pub dir: PathBuf,
    /// URL of etcd.
    pub etcd_url: String,
    /// Admission plugins.
    pub admission: Admission,
}

/// A kube-apiserver, and faults to inject.
#[derive(Debug)]
pub struct ApiServer {
    settings: Settings,
    credentials: Arc<Credentials>,
    port: u16,
    process: Mutex<Arc<Process>>,
}

impl ApiServer {
    /// Starts it on a free port and waits until it is ready and its own namespaces exist.
    ///
    /// # Errors
    /// See [`ApiServerError`].
    pub async fn start(settings: Settings, credentials: Arc<Credentials>) -> Result<Self, ApiServerError> {
        fs::write(settings.dir.join(audit::POLICY_FILE), audit::POLICY).map_err(ApiServerError::Files)?;
        let mut tries = 1;
        loop {
            let port = ports::free().map_err(ApiServerError::Port)?;
            match run(&settings, &credentials, port).await {
                Ok(process) => return Ok(Self { settings, credentials, port, process: Mutex::new(process) }),
                Err(ApiServerError::Start(_, error)) if tries < PORT_TRIES && port_taken(&error) => tries += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Address on which it listens; the same after a restart.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    /// Its current process.
    pub fn process(&self) -> Arc<Process> {
        Arc::clone(&self.process.lock())
    }

    /// Kills it with SIGKILL.
    pub fn kill(&self) {
        self.process().kill();
    }

    /// Stops it (SIGSTOP): connections stay open, nothing answers.
    ///
    /// # Errors
    /// If it is gone.
    pub fn freeze(&self) -> Result<(), ApiServerError> {
        self.signal(Signal::Stop)
    }

    /// Continues it after [`ApiServer::freeze`].
    ///
    /// # Errors
    /// If it is gone.
    pub fn thaw(&self) -> Result<(), ApiServerError> {
        self.signal(Signal::Cont)
    }

    /// Kills it if it still runs, and starts it again on the same port with the same data and keys.
    ///
    /// # Errors
    /// See [`ApiServerError`].
    pub async fn restart(&self) -> Result<(), ApiServerError> {
        self.kill();
        let began = Instant::now();
        let process = loop {
            match run(&self.settings, &self.credentials, self.port).await {
                Err(ApiServerError::Start(_, error)) if port_taken(&error) && began.elapsed() < OLD_PORT => {}
                outcome => break outcome?,
            }
        };
        *self.process.lock() = process;
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<(), ApiServerError> {
        self.process().signal(signal).map_err(|e| ApiServerError::Signal(self.settings.name.clone(), e))
    }
}

async fn run(settings: &Settings, credentials: &Credentials, port: u16) -> Result<Arc<Process>, ApiServerError> {
    let failed = |e| ApiServerError::Start(settings.name.clone(), e);
    let process = Process::start(program(settings, port)).map_err(failed)?;
    let url = format!("https://127.0.0.1:{port}");
    let kubeconfig = credentials.kubeconfig(&settings.name, &url, credentials.token(ClusterUser::Admin));
    let client = client(&settings.name, &kubeconfig).await?;
    process.until(READY, || probe(client.clone())).await.map_err(failed)?;
    Ok(Arc::new(process))
}

async fn probe(client: Client) -> Result<(), String> {
    let checks = async {
        let request = http::Request::get("/readyz").body(Vec::new()).map_err(|e| e.to_string())?;
        client.request_text(request).await.map_err(|e| e.to_string())?;
        for name in NAMESPACES {
            Api::<Namespace>::all(client.clone()).get(name).await.map_err(|e| e.to_string())?;
        }
        Ok(())
    };
    timeout(PROBE, checks).await.unwrap_or_else(|_| Err(format!("no answer within {PROBE:?}")))
}

fn program(settings: &Settings, port: u16) -> Program {
    let Settings { binary, name, dir, etcd_url, admission } = settings;
    let file = |flag: &str, file: &str| format!("--{flag}={}", dir.join(file).display());
    Program::new(format!("kube-apiserver of {name}"), binary, dir.join("kube-apiserver.log"))
        .args([
            format!("--etcd-servers={etcd_url}"),
            format!("--etcd-prefix=/{name}"),
            format!("--secure-port={port}"),
            format!("--disable-admission-plugins={}", admission.disabled()),
        ])
        .args([
            file("cert-dir", "certs"),
            file("tls-cert-file", files::CERTIFICATE),
            file("tls-private-key-file", files::KEY),
            file("service-account-key-file", files::ISSUER_PUBLIC),
            file("service-account-signing-key-file", files::ISSUER_KEY),
            file("token-auth-file", files::TOKENS),
            file("audit-policy-file", audit::POLICY_FILE),
            file("audit-log-path", audit::LOG_FILE),
        ])
        .args([
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=RBAC",
            // As in every cluster: agents on nodes need it.
            "--allow-privileged=true",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            "--audit-log-maxsize=1000",
            "--profiling=false",
            "--v=0",
        ])
}

/// A client on the calling tokio executor for a kubeconfig. Without retries of its own, so that a fault shows at once.
pub(crate) async fn client(cluster: &str, kubeconfig: &str) -> Result<Client, ApiServerError> {
    let failed = |e: Box<dyn std::error::Error + Send + Sync>| ApiServerError::Client(cluster.to_owned(), e);
    let parsed = kube::config::Kubeconfig::from_yaml(kubeconfig).map_err(|e| failed(e.into()))?;
    let options = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(parsed, &options).await;
    let mut config = config.map_err(|e| failed(e.into()))?;
    config.default_retry = false;
    Client::try_from(config).map_err(|e| failed(e.into()))
}

/// Creates the folder of a cluster.
pub(crate) fn folder(bed: &Path, cluster: &str) -> Result<PathBuf, ApiServerError> {
    let dir = bed.join(cluster);
    fs::create_dir_all(&dir).map_err(ApiServerError::Files)?;
    Ok(dir)
}
