//! Metrics of the watches of KCP.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_shared::{metric_set, metrics::KindLabel};

metric_set! {
    /// Metrics of the watches, by kind.
    pub struct Metrics {
        /// Objects in the cache, by kind.
        pub(super) objects: Family<KindLabel, Gauge> = "kcp_objects",
        /// Objects that could not be decoded, by kind.
        pub(super) unreadable: Family<KindLabel, Counter> = "kcp_unreadable_objects",
        /// Failures of watches, by kind.
        pub(super) failed: Family<KindLabel, Counter> = "kcp_watch_failures",
    }
}
