//! Migration of the stored objects of a CRD that loses versions.
//!
//! An API server rejects a CRD without a version of `status.storedVersions`, since it could not read an object that is stored
//! in that version. So one that stays becomes the storage version, every object is written again without a change, and the
//! others are dropped from the status. Each step can be repeated: a migration may end at any point, and begin anew.

use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DynamicObject, ListParams, PartialObjectMeta, Patch, PatchParams},
};
use serde_json::{Value, json};
use thiserror::Error;
use tokio::time::{Instant, sleep_until};

use super::{
    kinds::{Definition, Kind},
    object,
    runtime_access::list_page,
};

/// Objects per request for a list. A migration goes on after the last page that was rewritten completely.
const PAGE: u32 = 50;
/// Places in a list that may be too old, in one turn.
const MAX_EXPIRED: usize = 3;
/// Time from a change of the storage version until objects are written. Each API server notices the change through a watch,
/// and stores objects in the former version until then.
const STORAGE_SETTLES: Duration = Duration::from_secs(5);
/// Objects that are written at the same time: half of what a runtime's module gets for itself.
const CONCURRENT_WRITES: usize = 2;

/// What one turn of a migration may do.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Objects to write, rounded up to whole pages.
    pub objects: usize,
    /// Time after which no further page begins.
    pub time: Duration,
    /// The turn waits until API servers have noticed the storage version. Without it, the turn ends instead.
    pub waits_for_storage: bool,
}

/// Progress of a migration over several turns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Place in the list of objects from which it goes on.
    next: Option<String>,
    /// Time since which the storage version is known to be right.
    storage_since: Option<Instant>,
}

/// A migration that a CRD needs before it loses versions.
#[derive(Debug)]
pub struct Migration {
    definition: Definition,
    name: String,
    /// The only stored version afterwards.
    storage: String,
    /// A served version, in which the objects are listed and written.
    served: String,
    /// Versions of the CRD that stay, as `apiVersion` of the objects.
    kept: Vec<String>,
    /// Versions of the live CRD in which `storage` is the storage version; `None` if it is already.
    versions: Option<Vec<Value>>,
    resource_version: Option<String>,
}

/// A request of a migration failed.
#[derive(Debug, Error)]
#[error("{operation}")]
pub struct MigrationError {
    /// What the request was to do, with its object.
    operation: String,
    /// The failed request.
    pub source: kube::Error,
}

impl MigrationError {
    /// Conversion of a failed request.
    fn of(operation: String) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self { operation, source }
    }
}

impl Migration {
    /// The migration that a live CRD needs before the desired one is applied; `None` if it needs none, or if the API server
    /// would refuse the desired one all the same.
    pub fn of(live: &DynamicObject, desired: &Value) -> Option<Self> {
        let definition = Definition::of(desired)?;
        let stored = live.data["status"]["storedVersions"].as_array()?;
        let stays = |version: &Value| list(&desired["spec"]["versions"]).any(|desired| desired["name"] == *version);
        if stored.iter().all(stays) || live.data["spec"]["scope"] != desired["spec"]["scope"] {
            return None;
        }
        let wanted = list(&desired["spec"]["versions"]).find(|version| version["storage"] == true)?;
        let storage = wanted["name"].as_str()?;
        let is_wanted = |version: &Value| version["name"] == storage;
        let mut versions: Vec<_> = list(&live.data["spec"]["versions"]).cloned().collect();
        let is_stored = versions.iter().any(|version| is_wanted(version) && version["storage"] == true);
        if !versions.iter().any(is_wanted) {
            versions.push(wanted.clone());
        }
        versions.iter_mut().for_each(|version| version["storage"] = is_wanted(version).into());
        let group = desired["spec"]["group"].as_str()?;
        let names = list(&desired["spec"]["versions"]).filter_map(|version| version["name"].as_str());
        let kept = names.map(|name| format!("{group}/{name}")).collect();
        let is_served = |version: &&Value| version["served"] == true;
        let of_storage = versions.iter().filter(is_served).find(|version| is_wanted(version));
        let served = of_storage.or_else(|| versions.iter().find(is_served))?["name"].as_str()?;
        Some(Self {
            definition,
            name: live.name_any(),
            storage: storage.to_owned(),
            served: served.to_owned(),
            kept,
            versions: (!is_stored).then_some(versions.clone()),
            resource_version: live.resource_version(),
        })
    }

    /// The version that stays.
    pub fn storage(&self) -> &str {
        &self.storage
    }

