//! Shards of a runtime table: acquisition, release, and steps under the lock of one shard.
//!
//! Locks are acquired in this order: `placing`, which serializes changes of the places of Kymas; the shards, ascending;
//! one of the others, such as that of the agenda, which are held for single operations.
//!
//! A Kyma is in the queue of the agenda only while it is in a shard that is held, and the directory names that shard.

use std::mem;

use parking_lot::{Mutex, MutexGuard};
use tidewatch_api::{
    identity::{Instance, RuntimeId},
    key::KymaKey,
    shard::{ShardCount, ShardId},
};
use tidewatch_cluster::leader::WriteFence;
use tokio::time::Instant;

use super::{Inner, PlacementError, RuntimeTable, directory::Directory, state::State};
#[cfg(any(test, feature = "testing"))]
use super::{Metrics, Settings};
use crate::{Tenure, Tenures};

/// Place of the state of one shard; `None` while it is not held.
pub(super) type Slot = Mutex<Option<State>>;

impl RuntimeTable {
    /// Creates a table that holds all shards since `started`, for a test that serves the whole fleet while `fence` is open.
    #[cfg(any(test, feature = "testing"))]
    pub fn holding_all(
        settings: Settings,
        metrics: Metrics,
        instance: Instance,
        fence: &WriteFence,
        started: Instant,
    ) -> Self {
        let shards = ShardCount::default();
        let table = Self::new(shards, settings, metrics);
        shards.shards().for_each(|shard| table.acquire(shard, instance, fence, started));
        table
    }

    /// Begins to serve the runtimes of a shard, without any Kymas and not synced; a shard that is held already is released
    /// first. `instance` is new for each acquisition of a shard, writes are permitted until `fence` closes, and `started` is
    /// the time of the acquisition.
    pub fn acquire(&self, shard: ShardId, instance: Instance, fence: &WriteFence, started: Instant) {
        let _placing = self.placing();
        self.release_placing(shard);
        let number = self.0.shared.generation();
        let tenure = Tenure::new(shard, number, fence, started, self.0.settings.request_deadline);
        let state = State::new(instance, started, tenure.clone(), self.0.settings, self.0.shared.clone());
        let mut slot = self.lock(shard);
        self.directory().hold(shard, Some(tenure));
        *slot = Some(state);
        drop(slot);
        self.share_rates();
    }

    /// Ends the service of a shard, if it is held: when this returns, no write of its reconciles leaves any more, these are
    /// cancelled and their end has no effect, and its queued work, ledgers and forwarded events are gone. Returns its Kymas.
    /// The departure of its runtimes is not reported: another replica serves them.
    pub fn release(&self, shard: ShardId) -> Vec<KymaKey> {
        let _placing = self.placing();
        let released = self.release_placing(shard);
        self.share_rates();
        released
    }

    /// Begins no reconcile of a shard any more, and waits until those in progress have ended: then each of their requests is
    /// answered. Requests of its runtimes are accepted until the release. Returns at once if the shard is not held.
    pub async fn drain(&self, shard: ShardId) {
        let tenure = self.with(shard, |state, _| {
            state.tenure.drain();
            state.tenure.clone()
        });
        if let Some(tenure) = tenure {
            tenure.drained().await;
        }
    }

    fn release_placing(&self, shard: ShardId) -> Vec<KymaKey> {
        let tenure = self.directory().hold(shard, None);
        if let Some(tenure) = tenure {
            tenure.fence.close();
        }
        let mut slot = self.lock(shard);
        let Some(state) = slot.take() else { return Vec::new() };
        let kymas = state.kymas.into_keys();
        // One by one: other shards use the agenda meanwhile.
        kymas.iter().for_each(|kyma| self.0.shared.agenda().remove(kyma));
        drop(slot);
        self.publish(Vec::new());
        state.cancellation.cancel();
        for runtime in state.runtimes.keys() {
            if let Some(mut outbox) = self.0.shared.outbox_for(false) {
                outbox.forget(runtime);
            }
        }
        if let Some(outbox) = self.0.shared.outbox_for(false) {
            self.update_target_metrics(&outbox);
        }
        kymas
    }

    /// Shards that this process holds, in order.
    pub fn held(&self) -> Vec<ShardId> {
        self.directory().held()
    }

    /// Shards that this process may speak for now, with the instance of each: they are held with an open fence, and all of
    /// their Kymas are placed.
    pub fn served(&self) -> Vec<(ShardId, Instance)> {
        let served = |shard: ShardId| {
            let slot = self.lock(shard);
            let state = slot.as_ref().filter(|state| state.synced && state.tenure.fence.is_open())?;
            Some((shard, state.instance))
        };
        self.held().into_iter().filter_map(served).collect()
    }

    /// Number of Kymas of each shard of the fleet, in order, of shards that are held elsewhere too.
    pub fn kymas_by_shard(&self) -> Vec<usize> {
        self.directory().kymas_by_shard()
    }

    /// Shard of a runtime, or of a Kyma without a runtime id by the uid of its object.
    pub fn shard_of(&self, runtime: Option<&RuntimeId>, uid: &str) -> ShardId {
        let shards = self.0.shared.shards;
        runtime.map_or_else(|| shards.of_kyma(uid), |runtime| shards.of_runtime(runtime))
    }

