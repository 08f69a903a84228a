//! Forms in which an API server stores an applied object otherwise than it was sent. Pure.
//!
//! A receiver that starts does not know what earlier ones applied. `managedFields` tell: a field that our entry still has
//! was changed by no other writer since our last apply. If such a field differs from the desired one only in its form,
//! then so does what the API server would make of another apply, whatever we applied last. So each rule here holds
//! without a memory: `1000m` and `1` are one quantity, and where `false` is stored, an absent field means something else.
//! The owner of a list that is no map says nothing about single fields in it; there, only fields with a known meaning count.

use kube::api::DynamicObject;
use serde_json::{Map, Value};

use super::{
    fields::{self, Step, is_leaf, members},
    quantity::are_equal,
};

/// Members of objects that hold quantities by resource.
const QUANTITY_MAPS: [&str; 10] = [
    "capacity",
    "default",
    "defaultRequest",
    "hard",
    "limits",
    "max",
    "maxLimitRequestRatio",
    "min",
    "podFixed",
    "requests",
];
/// Members that are quantities.
const QUANTITIES: [&str; 3] = ["averageValue", "divisor", "sizeLimit"];
/// Members in lists that are no maps whose empty value, zero, or `false` equals an absent one. `default`, `minimum` and
/// `storageClassName`, for instance, are none of them.
const EMPTY_AS_ABSENT: [&str; 18] = [
    "apiGroup",
    "deprecated",
    "description",
    "effect",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "key",
    "namespace",
    "nullable",
    "operator",
    "pattern",
    "priority",
    "properties",
    "title",
    "uniqueItems",
    "value",
    "x-kubernetes-embedded-resource",
];
/// Members that hold data of any form, which API servers do not touch.
const RAW: [&str; 4] = ["default", "enum", "example", "const"];

/// What our entry has of a value.
#[derive(Clone, Copy)]
enum Owned<'a> {
    /// Its fields.
    Fields(&'a Value),
    /// The value as a whole.
    Whole,
}

impl<'a> Owned<'a> {
    fn of(set: &'a Value) -> Self {
        if is_leaf(set) { Self::Whole } else { Self::Fields(set) }
    }

    /// What it has of a member; `None` if that is not ours.
    fn member(self, name: &str) -> Option<Self> {
        match self {
            Self::Fields(set) => set.get(format!("f:{name}")).map(Self::of),
            Self::Whole => Some(Self::Whole),
        }
    }
}

/// Position of a value.
#[derive(Clone, Copy)]
struct Place<'a> {
    /// Member that contains the object of this one.
    parent: &'a str,
    name: &'a str,
    /// In a list that is no map, or in another value that our entry has as a whole.
    is_within_whole: bool,
    /// The API server decodes the object into a type. Custom resources are stored as they are sent.
    is_typed: bool,
}

/// Returns whether each difference between the desired content and the live one is a form of what our field manager
/// applied in this API version, or an addition of others to a list that is a map. `is_typed` is false for custom resources,
/// which API servers store as they are sent.
pub(super) fn explains(manager: &str, desired: &Value, live: &DynamicObject, is_typed: bool) -> bool {
    let Some(entry) = fields::applied(manager, live) else { return false };
    // Names of fields differ between versions.
    if entry.api_version.as_deref() != desired["apiVersion"].as_str() {
        return false;
    }
    let Some(set) = fields::of_entry(entry) else { return false };
    let content = desired.as_object().into_iter().flatten();
    let mut content =
        content.filter(|(name, _)| !matches!(name.as_str(), "apiVersion" | "kind" | "metadata" | "status"));
    content.all(|(name, desired)| {
        let place = Place { parent: "", name, is_within_whole: false, is_typed };
        is_form(desired, live.data.get(name), Owned::Fields(set).member(name), place)
    })
}

