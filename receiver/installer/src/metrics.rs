//! Metrics of the installation of agents.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{label_sets, metric_set, metrics::KindLabel, variant::VariantName as _};

use super::{Report, upgrade};

label_sets! {
    struct FailureLabels { class, kind }
}

metric_set! {
    /// Metrics of all installations; clones share the counters.
    #[derive(Debug)]
    pub struct Metrics {
        /// Objects of agents' installations that were created or repaired in runtimes, by kind.
        written: Family<KindLabel, Counter> = "installer_writes",
        /// Objects of agents' installations that could not be reconciled, by kind and class of the error.
        failed: Family<FailureLabels, Counter> = "installer_failures",
        /// Validity of the agents' image pull secret: 0 if one is configured that is missing or invalid, 1 otherwise.
        pub pull_secret: Gauge = "installer_pull_secret_good",
        /// Metrics of the upgrade.
        pub upgrade: upgrade::Metrics = ..,
    }
}

impl Metrics {
    pub(super) fn installed(&self, report: &Report) {
        for component in &report.written {
            self.written.get_or_create(&KindLabel { kind: component.kind().kind }).inc();
        }
        for failure in &report.failures {
            let kind = failure.component.kind().kind;
            let class = failure.error.class().as_str();
            self.failed.get_or_create(&FailureLabels { kind, class }).inc();
        }
    }
}
