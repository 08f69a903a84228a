//! Parts of objects that no reader of the caches needs. A reconcile reads its Kyma from KCP, so the cached one lacks what is
//! only shown to users.

use tidewatch_api::{Kyma, ModuleStatus, PartialMeta, TrackingObject};

/// Conditions that summarize other parts of the status for users: the states of the modules, and of the pull secret.
const UNREAD_CONDITIONS: [&str; 2] = ["Modules", "SKRImagePullSecretSync"];

/// Drops the unread parts of a Kyma's status. Of the objects that a module's status names, only the name of the Manifest is
/// read.
pub fn drop_unread(kyma: &mut Kyma) {
    let Some(status) = &mut kyma.status else { return };
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| !UNREAD_CONDITIONS.contains(&condition.type_.as_str()));
        conditions.shrink_to_fit();
    }
    status.active_channel = None;
    status.modules.iter_mut().flatten().for_each(drop_unread_of_module);
}

fn drop_unread_of_module(module: &mut ModuleStatus) {
    (module.fqdn, module.ocm_component_name) = (None, None);
    (module.resource, module.template) = (None, None);
    let manifest = module.manifest.take().and_then(|manifest| manifest.metadata?.name);
    module.manifest = manifest.map(|name| {
        let metadata = PartialMeta { name: Some(name), ..PartialMeta::default() };
        Box::new(TrackingObject { metadata: Some(metadata), ..TrackingObject::default() })
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn status_keeps_what_readers_of_the_cache_need() {
        let condition = |kind: &str| {
            json!({"type": kind, "status": "True", "reason": "Ready", "message": "words",
                "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let tracked =
            |name: &str| json!({"apiVersion": "g/v1", "kind": "Thing", "metadata": {"name": name, "namespace": "ns"}});
        let kyma = |status: serde_json::Value| -> Kyma {
            serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": "k", "labels": {"a": "b"}, "annotations": {"c": "d"}, "finalizers": ["f"]},
                "spec": {"channel": "regular", "modules": [{"name": "keda"}]}, "status": status}))
            .unwrap()
        };
        let module = json!({"name": "keda", "state": "Warning", "message": "words", "channel": "fast", "version": "1.0.0",
            "fqdn": "a.io/keda", "ocmComponentName": "a.io/keda", "maintenance": true, "manifest": tracked("m"),
            "resource": tracked("r"), "template": tracked("t")});
        let removed = json!({"name": "gone", "state": "Deleting"});
        let mut full =
            kyma(json!({"state": "Ready", "activeChannel": "regular", "lastOperation": {"operation": "words"},
            "conditions": [condition("Modules"), condition("EventPath")], "modules": [module, removed]}));
        drop_unread(&mut full);
        let module = json!({"name": "keda", "state": "Warning", "message": "words", "channel": "fast", "version": "1.0.0",
            "maintenance": true, "manifest": {"metadata": {"name": "m"}}});
        let expected = kyma(json!({"state": "Ready", "lastOperation": {"operation": "words"},
            "conditions": [condition("EventPath")], "modules": [module, removed]}));
        assert_eq!(full, expected);
        let mut new = kyma(serde_json::Value::Null);
        drop_unread(&mut new);
        assert_eq!(new, kyma(serde_json::Value::Null));
    }
}
