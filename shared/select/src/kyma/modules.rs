//! Decides on each module of a Kyma: pure. Deletes owned minus selected; a failed lookup deletes nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use jiff::civil::Date;
use kube::ResourceExt;
use tidewatch_api::{Kyma, Manifest, facts::ManifestFacts, names::annotation};
use tidewatch_engine::{precedence, succession};

use super::{
    build::{self, Desired},
    installed::{installed_of, is_unmanaged, module_of},
    layer::{LayerLookup, ModuleLayer},
    leaving::{self, Upgrade},
    lookup::{self, LookupError, Resolved, Sources, Waiting},
    validate::{Follow, WantedModule},
    window::{self, Gate},
};
use crate::{
    catalog::{RolloutMark, RolloutSlot, retirement},
    windows::WindowState,
};

/// The decision on one selected or mandatory module.
#[derive(Debug)]
pub struct Decision<'a> {
    /// The module.
    pub module: &'a WantedModule,
    /// Result of the lookup.
    pub found: Result<Resolved, LookupError>,
    /// Its Manifest in the cache.
    pub manifest: Option<Arc<Manifest>>,
    /// Manifest to apply, if it differs.
    pub write: Option<Desired>,
    /// The component descriptor is being fetched: the module is decided on again when it is known.
    pub pending: bool,
    /// Another version that waits for a maintenance window, while the installed one stays.
    pub waiting: Option<Waiting>,
}

/// The decisions on all modules of one Kyma.
#[derive(Debug)]
pub struct Decisions<'a> {
    /// Selected or mandatory modules by name.
    pub wanted: Vec<Decision<'a>>,
    /// Manifests of deselected modules, those being deleted included.
    pub unwanted: Vec<Arc<Manifest>>,
    /// Other versions for Manifests that are being deleted.
    pub upgrades: Vec<Desired>,
    /// Such a version awaits its component descriptor.
    pub awaits_upgrade: bool,
    /// Time until the first rollout slot.
    pub turn: Option<Duration>,
    /// Maintenance window that a module waits for, never an open one.
    pub window: Option<WindowState>,
    /// Day of the decisions, UTC.
    pub today: Date,
    /// First day after it on which the state or the message of a selected module changes.
    pub next_day: Option<Date>,
}

impl Decisions<'_> {
    /// True while a component descriptor is being fetched.
    pub fn is_pending(&self) -> bool {
        self.wanted.iter().any(|decision| decision.pending)
    }

    /// True if a module waits for the registry: its component descriptor is being fetched, or cannot be read.
    pub fn awaits_registry(&self) -> bool {
        let failed = |decision: &Decision<'_>| matches!(decision.found, Err(LookupError::Descriptor(_)));
        self.awaits_upgrade || self.is_pending() || self.wanted.iter().any(failed)
    }
}

/// Decides on these modules; `owned` are the Manifests of them and of deselected ones. `layer` returns the layer of a
/// component's version.
pub fn decide<'a>(
    kyma: &Kyma,
    wanted: &'a [WantedModule],
    owned: &[Arc<Manifest>],
    sources: &Sources<'_>,
    layer: &dyn Fn(&Resolved) -> LayerLookup,
) -> Decisions<'a> {
    let mut decisions = Vec::new();
    let mut times = Times::default();
    let mut kept = Kept::default();
    for module in wanted {
        let manifest = owned.iter().find(|manifest| module_of(manifest) == Some(&module.name));
        let (found, waiting) = find(kyma, sources, module, manifest, &mut times);
        let decision = match found.and_then(|found| resolved(kyma, module, found, owned, sources, layer)) {
            Ok((decision, its)) => {
                times.turn = sooner(times.turn, its);
                kept.resolved(module, &decision);
                decision
            }
            Err(error) => {
                // Unless the removal guard holds that, an excluded Kyma loses the module; any other error keeps the
                // installed version.
                if !error.ends_installation() || (sources.held)(&module.name) {
                    kept.unresolved.insert(&module.name);
                }
                let manifest = manifest.cloned();
                Decision { module, found: Err(error), manifest, write: None, pending: false, waiting: None }
            }
        };
        decisions.push(Decision { waiting, ..decision });
    }
    let unwanted = owned.iter().filter(|manifest| !kept.keeps(manifest)).map(Arc::clone).collect();
    let mut upgrades = Vec::new();
    let mut awaits_upgrade = false;
    for manifest in owned {
        let Some(module) = leaving::followed(manifest, wanted) else { continue };
        // A version that cannot be installed, or waits, leaves the Manifest as it is, and so does an edit until its rollout
        // slot.
        let (Ok(found), _) = find(kyma, sources, &module, Some(manifest), &mut times) else { continue };
        if manifest.spec.version.as_ref() == Some(&found.version) {
            let its = (sources.edited)(&module.name, &found.version);
            times.turn = sooner(times.turn, its);
            if its != RolloutSlot::Now {
                continue;
            }
        }
        match leaving::upgrade(kyma, manifest, &module, &found, layer(&found)) {
            Upgrade::None => {}
            Upgrade::Pending => awaits_upgrade = true,
            Upgrade::Write(desired) => upgrades.push(*desired),
        }
    }
    let Times { turn, window } = times;
    let today = sources.today;
    let next_day = decisions.iter().filter_map(|decision| next_day(decision, today)).min();
    Decisions { wanted: decisions, unwanted, upgrades, awaits_upgrade, turn, window, today, next_day }
}

