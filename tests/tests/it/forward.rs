//! Forwarding to other managers: a Watcher's events arrive at its service in contract v2 with the runtime's
//! certificate, also after outages of that service, and an unavailable manager delays no other one.

use std::{net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use k8s_openapi::{
    api::core::v1::ConfigMap, apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, PostParams},
    core::GroupVersionKind,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tidewatch_api::{State, Watcher};
use tidewatch_contract::v2::{self, Event};
use tidewatch_testing::landscape::{
    Landscape, Options, Runtime, until,
    watchers::{WATCHED, watcher},
};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

use crate::{
    support::{SingleRuntime, module, quick_options},
    sync::sum,
};

/// Behaviour of a manager towards requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behavior {
    Accepts,
    /// Accepts connections and never answers.
    Hangs,
    Refuses,
    /// Answers that it is unavailable.
    Unavailable,
}

/// Another manager: a listener of contract v2 in plain HTTP, as behind a service mesh.
pub(crate) struct Manager {
    address: SocketAddr,
    pub(crate) behavior: watch::Sender<Behavior>,
    /// The received requests, whether accepted or not: runtime, path, event.
    received: Arc<Mutex<Vec<(String, String, Event)>>>,
    task: JoinHandle<()>,
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Manager {
    pub(crate) async fn start(behavior: Behavior) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (behavior, behavior_changes) = watch::channel(behavior);
        let received = Arc::new(Mutex::new(Vec::new()));
        let log = received.clone();
        let task = tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let behavior_changes = behavior_changes.clone();
                let log = log.clone();
                let service = service_fn(move |request| answer(behavior_changes.clone(), log.clone(), request));
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(tcp), service));
            }
        });
        Ok(Self { address, behavior, received, task })
    }

    /// A Watcher of this manager for labelled ConfigMaps.
    pub(crate) fn watcher(&self, name: &str) -> Value {
        let mut watcher = watcher(name, ("", "v1", "configmaps"), "spec");
        watcher["spec"]["manager"] = json!(name);
        watcher["spec"]["serviceInfo"] = json!({"name": name, "namespace": "team", "port": self.address.port()});
        watcher
    }

    /// Waits until the manager has received an event of an object, and returns runtime, path and event.
    pub(crate) async fn receives(&self, name: &str) -> Result<(String, String, Event)> {
        until(&format!("the manager to receive an event of {name}"), async || {
            Ok(self.received.lock().iter().find(|(_, _, event)| event.name == name).cloned())
        })
        .await
    }
}

