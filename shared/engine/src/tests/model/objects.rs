//! Objects in the runtime cluster of the model: owner, fields with their managers, marks and content of users.

use std::collections::{BTreeMap, BTreeSet};

use kube::api::DynamicObject;
use serde_json::json;
use tidewatch_api::names::annotation;

use crate::inventory::ObjectKey;

/// Owner of an object in the runtime cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The Manifests of the module with this number, which have one name after another.
    Module(usize),
    /// The user, or nobody.
    Foreign,
}

/// Field manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Manager {
    /// The one of all owners.
    Owner,
    /// That of the additions of a module.
    Joined(usize),
    /// That of a writer who is none of ours.
    Writer,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Field {
    value: usize,
    managers: BTreeSet<Manager>,
}

/// Desired values by name.
pub(super) type Fields = BTreeMap<&'static str, usize>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) owner: Owner,
    /// A finalizer of its controller; of a CR, of the module's operator.
    pub(super) is_held: bool,
    pub(super) is_terminating: bool,
    /// A marker that keeps it.
    pub(super) is_marked: bool,
    fields: BTreeMap<&'static str, Field>,
}

impl Object {
    pub(super) fn new(owner: Owner) -> Self {
        Self { owner, is_held: false, is_terminating: false, is_marked: false, fields: BTreeMap::new() }
    }

    /// The object as a request returns it.
    pub(super) fn live(&self) -> DynamicObject {
        let mut live = json!({"metadata": {"name": "o"}});
        if let Owner::Module(at) = self.owner {
            live["metadata"]["annotations"] = json!({annotation::OWNED_BY: format!("kcp/{}", name(at))});
        }
        serde_json::from_value(live).unwrap()
    }

    pub(super) fn value(&self, field: &str) -> Option<usize> {
        self.fields.get(field).map(|field| field.value)
    }

    pub(super) fn has_joined(&self, at: usize) -> bool {
        self.fields.values().any(|field| field.managers.contains(&Manager::Joined(at)))
    }

    /// True for a field that a writer has set who is none of ours.
    pub(super) fn is_of_writer(&self, field: &str) -> bool {
        self.fields.get(field).is_some_and(|field| field.managers.contains(&Manager::Writer))
    }

    /// True if a field has another value than the desired one.
    pub(super) fn differs(&self, desired: &Fields) -> bool {
        desired.iter().any(|(name, value)| self.value(name) != Some(*value))
    }

    /// True if another manager of ours has set a field to another value.
    pub(super) fn conflicts(&self, manager: Manager, desired: &Fields) -> bool {
        let is_other = |it: &Manager| *it != manager && *it != Manager::Writer;
        desired.iter().any(|(name, value)| {
            let field = self.fields.get(name);
            field.is_some_and(|field| field.value != *value && field.managers.iter().any(is_other))
        })
    }

    /// Sets a field as a writer who is none of ours.
    pub(super) fn overwrite(&mut self, name: &'static str, value: usize) {
        self.fields.insert(name, Field { value, managers: [Manager::Writer].into() });
    }

    /// Server-side apply that takes over what conflicts.
    pub(super) fn apply(&mut self, manager: Manager, desired: &Fields) {
        for (name, value) in desired {
            let field = self.fields.entry(*name).or_insert_with(|| Field { value: *value, managers: BTreeSet::new() });
            if field.value != *value {
                *field = Field { value: *value, managers: BTreeSet::new() };
            }
            field.managers.insert(manager);
        }
        self.fields.retain(|name, field| {
            if !desired.contains_key(name) {
                field.managers.remove(&manager);
            }
            !field.managers.is_empty()
        });
    }
}

/// Name of the Manifest of a module.
pub(super) const fn name(at: usize) -> &'static str {
    ["alpha", "beta"][at]
}

pub(super) fn key(kind: &str, name: &str) -> ObjectKey {
    let group = match kind {
        "CustomResourceDefinition" => "apiextensions.k8s.io",
        "Deployment" => "apps",
        "ClusterRole" => "rbac.authorization.k8s.io",
        "ValidatingWebhookConfiguration" => "admissionregistration.k8s.io",
        "Sample" => "example.test",
        "Extra" => "extra.test",
        _ => "",
    };
    let namespace = if matches!(kind, "Deployment" | "ConfigMap" | "Sample" | "Extra") { "kyma-system" } else { "" };
    ObjectKey { group: group.into(), kind: kind.into(), namespace: namespace.into(), name: name.into() }
}

/// The CRD that both modules have.
pub(super) fn definition() -> ObjectKey {
    key("CustomResourceDefinition", "samples.example.test")
}

/// The ConfigMap that both modules have.
pub(super) fn map() -> ObjectKey {
    key("ConfigMap", "m")
}

/// The operator of the module with CRs.
pub(super) fn operator() -> ObjectKey {
    key("Deployment", "d")
}

/// The Namespace in which users have objects.
pub(super) fn namespace() -> ObjectKey {
    key("Namespace", "own")
}
