//! CRDs of a version.

use serde_json::Value;
use tidewatch_api::names::GROUP;

use crate::inventory::ObjectKey;

/// Kinds whose CRDs Kyma itself installs in every cluster.
const OWN: [&str; 3] = ["Kyma", "ModuleTemplate", "ModuleReleaseMeta"];

/// The first mistake in a CRD; `None` for any other object.
pub(super) fn mistake(key: &ObjectKey, object: &Value) -> Option<String> {
    // Other versions are not served any more.
    if !key.is_definition() || object["apiVersion"] != "apiextensions.k8s.io/v1" {
        return None;
    }
    let spec = &object["spec"];
    if !spec.is_object() {
        return Some("the CRD has no spec".to_owned());
    }
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let names = &spec["names"];
    for (path, value) in [("group", &spec["group"]), ("names.kind", &names["kind"]), ("names.plural", &names["plural"])]
    {
        if text(value).is_none() {
            return Some(format!("spec.{path} of the CRD is missing or not a string"));
        }
    }
    if spec["group"] == GROUP && OWN.iter().any(|own| names["kind"] == **own) {
        let kind = names["kind"].as_str().unwrap_or_default();
        return Some(format!("the receiver brings the CRD of {kind} itself, a module must not; remove it"));
    }
    if !matches!(spec["scope"].as_str(), Some("Namespaced" | "Cluster")) {
        return Some("spec.scope of the CRD is neither Namespaced nor Cluster".to_owned());
    }
    let name = format!("{}.{}", text(&names["plural"])?, text(&spec["group"])?);
    if key.name != name {
        return Some(format!("the name of the CRD must be {name}"));
    }
    of_versions(&spec["versions"])
}

fn of_versions(versions: &Value) -> Option<String> {
    let versions = versions.as_array().map(Vec::as_slice).unwrap_or_default();
    let is_complete = |version: &Value| {
        version["name"].is_string() && version["served"].is_boolean() && version["storage"].is_boolean()
    };
    if !versions.iter().all(is_complete) {
        return Some("each of spec.versions of the CRD needs name, served and storage".to_owned());
    }
    let stored = versions.iter().filter(|version| version["storage"] == true).count();
    (stored != 1).then(|| format!("{stored} of spec.versions of the CRD have storage: true instead of one"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    type Change = fn(&mut Value);

    fn found(change: impl FnOnce(&mut Value)) -> Option<String> {
        let mut definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": "samples.example.test"}, "spec": {"group": "example.test", "scope": "Namespaced",
                "names": {"kind": "Sample", "plural": "samples"},
                "versions": [{"name": "v1", "served": true, "storage": true}]}});
        change(&mut definition);
        mistake(&ObjectKey::of(&definition), &definition)
    }

    #[test]
    fn incomplete_definitions_and_those_of_the_receiver_are_mistakes() {
        assert_eq!(found(|_| ()), None);
        let changes: [(Change, &str); 10] = [
            (|it| it["spec"] = Value::Null, "the CRD has no spec"),
            (|it| it["spec"]["group"] = "".into(), "spec.group of the CRD is missing or not a string"),
            (|it| it["spec"]["names"] = Value::Null, "spec.names.kind of the CRD is missing or not a string"),
            (|it| it["spec"]["names"]["plural"] = 1.into(), "spec.names.plural of the CRD is missing or not a string"),
            (|it| it["spec"]["scope"] = "namespaced".into(), "spec.scope of the CRD is neither Namespaced nor Cluster"),
            (|it| it["metadata"]["name"] = "sample".into(), "the name of the CRD must be samples.example.test"),
            (
                |it| it["spec"]["versions"] = json!([]),
                "0 of spec.versions of the CRD have storage: true instead of one",
            ),
            (
                |it| it["spec"]["versions"][0]["served"] = Value::Null,
                "each of spec.versions of the CRD needs name, served and storage",
            ),
            (
                |it| {
                    let versions = it["spec"]["versions"].as_array_mut().unwrap();
                    versions.push(json!({"name": "v2", "served": true, "storage": true}));
                },
                "2 of spec.versions of the CRD have storage: true instead of one",
            ),
            (
                |it| {
                    it["spec"]["group"] = GROUP.into();
                    it["spec"]["names"] = json!({"kind": "Kyma", "plural": "kymas"});
                },
                "the receiver brings the CRD of Kyma itself, a module must not; remove it",
            ),
        ];
        for (change, expected) in changes {
            assert_eq!(found(change).as_deref(), Some(expected));
        }
        assert_eq!(found(|it| it["apiVersion"] = "apiextensions.k8s.io/v1beta1".into()), None);
        assert_eq!(found(|it| it["kind"] = "Other".into()), None);
    }
}
