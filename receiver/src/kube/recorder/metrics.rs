//! Metrics of the Kubernetes Events.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Result {
    result: &'static str,
}

/// Counts of Kubernetes Events; clones count together.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    events: Family<Result, Counter>,
    waiting: Gauge,
}

impl Metrics {
    /// Makes and registers the metrics.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "kubernetes_events",
            "Kubernetes Events about Kymas and Watchers: written, failed, or dropped because too many waited",
            metrics.events.clone(),
        );
        registry.register(
            "kubernetes_events_waiting",
            "Kubernetes Events that wait to be written",
            metrics.waiting.clone(),
        );
        metrics
    }

    pub(super) fn dropped(&self, count: usize) {
        if count > 0 {
            self.events.get_or_create(&Result { result: "dropped" }).inc_by(count as u64);
        }
    }

    pub(super) fn ended(&self, well: bool) {
        let result = if well { "written" } else { "failed" };
        self.events.get_or_create(&Result { result }).inc();
    }

    pub(super) fn waiting(&self, count: usize) {
        self.waiting.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
