//! Decisions on the mandatory modules of one Kyma, beside those on its user's selection.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tidewatch_api::{
    ModuleTemplate,
    names::{annotation, finalizer},
    selection::UserSelection,
};

use super::*;
use crate::{
    catalog::{RolloutBoard, VersionSource},
    kyma::{build, layer::ModuleLayer, validate::validate},
    windows::{NoWindowError, WindowState},
};

const REST: Duration = Duration::from_secs(9);

fn kyma() -> Kyma {
    serde_json::from_value(json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": "k", "namespace": "kcp-system", "uid": "u-1"}, "spec": {"channel": "fast"}
    }))
    .unwrap()
}

fn object(kind: &str, name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind,
        "metadata": {"name": name, "namespace": "kcp-system"}, "spec": spec})
}

/// The release meta of `warden`, mandatory in version 1.1.0, and changed.
fn meta(change: impl FnOnce(&mut Value)) -> Arc<ModuleReleaseMeta> {
    let mut meta = object(
        "ModuleReleaseMeta",
        "warden",
        &json!({
            "moduleName": "warden", "ocmComponentName": "kyma-project.io/module/warden",
            "mandatory": {"version": "1.1.0"}
        }),
    );
    meta["metadata"]["finalizers"] = json!([finalizer::MANDATORY_MODULE]);
    change(&mut meta);
    Arc::new(serde_json::from_value(meta).unwrap())
}

fn deleting(meta: &mut Value) {
    meta["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
}

fn optional(meta: &mut Value) {
    meta["spec"]["mandatory"] = Value::Null;
    meta["spec"]["channels"] = json!([{"channel": "fast", "version": "1.1.0"}]);
}

fn template(version: &str) -> Arc<ModuleTemplate> {
    let mut template = object(
        "ModuleTemplate",
        &format!("warden-{version}"),
        &json!({"moduleName": "warden", "version": version, "descriptor": {}, "requiresDowntime": true}),
    );
    // Mandatory modules wait for no maintenance window, and are installed whatever the labels of their templates are, as by
    // lifecycle-manager.
    template["metadata"]["labels"] = json!({label::BETA: "true", label::INTERNAL: "true"});
    Arc::new(serde_json::from_value(template).unwrap())
}

fn snapshot(meta: Option<Arc<ModuleReleaseMeta>>, versions: &[&str]) -> Snapshot {
    Snapshot::new(versions.iter().map(|version| template(version)), meta, &BTreeSet::new(), BTreeSet::new())
}

fn layer_of(version: &str) -> ModuleLayer {
    let source = json!({"repo": "r", "name": "n", "ref": version, "type": "oci-dir"});
    ModuleLayer::new(&source, Vec::new())
}

/// The Manifest of `warden` at a version, mandatory or selected.
fn manifest(version: &str, follows: Follow) -> Manifest {
    let policy = CustomResourcePolicy::CreateAndDelete;
    let channel = if let Follow::Channel(channel) = &follows { Some(channel.clone()) } else { None };
    let module = WantedModule { name: "warden".into(), follows: Ok(follows), managed: true, policy };
    let template = template(version);
    let component = "kyma-project.io/module/warden".into();
    let found = Resolved { template, channel, version: version.into(), meta: Arc::default(), component };
    serde_json::from_value(build::manifest(&kyma(), &module, &found, &layer_of(version)).body).unwrap()
}

fn mandatory(version: &str) -> Manifest {
    manifest(version, Follow::Mandatory)
}

fn selected(version: &str) -> Manifest {
    manifest(version, Follow::Channel("fast".into()))
}

/// Inputs of a decision, and the user's selection.
struct Case {
    meta: Option<Arc<ModuleReleaseMeta>>,
    versions: &'static [&'static str],
    owned: Vec<Manifest>,
    selects: &'static [&'static str],
    is_held: bool,
    turn: RolloutSlot,
    layer: Option<LayerLookup>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            meta: Some(meta(|_| ())),
            versions: &["1.0.0", "1.1.0"],
            owned: Vec::new(),
            selects: &[],
            is_held: false,
            turn: RolloutSlot::Now,
            layer: None,
        }
    }
}

/// Decision on the mandatory modules, and on the selected ones.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    /// Versions of the applied Manifests.
    applied: Vec<String>,
    deleted: usize,
    /// The same for the user's selection.
    of_user: (Vec<String>, usize),
    turn: Option<Duration>,
    faults: Vec<Option<String>>,
}

