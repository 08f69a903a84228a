//! A whole landscape on the test bed: the receiver at KCP, registered runtimes, and their agents, all as processes of
//! the product's own binaries under accounts of their own.
//!
//! Each landscape has a namespace of its own in KCP, so several share one KCP without interfering.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use parking_lot::Mutex as Lock;
use tidewatch_api::identity::{RuntimeId, TrustDomain};
use tidewatch_trust::Ca;
use tokio::sync::Mutex;

use crate::{
    artefacts::ArtefactServer,
    control_plane::Cluster,
    ports,
    process::Program,
    product::{ProductBinaries, ProductProcess, build_binaries},
    proxy::Proxy,
};

pub mod catalog;
mod objects;
mod rights;
mod runtime;
mod shards;
mod wait;
pub mod watchers;

/// The image of the agents that a receiver installs; see [`crate::kubelet`].
pub const AGENT_IMAGE: &str = "example.test/tidewatch-agent:dev";

pub use runtime::{Runtime, RuntimeProxies};
pub use wait::{DEADLINE, until};

/// Deviations from the default landscape.
#[derive(Clone, Debug)]
pub struct Options {
    /// Heartbeat interval. Tests use a short one, measurements the default.
    pub heartbeat_seconds: u32,
    /// Makes the receiver write a stamp for every event that enqueues a Kyma.
    pub stamps: bool,
    /// Further arguments of the receiver.
    pub receiver: Vec<String>,
    /// Further arguments of the agents.
    pub agent: Vec<String>,
    /// Image of the agents that the receiver installs. With an empty one it installs none, and issues certificates all
    /// the same; its server certificate is then issued by [`Landscape::ca`].
    pub agent_image: String,
    /// Port to which agents connect, if it is not the receiver's event port.
    pub agents_port: Option<u16>,
    /// Puts a [`Proxy`] on each path: agent to receiver, agent to its API server, receiver to the runtime's API server,
    /// receiver to KCP.
    pub proxied: bool,
    /// Round-trip time between the receiver and the runtimes: to their API servers, and from their agents. Above zero, each
    /// path has a [`Proxy`].
    pub distance: Duration,
    /// Log filter of both programs.
    pub log: String,
    /// Seconds within which a moved channel reaches the Kymas that follow it.
    pub rollout_seconds: u32,
    /// Host of the registry of the modules, if it is not the landscape's own [`ArtefactServer`].
    pub registry: Option<String>,
    /// Folder of the receiver's content store, if it is not in the landscape's own.
    pub content_dir: Option<PathBuf>,
    /// Loopback address that the receiver and the agents listen on and connect to: `::1` for IPv6 alone. Not with
    /// [`Options::proxied`], and not for agents that run in a [`crate::kubelet::Kubelet`].
    pub loopback: IpAddr,
    /// Duration of the receiver's Lease without a renewal, in seconds. Long by default, so that a receiver that a test
    /// stops keeps the Lease; a killed one is succeeded at once, because the successor has the same holder identity.
    pub lease_seconds: u16,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            heartbeat_seconds: 30,
            stamps: false,
            receiver: Vec::new(),
            agent: Vec::new(),
            agent_image: AGENT_IMAGE.to_owned(),
            agents_port: None,
            proxied: false,
            distance: Duration::ZERO,
            log: "info,kube_client=error".to_owned(),
            rollout_seconds: 0,
            registry: None,
            content_dir: None,
            loopback: Ipv4Addr::LOCALHOST.into(),
            lease_seconds: 60,
        }
    }
}

impl Options {
    /// Returns true if each path has a proxy.
    fn has_proxies(&self) -> bool {
        self.proxied || !self.distance.is_zero()
    }
}

/// A replica among others.
#[derive(Debug)]
pub struct Replica {
    /// Its process.
    pub process: ProductProcess,
    /// Its event port.
    pub events: SocketAddr,
    /// Its enrolment port, if it issues the agents' certificates.
    pub enrolment: Option<SocketAddr>,
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
    /// Enrolment port, if the receiver issues the agents' certificates.
    enrolment_port: Option<u16>,
    /// Proxy between agents and receiver.
    agents_proxy: Option<Proxy>,
    /// Proxy between agents and the enrolment port.
    enrolment_proxy: Option<Proxy>,
    /// Proxy between receiver and KCP.
    kcp_proxy: Option<Proxy>,
    /// Registry of the modules.
    artefacts: ArtefactServer,
    options: Options,
    receiver: Mutex<Option<ProductProcess>>,
}

