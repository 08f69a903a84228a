//! Registration of all metrics of the active receiver, in one place, so that the reference in the docs describes those
//! that run.

use kube::runtime::reflector::Store;
use prometheus_client::metrics::gauge::Gauge;
use tidewatch_shared::{
    api::Kyma,
    metrics::{MetricDescription, Registry},
};

use crate::{
    app::changes,
    controllers::{catalog, event_path, installer, kyma},
    fleet::table,
    ingress::{
        enrolment,
        gateway::{self, v2},
    },
    kube::{leader, recorder, runtime_access},
    pki,
    telemetry::Metrics,
};

/// Metrics of each component.
pub(super) struct Counters {
    pub(super) fleet: table::Metrics,
    pub(super) access: runtime_access::Metrics,
    pub(super) catalog: catalog::Metrics,
    pub(super) kcp: crate::kube::Metrics,
    pub(super) event_path: event_path::Metrics,
    pub(super) kyma: kyma::Metrics,
    pub(super) installer: installer::Metrics,
    pub(super) gateway: gateway::Metrics,
    pub(super) enrolment: enrolment::Metrics,
    /// Connections and requests of the enrolment port.
    pub(super) enrolment_port: gateway::PortMetrics,
    pub(super) v2: v2::Metrics,
    pub(super) recorder: recorder::Metrics,
}

impl Counters {
    /// Makes and registers all metrics.
    pub(super) fn register(
        metrics: &mut Metrics,
        lease: &leader::Metrics,
        pki: &pki::Metrics,
        kymas: Store<Kyma>,
    ) -> Self {
        let incumbent = metrics.incumbent();
        recorder::register_states(incumbent, kymas);
        let requeues = kyma::Requeues::register(incumbent);
        let v2 = v2::Metrics::register(incumbent.sub_registry_with_prefix("watcher_listener"));
        fips(incumbent);
        pki.register_incumbent(incumbent);
        let registry = metrics.tidewatch();
        lease.register(registry);
        pki.register(registry);
        let counters = Self {
            fleet: table::Metrics::register(registry),
            access: runtime_access::Metrics::register(registry),
            catalog: catalog::Metrics::register(registry),
            kcp: crate::kube::Metrics::register(registry),
            event_path: event_path::Metrics::register(registry),
            kyma: kyma::Metrics::register(registry, requeues),
            installer: installer::Metrics::register(registry),
            gateway: gateway::Metrics::register(registry.sub_registry_with_prefix("gateway")),
            enrolment: enrolment::Metrics::register(registry),
            enrolment_port: gateway::PortMetrics::register(registry.sub_registry_with_prefix("enrolment")),
            v2,
            recorder: recorder::Metrics::register(registry),
        };
        counters.fleet.register_incumbent(metrics.incumbent());
        counters
    }
}

/// Registers the incumbent's gauge of its cryptography's FIPS mode; the receiver has no such mode.
fn fips(registry: &mut Registry) {
    let help = "Whether cryptography runs in FIPS mode: always 0, which is off";
    registry.register("lifecycle_mgr_fips_mode", help, <Gauge>::default());
}

/// Descriptions of all metrics of an active receiver.
pub(super) fn described() -> Vec<MetricDescription> {
    let (mut metrics, (stores, _)) = (Metrics::new(), changes::stores());
    Counters::register(&mut metrics, &leader::Metrics::default(), &pki::Metrics::default(), stores.kymas);
    metrics.described()
}
