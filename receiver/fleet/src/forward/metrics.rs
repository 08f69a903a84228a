//! Metrics of forwarded events. Managers and services are named by Watchers, of which a plan has at most 500.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use strum::VariantNames as _;
use tidewatch_kit::{metric_set, variant::VariantName as _};

use super::{DeliveryOutcome, Target};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TargetLabels {
    manager: String,
    service: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    manager: String,
    result: &'static str,
    service: String,
}

impl TargetLabels {
    fn new(target: &Target) -> Self {
        Self { manager: target.manager().to_owned(), service: target.service().to_string() }
    }
}

impl ResultLabels {
    fn new(target: &Target, result: &'static str) -> Self {
        let TargetLabels { manager, service } = TargetLabels::new(target);
        Self { manager, result, service }
    }
}

metric_set! {
    /// Counters of events forwarded to other managers.
    pub struct Metrics {
        /// Requests to other managers, by result: delivered, refused (3xx, 4xx) or failed; refused and failed ones are
        /// retried.
        requests: Family<ResultLabels, Counter> = "forward_requests",
        /// Events given up because another manager refused them with status 400, 413 or 422 for five minutes; should
        /// stay zero.
        given_up: Family<TargetLabels, Counter> = "forward_events_given_up",
        /// Events refused because a manager's queue was full; their agents keep and retry them.
        no_room: Family<TargetLabels, Counter> = "forward_events_without_room",
        /// Objects queued for or in flight to another manager.
        waiting: Family<TargetLabels, Gauge> = "forward_objects",
        /// Objects of these that another manager refused and that are retried, from the third refusal on every five
        /// minutes.
        parked: Family<TargetLabels, Gauge> = "forward_objects_parked",
    }
}

impl Metrics {
    pub(crate) fn ended(&self, target: &Target, outcome: DeliveryOutcome, gave_up: bool) {
        self.requests.get_or_create(&ResultLabels::new(target, outcome.as_str())).inc();
        if gave_up {
            self.given_up.get_or_create(&TargetLabels::new(target)).inc();
        }
    }

    pub(crate) fn no_room(&self, target: &Target) {
        self.no_room.get_or_create(&TargetLabels::new(target)).inc();
    }

    /// Sets the numbers of queued and of parked objects of a target.
    pub(crate) fn objects(&self, target: &Target, objects: usize, parked: usize) {
        let labels = TargetLabels::new(target);
        self.waiting.get_or_create(&labels).set(i64::try_from(objects).unwrap_or(i64::MAX));
        self.parked.get_or_create(&labels).set(i64::try_from(parked).unwrap_or(i64::MAX));
    }

    /// Removes the series of a target that no Watcher names any more.
    pub(crate) fn forget(&self, target: &Target) {
        let labels = TargetLabels::new(target);
        self.given_up.remove(&labels);
        self.no_room.remove(&labels);
        self.waiting.remove(&labels);
        self.parked.remove(&labels);
        for &result in DeliveryOutcome::VARIANTS {
            self.requests.remove(&ResultLabels::new(target, result));
        }
    }
}
