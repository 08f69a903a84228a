//! The modelled world: the actions that change it, the invariants after each action, and the state that it converges to
//! once faults end.

pub(crate) mod actions;
mod lost_events;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use actions::{Action, RequestFault};
use proptest::{prop_assert, prop_assert_eq, test_runner::TestCaseError};
use tidewatch_agent::telemetry::Metrics as AgentMetrics;
use tidewatch_api::{identity::Epoch, plan::Work};
use tidewatch_contract::{
    digest::Digest,
    event::{EventId, Payload, Reason},
    exchange::{EventsResponse, Settled},
};
use tidewatch_fleet::{
    queue::{Priority, WorkSet},
    table::Metrics as TableMetrics,
};
use tokio::time::{self, Instant};

use crate::{
    agent::{Agent, Body, LARGE_CAP, ReportedObject, Request, RequestId, Response, SMALL_CAP},
    cluster::{Cluster, Mutation, Name, PlanId, WATCH_COUNT, WATCHES},
    receiver::{LateWrite, ManagerResponse, Receiver, ReconcileResult, Records, runtime},
};

/// Rounds within which the world must converge. One round exceeds the longest wait of either side.
const ROUNDS: usize = 12;
/// Longer than any wait of either side.
const LONG: Duration = Duration::from_secs(3_600);

/// Time that each action takes.
const ACTION_TIME: Duration = Duration::from_millis(250);
/// Unix time at the start.
const UNIX_START: i64 = 1_700_000_000;

pub(crate) type CheckResult = Result<(), TestCaseError>;

/// Per sequence: the tick at which the event was sent, and its target.
type SentEvents = BTreeMap<u64, (u64, EventTarget)>;

/// Subject of an event.
#[derive(Clone, Copy, Debug)]
enum EventTarget {
    Object(Name),
    Watch,
    /// The watch and objects of it that no event names.
    Unnamed,
}

/// Metrics of both sides. They are registered once, since registration costs more than a whole schedule.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub(crate) agent: AgentMetrics,
    pub(crate) fleet: TableMetrics,
}

pub(crate) struct World {
    metrics: Metrics,
    cap: usize,
    cluster: Cluster,
    backup: Option<Cluster>,
    agent: Agent,
    receivers: Vec<Receiver>,
    /// Counts the starts of agent and receivers.
    incarnations: u64,
    tick: u64,
    started: Instant,
    /// Sum of the steps of the receivers' wall clock, in seconds.
    clock_step: i64,
    requests: Vec<Request>,
    responses: Vec<(RequestId, Response)>,
    late_writes: Vec<LateWrite>,
    records: Records,
    /// The plan in KCP.
    plan: PlanId,
    /// The plan in the runtime cluster, and its revision.
    written_plan: (PlanId, u64),
    /// Revision of the plan in KCP.
    plan_revision: u64,
    /// Per watch: the tick at which the work that it triggers last changed.
    works_changed_at: [u64; WATCH_COUNT],
    /// Per epoch and watch: the events that no response has reported as settled yet.
    unsettled: BTreeMap<(Epoch, usize), SentEvents>,
    /// Per epoch: the highest sequence that was sent.
    highest_sent: BTreeMap<Epoch, u64>,
    /// The next event that arrives loses its content.
    corrupt_next_event: bool,
    /// Digest differences are expected.
    pub(crate) allows_digest_mismatch: bool,
}

impl World {
    pub(crate) fn new(instances: usize, metrics: Metrics) -> Self {
        let plan = PlanId::ALL;
        let cap = if instances == 1 { SMALL_CAP } else { LARGE_CAP };
        let agent = Agent::start(runtime(), 0, cap, &plan.plan(0), metrics.agent.clone());
        let mut world = Self {
            cap,
            cluster: Cluster::new(),
            backup: None,
            agent,
            receivers: Vec::new(),
            incarnations: 0,
            tick: 0,
            started: Instant::now(),
            clock_step: 0,
            requests: Vec::new(),
            responses: Vec::new(),
            late_writes: Vec::new(),
            records: Records::default(),
            plan,
            written_plan: (plan, 0),
            plan_revision: 0,
            works_changed_at: [0; WATCH_COUNT],
            unsettled: BTreeMap::new(),
            highest_sent: BTreeMap::new(),
            corrupt_next_event: false,
            allows_digest_mismatch: false,
            metrics,
        };
        for _ in 0..instances {
            let receiver = world.new_receiver();
            receiver.set_synced();
            world.receivers.push(receiver);
        }
        world
    }

