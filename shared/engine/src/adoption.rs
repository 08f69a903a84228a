//! Adoption of a module that the user installed by hand before listing it. Pure.
//!
//! A Manifest of which no object was written yet may meet such a module. It is adopted, that is, its objects are
//! overwritten, if that is no downgrade, or if the user permits it. A workload that Kyma manages, or managed, is no such
//! module: it may belong to a Manifest before, or have been unmanaged for a while.

use kube::{ResourceExt as _, api::DynamicObject};
use semver::Version;
use serde_json::Value;
use tidewatch_api::{
    Manifest,
    names::{annotation, label},
};
use tidewatch_kit::foreign_text::{line, shortened};

use super::{inventory::ObjectKey, render::RenderedObject};

/// Longest value of a label.
const MAX_VERSION_CHARS: usize = 63;
/// Fields that a message names at most.
const MAX_NAMED: usize = 5;
/// Longest list of fields: they are text of the runtime.
const MAX_SURPLUS_CHARS: usize = 512;

/// The manager of the module in the runtime cluster before the first write of its Manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Installation {
    /// It was not read.
    Unknown,
    /// It could not be read.
    Failed,
    /// There is none that the user installed, or it is adopted and the message is recorded.
    Ours,
    /// It is to be adopted, with this message.
    Adoptable(String),
    /// It is left as it is, for this reason.
    Foreign(String),
}

impl Installation {
    /// Decides on the manager as it was read; `target` is the version that the Manifest installs.
    pub(super) fn of(key: &ObjectKey, found: Option<&DynamicObject>, target: Option<&str>) -> Self {
        let Some(found) = found.filter(|found| !is_of_kyma(found)) else { return Self::Ours };
        let version = found.labels().get(label::VERSION).map(|version| line(version, MAX_VERSION_CHARS));
        let permitted = found.annotations().get(annotation::ADOPT).is_some_and(|value| value == "true");
        let is_newer = version.as_deref().and_then(core).zip(target.and_then(core)).map(|(it, to)| it > to);
        let installed = version.map_or_else(|| "no version".to_owned(), |version| format!("the version {version}"));
        if permitted || is_newer == Some(false) {
            return Self::Adoptable(format!("adopting the module that was installed by hand: {key} has {installed}"));
        }
        let newer = match (is_newer, target) {
            (Some(_), Some(target)) => format!(", newer than {target}"),
            _ => String::new(),
        };
        Self::Foreign(format!(
            "the module was installed by hand and is left as it is: {key} has {installed}{newer}; the annotation {}=true on it \
             lets the module replace it",
            annotation::ADOPT
        ))
    }
}

/// Fields of an object that an adoption removes: the tool by which it was installed applied them, and the module's version
/// lacks them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Surplus {
    pub(super) object: String,
    /// The first ones.
    pub(super) fields: Vec<String>,
    pub(super) number: usize,
}

/// Lists such fields as the end of a message; empty without one.
pub(super) fn surplus(objects: &[Surplus]) -> String {
    let named = objects.iter().flat_map(|it| it.fields.iter().map(move |field| format!("{} {field}", it.object)));
    let named: Vec<_> = named.take(MAX_NAMED).collect();
    let more = objects.iter().map(|it| it.number).sum::<usize>().saturating_sub(named.len());
    let fields = named.join(", ");
    let text = match (named.len(), more) {
        (0, _) => return String::new(),
        (_, 0) => fields,
        (_, more) => format!("{fields}, and {more} more"),
    };
    format!("; fields that this version lacks are removed: {}", shortened(&text, MAX_SURPLUS_CHARS))
}

/// Version that a Manifest installs: that of its rendered manager, if it has a label like the installed one, else the
/// module's.
pub(super) fn target<'a>(
    manifest: &'a Manifest,
    key: &ObjectKey,
    rendered: Option<&'a [RenderedObject]>,
) -> Option<&'a str> {
    let rendered = rendered.into_iter().flatten().find(|object| object.key == *key);
    let labelled =
        rendered.and_then(|object| object.body["metadata"]["labels"].get(label::VERSION)).and_then(Value::as_str);
    labelled.filter(|version| core(version).is_some()).or(manifest.spec.version.as_deref())
}

fn is_of_kyma(found: &DynamicObject) -> bool {
    let is_managed = found.labels().get(label::MANAGED_BY).is_some_and(|by| by == label::MANAGED_BY_SKR);
    is_managed || found.annotations().contains_key(annotation::OWNED_BY)
}

