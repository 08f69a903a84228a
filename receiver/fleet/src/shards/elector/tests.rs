//! Replicas with a fake API server, with paused time.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use http::Request;
use kube::client::Body;
use serde_json::{Value, json};
use tidewatch_api::{leases::Unit, shard::ShardCount};
use tidewatch_cluster::testing::{FakeApiServer, Fault};
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::*;
use crate::shards::ShardChange;

const LEASE: Duration = Duration::from_secs(15);
const SECOND: Duration = Duration::from_secs(1);
const SHARDS: u16 = 5;

/// An API server with the Leases of an installation.
fn installation() -> FakeApiServer {
    let server = FakeApiServer::default();
    for lease in leases::objects("kcp-system", count()) {
        let name = lease.metadata.name.clone().unwrap();
        server.edit(&format!("leases/{name}"), |object| {
            *object = serde_json::to_value(&lease).unwrap();
            object["metadata"]["labels"] = json!({"kept": "yes"});
        });
    }
    server.edit("leases/other", |lease| lease["spec"] = json!({"holderIdentity": "other"}));
    server
}

fn count() -> ShardCount {
    ShardCount::new(SHARDS).unwrap()
}

/// Client whose requests get no response while the switch is on: watches alone, or all.
fn cuttable(server: &FakeApiServer, cut: &Arc<AtomicBool>, all: bool) -> Client {
    let client = server.client();
    let cut = cut.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let client = client.clone();
        let cut = cut.clone();
        async move {
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let is_cut = || cut.load(Ordering::Relaxed) && (all || is_watch);
            if is_cut() {
                return std::future::pending().await;
            }
            let response = client.send(request).await;
            if is_cut() { std::future::pending().await } else { response }
        }
    });
    Client::new(service, "kcp-system")
}

struct Replica {
    task: JoinHandle<()>,
    stop: CancellationToken,
    changes: ShardChanges,
    holders: HoldersHandle,
    held: BTreeMap<Unit, (Instance, WriteFence)>,
    /// All instances so far.
    instances: Vec<Instance>,
    metrics: Metrics,
}

impl Replica {
    fn start(client: Client, name: &str, instance: u64) -> Self {
        let settings = Settings {
            name: name.to_owned(),
            namespace: "kcp-system".to_owned(),
            place: None,
            lease_duration: LEASE,
            shards: count(),
            relay_address: Some(format!("{name}:8443")),
        };
        Self::start_with(client, settings, instance)
    }

    fn start_with(client: Client, settings: Settings, instance: u64) -> Self {
        let metrics = Metrics::default();
        let holders = HoldersHandle::default();
        let started = ShardElector::start(client, settings, Instance::new(instance), holders.clone(), metrics.clone());
        let stop = CancellationToken::new();
        Self {
            task: tokio::spawn(started.elector.run(stop.clone())),
            stop,
            changes: started.changes,
            holders,
            held: BTreeMap::new(),
            instances: Vec::new(),
            metrics,
        }
    }

    /// Takes all changes for a time; acknowledges hand-overs at once if `stops`.
    async fn run(&mut self, time: Duration, stops: bool) {
        let end = Instant::now() + time;
        while let Ok(change) = tokio::time::timeout_at(end, self.changes.next()).await {
            match change {
                Some(ShardChange::Acquired { unit, instance, fence }) => {
                    assert!(fence.is_open() && !self.instances.contains(&instance));
                    self.instances.push(instance);
                    assert!(self.held.insert(unit, (instance, fence)).is_none());
                }
                Some(ShardChange::HandOver { unit, instance }) if stops => self.changes.stopped(unit, instance),
                Some(ShardChange::HandOver { .. }) => {}
                Some(ShardChange::Lost { unit, instance }) => {
                    let (lost, fence) = self.held.remove(&unit).unwrap();
                    assert!(lost == instance && !fence.is_open());
                }
                None => return sleep(end.saturating_duration_since(Instant::now())).await,
            }
        }
    }
}

async fn run_all<const N: usize>(replicas: [&mut Replica; N], time: Duration) {
    futures::future::join_all(replicas.map(|replica| replica.run(time, true))).await;
}

fn holder(server: &FakeApiServer, id: &str) -> Option<String> {
    Some(server.object(id)?["spec"]["holderIdentity"].as_str()?.to_owned())
}

