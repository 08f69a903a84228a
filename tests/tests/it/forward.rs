//! Forwarding to other managers: a Watcher's events arrive at its service in contract v2 with the runtime's
//! certificate, also after outages of that service, and an unavailable manager delays no other one.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{State, Watcher},
    v2::{self, Caller, Event},
};
use tidewatch_tests::landscape::{
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
                let (behavior_changes, log) = (behavior_changes.clone(), log.clone());
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
            Ok(self.received.lock().unwrap().iter().find(|(_, _, event)| event.name == name).cloned())
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
    let event = Event::parse(&body.collect().await?.to_bytes())?;
    let mut certificates = parts.headers.get_all("x-forwarded-client-cert").iter();
    let leaf = v2::parse_forwarded(certificates.next().context("a certificate")?.as_bytes())?;
    assert!(certificates.next().is_none() && parts.headers["content-type"] == "application/json");
    let runtime = Caller::read(&leaf)?.runtime.to_string();
    received.lock().unwrap().push((runtime, parts.uri.path().to_owned(), event));
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
    let (healthy, dead) = (Manager::start(Behavior::Accepts).await?, Manager::start(Behavior::Hangs).await?);
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

    let before = healthy.received.lock().unwrap().len();
    let maps = Api::<ConfigMap>::namespaced(setup.runtime.cluster().client().await?, "default");
    maps.delete("second", &DeleteParams::default()).await?;
    until("the manager to receive the deletion", async || {
        Ok((healthy.received.lock().unwrap().len() > before).then_some(()))
    })
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
    let (refusing, accepting) = (Manager::start(Behavior::Refuses).await?, Manager::start(Behavior::Accepts).await?);
    let setup = start("forward-refused", &[("other", &refusing)]).await?;
    write_map(&setup.runtime, "first", "other").await?;
    watcher_becomes(&setup.landscape, "other", State::Warning, "404").await?;
    let page = setup.receiver_page().await?;
    for metric in ["tidewatch_forward_objects", "tidewatch_forward_objects_parked"] {
        assert_eq!(sum(&page, metric, &["manager=\"other\""]), 1, "{page}");
    }
    assert_eq!(sum(&page, "tidewatch_forward_events_given_up_total", &[]), 0, "{page}");
    assert_eq!(refusing.received.lock().unwrap().iter().filter(|(_, _, event)| event.name == "first").count(), 3);

    // A corrected Watcher is served without waiting for the backoff.
    setup.landscape.write_watcher(&accepting.watcher("other")).await?;
    accepting.receives("first").await?;
    queue_becomes(&setup, "other", |count| count == 0).await?;
    watcher_becomes(&setup.landscape, "other", State::Ready, "team/other:").await?;
    setup.landscape.delete_watcher("other").await?;
    Ok(())
}
