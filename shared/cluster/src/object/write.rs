//! Writes of single objects: apply, replace, release, delete, and the convergence of an object to its desired form.

use std::fmt::Debug;

use json_patch::PatchOperation;
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
    core::Status,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use thiserror::Error;

use super::{
    contested::WriteBudget,
    get, if_exists,
    managed_fields::{self, Correction},
    second_way::{self, Fallback, SecondWay, SecondWays},
    shape::{Ownership, Repair, Shape, without_foreign_lifecycle},
};

/// A desired object.
pub struct Target<'a> {
    /// Name of the object.
    pub name: &'a str,
    /// Field manager of all writes.
    pub manager: &'static str,
    /// Rules of the comparison.
    pub shape: &'a Shape,
    /// Body of the server-side apply.
    pub desired: &'a Value,
    /// Limit of the writes against a competing writer; `None` for an object in the control plane.
    pub budget: Option<&'a WriteBudget<'a>>,
}

/// Result of a convergence.
#[derive(Debug)]
pub struct Converged {
    /// Object as in the last response.
    pub object: DynamicObject,
    /// The object was written.
    pub written: bool,
    /// A PUT followed an apply.
    pub replaced: bool,
}

/// Failure to converge an object.
#[derive(Debug, Error)]
pub enum WriteError {
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
    /// The apply after the answer to its first refusal.
    #[error("apply the object in another way")]
    Answered(Fallback, #[source] kube::Error),
    /// The object is deleted to be created again, and finalizers hold it.
    #[error("wait for the deletion of the object")]
    Terminating,
}

impl WriteError {
    /// The failed request; `None` if the object is contested, or being deleted.
    pub fn request(self) -> Option<kube::Error> {
        match self {
            Self::Contested | Self::Terminating => None,
            Self::Apply(error) | Self::Replace(error) | Self::Delete(error) | Self::Answered(_, error) => Some(error),
        }
    }
}

impl Target<'_> {
    /// Selects the repair of a live object, see [`Shape::compare`].
    pub fn compare(&self, live: &DynamicObject, accepted: Option<u64>) -> Repair {
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
    pub async fn converge(
        &self,
        api: &Api<DynamicObject>,
        found: Option<DynamicObject>,
        accepted: &mut Option<u64>,
    ) -> Result<Converged, WriteError> {
        self.converge_with(api, found, accepted, None).await
    }

    /// As [`Self::converge`], with `ways` beyond an apply: entries of `managedFields` are corrected before it, and some
    /// refusals are answered once.
    ///
    /// # Errors
    /// [`WriteError`].
    pub async fn converge_with(
        &self,
        api: &Api<DynamicObject>,
        found: Option<DynamicObject>,
        accepted: &mut Option<u64>,
        ways: Option<&SecondWays<'_>>,
    ) -> Result<Converged, WriteError> {
        let corrections = |live: &DynamicObject| ways.and_then(|ways| Some((ways, self.correction(live, ways)?)));
        let (found, is_corrected) = match found {
            Some(live) => match corrections(&live) {
                Some((ways, correction)) => (Some(self.correct(api, &live, &correction, ways).await?), true),
                None => (Some(live), false),
            },
            None => (None, false),
        };
        let repair = found.as_ref().map_or(Repair::Apply, |found| self.compare(found, *accepted));
        let found = match found {
            Some(object) if repair == Repair::None => {
                return Ok(Converged { object, written: is_corrected, replaced: false });
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
            (_, found) => self.apply_with(api, found.as_ref(), ways).await?,
        };
        // An object that was not read first shows only now who applied it before.
        if found.is_none()
            && let Some((ways, correction)) = corrections(&object)
        {
            let corrected = self.correct(api, &object, &correction, ways).await?;
            object = self.apply_with(api, Some(&corrected), Some(ways)).await?;
        }
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

    /// Applies, and answers a refusal once if there is an answer to it.
    async fn apply_with(
        &self,
        api: &Api<DynamicObject>,
        found: Option<&DynamicObject>,
        ways: Option<&SecondWays<'_>>,
    ) -> Result<DynamicObject, WriteError> {
        let refusal = match self.apply(api).await {
            Err(WriteError::Apply(kube::Error::Api(refusal))) if second_way::may_exist(ways, &refusal) => refusal,
            applied => return applied,
        };
        let read = match found {
            Some(_) => None,
            None => get(api, self.name).await.map_err(WriteError::Apply)?,
        };
        let way = found
            .or(read.as_ref())
            .and_then(|live| Some((live, second_way::select(ways, self.manager, &refusal, self.desired, live)?)));
        let Some((live, way)) = way else { return Err(WriteError::Apply(kube::Error::Api(refusal))) };
        if let Some(ways) = ways {
            ways.metrics.count(way.fallback());
        }
        match &way {
            SecondWay::Correct(_, correction) => drop(self.patch(api, live, correction.operations()).await?),
            SecondWay::Recreate => {
                if delete(api, self.name, live.uid()).await.map_err(WriteError::Delete)?.is_some() {
                    return Err(WriteError::Terminating);
                }
            }
        }
        self.apply(api).await.map_err(|error| match error {
            WriteError::Apply(error) => WriteError::Answered(way.fallback(), error),
            error => error,
        })
    }

    fn correction(&self, live: &DynamicObject, ways: &SecondWays<'_>) -> Option<Correction> {
        managed_fields::correction(self.manager, self.desired, live, ways.takes_over)
    }

    /// Corrects the entries of `managedFields`.
    async fn correct(
        &self,
        api: &Api<DynamicObject>,
        live: &DynamicObject,
        correction: &Correction,
        ways: &SecondWays<'_>,
    ) -> Result<DynamicObject, WriteError> {
        if self.budget.is_some_and(|budget| !budget.may_write()) {
            return Err(WriteError::Contested);
        }
        let corrected = self.patch(api, live, correction.operations()).await?;
        if let Some(budget) = self.budget {
            budget.wrote();
        }
        if correction.is_of_versions {
            ways.metrics.count(Fallback::FieldVersion);
        }
        if correction.is_adoption {
            ways.metrics.count(Fallback::Adopted);
        }
        Ok(corrected)
    }

    /// Patches an object if it has not changed since it was read.
    async fn patch(
        &self,
        api: &Api<DynamicObject>,
        live: &DynamicObject,
        operations: Vec<PatchOperation>,
    ) -> Result<DynamicObject, WriteError> {
        let mut all = vec![managed_fields::unchanged(live)];
        all.extend(operations);
        let params = PatchParams { field_manager: Some(self.manager.to_owned()), ..PatchParams::default() };
        let patch = Patch::Json::<()>(json_patch::Patch(all));
        api.patch(self.name, &params, &patch).await.map_err(|error| WriteError::Apply(as_conflict(error)))
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
pub async fn release(
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
pub async fn delete<K: Clone + DeserializeOwned + Debug>(
    api: &Api<K>,
    name: &str,
    uid: Option<String>,
) -> kube::Result<Option<K>> {
    let preconditions = Some(Preconditions { uid, ..Preconditions::default() });
    let params = DeleteParams { preconditions, ..DeleteParams::background() };
    Ok(if_exists(api.delete(name, &params).await, name)?.and_then(|deleted| deleted.left()))
}

/// Reads only the metadata of an object; `None` if it does not exist.
pub async fn get_metadata(api: &Api<DynamicObject>, name: &str) -> kube::Result<Option<DynamicObject>> {
    Ok(if_exists(api.get_metadata(name).await, name)?.map(|found| bare(found.metadata)))
}

/// Maps the failed test of a JSON patch, after a faster write, to a conflict. An object that is invalid has causes.
pub fn as_conflict(error: kube::Error) -> kube::Error {
    let has_causes = |it: &Status| it.details.as_ref().is_some_and(|details| !details.causes.is_empty());
    match error {
        kube::Error::Api(status) if status.code == 422 && !has_causes(&status) => {
            kube::Error::Api(Status::failure(&status.message, "Conflict").with_code(409).boxed())
        }
        error => error,
    }
}

fn bare(metadata: ObjectMeta) -> DynamicObject {
    DynamicObject { types: None, metadata, data: Value::Null }
}

/// Converts a typed object for the comparison.
pub fn erase(object: &(impl Resource + Serialize)) -> kube::Result<DynamicObject> {
    serde_json::to_value(object).and_then(serde_json::from_value).map_err(kube::Error::SerdeError)
}

/// Converts an object to its type.
pub fn parse<K: DeserializeOwned>(object: &DynamicObject) -> kube::Result<K> {
    serde_json::to_value(object).and_then(serde_json::from_value).map_err(kube::Error::SerdeError)
}