#[tokio::test(start_paused = true)]
async fn replicas_share_the_shards_and_take_over_from_a_dead_one() {
    let server = installation();
    let mut replicas = [1, 2, 3].map(|n| Replica::start(server.client(), &format!("pod-{n}"), n));
    let [one, two, three] = &mut replicas;
    run_all([one, two, three], LEASE * 3).await;
    assert_eq!([one.held.len(), two.held.len(), three.held.len()], [2, 2, 2]);
    assert!(one.held.keys().all(|unit| !two.held.contains_key(unit) && !three.held.contains_key(unit)));
    let members = server.objects();
    let members: Vec<_> =
        members.values().filter(|lease| lease["metadata"]["annotations"][leases::SHARDS] == "5").collect();
    assert!(members.len() == 3, "{members:?}");
    assert!(members.iter().all(|lease| lease["metadata"]["labels"]["kept"] == "yes"));

    // All know the holders.
    for (replica, name) in [(&*one, "pod-1"), (two, "pod-2"), (three, "pod-3")] {
        for unit in replica.held.keys() {
            let holders = two.holders.current();
            let holder = match unit {
                Unit::Shard(shard) => holders.get(*shard),
                Unit::Fleet => holders.fleet(),
            };
            let holder = holder.unwrap();
            assert_eq!((&*holder.name, holder.relay_address.as_deref()), (name, Some(&*format!("{name}:8443"))));
            assert!(holder.renewed.elapsed() <= LEASE / 2 && holder.moved.is_some());
            assert_eq!(holder.is_own, name == "pod-2");
        }
    }

    // Requests of a minute at rest: renewals alone, and no list.
    server.calls();
    run_all([one, two, three], SECOND * 60).await;
    let calls = server.calls();
    let count = |call: &str| calls.iter().filter(|it| it.starts_with(call)).count();
    assert!((33..=36).contains(&count("PUT leases/tidewatch-replica")), "{calls:?}");
    assert_eq!(count("PUT"), count("PUT leases/tidewatch-replica"), "{calls:?}");
    assert_eq!(count("GET leases"), 0, "{calls:?}");

    // A dead replica holds its shards for the duration of the Lease.
    three.task.abort();
    let dead: Vec<_> = three.held.keys().copied().collect();
    run_all([one, two], SECOND * 8).await;
    assert_eq!((one.held.len(), two.held.len()), (2, 2));
    let holders = one.holders.current();
    assert!(dead.iter().all(|unit| match unit {
        Unit::Shard(shard) => holders.get(*shard).is_some(),
        Unit::Fleet => holders.fleet().is_some(),
    }));
    run_all([one, two], SECOND * 12).await;
    assert_eq!((one.held.len(), two.held.len()), (3, 3));
    let shown = one.metrics.held.get() + one.metrics.fleet_role.get();
    assert_eq!((shown, one.metrics.wanted.get(), one.metrics.acquired.get() >= 3), (3, 3, true));
    assert_eq!(holder(&server, "leases/other").as_deref(), Some("other"));
}

#[tokio::test(start_paused = true)]
async fn stop_hands_all_shards_over_and_gives_the_membership_back() {
    let server = installation();
    let mut one = Replica::start(server.client(), "a", 1);
    let mut two = Replica::start(server.client(), "b", 2);
    run_all([&mut one, &mut two], LEASE * 3).await;
    assert_eq!((one.held.len(), two.held.len()), (3, 3));
    one.stop.cancel();
    run_all([&mut one, &mut two], SECOND).await;
    assert_eq!((one.held.len(), two.held.len()), (0, 6));
    timeout(SECOND, one.task).await.unwrap().unwrap();
    assert!(server.objects().values().all(|lease| lease["spec"]["holderIdentity"].as_str() != Some("a_1")));
    // Nobody is left to take over: work that does not stop delays the end until its deadline.
    two.stop.cancel();
    two.run(SECOND * 9, false).await;
    assert_eq!(two.held.len(), 6);
    two.run(SECOND * 7, false).await;
    assert!(two.held.is_empty());
    timeout(SECOND, two.task).await.unwrap().unwrap();
    let ended = two.metrics.ended.get_or_create(&ReasonLabel { reason: "hand-over-timeout" }).get();
    assert_eq!(ended, 6);
}

