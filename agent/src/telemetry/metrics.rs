//! Counters and gauges. Label values come from closed sets.

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
use tidewatch_shared::{
    event::Change,
    metrics::{Described, Registry},
};

use crate::{
    clock,
    core::Figures,
    kubernetes::Call,
    outbox::{Renewal, What},
};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfChange {
    change: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfRoute {
    route: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    route: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

/// A plan has at most 500 watches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfWatch {
    watch: Arc<str>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorReason {
    error_reason: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Build {
    version: &'static str,
}

/// An event that waited longer than this before it was first sent is late, in milliseconds.
const LATE: i64 = 1_000;

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/v3/events`.
    Events,
    /// `/v3/heartbeat`.
    Heartbeat,
    /// `/v3/certificates`, signed.
    Renewal,
    /// `/v3/certificates`, with a token.
    Enrolment,
    /// `/v2/<manager>/event`.
    V2,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Taken.
    Taken,
    /// Refused with a status.
    Refused(StatusCode),
    /// The receiver could not be connected to.
    Connect,
    /// It was connected to, but there was no answer that is of use.
    Fault,
    /// It could not even be made.
    Setup,
}

impl Outcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Connect => "connect",
            Self::Fault => "fault",
            Self::Setup => "setup",
            Self::Refused(status) => match status.as_u16() {
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
            },
        }
    }
}

/// Clones count into the same places.
#[derive(Clone)]
pub struct Metrics {
    events: Family<OfChange, Counter>,
    late: Counter,
    accepted: Histogram,
    settled: Histogram,
    requests: Family<Ended, Counter>,
    retried: Family<OfRoute, Counter>,
    refused_events: Family<Why, Counter>,
    epochs: Family<Why, Counter>,
    lists: Family<Why, Counter>,
    watch_failures: Family<OfKind, Counter>,
    watch_objects: Family<OfWatch, Gauge>,
    incumbent: Incumbent,
    /// Changes of objects whose earlier change had not been sent: both are told by one event.
    pub(crate) coalesced: Counter,
    /// Single events that were given up for one `watch.changed`.
    pub(crate) collapsed: Counter,
    /// Watches that were opened again.
    pub(crate) reopened: Counter,
    /// Watches that were silent beyond their deadline.
    pub(crate) silent: Counter,
    /// Rebuilds of every watch.
    pub(crate) rebuilds: Counter,
    /// Renewals of the canary's Lease that failed.
    pub(crate) canary_failed: Counter,
    /// Plans that were refused.
    pub(crate) plans_refused: Counter,
    /// Settings that were refused.
    pub(crate) settings_refused: Counter,
    /// Tries to keep the identity in the Secret that failed.
    pub(crate) identity_writes_failed: Counter,
    /// Sets of key, chain and bundle that were refused.
    pub(crate) identity_refused: Counter,
    /// End of the certificate's validity, in Unix seconds.
    pub(crate) certificate_not_after: Gauge<i64, AtomicI64>,
    /// Since when renewals of the certificate fail, in Unix seconds; 0 while they do not.
    pub(crate) renewal_failed_since: Gauge<i64, AtomicI64>,
    /// What is added to our clock when signing, in seconds.
    pub(crate) clock_offset: Gauge<i64, AtomicI64>,
    /// When a request was last taken, in Unix seconds.
    pub(crate) answered: Gauge<i64, AtomicI64>,
    canary_age: Gauge<i64, AtomicI64>,
    figures: [Gauge<i64, AtomicI64>; 7],
}

/// The incumbent's metrics, by the names, labels and meanings that dashboards know.
#[derive(Clone, Default)]
struct Incumbent {
    requests: Counter,
    failed: Family<ErrorReason, Counter>,
    duration: Gauge<f64, AtomicU64>,
}

impl Incumbent {
    fn register(&self, registry: &mut Registry) {
        let requests = "Requests with events to the control plane, tries included; heartbeats are no part of it";
        registry.register("watcher_kcp_requests", requests, self.requests.clone());
        let failed =
            "Those that failed: request-setup (it could not be made) or failed-request (no answer, or a refusal)";
        registry.register("watcher_failed_kcp", failed, self.failed.clone());
        let duration = "Seconds that the last request with events took";
        registry.register("watcher_request_duration", duration, self.duration.clone());
        let fips = "Whether cryptography runs in FIPS mode: always 0, which is off";
        registry.register("watcher_fips_mode", fips, <Gauge>::default());
    }

    fn requested(&self, outcome: Outcome, took: Duration) {
        self.requests.inc();
        self.duration.set(took.as_secs_f64());
        let error_reason = match outcome {
            Outcome::Taken => return,
            Outcome::Setup => "request-setup",
            Outcome::Refused(_) | Outcome::Connect | Outcome::Fault => "failed-request",
        };
        self.failed.get_or_create(&ErrorReason { error_reason }).inc();
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
    /// Every metric that an agent has.
    #[must_use]
    pub fn described() -> Vec<Described> {
        Self::default().registry().described()
    }

    /// A registry of everything: ours under a prefix, the incumbent's without.
    pub(crate) fn registry(&self) -> Registry {
        let mut registry = Registry::default();
        self.incumbent.register(&mut registry);
        let ours = registry.sub_registry_with_prefix("tidewatch_agent");
        self.families(ours);
        self.singles(ours);
        registry
    }

    fn families(&self, registry: &mut Registry) {
        let build = Family::<Build, Gauge>::default();
        build.get_or_create(&Build { version: env!("CARGO_PKG_VERSION") }).set(1);
        registry.register("build_info", "Which build this is; always 1", build);
        let events = "Events that got a sequence, by change; after a new epoch the same change gets another one";
        registry.register("events", events, self.events.clone());
        let help = "Requests that carried the same events once more, by route";
        registry.register("requests_retried", help, self.retried.clone());
        let reasons: [(&str, &str, &Family<Why, Counter>); 3] = [
            ("events_refused", "Events that the receiver refused one by one, by reason", &self.refused_events),
            ("epochs", "Epochs begun after the first, by reason: all that is not settled is sent again", &self.epochs),
            ("lists", "Lists begun, by reason", &self.lists),
        ];
        for (name, help, count) in reasons {
            registry.register(name, help, count.clone());
        }
        let help = "Lists and watches that failed, by kind of failure";
        registry.register("watch_failures", help, self.watch_failures.clone());
        registry.register("requests", "Requests to the receiver, by route and outcome", self.requests.clone());
        let help = "Objects in the index, by watch of the plan";
        registry.register("watch_objects", help, self.watch_objects.clone());
        let help = "Time from when a change was seen until the receiver had accepted its event";
        registry.register("event_accepted_seconds", help, self.accepted.clone());
        let help = "Time from when a change was seen until the receiver had ended all work that it asks for";
        registry.register("event_settled_seconds", help, self.settled.clone());
    }

    fn singles(&self, registry: &mut Registry) {
        let counters = [
            ("events_late", "Events first sent more than a second after they were seen", &self.late),
            ("changes_coalesced", "Changes that went into an event which had not been sent yet", &self.coalesced),
            ("events_collapsed", "Times that single events were given up for one of the whole watch", &self.collapsed),
            ("watches_reopened", "Watches that were opened again", &self.reopened),
            ("watches_silent", "Watches that were silent beyond their deadline", &self.silent),
            ("rebuilds", "Rebuilds of every watch from a list", &self.rebuilds),
            ("canary_failures", "Renewals of the Lease that failed", &self.canary_failed),
            ("plans_refused", "Plans that were refused", &self.plans_refused),
            ("settings_refused", "Settings of the ConfigMap that were refused", &self.settings_refused),
            (
                "identity_writes_failed",
                "Tries to keep the identity in the agent's Secret that failed",
                &self.identity_writes_failed,
            ),
            ("identities_refused", "Sets of key, chain and trust bundle that were refused", &self.identity_refused),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        let [waiting, parked, unsettled, watches, failing, coarse, objects] = &self.figures;
        let gauges = [
            (
                "certificate_not_after_seconds",
                "End of the certificate's validity, Unix time",
                &self.certificate_not_after,
            ),
            (
                "certificate_renewal_failed_since_seconds",
                "Since when renewals of the certificate fail, Unix time; 0 while they do not",
                &self.renewal_failed_since,
            ),
            (
                "last_taken_timestamp_seconds",
                "When the receiver last took a request, Unix time; 0 before",
                &self.answered,
            ),
            ("clock_offset_seconds", "Added to the clock when signing", &self.clock_offset),
            ("canary_age_seconds", "Since a renewal was seen to come back; -1 before", &self.canary_age),
            ("events_waiting", "Events that wait to be sent", waiting),
            ("events_parked", "Events that cannot be sent", parked),
            ("events_unsettled", "Events that were sent and are not settled", unsettled),
            ("watches", "Watches of the plan", watches),
            ("watches_failing", "Watches that do not work", failing),
            ("watches_coarse", "Watches with too many objects", coarse),
            ("objects", "Objects in the index", objects),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
    }

    /// An event got its sequence; `since` is when it was seen, in Unix milliseconds.
    pub(crate) fn boarded(&self, what: &What, since: i64) {
        let change = match what {
            What::Whole => "whole",
            What::Unnamed => "unnamed",
            What::Object { change, .. } => match change {
                Change::Created => "created",
                Change::Spec => "spec",
                Change::Metadata => "metadata",
                Change::Status => "status",
                Change::Deleted => "deleted",
            },
        };
        self.events.get_or_create(&OfChange { change }).inc();
        if clock::unix_millis() - since > LATE {
            self.late.inc();
        }
    }

    /// A request ended.
    pub(crate) fn requested(&self, route: Route, outcome: Outcome, took: Duration) {
        self.requests.get_or_create(&Ended { route: route.as_str(), outcome: outcome.as_str() }).inc();
        if matches!(route, Route::Events | Route::V2) {
            self.incumbent.requested(outcome, took);
        }
        if matches!(outcome, Outcome::Taken) {
            self.answered.set(clock::unix_seconds());
        }
    }

    /// The receiver accepted an event; `since` is when its change was seen, in Unix milliseconds.
    pub(crate) fn accepted(&self, since: i64) {
        self.accepted.observe(seconds_since(since));
    }

    /// All work that an event asks for has ended; `since` as above.
    pub(crate) fn settled(&self, since: i64) {
        self.settled.observe(seconds_since(since));
    }

    /// A request carries what an earlier one has carried.
    pub(crate) fn retried(&self, route: Route) {
        self.retried.get_or_create(&OfRoute { route: route.as_str() }).inc();
    }

    /// The receiver refused one event.
    pub(crate) fn refused(&self, reason: &'static str) {
        self.refused_events.get_or_create(&Why { reason }).inc();
    }

    /// A new epoch began.
    pub(crate) fn renewed(&self, why: Renewal) {
        self.epochs.get_or_create(&Why { reason: why.as_str() }).inc();
    }

    /// Epochs that began for that reason.
    pub(crate) fn epochs(&self, why: Renewal) -> u64 {
        self.epochs.get(&Why { reason: why.as_str() }).map_or(0, |count| count.get())
    }

    /// A list begins; `why` is from a closed set.
    pub(crate) fn listed(&self, why: &'static str) {
        self.lists.get_or_create(&Why { reason: why }).inc();
    }

    /// A list or watch failed.
    pub(crate) fn watch_failed(&self, why: &Call) {
        let kind = match why {
            Call::Status { status, .. } => Outcome::Refused(*status).as_str(),
            Call::Request(_) | Call::Send(_) | Call::Body(_) => "transport",
            Call::TooLarge { .. } => "too-large",
            Call::Deadline => "deadline",
            Call::Parse(_) => "parse",
            Call::NotServed(_) => "not-served",
            Call::Silent => "silent",
        };
        self.watch_failures.get_or_create(&OfKind { kind }).inc();
    }

    /// Takes over figures that are read when somebody asks.
    pub(crate) fn observe(&self, figures: Figures, objects: Vec<(Arc<str>, usize)>, canary_age: Option<u64>) {
        // What has left the plan is shown no more.
        self.watch_objects.clear();
        for (watch, count) in objects {
            self.watch_objects.get_or_create(&OfWatch { watch }).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let Figures { waiting, parked, unsettled, watches, failing, coarse, objects } = figures;
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
    fn what_is_counted_is_shown() {
        let metrics = Metrics::default();
        let registry = metrics.registry();
        let took = Duration::from_millis(250);
        metrics.requested(Route::Events, Outcome::Refused(StatusCode::TOO_MANY_REQUESTS), took);
        metrics.requested(Route::V2, Outcome::Taken, took);
        metrics.requested(Route::Heartbeat, Outcome::Connect, took);
        metrics.accepted(0);
        metrics.settled(i64::MAX);
        metrics.refused("unknown-watch");
        metrics.boarded(&What::Whole, 0);
        metrics.observe(Figures::default(), vec![("gone".into(), 1)], Some(1));
        metrics.observe(Figures { objects: 7, ..Figures::default() }, vec![("w".into(), 7)], None);
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
