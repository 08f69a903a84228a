//! Versions that are removed although something still names them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use tidewatch_shared::names::annotation;

use crate::controllers::catalog::{
    check::{
        document::Node,
        finding::{Code, Finding},
        object::Object,
    },
    desired::Kind,
    visibility::template_name,
};

/// Maximum number of Kymas that one finding names.
const MAX_NAMED: usize = 5;

/// Kymas that select a fixed version, by the name of its template.
#[derive(Debug, Default)]
pub(in crate::controllers::catalog::check) struct FixedUsers(BTreeMap<String, BTreeSet<String>>);

impl FixedUsers {
    /// Adds the fixed versions of a Kyma: those of the last accepted spec of its runtime, or else of its own spec.
    pub(in crate::controllers::catalog::check) fn add(&mut self, kyma: &Node) {
        let metadata = kyma.get("metadata");
        let name = metadata.and_then(|metadata| metadata.text("name")).unwrap_or("?");
        let accepted = metadata.and_then(|metadata| metadata.get("annotations")?.text(annotation::ACCEPTED_SPEC));
        let accepted: Option<Value> = accepted.and_then(|text| serde_json::from_str(text).ok());
        let spec = accepted.or_else(|| kyma.get("spec").map(Node::to_value)).unwrap_or_default();
        for module in spec["modules"].as_array().into_iter().flatten() {
            if let (Some(module), Some(version)) = (module["name"].as_str(), module["version"].as_str()) {
                self.0.entry(template_name(module, version)).or_default().insert(name.to_owned());
            }
        }
    }
}

/// Reports templates of the earlier state that are removed while a Kyma selects their version, or a release meta describes
/// it.
pub(super) fn check(objects: &[Object], before: &[Object], users: &FixedUsers, findings: &mut Vec<Finding>) {
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
            let message = format!("the template is removed, and Kymas select its version: {}{more}", named.join(", "));
            findings.push(used(message).suggest("keep it until they select another version or a channel"));
        } else if let Some(module) = described.get(&object.name) {
            let message = format!(
                "the template is removed, and spec.versions of the ModuleReleaseMeta {module} names its version"
            );
            findings
                .push(used(message).suggest("keep it as long as a runtime may have it, or remove the entry as well"));
        }
    }
}
