//! Metrics of transitions, polls and written conditions.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_fleet::PathState;
use tidewatch_kit::{
    metric_set,
    metrics::{ReasonLabel, ResultLabel, StateLabel},
    variant::VariantName as _,
};

use super::{poll_scheduler::PollKind, write::WriteError};

metric_set! {
    /// Metrics of the event path controller.
    pub struct Metrics {
        /// Transitions of event paths, by their new state; the first state after a start is included.
        transitions: Family<StateLabel, Counter> = "path_transitions",
        /// Reconciles enqueued without a known change, by reason: fallback while the event path is not proven,
        /// verification otherwise.
        polls: Family<ReasonLabel, Counter> = "path_polls",
        /// Installations verified because their agent is silent or lacks an object of its own.
        pub(super) repairs: Counter = "path_mended",
        /// Writes of the conditions EventPath, Paused, CARotation and ModuleRollout, by result; moved means that the Kyma had changed
        /// since it was read.
        conditions: Family<ResultLabel, Counter> = "path_conditions",
        /// Conditions whose write is pending because of the rate limit, backoff or failures.
        waiting: Gauge = "path_conditions_waiting",
    }
}

impl Metrics {
    pub(super) fn transitioned(&self, path: &PathState) {
        self.transitions.get_or_create(&StateLabel { state: path.as_str() }).inc();
    }

    pub(super) fn polled(&self, kind: PollKind) {
        self.polls.get_or_create(&ReasonLabel { reason: kind.as_str() }).inc();
    }

    pub(super) fn wrote_condition(&self, result: &Result<(), WriteError>) {
        let result = match result {
            Ok(()) => "written",
            Err(WriteError::Conflict) => "moved",
            Err(WriteError::Apply(_) | WriteError::Timeout) => "failed",
        };
        self.conditions.get_or_create(&ResultLabel { result }).inc();
    }

    pub(super) fn waiting(&self, count: usize) {
        self.waiting.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
