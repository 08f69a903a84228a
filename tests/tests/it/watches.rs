//! Life cycle of the watches that Watchers request, while other work goes on.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use k8s_openapi::{
    api::core::v1::ConfigMap, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tidewatch_agent::{BUILT_IN_KINDS, BuiltIn, ServedResource};
use tidewatch_testing::{
    bed, http,
    landscape::{
        until,
        watchers::{WATCHED, watcher},
    },
    stamps::{self, Stamp},
};

use crate::{
    load::{KEDA, Load, watch_objects},
    support::{Isolation, SingleRuntime, TestResult, module, quick_options},
};

/// Timeout of a single request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);
/// Watches of every plan without the agent's installation: Kyma, two kinds of the catalog, CRDs, namespace.
const BUILT_IN: u64 = 5;
const GROUP: &str = "tests.example";
const WIDGETS: (&str, &str, &str) = (GROUP, "*", "widgets");

/// The CRD of a module's kind, with or without a status subresource.
fn widgets(status: bool) -> Value {
    let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let mut version = json!({"name": "v1", "served": true, "storage": true, "schema": schema});
    if status {
        version["subresources"] = json!({"status": {}});
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("widgets.{GROUP}")},
        "spec": {"group": GROUP, "scope": "Namespaced", "versions": [version],
                 "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"}},
    })
}

struct Widgets<'a> {
    setup: &'a SingleRuntime,
    crds: Api<CustomResourceDefinition>,
    api: Api<DynamicObject>,
}

impl<'a> Widgets<'a> {
    async fn of(setup: &'a SingleRuntime) -> Result<Self> {
        let client = setup.runtime.cluster().client().await?;
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, "v1", "Widget"), "widgets");
        Ok(Self { setup, crds: Api::all(client.clone()), api: Api::namespaced_with(client, "default", &resource) })
    }

    async fn install(&self, status: bool) -> Result<()> {
        let crd = widgets(status);
        self.crds.patch(&crd_name(), &PatchParams::apply("test").force(), &Patch::Apply(&crd)).await?;
        until("the kind to be served", async || Ok(self.api.list(&Default::default()).await.ok())).await?;
        Ok(())
    }

    /// Deletes the CRD with all of its objects.
    async fn uninstall(&self) -> Result<()> {
        self.crds.delete(&crd_name(), &DeleteParams::default()).await?;
        until("the kind to be gone", async || Ok(self.crds.get_opt(&crd_name()).await?.is_none().then_some(()))).await
    }

    async fn write(&self, name: &str, watched: &str, content: Value) -> Result<DynamicObject> {
        let mut widget = json!({"apiVersion": format!("{GROUP}/v1"), "kind": "Widget",
                                "metadata": {"name": name, "labels": {WATCHED: watched}}});
        for (member, value) in content.as_object().into_iter().flatten() {
            widget[member] = value.clone();
        }
        Ok(self.api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(&widget)).await?)
    }

    /// Waits until the receiver has an event for this version of an object.
    async fn event_arrives(&self, watch: &str, object: &DynamicObject) -> Result<()> {
        event_arrives(self.setup, watch, &object.resource_version().context("a version")?).await
    }
}

fn crd_name() -> String {
    format!("widgets.{GROUP}")
}

fn stamps_of(setup: &SingleRuntime, watch: &str) -> Result<Vec<Stamp>> {
    let stamps = stamps::read(&setup.landscape.stamp_file())?;
    let watch = setup.landscape.watch_of(watch);
    Ok(stamps.into_iter().filter(|stamp| stamp.watch == watch).collect())
}

async fn event_arrives(setup: &SingleRuntime, watch: &str, version: &str) -> Result<()> {
    until(&format!("an event of version {version} from {watch}"), async || {
        Ok(stamps_of(setup, watch)?.into_iter().find(|stamp| stamp.resource_version == version).map(drop))
    })
    .await
}

/// Waits until the receiver's report counts this number of watches of kinds that the runtime does not serve, and no
/// watch fails.
async fn watches_not_served_become(setup: &SingleRuntime, number: u64) -> Result<()> {
    let admin =
        setup.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    until(&format!("{number} watches of kinds that are not served"), async || {
        let report: Value = serde_json::from_str(&http::get(admin, "/fleet", REQUEST_TIMEOUT).await?.1)?;
        let path = &report["runtimes"][0]["path"];
        anyhow::ensure!(path["reason"] != "FailingWatch", "{path}");
        Ok((report["runtimes"][0]["notServed"] == number).then_some(()))
    })
    .await?;
    failing_watches_become(setup, 0).await
}

async fn failing_watches_become(setup: &SingleRuntime, number: u64) -> Result<()> {
    until(&format!("{number} watches to fail"), async || {
        let page = setup.agent_page().await?;
        Ok((crate::sync::sum(&page, "tidewatch_agent_watches_failing", &[]) == number).then_some(()))
    })
    .await
}

