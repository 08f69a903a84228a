//! Corrections of `managedFields` before an apply. Pure.
//!
//! * The API server converts an object to the API version of every entry, and a CRD may convert nothing, or drop the version.
//!   So the entries of a custom resource follow the version in which we apply it.
//! * A server-side apply removes only the fields that its own manager applied before. What kubectl or Helm applied of a
//!   module that the user installed by hand becomes ours, so that the version of the module replaces it; what a user
//!   edited since then belongs to another manager, and stays.

use json_patch::{
    Patch,
    PatchOperation::{self, Remove, Replace, Test},
    RemoveOperation, ReplaceOperation, TestOperation,
    jsonptr::PointerBuf,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry, Time};
use kube::{
    ResourceExt as _,
    api::{DynamicObject, ObjectMeta},
    core::Status,
};
use serde_json::{Value, json};
use tidewatch_api::names::field_manager;

use super::fields::{self, APPLY, Step, UPDATE, members};
use crate::kinds::is_built_in;

/// Field managers and operations of the tools by which users install modules.
const TOOLS: [(&str, &str); 8] = [
    ("kubectl-client-side-apply", UPDATE),
    ("kubectl-create", UPDATE),
    ("kubectl-replace", UPDATE),
    ("kubectl", APPLY),
    ("helm", UPDATE),
    ("helm", APPLY),
    ("Helm", UPDATE),
    // Early versions of lifecycle-manager.
    (field_manager::MODULE, UPDATE),
];
/// Kinds of which fields that go would be refused, or lose data.
const NOT_ADOPTED: [&str; 4] = ["Job", "Namespace", "PersistentVolume", "PersistentVolumeClaim"];
/// Members that API servers fill in, and the annotation of kubectl.
const DEFAULTS: [&str; 34] = [
    LAST_APPLIED,
    "clusterIP",
    "clusterIPs",
    "defaultMode",
    "deployment.kubernetes.io/revision",
    "dnsPolicy",
    "failureThreshold",
    "imagePullPolicy",
    "internalTrafficPolicy",
    "ipFamilies",
    "ipFamilyPolicy",
    "matchPolicy",
    "periodSeconds",
    "podManagementPolicy",
    "progressDeadlineSeconds",
    "protocol",
    "reinvocationPolicy",
    "resources",
    "restartPolicy",
    "revisionHistoryLimit",
    "rollingUpdate",
    "schedulerName",
    "scheme",
    "securityContext",
    "serviceAccount",
    "sessionAffinity",
    "strategy",
    "successThreshold",
    "targetPort",
    "terminationGracePeriodSeconds",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "timeoutSeconds",
    "updateStrategy",
];
/// Annotation of kubectl with the object as it was applied.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Refusals of an apply whose entries the API server cannot convert.
const REFUSALS: [&str; 2] = ["request to convert CR to an invalid group/version", "field not declared in schema"];
/// Refusal of the applied object itself.
const REFUSED_BODY: &str = "failed to create typed patch object";
/// Fields that a text names at most.
const MAX_NAMED: usize = 5;

/// Corrected entries of an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Correction {
    entries: Vec<ManagedFieldsEntry>,
    /// Entries got another API version.
    pub(super) is_of_versions: bool,
    /// Entries of a tool became ours.
    pub(super) is_adoption: bool,
    has_last_applied: bool,
}

/// Computes the correction before an apply of the desired object; `None` if the entries are right. With `takes_over`, those
/// of tools become ours even if we have applied the object before.
pub(super) fn correction(manager: &str, desired: &Value, live: &DynamicObject, takes_over: bool) -> Option<Correction> {
    let mut correction = Correction { entries: live.managed_fields().to_vec(), ..Correction::default() };
    let version = desired["apiVersion"].as_str()?;
    let is_in_other_version = |entry: &ManagedFieldsEntry| {
        entry.manager.as_deref() == Some(manager) && entry.api_version.as_deref() != Some(version)
    };
    if is_custom(desired) && correction.entries.iter().any(is_in_other_version) {
        correction.set_version(version);
    }
    let is_adopted = desired["kind"].as_str().is_some_and(|kind| !NOT_ADOPTED.contains(&kind));
    if is_adopted && (takes_over || fields::applied(manager, live).is_none()) {
        correction.adopt(manager, version, desired);
        correction.has_last_applied = correction.is_adoption && live.annotations().contains_key(LAST_APPLIED);
    }
    (correction.is_of_versions || correction.is_adoption).then_some(correction)
}

