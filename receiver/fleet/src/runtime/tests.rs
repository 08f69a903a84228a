use serde_json::json;
use tidewatch_api::plan::{Plan, Work};
use tidewatch_contract::{
    digest::Digest,
    event::{Change, Object},
};

use super::*;

const E1: Epoch = Epoch::new(1);
const E2: Epoch = Epoch::new(2);

fn plan(revision: &str, watches: &[(&str, &[&str])]) -> Arc<PlanIndex> {
    let watches: Vec<_> = watches
        .iter()
        .map(|(name, work)| {
            json!({"name": name, "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": work})
        })
        .collect();
    let text = json!({"revision": revision, "watches": watches}).to_string();
    Arc::new(PlanIndex::new(Arc::new(Plan::parse(&text).unwrap())))
}

/// Watch `kyma` has one kind of work, `both` has two.
fn runtime() -> Runtime {
    Runtime::new(plan("1", &[("kyma", &["kyma"]), ("both", &["kyma", "catalog"])]), true, Instant::now())
}

fn id(epoch: Epoch, sequence: u64) -> EventId {
    EventId { epoch, sequence }
}

fn event(epoch: Epoch, sequence: u64, watch: &str) -> Received {
    let object = Object {
        subject: format!("g/v1/things/ns/{watch}").parse().unwrap(),
        kind: "Thing".into(),
        uid: String::new(),
        resource_version: sequence.to_string(),
        generation: None,
        change: Change::Spec,
    };
    let payload = Payload::Object(object);
    let source = "r-1".parse().unwrap();
    let watch = watch.to_owned();
    let delta = Digest::new(1);
    Ok(Event { id: id(epoch, sequence), source, watch, payload, delta, time: None, traceparent: None })
}

fn listed(epoch: Epoch, sequence: u64, watch: &str) -> Received {
    event(epoch, sequence, watch).map(|event| Event { payload: Payload::Watch, ..event })
}

fn heartbeat(epoch: Epoch, sequence: u64, counter: u64, digest: u128) -> Heartbeat {
    serde_json::from_value(json!({
        "epoch": epoch, "sequence": sequence, "counter": counter, "waiting": 0, "parked": 0, "agentVersion": "1",
        "planRevision": "1", "certificate": {"notAfter": "", "fingerprint": ""},
        "watches": [{"name": "both", "objects": 1, "digest": Digest::new(digest), "listedSecondsAgo": 1}],
    }))
    .unwrap()
}

fn kyma() -> WorkSet {
    WorkSet::of(&[Work::Kyma])
}

fn both() -> WorkSet {
    WorkSet::of(&[Work::Kyma, Work::Catalog])
}

fn work(recorded: &EventsRecord) -> WorkSet {
    recorded.queued.as_ref().map_or(WorkSet::EMPTY, |queued| queued.work)
}

fn settled(runtime: &Runtime, watch: &str) -> u64 {
    let ledger = runtime.epochs.iter().find(|(epoch, _)| *epoch == E1);
    ledger.and_then(|(_, ledger)| ledger.settled(&runtime.planned).get(watch).copied()).unwrap_or(0)
}

#[test]
fn event_enqueues_the_work_and_drift_of_its_watch() {
    let mut runtime = runtime();
    let recorded = runtime.events(E1, 1, vec![event(E1, 1, "kyma"), event(E1, 2, "both")]);
    assert_eq!((recorded.accepted, recorded.since), (2, 1));
    let queued = recorded.queued.unwrap();
    assert_eq!((queued.work, queued.priority), (both(), Priority::User));
    assert!(matches!(queued.drift, Drift::Objects(objects) if objects.len() == 2));
    let recorded = runtime.events(E1, 1, vec![listed(E1, 3, "kyma")]);
    assert_eq!(recorded.queued, Some(QueuedWork { work: kyma(), priority: Priority::User, drift: Drift::All }));
}

