//! Reads of single objects, and the meaning of the API server's refusals.

use kube::Api;
use serde::de::DeserializeOwned;

/// Whether an API server said that this very object is not there. A 404 that names no object means that the kind is not served:
/// that proves nothing.
pub(crate) fn is_absent(error: &kube::Error, name: &str) -> bool {
    let names_it = |status: &kube::core::Status| status.details.as_ref().is_some_and(|details| details.name == name);
    matches!(error, kube::Error::Api(status) if status.code == 404 && status.reason == "NotFound" && names_it(status))
}

/// Whether somebody else wrote in between, or made what we wanted to make.
pub(crate) fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// Reads an object; `None` only if the server says that it is not there.
pub(crate) async fn get<K>(api: &Api<K>, name: &str) -> kube::Result<Option<K>>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    match api.get(name).await {
        Ok(object) => Ok(Some(object)),
        Err(error) if is_absent(&error, name) => Ok(None),
        Err(error) => Err(error),
    }
}
