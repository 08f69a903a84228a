//! One runtime: its epochs, its plan, its last heartbeat.

use std::{sync::Arc, time::Duration};

use tidewatch_shared::{
    certificate::KeyId,
    event::{Event, EventId, Object, Payload, Reason, Received, Subject},
    exchange::{RefusedEvent, Settled},
    heartbeat::Heartbeat,
    identity::Epoch,
    plan::Work,
    v2,
};
use tokio::time::Instant;

use super::{
    Contract, EpochView, Inherited, PathState, Planned, Pulse, Terms,
    ledger::{Entry, Ledger},
    path::Evidence,
    run::Seen,
};
use crate::fleet::queue::{Drift, Priority, Wanted, Works};

/// Epochs that are remembered of one runtime.
const MAX_EPOCHS: usize = 4;

/// How many events of a request were what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Next of the run.
    pub(crate) recorded: u64,
    /// Seen before.
    pub(crate) duplicates: u64,
    /// New, above something that is missing.
    pub(crate) ahead: u64,
    /// Below where the ledger begins.
    pub(crate) below: u64,
    /// Not recorded, because too much is missing.
    pub(crate) too_far: u64,
    /// Watches whose digest was found to differ.
    pub(crate) differing: u64,
    /// Events that go to other managers had come before and were accepted only now.
    pub(crate) joined: bool,
}

/// Characters of a trust bundle's revision, at most.
const MAX_REVISION: usize = 64;

/// What a request of events came to.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) accepted: u64,
    pub(crate) since: u64,
    pub(crate) settled: Settled,
    pub(crate) refused: Vec<(EventId, Reason)>,
    pub(crate) wanted: Option<Wanted>,
    /// The lowest sequence of a request, in that request of the epoch where it was highest: what lies below is answered.
    pub(crate) reached: u64,
    /// What goes to other managers.
    pub(crate) forwards: Vec<Forward>,
    pub(crate) tally: Tally,
}

/// An event of a watch that is another manager's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Forward {
    pub(crate) id: EventId,
    pub(crate) watch: String,
    /// Its object, without a name if nobody knows which; `None` for the watch as a whole, whose objects have events of their own.
    pub(crate) event: Option<v2::Event>,
}

impl Recorded {
    /// The refusals as the answer spells them.
    pub(crate) fn refused(&self) -> Vec<RefusedEvent> {
        self.refused.iter().map(|(id, reason)| RefusedEvent { id: id.to_string(), reason: *reason }).collect()
    }
}

/// Whether a heartbeat counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    Yes,
    /// Its counter is not higher than the last.
    Late,
    /// A later epoch has spoken.
    OldEpoch,
}

/// What a heartbeat came to.
#[derive(Debug)]
pub(crate) struct Beat {
    pub(crate) counted: Counted,
    pub(crate) settled: Settled,
    /// Where the run begins that `settled` speaks of.
    pub(crate) since: u64,
    pub(crate) resend: Vec<String>,
    pub(crate) wanted: Option<Wanted>,
    pub(crate) differing: u64,
}

/// What a pass begins from: taken in the same step as what is wanted, before the pass reads anything.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    accepted: Vec<(Epoch, u64)>,
    planned: Arc<Planned>,
}

/// Bounded: at most [`MAX_EPOCHS`] ledgers, each by the watches of the plan.
#[derive(Debug)]
pub(crate) struct Runtime {
    planned: Arc<Planned>,
    /// It was placed when events were taken already: its agent may have sent what an earlier life has accepted.
    placed_late: bool,
    /// When it was placed or its plan changed.
    since: Instant,
    epochs: Vec<(Epoch, Ledger)>,
    order: u64,
    pulse: Option<Pulse>,
    /// When the agent began anew, while it has not told once that all is well since then.
    anew: Option<Instant>,
    /// When it was last heard of; when it was placed, before.
    heard: Instant,
    contract: Contract,
    /// To this process, or to an earlier one as far as its condition in KCP tells.
    spoke_v3: bool,
    /// The two heartbeat intervals that it was told last: an answer may have been lost.
    told: [Duration; 2],
    /// The last pass could not reach the runtime's API server.
    unreachable: bool,
    inherited: Option<Inherited>,
    /// The bundle that its agent has, by its last heartbeat that counted.
    trust_revision: Option<String>,
    /// The key that signed the certificate of that heartbeat.
    authority: Option<KeyId>,
}

