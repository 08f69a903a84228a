//! Change from an earlier state.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate, ModuleTemplateSpec};
use tidewatch_select::{catalog::desired::Kind, versions::core_version};

use crate::check::{
    CheckOptions,
    document::Step::{Index, Key},
    finding::{Code, Finding},
    object::Object,
};

pub(super) fn check(objects: &[Object], before: &[Object], options: &CheckOptions, findings: &mut Vec<Finding>) {
    let metas = before.iter().filter_map(|object| Some((object.name.as_str(), object.release_meta()?)));
    let metas: BTreeMap<_, _> = metas.collect();
    for object in objects {
        if let (Some(meta), Some(before)) = (object.release_meta(), metas.get(object.name.as_str())) {
            check_component(object, meta, before, findings);
            check_channels(object, meta, before, findings);
        }
    }
    let templates = before.iter().filter_map(|object| Some((object.name.as_str(), object.template()?)));
    let templates: BTreeMap<_, _> = templates.collect();
    for object in objects {
        if let (Some(template), Some(before)) = (object.template(), templates.get(object.name.as_str())) {
            check_template(object, template, before, findings);
        }
    }
    if options.whole {
        let stays = |name: &str| objects.iter().any(|object| object.kind == Kind::ReleaseMeta && object.name == name);
        let gone = before.iter().filter(|object| object.kind == Kind::ReleaseMeta && !stays(&object.name));
        findings.extend(gone.map(|object| {
            // The position is in the earlier state, the only one with the object.
            let finding = object.finding(&[], Code::ModuleRemoved, "the module is removed: its runtimes lose it");
            finding.suggest("catalog diff says from how many")
        }));
    }
}

/// Reports changed fields of a template that decide what runtimes install.
fn check_template(object: &Object, template: &ModuleTemplate, before: &ModuleTemplate, findings: &mut Vec<Finding>) {
    let members = |template: &ModuleTemplate| match serde_json::to_value(&template.spec) {
        Ok(Value::Object(members)) => members,
        _ => Map::new(),
    };
    let now = members(template);
    let before = members(before);
    let fields: BTreeSet<_> = now.keys().chain(before.keys()).collect();
    let is_changed = |field: &&String| {
        !ModuleTemplateSpec::EDITABLE.contains(&field.as_str()) && now.get(*field) != before.get(*field)
    };
    for field in fields.into_iter().filter(is_changed) {
        if field == ModuleTemplateSpec::REPAIRABLE {
            let message = "every runtime with this version looks for its manager anew".to_owned();
            let finding = object.finding(&[Key("spec"), Key(field)], Code::ManagerEdited, message);
            findings.push(finding.suggest("make sure that the new one names a workload of this version"));
            continue;
        }
        let message = format!("{field} of a template never changes: its version is installed with the former one");
        let finding = object.finding(&[Key("spec"), Key(field)], Code::TemplateEdited, message);
        findings.push(finding.suggest("restore it, and publish another version with the change"));
    }
}

/// Reports another component: the Manifests of all runtimes with the module are replaced.
fn check_component(object: &Object, meta: &ModuleReleaseMeta, before: &ModuleReleaseMeta, findings: &mut Vec<Finding>) {
    let component = |meta: &ModuleReleaseMeta| meta.spec.ocm_component_name.clone().unwrap_or_default();
    let now = component(meta);
    let before = component(before);
    if before.is_empty() || now == before {
        return;
    }
    let message =
        format!("the component changes from {before}: the Manifest of every runtime with the module is replaced");
    let finding = object.finding(&[Key("spec"), Key("ocmComponentName")], Code::ComponentChanged, message);
    findings.push(finding.suggest("restore it; publish the module under another name if it is another module"));
}

/// Reports channels that move to a lower version or are removed.
fn check_channels(object: &Object, meta: &ModuleReleaseMeta, before: &ModuleReleaseMeta, findings: &mut Vec<Finding>) {
    for (index, entry) in meta.spec.channels().iter().enumerate() {
        let Some(from) = before.spec.version_of(&entry.channel) else { continue };
        if core_version(&entry.version).zip(core_version(from)).is_some_and(|(to, from)| to < from) {
            let path = [Key("spec"), Key("channels"), Index(index), Key("version")];
            let message = format!("the channel {} moves down from {from} to {}", entry.channel, entry.version);
            let finding = object.finding(&path, Code::Downgrade, message);
            findings.push(finding.suggest("runtimes that have the higher version refuse it; release a higher one"));
        }
    }
    for entry in before.spec.channels() {
        if meta.spec.version_of(&entry.channel).is_none() {
            let message = format!(
                "the channel {} is removed: runtimes that follow it keep {} and no longer update",
                entry.channel, entry.version
            );
            let finding = object.finding(&[Key("spec"), Key("channels")], Code::ChannelRemoved, message);
            findings.push(finding.suggest(format!(
                "keep {{channel: {}, version: {}}} as long as anybody follows it; catalog diff says for how many it goes",
                entry.channel, entry.version
            )));
        }
    }
}
