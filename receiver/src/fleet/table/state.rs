//! What the one lock holds.

use std::{collections::HashMap, sync::Arc, time::Duration};

use rustls_pki_types::CertificateDer;
use tidewatch_shared::{
    certificate::KeyId,
    event,
    heartbeat::Heartbeat,
    identity::{Epoch, RuntimeId},
    plan::{Plan, Work},
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Follower;
use super::{
    Stand, Unplaced, View,
    job::Begun,
    metrics::Sum,
    pace::Pace,
    stamps::{Stamps, Told},
    traces::Traces,
    trust::Telling,
};
use crate::{
    base::{class::Class, key::KymaKey},
    fleet::{
        Beat, Contract, Counted, Inherited, PathState, Planned, Recorded, Runtime, Snapshot, Terms, Unproven,
        forward::{self, Outbox},
        queue::{Drift, Later, Outcome, Priority, Queue, Wanted, Works},
    },
};

/// A runtime that is away is tried again after one to two of these: its agent's first word wakes it sooner.
const AWAY_PROBE: Duration = Duration::from_secs(15 * 60);

/// Which Kyma an event made wanted, and whether nothing was wanted of it before.
pub(super) type Received = (KymaKey, bool);

/// What became of a request of events.
pub(super) struct Taken {
    pub(super) recorded: Recorded,
    pub(super) received: Option<Received>,
    /// What other managers are told.
    pub(super) forwarded: super::forward::Told,
}

/// What became of a heartbeat.
pub(super) struct Heard {
    pub(super) beat: Beat,
    pub(super) plan_revision: String,
    pub(super) trust_revision: Option<String>,
    /// The agent is to renew its certificate.
    pub(super) renew: bool,
}

/// A Kyma and what is known of its runtime.
pub(super) struct Placed {
    id: Option<RuntimeId>,
    /// Tells one life of a Kyma's name from the next: a pass that began in an earlier one settles nothing.
    generation: u64,
    pub(super) runtime: Runtime,
    /// The state of its path when it was last asked for; `None` before.
    told: Option<PathState>,
    /// When the oldest event that no pass has begun with was accepted.
    accepted: Option<Instant>,
    /// Cancelled when the Kyma is removed.
    gone: CancellationToken,
}

/// An agent that misses something of its own.
#[derive(Default)]
struct Incomplete {
    /// A heartbeat has said so since it was taken.
    said: bool,
    taken: Option<Instant>,
}

pub(super) struct State {
    pub(super) synced: bool,
    pub(super) pace: Pace,
    pub(super) kymas: HashMap<KymaKey, Placed>,
    /// Nearly always one Kyma each.
    runtimes: HashMap<RuntimeId, Vec<KymaKey>>,
    pub(super) queue: Queue<KymaKey>,
    pub(super) outbox: Outbox<Snapshot>,
    pub(super) stamps: Option<Stamps>,
    pub(super) traces: Traces,
    pub(super) trust: Telling,
    /// Whose connection ended when; bounded by the number of Kymas.
    closed: HashMap<KymaKey, Instant>,
    /// Whose agents miss something of their own, by their last heartbeats; bounded by the number of Kymas.
    incomplete: HashMap<KymaKey, Incomplete>,
    /// Most runtimes have the same plan.
    planned: Option<Arc<Planned>>,
    generations: u64,
    /// When the next of those who are woken at a pace has its turn.
    paced: Option<Instant>,
}

impl State {
    pub(super) fn new(slots: usize, seed: u64) -> Self {
        Self {
            synced: false,
            pace: Pace::default(),
            kymas: HashMap::new(),
            runtimes: HashMap::new(),
            queue: Queue::new(slots, seed),
            outbox: Outbox::new(forward::Limits::default(), seed),
            stamps: None,
            traces: Traces::default(),
            trust: Telling::default(),
            closed: HashMap::new(),
            incomplete: HashMap::new(),
            planned: None,
            generations: 0,
            paced: None,
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
            let keys = self.runtimes.entry(id.clone()).or_default();
            keys.reserve_exact(1);
            keys.push(key.clone());
        }
        self.generations += 1;
        self.queue.insert(key.clone());
        let runtime = Runtime::new(planned, self.synced, now);
        let gone = self.kymas.get(&key).map(|placed| placed.gone.clone()).unwrap_or_default();
        let placed = Placed { id, generation: self.generations, runtime, told: None, accepted: None, gone };
        self.kymas.insert(key, placed);
    }

    pub(super) fn remove(&mut self, key: &KymaKey) {
        self.unindex(key);
        if let Some(placed) = self.kymas.remove(key) {
            placed.gone.cancel();
        }
        self.queue.remove(key);
        self.traces.forget(key);
        self.closed.remove(key);
        self.incomplete.remove(key);
    }

    pub(super) fn runtime(&self, key: &KymaKey) -> Option<&Runtime> {
        self.kymas.get(key).map(|placed| &placed.runtime)
    }

    /// The heartbeat interval that agents are told now.
    pub(super) fn interval(&self) -> Duration {
        self.pace.interval(self.runtimes.len())
    }

    /// By what paths are judged, in a process that began to serve at `started`.
    pub(super) fn terms(&self, started: Instant) -> Terms {
        Terms { started, interval: self.interval(), away_after: self.pace.away_after }
    }

    pub(super) fn inherit(&mut self, key: &KymaKey, inherited: Option<Inherited>, spoke_v3: bool) {
        if let Some(placed) = self.kymas.get_mut(key) {
            placed.runtime.inherit(inherited, spoke_v3);
        }
    }

    /// Nothing came over a runtime's connection since then.
    pub(super) fn closed(&mut self, id: &RuntimeId, since: Instant) {
        if let Ok(key) = self.key_of(id) {
            // One that was used later may have ended before.
            let last = self.closed.entry(key).or_insert(since);
            *last = since.max(*last);
        }
    }

    /// Takes those whose connection ended so long ago, and who were not heard of since.
    pub(super) fn lost(&mut self, after: Duration, now: Instant) -> Vec<KymaKey> {
        let kymas = &self.kymas;
        let mut lost = Vec::new();
        self.closed.retain(|key, at| {
            let is_silent = kymas.get(key).is_some_and(|placed| placed.runtime.last_heard() <= *at);
            let waits = is_silent && now < *at + after;
            if is_silent && !waits {
                lost.push(key.clone());
            }
            waits
        });
        lost
    }

    /// Takes those whose agents miss something of their own, each no sooner than so long after it was taken before.
    pub(super) fn incomplete(&mut self, again: Duration, now: Instant) -> Vec<KymaKey> {
        let mut taken = Vec::new();
        for (key, incomplete) in &mut self.incomplete {
            if incomplete.said && incomplete.taken.is_none_or(|at| now >= at + again) {
                *incomplete = Incomplete { said: false, taken: Some(now) };
                taken.push(key.clone());
            }
        }
        taken
    }

    /// Something happened in a runtime whose agent speaks contract v2: nobody says what.
    pub(super) fn legacy_event(&mut self, id: &RuntimeId, now: Instant) -> Result<Received, Unplaced> {
        let (key, interval) = (self.key_of(id)?, self.interval());
        let placed = self.kymas.get_mut(&key).ok_or(Unplaced::Unknown)?;
        placed.runtime.heard(Contract::V2, interval, now);
        placed.accepted.get_or_insert(now);
        let works = Works::of(&[Work::Kyma, Work::Catalog]);
        let is_new = self.queue.wanted(&key).is_empty();
        self.queue.want(&key, Wanted { works, priority: Priority::User, drift: Drift::All }, now);
        Ok((key, is_new))
    }

    /// Whether a request in contract v3 of this runtime was ever taken, as far as is known.
    pub(super) fn speaks_v3(&self, id: &RuntimeId) -> bool {
        let keys = self.runtimes.get(id).into_iter().flatten();
        keys.filter_map(|key| self.kymas.get(key)).any(|placed| placed.runtime.speaks_v3())
    }

    /// Kymas whose path is not as when this was last asked. All are summed up.
    pub(super) fn moved_paths(&mut self, started: Instant, now: Instant, sum: &mut Sum) -> Vec<(KymaKey, PathState)> {
        let terms = self.terms(started);
        let mut moved = Vec::new();
        for (key, placed) in &mut self.kymas {
            let path = placed.runtime.path(terms, now);
            sum.add(key, &path, placed.runtime.pulse(now).map(|(pulse, _)| pulse));
            if placed.told.as_ref() != Some(&path) {
                placed.told = Some(path.clone());
                moved.push((key.clone(), path));
            }
        }
        moved
    }

    pub(super) fn events(
        &mut self,
        id: &RuntimeId,
        epoch: Epoch,
        created: i64,
        events: Vec<event::Received>,
        leaf: Option<&CertificateDer<'static>>,
        now: Instant,
    ) -> Result<Taken, Unplaced> {
        let (key, interval) = (self.key_of(id)?, self.interval());
        let stamped = if self.stamps.is_some() { events.iter().flatten().map(Told::of).collect() } else { Vec::new() };
        let placed = self.kymas.get_mut(&key).ok_or(Unplaced::Unknown)?;
        placed.runtime.heard(Contract::V3, interval, now);
        let mut recorded = placed.runtime.events(epoch, created, events);
        let forwarded = super::forward::take(&mut self.outbox, placed, id, epoch, &mut recorded, leaf);
        let mut received = None;
        if let Some(wanted) = recorded.wanted.take() {
            placed.accepted.get_or_insert(now);
            received = Some((key.clone(), self.queue.wanted(&key).is_empty()));
            self.queue.want(&key, wanted, now);
            if let Some(stamps) = &self.stamps {
                stamps.wanted(id, stamped);
            }
        }
        Ok(Taken { recorded, received, forwarded })
    }

    pub(super) fn heartbeat(
        &mut self,
        id: &RuntimeId,
        created: i64,
        heartbeat: &Heartbeat,
        authority: Option<&KeyId>,
        now: Instant,
    ) -> Result<Heard, Unplaced> {
        let (key, interval) = (self.key_of(id)?, self.interval());
        let placed = self.kymas.get_mut(&key).ok_or(Unplaced::Unknown)?;
        let was_away = placed.told == Some(PathState::Unproven(Unproven::Away));
        placed.runtime.heard(Contract::V3, interval, now);
        let mut beat = placed.runtime.heartbeat(heartbeat, created, now);
        if was_away {
            // It is back: what waits for its next probe waits no longer.
            placed.told = None;
            let works = self.queue.wanted(&key);
            self.queue.want(&key, Wanted::new(works, Priority::User), now);
        }
        if let Some(wanted) = beat.wanted.take() {
            self.queue.want(&key, wanted, now);
        }
        let plan_revision = placed.runtime.plan_revision().to_owned();
        let mut renew = false;
        if beat.counted == Counted::Yes {
            placed.runtime.shows(heartbeat, authority);
            if heartbeat.incomplete {
                self.incomplete.entry(key).or_default().said = true;
            } else {
                self.incomplete.remove(&key);
            }
            renew = self.trust.asks(authority, now);
        }
        Ok(Heard { beat, plan_revision, trust_revision: self.trust.revision(), renew })
    }

    /// Takes the next Kyma into work, with a snapshot of what is accepted.
    pub(super) fn begin(&mut self, now: Instant) -> Option<(KymaKey, Wanted, Begun)> {
        let (key, wanted) = self.queue.take(now)?;
        let traces = self.traces.take(&key);
        let placed = self.kymas.get_mut(&key)?;
        let (snapshot, accepted) = (placed.runtime.snapshot(), placed.accepted.take());
        let gone = placed.gone.clone();
        let patience = self.queue.patience(&key);
        let begun = Begun { generation: placed.generation, snapshot, accepted, at: now, patience, traces, gone };
        Some((key, wanted, begun))
    }

    /// Ends what [`Self::begin`] began. What began before `safe` is worked on once more then: until that time the last write of a
    /// receiver that died may still land. Returns when the oldest event that it settles was accepted.
    pub(super) fn finish(
        &mut self,
        key: &KymaKey,
        wanted: &Wanted,
        begun: &Begun,
        outcome: &Outcome,
        safe: Instant,
        now: Instant,
    ) -> Option<Instant> {
        let terms = self.terms(safe);
        let ended = outcome.ended.both(wanted.works).minus(outcome.failed);
        let (mut settled, mut probe) = (None, None);
        if let Some(placed) = self.kymas.get_mut(key).filter(|placed| placed.generation == begun.generation) {
            placed.runtime.ended(&begun.snapshot, ended);
            match outcome.class {
                Some(Class::Transport) => placed.runtime.reached(false),
                // Only this work is known to have asked the runtime something.
                _ if ended.contains(Work::Kyma) => placed.runtime.reached(true),
                _ => {}
            }
            if wanted.works.minus(ended).is_empty() {
                settled = begun.accepted;
            } else if let Some(accepted) = begun.accepted {
                placed.accepted = Some(placed.accepted.map_or(accepted, |since| since.min(accepted)));
            }
            let away = placed.runtime.path(terms, now) == PathState::Unproven(Unproven::Away);
            probe = away.then(|| AWAY_PROBE + self.queue.jitter(AWAY_PROBE));
        }
        let again_in = outcome.again_in.max(probe.filter(|_| !outcome.failed.is_empty()));
        self.queue.finish(key, wanted, &Outcome { again_in, ..outcome.clone() }, now);
        if begun.at < safe {
            let again = Wanted { works: wanted.works, priority: Priority::Catalog, drift: Drift::All };
            self.queue.want_later(key, Later::Restart, safe, again, now);
        }
        settled
    }

    pub(super) fn view(&self, started: Instant, now: Instant) -> Vec<View> {
        let terms = self.terms(started);
        let view = |(key, placed): (&KymaKey, &Placed)| {
            let pulse = placed.runtime.pulse(now);
            let epochs = placed.runtime.epochs();
            View {
                key: key.clone(),
                runtime: placed.id.clone(),
                ambiguous: self.is_ambiguous(placed),
                path: placed.runtime.path(terms, now),
                contract: placed.runtime.contract(),
                last_seen: pulse.map(|(_, ago)| ago),
                heartbeat: placed.runtime.interval(terms),
                canary_age: pulse.and_then(|(pulse, _)| pulse.canary_age(now)),
                agent_version: pulse.map(|(pulse, _)| pulse.agent_version.clone()),
                plan_revision: pulse.and_then(|(pulse, _)| pulse.plan_revision.clone()),
                plan_is_current: pulse
                    .is_some_and(|(pulse, _)| pulse.plan_revision.as_deref() == Some(placed.runtime.plan_revision())),
                certificate_not_after: pulse.map(|(pulse, _)| pulse.certificate_not_after.clone()),
                renewal_failed_since: pulse.and_then(|(pulse, _)| pulse.renewal_failed_since),
                waiting: pulse.map_or(0, |(pulse, _)| pulse.waiting),
                parked: pulse.map_or(0, |(pulse, _)| pulse.parked),
                gaps: epochs.iter().map(|epoch| epoch.gaps).sum(),
                duplicates: epochs.iter().map(|epoch| epoch.duplicates).sum(),
                epochs,
                wanted: self.queue.wanted(key),
                paused: self.queue.parked(key),
                in_work: self.queue.in_work(key),
                failures: self.queue.failures(key),
            }
        };
        self.kymas.iter().map(view).collect()
    }

    /// What is known of the identity of each runtime that is served.
    pub(super) fn followers(&self, started: Instant, now: Instant) -> Vec<Follower> {
        let terms = self.terms(started);
        let placed = self.kymas.iter().filter(|(_, placed)| !self.is_ambiguous(placed));
        let follower = |(key, placed): (&KymaKey, &Placed)| {
            let (trust_revision, authority) = placed.runtime.shown();
            Some(Follower {
                kyma: key.clone(),
                runtime: placed.id.clone()?,
                path: placed.runtime.path(terms, now),
                trust_revision,
                authority,
                silent: placed.runtime.silent(now),
            })
        };
        placed.filter_map(follower).collect()
    }

    /// How the path of each runtime that is served stands.
    pub(super) fn stands(&self, started: Instant, now: Instant) -> Vec<Stand> {
        let terms = self.terms(started);
        let placed = self.kymas.iter().filter(|(_, placed)| !self.is_ambiguous(placed));
        let stand = |(key, placed): (&KymaKey, &Placed)| {
            let path = placed.runtime.path(terms, now);
            let beat = placed.runtime.pulse(now).map(|(pulse, _)| pulse.at());
            Some(Stand { kyma: key.clone(), runtime: placed.id.clone()?, path, beat })
        };
        placed.filter_map(stand).collect()
    }

    /// Wants works of every Kyma, so many of them a second. How long that takes follows from their number.
    pub(super) fn want_all(&mut self, works: Works, priority: Priority, per_second: u32, now: Instant) {
        let count = u32::try_from(self.kymas.len()).unwrap_or(u32::MAX);
        // As many as one second takes need not wait.
        let spread = Duration::from_secs((count / per_second.max(1)).into());
        for key in self.kymas.keys() {
            let at = now + self.queue.jitter(spread);
            self.queue.want_later(key, Later::Spread, at, Wanted::new(works, priority), now);
        }
    }

    /// Wants works of these Kymas, so many of them a second, after those who wait already. Who waits already keeps the turn.
    pub(super) fn want_paced(&mut self, mut keys: Vec<KymaKey>, works: Works, per_second: u32, now: Instant) {
        let step = Duration::from_secs(1) / per_second.max(1);
        // To be the first is nobody's right.
        let first = self.queue.jitter(Duration::from_millis(u64::try_from(keys.len()).unwrap_or(u64::MAX)));
        let first = usize::try_from(first.as_millis()).unwrap_or(0).min(keys.len());
        keys.rotate_left(first);
        let mut at = self.paced.filter(|at| *at > now).unwrap_or(now);
        for key in keys {
            let waits = self.queue.is_later(&key, Later::Paced);
            self.queue.want_later(&key, Later::Paced, at, Wanted::new(works, Priority::Catalog), now);
            if !waits {
                at += step;
            }
        }
        self.paced = Some(at);
    }

    fn is_ambiguous(&self, placed: &Placed) -> bool {
        placed.id.as_ref().is_some_and(|id| self.runtimes.get(id).is_some_and(|keys| keys.len() > 1))
    }

    pub(super) fn key_of(&self, id: &RuntimeId) -> Result<KymaKey, Unplaced> {
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
            keys.retain(|known| known != key);
            if keys.is_empty() {
                self.runtimes.remove(id);
                self.outbox.forget(id);
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
