//! What the receiver sees of KCP: caches of the custom resources and access Secrets, and who wakes when one changes.

use k8s_openapi::api::core::v1::Secret;
use kube::runtime::reflector::Store;
use tidewatch_shared::api::{Kyma, Manifest, ModuleReleaseMeta, ModuleTemplate, Watcher};

/// The caches of KCP. Readers get what the watch has seen; whoever decides on a Kyma reads that Kyma itself by a quorum read.
#[derive(Clone)]
pub struct Stores {
    /// Kymas that `--kyma-selector` selects.
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