/// The entries of all managers in the version of a desired custom resource. `None` if they are.
pub(super) fn in_one_version(desired: &Value, live: &DynamicObject) -> Option<Correction> {
    let version = desired["apiVersion"].as_str().filter(|_| is_custom(desired))?;
    let differs = |entry: &ManagedFieldsEntry| entry.api_version.as_deref() != Some(version);
    let mut correction = Correction { entries: live.managed_fields().to_vec(), ..Correction::default() };
    correction.entries.iter().any(differs).then(|| {
        correction.set_version(version);
        correction
    })
}

/// The patch that moves the entries of an object to another API version, unless the object has changed since it was read.
/// `None` if they have it.
pub fn version_patch(version: &str, head: &ObjectMeta) -> Option<Patch> {
    let live = DynamicObject { types: None, metadata: head.clone(), data: Value::Null };
    let correction = in_one_version(&json!({"apiVersion": version}), &live)?;
    let mut operations = vec![unchanged(&live)];
    operations.extend(correction.operations());
    Some(Patch(operations))
}

/// Fails a patch of an object that has changed since it was read.
pub(super) fn unchanged(live: &DynamicObject) -> PatchOperation {
    let path = PointerBuf::from_tokens(["metadata", "resourceVersion"]);
    Test(TestOperation { path, value: json!(live.metadata.resource_version) })
}

/// Our entry with these fields, and the others without them.
pub(super) fn taking(manager: &str, desired: &Value, live: &DynamicObject, paths: &[Vec<String>]) -> Correction {
    let mut correction = Correction { entries: live.managed_fields().to_vec(), ..Correction::default() };
    for path in paths {
        for entry in &mut correction.entries {
            if let Some(set) = &mut entry.fields_v1 {
                remove(&mut set.0, path);
            }
        }
        let leaf = json!({});
        let set = path.iter().rev().fold(leaf, |inner, member| json!({member.as_str(): inner}));
        correction.give(manager, desired["apiVersion"].as_str().unwrap_or_default(), &set, None);
    }
    correction.entries.retain(|entry| fields::of_entry(entry).is_some_and(|set| *set != json!({})));
    correction
}

/// Removes the fields at a path from a set, with the parents that are empty then.
fn remove(set: &mut Value, path: &[String]) {
    let Some((first, rest)) = path.split_first() else { return };
    let Some(members) = set.as_object_mut() else { return };
    if rest.is_empty() {
        members.remove(first);
    } else if let Some(inner) = members.get_mut(first).filter(|inner| !fields::is_leaf(inner)) {
        remove(inner, rest);
        if *inner == json!({}) {
            members.remove(first);
        }
    }
}

/// Returns true for a refusal of an apply because of the API versions of entries.
pub(super) fn are_refused(refusal: &Status) -> bool {
    let message = &refusal.message;
    refusal.code == 500 && REFUSALS.iter().any(|words| message.contains(words)) && !message.contains(REFUSED_BODY)
}

/// True for an object of a kind that a CRD defines.
fn is_custom(desired: &Value) -> bool {
    let group = desired["apiVersion"].as_str().and_then(|version| version.split_once('/')).map(|(group, _)| group);
    group.is_some_and(|group| !is_built_in(group))
}

fn is_of_tool(entry: &ManagedFieldsEntry) -> bool {
    TOOLS.iter().any(|(manager, operation)| fields::is_of(entry, manager, operation))
}

impl Correction {
    /// Moves the fields of tools to our entry, apart from those that stay theirs.
    fn adopt(&mut self, manager: &str, version: &str, desired: &Value) {
        let mut taken = json!({});
        let mut time = None;
        let kept = self.entries.drain(..).filter_map(|mut entry| {
            // Names of fields differ between the versions of a typed object.
            let is_readable = is_custom(desired) || entry.api_version.as_deref() == Some(version);
            let set = fields::of_entry(&entry).filter(|_| is_readable && is_of_tool(&entry)).cloned();
            let Some(mut set) = set else { return Some(entry) };
            let left = without_kept(&mut set, desired);
            taken = fields::union(&taken, &set);
            time = time.take().or(entry.time.clone());
            entry.fields_v1 = left.map(FieldsV1);
            entry.fields_v1.is_some().then_some(entry)
        });
        let kept: Vec<_> = kept.collect();
        self.entries = kept;
        if taken == json!({}) {
            return;
        }
        self.is_adoption = true;
        self.give(manager, version, &taken, time);
    }

