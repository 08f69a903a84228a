//! Difference between the desired catalog and a runtime's observed objects, or its inventory. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kube::core::DynamicObject;
use serde_json::Value;
use tidewatch_shared::{
    event::{Change, Object},
    names::{GROUP, SKR_NAMESPACE, field_manager},
};

use super::{
    desired::{ContentHash, DesiredCatalog, DesiredObject, Kind, ObjectId},
    inventory::{Inventory, InventoryEntry},
};

/// An object to apply.
#[derive(Clone, Debug, PartialEq)]
pub struct Apply {
    /// Desired state.
    pub desired: Arc<DesiredObject>,
    /// The runtime has the object, in whatever form.
    pub present: bool,
}

/// An object to delete. The uid is a precondition, so that an object recreated under the same name survives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delete {
    /// Object to delete.
    pub id: ObjectId,
    /// UID that the object must have.
    pub uid: Box<str>,
}

/// Writes and deletions of one sync.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steps {
    /// Objects to apply.
    pub applies: Vec<Apply>,
    /// Objects to delete.
    pub deletes: Vec<Delete>,
}

/// Action that brings one object of a runtime to its desired state.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// None: the object matches its desired state, or its removal is held.
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
#[must_use]
pub fn action_for(
    id: &ObjectId,
    catalog: &DesiredCatalog,
    observed: Option<&DynamicObject>,
    entry: Option<&InventoryEntry>,
) -> Action {
    let apply = |desired, present| Action::Apply(Apply { desired: Arc::clone(desired), present });
    let Some(object) = observed else {
        return catalog.get(id).map_or(Action::Ignore, |desired| apply(desired, false));
    };
    let uid = object.metadata.uid.as_deref().unwrap_or_default();
    let recorded = entry.filter(|entry| *entry.uid == *uid && !uid.is_empty());
    let is_owned = object.metadata.deletion_timestamp.is_none() && (is_managed(object) || recorded.is_some());
    if is_owned && catalog.is_held(id) {
        // An edit during the hold makes the hash unknown, so the object is written again once the removal is decided.
        let version = object.metadata.resource_version.as_deref();
        let unedited = recorded.filter(|entry| Some(&*entry.resource_version) == version);
        let hash = unedited.map_or(ContentHash::UNKNOWN, |entry| entry.hash);
        return Action::UpToDate(InventoryEntry::new(hash, object));
    }
    match catalog.get(id) {
        Some(desired) if is_up_to_date(desired, object) => Action::UpToDate(InventoryEntry::new(desired.hash, object)),
        Some(desired) => apply(desired, true),
        None if is_owned => Action::Delete(Delete { id: id.clone(), uid: uid.into() }),
        None => Action::Ignore,
    }
}

/// Entry of a managed object that differs from its desired state, so that the inventory keeps it until it is repaired.
#[must_use]
pub fn owned_entry(object: &DynamicObject, entry: Option<&InventoryEntry>) -> Option<InventoryEntry> {
    let now = InventoryEntry::new(ContentHash::UNKNOWN, object);
    (is_managed(object) || entry.is_some_and(|entry| entry.uid == now.uid)).then_some(now)
}

/// Computes the steps from the inventory alone, without any read.
#[must_use]
pub fn diff_inventory(catalog: &DesiredCatalog, inventory: &Inventory) -> Steps {
    let changed = catalog.objects().filter_map(|desired| match inventory.entries.get(&desired.id) {
        Some(entry) if entry.hash == desired.hash => None,
        entry => Some(Apply { desired: Arc::clone(desired), present: entry.is_some() }),
    });
    let gone = inventory.entries.iter().filter(|(id, _)| catalog.get(id).is_none() && !catalog.is_held(id));
    let gone = gone.map(|(id, entry)| Delete { id: id.clone(), uid: entry.uid.clone() });
    Steps { applies: changed.collect(), deletes: gone.collect() }
}

/// Selects the objects that a runtime's events report a change of, leaving out echoes of own writes. An event is an
/// echo if it carries the uid and resourceVersion of the last write's response, or reports the deletion of an object
/// that this sync deleted. The generation, which the inventory has as well, proves nothing: labels and annotations
/// change without one, and an event carries no content.
#[must_use]
pub fn changed_objects(events: &[Object], catalog: &DesiredCatalog, inventory: &Inventory) -> BTreeSet<ObjectId> {
    let changed = events.iter().filter_map(|event| {
        let subject = &event.subject;
        let is_synced = subject.group == GROUP && subject.namespace == SKR_NAMESPACE && !subject.name.is_empty();
        let kind: Kind = subject.resource.parse().ok().filter(|_| is_synced)?;
        let id = ObjectId::new(kind, &subject.name);
        let is_echo = match (inventory.entries.get(&id), event.change) {
            (None, Change::Deleted) => catalog.get(&id).is_none(),
            (Some(_), Change::Deleted) | (None, _) => false,
            (Some(entry), _) => *entry.uid == *event.uid && *entry.resource_version == *event.resource_version,
        };
        (!is_echo).then_some(id)
    });
    changed.collect()
}

