//! Metrics of the watches of KCP.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_shared::{metric_set, metrics::KindLabel};

metric_set! {
    /// Metrics of the watches, by kind.
    pub struct Metrics {
        /// Objects in the cache, by kind.
        objects: Family<KindLabel, Gauge> = "kcp_objects",
        /// Objects that could not be decoded, by kind.
        unreadable: Family<KindLabel, Counter> = "kcp_unreadable_objects",
        /// Failures of watches, by kind.
        failed: Family<KindLabel, Counter> = "kcp_watch_failures",
    }
}

impl Metrics {
    pub(super) fn objects(&self, kind: &'static str, count: usize) {
        self.objects.get_or_create(&KindLabel { kind }).set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn invalid(&self, kind: &'static str) {
        self.unreadable.get_or_create(&KindLabel { kind }).inc();
    }

    pub(super) fn failed(&self, kind: &'static str) {
        self.failed.get_or_create(&KindLabel { kind }).inc();
    }
}
