use std::collections::BTreeSet;

use tidewatch_contract::event::Change;

use super::*;

fn object(name: &str, version: &str) -> Object {
    Object {
        subject: format!("g/v1/things/ns/{name}").parse().unwrap(),
        kind: "Thing".into(),
        uid: String::new(),
        resource_version: version.into(),
        generation: None,
        change: Change::Spec,
    }
}

#[test]
fn drift_keeps_the_last_report_of_each_object_and_is_bounded() {
    let mut drift = Drift::None;
    drift.merge(Drift::of(object("a", "1")));
    drift.merge(Drift::of(object("b", "1")));
    drift.merge(Drift::of(object("a", "2")));
    drift.merge(Drift::None);
    assert_eq!(drift, Drift::Objects(vec![object("b", "1"), object("a", "2")]));
    let reported = |name: &str| Drift::of(object(name, "1")).as_only_cause();
    let mut reports = reported("a");
    reports.merge(reported("b"));
    assert_eq!(reports, Drift::Reported(vec![object("a", "1"), object("b", "1")]));
    for other in [Drift::None, Drift::of(object("a", "1"))] {
        let mut either = reports.clone();
        either.merge(other.clone());
        let mut reversed = other;
        reversed.merge(reports.clone());
        let (Drift::Objects(either), Drift::Objects(reversed)) = (either, reversed) else { panic!("another cause") };
        assert_eq!((either.len(), reversed.len()), (2, 2));
    }
    for n in 0..MAX_DRIFTED_OBJECTS {
        drift.merge(Drift::of(object(&n.to_string(), "1")));
    }
    assert_eq!(drift, Drift::All);
    drift.merge(Drift::of(object("a", "3")));
    assert_eq!(drift, Drift::All);
}

#[test]
fn merge_keeps_the_more_urgent_priority() {
    let mut queued = QueuedWork::new(WorkSet::EMPTY, Priority::Verification);
    for (priority, expected) in
        [(Priority::Catalog, Priority::Catalog), (Priority::User, Priority::User), (Priority::Catalog, Priority::User)]
    {
        queued.merge(QueuedWork::new(WorkSet::ALL_KNOWN, priority));
        assert_eq!(queued.priority, expected);
    }
    assert_eq!(queued.work, WorkSet::ALL_KNOWN);
}

#[test]
fn bits_map_to_kinds_of_work() {
    assert_eq!(WorkSet::ALL_KNOWN.iter().collect::<Vec<_>>(), Work::VARIANTS);
    for (at, work) in Work::VARIANTS.iter().copied().enumerate() {
        assert_eq!(work as usize, at);
        assert!(WorkSet::of(&[work]).contains(work));
        assert!(!WorkSet::ALL_KNOWN.minus(WorkSet::of(&[work])).contains(work));
    }
    let both = WorkSet::of(&[Work::Kyma]) | BTreeSet::from([Work::Catalog]).into_iter().collect::<WorkSet>();
    assert_eq!(both.both(WorkSet::of(&[Work::Catalog, Work::Forward])), WorkSet::of(&[Work::Catalog]));
    assert!(both.minus(both).is_empty());
}

#[test]
fn verdict_follows_from_what_a_reconcile_proves() {
    use ErrorClass::{Auth, Conflict, Ours, Refused, Transport, User};
    let kyma = WorkSet::of(&[Work::Kyma]);
    let catalog = WorkSet::of(&[Work::Catalog]);
    let failed = ReconcileOutcome::failed;
    let unreached = |work| ReconcileOutcome { unreached: true, ..failed(work, Transport) };
    let beside_kyma = |work, class| ReconcileOutcome { ended: kyma, ..failed(work, class) };
    for (outcome, verdict) in [
        (unreached(kyma), Some(Verdict::Unreached)),
        (unreached(catalog), Some(Verdict::Unreached)),
        (unreached(WorkSet::INSTALLER), Some(Verdict::Unreached)),
        (ReconcileOutcome::ended(kyma), Some(Verdict::Answered)),
        (beside_kyma(catalog, Transport), Some(Verdict::Answered)),
        (beside_kyma(WorkSet::INSTALLER, Transport), Some(Verdict::Answered)),
        (beside_kyma(catalog, Ours), Some(Verdict::Answered)),
        (beside_kyma(kyma, Ours), None),
        (failed(kyma, Transport), Some(Verdict::Answered)),
        (failed(catalog, Refused), Some(Verdict::Answered)),
        (failed(kyma, User), Some(Verdict::Answered)),
        (failed(kyma, Auth), Some(Verdict::NoAccess)),
        (failed(WorkSet::INSTALLER, Transport), None),
        (failed(kyma, Conflict), None),
        (failed(kyma, Ours), None),
        (ReconcileOutcome::ended(catalog), None),
        (ReconcileOutcome::default(), None),
    ] {
        assert_eq!(outcome.verdict(), verdict, "{outcome:?}");
    }
}

#[test]
fn status_is_no_work_of_a_plan() {
    assert!(WorkSet::ALL_KNOWN.both(WorkSet::STATUS).is_empty() && !WorkSet::STATUS.is_empty());
    assert_eq!(WorkSet::STATUS.iter().count(), 0, "no event waits for it");
    assert_eq!(format!("{:?}", WorkSet::STATUS | WorkSet::of(&[Work::Kyma])), "{Kyma, Status}");
}