/// Returns whether an object matches its desired state: equal content (as JSON), equal labels, all desired annotations,
/// and no annotation that catalog sync once set and no longer desires. Annotations of other field managers are allowed.
#[must_use]
pub fn is_up_to_date(desired: &DesiredObject, object: &DynamicObject) -> bool {
    let metadata = &desired.body["metadata"];
    let labels = object.metadata.labels.iter().flatten();
    let same_labels = metadata["labels"].as_object().is_some_and(|desired| {
        labels.clone().count() == desired.len() && labels.clone().all(|(key, value)| is_text(desired.get(key), value))
    });
    let annotations = object.metadata.annotations.as_ref();
    let same_annotations = metadata["annotations"].as_object().into_iter().flatten().all(|(key, value)| {
        let found = annotations.and_then(|annotations| annotations.get(key));
        found.is_some_and(|found| is_text(Some(value), found))
    });
    same_labels && same_annotations && stale_annotations(desired, object).is_empty() && same_content(desired, object)
}

/// Builds the PUT that removes foreign additions left after an apply. It keeps resourceVersion, finalizers and the
/// annotations of other field managers.
#[must_use]
pub fn replacement(desired: &DesiredObject, mut object: DynamicObject) -> DynamicObject {
    let stale = stale_annotations(desired, &object);
    let strings = |value: &Value| -> BTreeMap<String, String> {
        let members = value.as_object().into_iter().flatten();
        members.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
    };
    object.metadata.labels = Some(strings(&desired.body["metadata"]["labels"]));
    let annotations = object.metadata.annotations.get_or_insert_default();
    annotations.retain(|key, _| !stale.contains(key));
    annotations.extend(strings(&desired.body["metadata"]["annotations"]));
    object.data = Value::Object(content(&desired.body).map(|(key, value)| (key.clone(), value.clone())).collect());
    object
}

/// Returns whether catalog sync, this one or the incumbent's, has written an object. Both use the same field manager as
/// ownership marker.
#[must_use]
pub fn is_managed(object: &DynamicObject) -> bool {
    let mut managers = object.metadata.managed_fields.iter().flatten();
    managers.any(|entry| entry.manager.as_deref() == Some(field_manager::CATALOG_SYNC))
}

/// Annotations that catalog sync owns and that are not desired.
fn stale_annotations(desired: &DesiredObject, object: &DynamicObject) -> BTreeSet<String> {
    let entries = object.metadata.managed_fields.iter().flatten();
    let owned = entries.filter(|entry| entry.manager.as_deref() == Some(field_manager::CATALOG_SYNC));
    let fields = owned.filter_map(|entry| entry.fields_v1.as_ref()?.0["f:metadata"]["f:annotations"].as_object());
    let keys = fields.flat_map(|fields| fields.keys()).filter_map(|key| key.strip_prefix("f:"));
    let present = object.metadata.annotations.as_ref();
    let stale = keys.filter(|key| {
        let is_desired = desired.body["metadata"]["annotations"].get(key).is_some();
        !is_desired && present.is_some_and(|present| present.contains_key(*key))
    });
    stale.map(str::to_owned).collect()
}

/// Members of an object other than type, metadata and status.
fn content(body: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let members = body.as_object().into_iter().flatten();
    members.filter(|(key, _)| !matches!(key.as_str(), "apiVersion" | "kind" | "metadata" | "status"))
}

fn same_content(desired: &DesiredObject, object: &DynamicObject) -> bool {
    let present = |(_, value): &(&String, &Value)| !value.is_null();
    let members = content(&desired.body).filter(present).count();
    let found = content(&object.data).filter(present).count();
    members == found && content(&desired.body).all(|(key, value)| json_eq(value, &object.data[key]))
}

fn is_text(value: Option<&Value>, text: &str) -> bool {
    value.and_then(Value::as_str) == Some(text)
}

/// Equality as JSON. A null member equals a missing one, since API servers drop nulls of typed fields.
fn json_eq(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let rest = |map: &serde_json::Map<String, Value>| map.values().filter(|value| !value.is_null()).count();
            let members = a.iter().filter(|(_, value)| !value.is_null());
            rest(a) == rest(b)
                && members.clone().all(|(key, value)| b.get(key).is_some_and(|other| json_eq(value, other)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| json_eq(a, b)),
        (a, b) => a == b,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_shared::event::Subject;

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
            let replacement = replacement(desired, object);
            assert!(is_up_to_date(desired, &replacement), "{replacement:?}");
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
    fn held_objects_are_neither_written_nor_deleted_and_stay_owned() {
        let held = DesiredCatalog::with_held_modules([], BTreeSet::from(["m".into()]));
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
