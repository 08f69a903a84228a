//! Objects that several modules of one cluster contain. Pure, but for `join`.
//!
//! The first Manifest that writes an object becomes its owner, which the owned-by annotation names. While the owner stays and
//! its inventory has the object, its values apply: the other modules add the fields that it lacks, under field managers of
//! their own, and never overrule it. An owner that leaves hands the object over.

mod join;

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use kube::{ResourceExt as _, api::DynamicObject};
use tidewatch_api::{
    Manifest, Resource,
    key::ManifestKey,
    names::{annotation, field_manager, label},
};

use super::{
    inventory::{ObjectKey, owner_of},
    module::{goal_of, module_of, precedence},
    step::Goal,
};

/// Characters of a module's name in a field manager, which has at most 128. Names of modules are labels, and shorter.
const MAX_MODULE_CHARS: usize = 63;

/// Another Manifest of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) key: ManifestKey,
    /// Value of the owned-by annotation on its objects.
    pub(super) owner: String,
    /// Name of its module, for messages.
    pub(super) module: String,
    /// It installs the same module: the component of the module was renamed.
    is_of_module: bool,
    /// It is being deleted, or released.
    is_leaving: bool,
}

/// Right of a Manifest to write an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim<'a> {
    /// It is the owner, or becomes it.
    Own,
    /// Another module is the owner.
    Join(&'a Holder),
    /// The Manifest that replaces this one is the owner.
    Yield,
}

/// Way in which an object leaves a Manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parting<'a> {
    /// No other Manifest needs it.
    Delete,
    /// This Manifest needs it, and becomes the owner.
    HandOver(&'a Holder),
    /// It is not ours: what we added to it goes.
    Withdraw,
}

/// Other Manifests of a cluster, and which objects of one Manifest their inventories have.
#[derive(Clone, Debug, Default)]
pub(super) struct Sharing {
    /// Value of the owned-by annotation on the objects of the Manifest.
    owner: String,
    namespace: String,
    module: String,
    /// The Manifest is being deleted, or released.
    is_leaving: bool,
    /// The last one of the same module comes first.
    holders: Vec<Holder>,
    /// Positions of the holders of an object.
    by_object: BTreeMap<ObjectKey, Vec<usize>>,
}

