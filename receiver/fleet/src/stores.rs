//! Caches of the control plane: Kymas and Manifests whole or reduced to facts, the catalog, and Watchers.
//!
//! Parts that no reader needs are dropped before they are stored.

pub mod kymas;
pub mod manifests;
pub mod unread;

use kube::runtime::reflector::Store;
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate, Watcher};

use self::{kymas::CachedKyma, manifests::Manifests};

/// Caches of KCP. They may lag behind the API server: a reconcile reads its Kyma by a quorum read.
#[derive(Clone)]
pub struct Stores {
    /// Kymas that this receiver manages; see [`crate::takeover`]. Those in the shards of other replicas are reduced.
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
