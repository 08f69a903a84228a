//! Counts of what is written to runtimes, and of what they refuse.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{Report, upgrade};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Written {
    kind: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failed {
    kind: &'static str,
    class: &'static str,
}

/// Of all installations; clones count together.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    written: Family<Written, Counter>,
    failed: Family<Failed, Counter>,
    pull_secret: Gauge,
    pub(crate) upgrade: upgrade::Metrics,
}

impl Metrics {
    /// Registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self { upgrade: upgrade::Metrics::register(registry), ..Self::default() };
        let help = "Objects of agents' installations that were made or mended in runtimes, by kind";
        registry.register("installer_writes", help, metrics.written.clone());
        let help = "Objects of agents' installations that could not be brought to what they shall be, by kind and class of the error";
        registry.register("installer_failures", help, metrics.failed.clone());
        let help = "Whether the Secret that agents' images are pulled with is there and holds what is used: 1 or 0; 0 without one";
        registry.register("installer_pull_secret_good", help, metrics.pull_secret.clone());
        metrics
    }

    pub(super) fn pull_secret(&self, is_good: bool) {
        self.pull_secret.set(is_good.into());
    }

    pub(super) fn installed(&self, report: &Report) {
        for part in &report.written {
            self.written.get_or_create(&Written { kind: part.as_str() }).inc();
        }
        for failure in &report.failures {
            let class = failure.error.class().as_str();
            self.failed.get_or_create(&Failed { kind: failure.part.as_str(), class }).inc();
        }
    }
}
