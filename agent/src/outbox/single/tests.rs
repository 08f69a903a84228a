use tidewatch_contract::digest::Digest;

use super::*;
use crate::{
    index::{ObjectState, Version},
    outbox::{Update, WatchInfo, refusal::PARKED_RETRY},
    telemetry::Metrics,
};

const W: &str = "w";
/// Permits a request to every manager at once.
const OPEN: NotBefore<'static> = &|_, due| due;

fn outbox(manager: &str) -> Outbox {
    let mut outbox = Outbox::new("r-1".parse().unwrap(), Box::new(|| 1), Metrics::default());
    open(&mut outbox, W, manager);
    outbox
}

fn open(outbox: &mut Outbox, watch: &str, manager: &str) {
    let [group, version, resource, kind] = ["g", "v1", "things", "Thing"].map(Into::into);
    let name = watch.into();
    let manager = manager.into();
    outbox.open(watch.into(), WatchInfo { watch: name, group, version, resource, kind, manager, forward: false });
}

fn mark(outbox: &mut Outbox, key: &str) {
    mark_in(outbox, W, key);
}

fn mark_in(outbox: &mut Outbox, watch: &str, key: &str) {
    let seen = ObjectState { uid: "u".into(), version: Version::Number(1), generation: None, metadata: 0 };
    let update = Update::Object { seen, change: tidewatch_contract::event::Change::Spec, part: Digest::ZERO };
    outbox.mark(watch, key, update, Digest::ZERO, 0);
}

/// Name in the next event, and whether the event was sent before.
fn next(outbox: &mut Outbox, now: Instant) -> Option<(String, bool)> {
    next_of(outbox, now, OPEN)
}

fn next_of(outbox: &mut Outbox, now: Instant, not_before: NotBefore<'_>) -> Option<(String, bool)> {
    match outbox.single(now, not_before, &|_| true)? {
        NextSingle::Event(single) => Some((single.event.name, single.again)),
        NextSingle::Expand(watch) => panic!("{watch}"),
    }
}

fn sent(name: &str, again: bool) -> Option<(String, bool)> {
    Some((name.to_owned(), again))
}

#[test]
fn one_event_is_in_flight_and_accepted_events_are_removed() {
    let mut outbox = outbox("m");
    let now = Instant::now();
    assert_eq!((outbox.single_due(now, OPEN), next(&mut outbox, now)), (None, None));
    mark(&mut outbox, "ns/a");
    mark(&mut outbox, "ns/b");
    assert_eq!(outbox.single_due(now, OPEN), Some(now));
    assert_eq!(next(&mut outbox, now), sent("a", false));
    // The object changes while its event is in flight: nothing else is sent to the manager, and the newer state waits
    // behind the others.
    mark(&mut outbox, "ns/a");
    assert_eq!((outbox.single_due(now, OPEN), next(&mut outbox, now)), (None, None));
    assert_eq!((outbox.waiting(), outbox.unsettled()), (2, 1));
    outbox.single_accepted("m");
    for name in ["b", "a"] {
        assert_eq!(next(&mut outbox, now), sent(name, false));
        outbox.single_accepted("m");
    }
    assert_eq!((outbox.waiting(), outbox.unsettled(), outbox.single_due(now, OPEN)), (0, 0, None));
}

#[test]
fn failed_event_waits_behind_the_others_and_the_newest_state_wins() {
    let mut outbox = outbox("m");
    let now = Instant::now();
    mark(&mut outbox, "ns/a");
    mark(&mut outbox, "ns/b");
    assert_eq!(next(&mut outbox, now), sent("a", false));
    mark(&mut outbox, "ns/a");
    outbox.single_failed("m");
    assert_eq!((outbox.waiting(), outbox.unsettled()), (2, 0), "the newer event supersedes the older one");
    for (name, again) in [("b", false), ("a", true)] {
        assert_eq!(next(&mut outbox, now), sent(name, again));
        outbox.single_accepted("m");
    }
    // Failures, however many, do not park an event.
    mark(&mut outbox, "ns/c");
    for again in [false, true, true, true, true, true, true] {
        assert_eq!(next(&mut outbox, now), sent("c", again));
        outbox.single_failed("m");
    }
    assert_eq!((outbox.waiting(), outbox.parked(), outbox.total_dirty()), (1, 0, 1));
}