fn is_form(desired: &Value, live: Option<&Value>, owned: Option<Owned<'_>>, place: Place<'_>) -> bool {
    let live = live.filter(|live| !live.is_null());
    if desired.is_null() || live == Some(desired) {
        return true;
    }
    let Some(owned) = owned else { return false };
    if RAW.contains(&place.name) && place.is_within_whole {
        return false;
    }
    match (desired, live) {
        (desired, None) => {
            place.is_typed && is_empty(desired) && (!place.is_within_whole || EMPTY_AS_ABSENT.contains(&place.name))
        }
        (Value::Object(desired), Some(Value::Object(live))) => are_members_forms(desired, live, owned, place),
        (Value::Array(desired), Some(Value::Array(live))) => match owned {
            Owned::Fields(set) => are_elements_forms(desired, live, set, place),
            Owned::Whole => {
                let place = Place { is_within_whole: true, ..place };
                let mut pairs = desired.iter().zip(live);
                desired.len() == live.len()
                    && pairs.all(|(desired, live)| is_form(desired, Some(live), Some(owned), place))
            }
        },
        (Value::Number(one), Some(Value::Number(other))) if one.is_f64() || other.is_f64() => {
            one.as_f64() == other.as_f64()
        }
        (desired, Some(live)) => {
            let is_quantity = QUANTITY_MAPS.contains(&place.parent) || QUANTITIES.contains(&place.name);
            place.is_typed && is_quantity && are_equal(desired, live)
        }
    }
}

fn are_members_forms(
    desired: &Map<String, Value>,
    live: &Map<String, Value>,
    owned: Owned<'_>,
    place: Place<'_>,
) -> bool {
    desired.iter().all(|(name, desired)| {
        let place = Place { parent: place.name, name, ..place };
        is_form(desired, live.get(name), owned.member(name), place)
    })
}

/// Compares the elements of a list that is a map or a set. Those of others may lie between ours, in any order.
fn are_elements_forms(desired: &[Value], live: &[Value], set: &Value, place: Place<'_>) -> bool {
    let steps: Vec<_> = members(set).map(|(_, step, inner)| (step, inner)).collect();
    let mut rest = live.iter();
    desired.iter().all(|element| {
        let is_here = |step: &Step<'_>| step.element_of(desired).is_some_and(|found| std::ptr::eq(found, element));
        let owned = steps.iter().find(|(step, _)| is_here(step));
        let Some((step, inner)) = owned else { return false };
        // The order of ours is that of the last apply.
        let Some(found) = rest.find(|live| step.is_of(live)) else { return false };
        // The element of a set is its own key.
        matches!(step, Step::Value(_)) || is_form(element, Some(found), Some(Owned::of(inner)), place)
    })
}