async fn answer(
    mut behavior_changes: watch::Receiver<Behavior>,
    received: Arc<Mutex<Vec<(String, String, Event)>>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>> {
    let behavior = *behavior_changes.borrow_and_update();
    if behavior == Behavior::Hangs {
        std::future::pending::<()>().await;
    }
    let (parts, body) = request.into_parts();
    let event = Event::parse(&body.collect().await?.to_bytes()).context("an event")?;
    let mut certificates = parts.headers.get_all("x-forwarded-client-cert").iter();
    let leaf = v2::parse_forwarded(certificates.next().context("a certificate")?.as_bytes()).context("a leaf")?;
    assert!(certificates.next().is_none() && parts.headers["content-type"] == "application/json");
    let runtime = v2::read_caller(&leaf)?.runtime.to_string();
    received.lock().push((runtime, parts.uri.path().to_owned(), event));
    let status = match behavior {
        Behavior::Accepts | Behavior::Hangs => StatusCode::OK,
        Behavior::Refuses => StatusCode::NOT_FOUND,
        Behavior::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
    };
    Ok(Response::builder().status(status).body(Full::default())?)
}

async fn start(name: &str, managers: &[(&str, &Manager)]) -> Result<SingleRuntime> {
    let receiver = ["--forward-url-template", "http://127.0.0.1:{port}"].map(str::to_owned).to_vec();
    let setup =
        SingleRuntime::with_options(name, &[("keda", "1.0.0", "1.1.0")], Options { receiver, ..quick_options() })
            .await?;
    for (name, manager) in managers {
        setup.landscape.write_watcher(&manager.watcher(name)).await?;
    }
    setup.runtime.start_agent().await?;
    setup.runtime.grant_agent("", "configmaps").await?;
    until("the Kyma in the runtime", async || setup.runtime.skr_kyma().await).await?;
    Ok(setup)
}

/// Writes a ConfigMap that a Watcher selects.
pub(crate) async fn write_map(runtime: &Runtime, name: &str, watched: &str) -> Result<()> {
    let map = json!({"metadata": {"name": name, "labels": {WATCHED: watched}}, "data": {"a": "b"}});
    let maps = Api::<ConfigMap>::namespaced(runtime.cluster().client().await?, "default");
    maps.create(&PostParams::default(), &serde_json::from_value(map)?).await?;
    Ok(())
}

/// Waits until a Watcher has this state, with a condition message that contains these words.
pub(crate) async fn watcher_becomes(landscape: &Landscape, name: &str, state: State, words: &str) -> Result<()> {
    until(&format!("the Watcher {name} to report {words:?}"), async || {
        let watcher: Watcher = landscape.watchers().get(name).await?;
        let status = watcher.status.filter(|status| status.state == state);
        Ok(status
            .filter(|status| {
                status.conditions().iter().any(|behavior_changes| behavior_changes.message.contains(words))
            })
            .map(drop))
    })
    .await
}

/// Waits until the number of objects that are queued for a manager or in flight is as expected.
async fn queue_becomes(setup: &SingleRuntime, manager: &str, expected: impl Fn(u64) -> bool) -> Result<()> {
    let name = format!("tidewatch_forward_objects{{manager=\"{manager}\",");
    until("the queue of a manager", async || {
        let (_, page) = setup.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        let value = page.lines().find(|line| line.starts_with(&name)).and_then(|line| line.rsplit(' ').next());
        let value = value.map_or(Ok(0), str::parse)?;
        Ok(expected(value).then_some(()))
    })
    .await
}

#[tokio::test]
async fn a_manager_receives_its_events_and_a_dead_one_delays_no_other() -> Result<()> {
    let healthy = Manager::start(Behavior::Accepts).await?;
    let dead = Manager::start(Behavior::Hangs).await?;
    let setup = start("forward", &[("well", &healthy), ("dead", &dead)]).await?;
    watcher_becomes(&setup.landscape, "well", State::Ready, "team/well:").await?;
    write_map(&setup.runtime, "first", "dead").await?;
    queue_becomes(&setup, "dead", |count| count > 0).await?;

    write_map(&setup.runtime, "second", "well").await?;
    let (runtime, path, event) = healthy.receives("second").await?;
    assert_eq!((runtime.as_str(), path.as_str()), (setup.runtime.id().as_str(), "/v2/well/event"));
    assert_eq!((event.namespace.as_str(), event.version.as_str(), event.kind.as_str()), ("default", "v1", "ConfigMap"));
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the Kyma's own change", |status| module(status, "keda").is_some()).await?;

    watcher_becomes(&setup.landscape, "dead", State::Warning, "cannot be reached").await?;
    dead.behavior.send_replace(Behavior::Accepts);
    dead.receives("first").await?;
    queue_becomes(&setup, "dead", |count| count == 0).await?;
    watcher_becomes(&setup.landscape, "dead", State::Ready, "team/dead:").await?;

    let before = healthy.received.lock().len();
    let maps = Api::<ConfigMap>::namespaced(setup.runtime.cluster().client().await?, "default");
    maps.delete("second", &DeleteParams::default()).await?;
    until("the manager to receive the deletion", async || Ok((healthy.received.lock().len() > before).then_some(())))
        .await?;
    Ok(())
}

#[tokio::test]
async fn events_accepted_but_not_forwarded_survive_a_receiver_crash() -> Result<()> {
    let manager = Manager::start(Behavior::Hangs).await?;
    let setup = start("forward-restart", &[("other", &manager)]).await?;
    write_map(&setup.runtime, "first", "other").await?;
    queue_becomes(&setup, "other", |count| count > 0).await?;
    // The agent has received every acknowledgement from before by the third heartbeat.
    let beats = ("tidewatch_fleet_heartbeats_total", ["\"counted\""]);
    let before = sum(&setup.receiver_page().await?, beats.0, &beats.1);
    setup.receiver_metric_reaches(beats.0, &beats.1, before + 3).await?;
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    manager.behavior.send_replace(Behavior::Accepts);
    setup.landscape.start_receiver().await?;
    manager.receives("first").await?;
    queue_becomes(&setup, "other", |count| count == 0).await?;
    Ok(())
}

#[tokio::test]
async fn a_refused_event_is_reported_and_retained_until_it_is_accepted() -> Result<()> {
    let refusing = Manager::start(Behavior::Refuses).await?;
    let accepting = Manager::start(Behavior::Accepts).await?;
    let setup = start("forward-refused", &[("other", &refusing)]).await?;
    write_map(&setup.runtime, "first", "other").await?;
    watcher_becomes(&setup.landscape, "other", State::Warning, "404").await?;
    let page = setup.receiver_page().await?;
    for metric in ["tidewatch_forward_objects", "tidewatch_forward_objects_parked"] {
        assert_eq!(sum(&page, metric, &["manager=\"other\""]), 1, "{page}");
    }
    assert_eq!(sum(&page, "tidewatch_forward_events_given_up_total", &[]), 0, "{page}");
    assert_eq!(refusing.received.lock().iter().filter(|(_, _, event)| event.name == "first").count(), 3);

    // A corrected Watcher is served without waiting for the backoff.
    setup.landscape.write_watcher(&accepting.watcher("other")).await?;
    accepting.receives("first").await?;
    queue_becomes(&setup, "other", |count| count == 0).await?;
    watcher_becomes(&setup.landscape, "other", State::Ready, "team/other:").await?;
    setup.landscape.delete_watcher("other").await?;
    Ok(())
}

/// API group of cloud-manager in runtimes. It installs its kinds by itself, when a runtime has the module.
const CLOUD: &str = "cloud-resources.kyma-project.io";

/// A CRD of cloud-manager, with served versions.
fn cloud_kind(kind: &str, versions: &[&str]) -> Value {
    let plural = format!("{}s", kind.to_lowercase());
    let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let version = |(at, name): (usize, &&str)| json!({"name": name, "served": true, "storage": at == 0, "schema": schema, "subresources": {"status": {}}});
    let versions: Vec<_> = versions.iter().enumerate().map(version).collect();
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{CLOUD}")},
        "spec": {"group": CLOUD, "scope": "Namespaced", "versions": versions,
                 "names": {"plural": plural, "singular": kind.to_lowercase(), "kind": kind, "listKind": format!("{kind}List")}},
    })
}