#[tokio::test]
async fn a_kind_may_be_installed_deleted_and_reinstalled_while_others_are_served() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::Shared, "kinds", &[KEDA], quick_options()).await?;
    let widgets = Widgets::of(&setup).await?;
    setup.runtime.grant_agent(GROUP, "widgets").await?;
    setup.landscape.write_watcher(&watcher("parts", WIDGETS, "spec")).await?;
    // The kind is not served yet: the watch counts as listed and empty, and other watches go on.
    watches_not_served_become(&setup, 1).await?;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;

    let installed = SystemTime::now();
    widgets.install(true).await?;
    setup.list_arrives(&setup.landscape.watch_of("parts"), installed).await?;
    watches_not_served_become(&setup, 0).await?;
    let first = widgets.write("a", "parts", json!({"spec": {"size": 1}})).await?;
    widgets.event_arrives("parts", &first).await?;
    // A status update is no change of `spec`, so it yields no event.
    let status = json!({"apiVersion": format!("{GROUP}/v1"), "kind": "Widget", "status": {"size": 1}});
    let seen = widgets.api.patch_status("a", &PatchParams::apply("controller").force(), &Patch::Apply(&status)).await?;
    let second = widgets.write("a", "parts", json!({"spec": {"size": 2}})).await?;
    widgets.event_arrives("parts", &second).await?;
    let versions: Vec<_> = stamps_of(&setup, "parts")?.into_iter().map(|stamp| stamp.resource_version).collect();
    assert!(!versions.contains(&seen.resource_version().context("a version")?), "{versions:?}");

    let deleted = SystemTime::now();
    widgets.uninstall().await?;
    watches_not_served_become(&setup, 1).await?;
    until("an event of the deletion", async || {
        Ok(stamps_of(&setup, "parts")?.into_iter().find(|stamp| stamp.enqueued >= deleted).map(drop))
    })
    .await?;
    setup.runtime.select(&[]).await?;
    setup.skr_status("no module", |status| status.modules().is_empty()).await?;

    // The same kind without a status subresource: its generation never changes, so every version counts as a change.
    let back = SystemTime::now();
    widgets.install(false).await?;
    setup.list_arrives(&setup.landscape.watch_of("parts"), back).await?;
    watches_not_served_become(&setup, 0).await?;
    for content in [json!({"spec": {"size": 3}}), json!({"spec": {"size": 3}, "status": {"size": 3}})] {
        widgets.event_arrives("parts", &widgets.write("b", "parts", content).await?).await?;
    }
    setup.in_sync().await?;
    setup.logs_are_clean().await?;
    Ok(())
}

#[tokio::test]
async fn a_forbidden_watch_is_reported_and_stops_no_other() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::Shared, "forbidden", &[KEDA], quick_options()).await?;
    setup.landscape.write_watcher(&watcher("maps", ("", "v1", "configmaps"), "spec")).await?;
    failing_watches_become(&setup, 1).await?;
    setup.agent_metric_reaches("tidewatch_agent_watch_failures_total", &["\"403\""], 1).await?;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    // A restarted agent becomes ready despite one failing watch.
    setup.runtime.with_agent(async |agent| agent.kill9()).await?;
    setup.runtime.start_agent().await?;
    failing_watches_become(&setup, 1).await?;

    setup.runtime.grant_agent("", "configmaps").await?;
    setup.list_arrives(&setup.landscape.watch_of("maps"), SystemTime::UNIX_EPOCH).await?;
    let maps = Api::<ConfigMap>::namespaced(setup.runtime.user(), "default");
    event_arrives(&setup, "maps", &write_map(&maps, "m", Some("maps")).await?).await?;

    // An open watch does not notice a revoked right: it is noticed when the watch is reopened, at the latest after a
    // restart.
    setup.runtime.revoke_agent("configmaps").await?;
    setup.runtime.with_agent(async |agent| agent.kill9()).await?;
    setup.runtime.start_agent().await?;
    failing_watches_become(&setup, 1).await?;
    setup.runtime.select(&[]).await?;
    setup.skr_status("no module", |status| status.modules().is_empty()).await?;
    Ok(())
}

/// Applies a ConfigMap with or without the Watcher's label; returns its resource version.
async fn write_map(maps: &Api<ConfigMap>, name: &str, watched: Option<&str>) -> Result<String> {
    let labels = watched.map_or_else(|| json!({}), |watched| json!({WATCHED: watched}));
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels},
                     "data": {"at": format!("{:?}", SystemTime::now())}});
    let written = maps.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(&map)).await?;
    written.resource_version().context("a version")
}