#[tokio::test(start_paused = true)]
async fn outage_ends_all_shards_and_they_come_back_with_new_instances() {
    for fault in [Fault::Unresponsive, Fault::LostResponses] {
        let server = installation();
        let mut replica = Replica::start(server.client(), "a", 1);
        replica.run(SECOND * 5, true).await;
        let first = replica.instances.clone();
        assert_eq!((replica.held.len(), first.len()), (6, 6));
        server.set_fault(fault);
        replica.run(LEASE, true).await;
        assert!(replica.held.is_empty(), "before another replica could take over");
        assert_eq!(replica.metrics.refused.get_or_create(&ReasonLabel { reason: "unconfirmed" }).get(), 1);
        server.set_fault(Fault::None);
        replica.run(LEASE, true).await;
        assert_eq!((replica.held.len(), replica.instances.len()), (6, 12));
        assert_eq!(replica.metrics.refused.get_or_create(&ReasonLabel { reason: "unconfirmed" }).get(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn partitioned_replica_is_replaced_and_returns() {
    let server = installation();
    let cut = Arc::new(AtomicBool::new(false));
    let mut one = Replica::start(cuttable(&server, &cut, true), "a", 1);
    let mut two = Replica::start(server.client(), "b", 2);
    run_all([&mut one, &mut two], LEASE * 3).await;
    assert_eq!((one.held.len(), two.held.len()), (3, 3));
    cut.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    while two.held.len() < 6 {
        run_all([&mut one, &mut two], SECOND / 10).await;
        assert!(two.held.len() == 3 || one.held.is_empty(), "the fences end first");
    }
    assert!(begun.elapsed() > LEASE / 2 && begun.elapsed() < LEASE + SECOND * 5);
    cut.store(false, Ordering::Relaxed);
    run_all([&mut one, &mut two], LEASE * 3).await;
    assert_eq!((one.held.len(), two.held.len()), (3, 3));
}

#[tokio::test(start_paused = true)]
async fn watch_that_stands_still_is_opened_anew() {
    let server = installation();
    let cut = Arc::new(AtomicBool::new(false));
    let mut replica = Replica::start(cuttable(&server, &cut, false), "a", 1);
    replica.run(SECOND * 5, true).await;
    assert_eq!(replica.held.len(), 6);
    let first = replica.instances.clone();
    cut.store(true, Ordering::Relaxed);
    server.calls();
    // Lists replace the watch, so that the shards are kept.
    replica.run(LEASE * 4, true).await;
    assert_eq!((replica.held.len(), &replica.instances), (6, &first));
    let lists = server.calls().iter().filter(|call| *call == "GET leases").count();
    assert!((5..=12).contains(&lists), "{lists}");
    cut.store(false, Ordering::Relaxed);
    replica.run(LEASE, true).await;
    server.calls();
    replica.run(LEASE * 2, true).await;
    assert!(!server.calls().contains(&"GET leases".to_owned()));
}

/// Its response was lost with a connection that a partition cut.
#[tokio::test(start_paused = true)]
async fn list_without_a_response_is_requested_anew_before_a_lease_lapses() {
    let server = installation();
    let cut = Arc::new(AtomicBool::new(true));
    let mut replica = Replica::start(cuttable(&server, &cut, true), "a", 1);
    replica.run(SECOND, true).await;
    cut.store(false, Ordering::Relaxed);
    replica.run(LEASE / 2, true).await;
    assert_eq!(replica.held.len(), 6);
}

/// One is a warm standby: it takes over when the Lease of the other one has lapsed, and at once when that one stops.
#[tokio::test(start_paused = true)]
async fn replica_without_a_relay_address_stands_by() {
    let server = installation();
    let start = |name: &str, instance| {
        let settings = Settings {
            name: name.to_owned(),
            namespace: "kcp-system".to_owned(),
            place: None,
            lease_duration: LEASE,
            shards: ShardCount::ONE,
            relay_address: None,
        };
        Replica::start_with(server.client(), settings, instance)
    };
    let mut one = start("a", 1);
    one.run(SECOND * 2, true).await;
    let mut two = start("b", 2);
    let refused = |replica: &Replica| replica.metrics.refused.get_or_create(&ReasonLabel { reason: "standby" }).get();
    run_all([&mut one, &mut two], LEASE * 4).await;
    assert_eq!((one.held.len(), two.held.len()), (2, 0), "the shard and the fleet role");
    assert_eq!((refused(&one), refused(&two)), (0, 1));
    let member = server.object("leases/tidewatch-replica-0").unwrap();
    assert_eq!(member["metadata"]["annotations"][leases::REPLICA], "a");
    assert_eq!(member["metadata"]["annotations"][leases::SHARDS], Value::Null);

    let killed = Instant::now();
    one.task.abort();
    while two.held.len() < 2 {
        two.run(SECOND / 10, true).await;
    }
    assert!(killed.elapsed() > LEASE / 2 && killed.elapsed() < LEASE + SECOND * 5, "{:?}", killed.elapsed());
    let mut three = start("c", 3);
    run_all([&mut two, &mut three], LEASE * 2).await;
    assert_eq!((two.held.len(), three.held.len(), refused(&three)), (2, 0, 1));
    two.stop.cancel();
    run_all([&mut two, &mut three], SECOND * 2).await;
    assert_eq!((two.held.len(), three.held.len(), refused(&three)), (0, 2, 0));
    timeout(SECOND, two.task).await.unwrap().unwrap();
}
