//! What an upgrade leaves.

use super::{content::CONTROL, *};

/// All objects of a module and around it, as if they were those of [`CONTROL`], and its inventory.
pub(super) async fn ends(writers: &Writers, module: &str) -> Result<BTreeMap<String, Value>> {
    let client = writers.setup.runtime.cluster().client().await?;
    let manifest = writers.manifest(module).await?.context("a Manifest")?;
    let owner = manifest.name_any();
    let as_of_control = |value: &Value, uid: &str| {
        let text = value.to_string().replace(&owner, "manifest").replace(module, CONTROL);
        serde_json::from_str::<Value>(&if uid.is_empty() { text } else { text.replace(uid, "uid") })
    };
    let mut ends = BTreeMap::new();
    let own = format!("{module}.test/v2");
    let kinds = [
        ("v1", "ConfigMap"),
        ("v1", "Secret"),
        ("v1", "Service"),
        ("apps/v1", "Deployment"),
        ("batch/v1", "Job"),
        ("autoscaling/v2", "HorizontalPodAutoscaler"),
        ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration"),
        ("apiextensions.k8s.io/v1", "CustomResourceDefinition"),
        (&own, "Moved"),
        (&own, "Stored"),
    ];
    for (api_version, kind) in kinds {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let found = Api::<DynamicObject>::all_with(client.clone(), &resource).list(&ListParams::default()).await?;
        for object in found.items.into_iter().filter(|object| object.name_any().contains(module)) {
            let uid = object.uid().unwrap_or_default();
            let name = format!("{kind} {}", object.name_any().replace(module, CONTROL));
            ends.insert(name, as_of_control(&lasting(object)?, &uid)?);
        }
    }
    let synced: Vec<_> = manifest.status.iter().flat_map(|status| status.synced()).map(|it| json!(it)).collect();
    let mut synced: Vec<_> = synced.iter().map(|entry| as_of_control(entry, "")).collect::<Result<_, _>>()?;
    synced.sort_by_key(Value::to_string);
    ends.insert("inventory".to_owned(), synced.into());
    Ok(ends)
}

/// An object without what differs between equal histories.
fn lasting(object: DynamicObject) -> Result<Value> {
    let mut object = serde_json::to_value(object)?;
    for (parent, members) in [
        ("/metadata", &["uid", "resourceVersion", "generation", "creationTimestamp"][..]),
        ("/spec", &["clusterIP", "clusterIPs"]),
    ] {
        if let Some(parent) = object.pointer_mut(parent).and_then(Value::as_object_mut) {
            parent.retain(|name, _| !members.contains(&name.as_str()));
        }
    }
    // The order is that of the times.
    if let Some(Value::Array(entries)) = object.pointer_mut("/metadata/managedFields") {
        entries.iter_mut().filter_map(Value::as_object_mut).for_each(|entry| drop(entry.remove("time")));
        entries.sort_by_key(Value::to_string);
    }
    let stored = object["status"]["storedVersions"].take();
    let members = object.as_object_mut().context("an object")?;
    members.remove("status");
    if !stored.is_null() {
        members.insert("status".to_owned(), json!({"storedVersions": stored}));
    }
    Ok(object)
}