fn check(case: Case) -> Outcome {
    let snapshot = snapshot(case.meta, case.versions);
    let modules: Vec<_> = case.selects.iter().map(|name| json!({"name": name})).collect();
    let spec = serde_json::from_value(json!({"channel": "fast", "modules": modules})).unwrap();
    let selection = UserSelection { spec, ..UserSelection::default() };
    let selection = validate(&selection, &BTreeMap::new()).unwrap();
    let owned = case.owned.into_iter().map(Arc::new).collect();
    let owned = Owned::divide(owned, &snapshot, Some(&selection));
    let sources = Sources {
        namespace: "kcp-system",
        kyma_labels: &BTreeMap::new(),
        catalog: &snapshot,
        held: &|_| case.is_held,
        window: &|| WindowState::Unknown(NoWindowError::NoPolicy),
        today: jiff::civil::date(2026, 6, 1),
        turn: &|module, source, version| {
            assert_eq!((module, version), ("warden", "1.1.0"));
            if source == VersionSource::Mandatory { case.turn } else { RolloutSlot::Now }
        },
        edited: &|_, _| RolloutSlot::Now,
        rollouts: &RolloutBoard::default(),
    };
    let layer = |found: &Resolved| case.layer.clone().unwrap_or_else(|| LayerLookup::Ready(layer_of(&found.version)));
    let mandatory = wanted(&snapshot, &owned.mandatory);
    let decisions = decide(&kyma(), &mandatory, &owned.mandatory, &sources, &layer);
    let of_user = modules::decide(&kyma(), &selection.modules, &owned.selected, &sources, &layer);
    let applied = |decisions: &Decisions<'_>| -> Vec<String> {
        let written = decisions.wanted.iter().filter_map(|decision| decision.write.as_ref());
        let written = written.chain(&decisions.upgrades);
        written.map(|desired| desired.body["spec"]["version"].as_str().unwrap().to_owned()).collect()
    };
    Outcome {
        applied: applied(&decisions),
        deleted: decisions.unwanted.len(),
        of_user: (applied(&of_user), of_user.unwanted.len()),
        turn: decisions.turn,
        faults: faults(&decisions).map(|(_, fault)| fault).collect(),
    }
}

fn applies(version: &str) -> Outcome {
    Outcome { applied: vec![version.to_owned()], faults: vec![None], ..Outcome::default() }
}

fn keeps(faults: Vec<Option<String>>) -> Outcome {
    Outcome { faults, ..Outcome::default() }
}

#[test]
fn every_kyma_gets_the_mandatory_version() {
    assert_eq!(check(Case::default()), applies("1.1.0"));
    assert_eq!(check(Case { owned: vec![mandatory("1.1.0")], ..Case::default() }), keeps(vec![None]));
    assert_eq!(check(Case { owned: vec![mandatory("1.0.0")], ..Case::default() }), applies("1.1.0"));
    assert_eq!(check(Case { owned: vec![mandatory("2.0.0")], ..Case::default() }), applies("1.1.0"), "also down");
    let mut edited = mandatory("1.1.0");
    Arc::make_mut(&mut edited.spec.install.source)["ref"] = json!("other");
    assert_eq!(check(Case { owned: vec![edited], ..Case::default() }), applies("1.1.0"), "edits are reset");
    // Its user may list it, or have selected it before it became mandatory.
    let listed = Case { selects: &["warden"], owned: vec![mandatory("1.1.0")], ..Case::default() };
    assert_eq!(check(listed), keeps(vec![None]));
    for selects in [&["warden"][..], &[]] {
        let former = Case { selects, owned: vec![selected("1.1.0")], ..Case::default() };
        assert_eq!(check(former), applies("1.1.0"), "the Manifest becomes a mandatory one");
    }
}

#[test]
fn moved_version_waits_for_the_rollout_slot() {
    let waits = |owned, turn| check(Case { owned, turn, ..Case::default() });
    let kept = Outcome { turn: Some(REST), ..Outcome::default() };
    assert_eq!(waits(vec![mandatory("1.0.0")], RolloutSlot::After(REST)), kept);
    assert_eq!(waits(vec![mandatory("1.0.0")], RolloutSlot::Undecided), Outcome::default());
    assert_eq!(waits(Vec::new(), RolloutSlot::After(REST)), applies("1.1.0"), "the first installation does not wait");
    let repaired = Outcome { applied: vec!["1.0.0".to_owned()], ..kept };
    let mut edited = mandatory("1.0.0");
    Arc::make_mut(&mut edited.spec.install.source)["ref"] = json!("other");
    assert_eq!(waits(vec![edited], RolloutSlot::After(REST)), repaired);
}

