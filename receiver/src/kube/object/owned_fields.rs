//! Fields that a field manager applied, from `managedFields` (`FieldsV1` of the Kubernetes API). Pure.

use kube::api::{DynamicObject, ResourceExt as _};
use serde_json::Value;

/// Returns whether a manager applied a field before that the desired object lacks, so that its next server-side apply
/// removes the field.
pub(super) fn has_stale_field(manager: &str, desired: &Value, live: &DynamicObject) -> bool {
    let applied = live.managed_fields().iter().filter(|entry| {
        entry.manager.as_deref() == Some(manager)
            && entry.operation.as_deref() == Some("Apply")
            && entry.subresource.as_deref().unwrap_or_default().is_empty()
            // Names of fields differ between versions.
            && entry.api_version.as_deref() == desired["apiVersion"].as_str()
    });
    applied.filter_map(|entry| entry.fields_v1.as_ref()).any(|fields| lacks(desired, &fields.0))
}

/// Returns whether a value lacks one of these fields. Of a list that is a map, an element whose key is partly left to
/// defaults counts as present.
fn lacks(value: &Value, fields: &Value) -> bool {
    let Some(fields) = fields.as_object() else { return false };
    fields.iter().any(|(path, inner)| match (path.split_once(':'), value) {
        (Some(("f", name)), Value::Object(members)) => members.get(name).is_none_or(|member| lacks(member, inner)),
        (Some(("k", key)), Value::Array(items)) => {
            let Ok(Value::Object(key)) = serde_json::from_str(key) else { return false };
            let has_key = |item: &&Value| key.iter().all(|(name, value)| item.get(name).is_none_or(|is| is == value));
            items.iter().find(has_key).is_none_or(|item| lacks(item, inner))
        }
        (Some(("v", element)), Value::Array(items)) => {
            serde_json::from_str(element).is_ok_and(|element: Value| !items.contains(&element))
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn live(entry: Value) -> DynamicObject {
        let mut managed = json!({"manager": "m", "operation": "Apply", "apiVersion": "v1"});
        managed.as_object_mut().unwrap().extend(entry.as_object().unwrap().clone());
        serde_json::from_value(json!({"metadata": {"managedFields": [managed]}})).unwrap()
    }

    #[test]
    fn only_fields_that_the_manager_applied_in_this_version_are_stale() {
        let desired = json!({"apiVersion": "v1", "data": {"kept": "1"}});
        let dropped = json!({"f:data": {".": {}, "f:kept": {}, "f:dropped": {}}});
        assert!(has_stale_field("m", &desired, &live(json!({"fieldsV1": dropped}))));
        assert!(!has_stale_field("m", &desired, &live(json!({"fieldsV1": {"f:data": {".": {}, "f:kept": {}}}}))));
        for other in [
            json!({"manager": "x"}),
            json!({"operation": "Update"}),
            json!({"subresource": "status"}),
            json!({"apiVersion": "v1beta1"}),
        ] {
            let mut entry = json!({"fieldsV1": dropped});
            entry.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
            assert!(!has_stale_field("m", &desired, &live(entry)), "{other}");
        }
    }

    #[test]
    fn dropped_members_elements_and_metadata_are_found_at_any_depth() {
        let desired = json!({
            "metadata": {"labels": {"a": "1"}, "annotations": null},
            "spec": {
                "ports": [{"port": 80, "name": "http"}], "set": ["a"], "atomic": [{"x": 1}], "empty": {}, "null": null,
                "a:b": 1,
            },
        });
        let is_stale = |fields: Value| lacks(&desired, &fields);
        for kept in [
            json!({"f:metadata": {"f:labels": {"f:a": {}}, "f:annotations": {"f:x": {}}}}),
            json!({"f:spec": {"f:ports": {".": {}, "k:{\"port\":80,\"protocol\":\"TCP\"}": {".": {}, "f:name": {}}}}}),
            json!({"f:spec": {"f:set": {"v:\"a\"": {}}, "f:atomic": {}, "f:empty": {}, "f:null": {"f:x": {}}, "f:a:b": {}}}),
            json!({"f:spec": {"f:set": {"i:0": {}, "k:{": {}, "x": {}}}}),
            json!("text"),
        ] {
            assert!(!is_stale(kept.clone()), "{kept}");
        }
        for stale in [
            json!({"f:metadata": {"f:labels": {"f:b": {}}}}),
            json!({"f:spec": {"f:ports": {"k:{\"port\":81,\"protocol\":\"TCP\"}": {}}}}),
            json!({"f:spec": {"f:ports": {"k:{\"port\":80,\"protocol\":\"TCP\"}": {"f:nodePort": {}}}}}),
            json!({"f:spec": {"f:set": {"v:\"b\"": {}}}}),
            json!({"f:spec": {"f:empty": {"f:x": {}}}}),
            json!({"f:status": {}}),
        ] {
            assert!(is_stale(stale.clone()), "{stale}");
        }
    }
}