#[tokio::test]
async fn adding_and_removing_watchers_interrupts_no_other() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::Shared, "live", &[KEDA], quick_options()).await?;
    watch_objects(&setup).await?;
    setup.in_sync().await?;
    let maps = Api::<ConfigMap>::namespaced(setup.runtime.user(), "default");
    write_map(&maps, "there-before", Some("second")).await?;
    let mut load = Load::start(&setup, PAUSE);
    for round in 0..3 {
        load.advance(20).await?;
        let added = SystemTime::now();
        setup.landscape.write_watcher(&watcher("second", ("", "v1", "configmaps"), "spec")).await?;
        setup.list_arrives(&setup.landscape.watch_of("second"), added).await?;

        // Enter the selection, change there, and leave it.
        let name = format!("m-{round}");
        write_map(&maps, &name, None).await?;
        event_arrives(&setup, "second", &write_map(&maps, &name, Some("second")).await?).await?;
        event_arrives(&setup, "second", &write_map(&maps, &name, Some("second")).await?).await?;
        event_arrives(&setup, "second", &write_map(&maps, &name, None).await?).await?;

        load.advance(20).await?;
        setup.landscape.delete_watcher("second").await?;
        until("the watch to be stopped", async || {
            let page = setup.agent_page().await?;
            Ok((crate::sync::sum(&page, "tidewatch_agent_watches", &[]) == BUILT_IN + 1).then_some(()))
        })
        .await?;
    }
    load.finish(&setup).await?;
    // The persistent watch was listed once and never relisted.
    let lists = stamps_of(&setup, "load")?.into_iter().filter(|stamp| stamp.resource_version == "-").count();
    assert_eq!(lists, 1);
    Ok(())
}

#[tokio::test]
async fn an_unservable_watcher_is_reported_and_stops_no_other() -> TestResult {
    let setup = SingleRuntime::isolated(Isolation::Shared, "unservable", &[KEDA], quick_options()).await?;
    let with = |name: &str, path: &str, value: Value| {
        let mut changed = watcher(name, ("", "v1", "configmaps"), "spec");
        *changed.pointer_mut(path).unwrap() = value;
        changed
    };
    let resource = "/spec/resourceToWatch";
    let labels = "/spec/labelsToWatch";
    let secrets = |version: &str| json!({"group": "", "version": version, "resource": "secrets"});
    let bad = [
        (with("secrets", resource, secrets("v1")), "secrets"),
        (with("any-secrets", resource, secrets("*")), "secrets"),
        (with("everything", resource, json!({"group": "", "version": "v1", "resource": "*"})), "may not be watched"),
        (with("bad-label", labels, json!({"a": "b,c!=d"})), "label"),
        (with("port", "/spec/serviceInfo/port", json!(0)), "port"),
    ];
    for (watcher, _) in &bad {
        setup.landscape.write_watcher(watcher).await?;
    }
    watch_objects(&setup).await?;
    let watchers = setup.landscape.watchers();
    let status = async |name: &str, state: &str| {
        until(&format!("the Watcher {name} to be {state}"), async || {
            let status = serde_json::to_value(watchers.get(name).await?.status)?;
            Ok((status["state"] == state)
                .then(|| status["conditions"][0]["message"].as_str().unwrap_or_default().to_owned()))
        })
        .await
    };
    for (watcher, word) in &bad {
        let message = status(watcher["metadata"]["name"].as_str().unwrap(), "Error").await?;
        assert!(message.contains(word), "{watcher}: {message}");
    }
    assert!(status("load", "Ready").await?.contains("gateway"));
    // The plan has only servable watches: the built-in ones, and the valid Watcher's.
    assert_eq!(crate::sync::sum(&setup.agent_page().await?, "tidewatch_agent_watches", &[]), BUILT_IN + 1);
    Load::run(&setup, 48, PAUSE).await?;

    // A corrected Watcher is served at once.
    setup.landscape.write_watcher(&watcher("secrets", ("", "v1", "configmaps"), "spec")).await?;
    status("secrets", "Ready").await?;
    setup.list_arrives(&setup.landscape.watch_of("secrets"), SystemTime::UNIX_EPOCH).await?;
    Ok(())
}

/// The agent begins the watches of these kinds without a lookup.
#[tokio::test]
async fn kinds_that_the_agent_knows_are_those_of_the_api_server() -> TestResult {
    let client = bed::shared().await?.runtime("built-in-kinds").await?.client().await?;
    let mut documents = BTreeMap::new();
    for kind in BUILT_IN_KINDS {
        let BuiltIn { group, version, resource, .. } = *kind;
        let served = kind.served();
        let version = match group {
            "" => version.to_owned(),
            group => format!("{group}/{version}"),
        };
        if !documents.contains_key(&version) {
            let resources = match group {
                "" => client.list_core_api_resources(&version).await?,
                _ => client.list_api_group_resources(&version).await?,
            };
            documents.insert(version.clone(), resources.resources);
        }
        let resources = &documents[&version];
        let found = resources.iter().find(|found| found.name == resource);
        let found = found.with_context(|| format!("{version} has no {resource}"))?;
        let status = format!("{resource}/status");
        let real = ServedResource {
            version: served.version.clone(),
            kind: found.kind.clone(),
            has_status: resources.iter().any(|found| found.name == status),
            is_watchable: ["list", "watch"].iter().all(|verb| found.verbs.iter().any(|served| served == verb)),
        };
        assert_eq!(served, real, "{version}, {resource}");
    }
    Ok(())
}
