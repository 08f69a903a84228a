//! Metrics of the Lease.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{metric_set, metrics::OutcomeLabel};

metric_set! {
    /// Metrics of the Lease, and whether this receiver serves; clones share them.
    #[derive(Debug)]
    pub struct Metrics {
        /// 1 if this receiver serves, else 0: it holds the Lease, or it is one of several replicas, and each shard and the
        /// fleet role have had a holder.
        pub(super) active: Gauge = "active",
        /// Writes of the leader election Lease, by outcome: written, conflict (another writer was first), or failed.
        pub(super) writes: Family<OutcomeLabel, Counter> = "lease_writes",
    }
}

impl Metrics {
    /// Records that this replica serves, which shares the runtimes with others and so does not wait for the Lease.
    pub fn serve_as_replica(&self) {
        self.active.set(1);
    }
}