impl Landscape {
    /// Prepares KCP under a name that must be a namespace's, and starts the receiver there.
    ///
    /// # Errors
    /// When KCP refuses a request, or the receiver does not become ready.
    pub async fn start(kcp: Arc<Cluster>, name: &str, options: Options) -> Result<Self> {
        let this = Self::prepare(kcp, name, options).await?;
        this.start_receiver().await?;
        Ok(this)
    }

    /// Prepares KCP and the files, and starts nothing.
    ///
    /// # Errors
    /// When KCP refuses a request.
    ///
    /// # Panics
    /// When this process has prepared a landscape of that name on that KCP before.
    pub async fn prepare(kcp: Arc<Cluster>, name: &str, options: Options) -> Result<Self> {
        Self::with_enrolment(kcp, name, options, None).await
    }

    /// As [`Landscape::start`], but without any identity: the receiver makes its own CA, installs the agents in the
    /// runtimes and enrols them. It needs only [`Landscape::register`] and a kubelet that runs the pods there, a
    /// [`crate::kubelet::Kubelet`]. [`Options::agent`] has no effect then, and [`Landscape::ca`] is not trusted by any
    /// party.
    ///
    /// # Errors
    /// When KCP refuses a request, or the receiver does not become ready.
    ///
    /// # Panics
    /// See [`Landscape::prepare`].
    pub async fn start_issuing(kcp: Arc<Cluster>, name: &str, options: Options) -> Result<Self> {
        let this = Self::prepare_issuing(kcp, name, options).await?;
        this.start_receiver().await?;
        Ok(this)
    }

    /// The same without starting the receiver.
    ///
    /// # Errors
    /// When KCP refuses a request.
    ///
    /// # Panics
    /// See [`Landscape::prepare`].
    pub async fn prepare_issuing(kcp: Arc<Cluster>, name: &str, options: Options) -> Result<Self> {
        Self::with_enrolment(kcp, name, options, Some(ports::free()?)).await
    }

    async fn with_enrolment(
        kcp: Arc<Cluster>,
        name: &str,
        options: Options,
        enrolment_port: Option<u16>,
    ) -> Result<Self> {
        claim(&kcp.dir().join(name));
        let binaries = build_binaries().await?;
        objects::install_crds(&kcp).await.context("install the CRDs in KCP")?;
        kcp.ensure_service_account(name, rights::RECEIVER).await?;
        rights::grant_receiver(&kcp, name).await.context("grant the receiver its rights")?;
        let dir = kcp.dir().join("landscapes").join(name);
        fs::create_dir_all(&dir).context("make the landscape's folder")?;
        let ca = Ca::generate("test bed", now(), tidewatch_trust::CA_VALIDITY)?;
        let server = ca.make_server(
            &["127.0.0.1".try_into()?, "::1".try_into()?, "localhost".try_into()?],
            now(),
            tidewatch_trust::SERVER_VALIDITY,
        )?;
        for (file, text) in
            [("tls.crt", &server.chain), ("tls.key", &server.key), ("ca.crt", &ca.trust_bundle().to_pem())]
        {
            fs::write(dir.join(file), text).with_context(|| format!("write {file}"))?;
        }
        let event_port = ports::free()?;
        let mut agents_proxy = None;
        let mut enrolment_proxy = None;
        let mut kcp_proxy = None;
        if options.has_proxies() {
            let local = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            agents_proxy = Some(start_proxy(local(event_port), options.distance).await?);
            if let Some(port) = enrolment_port {
                enrolment_proxy = Some(start_proxy(local(port), options.distance).await?);
            }
            kcp_proxy = Some(start_proxy(kcp.server().address(), Duration::ZERO).await?);
        }
        Ok(Self {
            name: name.to_owned(),
            operator: kcp.client().await?,
            kcp,
            ca,
            trust_domain: "kyma.local".parse()?,
            dir,
            binaries,
            event_port,
            enrolment_port,
            agents_proxy,
            enrolment_proxy,
            kcp_proxy,
            artefacts: ArtefactServer::start().await,
            options,
            receiver: Mutex::new(None),
        })
    }

