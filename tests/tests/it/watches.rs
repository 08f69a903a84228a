//! What can become of the watches that Watchers ask for, while everything else goes on.

use std::time::{Duration, SystemTime};

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
use tidewatch_tests::{
    demo::stamps::{self, Stamp},
    landscape::{
        until,
        watchers::{WATCHED, watcher},
    },
};

use crate::{
    load::{KEDA, Load, watch_objects},
    support::{Ground, One, Tested, module, quick},
};

const PAUSE: Duration = Duration::from_millis(20);
const GROUP: &str = "tests.example";
const WIDGETS: (&str, &str, &str) = (GROUP, "*", "widgets");

/// A kind of a module's, with or without a status subresource.
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
    one: &'a One,
    crds: Api<CustomResourceDefinition>,
    api: Api<DynamicObject>,
}

impl<'a> Widgets<'a> {
    async fn of(one: &'a One) -> Result<Self> {
        let client = one.runtime.cluster().client().await?;
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, "v1", "Widget"), "widgets");
        Ok(Self { one, crds: Api::all(client.clone()), api: Api::namespaced_with(client, "default", &resource) })
    }

    async fn install(&self, status: bool) -> Result<()> {
        let crd = widgets(status);
        self.crds.patch(&crd_name(), &PatchParams::apply("test").force(), &Patch::Apply(&crd)).await?;
        until("the kind to be served", async || Ok(self.api.list(&Default::default()).await.ok())).await?;
        Ok(())
    }

    /// Deletes the kind with all its objects.
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

    /// Waits until the receiver was told this version of an object.
    async fn told(&self, watch: &str, object: &DynamicObject) -> Result<()> {
        told(self.one, watch, &object.resource_version().context("a version")?).await
    }
}

fn crd_name() -> String {
    format!("widgets.{GROUP}")
}

fn stamps_of(one: &One, watch: &str) -> Result<Vec<Stamp>> {
    let stamps = stamps::read(&one.landscape.stamp_file())?;
    let watch = one.landscape.watch_of(watch);
    Ok(stamps.into_iter().filter(|stamp| stamp.watch == watch).collect())
}

async fn told(one: &One, watch: &str, version: &str) -> Result<()> {
    until(&format!("version {version} to be told by {watch}"), async || {
        Ok(stamps_of(one, watch)?.into_iter().find(|stamp| stamp.resource_version == version).map(drop))
    })
    .await
}

async fn failing(one: &One, number: u64) -> Result<()> {
    until(&format!("{number} watches to fail"), async || {
        let page = one.agent_page().await?;
        Ok((crate::sync::sum(&page, "tidewatch_agent_watches_failing", &[]) == number).then_some(()))
    })
    .await
}

#[tokio::test]
async fn a_kind_may_come_go_and_come_back_otherwise_while_others_are_served() -> Tested {
    let one = One::to_harm(Ground::Shared, "kinds", &[KEDA], quick()).await?;
    let widgets = Widgets::of(&one).await?;
    one.runtime.grant_agent(GROUP, "widgets").await?;
    one.landscape.write_watcher(&watcher("parts", WIDGETS, "spec")).await?;
    // Nobody serves it: named, and no other is stopped.
    failing(&one, 1).await?;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;

    widgets.install(true).await?;
    one.listed(&one.landscape.watch_of("parts"), SystemTime::UNIX_EPOCH).await?;
    failing(&one, 0).await?;
    let first = widgets.write("a", "parts", json!({"spec": {"size": 1}})).await?;
    widgets.told("parts", &first).await?;
    // What a controller writes is no change of `spec`.
    let status = json!({"apiVersion": format!("{GROUP}/v1"), "kind": "Widget", "status": {"size": 1}});
    let seen = widgets.api.patch_status("a", &PatchParams::apply("controller").force(), &Patch::Apply(&status)).await?;
    let second = widgets.write("a", "parts", json!({"spec": {"size": 2}})).await?;
    widgets.told("parts", &second).await?;
    let versions: Vec<_> = stamps_of(&one, "parts")?.into_iter().map(|stamp| stamp.resource_version).collect();
    assert!(!versions.contains(&seen.resource_version().context("a version")?), "{versions:?}");

    let deleted = SystemTime::now();
    widgets.uninstall().await?;
    failing(&one, 1).await?;
    until("the end of the object to be told", async || {
        Ok(stamps_of(&one, "parts")?.into_iter().find(|stamp| stamp.wanted >= deleted).map(drop))
    })
    .await?;
    one.runtime.select(&[]).await?;
    one.skr_status("no module", |status| status.modules().is_empty()).await?;

    // The same kind without a status subresource: there the generation tells nothing, and every version is a change.
    let back = SystemTime::now();
    widgets.install(false).await?;
    one.listed(&one.landscape.watch_of("parts"), back).await?;
    failing(&one, 0).await?;
    for content in [json!({"spec": {"size": 3}}), json!({"spec": {"size": 3}, "status": {"size": 3}})] {
        widgets.told("parts", &widgets.write("b", "parts", content).await?).await?;
    }
    one.in_sync().await?;
    one.nothing_was_odd().await?;
    Ok(())
}

