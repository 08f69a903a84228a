//! Metrics of the watches of KCP.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

/// Metrics of the watches, by kind.
#[derive(Clone)]
pub struct Metrics {
    objects: Family<Kind, Gauge>,
    unreadable: Family<Kind, Counter>,
    failed: Family<Kind, Counter>,
}

impl Metrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let (objects, unreadable, failed) = (Family::default(), Family::default(), Family::default());
        registry.register("kcp_objects", "Objects in the cache of a kind", objects.clone());
        registry.register("kcp_unreadable_objects", "Objects of a kind that could not be read", unreadable.clone());
        registry.register("kcp_watch_failures", "Failures of the watch of a kind", failed.clone());
        Self { objects, unreadable, failed }
    }

    pub(super) fn objects(&self, kind: &'static str, count: usize) {
        self.objects.get_or_create(&Kind { kind }).set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn invalid(&self, kind: &'static str) {
        self.unreadable.get_or_create(&Kind { kind }).inc();
    }

    pub(super) fn failed(&self, kind: &'static str) {
        self.failed.get_or_create(&Kind { kind }).inc();
    }
}
