//! The state of one reconcile of a Manifest, and its requests to the runtime cluster by kind.

use std::{collections::BTreeSet, sync::Arc};

use kube::{Api, api::DynamicObject};
use serde_json::Value;
use tidewatch_api::{Manifest, key::ManifestKey};
use tidewatch_cluster::{
    kinds::{Kinds, is_unserved},
    runtime_access::{CONCURRENT_CALLERS, CONCURRENT_REQUESTS},
};

use super::{
    Engine, Request,
    created_jobs::CreatedJobs,
    inventory::{ObjectKey, split_api_version},
    look::Look,
    memory::Memory,
    pods::PodSelection,
    ready::Manager,
    record::Record,
    remote::Remote,
    report::Results,
    sharing::Sharing,
    step::Facts,
    turns::Turn,
};

/// Requests to one runtime cluster for one Manifest at a time. A request that waits for those of another Manifest could
/// exceed its own deadline.
pub(super) const CONCURRENCY: usize = CONCURRENT_REQUESTS / CONCURRENT_CALLERS;
/// Lists of all objects of a kind among them. Their pages are large, and share the memory of one runtime cluster.
pub(super) const CONCURRENT_LISTS: usize = CONCURRENCY / 2;

/// One reconcile of one Manifest.
pub(super) struct Execution<'a> {
    pub(super) engine: &'a Engine,
    pub(super) key: &'a ManifestKey,
    pub(super) request: &'a Request<'a>,
    pub(super) record: Record<'a>,
    pub(super) kinds: Kinds,
    pub(super) facts: Facts<'a>,
    /// Objects in the runtime cluster are compared even if they were applied before.
    pub(super) memory: Memory,
    pub(super) results: Results,
    /// Other Manifests with objects of this one.
    pub(super) sharing: Sharing,
    /// Manifests of the same module that stay while this one is removed.
    pub(super) heirs: Vec<Arc<Manifest>>,
    /// The turn to let shared objects leave, until the inventory is written.
    pub(super) turn: Option<Turn>,
    /// CRDs of which a response of this reconcile shows that they are established.
    pub(super) established: BTreeSet<ObjectKey>,
    /// The Manifest has no finalizer of ours left.
    pub(super) has_left: bool,
    /// The module that was installed by hand is being adopted.
    pub(super) adopts: bool,
    /// The manager, if it was read before the objects were rendered.
    pub(super) look: Option<Look>,
    /// Object whose readiness is that of the module.
    pub(super) manager: Option<Manager>,
    /// The manager as in the last response, if this reconcile compared it.
    pub(super) live_manager: Option<DynamicObject>,
    /// Pods of the manager while it is not ready.
    pub(super) pods: Option<PodSelection>,
    /// Jobs that were created.
    pub(super) jobs: CreatedJobs,
}

impl Execution<'_> {
    /// Key, version and body of the default module CR.
    pub(super) fn default_object(&self) -> Option<(ObjectKey, String, Value)> {
        let body = self.record.manifest.spec.resource()?.clone();
        let key = ObjectKey::of(&body);
        let version = split_api_version(body["apiVersion"].as_str()?).1.to_owned();
        Some((key, version, body))
    }

    /// Sends a request on an object of a kind in this version; `None` if the kind is not served. The kind is discovered anew
    /// if the API server does not serve it as known.
    pub(super) async fn request<T, F>(
        &mut self,
        key: &ObjectKey,
        version: &str,
        mut send: impl FnMut(Api<DynamicObject>) -> F + Send,
    ) -> kube::Result<Option<T>>
    where
        F: Future<Output = kube::Result<T>> + Send,
    {
        let Some(api) = self.api_of(key, version).await? else { return Ok(None) };
        match send(api).await {
            Err(error) if is_unserved(&error) => {}
            sent => return sent.map(Some),
        }
        self.kinds.invalidate(&key.group);
        let Some(api) = self.api_of(key, version).await? else { return Ok(None) };
        send(api).await.map(Some)
    }

    fn api(&self, key: &ObjectKey, version: &str) -> Option<Api<DynamicObject>> {
        self.kinds.api(&self.request.cluster.client, &key.group, version, &key.kind, &key.namespace)
    }

    /// An object of a kind in this version; `None` if the kind is not served.
    pub(super) fn remote<'k>(&self, key: &'k ObjectKey, version: &str) -> Option<Remote<'k>> {
        Some(Remote { key, version: version.to_owned(), api: self.api(key, version)? })
    }

    /// As [`Self::api`], after discovery of the kind if it is unknown.
    async fn api_of(&mut self, key: &ObjectKey, version: &str) -> kube::Result<Option<Api<DynamicObject>>> {
        self.kinds.discover(&self.request.cluster.client, [(key.group.as_str(), version, key.kind.as_str())]).await?;
        Ok(self.api(key, version))
    }
}
