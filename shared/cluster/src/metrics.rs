//! Metrics of the watches and requests of KCP.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use tidewatch_kit::{label_sets, metric_set, metrics::KindLabel};

label_sets! {
    /// Resource and operation of a request.
    pub(super) struct RequestLabels { kind, operation }
}

metric_set! {
    /// Metrics of the watches and requests, by kind.
    pub struct Metrics {
        /// Objects in the cache, by kind.
        pub objects: Family<KindLabel, Gauge> = "kcp_objects",
        /// Objects in the cache without their body, because they concern runtimes in the shards of other replicas, by kind.
        pub reduced: Family<KindLabel, Gauge> = "kcp_reduced_objects",
        /// Bodies that were fetched for acquired shards, by kind.
        pub bodies_fetched: Family<KindLabel, Counter> = "kcp_bodies_fetched",
        /// Requests for bodies for acquired shards that failed and are retried, by kind.
        pub body_fetches_failed: Family<KindLabel, Counter> = "kcp_body_fetch_failures",
        /// Objects that could not be decoded, by kind.
        pub unreadable: Family<KindLabel, Counter> = "kcp_unreadable_objects",
        /// Failures of watches, by kind.
        pub failed: Family<KindLabel, Counter> = "kcp_watch_failures",
        /// Time since the API server last confirmed that the cache is current, by a list, an event, a bookmark or the
        /// orderly end of a watch, by kind. Above 360 s the cache is stale and the receiver not ready.
        pub age: Family<KindLabel, Gauge<f64, AtomicU64>> = "kcp_cache_age_seconds",
        /// Requests to the control plane by kind and operation, those for the Lease excepted; each page of a list counts.
        pub(super) requests: Family<RequestLabels, Counter> = "kcp_requests",
        /// Open watches of the control plane, by kind.
        pub(super) watches: Family<KindLabel, Gauge> = "kcp_watches_open",
    }
}
