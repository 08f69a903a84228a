//! Counters, gauges and histograms. Label values come from closed sets.

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use http::StatusCode;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
};
use strum::IntoStaticStr;
use tidewatch_kit::{
    label_sets, metric_set,
    metrics::{KindLabel, MetricDescription, ReasonLabel, Registry, RouteLabel},
    variant::VariantName as _,
};

use crate::clock;

label_sets! {
    struct ChangeLabel { change }
    struct RequestLabels { outcome, route }
    struct ErrorReasonLabel { error_reason }
}

/// Watch of the plan; a plan has at most 500.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WatchLabel {
    watch: Arc<str>,
}

/// Delay in milliseconds above which the first send of an event counts as late.
const LATE: i64 = 1_000;

/// Route of a request. The name is the value of the label `route`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Route {
    /// `/v3/events`.
    Events,
    /// `/v3/heartbeat`.
    Heartbeat,
    /// `/v3/certificates`, signed with the current certificate.
    Renewal,
    /// `/v3/certificates`, authorized by a token.
    Enrolment,
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    /// Accepted.
    Accepted,
    /// Refused with this status.
    Refused(StatusCode),
    /// No connection could be opened.
    Connect,
    /// The connection failed before a complete, valid response.
    NoResponse,
    /// The request could not be built or signed.
    Setup,
}

impl RequestOutcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "taken",
            Self::Connect => "connect",
            Self::NoResponse => "fault",
            Self::Setup => "setup",
            Self::Refused(status) => status_label(status),
        }
    }
}

/// Label for an HTTP status: the statuses of the contract by number, server errors as one, and all others as one.
pub(crate) const fn status_label(status: StatusCode) -> &'static str {
    match status.as_u16() {
        400 => "400",
        401 => "401",
        403 => "403",
        404 => "404",
        409 => "409",
        413 => "413",
        429 => "429",
        503 => "503",
        500..=599 => "5xx",
        _ => "other",
    }
}

/// Counts of index and outbox at one instant, for the gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Events waiting to be sent.
    pub waiting: usize,
    /// Parked events, which cannot be sent.
    pub parked: usize,
    /// Sent events that are not settled.
    pub unsettled: usize,
    /// Watches of the plan.
    pub watches: usize,
    /// Watches with failing list or watch requests.
    pub failing: usize,
    /// Watches above their object limit, which report changes without names.
    pub coarse: usize,
    /// Objects in the index.
    pub objects: usize,
    /// Memory of index and outbox at most, in bytes.
    pub state_bytes: usize,
}

