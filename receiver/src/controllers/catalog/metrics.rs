//! Metrics of catalog sync.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{
    removal_guard::HeldRemoval,
    snapshot::{Omission, OmissionReason},
};

/// Metrics of catalog sync; clones share the counters.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    calls: Family<CallLabels, Counter>,
    blocked: Counter,
    left_out: Family<ReasonLabel, Gauge>,
    held_modules: Gauge,
    held_runtimes: Gauge,
    enqueued: Counter,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    fault: &'static str,
}

/// Call to a runtime's API server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Operation {
    /// A list of one kind, all pages.
    #[default]
    List,
    /// A read of one object.
    Get,
    /// Server-side apply.
    Apply,
    /// PUT.
    Replace,
    /// DELETE.
    Delete,
    /// A read of the inventory.
    GetInventory,
    /// A write of the inventory.
    WriteInventory,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, EncodeLabelValue)]
enum Outcome {
    #[default]
    Ok,
    Failed,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    operation: Operation,
    outcome: Outcome,
}

impl Metrics {
    /// Creates and registers the metrics.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("catalog_calls", "Calls of catalog sync to runtimes", metrics.calls.clone());
        registry.register(
            "catalog_held",
            "Release metas not applied because a required template is missing in the runtime",
            metrics.blocked.clone(),
        );
        let help =
            "Templates and release metas, or channels of these, left out of every catalog because of a mistake in them";
        registry.register("catalog_left_out", help, metrics.left_out.clone());
        let help = "Modules whose removal from many runtimes waits for a confirmation";
        registry.register("catalog_held_modules", help, metrics.held_modules.clone());
        let help =
            "Runtimes that would lose a module, a channel or a version by the removal that waits for a confirmation";
        registry.register("catalog_held_runtimes", help, metrics.held_runtimes.clone());
        let help = "Runtimes enqueued because the catalog of their class changed";
        registry.register("catalog_woken", help, metrics.enqueued.clone());
        metrics.update_gauges(&[], None);
        metrics
    }

    pub(super) fn called(&self, operation: Operation, ok: bool) {
        let outcome = if ok { Outcome::Ok } else { Outcome::Failed };
        self.calls.get_or_create(&CallLabels { operation, outcome }).inc();
    }

    pub(super) fn blocked(&self, objects: usize) {
        self.blocked.inc_by(objects as u64);
    }

    /// Sets the gauges after KCP's catalog was recomputed.
    pub(super) fn update_gauges(&self, left_out: &[Omission], held: Option<&HeldRemoval>) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        for fault in OmissionReason::WORDS {
            let omissions = left_out.iter().filter(|omission| omission.reason.as_str() == fault).count();
            self.left_out.get_or_create(&ReasonLabel { fault }).set(count(omissions));
        }
        self.held_modules.set(held.map_or(0, |held| count(held.modules.len())));
        self.held_runtimes.set(held.map_or(0, |held| count(held.runtimes)));
    }

    pub(crate) fn count_enqueued(&self, runtimes: usize) {
        self.enqueued.inc_by(runtimes as u64);
    }
}
