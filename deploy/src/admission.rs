//! ValidatingAdmissionPolicies for ModuleTemplates and ModuleReleaseMetas in KCP, which deny or warn beyond the schemas
//! of the CRDs, in a kustomization of their own.
//!
//! A channel that is moved to a lower version, another component of a module, and another manager of a template only cause
//! a warning and an audit annotation, because a release may have to be withdrawn, moved or repaired. Another edit of a
//! template is denied unless an annotation allows that one.
//!
//! kustomize adds a namespace to objects of kinds that it does not know as cluster-scoped, including these: a
//! kustomization that sets a namespace must not include them.

use anyhow::Result;
use serde_json::{Value, json};
use tidewatch_api::{
    ModuleTemplateSpec, crds,
    names::{GROUP, KCP_NAMESPACE, VERSION, annotation},
};

use crate::render::{File, object, with_kustomization};

/// A CEL pattern of versions that can be part of the name of a ModuleTemplate: the pattern of the CRDs without capital
/// letters and trailing hyphens.
const NAMEABLE: &str = r"r'^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-([a-z-][0-9a-z-]*)?[0-9a-z])?$'";

/// Renders the files of `deploy/admission`.
///
/// # Errors
/// An object cannot be serialized.
pub fn admission() -> Result<Vec<File>> {
    let policies = [
        ("moduletemplates", templates(), json!(["Deny"])),
        ("template-edits", template_edits(), json!(["Deny"])),
        ("template-repairs", template_repairs(), json!(["Warn", "Audit"])),
        ("modulereleasemetas", release_metas(), json!(["Deny"])),
        ("channel-moves", channel_moves(), json!(["Warn", "Audit"])),
        ("component-changes", component_changes(), json!(["Warn", "Audit"])),
    ];
    let mut files = Vec::new();
    for (policy, spec, actions) in policies {
        let name = format!("tidewatch-{policy}");
        files.push(object(policy, &named("ValidatingAdmissionPolicy", &name, spec))?);
        let binding = json!({
            "policyName": name,
            "validationActions": actions,
            // If KCP is a runtime as well, objects in namespaces of its users are not restricted.
            "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": KCP_NAMESPACE}}},
        });
        files.push(object(&format!("{policy}-binding"), &named("ValidatingAdmissionPolicyBinding", &name, binding))?);
    }
    with_kustomization(files)
}

fn named(kind: &str, name: &str, spec: Value) -> Value {
    let labels = json!({"app.kubernetes.io/part-of": "tidewatch"});
    json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec})
}

fn policy(resource: &str, variables: Value, validations: &[(&str, &str)]) -> Value {
    let validations: Vec<_> =
        validations.iter().map(|(message, expression)| json!({"message": message, "expression": expression})).collect();
    json!({
        "failurePolicy": "Fail",
        "matchConstraints": constraints(&["CREATE", "UPDATE"], resource),
        // Existing objects can be labelled and deleted, even if invalid.
        "matchConditions": [{
            "name": "the-specification-is-new",
            "expression": "request.operation == 'CREATE' || object.?spec != oldObject.?spec",
        }],
        "variables": variables,
        "validations": validations,
    })
}

fn templates() -> Value {
    let variables = json!([
        {"name": "module", "expression": "object.?spec.?moduleName.orValue('')"},
        {"name": "version", "expression": "object.?spec.?version.orValue('')"},
    ]);
    policy(
        "moduletemplates",
        variables,
        &[
            (
                "spec.moduleName and spec.version must be set: templates are looked up by them",
                "variables.module != '' && variables.version != ''",
            ),
            (
                "the name must be <spec.moduleName>-<spec.version>",
                "variables.module == '' || variables.version == '' || \
             object.metadata.name == variables.module + '-' + variables.version",
            ),
        ],
    )
}

/// Denies changes of a template's specification except of the fields that inform users or have no effect, and of the manager.
/// Labels, such as those that limit the visibility, and annotations may change. A template that nothing finds by module and
/// version may be completed.
fn template_edits() -> Value {
    let differs = |field: &String| format!("(object.?spec.?{field} == oldObject.?spec.?{field} ? [] : ['{field}'])");
    let changed: Vec<_> = immutable_fields().iter().map(differs).collect();
    let allowed = format!(
        "object.metadata.?annotations[?'{}'].orValue('') == string(oldObject.metadata.generation)",
        annotation::ALLOW_EDIT
    );
    json!({
        "failurePolicy": "Fail",
        "matchConstraints": constraints(&["UPDATE"], "moduletemplates"),
        "matchConditions": [
            {"name": "the-specification-changes", "expression": "object.?spec != oldObject.?spec"},
            with_version_before(),
        ],
        "variables": [
            {"name": "changed", "expression": changed.join(" + ")},
            {"name": "allowed", "expression": allowed},
        ],
        "validations": [{
            "expression": "variables.changed.size() == 0 || variables.allowed",
            "message": "a template never changes: publish another version",
            "messageExpression": "'a template never changes: publish another version instead of changing spec.' + \
                variables.changed.join(' and spec.')",
        }],
    })
}

/// Warns of another manager: a template with a wrong one can be repaired, and a right one can be broken.
fn template_repairs() -> Value {
    let manager = format!("?spec.?{}", ModuleTemplateSpec::REPAIRABLE);
    json!({
        "failurePolicy": "Ignore",
        "matchConstraints": constraints(&["UPDATE"], "moduletemplates"),
        "matchConditions": [with_version_before()],
        "validations": [{
            "expression": format!("object.{manager} == oldObject.{manager}"),
            "message": "spec.manager changes: every runtime with this version looks for its manager anew",
        }],
    })
}

