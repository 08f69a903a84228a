//! Counts of transitions, polls and written conditions.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{rounds::Kind, write::Write};
use crate::fleet::PathState;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct To {
    state: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Result {
    result: &'static str,
}

/// What the loop over the paths does.
#[derive(Clone)]
pub struct Metrics {
    transitions: Family<To, Counter>,
    polls: Family<Reason, Counter>,
    mended: Counter,
    conditions: Family<Result, Counter>,
    waiting: Gauge,
}

impl Metrics {
    /// Makes and registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            transitions: Family::default(),
            polls: Family::default(),
            mended: Counter::default(),
            conditions: Family::default(),
            waiting: Gauge::default(),
        };
        registry.register(
            "path_transitions",
            "Event paths that moved to a state; the first state after a start counts too",
            metrics.transitions.clone(),
        );
        registry.register(
            "path_polls",
            "Runtimes looked at although nothing is known to have changed: fallback while the path is not proven, verification else",
            metrics.polls.clone(),
        );
        registry.register(
            "path_mended",
            "Installations looked at because nothing was heard of their agent, or because it misses something of its own",
            metrics.mended.clone(),
        );
        registry.register(
            "path_conditions",
            "Writes of the conditions EventPath, Paused and CARotation by their result; moved means that somebody wrote the Kyma meanwhile",
            metrics.conditions.clone(),
        );
        registry.register(
            "path_conditions_waiting",
            "Conditions that do not yet say what they shall, because of the rate, of flapping, or of failures",
            metrics.waiting.clone(),
        );
        metrics
    }

    pub(super) fn moved(&self, path: &PathState) {
        self.transitions.get_or_create(&To { state: path.as_str() }).inc();
    }

    pub(super) fn polled(&self, kind: Kind) {
        let reason = match kind {
            Kind::Fallback => "fallback",
            Kind::Verification => "verification",
        };
        self.polls.get_or_create(&Reason { reason }).inc();
    }

    pub(super) fn mended(&self) {
        self.mended.inc();
    }

    pub(super) fn written(&self, result: &std::result::Result<(), Write>) {
        let result = match result {
            Ok(()) => "written",
            Err(Write::Moved) => "moved",
            Err(Write::Apply(_) | Write::Slow) => "failed",
        };
        self.conditions.get_or_create(&Result { result }).inc();
    }

    pub(super) fn waiting(&self, count: usize) {
        self.waiting.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
