//! Counters, gauges and histograms. Label values come from closed sets.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64},
    },
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
use tidewatch_shared::metrics::{MetricDescription, Registry};

use crate::clock;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ChangeLabel {
    change: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabel {
    route: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

/// Watch of the plan; a plan has at most 500.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WatchLabel {
    watch: Arc<str>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorReasonLabel {
    error_reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabel {
    version: &'static str,
}

/// Delay in milliseconds above which the first send of an event counts as late.
const LATE: i64 = 1_000;

/// Route of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/v3/events`.
    Events,
    /// `/v3/heartbeat`.
    Heartbeat,
    /// `/v3/certificates`, signed with the current certificate.
    Renewal,
    /// `/v3/certificates`, authorized by a token.
    Enrolment,
    /// `/v2/<manager>/event`.
    V2,
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

/// Label for an HTTP status: the statuses of the contracts by number, server errors as one, and all others as one.
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
}

/// The agent's metrics; clones share the same values.
#[derive(Clone)]
pub struct Metrics {
    events: Family<ChangeLabel, Counter>,
    late: Counter,
    accepted: Histogram,
    settled: Histogram,
    requests: Family<RequestLabels, Counter>,
    retried: Family<RouteLabel, Counter>,
    refused_events: Family<ReasonLabel, Counter>,
    epochs: Family<ReasonLabel, Counter>,
    lists: Family<ReasonLabel, Counter>,
    watch_failures: Family<KindLabel, Counter>,
    watch_objects: Family<WatchLabel, Gauge>,
    incumbent: Incumbent,
    /// Changes merged into an event that had not been sent yet.
    pub(crate) coalesced: Counter,
    /// Collapses of single events into one `watch.changed`.
    pub(crate) collapsed: Counter,
    /// Reopened watches.
    pub(crate) reopened: Counter,
    /// Watches that exceeded their silence deadline.
    pub(crate) silent: Counter,
    /// Relists of all watches.
    pub(crate) rebuilds: Counter,
    /// Failed renewals of the canary's Lease.
    pub(crate) canary_failed: Counter,
    /// Refused plans.
    pub(crate) plans_refused: Counter,
    /// Refused settings.
    pub(crate) settings_refused: Counter,
    /// Failed writes of the identity Secret.
    pub(crate) identity_writes_failed: Counter,
    /// Refused sets of key, chain and trust bundle.
    pub(crate) identity_refused: Counter,
    /// End of the certificate's validity, in Unix seconds.
    pub(crate) certificate_not_after: Gauge<i64, AtomicI64>,
    /// Time since which certificate renewals fail, in Unix seconds; 0 if they do not.
    pub(crate) renewal_failed_since: Gauge<i64, AtomicI64>,
    /// Offset added to the clock for signatures, in seconds.
    pub(crate) clock_offset: Gauge<i64, AtomicI64>,
    /// Time of the last accepted request, in Unix seconds.
    pub(crate) answered: Gauge<i64, AtomicI64>,
    canary_age: Gauge<i64, AtomicI64>,
    figures: [Gauge<i64, AtomicI64>; 7],
}

/// The incumbent's metrics, with the names, labels and semantics that existing dashboards use.
#[derive(Clone, Default)]
struct Incumbent {
    requests: Counter,
    failed: Family<ErrorReasonLabel, Counter>,
    duration: Gauge<f64, AtomicU64>,
}

impl Incumbent {
    fn register(&self, registry: &mut Registry) {
        let requests = "Requests with events to the control plane, including retries, without heartbeats";
        registry.register("watcher_kcp_requests", requests, self.requests.clone());
        let failed = "Failed requests with events: request-setup (it could not be built) or failed-request (no response, or a refusal)";
        registry.register("watcher_failed_kcp", failed, self.failed.clone());
        let duration = "Duration of the last request with events in seconds";
        registry.register("watcher_request_duration", duration, self.duration.clone());
        let fips = "FIPS mode of the cryptography: always 0, off";
        registry.register("watcher_fips_mode", fips, <Gauge>::default());
    }

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

impl Default for Metrics {
    fn default() -> Self {
        // 1 ms to about an hour.
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.5, 17));
        Self {
            events: Family::default(),
            late: Counter::default(),
            accepted: seconds(),
            settled: seconds(),
            requests: Family::default(),
            retried: Family::default(),
            refused_events: Family::default(),
            epochs: Family::default(),
            lists: Family::default(),
            watch_failures: Family::default(),
            watch_objects: Family::default(),
            incumbent: Incumbent::default(),
            coalesced: Counter::default(),
            collapsed: Counter::default(),
            reopened: Counter::default(),
            silent: Counter::default(),
            rebuilds: Counter::default(),
            canary_failed: Counter::default(),
            plans_refused: Counter::default(),
            settings_refused: Counter::default(),
            identity_writes_failed: Counter::default(),
            identity_refused: Counter::default(),
            certificate_not_after: Gauge::default(),
            renewal_failed_since: Gauge::default(),
            clock_offset: Gauge::default(),
            answered: Gauge::default(),
            canary_age: Gauge::default(),
            figures: Default::default(),
        }
    }
}

impl Metrics {
    /// Descriptions of all metrics of an agent.
    #[must_use]
    pub fn described() -> Vec<MetricDescription> {
        Self::default().registry().described()
    }

    /// A registry of all metrics: Tidewatch's with a prefix, the incumbent's without.
    pub(crate) fn registry(&self) -> Registry {
        let mut registry = Registry::default();
        self.incumbent.register(&mut registry);
        let ours = registry.sub_registry_with_prefix("tidewatch_agent");
        self.register_families(ours);
        self.register_counters(ours);
        registry
    }

    fn register_families(&self, registry: &mut Registry) {
        let build = Family::<BuildLabel, Gauge>::default();
        build.get_or_create(&BuildLabel { version: env!("CARGO_PKG_VERSION") }).set(1);
        registry.register("build_info", "Which build this is; always 1", build);
        let events = "Events with an assigned sequence, by change; in a new epoch an unsettled change gets another one";
        registry.register("events", events, self.events.clone());
        let help = "Requests that carried the events of an earlier one, by route";
        registry.register("requests_retried", help, self.retried.clone());
        let reasons: [(&str, &str, &Family<ReasonLabel, Counter>); 3] = [
            ("events_refused", "Single events refused by the receiver, by reason", &self.refused_events),
            ("epochs", "Epochs begun after the first, by reason; each resends all unsettled events", &self.epochs),
            ("lists", "Lists begun, by reason", &self.lists),
        ];
        for (name, help, count) in reasons {
            registry.register(name, help, count.clone());
        }
        let help = "Failed lists and watches, by kind of failure";
        registry.register("watch_failures", help, self.watch_failures.clone());
        registry.register("requests", "Requests to the receiver, by route and outcome", self.requests.clone());
        let help = "Objects in the index, by watch of the plan";
        registry.register("watch_objects", help, self.watch_objects.clone());
        let help = "Time from the observation of a change to the acceptance of its event, in seconds";
        registry.register("event_accepted_seconds", help, self.accepted.clone());
        let help = "Time from the observation of a change to the end of all reconciles of its event, in seconds";
        registry.register("event_settled_seconds", help, self.settled.clone());
    }

    fn register_counters(&self, registry: &mut Registry) {
        let counters = [
            ("events_late", "Events first sent more than a second after their observation", &self.late),
            ("changes_coalesced", "Changes merged into an event that had not been sent yet", &self.coalesced),
            ("events_collapsed", "Collapses of single events into one event for the whole watch", &self.collapsed),
            ("watches_reopened", "Reopened watches", &self.reopened),
            ("watches_silent", "Watches that exceeded their silence deadline", &self.silent),
            ("rebuilds", "Relists of all watches", &self.rebuilds),
            ("canary_failures", "Failed renewals of the canary Lease", &self.canary_failed),
            ("plans_refused", "Refused plans", &self.plans_refused),
            ("settings_refused", "Refused settings of the ConfigMap", &self.settings_refused),
            ("identity_writes_failed", "Failed writes of the agent's identity Secret", &self.identity_writes_failed),
            ("identities_refused", "Refused sets of key, chain and trust bundle", &self.identity_refused),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        let [waiting, parked, unsettled, watches, failing, coarse, objects] = &self.figures;
        let gauges = [
            ("certificate_not_after_seconds", "Expiry of the certificate, Unix time", &self.certificate_not_after),
            (
                "certificate_renewal_failed_since_seconds",
                "Time since which certificate renewals fail, Unix time; 0 if they do not",
                &self.renewal_failed_since,
            ),
            ("last_taken_timestamp_seconds", "Time of the last accepted request, Unix time; 0 before", &self.answered),
            ("clock_offset_seconds", "Offset added to the clock for signatures, in seconds", &self.clock_offset),
            (
                "canary_age_seconds",
                "Time since the last round trip of the canary, in seconds; -1 before",
                &self.canary_age,
            ),
            ("events_waiting", "Events waiting to be sent", waiting),
            ("events_parked", "Parked events, which cannot be sent", parked),
            ("events_unsettled", "Sent events that are not settled", unsettled),
            ("watches", "Watches of the plan", watches),
            ("watches_failing", "Watches with failing list or watch requests", failing),
            ("watches_coarse", "Watches above their object limit", coarse),
            ("objects", "Objects in the index", objects),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
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
        if matches!(route, Route::Events | Route::V2) {
            self.incumbent.requested(outcome, took);
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
        let Stats { waiting, parked, unsettled, watches, failing, coarse, objects } = figures;
        let values = [waiting, parked, unsettled, watches, failing, coarse, objects];
        for (gauge, value) in self.figures.iter().zip(values) {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        self.canary_age.set(canary_age.map_or(-1, |age| i64::try_from(age).unwrap_or(i64::MAX)));
    }
}

impl Route {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::Heartbeat => "heartbeat",
            Self::Renewal => "renewal",
            Self::Enrolment => "enrolment",
            Self::V2 => "v2",
        }
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
        metrics.requested(Route::V2, RequestOutcome::Accepted, took);
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
            r#"tidewatch_agent_requests_total{route="events",outcome="429"} 1"#,
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
