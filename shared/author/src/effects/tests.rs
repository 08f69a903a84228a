use std::time::Duration;

use serde_json::{Value, json};
use tidewatch_api::names::{annotation, finalizer, label};
use tidewatch_select::{
    catalog::{holds::Holds, snapshot::Snapshot},
    kyma::build,
    windows::Windows,
};

use super::*;

const API: &str = "operator.kyma-project.io/v1beta2";

fn template(version: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut template = json!({"apiVersion": API, "kind": "ModuleTemplate", "metadata": {"name": format!("keda-{version}"), "labels": {}},
        "spec": {"moduleName": "keda", "version": version, "descriptor": {}}});
    change(&mut template);
    template
}

fn release(spec: Value) -> Value {
    let mut meta = json!({"apiVersion": API, "kind": "ModuleReleaseMeta", "metadata": {"name": "keda"},
        "spec": {"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda"}});
    for (member, value) in spec.as_object().unwrap() {
        meta["spec"][member] = value.clone();
    }
    meta
}

fn channels(channels: &[(&str, &str)]) -> Value {
    let channels: Vec<_> =
        channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
    release(json!({"channels": channels}))
}

fn objects(all: &[Value]) -> Objects {
    let mut objects = Objects::default();
    for object in all {
        if object["kind"] == "ModuleTemplate" {
            objects.templates.push(Arc::new(serde_json::from_value(object.clone()).unwrap()));
        } else {
            objects.release_metas.push(Arc::new(serde_json::from_value(object.clone()).unwrap()));
        }
    }
    objects
}

/// A Kyma whose user selects these modules in the channel `regular`.
fn kyma(name: &str, modules: Value) -> Kyma {
    let accepted = json!({"channel": "regular", "modules": modules}).to_string();
    serde_json::from_value(json!({"apiVersion": API, "kind": "Kyma",
        "metadata": {"name": name, "namespace": "kcp-system", "uid": format!("uid-{name}"),
                     "annotations": {annotation::ACCEPTED_SPEC: accepted}},
        "spec": {"channel": "regular"}}))
    .unwrap()
}

fn manifest(kyma: &str, version: &str, channel: Option<&str>) -> Manifest {
    let name = build::name(kyma, "kyma-project.io/module/keda", "keda");
    let mut labels = json!({label::KYMA_NAME: kyma, label::MODULE_NAME: "keda"});
    if let Some(channel) = channel {
        labels[label::CHANNEL] = channel.into();
    }
    serde_json::from_value(json!({"apiVersion": API, "kind": "Manifest",
        "metadata": {"name": name, "namespace": "kcp-system", "labels": labels},
        "spec": {"remote": true, "version": version, "install": {"name": "raw-manifest", "source": {"ref": version}}}}))
    .unwrap()
}

/// KCP with `keda` 1.0.0 in the channel `regular`, and 1.1.0 in none; the change; and the Kymas.
struct Case {
    live: Vec<Value>,
    files: Vec<Value>,
    whole: bool,
    restricted: bool,
    fleet: Fleet,
    rollouts: Option<Value>,
    releases: Option<Value>,
    windows: Option<Value>,
}

impl Case {
    fn new(files: &[Value]) -> Self {
        let plain = |version| template(version, |_| ());
        let live = vec![plain("1.0.0"), plain("1.1.0"), channels(&[("regular", "1.0.0")])];
        let kymas = vec![kyma("k", json!([{"name": "keda", "managed": true}]))];
        let fleet = Fleet { kymas, manifests: vec![manifest("k", "1.0.0", Some("regular"))], ..Fleet::default() };
        let rollouts = None;
        let releases = None;
        let windows = None;
        Self { live, files: files.to_vec(), whole: false, restricted: false, fleet, rollouts, releases, windows }
    }

    fn effects(self, limit: usize) -> KymaEffects {
        let Self { live, files, whole, restricted, fleet, rollouts, releases, windows } = self;
        let map = |data: Value| serde_json::from_value(json!({"data": data})).unwrap();
        let kymas = fleet.kymas.iter().map(|kyma| kyma.labels().clone()).collect();
        let rollouts = rollouts.map(map);
        let releases = releases.map(map);
        let live = Live { objects: objects(&live), kymas, releases, rollouts };
        let windows =
            windows.map(|policy| Windows::parse(policy.to_string().as_bytes(), Duration::from_secs(1_200)).unwrap());
        let restricted = restricted.then(|| "keda".to_owned()).into_iter().collect();
        let options = PreviewOptions {
            restricted,
            removal_limit_percent: 5,
            whole,
            windows,
            now: 1_000,
            ..PreviewOptions::default()
        };
        effects(&live, &objects(&files), &options, fleet, limit)
    }

