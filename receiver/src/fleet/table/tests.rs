//! The hub as its callers see it, and the rules of the contract as a model.

mod forward;
mod model;
mod silence;
#[cfg(feature = "otlp")]
mod traces;

use std::collections::{BTreeMap, BTreeSet};

use futures::FutureExt as _;
use serde_json::json;
use tidewatch_shared::{digest::Digest, event::Payload, plan::Work};

use super::*;
use crate::{
    base::class::Class,
    fleet::{Contract, Unproven},
};

const EPOCH: Epoch = Epoch::new(7);

fn hub(slots: usize) -> Hub {
    let settings = Settings { slots, seed: 1, ..Settings::default() };
    let metrics = Metrics::register(&mut tidewatch_shared::metrics::Registry::default());
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

fn send(hub: &Hub, n: u32, sequence: u64) -> Result<EventsResponse, Unplaced> {
    let event = event::Event {
        id: event::EventId { epoch: EPOCH, sequence },
        source: id(n),
        watch: "w".into(),
        payload: Payload::Watch,
        delta: Digest::ZERO,
        time: None,
        traceparent: None,
    };
    hub.events(&id(n), EPOCH, 1, vec![Ok(event)])
}

fn beat(hub: &Hub, n: u32, counter: u64) -> HeartbeatResponse {
    beat_with(hub, n, counter, &json!({"notAfter": "", "fingerprint": ""}))
}

fn beat_with(hub: &Hub, n: u32, counter: u64, certificate: &serde_json::Value) -> HeartbeatResponse {
    let heartbeat = json!({
        "epoch": EPOCH, "sequence": 1, "counter": counter, "waiting": 0, "parked": 0, "agentVersion": "1", "planRevision": "1",
        "certificate": certificate, "canary": {"ageSeconds": 1},
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
async fn what_was_accepted_by_a_kyma_that_was_placed_again_is_asked_for_and_settled() {
    let hub = placed(4, 1);
    send(&hub, 0, 1).unwrap();
    hub.remove(&key(0));
    hub.place(key(0), Some(id(0)), plan("1"));
    let answer = beat(&hub, 0, 1);
    assert_eq!((answer.resend.as_slice(), answer.settled.len()), (&["w".to_owned()][..], 0));
    assert!(hub.next().now_or_never().is_none(), "only an event wants work");
    assert_eq!(hub.path(&key(0), Instant::now()), Some(PathState::Proven), "nothing differs");
    assert_eq!(send(&hub, 0, 2).unwrap().since, 2);
    hub.done(hub.next().await, Outcome::ended(works()));
    let answer = beat(&hub, 0, 2);
    assert_eq!((answer.resend.len(), answer.settled["w"]), (0, 2));
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

#[tokio::test(start_paused = true)]
async fn a_work_that_ended_and_failed_has_failed() {
    let hub = placed(4, 1);
    send(&hub, 0, 1).unwrap();
    let outcome = Outcome { ended: works(), ..Outcome::failed(Works::of(&[Work::Catalog]), Class::Ours) };
    hub.done(hub.next().await, outcome);
    assert!(beat(&hub, 0, 1).settled.is_empty(), "one of two works is missing");
    let job = hub.next().await;
    assert_eq!(job.wanted.works, Works::of(&[Work::Catalog]), "only that is tried again");
    let ended = Outcome::ended(job.wanted.works);
    hub.done(job, ended);
    assert_eq!(beat(&hub, 0, 2).settled["w"], 1);
}

#[tokio::test(start_paused = true)]
async fn what_a_new_plan_leaves_unsettled_is_wanted() {
    let stands_for = |revision: &str, work: &[&str]| {
        let watch =
            json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": work});
        Arc::new(Plan::parse(&json!({"revision": revision, "watches": [watch]}).to_string()).unwrap())
    };
    let hub = hub(4);
    hub.place(key(0), Some(id(0)), stands_for("1", &["kyma"]));
    hub.set_synced();
    send(&hub, 0, 1).unwrap();
    let job = hub.next().await;
    hub.place(key(0), Some(id(0)), stands_for("2", &["kyma", "catalog"]));
    hub.done(job, Outcome::ended(Works::of(&[Work::Kyma])));
    let job = hub.next().await;
    assert!(job.wanted.works.contains(Work::Catalog), "the watch stands for more now");
    assert_eq!(job.wanted.priority, Priority::Catalog);
    hub.done(job, Outcome::ended(works()));
    assert_eq!(beat(&hub, 0, 1).settled["w"], 1);
    hub.place(key(0), Some(id(0)), stands_for("3", &["kyma"]));
    hub.place(key(0), Some(id(0)), stands_for("4", &["kyma", "catalog"]));
    let again = time::timeout(Duration::from_secs(10), hub.next()).await;
    assert!(again.is_err(), "what is settled stays so: {again:?}");
}

#[tokio::test(start_paused = true)]
async fn a_legacy_event_wants_everything_and_marks_the_path() {
    let hub = placed(4, 1);
    assert_eq!(hub.legacy_event(&id(9)), Err(Unplaced::Unknown));
    assert!(!hub.speaks_v3(&id(0)) && !hub.speaks_v3(&id(9)));
    hub.legacy_event(&id(0)).unwrap();
    let job = hub.next().await;
    assert_eq!(job.wanted, Wanted { works: works(), priority: Priority::User, drift: Drift::All });
    hub.done(job, Outcome::ended(works()));
    time::advance(Duration::from_secs(86_400)).await;
    assert_eq!(hub.path(&key(0), Instant::now()), Some(PathState::Unproven(Unproven::LegacyAgent)));
    assert_eq!(hub.view()[0].contract, Contract::V2);
    beat(&hub, 0, 1);
    assert_eq!(hub.path(&key(0), Instant::now()), Some(PathState::Proven));
    assert!(hub.speaks_v3(&id(0)));
    hub.legacy_event(&id(0)).unwrap();
    assert!(hub.speaks_v3(&id(0)), "once is enough");
}

#[tokio::test(start_paused = true)]
async fn moved_paths_are_told_once() {
    let hub = placed(4, 2);
    let moved = || {
        let mut moved: Vec<_> =
            hub.moved_paths().into_iter().map(|(key, path)| (key.name.clone(), path.as_str())).collect();
        moved.sort_unstable();
        moved
    };
    assert_eq!(moved(), [("kyma-0".to_owned(), "Unknown"), ("kyma-1".to_owned(), "Unknown")]);
    beat(&hub, 0, 1);
    assert_eq!(moved(), [("kyma-0".to_owned(), "Proven")]);
    beat(&hub, 0, 2);
    assert_eq!(moved(), []);
    time::advance(Duration::from_secs(91)).await;
    assert_eq!(moved(), [("kyma-0".to_owned(), "NoHeartbeat"), ("kyma-1".to_owned(), "NoHeartbeat")]);
}

#[tokio::test(start_paused = true)]
async fn who_fails_to_renew_is_counted_and_shown_until_it_succeeds_or_is_heard_no_more() {
    let mut registry = tidewatch_shared::metrics::Registry::default();
    let hub = Hub::new(Instance::new(1), Settings::default(), Metrics::register(&mut registry), Instant::now());
    (0..3).for_each(|n| hub.place(key(n), Some(id(n)), plan("1")));
    hub.set_synced();
    let failing = || {
        let _ = hub.moved_paths();
        let page = registry.encode().unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix("fleet_renewals_failing "));
        line.unwrap_or_else(|| panic!("{page}")).to_owned()
    };
    let shown = |n| {
        let view = hub.view().into_iter().find(|view| view.key == key(n)).unwrap();
        view.renewal_failed_since.map(i64::from)
    };
    let (since, since_unix) = ("2026-11-21T20:00:00Z", 1_795_291_200);
    let fails = json!({"notAfter": "", "fingerprint": "", "renewalFailedSince": since});
    assert_eq!(failing(), "0");
    (0..2).for_each(|n| drop(beat_with(&hub, n, 1, &fails)));
    beat(&hub, 2, 1);
    assert_eq!((failing().as_str(), shown(0), shown(2)), ("2", Some(since_unix), None));
    beat(&hub, 0, 2);
    assert_eq!((failing().as_str(), shown(0), shown(1)), ("1", None, Some(since_unix)));
    time::advance(Duration::from_secs(91)).await;
    assert_eq!(failing(), "0", "what was said long ago may be over");
}

#[tokio::test(start_paused = true)]
async fn who_fails_to_renew_has_the_incumbents_gauge_and_nobody_else() {
    let (mut ours, mut incumbents) = Default::default();
    let metrics = Metrics::register(&mut ours);
    metrics.register_incumbent(&mut incumbents);
    let hub = Hub::new(Instance::new(1), Settings::default(), metrics, Instant::now());
    (0..3).for_each(|n| hub.place(key(n), Some(id(n)), plan("1")));
    hub.set_synced();
    let shown = || {
        let _ = hub.moved_paths();
        let page = incumbents.encode().unwrap();
        let lines = page.lines().filter_map(|line| line.strip_prefix("lifecycle_mgr_self_signed_cert_not_renew"));
        lines.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let fails = json!({"notAfter": "", "fingerprint": "", "renewalFailedSince": "2026-11-21T20:00:00Z"});
    let failing = |n| format!("{{kyma_name=\"kyma-{n}\"}} 1");
    assert_eq!(shown(), BTreeSet::new());
    (0..2).for_each(|n| drop(beat_with(&hub, n, 1, &fails)));
    beat(&hub, 2, 1);
    assert_eq!(shown(), [failing(0), failing(1)].into());
    beat(&hub, 0, 2);
    assert_eq!(shown(), [failing(1)].into());
    hub.remove(&key(1));
    assert_eq!(shown(), BTreeSet::new());
}

#[tokio::test(start_paused = true)]
async fn who_is_away_is_probed_seldom_and_woken_by_its_first_word() {
    let hub = placed(4, 1);
    let silent = |hub: &Hub| hub.path(&key(0), Instant::now()).unwrap().as_str();
    let lost = || Outcome::failed(works(), Class::Transport);
    hub.want(&key(0), works(), Priority::User);
    let start = Instant::now();
    let mut probes = 0;
    let mut last = start;
    while last - start < Duration::from_secs(9 * 3_600) {
        let job = hub.next().await;
        last = Instant::now();
        probes += u32::from(last - start > Duration::from_secs(3 * 3_600));
        hub.done(job, lost());
        let _ = hub.moved_paths();
    }
    assert_eq!(silent(&hub), "Away");
    assert!((10..=25).contains(&probes), "{probes} in six hours");
    assert!(hub.next().now_or_never().is_none());
    beat(&hub, 0, 1);
    let job = time::timeout(Duration::from_secs(6), hub.next()).await.unwrap();
    assert_eq!(silent(&hub), "Proven");
    hub.done(job, Outcome::ended(works()));
    time::advance(Duration::from_secs(86_400)).await;
    assert_eq!(silent(&hub), "NoHeartbeat", "its API server was reached: it is not away");
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_process_saw_goes_on_until_something_is_heard() {
    let hub = placed(4, 3);
    for (n, reason) in [(0, "Away"), (1, "LegacyAgent"), (2, "NoHeartbeat")] {
        hub.inherit(&key(n), reason, "words");
    }
    let path = |n| hub.path(&key(n), Instant::now()).unwrap().as_str();
    assert_eq!([path(0), path(1), path(2)], ["Away", "LegacyAgent", "Unknown"]);
    time::advance(Duration::from_secs(100)).await;
    assert_eq!([path(0), path(1), path(2)], ["Away", "LegacyAgent", "NoHeartbeat"]);
    hub.want(&key(0), works(), Priority::User);
    hub.done(hub.next().await, Outcome::ended(works()));
    assert_eq!(path(0), "NoHeartbeat", "it was reached");
    assert!((0..3).all(|n| !hub.speaks_v3(&id(n))));
    beat(&hub, 1, 1);
    assert_eq!(path(1), "Proven");
}

#[tokio::test(start_paused = true)]
async fn who_spoke_v3_to_an_earlier_process_has_spoken_it() {
    let hub = placed(4, 4);
    for (n, reason, message) in [
        (0, "StaleCanary", "words".to_owned()),
        (1, "NoHeartbeat", format!("words{}", fleet::SPOKE_V3)),
        (2, "LegacyAgent", "words".to_owned()),
    ] {
        hub.inherit(&key(n), reason, &message);
    }
    let spoke = || [0, 1, 2, 3].map(|n| hub.speaks_v3(&id(n)));
    assert_eq!(spoke(), [true, true, false, false]);
    let path = |n| hub.path(&key(n), Instant::now()).unwrap().as_str();
    assert_eq!([path(0), path(1), path(2)], ["Unknown", "Unknown", "LegacyAgent"], "it says nothing of how they are");
    (0..4).for_each(|n| hub.legacy_event(&id(n)).unwrap());
    assert_eq!(spoke(), [true, true, false, false], "nothing takes it back");
}

#[tokio::test(start_paused = true)]
async fn the_told_interval_follows_the_number_of_runtimes_and_so_does_patience() {
    let settings = Settings { max_heartbeats_per_second: 1, seed: 1, ..Settings::default() };
    let metrics = Metrics::register(&mut tidewatch_shared::metrics::Registry::default());
    let hub = Hub::new(Instance::new(1), settings, metrics, Instant::now());
    (0..60).for_each(|n| hub.place(key(n), Some(id(n)), plan("1")));
    hub.set_synced();
    assert_eq!(beat(&hub, 0, 1).heartbeat_seconds, 60);
    assert_eq!(hub.heartbeat_interval().get(), Duration::from_secs(60));
    (1..60).for_each(|n| hub.remove(&key(n)));
    assert_eq!(hub.heartbeat_interval().get(), Duration::from_secs(30));
    time::advance(Duration::from_secs(170)).await;
    assert_eq!(hub.path(&key(0), Instant::now()).unwrap().as_str(), "Proven", "its agent was told 60 s");
    assert_eq!(beat(&hub, 0, 2).heartbeat_seconds, 30);
    time::advance(Duration::from_secs(170)).await;
    assert_eq!(hub.path(&key(0), Instant::now()).unwrap().as_str(), "Proven", "that answer may have been lost");
    beat(&hub, 0, 3);
    beat(&hub, 0, 4);
    time::advance(Duration::from_secs(170)).await;
    assert_eq!(hub.path(&key(0), Instant::now()).unwrap().as_str(), "NoHeartbeat", "it follows the new one");
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_pause_wakes_who_waited_and_nobody_else() {
    let hub = placed(4, 2);
    send(&hub, 0, 1).unwrap();
    hub.done(hub.next().await, Outcome::default());
    assert_eq!(hub.view().iter().filter(|view| view.paused == works()).count(), 1);
    assert!(hub.next().now_or_never().is_none());
    assert!(beat(&hub, 0, 1).settled.is_empty(), "a pause settles nothing");
    hub.unpause();
    let job = hub.next().now_or_never().unwrap();
    assert_eq!((&job.key, job.wanted.works, job.wanted.priority), (&key(0), works(), Priority::User));
    assert!(hub.next().now_or_never().is_none());
    hub.done(job, Outcome::ended(works()));
    assert_eq!(beat(&hub, 0, 2).settled["w"], 1);
}

#[tokio::test(start_paused = true)]
async fn a_verification_is_spread_and_comes_once() {
    let hub = placed(4, 50);
    time::advance(Duration::from_secs(30)).await;
    (0..50).for_each(|n| hub.verify_within(&key(n), Duration::from_secs(300)));
    let start = Instant::now();
    let mut early = 0;
    for _ in 0..50 {
        let job = hub.next().await;
        assert_eq!((job.wanted.priority, &job.wanted.drift), (Priority::Verification, &Drift::All));
        early += u32::from(Instant::now() - start < Duration::from_secs(100));
        hub.done(job, Outcome::ended(works()));
    }
    assert!((5..=30).contains(&early), "{early} of 50 in the first third");
    assert!(Instant::now() - start <= Duration::from_secs(301));
}

#[tokio::test(start_paused = true)]
async fn a_pass_is_told_when_its_kyma_goes_and_only_then() {
    let hub = placed(4, 2);
    send(&hub, 0, 1).unwrap();
    let job = hub.next().await;
    let gone = job.gone();
    // Another runtime under the same name is still this Kyma.
    hub.place(key(0), Some(id(9)), plan("1"));
    hub.remove(&key(1));
    assert!(!gone.is_cancelled());
    hub.remove(&key(0));
    assert!(gone.is_cancelled());
    hub.done(job, Outcome::default());
    hub.place(key(0), Some(id(0)), plan("1"));
    send(&hub, 0, 2).unwrap();
    assert!(!hub.next().await.gone().is_cancelled(), "the next one begins anew");
}

#[tokio::test(start_paused = true)]
async fn those_who_are_woken_at_a_pace_come_so_many_a_second_and_each_once() {
    let hub = placed(100, 50);
    let (catalog, begun) = (Works::of(&[Work::Catalog]), Instant::now());
    let keys = || (0..50).map(key).collect();
    hub.want_paced(keys(), catalog, 10);
    // A second change finds all of them waiting, but for who was the first.
    hub.done(hub.next().await, Outcome::ended(catalog));
    hub.want_paced(keys(), catalog, 10);
    let mut counts = BTreeMap::new();
    for n in 1..=50 {
        let job = hub.next().await;
        assert_eq!(job.wanted.priority, Priority::Catalog);
        *counts.entry(job.key.clone()).or_insert(0) += 1;
        let passed = begun.elapsed();
        assert!(passed >= Duration::from_millis(100) * n - Duration::from_millis(10), "{n} after {passed:?}");
        hub.done(job, Outcome::ended(catalog));
    }
    assert!(counts.len() == 50 && counts.values().all(|count| *count == 1), "{counts:?}");
    assert!(begun.elapsed() <= Duration::from_secs(6));
    assert!(hub.next().now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_roll_out_comes_at_its_time_and_the_soonest_counts() {
    let (hub, begun) = (placed(4, 1), Instant::now());
    hub.roll_out(&key(0), Duration::from_secs(90));
    hub.roll_out(&key(0), Duration::from_secs(40));
    hub.roll_out(&key(0), Duration::from_secs(60));
    let job = hub.next().await;
    assert_eq!((begun.elapsed().as_secs(), job.wanted.works), (40, Works::of(&[Work::Kyma])));
    hub.done(job, Outcome::ended(works()));
    assert!(hub.next().now_or_never().is_none());
}
