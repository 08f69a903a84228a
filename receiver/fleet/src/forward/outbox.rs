//! All queues and lanes of forwarded events.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::{Epoch, RuntimeId};
use tidewatch_contract::v2::Event;
use tidewatch_kit::random::Random;
use tokio::time::Instant;

use super::{
    DeliveryOutcome, Health, Routes, Target,
    lane::{Disposition, Lane, MAX_REFUSALS, PARK_PERIOD, QueueKey, park_delay},
    watch_queue::{LanePosition, Settlement, WatchQueue},
};

/// Capacity of the outbox.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Objects for one service; a runtime may hold a sixteenth of the free places.
    pub(crate) per_service: usize,
    /// Objects of one watch of one runtime.
    pub(crate) per_watch: usize,
    /// Objects refused by one service that await a retry; a runtime may hold a sixteenth of the free places. Beyond its
    /// share the queue of a runtime backs off, and without any place the service is treated as failing.
    pub(crate) parked: usize,
}

impl Default for Limits {
    fn default() -> Self {
        // An object takes about 300 bytes: 20 MB for a service that is down while everything changes. Parked objects
        // are retried every five minutes: three or four requests per second to a service that keeps refusing.
        Self { per_service: 65_536, per_watch: 4_096, parked: 1_024 }
    }
}

/// The outbox has no room for the event, or no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoomError;

/// One request to a manager.
#[derive(Clone, Debug)]
pub struct Delivery {
    pub(crate) key: QueueKey,
    generation: u64,
    taken: Instant,
    /// The object.
    pub event: Arc<Event>,
    /// The manager and its service.
    pub target: Arc<Target>,
    /// The runtime's certificate.
    pub leaf: Arc<CertificateDer<'static>>,
}

/// Effects of a completed delivery.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct DeliveryResult {
    /// The event was given up after repeated refusals about its content.
    pub(crate) gave_up: bool,
    /// The health of the service changed.
    pub(crate) health_changed: bool,
}

/// Pending forwarded events, see the parent module. Generic over the watermark `S`, so that tests can replace the
/// runtime table.
#[derive(Debug)]
pub(crate) struct Outbox<S> {
    limits: Limits,
    routes: Arc<Routes>,
    queues: BTreeMap<QueueKey, WatchQueue<S>>,
    lanes: BTreeMap<Arc<Target>, Lane>,
    /// Target served last; the round-robin continues behind it.
    last_served: Option<Arc<Target>>,
    generations: u64,
    random: Random,
}

impl<S> Outbox<S> {
    pub(crate) fn new(limits: Limits, seed: u64) -> Self {
        Self {
            limits,
            routes: Arc::default(),
            queues: BTreeMap::new(),
            lanes: BTreeMap::new(),
            last_served: None,
            generations: 0,
            random: Random::new(seed),
        }
    }

    pub(crate) fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    /// Replaces the routes: queues without a route are dropped, others move to their new lane, where their refusals are
    /// reset.
    pub(crate) fn set_routes(&mut self, routes: Arc<Routes>) {
        if self.routes == routes {
            return;
        }
        let before = std::mem::replace(&mut self.routes, routes);
        let routes = self.routes.clone();
        self.queues.retain(|(_, watch), _| routes.of(watch).is_some());
        let targets: BTreeSet<_> = routes.targets().cloned().collect();
        self.lanes.retain(|target, _| targets.contains(target));
        self.lanes.values_mut().for_each(Lane::clear);
        for target in targets {
            self.lanes.entry(target).or_default();
        }
        for (key, queue) in &mut self.queues {
            queue.position = LanePosition::Idle;
            if before.of(&key.1) != routes.of(&key.1) {
                queue.reset_refusals();
            }
            if let Some(lane) = routes.of(&key.1).and_then(|target| self.lanes.get_mut(target)) {
                lane.shares.change(&key.0, 0, queue.len());
                lane.parked.change(&key.0, 0, queue.parked());
                reposition(lane, key, queue);
            }
        }
    }

    /// Puts an event of a runtime's watch, with the certificate that the runtime presented.
    pub(crate) fn put(
        &mut self,
        key: &QueueKey,
        leaf: &Arc<CertificateDer<'static>>,
        event: Event,
    ) -> Result<(), NoRoomError> {
        let target = self.routes.of(&key.1).ok_or(NoRoomError)?;
        let lane = self.lanes.get_mut(target).ok_or(NoRoomError)?;
        let (objects, known) = self.queues.get(key).map_or((0, false), |queue| (queue.len(), queue.contains(&event)));
        if !known && (objects >= self.limits.per_watch || !lane.shares.admits(&key.0, self.limits.per_service)) {
            return Err(NoRoomError);
        }
        lane.shares.change(&key.0, 0, usize::from(!known));
        let queue = get_or_create(&mut self.queues, &mut self.generations, key, leaf);
        queue.put(event);
        reposition(lane, key, queue);
        Ok(())
    }