/// True for what API servers may leave out: `false`, zero, an empty text, list or object, and objects of such.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(elements) => elements.is_empty(),
        Value::Object(members) => members.values().all(is_empty),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MANAGER: &str = "m";

    fn holds(desired: &Value, live: &Value, set: &Value) -> bool {
        holds_for(desired, live, set, true)
    }

    fn holds_for(desired: &Value, live: &Value, set: &Value, is_typed: bool) -> bool {
        let managed = json!([{"manager": MANAGER, "operation": "Apply", "apiVersion": "v1", "fieldsV1": set}]);
        let mut object = live.clone();
        object["metadata"] = json!({"managedFields": managed});
        let mut desired = desired.clone();
        desired["apiVersion"] = "v1".into();
        explains(MANAGER, &desired, &serde_json::from_value(object).unwrap(), is_typed)
    }

    #[test]
    fn stored_form_of_an_owned_field_is_no_difference_and_another_value_is_one() {
        let env = json!({"f:spec": {"f:env": {"k:{\"name\":\"a\"}": {".": {}, "f:name": {}, "f:value": {}}}}});
        let limits = json!({"f:spec": {"f:limits": {"f:cpu": {}, "f:memory": {}}}});
        for (desired, live, set, expected) in [
            (json!({"globalDefault": false}), json!({}), json!({"f:globalDefault": {}}), true),
            (json!({"globalDefault": false}), json!({"globalDefault": true}), json!({"f:globalDefault": {}}), false),
            (json!({"globalDefault": true}), json!({}), json!({"f:globalDefault": {}}), false),
            (
                json!({"spec": {"env": [{"name": "a", "value": ""}]}}),
                json!({"spec": {"env": [{"name": "a"}]}}),
                env.clone(),
                true,
            ),
            (
                json!({"spec": {"env": [{"name": "a", "value": ""}]}}),
                json!({"spec": {"env": [{"name": "a", "value": "x"}]}}),
                env,
                false,
            ),
            (
                json!({"spec": {"limits": {"cpu": "1000m", "memory": 1024}}}),
                json!({"spec": {"limits": {"cpu": "1", "memory": "1024"}}}),
                limits.clone(),
                true,
            ),
            (json!({"spec": {"limits": {"cpu": "1"}}}), json!({"spec": {"limits": {"cpu": "2"}}}), limits, false),
            // Texts that are numbers only by chance.
            (
                json!({"data": {"version": "1.10"}}),
                json!({"data": {"version": "1.1"}}),
                json!({"f:data": {"f:version": {}}}),
                false,
            ),
            (json!({"spec": {"a": null}}), json!({"spec": {"a": 1}}), json!({"f:spec": {"f:a": {}}}), true),
            (json!({"spec": {"a": 1.0}}), json!({"spec": {"a": 1}}), json!({"f:spec": {"f:a": {}}}), true),
            (json!({"spec": {"a": {"b": false}}}), json!({"spec": {}}), json!({"f:spec": {"f:a": {"f:b": {}}}}), true),
        ] {
            assert_eq!(holds(&desired, &live, &set), expected, "{desired} {live}");
            let is_null_or_float = desired["spec"]["a"].is_null() || desired["spec"]["a"].is_f64();
            let of_custom = expected && is_null_or_float && desired["spec"].get("a").is_some();
            assert_eq!(holds_for(&desired, &live, &set, false), of_custom, "custom: {desired} {live}");
            if expected && !desired["spec"]["a"].is_null() {
                assert!(!holds(&desired, &live, &json!({"f:metadata": {}})), "another writer owns it: {desired}");
            }
        }
    }

    #[test]
    fn list_that_is_a_map_may_have_elements_of_others_and_keeps_the_order_of_ours() {
        let set = json!({"f:spec": {"f:l": {"k:{\"name\":\"a\"}": {".": {}, "f:name": {}}, "k:{\"name\":\"b\"}": {".": {}, "f:name": {}}}}});
        let list = |names: &[&str]| {
            let elements: Vec<_> = names.iter().map(|name| json!({"name": name})).collect();
            json!({"spec": {"l": elements}})
        };
        let desired = list(&["a", "b"]);
        for (live, expected) in [
            (&["a", "b", "theirs"][..], true),
            (&["theirs", "a", "more", "b"], true),
            (&["b", "a"], false),
            (&["a"], false),
        ] {
            assert_eq!(holds(&desired, &list(live), &set), expected, "{live:?}");
        }
        assert!(!holds(&list(&["a", "new"]), &list(&["a", "new", "theirs"]), &set), "another writer owns it");
        let set = json!({"f:spec": {"f:l": {"v:\"a\"": {}}}});
        let text = |elements: &[&str]| json!({"spec": {"l": elements}});
        assert!(holds(&text(&["a"]), &text(&["b", "a"]), &set) && !holds(&text(&["a"]), &text(&["b"]), &set));
    }

    #[test]
    fn port_without_a_protocol_is_not_that_of_another_protocol() {
        let keys = |protocol: &str| format!("k:{{\"port\":80,\"protocol\":\"{protocol}\"}}");
        let owned = json!({"f:port": {}, "f:name": {}, "f:protocol": {}});
        let set = json!({"f:spec": {"f:ports": {keys("SCTP"): owned, keys("TCP"): owned}}});
        let list = |ports: Value| json!({"spec": {"ports": ports}});
        let sctp = json!({"port": 80, "protocol": "SCTP", "name": "b"});
        let desired = list(json!([{"port": 80, "name": "a"}, sctp]));
        let live = |name: &str| list(json!([{"port": 80, "protocol": "TCP", "name": name}, sctp]));
        assert!(holds(&desired, &live("a"), &set) && !holds(&desired, &live("x"), &set));
    }

    #[test]
    fn within_a_list_that_is_owned_as_a_whole_only_known_fields_may_be_absent() {
        let set = json!({"f:spec": {"f:l": {}}});
        let list = |element: Value| json!({"spec": {"l": [element]}});
        for (desired, expected) in [
            (json!({"kind": "x", "apiGroup": ""}), true),
            (json!({"kind": "x", "nullable": false}), true),
            (json!({"kind": "x", "properties": {}}), true),
            (json!({"kind": "x", "minimum": 0}), false),
            (json!({"kind": "x", "default": false}), false),
            (json!({"kind": "x", "default": {"priority": 0}}), false),
        ] {
            assert_eq!(holds(&list(desired.clone()), &list(json!({"kind": "x"})), &set), expected, "{desired}");
        }
        let raw = |value: Value| list(json!({"kind": "x", "default": value}));
        assert!(!holds(&raw(json!({"priority": 0})), &raw(json!({})), &set), "data of any form");
        assert!(!holds(&list(json!(1)), &json!({"spec": {"l": [1, 2]}}), &set), "its length is ours");
    }
}
