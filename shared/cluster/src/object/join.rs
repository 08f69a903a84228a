//! Objects that another writer of ours owns: fields that its owner does not set are added by a server-side apply that is not
//! forced, under a field manager of its own, and leave with it.

use kube::{
    Api,
    api::{DynamicObject, Patch, PatchParams, ResourceExt as _, TypeMeta},
};
use serde_json::{Value, json};
use thiserror::Error;

use super::{
    contested::WriteBudget,
    owned_fields::has_stale_field,
    shape::{Repair, Shape},
};

/// Reason of a cause in the response to an apply that conflicts with another field manager.
const FIELD_CONFLICT: &str = "FieldManagerConflict";

/// A desired object of which another writer of ours is the owner.
pub struct Join<'a> {
    /// Name of the object.
    pub name: &'a str,
    /// Field manager of the added fields, which no other writer uses.
    pub manager: &'a str,
    /// Rules of the comparison, without a field manager.
    pub shape: &'a Shape,
    /// Body of the server-side apply.
    pub desired: &'a Value,
    /// Limit of the writes against a competing writer.
    pub budget: &'a WriteBudget<'a>,
    /// Selects the field managers of ours, whose fields are never taken over.
    pub is_ours: fn(&str) -> bool,
}

/// A field that another field manager has set to another value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dispute {
    /// Path of the field, as the API server writes it.
    pub field: String,
    /// Field manager that owns it.
    pub manager: String,
}

/// Failure to join an object.
#[derive(Debug, Error)]
pub enum JoinError {
    /// The write budget of the object is exhausted.
    #[error("the object is changed again and again")]
    Contested,
    /// Other writers of ours have set fields to other values. Nothing was written.
    #[error("other writers set other values")]
    Disputed(Vec<Dispute>),
    /// The request failed.
    #[error("apply the object")]
    Request(#[source] kube::Error),
}

impl Join<'_> {
    /// Adds the desired fields that the live object lacks, and removes those that this manager added and that are not desired
    /// any more. Fields that nobody of ours owns are taken over. Returns the written object; `None` if it has the desired fields,
    /// and is not written.
    ///
    /// # Errors
    /// [`JoinError`].
    pub async fn converge(
        &self,
        api: &Api<DynamicObject>,
        found: &DynamicObject,
        accepted: &mut Option<u64>,
    ) -> Result<Option<DynamicObject>, JoinError> {
        if !self.differs(found, *accepted) {
            return Ok(None);
        }
        if !self.budget.may_write() {
            return Err(JoinError::Contested);
        }
        let object = match self.apply(api, found, false).await {
            Ok(object) => object,
            Err(error) => {
                let disputes = disputes(&error);
                // A manager that the response does not name may be one of ours.
                let is_ours = |dispute: &Dispute| dispute.manager.is_empty() || (self.is_ours)(&dispute.manager);
                if disputes.iter().any(is_ours) {
                    return Err(JoinError::Disputed(disputes));
                }
                if disputes.is_empty() {
                    return Err(JoinError::Request(error));
                }
                self.apply(api, found, true).await.map_err(JoinError::Request)?
            }
        };
        self.budget.wrote();
        *accepted = self.differs(&object, None).then(|| self.shape.form(self.desired, &object));
        Ok(Some(object))
    }

    fn differs(&self, live: &DynamicObject, accepted: Option<u64>) -> bool {
        self.shape.compare(self.desired, live, accepted) != Repair::None
            || has_stale_field(self.manager, self.desired, live)
                && accepted != Some(self.shape.form(self.desired, live))
    }

    /// Applies the desired fields to the object that was found. An apply that takes over fields does so only from the version
    /// that was found: an owner may have written since.
    async fn apply(
        &self,
        api: &Api<DynamicObject>,
        found: &DynamicObject,
        takes_over: bool,
    ) -> kube::Result<DynamicObject> {
        let mut body = self.desired.clone();
        // Without the uid, an object that is gone by now would be created, and belong to nobody.
        body["metadata"]["uid"] = found.uid().into();
        let mut params = PatchParams::apply(self.manager);
        if takes_over {
            body["metadata"]["resourceVersion"] = found.resource_version().into();
            params = params.force();
        }
        api.patch(self.name, &params, &Patch::Apply(&body)).await
    }
}

/// Returns true if a field manager owns fields of an object.
pub fn has_joined(object: &DynamicObject, manager: &str) -> bool {
    object.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(manager))
}

/// Gives up the fields that a manager has added to an object: those that no other manager owns are removed.
///
/// # Errors
/// Of the request; a conflict if another object has taken the name, or none is left.
pub async fn leave(
    api: &Api<DynamicObject>,
    found: &DynamicObject,
    types: &TypeMeta,
    manager: &str,
) -> kube::Result<DynamicObject> {
    let name = found.name_any();
    let mut body = json!(types);
    body["metadata"] = json!({"name": name, "uid": found.uid()});
    if let Some(namespace) = found.namespace() {
        body["metadata"]["namespace"] = namespace.into();
    }
    let left = api.patch_metadata(&name, &PatchParams::apply(manager), &Patch::Apply(&body)).await?;
    Ok(DynamicObject { metadata: left.metadata, ..found.clone() })
}

/// Fields of a refused apply that conflict with other field managers, in a stable order; empty for any other failure.
fn disputes(error: &kube::Error) -> Vec<Dispute> {
    let kube::Error::Api(status) = error else { return Vec::new() };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let conflicts = causes.filter(|cause| status.code == 409 && cause.reason == FIELD_CONFLICT);
    let mut disputes: Vec<_> = conflicts
        .map(|cause| Dispute { field: cause.field.clone(), manager: quoted(&cause.message).unwrap_or_default() })
        .collect();
    disputes.sort();
    disputes.dedup();
    disputes
}

/// The first quoted text, as in `conflict with "manager" using v1`. Go quotes it as JSON does, but for rare characters.
fn quoted(message: &str) -> Option<String> {
    let from = message.get(message.find('"')?..)?;
    serde_json::Deserializer::from_str(from).into_iter::<String>().next()?.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: u16, causes: &Value) -> kube::Error {
        let status = json!({"status": "Failure", "code": code, "reason": "Conflict", "message": "m",
            "details": {"name": "n", "causes": causes}});
        kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()))
    }

    #[test]
    fn disputes_are_the_fields_that_the_api_server_names() {
        let cause =
            |reason: &str, field: &str, message: &str| json!({"reason": reason, "field": field, "message": message});
        let causes = json!([
            cause(FIELD_CONFLICT, ".spec.b", "conflict with \"x\""),
            cause(FIELD_CONFLICT, ".data.a", r#"conflict with "y \"z\"" using v1 at 2026-01-01T00:00:00Z"#),
            cause(FIELD_CONFLICT, ".spec.b", "conflict with \"x\""),
            cause("FieldValueInvalid", ".spec.c", "another problem"),
        ]);
        let expected = [(".data.a", "y \"z\""), (".spec.b", "x")];
        let expected =
            expected.map(|(field, manager)| Dispute { field: field.to_owned(), manager: manager.to_owned() });
        assert_eq!(disputes(&refused(409, &causes)), expected);
        assert_eq!(disputes(&refused(422, &causes)), []);
        assert_eq!(disputes(&refused(409, &json!([]))), []);
        let unnamed = json!([cause(FIELD_CONFLICT, ".a", "conflict")]);
        assert_eq!(disputes(&refused(409, &unnamed)), [Dispute { field: ".a".to_owned(), manager: String::new() }]);
    }
}
