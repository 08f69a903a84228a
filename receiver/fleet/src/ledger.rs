//! Ledger of one epoch of a runtime: sequences received, their watches, and how far the work of each watch is settled.

use tidewatch_api::{
    identity::Epoch,
    plan::{MAX_WATCHES, Work},
};
use tidewatch_contract::{admin::fleet::EpochView, event::Event, exchange::Settled, heartbeat::Heartbeat};
use tidewatch_kit::short_map::ShortMap;

use super::{
    compare::Compare,
    plan_index::PlanIndex,
    sequences::{SequenceStatus, SequenceTracker},
};
use crate::queue::WorkSet;

/// Watermarks of one watch in one epoch.
#[derive(Clone, Debug, Default)]
struct Watermarks {
    /// Highest recorded sequence of the watch.
    last: u64,
    /// Per kind of work: the accepted sequence at the start of the last reconcile that ended it.
    ended: [u64; WorkSet::COUNT],
    /// Lowest of `ended` over the watch's work; never decreases.
    settled: u64,
}

impl Watermarks {
    /// Work that has not ended for a sequence.
    fn missing(&self, work: WorkSet, sequence: u64) -> WorkSet {
        if sequence <= self.settled {
            return WorkSet::EMPTY;
        }
        work.iter().filter(|work| self.ended[*work as usize] < sequence).collect()
    }

    /// Advances after work ended. `planned` is the watch's work at the start of the reconcile, `current` its work now.
    fn advance(&mut self, ended: WorkSet, accepted: u64, planned: Option<WorkSet>, current: Option<WorkSet>) {
        let Some(planned) = planned else { return };
        for work in planned.both(ended).iter() {
            let mark = &mut self.ended[work as usize];
            *mark = accepted.max(*mark);
        }
        if let Some(current) = current {
            self.settle(current);
        }
    }

    /// Ends work that this event, the next one in sequence, does not need. Work that an earlier event still waits for is not
    /// ended: its reconcile covers both. Returns the work that the event needs.
    fn skip(&mut self, unneeded: WorkSet, work: WorkSet, sequence: u64) -> WorkSet {
        let skipped = unneeded.both(work).minus(self.missing(work, self.last));
        for work in skipped.iter() {
            self.ended[work as usize] = sequence;
        }
        self.settle(work);
        work.minus(skipped)
    }

    fn settle(&mut self, work: WorkSet) {
        let lowest = work.iter().map(|work| self.ended[work as usize]).min();
        self.settled = self.settled.max(lowest.unwrap_or(0));
    }
}

/// Effects of recording one event.
#[derive(Debug)]
pub(super) struct RecordedEvent {
    pub(super) status: SequenceStatus,
    /// Work of the event itself; `None` if the plan has no watch of its name.
    pub(super) work: Option<WorkSet>,
    /// Work of events received earlier that are accepted only now, because this event closed a gap.
    pub(super) unblocked: WorkSet,
    /// Watches with a digest mismatch.
    pub(super) differing: Vec<String>,
}

/// Ledger of one epoch.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger {
    pub(super) sequences: SequenceTracker,
    watches: ShortMap<String, Watermarks>,
    pub(super) compare: Compare,
    /// Creation time of the epoch's newest signature, in seconds of the receiver's monotonic clock.
    pub(super) newest: i64,
    /// Position of the epoch in the order of arrival; breaks ties of `newest`.
    pub(super) order: u64,
    /// Highest of the lowest sequences of the epoch's requests. An agent has one request in flight, so every sequence
    /// below was answered and the agent has received the response.
    pub(super) answered_below: u64,
    /// A request of events arrived since the last counted heartbeat.
    events_since_heartbeat: bool,
    counter: Option<u64>,
    duplicates: u64,
    reordered: u64,
    gaps: u64,
}

impl Ledger {
    pub(super) fn new(created: i64, order: u64) -> Self {
        Self { newest: created, order, ..Self::default() }
    }

