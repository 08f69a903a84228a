//! Metrics of the Kubernetes Events.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{metric_set, metrics::ResultLabel};

use super::event_queue::DropReason;

metric_set! {
    /// Counts of Kubernetes Events; clones share them.
    #[derive(Debug)]
    pub struct Metrics {
        /// Kubernetes Events about Kymas and Watchers, by result: written, failed, dropped because the queue was full, or
        /// limited because there were too many about the same object.
        events: Family<ResultLabel, Counter> = "kubernetes_events",
        /// Kubernetes Events pending in the queue.
        waiting: Gauge = "kubernetes_events_waiting",
    }
}

impl Metrics {
    pub(super) fn dropped(&self, reason: DropReason) {
        let result = match reason {
            DropReason::Full => "dropped",
            DropReason::Share => "limited",
        };
        self.events.get_or_create(&ResultLabel { result }).inc();
    }

    pub(super) fn ended(&self, well: bool) {
        let result = if well { "written" } else { "failed" };
        self.events.get_or_create(&ResultLabel { result }).inc();
    }

    pub(super) fn waiting(&self, count: usize) {
        self.waiting.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