    /// Starts or restarts the receiver, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn start_receiver(&self) -> Result<()> {
        let mut receiver = self.receiver.lock().await;
        let process = self.launch("receiver", self.event_port, &self.options).await?;
        process.ready(DEADLINE).await?;
        *receiver = Some(process);
        Ok(())
    }

    /// Kills the receiver with SIGKILL, and starts it with another agent image and these additional arguments.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn restart_receiver(&self, agent_image: &str, arguments: &[&str]) -> Result<()> {
        let mut receiver = self.receiver.lock().await;
        if let Some(before) = receiver.take() {
            before.kill9();
        }
        let mut options = Options { agent_image: agent_image.to_owned(), ..self.options.clone() };
        options.receiver.extend(arguments.iter().map(|&argument| argument.to_owned()));
        let process = self.launch("receiver", self.event_port, &options).await?;
        process.ready(DEADLINE).await?;
        *receiver = Some(process);
        Ok(())
    }

    /// Starts a further receiver in the same namespace, with an event port of its own that it serves once it is active.
    /// Does not wait for it: while another one is active, it is not ready. `name` is that of its lease place, log and
    /// files.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn start_standby(&self, name: &str, event_port: u16) -> Result<ProductProcess> {
        self.launch(name, event_port, &self.options).await
    }

    /// Starts a replica among others, all of which are active, with ports of its own. Agents connect to a
    /// [`Balancer`](crate::balancer::Balancer) at [`Options::agents_port`], and to another one at the enrolment port. Does not
    /// wait for it. `name` is that of its lease place, log and files.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn start_replica(&self, name: &str) -> Result<Replica> {
        self.start_replica_with(name, &self.options.agent_image).await
    }

    /// The same with another image of the agents.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn start_replica_with(&self, name: &str, agent_image: &str) -> Result<Replica> {
        let relay = self.at(ports::free()?).to_string();
        let flags = ["--relay-address", &relay, "--replica-name", name, "--authority", &self.agents_authority()];
        self.start_at_own_ports(name, agent_image, &flags).await
    }

    /// Starts a receiver that is to be the only active one, with ports of its own as a replica has them.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn start_single(&self, name: &str) -> Result<Replica> {
        let flags = ["--authority", &self.agents_authority()];
        self.start_at_own_ports(name, &self.options.agent_image, &flags).await
    }

    async fn start_at_own_ports(&self, name: &str, agent_image: &str, flags: &[&str]) -> Result<Replica> {
        let enrolment = self.enrolment_port.map(|_| ports::free()).transpose()?;
        let events = ports::free()?;
        let mut options = Options { agent_image: agent_image.to_owned(), ..self.options.clone() };
        options.receiver.extend(flags.iter().map(|&flag| flag.to_owned()));
        let process = self.launch_at(name, (events, enrolment), &options).await?;
        Ok(Replica { process, events: self.at(events), enrolment: enrolment.map(|port| self.at(port)) })
    }

    async fn launch(&self, name: &str, event_port: u16, options: &Options) -> Result<ProductProcess> {
        self.launch_at(name, (event_port, self.enrolment_port), options).await
    }

    async fn launch_at(
        &self,
        name: &str,
        (event_port, enrolment_port): (u16, Option<u16>),
        options: &Options,
    ) -> Result<ProductProcess> {
        let probes = ports::free()?;
        let admin = ports::free()?;
        let kubeconfig = self.dir.join(format!("{name}.kubeconfig"));
        let token = self.kcp.service_account_token(&self.name, rights::RECEIVER).await?;
        let kcp = self
            .kcp_proxy
            .as_ref()
            .map_or_else(|| self.kcp.url(), |kcp_proxy| format!("https://{}", kcp_proxy.address()));
        fs::write(&kubeconfig, self.kcp.kubeconfig_at(&kcp, &token))?;
        let path = |file: &str| self.dir.join(file).into_os_string();
        let text = |text: &dyn ToString| text.to_string().into();
        let local = |port: u16| self.at(port);
        let mut program = Program::new(name, self.binaries.receiver()?, self.dir.join(format!("{name}.log")))
            .env("RUST_LOG", options.log.clone())
            .args([text(&"--kubeconfig"), kubeconfig.into_os_string(), text(&"--namespace"), text(&self.name)])
            .args([text(&"--event-address"), text(&local(event_port)), text(&"--authority"), text(&self.authorities())])
            .args([text(&"--metrics-address"), text(&local(probes)), text(&"--admin-address"), text(&local(admin))])
            .args([text(&"--lease-seconds"), text(&options.lease_seconds), text(&"--lease-place"), text(&name)])
            .args([text(&"--trust-domain"), text(&self.trust_domain)])
            .args(["--allow-runtime-addresses", "127.0.0.0/8,::1/128"])
            .args([
                text(&"--oci-registry-host"),
                text(&options.registry.clone().unwrap_or_else(|| self.artefacts.host())),
                text(&"--oci-content-dir"),
                options.content_dir.clone().map_or_else(|| path(&format!("{name}.content")), PathBuf::into_os_string),
            ])
            .args([text(&"--heartbeat-seconds"), text(&options.heartbeat_seconds)])
            .args([text(&"--module-upgrade-rollout-max-delay"), text(&options.rollout_seconds)])
            .args(options.receiver.clone());
        program = match enrolment_port {
            Some(port) if options.agent_image.is_empty() => program
                .args([text(&"--tls-cert"), path("tls.crt"), text(&"--tls-key"), path("tls.key")])
                .args([text(&"--server-ca"), path("ca.crt"), text(&"--enrolment-address"), text(&local(port))]),
            Some(port) => program
                .args([
                    text(&"--agent-image"),
                    text(&options.agent_image),
                    text(&"--enrolment-address"),
                    text(&local(port)),
                ])
                .args([text(&"--receiver-url"), text(&format_args!("https://{}", self.agents_authority()))])
                .args([
                    text(&"--enrolment-url"),
                    text(&format_args!("https://{}", self.agents_enrolment().unwrap_or_else(|| local(port)))),
                ]),
            None => program
                .args([text(&"--tls-cert"), path("tls.crt"), text(&"--tls-key"), path("tls.key")])
                .args([text(&"--client-ca"), path("ca.crt")]),
        };
        if options.stamps {
            program = program.args([text(&"--stamp-file"), path("stamps")]);
        }
        let process = ProductProcess::start(program, self.at(probes))?;
        Ok(process.with_admin(self.at(admin)))
    }

    /// Access to the receiver's process, to kill, stop or inspect it.
    ///
    /// # Errors
    /// When none was started.
    pub async fn with_receiver<T>(&self, act: impl AsyncFnOnce(&ProductProcess) -> T) -> Result<T> {
        let receiver = self.receiver.lock().await;
        Ok(act(receiver.as_ref().context("the receiver was not started")?).await)
    }

    /// The id that a runtime of this name gets.
    ///
    /// # Errors
    /// When it is no valid id.
    pub fn runtime_id(&self, name: &str) -> Result<RuntimeId> {
        Ok(format!("{}.{name}", self.namespace()).parse()?)
    }

    /// Registers a runtime: its Kyma and its access Secret in KCP. The agent is not started yet.
    ///
    /// # Errors
    /// When a cluster refuses a request.
    pub async fn register(self: &Arc<Self>, cluster: Arc<Cluster>) -> Result<Runtime> {
        Runtime::register(self.clone(), cluster).await
    }

    /// Prepares a runtime as its infrastructure does: the control plane's account there. KCP has neither its Kyma nor its
    /// access Secret yet.
    ///
    /// # Errors
    /// When the cluster refuses a request.
    pub async fn prepare_runtime(self: &Arc<Self>, cluster: Arc<Cluster>) -> Result<Runtime> {
        Runtime::prepare(self.clone(), cluster).await
    }

    /// The control plane.
    pub fn kcp(&self) -> &Arc<Cluster> {
        &self.kcp
    }

    /// A client of KCP's operator.
    pub fn operator(&self) -> Client {
        self.operator.clone()
    }

    /// Its namespace in KCP.
    pub fn namespace(&self) -> &str {
        &self.name
    }

    /// The CA of both sides, unless the receiver has one of its own.
    pub fn ca(&self) -> &Ca {
        &self.ca
    }

    /// The trust domain of the runtimes.
    pub fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }

    /// The registry of the modules, if no other one was set.
    pub fn artefacts(&self) -> &ArtefactServer {
        &self.artefacts
    }

    /// Host and port of the receiver's event port.
    pub fn authority(&self) -> String {
        self.at(self.event_port).to_string()
    }

    /// The receiver's event port.
    pub fn event_port(&self) -> u16 {
        self.event_port
    }

    /// The enrolment port, if the receiver issues the agents' certificates.
    pub fn enrolment_port(&self) -> Option<u16> {
        self.enrolment_port
    }

    /// Address at which agents enrol: the enrolment port, or the proxy in front of it.
    pub fn agents_enrolment(&self) -> Option<SocketAddr> {
        let proxy = self.enrolment_proxy.as_ref().map(Proxy::address);
        proxy.or_else(|| Some(self.at(self.enrolment_port?)))
    }

    /// Round-trip time between the receiver and the runtimes.
    pub fn distance(&self) -> Duration {
        self.options.distance
    }

    /// Host and port to which agents connect: those of another port, or of the proxy, if there is one.
    pub fn agents_authority(&self) -> String {
        let port = self.options.agents_port.map(|port| self.at(port).to_string());
        let agents_proxy = self.agents_proxy.as_ref().map(|agents_proxy| agents_proxy.address().to_string());
        port.or(agents_proxy).unwrap_or_else(|| self.authority())
    }

    /// The proxy between agents and receiver, if there is one.
    pub fn agents_proxy(&self) -> Option<&Proxy> {
        self.agents_proxy.as_ref()
    }

    /// The proxy between receiver and KCP, if there is one.
    pub fn kcp_proxy(&self) -> Option<&Proxy> {
        self.kcp_proxy.as_ref()
    }

    /// A port of [`Options::loopback`].
    fn at(&self, port: u16) -> SocketAddr {
        (self.options.loopback, port).into()
    }

    fn authorities(&self) -> String {
        if self.agents_proxy.is_some() {
            format!("{},{}", self.authority(), self.agents_authority())
        } else {
            self.authority()
        }
    }

    /// File of the receiver's stamps.
    pub fn stamp_file(&self) -> PathBuf {
        self.dir.join("stamps")
    }
}

