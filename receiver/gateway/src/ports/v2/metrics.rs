//! lifecycle-manager's listener metrics, with the names, labels and meanings that existing dashboards use.

use std::{sync::atomic::AtomicU64, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_kit::{label_sets, metric_set};

label_sets! {
    struct Server { server_name }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Target {
    request_uri_label: String,
    server_name: &'static str,
}

/// Label set of lifecycle-manager's listener.
const LISTENER: Server = Server { server_name: "listener" };

metric_set! {
    /// Listener metrics, to be registered under `watcher_listener_`. They count contract v2 alone: a request of v3
    /// holds many events, and the gateway's own metrics count it.
    pub struct Metrics {
        /// Seconds that the last request of contract v2 took.
        duration: Family<Server, Gauge<f64, AtomicU64>> = "request_duration" with with_sample(),
        /// Requests of contract v2; those of v3 are in tidewatch_gateway_requests_total, by route.
        requests: Family<Server, Counter> = "requests" with with_sample(),
        /// Requests of contract v2 with another response than 200.
        errors: Family<Server, Counter> = "request_errors" with with_sample(),
        /// Requests of contract v2 in progress.
        in_flight: Family<Server, Gauge> = "inflight_requests" with with_sample(),
        /// Requests of contract v2 whose body was larger than 16 KiB.
        too_large: Family<Server, Counter> = "exceeding_size_limit_requests" with with_sample(),
        /// Requests of contract v2 whose client certificate names no runtime, by path of a known manager, or `other`.
        unverified: Family<Target, Counter> = "failed_verification_requests",
    }
}

/// Creates a family that exposes its sample from the start.
fn with_sample<M: Clone + Default>() -> Family<Server, M> {
    let family = Family::default();
    drop(family.get_or_create(&LISTENER));
    family
}

impl Metrics {
    /// Counts a request that begins.
    pub(super) fn begun(&self) {
        self.requests.get_or_create(&LISTENER).inc();
        self.in_flight.get_or_create(&LISTENER).inc();
    }

    /// Counts the end of a request.
    pub(super) fn ended(&self, took: Duration, is_error: bool) {
        self.in_flight.get_or_create(&LISTENER).dec();
        self.duration.get_or_create(&LISTENER).set(took.as_secs_f64());
        self.errors.get_or_create(&LISTENER).inc_by(u64::from(is_error));
    }

    pub(super) fn too_large(&self) {
        self.too_large.get_or_create(&LISTENER).inc();
    }

    /// Counts an unverified caller; `path` is one of a known manager, or none.
    pub(super) fn unverified(&self, path: Option<&str>) {
        let request_uri_label = path.unwrap_or("other").to_owned();
        self.unverified.get_or_create(&Target { server_name: LISTENER.server_name, request_uri_label }).inc();
    }
}