    /// Starts the ledger at the lowest sequence of the first request, even if that event is refused: the agent sends a
    /// refused event again.
    pub(super) fn begin(&mut self, first: u64) {
        self.events_since_heartbeat = true;
        if self.sequences.begin(first) && first != 1 {
            self.compare.reset();
        }
    }

    /// Records an event.
    pub(super) fn record(&mut self, event: &Event, planned: &PlanIndex) -> RecordedEvent {
        let before = self.sequences.accepted();
        let sequence = event.id.sequence;
        let status = self.sequences.record(sequence);
        match status {
            SequenceStatus::Next { closed_gap } => {
                self.reordered += u64::from(closed_gap || !self.sequences.is_whole());
                self.compare.apply_delta(&event.watch, event.delta);
            }
            SequenceStatus::Duplicate => self.duplicates += 1,
            SequenceStatus::Below => self.reordered += 1,
            SequenceStatus::Ahead | SequenceStatus::TooFar => self.gaps += 1,
        }
        if matches!(status, SequenceStatus::Ahead | SequenceStatus::Below | SequenceStatus::TooFar) {
            self.compare.reset();
        }
        if event.payload.is_watch() && status != SequenceStatus::TooFar {
            self.compare.relisted(&event.watch, sequence);
        }
        let work = planned.work_of(event).map(|work| {
            let watermarks = self.watches.entry(event.watch.as_str());
            let is_next = matches!(status, SequenceStatus::Next { .. });
            let unneeded = if is_next { planned.unneeded(event) } else { WorkSet::EMPTY };
            let needed = watermarks.skip(unneeded, work, sequence);
            if status != SequenceStatus::TooFar {
                watermarks.last = watermarks.last.max(sequence);
            }
            // A new event enqueues all its work, also where the ledger cannot classify it; a duplicate only the work
            // that has not ended.
            if status == SequenceStatus::Duplicate { watermarks.missing(work, sequence) } else { needed }
        });
        let closes_gap = status == SequenceStatus::Next { closed_gap: true };
        let unblocked = if closes_gap { self.missing(planned, before) } else { WorkSet::EMPTY };
        let differing = self.check(planned);
        RecordedEvent { status, work, unblocked, differing }
    }

    /// Unsettled work of planned watches with a last event above a sequence.
    pub(super) fn missing(&self, planned: &PlanIndex, above: u64) -> WorkSet {
        let recorded = self.watches.iter().filter(|(_, watermarks)| watermarks.last > above);
        let missing =
            recorded.filter_map(|(name, watermarks)| Some(watermarks.missing(planned.work(name)?, watermarks.last)));
        missing.fold(WorkSet::EMPTY, |sum, work| sum | work)
    }

