//! The hub as its callers see it, and the rules of the contract as a model.

mod model;

use std::collections::BTreeMap;

use futures::FutureExt as _;
use serde_json::json;
use tidewatch_shared::{digest::Digest, event::What};

use super::*;
use crate::queue::Class;

const EPOCH: Epoch = Epoch::new(7);

fn hub(slots: usize) -> Hub {
    let settings = Settings { slots, seed: 1, ..Settings::default() };
    let metrics = Metrics::register(&mut prometheus_client::registry::Registry::default());
    Hub::new(Instance::new(1), settings, metrics, Instant::now())
}

fn plan(revision: &str) -> Arc<Plan> {
    let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
                       "work": ["kyma", "catalog"]});
    Arc::new(Plan::parse(&json!({"revision": revision, "watches": [watch]}).to_string()).unwrap())
}

fn key(n: u32) -> KymaKey {
    KymaKey::new("kcp-system", format!("kyma-{n}"))
}

fn id(n: u32) -> RuntimeId {
    format!("r-{n}").parse().unwrap()
}

fn placed(slots: usize, kymas: u32) -> Hub {
    let hub = hub(slots);
    (0..kymas).for_each(|n| hub.place(key(n), Some(id(n)), plan("1")));
    hub.set_synced();
    hub
}

fn send(hub: &Hub, n: u32, sequence: u64) -> Result<EventsAnswer, Unplaced> {
    let event = event::Event {
        id: event::EventId { epoch: EPOCH, sequence },
        source: id(n),
        watch: "w".into(),
        what: What::Watch,
        delta: Digest::ZERO,
        time: None,
        traceparent: None,
    };
    hub.events(&id(n), EPOCH, 1, vec![Ok(event)])
}

fn beat(hub: &Hub, n: u32, counter: u64) -> HeartbeatAnswer {
    let heartbeat = json!({
        "epoch": EPOCH, "sequence": 1, "counter": counter, "waiting": 0, "parked": 0, "agentVersion": "1", "planRevision": "1",
        "certificate": {"notAfter": "", "fingerprint": ""}, "canary": {"ageSeconds": 1},
        "watches": [{"name": "w", "objects": 1, "listedSecondsAgo": 1}],
    });
    hub.heartbeat(&id(n), 1, serde_json::from_value(heartbeat).unwrap(), 1_700_000_000).unwrap()
}

fn works() -> Works {
    Works::of(&[Work::Kyma, Work::Catalog])
}

#[tokio::test(start_paused = true)]
async fn an_accepted_event_is_wanted_and_settled_when_its_pass_ends() {
    let hub = placed(4, 1);
    let answer = send(&hub, 0, 1).unwrap();
    assert_eq!((answer.accepted, answer.since, answer.settled.len(), answer.heartbeat_seconds), (1, 1, 0, 30));
    let job = hub.next().await;
    assert_eq!((&job.key, job.wanted.works), (&key(0), works()));
    send(&hub, 0, 2).unwrap();
    hub.done(job, Outcome::ended(works()));
    let answer = beat(&hub, 0, 1);
    assert_eq!(answer.settled, BTreeMap::from([("w".to_owned(), 1)]));
    assert_eq!((answer.plan_revision.as_deref(), answer.server_time.as_str()), (Some("1"), "2023-11-14T22:13:20Z"));
    let job = hub.next().await;
    hub.done(job, Outcome::failed(works(), Class::Ours));
    assert_eq!(beat(&hub, 0, 2).settled["w"], 1, "a passing failure settles nothing");
    let job = hub.next().await;
    hub.done(job, Outcome::ended(works()));
    assert_eq!(beat(&hub, 0, 3).settled["w"], 2);
}

#[tokio::test(start_paused = true)]
async fn runtimes_are_placed_by_exactly_one_kyma() {
    let hub = hub(4);
    hub.place(key(0), Some(id(0)), plan("1"));
    assert_eq!(send(&hub, 0, 1), Err(Unplaced::NotSynced));
    hub.set_synced();
    assert_eq!(send(&hub, 1, 1), Err(Unplaced::Unknown));
    assert_eq!(send(&hub, 0, 1).unwrap().accepted, 1);
    hub.place(key(1), Some(id(0)), plan("1"));
    assert_eq!(send(&hub, 0, 2), Err(Unplaced::Ambiguous));
    hub.place(key(1), None, plan("1"));
    assert_eq!(send(&hub, 0, 2).unwrap().since, 1, "nothing was forgotten");
    hub.remove(&key(0));
    assert_eq!(send(&hub, 0, 3), Err(Unplaced::Unknown));
    hub.place(key(0), Some(id(0)), plan("1"));
    assert_eq!(send(&hub, 0, 3).unwrap().since, 3, "all was forgotten, and the answer shows it");
}