    /// Outcomes with the numbers of their Kymas.
    fn outcomes(self) -> Vec<(String, usize)> {
        let texts = |effect: &Effect| {
            let (outcome, detail) = effect.outcome.texts();
            (format!("{outcome} {detail}"), effect.kymas)
        };
        self.effects(0).effects.iter().map(texts).collect()
    }
}

fn one(text: &str) -> Vec<(String, usize)> {
    vec![(text.to_owned(), 1)]
}

#[test]
fn each_change_has_the_outcome_of_the_reconcile() {
    let moved = channels(&[("regular", "1.1.0")]);
    let beta = template("1.0.0", |template| template["metadata"]["labels"][label::BETA] = json!("true"));
    let data = template("1.0.0", |template| template["spec"]["data"] = json!({"kind": "Keda"}));
    let other_component = release(
        json!({"channels": [{"channel": "regular", "version": "1.0.0"}], "ocmComponentName": "kyma-project.io/module/other"}),
    );
    for (files, expected) in [
        (channels(&[("regular", "1.0.0")]), None),
        (channels(&[("regular", "1.0.0"), ("fast", "1.1.0")]), None),
        (moved, Some("upgrades 1.0.0 → 1.1.0")),
        (
            channels(&[("regular", "9.9.9")]),
            Some(
                "refused 1.0.0: failed to get module template: ModuleTemplate.operator.kyma-project.io \"keda-9.9.9\" not found",
            ),
        ),
        (channels(&[("fast", "1.1.0")]), Some("refused 1.0.0: no versions found for channel: regular in module keda")),
        (beta, Some("loses 1.0.0: module template not allowed: beta module")),
        (data, Some("changes 1.0.0")),
        (other_component, Some("changes 1.0.0")),
        (release(json!({"mandatory": {"version": "1.1.0"}})), Some("upgrades 1.0.0 → 1.1.0")),
    ] {
        assert_eq!(
            Case::new(std::slice::from_ref(&files)).outcomes(),
            expected.map(one).unwrap_or_default(),
            "{files}"
        );
    }
}

#[test]
fn channel_that_moves_down_is_refused_and_one_that_moves_back_stays() {
    let mut case = Case::new(&[channels(&[("regular", "1.0.0")])]);
    case.live[2] = channels(&[("regular", "1.1.0")]);
    case.fleet.manifests = vec![manifest("k", "1.1.0", Some("regular"))];
    let skew = "refused 1.1.0: module template update not allowed: ignore channel skew (from regular to regular), as a higher \
                version (1.1.0) of the module was previously installed";
    assert_eq!(case.outcomes(), one(skew));
    let mut case = Case::new(&[channels(&[("regular", "1.0.0")])]);
    case.live[2] = channels(&[("regular", "1.1.0")]);
    assert_eq!(case.outcomes(), one("stays 1.0.0"), "its turn had not come");
}

#[test]
fn removed_objects_are_refused_and_keep_the_module() {
    let plain = |version| template(version, |_| ());
    for (files, message) in [
        (vec![plain("1.1.0"), channels(&[("regular", "1.0.0")])], "failed to get module template: ModuleTemplate"),
        (vec![plain("1.0.0")], "no ModuleReleaseMeta found for module \"keda\" in namespace \"kcp-system\""),
    ] {
        let case = Case { whole: true, ..Case::new(&files) };
        let found = case.outcomes();
        assert!(found.len() == 1 && found[0].0.starts_with(&format!("refused 1.0.0: {message}")), "{found:?}");
    }
}

