//! Comparison of a live object with its desired form, and the form of the PUT that replaces it. Pure.
//!
//! An absent field equals null, and `1.0` equals `1`, since API servers return integers. An empty object differs from an
//! absent one: it has a meaning, as in `subresources.status`, or in `ingress: [{}]`, which permits all traffic.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    ops::BitOr,
};

use kube::{
    ResourceExt,
    api::{DynamicObject, ObjectMeta},
};
use serde_json::{Value, json};
use tidewatch_kit::hash::hash;

use super::{normal_form, owned_fields::has_stale_field};

/// Repair of a live object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// The object is as desired.
    None,
    /// A desired field is missing or different: a server-side apply repairs it.
    Apply,
    /// Another field manager added a field, which an apply would keep: a PUT removes it.
    Replace,
    /// An object with content that is not ours has a foreign finalizer or owner, which is removed.
    Release,
    /// An immutable field differs: the object is deleted and created again.
    Recreate,
}

/// Extent of our ownership of an object's content, which is everything except type, metadata and status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// No content is ours. It is neither compared nor read.
    Metadata,
    /// The desired fields. Additions of other field managers stay.
    Fields,
    /// The desired fields, and at these JSON pointers all fields.
    Parts(&'static [&'static str]),
    /// All fields.
    Whole,
}

/// Rules of the comparison of one kind of object. Desired labels, annotations and owner references are always ours.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Extent of our ownership of the content.
    pub ownership: Ownership,
    /// Selects the labels that are removed unless they are desired.
    pub owns_label: fn(&str) -> bool,
    /// Field manager whose applied fields are removed once they are not desired any more. With [`Ownership::Whole`] all are.
    pub fields_of: Option<&'static str>,
    /// Field manager of the owner of an object to which we add fields: what it applied counts as stored in any form.
    pub owner: Option<&'static str>,
    /// Field manager whose annotations are removed once they are not desired any more.
    pub annotations_of: Option<&'static str>,
    /// Foreign finalizers and owner references are removed.
    pub owns_lifecycle: bool,
    /// JSON pointers to fields that are not ours, such as those that an API server allocates.
    pub ignored: &'static [&'static str],
    /// JSON pointers to fields that API servers treat as immutable. With [`Ownership::Metadata`], to labels instead.
    pub immutable: &'static [&'static str],
    /// An empty list equals an absent one, as in typed objects. False for custom resources.
    pub drops_empty_lists: bool,
    /// Fills the defaults of every API server into an object.
    pub defaults: Option<fn(&mut Value)>,
}

/// Difference of a live value from the desired one.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Difference {
    /// A desired value is missing or different.
    lacks: bool,
    /// A member or an element is not desired.
    surplus: bool,
}

impl BitOr for Difference {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self { lacks: self.lacks | other.lacks, surplus: self.surplus | other.surplus }
    }
}

impl Shape {
    /// Creates the rules of a typed object without exceptions.
    pub const fn new(ownership: Ownership) -> Self {
        Self {
            ownership,
            owns_label: |_| false,
            fields_of: None,
            owner: None,
            annotations_of: None,
            owns_lifecycle: false,
            ignored: &[],
            immutable: &[],
            drops_empty_lists: true,
            defaults: None,
        }
    }

