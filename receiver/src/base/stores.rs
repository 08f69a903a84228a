//! Caches of the control plane, shared by all layers.

use kube::runtime::reflector::Store;
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate, Watcher};

use super::{kymas::CachedKyma, manifests::Manifests};

/// Caches of KCP. They may lag behind the API server: a reconcile reads its Kyma by a quorum read.
#[derive(Clone)]
pub struct Stores {
    /// Kymas that this receiver manages; see [`crate::base::takeover`]. Those in the shards of other replicas are reduced.
    pub kymas: Store<CachedKyma>,
    /// ModuleTemplates.
    pub templates: Store<ModuleTemplate>,
    /// ModuleReleaseMetas.
    pub release_metas: Store<ModuleReleaseMeta>,
    /// Manifests, with an index by Kyma.
    pub manifests: Manifests,
    /// Watchers.
    pub watchers: Store<Watcher>,
}