#[test]
fn selector_takes_the_module_from_kymas_that_it_no_longer_matches() {
    let selecting = |team: &str| {
        release(
            json!({"channels": [{"channel": "regular", "version": "1.0.0"}], "kymaSelector": {"matchLabels": {"team": team}}}),
        )
    };
    let mut case = Case { restricted: true, ..Case::new(&[selecting("b")]) };
    case.live[2] = selecting("a");
    case.fleet.kymas.push(kyma("later", json!([{"name": "keda", "managed": true}])));
    for (kyma, team) in case.fleet.kymas.iter_mut().zip(["a", "b"]) {
        kyma.labels_mut().insert("team".to_owned(), team.to_owned());
    }
    let lost = "loses 1.0.0: module template not allowed: restricted module not allowed for this Kyma";
    assert_eq!(case.outcomes(), [(lost.to_owned(), 1), ("installs 1.0.0".to_owned(), 1)]);
}

#[test]
fn only_modules_that_follow_the_channel_and_are_managed_are_affected() {
    let mut case = Case::new(&[channels(&[("regular", "1.1.0"), ("fast", "1.1.0")])]);
    let selections = [
        json!([{"name": "keda", "managed": true}]),
        json!([{"name": "keda", "managed": false}]),
        json!([{"name": "nats", "managed": true}]),
        json!([{"name": "keda", "managed": true, "channel": "fast"}]),
        json!([{"name": "keda", "managed": true, "channel": "none"}]),
    ];
    let names = ["pinned", "unmanaged", "other", "fast", "invalid"];
    case.fleet.kymas = names.iter().zip(selections).map(|(name, modules)| kyma(name, modules)).collect();
    let pin = ("version.operator.kyma-project.io/keda".to_owned(), "1.0.0".to_owned());
    case.fleet.kymas[0].annotations_mut().extend([pin]);
    let mut unmanaged = manifest("unmanaged", "1.0.0", Some("regular"));
    unmanaged.annotations_mut().insert(annotation::UNMANAGED.to_owned(), "true".to_owned());
    case.fleet.manifests = vec![manifest("pinned", "1.0.0", None), unmanaged];
    assert_eq!(case.outcomes(), one("installs 1.1.0"), "the Kyma in the new channel");
}

#[test]
fn removal_from_many_kymas_waits_for_a_confirmation() {
    let beta = template("1.0.0", |template| template["metadata"]["labels"][label::BETA] = json!("true"));
    let mut case = Case::new(&[beta]);
    let names: Vec<_> = (0..10).map(|number| format!("k{number}")).collect();
    case.fleet.kymas = names.iter().map(|name| kyma(name, json!([{"name": "keda", "managed": true}]))).collect();
    case.fleet.manifests = names.iter().map(|name| manifest(name, "1.0.0", Some("regular"))).collect();
    let effects = case.effects(2);
    let [effect] = &*effects.effects else { panic!("{effects:?}") };
    let Outcome::Waits { reason: WaitReason::Held, then } = &effect.outcome else { panic!("{effect:?}") };
    assert!(matches!(**then, Outcome::Loses { .. }), "{effect:?}");
    assert_eq!((effect.kymas, effect.names.as_slice()), (10, &names[..2]));
    let json = serde_json::to_value(&effects).unwrap();
    let message = "module template not allowed: beta module";
    assert_eq!(
        json["effects"][0],
        json!({"module": "keda", "outcome": "waits", "reason": "held", "kymas": 10, "names": ["k0", "k1"],
               "then": {"outcome": "loses", "version": "1.0.0", "message": message}})
    );
    assert_eq!(
        effects.to_string(),
        "MODULE  OUTCOME  KYMAS  DETAIL                                                            NAMES\n\
         keda    waits    10     held, then loses 1.0.0: module template not allowed: beta module  k0, k1 and 8 more\n"
    );
}

/// The guard holds a part of a module alone: a new channel takes effect, a removed one stays.
#[test]
fn held_channel_and_version_wait_while_the_rest_of_their_module_does_not() {
    let beta = template("1.0.0", |template| template["metadata"]["labels"][label::BETA] = json!("true"));
    let refused = "no versions found for channel: regular in module keda";
    for (files, outcome) in [
        (vec![channels(&[("fast", "1.1.0")])], format!("waits held, then refused 1.0.0: {refused}")),
        (vec![channels(&[("fast", "1.1.0"), ("regular", "1.0.0")])], String::new()),
        (
            vec![beta, channels(&[("fast", "1.1.0"), ("regular", "1.0.0")])],
            "waits held, then loses 1.0.0: module template not allowed: beta module".to_owned(),
        ),
    ] {
        let mut case = Case::new(&files);
        let names = (0..10).map(|number| format!("k{number}"));
        case.fleet.kymas = names.clone().map(|it| kyma(&it, json!([{"name": "keda", "managed": true}]))).collect();
        case.fleet.manifests = names.map(|name| manifest(&name, "1.0.0", Some("regular"))).collect();
        let expected: Vec<_> = (!outcome.is_empty()).then_some((outcome, 10)).into_iter().collect();
        assert_eq!(case.outcomes(), expected);
    }
}