fn constraints(operations: &[&str], resource: &str) -> Value {
    json!({"resourceRules": [{
        "apiGroups": [GROUP], "apiVersions": [VERSION], "operations": operations, "resources": [resource],
    }]})
}

/// Condition that a template was found by module and version before the change.
fn with_version_before() -> Value {
    let before = |field: &str| format!("oldObject.?spec.?{field}.orValue('') != ''");
    json!({"name": "it-has-a-version", "expression": format!("{} && {}", before("moduleName"), before("version"))})
}

/// Fields of a template's specification that never change: all of its CRD but those that inform users, have no effect, or
/// are repaired.
fn immutable_fields() -> Vec<String> {
    let name = format!("moduletemplates.{GROUP}");
    let crd = crds::crds().into_iter().find(|crd| crd.metadata.name.as_ref() == Some(&name));
    let schema = crd.and_then(|crd| crd.spec.versions.into_iter().next()?.schema?.open_api_v3_schema?.properties);
    let spec = schema.and_then(|mut properties| properties.remove("spec")?.properties).unwrap_or_default();
    let may_change =
        |field: &str| ModuleTemplateSpec::EDITABLE.contains(&field) || field == ModuleTemplateSpec::REPAIRABLE;
    spec.into_keys().filter(|field| !may_change(field)).collect()
}

fn release_metas() -> Value {
    let variables = json!([
        {"name": "channels", "expression": "object.?spec.?channels.orValue([])"},
        {"name": "mandatory", "expression": "object.?spec.?mandatory.?version.orValue('')"},
        {"name": "requirements", "expression": "object.?spec.?kymaSelector.?matchExpressions.orValue([])"},
    ]);
    let nameable = format!(
        "variables.channels.all(entry, entry.version.matches({NAMEABLE})) && \
         (variables.mandatory == '' || variables.mandatory.matches({NAMEABLE}))"
    );
    policy(
        "modulereleasemetas",
        variables,
        &[
            ("the name must be spec.moduleName", "object.metadata.name == object.?spec.?moduleName.orValue('')"),
            (
                "spec.ocmComponentName must be set: without it nothing can be installed",
                "object.?spec.?ocmComponentName.orValue('') != ''",
            ),
            (
                "a version must be usable in the name of a template: three numbers, and after a hyphen lower-case letters, \
             digits and hyphens",
                &nameable,
            ),
            (
                "no channel may have the name none, which is reserved",
                "variables.channels.all(entry, entry.channel != 'none')",
            ),
            (
                "every entry of spec.versions must name its version",
                "object.?spec.?versions.orValue([]).all(entry, entry.version != '')",
            ),
            (
                "an operator of spec.kymaSelector must be In or NotIn with values, or Exists or DoesNotExist without values",
                "variables.requirements.all(entry, \
             entry.operator in ['In', 'NotIn'] ? entry.?values.orValue([]).size() > 0 : \
             entry.operator in ['Exists', 'DoesNotExist'] && entry.?values.orValue([]).size() == 0)",
            ),
        ],
    )
}

/// Warns of channels that are moved to a lower version. Like the receiver, it compares three numbers and ignores the
/// part after a hyphen.
fn channel_moves() -> Value {
    // Numbers with more digits may exceed CEL's int.
    let comparable =
        |version: &str| format!(r"{version}.matches(r'^[0-9]{{1,18}}\.[0-9]{{1,18}}\.[0-9]{{1,18}}(-.*)?$')");
    let compare = |how: &str, index: u8| {
        let number = |version: &str| format!("int({version}.split('-')[0].split('.')[{index}])");
        format!("{} {how} {}", number("entry.version"), number("old.version"))
    };
    let down = format!(
        "variables.channels.filter(entry, variables.before.exists(old, old.channel == entry.channel && {} && {} && \
         ({} || {} && ({} || {} && {}))))",
        comparable("entry.version"),
        comparable("old.version"),
        compare("<", 0),
        compare("==", 0),
        compare("<", 1),
        compare("==", 1),
        compare("<", 2),
    );
    json!({
        // Versions that cannot be compared must not block an update.
        "failurePolicy": "Ignore",
        "matchConstraints": constraints(&["UPDATE"], "modulereleasemetas"),
        "matchConditions": [{
            "name": "a-channel-is-new", "expression": "object.?spec.?channels != oldObject.?spec.?channels",
        }],
        "variables": [
            {"name": "channels", "expression": "object.?spec.?channels.orValue([])"},
            {"name": "before", "expression": "oldObject.?spec.?channels.orValue([])"},
            {"name": "down", "expression": down},
        ],
        "validations": [{
            "expression": "variables.down.size() == 0",
            "message": "a channel moves down: runtimes with a higher version reject it",
            "messageExpression": "'runtimes with a higher version reject it: ' + \
                variables.down.map(entry, entry.channel + ' moves down to ' + entry.version).join(', ')",
        }],
    })
}

/// Warns of another component of a module, which replaces the Manifests of all runtimes with the module.
fn component_changes() -> Value {
    let component = |object: &str| format!("{object}.?spec.?ocmComponentName.orValue('')");
    let before = component("oldObject");
    let now = component("object");
    json!({
        "failurePolicy": "Ignore",
        "matchConstraints": constraints(&["UPDATE"], "modulereleasemetas"),
        "validations": [{
            "expression": format!("{before} == '' || {before} == {now}"),
            "message": "the component of the module changes: the Manifest of every runtime with the module is replaced",
        }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_decides_what_is_installed_is_immutable() {
        let fields = immutable_fields();
        let expected =
            ["associatedResources", "data", "descriptor", "mandatory", "moduleName", "requiresDowntime", "version"];
        assert_eq!(fields, expected);
    }
}