    /// Moves all entries to another API version. An entry of another manager that stayed behind could not be converted
    /// either, and the API server would then drop all of them.
    fn set_version(&mut self, version: &str) {
        for entry in &mut self.entries {
            entry.api_version = Some(version.to_owned());
        }
        self.is_of_versions = true;
    }

    /// Adds fields to our entry.
    fn give(&mut self, manager: &str, version: &str, taken: &Value, time: Option<Time>) {
        match self.entries.iter_mut().find(|entry| fields::is_of(entry, manager, APPLY)) {
            Some(ours) => {
                let set = fields::of_entry(ours).map_or_else(|| taken.clone(), |set| fields::union(set, taken));
                ours.fields_v1 = Some(FieldsV1(set));
            }
            None => self.entries.push(ManagedFieldsEntry {
                api_version: Some(version.to_owned()),
                fields_type: Some("FieldsV1".to_owned()),
                fields_v1: Some(FieldsV1(taken.clone())),
                manager: Some(manager.to_owned()),
                operation: Some(APPLY.to_owned()),
                subresource: None,
                time,
            }),
        }
    }

    /// The patch of an object.
    pub(super) fn operations(&self) -> Vec<PatchOperation> {
        let path = PointerBuf::from_tokens(["metadata", "managedFields"]);
        let mut operations = vec![Replace(ReplaceOperation { path, value: json!(self.entries) })];
        if self.has_last_applied {
            let path = PointerBuf::from_tokens(["metadata", "annotations", LAST_APPLIED]);
            operations.push(Remove(RemoveOperation { path }));
        }
        operations
    }
}

/// Removes the fields that stay the tool's from its set, and returns them: the versions of a CRD, because an apply without
/// a version would delete stored data. The status is removed, too, and not returned.
fn without_kept(set: &mut Value, desired: &Value) -> Option<Value> {
    let members = set.as_object_mut()?;
    members.remove("f:status");
    if desired["kind"] != "CustomResourceDefinition" {
        return None;
    }
    let spec = members.get_mut("f:spec")?.as_object_mut()?;
    let versions = spec.remove("f:versions")?;
    if spec.is_empty() {
        members.remove("f:spec");
    }
    Some(json!({"f:spec": {"f:versions": versions}}))
}

/// Paths of the fields that tools applied and the desired object lacks, so that its first apply after an adoption removes
/// them; the first ones, and how many there are. A tool that updates owns the defaults of what it wrote, which come again.
pub fn surplus_of_tools(desired: &Value, head: &ObjectMeta) -> (Vec<String>, usize) {
    let mut found = Vec::new();
    if desired["kind"].as_str().is_none_or(|kind| NOT_ADOPTED.contains(&kind)) {
        return (found, 0);
    }
    for entry in head.managed_fields.iter().flatten().filter(|entry| is_of_tool(entry)) {
        let Some(mut set) = fields::of_entry(entry).cloned() else { continue };
        without_kept(&mut set, desired);
        collect_surplus(&set, Some(desired), "", &mut found);
    }
    found.sort();
    found.dedup();
    let number = found.len();
    found.truncate(MAX_NAMED);
    (found, number)
}

fn collect_surplus(set: &Value, desired: Option<&Value>, path: &str, found: &mut Vec<String>) {
    let steps = members(set).filter(|(_, step, _)| !matches!(step, Step::Field(name) if DEFAULTS.contains(name)));
    for (_, step, inner) in steps {
        let mut path = path.to_owned();
        step.add_to(&mut path);
        match desired.and_then(|desired| step.within(desired)) {
            // Its elements are those of a list that is owned as a whole, or of another type.
            Some(desired) if desired.is_object() || desired.is_array() => {
                collect_surplus(inner, Some(desired), &path, found);
            }
            Some(_) => {}
            None if matches!(step, Step::Field("metadata" | "annotations" | "labels" | "spec")) => {
                collect_surplus(inner, None, &path, found);
            }
            None => found.push(path),
        }
    }
}

#[cfg(test)]
mod tests;
