//! Decides on each module of a Kyma: pure. Deletes owned minus selected; a failed lookup deletes nothing.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kube::ResourceExt;
use serde_json::Value;
use tidewatch_shared::{
    api::{Kyma, Manifest},
    names::{annotation, label},
};

use super::{
    build::{self, Desired, covers},
    lookup::{self, Installed, LookupError, Resolved, Sources},
    validate::WantedModule,
};
use crate::controllers::catalog::RolloutSlot;

/// The decision on one selected module.
#[derive(Debug)]
pub(super) struct Decision<'a> {
    /// Selected module.
    pub(super) module: &'a WantedModule,
    /// Result of the lookup.
    pub(super) found: Result<Resolved, LookupError>,
    /// Its Manifest in the cache.
    pub(super) manifest: Option<Arc<Manifest>>,
    /// Manifest to apply, if it differs.
    pub(super) write: Option<Desired>,
}

/// The decisions on all modules of one Kyma.
#[derive(Debug)]
pub(super) struct Decisions<'a> {
    /// Selected modules by name.
    pub(super) wanted: Vec<Decision<'a>>,
    /// Manifests of deselected modules, those being deleted included.
    pub(super) unwanted: Vec<Arc<Manifest>>,
    /// Time until the first rollout slot.
    pub(super) turn: Option<Duration>,
}

/// Decides on the modules of a Kyma; `owned` are its Manifests.
pub(super) fn decide<'a>(
    kyma: &Kyma,
    wanted: &'a [WantedModule],
    owned: &[Arc<Manifest>],
    sources: &Sources<'_>,
    registry: &str,
) -> Decisions<'a> {
    let owned: Vec<_> = owned.iter().filter(|manifest| !is_mandatory(manifest)).collect();
    let installed =
        |module: &str| owned.iter().find(|manifest| module_of(manifest) == Some(module)).map(|found| Arc::clone(found));
    let (mut decisions, mut turn) = (Vec::new(), None);
    let (mut kept, mut unresolved) = (BTreeSet::new(), BTreeSet::new());
    for module in wanted {
        let manifest = installed(&module.name);
        let is = manifest.as_deref().and_then(installed_of);
        let found = match lookup::not_yet(sources, module, is.as_ref()) {
            Some((found, its)) => {
                turn = sooner(turn, its);
                Ok(found)
            }
            None => lookup::resolve(sources, module, is.as_ref()),
        };
        let decision = match found {
            Ok(found) => {
                let desired = build::manifest(kyma, module, &found, registry);
                let manifest =
                    owned.iter().find(|manifest| manifest.name_any() == desired.name).map(|found| Arc::clone(found));
                kept.insert(desired.name.clone());
                let write = is_due(&desired, manifest.as_deref()).then_some(desired);
                Decision { module, found: Ok(found), manifest, write }
            }
            Err(error) => {
                // An excluded Kyma loses the module unless the removal guard holds that; any other error keeps the
                // installed version.
                if !matches!(error, LookupError::NotAllowed(_)) || (sources.held)(&module.name) {
                    unresolved.insert(module.name.as_str());
                }
                Decision { module, found: Err(error), manifest, write: None }
            }
        };
        decisions.push(decision);
    }
    let unwanted = |manifest: &&&Arc<Manifest>| {
        let stays = match module_of(manifest) {
            Some(module) => unresolved.contains(module),
            // Its module is unknown: it may belong to one that did not resolve.
            None => !unresolved.is_empty(),
        };
        !stays && !kept.contains(&manifest.name_any())
    };
    let unwanted = owned.iter().filter(unwanted).map(|manifest| Arc::clone(manifest)).collect();
    Decisions { wanted: decisions, unwanted, turn }
}

fn sooner(turn: Option<Duration>, its: RolloutSlot) -> Option<Duration> {
    match its {
        RolloutSlot::After(its) => Some(turn.map_or(its, |turn| turn.min(its))),
        RolloutSlot::Now | RolloutSlot::Undecided => turn,
    }
}

