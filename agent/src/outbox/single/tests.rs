use tidewatch_shared::digest::Digest;

use super::*;
use crate::{
    index::{Seen, Version},
    outbox::{Facts, What, refused::PARKED},
    telemetry::Metrics,
};

const W: &str = "w";
/// Every manager may be told at once.
const OPEN: Opens<'static> = &|_, due| due;

fn outbox(manager: &str) -> Outbox {
    let mut outbox = Outbox::new("r-1".parse().unwrap(), Box::new(|| 1), Metrics::default());
    open(&mut outbox, W, manager);
    outbox
}

fn open(outbox: &mut Outbox, watch: &str, manager: &str) {
    let [group, version, resource, kind] = ["g", "v1", "things", "Thing"].map(Into::into);
    outbox.open(watch.into(), Facts { group, version, resource, kind, manager: manager.into(), forward: false });
}

fn mark(outbox: &mut Outbox, key: &str) {
    mark_in(outbox, W, key);
}

fn mark_in(outbox: &mut Outbox, watch: &str, key: &str) {
    let seen = Seen { uid: "u".into(), version: Version::Number(1), generation: None, metadata: 0 };
    let what = What::object(seen, tidewatch_shared::event::Change::Spec, Digest::ZERO);
    outbox.mark(watch, key, what, Digest::ZERO, 0);
}

/// The name that is sent next, and whether it was sent before.
fn next(outbox: &mut Outbox, now: Instant) -> Option<(String, bool)> {
    next_of(outbox, now, OPEN)
}

fn next_of(outbox: &mut Outbox, now: Instant, opens: Opens<'_>) -> Option<(String, bool)> {
    match outbox.single(now, opens, &|_| true)? {
        Next::Event(single) => Some((single.event.name, single.again)),
        Next::Whole(watch) => panic!("{watch}"),
    }
}

fn told(name: &str, again: bool) -> Option<(String, bool)> {
    Some((name.to_owned(), again))
}

#[test]
fn one_event_is_under_way_and_what_was_taken_is_forgotten() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    assert_eq!((outbox.single_due(now, OPEN), next(&mut outbox, now)), (None, None));
    mark(&mut outbox, "ns/a");
    mark(&mut outbox, "ns/b");
    assert_eq!(outbox.single_due(now, OPEN), Some(now));
    assert_eq!(next(&mut outbox, now), told("a", false));
    // It changes while it is sent: nothing else leaves, and the newer state waits behind it.
    mark(&mut outbox, "ns/a");
    assert_eq!((outbox.single_due(now, OPEN), next(&mut outbox, now)), (None, None));
    assert_eq!((outbox.waiting(), outbox.unsettled()), (2, 1));
    outbox.single_taken("m");
    for name in ["b", "a"] {
        assert_eq!(next(&mut outbox, now), told(name, false));
        outbox.single_taken("m");
    }
    assert_eq!((outbox.waiting(), outbox.unsettled(), outbox.single_due(now, OPEN)), (0, 0, None));
}

#[test]
fn what_failed_waits_again_behind_the_others_and_newest_wins() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    mark(&mut outbox, "ns/a");
    mark(&mut outbox, "ns/b");
    assert_eq!(next(&mut outbox, now), told("a", false));
    mark(&mut outbox, "ns/a");
    outbox.single_failed("m");
    assert_eq!((outbox.waiting(), outbox.unsettled()), (2, 0), "what is newer tells what is older as well");
    for (name, again) in [("b", false), ("a", true)] {
        assert_eq!(next(&mut outbox, now), told(name, again));
        outbox.single_taken("m");
    }
    // However often it fails, it is not parked.
    mark(&mut outbox, "ns/c");
    for again in [false, true, true, true, true, true, true] {
        assert_eq!(next(&mut outbox, now), told("c", again));
        outbox.single_failed("m");
    }
    assert_eq!((outbox.waiting(), outbox.parked(), outbox.dirty_in_all()), (1, 0, 1));
}