#[tokio::test(start_paused = true)]
async fn a_pass_of_an_earlier_life_of_a_name_settles_nothing() {
    let hub = placed(4, 1);
    send(&hub, 0, 1).unwrap();
    let job = hub.next().await;
    hub.remove(&key(0));
    hub.place(key(0), Some(id(0)), plan("1"));
    send(&hub, 0, 1).unwrap();
    assert!(hub.next().now_or_never().is_none(), "the earlier life is still in work");
    hub.done(job, Outcome::ended(works()));
    assert!(beat(&hub, 0, 1).settled.is_empty());
    hub.done(hub.next().await, Outcome::ended(works()));
    assert_eq!(beat(&hub, 0, 2).settled["w"], 1);
}

#[tokio::test(start_paused = true)]
async fn what_was_worked_on_right_after_the_start_is_worked_on_once_more() {
    let hub = placed(4, 2);
    let start = Instant::now();
    hub.want(&key(0), works(), Priority::User);
    hub.done(hub.next().await, Outcome::ended(works()));
    let job = hub.next().await;
    assert_eq!(Instant::now() - start, Duration::from_secs(20));
    assert_eq!(job.wanted, Wanted { works: works(), priority: Priority::Catalog, drift: Drift::All });
    hub.done(job, Outcome::ended(works()));
    hub.want(&key(1), works(), Priority::User);
    hub.done(hub.next().await, Outcome::ended(works()));
    assert!(
        time::timeout(Duration::from_secs(3_600), hub.next()).await.is_err(),
        "only once, and not what began later"
    );
}

#[tokio::test(start_paused = true)]
async fn a_job_that_is_dropped_counts_as_failed() {
    let hub = placed(4, 1);
    send(&hub, 0, 1).unwrap();
    drop(hub.next().await);
    assert!(hub.next().now_or_never().is_none(), "in backoff");
    let job = hub.next().await;
    assert_eq!(job.wanted.works, works());
    drop(Job::detached(key(0), job.wanted.clone()));
    assert!(hub.view()[0].in_work);
}

#[tokio::test(start_paused = true)]
async fn every_worker_finds_work_and_nobody_sleeps_past_a_time() {
    let hub = placed(8, 100);
    let mut workers = tokio::task::JoinSet::new();
    let (sender, mut ended) = tokio::sync::mpsc::unbounded_channel();
    for _ in 0..8 {
        let (hub, sender) = (hub.clone(), sender.clone());
        workers.spawn(async move {
            loop {
                let job = hub.next().await;
                time::sleep(Duration::from_secs(1)).await;
                let first = job.wanted.drift == Drift::All;
                let outcome =
                    if first { Outcome::failed(job.wanted.works, Class::Ours) } else { Outcome::ended(works()) };
                let _ = sender.send((job.key.clone(), first, Instant::now()));
                hub.done(job, outcome);
            }
        });
    }
    tokio::task::yield_now().await;
    let start = Instant::now();
    (0..100).for_each(|n| drop(send(&hub, n, 1).unwrap()));
    let mut first = 0;
    while first < 100 {
        let (_, drifted, at) = ended.recv().await.unwrap();
        first += u32::from(drifted);
        assert!(at - start < Duration::from_secs(60));
    }
    assert_eq!(first, 100);
}

#[tokio::test(start_paused = true)]
async fn a_path_is_proven_by_heartbeats() {
    let hub = placed(4, 1);
    assert_eq!(hub.path(&key(1), Instant::now()), None);
    assert_eq!(hub.path(&key(0), Instant::now()), Some(PathState::Unknown));
    beat(&hub, 0, 1);
    assert_eq!(hub.path(&key(0), Instant::now()), Some(PathState::Proven));
    hub.place(key(0), Some(id(0)), plan("2"));
    assert_eq!(hub.path(&key(0), Instant::now()), Some(PathState::Unknown));
    time::advance(Duration::from_secs(90)).await;
    assert!(matches!(hub.path(&key(0), Instant::now()), Some(PathState::Unproven(_))));
    let view = hub.view().remove(0);
    assert_eq!((view.runtime, view.ambiguous, view.epochs.len()), (Some(id(0)), false, 1));
    assert_eq!(view.last_seen, Some(Duration::from_secs(90)));
}
