//! What to do with the catalog of a runtime: desired against what is there, or against what we remember. Pure.

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
    desired::{ContentHash, Desired, Kind, ObjectId, Wanted},
    inventory::Inventory,
};

/// An object as our last write of it, or our last look at it, left it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// What it shall be; it was that.
    pub hash: ContentHash,
    /// Its uid.
    pub uid: Box<str>,
    /// Its generation; zero where the kind has none.
    pub generation: i64,
    /// Its resource version.
    pub resource_version: Box<str>,
}

impl Known {
    /// Remembers an object that is as it shall be.
    #[must_use]
    pub fn new(hash: ContentHash, object: &DynamicObject) -> Self {
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        Self {
            hash,
            uid: text(&object.metadata.uid),
            generation: object.metadata.generation.unwrap_or_default(),
            resource_version: text(&object.metadata.resource_version),
        }
    }
}

/// An object to apply.
#[derive(Clone, Debug, PartialEq)]
pub struct Put {
    /// As it shall be.
    pub desired: Arc<Desired>,
    /// Whether the runtime has it in some form.
    pub present: bool,
}

/// An object to delete: this one, and not another that took its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delete {
    /// Which.
    pub id: ObjectId,
    /// The uid that it must have.
    pub uid: Box<str>,
}

/// What a pass does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steps {
    /// Objects to apply.
    pub puts: Vec<Put>,
    /// Objects to delete.
    pub deletes: Vec<Delete>,
}

/// What one object of a runtime asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// It is as it shall be.
    Same(Known),
    /// It is wanted and differs, or is not there.
    Put(Put),
    /// It is ours and nobody wants it.
    Delete(Delete),
    /// It is not ours, or on its way out already.
    Leave,
}

/// Judges one object that was read; `None` when it is not there. What is remembered of it makes it ours as well.
#[must_use]
pub fn judge(id: &ObjectId, wanted: &Wanted, observed: Option<&DynamicObject>, known: Option<&Known>) -> Verdict {
    let is_going = |object: &DynamicObject| object.metadata.deletion_timestamp.is_some();
    let is_known = |object: &DynamicObject| {
        known.filter(|known| Some(&*known.uid) == object.metadata.uid.as_deref().filter(|uid| !uid.is_empty()))
    };
    match (wanted.get(id), observed) {
        // It stays as it is, and ours.
        (_, Some(object))
            if wanted.holds(id) && !is_going(object) && (is_ours(object) || is_known(object).is_some()) =>
        {
            // What somebody changed meanwhile is not what it was: it is written again once it is not held any more.
            let version = object.metadata.resource_version.as_deref();
            let same = is_known(object).filter(|known| Some(&*known.resource_version) == version);
            Verdict::Same(Known::new(same.map_or(ContentHash::UNKNOWN, |known| known.hash), object))
        }
        (Some(desired), Some(object)) if holds(desired, object) => Verdict::Same(Known::new(desired.hash, object)),
        (Some(desired), object) => Verdict::Put(Put { desired: Arc::clone(desired), present: object.is_some() }),
        (None, Some(object)) if !is_going(object) => {
            let uid: Box<str> = object.metadata.uid.as_deref().unwrap_or_default().into();
            let ours = is_ours(object) || is_known(object).is_some();
            if ours && !wanted.holds(id) { Verdict::Delete(Delete { id: id.clone(), uid }) } else { Verdict::Leave }
        }
        (None, _) => Verdict::Leave,
    }
}

/// An object as it is, when it is ours and not as it shall be: so that it is not lost sight of before that is mended.
#[must_use]
pub fn of_ours(object: &DynamicObject, known: Option<&Known>) -> Option<Known> {
    let now = Known::new(ContentHash::UNKNOWN, object);
    (is_ours(object) || known.is_some_and(|known| known.uid == now.uid)).then_some(now)
}

/// What the change of the desired catalog asks for, by memory alone.
#[must_use]
pub fn against_inventory(wanted: &Wanted, inventory: &Inventory) -> Steps {
    let changed = wanted.objects().filter_map(|desired| match inventory.known.get(&desired.id) {
        Some(known) if known.hash == desired.hash => None,
        known => Some(Put { desired: Arc::clone(desired), present: known.is_some() }),
    });
    let gone = inventory.known.iter().filter(|(id, _)| wanted.get(id).is_none() && !wanted.holds(id));
    let gone = gone.map(|(id, known)| Delete { id: id.clone(), uid: known.uid.clone() });
    Steps { puts: changed.collect(), deletes: gone.collect() }
}

