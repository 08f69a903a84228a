//! The receiver's side: instances with the product's hub, and passes that read the truth and record it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::FutureExt as _;
use rustls::pki_types::CertificateDer;
use tidewatch_receiver::{
    forward::{self, Delivery, Routes, Service, Target},
    hub::{Beside, Hub, Job, Metrics, Settings},
    key::KymaKey,
    queue::{Class, Drift, Outcome, Priority, Works},
};
use tidewatch_shared::{
    identity::{Epoch, Instance, RuntimeId},
    plan::{Plan, Work},
};
use tokio::time::Instant;

use crate::{
    agent::{Answer, Body, Request},
    cluster::{NAMES, Name, PlanId, RESOURCES, Told, Told1, Truth, WATCHES},
};

/// What a predecessor began has landed by then.
pub(crate) const REQUEST_DEADLINE: Duration = Duration::from_secs(20);

pub(crate) fn kyma() -> KymaKey {
    KymaKey::new("ns", "kyma")
}

pub(crate) fn runtime() -> RuntimeId {
    "r-1".parse().unwrap()
}

/// What has been recorded, whoever did it.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// Per work and watch: what was there when it was last looked at.
    pub(crate) known: BTreeMap<(Work, usize), Told1>,
    /// The same: when the newest pass began that looked at it and ended.
    began: BTreeMap<(Work, usize), u64>,
    /// Per forwarded watch and object: what its manager found when it was told last, and when that was.
    handed: BTreeMap<(usize, Name), (Option<Told>, u64)>,
    /// Per forwarded watch: when its manager was told last that any of its objects may have changed.
    handed_all: BTreeMap<usize, u64>,
}

impl Records {
    pub(crate) fn began(&self, work: Work, watch: usize) -> u64 {
        self.began.get(&(work, watch)).copied().unwrap_or(0)
    }

    /// When a manager was told of an object last.
    pub(crate) fn handed_at(&self, watch: usize, name: Name) -> u64 {
        self.handed.get(&(watch, name)).map_or(0, |(_, tick)| *tick)
    }

    /// What it found then; `None` also for an object that was gone.
    pub(crate) fn handed(&self, watch: usize, name: Name) -> Option<Told> {
        self.handed.get(&(watch, name)).and_then(|(told, _)| *told)
    }

    /// When a manager was told last of objects that nobody could name.
    pub(crate) fn handed_all_at(&self, watch: usize) -> u64 {
        self.handed_all.get(&watch).copied().unwrap_or(0)
    }

    /// A manager has taken an event.
    pub(crate) fn hand(&mut self, Handing { watch, found, tick, .. }: &Handing) {
        for (name, found) in found {
            if self.handed_at(*watch, *name) < *tick {
                self.handed.insert((*watch, *name), (*found, *tick));
            }
        }
        if found.len() > 1 {
            self.handed_all.insert(*watch, self.handed_all_at(*watch).max(*tick));
        }
    }

    /// Works whose newest record is of a later reading: a conflict, and the work begins anew.
    pub(crate) fn conflicts(&self, works: Works, reading: &Reading) -> Works {
        let late = |work: &Work| (0..WATCHES.len()).any(|at| self.began(*work, at) > reading.tick);
        works.iter().filter(late).collect()
    }

    /// Records what a pass has read, and that its work has ended.
    pub(crate) fn end(&mut self, works: Works, reading: &Reading) {
        for work in works.iter() {
            self.record(work, reading);
            self.began.extend(reading.watches(work).map(|at| ((work, at), reading.tick)));
        }
    }

    /// Records what a pass has read. The catalog has a memory, and reads again only what drift casts doubt on.
    fn record(&mut self, work: Work, pass: &Reading) {
        for at in pass.watches(work) {
            let watch = &WATCHES[at];
            let (known, read) = (self.known.entry((work, at)).or_default(), &pass.read[at]);
            match &pass.drift {
                Drift::All => known.clone_from(read),
                _ if work != Work::Catalog || pass.forgetful => known.clone_from(read),
                Drift::None => {}
                Drift::Objects(objects) => {
                    for object in objects.iter().filter(|object| object.subject.resource == RESOURCES[watch.resource]) {
                        let name: Name = object.subject.name.parse().unwrap();
                        match read.get(&name) {
                            Some(told) => drop(known.insert(name, *told)),
                            None => drop(known.remove(&name)),
                        }
                    }
                }
            }
        }
    }
}

/// What a pass has read.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) read: Truth,
    pub(crate) drift: Drift,
    /// It has no memory to go by.
    pub(crate) forgetful: bool,
    /// Work on the Kyma reads nothing of watches that do not stand for it. The catalog goes by what drift names.
    pub(crate) plan: PlanId,
    pub(crate) tick: u64,
}

