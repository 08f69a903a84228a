//! Creation of the default module CR. One that exists is not changed: it may be the user's.

use kube::{
    Api, ResourceExt as _,
    api::{DynamicObject, Patch, PatchParams, PostParams},
};
use tidewatch_api::names::field_manager;
use tidewatch_cluster::object;

/// Creates an object unless one of its name exists.
///
/// An API server holds a POST for 2 s if the CRD of its kind was established less than 2 s before (`ServeHTTP` in
/// `customresource_handler.go` of `k8s.io/apiextensions-apiserver`), but no server-side apply. An object of a new kind is
/// applied, without force, if a read finds none. An API server that refuses the apply gets a POST: unlike an apply, that
/// drops fields which the schema lacks.
///
/// # Errors
/// The request failed, not because the object exists.
pub(super) async fn create(api: Api<DynamicObject>, object: DynamicObject, is_new_kind: bool) -> kube::Result<()> {
    if is_new_kind {
        let name = object.name_any();
        if object::get_metadata(&api, &name).await?.is_some() {
            return Ok(());
        }
        let params = PatchParams::apply(field_manager::DEFAULT_OBJECT);
        match api.patch(&name, &params, &Patch::Apply(&object)).await {
            Err(kube::Error::Api(status)) if status.code != 409 => {}
            // A conflict: somebody else has created it since.
            applied => return unless_exists(applied),
        }
    }
    let manager = Some(field_manager::DEFAULT_OBJECT.to_owned());
    let params = PostParams { field_manager: manager, ..PostParams::default() };
    unless_exists(api.create(&params, &object).await)
}

fn unless_exists(created: kube::Result<DynamicObject>) -> kube::Result<()> {
    match created {
        Err(error) if !object::is_conflict(&error) => Err(error),
        _ => Ok(()),
    }
}
