//! What is counted about access to runtimes. Labels come from closed sets, never from names or texts.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
};
use tidewatch_shared::metrics::Registry;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfAnswer {
    answer: &'static str,
}

/// See [`Metrics::register`].
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    clients: Counter,
    unusable: Family<Reason, Counter>,
    forbidden: Family<Reason, Counter>,
    answers: Family<OfAnswer, Counter>,
    refused: Family<Reason, Counter>,
}

impl Metrics {
    /// Registers all families; the caller gives the prefix.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("runtime_clients", "Clients built for runtimes", metrics.clients.clone());
        registry.register(
            "runtime_access_unusable",
            "Access Secrets, new or changed, that gave no client, by reason",
            metrics.unusable.clone(),
        );
        registry.register(
            "runtime_addresses_forbidden",
            "Resolved addresses of runtimes that were not connected to, by reason",
            metrics.forbidden.clone(),
        );
        registry.register("runtime_answers", "Requests to runtimes, by class of answer", metrics.answers.clone());
        registry.register(
            "runtime_answers_refused",
            "Answers of runtimes that were cut off, by reason",
            metrics.refused.clone(),
        );
        metrics
    }

    pub(super) fn client_built(&self) {
        self.clients.inc();
    }

    pub(super) fn unusable(&self, reason: &'static str) {
        self.unusable.get_or_create(&Reason { reason }).inc();
    }

    pub(super) fn forbidden(&self, reason: &'static str) {
        self.forbidden.get_or_create(&Reason { reason }).inc();
    }

    pub(super) fn answer(&self, answer: &'static str) {
        self.answers.get_or_create(&OfAnswer { answer }).inc();
    }

    pub(super) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&Reason { reason }).inc();
    }
}
