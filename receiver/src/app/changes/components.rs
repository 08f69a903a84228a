//! Components that react to changes of KCP.

use std::sync::Arc;

use tidewatch_api::plan::PlannedWatch;
use tidewatch_cluster::{kinds::KindCache, leader::FleetRole, runtime_access::RuntimeAccess};
use tidewatch_fleet::{
    manifest_queue::ManifestQueue, pause::Pause, plans::Plans, recorder::EventRecorder, stores::Stores,
    table::RuntimeTable, takeover::Takeover,
};
use tidewatch_gateway::{enrolment::Revocations, ports::v2};
use tidewatch_modules::{catalog::Catalog, mandatory::MandatoryModules, manifest::Memories};

/// Components that react to changes of KCP.
#[derive(Clone)]
pub struct Components {
    /// Caches of KCP.
    pub stores: Stores,
    /// Runtime table and work queue.
    pub fleet: RuntimeTable,
    /// Work queue of the Manifests.
    pub manifest_queue: ManifestQueue,
    /// Clients of the runtimes.
    pub access: RuntimeAccess,
    /// Catalogs per visibility class.
    pub catalog: Catalog,
    /// The plan of all runtimes.
    pub plans: Plans,
    /// Watches that the installation of agents adds to the plan.
    pub installed: Arc<[PlannedWatch]>,
    /// Pause of runtimes.
    pub pause: Pause,
    /// Selection of the Kymas that this receiver manages.
    pub takeover: Takeover,
    /// Runtimes that may use contract v2 although they have used v3.
    pub v2_allowed: v2::V2AllowList,
    /// Revoked certificates.
    pub revocations: Revocations,
    /// Results of earlier reconciles of Manifests.
    pub manifest_memories: Memories,
    /// Kinds that the runtimes serve.
    pub(crate) kinds: KindCache,
    /// Wakes the task of the finalizers of mandatory modules.
    pub mandatory: MandatoryModules,
    /// Recorder of Kubernetes Events about Kymas, Watchers and the catalog.
    pub recorder: EventRecorder,
    /// Permission to write the status of what concerns the whole fleet, and to post Events about it.
    pub role: FleetRole,
}

#[cfg(test)]
mod testing {
    use std::time::Duration;

    use tidewatch_api::plan::Plan;
    use tidewatch_cluster::{WriteBudgets, leader::WriteFence, runtime_access};
    use tidewatch_fleet::recorder;
    use tidewatch_gateway::enrolment;
    use tidewatch_kit::metrics::Registry;
    use tidewatch_modules::catalog;

    use super::*;

    impl Components {
        /// Components of a replica without the fleet role, whose plan has no watches.
        pub(in crate::app::changes) fn around(
            stores: Stores,
            fleet: RuntimeTable,
            manifest_queue: ManifestQueue,
            takeover: Takeover,
        ) -> Self {
            let mut registry = Registry::default();
            let recorder = EventRecorder::new(recorder::Metrics::register(&mut registry));
            Self {
                stores,
                fleet,
                manifest_queue,
                access: RuntimeAccess::new(runtime_access::Settings::default(), runtime_access::Metrics::default()),
                catalog: Catalog::new(
                    catalog::Settings::default(),
                    catalog::Metrics::default(),
                    WriteBudgets::default(),
                    FleetRole::held(WriteFence::default()),
                ),
                plans: Plans::fixed(Plan::new("1".into(), Vec::new()).unwrap()),
                installed: Arc::default(),
                pause: Pause::default(),
                takeover,
                v2_allowed: v2::V2AllowList::default(),
                revocations: Revocations::new(enrolment::Metrics::register(&mut registry), Duration::ZERO),
                manifest_memories: Memories::default(),
                kinds: KindCache::default(),
                mandatory: MandatoryModules::new("kcp-system", recorder.clone()),
                recorder,
                role: FleetRole::released(),
            }
        }
    }
}
