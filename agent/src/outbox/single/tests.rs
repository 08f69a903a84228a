use tidewatch_shared::digest::Digest;

use super::*;
use crate::{
    index::{Seen, Version},
    outbox::{Facts, What, refused::PARKED},
    telemetry::Metrics,
};

const W: &str = "w";

fn outbox(manager: &str) -> Outbox {
    let mut outbox = Outbox::new("r-1".parse().unwrap(), Box::new(|| 1), Metrics::default());
    let [group, version, resource, kind] = ["g", "v1", "things", "Thing"].map(Into::into);
    outbox.open(W.into(), Facts { group, version, resource, kind, manager: manager.into(), forward: false });
    outbox
}

fn mark(outbox: &mut Outbox, key: &str) {
    let seen = Seen { uid: "u".into(), version: Version::Number(1), generation: None, metadata: 0 };
    let what = What::object(seen, tidewatch_shared::event::Change::Spec, Digest::ZERO);
    outbox.mark(W, key, what, Digest::ZERO, 0);
}

/// The name that is sent next, and whether it was sent before.
fn next(outbox: &mut Outbox, now: Instant) -> Option<(String, bool)> {
    match outbox.single(now, &|_| true)? {
        Next::Event(single) => Some((single.event.name, single.again)),
        Next::Whole(watch) => panic!("{watch}"),
    }
}

#[test]
fn one_event_is_in_flight_and_what_was_taken_is_forgotten() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    assert_eq!((outbox.single_due(now), next(&mut outbox, now)), (None, None));
    mark(&mut outbox, "ns/a");
    mark(&mut outbox, "ns/b");
    assert_eq!(next(&mut outbox, now), Some(("a".to_owned(), false)));
    // It changes while it is sent: the same goes on, and the newer state waits behind it.
    mark(&mut outbox, "ns/a");
    assert_eq!(next(&mut outbox, now), Some(("a".to_owned(), true)));
    assert_eq!((outbox.waiting(), outbox.unsettled()), (2, 1));
    outbox.single_taken();
    for name in ["b", "a"] {
        assert_eq!(next(&mut outbox, now), Some((name.to_owned(), false)));
        outbox.single_taken();
    }
    assert_eq!((outbox.waiting(), outbox.unsettled(), outbox.single_due(now)), (0, 0, None));
}

#[test]
fn an_event_names_an_object_as_the_incumbent_does() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    mark(&mut outbox, "ns/a");
    let Some(Next::Event(single)) = outbox.single(now, &|_| false) else { panic!("an event") };
    assert_eq!(single.manager, "m");
    let body = r#"{"watched":{"Namespace":"ns","Name":"a"},"watchedGvk":{"group":"g","version":"v1","kind":"Thing"}}"#;
    assert_eq!(single.event.to_body(), body);
}

#[test]
fn a_whole_watch_is_told_by_its_objects_or_without_a_name_when_nobody_knows_them() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    outbox.mark_whole(W, 0);
    assert_eq!(outbox.single(now, &|_| false), Some(Next::Whole(W.into())));
    assert_eq!(outbox.single(now, &|_| false), None);
    outbox.mark_whole(W, 0);
    assert_eq!(next(&mut outbox, now), Some((String::new(), false)));
}

#[test]
fn what_is_refused_again_and_again_is_parked_and_others_go_on_and_later_it_is_tried_again() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    mark(&mut outbox, "ns/a");
    mark(&mut outbox, "ns/b");
    for again in [false, true, true, true, true] {
        assert_eq!(next(&mut outbox, now), Some(("a".to_owned(), again)));
        outbox.single_refused(now);
    }
    assert_eq!(outbox.parked(), 1);
    assert_eq!(next(&mut outbox, now), Some(("b".to_owned(), false)));
    outbox.single_taken();
    let due = outbox.single_due(now).unwrap();
    assert!(due > now && due <= now + PARKED && next(&mut outbox, now).is_none());
    assert_eq!(next(&mut outbox, due), Some(("a".to_owned(), false)));
    outbox.single_taken();
    assert_eq!((outbox.parked(), outbox.single_due(now + PARKED)), (0, None));
}

#[test]
fn an_event_of_a_watch_that_has_left_the_plan_is_not_sent_again() {
    let (mut outbox, now) = (outbox("m"), Instant::now());
    mark(&mut outbox, "ns/a");
    assert!(next(&mut outbox, now).is_some());
    outbox.close(W);
    assert_eq!(next(&mut outbox, now), None);
    outbox.single_taken();
    outbox.single_refused(now);
}

#[test]
fn a_manager_that_no_path_can_name_is_parked() {
    let (mut outbox, now) = (outbox("../m"), Instant::now());
    mark(&mut outbox, "ns/a");
    assert_eq!((next(&mut outbox, now), outbox.parked()), (None, 1));
}
