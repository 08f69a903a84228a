//! Change from an earlier state.

use std::collections::BTreeMap;

use semver::Version;
use tidewatch_shared::api::ModuleReleaseMeta;

use crate::controllers::catalog::{
    check::{
        CheckOptions,
        document::Step::{Index, Key},
        finding::{Code, Finding},
        object::Object,
    },
    desired::Kind,
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

/// Reports another component: the Manifests of all runtimes with the module are replaced.
fn check_component(object: &Object, meta: &ModuleReleaseMeta, before: &ModuleReleaseMeta, findings: &mut Vec<Finding>) {
    let component = |meta: &ModuleReleaseMeta| meta.spec.ocm_component_name.clone().unwrap_or_default();
    let (now, before) = (component(meta), component(before));
    if before.is_empty() || now == before {
        return;
    }
    let message =
        format!("the component changes from {before}: the Manifest of every runtime with the module is replaced");
    let finding = object.finding(&[Key("spec"), Key("ocmComponentName")], Code::ComponentChanged, message);
    findings.push(finding.suggest("publish the module under another name if it is another module"));
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

/// Part of a version that the receiver compares before an upgrade: the numbers, without a pre-release.
fn core_version(version: &str) -> Option<(u64, u64, u64)> {
    Version::parse(version).ok().map(|version| (version.major, version.minor, version.patch))
}
