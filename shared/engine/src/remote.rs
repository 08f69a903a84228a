//! One object in the runtime cluster, and the requests on it.

use kube::{
    Api, ResourceExt as _,
    api::{DynamicObject, Patch, PatchParams},
};
use serde_json::Value;
use tidewatch_api::names::field_manager;
use tidewatch_cluster::object;

use super::{failure::Failure, inventory::ObjectKey};

/// An object in the runtime cluster, in a version in which its kind is served. A failed request is a failure to do
/// something with it, in the words of the caller.
pub(super) struct Remote<'a> {
    pub(super) key: &'a ObjectKey,
    pub(super) version: String,
    pub(super) api: Api<DynamicObject>,
}

impl Remote<'_> {
    /// Reads the object; `None` if it does not exist.
    pub(super) async fn read(&self, doing: &str) -> Result<Option<DynamicObject>, Failure> {
        object::get(&self.api, &self.key.name).await.map_err(self.failed(doing))
    }

    /// Reads the metadata of the object; `None` if it does not exist.
    pub(super) async fn read_metadata(&self, doing: &str) -> Result<Option<DynamicObject>, Failure> {
        object::get_metadata(&self.api, &self.key.name).await.map_err(self.failed(doing))
    }

    /// Merges members into the object.
    pub(super) async fn merge(&self, doing: &str, members: Value) -> Result<DynamicObject, Failure> {
        self.api.patch(&self.key.name, &as_module(), &Patch::Merge(members)).await.map_err(self.failed(doing))
    }

    /// Merges members into the metadata of the object. Returns false if it does not exist.
    pub(super) async fn merge_metadata(&self, doing: &str, members: Value) -> Result<bool, Failure> {
        let patched = self.api.patch_metadata(&self.key.name, &as_module(), &Patch::Merge(members)).await;
        Ok(object::if_exists(patched, &self.key.name).map_err(self.failed(doing))?.is_some())
    }

    /// Deletes the object as it was found, unless it is another one by now. Returns it while finalizers hold it.
    pub(super) async fn delete(&self, found: &DynamicObject) -> Result<Option<DynamicObject>, Failure> {
        object::delete(&self.api, &self.key.name, found.uid()).await.map_err(self.failed("delete"))
    }

    fn failed(&self, doing: &str) -> impl FnOnce(kube::Error) -> Failure + use<> {
        Failure::during(format!("{doing} {}", self.key))
    }
}

/// Parameters of a patch by the field manager of modules.
fn as_module() -> PatchParams {
    PatchParams { field_manager: Some(field_manager::MODULE.to_owned()), ..PatchParams::default() }
}