    /// Blocks the settlement of an epoch because an event found no room, until the agent has seen the refusal.
    pub(crate) fn block(&mut self, key: &QueueKey, leaf: &Arc<CertificateDer<'static>>, epoch: Epoch, sequence: u64) {
        get_or_create(&mut self.queues, &mut self.generations, key, leaf).block(epoch, sequence);
    }

    /// Removes the block of an event that found room now; the agent need not have seen its earlier refusal.
    pub(crate) fn found_room(&mut self, key: &QueueKey, epoch: Epoch, sequence: u64) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.found_room(epoch, sequence);
        }
    }

    /// Releases refusals below `first`, the lowest sequence of a new request. Returns the released queues; call
    /// [`Self::progress`] for each.
    pub(crate) fn answered_below(&mut self, runtime: &RuntimeId, epoch: Epoch, first: u64) -> Vec<QueueKey> {
        let from = (runtime.clone(), Arc::from(""));
        let mine = self.queues.range_mut(from..).take_while(|((id, _), _)| id == runtime);
        let released = mine.filter_map(|(key, queue)| queue.answered_below(epoch, first).then(|| key.clone()));
        released.collect()
    }

    /// Returns the new settlement of a watch, if any; `accepted` returns the current watermark. Call it after every
    /// put, release and completion.
    pub(crate) fn progress(&mut self, key: &QueueKey, accepted: impl FnOnce() -> S) -> Option<Settlement<S>> {
        self.routes.of(&key.1)?;
        let Some(queue) = self.queues.get_mut(key) else {
            // The outbox holds nothing of this watch.
            return Some(Settlement { accepted: accepted(), except: Vec::new() });
        };
        let settled = queue.progress(accepted)?;
        if queue.is_empty() {
            self.queues.remove(key);
        }
        Some(settled)
    }

    /// Forgets a runtime.
    pub(crate) fn forget(&mut self, runtime: &RuntimeId) {
        let from = (runtime.clone(), Arc::from(""));
        let mine = self.queues.range(from..).map(|(key, _)| key).take_while(|(id, _)| id == runtime);
        for key in mine.cloned().collect::<Vec<_>>() {
            let Some(queue) = self.queues.remove(&key) else { continue };
            if let Some(lane) = self.routes.of(&key.1).and_then(|target| self.lanes.get_mut(target)) {
                lane.shares.change(runtime, queue.len(), 0);
                lane.parked.change(runtime, queue.parked(), 0);
                lane.forget(&key);
            }
        }
    }

    /// Takes the next request: services round-robin, and within a service its queues round-robin.
    pub(crate) fn take(&mut self, now: Instant) -> Option<Delivery> {
        let may_send = |(target, lane): (&Arc<Target>, &Lane)| lane.may_send(now).then(|| target.clone());
        let all: Vec<_> = match &self.last_served {
            Some(last) => {
                let after = self.lanes.range::<Arc<Target>, _>((Excluded(last), Unbounded));
                after.chain(self.lanes.range::<Arc<Target>, _>(..=last)).filter_map(may_send).collect()
            }
            None => self.lanes.iter().filter_map(may_send).collect(),
        };
        for target in all {
            if let Some(delivery) = self.take_for(&target, now) {
                self.last_served = Some(target);
                return Some(delivery);
            }
        }
        None
    }

    fn take_for(&mut self, target: &Arc<Target>, now: Instant) -> Option<Delivery> {
        let lane = self.lanes.get_mut(target)?;
        while let Some(key) = lane.take_due(now) {
            if let Some(queue) = self.queues.get_mut(&key) {
                queue.position = LanePosition::Idle;
                lane.parked.change(&key.0, queue.unpark(now), 0);
                reposition(lane, &key, queue);
            }
        }
        while let Some(key) = lane.queue.pop_front() {
            let Some(queue) = self.queues.get_mut(&key) else { continue };
            queue.position = LanePosition::Idle;
            let taken = queue.take();
            let generation = queue.generation;
            let leaf = queue.leaf.clone();
            reposition(lane, &key, queue);
            let Some(event) = taken else { continue };
            lane.in_flight += 1;
            return Some(Delivery { key, generation, taken: now, event, target: target.clone(), leaf });
        }
        None
    }

    /// Completes a delivery; call [`Self::progress`] for its watch afterwards.
    pub(crate) fn complete(&mut self, delivery: &Delivery, outcome: DeliveryOutcome, now: Instant) -> DeliveryResult {
        let Self { limits, queues, lanes, routes, random, .. } = self;
        let target = routes.of(&delivery.key.1);
        let lane = target.and_then(|target| lanes.get_mut(target));
        let queue = queues.get_mut(&delivery.key).filter(|queue| queue.generation == delivery.generation);
        let mut result = RefusalResult { outcome, refusing: None, gave_up: false };
        if let (Some(queue), Some(lane)) = (queue, lane) {
            let objects = queue.len();
            let parked = queue.parked();
            match outcome {
                DeliveryOutcome::Delivered => queue.complete(&delivery.event),
                DeliveryOutcome::Refused(status) if target == Some(&delivery.target) => {
                    let room = Room {
                        all: limits.parked.saturating_sub(lane.parked.total()),
                        of_runtime: lane.parked.admits(&delivery.key.0, limits.parked),
                    };
                    result = refuse(queue, delivery, status, room, random, now);
                }
                // A refusal by a former service does not count against the current one.
                DeliveryOutcome::Refused(_) | DeliveryOutcome::Failed(_) => queue.retry(&delivery.event),
            }
            lane.shares.change(&delivery.key.0, objects, queue.len());
            lane.parked.change(&delivery.key.0, parked, queue.parked());
            reposition(lane, &delivery.key, queue);
        }
        let RefusalResult { outcome, refusing, gave_up } = result;
        let lane = lanes.get_mut(&delivery.target);
        let health_changed = lane.is_some_and(|lane| lane.complete(outcome, refusing, delivery.taken, random, now));
        DeliveryResult { gave_up, health_changed }
    }

    /// Time of the next possible request, apart from new events and responses.
    pub(crate) fn wake(&self, now: Instant) -> Option<Instant> {
        self.lanes.values().filter_map(|lane| lane.wake(now)).min()
    }

    /// Number of objects that await a retry after the target refused them.
    pub(crate) fn parked(&self, target: &Target) -> usize {
        self.lanes.get(target).map_or(0, |lane| lane.parked.total())
    }

    /// Number of objects queued for the target or in flight to it.
    pub(crate) fn objects(&self, target: &Target) -> usize {
        self.lanes.get(target).map_or(0, |lane| lane.shares.total())
    }

    /// Health of the service of each forwarded watch.
    pub(crate) fn health(&self, now: Instant) -> BTreeMap<Arc<str>, Health> {
        let health = |target: &Arc<Target>| self.lanes.get(target).map_or(Health::Healthy, |lane| lane.health(now));
        self.routes.iter().map(|(watch, target)| (watch.clone(), health(target))).collect()
    }
}

