//! `stringData` of Secrets. The API server writes it over `data` and forgets it, so that nobody owns the keys: one that a
//! version drops would stay for ever. Therefore it is written as `data`.

use std::collections::BTreeSet;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use kube::{ResourceExt as _, api::DynamicObject};
use serde_json::{Value, json};
use tidewatch_api::names::field_manager;

use crate::inventory::ObjectKey;

const STRING_DATA: &str = "f:stringData";

/// Writes the texts of a Secret into its data. Members of other types stay as they are: the API server names the mistake.
pub(super) fn fold(body: &mut Value, key: &ObjectKey) {
    let Some(members) = body.as_object_mut().filter(|_| key.is_secret()) else { return };
    let texts: Vec<_> = match members.get("stringData") {
        None => return,
        Some(Value::Null) => Vec::new(),
        Some(Value::Object(texts)) if texts.values().all(|text| text.is_string() || text.is_null()) => {
            let encode = |text: &Value| BASE64_STANDARD.encode(text.as_str().unwrap_or_default());
            texts.iter().map(|(key, text)| (key.clone(), Value::from(encode(text)))).collect()
        }
        Some(_) => return,
    };
    if !members.get("data").is_none_or(|data| data.is_object() || data.is_null()) {
        return;
    }
    members.remove("stringData");
    if texts.is_empty() {
        return;
    }
    let data = members.entry("data").or_insert(Value::Null);
    if data.is_null() {
        *data = json!({});
    }
    if let Some(data) = data.as_object_mut() {
        data.extend(texts);
    }
}

/// Keys of a live Secret that an earlier apply with `stringData` left behind: they are not desired, and no manager owns
/// them. Empty unless our last apply had `stringData`, so that they are looked for once.
pub(crate) fn leftovers(key: &ObjectKey, desired: &Value, live: &DynamicObject) -> Vec<String> {
    if !key.is_secret()
        || !live.managed_fields().iter().any(|entry| is_ours(entry) && fields(entry, STRING_DATA).is_some())
    {
        return Vec::new();
    }
    let mut owned = BTreeSet::new();
    for entry in live.managed_fields() {
        // A key that we owned by texts is desired, or is a leftover.
        let members = ["f:data", STRING_DATA].into_iter().filter(|member| *member != STRING_DATA || !is_ours(entry));
        let keys = members.filter_map(|member| fields(entry, member)?.as_object()).flat_map(|keys| keys.keys());
        owned.extend(keys.filter_map(|key| key.strip_prefix("f:")));
    }
    let keys = live.data["data"].as_object().into_iter().flat_map(|data| data.keys());
    let is_left = |key: &&String| desired["data"].get(key.as_str()).is_none() && !owned.contains(key.as_str());
    keys.filter(is_left).cloned().collect()
}

type Entry = k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;

fn is_ours(entry: &Entry) -> bool {
    entry.manager.as_deref() == Some(field_manager::MODULE) && entry.operation.as_deref() == Some("Apply")
}

fn fields<'a>(entry: &'a Entry, member: &str) -> Option<&'a Value> {
    entry.fields_v1.as_ref()?.0.get(member)
}
#[cfg(test)]
mod tests {
    use super::*;

    fn folded(members: Value) -> Value {
        let mut body = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}});
        body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        let key = ObjectKey::of(&body);
        fold(&mut body, &key);
        ["apiVersion", "kind", "metadata"]
            .iter()
            .for_each(|member| drop(body.as_object_mut().unwrap().remove(*member)));
        body
    }

    #[test]
    fn texts_win_over_data() {
        for (given, expected) in [
            (json!({"stringData": {"a": "b"}}), json!({"data": {"a": "Yg=="}})),
            (json!({"stringData": {"a": "b"}, "data": null}), json!({"data": {"a": "Yg=="}})),
            (
                json!({"stringData": {"a": "b", "e": null}, "data": {"a": "eA==", "c": "eA=="}}),
                json!({"data": {"a": "Yg==", "c": "eA==", "e": ""}}),
            ),
            (json!({"stringData": {}}), json!({})),
            (json!({"stringData": null, "data": {"a": ""}}), json!({"data": {"a": ""}})),
            (json!({"data": {"a": "Yg=="}}), json!({"data": {"a": "Yg=="}})),
        ] {
            assert_eq!(folded(given.clone()), expected, "{given}");
        }
        for refused in
            [json!({"stringData": {"a": 1}}), json!({"stringData": "a"}), json!({"stringData": {}, "data": 1})]
        {
            assert_eq!(folded(refused.clone()), refused, "the API server names the mistake");
        }
        let mut other = json!({"apiVersion": "example.test/v1", "kind": "Secret", "stringData": {"a": "b"}});
        let key = ObjectKey::of(&other);
        fold(&mut other, &key);
        assert_eq!(other["stringData"], json!({"a": "b"}));
    }

    #[test]
    fn only_keys_that_nobody_owns_are_leftovers_of_texts() {
        let entry = |manager: &str, operation: &str, fields: Value| json!({"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": fields});
        let live = |ours: Value| -> DynamicObject {
            let users = json!({"f:data": {"f:users": {}}});
            let theirs = json!({"f:stringData": {"f:theirs": {}}});
            let managed = [
                entry(field_manager::MODULE, "Apply", ours),
                entry("kubectl-edit", "Update", users),
                entry("flux", "Apply", theirs),
            ];
            let data = json!({"kept": "", "old": "", "older": "", "users": "", "theirs": "", "bytes": ""});
            let live = json!({"metadata": {"managedFields": managed}, "data": data});
            serde_json::from_value(live).unwrap()
        };
        let desired = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"kept": ""}});
        let key = ObjectKey::of(&desired);
        let before = json!({"f:data": {"f:bytes": {}}, "f:stringData": {"f:kept": {}, "f:old": {}}});
        assert_eq!(leftovers(&key, &desired, &live(before)), ["old", "older"]);
        let since = json!({"f:data": {"f:kept": {}, "f:old": {}}});
        assert_eq!(
            leftovers(&key, &desired, &live(since)),
            Vec::<String>::new(),
            "the next apply removes what it owns"
        );
    }
}
