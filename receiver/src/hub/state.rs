//! What the one lock holds.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use tidewatch_shared::{
    event,
    heartbeat::Heartbeat,
    identity::{Epoch, RuntimeId},
    plan::Plan,
};
use tokio::time::Instant;

use super::{
    Unplaced, View,
    job::Begun,
    stamps::{Stamps, Told},
};
use crate::{
    fleet::{Beat, Planned, Recorded, Runtime},
    key::KymaKey,
    queue::{Drift, Later, Outcome, Priority, Queue, Wanted},
};

/// A Kyma and what is known of its runtime.
struct Placed {
    id: Option<RuntimeId>,
    /// Tells one life of a Kyma's name from the next: a pass that began in an earlier one settles nothing.
    generation: u64,
    runtime: Runtime,
}

pub(super) struct State {
    pub(super) synced: bool,
    kymas: HashMap<KymaKey, Placed>,
    runtimes: HashMap<RuntimeId, BTreeSet<KymaKey>>,
    pub(super) queue: Queue<KymaKey>,
    pub(super) stamps: Option<Stamps>,
    /// Most runtimes have the same plan.
    planned: Option<Arc<Planned>>,
    generations: u64,
}

impl State {
    pub(super) fn new(slots: usize, seed: u64) -> Self {
        Self {
            synced: false,
            kymas: HashMap::new(),
            runtimes: HashMap::new(),
            queue: Queue::new(slots, seed),
            stamps: None,
            planned: None,
            generations: 0,
        }
    }

    pub(super) fn place(&mut self, key: KymaKey, id: Option<RuntimeId>, plan: Arc<Plan>, now: Instant) {
        let planned = self.planned(plan);
        if let Some(placed) = self.kymas.get_mut(&key).filter(|placed| placed.id == id) {
            let missing = placed.runtime.replan(planned, now);
            self.queue.want(&key, Wanted::new(missing, Priority::Catalog), now);
            return;
        }
        self.unindex(&key);
        if let Some(id) = &id {
            self.runtimes.entry(id.clone()).or_default().insert(key.clone());
        }
        self.generations += 1;
        self.queue.insert(key.clone());
        let runtime = Runtime::new(planned, now);
        self.kymas.insert(key, Placed { id, generation: self.generations, runtime });
    }

    pub(super) fn remove(&mut self, key: &KymaKey) {
        self.unindex(key);
        self.kymas.remove(key);
        self.queue.remove(key);
    }

    pub(super) fn runtime(&self, key: &KymaKey) -> Option<&Runtime> {
        self.kymas.get(key).map(|placed| &placed.runtime)
    }

    pub(super) fn events(
        &mut self,
        id: &RuntimeId,
        epoch: Epoch,
        created: i64,
        events: Vec<event::Received>,
        now: Instant,
    ) -> Result<Recorded, Unplaced> {
        let key = self.key_of(id)?;
        let stamped = if self.stamps.is_some() { events.iter().flatten().map(Told::of).collect() } else { Vec::new() };
        let placed = self.kymas.get_mut(&key).ok_or(Unplaced::Unknown)?;
        let mut recorded = placed.runtime.events(epoch, created, events);
        if let Some(wanted) = recorded.wanted.take() {
            self.queue.want(&key, wanted, now);
            if let Some(stamps) = &self.stamps {
                stamps.wanted(id, stamped);
            }
        }
        Ok(recorded)
    }

    pub(super) fn heartbeat(
        &mut self,
        id: &RuntimeId,
        created: i64,
        heartbeat: &Heartbeat,
        now: Instant,
    ) -> Result<(Beat, String), Unplaced> {
        let key = self.key_of(id)?;
        let placed = self.kymas.get_mut(&key).ok_or(Unplaced::Unknown)?;
        let mut beat = placed.runtime.heartbeat(heartbeat, created, now);
        if let Some(wanted) = beat.wanted.take() {
            self.queue.want(&key, wanted, now);
        }
        Ok((beat, placed.runtime.plan_revision().to_owned()))
    }

    /// Takes the next Kyma into work, with a snapshot of what is accepted.
    pub(super) fn begin(&mut self, now: Instant) -> Option<(KymaKey, Wanted, Begun)> {
        let (key, wanted) = self.queue.take(now)?;
        let placed = self.kymas.get(&key)?;
        let begun = Begun { generation: placed.generation, snapshot: placed.runtime.snapshot(), at: now };
        Some((key, wanted, begun))
    }

    /// Ends what [`Self::begin`] began. What began before `safe` is worked on once more then: until that time the last write of a
    /// receiver that died may still land.
    pub(super) fn finish(
        &mut self,
        key: &KymaKey,
        wanted: &Wanted,
        begun: &Begun,
        outcome: &Outcome,
        safe: Instant,
        now: Instant,
    ) {
        if let Some(placed) = self.kymas.get_mut(key).filter(|placed| placed.generation == begun.generation) {
            placed.runtime.ended(&begun.snapshot, outcome.ended.both(wanted.works).minus(outcome.failed));
        }
        self.queue.finish(key, wanted, outcome, now);
        if begun.at < safe {
            let again = Wanted { works: wanted.works, priority: Priority::Catalog, drift: Drift::All };
            self.queue.want_later(key, Later::Restart, safe, again, now);
        }
    }

    pub(super) fn view(&self, started: Instant, interval: Duration, now: Instant) -> Vec<View> {
        let view = |(key, placed): (&KymaKey, &Placed)| View {
            key: key.clone(),
            runtime: placed.id.clone(),
            ambiguous: placed.id.as_ref().is_some_and(|id| self.runtimes.get(id).is_some_and(|keys| keys.len() > 1)),
            path: placed.runtime.path(started, interval, now),
            last_seen: placed.runtime.pulse(now).map(|(_, ago)| ago),
            agent_version: placed.runtime.pulse(now).map(|(pulse, _)| pulse.agent_version.clone()),
            waiting: placed.runtime.pulse(now).map_or(0, |(pulse, _)| pulse.waiting),
            parked: placed.runtime.pulse(now).map_or(0, |(pulse, _)| pulse.parked),
            epochs: placed.runtime.epochs(),
            wanted: self.queue.wanted(key),
            in_work: self.queue.in_work(key),
        };
        self.kymas.iter().map(view).collect()
    }

    fn key_of(&self, id: &RuntimeId) -> Result<KymaKey, Unplaced> {
        if !self.synced {
            return Err(Unplaced::NotSynced);
        }
        let keys = self.runtimes.get(id).ok_or(Unplaced::Unknown)?;
        match keys.first() {
            Some(key) if keys.len() == 1 => Ok(key.clone()),
            Some(_) => Err(Unplaced::Ambiguous),
            None => Err(Unplaced::Unknown),
        }
    }

    fn unindex(&mut self, key: &KymaKey) {
        let Some(id) = self.kymas.get(key).and_then(|placed| placed.id.as_ref()) else { return };
        if let Some(keys) = self.runtimes.get_mut(id) {
            keys.remove(key);
            if keys.is_empty() {
                self.runtimes.remove(id);
            }
        }
    }

    fn planned(&mut self, plan: Arc<Plan>) -> Arc<Planned> {
        match &self.planned {
            Some(planned) if Arc::ptr_eq(planned.plan(), &plan) || *planned.plan() == plan => planned.clone(),
            _ => self.planned.insert(Arc::new(Planned::new(plan))).clone(),
        }
    }
}
