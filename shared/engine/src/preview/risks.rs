//! Changes of objects that the API server refuses, or that lose data of users.

use serde::Serialize;
use serde_json::Value;
use strum::Display;

use super::{
    ObjectIdentity,
    fields::{FieldChange, member, object_of},
};
use crate::{recreation, render::RenderedObject};

/// A change that can fail or lose data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Risk {
    /// The object.
    #[serde(flatten)]
    pub object: ObjectIdentity,
    /// Kind of the risk.
    pub code: RiskCode,
    /// Explanation: a clause without the object.
    pub message: String,
}

/// Kind of a risk.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum RiskCode {
    /// A CRD is removed where it has no resources.
    DefinitionRemoved,
    /// A Namespace or a PersistentVolumeClaim is removed where it has no content.
    DataRemoved,
    /// The scope of a CRD changes, which the API server refuses.
    ScopeChanged,
    /// A version of a CRD is removed: resources that are stored in it are first stored in another one.
    VersionRemoved,
    /// A version of a CRD is no longer served.
    VersionNotServed,
    /// The conversion webhook of a CRD is removed.
    ConversionRemoved,
    /// A field is removed from the schema of a version.
    FieldRemoved,
    /// A field of the schema has another type.
    FieldType,
    /// A field of the schema is required that was not.
    FieldRequired,
    /// A field is changed that the API server does not let change.
    ImmutableField,
    /// A field is set that excludes a default of the API server, which refuses both.
    DefaultExcluded,
}

/// Fields of a kind that cannot be changed.
struct Immutable {
    group: &'static str,
    kind: &'static str,
    paths: &'static [&'static str],
}

const fn immutable(group: &'static str, kind: &'static str, paths: &'static [&'static str]) -> Immutable {
    Immutable { group, kind, paths }
}

const IMMUTABLE: &[Immutable] = &[
    immutable("", "PersistentVolume", &["spec.csi", "spec.hostPath", "spec.local", "spec.nfs", "spec.volumeMode"]),
    immutable(
        "",
        "PersistentVolumeClaim",
        &[
            "spec.accessModes",
            "spec.dataSource",
            "spec.dataSourceRef",
            "spec.selector",
            "spec.storageClassName",
            "spec.volumeMode",
            "spec.volumeName",
        ],
    ),
    immutable("", "ResourceQuota", &["spec.scopes", "spec.scopeSelector"]),
    immutable("", "Secret", &["type"]),
    immutable("", "Service", &["spec.clusterIP", "spec.clusterIPs", "spec.loadBalancerClass"]),
    immutable("apiextensions.k8s.io", "CustomResourceDefinition", &["spec.names.kind"]),
    immutable("apps", "Deployment", &["spec.selector"]),
    immutable("apps", "DaemonSet", &["spec.selector"]),
    immutable("apps", "ReplicaSet", &["spec.selector"]),
    immutable(
        "apps",
        "StatefulSet",
        &[
            "spec.selector",
            "spec.serviceName",
            "spec.podManagementPolicy",
            "spec.volumeClaimTemplates",
            "spec.revisionHistoryLimit",
        ],
    ),
    immutable(
        "batch",
        "Job",
        &[
            "spec.selector",
            "spec.template",
            "spec.completionMode",
            "spec.completions",
            "spec.podFailurePolicy",
            "spec.successPolicy",
            "spec.backoffLimitPerIndex",
            "spec.managedBy",
        ],
    ),
    immutable("networking.k8s.io", "IngressClass", &["spec.controller"]),
    immutable("node.k8s.io", "RuntimeClass", &["handler"]),
    immutable("rbac.authorization.k8s.io", "RoleBinding", &["roleRef"]),
    immutable("rbac.authorization.k8s.io", "ClusterRoleBinding", &["roleRef"]),
    immutable("scheduling.k8s.io", "PriorityClass", &["value", "preemptionPolicy"]),
    immutable("storage.k8s.io", "CSIDriver", &["spec.attachRequired", "spec.volumeLifecycleModes"]),
    immutable("storage.k8s.io", "StorageClass", &["provisioner", "parameters", "reclaimPolicy", "volumeBindingMode"]),
    immutable("storage.k8s.io", "VolumeAttributesClass", &["driverName", "parameters"]),
];
/// Update strategy of a workload that names none.
const ROLLING: &str = "RollingUpdate";
/// Fields that cannot be changed while the object has `immutable: true`.
const FROZEN: [&str; 4] = ["data", "binaryData", "stringData", "immutable"];

/// Risk of the removal of an object.
pub(super) fn of_removal(object: &RenderedObject) -> Option<Risk> {
    let (code, message) = match (&*object.key.group, &*object.key.kind) {
        _ if object.key.is_definition() => (
            RiskCode::DefinitionRemoved,
            "it is removed from runtimes that have no resource of its kind, and stays in the others",
        ),
        ("", "Namespace") => (
            RiskCode::DataRemoved,
            "it is removed from runtimes in which it has no objects of others, and stays in the others",
        ),
        ("", "PersistentVolumeClaim") => {
            (RiskCode::DataRemoved, "it is removed from runtimes in which it was never bound")
        }
        _ => return None,
    };
    Some(Risk { object: ObjectIdentity::of_rendered(object), code, message: message.to_owned() })
}

