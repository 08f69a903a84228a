//! Reads of single objects, and classification of the API server's errors.

use kube::Api;
use serde::de::DeserializeOwned;

/// Returns true if an API server reported that this object does not exist. A 404 that names no object means that the
/// kind is not served, which proves nothing about the object.
pub(crate) fn is_absent(error: &kube::Error, name: &str) -> bool {
    let names_it = |status: &kube::core::Status| status.details.as_ref().is_some_and(|details| details.name == name);
    matches!(error, kube::Error::Api(status) if status.code == 404 && status.reason == "NotFound" && names_it(status))
}

/// Returns true for a conflict: a concurrent write, or an object that exists already.
pub(crate) fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// Reads an object; `None` only if the server reports that it does not exist.
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