    fn new_receiver(&mut self) -> Receiver {
        self.incarnations += 1;
        Receiver::start(self.incarnations, Arc::new(self.plan.plan(self.plan_revision)), self.metrics.fleet.clone())
    }

    /// Wall clock of the receivers in Unix seconds, which the agent follows. Signatures have a resolution of seconds, so
    /// two incarnations of an agent may share a timestamp.
    fn unix(&self) -> i64 {
        UNIX_START + i64::try_from(self.started.elapsed().as_secs()).unwrap() + self.clock_step
    }

    pub(crate) async fn apply(&mut self, action: Action) -> CheckResult {
        self.tick += 1;
        time::advance(ACTION_TIME).await;
        match action {
            Action::Mutate(resource, name, mutation) => self.mutate(resource, name, mutation),
            Action::ToggleStatusSubresource => {
                self.cluster.toggle_status_subresource();
                (0..WATCHES.len()).filter(|at| WATCHES[*at].resource == 0).for_each(|at| self.agent.break_watch(at));
            }
            Action::BackUpStore => self.backup = Some(self.cluster.clone()),
            Action::RestoreStore => {
                if let Some(backup) = self.backup.clone() {
                    self.cluster.restore(backup);
                    (0..WATCHES.len()).for_each(|at| self.agent.break_watch(at));
                }
            }
            Action::DeliverWatchEvent(watch) => drop(self.agent.deliver_watch_event(watch)),
            Action::List(watch, relist) => self.agent.list(&self.cluster, watch, relist, self.tick),
            Action::BreakWatch(watch) => self.agent.break_watch(watch),
            Action::SendEvents => self.send_events(),
            Action::AbandonRequest => self.agent.abandon_request(),
            Action::SendHeartbeat => self.send_heartbeat(),
            Action::Deliver { index, instance, duplicate, fault } => self.deliver(index, instance, duplicate, fault)?,
            Action::LoseRequest(at) => drop((at < self.requests.len()).then(|| self.requests.remove(at))),
            Action::DeliverResponse(at) => self.receive_response(at)?,
            Action::LoseResponse(at) => drop((at < self.responses.len()).then(|| self.responses.remove(at))),
            Action::BeginReconcile(at) => drop(self.begin_reconcile(at)),
            Action::EndReconcile(at, result) => drop(self.receivers[at].end_reconcile(result, &mut self.records)),
            Action::Enqueue(at, kyma, catalog) => self.enqueue(at, kyma, catalog),
            Action::Unpause(at) => self.receivers[at].unpause(),
            Action::RestartAgent => self.restart_agent(),
            Action::RestartReceiver(at, slow) => self.restart_receiver(at, slow),
            Action::SetSynced(at) => self.receivers[at].set_synced(),
            Action::BeginDelivery(at) => drop(self.begin_delivery(at)),
            Action::EndDelivery(at, delivery, response) => {
                self.receivers[at].end_delivery(delivery, response, &mut self.records);
            }
            Action::ReplaceKyma(at) => self.receivers[at].replace_kyma(Arc::new(self.plan.plan(self.plan_revision))),
            Action::ApplyLateWrite => {
                if let Some(late_write) = self.late_writes.pop() {
                    late_write.apply(&mut self.records);
                }
            }
            Action::ChangePlan(plan) => self.change_plan(PlanId(plan)),
            Action::WritePlan => self.written_plan = (self.plan, self.plan_revision),
            Action::ApplyPlan => self.apply_plan(),
            Action::StepClock(seconds) => self.clock_step += i64::from(seconds),
            Action::Wait(seconds) => time::advance(Duration::from_secs(seconds.into())).await,
        }
        self.check_pending()
    }

    fn mutate(&mut self, resource: usize, name: Name, mutation: Mutation) {
        let events = self.cluster.mutate(resource, name, mutation, self.tick);
        self.agent.push_watch_events(events);
    }

    fn send_events(&mut self) {
        let created = self.unix();
        let Some(request) = self.agent.events_request(created) else { return };
        if let Body::Events(events) = &request.body {
            for event in events.iter().map(|event| event.as_ref().unwrap()) {
                let at = WATCHES.iter().position(|watch| watch.name == event.watch).unwrap();
                let highest = self.highest_sent.entry(event.id.epoch).or_default();
                if event.id.sequence > *highest {
                    *highest = event.id.sequence;
                    let target = match &event.payload {
                        Payload::Object(object) => EventTarget::Object(object.subject.name.parse().unwrap()),
                        Payload::Watch => EventTarget::Watch,
                        Payload::Unnamed { .. } => EventTarget::Unnamed,
                    };
                    let sent = self.unsettled.entry((event.id.epoch, at)).or_default();
                    sent.insert(event.id.sequence, (self.tick, target));
                }
            }
        }
        self.requests.push(request);
    }

