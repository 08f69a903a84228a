//! The runtime table through its public interface, and the rules of the contract as a model.

mod forward;
mod model;
pub(crate) mod modules;
mod shards;
mod silence;
mod threads;

use std::collections::{BTreeMap, BTreeSet};

use futures::FutureExt as _;
use serde_json::json;
use tidewatch_api::{
    identity::Epoch,
    plan::{Plan, Work},
};
use tidewatch_cluster::error_class::ErrorClass;
use tidewatch_contract::{
    digest::Digest,
    event::{self, Payload},
};
use tidewatch_kit::variant::VariantName as _;
use tokio::time;

use super::*;
use crate::{
    PathState, Unproven,
    queue::{Drift, Priority, QueuedWork, WorkSet},
};

const EPOCH: Epoch = Epoch::new(7);

pub(crate) fn fleet(slots: usize) -> RuntimeTable {
    let settings = Settings { slots, seed: 1, ..Settings::default() };
    let metrics = Metrics::register(&mut tidewatch_kit::metrics::Registry::default());
    RuntimeTable::alone(1, settings, metrics)
}

fn plan(revision: &str) -> Arc<Plan> {
    let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m",
                       "work": ["kyma", "catalog"]});
    Arc::new(Plan::parse(&json!({"revision": revision, "watches": [watch]}).to_string()).unwrap())
}

pub(crate) fn key(n: u32) -> KymaKey {
    KymaKey::new("kcp-system", format!("kyma-{n}"))
}

pub(crate) fn id(n: u32) -> RuntimeId {
    format!("r-{n}").parse().unwrap()
}

fn table_with(slots: usize, kymas: u32) -> RuntimeTable {
    let fleet = fleet(slots);
    (0..kymas).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    fleet.set_synced();
    fleet
}

pub(crate) fn send(fleet: &RuntimeTable, n: u32, sequence: u64) -> Result<EventsResponse, PlacementError> {
    let event = event::Event {
        id: event::EventId { epoch: EPOCH, sequence },
        source: id(n),
        watch: "w".into(),
        payload: Payload::Watch,
        delta: Digest::ZERO,
        time: None,
        traceparent: None,
    };
    let batch = EventBatch { events: vec![Ok(event)], traceparent: None };
    fleet.events(Verified::unchecked(&id(n), EPOCH, 1, batch), 1_700_000_000)
}

pub(crate) fn send_heartbeat(fleet: &RuntimeTable, n: u32, counter: u64) -> HeartbeatResponse {
    send_heartbeat_with(fleet, n, counter, &json!({"notAfter": "", "fingerprint": ""}))
}

fn send_heartbeat_with(
    fleet: &RuntimeTable,
    n: u32,
    counter: u64,
    certificate: &serde_json::Value,
) -> HeartbeatResponse {
    let heartbeat = json!({
        "epoch": EPOCH, "sequence": 1, "counter": counter, "waiting": 0, "parked": 0, "agentVersion": "1", "planRevision": "1",
        "certificate": certificate, "canary": {"ageSeconds": 1},
        "watches": [{"name": "w", "objects": 1, "listedSecondsAgo": 1}],
    });
    let heartbeat = serde_json::from_value(heartbeat).unwrap();
    fleet.heartbeat(Verified::unchecked(&id(n), EPOCH, 1, heartbeat), 1_700_000_000).unwrap()
}

fn work() -> WorkSet {
    WorkSet::of(&[Work::Kyma, Work::Catalog])
}

#[tokio::test(start_paused = true)]
async fn only_a_runtime_id_without_a_kyma_departs() {
    let fleet = table_with(4, 5_000);
    let mut departures = fleet.departures();
    (0..5_000).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("2")));
    assert!(departures.is_empty(), "other labels changed");
    fleet.place(key(7), "", Some(id(6)), plan("2"));
    assert_eq!((departures.try_recv(), departures.is_empty()), (Ok(id(7)), true));
    fleet.remove(&key(6));
    assert!(departures.is_empty(), "another Kyma has the runtime id");
    fleet.remove(&key(7));
    fleet.place(key(8), "", None, plan("2"));
    assert_eq!((departures.try_recv(), departures.try_recv()), (Ok(id(6)), Ok(id(8))));
}

