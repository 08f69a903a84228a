//! The incumbent's metrics of its listener, by the names, labels and meanings that dashboards know.

use std::{sync::atomic::AtomicU64, time::Duration};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

/// The value of `server_name`, as the incumbent has it.
const SERVER: &str = "listener";

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Server {
    server_name: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Target {
    server_name: &'static str,
    request_uri_label: String,
}

/// The listener's metrics. They count contract v2 alone: a request of v3 holds many events, and the gateway's own metrics count it.
#[derive(Clone)]
pub struct Metrics {
    duration: Gauge<f64, AtomicU64>,
    requests: Counter,
    errors: Counter,
    in_flight: Gauge,
    too_large: Counter,
    unverified: Family<Target, Counter>,
}

impl Metrics {
    /// Registers the metrics under `watcher_listener_`, without any other prefix.
    pub fn register(registry: &mut Registry) -> Self {
        let server = Server { server_name: SERVER };
        let duration = Family::<Server, Gauge<f64, AtomicU64>>::default();
        let (requests, errors, too_large): (Family<Server, Counter>, Family<Server, Counter>, Family<Server, Counter>) =
            Default::default();
        let in_flight = Family::<Server, Gauge>::default();
        let unverified = Family::default();
        let metrics = Self {
            duration: duration.get_or_create_owned(&server),
            requests: requests.get_or_create_owned(&server),
            errors: errors.get_or_create_owned(&server),
            in_flight: in_flight.get_or_create_owned(&server),
            too_large: too_large.get_or_create_owned(&server),
            unverified,
        };
        let listener = registry.sub_registry_with_prefix("watcher_listener");
        listener.register("request_duration", "Seconds that the last request of contract v2 took", duration);
        let help = "Requests of contract v2; those of v3 are in tidewatch_gateway_requests_total, by route";
        listener.register("requests", help, requests);
        listener.register("request_errors", "Requests of contract v2 that were not answered by 200", errors);
        listener.register("inflight_requests", "Requests of contract v2 that are being answered", in_flight);
        let help = "Requests of contract v2 whose body was larger than 16 KiB";
        listener.register("exceeding_size_limit_requests", help, too_large);
        let help =
            "Requests of contract v2 whose client certificate names no runtime, by path of a known manager, or `other`";
        listener.register("failed_verification_requests", help, metrics.unverified.clone());
        metrics
    }

    pub(super) fn begun(&self) {
        self.requests.inc();
        self.in_flight.inc();
    }

    pub(super) fn ended(&self, took: Duration, is_error: bool) {
        self.in_flight.dec();
        self.duration.set(took.as_secs_f64());
        self.errors.inc_by(u64::from(is_error));
    }

    pub(super) fn too_large(&self) {
        self.too_large.inc();
    }

    pub(super) fn unverified(&self, path: Option<&str>) {
        let request_uri_label = path.unwrap_or("other").to_owned();
        self.unverified.get_or_create(&Target { server_name: SERVER, request_uri_label }).inc();
    }
}