    fn send_heartbeat(&mut self) {
        let heartbeat = self.agent.heartbeat_request(self.unix());
        self.requests.push(heartbeat);
    }

    fn deliver(&mut self, index: usize, instance: usize, duplicate: bool, fault: RequestFault) -> CheckResult {
        if index >= self.requests.len() {
            return Ok(());
        }
        let mut request = if duplicate { self.requests[index].clone() } else { self.requests.remove(index) };
        let id = request.id;
        if let (RequestFault::InvalidEvent(at, reason), Body::Events(events)) = (fault, &mut request.body)
            && let Some(event) = events.get_mut(at)
        {
            *event = Err((event.as_ref().unwrap().id, reason));
        }
        if let (true, Body::Events(events)) = (self.corrupt_next_event, &mut request.body)
            && let Some(Ok(event)) = events.first_mut()
        {
            // Simulates an agent that lost the content of the event before it built the event.
            event.delta = Digest::ZERO;
            if let Payload::Object(object) = &mut event.payload {
                object.subject.name = "99".to_owned();
            }
            self.corrupt_next_event = false;
        }
        let sent = if let Body::Heartbeat(heartbeat) = &request.body { heartbeat.sequence } else { 0 };
        let may_request_resend =
            self.allows_digest_mismatch || self.receivers[instance].may_request_resend(id.epoch, sent);
        let response = match fault {
            RequestFault::Rejected => Response::Rejected,
            RequestFault::Unauthorized => Response::Unauthorized,
            _ => self.receivers[instance].handle(request, self.unix()),
        };
        match &response {
            Response::Events(response) => self.check_settled(id.epoch, response.since, &response.settled)?,
            Response::Heartbeat(response) => {
                let since = self.receivers[instance].ledger_start(id.epoch);
                prop_assert_eq!(response.since, Some(since), "first sequence that the response covers");
                self.check_settled(id.epoch, since, &response.settled)?;
                prop_assert!(
                    may_request_resend || response.resend.is_empty(),
                    "false digest difference of {:?}",
                    response.resend
                );
            }
            Response::Rejected | Response::Unauthorized | Response::Unavailable => {}
        }
        if !matches!(fault, RequestFault::NoResponse) {
            self.responses.push((id, response));
        }
        Ok(())
    }

    /// Checks that each settled event was covered by a reconcile for each work of its watch, begun after the event was
    /// sent, or by a later delivery to its manager. A response makes no statement about forwarded events below `since`:
    /// the agent knows that and resends them.
    fn check_settled(&mut self, epoch: Epoch, since: u64, settled: &Settled) -> CheckResult {
        for (name, sequence) in settled {
            let at = WATCHES.iter().position(|watch| watch.name == name).unwrap();
            let Some(sent) = self.unsettled.get_mut(&(epoch, at)) else { continue };
            let later = sent.split_off(&(sequence + 1));
            let settled = std::mem::replace(sent, later);
            for (sequence, (tick, target)) in settled {
                // The watch may have triggered less work when the event was sent.
                let works =
                    if self.works_changed_at[at] >= tick { WATCHES[at].common_works() } else { self.plan.works(at) };
                for work in works.iter().filter(|_| self.plan.has(at)) {
                    let began = match (work, target) {
                        (Work::Forward, EventTarget::Watch) => continue,
                        (Work::Forward, _) if sequence < since => continue,
                        (Work::Forward, EventTarget::Object(name)) => self.records.delivered_at(at, name),
                        (Work::Forward, EventTarget::Unnamed) => self.records.delivered_all_at(at),
                        _ => self.records.began(*work, at),
                    };
                    prop_assert!(
                        began > tick,
                        "{name} {sequence} is settled, but {work:?} began at {began}, not after {tick}"
                    );
                }
            }
        }
        Ok(())
    }

    fn receive_response(&mut self, at: usize) -> CheckResult {
        if at >= self.responses.len() {
            return Ok(());
        }
        let (id, response) = self.responses.remove(at);
        let before = self.agent.stats();
        let is_current = self.agent.epoch() == id.epoch;
        self.agent.receive_response(id, &response);
        if let (true, Response::Events(response)) = (is_current, &response) {
            self.take_back_refused(id.epoch, response);
        }
        let after = self.agent.stats();
        prop_assert!(
            after.waiting + after.parked >= before.waiting + before.parked,
            "a response acknowledged events that were never sent: {before:?} {after:?}"
        );
        Ok(())
    }

