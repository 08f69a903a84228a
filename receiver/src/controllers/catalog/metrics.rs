//! What catalog sync counts.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use tidewatch_shared::metrics::Registry;

use super::{
    facts::Held,
    snapshot::{Fault, LeftOut},
};

/// Counters of catalog sync; clones count together.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    calls: Family<Labels, Counter>,
    held: Counter,
    left_out: Family<OfFault, Gauge>,
    held_modules: Gauge,
    held_runtimes: Gauge,
    woken: Counter,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfFault {
    fault: &'static str,
}

/// A call to a runtime's API server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Operation {
    /// One page of a list.
    #[default]
    List,
    /// One object read.
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
enum Ending {
    #[default]
    Ok,
    Failed,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    operation: Operation,
    outcome: Ending,
}

impl Metrics {
    /// Makes the counters and registers them.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("catalog_calls", "Calls of catalog sync to runtimes", metrics.calls.clone());
        registry.register(
            "catalog_held",
            "Release metas held back because a template that they need did not go in",
            metrics.held.clone(),
        );
        let help =
            "Templates and release metas, or channels of these, that are in no catalog because of a mistake in them";
        registry.register("catalog_left_out", help, metrics.left_out.clone());
        let help = "Modules whose removal from many runtimes waits for a confirmation";
        registry.register("catalog_held_modules", help, metrics.held_modules.clone());
        let help = "Runtimes that would lose something by the removal that waits for a confirmation";
        registry.register("catalog_held_runtimes", help, metrics.held_runtimes.clone());
        let help = "Runtimes whose catalog was woken because the catalog of their class changed";
        registry.register("catalog_woken", help, metrics.woken.clone());
        metrics.renewed(&[], None);
        metrics
    }

    pub(super) fn called(&self, operation: Operation, ok: bool) {
        let outcome = if ok { Ending::Ok } else { Ending::Failed };
        self.calls.get_or_create(&Labels { operation, outcome }).inc();
    }

    pub(super) fn held(&self, objects: usize) {
        self.held.inc_by(objects as u64);
    }

    /// What KCP's catalog came to.
    pub(super) fn renewed(&self, left_out: &[LeftOut], held: Option<&Held>) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        for fault in Fault::WORDS {
            let of = left_out.iter().filter(|left| left.fault.as_str() == fault).count();
            self.left_out.get_or_create(&OfFault { fault }).set(count(of));
        }
        self.held_modules.set(held.map_or(0, |held| count(held.modules.len())));
        self.held_runtimes.set(held.map_or(0, |held| count(held.runtimes)));
    }

    pub(crate) fn woken(&self, runtimes: usize) {
        self.woken.inc_by(runtimes as u64);
    }
}
