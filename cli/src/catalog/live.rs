//! The live catalog in KCP. Of the Kymas only metadata is read.

use std::{collections::BTreeSet, fmt::Debug, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use clap::Args;
use k8s_openapi::{NamespaceResourceScope, api::core::v1::ConfigMap};
use kube::{
    Api, Client, Resource,
    api::ListParams,
    core::{DeserializeGuard, ObjectMeta, PartialObjectMeta},
};
use serde::de::DeserializeOwned;
use tidewatch_receiver::{
    base::takeover::Takeover,
    controllers::catalog::{check::Objects, preview::Live, visibility::restricted_modules},
    kube::runtime_access::list_all,
};
use tidewatch_shared::{
    api::{Kyma, ModuleReleaseMeta, ModuleTemplate},
    names, table,
};

use crate::cluster::{ClusterFlags, LIST_LIMITS, within_deadline};

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

    /// Reads the input of a preview.
    pub(super) async fn read(&self, kyma_selector: &str) -> Result<Live> {
        let client = self.cluster.client().await?;
        let selector = Takeover::new(kyma_selector, Duration::ZERO).query();
        let kymas: Api<PartialObjectMeta<Kyma>> = self.cluster.api(&client);
        let selected = ListParams::default().labels(&selector);
        let kymas = list_all(&kymas, &selected, &LIST_LIMITS).await.context("list the Kymas")?;
        Ok(Live {
            objects: self.objects(&client).await?,
            kymas: kymas.into_iter().map(|kyma| kyma.metadata.labels.unwrap_or_default()).collect(),
            releases: self.releases(&client).await?,
        })
    }

    /// Reads the input of one Kyma's view.
    pub(super) async fn viewer(&self, name: &str) -> Result<(ObjectMeta, Objects, Option<ConfigMap>)> {
        let client = self.cluster.client().await?;
        let namespace = &self.cluster.namespace;
        let kymas: Api<Kyma> = self.cluster.api(&client);
        let kyma = within_deadline(kymas.get_metadata_opt(name)).await;
        let kyma = kyma.with_context(|| format!("read the Kyma {name}"))?;
        let kyma = kyma.with_context(|| format!("there is no Kyma {name} in {namespace}"))?;
        Ok((kyma.metadata, self.objects(&client).await?, self.releases(&client).await?))
    }

    pub(super) async fn objects(&self, client: &Client) -> Result<Objects> {
        Ok(Objects {
            templates: self.list::<ModuleTemplate>(client).await.context("list the ModuleTemplates")?,
            release_metas: self.list::<ModuleReleaseMeta>(client).await.context("list the ModuleReleaseMetas")?,
        })
    }

    /// Lists the readable objects of a kind. Reports the others on stderr and leaves them out, as the receiver does.
    pub(super) async fn list<K>(&self, client: &Client) -> Result<Vec<Arc<K>>>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
    {
        let api: Api<DeserializeGuard<K>> = self.cluster.api(client);
        let all = list_all(&api, &ListParams::default(), &LIST_LIMITS).await?;
        let readable = all.into_iter().filter_map(|object| match object.0 {
            Ok(object) => Some(Arc::new(object)),
            Err(invalid) => {
                let name = invalid.metadata.name.unwrap_or_default();
                eprintln!("{}", table::sanitize(&format!("{} {name} is left out: {}", K::kind(&()), invalid.error)));
                None
            }
        });
        Ok(readable.collect())
    }

    async fn releases(&self, client: &Client) -> Result<Option<ConfigMap>> {
        let api: Api<ConfigMap> = self.cluster.api(client);
        let releases = within_deadline(api.get_opt(names::RELEASES)).await;
        releases.with_context(|| format!("read the ConfigMap {}", names::RELEASES))
    }
}
