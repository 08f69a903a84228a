//! Objects that several modules have. Each module writes its form: fields with equal values are shared, for other values only one
//! module can have its way.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{AppliedObjects, ObjectIdentity, fields};

/// A version of a module.
#[derive(Clone, Debug, PartialEq)]
pub struct ComparedVersion {
    /// Component of the module. Versions of one component are not compared: a runtime cluster has one of them.
    pub component: String,
    /// Its objects.
    pub objects: AppliedObjects,
}

/// A field for which two modules have other values.
#[derive(Clone, Debug, PartialEq)]
pub struct Conflict {
    /// The object.
    pub object: ObjectIdentity,
    /// Path of the field.
    pub path: String,
    /// Positions of the two versions.
    pub versions: [usize; 2],
    /// Their values.
    pub values: [Value; 2],
}

/// Compares the objects that several modules have. Of a field, two modules are reported once.
pub fn conflicts(versions: &[ComparedVersion]) -> Vec<Conflict> {
    let mut found = Vec::new();
    let mut reported = BTreeSet::new();
    let mut known: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (second, version) in versions.iter().enumerate() {
        for object in &version.objects.rendered {
            let earlier = known.entry(&object.key).or_default();
            let is_other = |(first, _): &&(usize, &Value)| versions[*first].component != version.component;
            for (first, body) in earlier.iter().filter(is_other) {
                let changes = fields::changes(body, &object.body);
                for (path, values) in changes.into_iter().filter_map(contradiction) {
                    let components = [&versions[*first].component, &version.component];
                    if reported.insert((&object.key, path.clone(), components)) {
                        let object = ObjectIdentity::of_rendered(object);
                        found.push(Conflict { object, path, versions: [*first, second], values });
                    }
                }
            }
            earlier.push((second, &object.body));
        }
    }
    found
}

/// Path and values of a field that both forms have; `None` for one that a form lacks, and for the order of named elements.
fn contradiction(change: fields::FieldChange) -> Option<(String, [Value; 2])> {
    let fields::FieldChange { path, before, after } = change;
    let is_element = || {
        let index = path.strip_suffix(']').and_then(|path| path.rsplit_once('[')).map(|(_, index)| index);
        index.is_some_and(|index| !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()))
    };
    match (before, after) {
        (Some(_), Some(_)) if path.ends_with("[]") => None,
        (Some(before), Some(after)) => Some((path, [before, after])),
        // One of two lists that are replaced as a whole is longer.
        (before, after) if is_element() => Some((path, [before, after].map(Option::unwrap_or_default))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::preview::VersionContent;

    fn found(modules: &[&[Value]]) -> Vec<(String, String, [usize; 2])> {
        let named: Vec<_> = modules.iter().enumerate().map(|(n, objects)| (n.to_string(), *objects)).collect();
        found_of(&named)
    }

    fn found_of(versions: &[(String, &[Value])]) -> Vec<(String, String, [usize; 2])> {
        let compared = |(component, objects): &(String, &[Value])| {
            let content = VersionContent { objects: objects.to_vec(), ..VersionContent::default() };
            ComparedVersion { component: component.clone(), objects: content.applied().unwrap() }
        };
        let versions: Vec<_> = versions.iter().map(compared).collect();
        let named = |it: Conflict| (it.object.to_string(), it.path, it.versions);
        conflicts(&versions).into_iter().map(named).collect()
    }

    fn map(data: Value) -> Value {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m", "namespace": "ns"}, "data": data})
    }

    #[test]
    fn fields_with_other_values_conflict_and_equal_or_absent_ones_do_not() {
        let namespace = |label: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kyma-system", "labels": {"istio-injection": label}}});
        let first = [map(json!({"a": "1", "b": "1"})), namespace("enabled")];
        let second = [map(json!({"a": "1", "c": "1"})), namespace("enabled")];
        assert_eq!(found(&[&first, &second]), []);
        let third = [map(json!({"a": "2"})), namespace("disabled")];
        let text = str::to_owned;
        let both = |versions: [usize; 2]| (text("ConfigMap ns/m"), text("data.a"), versions);
        let label =
            |versions: [usize; 2]| (text("Namespace kyma-system"), text("metadata.labels.istio-injection"), versions);
        let expected = [label([0, 2]), label([1, 2]), both([0, 2]), both([1, 2])];
        assert_eq!(found(&[&first, &second, &third]), expected);
    }

    #[test]
    fn versions_of_one_module_are_not_compared_and_two_modules_are_named_once() {
        let [one, two] = [map(json!({"a": "1"})), map(json!({"a": "2"}))].map(|map| [map]);
        let version = |component: &str, objects: &'static str| (component.to_owned(), objects);
        let versions = [version("x", "1"), version("x", "2"), version("y", "1"), version("y", "2")];
        let versions = versions.map(|(name, data)| (name, if data == "1" { &one[..] } else { &two[..] }));
        assert_eq!(found_of(&versions), [("ConfigMap ns/m".to_owned(), "data.a".to_owned(), [1, 2])]);
    }

    #[test]
    fn lists_conflict_as_a_whole_or_by_their_names() {
        let role = |verbs: &[Value]| json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "r"}, "rules": verbs});
        let rule = |verb: &str| json!({"apiGroups": ["a"], "resources": ["b"], "verbs": [verb]});
        let longer = found(&[&[role(&[rule("get")])], &[role(&[rule("get"), rule("list")])]]);
        assert_eq!(longer, [("ClusterRole r".to_owned(), "rules[1]".to_owned(), [0, 1])]);
        let service = |ports: Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "ns"}, "spec": {"ports": ports}});
        let one = service(json!([{"name": "a", "port": 1}]));
        let other = service(json!([{"name": "b", "port": 2}, {"name": "a", "port": 1}]));
        assert_eq!(found(&[&[one], &[other]]), []);
    }
}
