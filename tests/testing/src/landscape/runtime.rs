//! One runtime of a landscape: its cluster, its Kyma, its access Secret, and its agent's process.

use std::{collections::BTreeMap, fs, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma,
    identity::RuntimeId,
    names::{SKR_KYMA, SKR_NAMESPACE},
};
use tokio::sync::Mutex;

use super::{DEADLINE, Landscape, now, objects, rights, start_proxy, until};
use crate::{
    control_plane::{Cluster, ClusterUser, apiserver},
    ports,
    process::Program,
    product::ProductProcess,
    proxy::Proxy,
};

/// See the module.
pub struct Runtime {
    landscape: Arc<Landscape>,
    cluster: Arc<Cluster>,
    id: RuntimeId,
    dir: PathBuf,
    // Made once, so that no write of the user's includes a handshake.
    user: Client,
    proxies: Option<RuntimeProxies>,
    agent: Mutex<Option<ProductProcess>>,
}

/// Proxies in front of a runtime's API server.
#[derive(Debug)]
pub struct RuntimeProxies {
    /// On the agent's path.
    pub agent: Proxy,
    /// On the receiver's path.
    pub receiver: Proxy,
}

impl Runtime {
    pub(super) async fn register(landscape: Arc<Landscape>, cluster: Arc<Cluster>) -> Result<Self> {
        let this = Self::prepare(landscape, cluster).await?;
        this.write_access(&this.control_plane_kubeconfig().await?).await?;
        let Self { landscape, cluster, id, .. } = &this;
        objects::write_kyma(&landscape.kcp, &landscape.name, cluster.name(), id.as_str()).await?;
        Ok(this)
    }

    pub(super) async fn prepare(landscape: Arc<Landscape>, cluster: Arc<Cluster>) -> Result<Self> {
        let id: RuntimeId = landscape.runtime_id(cluster.name())?;
        let dir = landscape.dir.join(cluster.name());
        fs::create_dir_all(&dir)?;
        cluster.ensure_service_account("kube-system", rights::CONTROL_PLANE).await?;
        rights::grant_control_plane(&cluster).await?;
        let user = cluster.client_as(ClusterUser::User).await?;
        let proxies = if landscape.options.has_proxies() {
            let server = cluster.server().address();
            let agent = start_proxy(server, Duration::ZERO).await?;
            let receiver = start_proxy(server, landscape.distance()).await?;
            Some(RuntimeProxies { agent, receiver })
        } else {
            None
        };
        Ok(Self { landscape, cluster, id, dir, user, proxies, agent: Mutex::new(None) })
    }

    /// A kubeconfig of the control plane for this runtime, with a new token.
    ///
    /// # Errors
    /// When the runtime issues no token.
    pub async fn control_plane_kubeconfig(&self) -> Result<String> {
        let token = self.cluster.service_account_token("kube-system", rights::CONTROL_PLANE).await?;
        Ok(self.kubeconfig(self.proxies.as_ref().map(|proxies| &proxies.receiver), &token))
    }

    /// Replaces the kubeconfig in the access Secret.
    ///
    /// # Errors
    /// When KCP refuses it.
    pub async fn write_access(&self, kubeconfig: &str) -> Result<()> {
        objects::write_access(&self.landscape.kcp, &self.landscape.name, self.name(), kubeconfig).await
    }