impl Sharing {
    /// Looks for `objects` of a Manifest in the inventories of the `others` of its cluster.
    pub(super) fn of<'a>(
        manifest: &Manifest,
        others: &[Arc<Manifest>],
        objects: impl IntoIterator<Item = &'a ObjectKey>,
    ) -> Self {
        let objects: HashSet<_> = objects.into_iter().map(identity_of_key).collect();
        let module = module_of(manifest);
        let mut others: Vec<_> = others.iter().collect();
        let is_of_module = |other: &Manifest| module.is_some() && module_of(other) == module;
        others.sort_by(|a, b| {
            let by_module = is_of_module(b).cmp(&is_of_module(a));
            by_module.then_with(|| precedence(b).cmp(&precedence(a)))
        });
        let mut by_object: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (at, other) in others.iter().enumerate() {
            let synced = other.status.as_ref().map(|status| status.synced()).unwrap_or_default();
            for object in synced.iter().filter(|object| objects.contains(&identity(object))) {
                let holders = by_object.entry(ObjectKey::recorded(object)).or_default();
                // An inventory may list an object in several API versions.
                if !holders.contains(&at) {
                    holders.push(at);
                }
            }
        }
        let holder = |other: &&Arc<Manifest>| Holder {
            key: ManifestKey::of(&***other),
            owner: owner_of(other),
            module: module_name(other),
            is_of_module: is_of_module(other),
            is_leaving: is_leaving(other),
        };
        Self {
            owner: owner_of(manifest),
            namespace: manifest.namespace().unwrap_or_default(),
            module: module_name(manifest),
            is_leaving: is_leaving(manifest),
            holders: others.iter().map(holder).collect(),
            by_object,
        }
    }

    /// Returns true if the inventory of another Manifest that stays has the object.
    pub(super) fn is_shared(&self, key: &ObjectKey) -> bool {
        self.holders_that_stay(key).next().is_some()
    }

    /// Returns true if another Manifest may be the owner of the object.
    pub(super) fn may_be_owned(&self, key: &ObjectKey) -> bool {
        self.by_object.contains_key(key)
    }

    /// Decides who may write an object, which exists as `live`. A Manifest that stays takes it from one that leaves; of several
    /// that leave, and are kept as rendered until they can, the owner writes it.
    pub(super) fn claim(&self, key: &ObjectKey, live: &DynamicObject) -> Claim<'_> {
        let Some(owner) = self.owner_of(live) else { return Claim::Own };
        let may_own = |holder: &&Holder| holder.owner == owner && (self.is_leaving || !holder.is_leaving);
        match self.holders_of(key).find(may_own) {
            None => Claim::Own,
            // The Manifest that replaces this one adds under the same field manager.
            Some(holder) if !holder.is_of_module && self.is_leaving && self.has_successor(key) => Claim::Yield,
            Some(holder) if !holder.is_of_module => Claim::Join(holder),
            // Only the newest one of a module is applied, unless its removal is blocked.
            Some(_) if self.is_leaving => Claim::Yield,
            Some(_) => Claim::Own,
        }
    }

    /// Decides how an object leaves, which exists as `live`.
    pub(super) fn parting(&self, key: &ObjectKey, live: &DynamicObject) -> Parting<'_> {
        if live.annotations().get(annotation::OWNED_BY) != Some(&self.owner) {
            return Parting::Withdraw;
        }
        self.heir(key).map_or(Parting::Delete, Parting::HandOver)
    }

    /// The Manifest that gets an object when this one leaves: that of the same module, if its inventory has the object.
    pub(super) fn heir(&self, key: &ObjectKey) -> Option<&Holder> {
        self.holders_that_stay(key).next()
    }

    /// Returns true if the Manifest that replaces this one has an object in its inventory.
    pub(super) fn has_successor(&self, key: &ObjectKey) -> bool {
        self.holders_that_stay(key).any(|holder| holder.is_of_module)
    }

    /// Field manager of what the module adds to objects of others.
    pub(super) fn manager(&self) -> String {
        let module: String = self.module.chars().take(MAX_MODULE_CHARS).collect();
        format!("{}{module}", field_manager::SHARED)
    }

    fn holders_of(&self, key: &ObjectKey) -> impl Iterator<Item = &Holder> {
        let at = self.by_object.get(key).into_iter().flatten();
        at.filter_map(|at| self.holders.get(*at))
    }

    fn holders_that_stay(&self, key: &ObjectKey) -> impl Iterator<Item = &Holder> {
        self.holders_of(key).filter(|holder| !holder.is_leaving)
    }

    /// Owner of a live object; by its label if somebody has removed the annotation.
    fn owner_of(&self, live: &DynamicObject) -> Option<String> {
        let annotated = live.annotations().get(annotation::OWNED_BY).cloned();
        let is_of_kyma = live.labels().get(label::MANAGED_BY).is_some_and(|by| by == label::MANAGED_BY_SKR);
        let manifest = live.labels().get(label::COMPONENT).filter(|_| is_of_kyma);
        annotated.or_else(|| manifest.map(|manifest| format!("{}/{manifest}", self.namespace)))
    }
}

/// Returns true for a field manager of ours, whose fields a module that shares an object never takes over.
pub(super) fn is_our_manager(manager: &str) -> bool {
    let fixed = [
        field_manager::MODULE,
        field_manager::LIFECYCLE,
        field_manager::LIFECYCLE_OPERATOR,
        field_manager::SYNC_CONTEXT,
        field_manager::TIDEWATCH,
    ];
    manager.starts_with(field_manager::SHARED) || fixed.contains(&manager)
}

