//! Metrics of the upgrade of agents.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{label_sets, metric_set, metrics::OutcomeLabel};

use super::{UpgradeState, summary::Counts};

label_sets! {
    struct StandingLabels { standing }
}

metric_set! {
    /// Metrics of the upgrade; clones share the values.
    #[derive(Debug)]
    pub struct Metrics {
        /// Agent upgrade in progress: 1 while agents are being upgraded to another image, also when halted; 0 otherwise.
        under_way: Gauge = "agent_upgrade_under_way",
        /// Stage of the agent upgrade, from 1; 0 before the first stage and without an upgrade.
        stage: Gauge = "agent_upgrade_stage",
        /// Halt of the agent upgrade: 1 while halted because too many upgraded runtimes are not proven, 0 otherwise.
        halted: Gauge = "agent_upgrade_halted",
        /// State ConfigMap of the agent upgrade: 1 if it is invalid, so that no agent is upgraded; 0 otherwise.
        refused: Gauge = "agent_upgrade_state_refused",
        /// Runtimes during an agent upgrade: proven, pending and failing with the new image, waiting and failing-before
        /// with another one, unfit (could not be upgraded, or were unwell before) and uncounted (away, paused, being
        /// deleted). Each replica counts those of its shards, so that the sum is the fleet.
        runtimes: Family<StandingLabels, Gauge> = "agent_upgrade_runtimes",
        /// Writes of the ConfigMap with the state of the agent upgrade, by outcome: written, conflict (changed since it
        /// was read) or failed.
        writes: Family<OutcomeLabel, Counter> = "agent_upgrade_writes",
        /// Steps of the agent upgrade that were put off because not every shard had a replica that assessed its runtimes.
        pub(super) incomplete: Counter = "agent_upgrade_incomplete",
    }
}

impl Metrics {
    pub(super) fn set_state(&self, rollout: &UpgradeState, is_refused: bool) {
        self.stage.set(rollout.ring().into());
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
            self.runtimes.get_or_create(&StandingLabels { standing }).set(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }

    pub(super) fn count_write(&self, outcome: &'static str) {
        self.writes.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}