/// Returns true if a Manifest must be applied. One that is being deleted or unmanaged is left unchanged.
fn is_due(desired: &Desired, manifest: Option<&Manifest>) -> bool {
    let Some(manifest) = manifest else { return desired.managed };
    let unmanaged = manifest.annotations().get(annotation::UNMANAGED).is_some_and(|value| value == "true");
    if unmanaged || manifest.metadata.deletion_timestamp.is_some() {
        return false;
    }
    let is = serde_json::to_value(manifest).unwrap_or_default();
    let part = |of: &Value, pointer: &str| of.pointer(pointer).cloned().unwrap_or_default();
    let same = |pointer: &str| covers(&part(&is, pointer), &part(&desired.body, pointer));
    let owner = &desired.body["metadata"]["ownerReferences"][0];
    let owned = part(&is, "/metadata/ownerReferences")
        .as_array()
        .is_some_and(|owners| owners.iter().any(|is| covers(is, owner)));
    let whole = owned && ["/spec", "/metadata/labels", "/metadata/annotations"].into_iter().all(same);
    !whole || has_surplus(manifest, desired)
}

/// Returns true if a Manifest installs something that its template does not name, or has a channel label without
/// following a channel. A server-side apply would keep both.
pub(super) fn has_surplus(manifest: &Manifest, desired: &Desired) -> bool {
    let (spec, shall) = (serde_json::to_value(&manifest.spec).unwrap_or_default(), &desired.body["spec"]);
    ["resource", "manager", "localizedImages"].into_iter().any(|part| has_more(&spec[part], &shall[part]))
        || (manifest.labels().contains_key(label::CHANNEL) && !desired.follows_channel())
}

/// Returns true if `is` has members or elements that `shall` lacks, at any depth. Nulls and empty lists equal absence;
/// different values are the task of [`covers`].
fn has_more(is: &Value, shall: &Value) -> bool {
    match (is, shall) {
        (Value::Null, _) => false,
        (Value::Object(is), Value::Object(shall)) => {
            is.iter().any(|(key, is)| has_more(is, shall.get(key).unwrap_or(&Value::Null)))
        }
        (Value::Array(is), Value::Array(shall)) => {
            is.len() > shall.len() || is.iter().zip(shall).any(|(is, shall)| has_more(is, shall))
        }
        (Value::Array(is), Value::Null) => !is.is_empty(),
        (_, shall) => shall.is_null(),
    }
}

/// The installed version; `None` for a Manifest without version.
fn installed_of(manifest: &Manifest) -> Option<Installed> {
    let version = manifest.spec.version.clone().filter(|version| !version.is_empty())?;
    Some(Installed { channel: manifest.labels().get(label::CHANNEL).cloned().unwrap_or_default(), version })
}

fn module_of(manifest: &Manifest) -> Option<&str> {
    manifest.labels().get(label::MODULE_NAME).map(String::as_str)
}