/// The kinds of cloud-manager in a runtime.
struct Cloud {
    client: Client,
    crds: Api<CustomResourceDefinition>,
}

impl Cloud {
    async fn of(setup: &SingleRuntime) -> Result<Self> {
        let client = setup.runtime.cluster().client().await?;
        Ok(Self { crds: Api::all(client.clone()), client })
    }

    fn objects(&self, kind: &str, version: &str) -> Api<DynamicObject> {
        let plural = format!("{}s", kind.to_lowercase());
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(CLOUD, version, kind), &plural);
        Api::namespaced_with(self.client.clone(), "default", &resource)
    }

    async fn install(&self, kind: &str, versions: &[&str]) -> Result<()> {
        let crd = cloud_kind(kind, versions);
        self.crds.create(&PostParams::default(), &serde_json::from_value(crd)?).await?;
        let objects = self.objects(kind, versions[0]);
        until("the kind to be served", async || Ok(objects.list(&ListParams::default()).await.ok())).await?;
        Ok(())
    }

    async fn write(&self, kind: &str, version: &str, name: &str) -> Result<()> {
        let object = json!({"apiVersion": format!("{CLOUD}/{version}"), "kind": kind,
            "metadata": {"name": name, "labels": {WATCHED: "labelled"}}, "spec": {"size": 1}});
        self.objects(kind, version).create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        Ok(())
    }
}