    /// An event refused as unplanned waits in the agent again, for a new sequence: its old sequence is no longer tracked once the
    /// agent has received the refusal.
    fn take_back_refused(&mut self, epoch: Epoch, response: &EventsResponse) {
        let unplanned = response.refused.iter().filter(|refused| refused.reason == Reason::UnknownWatch);
        for id in unplanned.filter_map(|refused| refused.id.parse::<EventId>().ok()).filter(|id| id.epoch == epoch) {
            for (_, sent) in self.unsettled.iter_mut().filter(|((sent, _), _)| *sent == epoch) {
                sent.remove(&id.sequence);
            }
        }
    }

    /// Checks that the agent holds at least one event for each watch with a change that no reconcile or delivery has
    /// covered.
    fn check_pending(&self) -> CheckResult {
        let is_open = |at: &usize| {
            let reported = self.agent.last_reported(*at).filter(|reported| *reported > self.works_changed_at[*at]);
            let reconciles = self.plan.works(*at).iter().filter(|work| **work != Work::Forward);
            let behind = |reported| reconciles.clone().any(|work| self.records.began(*work, *at) < reported);
            let objects = self.agent.reported_objects(*at).into_iter();
            // An object that was created and deleted need not be reported to a manager that never observed it.
            let never_delivered =
                |name: Name, object: ReportedObject| object.deleted && self.records.delivered(*at, name).is_none();
            let behind_on = |name: Name, object: ReportedObject| self.records.delivered_at(*at, name) < object.tick;
            let mut undelivered =
                objects.filter(|(name, object)| behind_on(*name, *object) && !never_delivered(*name, *object));
            self.plan.has(*at) && (reported.is_some_and(behind) || undelivered.next().is_some())
        };
        let open = (0..WATCHES.len()).filter(is_open).count();
        let stats = self.agent.stats();
        let pending = stats.waiting + stats.unsettled + stats.parked;
        prop_assert!(pending >= open, "{open} watches have unprocessed changes, but the agent holds {pending} events");
        Ok(())
    }

    fn begin_reconcile(&mut self, at: usize) -> bool {
        let cluster = &self.cluster;
        let plan = self.plan;
        let tick = self.tick;
        self.receivers[at].begin_reconcile(|| cluster.snapshot(), plan, tick)
    }

    fn begin_delivery(&mut self, at: usize) -> bool {
        let cluster = &self.cluster;
        let tick = self.tick;
        self.receivers[at].begin_delivery(|| cluster.snapshot(), tick)
    }

    fn enqueue(&self, at: usize, kyma: bool, catalog: bool) {
        let selected = [(Work::Kyma, kyma), (Work::Catalog, catalog)];
        let works: WorkSet = selected.into_iter().filter(|(_, selected)| *selected).map(|(work, _)| work).collect();
        self.receivers[at].enqueue(works, Priority::Catalog);
    }

    fn restart_agent(&mut self) {
        self.incarnations += 1;
        let (plan, revision) = self.written_plan;
        self.agent =
            Agent::start(runtime(), self.incarnations, self.cap, &plan.plan(revision), self.metrics.agent.clone());
    }

    fn restart_receiver(&mut self, at: usize, slow: bool) {
        let receiver = self.new_receiver();
        if !slow {
            receiver.set_synced();
        }
        // The product verifies all runtimes at every start. The model does so only in the case that depends on it, so that
        // elsewhere the events of the agent alone must suffice: state overwritten by a late write when the receiver that
        // would have reconciled again has crashed too.
        if !self.late_writes.is_empty() {
            receiver.verify();
        }
        let late_write = std::mem::replace(&mut self.receivers[at], receiver).crash();
        // With several instances, conflict detection separates their writes, and there are no late ones.
        self.late_writes.extend(late_write.filter(|_| self.receivers.len() == 1));
    }

    fn change_plan(&mut self, plan: PlanId) {
        self.plan_revision += 1;
        for at in 0..WATCHES.len() {
            if self.plan.works(at) != plan.works(at) {
                self.works_changed_at[at] = self.tick;
            }
        }
        self.plan = plan;
        let plan = Arc::new(plan.plan(self.plan_revision));
        self.receivers.iter().for_each(|receiver| receiver.set_plan(plan.clone()));
    }

    fn apply_plan(&mut self) {
        let (plan, revision) = self.written_plan;
        for stopped in self.agent.apply_plan(&plan.plan(revision)) {
            // A new list reports the later state of its objects, and events sent before are no longer tracked.
            self.unsettled.retain(|(_, at), _| *at != stopped || !WATCHES[*at].is_forwarded());
        }
    }

