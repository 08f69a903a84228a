//! Sets of fields as `managedFields` lists them (`FieldsV1` of the Kubernetes API), beside the values that they are
//! fields of. Pure.
//!
//! A set is an object: a member `f:<name>` is a field, `k:<keys as JSON>` an element of a list that is a map,
//! `v:<value as JSON>` an element of a list that is a set, and `.` the value itself.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::{ResourceExt as _, api::DynamicObject};
use serde_json::{Map, Value, json};

/// Operation of the entries of server-side applies.
pub(super) const APPLY: &str = "Apply";
/// Operation of all other entries.
pub(super) const UPDATE: &str = "Update";

/// A member of a set, other than `.`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step<'a> {
    Field(&'a str),
    /// Keys of the element of a list that is a map.
    Element(Map<String, Value>),
    /// Element of a list that is a set.
    Value(Value),
}

impl<'a> Step<'a> {
    /// Parses the name of a member. `None` for `.`, for an index, and for what no API server writes.
    pub(super) fn parse(member: &'a str) -> Option<Self> {
        match member.split_once(':')? {
            ("f", name) => Some(Self::Field(name)),
            ("k", keys) => serde_json::from_str(keys).ok().map(Self::Element),
            ("v", value) => serde_json::from_str(value).ok().map(Self::Value),
            _ => None,
        }
    }

    /// Returns the value at this step.
    pub(super) fn within<'v>(&self, value: &'v Value) -> Option<&'v Value> {
        match self {
            Self::Field(name) => value.as_object()?.get(*name),
            Self::Element(_) | Self::Value(_) => self.element_of(value.as_array()?),
        }
    }

    /// Returns the element of a list at this step. A key that an element leaves to a default counts as equal, unless another
    /// element states it: of two ports of one number, that without a protocol is not the one for UDP.
    pub(super) fn element_of<'v>(&self, elements: &'v [Value]) -> Option<&'v Value> {
        match self {
            Self::Field(_) => None,
            Self::Element(keys) => {
                let states_keys = |element: &&Value| keys.iter().all(|(name, key)| element.get(name) == Some(key));
                elements.iter().find(states_keys).or_else(|| elements.iter().find(|element| self.is_of(element)))
            }
            Self::Value(_) => elements.iter().find(|element| self.is_of(element)),
        }
    }

    /// True for the element of a list at this step.
    pub(super) fn is_of(&self, element: &Value) -> bool {
        match self {
            Self::Field(_) => false,
            Self::Element(keys) => {
                let has_key = |(name, value): (&String, &Value)| element.get(name).is_none_or(|it| it == value);
                element.is_object() && keys.iter().all(has_key)
            }
            Self::Value(value) => element == value,
        }
    }

    /// Text in a path for users, as in `containers[manager]`.
    pub(super) fn add_to(&self, path: &mut String) {
        let quoted = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        match self {
            Self::Field(name) if path.is_empty() => path.push_str(name),
            Self::Field(name) if name.contains(['.', '/']) => path.push_str(&format!("[{name}]")),
            Self::Field(name) => path.push_str(&format!(".{name}")),
            Self::Element(keys) => {
                let keys: Vec<_> = keys.values().map(quoted).collect();
                path.push_str(&format!("[{}]", keys.join(",")));
            }
            Self::Value(value) => path.push_str(&format!("[{}]", quoted(value))),
        }
    }
}

/// Members of a set with their steps.
pub(super) fn members(set: &Value) -> impl Iterator<Item = (&str, Step<'_>, &Value)> {
    let members = set.as_object().into_iter().flatten();
    members.filter_map(|(member, inner)| Some((member.as_str(), Step::parse(member)?, inner)))
}

/// True for a set without members: the value is owned as a whole.
pub(super) fn is_leaf(set: &Value) -> bool {
    set.as_object().is_none_or(|members| members.keys().all(|member| member == "."))
}

/// Set of an entry; `None` without one.
pub(super) fn of_entry(entry: &ManagedFieldsEntry) -> Option<&Value> {
    entry.fields_v1.as_ref().map(|fields| &fields.0)
}