#[tokio::test(start_paused = true)]
async fn accepted_event_is_settled_when_its_reconcile_ends() {
    let fleet = table_with(4, 1);
    let answer = send(&fleet, 0, 1).unwrap();
    assert_eq!((answer.accepted, answer.since, answer.settled.len(), answer.heartbeat_seconds), (1, 1, 0, 30));
    let job = fleet.next().await;
    assert_eq!((&job.key, job.queued.work), (&key(0), work()));
    send(&fleet, 0, 2).unwrap();
    fleet.done(job, ReconcileOutcome::ended(work()));
    let answer = send_heartbeat(&fleet, 0, 1);
    assert_eq!(answer.settled, BTreeMap::from([("w".to_owned(), 1)]));
    assert_eq!((answer.plan_revision.as_deref(), answer.server_time.as_str()), (Some("1"), "2023-11-14T22:13:20Z"));
    let job = fleet.next().await;
    fleet.done(job, ReconcileOutcome::failed(work(), ErrorClass::Ours));
    assert_eq!(send_heartbeat(&fleet, 0, 2).settled["w"], 1, "a passing failure settles nothing");
    let job = fleet.next().await;
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert_eq!(send_heartbeat(&fleet, 0, 3).settled["w"], 2);
}

/// The share of the reconciles is used up by reports alone, see `app::workers`.
#[tokio::test(start_paused = true)]
async fn only_reconciles_after_new_reports_are_caused_by_the_agent() {
    let fleet = table_with(4, 1);
    send(&fleet, 0, 1).unwrap();
    send(&fleet, 0, 2).unwrap();
    let job = fleet.next().await;
    assert!(job.start.has_new_reports, "two events, one reconcile");
    fleet.done(job, ReconcileOutcome::failed(work(), ErrorClass::Ours));
    let retry = fleet.next().await;
    assert!(!retry.start.has_new_reports, "a retry");
    send(&fleet, 0, 3).unwrap();
    fleet.done(retry, ReconcileOutcome::ended(work()));
    let job = fleet.next().await;
    assert!(job.start.has_new_reports, "an event during the retry");
    fleet.done(job, ReconcileOutcome::ended(work()));
    fleet.enqueue(&key(0), work(), Priority::Catalog);
    let job = fleet.next().await;
    assert!(!job.start.has_new_reports, "a change in KCP");
    fleet.done(job, ReconcileOutcome::ended(work()));
}

