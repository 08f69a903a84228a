//! Our CRDs in a runtime cluster: equal to ours in all fields, and established before use.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::LazyLock,
    time::Duration,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::crds,
    names::{field_manager, label},
};
use tokio::time::{Instant, sleep};

use super::{Error, inputs};
use crate::base::stored_form::canonical;
use crate::kube::object;

/// Deadline for a new CRD to become established in a runtime cluster.
const ESTABLISHED_WITHIN: Duration = Duration::from_secs(10);
/// Interval of polls for the condition Established.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A desired CRD.
#[derive(Debug)]
pub(super) struct Wanted {
    /// `<plural>.<group>`.
    pub(super) name: String,
    /// Kind of the custom resource.
    pub(super) kind: String,
    /// `spec` as applied.
    spec: Value,
    /// `spec` with the defaults that API servers fill in.
    form: Value,
}

/// The CRDs of every runtime cluster.
pub(super) fn wanted() -> &'static [Wanted] {
    static WANTED: LazyLock<Vec<Wanted>> =
        LazyLock::new(|| crds::runtime_crds().iter().filter_map(Wanted::of).collect());
    &WANTED
}

/// Hash of all desired CRDs; equal in every process of this version.
pub(super) fn fingerprint() -> &'static str {
    static FINGERPRINT: LazyLock<String> = LazyLock::new(|| {
        let specs: Vec<_> = wanted().iter().map(|wanted| (&wanted.name, &wanted.spec)).collect();
        inputs::hash(&json!(specs).to_string())
    });
    &FINGERPRINT
}

impl Wanted {
    fn of(crd: &CustomResourceDefinition) -> Option<Self> {
        let spec = serde_json::to_value(&crd.spec).ok()?;
        Some(Self { name: crd.name_any(), kind: crd.spec.names.kind.clone(), form: form(&spec), spec })
    }

    fn body(&self) -> Value {
        json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": self.name, "labels": {label::MANAGED_BY: label::MANAGED_BY_SKR}}, "spec": self.spec})
    }

    /// Returns true if a CRD equals the desired one, in its normal form or in the form that this API server stored
    /// after an earlier apply.
    fn is(&self, found: &DynamicObject, known: Option<&u64>) -> bool {
        let spec = &found.data["spec"];
        let marked = found.labels().get(label::MANAGED_BY).is_some_and(|by| by == label::MANAGED_BY_SKR);
        marked && (form(spec) == self.form || known == Some(&hash(spec)))
    }
}

/// A spec with the defaults that every API server fills in.
fn form(spec: &Value) -> Value {
    let mut spec = canonical(spec);
    if spec["conversion"].is_null() {
        spec["conversion"] = json!({"strategy": "None"});
    }
    let kind = spec["names"]["kind"].as_str().unwrap_or_default().to_owned();
    for (member, default) in [("listKind", format!("{kind}List")), ("singular", kind.to_lowercase())] {
        if spec["names"][member].is_null() {
            spec["names"][member] = default.into();
        }
    }
    if spec["preserveUnknownFields"] == false
        && let Some(members) = spec.as_object_mut()
    {
        members.remove("preserveUnknownFields");
    }
    spec
}

/// Compared within this process only.
fn hash(spec: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    spec.to_string().hash(&mut hasher);
    hasher.finish()
}

pub(super) fn definitions(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &ApiResource::erase::<CustomResourceDefinition>(&()))
}

/// Applies a CRD that differs, and waits until it is established. Records in `forms` the form in which the API server
/// stores it.
pub(super) async fn ensure(client: &Client, wanted: &Wanted, forms: &mut BTreeMap<String, u64>) -> Result<(), Error> {
    let api = definitions(client);
    let found = object::get(&api, &wanted.name).await.map_err(Error::crd("read", wanted))?;
    if found.as_ref().is_some_and(|found| found.metadata.deletion_timestamp.is_some()) {
        return Err(Error::CrdTerminating(wanted.name.clone()));
    }
    let current = match found {
        Some(found) if wanted.is(&found, forms.get(&wanted.name)) => found,
        found => {
            let written = write(&api, wanted, found.as_ref()).await.map_err(Error::crd("apply", wanted))?;
            let spec = &written.data["spec"];
            match form(spec) == wanted.form {
                true => forms.remove(&wanted.name),
                false => forms.insert(wanted.name.clone(), hash(spec)),
            };
            written
        }
    };
    established(&api, wanted, current).await
}