    /// True if the Kyma is placed in a shard that this process does not hold.
    pub fn is_elsewhere(&self, key: &KymaKey) -> bool {
        let directory = self.directory();
        directory.shard_of(key).is_some_and(|shard| directory.tenure(shard).is_none())
    }

    /// Returns the tenures of Kymas, for work on their runtimes that other queues hold.
    pub fn tenures(&self) -> Tenures {
        let table = self.clone();
        Box::new(move |key| table.directory().tenure_of(key).cloned().unwrap_or_else(Tenure::ended))
    }

    /// Sets this process's part of the fleet's rates, by the shards that it holds.
    fn share_rates(&self) {
        let held = self.directory().held().len();
        self.trust().set_share(held, self.0.shared.shards);
    }

    /// Runs one step under the lock of a shard, with the time just before it; `None` if the shard is not held. Wakes a
    /// waiting worker if work is ready or the earliest due time became earlier.
    pub(super) fn with<T>(&self, shard: ShardId, step: impl FnOnce(&mut State, Instant) -> T) -> Option<T> {
        let now = Instant::now();
        let mut slot = self.lock(shard);
        let state = slot.as_mut()?;
        let result = step(state, now);
        let departed = mem::take(&mut state.departed);
        drop(slot);
        self.publish(departed);
        Some(result)
    }

    /// Runs one step under the locks of a shard and of another one. The states are `None` of shards that are not held.
    pub(super) fn with_both<T>(
        &self,
        from: Option<ShardId>,
        to: ShardId,
        step: impl FnOnce(Option<&mut State>, Option<&mut State>, Instant) -> T,
    ) -> T {
        let now = Instant::now();
        let (mut first, mut second);
        match from.filter(|from| *from != to) {
            Some(from) if from < to => (first, second) = (Some(self.lock(from)), self.lock(to)),
            Some(from) => {
                second = self.lock(to);
                first = Some(self.lock(from));
            }
            None => (first, second) = (None, self.lock(to)),
        }
        let result = step(first.as_mut().and_then(|slot| slot.as_mut()), second.as_mut(), now);
        let states = first.iter_mut().filter_map(|slot| slot.as_mut()).chain(second.as_mut());
        let departed = states.flat_map(|state| mem::take(&mut state.departed)).collect();
        drop((first, second));
        self.publish(departed);
        result
    }

    /// Runs one step for a request of a runtime.
    pub(super) fn with_runtime<T>(
        &self,
        runtime: &RuntimeId,
        step: impl FnOnce(&mut State, Instant) -> Result<T, PlacementError>,
    ) -> Result<T, PlacementError> {
        self.with(self.0.shared.shards.of_runtime(runtime), step).unwrap_or(Err(PlacementError::Elsewhere))
    }

    /// Runs one step for a Kyma, under the lock of its shard; `None` if the Kyma is unknown, or its shard is not held.
    pub(super) fn with_kyma<T>(&self, key: &KymaKey, step: impl FnOnce(&mut State, Instant) -> T) -> Option<T> {
        let mut step = Some(step);
        let mut shard = self.directory().shard_of(key)?;
        loop {
            let found = self.with(shard, |state, now| {
                state.kymas.get(key)?;
                Some((step.take()?)(state, now))
            });
            if let Some(Some(result)) = found {
                return Some(result);
            }
            // It may have moved in between; a move changes the directory under the locks of both shards.
            let current = self.directory().shard_of(key)?;
            if mem::replace(&mut shard, current) == current {
                return None;
            }
        }
    }

    /// Reports departed runtimes after a step, updates metrics, and wakes workers for what the step has put into the agenda: here,
    /// and in no other place.
    pub(super) fn publish(&self, departed: Vec<RuntimeId>) {
        let mut agenda = self.0.shared.agenda();
        let needs_worker = agenda.queue.needs_worker();
        let has_new_reports = agenda.reports.announce();
        self.0.metrics.queue(&agenda.queue);
        drop(agenda);
        for runtime in departed {
            // Without an open port there is no receiver.
            let _ = self.0.departures.send(runtime);
        }
        if let (true, Some(added)) = (has_new_reports, self.0.report_added.get()) {
            added();
        }
        if needs_worker {
            self.0.notify.notify_one();
        }
    }

    pub(super) fn lock(&self, shard: ShardId) -> MutexGuard<'_, Option<State>> {
        #[cfg(test)]
        self.0.locked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // A shard is below the number of shards.
        let slots = &self.0.slots;
        slots[shard.index() % slots.len()].lock()
    }

    pub(super) fn placing(&self) -> MutexGuard<'_, ()> {
        self.0.placing.lock()
    }

    pub(super) fn directory(&self) -> MutexGuard<'_, Directory> {
        self.0.directory.lock()
    }
}

impl Inner {
    /// Slots of all shards, none of which is held.
    pub(super) fn slots(shards: ShardCount) -> Box<[Slot]> {
        shards.shards().map(|_| Slot::default()).collect()
    }
}
