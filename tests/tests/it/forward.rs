//! Other managers: a Watcher's events arrive at its service in contract v2, with the runtime's certificate, whatever becomes of the
//! service meanwhile, and nobody waits for one that is dead.

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
    Options, until,
    watchers::{WATCHED, watcher},
};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

use crate::{
    support::{One, module, quick},
    sync::sum,
};

/// How a manager answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    Takes,
    /// Accepts connections and never answers.
    Hangs,
    Refuses,
}

/// Another manager: a listener of contract v2, behind its mesh and so in plain HTTP.
pub(crate) struct Manager {
    address: SocketAddr,
    manner: watch::Sender<Manner>,
    /// What came, taken or not: runtime, path, event.
    heard: Arc<Mutex<Vec<(String, String, Event)>>>,
    task: JoinHandle<()>,
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Manager {
    pub(crate) async fn start(manner: Manner) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (manner, told) = watch::channel(manner);
        let heard = Arc::new(Mutex::new(Vec::new()));
        let room = heard.clone();
        let task = tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let (told, room) = (told.clone(), room.clone());
                let service = service_fn(move |request| answer(told.clone(), room.clone(), request));
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(tcp), service));
            }
        });
        Ok(Self { address, manner, heard, task })
    }

    /// A Watcher of this manager for labelled ConfigMaps.
    pub(crate) fn watcher(&self, name: &str) -> Value {
        let mut watcher = watcher(name, ("", "v1", "configmaps"), "spec");
        watcher["spec"]["manager"] = json!(name);
        watcher["spec"]["serviceInfo"] = json!({"name": name, "namespace": "team", "port": self.address.port()});
        watcher
    }

    /// Waits until it has heard of an object, and returns who told it.
    pub(crate) async fn hears(&self, name: &str) -> Result<(String, String, Event)> {
        until(&format!("the manager to hear of {name}"), async || {
            Ok(self.heard.lock().unwrap().iter().find(|(_, _, event)| event.name == name).cloned())
        })
        .await
    }
}

async fn answer(
    mut told: watch::Receiver<Manner>,
    heard: Arc<Mutex<Vec<(String, String, Event)>>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>> {
    let manner = *told.borrow_and_update();
    if manner == Manner::Hangs {
        std::future::pending::<()>().await;
    }
    let (parts, body) = request.into_parts();
    let event = Event::parse(&body.collect().await?.to_bytes())?;
    let mut certificates = parts.headers.get_all("x-forwarded-client-cert").iter();
    let leaf = v2::forwarded(certificates.next().context("a certificate")?.as_bytes())?;
    assert!(certificates.next().is_none() && parts.headers["content-type"] == "application/json");
    let runtime = Caller::read(&leaf)?.runtime.to_string();
    heard.lock().unwrap().push((runtime, parts.uri.path().to_owned(), event));
    let status = if manner == Manner::Takes { StatusCode::OK } else { StatusCode::NOT_FOUND };
    Ok(Response::builder().status(status).body(Full::default())?)
}

async fn start(name: &str, managers: &[(&str, &Manager)]) -> Result<One> {
    let receiver = ["--forward-url-template", "http://127.0.0.1:{port}"].map(str::to_owned).to_vec();
    let one = One::with(name, &[("keda", "1.0.0", "1.1.0")], Options { receiver, ..quick() }).await?;
    for (name, manager) in managers {
        one.landscape.write_watcher(&manager.watcher(name)).await?;
    }
    one.runtime.start_agent().await?;
    one.runtime.grant_agent("", "configmaps").await?;
    until("the Kyma in the runtime", async || one.runtime.skr_kyma().await).await?;
    Ok(one)
}

async fn write_map(one: &One, name: &str, watched: &str) -> Result<()> {
    let map = json!({"metadata": {"name": name, "labels": {WATCHED: watched}}, "data": {"a": "b"}});
    let maps = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, "default");
    maps.create(&PostParams::default(), &serde_json::from_value(map)?).await?;
    Ok(())
}

/// Waits for the status of a Watcher.
async fn told(one: &One, name: &str, state: State, words: &str) -> Result<()> {
    until(&format!("the Watcher {name} to say {words:?}"), async || {
        let watcher: Watcher = one.landscape.watchers().get(name).await?;
        let status = watcher.status.filter(|status| status.state == state);
        Ok(status.filter(|status| status.conditions().iter().any(|told| told.message.contains(words))).map(drop))
    })
    .await
}

