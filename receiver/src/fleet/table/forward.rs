//! What goes to other managers, in the hub's lock.

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
    Hub,
    state::{Placed, State},
};
use crate::fleet::{
    Forward, Recorded, Snapshot,
    forward::{Delivery, Health, Outbox, Outcome, Routes, Settled, Target},
};

/// Who is told of what.
#[derive(Default)]
pub(super) struct Notes {
    /// Something may be due.
    due: Notify,
    /// The health of a service moved.
    moved: Notify,
}

/// What a request brought for other managers, by watch.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Told {
    put: Vec<Arc<str>>,
    without_room: Vec<Arc<str>>,
}

/// Puts what a request brought for other managers into the outbox, and refuses what finds no room there.
pub(super) fn take(
    outbox: &mut Outbox<Snapshot>,
    placed: &mut Placed,
    id: &RuntimeId,
    epoch: Epoch,
    recorded: &mut Recorded,
    leaf: Option<&CertificateDer<'static>>,
) -> Told {
    let mut told = Told::default();
    let mut touched: BTreeSet<_> = outbox.heard(id, epoch, recorded.reached).into_iter().collect();
    if recorded.tally.joined {
        touched.extend(placed.runtime.unforwarded().into_iter().map(Arc::from));
    }
    let leaf = leaf.filter(|_| !recorded.forwards.is_empty()).map(|leaf| Arc::new(leaf.clone()));
    for Forward { id: event_id, watch, event } in std::mem::take(&mut recorded.forwards) {
        let watch: Arc<str> = watch.into();
        touched.insert(watch.clone());
        let Some(event) = event else { continue };
        let put = leaf.as_ref().map(|leaf| outbox.put(id, &watch, leaf, event));
        if let Some(Ok(())) = put {
            outbox.found_room(id, &watch, epoch, event_id.sequence);
            told.put.push(watch);
            continue;
        }
        // Below that it is an old request that came once more, and nobody waits for its answer.
        if let Some(leaf) = leaf.as_ref().filter(|_| event_id.sequence >= recorded.reached) {
            outbox.freeze(id, &watch, leaf, epoch, event_id.sequence);
        }
        // The agent keeps it, and tries again with backoff.
        recorded.refused.push((event_id, Reason::UnknownWatch));
        told.without_room.push(watch);
    }
    for watch in touched {
        progress(outbox, placed, id, &watch);
    }
    told
}

fn progress(outbox: &mut Outbox<Snapshot>, placed: &mut Placed, id: &RuntimeId, watch: &str) {
    if let Some(Settled { accepted, except }) = outbox.progress(id, watch, || placed.runtime.snapshot()) {
        placed.runtime.forwarded(&accepted, watch, &except);
    }
}

impl Hub {
    /// Replaces the targets of forwarded watches. To be called before the plan that names those watches.
    pub fn set_routes(&self, routes: Routes) {
        let routes = Arc::new(routes);
        let mut state = self.lock();
        let before = state.outbox.routes().clone();
        state.outbox.set_routes(routes.clone());
        self.tell_targets(&state);
        for target in before.targets().filter(|target| routes.targets().all(|still| still != *target)) {
            self.0.metrics.forward.forget(target);
        }
        drop(state);
        self.0.forward.due.notify_one();
    }

    /// A target of a manager.
    #[must_use]
    pub fn target_of(&self, manager: &str) -> Option<Arc<Target>> {
        self.lock().outbox.routes().of_manager(manager).cloned()
    }

    /// Waits for the next event that is to be sent to another manager. For one caller, which gives it to [`Self::forwarded`].
    /// Dropping the future loses nothing.
    pub async fn next_delivery(&self) -> Delivery {
        loop {
            let mut told = pin!(self.0.forward.due.notified());
            // Registered before looking, so that nothing that is put falls between.
            told.as_mut().enable();
            let now = Instant::now();
            let (next, wake) = {
                let outbox = &mut self.lock().outbox;
                (outbox.take(now), outbox.wake(now))
            };
            match (next, wake) {
                (Some(delivery), _) => return delivery,
                (None, None) => told.await,
                (None, Some(at)) => {
                    // Whichever it was, time or word, look again.
                    let _ = time::timeout_at(at, told).await;
                }
            }
        }
    }

    /// Ends a delivery: what has come to its manager is settled, and what failed is sent again with backoff.
    pub fn forwarded(&self, delivery: &Delivery, outcome: Outcome) {
        let now = Instant::now();
        let mut state = self.lock();
        let ended = state.outbox.ended(delivery, outcome, now);
        // Nothing is counted for a target that no Watcher names any more.
        if state.outbox.routes().targets().any(|named| *named == delivery.target) {
            let metrics = &self.0.metrics.forward;
            metrics.ended(&delivery.target, outcome, ended.gave_up);
            metrics.objects(
                &delivery.target,
                state.outbox.objects(&delivery.target),
                state.outbox.parked(&delivery.target),
            );
        }
        let key = state.key_of(delivery.runtime()).ok();
        let State { outbox, kymas, .. } = &mut *state;
        if let Some(placed) = key.and_then(|key| kymas.get_mut(&key)) {
            progress(outbox, placed, delivery.runtime(), delivery.watch());
        }
        drop(state);
        if ended.gave_up {
            tracing::warn!(
                manager = delivery.target.manager(),
                service = %delivery.target.service(),
                runtime = %delivery.runtime(),
                ?outcome,
                "A manager refuses an event for good"
            );
        }
        if ended.moved {
            self.0.forward.moved.notify_one();
        }
        self.0.forward.due.notify_one();
    }

    /// How the service of each forwarded watch does, by the watch's name.
    #[must_use]
    pub fn forward_health(&self) -> BTreeMap<Arc<str>, (Arc<Target>, Health)> {
        self.lock().outbox.health()
    }

    /// Waits until the health of a service moved. For one caller.
    pub async fn forward_health_moved(&self) {
        self.0.forward.moved.notified().await;
    }

    /// How much each target has left, after something went or moved elsewhere.
    pub(super) fn tell_targets(&self, state: &State) {
        for target in state.outbox.routes().targets() {
            self.0.metrics.forward.objects(target, state.outbox.objects(target), state.outbox.parked(target));
        }
    }

    /// Counts what a request brought, and wakes who sends it.
    pub(super) fn tell_forwarded(&self, state: &State, told: &Told) {
        let metrics = &self.0.metrics.forward;
        let routes = state.outbox.routes();
        told.without_room.iter().filter_map(|watch| routes.of(watch)).for_each(|target| metrics.no_room(target));
        let targets: BTreeSet<_> = told.put.iter().filter_map(|watch| routes.of(watch)).collect();
        for target in &targets {
            metrics.objects(target, state.outbox.objects(target), state.outbox.parked(target));
        }
        if !targets.is_empty() {
            self.0.forward.due.notify_one();
        }
    }
}