#[test]
fn unknown_watch_uses_its_sequence_and_other_refusals_leave_a_gap() {
    let mut runtime = runtime();
    let recorded = runtime.events(
        E1,
        1,
        vec![event(E1, 1, "gone"), Err((id(E1, 2), Reason::TooLarge)), event(E1, 3, "kyma"), event(E2, 4, "kyma")],
    );
    assert_eq!((recorded.accepted, recorded.since), (1, 1));
    assert_eq!(
        recorded.refused,
        [(id(E1, 1), Reason::UnknownWatch), (id(E1, 2), Reason::TooLarge), (id(E2, 4), Reason::Malformed)]
    );
    assert_eq!(work(&recorded), kyma(), "what is above the hole is not left waiting");
    let recorded = runtime.events(E1, 1, vec![listed(E1, 2, "kyma")]);
    assert_eq!(recorded.accepted, 3);
    assert_eq!(recorded.counts.by_status["recorded"], 1);
}

#[test]
fn watch_on_a_group_has_events_of_its_harmless_resources_only() {
    let watch = json!({"name": "all", "group": "example.com", "version": "*", "resource": "*", "field": "spec",
        "manager": "other", "work": ["forward"]});
    let text = json!({"revision": "1", "watches": [], "groupWatches": [watch]}).to_string();
    let index = PlanIndex::new(Arc::new(Plan::parse(&text).unwrap()));
    let mut runtime = Runtime::new(Arc::new(index), true, Instant::now());
    let of = |sequence: u64, subject: &str, kind: &str| {
        event(E1, sequence, "all").map(|event| {
            let Payload::Object(object) = event.payload else { panic!("an object") };
            let subject = subject.parse().unwrap();
            let kind = kind.to_owned();
            Event { payload: Payload::Object(Object { subject, kind, ..object }), ..event }
        })
    };
    let recorded = runtime.events(
        E1,
        1,
        vec![
            of(1, "example.com/v1/things/ns/a", "Thing"),
            of(2, "example.com/v2/others//a", "Other"),
            of(3, "example.org/v1/things/ns/a", "Thing"),
            of(4, "example.com/v1/secrets/ns/a", "Secret"),
            listed(E1, 5, "all"),
        ],
    );
    assert_eq!(recorded.refused, [3, 4].map(|sequence| (id(E1, sequence), Reason::UnknownWatch)));
    let forwarded: Vec<_> = recorded.forwards.into_iter().map(|forwarded| forwarded.event).collect();
    let expected = |namespace: &str, version: &str, kind: &str| {
        let [namespace, name, group, version, kind] = [namespace, "a", "example.com", version, kind].map(str::to_owned);
        Some(v2::Event { namespace, name, group, version, kind })
    };
    assert_eq!(forwarded, [expected("ns", "v1", "Thing"), expected("", "v2", "Other"), None]);
}

/// A module's CRD is created, changed and deleted with the module, and none of it concerns the Kyma.
#[test]
fn crd_of_a_module_enqueues_its_manifests_alone() {
    let mut runtime = Runtime::new(plan("1", &[("crds", &["kyma", "manifest"])]), true, Instant::now());
    let whole = WorkSet::of(&[Work::Kyma, Work::Manifest]);
    let crd = |sequence: u64, name: &str| {
        event(E1, sequence, "crds").map(|event| {
            let Payload::Object(object) = event.payload else { panic!("an object") };
            let subject = format!("apiextensions.k8s.io/v1/customresourcedefinitions//{name}").parse().unwrap();
            Event { payload: Payload::Object(Object { subject, ..object }), ..event }
        })
    };
    let ours = "kymas.operator.kyma-project.io";
    let of_module = "samples.operator.kyma-project.io";
    assert_eq!(work(&runtime.events(E1, 1, vec![crd(1, of_module)])), WorkSet::MANIFEST);
    let snapshot = runtime.snapshot();
    runtime.ended(&snapshot, WorkSet::MANIFEST);
    assert_eq!(settled(&runtime, "crds"), 1, "it waits for no reconcile of the Kyma");

    assert_eq!(work(&runtime.events(E1, 1, vec![crd(2, ours)])), whole);
    assert_eq!(work(&runtime.events(E1, 1, vec![crd(3, of_module)])), whole, "its predecessor waits for the Kyma");
    assert_eq!(work(&runtime.events(E1, 1, vec![crd(5, of_module)])), whole, "what the gap hides is not known");
    assert_eq!(work(&runtime.events(E1, 1, vec![crd(4, ours)])), whole);
    let snapshot = runtime.snapshot();
    runtime.ended(&snapshot, WorkSet::MANIFEST);
    assert_eq!(settled(&runtime, "crds"), 1);
    runtime.ended(&snapshot, kyma());
    assert_eq!(settled(&runtime, "crds"), 5);
    assert_eq!(work(&runtime.events(E1, 1, vec![crd(6, of_module)])), WorkSet::MANIFEST);
    assert_eq!(work(&runtime.events(E1, 1, vec![listed(E1, 7, "crds")])), whole);
}

