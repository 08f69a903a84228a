//! One cluster of the test bed: an API server, its credentials, and workloads if requested.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use k8s_openapi::{
    api::{
        authentication::v1::{TokenRequest, TokenRequestSpec},
        core::v1::{Namespace, ServiceAccount},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Api, Client, Resource, api::PostParams};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::Mutex;

use super::{
    apiserver::{self, Admission, ApiServer, ApiServerError, Settings},
    audit::{self, Mark, RequestKind, TimedWrite, Write},
    binaries::{Binaries, BinariesError, Tool},
    credentials::{ClusterUser, Credentials, CredentialsError},
    etcd::{Etcd, EtcdError},
    workloads::{Workloads, WorkloadsError},
};

/// Lifetime of a test's token in seconds; the API server allows no less than ten minutes.
const TOKEN_SECONDS: i64 = 24 * 3600;

/// Failure of a cluster's operation.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// A binary is missing.
    #[error("find the binaries")]
    Binaries(#[from] BinariesError),
    /// Keys or certificates cannot be made.
    #[error("make credentials")]
    Credentials(#[from] CredentialsError),
    /// Its own store failed.
    #[error("run the store")]
    Store(#[from] EtcdError),
    /// The API server failed.
    #[error("run the API server")]
    ApiServer(#[from] ApiServerError),
    /// Controller manager, scheduler or kwok failed.
    #[error("run the workloads")]
    Workloads(#[from] WorkloadsError),
    /// The API server refused or did not answer.
    #[error("{operation} in {cluster}")]
    Api {
        /// The operation.
        operation: &'static str,
        /// Name of the cluster.
        cluster: String,
        /// The client's error.
        #[source]
        source: Box<kube::Error>,
    },
    /// The audit log or a file cannot be read or written.
    #[error("use the files of {0}")]
    Files(String, #[source] io::Error),
}

/// A running cluster. Its processes end with it.
#[derive(Debug)]
pub struct Cluster {
    name: String,
    dir: PathBuf,
    credentials: Arc<Credentials>,
    // Before the API server in the order of drops: it depends on it.
    workloads: Mutex<Option<Workloads>>,
    server: ApiServer,
    // After the API server: without a store its end would take a minute.
    store: Option<Etcd>,
    binaries: Binaries,
}

impl Cluster {
    /// Starts the API server, the controllers unless it is [`Admission::ApiOnly`], and with [`Admission::Workloads`]
    /// scheduler and kwok. Without an etcd URL it starts an etcd of its own.
    pub(crate) async fn start(
        binaries: &Binaries,
        bed: &Path,
        name: &str,
        etcd_url: Option<&str>,
        admission: Admission,
    ) -> Result<Self, ClusterError> {
        let binary = binaries.get(Tool::KubeApiserver).await?;
        let dir = apiserver::folder(bed, name)?;
        let credentials = Arc::new(Credentials::create(name, &dir)?);
        let name = name.to_owned();
        let (etcd_url, store) = match etcd_url {
            Some(url) => (url.to_owned(), None),
            None => {
                let store = Etcd::start(&binaries.get(Tool::Etcd).await?, &dir.join("etcd")).await?;
                (store.url().to_owned(), Some(store))
            }
        };
        let settings = Settings { binary, name: name.clone(), dir: dir.clone(), etcd_url, admission };
        let server = ApiServer::start(settings, Arc::clone(&credentials)).await?;
        let binaries = binaries.clone();
        let this = Self { name, dir, credentials, workloads: Mutex::new(None), server, store, binaries };
        for user in [ClusterUser::Admin, ClusterUser::User, ClusterUser::Other] {
            this.write_kubeconfig(user)?;
        }
        if admission != Admission::ApiOnly {
            let simulate_pods = admission == Admission::Workloads;
            let workloads = Workloads::start(&this, &this.binaries, simulate_pods).await?;
            *this.workloads.lock().await = Some(workloads);
        }
        Ok(this)
    }

    /// Name: `kcp`, or that of the runtime.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Folder with logs, keys and kubeconfigs.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The API server's URL.
    pub fn url(&self) -> String {
        format!("https://{}", self.server.address())
    }

    /// The CA's certificate, PEM, and the ServiceAccount issuer's keys.
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// The API server: its address, its process, and faults (`kill`, `freeze`, `thaw`, `restart`).
    pub fn server(&self) -> &ApiServer {
        &self.server
    }

    /// Its own etcd; `None` if it shares that of the test bed, which must not be disturbed.
    pub fn store(&self) -> Option<&Etcd> {
        self.store.as_ref()
    }

    /// A new admin client on the calling tokio executor. (A client of another test's executor would die with it.)
    ///
    /// # Errors
    /// [`ClusterError::ApiServer`].
    pub async fn client(&self) -> Result<Client, ClusterError> {
        self.client_as(ClusterUser::Admin).await
    }

    /// A new client on the calling tokio executor for one of the test bed's users.
    ///
    /// # Errors
    /// [`ClusterError::ApiServer`].
    pub async fn client_as(&self, user: ClusterUser) -> Result<Client, ClusterError> {
        self.client_for_token(self.credentials.token(user)).await
    }

    /// A new client on the calling tokio executor for a bearer token.
    ///
    /// # Errors
    /// [`ClusterError::ApiServer`].
    pub async fn client_for_token(&self, token: &str) -> Result<Client, ClusterError> {
        Ok(apiserver::client(&self.name, &self.kubeconfig_for_token(token)).await?)
    }

    /// Path of a user's kubeconfig file, for `kubectl --kubeconfig`.
    pub fn kubeconfig_path(&self, user: ClusterUser) -> PathBuf {
        self.dir.join(format!("{}.kubeconfig", user.name()))
    }

    /// A kubeconfig (YAML) with this bearer token, for instance for an access Secret.
    pub fn kubeconfig_for_token(&self, token: &str) -> String {
        self.kubeconfig_at(&self.url(), token)
    }

    /// A kubeconfig (YAML) that reaches the API server by another URL: a proxy on 127.0.0.1 or localhost.
    pub fn kubeconfig_at(&self, url: &str, token: &str) -> String {
        self.credentials.kubeconfig(&self.name, url, token)
    }

    /// Creates the namespace and the account unless they exist.
    ///
    /// # Errors
    /// [`ClusterError::Api`].
    pub async fn ensure_service_account(&self, namespace: &str, name: &str) -> Result<(), ClusterError> {
        self.ensure_namespace(namespace).await?;
        let account = ServiceAccount { metadata: named(name), ..Default::default() };
        let accounts = Api::namespaced(self.client().await?, namespace);
        self.create_if_missing("create an account", &accounts, &account).await
    }

    /// Creates the namespace unless it exists.
    ///
    /// # Errors
    /// [`ClusterError::Api`].
    pub async fn ensure_namespace(&self, name: &str) -> Result<(), ClusterError> {
        let namespace = Namespace { metadata: named(name), ..Default::default() };
        self.create_if_missing("create a namespace", &Api::all(self.client().await?), &namespace).await
    }

    /// A token of an existing account for the API server itself, valid for a day.
    ///
    /// # Errors
    /// [`ClusterError::Api`].
    pub async fn service_account_token(&self, namespace: &str, name: &str) -> Result<String, ClusterError> {
        self.service_account_token_for(namespace, name, &[]).await
    }

    /// A token of an existing account for these audiences, valid for a day.
    ///
    /// # Errors
    /// [`ClusterError::Api`].
    pub async fn service_account_token_for(
        &self,
        namespace: &str,
        name: &str,
        audiences: &[&str],
    ) -> Result<String, ClusterError> {
        let audiences = audiences.iter().map(|&audience| audience.to_owned()).collect();
        let spec = TokenRequestSpec { audiences, expiration_seconds: Some(TOKEN_SECONDS), bound_object_ref: None };
        let request = TokenRequest { spec, ..Default::default() };
        let accounts = Api::<ServiceAccount>::namespaced(self.client().await?, namespace);
        let answer = accounts.create_token_request(name, &PostParams::default(), &request).await;
        let status = answer.map_err(|e| self.api("request a token", e))?.status;
        Ok(status.map(|status| status.token).unwrap_or_default())
    }

    /// The current end of the audit log, for [`Cluster::writes_since`].
    ///
    /// # Errors
    /// [`ClusterError::Files`].
    pub fn audit_mark(&self) -> Result<Mark, ClusterError> {
        audit::mark(&self.dir).map_err(|e| self.files(e))
    }

    /// Every write request since the mark with its user, refused ones included; reviews and token requests are not
    /// writes.
    ///
    /// # Errors
    /// [`ClusterError::Files`].
    pub fn writes_since(&self, mark: Mark) -> Result<Vec<Write>, ClusterError> {
        audit::writes_since(&self.dir, mark).map_err(|e| self.files(e))
    }

    /// The same with the time of each.
    ///
    /// # Errors
    /// [`ClusterError::Files`].
    pub fn timed_writes_since(&self, mark: Mark) -> Result<Vec<TimedWrite>, ClusterError> {
        audit::timed_since(&self.dir, mark).map_err(|e| self.files(e))
    }

    /// The API server's own count of write requests, by verb and resource; reviews and token requests are included.
    /// Starts at zero with the API server.
    ///
    /// # Errors
    /// [`ClusterError::Api`].
    pub async fn write_requests(&self) -> Result<BTreeMap<RequestKind, u64>, ClusterError> {
        let request = http::Request::get("/metrics").body(Vec::new());
        let request = request.map_err(|e| self.api("read metrics", kube::Error::HttpError(e)))?;
        let text = self.client().await?.request_text(request).await;
        Ok(audit::write_requests(&text.map_err(|e| self.api("read metrics", e))?))
    }

    /// Kills all its processes with SIGKILL.
    pub(crate) fn kill(&self) {
        if let Ok(mut workloads) = self.workloads.try_lock() {
            *workloads = None;
        }
        self.server.kill();
        if let Some(store) = &self.store {
            store.kill();
        }
    }

    pub(crate) fn write_kubeconfig(&self, user: ClusterUser) -> Result<PathBuf, ClusterError> {
        let path = self.kubeconfig_path(user);
        let text = self.kubeconfig_for_token(self.credentials.token(user));
        std::fs::write(&path, text).map_err(|e| self.files(e))?;
        Ok(path)
    }

    async fn create_if_missing<K>(&self, operation: &'static str, api: &Api<K>, object: &K) -> Result<(), ClusterError>
    where
        K: Resource + Serialize + DeserializeOwned + Clone + std::fmt::Debug,
    {
        match api.create(&PostParams::default(), object).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            Err(error) => Err(self.api(operation, error)),
        }
    }

    fn api(&self, operation: &'static str, source: kube::Error) -> ClusterError {
        ClusterError::Api { operation, cluster: self.name.clone(), source: Box::new(source) }
    }

    fn files(&self, source: io::Error) -> ClusterError {
        ClusterError::Files(self.name.clone(), source)
    }
}

fn named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..Default::default() }
}