/// Waits until the number of watches of the agent on kinds that are not served is as expected, and none fails.
async fn watches_not_served_become(setup: &SingleRuntime, number: u64) -> Result<()> {
    let admin =
        setup.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    until(&format!("{number} watches of kinds that are not served"), async || {
        let report = tidewatch_testing::http::get(admin, "/fleet", std::time::Duration::from_secs(5)).await?.1;
        let report: Value = serde_json::from_str(&report)?;
        let path = &report["runtimes"][0]["path"];
        anyhow::ensure!(path["reason"] != "FailingWatch", "{path}");
        Ok((report["runtimes"][0]["notServed"] == number).then_some(()))
    })
    .await
}

#[tokio::test]
async fn a_manager_receives_the_events_of_all_kinds_of_its_group() -> Result<()> {
    let manager = Manager::start(Behavior::Accepts).await?;
    let second = Manager::start(Behavior::Accepts).await?;
    let setup = start("forward-group", &[]).await?;
    setup.runtime.grant_agent(CLOUD, "*").await?;
    let cloud = Cloud::of(&setup).await?;
    // As cloud-manager publishes it: its kinds come later, without a label that an agent knows.
    let all = json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Watcher", "metadata": {"name": "cloud-manager"},
        "spec": {
            "field": "spec", "manager": "cloud-manager", "gateway": {"selector": {}},
            "resourceToWatch": {"group": CLOUD, "version": "*", "resource": "*"},
            "serviceInfo": {"name": "cloud-manager", "namespace": "kcp-system", "port": manager.address.port()},
        },
    });
    setup.landscape.write_watcher(&all).await?;
    let mut labelled = second.watcher("labelled");
    labelled["spec"]["resourceToWatch"] = all["spec"]["resourceToWatch"].clone();
    setup.landscape.write_watcher(&labelled).await?;
    for name in ["cloud-manager", "labelled"] {
        watcher_becomes(&setup.landscape, name, State::Ready, "forwards to the manager").await?;
    }
    watches_not_served_become(&setup, 2).await?;

    // A kind that is installed after the Watcher, and another one in other versions after the first.
    cloud.install("IpRange", &["v1beta1"]).await?;
    watches_not_served_become(&setup, 0).await?;
    cloud.write("IpRange", "v1beta1", "range").await?;
    let (runtime, path, event) = manager.receives("range").await?;
    assert_eq!((runtime.as_str(), path.as_str()), (setup.runtime.id().as_str(), "/v2/cloud-manager/event"));
    let gvk = |event: &Event| [&event.group, &event.version, &event.kind, &event.namespace].map(String::clone);
    assert_eq!(gvk(&event), [CLOUD, "v1beta1", "IpRange", "default"]);
    cloud.install("NfsVolume", &["v1alpha1"]).await?;
    cloud.write("NfsVolume", "v1alpha1", "volume").await?;
    assert_eq!(gvk(&manager.receives("volume").await?.2), [CLOUD, "v1alpha1", "NfsVolume", "default"]);
    assert_eq!(gvk(&second.receives("volume").await?.2), [CLOUD, "v1alpha1", "NfsVolume", "default"]);

    // A kind is removed with its objects; the other one is served as before.
    let of = |name: &str| {
        let received = manager.received.lock();
        received.iter().filter(|(_, _, event)| event.name == name).count()
    };
    let before = of("range");
    cloud.crds.delete(&format!("ipranges.{CLOUD}"), &DeleteParams::default()).await?;
    until("the manager to receive the deletion", async || Ok((of("range") > before).then_some(()))).await?;
    watches_not_served_become(&setup, 0).await?;
    cloud.write("NfsVolume", "v1alpha1", "later").await?;
    assert_eq!(gvk(&manager.receives("later").await?.2), [CLOUD, "v1alpha1", "NfsVolume", "default"]);
    // And comes back.
    until("the kind to be gone", async || {
        Ok(cloud.crds.get_opt(&format!("ipranges.{CLOUD}")).await?.is_none().then_some(()))
    })
    .await?;
    cloud.install("IpRange", &["v1beta1"]).await?;
    cloud.write("IpRange", "v1beta1", "again").await?;
    assert_eq!(gvk(&manager.receives("again").await?.2), [CLOUD, "v1beta1", "IpRange", "default"]);
    for name in ["cloud-manager", "labelled"] {
        watcher_becomes(&setup.landscape, name, State::Ready, "forwards to the manager").await?;
    }
    setup.logs_are_clean().await?;
    Ok(())
}
