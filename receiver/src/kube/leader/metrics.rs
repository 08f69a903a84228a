//! Metrics of the Lease.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

/// What happens to the Lease. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pub(super) active: Gauge,
    writes: Family<Outcome, Counter>,
}

impl Metrics {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("active", "Whether this receiver is the active one: 1 or 0", self.active.clone());
        registry.register(
            "lease_writes",
            "Writes of the Lease by which one receiver is active: written, conflict (somebody else wrote), or failed",
            self.writes.clone(),
        );
    }

    pub(super) fn wrote(&self, outcome: &'static str) {
        self.writes.get_or_create(&Outcome { outcome }).inc();
    }
}
