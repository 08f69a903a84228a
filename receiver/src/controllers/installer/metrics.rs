//! Metrics of the installation of agents.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{Report, upgrade};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    kind: &'static str,
    class: &'static str,
}

/// Metrics of all installations; clones share the counters.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    written: Family<WriteLabels, Counter>,
    failed: Family<FailureLabels, Counter>,
    pull_secret: Gauge,
    pub(crate) upgrade: upgrade::Metrics,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self { upgrade: upgrade::Metrics::register(registry), ..Self::default() };
        let help = "Objects of agents' installations that were created or repaired in runtimes, by kind";
        registry.register("installer_writes", help, metrics.written.clone());
        let help = "Objects of agents' installations that could not be reconciled, by kind and class of the error";
        registry.register("installer_failures", help, metrics.failed.clone());
        let help = "1 if the image pull secret exists and is valid, 0 otherwise and without one";
        registry.register("installer_pull_secret_good", help, metrics.pull_secret.clone());
        metrics
    }

    pub(super) fn pull_secret(&self, is_good: bool) {
        self.pull_secret.set(is_good.into());
    }

    pub(super) fn installed(&self, report: &Report) {
        for component in &report.written {
            self.written.get_or_create(&WriteLabels { kind: component.as_str() }).inc();
        }
        for failure in &report.failures {
            let class = failure.error.class().as_str();
            self.failed.get_or_create(&FailureLabels { kind: failure.component.as_str(), class }).inc();
        }
    }
}
