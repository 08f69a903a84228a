//! Metrics of the Lease.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{metric_set, metrics::OutcomeLabel};

metric_set! {
    /// Metrics of the Lease of an elector; clones share them.
    #[derive(Debug)]
    pub struct Metrics {
        /// 1 while this process holds the Lease.
        pub(super) active: Gauge = "active",
        /// Writes of the leader election Lease, by outcome: written, conflict (another writer was first), or failed.
        pub(super) writes: Family<OutcomeLabel, Counter> = "lease_writes",
    }
}
