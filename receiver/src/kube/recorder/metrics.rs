//! Metrics of the Kubernetes Events.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_shared::{metric_set, metrics::ResultLabel};

metric_set! {
    /// Counts of Kubernetes Events; clones share them.
    #[derive(Debug)]
    pub struct Metrics {
        /// Kubernetes Events about Kymas and Watchers, by result: written, failed, or dropped because the queue was
        /// full.
        events: Family<ResultLabel, Counter> = "kubernetes_events",
        /// Kubernetes Events pending in the queue.
        waiting: Gauge = "kubernetes_events_waiting",
    }
}

impl Metrics {
    pub(super) fn dropped(&self, count: usize) {
        if count > 0 {
            self.events.get_or_create(&ResultLabel { result: "dropped" }).inc_by(count as u64);
        }
    }

    pub(super) fn ended(&self, well: bool) {
        let result = if well { "written" } else { "failed" };
        self.events.get_or_create(&ResultLabel { result }).inc();
    }

    pub(super) fn waiting(&self, count: usize) {
        self.waiting.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
