//! Secrets of a module that are written with data from elsewhere than its version: those with the annotation
//! `operator.kyma-project.io/inject-data-from-kcp`. Pure.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tidewatch_api::names::annotation;

/// Data by the name of the Secret.
pub type SecretData = BTreeMap<String, BTreeMap<String, ByteString>>;

/// Replaces the data of a Secret with the annotation.
pub(crate) fn inject(object: &mut Value, data: &SecretData) {
    if !wants_injected_data(object) {
        return;
    }
    let Some(data) = object["metadata"]["name"].as_str().and_then(|name| data.get(name)) else { return };
    let data = json!(data);
    if let Some(members) = object.as_object_mut() {
        // The API server would write it over the data.
        members.remove("stringData");
        members.insert("data".to_owned(), data);
    }
}

/// True for a Secret with the annotation.
pub fn wants_injected_data(object: &Value) -> bool {
    object["apiVersion"] == "v1"
        && object["kind"] == "Secret"
        && object["metadata"]["annotations"][annotation::INJECT_DATA] == "true"
}