metric_set! {
    /// The agent's metrics; clones share the same values.
    pub struct Metrics {
        /// Events with an assigned sequence, by change; in a new epoch an unsettled change gets another one.
        events: Family<ChangeLabel, Counter> = "events",
        /// Events first sent more than a second after their observation.
        late: Counter = "events_late",
        /// Time from the observation of a change to the acceptance of its event, in seconds.
        accepted: Histogram = "event_accepted_seconds" with seconds(),
        /// Time from the observation of a change to the end of all reconciles of its event, in seconds.
        settled: Histogram = "event_settled_seconds" with seconds(),
        /// Requests to the receiver, by route and outcome.
        requests: Family<RequestLabels, Counter> = "requests",
        /// Requests that carried the events of an earlier one, by route.
        retried: Family<RouteLabel, Counter> = "requests_retried",
        /// Single events refused by the receiver, by reason.
        refused_events: Family<ReasonLabel, Counter> = "events_refused",
        /// Epochs begun after the first, by reason; each resends all unsettled events.
        epochs: Family<ReasonLabel, Counter> = "epochs",
        /// Lists begun, by reason.
        lists: Family<ReasonLabel, Counter> = "lists",
        /// Failed lists and watches, by kind of failure.
        watch_failures: Family<KindLabel, Counter> = "watch_failures",
        /// Objects in the index, by watch of the plan.
        watch_objects: Family<WatchLabel, Gauge> = "watch_objects",
        /// Changes merged into an event that had not been sent yet.
        pub(crate) coalesced: Counter = "changes_coalesced",
        /// Collapses of single events into one event for the whole watch.
        pub(crate) collapsed: Counter = "events_collapsed",
        /// Reopened watches.
        pub(crate) reopened: Counter = "watches_reopened",
        /// Watches that exceeded their silence deadline.
        pub(crate) silent: Counter = "watches_silent",
        /// Relists of all watches.
        pub(crate) rebuilds: Counter = "rebuilds",
        /// Failed renewals of the canary Lease.
        pub(crate) canary_failed: Counter = "canary_failures",
        /// Refused plans.
        pub(crate) plans_refused: Counter = "plans_refused",
        /// Refused settings of the ConfigMap.
        pub(crate) settings_refused: Counter = "settings_refused",
        /// Failed writes of the agent's identity Secret.
        pub(crate) identity_writes_failed: Counter = "identity_writes_failed",
        /// Refused sets of key, chain and trust bundle.
        pub(crate) identity_refused: Counter = "identities_refused",
        /// Expiry of the certificate, Unix time.
        pub(crate) certificate_not_after: Gauge = "certificate_not_after_seconds",
        /// Time since which certificate renewals fail, Unix time; 0 if they do not.
        pub(crate) renewal_failed_since: Gauge = "certificate_renewal_failed_since_seconds",
        /// Offset added to the clock for signatures, in seconds.
        pub(crate) clock_offset: Gauge = "clock_offset_seconds",
        /// Time of the last accepted request, Unix time; 0 before.
        pub(crate) answered: Gauge = "last_taken_timestamp_seconds",
        /// Time since the last round trip of the canary, in seconds; -1 before.
        canary_age: Gauge = "canary_age_seconds",
        /// Events waiting to be sent.
        waiting: Gauge = "events_waiting",
        /// Parked events, which cannot be sent.
        parked: Gauge = "events_parked",
        /// Sent events that are not settled.
        unsettled: Gauge = "events_unsettled",
        /// Watches of the plan.
        watches: Gauge = "watches",
        /// Watches with failing list or watch requests.
        failing: Gauge = "watches_failing",
        /// Watches above their object limit.
        coarse: Gauge = "watches_coarse",
        /// Objects in the index.
        objects: Gauge = "objects",
        /// Upper bound of the memory of index and outbox, in bytes; `--max-state-mib` limits it.
        state_bytes: Gauge = "state_bytes",
        lifecycle_manager: LifecycleManager = _,
    }
}

metric_set! {
    /// lifecycle-manager's metrics, with the names, labels and semantics that existing dashboards use.
    struct LifecycleManager {
        /// Requests with events to the control plane, including retries, without heartbeats.
        requests: Counter = "watcher_kcp_requests",
        /// Failed requests with events: request-setup (it could not be built) or failed-request (no response, or a
        /// refusal).
        failed: Family<ErrorReasonLabel, Counter> = "watcher_failed_kcp",
        /// Duration of the last request with events in seconds.
        duration: Gauge<f64, AtomicU64> = "watcher_request_duration",
        /// FIPS mode of the cryptography: always 0, off.
        fips_mode: Gauge = "watcher_fips_mode",
    }
}

/// Creates a histogram from 1 ms to about an hour.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.5, 17))
}

impl LifecycleManager {
    fn requested(&self, outcome: RequestOutcome, took: Duration) {
        self.requests.inc();
        self.duration.set(took.as_secs_f64());
        let error_reason = match outcome {
            RequestOutcome::Accepted => return,
            RequestOutcome::Setup => "request-setup",
            RequestOutcome::Refused(_) | RequestOutcome::Connect | RequestOutcome::NoResponse => "failed-request",
        };
        self.failed.get_or_create(&ErrorReasonLabel { error_reason }).inc();
    }
}

impl Metrics {
    /// Descriptions of all metrics of an agent.
    pub fn described() -> Vec<MetricDescription> {
        Self::default().registry().described()
    }

    /// A registry of all metrics: Tidewatch's with a prefix, lifecycle-manager's without.
    pub(crate) fn registry(&self) -> Registry {
        let mut registry = Registry::default();
        self.lifecycle_manager.register_in(&mut registry);
        let ours = registry.sub_registry_with_prefix("tidewatch_agent");
        ours.register_build_info(env!("CARGO_PKG_VERSION"));
        self.register_in(ours);
        registry
    }

    /// An event got its sequence; `since` is the time of its observation, in Unix milliseconds.
    pub(crate) fn sequenced(&self, change: &'static str, since: i64) {
        self.events.get_or_create(&ChangeLabel { change }).inc();
        if clock::unix_millis() - since > LATE {
            self.late.inc();
        }
    }

