//! Fields that field managers applied, from `managedFields`. Pure.

use kube::{ResourceExt as _, api::DynamicObject};
use serde_json::Value;

use super::fields::{self, Live, Step, is_leaf, members};

/// Returns whether a manager applied a field before that the desired object lacks and the live one has, so that its next
/// server-side apply removes the field.
pub(super) fn has_stale_field(manager: &str, desired: &Value, live: &DynamicObject) -> bool {
    let Some(entry) = fields::applied(manager, live) else { return false };
    // Names of fields differ between versions.
    if entry.api_version.as_deref() != desired["apiVersion"].as_str() {
        return false;
    }
    let Some(set) = fields::of_entry(entry) else { return false };
    let live = Live::new(live);
    members(set).any(|(_, step, inner)| match step {
        Step::Field(name) => is_stale(desired.get(name), live.member(name), inner),
        Step::Element(_) | Step::Value(_) => false,
    })
}

fn is_stale(desired: Option<&Value>, live: Option<&Value>, set: &Value) -> bool {
    match (desired, live) {
        (_, None | Some(Value::Null)) => false,
        (None, Some(_)) => true,
        (Some(desired), Some(live)) => lacks(desired, live, set),
    }
}

/// Returns whether a value lacks one of these fields that the live one has. Of a list that is a map, an element whose key
/// is partly left to defaults counts as present.
fn lacks(desired: &Value, live: &Value, set: &Value) -> bool {
    // Null permits any value, and another type is a difference that the comparison of the values finds.
    if !(desired.is_object() || desired.is_array()) {
        return false;
    }
    members(set).any(|(_, step, inner)| is_stale(step.within(desired), step.within(live), inner))
}

/// Returns whether a desired field is owned by another manager of ours, and not by `manager`: somebody has changed the field,
/// and the other one has changed it back.
pub fn has_lost_field(manager: &str, is_other: impl Fn(&str) -> bool, desired: &Value, live: &DynamicObject) -> bool {
    let sets_of = |selects: &dyn Fn(&str) -> bool| -> Vec<&Value> {
        let entries = live.managed_fields().iter();
        let selected = entries.filter(|entry| entry.manager.as_deref().is_some_and(selects));
        selected.filter_map(fields::of_entry).collect()
    };
    let own = sets_of(&|name| name == manager);
    sets_of(&is_other).iter().any(|set| lacks_owned(desired, set, &own))
}

/// Returns whether a value has one of these fields, and none of the `own` ones does.
fn lacks_owned(desired: &Value, set: &Value, own: &[&Value]) -> bool {
    members(set).any(|(member, step, inner)| {
        let value = step.within(desired).filter(|value| !value.is_null() && !matches!(step, Step::Value(_)));
        let Some(value) = value else { return false };
        let own: Vec<_> = own.iter().filter_map(|set| set.get(member)).collect();
        if is_leaf(inner) { own.is_empty() } else { lacks_owned(value, inner, &own) }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn live(entry: Value) -> DynamicObject {
        let mut managed = json!({"manager": "m", "operation": "Apply", "apiVersion": "v1"});
        managed.as_object_mut().unwrap().extend(entry.as_object().unwrap().clone());
        let data = json!({"kept": "1", "dropped": "2"});
        serde_json::from_value(json!({"metadata": {"managedFields": [managed]}, "data": data})).unwrap()
    }

    #[test]
    fn only_fields_that_the_manager_applied_in_this_version_are_stale() {
        let desired = json!({"apiVersion": "v1", "data": {"kept": "1"}});
        let dropped = json!({"f:data": {".": {}, "f:kept": {}, "f:dropped": {}}});
        assert!(has_stale_field("m", &desired, &live(json!({"fieldsV1": dropped}))));
        assert!(!has_stale_field("m", &desired, &live(json!({"fieldsV1": {"f:data": {".": {}, "f:kept": {}}}}))));
        let gone = json!({"f:data": {".": {}, "f:kept": {}, "f:gone": {}}, "f:spec": {"f:gone": {}}});
        assert!(!has_stale_field("m", &desired, &live(json!({"fieldsV1": gone}))), "it was null, or is empty");
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
    fn port_of_another_protocol_does_not_stand_for_one_that_leaves_it_to_the_default() {
        let ports = |tcp: Value| json!({"ports": [tcp, {"port": 53, "protocol": "UDP", "name": "udp"}]});
        let desired = ports(json!({"port": 53, "name": "tcp"}));
        let live = ports(json!({"port": 53, "protocol": "TCP", "name": "tcp"}));
        let udp = json!({".": {}, "f:port": {}, "f:protocol": {}, "f:name": {}});
        let tcp = json!({".": {}, "f:port": {}, "f:name": {}});
        let set = json!({"f:ports": {
            "k:{\"port\":53,\"protocol\":\"TCP\"}": tcp, "k:{\"port\":53,\"protocol\":\"UDP\"}": udp,
        }});
        assert!(!lacks(&desired, &live, &set));
        let desired = json!({"ports": [{"port": 53, "name": "tcp"}]});
        assert!(lacks(&desired, &live, &set), "the port for UDP is dropped");
    }

    #[test]
    fn desired_field_of_another_manager_is_lost_unless_it_is_shared() {
        let desired = json!({"data": {"a": "1", "null": null}, "list": [{"name": "x", "value": 1}]});
        let is_lost = |own: Value, other: Value| {
            let entry =
                |manager: &str, fields: Value| json!({"manager": manager, "operation": "Apply", "fieldsV1": fields});
            let managed = [entry("m", own), entry("other", other)];
            let live = serde_json::from_value(json!({"metadata": {"managedFields": managed}})).unwrap();
            has_lost_field("m", |name| name == "other", &desired, &live)
        };
        let data = |field: &str| json!({"f:data": {".": {}, format!("f:{field}"): {}}});
        let item = |field: &str| json!({"f:list": {"k:{\"name\":\"x\"}": {".": {}, format!("f:{field}"): {}}}});
        assert!(is_lost(json!({}), data("a")) && is_lost(data("b"), data("a")) && !is_lost(data("a"), data("a")));
        assert!(!is_lost(json!({}), data("b")) && !is_lost(json!({}), data("null")), "not desired");
        assert!(is_lost(item("name"), item("value")) && !is_lost(item("value"), item("value")));
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
        let live = json!({
            "metadata": {"labels": {"a": "1", "b": "1"}, "annotations": {"x": "1"}},
            "spec": {
                "ports": [{"port": 80, "protocol": "TCP", "name": "http", "nodePort": 1}, {"port": 81, "protocol": "TCP"}],
                "set": ["a", "b"], "atomic": [{"x": 1}], "empty": {"x": 1}, "null": {"x": 1}, "a:b": 1,
            },
            "status": {},
        });
        let is_stale = |fields: Value| lacks(&desired, &live, &fields);
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
