//! Metrics of the upgrade of agents.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{UpgradeState, decide::Counts};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AssessmentLabels {
    standing: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

/// Metrics of the upgrade; clones share the values.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    stage: Gauge,
    under_way: Gauge,
    halted: Gauge,
    refused: Gauge,
    runtimes: Family<AssessmentLabels, Gauge>,
    writes: Family<OutcomeLabels, Counter>,
}

impl Metrics {
    /// Registers the metrics.
    pub(in crate::controllers::installer) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "1 while agents are being upgraded to another image, also when halted; 0 otherwise";
        registry.register("agent_upgrade_under_way", help, metrics.under_way.clone());
        let help = "Stage of the agent upgrade, from 1; 0 before the first stage and without an upgrade";
        registry.register("agent_upgrade_stage", help, metrics.stage.clone());
        let help = "1 if the agent upgrade has halted because too many upgraded runtimes are not proven, 0 otherwise";
        registry.register("agent_upgrade_halted", help, metrics.halted.clone());
        let help = "1 if the ConfigMap with the state of the agent upgrade is invalid, so that no agent is upgraded; 0 otherwise";
        registry.register("agent_upgrade_state_refused", help, metrics.refused.clone());
        let help = "Runtimes during an agent upgrade: proven, pending and failing with the new image, waiting and failing-before with another one, \
                    unfit (could not be upgraded, or were unwell before) and uncounted (away, paused, being deleted)";
        registry.register("agent_upgrade_runtimes", help, metrics.runtimes.clone());
        let help = "Writes of the ConfigMap with the state of the agent upgrade, by outcome: written, conflict (changed since it was read) or failed";
        registry.register("agent_upgrade_writes", help, metrics.writes.clone());
        metrics
    }

    pub(super) fn set_state(&self, rollout: &UpgradeState, is_refused: bool) {
        self.stage.set(rollout.stage().into());
        self.under_way.set((!rollout.is_done()).into());
        self.halted.set(rollout.halted().is_some().into());
        self.refused.set(is_refused.into());
    }

    pub(super) fn set_counts(&self, count: &Counts, uncounted: usize) {
        let Counts { proven, pending, failing, unfit, waiting, failing_before, .. } = *count;
        for (standing, number) in [
            ("proven", proven),
            ("pending", pending),
            ("failing", failing),
            ("unfit", unfit),
            ("waiting", waiting),
            ("failing-before", failing_before),
            ("uncounted", uncounted),
        ] {
            self.runtimes.get_or_create(&AssessmentLabels { standing }).set(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }

    pub(super) fn count_write(&self, outcome: &'static str) {
        self.writes.get_or_create(&OutcomeLabels { outcome }).inc();
    }
}
