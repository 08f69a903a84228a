//! Fields of a desired object that other writers took from our field manager, and its form without them. Pure.
//!
//! A writer that changes a value takes the field out of our entry in `managedFields`; who wrote last is in the others.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::{ResourceExt as _, api::DynamicObject};
use serde_json::Value;

use super::fields::{self, Step, is_leaf, members};

/// Members that decide what runs, and with which rights. An object with one of them is never left to another writer.
const GUARDED: [&str; 8] =
    ["args", "command", "hostIPC", "hostNetwork", "hostPID", "image", "securityContext", "serviceAccountName"];
/// Group of the kinds that grant rights.
const RBAC: &str = "rbac.authorization.k8s.io";
/// Fields of one object that are followed.
const MAX_FIELDS: usize = 16;

/// A field of the desired object that another writer owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disputed {
    /// JSON pointer to it in the desired object.
    pub pointer: String,
    /// Path for users.
    pub path: String,
    /// Field manager that wrote it last; `None` if it was removed.
    pub writer: Option<String>,
    /// It decides what runs, or grants rights.
    pub is_guarded: bool,
}

/// Finds the outermost fields of the content that differ and that our entry does not have any more. None without an entry
/// of ours in this API version.
pub fn disputed(manager: &str, desired: &Value, live: &DynamicObject) -> Vec<Disputed> {
    let entry = fields::applied(manager, live);
    let Some(entry) = entry.filter(|entry| entry.api_version.as_deref() == desired["apiVersion"].as_str()) else {
        return Vec::new();
    };
    let Some(ours) = fields::of_entry(entry) else { return Vec::new() };
    let is_other = |it: &&ManagedFieldsEntry| !std::ptr::eq(*it, entry);
    let others = live.managed_fields().iter().filter(is_other);
    let others = others.filter_map(|entry| Some(Other { entry, set: fields::of_entry(entry)? })).collect();
    let grants = desired["apiVersion"].as_str().is_some_and(|version| version.starts_with(RBAC));
    let mut search = Search { grants, found: Vec::new() };
    let node = Node { desired, live: Some(&live.data), ours, others, pointer: String::new(), path: String::new() };
    search.visit(&node, true);
    search.found.truncate(MAX_FIELDS);
    search.found
}

/// Leaves a field of a live object as it is: its value becomes the desired one while our entry still has the field, since
/// leaving it out would remove it; otherwise it is left out.
pub fn left_as_it_is(manager: &str, desired: &Value, live: &DynamicObject, members: [&str; 2]) -> Value {
    let [parent, name] = members;
    let set = fields::applied(manager, live).and_then(fields::of_entry);
    let is_ours = set.is_some_and(|set| set[format!("f:{parent}")].get(format!("f:{name}")).is_some());
    let pointer = format!("/{parent}/{name}");
    let (true, Some(value)) = (is_ours, live.data.pointer(&pointer)) else { return without(desired, &[pointer]) };
    let mut desired = desired.clone();
    desired[parent][name] = value.clone();
    desired
}

/// Removes fields from the desired object, each given by a JSON pointer.
pub fn without(desired: &Value, pointers: &[String]) -> Value {
    let mut desired = desired.clone();
    // Elements of a list go from its end, so that the places of the others stay.
    let mut pointers: Vec<_> = pointers.iter().filter_map(|pointer| pointer.rsplit_once('/')).collect();
    pointers.sort_by_key(|(parent, name)| (*parent, name.parse::<usize>().ok()));
    for (parent, name) in pointers.into_iter().rev() {
        match desired.pointer_mut(parent) {
            Some(Value::Object(members)) => drop(members.remove(&name.replace("~1", "/").replace("~0", "~"))),
            Some(Value::Array(elements)) => {
                if let Some(index) = name.parse().ok().filter(|index| *index < elements.len()) {
                    elements.remove(index);
                }
            }
            _ => {}
        }
    }
    desired
}

/// An entry of another manager, or of another operation.
#[derive(Clone, Copy)]
struct Other<'a> {
    entry: &'a ManagedFieldsEntry,
    /// What it has here.
    set: &'a Value,
}