#[test]
fn installation_begins_with_the_finalizer_of_the_release_meta() {
    let unprotected = || Some(meta(|meta| meta["metadata"]["finalizers"] = json!(["foreign"])));
    assert_eq!(check(Case { meta: unprotected(), ..Case::default() }), Outcome::default());
    let installed = Case { meta: unprotected(), owned: vec![mandatory("1.0.0")], ..Case::default() };
    assert_eq!(check(installed), Outcome::default(), "an installed one stays");
}

#[test]
fn deletion_of_the_release_meta_uninstalls_unless_it_is_held() {
    let deleted = |case: Case| check(Case { meta: Some(meta(deleting)), ..case });
    let removes = Outcome { deleted: 1, ..Outcome::default() };
    assert_eq!(deleted(Case::default()), Outcome::default());
    for selects in [&["warden"][..], &[]] {
        for owned in [mandatory("1.1.0"), selected("1.0.0")] {
            let case = || Case { owned: vec![owned.clone()], selects, ..Case::default() };
            assert_eq!(deleted(case()), removes);
            assert_eq!(deleted(Case { is_held: true, ..case() }), Outcome::default());
            let failing = LayerLookup::Failed("the registry refuses the connection".into());
            assert_eq!(deleted(Case { layer: Some(failing), ..case() }), removes, "it needs no registry");
        }
    }
}

#[test]
fn optional_module_passes_to_its_user_or_is_uninstalled() {
    let case = |selects| Case {
        meta: Some(meta(optional)),
        owned: vec![mandatory("1.1.0")],
        selects,
        layer: None,
        ..Case::default()
    };
    let versions = snapshot(Some(meta(optional)), &["1.1.0"]);
    assert_eq!(versions.mandatory().count(), 0);
    assert_eq!(check(case(&[])), Outcome { deleted: 1, ..Outcome::default() });
    assert_eq!(check(Case { is_held: true, ..case(&[]) }), Outcome::default());
    // Beta and internal templates are not for this Kyma, so its user cannot have it either.
    let of_user = (Vec::new(), 1);
    assert_eq!(check(case(&["warden"])), Outcome { of_user, ..Outcome::default() });
    let owned = Owned::divide(vec![Arc::new(mandatory("1.1.0"))], &versions, None);
    assert_eq!((owned.selected.len(), owned.mandatory.len()), (1, 0), "the selection is unknown: nothing is deleted");
}

#[test]
fn fault_affects_nothing_that_is_installed() {
    let no_meta = "no ModuleReleaseMeta found for module \"warden\" in namespace \"kcp-system\"".to_owned();
    let no_component = "failed to create OCM Component Identity: the ModuleReleaseMeta of warden names no component \
                        or no version"
        .to_owned();
    let failing = "the registry refuses the connection".to_owned();
    let unnamed = || Some(meta(|meta| meta["spec"]["ocmComponentName"] = Value::Null));
    let misnamed = || Some(meta(|meta| meta["spec"]["moduleName"] = json!("other")));
    for (case, faults) in [
        (Case { meta: None, ..Case::default() }, vec![Some(no_meta)]),
        // Reported by the catalog.
        (Case { meta: misnamed(), ..Case::default() }, vec![]),
        (Case { versions: &["1.0.0"], ..Case::default() }, vec![]),
        (Case { meta: unnamed(), ..Case::default() }, vec![Some(no_component)]),
        (Case { layer: Some(LayerLookup::Pending), ..Case::default() }, vec![]),
        (Case { layer: Some(LayerLookup::Failed(failing.clone())), ..Case::default() }, vec![Some(failing)]),
    ] {
        assert_eq!(check(Case { owned: vec![mandatory("1.0.0")], ..case }), keeps(faults));
    }
    let mut nameless = mandatory("1.0.0");
    nameless.labels_mut().remove(label::MODULE_NAME);
    let unknown = Case { meta: None, owned: vec![nameless], ..Case::default() };
    assert_eq!(check(unknown), Outcome::default(), "its module is unknown");
}