async fn write(
    api: &Api<DynamicObject>,
    wanted: &Wanted,
    found: Option<&DynamicObject>,
) -> kube::Result<DynamicObject> {
    if let Some(found) = found {
        leave_old_versions(api, found).await?;
    }
    let params = PatchParams::apply(field_manager::LIFECYCLE).force();
    let mut applied = api.patch(&wanted.name, &params, &Patch::Apply(wanted.body())).await?;
    if form(&applied.data["spec"]) == wanted.form {
        return Ok(applied);
    }
    // A server-side apply keeps fields that other field managers added.
    applied.data["spec"] = wanted.spec.clone();
    applied.metadata.managed_fields = None;
    let params = PostParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PostParams::default() };
    api.replace(&wanted.name, &params, &applied).await
}

/// The API server rejects a CRD that lacks a version listed in `status.storedVersions`.
async fn leave_old_versions(api: &Api<DynamicObject>, found: &DynamicObject) -> kube::Result<()> {
    let stored: Vec<String> =
        serde_json::from_value(found.data["status"]["storedVersions"].clone()).unwrap_or_default();
    let Some(kept) = crds::stored_versions_after_takeover(&stored) else { return Ok(()) };
    let patch = json!({
        "metadata": {"resourceVersion": found.resource_version().unwrap_or_default()}, "status": {"storedVersions": kept}
    });
    let params = PatchParams { field_manager: Some(field_manager::LIFECYCLE.to_owned()), ..PatchParams::default() };
    api.patch_status(&found.name_any(), &params, &Patch::Merge(patch)).await.map(drop)
}

async fn established(api: &Api<DynamicObject>, wanted: &Wanted, mut current: DynamicObject) -> Result<(), Error> {
    let deadline = Instant::now() + ESTABLISHED_WITHIN;
    while !is_established(&current) {
        if Instant::now() >= deadline {
            return Err(Error::NotEstablished(wanted.name.clone()));
        }
        sleep(LOOK_AGAIN).await;
        current = api.get(&wanted.name).await.map_err(Error::crd("read", wanted))?;
    }
    Ok(())
}

fn is_established(crd: &DynamicObject) -> bool {
    let conditions = crd.data["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|condition| condition["type"] == "Established" && condition["status"] == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(data: Value) -> DynamicObject {
        serde_json::from_value(data).unwrap()
    }

    #[test]
    fn a_runtime_has_three_definitions_in_the_served_version_alone() {
        let names: Vec<_> = wanted().iter().map(|wanted| wanted.kind.as_str()).collect();
        assert_eq!(names.len(), 3, "{names:?}");
        let versions = |wanted: &Wanted| {
            wanted.spec["versions"]
                .as_array()
                .unwrap()
                .iter()
                .map(|version| version["name"].clone())
                .collect::<Vec<_>>()
        };
        assert!(wanted().iter().all(|wanted| versions(wanted) == ["v1beta2"]));
    }

    #[test]
    fn defaults_make_no_difference_and_additions_do() {
        let wanted = &wanted()[0];
        let mut served = wanted.body();
        served["spec"]["conversion"] = json!({"strategy": "None"});
        served["spec"]["preserveUnknownFields"] = false.into();
        served["spec"]["names"]["categories"] = json!([]);
        assert!(wanted.is(&object(served.clone()), None));
        let mut more = served.clone();
        more["spec"]["names"]["categories"] = json!(["all"]);
        assert!(!wanted.is(&object(more.clone()), None));
        assert!(wanted.is(&object(more.clone()), Some(&hash(&more["spec"]))), "a form that was learned");
        served["metadata"]["labels"] = json!({});
        assert!(!wanted.is(&object(served), None), "the label belongs to it");
    }

    #[test]
    fn only_an_established_definition_is_served() {
        for (status, established) in [("True", true), ("False", false)] {
            let crd = json!({"metadata": {"name": "x"}, "status": {"conditions": [
                {"type": "NamesAccepted", "status": "True"}, {"type": "Established", "status": status}
            ]}});
            assert_eq!(is_established(&object(crd)), established);
        }
        assert!(!is_established(&object(json!({"metadata": {"name": "x"}}))));
    }
}