    /// Selects the repair of a live object. `accepted` is the [`Self::form`] in which this API server stored the desired
    /// object before, where it, or an admission webhook, adds fields of its own.
    pub fn compare(&self, desired: &Value, live: &DynamicObject, accepted: Option<u64>) -> Repair {
        let marks = self.compare_marks(desired, live);
        let is_foreign = self.owns_lifecycle && has_foreign_lifecycle(&live.metadata);
        if self.ownership == Ownership::Metadata {
            let head = json!({"metadata": {"labels": live.metadata.labels}});
            let differs = |pointer: &&str| desired.pointer(pointer) != head.pointer(pointer);
            return match (is_foreign, marks.lacks) {
                _ if self.immutable.iter().any(differs) => Repair::Recreate,
                (true, _) => Repair::Release,
                (false, true) => Repair::Apply,
                (false, false) => Repair::None,
            };
        }
        let shall = self.normalize(desired);
        let is = self.normalize(&live.data);
        let is_stale = self.fields_of.is_some_and(|manager| has_stale_field(manager, desired, live));
        let mut content = self.compare_content(&is, &shall);
        let is_form = |manager| normal_form::explains(manager, &shall, live, self.drops_empty_lists);
        if content.lacks && self.fields_of.or(self.owner).is_some_and(is_form) {
            content.lacks = false;
        }
        content = content | Difference { surplus: is_foreign, lacks: is_stale };
        if content != Difference::default() && accepted == Some(self.form(desired, live)) {
            content = Difference::default();
        }
        let differs_at =
            |pointer: &&str| self.diff(is.pointer(pointer), shall.pointer(pointer)) != Difference::default();
        match content | marks {
            _ if content != Difference::default() && self.immutable.iter().any(differs_at) => Repair::Recreate,
            Difference { surplus: true, .. } => Repair::Replace,
            Difference { lacks: true, .. } => Repair::Apply,
            _ => Repair::None,
        }
    }

    /// Hash of the stored form of a desired object, for [`Self::compare`] within this process. It covers both, so that a
    /// form accepted for one desired object is not accepted for the next one.
    pub fn form(&self, desired: &Value, live: &DynamicObject) -> u64 {
        let text = |object: &Value| json!(content(&self.normalize(object)).collect::<BTreeMap<_, _>>()).to_string();
        let owners = self.owns_lifecycle.then(|| {
            let foreign = live.finalizers().iter().filter(|name| !is_kubernetes_finalizer(name));
            json!([foreign.collect::<Vec<_>>(), live.owner_references()]).to_string()
        });
        hash(&(text(desired), text(&live.data), owners))
    }

    /// Builds the PUT that removes surplus fields. It keeps the resourceVersion, labels, annotations and finalizers that
    /// are not ours, and ignored fields. Without managed fields it keeps those of the stored object.
    pub fn replacement(&self, desired: &Value, live: &DynamicObject) -> DynamicObject {
        let mut object = live.clone();
        if self.owns_lifecycle {
            object.metadata = without_foreign_lifecycle(&object.metadata);
        }
        object.metadata.managed_fields = None;
        let labels = object.metadata.labels.get_or_insert_default();
        labels.retain(|key, _| !(self.owns_label)(key));
        labels.extend(strings(&desired["metadata"]["labels"]));
        let stale = self.stale_annotations(desired, live);
        let annotations = object.metadata.annotations.get_or_insert_default();
        annotations.retain(|key, _| !stale.contains(key));
        annotations.extend(strings(&desired["metadata"]["annotations"]));
        for part in self.parts(&live.data, desired) {
            set(&mut object.data, &part, desired.pointer(&part));
        }
        for pointer in self.ignored {
            if let Some(kept) = live.data.pointer(pointer) {
                set(&mut object.data, pointer, Some(kept));
            }
        }
        object
    }

