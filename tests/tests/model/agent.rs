//! The agent's side of the model: its core, fed by the watch streams of the cluster, and the requests that it sends.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tidewatch_agent::{
    core::{Core, HeartbeatContext, ObjectState, Stats, WatchId},
    telemetry::Metrics,
};
use tidewatch_api::{
    identity::{Epoch, RuntimeId},
    plan::Plan,
};
use tidewatch_contract::{
    event::{Received, parse_batch},
    exchange::{EventsResponse, HeartbeatResponse},
    heartbeat::{CertificateState, Heartbeat},
};
use tokio::time::Instant;

use crate::cluster::{Cluster, Name, RESOURCES, WATCH_COUNT, WATCHES, WatchEvent};

/// Limits of objects and of pending events per watch, above which a watch turns coarse or its events collapse. Most
/// watches exceed the small limit, few the large one.
pub(crate) const SMALL_CAP: usize = 4;
pub(crate) const LARGE_CAP: usize = 8;
/// Objects in one page of a list.
const PAGE: usize = 2;

/// State of a watch loop.
#[derive(Debug)]
enum WatchLoopState {
    /// The watch must relist.
    Disconnected,
    /// The remaining pages of a list that was taken at `tick`.
    Listing {
        remaining: VecDeque<(Name, ObjectState)>,
        names: BTreeSet<Name>,
        tick: u64,
    },
    Watching,
}

/// The list and watch loop of one watch.
#[derive(Debug)]
struct WatchLoop {
    id: WatchId,
    state: WatchLoopState,
    stream: VecDeque<WatchEvent>,
    /// Ticks of the newest changes that the core received while the watch followed its stream: per object, and `None`
    /// for the list.
    reported_at: BTreeMap<Option<Name>, u64>,
    /// Forwarded watches only: every object that the agent must report, including those of a list.
    objects: BTreeMap<Name, ReportedObject>,
}

/// The last state of an object that the core received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReportedObject {
    pub(crate) tick: u64,
    pub(crate) deleted: bool,
}

/// A request on its way to the receiver.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) id: RequestId,
    pub(crate) created: i64,
    pub(crate) body: Body,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    Events(Vec<Received>),
    Heartbeat(Box<Heartbeat>),
}

/// Identifies the agent and the request that a response belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestId {
    incarnation: u64,
    number: u64,
    pub(crate) epoch: Epoch,
}

/// A response on its way to the agent.
#[derive(Debug)]
pub(crate) enum Response {
    Events(EventsResponse),
    Heartbeat(HeartbeatResponse),
    /// The whole request is refused (400, 413).
    Rejected,
    /// The signature or the nonce is refused (401).
    Unauthorized,
    /// The receiver is unavailable (503) or the connection broke.
    Unavailable,
}

pub(crate) struct Agent {
    core: Core,
    incarnation: u64,
    loops: [Option<WatchLoop>; WATCH_COUNT],
    /// Number of the events request that awaits its response.
    in_flight: Option<u64>,
    requests: u64,
}

impl Agent {
    /// Starts an agent with the plan that its cluster contains.
    pub(crate) fn start(runtime: RuntimeId, incarnation: u64, cap: usize, plan: &Plan, metrics: Metrics) -> Self {
        let core = Core::new(runtime, cap, metrics);
        let mut agent = Self { core, incarnation, loops: Default::default(), in_flight: None, requests: 0 };
        agent.apply_plan(plan);
        agent
    }

    /// Applies a plan. Returns the watches that it stops; their state is dropped.
    pub(crate) fn apply_plan(&mut self, plan: &Plan) -> Vec<usize> {
        let changes = self.core.follow(plan);
        let at = |name: &str| WATCHES.iter().position(|watch| watch.name == name).unwrap();
        let stopped: Vec<_> = changes.stopped.iter().map(|name| at(name)).collect();
        for watch in &stopped {
            self.loops[*watch] = None;
        }
        for started in changes.started {
            let stream = VecDeque::new();
            let reported_at = BTreeMap::new();
            let objects = BTreeMap::new();
            self.loops[at(&started.planned.name)] =
                Some(WatchLoop { id: started.id, state: WatchLoopState::Disconnected, stream, reported_at, objects });
        }
        stopped
    }

    /// Returns the core, for the link.
    pub(crate) fn core(&self) -> Core {
        self.core.clone()
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.core.epoch()
    }

    pub(crate) fn stats(&self) -> Stats {
        self.core.figures()
    }

    /// Appends events to the streams of the watches that are connected.
    pub(crate) fn push_watch_events(&mut self, events: [Vec<WatchEvent>; WATCH_COUNT]) {
        for (watch_loop, events) in self.loops.iter_mut().zip(events) {
            if let Some(watch_loop) =
                watch_loop.as_mut().filter(|watch_loop| !matches!(watch_loop.state, WatchLoopState::Disconnected))
            {
                watch_loop.stream.extend(events);
            }
        }
    }

    /// Ends a watch and drops the events of its stream that were not delivered (410, or an aborted list).
    pub(crate) fn break_watch(&mut self, watch: usize) {
        if let Some(watch_loop) = &mut self.loops[watch] {
            (watch_loop.state, watch_loop.stream) = (WatchLoopState::Disconnected, VecDeque::new());
        }
    }

