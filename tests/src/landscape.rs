//! A whole landscape on the test bed: the receiver at KCP, runtimes that it knows, and their agents, all as processes of the
//! product's own binaries under accounts of their own.
//!
//! Each landscape has a namespace of its own in KCP, so several share one KCP without seeing each other.

use std::{fs, path::PathBuf, sync::Arc};

use anyhow::{Context as _, Result};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tidewatch_receiver::pki::{self, Ca};
use tidewatch_shared::identity::TrustDomain;
use tokio::sync::Mutex;

use crate::{
    control_plane::Cluster,
    ports,
    process::Program,
    product::{ProductBinaries, ProductProcess, build_binaries},
};

pub mod catalog;
mod objects;
mod rights;
mod runtime;
mod wait;

pub use runtime::Runtime;
pub use wait::{DEADLINE, until};

/// How a landscape differs from the usual one.
#[derive(Clone, Debug)]
pub struct Options {
    /// Wanted heartbeat interval. Tests want it short, measurements as it is by default.
    pub heartbeat_seconds: u32,
    /// Whether the receiver writes a stamp for every event that makes a Kyma wanted.
    pub stamps: bool,
    /// Further arguments of the receiver.
    pub receiver: Vec<String>,
    /// Log filter of both programs.
    pub log: String,
}

impl Default for Options {
    fn default() -> Self {
        Self { heartbeat_seconds: 30, stamps: false, receiver: Vec::new(), log: "info,kube_client=error".to_owned() }
    }
}

/// See the module.
pub struct Landscape {
    name: String,
    kcp: Arc<Cluster>,
    operator: Client,
    ca: Ca,
    trust_domain: TrustDomain,
    dir: PathBuf,
    binaries: ProductBinaries,
    event_port: u16,
    options: Options,
    receiver: Mutex<Option<ProductProcess>>,
}

impl Landscape {
    /// Prepares KCP under a name that must be a namespace's, and starts the receiver there.
    ///
    /// # Errors
    /// When KCP refuses something, or the receiver does not become ready.
    pub async fn start(kcp: Arc<Cluster>, name: &str, options: Options) -> Result<Self> {
        let this = Self::prepare(kcp, name, options).await?;
        this.start_receiver().await?;
        Ok(this)
    }

    /// Prepares KCP and the files, and starts nothing.
    ///
    /// # Errors
    /// When KCP refuses something.
    pub async fn prepare(kcp: Arc<Cluster>, name: &str, options: Options) -> Result<Self> {
        let binaries = build_binaries().await?;
        objects::install_crds(&kcp).await.context("install the CRDs in KCP")?;
        kcp.ensure_service_account(name, rights::RECEIVER).await?;
        rights::grant_receiver(&kcp, name).await.context("grant the receiver its rights")?;
        let dir = kcp.dir().join("landscapes").join(name);
        fs::create_dir_all(&dir).context("make the landscape's folder")?;
        let ca = Ca::generate("test bed", now(), pki::CA_VALIDITY)?;
        let server = ca.make_server(&["127.0.0.1".parse()?, "localhost".parse()?], now(), pki::SERVER_VALIDITY)?;
        for (file, text) in
            [("tls.crt", &server.chain), ("tls.key", &server.key), ("ca.crt", &ca.trust_bundle().to_pem())]
        {
            fs::write(dir.join(file), text).with_context(|| format!("write {file}"))?;
        }
        Ok(Self {
            name: name.to_owned(),
            operator: kcp.client().await?,
            kcp,
            ca,
            trust_domain: "kyma.local".parse()?,
            dir,
            binaries,
            event_port: ports::free()?,
            options,
            receiver: Mutex::new(None),
        })
    }

    /// Starts the receiver, or starts it again after it was killed, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn start_receiver(&self) -> Result<()> {
        let mut receiver = self.receiver.lock().await;
        let probes = ports::free()?;
        let kubeconfig = self.dir.join("receiver.kubeconfig");
        let token = self.kcp.service_account_token(&self.name, rights::RECEIVER).await?;
        fs::write(&kubeconfig, self.kcp.kubeconfig_for_token(&token))?;
        let path = |file: &str| self.dir.join(file).into_os_string();
        let text = |text: &dyn ToString| text.to_string().into();
        let mut program = Program::new("receiver", self.binaries.receiver()?, self.dir.join("receiver.log"))
            .env("RUST_LOG", self.options.log.clone())
            .args([text(&"--kubeconfig"), kubeconfig.into_os_string(), text(&"--namespace"), text(&self.name)])
            .args([text(&"--event-address"), text(&self.authority()), text(&"--authority"), text(&self.authority())])
            .args([text(&"--metrics-address"), text(&format_args!("127.0.0.1:{probes}"))])
            .args([text(&"--tls-cert"), path("tls.crt"), text(&"--tls-key"), path("tls.key")])
            .args([text(&"--client-ca"), path("ca.crt"), text(&"--trust-domain"), text(&self.trust_domain)])
            .args(["--oci-registry-host", "registry.test:5000", "--allow-runtime-addresses", "127.0.0.0/8,::1/128"])
            .args([text(&"--heartbeat-seconds"), text(&self.options.heartbeat_seconds)])
            .args(self.options.receiver.clone());
        if self.options.stamps {
            program = program.args([text(&"--stamp-file"), path("stamps")]);
        }
        let process = ProductProcess::start(program, ([127, 0, 0, 1], probes).into())?;
        process.ready(DEADLINE).await?;
        *receiver = Some(process);
        Ok(())
    }

    /// The receiver's process, to kill, freeze or look at.
    ///
    /// # Errors
    /// When none was started.
    pub async fn with_receiver<T>(&self, act: impl AsyncFnOnce(&ProductProcess) -> T) -> Result<T> {
        let receiver = self.receiver.lock().await;
        Ok(act(receiver.as_ref().context("the receiver was not started")?).await)
    }

    /// Registers a runtime: its Kyma and its access Secret in KCP. The agent is not started yet.
    ///
    /// # Errors
    /// When a cluster refuses something.
    pub async fn register(self: &Arc<Self>, cluster: Arc<Cluster>) -> Result<Runtime> {
        Runtime::register(self.clone(), cluster).await
    }

    /// The control plane.
    #[must_use]
    pub fn kcp(&self) -> &Arc<Cluster> {
        &self.kcp
    }

    /// A client of KCP's operator.
    #[must_use]
    pub fn operator(&self) -> Client {
        self.operator.clone()
    }

    /// Its namespace in KCP.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.name
    }

    /// The CA of both sides.
    #[must_use]
    pub fn ca(&self) -> &Ca {
        &self.ca
    }

    /// The trust domain of the runtimes.
    #[must_use]
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }

    /// Host and port of the receiver's event port.
    #[must_use]
    pub fn authority(&self) -> String {
        format!("127.0.0.1:{}", self.event_port)
    }

    /// Where the receiver writes its stamps.
    #[must_use]
    pub fn stamp_file(&self) -> PathBuf {
        self.dir.join("stamps")
    }
}

/// The time as certificates count it.
#[must_use]
pub fn now() -> i64 {
    Timestamp::now().as_second()
}
