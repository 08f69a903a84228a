//! How far an upgrade is, in figures.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{Rollout, decide::Count};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Standing {
    standing: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

/// Of the upgrade of agents; clones count together.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    stage: Gauge,
    under_way: Gauge,
    halted: Gauge,
    refused: Gauge,
    runtimes: Family<Standing, Gauge>,
    writes: Family<Outcome, Counter>,
}

impl Metrics {
    /// Registers them.
    pub(in crate::controllers::installer) fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Whether agents are being upgraded to another image, halted or not: 1 or 0";
        registry.register("agent_upgrade_under_way", help, metrics.under_way.clone());
        let help = "The stage of the upgrade of agents, from 1; 0 before the first and when there is none";
        registry.register("agent_upgrade_stage", help, metrics.stage.clone());
        let help =
            "Whether the upgrade of agents has halted because too many of the upgraded ones are not proven: 1 or 0";
        registry.register("agent_upgrade_halted", help, metrics.halted.clone());
        let help = "Whether the ConfigMap in which the upgrade of agents stands cannot be read, so that nobody is upgraded: 1 or 0";
        registry.register("agent_upgrade_state_refused", help, metrics.refused.clone());
        let help = "Runtimes during an upgrade of agents: proven, pending (awaited) and failing with the new image, waiting and failing-before with \
                    another one, unfit (they could not be upgraded, or were not well before) and uncounted (away, paused, being deleted)";
        registry.register("agent_upgrade_runtimes", help, metrics.runtimes.clone());
        let help = "Writes of the ConfigMap in which the upgrade of agents stands: written, conflict (it was changed meanwhile), or failed";
        registry.register("agent_upgrade_writes", help, metrics.writes.clone());
        metrics
    }

    pub(super) fn shows(&self, rollout: &Rollout, is_refused: bool) {
        self.stage.set(rollout.stage().into());
        self.under_way.set((!rollout.is_done()).into());
        self.halted.set(rollout.halted().is_some().into());
        self.refused.set(is_refused.into());
    }

    pub(super) fn counted(&self, count: &Count, uncounted: usize) {
        let Count { proven, pending, failing, unfit, waiting, failing_before, .. } = *count;
        for (standing, number) in [
            ("proven", proven),
            ("pending", pending),
            ("failing", failing),
            ("unfit", unfit),
            ("waiting", waiting),
            ("failing-before", failing_before),
            ("uncounted", uncounted),
        ] {
            self.runtimes.get_or_create(&Standing { standing }).set(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }

    pub(super) fn wrote(&self, outcome: &'static str) {
        self.writes.get_or_create(&Outcome { outcome }).inc();
    }
}