#[tokio::test(start_paused = true)]
async fn kyma_placed_again_requests_a_resend_of_accepted_events() {
    let fleet = table_with(4, 1);
    send(&fleet, 0, 1).unwrap();
    fleet.remove(&key(0));
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    let answer = send_heartbeat(&fleet, 0, 1);
    assert_eq!((answer.resend.as_slice(), answer.settled.len()), (&["w".to_owned()][..], 0));
    assert!(fleet.next().now_or_never().is_none(), "only an event enqueues work");
    assert_eq!(fleet.path(&key(0), Instant::now()), Some(PathState::Proven), "no digest mismatch");
    assert_eq!(send(&fleet, 0, 2).unwrap().since, 2);
    fleet.done(fleet.next().await, ReconcileOutcome::ended(work()));
    let answer = send_heartbeat(&fleet, 0, 2);
    assert_eq!((answer.resend.len(), answer.settled["w"]), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn runtime_id_must_belong_to_exactly_one_kyma() {
    let fleet = fleet(4);
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    assert_eq!(send(&fleet, 0, 1), Err(PlacementError::NotSynced));
    fleet.set_synced();
    assert_eq!(send(&fleet, 1, 1), Err(PlacementError::Unknown));
    assert_eq!(send(&fleet, 0, 1).unwrap().accepted, 1);
    fleet.place(key(1), "", Some(id(0)), plan("1"));
    assert_eq!(send(&fleet, 0, 2), Err(PlacementError::Ambiguous));
    fleet.place(key(1), "", None, plan("1"));
    assert_eq!(send(&fleet, 0, 2).unwrap().since, 1, "the state was kept");
    fleet.remove(&key(0));
    assert_eq!(send(&fleet, 0, 3), Err(PlacementError::Unknown));
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    assert_eq!(send(&fleet, 0, 3).unwrap().since, 3, "the state was reset, and the response shows it");
}

#[tokio::test(start_paused = true)]
async fn reconcile_of_a_removed_kyma_settles_nothing_of_its_successor() {
    let fleet = table_with(4, 1);
    send(&fleet, 0, 1).unwrap();
    let job = fleet.next().await;
    fleet.remove(&key(0));
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    send(&fleet, 0, 1).unwrap();
    assert!(fleet.next().now_or_never().is_none(), "the earlier Kyma is still in progress");
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert!(send_heartbeat(&fleet, 0, 1).settled.is_empty());
    fleet.done(fleet.next().await, ReconcileOutcome::ended(work()));
    assert_eq!(send_heartbeat(&fleet, 0, 2).settled["w"], 1);
}

#[tokio::test(start_paused = true)]
async fn reconcile_right_after_the_start_is_repeated() {
    let fleet = table_with(4, 2);
    let start = Instant::now();
    fleet.enqueue(&key(0), work(), Priority::User);
    fleet.done(fleet.next().await, ReconcileOutcome::ended(work()));
    let job = fleet.next().await;
    assert_eq!(Instant::now() - start, Duration::from_secs(20));
    assert_eq!(job.queued, QueuedWork { work: work(), priority: Priority::Catalog, drift: Drift::All });
    fleet.done(job, ReconcileOutcome::ended(work()));
    fleet.enqueue(&key(1), work(), Priority::User);
    fleet.done(fleet.next().await, ReconcileOutcome::ended(work()));
    assert!(
        time::timeout(Duration::from_secs(3_600), fleet.next()).await.is_err(),
        "only once, and only reconciles that started early"
    );
}

#[tokio::test(start_paused = true)]
async fn dropped_job_counts_as_failed() {
    let fleet = table_with(4, 1);
    send(&fleet, 0, 1).unwrap();
    drop(fleet.next().await);
    assert!(fleet.next().now_or_never().is_none(), "in backoff");
    let job = fleet.next().await;
    assert_eq!(job.queued.work, work());
    assert!(fleet.views()[0].in_progress);
}

#[tokio::test(start_paused = true)]
async fn no_worker_misses_ready_or_due_work() {
    let fleet = table_with(8, 100);
    let mut workers = tokio::task::JoinSet::new();
    let (sender, mut ended) = tokio::sync::mpsc::unbounded_channel();
    for _ in 0..8 {
        let fleet = fleet.clone();
        let sender = sender.clone();
        workers.spawn(async move {
            loop {
                let job = fleet.next().await;
                time::sleep(Duration::from_secs(1)).await;
                let first = job.queued.drift == Drift::All;
                let outcome = if first {
                    ReconcileOutcome::failed(job.queued.work, ErrorClass::Ours)
                } else {
                    ReconcileOutcome::ended(work())
                };
                let _ = sender.send((job.key.clone(), first, Instant::now()));
                fleet.done(job, outcome);
            }
        });
    }
    tokio::task::yield_now().await;
    let start = Instant::now();
    (0..100).for_each(|n| drop(send(&fleet, n, 1).unwrap()));
    let mut first = 0;
    while first < 100 {
        let (_, drifted, at) = ended.recv().await.unwrap();
        first += u32::from(drifted);
        assert!(at - start < Duration::from_secs(60));
    }
    assert_eq!(first, 100);
}

#[tokio::test(start_paused = true)]
async fn path_is_proven_by_heartbeats() {
    let fleet = table_with(4, 1);
    assert_eq!(fleet.path(&key(1), Instant::now()), None);
    assert_eq!(fleet.path(&key(0), Instant::now()), Some(PathState::Unknown));
    send_heartbeat(&fleet, 0, 1);
    assert_eq!(fleet.path(&key(0), Instant::now()), Some(PathState::Proven));
    fleet.place(key(0), "", Some(id(0)), plan("2"));
    assert_eq!(fleet.path(&key(0), Instant::now()), Some(PathState::Unknown));
    time::advance(Duration::from_secs(90)).await;
    assert!(matches!(fleet.path(&key(0), Instant::now()), Some(PathState::Unproven(_))));
    let view = fleet.views().remove(0);
    assert_eq!((view.runtime_id.as_deref(), view.ambiguous, view.epochs.len()), (Some("r-0"), false, 1));
    assert_eq!(view.last_seen_seconds, Some(90));
}

#[tokio::test(start_paused = true)]
async fn work_that_ended_and_failed_counts_as_failed() {
    let fleet = table_with(4, 1);
    send(&fleet, 0, 1).unwrap();
    let outcome =
        ReconcileOutcome { ended: work(), ..ReconcileOutcome::failed(WorkSet::of(&[Work::Catalog]), ErrorClass::Ours) };
    fleet.done(fleet.next().await, outcome);
    assert!(send_heartbeat(&fleet, 0, 1).settled.is_empty(), "one of two kinds of work has not ended");
    let job = fleet.next().await;
    assert_eq!(job.queued.work, WorkSet::of(&[Work::Catalog]), "only that is retried");
    let ended = ReconcileOutcome::ended(job.queued.work);
    fleet.done(job, ended);
    assert_eq!(send_heartbeat(&fleet, 0, 2).settled["w"], 1);
}

#[tokio::test(start_paused = true)]
async fn new_plan_enqueues_work_that_becomes_unsettled() {
    let work_of = |revision: &str, work: &[&str]| {
        let watch =
            json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": work});
        Arc::new(Plan::parse(&json!({"revision": revision, "watches": [watch]}).to_string()).unwrap())
    };
    let fleet = fleet(4);
    fleet.place(key(0), "", Some(id(0)), work_of("1", &["kyma"]));
    fleet.set_synced();
    send(&fleet, 0, 1).unwrap();
    let job = fleet.next().await;
    fleet.place(key(0), "", Some(id(0)), work_of("2", &["kyma", "catalog"]));
    fleet.done(job, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    let job = fleet.next().await;
    assert!(job.queued.work.contains(Work::Catalog), "the watch has more work now");
    assert_eq!(job.queued.priority, Priority::Catalog);
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert_eq!(send_heartbeat(&fleet, 0, 1).settled["w"], 1);
    fleet.place(key(0), "", Some(id(0)), work_of("3", &["kyma"]));
    fleet.place(key(0), "", Some(id(0)), work_of("4", &["kyma", "catalog"]));
    let again = time::timeout(Duration::from_secs(10), fleet.next()).await;
    assert!(again.is_err(), "settled events stay settled: {again:?}");
}

#[tokio::test(start_paused = true)]
async fn legacy_event_enqueues_all_work_and_marks_the_path() {
    let fleet = table_with(4, 1);
    assert_eq!(fleet.legacy_event(&id(9)), Err(PlacementError::Unknown));
    assert!(!fleet.has_used_v3(&id(0)) && !fleet.has_used_v3(&id(9)));
    fleet.legacy_event(&id(0)).unwrap();
    let job = fleet.next().await;
    assert_eq!(job.queued, QueuedWork { work: work(), priority: Priority::User, drift: Drift::All });
    fleet.done(job, ReconcileOutcome::ended(work()));
    time::advance(Duration::from_secs(86_400)).await;
    assert_eq!(fleet.path(&key(0), Instant::now()), Some(PathState::Unproven(Unproven::LegacyAgent)));
    assert_eq!(fleet.views()[0].contract, "v2");
    send_heartbeat(&fleet, 0, 1);
    assert_eq!(fleet.path(&key(0), Instant::now()), Some(PathState::Proven));
    assert!(fleet.has_used_v3(&id(0)));
    fleet.legacy_event(&id(0)).unwrap();
    assert!(fleet.has_used_v3(&id(0)), "it is permanent");
}

#[tokio::test(start_paused = true)]
async fn changed_paths_are_returned_once() {
    let fleet = table_with(4, 2);
    let moved = || {
        let mut moved: Vec<_> =
            fleet.changed_paths().into_iter().map(|(key, path)| (key.name.clone(), path.as_str())).collect();
        moved.sort_unstable();
        moved
    };
    assert_eq!(moved(), [("kyma-0".to_owned(), "Unknown"), ("kyma-1".to_owned(), "Unknown")]);
    send_heartbeat(&fleet, 0, 1);
    assert_eq!(moved(), [("kyma-0".to_owned(), "Proven")]);
    send_heartbeat(&fleet, 0, 2);
    assert_eq!(moved(), []);
    time::advance(Duration::from_secs(91)).await;
    assert_eq!(moved(), [("kyma-0".to_owned(), "NoHeartbeat"), ("kyma-1".to_owned(), "NoHeartbeat")]);
}

#[tokio::test(start_paused = true)]
async fn renewal_failures_are_counted_while_heartbeats_report_them() {
    let mut registry = tidewatch_kit::metrics::Registry::default();
    let fleet = RuntimeTable::alone(1, Settings::default(), Metrics::register(&mut registry));
    (0..3).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    fleet.set_synced();
    let failing = || {
        let _ = fleet.changed_paths();
        let page = registry.encode().unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix("fleet_renewals_failing "));
        line.unwrap_or_else(|| panic!("{page}")).to_owned()
    };
    let shown = |n| {
        let view = fleet.views().into_iter().find(|view| view.kyma == key(n).name).unwrap();
        view.renewal_failed_since
    };
    let since = "2026-11-21T20:00:00Z";
    let fails = json!({"notAfter": "", "fingerprint": "", "renewalFailedSince": since});
    assert_eq!(failing(), "0");
    (0..2).for_each(|n| drop(send_heartbeat_with(&fleet, n, 1, &fails)));
    send_heartbeat(&fleet, 2, 1);
    assert_eq!((failing().as_str(), shown(0), shown(2)), ("2", Some(since.to_owned()), None));
    send_heartbeat(&fleet, 0, 2);
    assert_eq!((failing().as_str(), shown(0), shown(1)), ("1", None, Some(since.to_owned())));
    time::advance(Duration::from_secs(91)).await;
    assert_eq!(failing(), "0", "an outdated report does not count");
}

#[tokio::test(start_paused = true)]
async fn lifecycle_managers_gauge_has_a_series_per_failing_renewal() {
    let (mut ours, mut theirs) = Default::default();
    let metrics = Metrics::register(&mut ours);
    metrics.lifecycle_manager.register_in(&mut theirs);
    let fleet = RuntimeTable::alone(1, Settings::default(), metrics);
    (0..3).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    fleet.set_synced();
    let shown = || {
        let _ = fleet.changed_paths();
        let page = theirs.encode().unwrap();
        let lines = page.lines().filter_map(|line| line.strip_prefix("lifecycle_mgr_self_signed_cert_not_renew"));
        lines.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let fails = json!({"notAfter": "", "fingerprint": "", "renewalFailedSince": "2026-11-21T20:00:00Z"});
    let failing = |n| format!("{{kyma_name=\"kyma-{n}\"}} 1");
    assert_eq!(shown(), BTreeSet::new());
    (0..2).for_each(|n| drop(send_heartbeat_with(&fleet, n, 1, &fails)));
    send_heartbeat(&fleet, 2, 1);
    assert_eq!(shown(), [failing(0), failing(1)].into());
    send_heartbeat(&fleet, 0, 2);
    assert_eq!(shown(), [failing(1)].into());
    fleet.remove(&key(1));
    assert_eq!(shown(), BTreeSet::new());
}

/// A reconcile that did not reach the API server.
fn unreached() -> ReconcileOutcome {
    ReconcileOutcome { unreached: true, ..ReconcileOutcome::failed(work(), ErrorClass::Transport) }
}

#[tokio::test(start_paused = true)]
async fn away_runtime_is_probed_rarely_and_reconciled_on_its_first_heartbeat() {
    let fleet = table_with(4, 1);
    let path = |fleet: &RuntimeTable| fleet.path(&key(0), Instant::now()).unwrap().as_str();
    fleet.enqueue(&key(0), work(), Priority::User);
    let start = Instant::now();
    let mut probes = 0;
    let mut last = start;
    while last - start < Duration::from_secs(9 * 3_600) {
        let job = fleet.next().await;
        last = Instant::now();
        probes += u32::from(last - start > Duration::from_secs(3 * 3_600));
        fleet.done(job, unreached());
        let _ = fleet.changed_paths();
    }
    assert_eq!(path(&fleet), "Away");
    assert!((10..=25).contains(&probes), "{probes} in six hours");
    assert!(fleet.next().now_or_never().is_none());
    send_heartbeat(&fleet, 0, 1);
    let job = time::timeout(Duration::from_secs(6), fleet.next()).await.unwrap();
    assert_eq!(path(&fleet), "Proven");
    fleet.done(job, ReconcileOutcome::ended(work()));
    time::advance(Duration::from_secs(86_400)).await;
    assert_eq!(path(&fleet), "NoHeartbeat", "its API server was reached: it is not away");
}

#[tokio::test(start_paused = true)]
async fn silent_runtime_is_away_by_the_last_reconcile_that_proves_its_reach() {
    let fleet = table_with(4, 1);
    let path = |fleet: &RuntimeTable| fleet.path(&key(0), Instant::now()).unwrap().as_str();
    // As after a 404, or while a CRD is being deleted.
    let answered = || ReconcileOutcome::failed(work(), ErrorClass::Transport);
    fleet.enqueue(&key(0), work(), Priority::User);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3 * 3_600) {
        fleet.done(fleet.next().await, answered());
    }
    assert_eq!(path(&fleet), "NoHeartbeat");
    fleet.done(fleet.next().await, unreached());
    assert_eq!(path(&fleet), "Away");
    for class in [ErrorClass::Auth, ErrorClass::Conflict, ErrorClass::Ours] {
        fleet.done(fleet.next().await, ReconcileOutcome::failed(work(), class));
        assert_eq!(path(&fleet), "Away", "{class:?}");
    }
    fleet.done(fleet.next().await, answered());
    assert_eq!(path(&fleet), "NoHeartbeat");
}

#[tokio::test(start_paused = true)]
async fn inherited_path_state_lasts_until_the_first_request() {
    let fleet = table_with(4, 3);
    for (n, reason) in [(0, "Away"), (1, "LegacyAgent"), (2, "NoHeartbeat")] {
        fleet.inherit(&key(n), reason, "words");
    }
    let path = |n| fleet.path(&key(n), Instant::now()).unwrap().as_str();
    assert_eq!([path(0), path(1), path(2)], ["Away", "LegacyAgent", "Unknown"]);
    time::advance(Duration::from_secs(100)).await;
    assert_eq!([path(0), path(1), path(2)], ["Away", "LegacyAgent", "NoHeartbeat"]);
    fleet.enqueue(&key(0), work(), Priority::User);
    fleet.done(fleet.next().await, ReconcileOutcome::ended(work()));
    assert_eq!(path(0), "NoHeartbeat", "its API server was reached");
    assert!((0..3).all(|n| !fleet.has_used_v3(&id(n))));
    send_heartbeat(&fleet, 1, 1);
    assert_eq!(path(1), "Proven");
}

#[tokio::test(start_paused = true)]
async fn use_of_v3_is_inherited_permanently() {
    let fleet = table_with(4, 4);
    for (n, reason, message) in [
        (0, "StaleCanary", "words".to_owned()),
        (1, "NoHeartbeat", format!("words{}", crate::USED_V3_SUFFIX)),
        (2, "LegacyAgent", "words".to_owned()),
    ] {
        fleet.inherit(&key(n), reason, &message);
    }
    let used_v3 = || [0, 1, 2, 3].map(|n| fleet.has_used_v3(&id(n)));
    assert_eq!(used_v3(), [true, true, false, false]);
    let path = |n| fleet.path(&key(n), Instant::now()).unwrap().as_str();
    assert_eq!(
        [path(0), path(1), path(2)],
        ["Unknown", "Unknown", "LegacyAgent"],
        "the path state is not inherited from it"
    );
    (0..4).for_each(|n| fleet.legacy_event(&id(n)).unwrap());
    assert_eq!(used_v3(), [true, true, false, false], "it is permanent");
}

#[tokio::test(start_paused = true)]
async fn announced_interval_and_its_tolerance_follow_the_number_of_runtimes() {
    let settings = Settings { max_heartbeats_per_second: 1, seed: 1, ..Settings::default() };
    let metrics = Metrics::register(&mut tidewatch_kit::metrics::Registry::default());
    let fleet = RuntimeTable::alone(1, settings, metrics);
    (0..60).for_each(|n| fleet.place(key(n), "", Some(id(n)), plan("1")));
    fleet.set_synced();
    assert_eq!(send_heartbeat(&fleet, 0, 1).heartbeat_seconds, 60);
    assert_eq!(fleet.heartbeat_interval().get(), Duration::from_secs(60));
    (1..60).for_each(|n| fleet.remove(&key(n)));
    assert_eq!(fleet.heartbeat_interval().get(), Duration::from_secs(30));
    time::advance(Duration::from_secs(170)).await;
    assert_eq!(fleet.path(&key(0), Instant::now()).unwrap().as_str(), "Proven", "its agent follows the announced 60 s");
    assert_eq!(send_heartbeat(&fleet, 0, 2).heartbeat_seconds, 30);
    time::advance(Duration::from_secs(170)).await;
    assert_eq!(fleet.path(&key(0), Instant::now()).unwrap().as_str(), "Proven", "the last response may have been lost");
    send_heartbeat(&fleet, 0, 3);
    send_heartbeat(&fleet, 0, 4);
    time::advance(Duration::from_secs(170)).await;
    assert_eq!(fleet.path(&key(0), Instant::now()).unwrap().as_str(), "NoHeartbeat", "it follows the new one");
}

#[tokio::test(start_paused = true)]
async fn end_of_a_pause_resumes_paused_work_only() {
    let fleet = table_with(4, 2);
    send(&fleet, 0, 1).unwrap();
    fleet.done(fleet.next().await, ReconcileOutcome::default());
    assert_eq!(fleet.views().iter().filter(|view| WorkSet::of(&view.paused) == work()).count(), 1);
    assert!(fleet.next().now_or_never().is_none());
    assert!(send_heartbeat(&fleet, 0, 1).settled.is_empty(), "a pause settles nothing");
    fleet.unpause();
    let job = fleet.next().now_or_never().unwrap();
    assert_eq!((&job.key, job.queued.work, job.queued.priority), (&key(0), work(), Priority::User));
    assert!(fleet.next().now_or_never().is_none());
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert_eq!(send_heartbeat(&fleet, 0, 2).settled["w"], 1);
}

#[tokio::test(start_paused = true)]
async fn verification_is_spread_and_runs_once() {
    let fleet = table_with(4, 50);
    time::advance(Duration::from_secs(30)).await;
    (0..50).for_each(|n| fleet.verify_within(&key(n), Duration::from_secs(300)));
    let start = Instant::now();
    let mut early = 0;
    for _ in 0..50 {
        let job = fleet.next().await;
        assert_eq!((job.queued.priority, &job.queued.drift), (Priority::Verification, &Drift::All));
        early += u32::from(Instant::now() - start < Duration::from_secs(100));
        fleet.done(job, ReconcileOutcome::ended(work()));
    }
    assert!((5..=30).contains(&early), "{early} of 50 in the first third");
    assert!(Instant::now() - start <= Duration::from_secs(301));
}

#[tokio::test(start_paused = true)]
async fn job_is_cancelled_when_its_kyma_is_removed() {
    let fleet = table_with(4, 2);
    send(&fleet, 0, 1).unwrap();
    let job = fleet.next().await;
    let cancellation = job.start.cancellation.clone();
    // Another runtime under the same name is still this Kyma, while it stays in the shard.
    let shard = |n| fleet.shard_of(Some(&id(n)), "");
    let neighbour = (1..).find(|n| shard(*n) == shard(0)).unwrap();
    fleet.place(key(0), "", Some(id(neighbour)), plan("1"));
    fleet.remove(&key(1));
    assert!(!cancellation.is_cancelled());
    fleet.remove(&key(0));
    assert!(cancellation.is_cancelled());
    fleet.done(job, ReconcileOutcome::default());
    fleet.place(key(0), "", Some(id(0)), plan("1"));
    send(&fleet, 0, 2).unwrap();
    assert!(!fleet.next().await.start.cancellation.is_cancelled(), "the new Kyma has a token of its own");
}

#[tokio::test(start_paused = true)]
async fn paced_work_follows_the_rate_and_runs_once() {
    let fleet = table_with(100, 50);
    let catalog = WorkSet::of(&[Work::Catalog]);
    let start = Instant::now();
    let keys = || (0..50).map(key).collect();
    fleet.enqueue_paced(keys(), catalog, 10);
    // At a second change all of them still wait, except the first.
    fleet.done(fleet.next().await, ReconcileOutcome::ended(catalog));
    fleet.enqueue_paced(keys(), catalog, 10);
    let mut counts = BTreeMap::new();
    for n in 1..=50 {
        let job = fleet.next().await;
        assert_eq!(job.queued.priority, Priority::Catalog);
        *counts.entry(job.key.clone()).or_insert(0) += 1;
        let passed = start.elapsed();
        assert!(passed >= Duration::from_millis(100) * n - Duration::from_millis(10), "{n} after {passed:?}");
        fleet.done(job, ReconcileOutcome::ended(catalog));
    }
    assert!(counts.len() == 50 && counts.values().all(|count| *count == 1), "{counts:?}");
    assert!(start.elapsed() <= Duration::from_secs(6));
    assert!(fleet.next().now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn earliest_rollout_delay_applies() {
    let fleet = table_with(4, 1);
    let start = Instant::now();
    fleet.roll_out(&key(0), Duration::from_secs(90));
    fleet.roll_out(&key(0), Duration::from_secs(40));
    fleet.roll_out(&key(0), Duration::from_secs(60));
    let job = fleet.next().await;
    assert_eq!((start.elapsed().as_secs(), job.queued.work), (40, WorkSet::of(&[Work::Kyma])));
    fleet.done(job, ReconcileOutcome::ended(work()));
    assert!(fleet.next().now_or_never().is_none());
}

/// Agent version of the last counted heartbeat, after one of an epoch with a signature created at a time of the
/// receiver's wall clock, which also is its current time.
fn version_after_heartbeat(fleet: &RuntimeTable, epoch: u64, unix: i64) -> String {
    let version = format!("of epoch {epoch}");
    let epoch = Epoch::new(epoch);
    let heartbeat = json!({
        "epoch": epoch, "sequence": 0, "counter": 1, "waiting": 0, "parked": 0, "agentVersion": version,
        "certificate": {"notAfter": "", "fingerprint": ""}, "watches": [],
    });
    let heartbeat = serde_json::from_value(heartbeat).unwrap();
    fleet.heartbeat(Verified::unchecked(&id(0), epoch, unix, heartbeat), unix).unwrap();
    fleet.views().remove(0).agent_version.unwrap()
}

#[tokio::test(start_paused = true)]
async fn restarted_agent_counts_although_the_receivers_clock_was_set_back() {
    let fleet = table_with(4, 1);
    let before = 1_700_000_000;
    for epoch in 1..=4 {
        assert_eq!(version_after_heartbeat(&fleet, epoch, before), format!("of epoch {epoch}"));
    }
    time::advance(Duration::from_secs(10)).await;
    assert_eq!(version_after_heartbeat(&fleet, 5, before + 10 - 3_600), "of epoch 5", "heartbeat counts");
    let epochs = fleet.views().remove(0).epochs;
    assert!(epochs.iter().any(|view| view.epoch == Epoch::new(5)), "its ledger is kept");
}
