//! What is counted about access to runtimes. Labels come from closed sets, never from names or texts.

use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

type Labelled = Family<[(&'static str, &'static str); 1], Counter>;

/// See [`Metrics::register`].
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    clients: Counter,
    unusable: Labelled,
    forbidden: Labelled,
    answers: Labelled,
    refused: Labelled,
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
        self.unusable.get_or_create(&[("reason", reason)]).inc();
    }

    pub(super) fn forbidden(&self, reason: &'static str) {
        self.forbidden.get_or_create(&[("reason", reason)]).inc();
    }

    pub(super) fn answer(&self, answer: &'static str) {
        self.answers.get_or_create(&[("answer", answer)]).inc();
    }

    pub(super) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }
}
