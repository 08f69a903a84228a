//! Writes of objects that another module owns, and of the namespace that belongs to none.

use std::{collections::BTreeSet, ops::ControlFlow};

use kube::{
    ResourceExt,
    api::{DynamicObject, TypeMeta},
};
use serde_json::{Value, json};
use tidewatch_api::names::{annotation, field_manager, label};
use tidewatch_cluster::{
    kinds::is_built_in,
    object::{self, Dispute, Join, JoinError, Ownership, Shape, has_joined, has_lost_field},
};

use super::{
    super::{
        apply::{Applied, Wanted, contested},
        execution::Execution,
        failure::Failure,
        inventory::ObjectKey,
        remote::Remote,
        report::list,
    },
    Claim, Holder, is_our_manager,
};

/// Marks of the owner of an object.
const OWNERSHIP: [(&str, &[&str]); 2] = [
    ("labels", &[label::MANAGED_BY, label::COMPONENT, label::PART_OF]),
    ("annotations", &[annotation::OWNED_BY, annotation::DISCLAIMER]),
];

/// Result of [`Execution::join`]: the object is up to this Manifest alone, or done.
pub(in super::super) type Joined = ControlFlow<Result<Applied, Failure>, Option<DynamicObject>>;

impl Execution<'_> {
    /// Returns true if an object must be read before it is written, since another module may own it.
    pub(in super::super) fn is_shared(&self, key: &ObjectKey) -> bool {
        key.is_common_namespace() || self.sharing.may_be_owned(key)
    }

    /// Adds to a live object what its owner lacks, if that is another module, or none.
    pub(in super::super) async fn join(&self, wanted: &Wanted<'_>, found: Option<DynamicObject>) -> Joined {
        let key = &wanted.object.key;
        let body = &*wanted.body;
        let budget = &self.budget(wanted);
        let Some(found) = found else { return Joined::Continue(None) };
        let manager = self.sharing.manager();
        let (owner, desired) = if key.is_common_namespace() {
            (None, marks_to_add(body, &found, &manager))
        } else {
            match self.sharing.claim(key, &found) {
                // An apply makes the owner own its fields again.
                Claim::Own if has_lost_field(field_manager::MODULE, is_joining, body, &found) => {
                    return Joined::Continue(None);
                }
                Claim::Own => return Joined::Continue(Some(found)),
                Claim::Yield => return Joined::Break(Ok(self.current(key, found, None))),
                Claim::Join(owner) => (Some(owner), without_ownership(body)),
            }
        };
        let shape = Shape {
            owner: Some(field_manager::MODULE),
            drops_empty_lists: is_built_in(&key.group),
            ..Shape::new(Ownership::Fields)
        };
        let join = Join {
            name: &key.name,
            manager: &manager,
            shape: &shape,
            desired: &desired,
            budget,
            is_ours: is_our_manager,
        };
        let disputed = object::disputed(&manager, &desired, &found);
        let mut accepted = self.memory.accepted(key);
        let operation = || format!("apply {key}");
        Joined::Break(match join.converge(&wanted.remote.api, &found, &mut accepted).await {
            Ok(written) => {
                if let Some(version) = written.as_ref().and_then(ResourceExt::resource_version) {
                    self.engine.memories.own_writes.wrote(self.key, key, &version);
                    self.count_reverted(key, wanted.form(), disputed);
                }
                Ok(self.current(key, written.unwrap_or(found), accepted))
            }
            Err(JoinError::Disputed(disputes)) => {
                let remark = owner.map(|owner| remark(key, owner, &disputes));
                Ok(self.current(key, found, None).with(remark))
            }
            Err(JoinError::Contested) => Err(contested(operation())),
            Err(JoinError::Request(error)) => Err(Failure::new(operation(), &error)),
        })
    }

    /// Returns true if the module has added fields to an object while another one was its owner.
    pub(in super::super) fn has_joined(&self, live: &DynamicObject) -> bool {
        has_joined(live, &self.sharing.manager())
    }

    /// Gives up what the module added to an object, once it is the owner and sets all of its fields, or once it leaves.
    pub(in super::super) async fn end_joining(&self, remote: &Remote<'_>, live: &DynamicObject) -> Result<(), Failure> {
        let Remote { key, version, api } = remote;
        let manager = self.sharing.manager();
        if !has_joined(live, &manager) {
            return Ok(());
        }
        let group = if key.group.is_empty() { String::new() } else { format!("{}/", key.group) };
        let types = TypeMeta { api_version: format!("{group}{version}"), kind: key.kind.clone() };
        match object::leave(api, live, &types, &manager).await {
            Ok(left) => {
                if let Some(version) = left.resource_version() {
                    self.engine.memories.own_writes.wrote(self.key, key, &version);
                }
                Ok(())
            }
            Err(error) => Err(Failure::new(format!("give up our fields of {key}"), &error)),
        }
    }
}

/// True for the field manager of a module that has added fields to an object of another one.
fn is_joining(manager: &str) -> bool {
    manager.starts_with(field_manager::SHARED)
}

/// The desired object without the marks of an owner.
fn without_ownership(body: &Value) -> Value {
    let mut desired = body.clone();
    for (member, keys) in OWNERSHIP {
        let marks = desired.pointer_mut(&format!("/metadata/{member}"));
        if let Some(marks) = marks.and_then(Value::as_object_mut) {
            marks.retain(|key, _| !keys.contains(&key.as_str()));
        }
    }
    desired
}