#[test]
fn stopped_and_deleted_kymas_do_not_upgrade() {
    let mut case = Case::new(&[channels(&[("regular", "1.1.0")])]);
    let names = ["paused", "skipped", "deleting", "handed-back"];
    case.fleet.kymas = names.map(|name| kyma(name, json!([{"name": "keda", "managed": true}]))).to_vec();
    case.fleet.manifests = names.map(|name| manifest(name, "1.0.0", Some("regular"))).to_vec();
    for (kyma, label) in case.fleet.kymas.iter_mut().zip([label::PAUSE, label::SKIP_RECONCILIATION]) {
        kyma.labels_mut().insert(label.to_owned(), "true".to_owned());
    }
    case.fleet.kymas[2].metadata.deletion_timestamp =
        Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    case.fleet.kymas[3].labels_mut().insert(label::HAND_BACK.to_owned(), label::HAND_BACK_REQUESTED.to_owned());
    let effects = case.effects(1);
    assert_eq!((effects.total, effects.left_out), (4, 2));
    let found: Vec<_> = effects.effects.iter().map(|it| (it.outcome.texts().1, it.names[0].as_str())).collect();
    let then = "then upgrades 1.0.0 → 1.1.0";
    assert_eq!(found, [(format!("paused, {then}"), "paused"), (format!("skipped, {then}"), "skipped")]);
}

#[test]
fn installed_modules_stand_for_an_unknown_selection() {
    let mut case = Case::new(&[channels(&[("regular", "1.1.0")])]);
    case.fleet.kymas[0].annotations_mut().clear();
    let effects = case.effects(1);
    assert_eq!((effects.unknown_selections, effects.effects.len()), (1, 1));
    assert!(
        effects
            .to_string()
            .ends_with("the selections of 1 Kymas are not known; their installed modules stand for them\n")
    );
}

#[test]
fn mandatory_module_reaches_all_kymas_and_its_removal_waits() {
    let mandatory = |version: &str| {
        let mut meta = release(json!({"mandatory": {"version": version}}));
        meta["metadata"]["finalizers"] = json!([finalizer::MANDATORY_MODULE]);
        meta
    };
    let fleet = || {
        let names = ["a", "b", "c", "d"];
        let mut manifests = names.map(|name| manifest(name, "1.0.0", None)).to_vec();
        for manifest in &mut manifests {
            manifest.labels_mut().insert(label::MANDATORY_MODULE.to_owned(), "true".to_owned());
        }
        Fleet { kymas: names.map(|name| kyma(name, json!([]))).to_vec(), manifests, ..Fleet::default() }
    };
    let four = |text: &str| vec![(text.to_owned(), 4)];
    let mut moved = Case { fleet: fleet(), ..Case::new(&[release(json!({"mandatory": {"version": "1.1.0"}}))]) };
    moved.live[2] = mandatory("1.0.0");
    assert_eq!(moved.outcomes(), four("upgrades 1.0.0 → 1.1.0"));
    let mut lowered = Case { fleet: fleet(), ..Case::new(&[mandatory("1.0.0")]) };
    lowered.live[2] = mandatory("1.1.0");
    lowered.fleet.manifests.iter_mut().for_each(|manifest| manifest.spec.version = Some("1.1.0".to_owned()));
    assert_eq!(lowered.outcomes(), four("upgrades 1.1.0 → 1.0.0"), "the operator may lower it");
    let mut removed = Case { fleet: fleet(), whole: true, ..Case::new(&[]) };
    removed.files = removed.live[..2].to_vec();
    removed.live[2] = mandatory("1.0.0");
    assert_eq!(removed.outcomes(), four("waits held, then loses 1.0.0: the module keda is not mandatory any more"));
    let mut added = Case { fleet: fleet(), ..Case::new(&[release(json!({"mandatory": {"version": "1.1.0"}}))]) };
    added.live.pop();
    added.fleet.manifests.clear();
    assert_eq!(added.outcomes(), four("installs 1.1.0"), "the receiver sets the finalizer first");
}

