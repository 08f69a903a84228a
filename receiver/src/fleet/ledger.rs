//! One epoch of one runtime: what came, for which watches, and how far their work has ended.

use tidewatch_shared::{
    digest::Digest,
    exchange::Settled,
    heartbeat::Heartbeat,
    identity::Epoch,
    plan::{MAX_WATCHES, Work},
};

use super::{
    Planned,
    compare::Compare,
    run::{Run, Seen},
};
use crate::{base::short_map::ShortMap, fleet::queue::Works};

/// One watch of one epoch.
#[derive(Clone, Debug, Default)]
struct Marks {
    /// The highest sequence recorded for it.
    last: u64,
    /// Per work: what was accepted when the last pass that ended it began.
    ended: [u64; Works::COUNT],
    /// The lowest of `ended` over the works it stands for; never lowered.
    settled: u64,
}

impl Marks {
    /// The works that must still end for a sequence.
    fn missing(&self, works: Works, sequence: u64) -> Works {
        if sequence <= self.settled {
            return Works::EMPTY;
        }
        works.iter().filter(|work| self.ended[Works::index(*work)] < sequence).collect()
    }

    fn settle(&mut self, works: Works) {
        let lowest = works.iter().map(|work| self.ended[Works::index(work)]).min();
        self.settled = self.settled.max(lowest.unwrap_or(0));
    }
}

/// An event as the ledger needs it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<'a> {
    pub(super) sequence: u64,
    pub(super) watch: &'a str,
    /// Whether it is a `watch.changed`.
    pub(super) listed: bool,
    pub(super) delta: Digest,
}

/// What recording an event means.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) seen: Seen,
    /// Works that the event itself wants; `None` if no watch of the plan has its name.
    pub(super) wants: Option<Works>,
    /// Works of events that had come before and were accepted only now.
    pub(super) joined: Works,
    /// Watches whose digest was found to differ.
    pub(super) differing: Vec<String>,
}

/// Ledger of one epoch.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger {
    run: Run,
    watches: ShortMap<String, Marks>,
    compare: Compare,
    /// The newest `created` of any signature of this epoch, unix seconds.
    pub(super) newest: i64,
    /// Counts epochs in the order in which they came; decides between equal `newest`.
    pub(super) order: u64,
    /// The highest of the lowest sequences of its requests. An agent has one request on its way, so what lies below was answered and
    /// the answer heard.
    pub(super) reached: u64,
    /// A request of events has come since the last heartbeat that counted.
    spoke: bool,
    counter: Option<u64>,
    duplicates: u64,
    reordered: u64,
    gaps: u64,
}

impl Ledger {
    pub(super) fn new(created: i64, order: u64) -> Self {
        Self { newest: created, order, ..Self::default() }
    }

    pub(super) fn accepted(&self) -> u64 {
        self.run.accepted()
    }

    pub(super) fn since(&self) -> u64 {
        self.run.since()
    }

    /// Begins at the lowest sequence of the first request, whether it is refused or not: a refused one is still to come.
    pub(super) fn begin(&mut self, first: u64) {
        self.spoke = true;
        if self.run.begin(first) && first != 1 {
            self.compare.begin_anew();
        }
    }

    /// Records an event.
    pub(super) fn record(&mut self, entry: Entry<'_>, planned: &Planned) -> Taken {
        let before = self.run.accepted();
        let seen = self.run.record(entry.sequence);
        match seen {
            Seen::Next { joined } => {
                self.reordered += u64::from(joined || !self.run.is_whole());
                self.compare.moved(entry.watch, entry.delta);
            }
            Seen::Again => self.duplicates += 1,
            Seen::Below => self.reordered += 1,
            Seen::Ahead | Seen::TooFar => self.gaps += 1,
        }
        if matches!(seen, Seen::Ahead | Seen::Below | Seen::TooFar) {
            self.compare.begin_anew();
        }
        if entry.listed && seen != Seen::TooFar {
            self.compare.listed(entry.watch, entry.sequence);
        }
        let wants = planned.works(entry.watch).map(|works| {
            let marks = self.watches.entry(entry.watch);
            if seen != Seen::TooFar {
                marks.last = marks.last.max(entry.sequence);
            }
            // What is new wants all its work, also where the ledger cannot tell; what was seen, only what has not ended.
            if seen == Seen::Again { marks.missing(works, entry.sequence) } else { works }
        });
        let joined = if seen == (Seen::Next { joined: true }) { self.missing(planned, before) } else { Works::EMPTY };
        let differing = self.check(planned);
        Taken { seen, wants, joined, differing }
    }

    /// Works that unsettled events of the plan's watches stand for, of watches whose last event is above a sequence.
    pub(super) fn missing(&self, planned: &Planned, above: u64) -> Works {
        let recorded = self.watches.iter().filter(|(_, marks)| marks.last > above);
        let missing = recorded.filter_map(|(name, marks)| Some(marks.missing(planned.works(name)?, marks.last)));
        missing.fold(Works::EMPTY, |sum, works| sum | works)
    }

    /// Watches of which a recorded event waits for a work.
    pub(super) fn unended<'a>(&'a self, work: Work, planned: &'a Planned) -> impl Iterator<Item = String> + 'a {
        let waits = move |(name, marks): &(&String, &Marks)| {
            planned.works(name).is_some_and(|works| marks.missing(works, marks.last).contains(work))
        };
        self.watches.iter().filter(waits).map(|(name, _)| name.clone())
    }

