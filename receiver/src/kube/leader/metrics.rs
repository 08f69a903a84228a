//! Metrics of the Lease.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_shared::{metric_set, metrics::OutcomeLabel};

metric_set! {
    /// Counters of the Lease; clones share them.
    #[derive(Debug)]
    pub struct Metrics {
        /// Leadership of this receiver: 1 if it is the active one, else 0.
        pub(super) active: Gauge = "active",
        /// Writes of the leader election Lease, by outcome: written, conflict (another writer was first), or failed.
        pub(super) writes: Family<OutcomeLabel, Counter> = "lease_writes",
    }
}