/// Entry of the server-side applies of a manager on the object itself.
pub(super) fn applied<'a>(manager: &str, live: &'a DynamicObject) -> Option<&'a ManagedFieldsEntry> {
    live.managed_fields().iter().find(|entry| is_of(entry, manager, APPLY))
}

/// True for the entry of a manager, an operation, and the object itself.
pub(super) fn is_of(entry: &ManagedFieldsEntry, manager: &str, operation: &str) -> bool {
    entry.manager.as_deref() == Some(manager)
        && entry.operation.as_deref() == Some(operation)
        && entry.subresource.as_deref().unwrap_or_default().is_empty()
}

/// The union of two sets.
pub(super) fn union(set: &Value, other: &Value) -> Value {
    match (set, other) {
        (Value::Object(set), Value::Object(other)) => {
            let mut all = set.clone();
            for (member, inner) in other {
                let merged = all.get(member).map_or_else(|| inner.clone(), |known| union(known, inner));
                all.insert(member.clone(), merged);
            }
            Value::Object(all)
        }
        _ => set.clone(),
    }
}

/// A live object for a walk beside a set.
pub(super) struct Live<'a> {
    data: &'a Value,
    /// Members of the metadata that a module can set.
    metadata: Value,
}

impl<'a> Live<'a> {
    pub(super) fn new(live: &'a DynamicObject) -> Self {
        let head = &live.metadata;
        let metadata = json!({"labels": head.labels, "annotations": head.annotations,
            "finalizers": head.finalizers, "ownerReferences": head.owner_references});
        Self { data: &live.data, metadata }
    }

    /// Value of a member of the object.
    pub(super) fn member(&self, name: &str) -> Option<&Value> {
        if name == "metadata" { Some(&self.metadata) } else { self.data.get(name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_finds_its_value_and_names_it() {
        let ports = json!([{"port": 80, "name": "http"}, {"port": 80, "protocol": "UDP", "name": "quic"}]);
        let value = json!({"spec": {"ports": ports, "set": ["a", 1]}, "metadata": {"labels": {"a/b.c": "1"}}});
        for (members, expected, text) in [
            (&["f:spec"][..], Some(value["spec"].clone()), "spec"),
            (
                &["f:spec", "f:ports", "k:{\"port\":80,\"protocol\":\"TCP\"}", "f:name"],
                Some(json!("http")),
                "spec.ports[80,TCP].name",
            ),
            (
                &["f:spec", "f:ports", "k:{\"port\":80,\"protocol\":\"UDP\"}", "f:name"],
                Some(json!("quic")),
                "spec.ports[80,UDP].name",
            ),
            (&["f:spec", "f:ports", "k:{\"port\":81}"], None, "spec.ports[81]"),
            (&["f:spec", "f:set", "v:\"a\""], Some(json!("a")), "spec.set[a]"),
            (&["f:spec", "f:set", "v:1"], Some(json!(1)), "spec.set[1]"),
            (&["f:metadata", "f:labels", "f:a/b.c"], Some(json!("1")), "metadata.labels[a/b.c]"),
        ] {
            let mut path = String::new();
            let steps: Vec<_> = members.iter().map(|member| Step::parse(member).unwrap()).collect();
            steps.iter().for_each(|step| step.add_to(&mut path));
            let found = steps.iter().try_fold(&value, |value, step| step.within(value));
            assert_eq!((found, &*path), (expected.as_ref(), text));
        }
        for member in [".", "i:0", "k:{", "x"] {
            assert_eq!(Step::parse(member), None, "{member}");
        }
    }

    #[test]
    fn union_has_the_members_of_both() {
        let set = json!({"f:a": {"f:b": {}}, "f:c": {}});
        let other = json!({"f:a": {".": {}, "f:d": {"f:e": {}}}, "f:f": {}});
        let both = json!({"f:a": {".": {}, "f:b": {}, "f:d": {"f:e": {}}}, "f:c": {}, "f:f": {}});
        assert_eq!(union(&set, &other), both);
        assert_eq!(union(&both, &both), both);
        assert!(is_leaf(&json!({})) && is_leaf(&json!({".": {}})) && !is_leaf(&both));
    }
}
