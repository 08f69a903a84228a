//! Changes of the objects by an upgrade from one version of a module to another.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{
    AppliedObjects, ObjectIdentity, RenderError, VersionContent,
    fields::{self, FieldChange},
    risks::{self, Risk},
};

/// Changes by an upgrade. Objects are compared as they are written to a runtime cluster; equal group, kind, namespace and
/// name mean the same object.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Upgrade {
    /// Objects that the upgrade creates, in the order of their application.
    pub added: Vec<ObjectIdentity>,
    /// Objects that it deletes, in the order of their deletion.
    pub removed: Vec<ObjectIdentity>,
    /// Objects that it changes, in the order of their application.
    pub changed: Vec<ObjectChange>,
    /// Number of objects that it leaves as they are.
    pub unchanged: usize,
    /// Changes of the default module CR, which affect new installations only.
    #[serde(rename = "defaultCR", skip_serializing_if = "Vec::is_empty")]
    pub default_cr: Vec<FieldChange>,
    /// Change of the workload that decides on the readiness of the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manager: Option<ManagerChange>,
    /// Changes that can fail or lose data.
    pub risks: Vec<Risk>,
    /// Kinds whose scope only the runtime cluster knows.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub undecided: BTreeSet<String>,
}

/// Changes of one object.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ObjectChange {
    /// The object, after the change.
    #[serde(flatten)]
    pub object: ObjectIdentity,
    /// Changed fields, at least one.
    pub fields: Vec<FieldChange>,
}

/// Change of the manager. `None` means that the module has none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ManagerChange {
    /// Manager before.
    pub before: Option<ObjectIdentity>,
    /// Manager after.
    pub after: Option<ObjectIdentity>,
}

impl Upgrade {
    /// Compares two versions.
    ///
    /// # Errors
    /// An object of one of them is malformed.
    pub fn between(from: &VersionContent, to: &VersionContent) -> Result<Self, RenderError> {
        let before = from.applied()?;
        let after = to.applied()?;
        let old = before.by_key();
        let new = after.by_key();
        let mut added = Vec::new();
        let mut changed = Vec::new();
        let mut risks = Vec::new();
        let mut unchanged = 0;
        for object in &after.rendered {
            let Some(previous) = old.get(&object.key) else {
                added.push(ObjectIdentity::of_rendered(object));
                continue;
            };
            let fields = fields::changes(&previous.body, &object.body);
            if fields.is_empty() {
                unchanged += 1;
                continue;
            }
            risks.extend(risks::of_change(previous, object, &fields));
            changed.push(ObjectChange { object: ObjectIdentity::of_rendered(object), fields });
        }
        let removed: Vec<_> = before.rendered.iter().rev().filter(|object| !new.contains_key(&object.key)).collect();
        risks.extend(removed.iter().filter_map(|object| risks::of_removal(object)));
        let empty = serde_json::json!({});
        let default_cr = [from, to].map(|version| version.default_cr.as_ref().unwrap_or(&empty));
        let AppliedObjects { manager: later, .. } = &after;
        let manager =
            (before.manager != *later).then(|| ManagerChange { before: before.manager.clone(), after: later.clone() });
        Ok(Self {
            added,
            changed,
            unchanged,
            default_cr: fields::changes(default_cr[0], default_cr[1]),
            manager,
            risks,
            undecided: before.undecided.union(&after.undecided).cloned().collect(),
            removed: removed.into_iter().map(ObjectIdentity::of_rendered).collect(),
        })
    }

    /// Returns true if the versions differ.
    pub fn is_change(&self) -> bool {
        let Self { added, removed, changed, default_cr, manager, .. } = self;
        !(added.is_empty() && removed.is_empty() && changed.is_empty() && default_cr.is_empty() && manager.is_none())
    }
}
