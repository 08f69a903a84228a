//! Difference between the desired catalog and a runtime's observed objects, or its inventory. Pure.

use std::{collections::BTreeSet, sync::Arc};

use kube::core::DynamicObject;
use tidewatch_api::names::{GROUP, SKR_NAMESPACE, field_manager};
use tidewatch_contract::event::{Change, Object};
use tidewatch_kit::foreign_text::identifier;
use tidewatch_select::catalog::desired::{ContentHash, DesiredCatalog, DesiredObject, Kind, ObjectId};

use super::inventory::{Inventory, InventoryEntry};

/// An object to apply.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Apply {
    /// Desired state.
    pub desired: Arc<DesiredObject>,
    /// The runtime has the object, in whatever form.
    pub present: bool,
}

/// An object to delete. The uid is a precondition, so that an object recreated under the same name survives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Delete {
    /// Object to delete.
    pub id: ObjectId,
    /// UID that the object must have.
    pub uid: Box<str>,
}

/// Writes and deletions of one sync.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Steps {
    /// Objects to apply.
    pub applies: Vec<Apply>,
    /// Objects to delete.
    pub deletes: Vec<Delete>,
}

/// Action that brings one object of a runtime to its desired state.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    /// None: the object matches its desired state, or its removal is held, so that it stays as it is.
    UpToDate(InventoryEntry),
    /// Apply: the object is desired, and missing or different.
    Apply(Apply),
    /// Delete: the object is managed and not desired.
    Delete(Delete),
    /// None: the object is not managed, or is terminating already.
    Ignore,
}

/// Decides on one object that was read; `observed` is `None` if it does not exist. An object is managed if it has the
/// field manager of catalog sync, or if the inventory has an entry with its uid.
pub(super) fn action_for(
    id: &ObjectId,
    catalog: &DesiredCatalog,
    observed: Option<&DynamicObject>,
    entry: Option<&InventoryEntry>,
) -> Action {
    let apply = |desired, present| Action::Apply(Apply { desired: Arc::clone(desired), present });
    let Some(object) = observed else {
        return catalog.get(id).map_or(Action::Ignore, |desired| apply(desired, false));
    };
    let uid = identifier(object.metadata.uid.as_deref());
    let recorded = entry.filter(|entry| *entry.uid == *uid && !uid.is_empty());
    let is_owned = object.metadata.deletion_timestamp.is_none() && (is_managed(object) || recorded.is_some());
    let desired = catalog.get(id);
    let is_up_to_date = desired.is_some_and(|desired| desired.is_up_to_date(object));
    if catalog.is_held(id) && !is_up_to_date {
        if !is_owned {
            return Action::Ignore;
        }
        // An edit during the hold makes the hash unknown, so the object is written again once the removal is decided.
        let version = object.metadata.resource_version.as_deref();
        let unedited = recorded.filter(|entry| Some(&*entry.resource_version) == version);
        let hash = unedited.map_or(ContentHash::UNKNOWN, |entry| entry.hash);
        return Action::UpToDate(InventoryEntry::new(hash, object));
    }
    match desired {
        Some(desired) if is_up_to_date => Action::UpToDate(InventoryEntry::new(desired.hash, object)),
        Some(desired) => apply(desired, true),
        None if is_owned => Action::Delete(Delete { id: id.clone(), uid: uid.into() }),
        None => Action::Ignore,
    }
}

/// Entry of a managed object that differs from its desired state, so that the inventory keeps it until it is repaired.
pub(super) fn owned_entry(object: &DynamicObject, entry: Option<&InventoryEntry>) -> Option<InventoryEntry> {
    let now = InventoryEntry::new(ContentHash::UNKNOWN, object);
    (is_managed(object) || entry.is_some_and(|entry| entry.uid == now.uid)).then_some(now)
}

/// Computes the steps from the inventory alone, without any read.
pub(super) fn diff_inventory(catalog: &DesiredCatalog, inventory: &Inventory) -> Steps {
    let changed = catalog.objects().filter_map(|desired| match inventory.entries.get(&desired.id) {
        Some(entry) if entry.hash == desired.hash || catalog.is_held(&desired.id) => None,
        entry => Some(Apply { desired: Arc::clone(desired), present: entry.is_some() }),
    });
    let gone = inventory.entries.iter().filter(|(id, _)| catalog.get(id).is_none() && !catalog.is_held(id));
    let gone = gone.map(|(id, entry)| Delete { id: id.clone(), uid: entry.uid.clone() });
    Steps { applies: changed.collect(), deletes: gone.collect() }
}