struct Node<'a> {
    desired: &'a Value,
    live: Option<&'a Value>,
    ours: &'a Value,
    others: Vec<Other<'a>>,
    pointer: String,
    path: String,
}

struct Search {
    grants: bool,
    found: Vec<Disputed>,
}

impl Search {
    /// Visits the members of an object, or the elements of a list that is a map. The parser bounds the depth.
    fn visit(&mut self, node: &Node<'_>, is_root: bool) {
        match node.desired {
            Value::Object(desired) => {
                for (name, desired) in desired.iter().filter(|(name, _)| !(is_root && is_head(name))) {
                    let pointer = format!("{}/{}", node.pointer, name.replace('~', "~0").replace('/', "~1"));
                    let member = format!("f:{name}");
                    self.look(node, desired, &member, &Step::Field(name), pointer);
                }
            }
            Value::Array(desired) => {
                for (index, desired) in desired.iter().enumerate() {
                    let sets = [node.ours].into_iter().chain(node.others.iter().map(|other| other.set));
                    let mut steps = sets.flat_map(members).filter(|(_, step, _)| step.is_of(desired));
                    // An element that somebody removed has no owner.
                    let Some((member, step, _)) = steps.next() else { continue };
                    self.look(node, desired, member, &step, format!("{}/{index}", node.pointer));
                }
            }
            _ => {}
        }
    }

    fn look(&mut self, node: &Node<'_>, desired: &Value, member: &str, step: &Step<'_>, pointer: String) {
        let live = node.live.and_then(|live| step.within(live));
        if desired.is_null() || live == Some(desired) {
            return;
        }
        let mut path = node.path.clone();
        step.add_to(&mut path);
        let within = |other: &Other<'_>| other.set.get(member).is_some();
        let Some(ours) = node.ours.get(member) else {
            let last = node.others.iter().filter(|other| within(other)).max_by_key(|other| other.entry.time.clone());
            let writer = last.and_then(|other| other.entry.manager.clone());
            let name = pointer.rsplit('/').next().unwrap_or_default();
            let is_guarded = self.grants || GUARDED.contains(&name) || has_guarded(desired);
            return self.found.push(Disputed { pointer, path, writer, is_guarded });
        };
        if !is_leaf(ours) {
            let others = node.others.iter();
            let others = others.filter_map(|other| Some(Other { set: other.set.get(member)?, ..*other })).collect();
            self.visit(&Node { desired, live, ours, others, pointer, path }, false);
        }
    }
}

/// True for members that are no content, or not left to others.
fn is_head(name: &str) -> bool {
    matches!(name, "apiVersion" | "kind" | "metadata" | "status")
}

