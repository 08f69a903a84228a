//! Metrics of the process, which [`probes`](crate::probes) serve.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tidewatch_kit::metrics::{MetricDescription, Registry};

/// Registry that `/metrics` serves: first that of a candidate, later that of the active receiver.
pub type MetricsPage = Arc<ArcSwap<Metrics>>;

/// Metrics of the process. All are registered at start; afterwards the registry is only read.
#[derive(Debug)]
pub struct Metrics(Registry);

impl Metrics {
    /// Creates a registry with `tidewatch_build_info`.
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::default();
        registry.sub_registry_with_prefix("tidewatch").register_build_info(env!("CARGO_PKG_VERSION"));
        Self(registry)
    }

    /// Registry of Tidewatch's own metrics, with the prefix `tidewatch_`.
    pub fn tidewatch(&mut self) -> &mut Registry {
        self.0.sub_registry_with_prefix("tidewatch")
    }

    /// Registry of the metrics with lifecycle-manager's names, without a prefix.
    pub fn lifecycle_manager(&mut self) -> &mut Registry {
        &mut self.0
    }

    /// Encodes all metrics as OpenMetrics text; `None` if a metric cannot be encoded, which is a defect.
    #[must_use]
    pub fn encode(&self) -> Option<String> {
        self.0.encode()
    }

    /// Descriptions of all registered metrics, also of those without samples.
    #[must_use]
    pub fn described(&self) -> Vec<MetricDescription> {
        self.0.described()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}