/// The objects that a runtime's events tell something new of. An event is the echo of our own write when it tells of the
/// uid and resource version that the write's answer carried, or of the end of an object that we deleted. The generation, which
/// the inventory holds as well, proves nothing here: labels and annotations change without one, and an event carries no content.
#[must_use]
pub fn news(events: &[Object], wanted: &Wanted, inventory: &Inventory) -> BTreeSet<ObjectId> {
    let told = events.iter().filter_map(|event| {
        let subject = &event.subject;
        let ours = subject.group == GROUP && subject.namespace == SKR_NAMESPACE && !subject.name.is_empty();
        let kind = Kind::of_resource(&subject.resource).filter(|_| ours)?;
        let id = ObjectId::new(kind, &subject.name);
        let echo = match (inventory.known.get(&id), event.change) {
            (None, Change::Deleted) => wanted.get(&id).is_none(),
            (Some(_), Change::Deleted) | (None, _) => false,
            (Some(known), _) => *known.uid == *event.uid && *known.resource_version == *event.resource_version,
        };
        (!echo).then_some(id)
    });
    told.collect()
}

/// Whether an object is as it shall be: the same spec (equal as JSON), the same labels, and the annotations that we carry,
/// among others' perhaps, but none that we once set and no longer want.
#[must_use]
pub fn holds(desired: &Desired, object: &DynamicObject) -> bool {
    let metadata = &desired.body["metadata"];
    let labels = object.metadata.labels.iter().flatten();
    let same_labels = metadata["labels"].as_object().is_some_and(|wanted| {
        labels.clone().count() == wanted.len() && labels.clone().all(|(key, value)| is_text(wanted.get(key), value))
    });
    let annotations = object.metadata.annotations.as_ref();
    let same_annotations = metadata["annotations"].as_object().into_iter().flatten().all(|(key, value)| {
        let found = annotations.and_then(|annotations| annotations.get(key));
        found.is_some_and(|found| is_text(Some(value), found))
    });
    same_labels && same_annotations && stale_annotations(desired, object).is_empty() && same_content(desired, object)
}

