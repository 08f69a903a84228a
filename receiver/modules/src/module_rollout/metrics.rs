//! Metrics of the ring rollouts.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{
    label_sets, metric_set,
    metrics::{OutcomeLabel, StateLabel},
};
use tidewatch_select::module_rollout::members::Standing;

label_sets! {
    struct StandingLabels { standing }
}

metric_set! {
    /// Metrics of the ring rollouts; clones share the values.
    #[derive(Debug)]
    pub struct Metrics {
        /// Ring rollouts of modules that have not ended, in the replica that decides on them, by state: progressing, waiting (for a pause, or for runtimes that
        /// cannot be upgraded now), halted, or invalid (their stored state or the annotations of their ModuleReleaseMeta).
        rollouts: Family<StateLabel, Gauge> = "module_rollouts",
        /// Runtimes of the ring rollouts that have not ended, by standing: waiting, blocked (unreachable, paused, outside
        /// their maintenance window, or not upgraded in time), upgrading, lost (upgraded, then unreachable), proven,
        /// failing and unfit (unhealthy before).
        runtimes: Family<StandingLabels, Gauge> = "module_rollout_runtimes",
        /// Writes of the ConfigMap with the state of the ring rollouts, by outcome: written, conflict (changed since it was
        /// read) or failed.
        writes: Family<OutcomeLabel, Counter> = "module_rollout_writes",
        /// Admissions to a ring rollout that did not reach every replica; they are repeated.
        incomplete: Counter = "module_rollout_incomplete",
    }
}

/// Number of rollouts by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct States {
    pub(super) progressing: usize,
    pub(super) waiting: usize,
    pub(super) halted: usize,
    pub(super) invalid: usize,
}

impl Metrics {
    pub(super) fn set(&self, states: States, standings: &[Standing]) {
        let States { progressing, waiting, halted, invalid } = states;
        for (state, number) in
            [("progressing", progressing), ("waiting", waiting), ("halted", halted), ("invalid", invalid)]
        {
            self.rollouts.get_or_create(&StateLabel { state }).set(gauge(number));
        }
        for standing in ["waiting", "blocked", "upgrading", "lost", "proven", "failing", "unfit"] {
            let number = standings.iter().filter(|it| standing == <&str>::from(*it)).count();
            self.runtimes.get_or_create(&StandingLabels { standing }).set(gauge(number));
        }
    }

    pub(super) fn count_incomplete(&self) {
        self.incomplete.inc();
    }

    pub(super) fn count_write(&self, outcome: &'static str) {
        self.writes.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}

fn gauge(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
