//! What is counted about certificates. Every label comes from a closed set.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct By {
    by: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    call: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    of: &'static str,
}

/// The metrics of this room.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    issued: Family<By, Counter>,
    failed: Family<Reason, Counter>,
    calls: Family<Call, Counter>,
    revocations: Family<Of, Gauge>,
}

impl Metrics {
    /// Registers the metrics under `enrolment_`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let room = registry.sub_registry_with_prefix("enrolment");
        let help = "Certificates that were issued to runtimes, by what had proven the runtime: enrolment or renewal";
        room.register("certificates_issued", help, metrics.issued.clone());
        let help = "Certificates that were not issued although the runtime was proven, by reason";
        room.register("certificates_failed", help, metrics.failed.clone());
        let help = "Questions to runtimes about their keys and about tokens, by what became of them";
        room.register("runtime_calls", help, metrics.calls.clone());
        let help = "Entries of the revocation list: leaf, runtime, or malformed, which revokes nothing";
        room.register("revocations", help, metrics.revocations.clone());
        metrics
    }

    pub(super) fn issued(&self, by: &'static str) {
        self.issued.get_or_create(&By { by }).inc();
    }

    pub(super) fn failed(&self, reason: &'static str) {
        self.failed.get_or_create(&Reason { reason }).inc();
    }

    pub(super) fn called(&self, call: &'static str, outcome: &'static str) {
        self.calls.get_or_create(&Call { call, outcome }).inc();
    }

    pub(super) fn revoked(&self, leaves: usize, runtimes: usize, malformed: usize) {
        for (of, count) in [("leaf", leaves), ("runtime", runtimes), ("malformed", malformed)] {
            self.revocations.get_or_create(&Of { of }).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    #[cfg(test)]
    pub(super) fn count_issued(&self, by: super::By) -> u64 {
        self.issued.get_or_create(&By { by: by.as_str() }).get()
    }
}