    /// Goes on with the migration. Returns true once nothing is stored in another version, and the desired CRD can be applied.
    ///
    /// # Errors
    /// [`MigrationError`]; `progress` is kept.
    pub async fn advance(
        &self,
        client: &Client,
        definitions: &Api<DynamicObject>,
        manager: &str,
        progress: &mut Progress,
        turn: Turn,
    ) -> Result<bool, MigrationError> {
        let params = PatchParams { field_manager: Some(manager.to_owned()), ..PatchParams::default() };
        let mut resource_version = self.resource_version.clone();
        if let Some(versions) = &self.versions {
            // Objects that were written before may have been written in the former version since.
            *progress = Progress::default();
            let patch = json!({"metadata": {"resourceVersion": resource_version}, "spec": {"versions": versions}});
            let patched = definitions.patch(&self.name, &params, &Patch::Merge(patch)).await;
            let operation = format!("make {} the storage version of the CRD {}", self.storage, self.name);
            resource_version = patched.map_err(MigrationError::of(operation))?.resource_version();
        }
        // A restarted process does not know since when the storage version is right.
        let settled = *progress.storage_since.get_or_insert_with(Instant::now) + STORAGE_SETTLES;
        if !turn.waits_for_storage && Instant::now() < settled {
            return Ok(false);
        }
        sleep_until(settled).await;
        if !self.rewrite(client, &params, progress, turn).await? {
            return Ok(false);
        }
        let status = json!({"storedVersions": [self.storage]});
        let patch = json!({"metadata": {"resourceVersion": resource_version}, "status": status});
        let patched = definitions.patch_status(&self.name, &params, &Patch::Merge(patch)).await;
        let operation = format!("drop the former stored versions of the CRD {}", self.name);
        patched.map(|_| true).map_err(MigrationError::of(operation))
    }

    /// Writes objects without a change of their content: the API server stores them in the storage version, unless they are
    /// already. Returns true after the last one.
    async fn rewrite(
        &self,
        client: &Client,
        params: &PatchParams,
        progress: &mut Progress,
        turn: Turn,
    ) -> Result<bool, MigrationError> {
        let kind = self.definition.in_version(&self.served);
        let all: Api<PartialObjectMeta> = kind.api(client, "");
        let begun = Instant::now();
        let mut written = 0;
        let mut expired = 0;
        loop {
            let list = ListParams { continue_token: progress.next.clone(), ..ListParams::default().limit(PAGE) };
            let (page, next) = match list_page(&all, &list).await {
                Ok(page) => page,
                // The place in the list is too old. The API server may name a new one after the same object.
                Err(kube::Error::Api(status))
                    if status.code == 410 && progress.next.is_some() && expired < MAX_EXPIRED =>
                {
                    expired += 1;
                    progress.next = status.metadata.as_ref().and_then(|metadata| metadata.continue_.clone());
                    continue;
                }
                Err(source) => {
                    let name = &self.name;
                    let operation =
                        format!("list the resources of the CRD {name}, which are stored in another version");
                    return Err(MigrationError { operation, source });
                }
            };
            written += page.len();
            let writes: Vec<_> = page.into_iter().map(|object| self.write(client, &kind, params, object)).collect();
            stream::iter(writes).buffer_unordered(CONCURRENT_WRITES).try_collect::<()>().await?;
            progress.next = next;
            if progress.next.is_none() {
                return Ok(true);
            }
            if written >= turn.objects || begun.elapsed() >= turn.time {
                return Ok(false);
            }
        }
    }

    async fn write(
        &self,
        client: &Client,
        kind: &Kind,
        params: &PatchParams,
        object: PartialObjectMeta,
    ) -> Result<(), MigrationError> {
        let namespace = object.namespace().unwrap_or_default();
        let name = object.name_any();
        let api: Api<DynamicObject> = kind.api(client, &namespace);
        let patch = self.patch_of(&object.metadata);
        let written = api.patch_metadata(&name, params, &patch).await;
        // Only a JSON patch has a test that may fail.
        let written = if matches!(patch, Patch::Json(_)) { written.map_err(object::as_conflict) } else { written };
        let slash = if namespace.is_empty() { "" } else { "/" };
        let operation = format!("store {} {namespace}{slash}{name} in the version {}", kind.kind, self.storage);
        object::if_exists(written, &name).map(drop).map_err(MigrationError::of(operation))
    }
}

impl Migration {
    /// The patch of an object that changes no content. Entries of `managedFields` in a version that goes move to the one
    /// that stays: the API server could convert them no more, and would refuse each server-side apply.
    fn patch_of(&self, head: &ObjectMeta) -> Patch<Value> {
        let is_kept = |version: &String| self.kept.contains(version);
        let goes = |entry: &ManagedFieldsEntry| !entry.api_version.as_ref().is_some_and(is_kept);
        let storage = self.kept.iter().find(|kept| kept.ends_with(&format!("/{}", self.storage)));
        let patch = storage
            .filter(|_| self.storage == self.served && head.managed_fields.iter().flatten().any(goes))
            .and_then(|storage| object::version_patch(storage, head));
        patch.map_or_else(|| Patch::Merge(json!({})), Patch::Json)
    }
}

fn list(versions: &Value) -> impl Iterator<Item = &Value> {
    versions.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests;