    /// Runs the next step of a list. A watch that follows its stream lists again only if `relist` is set.
    pub(crate) fn list(&mut self, cluster: &Cluster, watch: usize, relist: bool, tick: u64) {
        let core = &self.core;
        let now = Instant::now();
        let Some(watch_loop) = &mut self.loops[watch] else { return };
        let id = watch_loop.id;
        match &mut watch_loop.state {
            WatchLoopState::Watching if !relist => {}
            WatchLoopState::Disconnected | WatchLoopState::Watching => {
                let resource = WATCHES[watch].resource;
                core.described(id, "v1", RESOURCES[resource], cluster.every_version(resource));
                core.list_begun(id);
                watch_loop.stream.clear();
                let remaining = VecDeque::from(cluster.list(watch));
                let names = remaining.iter().map(|(name, _)| *name).collect();
                watch_loop.state = WatchLoopState::Listing { remaining, names, tick };
            }
            WatchLoopState::Listing { remaining, names, tick } => {
                let page = remaining.drain(..remaining.len().min(PAGE));
                let more = core.listed(id, page.map(|(name, state)| (key(name).into(), state)).collect(), now);
                if remaining.is_empty() || !more {
                    watch_loop.reported_at = BTreeMap::from([(None, *tick)]);
                    // An object that is missing from the list is reported as deleted once.
                    for (_, object) in watch_loop.objects.iter_mut().filter(|(name, _)| !names.contains(name)) {
                        *object = if object.deleted { *object } else { ReportedObject { tick: *tick, deleted: true } };
                    }
                    watch_loop
                        .objects
                        .extend(names.iter().map(|name| (*name, ReportedObject { tick: *tick, deleted: false })));
                    core.list_complete(id, now);
                    watch_loop.state = WatchLoopState::Watching;
                }
            }
        }
    }

    /// Delivers the next event of a stream to the core. Returns false if there is none.
    pub(crate) fn deliver_watch_event(&mut self, watch: usize) -> bool {
        let core = &self.core;
        let now = Instant::now();
        let Some(watch_loop) = &mut self.loops[watch] else { return false };
        if !matches!(watch_loop.state, WatchLoopState::Watching) {
            return false;
        }
        let Some(WatchEvent { name, state, deleted, reportable, tick }) = watch_loop.stream.pop_front() else {
            return false;
        };
        if deleted {
            core.gone(watch_loop.id, &key(name), state, now);
        } else {
            core.present(watch_loop.id, &key(name), state, now);
        }
        if reportable {
            watch_loop.reported_at.insert(Some(name), tick);
            watch_loop.objects.insert(name, ReportedObject { tick, deleted });
        }
        true
    }

    /// Returns true if a watch follows its stream and the core has received all of its events.
    pub(crate) fn is_up_to_date(&self, watch: usize) -> bool {
        self.loops[watch].as_ref().is_none_or(|w| matches!(w.state, WatchLoopState::Watching) && w.stream.is_empty())
    }

    /// Returns the tick of the newest change that the core received.
    pub(crate) fn last_reported(&self, watch: usize) -> Option<u64> {
        self.loops[watch].as_ref().and_then(|watch_loop| watch_loop.reported_at.values().max().copied())
    }

    /// Returns the objects that must be reported to the manager of a forwarded watch, each with the tick of its newest
    /// change or list.
    pub(crate) fn reported_objects(&self, watch: usize) -> BTreeMap<Name, ReportedObject> {
        let forwarded = self.loops[watch].as_ref().filter(|_| WATCHES[watch].is_forwarded());
        forwarded.map(|watch_loop| watch_loop.objects.clone()).unwrap_or_default()
    }

    fn next_request_id(&mut self, epoch: Epoch) -> RequestId {
        self.requests += 1;
        RequestId { incarnation: self.incarnation, number: self.requests, epoch }
    }

    /// Returns the next events request, unless one is in flight.
    pub(crate) fn events_request(&mut self, created: i64) -> Option<Request> {
        if self.in_flight.is_some() {
            return None;
        }
        let batch = self.core.batch(Instant::now())?;
        let id = self.next_request_id(batch.epoch);
        self.in_flight = Some(id.number);
        Some(Request { id, created, body: Body::Events(parse_batch(&batch.body).unwrap()) })
    }

    pub(crate) fn heartbeat_request(&mut self, created: i64) -> Request {
        let (not_after, fingerprint) = Default::default();
        let certificate = CertificateState { not_after, fingerprint, renewal_failed_since: None };
        let context = HeartbeatContext { certificate, trust_revision: None, canary: None, incomplete: false };
        let (heartbeat, _) = self.core.heartbeat(Instant::now(), context);
        let id = self.next_request_id(heartbeat.epoch);
        Request { id, created, body: Body::Heartbeat(Box::new(heartbeat)) }
    }

    /// Stops waiting for the response in flight; a late response is dropped.
    pub(crate) fn abandon_request(&mut self) {
        self.in_flight = None;
    }

    pub(crate) fn receive_response(&mut self, id: RequestId, response: &Response) {
        let awaited = self.in_flight == Some(id.number);
        if id.incarnation != self.incarnation || (!awaited && !matches!(response, Response::Heartbeat(_))) {
            return;
        }
        let now = Instant::now();
        match response {
            Response::Heartbeat(response) => return self.core.apply_heartbeat_response(now, id.epoch, response),
            Response::Events(response) => self.core.apply_response(now, id.epoch, response),
            Response::Rejected => drop(self.core.refused_whole(now, id.epoch)),
            Response::Unauthorized => self.core.restart_epoch(),
            Response::Unavailable => {}
        }
        self.in_flight = None;
    }
}

fn key(name: Name) -> String {
    format!("ns/{name}")
}