impl Runtime {
    pub(crate) fn new(planned: Arc<Planned>, placed_late: bool, now: Instant) -> Self {
        Self {
            planned,
            placed_late,
            since: now,
            epochs: Vec::new(),
            order: 0,
            pulse: None,
            anew: None,
            heard: now,
            contract: Contract::Unheard,
            spoke_v3: false,
            told: [Duration::ZERO; 2],
            unreachable: false,
            inherited: None,
            trust_revision: None,
            authority: None,
        }
    }

    /// A heartbeat counted: what it says of its roots, and who signed the certificate that it came with.
    pub(crate) fn shows(&mut self, heartbeat: &Heartbeat, authority: Option<&KeyId>) {
        // A revision has 16 characters; a longer word is none of ours.
        let revision = heartbeat.trust_revision.as_ref().filter(|revision| revision.len() <= MAX_REVISION);
        self.trust_revision = revision.cloned();
        self.authority = authority.cloned();
    }

    /// What [`Self::shows`] was told last.
    pub(crate) fn shown(&self) -> (Option<String>, Option<KeyId>) {
        (self.trust_revision.clone(), self.authority.clone())
    }

    /// How long nothing was heard of it.
    pub(crate) fn silent(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.heard)
    }

    /// Continues what the condition in KCP says that an earlier process saw: where it stands, until something is heard of the runtime, and for
    /// ever that it has spoken v3.
    pub(crate) fn inherit(&mut self, inherited: Option<Inherited>, spoke_v3: bool) {
        self.inherited = inherited;
        self.unreachable |= inherited == Some(Inherited::Away);
        self.spoke_v3 |= spoke_v3;
    }

    /// A request came, in this contract, and its answer tells this heartbeat interval.
    pub(crate) fn heard(&mut self, contract: Contract, told: Duration, now: Instant) {
        (self.heard, self.contract, self.inherited) = (now, contract, None);
        self.spoke_v3 |= contract == Contract::V3;
        self.told = [told, self.told[0]];
    }

    /// When its last request came, or could first have come.
    pub(crate) fn last_heard(&self) -> Instant {
        self.heard
    }

    /// Whether a request in contract v3 ever came, as far as is known.
    pub(crate) fn speaks_v3(&self) -> bool {
        self.spoke_v3
    }

    /// The contract of its last request.
    pub(crate) fn contract(&self) -> Contract {
        self.contract
    }

    /// Whether a pass could reach the runtime's API server.
    pub(crate) fn reached(&mut self, reached: bool) {
        self.unreachable = !reached;
        if reached && self.inherited == Some(Inherited::Away) {
            self.inherited = None;
        }
    }

    pub(crate) fn plan_revision(&self) -> &str {
        self.planned.plan().revision()
    }

    /// Gives it another plan. Returns the works that its unsettled events stand for now.
    pub(crate) fn replan(&mut self, planned: Arc<Planned>, now: Instant) -> Works {
        if self.planned.plan() == planned.plan() {
            return Works::EMPTY;
        }
        (self.planned, self.since) = (planned, now);
        let mut missing = Works::EMPTY;
        for (_, ledger) in &mut self.epochs {
            ledger.replan(&self.planned);
            missing |= ledger.missing(&self.planned, 0);
        }
        missing.minus(FORWARD)
    }

    /// Records a request. Nothing of it is kept but watermarks; what it wants must be wanted in the same step.
    pub(crate) fn events(&mut self, epoch: Epoch, created: i64, events: Vec<Received>) -> Recorded {
        let planned = self.planned.clone();
        let ledger = self.ledger(epoch, created);
        let id = |received: &Received| received.as_ref().map_or_else(|(id, _)| *id, |event| event.id);
        let sequences = events.iter().map(id).filter(|id| id.epoch == epoch).map(|id| id.sequence);
        let first = sequences.min();
        if let Some(first) = first {
            ledger.begin(first);
            ledger.reached = ledger.reached.max(first);
        }
        let reached = ledger.reached;
        let (mut refused, mut wanted, mut tally) = (Vec::new(), None, Tally::default());
        let mut forwards = Vec::new();
        for received in events {
            match received {
                Err(refusal) => refused.push(refusal),
                Ok(event) if event.id.epoch != epoch => refused.push((event.id, Reason::Malformed)),
                Ok(event) => match record(ledger, &planned, &event, &mut wanted, &mut tally) {
                    Ok(works) if works.contains(Work::Forward) => forwards.push(Forward::of(event)),
                    Ok(_) => {}
                    Err(reason) => refused.push((event.id, reason)),
                },
            }
        }
        let (accepted, since, settled) = (ledger.accepted(), ledger.since(), ledger.settled(&planned));
        self.bound();
        Recorded { accepted, since, settled, refused, wanted, reached, forwards, tally }
    }

    /// Takes a heartbeat.
    pub(crate) fn heartbeat(&mut self, heartbeat: &Heartbeat, created: i64, now: Instant) -> Beat {
        let (planned, placed_late) = (self.planned.clone(), self.placed_late);
        self.ledger(heartbeat.epoch, created);
        let newest =
            self.epochs.iter().max_by_key(|(_, ledger)| (ledger.newest, ledger.order)).map(|(epoch, _)| *epoch);
        let is_newest = newest == Some(heartbeat.epoch);
        let ledger = self.ledger(heartbeat.epoch, created);
        let counted = match (is_newest, is_newest && ledger.counts(heartbeat.counter)) {
            (false, _) => Counted::OldEpoch,
            (true, false) => Counted::Late,
            (true, true) => Counted::Yes,
        };
        let (mut wanted, mut differing) = (None, Vec::new());
        if counted == Counted::Yes {
            differing = ledger.heartbeat(heartbeat, placed_late, &planned);
            want_differing(&differing, &planned, &mut wanted);
        }
        let (settled, since) = (ledger.settled(&planned), ledger.since());
        let resend = if is_newest { ledger.resend() } else { Vec::new() };
        if counted == Counted::Yes {
            let pulse = Pulse::of(heartbeat, now);
            let same = self.pulse.as_ref().is_some_and(|before| before.epoch == pulse.epoch);
            match (pulse.is_well(planned.plan().revision()), self.anew) {
                (true, _) => self.anew = None,
                (false, None) if !same => self.anew = Some(now),
                (false, _) => {}
            }
            self.pulse = Some(pulse);
            let others = self.epochs.iter_mut().filter(|(epoch, _)| *epoch != heartbeat.epoch);
            others.for_each(|(_, ledger)| ledger.forget_digests());
        }
        self.bound();
        Beat { counted, settled, since, resend, wanted, differing: differing.len() as u64 }
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let accepted = self.epochs.iter().map(|(epoch, ledger)| (*epoch, ledger.accepted())).collect();
        Snapshot { accepted, planned: self.planned.clone() }
    }

    /// Works that began from the snapshot have ended, with their outcome recorded.
    pub(crate) fn ended(&mut self, snapshot: &Snapshot, works: Works) {
        for (epoch, ledger) in &mut self.epochs {
            if let Some((_, accepted)) = snapshot.accepted.iter().find(|(known, _)| known == epoch) {
                ledger.ended(works, *accepted, &snapshot.planned, &self.planned);
            }
        }
    }

    /// Watches of which something is not known to be with its manager.
    pub(crate) fn unforwarded(&self) -> Vec<String> {
        self.epochs.iter().flat_map(|(_, ledger)| ledger.unended(Work::Forward, &self.planned)).collect()
    }

    /// All events of a watch that the snapshot knows are with its manager, but of these epochs nobody knows.
    pub(crate) fn forwarded(&mut self, snapshot: &Snapshot, watch: &str, except: &[Epoch]) {
        for (epoch, ledger) in self.epochs.iter_mut().filter(|(epoch, _)| !except.contains(epoch)) {
            if let Some((_, accepted)) = snapshot.accepted.iter().find(|(known, _)| known == epoch) {
                ledger.ended_of(watch, FORWARD, *accepted, &snapshot.planned, &self.planned);
            }
        }
    }

    /// Whether its path is proven.
    pub(crate) fn path(&self, terms: Terms, now: Instant) -> PathState {
        let since = self.since.max(terms.started);
        Evidence {
            since: self.anew.map_or(since, |anew| since.max(anew)),
            interval: self.interval(terms),
            away_after: terms.away_after,
            heard: self.heard.max(terms.started),
            legacy: self.contract == Contract::V2 || self.inherited == Some(Inherited::LegacyAgent),
            unreachable: self.unreachable,
            was_away: self.inherited == Some(Inherited::Away),
            plan_revision: self.plan_revision(),
            diverged: self.diverged(),
            pulse: self.pulse.as_ref(),
        }
        .judge(now)
    }

    /// The longest heartbeat interval that its agent may follow.
    pub(crate) fn interval(&self, terms: Terms) -> Duration {
        terms.interval.max(self.told[0]).max(self.told[1])
    }

    /// A watch whose digest did not agree, in the epoch that counts.
    fn diverged(&self) -> Option<&str> {
        let counts = self.pulse.as_ref()?.epoch;
        self.epochs.iter().find(|(epoch, _)| *epoch == counts)?.1.diverged()
    }

    /// The last heartbeat that counted, and how long ago it came.
    pub(crate) fn pulse(&self, now: Instant) -> Option<(&Pulse, Duration)> {
        self.pulse.as_ref().map(|pulse| (pulse, now.saturating_duration_since(pulse.at)))
    }

    pub(crate) fn epochs(&self) -> Vec<EpochView> {
        self.epochs.iter().map(|(epoch, ledger)| ledger.view(*epoch, &self.planned)).collect()
    }

    /// The ledger of an epoch, which a signature of this time has just named.
    fn ledger(&mut self, epoch: Epoch, created: i64) -> &mut Ledger {
        let at = self.epochs.iter().position(|(known, _)| *known == epoch).unwrap_or_else(|| {
            self.order += 1;
            // Nearly always the only one.
            self.epochs.reserve_exact(1);
            self.epochs.push((epoch, Ledger::new(created, self.order)));
            self.epochs.len() - 1
        });
        let ledger = &mut self.epochs[at].1;
        ledger.newest = ledger.newest.max(created);
        ledger
    }

    /// The epoch whose newest signature is the oldest goes; it may be the one that has just spoken.
    fn bound(&mut self) {
        if self.epochs.len() > MAX_EPOCHS {
            let oldest = self.epochs.iter().enumerate().min_by_key(|(_, (_, ledger))| (ledger.newest, ledger.order));
            if let Some(at) = oldest.map(|(at, _)| at) {
                self.epochs.remove(at);
            }
        }
    }
}

