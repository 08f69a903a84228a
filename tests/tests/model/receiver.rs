//! The receiver's side of the model: instances with the product's runtime table, and reconciles that read the cluster
//! and record its state.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::FutureExt as _;
use tidewatch_api::{
    identity::{Epoch, Instance, RuntimeId},
    key::KymaKey,
    plan::{Plan, Work},
};
use tidewatch_cluster::{error_class::ErrorClass, leader::WriteFence};
use tidewatch_contract::signature::{Nonce, VerifiedSignature, WINDOW_SECONDS};
use tidewatch_fleet::{
    EventBatch, Verified,
    forward::{self, Delivery, Routes, Service, Target},
    queue::{Drift, Priority, ReconcileOutcome, WorkSet},
    table::{Job, Metrics, RuntimeTable, Settings},
};
use tokio::time::Instant;

use crate::{
    agent::{Body, Request, Response},
    cluster::{ClusterSnapshot, NAMES, Name, ObservedObject, ObservedObjects, PlanId, RESOURCES, WATCHES},
};

/// Deadline by which the last write of a crashed receiver has been applied.
pub(crate) const REQUEST_DEADLINE: Duration = Duration::from_secs(20);

pub(crate) fn kyma() -> KymaKey {
    KymaKey::new("ns", "kyma")
}

pub(crate) fn runtime() -> RuntimeId {
    "r-1".parse().unwrap()
}

/// Wraps input of the runtime like the gateway after verification.
fn verified<T>(epoch: Epoch, created: i64, payload: T) -> Verified<T> {
    Verified::new(runtime(), VerifiedSignature::unchecked(created, Nonce { epoch, counter: 0 }), payload)
}

/// The state that all receivers together have recorded.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// Per work and watch: the state of the objects at the last reconcile.
    pub(crate) recorded: BTreeMap<(Work, usize), ObservedObjects>,
    /// Per work and watch: the tick at which the newest completed reconcile began.
    began: BTreeMap<(Work, usize), u64>,
    /// Per forwarded watch and object: the state that its manager observed at the last delivery, and the tick of that
    /// delivery.
    delivered: BTreeMap<(usize, Name), (Option<ObservedObject>, u64)>,
    /// Per forwarded watch: the tick of the last delivery that covers all of its objects.
    delivered_all: BTreeMap<usize, u64>,
}

impl Records {
    pub(crate) fn began(&self, work: Work, watch: usize) -> u64 {
        self.began.get(&(work, watch)).copied().unwrap_or(0)
    }

    /// Returns the tick of the last delivery about an object.
    pub(crate) fn delivered_at(&self, watch: usize, name: Name) -> u64 {
        self.delivered.get(&(watch, name)).map_or(0, |(_, tick)| *tick)
    }

    /// Returns the state that the manager observed then; `None` also if the object was deleted.
    pub(crate) fn delivered(&self, watch: usize, name: Name) -> Option<ObservedObject> {
        self.delivered.get(&(watch, name)).and_then(|(object, _)| *object)
    }

    /// Returns the tick of the last delivery that names no object and so covers all of them.
    pub(crate) fn delivered_all_at(&self, watch: usize) -> u64 {
        self.delivered_all.get(&watch).copied().unwrap_or(0)
    }

    /// Records an event that a manager has accepted.
    pub(crate) fn record_delivery(&mut self, PendingDelivery { watch, found, tick, .. }: &PendingDelivery) {
        for (name, found) in found {
            if self.delivered_at(*watch, *name) < *tick {
                self.delivered.insert((*watch, *name), (*found, *tick));
            }
        }
        if found.len() > 1 {
            self.delivered_all.insert(*watch, self.delivered_all_at(*watch).max(*tick));
        }
    }

    /// Returns the work with a newest record from a later snapshot: a write conflict, so the work starts over.
    pub(crate) fn conflicts(&self, works: WorkSet, input: &ReconcileInput) -> WorkSet {
        let late = |work: &Work| (0..WATCHES.len()).any(|at| self.began(*work, at) > input.tick);
        works.iter().filter(late).collect()
    }

    /// Records the snapshot of a reconcile and the end of its work.
    pub(crate) fn record_end(&mut self, works: WorkSet, input: &ReconcileInput) {
        for work in works.iter() {
            self.record(work, input);
            self.began.extend(input.watches(work).map(|at| ((work, at), input.tick)));
        }
    }