/// Major, minor and patch, which decide on a downgrade; pre-release and build are ignored.
fn core(version: &str) -> Option<(u64, u64, u64)> {
    let version = Version::parse(version.strip_prefix('v').unwrap_or(version)).ok()?;
    Some((version.major, version.minor, version.patch))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key() -> ObjectKey {
        ObjectKey::of(&json!({"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "d", "namespace": "kyma-system"}}))
    }

    fn decide(labels: Value, annotations: Value, target: &str) -> Installation {
        let found = json!({"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "d", "labels": labels, "annotations": annotations}});
        Installation::of(&key(), Some(&serde_json::from_value(found).unwrap()), Some(target))
    }

    #[test]
    fn message_names_the_first_fields_that_go() {
        let of = |object: &str, fields: &[&str], number: usize| Surplus {
            object: object.to_owned(),
            fields: fields.iter().map(|field| (*field).to_owned()).collect(),
            number,
        };
        assert_eq!(surplus(&[of("ConfigMap ns/a", &[], 0)]), "");
        let few = [of("ConfigMap ns/a", &["data.x"], 1), of("Deployment ns/d", &["spec.paused"], 1)];
        let said = "; fields that this version lacks are removed: ConfigMap ns/a data.x, Deployment ns/d spec.paused";
        assert_eq!(surplus(&few), said);
        let many = surplus(&[
            of("ConfigMap ns/a", &["data.a", "data.b", "data.c"], 7),
            of("ConfigMap ns/b", &["data.d", "data.e", "data.f"], 3),
        ]);
        assert!(many.ends_with("ConfigMap ns/b data.e, and 5 more"), "{many}");
        assert!(surplus(&[of(&"x".repeat(10_000), &["data.a"], 1)]).chars().count() < 600);
    }

    #[test]
    fn workload_that_is_not_newer_is_adopted_and_any_other_needs_the_annotation() {
        let permitted = json!({annotation::ADOPT: "true"});
        for (version, target, adopted) in [
            (Some("1.0.0"), "1.0.0", true),
            (Some("v0.9.9"), "1.0.0", true),
            (Some("1.0.0-rc1"), "1.0.0-alpha", true),
            (Some("1.0.1"), "1.0.0", false),
            (Some("latest"), "1.0.0", false),
            (Some("1.0.0"), "main", false),
            (None, "1.0.0", false),
        ] {
            let labels = version.map_or(json!({}), |version| json!({label::VERSION: version}));
            let decision = decide(labels.clone(), json!({}), target);
            assert_eq!(matches!(decision, Installation::Adoptable(_)), adopted, "{version:?}: {decision:?}");
            assert_eq!(matches!(decision, Installation::Foreign(_)), !adopted, "{version:?}: {decision:?}");
            assert!(matches!(decide(labels.clone(), permitted.clone(), target), Installation::Adoptable(_)));
            assert_eq!(decide(labels, json!({annotation::ADOPT: "false"}), target), decision, "no permission");
        }
        let newer = decide(json!({label::VERSION: "1.0.1"}), json!({}), "1.0.0");
        let said = "the module was installed by hand and is left as it is: Deployment kyma-system/d has the version 1.0.1, newer \
                    than 1.0.0; the annotation operator.kyma-project.io/adopt=true on it lets the module replace it";
        assert_eq!(newer, Installation::Foreign(said.to_owned()));
        let said = "adopting the module that was installed by hand: Deployment kyma-system/d has the version 0.9.0";
        assert_eq!(
            decide(json!({label::VERSION: "0.9.0"}), json!({}), "1.0.0"),
            Installation::Adoptable(said.to_owned())
        );
    }

    #[test]
    fn absent_workload_and_one_of_kyma_are_not_the_users() {
        assert_eq!(Installation::of(&key(), None, Some("1.0.0")), Installation::Ours);
        let newer = json!({label::VERSION: "9.0.0"});
        let mut managed = newer.clone();
        managed[label::MANAGED_BY] = json!("kyma");
        assert_eq!(decide(managed, json!({}), "1.0.0"), Installation::Ours);
        let unmanaged = json!({annotation::OWNED_BY: "kcp-system/m"});
        assert_eq!(decide(newer.clone(), unmanaged, "1.0.0"), Installation::Ours, "managed again");
        let helm = json!({label::VERSION: "9.0.0", label::MANAGED_BY: "Helm"});
        assert!(matches!(decide(helm, json!({}), "1.0.0"), Installation::Foreign(_)));
    }

    #[test]
    fn like_is_compared_with_like() {
        let manifest: Manifest = serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest", "metadata": {"name": "m"},
            "spec": {"remote": true, "version": "1.0.0", "install": {"name": "i", "source": {}}}}))
        .unwrap();
        let rendered = |labels: Value| RenderedObject {
            key: key(),
            version: "v1".into(),
            stage: super::super::stage::Stage::Workloads,
            body: json!({"metadata": {"labels": labels}}),
            served: true,
        };
        for (labels, expected) in [
            (json!({label::VERSION: "2.17.0"}), "2.17.0"),
            (json!({label::VERSION: "main"}), "1.0.0"),
            (Value::Null, "1.0.0"),
        ] {
            assert_eq!(target(&manifest, &key(), Some(&[rendered(labels)])), Some(expected));
        }
        assert_eq!(target(&manifest, &key(), None), Some("1.0.0"));
    }
}