/// The object, once it was applied and something that does not belong to it is still there, as a PUT makes it right:
/// it keeps its versions, its finalizers and others' annotations.
#[must_use]
pub fn purged(desired: &Desired, mut object: DynamicObject) -> DynamicObject {
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

/// Whether catalog sync, ours or the incumbent's, has written an object: the ownership marker that both share.
#[must_use]
pub fn is_ours(object: &DynamicObject) -> bool {
    let mut managers = object.metadata.managed_fields.iter().flatten();
    managers.any(|entry| entry.manager.as_deref() == Some(field_manager::CATALOG_SYNC))
}

/// Annotations that catalog sync owns and the desired object does not have.
fn stale_annotations(desired: &Desired, object: &DynamicObject) -> BTreeSet<String> {
    let entries = object.metadata.managed_fields.iter().flatten();
    let ours = entries.filter(|entry| entry.manager.as_deref() == Some(field_manager::CATALOG_SYNC));
    let fields = ours.filter_map(|entry| entry.fields_v1.as_ref()?.0["f:metadata"]["f:annotations"].as_object());
    let keys = fields.flat_map(|fields| fields.keys()).filter_map(|key| key.strip_prefix("f:"));
    let present = object.metadata.annotations.as_ref();
    let stale = keys.filter(|key| {
        let wanted = desired.body["metadata"]["annotations"].get(key).is_some();
        !wanted && present.is_some_and(|present| present.contains_key(*key))
    });
    stale.map(str::to_owned).collect()
}

/// Everything but type and metadata.
fn content(body: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let members = body.as_object().into_iter().flatten();
    members.filter(|(key, _)| !matches!(key.as_str(), "apiVersion" | "kind" | "metadata" | "status"))
}

fn same_content(desired: &Desired, object: &DynamicObject) -> bool {
    let present = |(_, value): &(&String, &Value)| !value.is_null();
    let wanted = content(&desired.body).filter(present).count();
    let found = content(&object.data).filter(present).count();
    wanted == found && content(&desired.body).all(|(key, value)| same(value, &object.data[key]))
}

fn is_text(value: Option<&Value>, text: &str) -> bool {
    value.and_then(Value::as_str) == Some(text)
}

/// Equality as JSON; a member that is null is one that is not there, since API servers drop those of typed fields.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let rest = |map: &serde_json::Map<String, Value>| map.values().filter(|value| !value.is_null()).count();
            let members = a.iter().filter(|(_, value)| !value.is_null());
            rest(a) == rest(b) && members.clone().all(|(key, value)| b.get(key).is_some_and(|other| same(value, other)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (a, b) => a == b,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_shared::event::Subject;

    use super::*;

    fn desired(kind: Kind, name: &str, spec: Value) -> Desired {
        let body = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind.name(), "spec": spec,
            "metadata": {"name": name, "namespace": "kyma-system", "labels": {"l": "1"}, "annotations": {"a": "1"}}});
        Desired { id: ObjectId::new(kind, name), hash: ContentHash::of(&body), body, needs: Vec::new() }
    }

    fn observed(change: impl FnOnce(&mut Value)) -> DynamicObject {
        let mut object = desired(Kind::Template, "t", json!({"n": 1, "list": [{"name": "x", "none": null}]})).body;
        object["metadata"]["uid"] = json!("u");
        object["metadata"]["resourceVersion"] = json!("7");
        change(&mut object);
        serde_json::from_value(object).unwrap()
    }

    fn wanted() -> Wanted {
        Wanted::new([Arc::new(desired(Kind::Template, "t", json!({"n": 1, "list": [{"name": "x"}]})))])
    }

    #[test]
    fn an_object_differs_by_edits_and_by_additions_but_not_by_others_annotations() {
        let wanted = wanted();
        let id = ObjectId::new(Kind::Template, "t");
        let owned =
            json!([{"manager": "catalog-sync", "fieldsV1": {"f:metadata": {"f:annotations": {".": {}, "f:b": {}}}}}]);
        for (same, object) in [
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
            let verdict = judge(&id, &wanted, Some(&object), None);
            assert_eq!(matches!(verdict, Verdict::Same(_)), same, "{object:?}");
            let desired = wanted.get(&id).unwrap();
            let purged = purged(desired, object);
            assert!(holds(desired, &purged), "{purged:?}");
            assert_eq!(purged.metadata.resource_version.as_deref(), Some("7"));
        }
    }

    #[test]
    fn only_what_is_ours_and_unwanted_is_deleted() {
        let nothing = Wanted::new([]);
        let id = ObjectId::new(Kind::Template, "t");
        let users = observed(|_| ());
        let ours = observed(|object| object["metadata"]["managedFields"] = json!([{"manager": "catalog-sync"}]));
        let going = observed(|object| {
            object["metadata"]["managedFields"] = json!([{"manager": "catalog-sync"}]);
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        });
        let known = Known::new(ContentHash::of(&json!(1)), &users);
        let other = Known { uid: "other".into(), ..known.clone() };
        assert_eq!(judge(&id, &nothing, Some(&users), None), Verdict::Leave);
        assert_eq!(judge(&id, &nothing, Some(&users), Some(&other)), Verdict::Leave);
        assert!(matches!(judge(&id, &nothing, Some(&users), Some(&known)), Verdict::Delete(_)));
        assert_eq!(
            judge(&id, &nothing, Some(&ours), None),
            Verdict::Delete(Delete { id: id.clone(), uid: "u".into() })
        );
        assert_eq!(judge(&id, &nothing, Some(&going), Some(&known)), Verdict::Leave);
        assert_eq!(judge(&id, &nothing, None, Some(&known)), Verdict::Leave);
    }

    #[test]
    fn what_is_held_is_neither_written_nor_deleted_and_stays_ours() {
        let held = Wanted::with_held([], BTreeSet::from(["m".into()]));
        let id = ObjectId::new(Kind::Template, "m-1.0.0");
        let object = observed(|object| object["spec"]["n"] = json!(7));
        let hash = ContentHash::of(&json!(1));
        let known = Known::new(hash, &object);
        assert_eq!(judge(&id, &held, Some(&object), Some(&known)), Verdict::Same(known.clone()));
        assert_eq!(judge(&id, &held, Some(&object), None), Verdict::Leave, "a user's own");
        let ours = observed(|object| object["metadata"]["managedFields"] = json!([{"manager": "catalog-sync"}]));
        let unknown = Known::new(ContentHash::UNKNOWN, &ours);
        assert_eq!(judge(&id, &held, Some(&ours), None), Verdict::Same(unknown));
        assert_eq!(judge(&id, &held, None, Some(&known)), Verdict::Leave);
        let inventory = Inventory::of([(id, known)].into_iter().collect());
        assert_eq!(against_inventory(&held, &inventory), Steps::default());
    }

    #[test]
    fn memory_alone_finds_what_changed() {
        let [same, changed, new] = ["a", "b", "c"].map(|name| desired(Kind::Template, name, json!({"n": 1})));
        let known = |hash| Known { hash, uid: "u".into(), generation: 1, resource_version: "1".into() };
        let known = BTreeMap::from([
            (same.id.clone(), known(same.hash)),
            (changed.id.clone(), known(ContentHash::of(&json!("old")))),
            (ObjectId::new(Kind::ReleaseMeta, "gone"), known(same.hash)),
        ]);
        let inventory = Inventory::of(known.into_iter().collect());
        let steps = against_inventory(&Wanted::new([same, changed, new].map(Arc::new)), &inventory);
        let puts: Vec<_> = steps.puts.iter().map(|put| (&*put.desired.id.name, put.present)).collect();
        assert_eq!(puts, [("b", true), ("c", false)]);
        assert_eq!(steps.deletes, [Delete { id: ObjectId::new(Kind::ReleaseMeta, "gone"), uid: "u".into() }]);
    }

    #[test]
    fn echoes_of_our_own_writes_are_no_news() {
        let wanted = wanted();
        let id = ObjectId::new(Kind::Template, "t");
        let known = Known::new(wanted.get(&id).unwrap().hash, &observed(|_| ()));
        let inventory = Inventory::of([(id, known)].into_iter().collect());
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
        for (is_news, event) in [
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
            assert_eq!(!news(std::slice::from_ref(&event), &wanted, &inventory).is_empty(), is_news, "{event:?}");
        }
    }
}