/// Selects the held objects of which the inventory does not tell whether the runtime has them. Those that it has, in
/// whatever form, stay as they are.
pub(super) fn unknown_held_objects<'a>(
    catalog: &'a DesiredCatalog,
    inventory: &'a Inventory,
) -> impl Iterator<Item = ObjectId> + 'a {
    let held = catalog.objects().map(|desired| &desired.id).filter(|id| catalog.is_held(id));
    held.filter(|id| !inventory.entries.contains_key(id)).cloned()
}

/// Selects the objects that a runtime's events report a change of, leaving out echoes of own writes. An event is an
/// echo if it carries the uid and resourceVersion of the last write's response, or reports the deletion of an object
/// that this sync deleted. The generation, which the inventory has as well, proves nothing: labels and annotations
/// change without one, and an event carries no content.
pub(super) fn changed_objects(
    events: &[Object],
    catalog: &DesiredCatalog,
    inventory: &Inventory,
) -> BTreeSet<ObjectId> {
    let changed = events.iter().filter_map(|event| {
        let subject = &event.subject;
        let is_synced = subject.group == GROUP && subject.namespace == SKR_NAMESPACE;
        let kind: Kind = subject.resource.parse().ok().filter(|_| is_synced)?;
        let id = ObjectId::checked(kind, &subject.name)?;
        let is_echo = match (inventory.entries.get(&id), event.change) {
            (None, Change::Deleted) => catalog.get(&id).is_none(),
            (Some(_), Change::Deleted) | (None, _) => false,
            (Some(entry), _) => *entry.uid == *event.uid && *entry.resource_version == *event.resource_version,
        };
        (!is_echo).then_some(id)
    });
    changed.collect()
}

