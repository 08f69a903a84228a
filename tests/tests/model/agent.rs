//! The agent's side: its core, fed by the streams of the cluster, and the requests that it makes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tidewatch_agent::{
    core::{Core, Figures, Seen, Surroundings, WatchId},
    telemetry::Metrics,
};
use tidewatch_shared::{
    event::{Received, parse_batch},
    exchange::{EventsAnswer, HeartbeatAnswer},
    heartbeat::{CertificateState, Heartbeat},
    identity::Epoch,
    plan::Plan,
};
use tokio::time::Instant;

use crate::cluster::{COUNT, Cluster, Name, RESOURCES, Said, WATCHES};

/// Objects of one watch above which it goes coarse: many watches do with the one, hardly any with the other.
pub(crate) const SMALL: usize = 4;
pub(crate) const LARGE: usize = 8;
/// Objects of a page.
const PAGE: usize = 2;

/// Where the loop of a watch is.
#[derive(Debug)]
enum At {
    /// It must list.
    Broken,
    /// Pages of a list that was made at a tick.
    Listing {
        rest: VecDeque<(Name, Seen)>,
        names: BTreeSet<Name>,
        tick: u64,
    },
    Watching,
}

/// The loop of one watch.
#[derive(Debug)]
struct Loop {
    id: WatchId,
    at: At,
    stream: VecDeque<Said>,
    /// When the newest changes happened that the core was told of, while it followed: of each object, and of a list.
    told: BTreeMap<Option<Name>, u64>,
    /// Of a forwarded watch: the same for every object that must be told of, those of a list included.
    objects: BTreeMap<Name, Object>,
}

/// An object as the core was told of it last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object {
    pub(crate) tick: u64,
    pub(crate) gone: bool,
}

/// What is on its way to the receiver.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) from: Sender,
    pub(crate) created: i64,
    pub(crate) body: Body,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    Events(Vec<Received>),
    Beat(Box<Heartbeat>),
}

/// Whose request it is, so that its answer finds the way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sender {
    life: u64,
    number: u64,
    pub(crate) epoch: Epoch,
}

/// What is on its way back.
#[derive(Debug)]
pub(crate) enum Answer {
    Events(EventsAnswer),
    Beat(HeartbeatAnswer),
    /// The request is refused as a whole (400, 413).
    RefusedWhole,
    /// The signature or the nonce is refused (401).
    NewEpoch,
    /// Not now (503), or a connection that broke.
    Fault,
}

pub(crate) struct Agent {
    core: Core,
    life: u64,
    loops: [Option<Loop>; COUNT],
    /// The events request whose answer is awaited.
    in_flight: Option<u64>,
    requests: u64,
}

impl Agent {
    /// Starts and reads the plan that its cluster has.
    pub(crate) fn start(life: u64, cap: usize, plan: &Plan, metrics: Metrics) -> Self {
        let core = Core::new("r-1".parse().unwrap(), cap, metrics);
        let mut agent = Self { core, life, loops: Default::default(), in_flight: None, requests: 0 };
        agent.follow(plan);
        agent
    }

    /// Follows another plan. Returns the watches that it stops, of which it keeps nothing.
    pub(crate) fn follow(&mut self, plan: &Plan) -> Vec<usize> {
        let turnover = self.core.follow(plan);
        let at = |name: &str| WATCHES.iter().position(|watch| watch.name == name).unwrap();
        let stopped: Vec<_> = turnover.stopped.iter().map(|name| at(name)).collect();
        for watch in &stopped {
            self.loops[*watch] = None;
        }
        for started in turnover.started {
            let (stream, told, objects) = (VecDeque::new(), BTreeMap::new(), BTreeMap::new());
            self.loops[at(&started.planned.name)] =
                Some(Loop { id: started.id, at: At::Broken, stream, told, objects });
        }
        stopped
    }

    /// For the link.
    pub(crate) fn core(&self) -> Core {
        self.core.clone()
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.core.epoch()
    }

    pub(crate) fn figures(&self) -> Figures {
        self.core.figures()
    }

    /// What streams say comes in behind what they have said.
    pub(crate) fn hear_streams(&mut self, said: [Vec<Said>; COUNT]) {
        for (watching, said) in self.loops.iter_mut().zip(said) {
            if let Some(watching) = watching.as_mut().filter(|watching| !matches!(watching.at, At::Broken)) {
                watching.stream.extend(said);
            }
        }
    }

    /// A watch ends, and what its stream had not yet said with it (410, or a list that breaks off).
    pub(crate) fn break_off(&mut self, watch: usize) {
        if let Some(watching) = &mut self.loops[watch] {
            (watching.at, watching.stream) = (At::Broken, VecDeque::new());
        }
    }