    /// Adds defaults and removes ignored fields; copies only an object with either.
    fn normalize<'a>(&self, object: &'a Value) -> Cow<'a, Value> {
        let mut object = Cow::Borrowed(object);
        for pointer in self.ignored {
            set(object.to_mut(), pointer, None);
        }
        if let Some(fill) = self.defaults {
            fill(object.to_mut());
        }
        object
    }

    /// JSON pointers to the parts of an object that are ours as a whole.
    fn parts(&self, is: &Value, shall: &Value) -> BTreeSet<String> {
        match self.ownership {
            Ownership::Metadata | Ownership::Fields => BTreeSet::new(),
            Ownership::Parts(pointers) => pointers.iter().map(|pointer| (*pointer).to_owned()).collect(),
            Ownership::Whole => content(is).chain(content(shall)).map(|(key, _)| format!("/{key}")).collect(),
        }
    }

    fn compare_content(&self, is: &Value, shall: &Value) -> Difference {
        let fields = content(shall).map(|(key, shall)| self.diff(is.get(key), Some(shall)));
        let lacks = fields.fold(Difference::default(), BitOr::bitor).lacks;
        let surplus = self.parts(is, shall).iter().any(|part| self.diff(is.pointer(part), shall.pointer(part)).surplus);
        Difference { lacks, surplus }
    }

    /// Compares two values at any depth. A desired null permits any value of another manager.
    fn diff(&self, is: Option<&Value>, shall: Option<&Value>) -> Difference {
        let is_nothing =
            |value: &&Value| value.is_null() || (self.drops_empty_lists && value.as_array().is_some_and(Vec::is_empty));
        let (lacks, surplus) = match (is.filter(|is| !is_nothing(is)), shall.filter(|shall| !shall.is_null())) {
            (None, shall) => (shall.is_some_and(|shall| !is_nothing(&shall)), false),
            (Some(_), None) => (false, true),
            (Some(Value::Object(is)), Some(Value::Object(shall))) => {
                let desired = shall.iter().map(|(key, shall)| self.diff(is.get(key), Some(shall)));
                let added = is.iter().filter(|(key, _)| !shall.contains_key(*key));
                let added = added.map(|(_, is)| self.diff(Some(is), None));
                return desired.chain(added).fold(Difference::default(), BitOr::bitor);
            }
            (Some(Value::Array(is)), Some(Value::Array(shall))) => {
                // The elements that only one list has; null is an element.
                let length = Difference { lacks: is.len() != shall.len(), surplus: is.len() > shall.len() };
                let pairs = is.iter().zip(shall).map(|(is, shall)| self.diff(Some(is), Some(shall)));
                return pairs.fold(length, BitOr::bitor);
            }
            (Some(Value::Number(is)), Some(Value::Number(shall))) if is.is_f64() || shall.is_f64() => {
                (is.as_f64() != shall.as_f64(), false)
            }
            (is, shall) => (is != shall, false),
        };
        Difference { lacks, surplus }
    }

    fn compare_marks(&self, desired: &Value, live: &DynamicObject) -> Difference {
        let marks = &desired["metadata"];
        let lacks = |is: &BTreeMap<_, _>, shall| strings(shall).any(|(key, value)| is.get(&key) != Some(&value));
        let mut owners = marks["ownerReferences"].as_array().into_iter().flatten();
        let lacks_owner = |shall: &Value| {
            let mut owners = live.owner_references().iter().map(|owner| json!(owner));
            !owners.any(|is| !self.diff(Some(&is), Some(shall)).lacks)
        };
        let is_surplus = |key: &String| (self.owns_label)(key) && marks["labels"].get(key).is_none();
        Difference {
            lacks: lacks(live.labels(), &marks["labels"])
                || lacks(live.annotations(), &marks["annotations"])
                || owners.any(lacks_owner),
            surplus: live.labels().keys().any(is_surplus) || !self.stale_annotations(desired, live).is_empty(),
        }
    }

    /// Annotations that our field manager owns and that are not desired.
    fn stale_annotations(&self, desired: &Value, live: &DynamicObject) -> BTreeSet<String> {
        let Some(manager) = self.annotations_of else { return BTreeSet::new() };
        let entries = live.metadata.managed_fields.iter().flatten();
        let owned = entries.filter(|entry| entry.manager.as_deref() == Some(manager));
        let fields = owned.filter_map(|entry| entry.fields_v1.as_ref()?.0["f:metadata"]["f:annotations"].as_object());
        let keys = fields.flat_map(|fields| fields.keys()).filter_map(|key| key.strip_prefix("f:"));
        let desired = &desired["metadata"]["annotations"];
        let stale = keys.filter(|key| desired.get(key).is_none() && live.annotations().contains_key(*key));
        stale.map(str::to_owned).collect()
    }
}

/// Returns whether another manager controls the deletion of an object: by a finalizer, or by an owner with which the
/// garbage collector deletes it.
pub fn has_foreign_lifecycle(head: &ObjectMeta) -> bool {
    let mut finalizers = head.finalizers.iter().flatten();
    finalizers.any(|name| !is_kubernetes_finalizer(name)) || head.owner_references.iter().flatten().next().is_some()
}

/// Returns the metadata without foreign finalizers and owner references.
pub(super) fn without_foreign_lifecycle(head: &ObjectMeta) -> ObjectMeta {
    let mut head = head.clone();
    head.owner_references = None;
    head.finalizers.iter_mut().for_each(|finalizers| finalizers.retain(|name| is_kubernetes_finalizer(name)));
    head.finalizers = head.finalizers.filter(|finalizers| !finalizers.is_empty());
    head
}