impl Reading {
    fn watches(&self, work: Work) -> impl Iterator<Item = usize> + use<> {
        let plan = self.plan;
        let reads = move |at: &usize| plan.has(*at) && plan.works(*at).contains(&work);
        (0..WATCHES.len()).filter(move |at| work == Work::Catalog || reads(at))
    }
}

/// An event on its way to another manager, which looks at the object as soon as it comes.
pub(crate) struct Handing {
    delivery: Delivery,
    watch: usize,
    /// What it finds, where it looks: at one object, or at all of them when the event names none.
    found: BTreeMap<Name, Option<Told>>,
    tick: u64,
}

impl Handing {
    pub(crate) fn new(delivery: Delivery, truth: &Truth, tick: u64) -> Self {
        let watch = WATCHES.iter().position(|watch| watch.name == delivery.watch()).unwrap();
        let names = match delivery.event.name.as_str() {
            "" => 0..NAMES,
            name => name.parse().map(|name: Name| name..name + 1).unwrap(),
        };
        let found = names.map(|name| (name, truth[watch].get(&name).copied())).collect();
        Self { watch, found, tick, delivery }
    }

    pub(crate) fn delivery(&self) -> &Delivery {
        &self.delivery
    }
}

/// How an event fares with another manager.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fate {
    Taken,
    /// It was not taken, or nobody knows that it was; the manager may have said for how many seconds to wait.
    Failed(Option<u16>),
    /// It was refused, with this status: not for what it is, so never for good.
    Refused(u16),
}

/// Where the events of a plan's forwarded watches go.
pub(crate) fn routes(plan: &Plan) -> Routes {
    let forwarded = plan.watches().iter().filter(|watch| watch.work.contains(&Work::Forward));
    let target = || Target::new("m", Service::new("s", "n", 1).unwrap()).unwrap();
    forwarded.map(|watch| (watch.name.clone(), target())).collect()
}

struct Pass {
    job: Job,
    reading: Reading,
}

/// How a pass ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Good,
    Failed,
    /// Only the catalog failed.
    CatalogFailed,
    /// Only the catalog is paused.
    CatalogPaused,
    Paused,
    /// Nobody tells how it ended: the worker broke off.
    Dropped,
}

/// The last write of an instance that died.
#[derive(Debug)]
pub(crate) struct Ghost {
    works: Works,
    reading: Reading,
    until: Instant,
}

impl Ghost {
    /// Lands, unless it is too late. A write of that kind knows no conflict.
    pub(crate) fn land(self, records: &mut Records) {
        if Instant::now() < self.until {
            self.works.iter().for_each(|work| records.record(work, &self.reading));
        }
    }
}

/// One life of a receiver.
pub(crate) struct Receiver {
    hub: Hub,
    pass: Option<Pass>,
    /// It has worked on the catalog once.
    remembers: bool,
    /// What was paused and not woken since.
    paused: Works,
    /// What is on its way to other managers.
    handings: Vec<Handing>,
    /// It has forgotten what it had accepted.
    forgot: bool,
}

impl Receiver {
    pub(crate) fn start(life: u64, plan: Arc<Plan>, metrics: Metrics) -> Self {
        let settings = Settings { request_deadline: REQUEST_DEADLINE, slots: 4, seed: life, ..Settings::default() };
        let hub = Hub::new(Instance::new(life), settings, metrics, Instant::now());
        hub.set_routes(routes(&plan));
        hub.place(kyma(), Some(runtime()), plan);
        Self { hub, pass: None, remembers: false, paused: Works::EMPTY, handings: Vec::new(), forgot: false }
    }

    /// Its caches are there.
    pub(crate) fn synced(&self) {
        self.hub.set_synced();
    }

    pub(crate) fn place(&self, plan: Arc<Plan>) {
        self.hub.set_routes(routes(&plan));
        self.hub.place(kyma(), Some(runtime()), plan);
    }

    /// Its Kyma goes and comes again; whatever is new in KCP is worked on.
    pub(crate) fn forget(&mut self, plan: Arc<Plan>) {
        self.forgot = true;
        self.hub.remove(&kyma());
        self.place(plan);
        self.verify();
    }

    pub(crate) fn want(&self, works: Works, priority: Priority) {
        self.hub.want(&kyma(), works, priority);
    }

    /// Whoever ends a pause changes something in KCP, and that wakes.
    pub(crate) fn unpause(&mut self) {
        self.hub.want(&kyma(), self.paused, Priority::Verification);
        self.paused = Works::EMPTY;
    }

    pub(crate) fn take(&self, request: Request) -> Answer {
        let Request { from, created, body } = request;
        match body {
            Body::Events(events) => {
                let leaf = CertificateDer::from(vec![0x30]);
                let beside = Beside { leaf: Some(&leaf), ..Beside::default() };
                let answer = self.hub.events_with(&runtime(), from.epoch, created, events, beside);
                answer.map_or(Answer::Fault, Answer::Events)
            }
            Body::Beat(beat) => {
                self.hub.heartbeat(&runtime(), created, *beat, created).map_or(Answer::Fault, Answer::Beat)
            }
        }
    }