/// A receiver whose selector names the label skip-reconciliation reconciles the Kymas that have it.
#[test]
fn selected_kyma_with_the_skip_label_is_not_stopped() {
    let mut case = Case::new(&[channels(&[("regular", "1.1.0")])]);
    case.fleet.kymas[0].labels_mut().insert(label::SKIP_RECONCILIATION.to_owned(), "true".to_owned());
    case.fleet.kyma_selector = format!("{}=true", label::SKIP_RECONCILIATION);
    assert_eq!(case.outcomes(), one("upgrades 1.0.0 → 1.1.0"));
}

/// A stopped Kyma waits for the end of the stop, whatever else it waits for.
#[test]
fn paused_kyma_whose_removal_is_held_is_paused() {
    let beta = template("1.0.0", |template| template["metadata"]["labels"][label::BETA] = json!("true"));
    let mut case = Case::new(&[beta]);
    let names = (0..10).map(|number| format!("k{number}"));
    case.fleet.kymas = names.clone().map(|it| kyma(&it, json!([{"name": "keda", "managed": true}]))).collect();
    case.fleet.kymas[0].labels_mut().insert(label::PAUSE.to_owned(), "true".to_owned());
    case.fleet.manifests = names.map(|name| manifest(&name, "1.0.0", Some("regular"))).collect();
    let then = "then loses 1.0.0: module template not allowed: beta module";
    assert_eq!(case.outcomes(), [(format!("waits held, {then}"), 9), (format!("waits paused, {then}"), 1)]);
}

#[test]
fn manifest_without_the_label_is_that_of_its_owner() {
    let mut case = Case::new(&[channels(&[("regular", "1.1.0")])]);
    let manifest = &mut case.fleet.manifests[0];
    manifest.labels_mut().remove(label::KYMA_NAME);
    let owner = json!({"apiVersion": API, "kind": "Kyma", "name": "k", "uid": "uid-k"});
    manifest.owner_references_mut().push(serde_json::from_value(owner).unwrap());
    assert_eq!(case.outcomes(), one("upgrades 1.0.0 → 1.1.0"));
}

/// While the user's resources block the removal of a module, it follows its channel, and is not removed once more.
#[test]
fn module_that_is_being_removed_is_upgraded_and_not_lost() {
    let removing = |modules: Value, files: &[Value]| {
        let mut case = Case::new(files);
        case.fleet.kymas = vec![kyma("k", modules)];
        case.fleet.manifests[0].metadata.deletion_timestamp =
            Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        case.outcomes()
    };
    let moved = channels(&[("regular", "1.1.0")]);
    assert_eq!(removing(json!([]), std::slice::from_ref(&moved)), one("upgrades 1.0.0 → 1.1.0"));
    let beta = template("1.0.0", |template| template["metadata"]["labels"][label::BETA] = json!("true"));
    let refused = "refused 1.0.0: module template not allowed: beta module";
    assert_eq!(removing(json!([{"name": "keda", "managed": true}]), &[beta]), one(refused));
}

/// Withdrawn on the day of the preview, and announced for the next one.
#[test]
fn withdrawal_takes_effect_on_the_day_of_the_preview() {
    for (date, expected) in [
        (
            "1970-01-01",
            "refused 1.0.0: module template update not allowed: version 1.1.0 of module keda is withdrawn as of 1970-01-01; version \
             1.0.0 stays installed",
        ),
        ("1970-01-02", "upgrades 1.0.0 → 1.1.0"),
    ] {
        let channels = json!([{"channel": "regular", "version": "1.1.0"}]);
        let versions = json!([{"version": "1.1.0", "withdrawal": {"date": date}}]);
        let files = [release(json!({"channels": channels, "versions": versions}))];
        assert_eq!(Case::new(&files).outcomes(), one(expected), "{date}");
    }
}

