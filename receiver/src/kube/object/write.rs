//! Writes of single objects: apply, replace, release, delete, and the convergence of an object to its desired form.

use std::fmt::Debug;

use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use thiserror::Error;

use super::{
    contested::WriteBudget,
    if_exists,
    shape::{Ownership, Repair, Shape, without_foreign_lifecycle},
};

/// A desired object.
pub(crate) struct Target<'a> {
    pub(crate) name: &'a str,
    /// Field manager of all writes.
    pub(crate) manager: &'static str,
    pub(crate) shape: &'a Shape,
    /// Body of the server-side apply.
    pub(crate) desired: &'a Value,
    /// Limit of the writes against a competing writer; `None` for an object in the control plane.
    pub(crate) budget: Option<&'a WriteBudget<'a>>,
}

/// Result of a convergence.
#[derive(Debug)]
pub(crate) struct Converged {
    /// Object as in the last response.
    pub(crate) object: DynamicObject,
    /// The object was written.
    pub(crate) written: bool,
    /// A PUT followed an apply.
    pub(crate) replaced: bool,
}

/// Failure to converge an object.
#[derive(Debug, Error)]
pub(crate) enum WriteError {
    /// The write budget of the object is exhausted.
    #[error("the object is changed again and again")]
    Contested,
    /// Server-side apply, or the removal of a foreign finalizer or owner.
    #[error("apply the object")]
    Apply(#[source] kube::Error),
    /// PUT.
    #[error("replace the object")]
    Replace(#[source] kube::Error),
    /// DELETE before the object is created again.
    #[error("delete the object")]
    Delete(#[source] kube::Error),
}

impl WriteError {
    /// The failed request; `None` if the object is contested.
    pub(crate) fn request(self) -> Option<kube::Error> {
        match self {
            Self::Contested => None,
            Self::Apply(error) | Self::Replace(error) | Self::Delete(error) => Some(error),
        }
    }
}

impl Target<'_> {
    /// Selects the repair of a live object, see [`Shape::compare`].
    pub(crate) fn compare(&self, live: &DynamicObject, accepted: Option<u64>) -> Repair {
        self.shape.compare(self.desired, live, accepted)
    }

    /// Writes an object that differs, and compares the response: fields of other managers that an apply kept are removed
    /// by a PUT at the resourceVersion of the response. A difference that remains comes from this API server (a default,
    /// an older schema, a mutating webhook): `accepted` becomes the form in which it stores the object, and another
    /// write would not help. `found` is the live object if the repair is to depend on it; without it an apply comes
    /// first. An object that is being deleted is not replaced.
    ///
    /// # Errors
    /// [`WriteError`]; without a request for [`WriteError::Contested`].
    pub(crate) async fn converge(
        &self,
        api: &Api<DynamicObject>,
        found: Option<DynamicObject>,
        accepted: &mut Option<u64>,
    ) -> Result<Converged, WriteError> {
        let repair = found.as_ref().map_or(Repair::Apply, |found| self.compare(found, *accepted));
        let found = match found {
            Some(object) if repair == Repair::None => {
                return Ok(Converged { object, written: false, replaced: false });
            }
            found => found,
        };
        if self.budget.is_some_and(|budget| !budget.may_write()) {
            return Err(WriteError::Contested);
        }
        let mut object = match (repair, &found) {
            (Repair::Replace, Some(found)) => self.replace(api, found).await?,
            (Repair::Release, Some(found)) => {
                release(api, self.name, self.manager, found).await.map_err(WriteError::Apply)?
            }
            (Repair::Recreate, Some(found)) => {
                delete(api, self.name, found.uid()).await.map_err(WriteError::Delete)?;
                self.apply(api).await?
            }
            _ => self.apply(api).await?,
        };
        if let Some(budget) = self.budget {
            budget.wrote();
        }
        let mut remaining = self.compare(&object, None);
        let is_live = object.metadata.deletion_timestamp.is_none();
        let replaced = is_live && remaining == Repair::Replace && repair != Repair::Replace;
        if replaced {
            object = self.replace(api, &object).await?;
            remaining = self.compare(&object, None);
        } else if is_live && (repair, remaining) == (Repair::Release, Repair::Apply) {
            object = self.apply(api).await?;
            remaining = self.compare(&object, None);
        }
        *accepted = (remaining != Repair::None).then(|| self.shape.form(self.desired, &object));
        Ok(Converged { object, written: true, replaced })
    }

    /// Applies the desired fields, and takes over those that other managers own.
    async fn apply(&self, api: &Api<DynamicObject>) -> Result<DynamicObject, WriteError> {
        let params = PatchParams::apply(self.manager).force();
        let patch = Patch::Apply(self.desired);
        let applied = match self.shape.ownership {
            // A metadata-only response does not reveal the content.
            Ownership::Metadata => {
                api.patch_metadata(self.name, &params, &patch).await.map(|applied| bare(applied.metadata))
            }
            _ => api.patch(self.name, &params, &patch).await,
        };
        applied.map_err(WriteError::Apply)
    }

    /// Replaces an object if it has not changed since it was read.
    async fn replace(&self, api: &Api<DynamicObject>, live: &DynamicObject) -> Result<DynamicObject, WriteError> {
        let params = PostParams { field_manager: Some(self.manager.to_owned()), ..PostParams::default() };
        let object = self.shape.replacement(self.desired, live);
        api.replace(self.name, &params, &object).await.map_err(WriteError::Replace)
    }
}

/// Removes foreign finalizers and owner references from an object if it is still the same one. Its content stays, and
/// is not read.
pub(crate) async fn release(
    api: &Api<DynamicObject>,
    name: &str,
    manager: &str,
    found: &DynamicObject,
) -> kube::Result<DynamicObject> {
    let finalizers = without_foreign_lifecycle(&found.metadata).finalizers;
    let patch = json!({"metadata": {"uid": found.uid(), "finalizers": finalizers, "ownerReferences": null}});
    let released = api.patch_metadata(name, &PatchParams::apply(manager), &Patch::Merge(patch)).await?;
    // The content is unchanged if it was known.
    Ok(DynamicObject { metadata: released.metadata, ..found.clone() })
}

/// Deletes the object with this uid in the background. Returns it while it is still being deleted.
///
/// # Errors
/// A conflict if another object has taken the name.
pub(crate) async fn delete<K: Clone + DeserializeOwned + Debug>(
    api: &Api<K>,
    name: &str,
    uid: Option<String>,
) -> kube::Result<Option<K>> {
    let preconditions = Some(Preconditions { uid, ..Preconditions::default() });
    let params = DeleteParams { preconditions, ..DeleteParams::background() };
    Ok(if_exists(api.delete(name, &params).await, name)?.and_then(|deleted| deleted.left()))
}

/// Reads only the metadata of an object; `None` if it does not exist.
pub(crate) async fn get_metadata(api: &Api<DynamicObject>, name: &str) -> kube::Result<Option<DynamicObject>> {
    Ok(if_exists(api.get_metadata(name).await, name)?.map(|found| bare(found.metadata)))
}

fn bare(metadata: ObjectMeta) -> DynamicObject {
    DynamicObject { types: None, metadata, data: Value::Null }
}

/// Converts a typed object for the comparison.
pub(crate) fn erase(object: &(impl Resource + Serialize)) -> kube::Result<DynamicObject> {
    serde_json::to_value(object).and_then(serde_json::from_value).map_err(kube::Error::SerdeError)
}

/// Converts an object to its type.
pub(crate) fn parse<K: DeserializeOwned>(object: &DynamicObject) -> kube::Result<K> {
    serde_json::to_value(object).and_then(serde_json::from_value).map_err(kube::Error::SerdeError)
}