/// Returns whether catalog sync, this one or lifecycle-manager's, has written an object. Both use the same field manager as
/// ownership marker.
pub(super) fn is_managed(object: &DynamicObject) -> bool {
    let mut managers = object.metadata.managed_fields.iter().flatten();
    managers.any(|entry| entry.manager.as_deref() == Some(field_manager::CATALOG_SYNC))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};
    use tidewatch_contract::event::Subject;

    use super::*;

    fn desired(kind: Kind, name: &str, spec: Value) -> DesiredObject {
        let body = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind.name(), "spec": spec,
            "metadata": {"name": name, "namespace": "kyma-system", "labels": {"l": "1"}, "annotations": {"a": "1"}}});
        DesiredObject { id: ObjectId::new(kind, name), hash: ContentHash::of(&body), body, requires: Vec::new() }
    }

    fn observed(change: impl FnOnce(&mut Value)) -> DynamicObject {
        let mut object = desired(Kind::Template, "t", json!({"n": 1, "list": [{"name": "x", "none": null}]})).body;
        object["metadata"]["uid"] = json!("u");
        object["metadata"]["resourceVersion"] = json!("7");
        change(&mut object);
        serde_json::from_value(object).unwrap()
    }

    fn inventory(entries: impl IntoIterator<Item = (ObjectId, InventoryEntry)>) -> Inventory {
        let mut inventory = Inventory::default();
        inventory.entries = entries.into_iter().collect();
        inventory
    }

    fn catalog() -> DesiredCatalog {
        DesiredCatalog::new([Arc::new(desired(Kind::Template, "t", json!({"n": 1, "list": [{"name": "x"}]})))])
    }

    #[test]
    fn edits_and_additions_differ_but_foreign_annotations_do_not() {
        let catalog = catalog();
        let id = ObjectId::new(Kind::Template, "t");
        let owned =
            json!([{"manager": "catalog-sync", "fieldsV1": {"f:metadata": {"f:annotations": {".": {}, "f:b": {}}}}}]);
        for (is_same, object) in [
            (true, observed(|_| ())),
            (true, observed(|object| object["metadata"]["annotations"]["b"] = json!("2"))),
            (
                false,
                observed(|object| {
                    object["metadata"]["annotations"]["b"] = json!("2");
                    object["metadata"]["managedFields"] = owned.clone();
                }),
            ),
            (false, observed(|object| object["metadata"]["annotations"] = json!({}))),
            (false, observed(|object| object["metadata"]["labels"]["m"] = json!("2"))),
            (false, observed(|object| object["metadata"]["labels"] = json!({"l": "2"}))),
            (false, observed(|object| object["spec"]["n"] = json!(2))),
            (false, observed(|object| object["spec"]["m"] = json!(false))),
            (false, observed(|object| object["spec"]["list"].as_array_mut().unwrap().push(json!({"name": "y"})))),
        ] {
            let action = action_for(&id, &catalog, Some(&object), None);
            assert_eq!(matches!(action, Action::UpToDate(_)), is_same, "{object:?}");
            let desired = catalog.get(&id).unwrap();
            let replacement = desired.target().shape.replacement(&desired.body, &object);
            assert!(desired.is_up_to_date(&replacement), "{replacement:?}");
            assert_eq!(replacement.metadata.resource_version.as_deref(), Some("7"));
        }
    }

    #[test]
    fn only_owned_undesired_objects_are_deleted() {
        let nothing = DesiredCatalog::new([]);
        let id = ObjectId::new(Kind::Template, "t");
        let foreign = observed(|_| ());
        let managed = observed(|object| object["metadata"]["managedFields"] = json!([{"manager": "catalog-sync"}]));
        let terminating = observed(|object| {
            object["metadata"]["managedFields"] = json!([{"manager": "catalog-sync"}]);
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        });
        let entry = InventoryEntry::new(ContentHash::of(&json!(1)), &foreign);
        let other = InventoryEntry { uid: "other".into(), ..entry.clone() };
        assert_eq!(action_for(&id, &nothing, Some(&foreign), None), Action::Ignore);
        assert_eq!(action_for(&id, &nothing, Some(&foreign), Some(&other)), Action::Ignore);
        assert!(matches!(action_for(&id, &nothing, Some(&foreign), Some(&entry)), Action::Delete(_)));
        assert_eq!(
            action_for(&id, &nothing, Some(&managed), None),
            Action::Delete(Delete { id: id.clone(), uid: "u".into() })
        );
        assert_eq!(action_for(&id, &nothing, Some(&terminating), Some(&entry)), Action::Ignore);
        assert_eq!(action_for(&id, &nothing, None, Some(&entry)), Action::Ignore);
    }

    #[test]
    fn held_objects_are_neither_changed_nor_deleted_and_stay_owned() {
        let held = DesiredCatalog::with_held([], BTreeSet::from(["m".into()]).into());
        let id = ObjectId::new(Kind::Template, "m-1.0.0");
        let object = observed(|object| object["spec"]["n"] = json!(7));
        let hash = ContentHash::of(&json!(1));
        let entry = InventoryEntry::new(hash, &object);
        assert_eq!(action_for(&id, &held, Some(&object), Some(&entry)), Action::UpToDate(entry.clone()));
        assert_eq!(action_for(&id, &held, Some(&object), None), Action::Ignore, "an object of the user");
        let managed = observed(|object| object["metadata"]["managedFields"] = json!([{"manager": "catalog-sync"}]));
        let unknown = InventoryEntry::new(ContentHash::UNKNOWN, &managed);
        assert_eq!(action_for(&id, &held, Some(&managed), None), Action::UpToDate(unknown));
        assert_eq!(action_for(&id, &held, None, Some(&entry)), Action::Ignore);
        let inventory = inventory([(id, entry)]);
        assert_eq!(diff_inventory(&held, &inventory), Steps::default());
    }

    #[test]
    fn held_objects_that_a_runtime_lacks_are_applied() {
        let object = desired(Kind::Template, "m-1.0.0", json!({"n": 1}));
        let id = object.id.clone();
        let hash = object.hash;
        let held = DesiredCatalog::with_held([Arc::new(object)], BTreeSet::from(["m".into()]).into());
        assert!(matches!(action_for(&id, &held, None, None), Action::Apply(Apply { present: false, .. })));
        let mut same = desired(Kind::Template, "m-1.0.0", json!({"n": 1})).body;
        same["metadata"]["uid"] = json!("u");
        let same = serde_json::from_value(same).unwrap();
        assert_eq!(action_for(&id, &held, Some(&same), None), Action::UpToDate(InventoryEntry::new(hash, &same)));
        let other = observed(|object| object["metadata"]["name"] = json!("m-1.0.0"));
        assert_eq!(action_for(&id, &held, Some(&other), None), Action::Ignore, "an object of the user");
        assert_eq!(unknown_held_objects(&held, &inventory([])).collect::<Vec<_>>(), std::slice::from_ref(&id));
        let known = inventory([(id, InventoryEntry::new(ContentHash::of(&json!("old")), &other))]);
        assert_eq!(unknown_held_objects(&held, &known).count(), 0);
        assert_eq!(diff_inventory(&held, &known), Steps::default());
    }

    #[test]
    fn inventory_diff_finds_changes_without_a_read() {
        let [same, changed, new] = ["a", "b", "c"].map(|name| desired(Kind::Template, name, json!({"n": 1})));
        let entry_with = |hash| InventoryEntry { hash, uid: "u".into(), generation: 1, resource_version: "1".into() };
        let entries = BTreeMap::from([
            (same.id.clone(), entry_with(same.hash)),
            (changed.id.clone(), entry_with(ContentHash::of(&json!("old")))),
            (ObjectId::new(Kind::ReleaseMeta, "gone"), entry_with(same.hash)),
        ]);
        let inventory = inventory(entries);
        let steps = diff_inventory(&DesiredCatalog::new([same, changed, new].map(Arc::new)), &inventory);
        let applies: Vec<_> = steps.applies.iter().map(|apply| (&*apply.desired.id.name, apply.present)).collect();
        assert_eq!(applies, [("b", true), ("c", false)]);
        assert_eq!(steps.deletes, [Delete { id: ObjectId::new(Kind::ReleaseMeta, "gone"), uid: "u".into() }]);
    }

    #[test]
    fn echoes_of_own_writes_are_ignored() {
        let catalog = catalog();
        let id = ObjectId::new(Kind::Template, "t");
        let entry = InventoryEntry::new(catalog.get(&id).unwrap().hash, &observed(|_| ()));
        let inventory = inventory([(id, entry)]);
        let event = |resource: &str, namespace: &str, name: &str, version: &str, uid: &str, change| Object {
            subject: Subject {
                group: GROUP.to_owned(),
                version: "v1beta2".to_owned(),
                resource: resource.to_owned(),
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            },
            kind: String::new(),
            uid: uid.to_owned(),
            resource_version: version.to_owned(),
            generation: Some(1),
            change,
        };
        for (is_change, event) in [
            (false, event("moduletemplates", SKR_NAMESPACE, "t", "7", "u", Change::Created)),
            (false, event("moduletemplates", SKR_NAMESPACE, "t", "7", "u", Change::Metadata)),
            (true, event("moduletemplates", SKR_NAMESPACE, "t", "8", "u", Change::Spec)),
            (true, event("moduletemplates", SKR_NAMESPACE, "t", "7", "v", Change::Spec)),
            (true, event("moduletemplates", SKR_NAMESPACE, "t", "7", "u", Change::Deleted)),
            (true, event("moduletemplates", SKR_NAMESPACE, "foreign", "7", "u", Change::Created)),
            (false, event("moduletemplates", SKR_NAMESPACE, "", "7", "u", Change::Created)),
            (false, event("moduletemplates", SKR_NAMESPACE, "no name", "7", "u", Change::Created)),
            (false, event("moduletemplates", SKR_NAMESPACE, &"n".repeat(254), "7", "u", Change::Created)),
            (false, event("moduletemplates", SKR_NAMESPACE, "removed", "7", "u", Change::Deleted)),
            (false, event("moduletemplates", "default", "t", "8", "u", Change::Spec)),
            (false, event("kymas", SKR_NAMESPACE, "t", "8", "u", Change::Spec)),
        ] {
            assert_eq!(
                !changed_objects(std::slice::from_ref(&event), &catalog, &inventory).is_empty(),
                is_change,
                "{event:?}"
            );
        }
    }
}