    /// Unsettled work that each watch of a plan has got since another one. That of the other one is enqueued already.
    pub(super) fn missing_since<'a>(
        &'a self,
        before: &'a PlanIndex,
        current: &'a PlanIndex,
    ) -> impl Iterator<Item = (&'a str, WorkSet)> {
        self.watches.iter().filter_map(|(name, watermarks)| {
            let got = current.work(name)?.minus(before.work(name).unwrap_or_default());
            Some((name.as_str(), watermarks.missing(got, watermarks.last)))
        })
    }

    /// Watches with a recorded event for which this kind of work has not ended.
    pub(super) fn watches_pending<'a>(&'a self, kind: Work, planned: &'a PlanIndex) -> impl Iterator<Item = &'a str> {
        let waits = move |(name, watermarks): &(&String, &Watermarks)| {
            planned.work(name).is_some_and(|work| watermarks.missing(work, watermarks.last).contains(kind))
        };
        self.watches.iter().filter(waits).map(|(name, _)| name.as_str())
    }

    /// Requests the objects of a forwarded watch whose queue was dropped: events that were accepted for it may not have
    /// reached the manager. Until the agent has sent them, the watch settles nothing.
    pub(super) fn request_forward(&mut self, watch: &str) {
        if let Some(watermarks) = self.watches.get(watch) {
            self.compare.request(watch, watermarks.last.max(self.sequences.accepted()));
        }
    }

    /// Advances the watermarks after work ended. `accepted` and `plan_at_start` are those of the reconcile's start.
    pub(super) fn ended(&mut self, work: WorkSet, accepted: u64, plan_at_start: &PlanIndex, current: &PlanIndex) {
        for (name, watermarks) in self.watches.iter_mut() {
            watermarks.advance(work, accepted, plan_at_start.work(name), current.work(name));
        }
    }

    /// Same as [`Self::ended`] for one watch.
    pub(super) fn ended_of(
        &mut self,
        watch: &str,
        work: WorkSet,
        accepted: u64,
        plan_at_start: &PlanIndex,
        current: &PlanIndex,
    ) {
        if work.contains(Work::Forward) && self.compare.is_requested(watch) {
            return;
        }
        if let Some(watermarks) = self.watches.get_mut(watch) {
            watermarks.advance(work, accepted, plan_at_start.work(watch), current.work(watch));
        }
    }

    /// Applies another plan: a watch may have less work now. Unplanned names are removed when there are too many.
    pub(super) fn replan(&mut self, current: &PlanIndex) {
        if self.watches.len() > MAX_WATCHES {
            self.watches.retain(|name, _| current.work(name).is_some());
        }
        for (name, watermarks) in self.watches.iter_mut() {
            if let Some(work) = current.work(name) {
                watermarks.settle(work);
            }
        }
        self.compare.replan(|name| current.work(name).is_some());
    }

    /// Settled watermark per planned watch with a recorded event. When a watch leaves the plan, the agent drops its events; if the
    /// watch returns before, they still count.
    pub(super) fn settled(&self, planned: &PlanIndex) -> Settled {
        let settled = |(name, watermarks): (&String, &Watermarks)| {
            (watermarks.settled > 0 && planned.work(name).is_some()).then(|| (name.clone(), watermarks.settled))
        };
        self.watches.iter().filter_map(settled).collect()
    }

    /// Advances the heartbeat counter. Returns false, without effect, if it is not higher than the last.
    pub(super) fn advance_counter(&mut self, counter: u64) -> bool {
        let is_higher = self.counter < Some(counter);
        self.counter = self.counter.max(Some(counter));
        is_higher
    }

    /// Processes a counted heartbeat. Returns the watches with a digest mismatch.
    ///
    /// An agent does not resend events that an earlier ledger of this epoch accepted, and this ledger cannot settle
    /// them. An agent that has sent sequences which this empty ledger has not seen may hold such events, so its watches
    /// are requested again. If the runtime was placed while events were already received (`placed_late`), the earlier
    /// ledger may have belonged to this process and a delayed request may have filled this one meanwhile; then the same
    /// applies to an agent that reports twice that it has sent more, and sends no events in between.
    pub(super) fn heartbeat(&mut self, heartbeat: &Heartbeat, placed_late: bool, planned: &PlanIndex) -> Vec<String> {
        let accepted = self.sequences.accepted();
        let stalled = !std::mem::take(&mut self.events_since_heartbeat) && self.compare.is_behind(accepted);
        if heartbeat.sequence > accepted && (self.sequences.is_empty() || (placed_late && stalled)) {
            self.compare.request_unknown(heartbeat, |name| planned.work(name).is_some());
        }
        self.compare.set_pending(heartbeat, |name| planned.work(name).is_some());
        self.check(planned)
    }

    fn check(&mut self, planned: &PlanIndex) -> Vec<String> {
        self.compare.check(self.sequences.accepted(), self.sequences.is_whole(), |name| planned.work(name).is_some())
    }

    pub(super) fn view(&self, epoch: Epoch, planned: &PlanIndex) -> EpochView {
        EpochView {
            epoch,
            accepted: self.sequences.accepted(),
            since: self.sequences.since(),
            missing: self.sequences.missing(),
            unsettled: self.missing(planned, 0).iter().collect(),
            resend: self.compare.resend(),
            duplicates: self.duplicates,
            reordered: self.reordered,
            gaps: self.gaps,
        }
    }
}