    /// Starts or restarts the agent under an account of its own, and waits until it is ready. The receiver must be
    /// running: it creates the namespace and the plan.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn start_agent(&self) -> Result<()> {
        let mut agent = self.agent.lock().await;
        self.make_account().await?;
        let token = self.cluster.service_account_token(SKR_NAMESPACE, rights::AGENT).await?;
        let kubeconfig = self.dir.join("agent.kubeconfig");
        fs::write(&kubeconfig, self.kubeconfig(self.proxies.as_ref().map(|proxies| &proxies.agent), &token))?;
        self.write_identity()?;
        let probes = ports::free()?;
        let admin = ports::free()?;
        let landscape = &self.landscape;
        let text = |text: &dyn ToString| text.to_string().into();
        let program = Program::new("agent", landscape.binaries.agent()?, self.dir.join("agent.log"))
            .env("RUST_LOG", landscape.options.log.clone())
            .args([text(&"--kubeconfig"), kubeconfig.into_os_string()])
            .args([text(&"--receiver-url"), text(&format_args!("https://{}", landscape.agents_authority()))])
            .args([text(&"--identity-dir"), self.dir.clone().into_os_string()])
            .args([text(&"--trust-domain"), text(&landscape.trust_domain)])
            .args([text(&"--metrics-address"), text(&landscape.at(probes))])
            .args([text(&"--admin-address"), text(&landscape.at(admin))])
            .args([text(&"--heartbeat-seconds"), text(&landscape.options.heartbeat_seconds)])
            .args(landscape.options.agent.clone());
        let process = ProductProcess::start(program, landscape.at(probes))?;
        let process = process.with_admin(landscape.at(admin));
        process.ready(DEADLINE).await?;
        *agent = Some(process);
        Ok(())
    }

    /// Waits for the namespace, and creates the agent's account there with its rights. For an agent that is not started
    /// by [`Runtime::start_agent`], and not installed by the receiver.
    ///
    /// # Errors
    /// When the receiver does not create the namespace, or the runtime refuses a request.
    pub async fn make_account(&self) -> Result<()> {
        let namespaces = Api::<Namespace>::all(self.cluster.client().await?);
        until("the receiver to make the runtime's namespace", async || {
            Ok(namespaces.get_opt(SKR_NAMESPACE).await?.map(drop))
        })
        .await?;
        self.cluster.ensure_service_account(SKR_NAMESPACE, rights::AGENT).await?;
        rights::grant_agent(&self.cluster).await.context("grant the agent its rights")
    }

    /// Access to the agent's process, to kill, stop or inspect it.
    ///
    /// # Errors
    /// When none was started.
    pub async fn with_agent<T>(&self, act: impl AsyncFnOnce(&ProductProcess) -> T) -> Result<T> {
        let agent = self.agent.lock().await;
        Ok(act(agent.as_ref().context("the agent was not started")?).await)
    }

    /// Lets the agent list and watch the resource of a Watcher, in all namespaces.
    ///
    /// # Errors
    /// When the runtime refuses it.
    pub async fn grant_agent(&self, group: &str, resource: &str) -> Result<()> {
        rights::grant_watch(&self.cluster, group, resource).await
    }

    /// Revokes [`Runtime::grant_agent`].
    ///
    /// # Errors
    /// When the runtime refuses it.
    pub async fn revoke_agent(&self, resource: &str) -> Result<()> {
        rights::revoke_watch(&self.cluster, resource).await
    }

    /// The proxies in front of its API server, if there are any.
    pub fn proxies(&self) -> Option<&RuntimeProxies> {
        self.proxies.as_ref()
    }

    /// A client of the operator, as far from the runtime as the receiver is.
    ///
    /// # Errors
    /// When it cannot be made.
    pub async fn distant_client(&self) -> Result<Client> {
        let token = self.cluster.credentials().token(ClusterUser::Admin);
        let proxy = self.proxies.as_ref().map(|proxies| &proxies.receiver);
        Ok(apiserver::client(self.name(), &self.kubeconfig(proxy, token)).await?)
    }

    fn kubeconfig(&self, proxy: Option<&Proxy>, token: &str) -> String {
        let url = proxy.map_or_else(|| self.cluster.url(), |proxy| format!("https://{}", proxy.address()));
        self.cluster.kubeconfig_at(&url, token)
    }

    fn write_identity(&self) -> Result<()> {
        let files = self.make_identity()?;
        files
            .into_iter()
            .try_for_each(|(file, text)| fs::write(self.dir.join(file), text).with_context(|| format!("write {file}")))
    }

    /// A new identity of the runtime: the files `tls.key`, `tls.crt` and `ca.crt`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn make_identity(&self) -> Result<BTreeMap<&'static str, String>> {
        let landscape = &self.landscape;
        let pair =
            landscape.ca.make_runtime(&self.id, &landscape.trust_domain, now(), tidewatch_trust::RUNTIME_VALIDITY)?;
        let bundle = landscape.ca.trust_bundle().to_pem();
        Ok([("tls.key", pair.key), ("tls.crt", pair.chain), ("ca.crt", bundle)].into())
    }

    /// Its name: that of its cluster, and of its Kyma in KCP.
    pub fn name(&self) -> &str {
        self.cluster.name()
    }

    /// Its runtime id.
    pub fn id(&self) -> &RuntimeId {
        &self.id
    }

    /// Its cluster.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// A client of the runtime's user.
    pub fn user(&self) -> Client {
        self.user.clone()
    }

    /// The Kyma in KCP.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn kcp_kyma(&self) -> Result<Option<Kyma>> {
        Ok(Api::<Kyma>::namespaced(self.landscape.operator(), &self.landscape.name).get_opt(self.name()).await?)
    }

    /// The Kyma in the runtime.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn skr_kyma(&self) -> Result<Option<Kyma>> {
        Ok(self.skr_kymas().get_opt(SKR_KYMA).await?)
    }

    /// Merges a patch into the Kyma in the runtime, as its user, once it exists: a path can be proven before the first
    /// reconcile has created the Kyma.
    ///
    /// # Errors
    /// When the runtime refuses it, or has no Kyma in time.
    pub async fn patch_kyma(&self, patch: &Value) -> Result<Kyma> {
        let condition = format!("the Kyma to be placed in {}", self.name());
        let patched = until(&condition, async || {
            Ok(match self.skr_kymas().patch(SKR_KYMA, &PatchParams::default(), &Patch::Merge(patch)).await {
                Err(kube::Error::Api(status)) if status.is_not_found() => None,
                patched => Some(patched),
            })
        })
        .await?;
        Ok(patched?)
    }

    /// Sets the modules of the Kyma in the runtime, as its user.
    ///
    /// # Errors
    /// When the runtime refuses it.
    pub async fn select(&self, modules: &[&str]) -> Result<Kyma> {
        let modules: Vec<_> = modules.iter().map(|name| json!({"name": name})).collect();
        self.patch_kyma(&json!({"spec": {"modules": modules}})).await
    }

    fn skr_kymas(&self) -> Api<Kyma> {
        Api::namespaced(self.user(), SKR_NAMESPACE)
    }
}