    /// Records the snapshot of a reconcile. The catalog keeps a cache and rereads only the objects that drift names.
    fn record(&mut self, work: Work, input: &ReconcileInput) {
        for at in input.watches(work) {
            let watch = &WATCHES[at];
            let recorded = self.recorded.entry((work, at)).or_default();
            let current = &input.snapshot[at];
            match &input.drift {
                Drift::All => recorded.clone_from(current),
                _ if work != Work::Catalog || input.cold_cache => recorded.clone_from(current),
                Drift::None => {}
                Drift::Objects(objects) | Drift::Reported(objects) => {
                    for object in objects.iter().filter(|object| object.subject.resource == RESOURCES[watch.resource]) {
                        let name: Name = object.subject.name.parse().unwrap();
                        match current.get(&name) {
                            Some(object) => drop(recorded.insert(name, *object)),
                            None => drop(recorded.remove(&name)),
                        }
                    }
                }
            }
        }
    }
}

/// The input of a reconcile.
#[derive(Clone, Debug)]
pub(crate) struct ReconcileInput {
    pub(crate) snapshot: ClusterSnapshot,
    pub(crate) drift: Drift,
    /// The catalog cache is empty, so everything is read.
    pub(crate) cold_cache: bool,
    /// The plan of the reconcile. Work on the Kyma reads only watches that trigger it; the catalog reads the objects
    /// that drift names.
    pub(crate) plan: PlanId,
    pub(crate) tick: u64,
}

impl ReconcileInput {
    fn watches(&self, work: Work) -> impl Iterator<Item = usize> + use<> {
        let plan = self.plan;
        let reads = move |at: &usize| plan.has(*at) && plan.works(*at).contains(&work);
        (0..WATCHES.len()).filter(move |at| work == Work::Catalog || reads(at))
    }
}

/// An event on its way to another manager, which reads the object as soon as the event arrives.
pub(crate) struct PendingDelivery {
    delivery: Delivery,
    watch: usize,
    /// The state that the manager observes: of one object, or of all if the event names none.
    found: BTreeMap<Name, Option<ObservedObject>>,
    tick: u64,
}

impl PendingDelivery {
    pub(crate) fn new(delivery: Delivery, snapshot: &ClusterSnapshot, tick: u64) -> Self {
        let watch = WATCHES.iter().position(|watch| watch.name == delivery.watch()).unwrap();
        let names = match delivery.event.name.as_str() {
            "" => 0..NAMES,
            name => name.parse().map(|name: Name| name..name + 1).unwrap(),
        };
        let found = names.map(|name| (name, snapshot[watch].get(&name).copied())).collect();
        Self { watch, found, tick, delivery }
    }

    pub(crate) fn delivery(&self) -> &Delivery {
        &self.delivery
    }
}

/// Response of another manager to an event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ManagerResponse {
    Accepted,
    /// The event was not accepted, or the result is unknown; optionally with the number of seconds to wait
    /// (`Retry-After`).
    Failed(Option<u16>),
    /// The event was refused with this status. The refusal does not depend on its content, so it is never final.
    Refused(u16),
}

/// Returns the routes of a plan's forwarded watches.
pub(crate) fn routes(plan: &Plan) -> Routes {
    let forwarded = plan.watches().iter().filter(|watch| watch.work.contains(&Work::Forward));
    let target = || Target::new("m", Service::new("s", "n", 1).unwrap()).unwrap();
    forwarded.map(|watch| (watch.name.clone(), target())).collect()
}

struct RunningReconcile {
    job: Job,
    input: ReconcileInput,
}

/// Result of a reconcile.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReconcileResult {
    Succeeded,
    Failed,
    /// Only the catalog failed.
    CatalogFailed,
    /// Only the catalog is paused.
    CatalogPaused,
    Paused,
    /// The worker dropped the job without an outcome.
    Aborted,
}

/// The last write of a receiver that crashed.
#[derive(Debug)]
pub(crate) struct LateWrite {
    works: WorkSet,
    input: ReconcileInput,
    until: Instant,
}

impl LateWrite {
    /// Applies the write unless its deadline has passed. It is applied without conflict detection.
    pub(crate) fn apply(self, records: &mut Records) {
        if Instant::now() < self.until {
            self.works.iter().for_each(|work| records.record(work, &self.input));
        }
    }
}

