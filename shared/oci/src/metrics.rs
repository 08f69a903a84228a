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
        pub(super) fetches: Family<ResultLabel, Counter> = "oci_fetches",
        /// Verifications of component descriptors, by result: `ok`, or the reason of the refusal. None without
        /// --component-keys.
        pub(super) verifications: Family<ResultLabel, Counter> = "oci_signature_verifications",
        /// Bytes of response bodies read from the OCI registry.
        pub(super) received: Counter = "oci_received_bytes",
        /// Reads from the content store, by result: `hit`, `miss` or `corrupt`.
        pub(super) store_reads: Family<ResultLabel, Counter> = "oci_store_reads",
        /// Contents evicted from the content store.
        pub(super) store_evictions: Counter = "oci_store_evictions",
        /// Failed operations of the content store, by reason: `open`, `read`, `write` or `remove`.
        pub(super) store_errors: Family<ReasonLabel, Counter> = "oci_store_errors",
        /// Bytes in the content store.
        pub(super) store_bytes: Gauge = "oci_store_bytes",
        /// Descriptors and layers whose first lookup has no result yet.
        pub(super) pending: Gauge = "oci_lookups_pending",
        /// Descriptors and layers whose last fetch failed.
        pub(super) failed: Gauge = "oci_lookups_failed",
    }
}