/// First day after today on which the notice of the module's version changes. The status of mandatory modules is not
/// shown, and the version of unmanaged ones is not known.
fn next_day(decision: &Decision<'_>, today: Date) -> Option<Date> {
    let Decision { module, found: Ok(found), manifest, write, .. } = decision else { return None };
    if !module.managed || module.follows == Ok(Follow::Mandatory) {
        return None;
    }
    let installed = manifest.as_ref().filter(|_| write.is_none()).and_then(|manifest| manifest.spec.version.as_deref());
    retirement::next_day(&found.meta, installed.unwrap_or(&found.version), today)
}

/// The times that modules wait for.
#[derive(Default)]
struct Times {
    turn: Option<Duration>,
    window: Option<WindowState>,
}

/// Resolves a module to the version that its Kyma gets now, with the one that waits for a maintenance window. A version
/// whose rollout slot has not come waits for that first.
fn find(
    kyma: &Kyma,
    sources: &Sources<'_>,
    module: &WantedModule,
    manifest: Option<&Arc<Manifest>>,
    times: &mut Times,
) -> (Result<Resolved, LookupError>, Option<Waiting>) {
    let installed = manifest.and_then(|manifest| Some((&**manifest, installed_of(manifest)?)));
    let version = installed.as_ref().map(|(_, installed)| installed);
    if let Some((found, its)) = lookup::not_yet(sources, module, version) {
        times.turn = sooner(times.turn, its);
        return (Ok(found), None);
    }
    let found = match lookup::resolve(sources, module, version) {
        Ok(found) => found,
        Err(error) => return (Err(error), None),
    };
    let installed = installed.as_ref().map(|(manifest, installed)| (*manifest, installed));
    match window::gate(kyma, sources, module, installed, found) {
        Gate::Now(found) => (Ok(found), None),
        Gate::Waits(kept, waiting) => {
            times.window = Some(WindowState::Opens(waiting.opens));
            match kept {
                Some(kept) => (Ok(kept), Some(waiting)),
                None => (Err(LookupError::Waiting(waiting)), None),
            }
        }
        Gate::Unknown(cause) => {
            times.window = Some(WindowState::Unknown(cause));
            (Err(LookupError::UnknownWindow(cause)), None)
        }
    }
}

/// Decides on a module that resolved, and returns the rollout slot of an edited template. While the component descriptor is
/// unknown, the installed version stays as it is; one that is of the resolved version is repaired from its own Manifest, as
/// is one whose template was edited, until the slot.
fn resolved<'a>(
    kyma: &Kyma,
    module: &'a WantedModule,
    found: Resolved,
    owned: &[Arc<Manifest>],
    sources: &Sources<'_>,
    layer: &dyn Fn(&Resolved) -> LayerLookup,
) -> Result<(Decision<'a>, RolloutSlot), LookupError> {
    let name = build::name_of(kyma, module, &found);
    let manifest = owned.iter().find(|manifest| manifest.name_any() == name).cloned();
    let predecessor = owned.iter().find(|manifest| module_of(manifest) == Some(&module.name)).cloned();
    let keep = |found, pending| {
        let manifest = manifest.clone().or_else(|| predecessor.clone());
        let decision = Decision { module, found: Ok(found), manifest, write: None, pending, waiting: None };
        Ok((decision, RolloutSlot::Now))
    };
    if manifest.is_none() && predecessor.is_some() && (sources.held)(&module.name) {
        return keep(found, false);
    }
    let layer = match (layer(&found), &manifest) {
        (LayerLookup::Ready(layer), _) => layer,
        (_, Some(manifest)) if manifest.spec.version.as_ref() == Some(&found.version) => {
            ModuleLayer::installed(manifest)
        }
        (LayerLookup::Pending, _) => return keep(found, true),
        // An unmanaged module needs nothing of the registry.
        (LayerLookup::Failed(_), _) if !module.managed => return keep(found, false),
        (LayerLookup::Failed(reason), _) => return Err(LookupError::Descriptor(reason)),
    };
    let mut desired = build::manifest(kyma, module, &found, &layer);
    let mut slot = RolloutSlot::Now;
    if let Some(mark) = mark(sources, module, predecessor.as_deref(), &found.version) {
        desired.body["metadata"]["annotations"][annotation::ROLLOUT] = mark.to_text().into();
    }
    if let Some(number) = number(&module.name, &name, manifest.as_deref(), owned) {
        desired.body["metadata"]["annotations"][annotation::SUCCESSION] = number.to_string().into();
    }
    if let Some(manifest) = &manifest {
        build::record_default(&mut desired, manifest);
    }
    let installed = manifest.iter().find(|manifest| manifest.spec.version.as_ref() == Some(&found.version));
    let kept = installed.map(|manifest| build::as_installed(&desired, manifest));
    if let Some(kept) = kept.filter(|kept| *kept != desired) {
        slot = (sources.edited)(&module.name, &found.version);
        if slot != RolloutSlot::Now {
            desired = kept;
        }
    }
    let write = is_due(&desired, manifest.as_deref()).then_some(desired);
    Ok((Decision { module, found: Ok(found), manifest, write, pending: false, waiting: None }, slot))
}

