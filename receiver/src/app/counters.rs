//! Registration of all metrics of the active receiver, in one place, so that the reference in the docs describes those
//! that run.

use prometheus_client::metrics::gauge::Gauge;
use tidewatch_cluster::runtime_access;
use tidewatch_fleet::{manifest_queue, recorder, shards, stores::Stores, table};
use tidewatch_gateway::{
    enrolment,
    ports::{self, v2},
    probes, relay,
};
use tidewatch_kit::{
    metric_set,
    metrics::{MetricDescription, Registry},
};
use tidewatch_modules::{catalog, event_path, kyma, manifest, module_rollout, windows};

use crate::app::{changes, open_files};

metric_set! {
    /// Metrics of each component.
    pub(super) struct Counters {
        /// 1 if this receiver serves, else 0: without a relay it holds the shard, and with one each shard and the fleet role
        /// have had a holder.
        pub(super) active: Gauge = "active",
        pub(super) fleet: table::Metrics = ..,
        pub(super) manifests: manifest_queue::Metrics = ..,
        pub(super) shares: tidewatch_fleet::ShareMetrics = ..,
        pub(super) access: runtime_access::Metrics = ..,
        pub(super) catalog: catalog::Metrics = ..,
        pub(super) kcp: tidewatch_cluster::Metrics = ..,
        pub(super) writes: tidewatch_cluster::WriteMetrics = ..,
        pub(super) event_path: event_path::Metrics = ..,
        pub(super) kyma: kyma::Metrics = ..,
        pub(super) manifest: manifest::Metrics = ..,
        pub(super) windows: windows::Metrics = ..,
        pub(super) module_rollout: module_rollout::Metrics = ..,
        pub(super) oci: tidewatch_oci::metrics::Metrics = ..,
        pub(super) open_files: open_files::Metrics = ..,
        pub(super) installer: tidewatch_installer::Metrics = ..,
        pub(super) enrolment: enrolment::Metrics = ..,
        pub(super) recorder: recorder::Metrics = ..,
        pub(super) shards: shards::Metrics = ..,
        pub(super) relay: relay::Metrics = ..,
        pub(super) replica: tidewatch_trust::ReplicaMetrics = ..,
        /// Connections and requests of the relay port.
        pub(super) relay_port: ports::PortMetrics = _,
        pub(super) gateway: ports::Metrics = _,
        /// Connections and requests of the enrolment port.
        pub(super) enrolment_port: ports::PortMetrics = _,
        pub(super) v2: v2::Metrics = _,
        lifecycle_manager: LifecycleManager = _,
    }
}

metric_set! {
    /// Metrics with lifecycle-manager's names that never change.
    struct LifecycleManager {
        /// FIPS mode of the cryptography: always 0, off.
        fips_mode: Gauge = "lifecycle_mgr_fips_mode",
    }
}

impl Counters {
    /// Creates all metrics and registers them, each under its prefix.
    pub(super) fn register_all(
        metrics: &mut Registry,
        pki: &tidewatch_trust::Metrics,
        stores: Stores,
        served: recorder::ServedKymas,
    ) -> Self {
        let registry = metrics.sub_registry_with_prefix("tidewatch");
        pki.register_in(registry);
        let mut counters = Self::register(registry);
        counters.manifest.requeues = counters.kyma.requeues.clone();
        for pull_secret in [&counters.installer.pull_secret, &counters.kyma.pull_secret] {
            pull_secret.set(1);
        }
        counters.gateway.register_in(registry.sub_registry_with_prefix("gateway"));
        counters.enrolment_port.register_in(registry.sub_registry_with_prefix("enrolment"));
        counters.relay_port.register_in(registry.sub_registry_with_prefix("relay_port"));
        // Without a prefix.
        let lifecycle_manager = metrics;
        recorder::register_states(lifecycle_manager, stores, served);
        pki.lifecycle_manager.register_in(lifecycle_manager);
        counters.lifecycle_manager.register_in(lifecycle_manager);
        counters.kyma.requeues.register_in(lifecycle_manager);
        counters.windows.lifecycle_manager.register_in(lifecycle_manager);
        counters.fleet.lifecycle_manager.register_in(lifecycle_manager);
        counters.v2.register_in(lifecycle_manager.sub_registry_with_prefix("watcher_listener"));
        counters
    }
}

/// Descriptions of all metrics of an active receiver.
pub fn described() -> Vec<MetricDescription> {
    let (mut metrics, (stores, _)) = (probes::registry(), changes::stores());
    Counters::register_all(
        &mut metrics,
        &tidewatch_trust::Metrics::default(),
        stores,
        recorder::ServedKymas::default(),
    );
    metrics.described()
}