/// True for a Manifest that is being deleted, or whose module becomes unmanaged.
fn is_leaving(manifest: &Manifest) -> bool {
    goal_of(manifest) != Goal::Install
}

fn module_name(manifest: &Manifest) -> String {
    module_of(manifest).map_or_else(|| manifest.name_any(), str::to_owned)
}

/// Group, kind, namespace and name.
type Identity<'a> = (&'a str, &'a str, &'a str, &'a str);

fn identity(object: &Resource) -> Identity<'_> {
    (&object.group, &object.kind, &object.namespace, &object.name)
}

fn identity_of_key(key: &ObjectKey) -> Identity<'_> {
    (&key.group, &key.kind, &key.namespace, &key.name)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn manifest(name: &str, module: &str, objects: &[&str], change: impl FnOnce(&mut Value)) -> Arc<Manifest> {
        let synced: Vec<_> = objects
            .iter()
            .map(|name| json!({"group": "", "version": "v1", "kind": "ConfigMap", "namespace": "ns", "name": name}))
            .collect();
        let mut manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": name, "namespace": "kcp", "labels": {label::MODULE_NAME: module}},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}, "status": {"state": "Ready", "synced": synced}});
        change(&mut manifest);
        Arc::new(serde_json::from_value(manifest).unwrap())
    }

    fn key(name: &str) -> ObjectKey {
        ObjectKey::of(&json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "ns"}}))
    }

    fn live(owner: &str) -> DynamicObject {
        let metadata = json!({"name": "x", "annotations": {annotation::OWNED_BY: owner}});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    fn deleted(manifest: &mut Value) {
        manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    }

    fn unmanaged(manifest: &mut Value) {
        manifest["metadata"]["annotations"] = json!({annotation::UNMANAGED: "true"});
    }

    /// Claim and parting of the Manifest `b` on the object `x`, by the name of the other Manifest.
    fn decide(own: &Arc<Manifest>, others: &[Arc<Manifest>], live: &DynamicObject) -> (String, String) {
        let sharing = Sharing::of(own, others, [&key("x")]);
        let claim = match sharing.claim(&key("x"), live) {
            Claim::Own => "own".to_owned(),
            Claim::Join(holder) => format!("join {}", holder.key.name),
            Claim::Yield => "yield".to_owned(),
        };
        let parting = match sharing.parting(&key("x"), live) {
            Parting::Delete => "delete".to_owned(),
            Parting::HandOver(holder) => format!("hand over to {}", holder.key.name),
            Parting::Withdraw => "withdraw".to_owned(),
        };
        (claim, parting)
    }

    fn words(claim: &str, parting: &str) -> (String, String) {
        (claim.to_owned(), parting.to_owned())
    }

    #[test]
    fn owner_that_stays_and_has_the_object_is_never_overruled() {
        let own = manifest("b", "beta", &["x"], |_| ());
        let of = |objects: &[&str], change: fn(&mut Value), owner: &str| {
            decide(&own, &[manifest("a", "alpha", objects, change)], &live(owner))
        };
        assert_eq!(of(&["x"], |_| (), "kcp/a"), words("join a", "withdraw"));
        assert_eq!(of(&["x"], |_| (), "kcp/b"), words("own", "hand over to a"));
        // It does not list the object, leaves, or is another one.
        for (objects, change, owner) in [
            (&["y"][..], (|_| ()) as fn(&mut Value), "kcp/a"),
            (&["x"], deleted, "kcp/a"),
            (&["x"], unmanaged, "kcp/a"),
            (&["x"], |_| (), "kcp/gone"),
        ] {
            assert_eq!(of(objects, change, owner), words("own", "withdraw"), "{owner}");
        }
        assert_eq!(of(&["y"], |_| (), "kcp/b"), words("own", "delete"));
        assert_eq!(of(&["x"], deleted, "kcp/b"), words("own", "delete"));
        assert_eq!(decide(&own, &[], &live("kcp/b")), words("own", "delete"));
    }

    /// User CRs block the removal of both, so both are kept as rendered.
    #[test]
    fn of_two_manifests_that_leave_the_owner_alone_writes() {
        let own = manifest("b", "beta", &["x"], deleted);
        for (module, claim) in [("alpha", "join a"), ("beta", "yield")] {
            let others = [manifest("a", module, &["x"], deleted)];
            assert_eq!(decide(&own, &others, &live("kcp/a")), words(claim, "withdraw"));
            assert_eq!(decide(&own, &others, &live("kcp/b")), words("own", "delete"));
            let sharing = Sharing::of(&own, &others, [&key("x")]);
            assert!(
                !sharing.is_shared(&key("x")) && sharing.may_be_owned(&key("x")),
                "it is read before it is written"
            );
        }
    }

    #[test]
    fn owner_is_known_by_its_label_without_the_annotation() {
        let own = manifest("b", "beta", &["x"], |_| ());
        let others = [manifest("a", "alpha", &["x"], |_| ())];
        let labelled = |labels: Value| serde_json::from_value(json!({"metadata": {"labels": labels}})).unwrap();
        let of_kyma = labelled(json!({label::MANAGED_BY: "kyma", label::COMPONENT: "a"}));
        assert_eq!(decide(&own, &others, &of_kyma), words("join a", "withdraw"));
        let foreign = labelled(json!({label::COMPONENT: "a"}));
        assert_eq!(decide(&own, &others, &foreign), words("own", "withdraw"));
    }

    #[test]
    fn manifest_takes_the_objects_of_an_older_one_of_its_module_over() {
        let numbered = |number: &'static str| {
            move |manifest: &mut Value| manifest["metadata"]["annotations"] = json!({annotation::SUCCESSION: number})
        };
        let older = manifest("older", "beta", &["x"], |_| ());
        let own = manifest("b", "beta", &["x"], numbered("1"));
        assert_eq!(decide(&own, std::slice::from_ref(&older), &live("kcp/older")), words("own", "withdraw"));
        let leaving = manifest("old", "beta", &["x"], deleted);
        assert_eq!(decide(&leaving, std::slice::from_ref(&own), &live("kcp/b")), words("yield", "withdraw"));
        assert_eq!(decide(&leaving, std::slice::from_ref(&own), &live("kcp/old")), words("own", "hand over to b"));
        // The newest one of the same module is the heir, before other modules.
        let others = [
            manifest("a", "alpha", &["x"], numbered("9")),
            older,
            own.clone(),
            manifest("empty", "beta", &[], numbered("9")),
        ];
        let (_, parting) = decide(&leaving, &others, &live("kcp/old"));
        assert_eq!(parting, "hand over to b");
        let sharing = Sharing::of(&leaving, &others, [&key("x"), &key("y")]);
        assert!(sharing.has_successor(&key("x")) && sharing.is_shared(&key("x")));
        assert!(!sharing.has_successor(&key("y")) && !sharing.is_shared(&key("y")));
        let sharing = Sharing::of(&own, &[manifest("a", "alpha", &["x"], |_| ())], [&key("x")]);
        assert!(sharing.is_shared(&key("x")) && !sharing.has_successor(&key("x")));
    }

    #[test]
    fn field_manager_is_that_of_the_module_and_bounded() {
        let of = |module: &str| Sharing::of(&manifest("m", module, &[], |_| ()), &[], []).manager();
        assert_eq!(of("beta"), "operator.kyma-project.io/tidewatch-shared/beta");
        assert!(of(&"x".repeat(1_000)).len() <= 128);
        assert!(is_our_manager(&of("beta")) && is_our_manager(field_manager::MODULE) && !is_our_manager("kubectl"));
    }
}
