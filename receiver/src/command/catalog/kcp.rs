//! Reads the catalog of a live KCP, and nothing else of it but the labels of its Kymas.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use clap::Args;
use k8s_openapi::{NamespaceResourceScope, api::core::v1::ConfigMap};
use kube::{
    Api, Client, Config, Resource,
    api::ListParams,
    core::{DeserializeGuard, PartialObjectMeta},
};
use serde::de::DeserializeOwned;
use tidewatch_shared::{
    api::{Kyma, ModuleReleaseMeta, ModuleTemplate},
    names, table,
};
use tokio::{runtime, time::timeout};

use crate::{
    base::takeover::Takeover,
    controllers::catalog::{check::Objects, preview::Live, view::Viewer},
    kube::runtime_access::{ListLimits, list_all},
};

/// One object.
const DEADLINE: Duration = Duration::from_secs(30);
/// One list: of more Kymas than one KCP serves, and of more versions than fit into a runtime.
const LIST: ListLimits =
    ListLimits { page: 500, pages: 1_000, objects: 200_000, bytes: 1 << 30, deadline: Duration::from_secs(120) };

/// KCP, and what the receiver there is told.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Kcp {
    /// Kubeconfig of the control plane; without it kubectl's, or else the account of the pod.
    #[arg(long, env = "TIDEWATCH_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// Namespace of Kymas, templates and release metas.
    #[arg(short, long, env = "TIDEWATCH_NAMESPACE", default_value = names::KCP_NAMESPACE)]
    pub namespace: String,

    /// Modules that only runtimes selected by their release meta's `kymaSelector` may see, as the receiver is told.
    #[arg(long, env = "TIDEWATCH_RESTRICTED_DEFAULT_MODULES", value_delimiter = ',')]
    pub restricted_default_modules: Vec<String>,
}

/// Waits for KCP.
pub(super) fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build().context("build the runtime")?;
    runtime.block_on(work)
}

impl Kcp {
    pub(super) fn restricted(&self) -> BTreeSet<String> {
        self.restricted_default_modules.iter().cloned().collect()
    }

    /// All that a preview needs.
    pub(super) async fn live(&self, kyma_selector: &str) -> Result<Live> {
        let client = self.client().await?;
        let selector = Takeover::new(kyma_selector, Duration::ZERO).query();
        let kymas: Api<PartialObjectMeta<Kyma>> = self.api(&client);
        let selected = ListParams::default().labels(&selector);
        let kymas = list_all(&kymas, &selected, &LIST).await.context("list the Kymas")?;
        Ok(Live {
            objects: self.objects(&client).await?,
            kymas: kymas.into_iter().map(|kyma| kyma.metadata.labels.unwrap_or_default()).collect(),
            releases: self.releases(&client).await?,
        })
    }

    /// All that a view needs.
    pub(super) async fn viewer(&self, name: &str) -> Result<(Viewer, Objects, Option<ConfigMap>)> {
        let client = self.client().await?;
        let kymas: Api<Kyma> = self.api(&client);
        let kyma = in_time(kymas.get_metadata_opt(name)).await.with_context(|| format!("read the Kyma {name}"))?;
        let kyma = kyma.with_context(|| format!("there is no Kyma {name} in {}", self.namespace))?;
        let labels = kyma.metadata.labels.unwrap_or_default();
        let viewer = Viewer { name: name.to_owned(), namespace: self.namespace.clone(), labels };
        Ok((viewer, self.objects(&client).await?, self.releases(&client).await?))
    }

    async fn client(&self) -> Result<Client> {
        let inferred = async { Config::infer().await.context("find the control plane") };
        let config = crate::kube::client::config(self.kubeconfig.as_deref(), inferred).await?;
        Client::try_from(config).context("build the client of the control plane")
    }

    fn api<K>(&self, client: &Client) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(client.clone(), &self.namespace)
    }

    async fn objects(&self, client: &Client) -> Result<Objects> {
        Ok(Objects {
            templates: self.list::<ModuleTemplate>(client).await.context("list the templates")?,
            release_metas: self.list::<ModuleReleaseMeta>(client).await.context("list the release metas")?,
        })
    }

    /// What of a kind can be read. The rest is named, and left out as the receiver leaves it out.
    async fn list<K>(&self, client: &Client) -> Result<Vec<Arc<K>>>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let api: Api<DeserializeGuard<K>> = self.api(client);
        let all = list_all(&api, &ListParams::default(), &LIST).await?;
        let read = all.into_iter().filter_map(|object| match object.0 {
            Ok(object) => Some(Arc::new(object)),
            Err(invalid) => {
                let name = invalid.metadata.name.unwrap_or_default();
                eprintln!("{}", table::sanitize(&format!("{} {name} is left out: {}", K::kind(&()), invalid.error)));
                None
            }
        });
        Ok(read.collect())
    }

    async fn releases(&self, client: &Client) -> Result<Option<ConfigMap>> {
        let api: Api<ConfigMap> = self.api(client);
        in_time(api.get_opt(names::RELEASES)).await.with_context(|| format!("read the ConfigMap {}", names::RELEASES))
    }
}

async fn in_time<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T> {
    Ok(timeout(DEADLINE, call).await.context("no answer in time")??)
}