#[test]
fn a_manager_that_has_to_wait_or_has_an_event_under_way_delays_no_other() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    open(&mut outbox, "v", "other");
    let later = now + PARKED;
    let waits = |manager: &str, due: Instant| if manager == "m" { later } else { due };
    mark(&mut outbox, "ns/a");
    assert_eq!((outbox.single_due(now, &waits), next_of(&mut outbox, now, &waits)), (Some(later), None));
    for name in ["x", "y"] {
        mark_in(&mut outbox, "v", &format!("ns/{name}"));
        assert_eq!(outbox.single_due(now, &waits), Some(now));
        assert_eq!(next_of(&mut outbox, now, &waits), told(name, false));
        outbox.single_taken("other");
    }
    mark_in(&mut outbox, "v", "ns/z");
    assert_eq!(
        next_of(&mut outbox, later, &waits).zip(next_of(&mut outbox, later, &waits)),
        told("a", false).zip(told("z", false))
    );
    outbox.single_failed("other");
    assert_eq!(next(&mut outbox, later), told("z", true), "another manager's event is still under way");
    outbox.single_taken("m");
    outbox.single_taken("other");
    assert_eq!(outbox.dirty_in_all(), 0);
}

#[test]
fn an_event_names_an_object_as_the_incumbent_does() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    mark(&mut outbox, "ns/a");
    let Some(Next::Event(single)) = outbox.single(now, OPEN, &|_| false) else { panic!("an event") };
    assert_eq!(single.manager, "m");
    let body = r#"{"watched":{"Namespace":"ns","Name":"a"},"watchedGvk":{"group":"g","version":"v1","kind":"Thing"}}"#;
    assert_eq!(single.event.to_body(), body);
}

#[test]
fn a_whole_watch_is_told_by_its_objects_or_without_a_name_when_nobody_knows_them() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    outbox.mark_whole(W, 0);
    assert_eq!(outbox.single(now, OPEN, &|_| false), Some(Next::Whole(W.into())));
    assert_eq!(outbox.single(now, OPEN, &|_| false), None);
    outbox.mark_whole(W, 0);
    assert_eq!(next(&mut outbox, now), told("", false));
}

#[test]
fn what_is_refused_again_and_again_is_parked_and_others_go_on_and_later_it_is_tried_again() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    mark(&mut outbox, "ns/a");
    mark(&mut outbox, "ns/b");
    for (name, again) in [("a", false), ("b", false), ("a", true), ("a", true), ("a", true), ("a", true)] {
        assert_eq!((next(&mut outbox, now), outbox.parked()), (told(name, again), 0));
        match name {
            "a" => outbox.single_refused("m", now),
            _ => outbox.single_taken("m"),
        }
    }
    assert_eq!((outbox.parked(), outbox.waiting()), (1, 0));
    let due = outbox.single_due(now, OPEN).unwrap();
    assert!(due > now && due <= now + PARKED && next(&mut outbox, now).is_none());
    assert_eq!(next(&mut outbox, due), told("a", false));
    outbox.single_taken("m");
    assert_eq!((outbox.parked(), outbox.single_due(now + PARKED, OPEN)), (0, None));
}

#[test]
fn an_event_of_a_watch_that_has_left_the_plan_is_not_sent_again() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    let ends: [fn(&mut Outbox, Instant); 3] = [
        |outbox, _| outbox.single_taken("m"),
        |outbox, _| outbox.single_failed("m"),
        |outbox, now| outbox.single_refused("m", now),
    ];
    for end in ends {
        mark(&mut outbox, "ns/a");
        assert!(next(&mut outbox, now).is_some() && outbox.is_manager("m"));
        outbox.close(W);
        end(&mut outbox, now);
        assert_eq!((next(&mut outbox, now), outbox.is_manager("m")), (None, false));
        // Nor is it the same watch when it comes back.
        open(&mut outbox, W, "m");
        assert_eq!((next(&mut outbox, now), outbox.dirty_in_all()), (None, 0));
        end(&mut outbox, now);
    }
}

#[test]
fn a_manager_that_no_path_can_name_is_parked() {
    let (mut outbox, now) = (outbox("../m"), Instant::now());
    mark(&mut outbox, "ns/a");
    assert_eq!((next(&mut outbox, now), outbox.parked()), (None, 1));
}