fn record(
    ledger: &mut Ledger,
    planned: &Planned,
    event: &Event,
    wanted: &mut Option<Wanted>,
    tally: &mut Tally,
) -> Result<Works, Reason> {
    let listed = event.payload.is_watch();
    let taken =
        ledger.record(Entry { sequence: event.id.sequence, watch: &event.watch, listed, delta: event.delta }, planned);
    *match taken.seen {
        Seen::Next { .. } => &mut tally.recorded,
        Seen::Again => &mut tally.duplicates,
        Seen::Ahead => &mut tally.ahead,
        Seen::Below => &mut tally.below,
        Seen::TooFar => &mut tally.too_far,
    } += 1;
    tally.differing += taken.differing.len() as u64;
    want_differing(&taken.differing, planned, wanted);
    want(wanted, taken.joined, Drift::None);
    tally.joined |= taken.joined.contains(Work::Forward);
    // Its sequence is taken and its delta counts, but nothing here knows what to do about it.
    let works = taken.wants.ok_or(Reason::UnknownWatch)?;
    if !works.is_empty() {
        let drift = match &event.payload {
            Payload::Object(object) => Drift::of(object.clone()),
            Payload::Watch | Payload::Unnamed { .. } => Drift::All,
        };
        want(wanted, works, drift);
    }
    Ok(works)
}

