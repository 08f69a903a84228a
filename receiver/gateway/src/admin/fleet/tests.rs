use futures::future::BoxFuture;
use http::{Method, Request, header};
use http_body_util::{BodyExt as _, Full};
use parking_lot::Mutex;
use serde_json::json;
use tidewatch_api::{key::KymaKey, plan::Plan};
use tidewatch_cluster::leader::WriteFence;
use tidewatch_contract::admin::shards::Ownership;
use tidewatch_fleet::{
    peers::{Peers, Responders},
    table::{Metrics, Settings},
};
use tidewatch_trust::PendingRotation;
use tokio::sync::{mpsc, watch};

use super::*;
use crate::admin::{AccessPolicy, routes};

/// Two replicas that ask each other without a network. The first answers are those of the first replica.
#[derive(Clone, Default)]
struct FakePeers {
    replicas: Arc<Mutex<Vec<Responders>>>,
    fleet_holder: Arc<Mutex<Option<usize>>>,
    /// A shard is held nowhere.
    is_incomplete: Arc<Mutex<bool>>,
}

impl Peers for FakePeers {
    fn ask_all(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Vec<Bytes>, AskError>> {
        Box::pin(async move {
            if *self.is_incomplete.lock() {
                return Err(AskError::Incomplete);
            }
            let replicas = self.replicas.lock().clone();
            let mut answers = Vec::new();
            for replica in replicas {
                answers.push(replica.answer(topic, question.clone()).await?);
            }
            Ok(answers)
        })
    }

    fn ask_fleet_holder(&self, topic: Topic, question: Bytes) -> BoxFuture<'_, Result<Bytes, AskError>> {
        let holder = self.fleet_holder.lock().ok_or(AskError::NoFleetHolder);
        let holder = holder.map(|holder| self.replicas.lock()[holder].clone());
        Box::pin(async move { holder?.answer(topic, question).await })
    }
}

/// A replica that is active, with the requests that its rotation gets.
struct Replica {
    handle: FleetHandle,
    table: RuntimeTable,
    role: FleetRole,
    requests: mpsc::Receiver<PendingRotation>,
    progress: watch::Sender<Option<Arc<RotationProgress>>>,
}

fn replica(peers: &FakePeers, instance: u64) -> Replica {
    let table = RuntimeTable::alone(instance, Settings::default(), Metrics::default());
    let (sender, requests) = mpsc::channel(1);
    let (progress, progress_receiver) = watch::channel(None);
    let rotations =
        RotationHandle { requests: sender, progress: progress_receiver, stragglers: watch::channel(None).1 };
    let handle = FleetHandle::new(Instance::new(instance));
    let role = FleetRole::released();
    let responders = Responders::default();
    let active = ActiveFleet {
        table: table.clone(),
        rotations,
        replicas: Replicas { role: role.clone(), peers: Arc::new(peers.clone()), responders: responders.clone() },
        holders: HoldersHandle::default(),
        shards: ShardCount::default(),
    };
    handle.activate(active);
    peers.replicas.lock().push(responders);
    Replica { handle, table, role, requests, progress }
}

fn two() -> (FakePeers, Replica, Replica) {
    let peers = FakePeers::default();
    let one = replica(&peers, 1);
    let two = replica(&peers, 2);
    (peers, one, two)
}

fn place(replica: &Replica, names: &[&str]) {
    let plan = Arc::new(Plan::parse(&json!({"revision": "1", "watches": []}).to_string()).unwrap());
    for name in names {
        replica.table.place(KymaKey::new("n", *name), name, Some(name.parse().unwrap()), plan.clone());
    }
}

async fn send(replica: &Replica, method: Method, path: &str, body: &'static str) -> (u16, String) {
    let request = Request::builder().method(method).uri(path).header(header::HOST, "localhost");
    let request = request.header(header::CONTENT_TYPE, "application/json").body(Full::<Bytes>::from(body)).unwrap();
    let response = routes::respond(&AccessPolicy::Loopback, &replica.handle, request).await;
    let status = response.status().as_u16();
    (status, String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap())
}

fn progress(runtimes: usize) -> RotationProgress {
    let progress = json!({"phase": "spread", "since": 1, "target": "ab", "targetNotAfter": 2, "secret": "good",
        "runtimes": runtimes, "waitingFor": 0, "stragglers": []});
    serde_json::from_value(progress).unwrap()
}

