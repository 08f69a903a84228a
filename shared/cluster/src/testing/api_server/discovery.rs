//! Discovery of the kinds that stored definitions define. Kinds of Kubernetes itself are missing.

use http::StatusCode;
use serde_json::{Value, json};

use super::{Response, ok};

/// Response to a request for an API group, or for the resources of a group and version. `None` for any other path.
pub(super) fn respond<'a>(path: &str, definitions: impl Iterator<Item = &'a Value>) -> Option<Response> {
    let segments: Vec<_> = path.trim_start_matches('/').split('/').collect();
    let (group, version) = match segments[..] {
        ["apis", group] => (group, None),
        ["apis", group, version] => (group, Some(version)),
        _ => return None,
    };
    let of_group: Vec<_> = definitions.filter(|definition| definition["spec"]["group"] == group).collect();
    let documents = match version {
        None => versions(&of_group),
        Some(version) => of_group.iter().filter(|it| serves(it, version)).map(|it| resource(it)).collect(),
    };
    if documents.is_empty() {
        return Some((StatusCode::NOT_FOUND, "404 page not found\n".to_owned()));
    }
    Some(ok(&match version {
        None => json!({"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": documents}),
        Some(version) => json!({"kind": "APIResourceList", "apiVersion": "v1",
            "groupVersion": format!("{group}/{version}"), "resources": documents}),
    }))
}

/// Returns true if the definition serves the version.
pub(super) fn serves(definition: &Value, version: &str) -> bool {
    let mut versions = definition["spec"]["versions"].as_array().into_iter().flatten();
    versions.any(|it| it["name"] == version && it["served"] == true)
}

fn versions(definitions: &[&Value]) -> Vec<Value> {
    let all = definitions.iter().flat_map(|it| it["spec"]["versions"].as_array().into_iter().flatten());
    let mut names: Vec<_> = all.filter(|it| it["served"] == true).map(|it| it["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(|name| json!({"version": name})).collect()
}

fn resource(definition: &Value) -> Value {
    let spec = &definition["spec"];
    json!({"name": spec["names"]["plural"], "singularName": "", "kind": spec["names"]["kind"],
        "namespaced": spec["scope"] == "Namespaced", "verbs": ["get", "list"]})
}