#[test]
fn delayed_or_busy_manager_does_not_delay_others() {
    let mut outbox = outbox("m");
    let now = Instant::now();
    open(&mut outbox, "v", "other");
    let later = now + PARKED_RETRY;
    let waits = |manager: &str, due: Instant| if manager == "m" { later } else { due };
    mark(&mut outbox, "ns/a");
    assert_eq!((outbox.single_due(now, &waits), next_of(&mut outbox, now, &waits)), (Some(later), None));
    for name in ["x", "y"] {
        mark_in(&mut outbox, "v", &format!("ns/{name}"));
        assert_eq!(outbox.single_due(now, &waits), Some(now));
        assert_eq!(next_of(&mut outbox, now, &waits), sent(name, false));
        outbox.single_accepted("other");
    }
    mark_in(&mut outbox, "v", "ns/z");
    assert_eq!(
        next_of(&mut outbox, later, &waits).zip(next_of(&mut outbox, later, &waits)),
        sent("a", false).zip(sent("z", false))
    );
    outbox.single_failed("other");
    assert_eq!(next(&mut outbox, later), sent("z", true), "the event of the other manager is still in flight");
    outbox.single_accepted("m");
    outbox.single_accepted("other");
    assert_eq!(outbox.total_dirty(), 0);
}

#[test]
fn an_event_names_an_object_as_lifecycle_manager_does() {
    let mut outbox = outbox("m");
    let now = Instant::now();
    mark(&mut outbox, "ns/a");
    let Some(NextSingle::Event(single)) = outbox.single(now, OPEN, &|_| false) else { panic!("an event") };
    assert_eq!(single.manager, "m");
    let body = r#"{"watched":{"Namespace":"ns","Name":"a"},"watchedGvk":{"group":"g","version":"v1","kind":"Thing"}}"#;
    assert_eq!(single.event.to_body(), body);
}

#[test]
fn watch_event_is_expanded_into_objects_or_sent_without_a_name() {
    let mut outbox = outbox("m");
    let now = Instant::now();
    outbox.mark_watch(W, 0);
    assert_eq!(outbox.single(now, OPEN, &|_| false), Some(NextSingle::Expand(W.into())));
    assert_eq!(outbox.single(now, OPEN, &|_| false), None);
    outbox.mark_watch(W, 0);
    assert_eq!(next(&mut outbox, now), sent("", false));
}

#[test]
fn repeatedly_refused_event_is_parked_and_retried_later_while_others_proceed() {
    let mut outbox = outbox("m");
    let now = Instant::now();
    mark(&mut outbox, "ns/a");
    mark(&mut outbox, "ns/b");
    for (name, again) in [("a", false), ("b", false), ("a", true), ("a", true), ("a", true), ("a", true)] {
        assert_eq!((next(&mut outbox, now), outbox.parked()), (sent(name, again), 0));
        match name {
            "a" => outbox.single_refused("m", now),
            _ => outbox.single_accepted("m"),
        }
    }
    assert_eq!((outbox.parked(), outbox.waiting()), (1, 0));
    let due = outbox.single_due(now, OPEN).unwrap();
    assert!(due > now && due <= now + PARKED_RETRY && next(&mut outbox, now).is_none());
    assert_eq!(next(&mut outbox, due), sent("a", false));
    outbox.single_accepted("m");
    assert_eq!((outbox.parked(), outbox.single_due(now + PARKED_RETRY, OPEN)), (0, None));
}

#[test]
fn an_event_of_a_watch_that_has_left_the_plan_is_not_sent_again() {
    let mut outbox = outbox("m");
    let now = Instant::now();
    let ends: [fn(&mut Outbox, Instant); 3] = [
        |outbox, _| outbox.single_accepted("m"),
        |outbox, _| outbox.single_failed("m"),
        |outbox, now| outbox.single_refused("m", now),
    ];
    for end in ends {
        mark(&mut outbox, "ns/a");
        assert!(next(&mut outbox, now).is_some() && outbox.is_manager("m"));
        outbox.close(W);
        end(&mut outbox, now);
        assert_eq!((next(&mut outbox, now), outbox.is_manager("m")), (None, false));
        // A watch of the same name that is added later is a different one.
        open(&mut outbox, W, "m");
        assert_eq!((next(&mut outbox, now), outbox.total_dirty()), (None, 0));
        end(&mut outbox, now);
    }
}

#[test]
fn event_for_a_manager_with_an_invalid_name_is_parked() {
    let mut outbox = outbox("../m");
    let now = Instant::now();
    mark(&mut outbox, "ns/a");
    assert_eq!((next(&mut outbox, now), outbox.parked()), (None, 1));
}
