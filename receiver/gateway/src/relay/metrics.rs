//! Metrics of the relay, at the replica that accepted the requests. Every label comes from a closed set.

use std::time::Duration;

use prometheus_client::metrics::{
    counter::Counter,
    family::Family,
    gauge::Gauge,
    histogram::{Histogram, exponential_buckets},
};
use tidewatch_fleet::peers::{AskError, Topic};
use tidewatch_kit::{
    label_sets, metric_set,
    metrics::{OutcomeLabel, ReasonLabel},
    variant::VariantName as _,
};

use super::{RelayError, RelayedPort, question::QuestionError};

label_sets! {
    /// Port that accepted a request.
    pub(super) struct PortLabel { port }
    /// Topic of a question, and its outcome.
    pub(super) struct QuestionLabels { outcome, topic }
    /// Topic of a question, and the reason for which a replica did not answer it.
    pub(super) struct FailureLabels { reason, topic }
}

metric_set! {
    /// Metrics of the relay.
    pub struct Metrics {
        /// Requests that another replica responded to, by the port that accepted them.
        pub(super) relayed: Family<PortLabel, Counter> = "relay_requests",
        /// Requests that were not relayed or got no response, by reason.
        pub(super) refused: Family<ReasonLabel, Counter> = "relay_requests_refused",
        /// Requests in flight to other replicas.
        pub(super) in_flight: Gauge = "relay_requests_in_flight",
        /// Seconds from the end of a request's body to the response of another replica, or to the refusal.
        ///
        /// From 0.1 ms, a request within one zone, to 26 s, an enrolment of a slow runtime.
        pub(super) duration: Family<PortLabel, Histogram, fn() -> Histogram> = "relay_request_duration_seconds"
            with Family::new_with_constructor(|| Histogram::new(exponential_buckets(1e-4, 2.0, 19))),
        /// Connections to other replicas, by outcome: opened or failed.
        pub(super) connections: Family<OutcomeLabel, Counter> = "relay_connections",
        /// Lost connections of runtimes of other replicas, by outcome: reported, dropped (too many at once) or failed.
        pub(super) lost: Family<OutcomeLabel, Counter> = "relay_lost_connections",
        /// Questions of this replica about the fleet, by topic and outcome: answered, incomplete (a shard has no replica that
        /// answers), no-fleet-holder or unavailable.
        pub(super) questions: Family<QuestionLabels, Counter> = "relay_questions",
        /// Attempts to ask one replica that got no answer, by topic and reason.
        pub(super) questions_failed: Family<FailureLabels, Counter> = "relay_questions_failed",
    }
}

impl Metrics {
    pub(super) fn refused(&self, error: RelayError) {
        self.refused.get_or_create(&ReasonLabel { reason: error.as_str() }).inc();
    }

    pub(super) fn relayed(&self, port: RelayedPort, took: Duration, error: Option<&RelayError>) {
        let label = PortLabel { port: port.as_str() };
        self.duration.get_or_create(&label).observe(took.as_secs_f64());
        match error {
            Some(error) => self.refused(*error),
            None => drop(self.relayed.get_or_create(&label).inc()),
        }
    }

    pub(super) fn connected(&self, outcome: &'static str) {
        self.connections.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    pub(super) fn lost_reported(&self, outcome: &'static str, count: u64) {
        self.lost.get_or_create(&OutcomeLabel { outcome }).inc_by(count);
    }

    pub(super) fn asked(&self, topic: Topic, error: Option<&AskError>) {
        let outcome = error.map_or("answered", |error| error.as_str());
        self.questions.get_or_create(&QuestionLabels { topic: topic.as_str(), outcome }).inc();
    }

    pub(super) fn question_failed(&self, topic: Topic, error: QuestionError) {
        self.questions_failed.get_or_create(&FailureLabels { topic: topic.as_str(), reason: error.as_str() }).inc();
    }
}
