use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tidewatch_api::names::annotation;
use tidewatch_rollout::Ring;
use tidewatch_select::catalog::{
    RolloutMark, VisibilityLabels,
    removal_guard::{Audience, ModuleState},
    rollout::{Progress, data_key},
};

use super::*;

const API: &str = "operator.kyma-project.io/v1beta2";
/// Unix time of the move.
const MOVED: i64 = 1_000;

fn target(version: &str, since: Option<i64>) -> ChannelTarget {
    ChannelTarget {
        version: version.to_owned(),
        labels: VisibilityLabels::default(),
        since,
        from: Some("1.0.0".to_owned()),
    }
}

fn releases(module: &str, channel: &str, target: ChannelTarget) -> ConfigMap {
    let state = ModuleState {
        audience: Audience::All,
        component: None,
        mandatory: None,
        channels: [(channel.to_owned(), target)].into(),
        versions: BTreeMap::new(),
        contents: BTreeMap::new(),
        edited: BTreeMap::new(),
    };
    let accepted = json!({module: state}).to_string();
    serde_json::from_value(json!({"data": {"accepted": accepted}})).unwrap()
}

fn rollout(change: impl FnOnce(&mut Rollout)) -> Rollout {
    let key = RolloutKey { module: "keda".to_owned(), channel: Some("fast".to_owned()) };
    let mut rollout = Rollout::of_move(&key, None, &target("1.1.0", Some(MOVED)), false);
    change(&mut rollout);
    rollout
}

fn in_ring(rollout: &mut Rollout, halted: Option<&str>) {
    let ring = Some(Ring { number: 1, through: u64::MAX - 1 });
    rollout.progress = Some(Progress { ring, since: MOVED, halted: halted.map(str::to_owned), ..Progress::default() });
}

fn stored(rollouts: &[&Rollout]) -> ConfigMap {
    let data: BTreeMap<_, _> =
        rollouts.iter().map(|it| (data_key(&it.key()), serde_json::to_string(it).unwrap())).collect();
    serde_json::from_value(json!({"metadata": {"name": ROLLOUTS}, "data": data})).unwrap()
}

fn meta(annotations: &Value) -> Objects {
    let meta = json!({"apiVersion": API, "kind": "ModuleReleaseMeta",
        "metadata": {"name": "keda", "annotations": annotations},
        "spec": {"moduleName": "keda", "channels": [{"channel": "fast", "version": "1.1.0"}]}});
    let template = json!({"apiVersion": API, "kind": "ModuleTemplate", "metadata": {"name": "keda-1.1.0"},
        "spec": {"moduleName": "keda", "version": "1.1.0", "descriptor": {}, "requiresDowntime": true}});
    Objects {
        templates: vec![Arc::new(serde_json::from_value(template).unwrap())],
        release_metas: vec![Arc::new(serde_json::from_value(meta).unwrap())],
    }
}

fn rings() -> Objects {
    meta(&json!({annotation::ROLLOUT_RINGS: "50%,100%"}))
}

fn kyma(name: &str, change: impl FnOnce(&mut Value)) -> Kyma {
    let mut kyma = json!({"apiVersion": API, "kind": "Kyma",
        "metadata": {"name": name, "namespace": "kcp-system", "uid": format!("uid-{name}"), "labels": {}},
        "spec": {"channel": "fast"}});
    change(&mut kyma);
    serde_json::from_value(kyma).unwrap()
}

fn manifest(kyma: &str, version: &str, state: &str, mark: Option<&Rollout>) -> Manifest {
    let mut manifest = json!({"apiVersion": API, "kind": "Manifest",
        "metadata": {"name": format!("{kyma}-keda"), "namespace": "kcp-system",
            "labels": {label::KYMA_NAME: kyma, label::MODULE_NAME: "keda", label::CHANNEL: "fast"},
            "annotations": {annotation::SYNC_OCI_REF: version}},
        "spec": {"remote": true, "version": version, "install": {"name": "raw-manifest", "source": {"ref": version}}},
        "status": {"state": state}});
    if let Some(rollout) = mark {
        let mark = RolloutMark { change: rollout.change.clone(), healthy: true }.to_text();
        manifest["metadata"]["annotations"][annotation::ROLLOUT] = mark.into();
    }
    serde_json::from_value(manifest).unwrap()
}

