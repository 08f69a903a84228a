//! Content of a template: the part of its specification that decides what runtimes install. Pure.

use serde_json::Value;
use tidewatch_api::ModuleTemplateSpec;
use tidewatch_kit::digest::short_digest;

/// Identifier of the content of a template, which changes with every field but [`ModuleTemplateSpec::EDITABLE`]: the first
/// five bytes of the SHA-256 of its JSON in hex.
pub fn content_id(spec: &ModuleTemplateSpec) -> String {
    let mut content = serde_json::to_value(spec).unwrap_or_default();
    if let Value::Object(members) = &mut content {
        ModuleTemplateSpec::EDITABLE.iter().for_each(|field| drop(members.remove(*field)));
    }
    // `Value` keeps its keys sorted.
    short_digest(content.to_string().as_bytes(), 5)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn identifier_changes_with_all_but_fields_without_effect_in_a_runtime() {
        let id = |change: Value| {
            let mut spec = json!({"moduleName": "keda", "version": "1.0.0", "descriptor": {}});
            spec.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            content_id(&serde_json::from_value(spec).unwrap())
        };
        let plain = id(json!({}));
        assert_eq!(plain.len(), 10);
        for same in [
            json!({"info": {"repository": "https://r", "documentation": "https://d"}}),
            json!({"resources": [{"name": "raw", "link": "https://l"}]}),
            json!({"channel": "regular"}),
            json!({"customStateCheck": [{"jsonPath": "status.x", "value": "y", "mappedState": "Ready"}]}),
        ] {
            assert_eq!(id(same.clone()), plain, "{same}");
        }
        for other in [
            json!({"data": {"apiVersion": "a/v1", "kind": "Keda"}}),
            json!({"descriptor": {"x": 1}}),
            json!({"manager": {"group": "apps", "version": "v1", "kind": "Deployment", "name": "m"}}),
            json!({"requiresDowntime": true}),
            json!({"mandatory": true}),
            json!({"fieldOfALaterVersion": 1}),
        ] {
            assert_ne!(id(other.clone()), plain, "{other}");
        }
    }
}
