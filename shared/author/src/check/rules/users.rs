//! Versions that are removed although something still names them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use tidewatch_api::{
    Kyma,
    names::{GROUP, VERSION},
    selection::ModuleSelection,
};
use tidewatch_select::catalog::{desired::Kind, visibility::template_name};

use crate::check::{
    document::Node,
    finding::{Code, Finding},
    object::Object,
};

/// Maximum number of Kymas that one finding names.
const MAX_NAMED: usize = 5;

/// Kymas that pin a version of a module that they select, by the name of its template.
#[derive(Debug, Default)]
pub(in crate::check) struct PinnedUsers(BTreeMap<String, BTreeSet<String>>);

impl PinnedUsers {
    /// Adds the pinned versions of a Kyma. A document that is no Kyma has none.
    pub(in crate::check) fn add(&mut self, kyma: &Node) {
        let metadata = kyma.get("metadata");
        let spec = kyma.get("spec");
        let name = metadata.and_then(|metadata| metadata.text("name")).unwrap_or("?");
        let value = |of: Option<&Node>, member: &str| of.and_then(|of| of.get(member)).map(Node::to_value);
        // Channels do not matter to pins.
        let parts = json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Kyma",
            "metadata": {"annotations": value(metadata, "annotations")},
            "spec": {"channel": "", "modules": value(spec, "modules")}});
        let Ok(kyma) = serde_json::from_value::<Kyma>(parts) else { return };
        for (module, version) in ModuleSelection::of(&kyma).pinned() {
            self.0.entry(template_name(module, version)).or_default().insert(name.to_owned());
        }
    }
}

/// Reports templates of the earlier state that are removed while a Kyma pins their version, or a release meta describes
/// it.
pub(super) fn check(objects: &[Object], before: &[Object], users: &PinnedUsers, findings: &mut Vec<Finding>) {
    let stays = |name: &str| objects.iter().any(|object| object.kind == Kind::Template && object.name == name);
    let metas = objects.iter().filter_map(Object::release_meta);
    let described: BTreeMap<_, _> = metas
        .flat_map(|meta| {
            let module = &meta.spec.module_name;
            meta.spec.versions().iter().map(move |entry| (template_name(module, &entry.version), module))
        })
        .collect();
    for object in before.iter().filter(|object| object.kind == Kind::Template && !stays(&object.name)) {
        // The position is in the earlier state, the only one with the object.
        let used = |message: String| object.finding(&[], Code::VersionInUse, message);
        if let Some(kymas) = users.0.get(&object.name) {
            let named: Vec<_> = kymas.iter().take(MAX_NAMED).map(String::as_str).collect();
            let more = match kymas.len() - named.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let message = format!("the template is removed, and Kymas pin its version: {}{more}", named.join(", "));
            findings.push(used(message).suggest("keep it until they pin another version, or none"));
        } else if let Some(module) = described.get(&object.name) {
            let message = format!(
                "the template is removed, and spec.versions of the ModuleReleaseMeta {module} names its version"
            );
            findings
                .push(used(message).suggest("keep it as long as a runtime may have it, or remove the entry as well"));
        }
    }
}
