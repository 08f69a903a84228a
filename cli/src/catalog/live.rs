//! The live catalog in KCP, with the Kymas and Manifests that a change of it affects.

use std::{collections::BTreeSet, fmt::Debug, sync::Arc};

use anyhow::{Context as _, Result};
use clap::Args;
use k8s_openapi::{NamespaceResourceScope, api::core::v1::ConfigMap};
use kube::{
    Api, Client, Resource,
    api::ListParams,
    core::{DeserializeGuard, ObjectMeta},
};
use serde::de::DeserializeOwned;
use tidewatch_api::{
    Kyma, Manifest, ModuleReleaseMeta, ModuleTemplate,
    labels::is_label_value,
    names::{self, label},
    selectors::managed_kymas,
};
use tidewatch_author::{check::Objects, preview::Live};
use tidewatch_cluster::runtime_access::list_map;
use tidewatch_kit::table;
use tidewatch_select::catalog::visibility::restricted_modules;

use crate::cluster::{ClusterFlags, LIST_LIMITS, within_deadline};

/// Modules that a label selector names, far above those of one change.
const MAX_SELECTED: usize = 50;

/// Flags of the live catalog.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct LiveFlags {
    /// Control plane with the catalog.
    #[command(flatten)]
    pub cluster: ClusterFlags,

    /// Modules visible only to runtimes that match their release meta's kymaSelector, as for the receiver
    #[arg(long, env = "TIDEWATCH_RESTRICTED_DEFAULT_MODULES", value_delimiter = ',', value_name = "MODULE")]
    pub restricted_default_modules: Vec<String>,
}

impl LiveFlags {
    pub(super) fn restricted(&self) -> BTreeSet<String> {
        restricted_modules(&self.restricted_default_modules)
    }

    /// Reads the catalog and the Kymas, whose status is left out.
    pub(super) async fn read(&self, client: &Client, kyma_selector: &str) -> Result<(Live, Vec<Kyma>)> {
        let without_status = |mut kyma: Kyma| {
            (kyma.status, kyma.metadata.managed_fields) = (None, None);
            kyma
        };
        let kymas = self.kymas(client, kyma_selector, without_status).await?;
        let live = Live {
            objects: self.objects(client).await?,
            kymas: kymas.iter().map(|kyma| kyma.metadata.labels.clone().unwrap_or_default()).collect(),
            releases: self.config_map(client, names::RELEASES).await?,
            rollouts: self.config_map(client, names::ROLLOUTS).await?,
        };
        Ok((live, kymas))
    }

    /// Reads the Kymas that the receiver manages, and keeps what `keep` returns of each.
    pub(crate) async fn kymas(
        &self,
        client: &Client,
        kyma_selector: &str,
        keep: impl Fn(Kyma) -> Kyma,
    ) -> Result<Vec<Kyma>> {
        let selected = ListParams::default().labels(&managed_kymas(kyma_selector));
        self.list(client, &selected, keep).await.context("list the Kymas")
    }

    /// Reads the Manifests of these modules, and keeps what `keep` returns of each.
    pub(crate) async fn manifests(
        &self,
        client: &Client,
        modules: &BTreeSet<String>,
        keep: impl Fn(Manifest) -> Manifest,
    ) -> Result<Vec<Manifest>> {
        let mut params = ListParams::default();
        // No Manifest has another name in its label.
        let names: Vec<_> = modules.iter().map(String::as_str).filter(|name| is_label_value(name)).collect();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        // A longer selector could exceed the limit of a URL.
        if names.len() <= MAX_SELECTED {
            params = params.labels(&format!("{} in ({})", label::MODULE_NAME, names.join(",")));
        }
        self.list(client, &params, keep).await.context("list the Manifests")
    }

    /// Reads the input of one Kyma's view.
    pub(super) async fn viewer(&self, name: &str) -> Result<(ObjectMeta, Objects, Option<ConfigMap>)> {
        let client = self.cluster.client().await?;
        let namespace = &self.cluster.namespace;
        let kymas: Api<Kyma> = self.cluster.api(&client);
        let kyma = within_deadline(kymas.get_metadata_opt(name)).await;
        let kyma = kyma.with_context(|| format!("read the Kyma {name}"))?;
        let kyma = kyma.with_context(|| format!("there is no Kyma {name} in {namespace}"))?;
        Ok((kyma.metadata, self.objects(&client).await?, self.config_map(&client, names::RELEASES).await?))
    }

    pub(crate) async fn objects(&self, client: &Client) -> Result<Objects> {
        Ok(Objects {
            templates: self.all::<ModuleTemplate>(client).await.context("list the ModuleTemplates")?,
            release_metas: self.all::<ModuleReleaseMeta>(client).await.context("list the ModuleReleaseMetas")?,
        })
    }

    /// Lists all readable objects of a kind.
    pub(super) async fn all<K>(&self, client: &Client) -> Result<Vec<Arc<K>>>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
    {
        self.list(client, &ListParams::default(), Arc::new).await
    }

    /// Lists the readable objects of a kind, and keeps what `keep` returns of each. Reports the others on stderr and leaves
    /// them out, as the receiver does.
    async fn list<K, T>(&self, client: &Client, selected: &ListParams, keep: impl Fn(K) -> T) -> Result<Vec<T>>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
    {
        let api: Api<DeserializeGuard<K>> = self.cluster.api(client);
        let readable = |object: DeserializeGuard<K>| match object.0 {
            Ok(object) => Some(keep(object)),
            Err(invalid) => {
                let name = invalid.metadata.name.unwrap_or_default();
                eprintln!("{}", table::sanitize(&format!("{} {name} is left out: {}", K::kind(&()), invalid.error)));
                None
            }
        };
        Ok(list_map(&api, selected, &LIST_LIMITS, readable).await?.into_iter().flatten().collect())
    }

    /// Reads a ConfigMap; `None` if it does not exist.
    pub(crate) async fn config_map(&self, client: &Client, name: &str) -> Result<Option<ConfigMap>> {
        let api: Api<ConfigMap> = self.cluster.api(client);
        let map = within_deadline(api.get_opt(name)).await;
        map.with_context(|| format!("read the ConfigMap {name}"))
    }
}
