//! All mailboxes and lanes.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

use rustls_pki_types::CertificateDer;
use tidewatch_shared::{
    identity::{Epoch, RuntimeId},
    v2::Event,
};
use tokio::time::Instant;

use super::{
    Health, Outcome, Routes, Target,
    lane::{Lane, MAX_REFUSALS, PARKED, Shall, wait_refused},
    mailbox::{Mailbox, Settled, Stands},
};
use crate::base::random::Random;

/// A watch of a runtime.
pub(super) type Place = (RuntimeId, Arc<str>);

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Objects for one service.
    pub(crate) per_service: usize,
    /// Objects of one watch of one runtime, so that nobody fills a service's queue alone.
    pub(crate) per_watch: usize,
    /// Objects that one service has refused and that wait to be tried again. Beyond it the service counts as one that fails.
    pub(crate) parked: usize,
}

impl Default for Limits {
    fn default() -> Self {
        // About 300 bytes each: 20 MB for a service that is dead while everything changes.
        // What is parked comes again every five minutes: three or four requests a second to a service that goes on refusing.
        Self { per_service: 65_536, per_watch: 4_096, parked: 1_024 }
    }
}

/// There is no room, or no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// One request that is to be made.
#[derive(Clone, Debug)]
pub struct Delivery {
    place: Place,
    life: u64,
    /// The object.
    pub event: Arc<Event>,
    /// To whom.
    pub target: Arc<Target>,
    /// The runtime's certificate.
    pub leaf: Arc<CertificateDer<'static>>,
}

/// What became of a delivery.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Ended {
    /// The manager refused it for what it is, often and for long; it is not tried again.
    pub(crate) gave_up: bool,
    /// The health of the service moved.
    pub(crate) moved: bool,
}

/// See `forward`. Generic over what the hub settles by, so that a model can stand in for the hub.
#[derive(Debug)]
pub(crate) struct Outbox<S> {
    limits: Limits,
    routes: Arc<Routes>,
    boxes: BTreeMap<Place, Mailbox<S>>,
    frozen: BTreeSet<Place>,
    lanes: BTreeMap<Arc<Target>, Lane>,
    /// The lane that was served last: the next one is behind it.
    turn: Option<Arc<Target>>,
    lives: u64,
    random: Random,
}

impl<S> Outbox<S> {
    pub(crate) fn new(limits: Limits, seed: u64) -> Self {
        Self {
            limits,
            routes: Arc::default(),
            boxes: BTreeMap::new(),
            frozen: BTreeSet::new(),
            lanes: BTreeMap::new(),
            turn: None,
            lives: 0,
            random: Random::new(seed),
        }
    }

    pub(crate) fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    /// Replaces the routes: mailboxes without one go, others move to their new lane, where nothing of theirs has been refused yet.
    pub(crate) fn set_routes(&mut self, routes: Arc<Routes>) {
        if self.routes == routes {
            return;
        }
        let before = std::mem::replace(&mut self.routes, routes);
        let routes = self.routes.clone();
        self.boxes.retain(|(_, watch), _| routes.of(watch).is_some());
        self.frozen.retain(|place| self.boxes.contains_key(place));
        let targets: BTreeSet<_> = routes.iter().map(|(_, target)| target.clone()).collect();
        self.lanes.retain(|target, _| targets.contains(target));
        self.lanes.values_mut().for_each(Lane::clear);
        for target in targets {
            self.lanes.entry(target).or_default();
        }
        for (place, mailbox) in &mut self.boxes {
            mailbox.stands = Stands::Nowhere;
            if before.of(&place.1) != routes.of(&place.1) {
                mailbox.forgive();
            }
            if let Some(lane) = routes.of(&place.1).and_then(|target| self.lanes.get_mut(target)) {
                lane.objects += mailbox.len();
                lane.parked += mailbox.parked();
                stand(lane, place, mailbox);
            }
        }
    }

    /// Puts an event of a runtime's watch, with the certificate that the runtime showed.
    pub(crate) fn put(
        &mut self,
        runtime: &RuntimeId,
        watch: &str,
        leaf: &Arc<CertificateDer<'static>>,
        event: Event,
    ) -> Result<(), Full> {
        let target = self.routes.of(watch).ok_or(Full)?;
        let lane = self.lanes.get_mut(target).ok_or(Full)?;
        let place = (runtime.clone(), Arc::from(watch));
        let (held, known) = self.boxes.get(&place).map_or((0, false), |mailbox| (mailbox.len(), mailbox.has(&event)));
        if !known && (held >= self.limits.per_watch || lane.objects >= self.limits.per_service) {
            return Err(Full);
        }
        lane.objects += usize::from(!known);
        let mailbox = open(&mut self.boxes, &mut self.lives, &place, leaf);
        mailbox.put(event);
        stand(lane, &place, mailbox);
        Ok(())
    }