    /// Ends all faults and delivers everything in flight. Checks that the world converges, and that the records then
    /// match the cluster.
    pub(crate) async fn converge(&mut self) -> CheckResult {
        for receiver in &mut self.receivers {
            receiver.set_synced();
            receiver.unpause();
        }
        self.apply(Action::WritePlan).await?;
        self.apply(Action::ApplyPlan).await?;
        // Reconciles once before the late writes of crashed receivers are applied.
        self.run_round(Duration::ZERO).await?;
        std::mem::take(&mut self.late_writes).into_iter().for_each(|late_write| late_write.apply(&mut self.records));
        let mut idle_rounds = 0;
        for round in 0..ROUNDS {
            if self.agent.stats().parked > 0 && round > 2 {
                // Parked events wait for another plan; a new revision suffices.
                self.change_plan(self.plan);
                self.apply(Action::WritePlan).await?;
                self.apply(Action::ApplyPlan).await?;
            }
            self.run_round(LONG).await?;
            idle_rounds = if self.is_idle() { idle_rounds + 1 } else { 0 };
            if idle_rounds == 2 {
                break;
            }
        }
        let stats = self.agent.stats();
        let pending = (stats.waiting, stats.unsettled, stats.parked);
        prop_assert_eq!(pending, (0, 0, 0), "waiting, unsettled and parked after {} rounds", ROUNDS);
        for receiver in &self.receivers {
            prop_assert_eq!(receiver.pending_work(), None, "work that never ends");
        }
        // Only the first receiver still gets requests from the agent.
        prop_assert!(self.receivers[0].requested_watches().is_empty(), "a resend is still requested");
        let snapshot = self.cluster.snapshot();
        for at in (0..WATCHES.len()).filter(|at| self.plan.has(*at)) {
            for work in self.plan.works(at).iter().filter(|work| **work != Work::Forward) {
                let recorded = self.records.recorded.get(&(*work, at)).cloned().unwrap_or_default();
                prop_assert_eq!(&recorded, &snapshot[at], "{:?} of {}", work, WATCHES[at].name);
            }
            let objects = self.agent.reported_objects(at);
            let listed = snapshot[at].keys().all(|name| objects.contains_key(name));
            prop_assert!(listed || !WATCHES[at].is_forwarded(), "an object that was never reported to its manager");
            for (name, object) in objects {
                let delivered = self.records.delivered(at, name);
                prop_assert_eq!(
                    delivered,
                    snapshot[at].get(&name).copied(),
                    "{} of {}: {:?}",
                    name,
                    WATCHES[at].name,
                    object
                );
            }
        }
        Ok(())
    }

    fn is_idle(&self) -> bool {
        let stats = self.agent.stats();
        stats.waiting + stats.unsettled + stats.parked == 0
            && self.receivers.iter().all(|receiver| receiver.pending_work().is_none())
            && self.receivers[0].requested_watches().is_empty()
    }

    /// Delivers all changes to the agent, so that no later watch event repairs a fault from here on.
    pub(crate) async fn drain_watches(&mut self) -> CheckResult {
        for watch in 0..WATCHES.len() {
            while !self.agent.is_up_to_date(watch) {
                self.apply(Action::DeliverWatchEvent(watch)).await?;
                self.apply(Action::List(watch, false)).await?;
            }
        }
        Ok(())
    }

    /// Exchanges all pending requests and responses, then waits and completes all pending reconciles and deliveries.
    async fn run_round(&mut self, wait: Duration) -> CheckResult {
        self.drain_watches().await?;
        self.apply(Action::AbandonRequest).await?;
        for action in [Action::SendEvents, Action::SendHeartbeat] {
            self.apply(action).await?;
            while !self.requests.is_empty() {
                self.apply(Action::Deliver { index: 0, instance: 0, duplicate: false, fault: RequestFault::None })
                    .await?;
            }
            while !self.responses.is_empty() {
                self.apply(Action::DeliverResponse(0)).await?;
            }
        }
        time::advance(wait).await;
        for at in 0..self.receivers.len() {
            self.tick += 1;
            self.receivers[at].end_reconcile(ReconcileResult::Succeeded, &mut self.records);
            while self.begin_reconcile(at) {
                self.tick += 1;
                self.receivers[at].end_reconcile(ReconcileResult::Succeeded, &mut self.records);
            }
            self.tick += 1;
            while self.receivers[at].end_delivery(0, ManagerResponse::Accepted, &mut self.records)
                || self.begin_delivery(at)
            {
                self.tick += 1;
            }
        }
        Ok(())
    }
}