#[tokio::test]
async fn report_of_any_replica_has_the_runtimes_of_all_once() {
    let (_, one, two) = two();
    place(&one, &["b", "d"]);
    // `b` moved between the two answers.
    place(&two, &["a", "b", "c"]);
    for replica in [&one, &two] {
        let (status, body) = send(replica, Method::GET, "/fleet", "").await;
        let report: Report = serde_json::from_str(&body).unwrap();
        let names: Vec<_> = report.runtimes.iter().map(|runtime| &*runtime.kyma).collect();
        assert_eq!((status, names, report.summary.kymas), (200, vec!["a", "b", "c", "d"], 4));
        assert!(report.receiver.active);
        assert_eq!(report.receiver.instance, replica.handle.receiver().instance);
    }
}

#[tokio::test]
async fn part_of_the_fleet_is_never_reported() {
    let (peers, one, _two) = two();
    place(&one, &["a"]);
    *peers.is_incomplete.lock() = true;
    let (status, body) = send(&one, Method::GET, "/fleet", "").await;
    assert_eq!(status, 503);
    assert!(body.contains("at least one shard has no replica"), "{body}");
    *peers.is_incomplete.lock() = false;
    let malformed: tidewatch_fleet::peers::Responder =
        Arc::new(|_| std::future::ready(Ok(Bytes::from_static(b"[{}]"))).boxed());
    peers.replicas.lock()[1].set(Topic::Report, malformed);
    assert_eq!(send(&one, Method::GET, "/fleet", "").await.0, 503, "an answer of another version");
}

#[tokio::test]
async fn progress_is_that_of_the_replica_with_the_fleet_role() {
    let (peers, one, two) = two();
    one.progress.send_replace(Some(Arc::new(progress(1))));
    let (status, body) = send(&one, Method::GET, "/rotation", "").await;
    assert_eq!(status, 503);
    assert!(body.contains("no replica that runs the tasks"), "{body}");
    *peers.fleet_holder.lock() = Some(1);
    assert_eq!(send(&one, Method::GET, "/rotation", "").await.0, 503, "it has lost the role");
    two.role.acquire(WriteFence::default());
    assert_eq!(send(&one, Method::GET, "/rotation", "").await.0, 404, "it has no CA");
    two.progress.send_replace(Some(Arc::new(progress(2))));
    for replica in [&one, &two] {
        let (status, body) = send(replica, Method::GET, "/rotation", "").await;
        assert_eq!((status, serde_json::from_str::<RotationProgress>(&body).unwrap()), (200, progress(2)));
    }
}

#[tokio::test]
async fn rotation_is_requested_of_the_replica_with_the_fleet_role() {
    let (peers, mut one, mut two) = two();
    let body = r#"{"forceAfterSeconds": 5}"#;
    assert_eq!(send(&one, Method::POST, "/rotate-ca", body).await.0, 503);
    *peers.fleet_holder.lock() = Some(1);
    assert_eq!(send(&one, Method::POST, "/rotate-ca", body).await.0, 503, "it has lost the role");
    assert!(two.requests.try_recv().is_err());
    two.role.acquire(WriteFence::default());
    let Replica { requests, .. } = &mut two;
    let response: RotationResponse = serde_json::from_value(json!({"target": "ab"})).unwrap();
    for (result, status) in [(Ok(response), 202), (Err(RotationError::NoCa), 404), (Err(RotationError::Secret), 409)] {
        let rotation = async {
            let (request, sender) = requests.recv().await.unwrap();
            sender.send(result).unwrap();
            request
        };
        let ((answered, _), request) = tokio::join!(send(&one, Method::POST, "/rotate-ca", body), rotation);
        assert_eq!((answered, request.force_after_seconds), (status, Some(5)));
    }
    assert!(one.requests.try_recv().is_err());
}

#[tokio::test]
async fn replica_with_the_fleet_role_asks_no_other() {
    let (peers, mut one, _two) = two();
    *peers.fleet_holder.lock() = None;
    one.role.acquire(WriteFence::default());
    one.progress.send_replace(Some(Arc::new(progress(1))));
    assert_eq!(send(&one, Method::GET, "/rotation", "").await.0, 200);
    let mut requests = std::mem::replace(&mut one.requests, mpsc::channel(1).1);
    let rotation = async { requests.recv().await.unwrap().1.send(Err(RotationError::Write)).unwrap() };
    let ((status, _), ()) = tokio::join!(send(&one, Method::POST, "/rotate-ca", "{}"), rotation);
    assert_eq!(status, 503);
}

#[tokio::test]
async fn shards_are_reported_with_the_runtimes_of_each() {
    let (_, one, _two) = two();
    place(&one, &["a", "b", "c"]);
    let (status, body) = send(&one, Method::GET, "/shards", "").await;
    let report: ShardsReport = serde_json::from_str(&body).unwrap();
    let Some(Ownership { fleet: None, shards }) = report.ownership else { panic!("{body}") };
    assert_eq!((status, shards.len(), shards.iter().map(|shard| shard.runtimes).sum::<usize>()), (200, 24, 3));
}