/// Returns whether Kubernetes sets a finalizer and removes it by itself, as for foreground deletion or a load balancer.
fn is_kubernetes_finalizer(finalizer: &str) -> bool {
    let is_own = |domain: &str| domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    finalizer.split_once('/').is_none_or(|(domain, _)| is_own(domain))
}

/// Members of an object other than type, metadata and status.
fn content(object: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let members = object.as_object().into_iter().flatten();
    members.filter(|(key, _)| !matches!(key.as_str(), "apiVersion" | "kind" | "metadata" | "status"))
}

fn strings(value: &Value) -> impl Iterator<Item = (String, String)> {
    let members = value.as_object().into_iter().flatten();
    members.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
}

/// Sets or removes the member at a JSON pointer if its parent is an object.
fn set(object: &mut Value, pointer: &str, value: Option<&Value>) {
    let Some((parent, member)) = pointer.rsplit_once('/') else { return };
    let Some(members) = object.pointer_mut(parent).and_then(Value::as_object_mut) else { return };
    match value {
        Some(value) => drop(members.insert(member.to_owned(), value.clone())),
        None => drop(members.remove(member)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> DynamicObject {
        serde_json::from_value(value).unwrap()
    }

    fn compare(shape: &Shape, desired: &Value, live: &Value) -> Repair {
        let mut live = live.clone();
        if live["metadata"].is_null() {
            live["metadata"] = json!({});
        }
        shape.compare(desired, &object(live), None)
    }

    #[test]
    fn object_covers_its_subset() {
        for (is, shall, covered) in [
            (json!({"a": 1, "b": 2}), json!({"a": 1}), true),
            (json!({"a": 1}), json!({"a": 2}), false),
            (json!({"a": 1}), json!({"b": 1}), false),
            (json!({"a": [1, 2]}), json!({"a": [1]}), false),
            (json!({"a": [{"b": 1, "c": 2}]}), json!({"a": [{"b": 1}]}), true),
            (json!({}), json!({"a": null}), true),
            (json!({}), json!({"a": []}), true),
            (json!({"a": [1]}), json!({"a": []}), false),
            (json!({}), json!({"a": {}}), false),
        ] {
            let repair = compare(&Shape::new(Ownership::Fields), &shall, &is);
            assert_eq!(repair == Repair::None, covered, "{is} {shall}");
        }
    }

    #[test]
    fn integral_floats_equal_integers() {
        let whole = Shape::new(Ownership::Whole);
        let desired = json!({"spec": {"minimum": 0.0, "maximum": -2.0, "x": 0.5}});
        assert_eq!(compare(&whole, &desired, &json!({"spec": {"minimum": 0, "maximum": -2, "x": 0.5}})), Repair::None);
        assert_eq!(compare(&whole, &desired, &json!({"spec": {"minimum": 0, "maximum": -2, "x": 1}})), Repair::Apply);
    }

    #[test]
    fn nulls_and_empty_lists_equal_absence_and_empty_objects_do_not() {
        let whole = Shape::new(Ownership::Whole);
        let shall = json!({"c": [{}], "d": {"e": {}}});
        let is = json!({"a": null, "b": [], "c": [{}], "d": {"e": {}, "f": null}});
        for (is, shall) in [(&is, &shall), (&shall, &is)] {
            assert_eq!(compare(&whole, shall, is), Repair::None);
        }
        let custom = Shape { drops_empty_lists: false, ..whole };
        assert_eq!((compare(&custom, &shall, &is), compare(&custom, &is, &shall)), (Repair::Replace, Repair::Apply));
        assert_eq!(compare(&whole, &json!({}), &json!({"a": {}})), Repair::Replace);
    }

    #[test]
    fn additions_are_surplus_only_in_parts_that_are_ours() {
        let desired = json!({"spec": {"ours": {"a": 1}, "list": [{"b": 1}]}});
        for (pointer, more) in [
            ("", json!({"x": 1})),
            ("/spec", json!({"x": 1})),
            ("/spec/ours", json!({"x": 1})),
            ("/spec/list/0", json!({"x": 1})),
        ] {
            let mut live = desired.clone();
            live.pointer_mut(pointer).unwrap()["x"] = more;
            let repair = |ownership| compare(&Shape::new(ownership), &desired, &live);
            assert_eq!(repair(Ownership::Whole), Repair::Replace, "{pointer}");
            assert_eq!(repair(Ownership::Fields), Repair::None, "{pointer}");
            let expected = if pointer == "/spec/ours" { Repair::Replace } else { Repair::None };
            assert_eq!(repair(Ownership::Parts(&["/spec/ours", "/spec/absent"])), expected, "{pointer}");
        }
    }

    #[test]
    fn field_that_we_applied_and_do_not_desire_any_more_is_removed_by_an_apply() {
        let shape = Shape { fields_of: Some("m"), ..Shape::new(Ownership::Fields) };
        let desired = json!({"apiVersion": "v1", "data": {"a": "1"}});
        let live = |manager: &str| {
            let fields = json!({"f:data": {"f:a": {}, "f:b": {}}});
            let managed = json!({"manager": manager, "operation": "Apply", "apiVersion": "v1", "fieldsV1": fields});
            object(json!({"metadata": {"managedFields": [managed]}, "data": {"a": "1", "b": "1"}}))
        };
        assert_eq!(shape.compare(&desired, &live("m"), None), Repair::Apply);
        assert_eq!(shape.compare(&desired, &live("operator"), None), Repair::None);
        // An API server that keeps the field after an apply gets no further one.
        let accepted = shape.form(&desired, &live("m"));
        assert_eq!(shape.compare(&desired, &live("m"), Some(accepted)), Repair::None);
    }

    #[test]
    fn finalizers_of_kubernetes_are_not_foreign() {
        let head = json!({"finalizers": ["service.kubernetes.io/load-balancer-cleanup", "example.test/foreign"],
            "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "u"}], "name": "n"});
        let released = without_foreign_lifecycle(&serde_json::from_value(head).unwrap());
        assert_eq!(released.finalizers, Some(vec!["service.kubernetes.io/load-balancer-cleanup".to_owned()]));
        assert_eq!((released.owner_references, released.name.as_deref()), (None, Some("n")));
    }

    #[test]
    fn surplus_is_removed_and_fields_of_others_stay() {
        let desired = json!({"metadata": {"labels": {"l": "1"}}, "spec": {"a": 1, "ip": "", "part": {"b": 1}}});
        let live = object(json!({
            "metadata": {"resourceVersion": "7", "labels": {"theirs": "1"}, "annotations": {"x": "y"},
                "finalizers": ["example.test/f"], "managedFields": [{"manager": "m"}]},
            "spec": {"a": 1, "ip": "10.0.0.1", "more": 1, "part": {"b": 1, "c": 2}}, "status": {"s": 1}, "top": 1}));
        let whole = Shape { ignored: &["/spec/ip"], ..Shape::new(Ownership::Whole) };
        let parts = Shape { owns_label: |_| true, ..Shape::new(Ownership::Parts(&["/spec/part"])) };
        for (shape, spec) in [
            (whole, json!({"a": 1, "ip": "10.0.0.1", "part": {"b": 1}})),
            (parts, json!({"a": 1, "ip": "10.0.0.1", "more": 1, "part": {"b": 1}})),
        ] {
            assert_eq!(shape.compare(&desired, &live, None), Repair::Replace);
            let put = shape.replacement(&desired, &live);
            assert_eq!((&put.data["spec"], &put.data["status"]), (&spec, &json!({"s": 1})));
            let head = &put.metadata;
            assert_eq!((head.resource_version.as_deref(), &head.managed_fields), (Some("7"), &None));
            assert_eq!((head.finalizers.as_deref().unwrap().len(), &put.annotations()["x"]), (1, &"y".to_owned()));
            assert_eq!(put.labels().contains_key("theirs"), !(shape.owns_label)("theirs"));
            assert_eq!(put.labels()["l"], "1");
        }
        assert_eq!(whole.compare(&desired, &whole.replacement(&desired, &live), None), Repair::None);
        assert!(whole.replacement(&desired, &live).data["top"].is_null());
    }
}
