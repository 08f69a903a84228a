use std::num::NonZeroI64;

use serde_json::json;
use tidewatch_shared::{
    event::{Event, Reason, What as Told, parse_batch},
    exchange::Refused,
    identity::Instance,
};

use super::*;
use crate::index::Version;

fn plan(revision: &str, watches: &[serde_json::Value]) -> Plan {
    Plan::parse(&json!({"revision": revision, "watches": watches}).to_string()).unwrap()
}

fn watch(name: &str, work: &str) -> serde_json::Value {
    json!({"name": name, "group": "g", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": [work]})
}

fn core(cap: usize) -> Core {
    Core::new("r-1".parse().unwrap(), cap, Metrics::default())
}

fn started(core: &Core, work: &str) -> WatchId {
    let id = core.follow(&plan("1", &[watch("w", work)])).started[0].id;
    core.described(id, "v1", "Thing", false);
    id
}

fn seen(version: u64, generation: i64) -> Seen {
    Seen { uid: "u".into(), version: Version::Number(version), generation: NonZeroI64::new(generation), metadata: 0 }
}

fn list(core: &Core, id: WatchId, names: &[&str]) {
    core.list_begun(id);
    let objects = names.iter().map(|name| (format!("ns/{name}").into(), seen(1, 1))).collect();
    core.listed(id, objects, Instant::now());
    core.list_complete(id, Instant::now());
}

/// Sends what waits and has it accepted and settled; gives names, empty for a whole watch, `?` for objects without a name.
fn deliver(core: &Core) -> Vec<String> {
    hand_over(core, true)
}

fn hand_over(core: &Core, settles: bool) -> Vec<String> {
    hand_over_at(core, Instant::now(), settles, None)
}

/// Events of a watch that is not known are refused.
fn hand_over_at(core: &Core, now: Instant, settles: bool, unknown: Option<&str>) -> Vec<String> {
    let Some(batch) = core.batch(now) else { return Vec::new() };
    let events: Vec<Event> = parse_batch(&batch.body).unwrap().into_iter().map(Result::unwrap).collect();
    let accepted = events.last().unwrap().id.sequence;
    let settled = settles.then(|| ("w".to_owned(), accepted)).into_iter().collect();
    let instance = Instance::new(1);
    let refused = events.iter().filter(|event| Some(&*event.watch) == unknown);
    let refused = refused.map(|event| Refused { id: event.id.to_string(), reason: Reason::UnknownWatch }).collect();
    core.answered(
        now,
        batch.epoch,
        &EventsAnswer { instance, accepted, since: 1, settled, refused, heartbeat_seconds: 30 },
    );
    let name = |event: &Event| match &event.what {
        Told::Object(object) => object.subject.name.clone(),
        Told::Watch => String::new(),
        Told::Unnamed { .. } => "?".to_owned(),
    };
    events.iter().map(name).collect()
}

#[test]
fn a_list_is_one_event_and_a_change_is_one_more() {
    let core = core(100);
    let id = started(&core, "kyma");
    assert_eq!(core.untried(9), ["w"]);
    assert_eq!(core.plain_heartbeat().watches[0].digest, None);
    list(&core, id, &["a", "b"]);
    assert!(core.untried(9).is_empty());
    assert_eq!(deliver(&core), [""]);
    assert!(core.plain_heartbeat().watches[0].digest.is_some());
    core.present(id, "ns/a", seen(2, 1), Instant::now());
    assert_eq!(core.due(Instant::now()), None, "a status change of a spec watch");
    core.present(id, "ns/a", seen(3, 2), Instant::now());
    core.gone(id, "ns/b", seen(4, 1), Instant::now());
    assert_eq!(deliver(&core), ["a", "b"]);
    assert_eq!(core.figures(), Figures { watches: 1, objects: 1, ..Figures::default() });
}

#[test]
fn a_relist_names_what_changed_and_what_is_gone() {
    let core = core(100);
    let id = started(&core, "kyma");
    list(&core, id, &["a", "b"]);
    deliver(&core);
    list(&core, id, &["b", "c"]);
    assert_eq!(deliver(&core), ["", "a", "c"]);
}

#[test]
fn a_forwarded_watch_names_every_object_at_each_list_and_resend() {
    let core = core(100);
    let id = started(&core, "forward");
    for _ in 0..2 {
        list(&core, id, &["a", "b"]);
        assert_eq!(deliver(&core), ["", "a", "b"]);
    }
    let heartbeat = core.plain_heartbeat();
    let digest = heartbeat.watches[0].digest;
    let answer = HeartbeatAnswer { resend: vec!["w".to_owned(), "unknown".to_owned()], ..well() };
    core.heartbeat_answered(Instant::now(), heartbeat.epoch, &answer);
    assert_eq!(deliver(&core), ["", "a", "b"]);
    assert_eq!(core.plain_heartbeat().watches[0].digest, digest);
}

/// The answer to a heartbeat that asks for nothing.
fn well() -> HeartbeatAnswer {
    HeartbeatAnswer {
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
fn a_watch_that_was_refused_stops_the_sweep_of_no_other() {
    let (core, now) = (core(10), Instant::now());
    let followed = core.follow(&plan("1", &[watch("w", "forward"), watch("x", "kyma")]));
    let [w, x] = [0, 1].map(|n| followed.started[n].id);
    for id in [w, x] {
        core.described(id, "v1", "Thing", false);
    }
    list(&core, x, &["x"]);
    assert_eq!(hand_over_at(&core, now, false, Some("x")), [""]);
    assert!(core.due(now).is_some_and(|due| due > now), "it is on hold");
    let names: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    list(&core, w, &names.iter().map(String::as_str).collect::<Vec<_>>());
    let mut told = Vec::new();
    while core.due(now) == Some(now) {
        told.extend(hand_over_at(&core, now, false, None));
    }
    assert!(told.len() < 10, "half of what may be held is under way: {told:?}");
    let heartbeat = core.plain_heartbeat();
    let answer = HeartbeatAnswer { settled: [("w".to_owned(), u64::MAX)].into(), ..well() };
    core.heartbeat_answered(now, heartbeat.epoch, &answer);
    assert_eq!(core.due(now), Some(now));
}

/// Hands over until nothing is left to send.
fn drain(core: &Core) -> Vec<String> {
    let mut names = Vec::new();
    while core.due(Instant::now()).is_some() {
        names.extend(deliver(core));
    }
    names
}

#[test]
fn a_forwarded_watch_with_more_to_tell_than_it_may_hold_tells_every_object_in_the_end() {
    let core = core(10);
    let id = started(&core, "forward");
    let names: Vec<String> = (0..10).map(|n| n.to_string()).collect();
    list(&core, id, &names.iter().map(String::as_str).collect::<Vec<_>>());
    // Its manager is dead: what was taken is not settled.
    while core.due(Instant::now()).is_some() {
        hand_over(&core, false);
    }
    for name in &names {
        core.present(id, &format!("ns/{name}"), seen(2, 2), Instant::now());
        let Figures { waiting, unsettled, .. } = core.figures();
        assert!(waiting + unsettled <= 12, "{waiting} {unsettled}");
    }
    let mut told = drain(&core);
    told.retain(|name| !name.is_empty());
    told.sort();
    told.dedup();
    assert_eq!(told, names);
    assert_eq!(core.figures(), Figures { watches: 1, objects: 10, ..Figures::default() });
    assert!(core.plain_heartbeat().watches[0].digest.is_some());
}

#[test]
fn a_forwarded_watch_with_more_to_tell_than_it_may_hold_still_tells_what_went() {
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
    // Nobody ever heard of those that came and went meanwhile.
    let told = drain(&core);
    assert!(told.contains(&"a".to_owned()), "{told:?}");
    assert!(!told.contains(&"?".to_owned()) && !told.contains(&"0".to_owned()), "{told:?}");
}

#[test]
fn more_that_went_than_can_be_held_are_told_without_their_names() {
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
fn a_forwarded_watch_that_is_planned_otherwise_says_that_something_may_have_gone() {
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
    assert_eq!(otherwise("2", "m", "x=y"), ["?", "b"], "nobody has told yet that `a` went");
    assert_eq!(otherwise("3", "other", "x=y"), ["", "b"], "who is new has heard of nothing that could have gone");
    assert!(core.batch(Instant::now()).is_none());
}

#[test]
fn objects_that_nobody_holds_are_told_without_a_name_to_whoever_knows_objects_only() {
    let core = core(2);
    let id = started(&core, "forward");
    list(&core, id, &["a", "b", "c"]);
    assert_eq!(drain(&core), ["?"]);
    core.gone(id, "ns/a", seen(9, 1), Instant::now());
    assert_eq!(drain(&core), ["?"]);
    // What went before this list nobody can name, but from then on all is known again.
    list(&core, id, &["c"]);
    assert_eq!(drain(&core), ["?", "c"]);
    list(&core, id, &["c"]);
    assert_eq!(drain(&core), ["", "c"]);
}

#[test]
fn another_rule_loses_nothing_that_went_and_is_another_digest() {
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
fn a_plan_starts_and_stops_what_changed_and_calls_of_stopped_loops_do_nothing() {
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
fn too_many_objects_make_a_watch_coarse_and_the_others_stay_exact() {
    let core = core(2);
    let id = started(&core, "kyma");
    list(&core, id, &["a", "b", "c"]);
    assert_eq!(deliver(&core), [""]);
    let watch = core.plain_heartbeat().watches.remove(0);
    assert!(watch.coarse && watch.digest.is_none());
    core.present(id, "ns/a", seen(9, 9), Instant::now());
    assert_eq!(deliver(&core), [""]);
    list(&core, id, &["a"]);
    assert!(!core.plain_heartbeat().watches[0].coarse);
}

#[test]
fn all_watches_together_have_a_bound_too_and_the_largest_pays_for_it() {
    let core = core(100).bounded(10);
    let started = core.follow(&plan("1", &[watch("small", "kyma"), watch("w", "forward")])).started;
    let (small, large) = (started[0].id, started[1].id);
    let names: Vec<String> = (0..20).map(|n| n.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    list(&core, small, &names[..4]);
    list(&core, large, &names[..6]);
    // The objects that are to be told in their turn count as one.
    assert_eq!(core.figures(), Figures { waiting: 3, watches: 2, objects: 10, ..Figures::default() });
    core.present(small, "ns/new", seen(2, 1), Instant::now());
    assert_eq!(core.figures(), Figures { waiting: 3, watches: 2, objects: 5, coarse: 1, ..Figures::default() });
    // No object that comes makes a coarse watch larger, and the small one is as exact as before.
    core.present(large, "ns/other", seen(3, 1), Instant::now());
    let state = |name: &str| core.plain_heartbeat().watches.into_iter().find(|watch| watch.name == name).unwrap();
    assert!(state("w").coarse && !state("small").coarse);
    assert_eq!(deliver(&core), ["", "new", "?"]);
    assert!(state("small").digest.is_some());
    // A list that is too long is not read to its end.
    core.list_begun(large);
    let objects = names.iter().map(|name| (format!("ns/{name}").into(), seen(9, 1))).collect();
    assert!(!core.listed(large, objects, Instant::now()));
    core.list_complete(large, Instant::now());
    assert!(state("w").coarse && core.figures().objects == 5);
}

#[test]
fn names_that_come_and_go_in_many_watches_do_not_fill_the_outbox() {
    let core = core(50).bounded(60);
    let watches: Vec<_> = (0..10).map(|n| watch(&format!("w{n}"), "kyma")).collect();
    let started = core.follow(&plan("1", &watches)).started;
    started.iter().for_each(|started| list(&core, started.id, &[]));
    for n in 0..100 {
        for started in &started {
            core.present(started.id, &format!("ns/{n}"), seen(1, 1), Instant::now());
            core.gone(started.id, &format!("ns/{n}"), seen(2, 1), Instant::now());
            let Figures { waiting, unsettled, .. } = core.figures();
            assert!(waiting + unsettled <= 60, "{waiting} {unsettled}");
        }
    }
}

#[test]
fn in_contract_v2_a_list_names_every_object_that_is_there_and_every_one_that_went() {
    let core = core(100);
    let id = started(&core, "kyma");
    let drain = || {
        let mut names = Vec::new();
        while let Some(single) = core.single(Instant::now(), &|_, due| due) {
            names.push(single.event.name);
            core.single_taken(&single.manager);
        }
        names
    };
    list(&core, id, &["a", "b"]);
    assert_eq!(drain(), ["a", "b"]);
    core.present(id, "ns/b", seen(5, 5), Instant::now());
    assert_eq!(drain(), ["b"]);
    list(&core, id, &["b", "c"]);
    assert_eq!(drain(), ["a", "b", "c"]);
    assert_eq!(core.figures(), Figures { watches: 1, objects: 2, ..Figures::default() });
    let many: Vec<String> = (0..200).map(|n| n.to_string()).collect();
    list(&core, id, &many.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(drain(), [""], "nobody knows their names");
}

#[test]
fn names_that_come_and_go_do_not_fill_the_outbox() {
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
