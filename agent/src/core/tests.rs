use std::{num::NonZeroI64, time::Duration};

use serde_json::json;
use tidewatch_api::identity::Instance;
use tidewatch_contract::{
    event::{Event, Payload, Reason, parse_batch},
    exchange::RefusedEvent,
};

use super::*;
use crate::index::Version;

impl Core {
    /// A heartbeat with default context.
    pub(crate) fn plain_heartbeat(&self) -> Heartbeat {
        let (not_after, fingerprint) = Default::default();
        let certificate = CertificateState { not_after, fingerprint, renewal_failed_since: None };
        self.heartbeat(
            Instant::now(),
            HeartbeatContext { certificate, trust_revision: None, canary: None, incomplete: false },
        )
        .0
    }
}

fn plan(revision: &str, watches: &[serde_json::Value]) -> Plan {
    Plan::parse(&json!({"revision": revision, "watches": watches}).to_string()).unwrap()
}

fn watch(name: &str, work: &str) -> serde_json::Value {
    json!({"name": name, "group": "g", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": [work]})
}

fn core(cap: usize) -> Core {
    Core::new("r-1".parse().unwrap(), cap, Metrics::default())
}

/// The figures without the memory.
fn counts(core: &Core) -> Stats {
    Stats { state_bytes: 0, ..core.figures() }
}

fn started(core: &Core, work: &str) -> WatchId {
    let id = core.follow(&plan("1", &[watch("w", work)])).started[0].id;
    core.described(id, "v1", "Thing", false);
    id
}

fn seen(version: u64, generation: i64) -> ObjectState {
    ObjectState {
        uid: "u".into(),
        version: Version::Number(version),
        generation: NonZeroI64::new(generation),
        metadata: 0,
    }
}

fn list(core: &Core, id: WatchId, names: &[&str]) {
    core.list_begun(id);
    let objects = names.iter().map(|name| (format!("ns/{name}").into(), seen(1, 1))).collect();
    core.listed(id, objects, Instant::now());
    core.list_complete(id, Instant::now());
}

/// Sends all waiting events, accepted and settled at once; returns their names, empty for a `watch.changed`, `?` for an
/// unnamed one.
fn deliver(core: &Core) -> Vec<String> {
    send_batch(core, true)
}

fn send_batch(core: &Core, settles: bool) -> Vec<String> {
    send_batch_at(core, Instant::now(), settles, None)
}

/// Sends one batch; events of the watch `unknown` are refused.
fn send_batch_at(core: &Core, now: Instant, settles: bool, unknown: Option<&str>) -> Vec<String> {
    let Some(batch) = core.batch(now) else { return Vec::new() };
    let events: Vec<Event> = parse_batch(&batch.body).unwrap().into_iter().map(Result::unwrap).collect();
    let accepted = events.last().unwrap().id.sequence;
    let settled = settles.then(|| ("w".to_owned(), accepted)).into_iter().collect();
    let instance = Instance::new(1);
    let refused = events.iter().filter(|event| Some(&*event.watch) == unknown);
    let refused =
        refused.map(|event| RefusedEvent { id: event.id.to_string(), reason: Reason::UnknownWatch }).collect();
    core.apply_response(
        now,
        batch.epoch,
        &EventsResponse { instance, accepted, since: 1, settled, refused, heartbeat_seconds: 30 },
    );
    let name = |event: &Event| match &event.payload {
        Payload::Object(object) => object.subject.name.clone(),
        Payload::Watch => String::new(),
        Payload::Unnamed { .. } => "?".to_owned(),
    };
    events.iter().map(name).collect()
}

#[test]
fn list_is_one_event_and_each_change_another() {
    let core = core(100);
    let id = started(&core, "kyma");
    assert_eq!(core.unattempted(9), ["w"]);
    assert_eq!(core.plain_heartbeat().watches[0].digest, None);
    list(&core, id, &["a", "b"]);
    assert!(core.unattempted(9).is_empty());
    assert_eq!(deliver(&core), [""]);
    assert!(core.plain_heartbeat().watches[0].digest.is_some());
    core.present(id, "ns/a", seen(2, 1), Instant::now());
    assert_eq!(core.due(Instant::now()), None, "a status change of a spec watch");
    core.present(id, "ns/a", seen(3, 2), Instant::now());
    core.gone(id, "ns/b", seen(4, 1), Instant::now());
    assert_eq!(deliver(&core), ["a", "b"]);
    assert_eq!(counts(&core), Stats { watches: 1, objects: 1, ..Stats::default() });
}

#[test]
fn absent_kind_is_one_event_and_an_empty_list() {
    let core = core(100);
    let now = Instant::now();
    let id = core.follow(&plan("1", &[watch("w", "kyma")])).started[0].id;
    assert!(core.not_served(id, false, now), "a watch that was never listed needs no confirmation");
    assert!(core.unattempted(9).is_empty());
    assert_eq!(deliver(&core), [""]);
    core.set_error(id, Some("500".to_owned()));
    let later = now + Duration::from_secs(200);
    assert!(!core.not_served(id, true, later));
    assert_eq!(deliver(&core), Vec::<String>::new());
    let state = core.plain_heartbeat().watches.remove(0);
    assert_eq!((state.not_served, state.error, state.digest, state.objects), (true, None, Some(Digest::ZERO), 0));
    assert_eq!(core.snapshot(later, None).watches[0].alive_seconds_ago, Some(0));
    core.described(id, "v1", "Thing", false);
    list(&core, id, &["a"]);
    assert_eq!(deliver(&core), ["", "a"]);
    assert!(!core.plain_heartbeat().watches[0].not_served);
}

#[test]
fn only_a_confirmed_absence_deletes_objects() {
    for work in ["kyma", "forward"] {
        let core = core(100);
        let now = Instant::now();
        let id = started(&core, work);
        list(&core, id, &["a", "b"]);
        while !deliver(&core).is_empty() {}
        let before = core.plain_heartbeat().watches.remove(0);
        assert!(!core.not_served(id, false, now));
        let after = core.plain_heartbeat().watches.remove(0);
        assert_eq!((after.objects, after.digest, after.not_served), (2, before.digest, false));
        assert_eq!(deliver(&core), Vec::<String>::new());
        assert!(core.not_served(id, true, now));
        assert_eq!(deliver(&core), ["", "a", "b"]);
        assert_eq!(core.plain_heartbeat().watches[0].digest, Some(Digest::ZERO));
    }
}

#[test]
fn unnamed_objects_of_an_absent_kind_are_reported_once_it_is_known() {
    let core = core(100);
    let id = started(&core, "forward");
    list(&core, id, &["a"]);
    while !deliver(&core).is_empty() {}
    let mut selecting = watch("w", "forward");
    selecting["labelSelector"] = json!("a=b");
    let id = core.follow(&plan("2", &[selecting])).started[0].id;
    assert!(core.not_served(id, true, Instant::now()));
    assert_eq!(deliver(&core), [""]);
    core.described(id, "v1", "Thing", false);
    list(&core, id, &[]);
    assert_eq!(deliver(&core), ["?"]);
}

#[test]
fn evidence_changes_with_plan_and_watches_but_not_with_objects() {
    let core = core(100);
    let evidence = || core.evidence(true, false);
    let id = started(&core, "kyma");
    let unlisted = evidence();
    assert_eq!((unlisted.plan_revision.as_deref(), unlisted.is_listed), (Some("1"), false));
    list(&core, id, &["a"]);
    let listed = evidence();
    assert!(listed.is_listed);
    core.present(id, "ns/b", seen(2, 1), Instant::now());
    deliver(&core);
    assert_eq!(evidence(), listed);
    core.set_error(id, Some("403".to_owned()));
    assert_eq!(evidence(), unlisted);
    core.set_error(id, None);
    core.set_plan_error(Some("no".to_owned()));
    assert!(evidence().is_plan_refused);
    core.set_plan_error(None);
    core.not_served(id, true, Instant::now());
    assert_eq!(evidence(), listed, "an absent kind is no failure");
}

#[test]
fn relist_reports_changed_and_deleted_objects() {
    let core = core(100);
    let id = started(&core, "kyma");
    list(&core, id, &["a", "b"]);
    deliver(&core);
    list(&core, id, &["b", "c"]);
    assert_eq!(deliver(&core), ["", "a", "c"]);
}

#[test]
fn first_list_of_a_watch_that_the_plan_has_got_since_the_start_reports_its_objects_if_they_are_few() {
    let core = core(100);
    started(&core, "kyma");
    let again = |revision: &str, name: &str| {
        let id = core.follow(&plan(revision, &[watch("w", "kyma"), watch(name, "manifest")])).started[0].id;
        core.described(id, "v1", "Thing", false);
        id
    };
    let few = again("2", "few");
    list(&core, few, &["a", "b"]);
    assert_eq!(deliver(&core), ["", "a", "b"]);
    let digest = core.plain_heartbeat().watches.into_iter().find(|watch| watch.name == "few").unwrap().digest;
    assert!(digest.is_some_and(|digest| digest != Digest::ZERO), "each object is counted once");
    list(&core, few, &["a", "b"]);
    assert_eq!(deliver(&core), [""], "a later list");
    let many = again("3", "many");
    let names: Vec<_> = (0..=ANNOUNCED).map(|n| format!("o{n}")).collect();
    list(&core, many, &names.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(deliver(&core), [""]);
}

#[test]
fn forwarded_watch_sends_every_object_after_each_list_and_resend() {
    let core = core(100);
    let id = started(&core, "forward");
    for _ in 0..2 {
        list(&core, id, &["a", "b"]);
        assert_eq!(deliver(&core), ["", "a", "b"]);
    }
    let heartbeat = core.plain_heartbeat();
    let digest = heartbeat.watches[0].digest;
    let response = HeartbeatResponse { resend: vec!["w".to_owned(), "unknown".to_owned()], ..empty_response() };
    core.apply_heartbeat_response(Instant::now(), heartbeat.epoch, &response);
    assert_eq!(deliver(&core), ["", "a", "b"]);
    assert_eq!(core.plain_heartbeat().watches[0].digest, digest);
}

/// A heartbeat response without requests.
fn empty_response() -> HeartbeatResponse {
    HeartbeatResponse {
        instance: Instance::new(1),
        settled: [].into(),
        since: None,
        heartbeat_seconds: 30,
        plan_revision: None,
        trust_revision: None,
        server_time: String::new(),
        resend: Vec::new(),
        renew: false,
    }
}

#[test]
fn watch_in_backoff_does_not_delay_the_sweep_of_others() {
    let core = core(10);
    let now = Instant::now();
    let followed = core.follow(&plan("1", &[watch("w", "forward"), watch("x", "kyma")]));
    let [w, x] = [0, 1].map(|n| followed.started[n].id);
    for id in [w, x] {
        core.described(id, "v1", "Thing", false);
    }
    list(&core, x, &["x"]);
    assert_eq!(send_batch_at(&core, now, false, Some("x")), [""]);
    assert!(core.due(now).is_some_and(|due| due > now), "it is on hold");
    let names: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    list(&core, w, &names.iter().map(String::as_str).collect::<Vec<_>>());
    let mut sent = Vec::new();
    while core.due(now) == Some(now) {
        sent.extend(send_batch_at(&core, now, false, None));
    }
    assert!(sent.len() < 10, "half of the limit is in flight: {sent:?}");
    let heartbeat = core.plain_heartbeat();
    let response = HeartbeatResponse { settled: [("w".to_owned(), u64::MAX)].into(), ..empty_response() };
    core.apply_heartbeat_response(now, heartbeat.epoch, &response);
    assert_eq!(core.due(now), Some(now));
}

/// Sends batches until nothing is waiting.
fn drain(core: &Core) -> Vec<String> {
    let mut names = Vec::new();
    while core.due(Instant::now()).is_some() {
        names.extend(deliver(core));
    }
    names
}

#[test]
fn forwarded_watch_beyond_its_limit_sends_every_object_eventually() {
    let core = core(10);
    let id = started(&core, "forward");
    let names: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    list(&core, id, &names.iter().map(String::as_str).collect::<Vec<_>>());
    // The manager is dead: accepted events are not settled.
    while core.due(Instant::now()).is_some() {
        send_batch(&core, false);
    }
    for name in &names {
        core.present(id, &format!("ns/{name}"), seen(2, 2), Instant::now());
        let Stats { waiting, unsettled, .. } = core.figures();
        assert!(waiting + unsettled <= 12, "{waiting} {unsettled}");
    }
    let mut sent = drain(&core);
    sent.retain(|name| !name.is_empty());
    sent.sort();
    sent.dedup();
    assert_eq!(sent, names);
    assert_eq!(counts(&core), Stats { watches: 1, objects: 10, ..Stats::default() });
    assert!(core.plain_heartbeat().watches[0].digest.is_some());
}

#[test]
fn forwarded_watch_beyond_its_limit_keeps_announced_deletions() {
    let core = core(4);
    let id = started(&core, "forward");
    list(&core, id, &["a", "b"]);
    drain(&core);
    core.gone(id, "ns/a", seen(2, 1), Instant::now());
    for n in 0..100 {
        core.present(id, &format!("ns/{n}"), seen(1, 1), Instant::now());
        core.gone(id, &format!("ns/{n}"), seen(2, 1), Instant::now());
        assert!(core.figures().waiting <= 6);
    }
    // Objects that were created and deleted in the meantime were never announced.
    let sent = drain(&core);
    assert!(sent.contains(&"a".to_owned()), "{sent:?}");
    assert!(!sent.contains(&"?".to_owned()) && !sent.contains(&"0".to_owned()), "{sent:?}");
}

#[test]
fn deletions_beyond_the_limit_are_reported_without_names() {
    let core = core(4);
    let id = started(&core, "forward");
    list(&core, id, &["a", "b", "c", "d"]);
    drain(&core);
    for name in ["a", "b", "c", "d"] {
        core.gone(id, &format!("ns/{name}"), seen(2, 1), Instant::now());
    }
    core.present(id, "ns/e", seen(1, 1), Instant::now());
    assert_eq!(drain(&core), ["?", "e"]);
}

#[test]
fn replanned_forwarded_watch_reports_possible_deletions() {
    let core = core(100);
    let id = started(&core, "forward");
    list(&core, id, &["a", "b"]);
    drain(&core);
    core.gone(id, "ns/a", seen(2, 1), Instant::now());
    let otherwise = |revision: &str, manager: &str, selector: &str| {
        let mut watch = watch("w", "forward");
        (watch["labelSelector"], watch["manager"]) = (json!(selector), json!(manager));
        let id = core.follow(&plan(revision, &[watch])).started[0].id;
        core.described(id, "v1", "Thing", false);
        list(&core, id, &["b"]);
        drain(&core)
    };
    assert_eq!(otherwise("2", "m", "x=y"), ["?", "b"], "the deletion of `a` has not been sent");
    assert_eq!(otherwise("3", "other", "x=y"), ["", "b"], "a new manager knows no deleted object");
    assert!(core.batch(Instant::now()).is_none());
}

#[test]
fn coarse_forwarded_watch_reports_changes_without_names() {
    let core = core(2);
    let id = started(&core, "forward");
    list(&core, id, &["a", "b", "c"]);
    assert_eq!(drain(&core), ["?"]);
    core.gone(id, "ns/a", seen(9, 1), Instant::now());
    assert_eq!(drain(&core), ["?"]);
    // Deletions before this list cannot be named, but from then on the index is complete.
    list(&core, id, &["c"]);
    assert_eq!(drain(&core), ["?", "c"]);
    list(&core, id, &["c"]);
    assert_eq!(drain(&core), ["", "c"]);
}

#[test]
fn changed_rule_keeps_deletions_and_changes_the_digest() {
    let core = core(100);
    let id = started(&core, "forward");
    list(&core, id, &["a", "b"]);
    drain(&core);
    let digest = core.plain_heartbeat().watches[0].digest;
    core.gone(id, "ns/a", seen(2, 1), Instant::now());
    core.described(id, "v1", "Thing", true);
    list(&core, id, &[]);
    assert_eq!(drain(&core), ["", "a", "b"]);
    list(&core, id, &["a", "b"]);
    drain(&core);
    let other = core.plain_heartbeat().watches[0].digest;
    assert!(other.is_some() && other != digest);
}

#[test]
fn plan_restarts_changed_watches_and_calls_of_stopped_loops_have_no_effect() {
    let core = core(100);
    let old = started(&core, "kyma");
    list(&core, old, &["a"]);
    assert!(core.follow(&plan("2", &[watch("w", "kyma")])).started.is_empty());
    let turnover = core.follow(&plan("3", &[watch("w", "catalog"), watch("x", "kyma")]));
    assert_eq!((turnover.stopped.len(), turnover.started.len()), (1, 2));
    list(&core, old, &["a"]);
    assert_eq!(core.due(Instant::now()), None);
    assert_eq!(core.plain_heartbeat().plan_revision.as_deref(), Some("3"));
}

#[test]
fn watch_above_its_limit_goes_coarse_and_others_stay_exact() {
    let core = core(2);
    let id = started(&core, "kyma");
    list(&core, id, &["a", "b", "c"]);
    assert_eq!(deliver(&core), [""]);
    let watch = core.plain_heartbeat().watches.remove(0);
    assert!(watch.coarse && watch.digest.is_none());
    // Each of its events is a reconcile, so its changes wait for each other.
    let now = Instant::now();
    for version in 10..1_000_i64 {
        core.present(id, "ns/a", seen(version.unsigned_abs(), version), now);
        assert_eq!(deliver(&core), [""; 0]);
    }
    let due = core.due(now).unwrap();
    assert!((now + Duration::from_secs(29)..now + Duration::from_secs(61)).contains(&due));
    assert_eq!(send_batch_at(&core, due, true, None), [""]);
    assert_eq!(core.due(due), None);
    list(&core, id, &["a"]);
    assert!(!core.plain_heartbeat().watches[0].coarse);
    assert_eq!(deliver(&core), [""], "an exact watch does not wait");
}

#[test]
fn largest_watch_goes_coarse_beyond_the_total_limit() {
    let core = core(100).bounded(10);
    let started = core.follow(&plan("1", &[watch("small", "kyma"), watch("w", "forward")])).started;
    let small = started[0].id;
    let large = started[1].id;
    let names: Vec<String> = (0..20).map(|n| n.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    list(&core, small, &names[..4]);
    list(&core, large, &names[..6]);
    // Objects that a sweep has not reached count as one event.
    assert_eq!(counts(&core), Stats { waiting: 3, watches: 2, objects: 10, ..Stats::default() });
    core.present(small, "ns/new", seen(2, 1), Instant::now());
    assert_eq!(counts(&core), Stats { waiting: 3, watches: 2, objects: 5, coarse: 1, ..Stats::default() });
    // A coarse watch does not grow, and the small one stays exact.
    core.present(large, "ns/other", seen(3, 1), Instant::now());
    let state = |name: &str| core.plain_heartbeat().watches.into_iter().find(|watch| watch.name == name).unwrap();
    assert!(state("w").coarse && !state("small").coarse);
    assert_eq!(deliver(&core), ["", "new", "?"]);
    assert!(state("small").digest.is_some());
    // A list above the limit is not read to its end.
    core.list_begun(large);
    let objects = names.iter().map(|name| (format!("ns/{name}").into(), seen(9, 1))).collect();
    assert!(!core.listed(large, objects, Instant::now()));
    core.list_complete(large, Instant::now());
    assert!(state("w").coarse && core.figures().objects == 5);
}

#[test]
fn outbox_is_bounded_under_churn_of_many_watches() {
    let core = core(50).bounded(60);
    let watches: Vec<_> = (0..10).map(|n| watch(&format!("w{n}"), "kyma")).collect();
    let started = core.follow(&plan("1", &watches)).started;
    started.iter().for_each(|started| list(&core, started.id, &[]));
    for n in 0..100 {
        for started in &started {
            core.present(started.id, &format!("ns/{n}"), seen(1, 1), Instant::now());
            core.gone(started.id, &format!("ns/{n}"), seen(2, 1), Instant::now());
            let Stats { waiting, unsettled, .. } = core.figures();
            assert!(waiting + unsettled <= 60, "{waiting} {unsettled}");
        }
    }
}

#[test]
fn outbox_is_bounded_under_churn() {
    let core = core(3);
    let id = started(&core, "kyma");
    list(&core, id, &[]);
    deliver(&core);
    for n in 0..100 {
        core.present(id, &format!("ns/{n}"), seen(1, 1), Instant::now());
        core.gone(id, &format!("ns/{n}"), seen(2, 1), Instant::now());
        assert!(core.figures().waiting <= 4);
    }
    assert_eq!(deliver(&core)[0], "");
    assert!(core.plain_heartbeat().watches[0].digest.is_some());
}
