//! Metrics of the Lease.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// Counters of the Lease. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pub(super) active: Gauge,
    writes: Family<OutcomeLabel, Counter>,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("active", "1 if this receiver is the active one, else 0", self.active.clone());
        registry.register(
            "lease_writes",
            "Writes of the leader election Lease: written, conflict (another writer was first), or failed",
            self.writes.clone(),
        );
    }

    pub(super) fn wrote(&self, outcome: &'static str) {
        self.writes.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}
