//! Forwarding under the runtime table's lock.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::Arc,
};

use rustls_pki_types::CertificateDer;
use tidewatch_shared::{
    event::Reason,
    identity::{Epoch, RuntimeId},
};
use tokio::{sync::Notify, time, time::Instant};

use super::{
    RuntimeTable,
    state::{Entry, State},
};
use crate::fleet::{
    EventsRecord, ForwardedEvent, Snapshot,
    forward::{Delivery, DeliveryOutcome, Health, Outbox, Routes, Settlement, Target},
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
        touched.extend(entry.runtime.watches_pending_forward().into_iter().map(Arc::from));
    }
    let leaf = leaf.filter(|_| !recorded.forwards.is_empty()).map(|leaf| Arc::new(leaf.clone()));
    for ForwardedEvent { id: event_id, watch, event } in std::mem::take(&mut recorded.forwards) {
        let watch: Arc<str> = watch.into();
        touched.insert(watch.clone());
        let Some(event) = event else { continue };
        let put = leaf.as_ref().map(|leaf| outbox.put(id, &watch, leaf, event));
        if let Some(Ok(())) = put {
            outbox.found_room(id, &watch, epoch, event_id.sequence);
            changes.put.push(watch);
            continue;
        }
        // A lower sequence belongs to a delayed duplicate; the agent no longer awaits its response.
        if let Some(leaf) = leaf.as_ref().filter(|_| event_id.sequence >= recorded.answered_below) {
            outbox.block(id, &watch, leaf, epoch, event_id.sequence);
        }
        // The agent keeps a refused event and retries it with backoff.
        recorded.refused.push((event_id, Reason::UnknownWatch));
        changes.without_room.push(watch);
    }
    for watch in touched {
        progress(outbox, entry, id, &watch);
    }
    changes
}

fn progress(outbox: &mut Outbox<Snapshot>, entry: &mut Entry, id: &RuntimeId, watch: &str) {
    if let Some(Settlement { accepted, except }) = outbox.progress(id, watch, || entry.runtime.snapshot()) {
        entry.runtime.forwarded(&accepted, watch, &except);
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
        self.0.forward.due.notify_one();
    }

    /// Returns a target of a manager.
    #[must_use]
    pub fn target_of(&self, manager: &str) -> Option<Arc<Target>> {
        self.lock().outbox.routes().of_manager(manager).cloned()
    }

    /// Waits for the next event to send to another manager. Supports one caller, which passes the delivery to
    /// [`Self::forwarded`]. Cancel safe.
    pub async fn next_delivery(&self) -> Delivery {
        loop {
            let mut wakeup = pin!(self.0.forward.due.notified());
            // Registered before the check, so that no event put in between is missed.
            wakeup.as_mut().enable();
            let now = Instant::now();
            let (next, wake) = {
                let outbox = &mut self.lock().outbox;
                (outbox.take(now), outbox.wake(now))
            };
            match (next, wake) {
                (Some(delivery), _) => return delivery,
                (None, None) => wakeup.await,
                (None, Some(at)) => {
                    // Check again after a timeout as well as after a notification.
                    let _ = time::timeout_at(at, wakeup).await;
                }
            }
        }
    }

    /// Completes a delivery: settles events that the manager took, and schedules a retry for failures.
    pub fn forwarded(&self, delivery: &Delivery, outcome: DeliveryOutcome) {
        let now = Instant::now();
        let mut state = self.lock();
        let result = state.outbox.complete(delivery, outcome, now);
        // A target that no Watcher names any more has no metrics.
        if state.outbox.routes().targets().any(|named| *named == delivery.target) {
            let metrics = &self.0.metrics.forward;
            metrics.ended(&delivery.target, outcome, result.gave_up);
            metrics.objects(
                &delivery.target,
                state.outbox.objects(&delivery.target),
                state.outbox.parked(&delivery.target),
            );
        }
        let key = state.key_of(delivery.runtime()).ok();
        let State { outbox, kymas, .. } = &mut *state;
        if let Some(entry) = key.and_then(|key| kymas.get_mut(&key)) {
            progress(outbox, entry, delivery.runtime(), delivery.watch());
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
            self.0.metrics.forward.objects(target, state.outbox.objects(target), state.outbox.parked(target));
        }
    }

    /// Updates the metrics after a request and wakes the sender.
    pub(super) fn record_outbox_changes(&self, state: &State, changes: &OutboxChanges) {
        let metrics = &self.0.metrics.forward;
        let routes = state.outbox.routes();
        changes.without_room.iter().filter_map(|watch| routes.of(watch)).for_each(|target| metrics.no_room(target));
        let targets: BTreeSet<_> = changes.put.iter().filter_map(|watch| routes.of(watch)).collect();
        for target in &targets {
            metrics.objects(target, state.outbox.objects(target), state.outbox.parked(target));
        }
        if !targets.is_empty() {
            self.0.forward.due.notify_one();
        }
    }
}
