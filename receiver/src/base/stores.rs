//! Caches of the control plane and the current plan, shared by all layers.

use std::sync::Arc;

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::Secret;
use kube::runtime::reflector::Store;
use tidewatch_shared::{
    api::{Kyma, Manifest, ModuleReleaseMeta, ModuleTemplate, Watcher},
    plan::Plan,
};

/// The caches of KCP. Readers get what the watch has seen; whoever decides on a Kyma reads that Kyma itself by a quorum read.
#[derive(Clone)]
pub struct Stores {
    /// Kymas that are this receiver's; see [`crate::base::takeover`].
    pub kymas: Store<Kyma>,
    /// ModuleTemplates.
    pub templates: Store<ModuleTemplate>,
    /// ModuleReleaseMetas.
    pub release_metas: Store<ModuleReleaseMeta>,
    /// Manifests.
    pub manifests: Store<Manifest>,
    /// Watchers.
    pub watchers: Store<Watcher>,
    /// Access Secrets: those with the label `operator.kyma-project.io/kyma-name`.
    pub secrets: Store<Secret>,
}

/// The plan that all runtimes get, replaced as a whole when a Watcher changes.
pub type CurrentPlan = Arc<ArcSwap<Plan>>;
