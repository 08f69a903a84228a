//! What the gateway counts. Every label comes from a closed set.

use std::{sync::atomic::AtomicU64, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
};
use tidewatch_shared::metrics::Registry;

/// The gateway's metrics.
#[derive(Clone)]
pub struct Metrics {
    pub(super) connections: Gauge,
    pub(super) handshakes: Gauge,
    pub(super) connections_ended: Family<Why, Counter>,
    pub(super) handshakes_failed: Family<Why, Counter>,
    pub(super) accepts_failed: Counter,
    pub(super) accepts_paused: Family<Why, Counter>,
    pub(super) begun: Family<Path, Counter>,
    pub(super) accepted: Family<Path, Counter>,
    pub(super) refused: Family<RefusedAs, Counter>,
    pub(super) events: Counter,
    pub(super) events_refused: Family<Why, Counter>,
    pub(super) body_bytes: Counter<u64, AtomicU64>,
    pub(super) duration: Family<Path, Histogram, fn() -> Histogram>,
    pub(super) lag: Gauge<f64, AtomicU64>,
}

/// Why something failed or ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Why {
    pub(super) reason: &'static str,
}

/// Which route; `other` for what is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct Path {
    pub(super) route: &'static str,
}

/// Which route refused, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RefusedAs {
    pub(super) route: &'static str,
    pub(super) reason: &'static str,
}

impl Metrics {
    /// Registers the metrics under `gateway_`.
    pub fn register(registry: &mut Registry) -> Self {
        let gateway = registry.sub_registry_with_prefix("gateway");
        let metrics = Self::register_port(gateway);
        gateway.register("events", "Events in accepted requests, refused ones included", metrics.events.clone());
        let help = "Events that were refused one by one, by reason";
        gateway.register("events_refused", help, metrics.events_refused.clone());
        metrics
    }

    /// Registers what every port has, on which no events come, under the registry's own prefix.
    pub fn register_port(gateway: &mut Registry) -> Self {
        // From 50 µs, a signature check, to 6.5 s, a slow body.
        let buckets: fn() -> Histogram = || Histogram::new(exponential_buckets(50e-6, 2.0, 18));
        let metrics = Self {
            connections: Gauge::default(),
            handshakes: Gauge::default(),
            connections_ended: Family::default(),
            handshakes_failed: Family::default(),
            accepts_failed: Counter::default(),
            accepts_paused: Family::default(),
            begun: Family::default(),
            accepted: Family::default(),
            refused: Family::default(),
            events: Counter::default(),
            events_refused: Family::default(),
            body_bytes: Counter::default(),
            duration: Family::new_with_constructor(buckets),
            lag: Gauge::default(),
        };
        gateway.register("connections", "Open connections, handshakes included", metrics.connections.clone());
        gateway.register("handshakes", "TLS handshakes that have begun and not ended", metrics.handshakes.clone());
        let help = "Connections that have ended, by reason";
        gateway.register("connections_ended", help, metrics.connections_ended.clone());
        let help = "TLS handshakes that failed, by reason";
        gateway.register("handshakes_failed", help, metrics.handshakes_failed.clone());
        let help = "Connections that the system could not hand over";
        gateway.register("accepts_failed", help, metrics.accepts_failed.clone());
        let help = "Times that nobody was accepted until there was a place again, by what there were too many of";
        gateway.register("accepts_paused", help, metrics.accepts_paused.clone());
        gateway.register("requests", "Requests whose head has arrived, by route", metrics.begun.clone());
        gateway.register("requests_accepted", "Requests that were accepted, by route", metrics.accepted.clone());
        let help = "Requests that were refused, by route and reason";
        gateway.register("requests_refused", help, metrics.refused.clone());
        gateway.register("body_bytes", "Bytes of bodies that were read", metrics.body_bytes.clone());
        let help = "From the request's head to its answer, in seconds";
        gateway.register("request_duration_seconds", help, metrics.duration.clone());
        let help = "How late something that was due came to run; requests are shed when it stays high";
        gateway.register("lag_seconds", help, metrics.lag.clone());
        metrics
    }

    /// The head of a request has arrived.
    pub(super) fn request_begun(&self, route: &'static str) {
        self.begun.get_or_create(&Path { route }).inc();
    }

    /// A request was accepted, or refused for this reason, after so long.
    pub(super) fn request_ended(&self, route: &'static str, took: Duration, refused: Option<&'static str>) {
        self.duration.get_or_create(&Path { route }).observe(took.as_secs_f64());
        match refused {
            None => self.accepted.get_or_create(&Path { route }).inc(),
            Some(reason) => self.refused.get_or_create(&RefusedAs { route, reason }).inc(),
        };
    }
}