    /// A pass begins, and reads.
    pub(crate) fn begin(&mut self, truth: impl FnOnce() -> Truth, plan: PlanId, tick: u64) -> bool {
        if self.pass.is_some() {
            // The only Kyma is in work: nobody else may have it.
            assert!(self.hub.next().now_or_never().is_none(), "one at a time");
            return false;
        }
        let Some(job) = self.hub.next().now_or_never() else { return false };
        let drift = job.wanted.drift.clone();
        let reading = Reading { read: truth(), drift, forgetful: !self.remembers, plan, tick };
        self.pass = Some(Pass { job, reading });
        true
    }

    pub(crate) fn end(&mut self, how: End, records: &mut Records) -> bool {
        let Some(Pass { job, reading }) = self.pass.take() else { return false };
        let (works, catalog) = (job.wanted.works, Works::of(&[Work::Catalog]));
        let mut outcome = match how {
            End::Good => Outcome::ended(works),
            End::Failed => Outcome::failed(works, Class::Ours),
            End::CatalogFailed => {
                Outcome { ended: works.minus(catalog), ..Outcome::failed(works.both(catalog), Class::Refused) }
            }
            End::CatalogPaused => Outcome::ended(works.minus(catalog)),
            End::Paused => Outcome::default(),
            End::Dropped => {
                drop(job);
                return true;
            }
        };
        let late = records.conflicts(outcome.ended, &reading);
        if !late.is_empty() {
            outcome.ended = outcome.ended.minus(late);
            outcome.failed |= late;
            outcome.class = Some(Class::Refused);
        }
        records.end(outcome.ended, &reading);
        self.remembers |= outcome.ended.contains(Work::Catalog);
        self.paused |= works.minus(outcome.ended | outcome.failed);
        self.hub.done(job, outcome);
        true
    }

    /// An event leaves for another manager.
    pub(crate) fn hand(&mut self, truth: impl FnOnce() -> Truth, tick: u64) -> bool {
        let Some(delivery) = self.hub.next_delivery().now_or_never() else { return false };
        self.handings.push(Handing::new(delivery, &truth(), tick));
        true
    }

    /// An answer comes from another manager.
    pub(crate) fn handed(&mut self, at: usize, fate: Fate, records: &mut Records) -> bool {
        if at >= self.handings.len() {
            return false;
        }
        let handing = self.handings.remove(at);
        let outcome = match fate {
            Fate::Taken => {
                records.hand(&handing);
                forward::Outcome::Delivered
            }
            Fate::Refused(status) => forward::Outcome::Refused(status),
            Fate::Failed(told) => forward::Outcome::Failed(told.map(|seconds| Duration::from_secs(seconds.into()))),
        };
        self.hub.forwarded(handing.delivery(), outcome);
        true
    }

    /// Dies. What it was just writing may still land.
    pub(crate) fn die(self) -> Option<Ghost> {
        let Pass { job, reading } = self.pass?;
        Some(Ghost { works: job.wanted.works, reading, until: Instant::now() + REQUEST_DEADLINE })
    }

    /// What it will still work on; nothing when it is at rest.
    pub(crate) fn busy_with(&self) -> Option<Works> {
        let view = self.hub.view().remove(0);
        (!view.wanted.is_empty() || view.in_work).then_some(view.wanted)
    }

    /// Watches that are asked for.
    pub(crate) fn resend(&self) -> Vec<String> {
        self.hub.view().remove(0).epochs.into_iter().flat_map(|epoch| epoch.resend).collect()
    }

    /// Where the ledger of an epoch begins.
    pub(crate) fn since(&self, epoch: Epoch) -> u64 {
        self.hub.view().remove(0).epochs.into_iter().find(|view| view.epoch == epoch).map_or(1, |view| view.since)
    }

    /// Whether it may ask for watches whose digest agrees, when the agent has sent so much: of some of that it knows nothing, and it
    /// has never known anything of this epoch, or has forgotten what it knew.
    pub(crate) fn may_ask(&self, epoch: Epoch, sent: u64) -> bool {
        let view = self.hub.view().remove(0).epochs.into_iter().find(|view| view.epoch == epoch);
        let accepted = view.as_ref().map_or(0, |view| view.accepted);
        let asks = view.is_some_and(|view| !view.resend.is_empty());
        asks || (sent > accepted && (accepted == 0 || self.forgot))
    }

    /// Everything is verified, as after every start.
    pub(crate) fn verify(&self) {
        self.want(Works::RUNTIME, Priority::Verification);
    }
}