/// A withdrawn version reaches no further runtime and stays where it is. Its fault is the same for every Kyma, and no Kyma that
/// has it ends the fault: each change of it would be an Event.
#[test]
fn withdrawn_version_is_installed_nowhere_else_and_its_fault_is_the_same_everywhere() {
    let with = |date: &str, owned: Vec<Manifest>| {
        let entry = json!([{"version": "1.1.0", "withdrawal": {"date": date, "replacement": "1.1.1"}}]);
        check(Case { meta: Some(meta(|meta| meta["spec"]["versions"] = entry)), owned, ..Case::default() })
    };
    let today = "2026-06-01";
    let later = "2026-06-02";
    let notice =
        "module version not available: version 1.1.0 of module warden is withdrawn as of 2026-06-01, use version 1.1.1";
    let refused = || keeps(vec![Some(notice.to_owned())]);
    assert_eq!(with(today, Vec::new()), refused());
    for other in ["1.0.0", "1.0.1", "2.0.0"] {
        assert_eq!(with(today, vec![mandatory(other)]), refused(), "{other} stays");
    }
    assert_eq!(with(today, vec![mandatory("1.1.0")]), keeps(vec![]));
    let mut edited = mandatory("1.1.0");
    Arc::make_mut(&mut edited.spec.install.source)["ref"] = json!("other");
    assert_eq!(with(today, vec![edited]), Outcome { faults: vec![], ..applies("1.1.0") }, "it is repaired");
    assert_eq!(with(later, Vec::new()), applies("1.1.0"), "announced only");
    assert_eq!(with(later, vec![mandatory("1.0.0")]), applies("1.1.0"));
}

#[test]
fn manifest_of_another_component_goes_after_its_successor_is_applied() {
    let mut old = mandatory("1.1.0");
    old.metadata.name = Some("k-other-1".into());
    assert_eq!(check(Case { owned: vec![old.clone()], ..Case::default() }), applies("1.1.0"));
    let held = Case { owned: vec![old.clone()], is_held: true, ..Case::default() };
    assert_eq!(check(held), keeps(vec![None]), "another component is a removal");
    let mut new = mandatory("1.1.0");
    new.annotations_mut().insert(annotation::SYNC_OCI_REF.into(), "1.1.0".into());
    let replaced = Outcome { deleted: 1, ..keeps(vec![None]) };
    assert_eq!(check(Case { owned: vec![old, new], ..Case::default() }), replaced);
}

#[test]
fn blocked_deletion_of_a_manifest_is_upgraded() {
    let mut leaving = mandatory("1.0.0");
    leaving.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    assert_eq!(check(Case { owned: vec![leaving], ..Case::default() }), applies("1.1.0"));
}

#[test]
fn start_finds_kymas_with_work_on_mandatory_modules() {
    let due = |owned: Vec<Manifest>, meta: Arc<ModuleReleaseMeta>, slot: RolloutSlot| {
        let owned: Vec<_> = owned.into_iter().map(Arc::new).collect();
        due_after(&owned, &snapshot(Some(meta), &["1.0.0", "1.1.0"]), |_, _| slot, |_| false)
    };
    let later = RolloutSlot::After(REST);
    let installable = || meta(|_| ());
    let at_once = Some(Duration::ZERO);
    assert_eq!(due(vec![mandatory("1.1.0")], installable(), later), None);
    assert_eq!(due(Vec::new(), installable(), later), at_once);
    assert_eq!(due(vec![mandatory("1.0.0")], installable(), RolloutSlot::Now), at_once);
    assert_eq!(due(vec![mandatory("1.0.0")], installable(), later), Some(REST));
    assert_eq!(due(vec![mandatory("1.0.0")], installable(), RolloutSlot::Ring), None);
    assert_eq!(due(vec![mandatory("1.1.0")], meta(deleting), later), at_once);
    assert_eq!(due(vec![mandatory("1.1.0")], meta(optional), later), at_once);
    let owned = [Arc::new(mandatory("1.1.0"))];
    let catalog = snapshot(Some(meta(optional)), &["1.1.0"]);
    assert_eq!(due_after(&owned, &catalog, |_, _| later, |module| module == "warden"), None, "the removal is held");
    assert_eq!(due(vec![selected("1.1.0")], meta(optional), later), None);
    let mut leaving = mandatory("1.1.0");
    leaving.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    assert_eq!(due(vec![leaving], meta(deleting), later), None);
    let unprotected = meta(|meta| meta["metadata"]["finalizers"] = json!([]));
    assert_eq!(due(Vec::new(), unprotected, later), None);
    let absent = meta(|meta| meta["spec"]["mandatory"]["version"] = json!("9.0.0"));
    assert_eq!(due(vec![mandatory("1.1.0")], absent, later), None, "without a template the installed version stays");
}