#[test]
fn ledger_starts_at_a_refused_first_event() {
    let mut runtime = runtime();
    let recorded = runtime.events(E1, 1, vec![Err((id(E1, 1), Reason::Malformed)), event(E1, 2, "kyma")]);
    assert_eq!((recorded.accepted, recorded.since), (0, 1));
    assert_eq!(runtime.events(E1, 1, vec![listed(E1, 1, "kyma")]).accepted, 2);
    let recorded = runtime.events(E2, 1, vec![event(E2, 7, "kyma")]);
    assert_eq!((recorded.accepted, recorded.since), (7, 7));
}

#[test]
fn watch_is_settled_when_all_its_work_has_ended() {
    let mut runtime = runtime();
    runtime.events(E1, 1, vec![event(E1, 1, "kyma"), event(E1, 2, "both")]);
    let first = runtime.snapshot();
    runtime.events(E1, 1, vec![event(E1, 3, "both")]);
    runtime.ended(&first, kyma());
    assert_eq!((settled(&runtime, "kyma"), settled(&runtime, "both")), (2, 0));
    let second = runtime.snapshot();
    runtime.ended(&second, WorkSet::of(&[Work::Catalog]));
    assert_eq!(settled(&runtime, "both"), 2, "the other work saw only so much");
    runtime.ended(&second, kyma());
    assert_eq!(settled(&runtime, "both"), 3);
    runtime.ended(&first, both());
    assert_eq!(settled(&runtime, "both"), 3, "never back");
}

#[test]
fn duplicate_enqueues_work_only_while_unsettled() {
    let mut runtime = runtime();
    runtime.events(E1, 1, vec![event(E1, 1, "both")]);
    let snapshot = runtime.snapshot();
    let again = runtime.events(E1, 1, vec![event(E1, 1, "both")]);
    assert_eq!(work(&again), both());
    let drift = again.queued.unwrap().drift;
    assert_eq!(drift.objects().unwrap()[0].resource_version, "", "it may be older than another report of the object");
    runtime.ended(&snapshot, kyma());
    let again = runtime.events(E1, 1, vec![event(E1, 1, "both")]);
    assert_eq!(work(&again), WorkSet::of(&[Work::Catalog]), "what has ended is not done again");
    assert_eq!(again.counts.by_status["duplicate"], 1);
    runtime.ended(&snapshot, both());
    let again = runtime.events(E1, 1, vec![event(E1, 1, "both")]);
    assert_eq!(again.queued, None);
    assert_eq!(again.settled["both"], 1);
}

#[test]
fn duplicate_of_a_formerly_unknown_watch_is_recorded() {
    let mut runtime = runtime();
    assert_eq!(runtime.events(E1, 1, vec![event(E1, 1, "new")]).refused.len(), 1);
    runtime.replan(plan("2", &[("new", &["kyma"])]), Instant::now());
    let recorded = runtime.events(E1, 1, vec![event(E1, 1, "new")]);
    assert_eq!((work(&recorded), recorded.refused.len()), (kyma(), 0));
    let snapshot = runtime.snapshot();
    runtime.ended(&snapshot, kyma());
    assert_eq!(settled(&runtime, "new"), 1);
}

#[test]
fn events_behind_a_closed_gap_are_enqueued_again() {
    let mut runtime = runtime();
    runtime.events(E1, 1, vec![event(E1, 1, "kyma")]);
    runtime.events(E1, 1, vec![event(E1, 3, "both")]);
    let snapshot = runtime.snapshot();
    runtime.ended(&snapshot, both());
    assert_eq!(settled(&runtime, "both"), 1);
    let recorded = runtime.events(E1, 1, vec![event(E1, 2, "kyma")]);
    assert_eq!((recorded.accepted, work(&recorded)), (3, both()), "or the third would never be settled");
}