/// One incarnation of a receiver.
pub(crate) struct Receiver {
    fleet: RuntimeTable,
    running: Option<RunningReconcile>,
    /// Set once the catalog has been reconciled.
    warm_cache: bool,
    /// Paused work that has not been enqueued again.
    paused: WorkSet,
    /// Events on their way to other managers.
    deliveries: Vec<PendingDelivery>,
    /// The ledger of accepted events was dropped.
    lost_ledger: bool,
}

impl Receiver {
    pub(crate) fn start(incarnation: u64, plan: Arc<Plan>, metrics: Metrics) -> Self {
        let settings =
            Settings { request_deadline: REQUEST_DEADLINE, slots: 4, seed: incarnation, ..Settings::default() };
        let fleet = RuntimeTable::holding_all(
            settings,
            metrics,
            Instance::new(incarnation),
            &WriteFence::default(),
            Instant::now(),
        );
        fleet.set_routes(routes(&plan));
        fleet.place(kyma(), "", Some(runtime()), plan);
        Self {
            fleet,
            running: None,
            warm_cache: false,
            paused: WorkSet::EMPTY,
            deliveries: Vec::new(),
            lost_ledger: false,
        }
    }

    /// Marks the caches as synced.
    pub(crate) fn set_synced(&self) {
        self.fleet.set_synced();
    }

    pub(crate) fn set_plan(&self, plan: Arc<Plan>) {
        self.fleet.set_routes(routes(&plan));
        self.fleet.place(kyma(), "", Some(runtime()), plan);
    }

    /// Deletes and recreates the Kyma. Like every new Kyma in KCP it is verified.
    pub(crate) fn replace_kyma(&mut self, plan: Arc<Plan>) {
        self.lost_ledger = true;
        self.fleet.remove(&kyma());
        self.set_plan(plan);
        self.verify();
    }

    pub(crate) fn enqueue(&self, works: WorkSet, priority: Priority) {
        self.fleet.enqueue(&kyma(), works, priority);
    }

    /// Ends a pause. That changes an object in KCP, which enqueues the paused work.
    pub(crate) fn unpause(&mut self) {
        self.fleet.enqueue(&kyma(), self.paused, Priority::Verification);
        self.paused = WorkSet::EMPTY;
    }

    /// Handles a request at a time of the receivers' wall clock, in Unix seconds.
    pub(crate) fn handle(&self, request: Request, now: i64) -> Response {
        let Request { id, created, body } = request;
        if created > now + WINDOW_SECONDS {
            // The clock was set back. The gateway refuses the signature, and the agent signs with the new time.
            return Response::Unauthorized;
        }
        match body {
            Body::Events(events) => {
                let batch = verified(id.epoch, created, EventBatch { events, traceparent: None });
                let response = self.fleet.events(batch.with_leaf(vec![0x30].into()), now);
                response.map_or(Response::Unavailable, Response::Events)
            }
            Body::Heartbeat(heartbeat) => {
                let heartbeat = verified(id.epoch, created, *heartbeat);
                self.fleet.heartbeat(heartbeat, now).map_or(Response::Unavailable, Response::Heartbeat)
            }
        }
    }

    /// Begins a reconcile and takes its snapshot. Returns false if none can begin.
    pub(crate) fn begin_reconcile(
        &mut self,
        snapshot: impl FnOnce() -> ClusterSnapshot,
        plan: PlanId,
        tick: u64,
    ) -> bool {
        if self.running.is_some() {
            // The only Kyma is being reconciled, so no other worker may get it.
            assert!(self.fleet.next().now_or_never().is_none(), "a Kyma is reconciled by one worker at a time");
            return false;
        }
        let Some(job) = self.fleet.next().now_or_never() else { return false };
        let drift = job.queued.drift.clone();
        let input = ReconcileInput { snapshot: snapshot(), drift, cold_cache: !self.warm_cache, plan, tick };
        self.running = Some(RunningReconcile { job, input });
        true
    }

