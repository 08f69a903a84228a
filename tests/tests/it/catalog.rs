//! Catalog sync on real control planes (`acceptance.md` 25-28, 36, 38).

mod commands;
mod differences;
pub(crate) mod guard;
mod inherited;
mod mistakes;
mod rollout;
mod versions;
mod visibility;

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use k8s_openapi::api::{core::v1::ConfigMap, events::v1::Event};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma, KymaStatus, ModuleReleaseMeta, ModuleTemplate, State,
    names::{CATALOG_INVENTORY, RELEASES, SKR_NAMESPACE, annotation, label},
};
use tidewatch_testing::{
    control_plane::{ClusterUser, audit::Write},
    http,
    landscape::{
        DEADLINE, Options,
        catalog::{release_meta, template},
        until,
    },
};

use crate::support::{SingleRuntime, TestResult, condition, module, quick_options};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

async fn names<K>(setup: &SingleRuntime) -> Result<BTreeSet<String>>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let api = Api::<K>::namespaced(setup.runtime.cluster().client().await?, SKR_NAMESPACE);
    Ok(api.list(&Default::default()).await?.items.iter().map(|object| object.name_any()).collect())
}

async fn user_api<K>(setup: &SingleRuntime) -> Result<Api<K>>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
{
    Ok(Api::namespaced(setup.runtime.cluster().client_as(ClusterUser::User).await?, SKR_NAMESPACE))
}

async fn catalog_is_synced(setup: &SingleRuntime) -> Result<()> {
    until("the catalog in the runtime", async || {
        let whole = names::<ModuleReleaseMeta>(setup).await?.contains("keda")
            && names::<ModuleTemplate>(setup).await?.len() >= 2;
        Ok(whole.then_some(()))
    })
    .await
}

fn catalog_writes(writes: &[Write]) -> Vec<&Write> {
    let catalog = |write: &&Write| write.resource == "moduletemplates" || write.resource == "modulereleasemetas";
    writes.iter().filter(|write| write.user != ClusterUser::User.name()).filter(catalog).collect()
}

/// The requests for the catalog: verb and name.
fn catalog_requests(writes: &[Write]) -> Vec<(&str, &str)> {
    catalog_writes(writes).into_iter().map(|write| (write.verb.as_str(), write.name.as_str())).collect()
}

fn spec<K: Serialize>(object: &K) -> Result<Value> {
    Ok(serde_json::to_value(object)?["spec"].clone())
}

/// Applies an object to KCP's catalog as the operator.
async fn apply<K>(setup: &SingleRuntime, name: &str, body: &Value) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let api = Api::<K>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    api.patch(name, &PatchParams::apply("operator").force(), &Patch::Apply(body)).await?;
    Ok(())
}

async fn set_labels(setup: &SingleRuntime, labels: Value) -> Result<()> {
    let labels = Patch::Merge(json!({"metadata": {"labels": labels}}));
    setup.kcp_kymas().await?.patch(setup.runtime.name(), &PatchParams::default(), &labels).await?;
    Ok(())
}

/// The version in the spec of the runtime's first Manifest.
async fn installed_version(setup: &SingleRuntime) -> Result<Option<String>> {
    Ok(setup.manifests().await?.first().and_then(|manifest| manifest.spec.version.clone()))
}

/// Waits until the runtime's first Manifest has this version.
async fn version_becomes(setup: &SingleRuntime, version: &str) -> Result<()> {
    let runs = async || Ok(installed_version(setup).await?.filter(|runs| runs == version).map(drop));
    until(&format!("the version {version}"), runs).await
}

/// Waits until a metric of the receiver has this value.
async fn metric_becomes(setup: &SingleRuntime, sample: &str, value: u64) -> Result<()> {
    let line = format!("tidewatch_{sample} {value}");
    let shown = |page: &str| page.lines().any(|sample| sample == line).then_some(());
    let waited = setup.landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, shown).await).await?;
    waited.with_context(|| format!("waited for: {line}"))
}

/// Waits for an Event with this reason about an object in KCP, and returns its note.
pub(crate) async fn event_note(setup: &SingleRuntime, reason: &str, (kind, name): (&str, &str)) -> Result<String> {
    let events = Api::<Event>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    until(&format!("the Event {reason} of {name}"), async || {
        let events = events.list(&Default::default()).await?.items;
        let is_it = |event: &Event| {
            let about = event.regarding.as_ref();
            let is_of = about.is_some_and(|it| it.kind.as_deref() == Some(kind) && it.name.as_deref() == Some(name));
            is_of && event.reason.as_deref() == Some(reason) && event.type_.as_deref() == Some("Warning")
        };
        Ok(events.into_iter().find(is_it).map(|event| event.note.unwrap_or_default()))
    })
    .await
}

/// Waits until the runtime's catalog has exactly these modules, with their templates.
async fn modules_become(setup: &SingleRuntime, modules: &[&str]) -> Result<()> {
    until(&format!("the modules {modules:?} and no others"), async || {
        let metas = names::<ModuleReleaseMeta>(setup).await?;
        let templates: BTreeSet<_> = names::<ModuleTemplate>(setup).await?;
        let expected: BTreeSet<_> = modules.iter().map(|module| (*module).to_owned()).collect();
        let of_templates: BTreeSet<_> =
            templates.iter().filter_map(|name| Some(name.strip_suffix("-1.0.0")?.to_owned())).collect();
        Ok((metas == expected && of_templates == expected).then_some(()))
    })
    .await
}

async fn inventory(setup: &SingleRuntime) -> Result<Option<ConfigMap>> {
    let api = Api::<ConfigMap>::namespaced(setup.runtime.cluster().client().await?, SKR_NAMESPACE);
    Ok(api.get_opt(CATALOG_INVENTORY).await?)
}