    /// Works have ended that began when `accepted` was so and the plan was `began`.
    pub(super) fn ended(&mut self, works: Works, accepted: u64, began: &Planned, current: &Planned) {
        for (name, marks) in self.watches.iter_mut() {
            end(name, marks, works, accepted, began, current);
        }
    }

    /// The same for one watch alone.
    pub(super) fn ended_of(&mut self, watch: &str, works: Works, accepted: u64, began: &Planned, current: &Planned) {
        if let Some(marks) = self.watches.get_mut(watch) {
            end(watch, marks, works, accepted, began, current);
        }
    }

    /// Another plan: a watch may now stand for less. Names that are in no plan any more go when there are too many.
    pub(super) fn replan(&mut self, current: &Planned) {
        if self.watches.len() > MAX_WATCHES {
            self.watches.retain(|name, _| current.works(name).is_some());
        }
        for (name, marks) in self.watches.iter_mut() {
            if let Some(works) = current.works(name) {
                marks.settle(works);
            }
        }
        self.compare.replan(|name| current.works(name).is_some());
    }

    /// Per watch of which something was recorded. One that has left the plan counts as settled, as far as anything of it was recorded:
    /// what was refused since then is the agent's to send again.
    pub(super) fn settled(&self, planned: &Planned) -> Settled {
        let settled = |(name, marks): (&String, &Marks)| {
            let settled = planned.works(name).map_or(marks.last.min(self.run.accepted()), |_| marks.settled);
            (settled > 0).then(|| (name.clone(), settled))
        };
        self.watches.iter().filter_map(settled).collect()
    }

    /// Whether the counter of a heartbeat is higher than the last; if so, it is now the last.
    pub(super) fn counts(&mut self, counter: u64) -> bool {
        let higher = self.counter.is_none_or(|last| counter > last);
        if higher {
            self.counter = Some(counter);
        }
        higher
    }

    /// Takes a heartbeat that counts. Returns the watches whose digest was found to differ.
    ///
    /// Events that an earlier life of this ledger accepted will not be sent again by themselves, and nothing here can settle them. An
    /// agent that has sent something of which nothing is known may be one of those. With `placed_late` that life may have ended in this
    /// process, and an old request may have come since: then also one that says twice that it has sent more, and sends nothing between.
    pub(super) fn heartbeat(&mut self, heartbeat: &Heartbeat, placed_late: bool, planned: &Planned) -> Vec<String> {
        let accepted = self.run.accepted();
        let silent = !std::mem::take(&mut self.spoke) && self.compare.is_behind(accepted);
        if heartbeat.sequence > accepted && (self.run.is_empty() || (placed_late && silent)) {
            self.compare.forgotten(heartbeat, |name| planned.works(name).is_some());
        }
        self.compare.said(heartbeat);
        self.check(planned)
    }

    /// Heartbeats of this epoch do not count any more.
    pub(super) fn forget_digests(&mut self) {
        self.compare = Compare::default();
    }

    pub(super) fn resend(&self) -> Vec<String> {
        self.compare.resend()
    }

    /// The first of [`Self::resend`] whose digest did not agree.
    pub(super) fn diverged(&self) -> Option<&str> {
        self.compare.diverged()
    }

    fn check(&mut self, planned: &Planned) -> Vec<String> {
        self.compare.check(self.run.accepted(), self.run.is_whole(), |name| planned.works(name).is_some())
    }

    pub(super) fn view(&self, epoch: Epoch, planned: &Planned) -> EpochView {
        EpochView {
            epoch,
            accepted: self.run.accepted(),
            since: self.run.since(),
            missing: self.run.missing(),
            settled: self.settled(planned),
            unsettled: self.missing(planned, 0),
            resend: self.resend(),
            duplicates: self.duplicates,
            reordered: self.reordered,
            gaps: self.gaps,
        }
    }
}

fn end(watch: &str, marks: &mut Marks, works: Works, accepted: u64, began: &Planned, current: &Planned) {
    let Some(stood_for) = began.works(watch) else { return };
    for work in stood_for.both(works).iter() {
        let mark = &mut marks.ended[Works::index(work)];
        *mark = accepted.max(*mark);
    }
    if let Some(stands_for) = current.works(watch) {
        marks.settle(stands_for);
    }
}

/// One epoch of a runtime, for summaries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochView {
    /// Which epoch.
    pub epoch: Epoch,
    /// Every sequence from `since` up to here was recorded.
    pub accepted: u64,
    /// Where that run begins; 1 before anything came.
    pub since: u64,
    /// Sequences that are missing now, below one that was recorded.
    pub missing: u64,
    /// Per watch: up to where all its work has ended.
    pub settled: Settled,
    /// Works that recorded events still wait for.
    pub unsettled: Works,
    /// Watches of which a `watch.changed` is awaited: their digest did not agree, or what their agent sent is not known here.
    pub resend: Vec<String>,
    /// Events that came again.
    pub duplicates: u64,
    /// Events that came after a later one.
    pub reordered: u64,
    /// Events that came while an earlier one was missing.
    pub gaps: u64,
}