#[tokio::test]
async fn a_watch_that_is_forbidden_is_named_and_stops_no_other() -> Tested {
    let one = One::to_harm(Ground::Shared, "forbidden", &[KEDA], quick()).await?;
    one.landscape.write_watcher(&watcher("maps", ("", "v1", "configmaps"), "spec")).await?;
    failing(&one, 1).await?;
    one.agent_counts("tidewatch_agent_watch_failures_total", &["\"403\""], 1).await?;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    // Ready all the same: an agent that restarts must not be held back by one kind.
    one.runtime.with_agent(async |agent| agent.kill9()).await?;
    one.runtime.start_agent().await?;
    failing(&one, 1).await?;

    one.runtime.grant_agent("", "configmaps").await?;
    one.listed(&one.landscape.watch_of("maps"), SystemTime::UNIX_EPOCH).await?;
    let maps = Api::<ConfigMap>::namespaced(one.runtime.user(), "default");
    told(&one, "maps", &write_map(&maps, "m", Some("maps")).await?).await?;

    // No watch shows that a right was taken away: it is seen when the watch is opened again, at the latest after a restart.
    one.runtime.revoke_agent("configmaps").await?;
    one.runtime.with_agent(async |agent| agent.kill9()).await?;
    one.runtime.start_agent().await?;
    failing(&one, 1).await?;
    one.runtime.select(&[]).await?;
    one.skr_status("no module", |status| status.modules().is_empty()).await?;
    Ok(())
}

/// Writes a ConfigMap with the label that a Watcher selects by, or without; returns its version.
async fn write_map(maps: &Api<ConfigMap>, name: &str, watched: Option<&str>) -> Result<String> {
    let labels = watched.map_or_else(|| json!({}), |watched| json!({WATCHED: watched}));
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels},
                     "data": {"at": format!("{:?}", SystemTime::now())}});
    let written = maps.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(&map)).await?;
    written.resource_version().context("a version")
}

#[tokio::test]
async fn watchers_come_and_go_while_the_events_of_others_flow() -> Tested {
    let one = One::to_harm(Ground::Shared, "live", &[KEDA], quick()).await?;
    watch_objects(&one).await?;
    one.in_sync().await?;
    let maps = Api::<ConfigMap>::namespaced(one.runtime.user(), "default");
    write_map(&maps, "there-before", Some("second")).await?;
    let mut load = Load::start(&one, PAUSE);
    for round in 0..3 {
        load.goes_on(20).await?;
        let added = SystemTime::now();
        one.landscape.write_watcher(&watcher("second", ("", "v1", "configmaps"), "spec")).await?;
        one.listed(&one.landscape.watch_of("second"), added).await?;

        // Into the selection, changed there, and out of it.
        let name = format!("m-{round}");
        write_map(&maps, &name, None).await?;
        told(&one, "second", &write_map(&maps, &name, Some("second")).await?).await?;
        told(&one, "second", &write_map(&maps, &name, Some("second")).await?).await?;
        told(&one, "second", &write_map(&maps, &name, None).await?).await?;

        load.goes_on(20).await?;
        one.landscape.delete_watcher("second").await?;
        until("the watch to be stopped", async || {
            let page = one.agent_page().await?;
            Ok((crate::sync::sum(&page, "tidewatch_agent_watches", &[]) == 5).then_some(()))
        })
        .await?;
    }
    load.arrives(&one).await?;
    // The watch that stayed was listed once, and never again.
    let lists = stamps_of(&one, "load")?.into_iter().filter(|stamp| stamp.resource_version == "-").count();
    assert_eq!(lists, 1);
    Ok(())
}

#[tokio::test]
async fn a_watcher_that_cannot_be_served_says_so_and_stops_no_other() -> Tested {
    let one = One::to_harm(Ground::Shared, "unservable", &[KEDA], quick()).await?;
    let with = |name: &str, path: &str, value: Value| {
        let mut changed = watcher(name, ("", "v1", "configmaps"), "spec");
        *changed.pointer_mut(path).unwrap() = value;
        changed
    };
    let (resource, labels) = ("/spec/resourceToWatch", "/spec/labelsToWatch");
    let secrets = |version: &str| json!({"group": "", "version": version, "resource": "secrets"});
    let bad = [
        (with("secrets", resource, secrets("v1")), "secrets"),
        (with("any-secrets", resource, secrets("*")), "secrets"),
        (with("everything", resource, json!({"group": "", "version": "v1", "resource": "*"})), "may not be watched"),
        (with("bad-label", labels, json!({"a": "b,c!=d"})), "label"),
        (with("port", "/spec/serviceInfo/port", json!(0)), "port"),
    ];
    for (watcher, _) in &bad {
        one.landscape.write_watcher(watcher).await?;
    }
    watch_objects(&one).await?;
    let watchers = one.landscape.watchers();
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
    // The agent was asked for nothing but what is served: the four built-in ones, and the good one.
    assert_eq!(crate::sync::sum(&one.agent_page().await?, "tidewatch_agent_watches", &[]), 5);
    Load::run(&one, 48, PAUSE).await?;

    // What is repaired is served at once.
    one.landscape.write_watcher(&watcher("secrets", ("", "v1", "configmaps"), "spec")).await?;
    status("secrets", "Ready").await?;
    one.listed(&one.landscape.watch_of("secrets"), SystemTime::UNIX_EPOCH).await?;
    Ok(())
}