    /// An event found no room: nothing of that epoch is settled until the agent has seen so.
    pub(crate) fn freeze(
        &mut self,
        runtime: &RuntimeId,
        watch: &str,
        leaf: &Arc<CertificateDer<'static>>,
        epoch: Epoch,
        sequence: u64,
    ) {
        let place = (runtime.clone(), Arc::from(watch));
        open(&mut self.boxes, &mut self.lives, &place, leaf).freeze(epoch, sequence);
        self.frozen.insert(place);
    }

    /// An event found room: if it was refused before, the agent need not have seen so.
    pub(crate) fn found_room(&mut self, runtime: &RuntimeId, watch: &str, epoch: Epoch, sequence: u64) {
        if self.frozen.is_empty() {
            return;
        }
        let place = (runtime.clone(), Arc::from(watch));
        let Some(mailbox) = self.boxes.get_mut(&place) else { return };
        mailbox.found_room(epoch, sequence);
        if !mailbox.is_frozen() {
            self.frozen.remove(&place);
        }
    }

    /// A request of a runtime's epoch has come, with this lowest sequence. Returns the watches that thawed; each may progress.
    pub(crate) fn heard(&mut self, runtime: &RuntimeId, epoch: Epoch, first: u64) -> Vec<Arc<str>> {
        let from = (runtime.clone(), Arc::from(""));
        let mine = self.frozen.range(from..).take_while(|(id, _)| id == runtime);
        let mut thawed = Vec::new();
        for place in mine.cloned().collect::<Vec<_>>() {
            let Some(mailbox) = self.boxes.get_mut(&place) else { continue };
            if mailbox.heard(epoch, first) {
                thawed.push(place.1.clone());
            }
            if !mailbox.is_frozen() {
                self.frozen.remove(&place);
            }
        }
        thawed
    }

    /// What can be settled of a watch now; `accepted` is what has been accepted by now. To be asked after every put, thaw and end.
    pub(crate) fn progress(
        &mut self,
        runtime: &RuntimeId,
        watch: &str,
        accepted: impl FnOnce() -> S,
    ) -> Option<Settled<S>> {
        self.routes.of(watch)?;
        let place = (runtime.clone(), Arc::from(watch));
        let Some(mailbox) = self.boxes.get_mut(&place) else {
            // Nothing of it is with us.
            return Some(Settled { accepted: accepted(), except: Vec::new() });
        };
        let settled = mailbox.progress(accepted)?;
        if mailbox.is_done() {
            self.boxes.remove(&place);
        }
        Some(settled)
    }

    /// Forgets a runtime.
    pub(crate) fn forget(&mut self, runtime: &RuntimeId) {
        let from = (runtime.clone(), Arc::from(""));
        let mine: Vec<_> = self.boxes.range(from..).take_while(|((id, _), _)| id == runtime).collect();
        let mine: Vec<_> = mine.into_iter().map(|(place, _)| place.clone()).collect();
        for place in mine {
            let Some(mailbox) = self.boxes.remove(&place) else { continue };
            self.frozen.remove(&place);
            if let Some(lane) = self.routes.of(&place.1).and_then(|target| self.lanes.get_mut(target)) {
                lane.objects -= mailbox.len();
                lane.parked -= mailbox.parked();
                lane.forget(&place);
            }
        }
    }

    /// The next request: services in turn, and at each the mailboxes in turn.
    pub(crate) fn take(&mut self, now: Instant) -> Option<Delivery> {
        let may_send = |(target, lane): (&Arc<Target>, &Lane)| lane.may_send(now).then(|| target.clone());
        let all: Vec<_> = match &self.turn {
            Some(turn) => {
                let after = self.lanes.range::<Arc<Target>, _>((Excluded(turn), Unbounded));
                after.chain(self.lanes.range::<Arc<Target>, _>(..=turn)).filter_map(may_send).collect()
            }
            None => self.lanes.iter().filter_map(may_send).collect(),
        };
        for target in all {
            if let Some(delivery) = self.take_for(&target, now) {
                self.turn = Some(target);
                return Some(delivery);
            }
        }
        None
    }

    fn take_for(&mut self, target: &Arc<Target>, now: Instant) -> Option<Delivery> {
        let lane = self.lanes.get_mut(target)?;
        while let Some(place) = lane.due(now) {
            if let Some(mailbox) = self.boxes.get_mut(&place) {
                mailbox.stands = Stands::Nowhere;
                lane.parked -= mailbox.unpark(now);
                stand(lane, &place, mailbox);
            }
        }
        while let Some(place) = lane.queue.pop_front() {
            let Some(mailbox) = self.boxes.get_mut(&place) else { continue };
            mailbox.stands = Stands::Nowhere;
            let taken = mailbox.take();
            let (life, leaf) = (mailbox.life, mailbox.leaf.clone());
            stand(lane, &place, mailbox);
            let Some(event) = taken else { continue };
            lane.sent();
            return Some(Delivery { place, life, event, target: target.clone(), leaf });
        }
        None
    }