/// Number of the Manifest of a module, by which it is applied instead of those of other components. A new one follows all
/// of them, one that is behind another passes them, and any other keeps its number.
fn number(module: &str, name: &str, manifest: Option<&Manifest>, owned: &[Arc<Manifest>]) -> Option<u64> {
    let is_other = |other: &&Manifest| {
        other.metadata.deletion_timestamp.is_none() && module_of(other) == Some(module) && other.name_any() != name
    };
    let others: Vec<&Manifest> = owned.iter().map(Arc::as_ref).filter(is_other).collect();
    let is_newer = |other: &&Manifest| manifest.is_none_or(|manifest| precedence(other) > precedence(manifest));
    if others.iter().any(is_newer) {
        let highest = others.iter().map(|other| succession(other)).max().unwrap_or_default();
        return Some(highest.saturating_add(1));
    }
    manifest.map(succession).filter(|own| *own > 0)
}

/// Mark of the ring rollout by which a module gets a version, or got the installed one.
fn mark(
    sources: &Sources<'_>,
    module: &WantedModule,
    manifest: Option<&Manifest>,
    version: &str,
) -> Option<RolloutMark> {
    let manifest = manifest?;
    let installed = installed_of(manifest)?;
    if installed.version == version {
        return installed.mark;
    }
    let change = sources.rollouts.change(&module.name, lookup::followed_source(module, &installed)?, version)?;
    Some(RolloutMark { change, healthy: ManifestFacts::from(manifest).is_healthy() })
}

/// The Manifests that stay.
#[derive(Default)]
struct Kept<'a> {
    /// Names of the Manifests of resolved modules.
    names: BTreeSet<String>,
    /// Modules of which every Manifest stays.
    unresolved: BTreeSet<&'a str>,
    /// The Manifest of each resolved module, which may replace one of another component.
    successors: BTreeMap<&'a str, Option<Arc<Manifest>>>,
}

impl<'a> Kept<'a> {
    fn resolved(&mut self, module: &'a WantedModule, decision: &Decision<'_>) {
        let name = decision.write.as_ref().map(|desired| desired.name.clone());
        self.names.extend(name.or_else(|| decision.manifest.as_ref().map(|manifest| manifest.name_any())));
        // A Manifest that gets another layer is not applied yet.
        let layer = decision.write.as_ref().map(|desired| &desired.body["spec"]["install"]["source"]["ref"]);
        let has_layer = |manifest: &Arc<Manifest>| layer.is_none_or(|it| *it == manifest.spec.install.source["ref"]);
        self.successors.insert(&module.name, decision.manifest.clone().filter(has_layer));
    }

    fn keeps(&self, manifest: &Manifest) -> bool {
        let Some(module) = module_of(manifest) else {
            // Its module is unknown: it may belong to one that did not resolve.
            return !self.unresolved.is_empty() || self.names.contains(&manifest.name_any());
        };
        let is_replaced = |successor: &Option<Arc<Manifest>>| successor.as_ref().is_some_and(|it| it.is_synced());
        self.unresolved.contains(module)
            || self.names.contains(&manifest.name_any())
            || self.successors.get(module).is_some_and(|successor| !is_replaced(successor))
    }
}

fn sooner(turn: Option<Duration>, its: RolloutSlot) -> Option<Duration> {
    match its {
        RolloutSlot::After(its) => Some(turn.map_or(its, |turn| turn.min(its))),
        RolloutSlot::Now | RolloutSlot::Ring | RolloutSlot::Undecided => turn,
    }
}

