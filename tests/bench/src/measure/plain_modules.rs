//! Floor of the module measurements: a plain client that applies the same objects in the same stages, and writes the
//! same statuses when a Deployment becomes available.

use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use k8s_openapi::{
    api::apps::v1::Deployment,
    apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, CustomResourceDefinitionSpec},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::{Value, json};
use tidewatch_api::{Kyma, Manifest, names::SKR_NAMESPACE};
use tidewatch_testing::{landscape::until, modules::Module};
use tokio::time::sleep;

use crate::demo::{is_available, named};

/// Interval of the reads of a CRD that is not established yet.
const ESTABLISHED_INTERVAL: Duration = Duration::from_millis(20);

/// Lists at the same time.
const LISTS: usize = 8;

/// The plain client in one runtime.
pub(super) struct PlainClient {
    client: Client,
    module: Module,
}

impl PlainClient {
    pub(super) fn new(client: Client, module: Module) -> Self {
        Self { client, module }
    }

    /// Applies the objects in the stages CRDs, configuration, workloads, and creates the default CR.
    pub(super) async fn install(&self) -> Result<()> {
        let (workloads, others): (Vec<_>, Vec<_>) = self.module.objects.iter().partition(|it| kind(it) == "Deployment");
        let (definitions, configuration): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|it| kind(it) == "CustomResourceDefinition");
        self.apply(&definitions).await?;
        for definition in &definitions {
            self.established(&definition.name_any()).await?;
        }
        self.apply(&configuration).await?;
        self.apply(&workloads).await?;
        if let Some(object) = &self.module.default_cr {
            self.api(object)?.create(&PostParams::default(), object).await?;
        }
        Ok(())
    }

    async fn apply(&self, objects: &[&DynamicObject]) -> Result<()> {
        let params = PatchParams::apply("plain-client").force();
        let requests = objects.iter().map(async |object| {
            self.api(object)?.patch(&object.name_any(), &params, &Patch::Apply(object)).await?;
            anyhow::Ok(())
        });
        try_join_all(requests).await.map(drop)
    }

    async fn established(&self, name: &str) -> Result<()> {
        let api = Api::<CustomResourceDefinition>::all(self.client.clone());
        loop {
            let conditions = api.get(name).await?.status.and_then(|status| status.conditions).unwrap_or_default();
            if conditions.iter().any(|condition| condition.type_ == "Established" && condition.status == "True") {
                return Ok(());
            }
            sleep(ESTABLISHED_INTERVAL).await;
        }
    }

    /// Deletes the objects and waits until they are gone.
    pub(super) async fn remove(&self) -> Result<()> {
        self.kinds_are_served().await?;
        let objects: Vec<_> = self.module.default_cr.iter().chain(self.module.objects.iter().rev()).collect();
        for object in &objects {
            self.api(object)?.delete(&object.name_any(), &DeleteParams::default()).await?;
        }
        for object in objects {
            let api = self.api(object)?;
            until(&format!("{} to go", object.name_any()), async || {
                match api.get_opt(&object.name_any()).await {
                    Ok(found) => Ok(found.is_none().then_some(())),
                    // With its CRD, a kind is gone as well.
                    Err(kube::Error::Api(status)) if status.code == 404 => Ok(Some(())),
                    Err(error) => Err(error.into()),
                }
            })
            .await?;
        }
        Ok(())
    }

    /// Lists the resources of each CRD: the API server may hold back the deletion of one whose storage it is preparing.
    async fn kinds_are_served(&self) -> Result<()> {
        let definitions = self.module.objects.iter().filter(|object| kind(object) == "CustomResourceDefinition");
        let lists = definitions.map(async |definition| {
            let definition: CustomResourceDefinition = serde_json::from_value(serde_json::to_value(definition)?)?;
            let CustomResourceDefinitionSpec { group, names, versions, .. } = definition.spec;
            let version = &versions.first().context("a version")?.name;
            let resource =
                ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(&group, version, &names.kind), &names.plural);
            let api = Api::<DynamicObject>::all_with(self.client.clone(), &resource);
            let condition = format!("{} to be served", names.plural);
            until(&condition, async || Ok(Some(api.list(&ListParams::default()).await?))).await.map(drop)
        });
        stream::iter(lists.collect::<Vec<_>>()).buffer_unordered(LISTS).try_collect().await
    }

    fn api(&self, object: &DynamicObject) -> Result<Api<DynamicObject>> {
        let types = object.types.as_ref().context("a kind")?;
        let kind = GroupVersionKind::try_from(types)?;
        let resource = ApiResource::from_gvk(&kind);
        Ok(match object.namespace() {
            Some(namespace) => Api::namespaced_with(self.client.clone(), &namespace, &resource),
            None => Api::all_with(self.client.clone(), &resource),
        })
    }
}

fn kind(object: &DynamicObject) -> &str {
    object.types.as_ref().map_or("", |types| &types.kind)
}

/// Objects of the plain client with the statuses that it writes: a Manifest and a Kyma in KCP, and a Kyma in the runtime.
pub(super) struct PlainStatuses {
    manifests: Api<Manifest>,
    kymas: Api<Kyma>,
    pub(super) shown: Api<Kyma>,
    deployments: Api<Deployment>,
}

/// Name of the plain client's objects.
pub(super) const PLAIN: &str = "plain-manager";

impl PlainStatuses {
    /// Creates the objects, in namespaces of their own.
    pub(super) async fn create(kcp: &Client, runtime: &Client) -> Result<Self> {
        let this = Self {
            manifests: Api::namespaced(kcp.clone(), "default"),
            kymas: Api::namespaced(kcp.clone(), "default"),
            shown: Api::namespaced(runtime.clone(), "default"),
            deployments: Api::namespaced(runtime.clone(), SKR_NAMESPACE),
        };
        let params = PostParams::default();
        let manifest = json!({"metadata": {"name": PLAIN},
            "spec": {"remote": true, "install": {"name": "plain", "source": {"type": "oci-dir"}}}});
        this.manifests.create(&params, &serde_json::from_value(manifest)?).await?;
        let kyma: Kyma = serde_json::from_value(json!({"metadata": {"name": PLAIN}, "spec": {"channel": "regular"}}))?;
        this.kymas.create(&params, &kyma).await?;
        this.shown.create(&params, &kyma).await?;
        let labels = json!({"app": PLAIN});
        let pod = json!({"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "plain"}]}});
        let deployment = json!({"metadata": {"name": PLAIN},
            "spec": {"selector": {"matchLabels": labels}, "template": pod}});
        this.deployments.create(&params, &serde_json::from_value(deployment)?).await?;
        Ok(this)
    }

    /// Watches the Deployment, and writes its state to the three statuses, until it is aborted.
    pub(super) async fn follow(&self) -> Result<()> {
        let mut events = watcher(self.deployments.clone(), named(PLAIN)).applied_objects().boxed();
        while let Some(deployment) = events.next().await {
            let state = if is_available(Some(&deployment?)) { "Ready" } else { "Processing" };
            let status = json!({"status": {"state": state}});
            write(&self.manifests, &status).await?;
            write(&self.kymas, &status).await?;
            write(&self.shown, &status).await?;
        }
        Ok(())
    }
}

async fn write<K>(api: &Api<K>, status: &Value) -> Result<()>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    api.patch_status(PLAIN, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}