    /// Ends a delivery. The watch may progress.
    pub(crate) fn ended(&mut self, delivery: &Delivery, outcome: Outcome, now: Instant) -> Ended {
        let Self { limits, boxes, lanes, routes, random, .. } = self;
        let target = routes.of(&delivery.place.1);
        let lane = target.and_then(|target| lanes.get_mut(target));
        let mailbox = boxes.get_mut(&delivery.place).filter(|mailbox| mailbox.life == delivery.life);
        let mut verdict = Verdict { outcome, refuses: None, gave_up: false };
        if let (Some(mailbox), Some(lane)) = (mailbox, lane) {
            let (objects, parked) = (mailbox.len(), mailbox.parked());
            match outcome {
                Outcome::Delivered => mailbox.close(&delivery.event),
                Outcome::Refused(status) if target == Some(&delivery.target) => {
                    let room = limits.parked.saturating_sub(lane.parked);
                    verdict = refused(mailbox, &delivery.event, status, room, random, now);
                }
                // What another service refused says nothing about this one.
                Outcome::Refused(_) | Outcome::Failed(_) => mailbox.reopen(&delivery.event),
            }
            lane.objects = lane.objects + mailbox.len() - objects;
            lane.parked = lane.parked + mailbox.parked() - parked;
            stand(lane, &delivery.place, mailbox);
        }
        let Verdict { outcome, refuses, gave_up } = verdict;
        let lane = lanes.get_mut(&delivery.target);
        let moved = lane.is_some_and(|lane| lane.ended(outcome, refuses, random, now));
        Ended { gave_up, moved }
    }

    /// When it is worth to look again, apart from what comes in.
    pub(crate) fn wake(&self, now: Instant) -> Option<Instant> {
        self.lanes.values().filter_map(|lane| lane.wake(now)).min()
    }

    /// Objects that a service has refused and that wait to be tried again.
    pub(crate) fn parked(&self, target: &Target) -> usize {
        self.lanes.get(target).map_or(0, |lane| lane.parked)
    }

    /// Objects that wait for a service or are on their way.
    pub(crate) fn objects(&self, target: &Target) -> usize {
        self.lanes.get(target).map_or(0, |lane| lane.objects)
    }

    /// How the service of each forwarded watch does.
    pub(crate) fn health(&self) -> BTreeMap<Arc<str>, (Arc<Target>, Health)> {
        let health = |target: &Arc<Target>| self.lanes.get(target).map_or(Health::Fine, Lane::health);
        self.routes.iter().map(|(watch, target)| (watch.clone(), (target.clone(), health(target)))).collect()
    }
}

impl Delivery {
    /// Whose object it is.
    #[must_use]
    pub fn runtime(&self) -> &RuntimeId {
        &self.place.0
    }

    /// Of which watch.
    #[must_use]
    pub fn watch(&self) -> &str {
        &self.place.1
    }
}

fn open<'a, S>(
    boxes: &'a mut BTreeMap<Place, Mailbox<S>>,
    lives: &mut u64,
    place: &Place,
    leaf: &Arc<CertificateDer<'static>>,
) -> &'a mut Mailbox<S> {
    let mailbox = boxes.entry(place.clone()).or_insert_with(|| {
        *lives += 1;
        Mailbox::new(*lives, leaf.clone())
    });
    mailbox.leaf = leaf.clone();
    mailbox
}

/// What a refusal comes to.
struct Verdict {
    /// How the service does by it.
    outcome: Outcome,
    /// The status, if it has refused too often.
    refuses: Option<u16>,
    gave_up: bool,
}

/// Whether a status is a word about the event itself. Any other may be the word of a mesh, or of a service that is not itself yet.
const fn is_own(status: u16) -> bool {
    matches!(status, 400 | 413 | 422)
}

/// An event was refused: it waits, longer after several times, and is given up only if it was refused all along for what it is. `room` is how
/// many can still be parked.
fn refused<S>(
    mailbox: &mut Mailbox<S>,
    event: &Arc<Event>,
    status: u16,
    room: usize,
    random: &mut Random,
    now: Instant,
) -> Verdict {
    let (outcome, refusals) = (Outcome::Refused(status), mailbox.refused(event, is_own(status), now));
    let refuses = (refusals.count >= MAX_REFUSALS).then_some(status);
    let for_long = refusals.own_since.is_some_and(|since| now.saturating_duration_since(since) >= PARKED);
    if refuses.is_some() && for_long {
        mailbox.close(event);
        return Verdict { outcome, refuses, gave_up: true };
    }
    match room {
        0 => mailbox.reopen(event),
        _ => mailbox.park(event, now + wait_refused(refusals.count, random)),
    }
    if room > 1 {
        return Verdict { outcome, refuses, gave_up: false };
    }
    // Whoever refuses so much refuses everything: it is asked again as if it could not be reached, one event at a time.
    Verdict { outcome: Outcome::Failed(None), refuses: Some(status), gave_up: false }
}

/// Puts a mailbox where it belongs in its lane.
fn stand<S>(lane: &mut Lane, place: &Place, mailbox: &mut Mailbox<S>) {
    let shall = match mailbox.due() {
        _ if mailbox.can_take() => Shall::Send,
        Some(until) => Shall::Wait(until),
        None => Shall::Rest,
    };
    lane.stand(place, &mut mailbox.stands, shall);
}

#[cfg(test)]
mod tests;