#[test]
fn reconcile_settles_only_watches_of_its_plan() {
    let mut runtime = runtime();
    runtime.events(E1, 1, vec![event(E1, 1, "kyma")]);
    let before = runtime.snapshot();
    let missing = runtime.replan(plan("2", &[("kyma", &["kyma", "installer"]), ("new", &["kyma"])]), Instant::now());
    assert_eq!(missing.work, WorkSet::INSTALLER, "the other work is enqueued already");
    runtime.events(E1, 1, vec![event(E1, 2, "new")]);
    runtime.ended(&before, WorkSet::ALL_KNOWN);
    assert_eq!((settled(&runtime, "kyma"), settled(&runtime, "new")), (0, 0));
    let after = runtime.snapshot();
    runtime.ended(&after, WorkSet::ALL_KNOWN);
    assert_eq!((settled(&runtime, "kyma"), settled(&runtime, "new")), (2, 2));
    runtime.events(E1, 1, vec![event(E1, 3, "new")]);
    assert_eq!(runtime.replan(plan("3", &[("kyma", &["kyma"])]), Instant::now()), MissingWork::default());
    assert_eq!(settled(&runtime, "new"), 0, "the agent drops the events of a watch that left the plan");
    let missing = runtime.replan(plan("2", &[("kyma", &["kyma"]), ("new", &["kyma"])]), Instant::now());
    assert_eq!(missing.work, WorkSet::of(&[Work::Kyma]), "and they count if it returns before");
    runtime.replan(plan("4", &[("things", &["manifest"])]), Instant::now());
    runtime.events(E1, 1, vec![event(E1, 4, "things")]);
    runtime.replan(plan("5", &[]), Instant::now());
    let missing = runtime.replan(plan("4", &[("things", &["manifest"])]), Instant::now());
    let Drift::Objects(objects) = missing.modules else { panic!("{missing:?}") };
    assert_eq!(objects.iter().map(|object| object.subject.to_string()).collect::<Vec<_>>(), ["/v1/things//"]);
}

#[test]
fn only_the_newest_epochs_heartbeats_count_and_four_epochs_are_kept() {
    let mut runtime = runtime();
    let now = Instant::now();
    assert_eq!(runtime.heartbeat(&heartbeat(E1, 0, 1, 0), 100, now).status, HeartbeatStatus::Counted);
    assert_eq!(runtime.heartbeat(&heartbeat(E1, 0, 1, 0), 100, now).status, HeartbeatStatus::Late);
    assert_eq!(
        runtime.heartbeat(&heartbeat(E2, 0, 1, 0), 100, now).status,
        HeartbeatStatus::Counted,
        "as new, but came later"
    );
    assert_eq!(runtime.heartbeat(&heartbeat(E1, 0, 2, 0), 100, now).status, HeartbeatStatus::OldEpoch);
    let old = runtime.events(E1, 90, vec![event(E1, 1, "kyma")]);
    assert_eq!((old.accepted, work(&old)), (1, kyma()), "events of older epochs still wake");
    assert_eq!(runtime.heartbeat(&heartbeat(E1, 1, 3, 0), 101, now).status, HeartbeatStatus::Counted);
    for n in 3..9 {
        runtime.events(Epoch::new(n), 200 + n as i64, vec![event(Epoch::new(n), 1, "kyma")]);
    }
    let late = runtime.events(Epoch::new(99), 50, vec![event(Epoch::new(99), 4, "kyma")]);
    assert_eq!((late.accepted, work(&late)), (4, kyma()));
    let epochs: Vec<_> = runtime.epochs().iter().map(|view| view.epoch).collect();
    assert_eq!(epochs, [5, 6, 7, 8].map(Epoch::new));
}