/// Returns true if a Manifest must be applied. One that is unmanaged is left unchanged; one that is being deleted is
/// decided on apart.
fn is_due(desired: &Desired, manifest: Option<&Manifest>) -> bool {
    let Some(manifest) = manifest else { return desired.managed };
    !is_unmanaged(manifest) && manifest.metadata.deletion_timestamp.is_none() && desired.differs_from(manifest)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};
    use tidewatch_api::{CustomResourcePolicy, ModuleReleaseMeta, ModuleTemplate, names::label};

    use super::*;
    use crate::{
        catalog::{RolloutBoard, snapshot::Snapshot},
        kyma::pin::Pin,
    };

    fn kyma() -> Kyma {
        serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "namespace": "kcp-system", "uid": "u-1"}, "spec": {"channel": "fast"}
        }))
        .unwrap()
    }

    fn wanted(name: &str, managed: bool) -> WantedModule {
        WantedModule {
            name: name.into(),
            follows: Ok(Follow::Channel("fast".into())),
            managed,
            policy: CustomResourcePolicy::CreateAndDelete,
        }
    }

    /// Decides with the modules `a` and `b`, of which `b` is beta.
    fn check(wanted: &[WantedModule], owned: &[Manifest]) -> (Vec<String>, Vec<String>) {
        check_held(wanted, owned, false)
    }

    /// As `check`, with removals held.
    fn check_held(wanted: &[WantedModule], owned: &[Manifest], held: bool) -> (Vec<String>, Vec<String>) {
        let (written, unwanted, _) = check_turn(wanted, owned, held, RolloutSlot::Now);
        (written, unwanted)
    }

    /// As `check`, with a rollout slot; returns applied and deleted Manifests and the time until the slot.
    fn check_turn(
        wanted: &[WantedModule],
        owned: &[Manifest],
        held: bool,
        turn: RolloutSlot,
    ) -> (Vec<String>, Vec<String>, Option<Duration>) {
        let (written, unwanted, errors, turn) = check_layers(wanted, owned, held, turn, None);
        assert!(errors.iter().all(|error| !matches!(error, LookupError::Descriptor(_))), "{errors:?}");
        (written, unwanted, turn)
    }

    type Checked = (Vec<String>, Vec<String>, Vec<LookupError>, Option<Duration>);

    fn layer_of(version: &str) -> ModuleLayer {
        let source = json!({"repo": "r/component-descriptors", "name": "n", "ref": version, "type": "oci-dir"});
        ModuleLayer::new(&source, Vec::new())
    }

    /// Decides while no component descriptor can be read, or all can. Returns the modules of the written Manifests, the
    /// deleted Manifests and the errors.
    fn check_layers(
        wanted: &[WantedModule],
        owned: &[Manifest],
        held: bool,
        turn: RolloutSlot,
        unavailable: Option<&LayerLookup>,
    ) -> Checked {
        let release_metas = ["a", "b"].map(|name| {
            let meta: ModuleReleaseMeta = serde_json::from_value(json!({
                "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta", "metadata": {"name": name},
                "spec": {"moduleName": name, "ocmComponentName": format!("kyma-project.io/module/{name}"),
                         "channels": [{"channel": "fast", "version": "1.0.0"}]}
            }))
            .unwrap();
            Arc::new(meta)
        });
        let beta = json!({"operator.kyma-project.io/beta": "true"});
        let templates =
            [template("a", "1.0.0", &json!({})), template("a", "0.9.0", &json!({})), template("b", "1.0.0", &beta)];
        let catalog = Snapshot::new(templates, release_metas, &BTreeSet::new(), BTreeSet::new());
        let labels = BTreeMap::new();
        let rollouts = RolloutBoard::default();
        let sources =
            Sources { held: &|_| held, turn: &|_, _, _| turn, ..Sources::at_once(&catalog, &labels, &rollouts) };
        let owned: Vec<_> = owned.iter().cloned().map(Arc::new).collect();
        let decisions = decide(&kyma(), wanted, &owned, &sources, &|found| {
            unavailable.cloned().unwrap_or_else(|| LayerLookup::Ready(layer_of(&found.version)))
        });
        let errors = decisions.wanted.iter().filter_map(|decision| decision.found.as_ref().err().cloned()).collect();
        let written = decisions.wanted.iter().filter_map(|decision| decision.write.as_ref());
        (
            written
                .map(|desired| desired.body["metadata"]["labels"][label::MODULE_NAME].as_str().unwrap().to_owned())
                .collect(),
            decisions.unwanted.iter().map(|manifest| manifest.name_any()).collect(),
            errors,
            decisions.turn,
        )
    }

    /// A template with a default module CR that contains a list.
    fn template(module: &str, version: &str, labels: &Value) -> Arc<ModuleTemplate> {
        let data = json!({"kind": "Sample", "spec": {"replicas": 2, "parts": [{"name": "x"}], "unset": null}});
        let template = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": format!("{module}-{version}"), "labels": labels},
            "spec": {"moduleName": module, "version": version, "descriptor": {}, "data": data}
        });
        Arc::new(serde_json::from_value(template).unwrap())
    }

    /// The Manifest that a decision on the module writes.
    fn manifest(module: &WantedModule) -> Manifest {
        let channel = match &module.follows {
            Ok(Follow::Channel(channel)) => Some(channel.clone()),
            _ => None,
        };
        let found = Resolved {
            template: template("a", "1.0.0", &json!({})),
            channel,
            meta: Arc::default(),
            version: "1.0.0".into(),
            component: format!("kyma-project.io/module/{}", module.name),
        };
        serde_json::from_value(build::manifest(&kyma(), module, &found, &layer_of(&found.version)).body).unwrap()
    }

    fn named(manifest: &Manifest) -> Vec<String> {
        vec![manifest.name_any()]
    }

    #[test]
    fn missing_or_different_manifest_is_applied() {
        let a = wanted("a", true);
        let none = Vec::<String>::new();
        let is = manifest(&a);
        assert_eq!(check(std::slice::from_ref(&a), &[]), (vec!["a".into()], none.clone()));
        assert_eq!(check(std::slice::from_ref(&a), std::slice::from_ref(&is)), (none.clone(), none.clone()));
        let mut older = is.clone();
        older.spec.version = Some("0.9.0".into());
        let mut other_channel = is.clone();
        other_channel.labels_mut().insert(label::CHANNEL.into(), "regular".into());
        let mut tampered = is.clone();
        Arc::make_mut(&mut tampered.spec.install.source)["ref"] = "evil".into();
        let mut foreign = is.clone();
        foreign.metadata.owner_references = None;
        let mut replaced = is.clone();
        replaced.spec.resource = Some(json!({"kind": "Evil"}).into());
        let mut added = is.clone();
        added.spec.localized_images = Some(vec!["evil".to_owned()].into());
        for changed in [older, other_channel, tampered, foreign, replaced, added] {
            assert_eq!(check(std::slice::from_ref(&a), &[changed]).0, ["a"]);
        }
        let mut leaving = is;
        leaving.spec.version = Some("0.9.0".into());
        leaving.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        assert_eq!(check(&[a], &[leaving]), (none.clone(), none), "what is on its way out is waited for");
    }

    #[test]
    fn surplus_fields_are_removed() {
        let a = wanted("a", true);
        let none = Vec::<String>::new();
        let is = manifest(&a);
        let with = |pointer: &str, member: &str, value: Value| {
            let mut changed = is.clone();
            Arc::make_mut(changed.spec.resource.as_mut().unwrap()).pointer_mut(pointer).unwrap()[member] = value;
            changed
        };
        for changed in [
            with("", "data", json!({"evil": true})),
            with("/spec", "logging", json!({"level": "debug"})),
            with("/spec/parts/0", "evil", json!(true)),
            with("/metadata", "annotations", json!({"evil": "true"})),
            with("/spec", "unset", json!(true)),
        ] {
            assert_eq!(check(std::slice::from_ref(&a), std::slice::from_ref(&changed)).0, ["a"], "{changed:?}");
        }
        // Nulls equal absence; metadata of other writers stays.
        let mut same = with("/spec", "logging", Value::Null);
        same.spec.localized_images = Some(Vec::new().into());
        same.labels_mut().insert("theirs".into(), "x".into());
        assert_eq!(check(std::slice::from_ref(&a), &[same]).0, none);

        let pinned = WantedModule { follows: Ok(Follow::Pin(Pin::at("1.0.0"))), ..a };
        assert_eq!(check(std::slice::from_ref(&pinned), std::slice::from_ref(&is)).0, ["a"], "it follows no channel");
        assert_eq!(check(std::slice::from_ref(&pinned), &[manifest(&pinned)]).0, none);
    }

    #[test]
    fn waiting_module_keeps_its_installed_version() {
        let a = wanted("a", true);
        let none = Vec::<String>::new();
        let mut older = manifest(&a);
        older.spec.version = Some("0.9.0".into());
        Arc::make_mut(&mut older.spec.install.source)["ref"] = "0.9.0".into();
        let mut tampered = older.clone();
        Arc::make_mut(&mut tampered.spec.install.source)["ref"] = "evil".into();
        let check = |module: &WantedModule, owned: &Manifest, turn| {
            check_turn(std::slice::from_ref(module), std::slice::from_ref(owned), false, turn)
        };
        let rest = Duration::from_secs(9);
        let waits = Some(rest);
        assert_eq!(check(&a, &older, RolloutSlot::After(rest)), (none.clone(), none.clone(), waits));
        assert_eq!(
            check(&a, &tampered, RolloutSlot::After(rest)),
            (vec!["a".into()], none.clone(), waits),
            "repaired all the same"
        );
        assert_eq!(
            check(&a, &older, RolloutSlot::Ring),
            (none.clone(), none.clone(), None),
            "the begin of its ring enqueues it"
        );
        assert_eq!(
            check(&a, &older, RolloutSlot::Undecided),
            (none.clone(), none.clone(), None),
            "whoever decides wakes it"
        );
        assert_eq!(check(&a, &older, RolloutSlot::Now), (vec!["a".into()], none.clone(), None));
        let elsewhere = WantedModule { follows: Ok(Follow::Channel("regular".into())), ..a.clone() };
        assert_eq!(check(&elsewhere, &older, RolloutSlot::After(rest)).2, None, "the user has changed what it follows");
        let first = check_turn(std::slice::from_ref(&a), &[], false, RolloutSlot::After(rest));
        assert_eq!(first, (vec!["a".into()], none, None), "what is new has no version to stay at");
        assert_eq!(sooner(sooner(None, RolloutSlot::After(rest * 2)), RolloutSlot::After(rest)), waits);
    }

    #[test]
    fn upgrade_by_a_ring_rollout_records_it_and_the_state_before() {
        let rollout = |progress: Value| {
            serde_json::from_value(json!({
                "module": "a", "channel": "fast", "version": "1.0.0", "moved": 7, "change": "c2", "progress": progress
            }))
            .unwrap()
        };
        let kyma = kyma();
        let a = wanted("a", true);
        let catalog = Snapshot::new([template("a", "1.0.0", &json!({}))], [], &BTreeSet::new(), BTreeSet::new());
        let marked = |owned: &Manifest, progress: Value, version: &str| {
            let labels = BTreeMap::new();
            let rollouts = RolloutBoard::with(rollout(progress));
            let sources = Sources::at_once(&catalog, &labels, &rollouts);
            mark(&sources, &a, Some(owned), version)
        };
        let in_progress = || json!({"since": 7});
        let mut older = manifest(&a);
        older.spec.version = Some("0.9.0".into());
        let of = |healthy| Some(RolloutMark { change: "c2".to_owned(), healthy });
        assert_eq!(marked(&older, in_progress(), "1.0.0"), of(false), "it has no state");
        older.status = serde_json::from_value(json!({"state": "Warning"})).unwrap();
        assert_eq!(marked(&older, in_progress(), "1.0.0"), of(true));
        assert_eq!(marked(&older, Value::Null, "1.0.0"), None, "the rollout has ended");
        assert_eq!(marked(&older, in_progress(), "1.1.0"), None, "another version");
        let mut elsewhere = older.clone();
        elsewhere.labels_mut().insert(label::CHANNEL.into(), "regular".into());
        assert_eq!(marked(&elsewhere, in_progress(), "1.0.0"), None, "the user changed the channel");
        let mut upgraded = manifest(&a);
        upgraded.annotations_mut().insert(annotation::ROLLOUT.into(), of(true).unwrap().to_text());
        assert_eq!(marked(&upgraded, Value::Null, "1.0.0"), of(true), "the mark stays");
        assert_eq!(mark_of(&kyma, &a, &upgraded), of(true), "also in the Manifest that is written");
    }

    /// Mark in the Manifest that a decision writes because another field differs.
    fn mark_of(kyma: &Kyma, module: &WantedModule, owned: &Manifest) -> Option<RolloutMark> {
        let mut owned = owned.clone();
        Arc::make_mut(&mut owned.spec.install.source)["ref"] = "evil".into();
        let labels = BTreeMap::new();
        let rollouts = RolloutBoard::default();
        let meta = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta", "metadata": {"name": "a"},
            "spec": {"moduleName": "a", "ocmComponentName": "kyma-project.io/module/a",
                "channels": [{"channel": "fast", "version": "1.0.0"}]}
        });
        let metas = [Arc::new(serde_json::from_value::<ModuleReleaseMeta>(meta).unwrap())];
        let templates = [template("a", "1.0.0", &json!({}))];
        let catalog = Snapshot::new(templates, metas, &BTreeSet::new(), BTreeSet::new());
        let sources = Sources::at_once(&catalog, &labels, &rollouts);
        let layer = |found: &Resolved| LayerLookup::Ready(layer_of(&found.version));
        let decisions = decide(kyma, std::slice::from_ref(module), &[Arc::new(owned)], &sources, &layer);
        let body = &decisions.wanted[0].write.as_ref().unwrap().body;
        RolloutMark::parse(&serde_json::from_value(body["metadata"]["annotations"].clone()).unwrap())
    }

    #[test]
    fn an_unmanaged_module_is_marked_once_and_never_created() {
        let managed = wanted("a", true);
        let unmanaged = wanted("a", false);
        let none = Vec::<String>::new();
        assert_eq!(check(std::slice::from_ref(&unmanaged), &[]).0, none);
        assert_eq!(check(std::slice::from_ref(&unmanaged), &[manifest(&managed)]).0, ["a"]);
        for module in [&unmanaged, &managed] {
            assert_eq!(check(std::slice::from_ref(module), &[manifest(&unmanaged)]).0, none, "given away for good");
        }
    }

    #[test]
    fn deselected_modules_are_deleted_and_lookup_errors_delete_nothing() {
        let a = wanted("a", true);
        let b = wanted("b", true);
        let c = wanted("c", true);
        let of_a = manifest(&a);
        assert_eq!(check(&[], std::slice::from_ref(&of_a)).1, named(&of_a));
        let of_b = manifest(&b);
        assert_eq!(
            check(std::slice::from_ref(&b), std::slice::from_ref(&of_b)).1,
            named(&of_b),
            "not allowed any more"
        );
        let held = check_held(std::slice::from_ref(&b), std::slice::from_ref(&of_b), true);
        assert_eq!(held.1, Vec::<String>::new(), "not allowed to too many at once");
        let of_c = manifest(&c);
        assert_eq!(
            check(std::slice::from_ref(&c), std::slice::from_ref(&of_c)).1,
            Vec::<String>::new(),
            "no release meta"
        );
        let mut nameless = of_a.clone();
        nameless.labels_mut().remove(label::MODULE_NAME);
        assert_eq!(check(&[c], std::slice::from_ref(&nameless)).1, Vec::<String>::new(), "it may be that of c");
    }

    #[test]
    fn module_waits_for_its_component_descriptor() {
        let a = wanted("a", true);
        let none = Vec::<String>::new();
        let is = manifest(&a);
        let mut older = is.clone();
        older.spec.version = Some("0.9.0".into());
        let mut relabelled = is.clone();
        relabelled.labels_mut().insert(label::MANAGED_BY.into(), "another".into());
        let check = |owned: &[Manifest], layer: &LayerLookup| {
            let (written, unwanted, errors, _) =
                check_layers(std::slice::from_ref(&a), owned, false, RolloutSlot::Now, Some(layer));
            (written, unwanted, errors)
        };
        let failed = LayerLookup::Failed("the registry refuses the connection".into());
        let error = vec![LookupError::Descriptor("the registry refuses the connection".into())];
        for owned in [vec![], vec![older]] {
            assert_eq!(check(&owned, &LayerLookup::Pending), (none.clone(), none.clone(), vec![]));
            assert_eq!(check(&owned, &failed), (none.clone(), none.clone(), error.clone()));
        }
        for layer in [LayerLookup::Pending, failed] {
            let installed = check(std::slice::from_ref(&is), &layer);
            assert_eq!(installed, (none.clone(), none.clone(), vec![]), "an installed version needs no registry");
            let repaired = check(std::slice::from_ref(&relabelled), &layer);
            assert_eq!(repaired, (vec!["a".into()], none.clone(), vec![]));
            assert_eq!(
                check_layers(&[], std::slice::from_ref(&is), false, RolloutSlot::Now, Some(&layer)).1,
                named(&is),
                "a removal needs no registry"
            );
        }
    }

    #[test]
    fn manifest_of_another_component_stays_until_the_new_one_is_applied() {
        let a = wanted("a", true);
        let none = Vec::<String>::new();
        let new = manifest(&a);
        let mut old = new.clone();
        old.metadata.name = Some("k-other-1".into());
        let check = |owned: &[Manifest]| check(std::slice::from_ref(&a), owned);
        assert_eq!(
            check(std::slice::from_ref(&old)),
            (vec!["a".into()], none.clone()),
            "the successor is created first"
        );
        let applied = |layer: Option<&str>| {
            let mut successor = new.clone();
            successor.annotations_mut().extend(layer.map(|layer| (annotation::SYNC_OCI_REF.into(), layer.into())));
            successor
        };
        for layer in [None, Some("0.9.0")] {
            assert_eq!(check(&[old.clone(), applied(layer)]), (none.clone(), none.clone()), "{layer:?}");
        }
        let successor = applied(Some("1.0.0"));
        assert_eq!(check(&[old.clone(), successor.clone()]), (none.clone(), named(&old)));
        assert_eq!(
            check_held(std::slice::from_ref(&a), std::slice::from_ref(&old), true),
            (none.clone(), none),
            "held"
        );
        let deselected = super::tests::check(&[], &[old.clone(), successor.clone()]);
        assert_eq!(deselected.1, [named(&old), named(&successor)].concat());
    }

    /// Number in the Manifest of the module `a` that a decision writes, `None` without a write; and the deleted Manifests.
    fn numbered(owned: &[&Manifest]) -> (Option<Value>, Vec<String>) {
        let a = [wanted("a", true)];
        let kyma = kyma();
        let meta = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta", "metadata": {"name": "a"},
            "spec": {"moduleName": "a", "ocmComponentName": "kyma-project.io/module/a",
                "channels": [{"channel": "fast", "version": "1.0.0"}]}
        });
        let metas = [Arc::new(serde_json::from_value::<ModuleReleaseMeta>(meta).unwrap())];
        let templates = [template("a", "1.0.0", &json!({})), template("a", "0.9.0", &json!({}))];
        let catalog = Snapshot::new(templates, metas, &BTreeSet::new(), BTreeSet::new());
        let labels = BTreeMap::new();
        let rollouts = RolloutBoard::default();
        let sources = Sources::at_once(&catalog, &labels, &rollouts);
        let layer = |found: &Resolved| LayerLookup::Ready(layer_of(&found.version));
        let owned: Vec<_> = owned.iter().map(|manifest| Arc::new((*manifest).clone())).collect();
        let decisions = decide(&kyma, &a, &owned, &sources, &layer);
        let number = |desired: &Desired| desired.body["metadata"]["annotations"][annotation::SUCCESSION].clone();
        let unwanted = decisions.unwanted.iter().map(|manifest| manifest.name_any()).collect();
        (decisions.wanted[0].write.as_ref().map(number), unwanted)
    }

    /// The Manifests of the wanted component and of another one, created at these seconds.
    fn components(wanted_at: u8, other_at: u8) -> (Manifest, Manifest) {
        let created = |name: Option<&str>, uid: &str, second: u8| {
            let mut manifest = manifest(&wanted("a", true));
            manifest.metadata.name = name.map(str::to_owned).or(manifest.metadata.name);
            manifest.metadata.uid = Some(uid.to_owned());
            let time = json!(format!("2026-01-01T12:00:{second:02}Z"));
            manifest.metadata.creation_timestamp = Some(serde_json::from_value(time).unwrap());
            manifest
        };
        (created(None, "a", wanted_at), created(Some("k-other-1"), "b", other_at))
    }

    fn set_number(manifest: &mut Manifest, number: &str) {
        manifest.annotations_mut().insert(annotation::SUCCESSION.into(), number.into());
    }

    fn set_applied(manifest: &mut Manifest, layer: &str) {
        manifest.annotations_mut().insert(annotation::SYNC_OCI_REF.into(), layer.into());
    }

    #[test]
    fn manifest_of_a_component_that_is_wanted_again_passes_the_newer_one() {
        let (mut is, other) = components(1, 2);
        is.spec.version = Some("0.9.0".into());
        Arc::make_mut(&mut is.spec.install.source)["ref"] = "0.9.0".into();
        set_applied(&mut is, "0.8.0");
        let first = Some(json!("1"));
        let none = Vec::<String>::new();
        assert_eq!(numbered(&[&is, &other]), (first.clone(), none.clone()), "the other one stays until it is applied");
        let (mut is, other) = components(1, 2);
        assert_eq!(numbered(&[&is, &other]), (first, none.clone()), "the number alone is written");
        set_number(&mut is, "1");
        assert_eq!(numbered(&[&is, &other]), (None, none.clone()), "once");
        set_applied(&mut is, "1.0.0");
        assert_eq!(numbered(&[&is, &other]), (None, named(&other)));
        assert_eq!(numbered(&[&is]), (None, none.clone()), "without the other one it keeps its number");

        let (mut is, other) = components(1, 2);
        is.spec.version = Some("0.9.0".into());
        Arc::make_mut(&mut is.spec.install.source)["ref"] = "0.9.0".into();
        set_applied(&mut is, "0.9.0");
        assert_eq!(numbered(&[&is, &other]), (Some(json!("1")), none), "it is applied, but not with its next layer");
    }

    #[test]
    fn number_is_written_only_to_a_new_manifest_or_one_that_is_behind() {
        let write = |is: &Manifest, other: &Manifest| numbered(&[is, other]).0;
        let number = |number: &str| Some(json!(number));
        let (is, mut other) = components(2, 1);
        assert_eq!(write(&is, &other), None, "it is the newer one");
        assert_eq!(numbered(&[]).0, Some(Value::Null), "a new one without others has none");
        assert_eq!(numbered(&[&other]).0, number("1"), "a new one follows the others");
        set_number(&mut other, "7");
        assert_eq!(numbered(&[&other]).0, number("8"));
        assert_eq!(write(&is, &other), number("8"));
        for (own, written) in [("7", None), ("8", None), ("6", number("8")), ("seven", number("8"))] {
            let mut is = is.clone();
            set_number(&mut is, own);
            assert_eq!(write(&is, &other), written, "{own}");
        }
        other.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T12:00:03Z")).unwrap());
        assert_eq!(write(&is, &other), None, "one that is being deleted does not count");
        let (is, other) = components(1, 1);
        assert_eq!(write(&is, &other), number("1"), "created in the same second");
    }
}
