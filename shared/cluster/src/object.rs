//! Single objects: reads, watches and writes, and classification of the API server's errors.
//!
//! `shape` compares a live object with its desired form, `owned_fields` finds fields that are not desired any more,
//! `normal_form` recognises what the API server stores otherwise than it was applied. `write` converges the object,
//! `managed_fields` corrects entries before an apply, and `second_way` answers its refusal. `join` adds fields to an object
//! of another writer of ours. `contested` limits the writes against a competing writer, and `disputed` finds the fields that
//! one has taken.

mod contested;
mod disputed;
mod fields;
mod join;
mod managed_fields;
mod normal_form;
mod owned_fields;
mod quantity;
mod second_way;
mod shape;
mod write;

use std::fmt::{Debug, Display};

use futures::{StreamExt as _, future, stream::BoxStream};
use kube::{
    Api, Resource, ResourceExt,
    api::ListParams,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::de::DeserializeOwned;
use tidewatch_kit::log_error;

pub use contested::{Component, WriteBudget};
pub use contested::{WriteBudgets, WriteMetrics};
pub use disputed::{Disputed, disputed, left_as_it_is, without};
pub use join::{Dispute, Join, JoinError, has_joined, leave};
pub use managed_fields::{surplus_of_tools, version_patch};
pub use owned_fields::has_lost_field;
pub use second_way::FallbackMetrics;
pub use second_way::{Fallback, SecondWays};
pub use shape::{Ownership, Repair, Shape, has_foreign_lifecycle};
pub use write::{Converged, Target, WriteError, as_conflict, delete, erase, get_metadata, parse, release};

/// Returns true if an API server reported that this object does not exist. A 404 that names no object means that the
/// kind is not served, which proves nothing about the object.
pub fn is_absent(error: &kube::Error, name: &str) -> bool {
    let names_it = |status: &kube::core::Status| status.details.as_ref().is_some_and(|details| details.name == name);
    matches!(error, kube::Error::Api(status) if status.code == 404 && status.reason == "NotFound" && names_it(status))
}

/// Returns true for a conflict: a concurrent write, or an object that exists already.
pub fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// Maps the server's response that the object does not exist to `None`.
pub fn if_exists<T>(response: kube::Result<T>, name: &str) -> kube::Result<Option<T>> {
    match response {
        Ok(object) => Ok(Some(object)),
        Err(error) if is_absent(&error, name) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads an object; `None` only if the server reports that it does not exist.
pub async fn get<K: Clone + DeserializeOwned + Debug>(api: &Api<K>, name: &str) -> kube::Result<Option<K>> {
    if_exists(api.get(name).await, name)
}

/// Reads an object with a list request, which needs the same right as a watch on it.
pub async fn get_by_list<K>(api: &Api<K>, name: &str) -> kube::Result<Option<K>>
where
    K: Clone + DeserializeOwned + Debug + ResourceExt,
{
    let found = api.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?;
    Ok(found.items.into_iter().find(|object| object.name_any() == name))
}

/// Watches an object: yields it after each change, and `None` while it does not exist. A failure is logged, and the
/// watch retried; the stream does not end by itself. `description` completes *Watch of the*.
pub fn watch<K>(api: Api<K>, name: &str, description: impl Display + Send + 'static) -> BoxStream<'static, Option<K>>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let logged = move |change: watcher::Result<Option<K>>| {
        let warn = |error: &watcher::Error| {
            log_error!(warn, error, "Watch of the {description} failed");
        };
        future::ready(change.inspect_err(warn).ok())
    };
    watcher::watch_object(api, name).default_backoff().filter_map(logged).boxed()
}