/// Labels and annotations of a namespace that belongs to no module, as far as nobody else has set them to another value. Of
/// two modules with different values, the first one counts, silently: such labels are often left over from a template.
fn marks_to_add(body: &Value, live: &DynamicObject, manager: &str) -> Value {
    let mut metadata = json!({"name": body["metadata"]["name"]});
    for (member, is) in [("labels", live.labels()), ("annotations", live.annotations())] {
        let mut marks = body["metadata"][member].clone();
        let is_free = |key: &String, value: &Value| {
            is.get(key).is_none_or(|is| *value == **is) || owns_mark(live, manager, member, key)
        };
        if let Some(marks) = marks.as_object_mut() {
            marks.retain(|key, value| is_free(key, value));
        }
        metadata[member] = marks;
    }
    json!({"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata})
}

fn owns_mark(live: &DynamicObject, manager: &str, member: &str, key: &str) -> bool {
    let of_manager = live.managed_fields().iter().filter(|entry| entry.manager.as_deref() == Some(manager));
    let mut fields = of_manager.filter_map(|entry| entry.fields_v1.as_ref());
    fields.any(|fields| fields.0["f:metadata"][format!("f:{member}")].get(format!("f:{key}")).is_some())
}

/// One sentence about fields that other modules set to other values.
fn remark(key: &ObjectKey, owner: &Holder, disputes: &[Dispute]) -> String {
    let module_of = |dispute: &Dispute| match dispute.manager.strip_prefix(field_manager::SHARED) {
        Some(module) => Some(module.to_owned()),
        None => is_our_manager(&dispute.manager).then(|| owner.module.clone()),
    };
    let modules: BTreeSet<_> = disputes.iter().filter_map(module_of).collect();
    let fields: BTreeSet<_> = disputes.iter().map(|dispute| dispute.field.as_str()).collect();
    let noun = if modules.len() == 1 { "module" } else { "modules" };
    format!(
        "{key} is shared with the {noun} {}, whose values stay; this module has other ones for {}, and adds none of its own: all of them need equal \
         values, or the object belongs into one of them",
        list(modules.iter().map(String::as_str)),
        list(fields.into_iter()),
    )
}

#[cfg(test)]
mod tests {
    use tidewatch_api::key::ManifestKey;

    use super::*;

    fn live(labels: &Value, managed: &Value) -> DynamicObject {
        let metadata = json!({"name": "n", "labels": labels, "managedFields": managed});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    #[test]
    fn marks_of_an_owner_are_left_out_and_all_else_stays() {
        let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "1"}, "metadata": {"name": "n",
            "labels": {label::MANAGED_BY: "kyma", label::COMPONENT: "m", label::PART_OF: "Kyma", "l": "1"},
            "annotations": {annotation::OWNED_BY: "ns/m", annotation::DISCLAIMER: "d", "a": "1"}}});
        let expected = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "1"},
            "metadata": {"name": "n", "labels": {"l": "1"}, "annotations": {"a": "1"}}});
        assert_eq!(without_ownership(&body), expected);
        assert_eq!(without_ownership(&json!({"metadata": {}})), json!({"metadata": {}}));
    }

    #[test]
    fn labels_of_the_common_namespace_are_added_unless_others_have_set_them() {
        let body = json!({"apiVersion": "v1", "kind": "Namespace", "spec": {"finalizers": ["kubernetes"]},
            "metadata": {"name": "n", "labels": {"new": "1", "equal": "1", "theirs": "1", "ours": "2"}, "annotations": {}}});
        let fields = json!({"f:metadata": {"f:labels": {"f:ours": {}}}});
        let managed = json!([{"manager": "m", "operation": "Apply", "fieldsV1": fields}]);
        let found = live(&json!({"equal": "1", "theirs": "2", "ours": "1"}), &managed);
        let added = marks_to_add(&body, &found, "m");
        let expected = json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": "n", "labels": {"new": "1", "equal": "1", "ours": "2"}, "annotations": {}}});
        assert_eq!(added, expected);
        let of_another = marks_to_add(&body, &found, "another");
        assert_eq!(of_another["metadata"]["labels"], json!({"new": "1", "equal": "1"}));
    }

    #[test]
    fn remark_names_object_fields_and_the_modules_that_set_them() {
        let key = ObjectKey::of(
            &json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "ns"}}),
        );
        let owner = Holder {
            key: ManifestKey::new("kcp", "m"),
            owner: "kcp/m".to_owned(),
            module: "alpha".to_owned(),
            is_of_module: false,
            is_leaving: false,
        };
        let dispute = |field: &str, manager: &str| Dispute { field: field.to_owned(), manager: manager.to_owned() };
        let shared = format!("{}gamma", field_manager::SHARED);
        let disputes =
            [dispute(".data.x", field_manager::MODULE), dispute(".data.y", &shared), dispute(".data.z", "u")];
        let said = "ConfigMap ns/a is shared with the modules alpha, gamma, whose values stay; this module has other ones for \
                    .data.x, .data.y, .data.z, and adds none of its own: all of them need equal values, or the object belongs into one \
                    of them";
        assert_eq!(remark(&key, &owner, &disputes), said);
    }
}
