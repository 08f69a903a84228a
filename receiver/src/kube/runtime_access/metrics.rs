//! Metrics of the access to runtimes. Labels come from closed sets, never from names or texts.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
};
use tidewatch_shared::metrics::Registry;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabel {
    answer: &'static str,
}

/// Counters of clients, refused addresses and responses.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    clients: Counter,
    unusable: Family<ReasonLabel, Counter>,
    forbidden: Family<ReasonLabel, Counter>,
    responses: Family<ResponseLabel, Counter>,
    refused: Family<ReasonLabel, Counter>,
}

impl Metrics {
    /// Registers all families; the registry adds the prefix.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("runtime_clients", "Clients built for runtimes", metrics.clients.clone());
        registry.register(
            "runtime_access_unusable",
            "Access Secrets, new or changed, without a usable client, by reason",
            metrics.unusable.clone(),
        );
        registry.register(
            "runtime_addresses_forbidden",
            "Resolved addresses of runtimes that were not connected to, by reason",
            metrics.forbidden.clone(),
        );
        registry.register("runtime_answers", "Requests to runtimes, by class of response", metrics.responses.clone());
        registry.register(
            "runtime_answers_refused",
            "Responses of runtimes that violated a limit, by reason",
            metrics.refused.clone(),
        );
        metrics
    }

    pub(super) fn client_built(&self) {
        self.clients.inc();
    }

    pub(super) fn unusable(&self, reason: &'static str) {
        self.unusable.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(super) fn forbidden(&self, reason: &'static str) {
        self.forbidden.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(super) fn responded(&self, answer: &'static str) {
        self.responses.get_or_create(&ResponseLabel { answer }).inc();
    }

    pub(super) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&ReasonLabel { reason }).inc();
    }
}
