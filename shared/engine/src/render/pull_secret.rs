//! Copies of the image pull secret in the namespaces of a module's workloads.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tidewatch_api::names::SKR_NAMESPACE;

use super::{RenderedObject, pods};
use crate::content::PullSecret;

/// The copies, one for each namespace in which a rendered workload has pods. The caller copies the Secret to the
/// namespace of all modules.
pub(super) fn copies(rendered: &[RenderedObject], secret: Option<&PullSecret>) -> Vec<Value> {
    let Some(PullSecret { name, content: Some(content) }) = secret else { return Vec::new() };
    let workloads = rendered.iter().filter(|object| object.served && pods::has_pods(&object.body, &object.key));
    let namespaces: BTreeSet<_> = workloads.map(|object| object.key.namespace.as_str()).collect();
    let is_elsewhere = |namespace: &&str| !namespace.is_empty() && *namespace != SKR_NAMESPACE;
    let copy = |namespace: &str| {
        let mut copy = (**content).clone();
        copy["apiVersion"] = "v1".into();
        copy["kind"] = "Secret".into();
        copy["metadata"] = json!({"name": name, "namespace": namespace});
        copy
    };
    namespaces.into_iter().filter(is_elsewhere).map(copy).collect()
}
