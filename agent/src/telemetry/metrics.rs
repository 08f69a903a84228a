//! Counters and gauges. Label values come from closed sets.

use std::sync::atomic::AtomicI64;

use http::StatusCode;
use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use tidewatch_shared::event::Change;

use crate::{
    core::Figures,
    kubernetes::Call,
    outbox::{Renewal, What},
    random,
};

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counts<const N: usize> = Family<Labels<N>, Counter>;

/// An event that waited longer than this before it was first sent is late, in milliseconds.
const LATE: i64 = 1_000;

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/v3/events`.
    Events,
    /// `/v3/heartbeat`.
    Heartbeat,
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
}

impl Outcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Connect => "connect",
            Self::Fault => "fault",
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
#[derive(Clone, Default)]
pub(crate) struct Metrics {
    events: Counts<1>,
    late: Counter,
    requests: Counts<2>,
    retried: Counts<1>,
    refused_events: Counts<1>,
    epochs: Counts<1>,
    lists: Counts<1>,
    watch_failures: Counts<1>,
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
    /// Sets of key, chain and bundle that were refused.
    pub(crate) identity_refused: Counter,
    /// End of the certificate's validity, in Unix seconds.
    pub(crate) certificate_not_after: Gauge<i64, AtomicI64>,
    /// What is added to our clock when signing, in seconds.
    pub(crate) clock_offset: Gauge<i64, AtomicI64>,
    canary_age: Gauge<i64, AtomicI64>,
    figures: [Gauge<i64, AtomicI64>; 7],
}

impl Metrics {
    /// Registers everything; the caller gives the prefix.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let counts: [(&str, &str, &Counts<1>); 6] = [
            ("events", "Events that got a sequence, by change", &self.events),
            ("requests_retried", "Requests that carried the same events once more, by route", &self.retried),
            ("events_refused", "Events that the receiver refused one by one, by reason", &self.refused_events),
            ("epochs", "Epochs begun after the first, by reason", &self.epochs),
            ("lists", "Lists begun, by reason", &self.lists),
            ("watch_failures", "Lists and watches that failed, by kind of failure", &self.watch_failures),
        ];
        for (name, help, count) in counts {
            registry.register(name, help, count.clone());
        }
        registry.register("requests", "Requests to the receiver, by route and outcome", self.requests.clone());
        let counters = [
            ("events_late", "Events first sent more than a second after they were seen", &self.late),
            ("events_collapsed", "Times that single events were given up for one of the whole watch", &self.collapsed),
            ("watches_reopened", "Watches that were opened again", &self.reopened),
            ("watches_silent", "Watches that were silent beyond their deadline", &self.silent),
            ("rebuilds", "Rebuilds of every watch from a list", &self.rebuilds),
            ("canary_failures", "Renewals of the Lease that failed", &self.canary_failed),
            ("plans_refused", "Plans that were refused", &self.plans_refused),
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
            What::Object { change, .. } => match change {
                Change::Created => "created",
                Change::Spec => "spec",
                Change::Metadata => "metadata",
                Change::Status => "status",
                Change::Deleted => "deleted",
            },
        };
        self.events.get_or_create(&[("change", change)]).inc();
        if random::unix_millis() - since > LATE {
            self.late.inc();
        }
    }

    /// A request ended.
    pub(crate) fn requested(&self, route: Route, outcome: Outcome) {
        self.requests.get_or_create(&[route.label(), ("outcome", outcome.as_str())]).inc();
    }

    /// A request carries what an earlier one has carried.
    pub(crate) fn retried(&self, route: Route) {
        self.retried.get_or_create(&[route.label()]).inc();
    }

    /// The receiver refused one event.
    pub(crate) fn refused(&self, reason: &'static str) {
        self.refused_events.get_or_create(&[("reason", reason)]).inc();
    }

    /// A new epoch began.
    pub(crate) fn renewed(&self, why: Renewal) {
        self.epochs.get_or_create(&[("reason", why.as_str())]).inc();
    }

    /// A list begins; `why` is from a closed set.
    pub(crate) fn listed(&self, why: &'static str) {
        self.lists.get_or_create(&[("reason", why)]).inc();
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
        };
        self.watch_failures.get_or_create(&[("kind", kind)]).inc();
    }

    /// Takes over figures that are read when somebody asks.
    pub(crate) fn observe(&self, figures: Figures, canary_age: Option<u64>) {
        let Figures { waiting, parked, unsettled, watches, failing, coarse, objects } = figures;
        let values = [waiting, parked, unsettled, watches, failing, coarse, objects];
        for (gauge, value) in self.figures.iter().zip(values) {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        self.canary_age.set(canary_age.map_or(-1, |age| i64::try_from(age).unwrap_or(i64::MAX)));
    }
}

impl Route {
    const fn label(self) -> (&'static str, &'static str) {
        let name = match self {
            Self::Events => "events",
            Self::Heartbeat => "heartbeat",
        };
        ("route", name)
    }
}

/// OpenMetrics text of a registry; `None` if a metric cannot be written.
pub(super) fn text(registry: &Registry) -> Option<String> {
    let mut text = String::new();
    encode(&mut text, registry).ok().map(|()| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_shown() {
        let (metrics, mut registry) = (Metrics::default(), Registry::with_prefix("tidewatch_agent"));
        metrics.register(&mut registry);
        metrics.requested(Route::Events, Outcome::Refused(StatusCode::TOO_MANY_REQUESTS));
        metrics.refused("unknown-watch");
        metrics.boarded(&What::Whole, 0);
        metrics.observe(Figures { objects: 7, ..Figures::default() }, None);
        let text = text(&registry).unwrap();
        for line in [
            r#"tidewatch_agent_requests_total{route="events",outcome="429"} 1"#,
            r#"tidewatch_agent_events_refused_total{reason="unknown-watch"} 1"#,
            r#"tidewatch_agent_events_total{change="whole"} 1"#,
            "tidewatch_agent_events_late_total 1",
            "tidewatch_agent_objects 7",
            "tidewatch_agent_canary_age_seconds -1",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