    pub(crate) fn end_reconcile(&mut self, result: ReconcileResult, records: &mut Records) -> bool {
        let Some(RunningReconcile { job, input }) = self.running.take() else { return false };
        let works = job.queued.work;
        let catalog = WorkSet::of(&[Work::Catalog]);
        let mut outcome = match result {
            ReconcileResult::Succeeded => ReconcileOutcome::ended(works),
            ReconcileResult::Failed => ReconcileOutcome::failed(works, ErrorClass::Ours),
            ReconcileResult::CatalogFailed => ReconcileOutcome {
                ended: works.minus(catalog),
                ..ReconcileOutcome::failed(works.both(catalog), ErrorClass::Refused)
            },
            ReconcileResult::CatalogPaused => ReconcileOutcome::ended(works.minus(catalog)),
            ReconcileResult::Paused => ReconcileOutcome::default(),
            ReconcileResult::Aborted => {
                drop(job);
                return true;
            }
        };
        let late = records.conflicts(outcome.ended, &input);
        if !late.is_empty() {
            outcome.ended = outcome.ended.minus(late);
            outcome.failed |= late;
            outcome.class = Some(ErrorClass::Refused);
        }
        records.record_end(outcome.ended, &input);
        self.warm_cache |= outcome.ended.contains(Work::Catalog);
        self.paused |= works.minus(outcome.ended | outcome.failed);
        self.fleet.done(job, outcome);
        true
    }

    /// Takes the next event for another manager. Returns false if there is none.
    pub(crate) fn begin_delivery(&mut self, snapshot: impl FnOnce() -> ClusterSnapshot, tick: u64) -> bool {
        let Some(delivery) = self.fleet.next_delivery().now_or_never() else { return false };
        self.deliveries.push(PendingDelivery::new(delivery, &snapshot(), tick));
        true
    }

    /// Applies the response of another manager.
    pub(crate) fn end_delivery(&mut self, at: usize, response: ManagerResponse, records: &mut Records) -> bool {
        if at >= self.deliveries.len() {
            return false;
        }
        let pending = self.deliveries.remove(at);
        let outcome = match response {
            ManagerResponse::Accepted => {
                records.record_delivery(&pending);
                forward::DeliveryOutcome::Delivered
            }
            ManagerResponse::Refused(status) => forward::DeliveryOutcome::Refused(status),
            ManagerResponse::Failed(retry_after) => {
                forward::DeliveryOutcome::Failed(retry_after.map(|seconds| Duration::from_secs(seconds.into())))
            }
        };
        self.fleet.forwarded(pending.delivery(), outcome);
        true
    }

    /// Crashes the receiver. Returns the write in progress, which may still be applied.
    pub(crate) fn crash(self) -> Option<LateWrite> {
        let RunningReconcile { job, input } = self.running?;
        Some(LateWrite { works: job.queued.work, input, until: Instant::now() + REQUEST_DEADLINE })
    }

    /// Returns the queued work, or `None` if the receiver is idle.
    pub(crate) fn pending_work(&self) -> Option<WorkSet> {
        let view = self.fleet.views().remove(0);
        (!view.queued.is_empty() || view.in_progress).then(|| WorkSet::of(&view.queued))
    }

    /// Returns the watches for which the receiver requests a resend.
    pub(crate) fn requested_watches(&self) -> Vec<String> {
        self.fleet.views().remove(0).epochs.into_iter().flat_map(|epoch| epoch.resend).collect()
    }

    /// Returns the first sequence that the ledger of an epoch covers.
    pub(crate) fn ledger_start(&self, epoch: Epoch) -> u64 {
        self.fleet.views().remove(0).epochs.into_iter().find(|view| view.epoch == epoch).map_or(1, |view| view.since)
    }

    /// Returns true if the receiver may request a resend without a lost event, where `sent` is the agent's highest
    /// sequence: a request is already open, or some events up to `sent` are missing and it has accepted none of this
    /// epoch or has lost its ledger.
    pub(crate) fn may_request_resend(&self, epoch: Epoch, sent: u64) -> bool {
        let view = self.fleet.views().remove(0).epochs.into_iter().find(|view| view.epoch == epoch);
        let accepted = view.as_ref().map_or(0, |view| view.accepted);
        let requests_resend = view.is_some_and(|view| !view.resend.is_empty());
        requests_resend || (sent > accepted && (accepted == 0 || self.lost_ledger))
    }

    /// Enqueues a verification of the runtime, as after every start.
    pub(crate) fn verify(&self) {
        self.enqueue(WorkSet::RUNTIME, Priority::Verification);
    }
}