#[test]
fn digest_mismatch_enqueues_everything_and_requests_a_resend() {
    let mut runtime = runtime();
    let now = Instant::now();
    runtime.events(E1, 1, vec![event(E1, 1, "both")]);
    assert_eq!(runtime.heartbeat(&heartbeat(E1, 1, 1, 10), 1, now).differing, 0);
    // Each event adds one to the digest; the duplicate does not.
    runtime.events(E1, 1, vec![event(E1, 2, "both"), event(E1, 2, "both")]);
    assert_eq!(runtime.heartbeat(&heartbeat(E1, 2, 2, 11), 1, now).differing, 0);
    let record = runtime.heartbeat(&heartbeat(E1, 2, 3, 12), 1, now);
    assert_eq!((record.differing, record.resend.as_slice()), (1, &["both".to_owned()][..]));
    assert_eq!(record.queued, Some(QueuedWork { work: both(), priority: Priority::User, drift: Drift::All }));
    let record = runtime.heartbeat(&heartbeat(E1, 2, 4, 12), 1, now);
    assert_eq!((record.differing, record.resend.len(), record.queued), (0, 1, None));
    runtime.events(E1, 1, vec![listed(E1, 3, "both")]);
    let record = runtime.heartbeat(&heartbeat(E1, 3, 5, 50), 1, now);
    assert_eq!((record.differing, record.resend.len()), (0, 0));
}

#[test]
fn heartbeat_ahead_is_compared_when_its_events_are_accepted() {
    let mut runtime = runtime();
    let now = Instant::now();
    runtime.events(E1, 1, vec![event(E1, 1, "both")]);
    runtime.heartbeat(&heartbeat(E1, 1, 1, 10), 1, now);
    runtime.heartbeat(&heartbeat(E1, 3, 2, 99), 1, now);
    let recorded = runtime.events(E1, 1, (2..6).map(|n| event(E1, n, "both")).collect());
    assert_eq!(recorded.counts.differing, 1, "in the middle of the request");
    assert_eq!(recorded.queued.unwrap().drift, Drift::All);
}

#[test]
fn skipped_sequence_resets_the_comparison() {
    let mut runtime = runtime();
    let now = Instant::now();
    runtime.events(E1, 1, vec![event(E1, 1, "both")]);
    runtime.heartbeat(&heartbeat(E1, 1, 1, 10), 1, now);
    runtime.events(E1, 1, vec![event(E1, 3, "both")]);
    runtime.events(E1, 1, vec![event(E1, 2, "both")]);
    assert_eq!(runtime.heartbeat(&heartbeat(E1, 3, 2, 77), 1, now).differing, 0);
    assert_eq!(runtime.heartbeat(&heartbeat(E1, 3, 3, 78), 1, now).differing, 1);
}

#[test]
fn resend_is_requested_for_events_that_are_unknown() {
    let mut runtime = runtime();
    let now = Instant::now();
    assert!(runtime.heartbeat(&heartbeat(E1, 0, 1, 0), 1, now).resend.is_empty(), "no event was sent");
    let record = runtime.heartbeat(&heartbeat(E1, 7, 2, 0), 1, now);
    assert_eq!((record.resend.as_slice(), record.differing, record.queued), (&["both".to_owned()][..], 0, None));
    assert!(!runtime.epochs()[0].resend.is_empty() && runtime.diverged().is_none());
    runtime.events(E1, 1, vec![listed(E1, 8, "both")]);
    assert!(runtime.heartbeat(&heartbeat(E1, 8, 3, 5), 1, now).resend.is_empty());
    assert_eq!(runtime.heartbeat(&heartbeat(E1, 8, 4, 6), 1, now).differing, 1, "digests are compared from then on");
}

#[test]
fn late_placed_runtime_must_resend_after_two_stalled_heartbeats() {
    for (placed_late, sends, requested) in [(true, false, 1), (true, true, 0), (false, false, 0)] {
        let now = Instant::now();
        let mut runtime = Runtime::new(plan("1", &[("both", &["kyma"])]), placed_late, now);
        // A delayed duplicate request.
        runtime.events(E1, 1, vec![event(E1, 1, "both")]);
        assert!(runtime.heartbeat(&heartbeat(E1, 7, 1, 0), 1, now).resend.is_empty(), "its events may be in flight");
        if sends {
            runtime.events(E1, 1, vec![event(E1, 2, "both")]);
        }
        assert_eq!(runtime.heartbeat(&heartbeat(E1, 7, 2, 0), 1, now).resend.len(), requested, "{placed_late} {sends}");
    }
}
