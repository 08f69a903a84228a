//! Forwarding: the outbox of all shards, changed under the lock of the runtime's shard.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tokio::{sync::Notify, time::Instant};

use super::{
    RuntimeTable,
    forwarded::{OutboxChanges, progress},
};
use crate::{
    Snapshot,
    due::next_due,
    forward::{Delivery, DeliveryOutcome, Health, Outbox, Routes, Target},
};

/// Notifications for the sender and for the Watchers' conditions.
#[derive(Default)]
pub(super) struct Wakeups {
    /// A delivery may be due.
    due: Notify,
    /// The health of a service changed.
    health_changed: Notify,
}

impl RuntimeTable {
    /// Replaces the targets of forwarded watches. Call it before placing a plan that names those watches.
    pub fn set_routes(&self, routes: Routes) {
        let routes = Arc::new(routes);
        let mut outbox = self.0.shared.outbox();
        let before = outbox.routes().clone();
        outbox.set_routes(routes.clone());
        self.update_target_metrics(&outbox);
        for target in before.targets().filter(|target| routes.targets().all(|still| still != *target)) {
            self.0.metrics.forward.forget(target);
        }
        drop(outbox);
        // The queues of these watches were dropped with their former routes. If their plans did not change meanwhile,
        // no agent lists them again by itself.
        let returned = |watch: &str| before.of(watch).is_none() && routes.of(watch).is_some();
        if routes.iter().any(|(watch, _)| returned(watch)) {
            self.in_chunks(|state, keys, _| {
                for key in keys {
                    if let Some(entry) = state.kymas.get_mut(key) {
                        entry.runtime.request_forwards(returned);
                    }
                }
            });
        }
        self.0.forward.due.notify_one();
    }

    /// Returns a target of a manager.
    pub fn target_of(&self, manager: &str) -> Option<Arc<Target>> {
        self.0.shared.outbox().routes().targets().find(|target| target.manager() == manager).cloned()
    }

    /// Waits for the next event to send to another manager. Supports one caller, which passes the delivery to
    /// [`Self::forwarded`]. Cancel safe.
    pub async fn next_delivery(&self) -> Delivery {
        let take = || {
            let now = Instant::now();
            let mut outbox = self.0.shared.outbox();
            (outbox.take(now), outbox.wake(now))
        };
        next_due(&self.0.forward.due, take).await
    }

    /// Completes a delivery: settles events that the manager took, and schedules a retry for failures.
    pub fn forwarded(&self, delivery: &Delivery, outcome: DeliveryOutcome) {
        let now = Instant::now();
        // Locked in the order of all requests. The outbox and the ledger of the watch are compared in one step.
        let mut slot = self.lock(self.shard_of(Some(delivery.runtime()), ""));
        let mut outbox = self.0.shared.outbox();
        let result = outbox.complete(delivery, outcome, now);
        // A target that no Watcher names any more has no metrics.
        if outbox.routes().targets().any(|named| *named == delivery.target) {
            self.0.metrics.forward.ended(&delivery.target, outcome, result.gave_up);
            self.count_objects(&outbox, &delivery.target);
        }
        if let Some(state) = slot.as_mut()
            && let Ok(key) = state.key_of(delivery.runtime())
            && let Some(entry) = state.kymas.get_mut(&key)
        {
            progress(&mut outbox, entry, &delivery.key);
        }
        drop(outbox);
        drop(slot);
        if result.gave_up {
            tracing::warn!(
                manager = delivery.target.manager(),
                service = %delivery.target.service(),
                runtime = %delivery.runtime(),
                ?outcome,
                "A manager refuses an event for good"
            );
        }
        if result.health_changed {
            self.0.forward.health_changed.notify_one();
        }
        self.0.forward.due.notify_one();
    }

    /// Returns the health of the target of each forwarded watch, by the watch's name, as the deliveries of this replica
    /// show it.
    pub fn forward_health(&self, now: Instant) -> BTreeMap<Arc<str>, Health> {
        self.0.shared.outbox().health(now)
    }

    /// Waits until the health of a service changes. Supports one caller.
    pub async fn forward_health_changed(&self) {
        self.0.forward.health_changed.notified().await;
    }

    /// Updates the metrics of all targets after events were dropped or moved.
    pub(super) fn update_target_metrics(&self, outbox: &Outbox<Snapshot>) {
        for target in outbox.routes().targets() {
            self.count_objects(outbox, target);
        }
    }

    fn count_objects(&self, outbox: &Outbox<Snapshot>, target: &Target) {
        self.0.metrics.forward.objects(target, outbox.objects(target), outbox.parked(target));
    }

    /// Updates the metrics after a request and wakes the sender.
    pub(super) fn record_outbox_changes(&self, changes: &OutboxChanges) {
        if *changes == OutboxChanges::default() {
            return;
        }
        let metrics = &self.0.metrics.forward;
        let outbox = self.0.shared.outbox();
        let routes = outbox.routes();
        changes.without_room.iter().filter_map(|watch| routes.of(watch)).for_each(|target| metrics.no_room(target));
        let targets: BTreeSet<_> = changes.put.iter().filter_map(|watch| routes.of(watch)).collect();
        for target in &targets {
            self.count_objects(&outbox, target);
        }
        if !targets.is_empty() {
            self.0.forward.due.notify_one();
        }
    }
}