    /// A request ended after `took`.
    pub(crate) fn requested(&self, route: Route, outcome: RequestOutcome, took: Duration) {
        self.requests.get_or_create(&RequestLabels { route: route.as_str(), outcome: outcome.as_str() }).inc();
        if route == Route::Events {
            self.lifecycle_manager.requested(outcome, took);
        }
        if matches!(outcome, RequestOutcome::Accepted) {
            self.answered.set(clock::unix_seconds());
        }
    }

    /// The receiver accepted an event that was observed at `since`, in Unix milliseconds.
    pub(crate) fn accepted(&self, since: i64) {
        self.accepted.observe(seconds_since(since));
    }

    /// All reconciles of an event that was observed at `since`, in Unix milliseconds, have ended.
    pub(crate) fn settled(&self, since: i64) {
        self.settled.observe(seconds_since(since));
    }

    /// A request carries the events of an earlier one.
    pub(crate) fn retried(&self, route: Route) {
        self.retried.get_or_create(&RouteLabel { route: route.as_str() }).inc();
    }

    /// The receiver refused a single event.
    pub(crate) fn refused(&self, reason: &'static str) {
        self.refused_events.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// A new epoch began.
    pub(crate) fn epoch_begun(&self, reason: &'static str) {
        self.epochs.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Number of epochs that began for this reason.
    pub(crate) fn epochs(&self, reason: &'static str) -> u64 {
        self.epochs.get(&ReasonLabel { reason }).map_or(0, |count| count.get())
    }

    /// A list begins; `reason` is from a closed set.
    pub(crate) fn listed(&self, reason: &'static str) {
        self.lists.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// A list or watch failed; `kind` is from a closed set.
    pub(crate) fn watch_failed(&self, kind: &'static str) {
        self.watch_failures.get_or_create(&KindLabel { kind }).inc();
    }

    /// Sets the gauges whose values are collected on scrape.
    pub(crate) fn observe(&self, figures: Stats, objects: Vec<(Arc<str>, usize)>, canary_age: Option<u64>) {
        // Watches that have left the plan must disappear.
        self.watch_objects.clear();
        for (watch, count) in objects {
            self.watch_objects.get_or_create(&WatchLabel { watch }).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let Stats { waiting, parked, unsettled, watches, failing, coarse, objects, state_bytes } = figures;
        for (gauge, value) in [
            (&self.waiting, waiting),
            (&self.parked, parked),
            (&self.unsettled, unsettled),
            (&self.watches, watches),
            (&self.failing, failing),
            (&self.coarse, coarse),
            (&self.objects, objects),
            (&self.state_bytes, state_bytes),
        ] {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        self.canary_age.set(canary_age.map_or(-1, |age| i64::try_from(age).unwrap_or(i64::MAX)));
    }
}

fn seconds_since(unix_millis: i64) -> f64 {
    let millis = u64::try_from(clock::unix_millis() - unix_millis).unwrap_or(0);
    Duration::from_millis(millis).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_values_are_exposed() {
        let metrics = Metrics::default();
        let registry = metrics.registry();
        let took = Duration::from_millis(250);
        metrics.requested(Route::Events, RequestOutcome::Refused(StatusCode::TOO_MANY_REQUESTS), took);
        metrics.requested(Route::Events, RequestOutcome::Accepted, took);
        metrics.requested(Route::Heartbeat, RequestOutcome::Connect, took);
        metrics.accepted(0);
        metrics.settled(i64::MAX);
        metrics.refused("unknown-watch");
        metrics.sequenced("whole", 0);
        metrics.observe(Stats::default(), vec![("gone".into(), 1)], Some(1));
        metrics.observe(Stats { objects: 7, ..Stats::default() }, vec![("w".into(), 7)], None);
        let text = registry.encode().unwrap();
        assert!(!text.contains("gone"), "{text}");
        for line in [
            r#"tidewatch_agent_requests_total{outcome="429",route="events"} 1"#,
            r#"tidewatch_agent_events_refused_total{reason="unknown-watch"} 1"#,
            r#"tidewatch_agent_events_total{change="whole"} 1"#,
            "tidewatch_agent_events_late_total 1",
            "tidewatch_agent_objects 7",
            r#"tidewatch_agent_watch_objects{watch="w"} 7"#,
            "tidewatch_agent_event_accepted_seconds_count 1",
            "tidewatch_agent_event_settled_seconds_sum 0.0",
            "watcher_kcp_requests_total 2",
            r#"watcher_failed_kcp_total{error_reason="failed-request"} 1"#,
            "watcher_request_duration 0.25",
            "watcher_fips_mode 0",
            "tidewatch_agent_canary_age_seconds -1",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