/// Starts a proxy in front of an address at this distance.
async fn start_proxy(target: SocketAddr, distance: Duration) -> Result<Proxy> {
    let proxy = Proxy::start(target).await.with_context(|| format!("start a proxy in front of {target}"))?;
    proxy.set_round_trip(distance);
    Ok(proxy)
}

/// Folders of all landscapes that this process has ever made. Two landscapes of one name would share namespace, Kyma
/// and Lease, and disturb each other in ways that are hard to diagnose.
static CLAIMED: Lock<BTreeSet<PathBuf>> = Lock::new(BTreeSet::new());

fn claim(place: &Path) {
    let is_new = CLAIMED.lock().insert(place.to_owned());
    assert!(is_new, "the landscape {} is there already: each needs a name of its own in its KCP", place.display());
}

/// Current time in Unix seconds, as in certificates.
pub fn now() -> i64 {
    Timestamp::now().as_second()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinct_landscapes_are_accepted() {
        claim(Path::new("kcp-1/one"));
        claim(Path::new("kcp-1/another"));
        claim(Path::new("kcp-2/one"));
    }

    #[test]
    #[should_panic(expected = "the landscape kcp/twice is there already")]
    fn duplicate_landscape_is_refused() {
        claim(Path::new("kcp/twice"));
        claim(Path::new("kcp/twice"));
    }
}