fn has_guarded(value: &Value) -> bool {
    match value {
        Value::Object(members) => {
            members.iter().any(|(name, inner)| GUARDED.contains(&name.as_str()) || has_guarded(inner))
        }
        Value::Array(elements) => elements.iter().any(has_guarded),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MANAGER: &str = "m";

    fn entry(manager: &str, second: u8, set: &Value) -> Value {
        let operation = if manager == MANAGER { "Apply" } else { "Update" };
        json!({"manager": manager, "operation": operation, "apiVersion": "apps/v1", "fieldsV1": set,
            "time": format!("2026-01-01T00:00:{second:02}Z")})
    }

    fn live(content: &Value, entries: &Value) -> DynamicObject {
        let mut object = content.clone();
        object["metadata"] = json!({"managedFields": entries});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn field_that_another_writer_owns_is_named_with_its_last_writer() {
        let desired = json!({"apiVersion": "apps/v1", "metadata": {"labels": {"a": "1"}}, "spec": {
            "replicas": 1, "paused": false, "gone": 1, "own": {"x": 1},
            "containers": [{"name": "a", "image": "i:1", "limits": {"cpu": "1"}}, {"name": "b", "tty": true}]}});
        let is = json!({"spec": {"replicas": 3, "paused": true, "own": {"x": 2},
            "containers": [{"name": "b", "tty": false}, {"name": "a", "image": "i:2", "limits": {"cpu": "2"}}]}});
        let a = "k:{\"name\":\"a\"}";
        let b = "k:{\"name\":\"b\"}";
        let entries = json!([
            entry(
                MANAGER,
                0,
                &json!({"f:spec": {"f:own": {"f:x": {}}, "f:containers": {a: {".": {}, "f:name": {}, "f:limits": {}}}}})
            ),
            entry("hpa", 1, &json!({"f:spec": {"f:replicas": {}}})),
            entry("kubectl-scale", 2, &json!({"f:spec": {"f:replicas": {}, "f:paused": {}}})),
            entry("kubectl-set", 3, &json!({"f:spec": {"f:containers": {a: {"f:image": {}}, b: {"f:tty": {}}}}})),
        ]);
        let mut found = disputed(MANAGER, &desired, &live(&is, &entries));
        found.sort_by(|one, other| one.path.cmp(&other.path));
        let found: Vec<_> = found
            .iter()
            .map(|it| (it.pointer.as_str(), it.path.as_str(), it.writer.as_deref(), it.is_guarded))
            .collect();
        let expected = [
            ("/spec/containers/0/image", "spec.containers[a].image", Some("kubectl-set"), true),
            ("/spec/containers/1", "spec.containers[b]", Some("kubectl-set"), false),
            ("/spec/gone", "spec.gone", None, false),
            ("/spec/paused", "spec.paused", Some("kubectl-scale"), false),
            ("/spec/replicas", "spec.replicas", Some("kubectl-scale"), false),
        ];
        assert_eq!(found, expected, "`limits` and `own` are ours, and differ in their form");
        assert_eq!(disputed("other", &desired, &live(&is, &entries)), [], "nothing of it was ours");
        let mut newer = desired;
        newer["apiVersion"] = "apps/v2".into();
        assert_eq!(disputed(MANAGER, &newer, &live(&is, &entries)), []);
    }

    #[test]
    fn what_runs_and_what_grants_rights_is_guarded() {
        let ours = |version: &str| {
            let mut entry = entry(MANAGER, 0, &json!({"f:spec": {"f:x": {}}}));
            entry["apiVersion"] = version.into();
            json!([entry])
        };
        for (desired, expected) in [
            (json!({"apiVersion": "apps/v1", "spec": {"serviceAccountName": "a"}}), true),
            (json!({"apiVersion": "apps/v1", "spec": {"template": {"spec": {"containers": [{"command": []}]}}}}), true),
            (json!({"apiVersion": "apps/v1", "spec": {"replicas": 1}}), false),
            (json!({"apiVersion": "rbac.authorization.k8s.io/v1", "rules": [{}]}), true),
        ] {
            let version = desired["apiVersion"].as_str().unwrap();
            let found = disputed(MANAGER, &desired, &live(&json!({}), &ours(version)));
            assert_eq!(found.len(), 1, "{desired}");
            assert_eq!(found[0].is_guarded, expected, "{desired}");
        }
    }

    #[test]
    fn field_that_is_still_ours_keeps_its_live_value() {
        let desired = json!({"spec": {"replicas": 1, "a": 1}});
        let ours = json!([entry(MANAGER, 0, &json!({"f:spec": {"f:replicas": {}}}))]);
        let theirs = json!([entry(MANAGER, 0, &json!({"f:spec": {"f:a": {}}}))]);
        for (entries, expected) in
            [(ours, json!({"spec": {"replicas": 3, "a": 1}})), (theirs, json!({"spec": {"a": 1}}))]
        {
            let live = live(&json!({"spec": {"replicas": 3}}), &entries);
            assert_eq!(left_as_it_is(MANAGER, &desired, &live, ["spec", "replicas"]), expected);
        }
    }

    #[test]
    fn yielded_fields_are_left_out() {
        let desired = json!({"spec": {"a": 1, "b/c~": 2, "list": [0, 1, 2, 3]}});
        let pointers = ["/spec/a", "/spec/list/0", "/spec/list/2", "/spec/b~1c~0", "/spec/x/y", "/spec/list/9", ""];
        let left = without(&desired, &pointers.map(str::to_owned));
        assert_eq!(left, json!({"spec": {"list": [1, 3]}}));
    }
}
