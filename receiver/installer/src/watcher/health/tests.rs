use futures::FutureExt as _;
use serde_json::json;
use tidewatch_api::{
    identity::{Epoch, RuntimeId},
    key::KymaKey,
    plan::Plan,
};
use tidewatch_contract::{
    digest::Digest,
    event::{Change, Event, EventId, Object, Payload},
};
use tidewatch_fleet::{
    EventBatch, Verified,
    evidence::testing::FakePeers,
    forward::{DeliveryOutcome, Service, Target},
    table::{Metrics, Settings},
};
use tidewatch_kit::metrics::Registry;

use super::*;

const WATCH: &str = "f";

/// A table with a forwarded watch, and one runtime.
fn table() -> RuntimeTable {
    let table = RuntimeTable::alone(1, Settings::default(), Metrics::register(&mut Registry::default()));
    let target = Target::new("m", Service::new("s", "n", 1).unwrap()).unwrap();
    table.set_routes([(WATCH.to_owned(), target)].into_iter().collect());
    let watch = json!({"name": WATCH, "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["forward"]});
    let plan = Plan::parse(&json!({"revision": "1", "watches": [watch]}).to_string()).unwrap();
    table.place(KymaKey::new("n", "k"), "", Some(runtime()), Arc::new(plan));
    table.set_synced();
    table
}

fn runtime() -> RuntimeId {
    "r".parse().unwrap()
}

/// Lets three deliveries to the service fail, after which it counts as unreachable.
async fn fail(table: &RuntimeTable) {
    let epoch = Epoch::new(7);
    let event = |sequence: u64| Event {
        id: EventId { epoch, sequence },
        source: runtime(),
        watch: WATCH.into(),
        payload: Payload::Object(Object {
            subject: format!("g/v1/things/ns/o{sequence}").parse().unwrap(),
            kind: "Thing".into(),
            uid: String::new(),
            resource_version: String::new(),
            generation: None,
            change: Change::Spec,
        }),
        delta: Digest::ZERO,
        time: None,
        traceparent: None,
    };
    let batch = EventBatch { events: vec![Ok(event(1))], traceparent: None };
    let verified = Verified::unchecked(&runtime(), epoch, 1, batch).with_leaf(vec![0x30].into());
    assert!(table.events(verified, 1).unwrap().refused.is_empty());
    for _ in 0..3 {
        let delivery = table.next_delivery().await;
        table.forwarded(&delivery, DeliveryOutcome::Failed(None));
    }
}

fn answering(peers: &Arc<FakePeers>, watch: &'static str, health: Health) {
    let replica = Replicas::joining(peers);
    replica.respond(Topic::ForwardHealth, move |()| Ok(HealthByWatch::from([(watch.to_owned(), health)])));
}

#[tokio::test]
async fn worst_health_of_all_replicas_counts() {
    let peers = Arc::new(FakePeers::default());
    let own = ForwardHealth::new(table(), Replicas::joining(&peers));
    let of_fleet = async || own.of_fleet().await.map(|health| health.into_iter().collect::<Vec<_>>());
    assert_eq!(of_fleet().await, Ok(vec![(WATCH.to_owned(), Health::Healthy)]));
    answering(&peers, WATCH, Health::Refusing(404));
    assert_eq!(of_fleet().await, Ok(vec![(WATCH.to_owned(), Health::Refusing(404))]));
    answering(&peers, WATCH, Health::Unreachable);
    answering(&peers, WATCH, Health::Refusing(404));
    answering(&peers, WATCH, Health::Healthy);
    answering(&peers, "other", Health::Healthy);
    let both = vec![(WATCH.to_owned(), Health::Unreachable), ("other".to_owned(), Health::Healthy)];
    assert_eq!(of_fleet().await, Ok(both));
    peers.fail(Some(AskError::Incomplete));
    assert_eq!(of_fleet().await, Err(AskError::Incomplete), "the health of a part of the fleet is none");
}

#[tokio::test]
async fn without_forwarded_watches_no_replica_is_asked() {
    let peers = Arc::new(FakePeers::default());
    let table = table();
    table.set_routes([].into_iter().collect());
    let own = ForwardHealth::new(table, Replicas::joining(&peers));
    assert_eq!((own.of_fleet().await, peers.asked()), (Ok(HealthByWatch::new()), 0));
}

#[tokio::test(start_paused = true)]
async fn a_change_is_reported_once_to_the_replica_with_the_role() {
    let peers = Arc::new(FakePeers::default());
    let tables = [table(), table()];
    let [mut holder, mut other] = tables.clone().map(|table| ForwardHealth::new(table, Replicas::joining(&peers)));
    assert_eq!(other.report().await, Ok(()), "there is nothing to report");
    assert!(other.changed().now_or_never().is_none());

    fail(&tables[1]).await;
    other.changed().await;
    assert_eq!(other.report().await, Err(AskError::NoFleetHolder));
    peers.hold(holder.replicas.responders.clone());
    assert_eq!(other.report().await, Ok(()), "the report is repeated");
    holder.changed().await;
    assert_eq!(holder.of_fleet().await.unwrap()[WATCH], Health::Unreachable);
    assert_eq!(other.report().await, Ok(()));
    assert!(holder.changed().now_or_never().is_none(), "reported once");
}

#[tokio::test(start_paused = true)]
async fn a_replica_without_events_for_a_service_does_not_report_its_last_failure() {
    let table = table();
    let own = ForwardHealth::new(table.clone(), Replicas::alone());
    fail(&table).await;
    assert_eq!(own.of_fleet().await.unwrap()[WATCH], Health::Unreachable);
    table.remove(&KymaKey::new("n", "k"));
    assert_eq!(own.of_fleet().await.unwrap()[WATCH], Health::Healthy);
}
