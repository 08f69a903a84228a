//! What catalog sync counts.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
};
use tidewatch_shared::metrics::Registry;

/// Counters of catalog sync; clones count together.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    calls: Family<Labels, Counter>,
    held: Counter,
}

/// A call to a runtime's API server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Operation {
    /// One page of a list.
    #[default]
    List,
    /// One object read.
    Get,
    /// Server-side apply.
    Apply,
    /// PUT.
    Replace,
    /// DELETE.
    Delete,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, EncodeLabelValue)]
enum Ending {
    #[default]
    Ok,
    Failed,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    operation: Operation,
    outcome: Ending,
}

impl Metrics {
    /// Makes the counters and registers them.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("catalog_calls", "Calls of catalog sync to runtimes", metrics.calls.clone());
        registry.register(
            "catalog_held",
            "Release metas held back because a template that they need did not go in",
            metrics.held.clone(),
        );
        metrics
    }

    pub(super) fn called(&self, operation: Operation, ok: bool) {
        let outcome = if ok { Ending::Ok } else { Ending::Failed };
        self.calls.get_or_create(&Labels { operation, outcome }).inc();
    }

    pub(super) fn held(&self, objects: usize) {
        self.held.inc_by(objects as u64);
    }
}