fn want_differing(watches: &[String], planned: &Planned, wanted: &mut Option<Wanted>) {
    for works in watches.iter().filter_map(|watch| planned.works(watch)) {
        want(wanted, works, Drift::All);
    }
}

impl Forward {
    fn of(event: Event) -> Self {
        let object = match event.payload {
            Payload::Object(Object { subject: Subject { group, version, namespace, name, .. }, kind, .. }) => {
                Some(v2::Event { namespace, name, group, version, kind })
            }
            // Contract v2 knows objects only; one without a name says that it was none of those that are named.
            Payload::Unnamed { subject: Subject { group, version, .. }, kind } => {
                Some(v2::Event { group, version, kind, ..v2::Event::default() })
            }
            Payload::Watch => None,
        };
        Self { id: event.id, watch: event.watch, event: object }
    }
}

/// What no pass does: events for other managers are put into the outbox in the step that records them.
const FORWARD: Works = Works::FORWARD;

fn want(wanted: &mut Option<Wanted>, works: Works, drift: Drift) {
    let works = works.minus(FORWARD);
    if works.is_empty() {
        return;
    }
    let more = Wanted { works, priority: Priority::User, drift };
    match wanted {
        Some(wanted) => wanted.merge(more),
        None => *wanted = Some(more),
    }
}

#[cfg(test)]
mod tests;