fn is_mandatory(manifest: &Manifest) -> bool {
    manifest.labels().get(label::MANDATORY_MODULE).is_some_and(|value| value == "true")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use tidewatch_shared::api::{CustomResourcePolicy, ModuleReleaseMeta, ModuleTemplate};

    use super::*;
    use crate::controllers::kyma::validate::Follow;

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
        let release_meta = |name: &str| {
            let meta: ModuleReleaseMeta = serde_json::from_value(json!({
                "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta", "metadata": {"name": name},
                "spec": {"moduleName": name, "ocmComponentName": format!("kyma-project.io/module/{name}"),
                         "channels": [{"channel": "fast", "version": "1.0.0"}]}
            }))
            .unwrap();
            ["a", "b"].contains(&name).then(|| Arc::new(meta))
        };
        let template = |name: &str| {
            let labels =
                if name.starts_with('b') { json!({"operator.kyma-project.io/beta": "true"}) } else { json!({}) };
            Some(template(name, &labels))
        };
        let sources = Sources {
            namespace: "kcp-system",
            kyma_labels: &BTreeMap::new(),
            restricted: &BTreeSet::new(),
            release_meta: &release_meta,
            template: &template,
            held: &|_| held,
            turn: &|_, _, _| turn,
        };
        let owned: Vec<_> = owned.iter().cloned().map(Arc::new).collect();
        let decisions = decide(&kyma(), wanted, &owned, &sources, "r");
        let written = decisions.wanted.iter().filter_map(|decision| decision.write.as_ref());
        (
            written
                .map(|desired| desired.body["metadata"]["labels"][label::MODULE_NAME].as_str().unwrap().to_owned())
                .collect(),
            decisions.unwanted.iter().map(|manifest| manifest.name_any()).collect(),
            decisions.turn,
        )
    }

    /// A template with a default module CR that contains a list.
    fn template(name: &str, labels: &Value) -> Arc<ModuleTemplate> {
        let data = json!({"kind": "Sample", "spec": {"replicas": 2, "parts": [{"name": "x"}], "unset": null}});
        let template = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": name, "labels": labels}, "spec": {"descriptor": {}, "data": data}
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
            template: template("t", &json!({})),
            channel,
            meta: Arc::default(),
            version: "1.0.0".into(),
            component: format!("kyma-project.io/module/{}", module.name),
        };
        serde_json::from_value(build::manifest(&kyma(), module, &found, "r").body).unwrap()
    }

    fn named(manifest: &Manifest) -> Vec<String> {
        vec![manifest.name_any()]
    }

    #[test]
    fn missing_or_different_manifest_is_applied() {
        let (a, none) = (wanted("a", true), Vec::<String>::new());
        let is = manifest(&a);
        assert_eq!(check(std::slice::from_ref(&a), &[]), (vec!["a".into()], none.clone()));
        assert_eq!(check(std::slice::from_ref(&a), std::slice::from_ref(&is)), (none.clone(), none.clone()));
        let mut older = is.clone();
        older.spec.version = Some("0.9.0".into());
        let mut other_channel = is.clone();
        other_channel.labels_mut().insert(label::CHANNEL.into(), "regular".into());
        let mut tampered = is.clone();
        tampered.spec.install.source["ref"] = "evil".into();
        let mut foreign = is.clone();
        foreign.metadata.owner_references = None;
        let mut replaced = is.clone();
        replaced.spec.resource = Some(json!({"kind": "Evil"}));
        let mut added = is.clone();
        added.spec.localized_images = Some(vec!["evil".into()]);
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
        let (a, none) = (wanted("a", true), Vec::<String>::new());
        let is = manifest(&a);
        let with = |pointer: &str, member: &str, value: Value| {
            let mut changed = is.clone();
            changed.spec.resource.as_mut().unwrap().pointer_mut(pointer).unwrap()[member] = value;
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
        same.spec.localized_images = Some(Vec::new());
        same.labels_mut().insert("theirs".into(), "x".into());
        assert_eq!(check(std::slice::from_ref(&a), &[same]).0, none);

        let pinned = WantedModule { follows: Ok(Follow::Version("1.0.0".into())), ..a };
        assert_eq!(check(std::slice::from_ref(&pinned), std::slice::from_ref(&is)).0, ["a"], "it follows no channel");
        assert_eq!(check(std::slice::from_ref(&pinned), &[manifest(&pinned)]).0, none);
    }

    #[test]
    fn waiting_module_keeps_its_installed_version() {
        let (a, none) = (wanted("a", true), Vec::<String>::new());
        let mut older = manifest(&a);
        older.spec.version = Some("0.9.0".into());
        older.spec.install.source["ref"] = "0.9.0".into();
        let mut tampered = older.clone();
        tampered.spec.install.source["ref"] = "evil".into();
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
    fn an_unmanaged_module_is_marked_once_and_never_created() {
        let (managed, unmanaged, none) = (wanted("a", true), wanted("a", false), Vec::<String>::new());
        assert_eq!(check(std::slice::from_ref(&unmanaged), &[]).0, none);
        assert_eq!(check(std::slice::from_ref(&unmanaged), &[manifest(&managed)]).0, ["a"]);
        for module in [&unmanaged, &managed] {
            assert_eq!(check(std::slice::from_ref(module), &[manifest(&unmanaged)]).0, none, "given away for good");
        }
    }

    #[test]
    fn deselected_modules_are_deleted_and_lookup_errors_delete_nothing() {
        let (a, b, c) = (wanted("a", true), wanted("b", true), wanted("c", true));
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
        let mut mandatory = of_a;
        mandatory.labels_mut().insert(label::MANDATORY_MODULE.into(), "true".into());
        assert_eq!(check(&[], &[mandatory]).1, Vec::<String>::new());
    }
}
