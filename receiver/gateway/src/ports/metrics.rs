//! Metrics of the gateway's ports. Every label comes from a closed set.

use std::{sync::atomic::AtomicU64, time::Duration};

use prometheus_client::metrics::{
    counter::Counter,
    family::Family,
    gauge::Gauge,
    histogram::{Histogram, exponential_buckets},
};
pub(super) use tidewatch_kit::metrics::{ReasonLabel, RouteLabel};
use tidewatch_kit::{label_sets, metric_set};

label_sets! {
    /// Route and reason of a refusal.
    pub(super) struct RefusalLabels { reason, route }
}

metric_set! {
    /// Metrics of the event port.
    pub struct Metrics {
        /// Metrics common to all ports.
        pub port: PortMetrics = ..,
        /// Events in accepted requests, refused ones included.
        pub(super) events: Counter = "events",
        /// Events refused individually within accepted requests, by reason.
        pub(super) events_refused: Family<ReasonLabel, Counter> = "events_refused",
    }
}

metric_set! {
    /// Metrics of a port's connections and requests.
    pub struct PortMetrics {
        /// Open connections, handshakes included.
        pub(super) connections: Gauge = "connections",
        /// TLS handshakes in progress.
        pub(super) handshakes: Gauge = "handshakes",
        /// Connections that wait for a TLS handshake, because their address or network holds its share of them.
        pub(super) handshakes_waiting: Gauge = "handshakes_waiting",
        /// Ended connections, by reason.
        pub(super) connections_ended: Family<ReasonLabel, Counter> = "connections_ended",
        /// Failed TLS handshakes, by reason.
        pub(super) handshakes_failed: Family<ReasonLabel, Counter> = "handshakes_failed",
        /// Connections that the system failed to accept.
        pub(super) accepts_failed: Counter = "accepts_failed",
        /// Times the port paused accepting connections, by the limit that was reached.
        pub(super) accepts_paused: Family<ReasonLabel, Counter> = "accepts_paused",
        /// Requests by route, counted on arrival of their head.
        pub(super) begun: Family<RouteLabel, Counter> = "requests",
        /// Accepted requests, by route.
        pub(super) accepted: Family<RouteLabel, Counter> = "requests_accepted",
        /// Refused requests, by route and reason.
        pub(super) refused: Family<RefusalLabels, Counter> = "requests_refused",
        /// Bytes of request bodies read.
        pub(super) body_bytes: Counter = "body_bytes",
        /// Seconds from a request's head to its response.
        ///
        /// From 50 µs, a signature check, to 6.5 s, a slow body.
        pub(super) duration: Family<RouteLabel, Histogram, fn() -> Histogram> = "request_duration_seconds"
            with Family::new_with_constructor(|| Histogram::new(exponential_buckets(50e-6, 2.0, 18))),
        /// Delay of a due task on the port's executor; requests are shed while it stays high.
        pub(super) lag: Gauge<f64, AtomicU64> = "lag_seconds",
    }
}

impl PortMetrics {
    /// Counts a request on arrival of its head.
    pub(super) fn request_begun(&self, route: &'static str) {
        self.begun.get_or_create(&RouteLabel { route }).inc();
    }

    /// Counts the result of a request, with the reason if it was refused.
    pub(super) fn request_ended(&self, route: &'static str, took: Duration, refused: Option<&'static str>) {
        self.duration.get_or_create(&RouteLabel { route }).observe(took.as_secs_f64());
        match refused {
            None => self.accepted.get_or_create(&RouteLabel { route }).inc(),
            Some(reason) => self.refused.get_or_create(&RefusalLabels { route, reason }).inc(),
        };
    }
}
