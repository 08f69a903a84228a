//! Catalog sync on real control planes (`acceptance.md` 25-28, 36, 38).

mod commands;
mod differences;
mod guard;
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
use tidewatch_shared::{
    api::{Kyma, ModuleReleaseMeta, ModuleTemplate, State},
    names::{CATALOG_INVENTORY, RELEASES, SKR_NAMESPACE, annotation, label},
};
use tidewatch_tests::{
    control_plane::{Person, audit::Write},
    http,
    landscape::{
        DEADLINE, Options,
        catalog::{release_meta, template},
        until,
    },
};

use crate::support::{One, Tested, condition, module, quick};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

async fn names<K>(one: &One) -> Result<BTreeSet<String>>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let api = Api::<K>::namespaced(one.runtime.cluster().client().await?, SKR_NAMESPACE);
    Ok(api.list(&Default::default()).await?.items.iter().map(|object| object.name_any()).collect())
}

async fn user_api<K>(one: &One) -> Result<Api<K>>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
{
    Ok(Api::namespaced(one.runtime.cluster().client_as(Person::User).await?, SKR_NAMESPACE))
}

async fn synced(one: &One) -> Result<()> {
    until("the catalog in the runtime", async || {
        let whole =
            names::<ModuleReleaseMeta>(one).await?.contains("keda") && names::<ModuleTemplate>(one).await?.len() >= 2;
        Ok(whole.then_some(()))
    })
    .await
}

fn of_catalog(writes: &[Write]) -> Vec<&Write> {
    let catalog = |write: &&Write| write.resource == "moduletemplates" || write.resource == "modulereleasemetas";
    writes.iter().filter(|write| write.user != Person::User.name()).filter(catalog).collect()
}

/// What was called for the catalog: verb and name.
fn calls(writes: &[Write]) -> Vec<(&str, &str)> {
    of_catalog(writes).into_iter().map(|write| (write.verb.as_str(), write.name.as_str())).collect()
}

fn spec<K: Serialize>(object: &K) -> Result<Value> {
    Ok(serde_json::to_value(object)?["spec"].clone())
}

/// Writes to KCP's catalog as its operator.
async fn apply<K>(one: &One, name: &str, body: &Value) -> Result<()>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let api = Api::<K>::namespaced(one.landscape.operator(), one.landscape.namespace());
    api.patch(name, &PatchParams::apply("operator").force(), &Patch::Apply(body)).await?;
    Ok(())
}

async fn set_labels(one: &One, labels: Value) -> Result<()> {
    let labels = Patch::Merge(json!({"metadata": {"labels": labels}}));
    one.kcp_kymas().await?.patch(one.runtime.name(), &PatchParams::default(), &labels).await?;
    Ok(())
}

/// The version that the Manifest of the only module installs.
async fn runs(one: &One) -> Result<Option<String>> {
    Ok(one.manifests().await?.first().and_then(|manifest| manifest.spec.version.clone()))
}

/// Waits until the Manifest of the only module installs this version.
async fn comes_to_run(one: &One, version: &str) -> Result<()> {
    let runs = async || Ok(runs(one).await?.filter(|runs| runs == version).map(drop));
    until(&format!("the version {version}"), runs).await
}

/// Waits until a sample of the receiver has this value.
async fn measured(one: &One, sample: &str, value: u64) -> Result<()> {
    let line = format!("tidewatch_{sample} {value}");
    let shown = |page: &str| page.lines().any(|sample| sample == line).then_some(());
    let waited = one.landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, shown).await).await?;
    waited.with_context(|| format!("waited for: {line}"))
}

/// Waits until an Event tells this of an object in KCP, and returns its words.
async fn told(one: &One, reason: &str, (kind, name): (&str, &str)) -> Result<String> {
    let events = Api::<Event>::namespaced(one.landscape.operator(), one.landscape.namespace());
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

/// Waits until exactly these modules are in the runtime's catalog, with their templates.
async fn modules_are(one: &One, modules: &[&str]) -> Result<()> {
    until(&format!("the modules {modules:?} and no others"), async || {
        let metas = names::<ModuleReleaseMeta>(one).await?;
        let templates: BTreeSet<_> = names::<ModuleTemplate>(one).await?;
        let expected: BTreeSet<_> = modules.iter().map(|module| (*module).to_owned()).collect();
        let of_templates: BTreeSet<_> =
            templates.iter().filter_map(|name| Some(name.strip_suffix("-1.0.0")?.to_owned())).collect();
        Ok((metas == expected && of_templates == expected).then_some(()))
    })
    .await
}

async fn inventory(one: &One) -> Result<Option<ConfigMap>> {
    let api = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, SKR_NAMESPACE);
    Ok(api.get_opt(CATALOG_INVENTORY).await?)
}