    /// The next step of a list; one that is watching lists again only if told so.
    pub(crate) fn list(&mut self, cluster: &Cluster, watch: usize, again: bool, tick: u64) {
        let (core, now) = (&self.core, Instant::now());
        let Some(watching) = &mut self.loops[watch] else { return };
        let id = watching.id;
        match &mut watching.at {
            At::Watching if !again => {}
            At::Broken | At::Watching => {
                let resource = WATCHES[watch].resource;
                core.described(id, "v1", RESOURCES[resource], cluster.every_version(resource));
                core.list_begun(id);
                watching.stream.clear();
                let rest = VecDeque::from(cluster.list(watch));
                let names = rest.iter().map(|(name, _)| *name).collect();
                watching.at = At::Listing { rest, names, tick };
            }
            At::Listing { rest, names, tick } => {
                let page = rest.drain(..rest.len().min(PAGE));
                let more = core.listed(id, page.map(|(name, seen)| (key(name).into(), seen)).collect(), now);
                if rest.is_empty() || !more {
                    watching.told = BTreeMap::from([(None, *tick)]);
                    // What was there and is not on the list is told of once.
                    for (_, object) in watching.objects.iter_mut().filter(|(name, _)| !names.contains(name)) {
                        *object = if object.gone { *object } else { Object { tick: *tick, gone: true } };
                    }
                    watching.objects.extend(names.iter().map(|name| (*name, Object { tick: *tick, gone: false })));
                    core.list_complete(id, now);
                    watching.at = At::Watching;
                }
            }
        }
    }

    /// The core hears the next word of a stream.
    pub(crate) fn feed(&mut self, watch: usize) -> bool {
        let (core, now) = (&self.core, Instant::now());
        let Some(watching) = &mut self.loops[watch] else { return false };
        if !matches!(watching.at, At::Watching) {
            return false;
        }
        let Some(Said { name, seen, gone, counts, tick }) = watching.stream.pop_front() else { return false };
        if gone {
            core.gone(watching.id, &key(name), seen, now);
        } else {
            core.present(watching.id, &key(name), seen, now);
        }
        if counts {
            watching.told.insert(Some(name), tick);
            watching.objects.insert(name, Object { tick, gone });
        }
        true
    }

    /// Whether a watch follows its stream and has heard all of it.
    pub(crate) fn is_up_to_date(&self, watch: usize) -> bool {
        self.loops[watch].as_ref().is_none_or(|w| matches!(w.at, At::Watching) && w.stream.is_empty())
    }

    /// When the newest change happened that the core was told of.
    pub(crate) fn told(&self, watch: usize) -> Option<u64> {
        self.loops[watch].as_ref().and_then(|watching| watching.told.values().max().copied())
    }

    /// Objects that the manager of a forwarded watch must hear of, each since its newest change or list.
    pub(crate) fn objects(&self, watch: usize) -> BTreeMap<Name, Object> {
        let forwarded = self.loops[watch].as_ref().filter(|_| WATCHES[watch].is_forwarded());
        forwarded.map(|watching| watching.objects.clone()).unwrap_or_default()
    }

    fn sender(&mut self, epoch: Epoch) -> Sender {
        self.requests += 1;
        Sender { life: self.life, number: self.requests, epoch }
    }

    /// The next request of events, unless one is under way.
    pub(crate) fn events(&mut self, created: i64) -> Option<Request> {
        if self.in_flight.is_some() {
            return None;
        }
        let batch = self.core.batch(Instant::now())?;
        let from = self.sender(batch.epoch);
        self.in_flight = Some(from.number);
        Some(Request { from, created, body: Body::Events(parse_batch(&batch.body).unwrap()) })
    }

    pub(crate) fn beat(&mut self, created: i64) -> Request {
        let (not_after, fingerprint) = Default::default();
        let certificate = CertificateState { not_after, fingerprint, renewal_failed_since: None };
        let surroundings = Surroundings { certificate, trust_revision: None, canary: None, incomplete: false };
        let (beat, _) = self.core.heartbeat(Instant::now(), surroundings);
        let from = self.sender(beat.epoch);
        Request { from, created, body: Body::Beat(Box::new(beat)) }
    }

    /// It waits no longer; an answer that still comes reaches nobody.
    pub(crate) fn give_up(&mut self) {
        self.in_flight = None;
    }

    pub(crate) fn hear(&mut self, to: Sender, answer: &Answer) {
        let awaited = self.in_flight == Some(to.number);
        if to.life != self.life || (!awaited && !matches!(answer, Answer::Beat(_))) {
            return;
        }
        let now = Instant::now();
        match answer {
            Answer::Beat(answer) => return self.core.heartbeat_answered(now, to.epoch, answer),
            Answer::Events(answer) => self.core.answered(now, to.epoch, answer),
            Answer::RefusedWhole => drop(self.core.refused_whole(now, to.epoch)),
            Answer::NewEpoch => self.core.start_over(),
            Answer::Fault => {}
        }
        self.in_flight = None;
    }
}

fn key(name: Name) -> String {
    format!("ns/{name}")
}
