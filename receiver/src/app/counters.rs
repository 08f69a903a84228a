//! Every metric of the active receiver, registered in one place, so that what runs and what is described are the same.

use kube::runtime::reflector::Store;
use prometheus_client::metrics::gauge::Gauge;
use tidewatch_shared::{
    api::Kyma,
    metrics::{MetricDescription, Registry},
};

use crate::{
    app::changes,
    controllers::{catalog, event_path, installer, kyma},
    fleet::hub,
    ingress::{
        enrolment,
        gateway::{self, v2},
    },
    kube::{leader, record, runtime_access},
    pki,
    telemetry::Metrics,
};

/// What each room counts with.
pub(super) struct Counters {
    pub(super) hub: hub::Metrics,
    pub(super) access: runtime_access::Metrics,
    pub(super) catalog: catalog::Metrics,
    pub(super) kcp: crate::kube::Metrics,
    pub(super) paths: event_path::Metrics,
    pub(super) kyma: kyma::Metrics,
    pub(super) installer: installer::Metrics,
    pub(super) gateway: gateway::Metrics,
    pub(super) enrolment: enrolment::Metrics,
    /// Of the enrolment port's connections and requests.
    pub(super) enrolment_port: gateway::Metrics,
    pub(super) v2: v2::Metrics,
    pub(super) record: record::Metrics,
}

impl Counters {
    /// Makes and registers all of it.
    pub(super) fn register(
        metrics: &mut Metrics,
        lease: &leader::Metrics,
        pki: &pki::Metrics,
        kymas: Store<Kyma>,
    ) -> Self {
        let incumbent = metrics.incumbent();
        record::register_states(incumbent, kymas);
        let requeues = kyma::Requeues::register(incumbent);
        let v2 = v2::Metrics::register(incumbent);
        fips(incumbent);
        pki.register_incumbent(incumbent);
        let rooms = metrics.rooms();
        lease.register(rooms);
        pki.register(rooms);
        let counters = Self {
            hub: hub::Metrics::register(rooms),
            access: runtime_access::Metrics::register(rooms),
            catalog: catalog::Metrics::register(rooms),
            kcp: crate::kube::Metrics::register(rooms),
            paths: event_path::Metrics::register(rooms),
            kyma: kyma::Metrics::register(rooms, requeues),
            installer: installer::Metrics::register(rooms),
            gateway: gateway::Metrics::register(rooms),
            enrolment: enrolment::Metrics::register(rooms),
            enrolment_port: gateway::Metrics::register_port(rooms.sub_registry_with_prefix("enrolment")),
            v2,
            record: record::Metrics::register(rooms),
        };
        counters.hub.register_incumbent(metrics.incumbent());
        counters
    }
}

/// The incumbent tells by it in which mode its cryptography runs; ours has no such mode.
fn fips(registry: &mut Registry) {
    let help = "Whether cryptography runs in FIPS mode: always 0, which is off";
    registry.register("lifecycle_mgr_fips_mode", help, <Gauge>::default());
}

/// Every metric that an active receiver has.
pub(super) fn described() -> Vec<MetricDescription> {
    let (mut metrics, (stores, _)) = (Metrics::new(), changes::stores());
    Counters::register(&mut metrics, &leader::Metrics::default(), &pki::Metrics::default(), stores.kymas);
    metrics.described()
}
