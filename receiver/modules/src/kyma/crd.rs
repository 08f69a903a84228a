//! Our CRDs in a runtime cluster: equal to ours in all fields, and established before use.

use std::{sync::LazyLock, time::Duration};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject},
};
use serde_json::{Value, json};
use tidewatch_api::{
    crds,
    names::{field_manager, label},
};
use tidewatch_cluster::{
    object::{self, Ownership, Repair, Shape, Target, WriteBudget, WriteError},
    stored_versions::{Migration, Progress, Turn},
    workload::condition_with,
};
use tidewatch_kit::digest::short_digest;
use tokio::time::{Instant, sleep};

use super::Error;

/// Deadline for a new CRD to become established in a runtime cluster.
const ESTABLISHED_WITHIN: Duration = Duration::from_secs(10);
/// Interval of polls for the condition Established.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Objects of one of our CRDs that are stored in our version, far more than any runtime has.
const TURN: Turn = Turn { objects: 10_000, time: Duration::from_secs(60), waits_for_storage: true };

/// All of a CRD is ours, except for its metadata and status.
const SHAPE: Shape = Shape { defaults: Some(fill_defaults), ..Shape::new(Ownership::Whole) };

/// A desired CRD.
#[derive(Debug)]
pub(super) struct Wanted {
    /// `<plural>.<group>`.
    pub(super) name: String,
    /// Kind of the custom resource.
    pub(super) kind: String,
    /// Body of the server-side apply.
    body: Value,
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
        let specs: Vec<_> = wanted().iter().map(|wanted| (&wanted.name, &wanted.body["spec"])).collect();
        short_digest(json!(specs).to_string().as_bytes(), 8)
    });
    &FINGERPRINT
}

impl Wanted {
    fn of(crd: &CustomResourceDefinition) -> Option<Self> {
        let name = crd.name_any();
        let spec = serde_json::to_value(&crd.spec).ok()?;
        let labels = json!({label::MANAGED_BY: label::MANAGED_BY_SKR});
        let body = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": name, "labels": labels}, "spec": spec});
        Some(Self { name, kind: crd.spec.names.kind.clone(), body })
    }

    fn target<'a>(&'a self, budget: &'a WriteBudget<'a>) -> Target<'a> {
        let name = &self.name;
        let manager = field_manager::LIFECYCLE;
        Target { name, manager, shape: &SHAPE, desired: &self.body, budget: Some(budget) }
    }
}

/// Adds the defaults that every API server fills in, and removes one that equals absence.
fn fill_defaults(crd: &mut Value) {
    let Some(spec) = crd.get_mut("spec").and_then(Value::as_object_mut) else { return };
    spec.entry("conversion").or_insert_with(|| json!({"strategy": "None"}));
    if spec.get("preserveUnknownFields") == Some(&Value::Bool(false)) {
        spec.remove("preserveUnknownFields");
    }
    let Some(names) = spec.get_mut("names").and_then(Value::as_object_mut) else { return };
    let kind = names.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
    for (member, default) in [("listKind", format!("{kind}List")), ("singular", kind.to_lowercase())] {
        names.entry(member).or_insert_with(|| default.into());
    }
}

pub(super) fn definitions(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &ApiResource::erase::<CustomResourceDefinition>(&()))
}

/// A CRD that is as desired, and established.
pub(super) struct Served {
    /// Hash of the form in which the API server stores it, if that adds fields.
    pub(super) form: Option<u64>,
    /// There was no such CRD before, and so there is no resource of its kind.
    pub(super) is_new: bool,
}

/// Applies a CRD that differs, and waits until it is established. `form` is the [`Served::form`] that is known.
pub(super) async fn ensure(
    client: &Client,
    wanted: &Wanted,
    mut form: Option<u64>,
    budget: &WriteBudget<'_>,
) -> Result<Served, Error> {
    let api = definitions(client);
    let target = wanted.target(budget);
    let found = object::get(&api, &wanted.name).await.map_err(Error::crd("read", &wanted.name))?;
    if found.as_ref().is_some_and(|found| found.metadata.deletion_timestamp.is_some()) {
        return Err(Error::CrdTerminating(wanted.name.clone()));
    }
    let is_new = found.is_none();
    let current = match found {
        Some(found) if target.compare(&found, form) == Repair::None => found,
        found => {
            let contested = || Error::CrdContested(wanted.name.clone());
            if !budget.may_write() {
                return Err(contested());
            }
            if let Some(found) = &found {
                leave_other_versions(client, &api, wanted, found).await?;
            }
            let converged = target.converge(&api, None, &mut form).await;
            let failed = |error: WriteError| error.request().map_or_else(contested, Error::crd("apply", &wanted.name));
            converged.map_err(failed)?.object
        }
    };
    established(&api, wanted, current).await?;
    Ok(Served { form, is_new })
}

/// Stores the objects of a CRD in our version, and drops the versions of lifecycle-manager in which they may be stored.
async fn leave_other_versions(
    client: &Client,
    definitions: &Api<DynamicObject>,
    wanted: &Wanted,
    found: &DynamicObject,
) -> Result<(), Error> {
    let Some(migration) = Migration::of(found, &wanted.body) else { return Ok(()) };
    let mut progress = Progress::default();
    match migration.advance(client, definitions, field_manager::LIFECYCLE, &mut progress, TURN).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::CrdNotMigrated(wanted.name.clone())),
        Err(error) => Err(Error::CrdMigration(error.to_string(), error.source)),
    }
}

async fn established(api: &Api<DynamicObject>, wanted: &Wanted, mut current: DynamicObject) -> Result<(), Error> {
    let deadline = Instant::now() + ESTABLISHED_WITHIN;
    while !is_established(&current) {
        if Instant::now() >= deadline {
            return Err(Error::NotEstablished(wanted.name.clone()));
        }
        sleep(LOOK_AGAIN).await;
        current = api.get(&wanted.name).await.map_err(Error::crd("read", &wanted.name))?;
    }
    Ok(())
}

fn is_established(crd: &DynamicObject) -> bool {
    condition_with(crd, "Established", "True").is_some()
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
            wanted.body["spec"]["versions"]
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
        let is =
            |found: &Value, accepted| SHAPE.compare(&wanted.body, &object(found.clone()), accepted) == Repair::None;
        let mut served = wanted.body.clone();
        served["spec"]["conversion"] = json!({"strategy": "None"});
        served["spec"]["preserveUnknownFields"] = false.into();
        served["spec"]["names"]["categories"] = json!([]);
        assert!(is(&served, None));
        let mut more = served.clone();
        more["spec"]["names"]["categories"] = json!(["all"]);
        assert!(!is(&more, None));
        assert!(is(&more, Some(SHAPE.form(&wanted.body, &object(more.clone())))), "a form that was learned");
        served["metadata"]["labels"] = json!({});
        assert!(!is(&served, None), "the label belongs to it");
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
