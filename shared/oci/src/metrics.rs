//! Metrics of the access to the registry.

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{
    metric_set,
    metrics::{ReasonLabel, ResultLabel},
};

metric_set! {
    /// Requests to the registry, the content store, and the lookups.
    #[derive(Debug)]
    pub struct Metrics {
        /// Fetches of manifests and blobs from the OCI registry, by result: `ok`, or the reason of the failure.
        fetches: Family<ResultLabel, Counter> = "oci_fetches",
        /// Verifications of component descriptors, by result: `ok`, or the reason of the refusal. None without
        /// --component-keys.
        verifications: Family<ResultLabel, Counter> = "oci_signature_verifications",
        /// Bytes of response bodies read from the OCI registry.
        pub(super) received: Counter = "oci_received_bytes",
        /// Reads from the content store, by result: `hit`, `miss` or `corrupt`.
        store_reads: Family<ResultLabel, Counter> = "oci_store_reads",
        /// Contents evicted from the content store.
        pub(super) store_evictions: Counter = "oci_store_evictions",
        /// Failed operations of the content store, by reason: `open`, `read`, `write` or `remove`.
        store_errors: Family<ReasonLabel, Counter> = "oci_store_errors",
        /// Bytes in the content store.
        pub(super) store_bytes: Gauge = "oci_store_bytes",
        /// Descriptors and layers whose first lookup has no result yet.
        pub(super) pending: Gauge = "oci_lookups_pending",
        /// Descriptors and layers whose last fetch failed.
        pub(super) failed: Gauge = "oci_lookups_failed",
    }
}

impl Metrics {
    pub(super) fn fetched(&self, result: &'static str) {
        self.fetches.get_or_create(&ResultLabel { result }).inc();
    }

    pub(super) fn verified(&self, result: &'static str) {
        self.verifications.get_or_create(&ResultLabel { result }).inc();
    }

    pub(super) fn store_read(&self, result: &'static str) {
        self.store_reads.get_or_create(&ResultLabel { result }).inc();
    }

    pub(super) fn store_failed(&self, reason: &'static str) {
        self.store_errors.get_or_create(&ReasonLabel { reason }).inc();
    }

    #[cfg(test)]
    pub(super) fn fetches_of(&self, result: &'static str) -> u64 {
        self.fetches.get_or_create(&ResultLabel { result }).get()
    }

    #[cfg(test)]
    pub(super) fn verifications_of(&self, result: &'static str) -> u64 {
        self.verifications.get_or_create(&ResultLabel { result }).get()
    }

    #[cfg(test)]
    pub(super) fn store_reads_of(&self, result: &'static str) -> u64 {
        self.store_reads.get_or_create(&ResultLabel { result }).get()
    }

    #[cfg(test)]
    pub(super) fn store_errors_of(&self, reason: &'static str) -> u64 {
        self.store_errors.get_or_create(&ReasonLabel { reason }).get()
    }
}
