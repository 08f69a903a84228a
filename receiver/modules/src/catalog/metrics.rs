//! Metrics of catalog sync.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use strum::VariantNames as _;
use tidewatch_kit::{label_sets, metric_set, variant::VariantName as _};
use tidewatch_select::catalog::{
    removal_guard::{HeldRemovals, LostReleases},
    snapshot::{Omission, OmissionReason},
};

use super::inventory::InventoryError;

metric_set! {
    /// Metrics of catalog sync; clones share the counters.
    #[derive(Debug)]
    pub struct Metrics {
        /// Calls of catalog sync to runtimes, by operation and outcome.
        calls: Family<CallLabels, Counter> = "catalog_calls",
        /// Release metas not applied because a required template is missing in the runtime.
        blocked: Counter = "catalog_held",
        /// Inventories stored in a runtime that were ignored and rebuilt, by the fault found in them.
        unreadable_inventories: Family<FaultLabel, Counter> = "catalog_unreadable_inventories" with zeros(InventoryError::VARIANTS),
        /// Templates and release metas, or channels of these, left out of every catalog because of a mistake in them.
        left_out: Family<FaultLabel, Gauge> = "catalog_left_out" with zeros(OmissionReason::VARIANTS),
        /// Modules of which a removal from many runtimes, of the module or of a part, waits for a confirmation.
        held_modules: Gauge = "catalog_held_modules",
        /// Runtimes that would lose a module, a channel or a version by the removals that wait for a confirmation.
        held_runtimes: Gauge = "catalog_held_runtimes",
        /// 1 while every removal waits for a confirmation, because the accepted releases are missing or unreadable.
        lost: Gauge = "catalog_accepted_releases_lost",
        /// Runtimes enqueued because the catalog of their class changed.
        enqueued: Counter = "catalog_woken",
    }
}

/// Creates a family that exposes 0 for each fault from the start.
fn zeros<M: Default>(faults: &[&'static str]) -> Family<FaultLabel, M> {
    let family = Family::default();
    for &fault in faults {
        drop(family.get_or_create(&FaultLabel { fault }));
    }
    family
}

label_sets! {
    struct FaultLabel { fault }
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

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    operation: Operation,
    outcome: &'static str,
}

impl Metrics {
    pub(super) fn called(&self, operation: Operation, ok: bool) {
        let outcome = if ok { "Ok" } else { "Failed" };
        self.calls.get_or_create(&CallLabels { operation, outcome }).inc();
    }

    pub(super) fn blocked(&self, objects: usize) {
        self.blocked.inc_by(objects as u64);
    }

    pub(super) fn unreadable_inventory(&self, error: InventoryError) {
        self.unreadable_inventories.get_or_create(&FaultLabel { fault: error.as_str() }).inc();
    }

    /// Sets the gauges after KCP's catalog was recomputed.
    pub(super) fn update_gauges(&self, left_out: &[Omission], held: &HeldRemovals, lost: Option<&LostReleases>) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        for &fault in OmissionReason::VARIANTS {
            let omissions = left_out.iter().filter(|omission| omission.reason.as_str() == fault).count();
            self.left_out.get_or_create(&FaultLabel { fault }).set(count(omissions));
        }
        self.held_modules.set(count(held.modules.len()));
        self.held_runtimes.set(count(held.runtimes));
        self.lost.set(i64::from(lost.is_some()));
    }

    /// Counts runtimes that a change of the catalog enqueued.
    pub fn count_enqueued(&self, runtimes: usize) {
        self.enqueued.inc_by(runtimes as u64);
    }
}
