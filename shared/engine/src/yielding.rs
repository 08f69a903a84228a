//! Fields of an object that are left to other writers: the replicas of a workload that an autoscaler scales, and fields that
//! another writer changes back again and again.

use std::borrow::Cow;

use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, ListParams, ResourceExt as _},
};
use serde_json::Value;
use tidewatch_api::names::field_manager;
use tidewatch_cluster::{
    object::{self, Disputed, Fallback},
    runtime_access::list_first,
};

use super::{
    execution::Execution,
    failure::Failure,
    inventory::{ObjectKey, split_api_version},
    render::RenderedObject,
};

/// Autoscalers of a namespace that are read.
const MAX_AUTOSCALERS: u16 = 500;
/// Manager and subresource by which an autoscaler writes.
const AUTOSCALER: (&str, &str) = ("kube-controller-manager", "scale");

impl Execution<'_> {
    /// The desired form of an object, given with its hash, without the fields that are left to other writers.
    pub(super) async fn without_yielded<'b>(
        &self,
        rendered: &'b RenderedObject,
        form: u64,
        live: &DynamicObject,
    ) -> Result<Cow<'b, Value>, Failure> {
        let RenderedObject { key, body, .. } = rendered;
        let yielded = self.engine.memories.yields.yielded(self.key, key, form);
        let mut desired = Cow::Borrowed(body);
        if !yielded.is_empty() {
            desired = Cow::Owned(object::without(body, &yielded));
        }
        let replicas = |object: &Value| object["spec"]["replicas"].as_i64();
        let differs = replicas(&desired).is_some_and(|shall| replicas(&live.data).is_some_and(|is| is != shall));
        if differs && self.is_autoscaled(key, live).await? {
            let left = object::left_as_it_is(field_manager::MODULE, &desired, live, ["spec", "replicas"]);
            desired = Cow::Owned(left);
        }
        Ok(desired)
    }

    /// Counts the fields that a write has just set back.
    pub(super) fn count_reverted(&self, key: &ObjectKey, form: u64, disputed: Vec<Disputed>) {
        if disputed.is_empty() {
            return;
        }
        let yielded = self.engine.memories.yields.reverted(self.key, key, form, disputed);
        (0..yielded).for_each(|_| self.engine.fallbacks.count(Fallback::Yielded));
    }

    /// Returns true if an autoscaler scales a workload. If they may not be listed, its last writer decides.
    async fn is_autoscaled(&self, key: &ObjectKey, live: &DynamicObject) -> Result<bool, Failure> {
        let kind = ApiResource::erase::<HorizontalPodAutoscaler>(&());
        let api: Api<DynamicObject> = Api::namespaced_with(self.request.cluster.client.clone(), &key.namespace, &kind);
        match list_first(&api, &ListParams::default(), MAX_AUTOSCALERS).await {
            Ok(autoscalers) => Ok(autoscalers.iter().any(|autoscaler| scales(autoscaler, key))),
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => Ok(was_autoscaled(live)),
            Err(error) => Err(Failure::new(format!("list the autoscalers of {key}"), &error)),
        }
    }
}

fn scales(autoscaler: &DynamicObject, key: &ObjectKey) -> bool {
    let target = &autoscaler.data["spec"]["scaleTargetRef"];
    let group = target["apiVersion"].as_str().map(|version| split_api_version(version).0);
    group == Some(key.group.as_str()) && target["kind"] == key.kind && target["name"] == key.name
}

/// True if an autoscaler wrote the replicas last.
fn was_autoscaled(live: &DynamicObject) -> bool {
    let (manager, subresource) = AUTOSCALER;
    live.managed_fields().iter().any(|entry| {
        let set = entry.fields_v1.as_ref().map(|fields| &fields.0);
        entry.manager.as_deref() == Some(manager)
            && entry.subresource.as_deref() == Some(subresource)
            && set.is_some_and(|set| set["f:spec"].get("f:replicas").is_some())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn autoscaler_scales_its_target_alone() {
        let key = |api_version: &str, kind: &str, name: &str| {
            ObjectKey::of(
                &json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": "ns"}}),
            )
        };
        let autoscaler: DynamicObject = serde_json::from_value(json!({"metadata": {"name": "a"},
            "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}}}))
        .unwrap();
        assert!(scales(&autoscaler, &key("apps/v1", "Deployment", "d")));
        for other in
            [key("apps/v1", "Deployment", "e"), key("apps/v1", "StatefulSet", "d"), key("x.test/v1", "Deployment", "d")]
        {
            assert!(!scales(&autoscaler, &other), "{other}");
        }
    }

    #[test]
    fn last_writer_of_the_replicas_tells_an_autoscaler_from_a_user() {
        let by = |manager: &str, subresource: Value| -> DynamicObject {
            let set = json!({"f:spec": {"f:replicas": {}}});
            let entry = json!({"manager": manager, "operation": "Update", "subresource": subresource, "fieldsV1": set});
            serde_json::from_value(json!({"metadata": {"managedFields": [entry]}})).unwrap()
        };
        assert!(was_autoscaled(&by("kube-controller-manager", json!("scale"))));
        assert!(!was_autoscaled(&by("kubectl", json!("scale"))));
        assert!(!was_autoscaled(&by("kube-controller-manager", Value::Null)));
    }
}