/// Risks of the change of an object, given with its changed fields.
pub(super) fn of_change(before: &RenderedObject, after: &RenderedObject, fields: &[FieldChange]) -> Vec<Risk> {
    let mut found = Vec::new();
    if after.key.is_definition() {
        of_definition(&before.body["spec"], &after.body["spec"], &mut found);
    }
    let is_of_kind = |it: &&Immutable| it.group == after.key.group && it.kind == after.key.kind;
    let immutable = IMMUTABLE.iter().filter(is_of_kind).flat_map(|it| it.paths);
    let can_be_frozen = after.key.group.is_empty() && matches!(&*after.key.kind, "ConfigMap" | "Secret");
    let is_frozen = can_be_frozen && before.body["immutable"] == true;
    for path in immutable.chain(FROZEN.iter().filter(|_| is_frozen)) {
        if !fields.iter().any(|field| is_within(field, path)) {
            continue;
        }
        let text = if recreation::permits(&after.key, &after.body) {
            format!("{path} cannot be changed: the object is deleted and created again")
        } else {
            format!("{path} cannot be changed")
        };
        found.push((RiskCode::ImmutableField, text));
    }
    found.extend(of_strategy(before, after));
    let object = ObjectIdentity::of_rendered(after);
    found.into_iter().map(|(code, message)| Risk { object: object.clone(), code, message }).collect()
}

fn is_within(field: &FieldChange, path: &str) -> bool {
    let rest = field.path.strip_prefix(path);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Risk of another update strategy than the default one that a workload had.
fn of_strategy(before: &RenderedObject, after: &RenderedObject) -> Option<(RiskCode, String)> {
    let name = match (&*after.key.group, &*after.key.kind) {
        ("apps", "Deployment") => "strategy",
        ("apps", "StatefulSet") => "updateStrategy",
        _ => return None,
    };
    let type_of = |object: &RenderedObject| object.body["spec"][name]["type"].as_str().unwrap_or(ROLLING).to_owned();
    let has_default = before.body["spec"][name]["rollingUpdate"].is_null() && type_of(before) == ROLLING;
    let becomes = Some(type_of(after)).filter(|becomes| has_default && becomes != ROLLING)?;
    let text =
        format!("spec.{name} becomes {becomes}: the receiver removes the defaults of {ROLLING}, which exclude it");
    Some((RiskCode::DefaultExcluded, text))
}

fn of_definition(before: &Value, after: &Value, found: &mut Vec<(RiskCode, String)>) {
    if before["scope"] != after["scope"] {
        let text = |spec: &Value| spec["scope"].as_str().unwrap_or_default().to_owned();
        found.push((RiskCode::ScopeChanged, format!("the scope changes from {} to {}", text(before), text(after))));
    }
    if before["conversion"]["strategy"] == "Webhook" && after["conversion"].is_null() {
        let text = "spec.conversion is removed, with what others wrote into it";
        found.push((RiskCode::ConversionRemoved, text.to_owned()));
    }
    for version in versions(before) {
        let name = version["name"].as_str().unwrap_or_default();
        let Some(later) = versions(after).find(|later| later["name"] == version["name"]) else {
            found.push((RiskCode::VersionRemoved, format!("the version {name} is removed")));
            continue;
        };
        if version["served"] == true && later["served"] != true {
            found.push((RiskCode::VersionNotServed, format!("the version {name} is no longer served")));
        }
        let schema = |version: &Value| version["schema"]["openAPIV3Schema"].clone();
        of_schema(name, "", &schema(version), &schema(later), found);
    }
}

fn versions(spec: &Value) -> impl Iterator<Item = &Value> {
    spec["versions"].as_array().into_iter().flatten()
}

/// Compares the schemas of one field in one version. The parser of the objects bounds their depth.
fn of_schema(version: &str, path: &str, before: &Value, after: &Value, found: &mut Vec<(RiskCode, String)>) {
    let field = || if path.is_empty() { "the resource".to_owned() } else { format!("the field {path}") };
    if let (Some(old), Some(new)) = (before["type"].as_str(), after["type"].as_str())
        && old != new
    {
        found.push((RiskCode::FieldType, format!("{version}: {} changes from {old} to {new}", field())));
        return;
    }
    let keeps_unknown = after["x-kubernetes-preserve-unknown-fields"] == true;
    let old = object_of(before, "properties");
    let new = object_of(after, "properties");
    for (name, schema) in old.into_iter().flatten() {
        match new.and_then(|new| new.get(name)) {
            Some(later) => of_schema(version, &member(path, name), schema, later, found),
            None if keeps_unknown => {}
            None => {
                let text = format!("{version}: the field {} is removed", member(path, name));
                found.push((RiskCode::FieldRemoved, text));
            }
        }
    }
    let required = |schema: &Value| schema["required"].as_array().cloned().unwrap_or_default();
    let earlier = required(before);
    for name in required(after).iter().filter(|name| !earlier.contains(name)).filter_map(Value::as_str) {
        // A default fills the field in stored resources, too.
        if new.and_then(|new| new.get(name)).is_none_or(|schema| schema.get("default").is_none()) {
            let text = format!("{version}: the field {} becomes required", member(path, name));
            found.push((RiskCode::FieldRequired, text));
        }
    }
    for (schema, suffix) in [("items", "[]"), ("additionalProperties", "[*]")] {
        if before[schema].is_object() && after[schema].is_object() {
            of_schema(version, &format!("{path}{suffix}"), &before[schema], &after[schema], found);
        }
    }
}
