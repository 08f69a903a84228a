//! Metrics of transitions, polls and written conditions.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{poll_scheduler::PollKind, write::WriteError};
use crate::fleet::PathState;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransitionLabels {
    state: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PollLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabels {
    result: &'static str,
}

/// Metrics of the event path controller.
#[derive(Clone, Default)]
pub struct Metrics {
    transitions: Family<TransitionLabels, Counter>,
    polls: Family<PollLabels, Counter>,
    repairs: Counter,
    conditions: Family<WriteLabels, Counter>,
    waiting: Gauge,
}

impl Metrics {
    /// Creates and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Transitions of event paths by their new state, including the first state after a start";
        registry.register("path_transitions", help, metrics.transitions.clone());
        let help = "Reconciles enqueued without a known change: fallback while the event path is not proven, verification otherwise";
        registry.register("path_polls", help, metrics.polls.clone());
        let help = "Installations verified because their agent is silent or lacks an object of its own";
        registry.register("path_mended", help, metrics.repairs.clone());
        let help = "Writes of the conditions EventPath, Paused and CARotation by result; moved means that the Kyma had changed since it was read";
        registry.register("path_conditions", help, metrics.conditions.clone());
        let help = "Conditions whose write is pending because of the rate limit, backoff or failures";
        registry.register("path_conditions_waiting", help, metrics.waiting.clone());
        metrics
    }

    pub(super) fn transitioned(&self, path: &PathState) {
        self.transitions.get_or_create(&TransitionLabels { state: path.as_str() }).inc();
    }

    pub(super) fn polled(&self, kind: PollKind) {
        let reason = match kind {
            PollKind::Fallback => "fallback",
            PollKind::Verification => "verification",
        };
        self.polls.get_or_create(&PollLabels { reason }).inc();
    }

    pub(super) fn repaired(&self) {
        self.repairs.inc();
    }

    pub(super) fn wrote_condition(&self, result: &Result<(), WriteError>) {
        let result = match result {
            Ok(()) => "written",
            Err(WriteError::Conflict) => "moved",
            Err(WriteError::Apply(_) | WriteError::Timeout) => "failed",
        };
        self.conditions.get_or_create(&WriteLabels { result }).inc();
    }

    pub(super) fn waiting(&self, count: usize) {
        self.waiting.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