#[test]
fn reset_selection_is_that_of_the_control_plane() {
    let mut case = Case::new(&[channels(&[("regular", "1.1.0")])]);
    case.fleet.kymas[0].labels_mut().insert(label::RESET_MODULES.to_owned(), "true".to_owned());
    assert_eq!(case.outcomes(), []);
}

#[test]
fn mandatory_module_that_a_user_lists_is_upgraded_all_the_same() {
    let mut case = Case::new(&[release(json!({"mandatory": {"version": "1.1.0"}}))]);
    case.live[2] = release(json!({"mandatory": {"version": "1.0.0"}}));
    case.fleet.manifests = vec![manifest("k", "1.0.0", None)];
    case.fleet.manifests[0].labels_mut().insert(label::MANDATORY_MODULE.to_owned(), "true".to_owned());
    assert_eq!(case.outcomes(), one("upgrades 1.0.0 → 1.1.0"));
}

/// KCP whose version 1.1.0 requires a downtime, with the Kymas `sat`, `sat2` and `skips` in one region and `sun` in another.
fn with_downtime() -> Case {
    let requires_downtime = |template: &mut Value| template["spec"]["requiresDowntime"] = true.into();
    let mut case = Case::new(&[channels(&[("regular", "1.1.0")])]);
    case.live[1] = template("1.1.0", requires_downtime);
    let names = ["sat", "sat2", "skips", "sun"];
    case.fleet.kymas = names.map(|name| kyma(name, json!([{"name": "keda", "managed": true}]))).to_vec();
    case.fleet.manifests = names.map(|name| manifest(name, "1.0.0", Some("regular"))).to_vec();
    for (kyma, name) in case.fleet.kymas.iter_mut().zip(names) {
        kyma.labels_mut().insert("kyma-project.io/region".to_owned(), name.to_owned());
    }
    case.fleet.kymas[2].spec.skip_maintenance_windows = Some(true);
    case
}

fn window(begin: &str) -> Value {
    json!([{"begin": begin, "end": "1970-02-01T00:00:00Z"}])
}

#[test]
fn version_with_a_downtime_waits_for_the_window_of_each_kyma() {
    let rule = |region: &str, begin: &str| json!({"match": {"region": region}, "windows": window(begin)});
    let later = "1970-01-03T20:00:00Z";
    let windows = |rules: Value| Some(json!({"rules": rules}));
    let case = Case {
        windows: windows(json!([rule("^sat", later), rule("^sun", "1970-01-01T00:00:00Z")])),
        ..with_downtime()
    };
    let effects = case.effects(9);
    let found: Vec<_> =
        effects.effects.iter().map(|it| (it.outcome.texts(), it.names.len(), it.opens.as_deref())).collect();
    let upgrade = "1.0.0 → 1.1.0".to_owned();
    let waits = ("waits", format!("maintenance window, then upgrades {upgrade}"));
    assert_eq!(found, [(waits, 2, Some(later)), (("upgrades", upgrade), 2, None)], "sun is in its window");
    assert!(effects.to_string().contains(&format!("1.0.0 → 1.1.0; the window opens at {later}")), "{effects}");
    assert_eq!(serde_json::to_value(&effects).unwrap()["effects"][0]["reason"], "window");

    let rules = json!([rule("^sat$", later), rule("^sat2", "1970-01-03T21:00:00Z")]);
    let effects = Case { windows: windows(rules), ..with_downtime() }.effects(9);
    let found: Vec<_> =
        effects.effects.iter().map(|it| (it.outcome.texts().0, it.kymas, it.opens.as_deref())).collect();
    assert_eq!(found, [("refused", 1, None), ("waits", 2, None), ("upgrades", 1, None)], "other starts");
    let message =
        "failed to determine if maintenance window is active: matches and defaults also failed to provide a window";
    assert_eq!(effects.effects[0].outcome.texts().1, format!("1.0.0: {message}"));
}

#[test]
fn unknown_windows_are_counted() {
    let effects = with_downtime().effects(9);
    assert_eq!((effects.unknown_windows, effects.effects.len(), effects.effects[0].kymas), (3, 1, 4));
    assert!(
        effects.to_string().contains("for which 3 upgrades may wait; name the policy with --maintenance-window-policy")
    );
}

