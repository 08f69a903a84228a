//! Metrics of certificates. All labels come from closed sets.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    by: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabel {
    call: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ListLabel {
    of: &'static str,
}

/// Counters of issued and refused certificates, of calls to runtimes, and of revocations.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    issued: Family<KindLabel, Counter>,
    failed: Family<ReasonLabel, Counter>,
    calls: Family<CallLabel, Counter>,
    revocations: Family<ListLabel, Gauge>,
}

impl Metrics {
    /// Registers the metrics under `enrolment_`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let bed = registry.sub_registry_with_prefix("enrolment");
        let help = "Certificates issued to runtimes, by kind: enrolment or renewal";
        bed.register("certificates_issued", help, metrics.issued.clone());
        let help = "Certificates not issued to authenticated runtimes, by reason";
        bed.register("certificates_failed", help, metrics.failed.clone());
        let help = "Calls to runtimes for their token keys and for token reviews, by outcome";
        bed.register("runtime_calls", help, metrics.calls.clone());
        let help = "Entries of the revocation list: leaf, runtime, or malformed, which revokes nothing";
        bed.register("revocations", help, metrics.revocations.clone());
        metrics
    }

    pub(super) fn issued(&self, by: &'static str) {
        self.issued.get_or_create(&KindLabel { by }).inc();
    }

    pub(super) fn failed(&self, reason: &'static str) {
        self.failed.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(super) fn called(&self, call: &'static str, outcome: &'static str) {
        self.calls.get_or_create(&CallLabel { call, outcome }).inc();
    }

    pub(super) fn revoked(&self, leaves: usize, runtimes: usize, malformed: usize) {
        for (of, count) in [("leaf", leaves), ("runtime", runtimes), ("malformed", malformed)] {
            self.revocations.get_or_create(&ListLabel { of }).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    #[cfg(test)]
    pub(super) fn count_issued(&self, by: super::IssuanceKind) -> u64 {
        self.issued.get_or_create(&KindLabel { by: by.as_str() }).get()
    }
}
