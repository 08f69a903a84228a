//! Every metric of the active receiver, registered in one place, so that what runs and what is described are the same.

use kube::runtime::reflector::Store;
use prometheus_client::metrics::gauge::Gauge;
use tidewatch_shared::{
    api::Kyma,
    metrics::{Described, Registry},
};

use crate::{
    active, catalog,
    gateway::{self, v2},
    hub, kcp, kyma, path, record, runtime_access,
    telemetry::Metrics,
};

/// What each room counts with.
pub(super) struct Counters {
    pub(super) hub: hub::Metrics,
    pub(super) access: runtime_access::Metrics,
    pub(super) catalog: catalog::Metrics,
    pub(super) kcp: kcp::Metrics,
    pub(super) paths: path::Metrics,
    pub(super) kyma: kyma::Metrics,
    pub(super) gateway: gateway::Metrics,
    pub(super) v2: v2::Metrics,
    pub(super) record: record::Metrics,
    /// End of the event port's certificate, in Unix seconds.
    pub(super) certificate_ends: Gauge,
}

impl Counters {
    /// Makes and registers all of it.
    pub(super) fn register(metrics: &mut Metrics, lease: &active::Metrics, kymas: Store<Kyma>) -> Self {
        let incumbent = metrics.incumbent();
        record::register_states(incumbent, kymas);
        let requeues = kyma::Requeues::register(incumbent);
        let v2 = v2::Metrics::register(incumbent);
        fips(incumbent);
        let rooms = metrics.rooms();
        lease.register(rooms);
        let certificate_ends = Gauge::default();
        let help = "When the certificate of the event port ends, Unix time; 0 if it cannot be read";
        rooms.register("gateway_certificate_end_timestamp_seconds", help, certificate_ends.clone());
        Self {
            hub: hub::Metrics::register(rooms),
            access: runtime_access::Metrics::register(rooms),
            catalog: catalog::Metrics::register(rooms),
            kcp: kcp::Metrics::register(rooms),
            paths: path::Metrics::register(rooms),
            kyma: kyma::Metrics::register(rooms, requeues),
            gateway: gateway::Metrics::register(rooms),
            v2,
            record: record::Metrics::register(rooms),
            certificate_ends,
        }
    }
}

/// The incumbent tells by it in which mode its cryptography runs; ours has no such mode.
fn fips(registry: &mut Registry) {
    let help = "Whether cryptography runs in FIPS mode: always 0, which is off";
    registry.register("lifecycle_mgr_fips_mode", help, <Gauge>::default());
}

/// Every metric that an active receiver has.
pub(super) fn described() -> Vec<Described> {
    let (mut metrics, (stores, _)) = (Metrics::new(), kcp::stores());
    Counters::register(&mut metrics, &active::Metrics::default(), stores.kymas);
    metrics.described()
}