fn options() -> ViewOptions {
    ViewOptions { now: Timestamp::from_second(MOVED + 10).unwrap(), ..ViewOptions::default() }
}

fn only(view: &RolloutsView) -> &RolloutView {
    let [rollout] = &*view.rollouts else { panic!("{view:?}") };
    rollout
}

/// Five runtimes in a halted rollout: one each that is proven, failing, waiting, paused and unreachable.
fn halted() -> KcpObjects {
    let rollout = rollout(|rollout| in_ring(rollout, Some("1 of 2 upgraded runtimes are no longer healthy")));
    let unreachable = |kyma: &mut Value| {
        kyma["status"] = json!({"conditions": [{"type": "RuntimeAccess", "status": "False", "reason": "x",
            "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
    };
    let kymas = vec![
        kyma("proven", |_| ()),
        kyma("failing", |_| ()),
        kyma("waiting", |_| ()),
        kyma("paused", |kyma| kyma["metadata"]["labels"][label::PAUSE] = "true".into()),
        kyma("unreachable", unreachable),
    ];
    let mut other = manifest("waiting", "1.1.0", "Ready", Some(&rollout));
    other.labels_mut().insert(label::CHANNEL.to_owned(), "regular".to_owned());
    let manifests = vec![
        manifest("proven", "1.1.0", "Ready", Some(&rollout)),
        manifest("failing", "1.1.0", "Error", Some(&rollout)),
        manifest("waiting", "1.0.0", "Ready", None),
        manifest("paused", "1.0.0", "Ready", None),
        manifest("unreachable", "1.0.0", "Ready", None),
        manifest("deleted", "1.0.0", "Ready", None),
        other,
    ];
    let releases = Some(releases("keda", "fast", target("1.1.0", Some(MOVED))));
    KcpObjects { rollouts: Some(stored(&[&rollout])), releases, catalog: rings(), kymas, manifests, pause: None }
}

#[test]
fn halted_rollout_has_counts_reason_and_confirmation() {
    let kcp = halted();
    assert_eq!(modules_in_progress(&kcp, &options()), ["keda".to_owned()].into());
    let found = view(&kcp, &options());
    let rollout = only(&found);
    let id = rollout.confirmation.clone().unwrap();
    let json = serde_json::to_value(rollout).unwrap();
    assert_eq!(
        json,
        json!({"module": "keda", "channel": "fast", "from": "1.0.0", "to": "1.1.0", "change": rollout.change,
            "moved": "1970-01-01T00:16:40Z", "state": "halted", "ring": 1, "rings": 2,
            "runtimes": {"proven": 1, "upgrading": 0, "failing": 1, "waiting": 1, "unfit": 0,
                "blocked": {"paused": 1, "unreachable": 1}},
            "waitsFor": format!("the confirmation {id}"),
            "reason": "1 of 2 upgraded runtimes are no longer healthy", "confirmation": id, "confirmed": false})
    );
    let page = found.to_string();
    let lines: Vec<_> = page.lines().collect();
    assert!(lines[1].contains("1.0.0 → 1.1.0") && lines[1].contains("halted in ring 1 of 2"), "{page}");
    assert!(lines[1].contains("1 unreachable, 1 paused") || lines[1].contains("1 paused, 1 unreachable"), "{page}");
    assert_eq!(
        lines[3],
        "keda in the channel fast has halted in ring 1 of 2: 1 of 2 upgraded runtimes are no longer healthy"
    );
    assert_eq!(lines[4], format!("  to continue: tidewatch rollout confirm {id}"));
    assert_eq!(lines[5], "  to revert: move it back to 1.0.0");
    assert!(lines[7].starts_with("the maintenance windows are not known"), "{page}");
}

#[test]
fn runtimes_outside_their_window_and_all_paused_ones_are_blocked() {
    let policy = br#"{"rules": [], "default": {"begin": "2030-01-01T00:00:00Z", "end": "2030-01-02T00:00:00Z"}}"#;
    let windows = Windows::parse(policy, Duration::ZERO).unwrap();
    let blocked = |kcp: &KcpObjects| {
        let found = view(kcp, &ViewOptions { windows: Some(windows.clone()), ..options() });
        let runtimes = only(&found).runtimes.clone().unwrap();
        (runtimes.waiting, runtimes.blocked)
    };
    assert_eq!(blocked(&halted()), (0, [("paused", 1), ("unreachable", 1), ("window", 1)].into()));
    let pause = Some(serde_json::from_value(json!({"data": {"pause": "true"}})).unwrap());
    assert_eq!(blocked(&KcpObjects { pause, ..halted() }), (0, [("paused", 3)].into()));
}

#[test]
fn states_follow_from_the_record_and_the_accepted_target() {
    let accepted = |target| Some(releases("keda", "fast", target));
    let of = |rollouts: &[&Rollout], target: ChannelTarget, catalog: Objects, all: bool| {
        let kcp = KcpObjects { rollouts: Some(stored(rollouts)), releases: accepted(target), catalog, ..halted() };
        view(&kcp, &ViewOptions { all, ..options() })
    };
    let moved = || target("1.1.0", Some(MOVED));
    let complete = rollout(|rollout| rollout.progress = None);
    assert!(of(&[&complete], moved(), rings(), false).rollouts.is_empty());
    let found = of(&[&complete], moved(), rings(), true);
    assert_eq!((only(&found).state, &only(&found).runtimes), (RolloutState::Complete, &None));
    assert!(of(&[], target("1.1.0", None), rings(), true).rollouts.is_empty(), "no move was observed");

    let found = of(&[], moved(), rings(), false);
    assert_eq!((only(&found).state, only(&found).from.as_deref()), (RolloutState::NotStarted, Some("1.0.0")));
    let waits_for = "the receiver, which has not recorded the move yet";
    assert_eq!(only(&found).waits_for.as_deref(), Some(waits_for));
    let next = of(&[&complete], target("1.2.0", Some(MOVED + 5)), rings(), false);
    assert_eq!((only(&next).from.as_deref(), &*only(&next).to), (Some("1.1.0"), "1.2.0"), "a move after the record");

    let progressing = rollout(|rollout| in_ring(rollout, None));
    let found = of(&[&progressing], moved(), meta(&json!({})), false);
    assert_eq!((only(&found).state, only(&found).rings), (RolloutState::InRing, None), "the receiver has the flag");
    assert!(found.to_string().contains("give the receiver's --module-rollout-rings"), "{found}");
}

#[test]
fn invalid_states_and_annotations_are_named() {
    let mut kcp = KcpObjects { catalog: meta(&json!({annotation::ROLLOUT_RINGS: "9%"})), ..halted() };
    let data = kcp.rollouts.as_mut().unwrap().data.as_mut().unwrap();
    data.insert("nats_fast".to_owned(), "{\u{1b}".to_owned());
    let found = view(&kcp, &options());
    assert_eq!(only(&found).waits_for.as_deref(), Some("valid annotations of the ModuleReleaseMeta"));
    let page = found.to_string();
    assert!(page.contains("ConfigMap tidewatch-rollouts, key nats_fast: the stored state is invalid"), "{page}");
    let rules = "ModuleReleaseMeta keda: the annotation operator.kyma-project.io/tidewatch-rollout-rings of the \
                 ModuleReleaseMeta has the value \"9%\": the last share must be 100%";
    assert!(page.contains(rules), "{page}");
}

#[test]
fn confirmation_names_a_halt_and_keeps_the_others() {
    let mut map = halted().rollouts.unwrap();
    let id = only(&view(&halted(), &options())).confirmation.clone().unwrap();
    let unknown = confirm(Some(&map), "other").unwrap_err().to_string();
    let waiting = format!("no rollout waits for the confirmation \"other\"; the halted ones wait for: {id}");
    assert_eq!(unknown, waiting);
    assert_eq!(confirm(None, &id), Err(ConfirmError::NoneHalted(id.clone())));

    map.metadata.annotations = Some([(annotation::CONFIRM.to_owned(), "zz-1".to_owned())].into());
    let confirmation = confirm(Some(&map), &id).unwrap();
    assert_eq!((&*confirmation.annotation, confirmation.is_known), (&*format!("{id},zz-1"), false));
    let continues = "the rollout of 1.1.0 of the module keda in the channel fast continues in ring 1";
    assert_eq!(confirmation.continues, continues);
    map.metadata.annotations = Some([(annotation::CONFIRM.to_owned(), confirmation.annotation)].into());
    assert!(confirm(Some(&map), &id).unwrap().is_known);
    let found = view(&KcpObjects { rollouts: Some(map), ..halted() }, &options());
    assert!(only(&found).confirmed && found.to_string().contains("it is confirmed"), "{found}");
}