/// Waits until so many objects wait for a manager or are on their way to it.
async fn objects(one: &One, manager: &str, expected: impl Fn(u64) -> bool) -> Result<()> {
    let name = format!("tidewatch_forward_objects{{manager=\"{manager}\",");
    until("the queue of a manager", async || {
        let (_, page) = one.landscape.with_receiver(async |receiver| receiver.get("/metrics").await).await??;
        let value = page.lines().find(|line| line.starts_with(&name)).and_then(|line| line.rsplit(' ').next());
        let value = value.map_or(Ok(0), str::parse)?;
        Ok(expected(value).then_some(()))
    })
    .await
}

#[tokio::test]
async fn a_manager_hears_of_its_objects_and_a_dead_one_delays_nobody() -> Result<()> {
    let (well, dead) = (Manager::start(Manner::Takes).await?, Manager::start(Manner::Hangs).await?);
    let one = start("forward", &[("well", &well), ("dead", &dead)]).await?;
    told(&one, "well", State::Ready, "team/well:").await?;
    write_map(&one, "first", "dead").await?;
    objects(&one, "dead", |objects| objects > 0).await?;

    write_map(&one, "second", "well").await?;
    let (runtime, path, event) = well.hears("second").await?;
    assert_eq!((runtime.as_str(), path.as_str()), (one.runtime.id().as_str(), "/v2/well/event"));
    assert_eq!((event.namespace.as_str(), event.version.as_str(), event.kind.as_str()), ("default", "v1", "ConfigMap"));
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the Kyma's own change", |status| module(status, "keda").is_some()).await?;

    told(&one, "dead", State::Warning, "cannot be reached").await?;
    dead.manner.send_replace(Manner::Takes);
    dead.hears("first").await?;
    objects(&one, "dead", |objects| objects == 0).await?;
    told(&one, "dead", State::Ready, "team/dead:").await?;

    let before = well.heard.lock().unwrap().len();
    let maps = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, "default");
    maps.delete("second", &DeleteParams::default()).await?;
    until(
        "the manager to hear of the deletion",
        async || Ok((well.heard.lock().unwrap().len() > before).then_some(())),
    )
    .await?;
    Ok(())
}

#[tokio::test]
async fn what_was_accepted_and_not_forwarded_survives_the_receiver() -> Result<()> {
    let manager = Manager::start(Manner::Hangs).await?;
    let one = start("forward-restart", &[("other", &manager)]).await?;
    write_map(&one, "first", "other").await?;
    objects(&one, "other", |objects| objects > 0).await?;
    // Whatever a heartbeat's answer calls settled, the agent has heard by the third.
    let beats = ("tidewatch_fleet_heartbeats_total", ["\"counted\""]);
    let before = sum(&one.receiver_page().await?, beats.0, &beats.1);
    one.receiver_counts(beats.0, &beats.1, before + 3).await?;
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    manager.manner.send_replace(Manner::Takes);
    one.landscape.start_receiver().await?;
    manager.hears("first").await?;
    objects(&one, "other", |objects| objects == 0).await?;
    Ok(())
}

#[tokio::test]
async fn what_a_manager_refuses_is_told_and_waits_until_somebody_takes_it() -> Result<()> {
    let (refuses, takes) = (Manager::start(Manner::Refuses).await?, Manager::start(Manner::Takes).await?);
    let one = start("forward-refused", &[("other", &refuses)]).await?;
    write_map(&one, "first", "other").await?;
    told(&one, "other", State::Warning, "404").await?;
    let page = one.receiver_page().await?;
    for metric in ["tidewatch_forward_objects", "tidewatch_forward_objects_parked"] {
        assert_eq!(sum(&page, metric, &["manager=\"other\""]), 1, "{page}");
    }
    assert_eq!(sum(&page, "tidewatch_forward_events_given_up_total", &[]), 0, "{page}");
    assert_eq!(refuses.heard.lock().unwrap().iter().filter(|(_, _, event)| event.name == "first").count(), 3);

    // Whoever sets the Watcher right need not wait.
    one.landscape.write_watcher(&takes.watcher("other")).await?;
    takes.hears("first").await?;
    objects(&one, "other", |objects| objects == 0).await?;
    told(&one, "other", State::Ready, "team/other:").await?;
    one.landscape.delete_watcher("other").await?;
    Ok(())
}