/// A release meta with rings.
fn rings(channels: &[(&str, &str)], rings: &str) -> Value {
    let mut meta = self::channels(channels);
    meta["metadata"]["annotations"] = json!({annotation::ROLLOUT_RINGS: rings});
    meta
}

#[test]
fn moved_channel_of_a_module_with_rings_waits_unless_the_user_installs_or_switches() {
    let mut case = Case::new(&[rings(&[("regular", "1.1.0"), ("fast", "1.1.0")], "1%,100%")]);
    let names = ["follows", "installs", "switches"];
    let selections = [None, None, Some("fast")];
    let selected = |channel: Option<&str>| json!([{"name": "keda", "managed": true, "channel": channel}]);
    case.fleet.kymas = names.iter().zip(selections).map(|(name, channel)| kyma(name, selected(channel))).collect();
    case.fleet.manifests = ["follows", "switches"].map(|name| manifest(name, "1.0.0", Some("regular"))).to_vec();
    let effects = case.effects(9);
    let found: Vec<_> = effects.effects.iter().map(|it| (it.outcome.texts(), it.names[0].as_str())).collect();
    let waits = ("waits", "ring rollout, then upgrades 1.0.0 → 1.1.0".to_owned());
    let upgrades = ("upgrades", "1.0.0 → 1.1.0".to_owned());
    assert_eq!(found, [(waits, "follows"), (upgrades, "switches"), (("installs", "1.1.0".to_owned()), "installs")]);
}

#[test]
fn rules_of_the_live_release_meta_stay_and_invalid_ones_are_named() {
    let mut case = Case::new(&[channels(&[("regular", "1.1.0")])]);
    case.live[2] = rings(&[("regular", "1.0.0")], "1%,100%");
    assert_eq!(case.outcomes(), one("waits ring rollout, then upgrades 1.0.0 → 1.1.0"));
    let off = Case::new(&[rings(&[("regular", "1.1.0")], "off")]);
    assert_eq!(off.outcomes(), one("upgrades 1.0.0 → 1.1.0"));
    let effects = Case::new(&[rings(&[("regular", "1.1.0")], "1%")]).effects(1);
    assert_eq!(effects.effects[0].outcome.texts().1, "ring rollout, then upgrades 1.0.0 → 1.1.0");
    assert!(effects.to_string().contains("the ring rollout of keda is invalid: the annotation"), "{effects}");
}

/// The downgrade is allowed only where the rollout in progress brought the version.
#[test]
fn move_back_downgrades_the_runtimes_of_the_rollout_in_progress() {
    let mut case = Case::new(&[rings(&[("regular", "1.0.0")], "1%,100%")]);
    case.live[2] = rings(&[("regular", "1.1.0")], "1%,100%");
    let target = json!({"version": "1.1.0", "since": 900, "from": "1.0.0", "beta": false, "internal": false});
    let rollout = json!({"module": "keda", "channel": "regular", "version": "1.1.0", "moved": 900, "change": "c1",
        "earlier": [{"version": "1.0.0"}], "progress": {"since": 900}});
    let snapshot =
        |objects: Objects| Snapshot::new(objects.templates, objects.release_metas, &BTreeSet::new(), Holds::default());
    let mut accepted = serde_json::to_value(snapshot(objects(&case.live)).releases()).unwrap();
    accepted["keda"]["channels"]["regular"] = target;
    case.releases = Some(json!({"accepted": accepted.to_string()}));
    case.rollouts = Some(json!({"keda_regular": rollout.to_string()}));
    let names = ["upgraded", "waiting", "new"];
    case.fleet.kymas = names.map(|name| kyma(name, json!([{"name": "keda", "managed": true}]))).to_vec();
    case.fleet.manifests = names.map(|name| manifest(name, "1.1.0", Some("regular"))).to_vec();
    case.fleet.manifests[1].spec.version = Some("1.0.0".to_owned());
    let mark = json!({"change": "c1", "healthy": true}).to_string();
    case.fleet.manifests[0].annotations_mut().insert(annotation::ROLLOUT.to_owned(), mark);
    let effects = case.effects(9);
    let found: Vec<_> = effects.effects.iter().map(|it| (it.outcome.texts().0, it.names[0].as_str())).collect();
    assert_eq!(found, [("refused", "new"), ("upgrades", "upgraded"), ("stays", "waiting")], "{effects}");
}
