//! Leaves the versions of the incumbent in which objects of a CRD may still be stored. The API server rejects a CRD
//! without a version of `status.storedVersions`, and cannot read an object that is stored in a version that the CRD does
//! not have. So every object is written again in our version before the others are dropped.

use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::crds,
    names::{GROUP, VERSION, field_manager},
};

use super::{Error, Wanted};
use crate::kube::{
    object,
    runtime_access::{ListLimits, list_map},
};

/// Makes our version the only stored one of the CRD that was found, if others are listed.
pub(super) async fn leave_others(
    client: &Client,
    definitions: &Api<DynamicObject>,
    wanted: &Wanted,
    found: &DynamicObject,
) -> Result<(), Error> {
    let stored: Vec<String> =
        serde_json::from_value(found.data["status"]["storedVersions"].clone()).unwrap_or_default();
    let Some(kept) = crds::stored_versions_after_takeover(&stored) else { return Ok(()) };
    let (name, params) = (&wanted.name, params());
    let mut resource_version = found.resource_version();
    if let Some(versions) = storing_ours(&found.data["spec"]["versions"]) {
        let patch = json!({"metadata": {"resourceVersion": resource_version}, "spec": {"versions": versions}});
        let patched = definitions.patch(name, &params, &Patch::Merge(patch)).await;
        resource_version =
            patched.map_err(Error::crd("store the objects in our version of", wanted))?.resource_version();
    }
    rewrite_objects(client, wanted).await?;
    let patch = json!({"metadata": {"resourceVersion": resource_version}, "status": {"storedVersions": kept}});
    let patched = definitions.patch_status(name, &params, &Patch::Merge(patch)).await;
    patched.map(drop).map_err(Error::crd("drop the former stored versions of", wanted))
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PatchParams::default() }
}

/// Versions of a CRD with ours as the stored one; `None` if it is already, or is missing.
fn storing_ours(versions: &Value) -> Option<Vec<Value>> {
    let versions = versions.as_array()?;
    let is_ours = |version: &Value| version["name"] == VERSION;
    if !versions.iter().any(is_ours) || versions.iter().any(|version| is_ours(version) && version["storage"] == true) {
        return None;
    }
    let stored = versions.iter().cloned().map(|mut version| {
        version["storage"] = is_ours(&version).into();
        version
    });
    Some(stored.collect())
}

/// Writes every object without a change: the API server stores it in the current version, unless it is already.
async fn rewrite_objects(client: &Client, wanted: &Wanted) -> Result<(), Error> {
    let plural = wanted.name.split('.').next().unwrap_or_default();
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, VERSION, &wanted.kind), plural);
    let all: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let name = |object: DynamicObject| (object.metadata.namespace, object.metadata.name);
    let listed = list_map(&all, &ListParams::default(), &ListLimits::default(), name).await;
    for (namespace, name) in listed.map_err(|source| Error::CrdObjects(wanted.name.clone(), source))? {
        let (Some(namespace), Some(name)) = (namespace, name) else { continue };
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &resource);
        let written = api.patch_metadata(&name, &params(), &Patch::Merge(json!({}))).await;
        object::if_exists(written, &name).map_err(Error::crd("write the objects in our version of", wanted))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_version_becomes_the_stored_one() {
        let version = |name: &str, storage: bool| json!({"name": name, "served": true, "storage": storage});
        let of = |versions: &[Value]| storing_ours(&json!(versions));
        assert_eq!(of(&[version("v1beta1", false), version("v1beta2", true)]), None);
        assert_eq!(
            of(&[version("v1beta1", true), version("v1beta2", false)]),
            Some(vec![version("v1beta1", false), version("v1beta2", true)])
        );
        assert_eq!((of(&[version("v1beta1", true)]), storing_ours(&Value::Null)), (None, None));
    }
}
