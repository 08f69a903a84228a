//! Metrics of the access to runtimes. Labels come from closed sets, never from names or texts.

use prometheus_client::metrics::{counter::Counter, family::Family};
use tidewatch_kit::{label_sets, metric_set, metrics::ReasonLabel};

label_sets! {
    struct ResponseLabel { answer }
}

metric_set! {
    /// Counters of clients, refused addresses and responses.
    #[derive(Debug)]
    pub struct Metrics {
        /// Clients built for runtimes.
        pub(super) clients: Counter = "runtime_clients",
        /// Access Secrets, new or changed, without a usable client, by reason.
        unusable: Family<ReasonLabel, Counter> = "runtime_access_unusable",
        /// Resolved addresses of runtimes that were not connected to, by reason.
        pub(super) forbidden: Family<ReasonLabel, Counter> = "runtime_addresses_forbidden",
        /// Requests to runtimes, by class of response.
        responses: Family<ResponseLabel, Counter> = "runtime_answers",
        /// Responses of runtimes that violated a limit, by reason.
        pub(super) refused: Family<ReasonLabel, Counter> = "runtime_answers_refused",
    }
}

impl Metrics {
    pub(super) fn unusable(&self, reason: &'static str) {
        self.unusable.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(super) fn responded(&self, answer: &'static str) {
        self.responses.get_or_create(&ResponseLabel { answer }).inc();
    }
}