impl Delivery {
    /// Runtime of the object.
    pub fn runtime(&self) -> &RuntimeId {
        &self.key.0
    }

    /// Name of the watch.
    pub fn watch(&self) -> &str {
        &self.key.1
    }
}

fn get_or_create<'a, S>(
    queues: &'a mut BTreeMap<QueueKey, WatchQueue<S>>,
    generations: &mut u64,
    key: &QueueKey,
    leaf: &Arc<CertificateDer<'static>>,
) -> &'a mut WatchQueue<S> {
    let queue = queues.entry(key.clone()).or_insert_with(|| {
        *generations += 1;
        WatchQueue::new(*generations, leaf.clone())
    });
    queue.leaf = leaf.clone();
    queue
}

/// Effects of one refusal.
struct RefusalResult {
    /// Outcome as it counts for the lane.
    outcome: DeliveryOutcome,
    /// The status, if the event was refused too often.
    refusing: Option<u16>,
    gave_up: bool,
}

/// Returns true for a status about the event itself. Any other may come from a mesh, or from a service that is not
/// ready.
const fn is_unprocessable(status: u16) -> bool {
    matches!(status, 400 | 413 | 422)
}

/// Remaining places for parked objects.
#[derive(Clone, Copy)]
struct Room {
    all: usize,
    /// The runtime may take one.
    of_runtime: bool,
}

/// Handles a refused event: parks it, with growing delays, and gives it up only if every refusal of the whole period
/// was about the event itself. Beyond the share of the runtime its queue is held back.
fn refuse<S>(
    queue: &mut WatchQueue<S>,
    delivery: &Delivery,
    status: u16,
    room: Room,
    random: &mut Random,
    now: Instant,
) -> RefusalResult {
    let event = &delivery.event;
    let outcome = DeliveryOutcome::Refused(status);
    let refusals = queue.count_refusal(event, is_unprocessable(status), now);
    let refusing = (refusals.count >= MAX_REFUSALS).then_some(status);
    let for_whole_period =
        refusals.unprocessable_since.is_some_and(|since| now.saturating_duration_since(since) >= PARK_PERIOD);
    if refusing.is_some() && for_whole_period {
        queue.complete(event);
        return RefusalResult { outcome, refusing, gave_up: true };
    }
    if room.of_runtime {
        queue.park(event, now + park_delay(refusals.count, random));
    } else {
        queue.retry(event);
        queue.hold(delivery.taken, |refusals| park_delay(refusals, random), now);
    }
    if room.all > 1 {
        return RefusalResult { outcome, refusing, gave_up: false };
    }
    // A service that refuses this many objects probably refuses all: it backs off as if it were unreachable and is
    // probed with one event at a time.
    RefusalResult { outcome: DeliveryOutcome::Failed(None), refusing: Some(status), gave_up: false }
}

/// Moves a queue to its place in the lane.
fn reposition<S>(lane: &mut Lane, key: &QueueKey, queue: &mut WatchQueue<S>) {
    let disposition = match queue.next_retry() {
        _ if queue.can_take() => Disposition::Ready,
        Some(until) => Disposition::Delayed(until),
        None => Disposition::Idle,
    };
    lane.reposition(key, &mut queue.position, disposition);
}

#[cfg(test)]
mod tests;
