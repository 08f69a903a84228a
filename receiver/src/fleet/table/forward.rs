//! Forwarding under the runtime table's lock.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rustls_pki_types::CertificateDer;
use tidewatch_shared::{
    event::Reason,
    identity::{Epoch, RuntimeId},
};
use tokio::{sync::Notify, time::Instant};

use super::{
    RuntimeTable,
    state::{Entry, State},
};
use crate::fleet::{
    EventsRecord, ForwardedEvent, Snapshot,
    due::next_due,
    forward::{Delivery, DeliveryOutcome, Health, Outbox, QueueKey, Routes, Settlement, Target},
};

/// Notifications for the sender and for the Watchers' conditions.
#[derive(Default)]
pub(super) struct Wakeups {
    /// A delivery may be due.
    due: Notify,
    /// The health of a service changed.
    health_changed: Notify,
}

/// Watches with queues that a request changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OutboxChanges {
    put: Vec<Arc<str>>,
    without_room: Vec<Arc<str>>,
}

/// Puts the forwarded events of a request into the outbox and refuses those that find no room.
pub(super) fn take(
    outbox: &mut Outbox<Snapshot>,
    entry: &mut Entry,
    id: &RuntimeId,
    epoch: Epoch,
    recorded: &mut EventsRecord,
    leaf: Option<&CertificateDer<'static>>,
) -> OutboxChanges {
    let mut changes = OutboxChanges::default();
    let mut touched: BTreeSet<_> = outbox.answered_below(id, epoch, recorded.answered_below).into_iter().collect();
    if recorded.counts.forwards_unblocked {
        touched.extend(entry.runtime.watches_pending_forward().map(|watch| (id.clone(), watch.into())));
    }
    let leaf = leaf.filter(|_| !recorded.forwards.is_empty()).map(|leaf| Arc::new(leaf.clone()));
    for ForwardedEvent { id: event_id, watch, event } in std::mem::take(&mut recorded.forwards) {
        let key: QueueKey = (id.clone(), watch.into());
        touched.insert(key.clone());
        let Some(event) = event else { continue };
        let put = leaf.as_ref().map(|leaf| outbox.put(&key, leaf, event));
        if let Some(Ok(())) = put {
            outbox.found_room(&key, epoch, event_id.sequence);
            changes.put.push(key.1);
            continue;
        }
        changes.without_room.push(key.1.clone());
        // A lower sequence belongs to a delayed duplicate; the agent no longer awaits its response.
        if let Some(leaf) = leaf.as_ref().filter(|_| event_id.sequence >= recorded.answered_below) {
            outbox.block(key, leaf, epoch, event_id.sequence);
        }
        // The agent keeps a refused event and retries it with backoff.
        recorded.refused.push((event_id, Reason::UnknownWatch));
    }
    for key in touched {
        progress(outbox, entry, &key);
    }
    changes
}

fn progress(outbox: &mut Outbox<Snapshot>, entry: &mut Entry, key: &QueueKey) {
    if let Some(Settlement { accepted, except }) = outbox.progress(key, || entry.runtime.snapshot()) {
        entry.runtime.forwarded(&accepted, &key.1, &except);
    }
}

impl RuntimeTable {
    /// Replaces the targets of forwarded watches. Call it before placing a plan that names those watches.
    pub fn set_routes(&self, routes: Routes) {
        let routes = Arc::new(routes);
        let mut state = self.lock();
        let before = state.outbox.routes().clone();
        state.outbox.set_routes(routes.clone());
        self.update_target_metrics(&state);
        for target in before.targets().filter(|target| routes.targets().all(|still| still != *target)) {
            self.0.metrics.forward.forget(target);
        }
        drop(state);
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
    #[must_use]
    pub fn target_of(&self, manager: &str) -> Option<Arc<Target>> {
        self.lock().outbox.routes().targets().find(|target| target.manager() == manager).cloned()
    }

    /// Waits for the next event to send to another manager. Supports one caller, which passes the delivery to
    /// [`Self::forwarded`]. Cancel safe.
    pub async fn next_delivery(&self) -> Delivery {
        let take = || {
            let now = Instant::now();
            let outbox = &mut self.lock().outbox;
            (outbox.take(now), outbox.wake(now))
        };
        next_due(&self.0.forward.due, take).await
    }

    /// Completes a delivery: settles events that the manager took, and schedules a retry for failures.
    pub fn forwarded(&self, delivery: &Delivery, outcome: DeliveryOutcome) {
        let now = Instant::now();
        let mut state = self.lock();
        let result = state.outbox.complete(delivery, outcome, now);
        // A target that no Watcher names any more has no metrics.
        if state.outbox.routes().targets().any(|named| *named == delivery.target) {
            self.0.metrics.forward.ended(&delivery.target, outcome, result.gave_up);
            self.count_objects(&state, &delivery.target);
        }
        let key = state.key_of(delivery.runtime()).ok();
        let State { outbox, kymas, .. } = &mut *state;
        if let Some(entry) = key.and_then(|key| kymas.get_mut(&key)) {
            progress(outbox, entry, &delivery.key);
        }
        drop(state);
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

    /// Returns target and health of each forwarded watch, by the watch's name.
    #[must_use]
    pub fn forward_health(&self) -> BTreeMap<Arc<str>, (Arc<Target>, Health)> {
        self.lock().outbox.health()
    }

    /// Waits until the health of a service changes. Supports one caller.
    pub async fn forward_health_changed(&self) {
        self.0.forward.health_changed.notified().await;
    }

    /// Updates the metrics of all targets after events were dropped or moved.
    pub(super) fn update_target_metrics(&self, state: &State) {
        for target in state.outbox.routes().targets() {
            self.count_objects(state, target);
        }
    }

    fn count_objects(&self, state: &State, target: &Target) {
        self.0.metrics.forward.objects(target, state.outbox.objects(target), state.outbox.parked(target));
    }

    /// Updates the metrics after a request and wakes the sender.
    pub(super) fn record_outbox_changes(&self, state: &State, changes: &OutboxChanges) {
        let metrics = &self.0.metrics.forward;
        let routes = state.outbox.routes();
        changes.without_room.iter().filter_map(|watch| routes.of(watch)).for_each(|target| metrics.no_room(target));
        let targets: BTreeSet<_> = changes.put.iter().filter_map(|watch| routes.of(watch)).collect();
        for target in &targets {
            self.count_objects(state, target);
        }
        if !targets.is_empty() {
            self.0.forward.due.notify_one();
        }
    }
}
