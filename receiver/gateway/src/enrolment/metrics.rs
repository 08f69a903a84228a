//! Metrics of certificates. All labels come from closed sets.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{label_sets, metric_set, metrics::ReasonLabel};

label_sets! {
    struct KindLabel { by }
    struct CallLabel { call, outcome }
    struct ListLabel { of }
}

metric_set! {
    /// Counters of issued and refused certificates, of calls to runtimes, and of revocations.
    #[derive(Debug)]
    pub struct Metrics {
        /// Certificates issued to runtimes, by kind: enrolment or renewal.
        issued: Family<KindLabel, Counter> = "enrolment_certificates_issued",
        /// Certificates not issued to authenticated runtimes, by reason.
        failed: Family<ReasonLabel, Counter> = "enrolment_certificates_failed",
        /// Calls to runtimes for their token keys and for token reviews, by outcome.
        calls: Family<CallLabel, Counter> = "enrolment_runtime_calls",
        /// Certificates refused by the receiver itself, by reason: two agent processes use it (fork), or a renewal
        /// carried a token that is not that of the runtime's agent (token).
        leaves_refused: Family<ReasonLabel, Counter> = "enrolment_certificates_refused",
        /// Entries of the revocation list: leaf, runtime, or malformed, which revokes nothing, or the whole runtime if
        /// only its time is malformed.
        revocations: Family<ListLabel, Gauge> = "enrolment_revocations",
    }
}

impl Metrics {
    pub(super) fn issued(&self, by: &'static str) {
        self.issued.get_or_create(&KindLabel { by }).inc();
    }

    pub(super) fn failed(&self, reason: &'static str) {
        self.failed.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(super) fn called(&self, call: &'static str, outcome: &'static str) {
        self.calls.get_or_create(&CallLabel { call, outcome }).inc();
    }

    pub(super) fn refused_leaf(&self, reason: &'static str) {
        self.leaves_refused.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(super) fn revoked(&self, leaves: usize, runtimes: usize, malformed: usize) {
        for (of, count) in [("leaf", leaves), ("runtime", runtimes), ("malformed", malformed)] {
            self.revocations.get_or_create(&ListLabel { of }).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }
}
