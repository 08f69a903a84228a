//! What is forwarded. Managers and services are named by Watchers, of which a plan has at most 500.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{Outcome, Target};

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    manager: String,
    service: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfResult {
    manager: String,
    service: String,
    result: &'static str,
}

impl Of {
    fn new(target: &Target) -> Self {
        Self { manager: target.manager().to_owned(), service: target.service().to_string() }
    }
}

impl OfResult {
    fn new(target: &Target, result: &'static str) -> Self {
        let Of { manager, service } = Of::new(target);
        Self { manager, service, result }
    }
}

/// Counts of what goes to other managers.
#[derive(Clone)]
pub struct Metrics {
    requests: Family<OfResult, Counter>,
    gave_up: Family<Of, Counter>,
    no_room: Family<Of, Counter>,
    waiting: Family<Of, Gauge>,
    parked: Family<Of, Gauge>,
}

impl Metrics {
    /// Registers the metrics under `forward_`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            gave_up: Family::default(),
            no_room: Family::default(),
            waiting: Family::default(),
            parked: Family::default(),
        };
        let forward = registry.sub_registry_with_prefix("forward");
        let help =
            "Requests to other managers by how they ended: delivered, refused (3xx, 4xx), failed; both are tried again";
        forward.register("requests", help, metrics.requests.clone());
        let help = "Events that another manager refused for five minutes with status 400, 413 or 422 and that are not tried again; should stay zero";
        forward.register("events_given_up", help, metrics.gave_up.clone());
        let help = "Events that found no room in a manager's queue: their agents keep them and try again";
        forward.register("events_without_room", help, metrics.no_room.clone());
        forward.register(
            "objects",
            "Objects that wait for another manager or are on their way",
            metrics.waiting.clone(),
        );
        let help = "Those of them that another manager refused and that are tried again later: every five minutes after the third time";
        forward.register("objects_parked", help, metrics.parked.clone());
        metrics
    }

    pub(crate) fn ended(&self, target: &Target, outcome: Outcome, gave_up: bool) {
        self.requests.get_or_create(&OfResult::new(target, result(outcome))).inc();
        if gave_up {
            self.gave_up.get_or_create(&Of::new(target)).inc();
        }
    }

    pub(crate) fn no_room(&self, target: &Target) {
        self.no_room.get_or_create(&Of::new(target)).inc();
    }

    /// Objects of a target, and those of them that are parked.
    pub(crate) fn objects(&self, target: &Target, objects: usize, parked: usize) {
        let of = Of::new(target);
        self.waiting.get_or_create(&of).set(i64::try_from(objects).unwrap_or(i64::MAX));
        self.parked.get_or_create(&of).set(i64::try_from(parked).unwrap_or(i64::MAX));
    }

    /// A target that nobody names any more.
    pub(crate) fn forget(&self, target: &Target) {
        let of = Of::new(target);
        self.gave_up.remove(&of);
        self.no_room.remove(&of);
        self.waiting.remove(&of);
        self.parked.remove(&of);
        for result in ["delivered", "refused", "failed"] {
            self.requests.remove(&OfResult::new(target, result));
        }
    }
}

const fn result(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Delivered => "delivered",
        Outcome::Refused(_) => "refused",
        Outcome::Failed(_) => "failed",
    }
}
