//! Protocol state of an agent under the wire contract, for objects that are only numbers. No I/O.
//!
//! One request is in flight at a time and is retried until it is answered. An object that is marked again after it was
//! sent is pending again. Accepted events are kept until the instance that accepted them reports them as settled;
//! another instance, or one that lost its state, begins a new epoch. The digest is a running sum of random deltas, so
//! it agrees with the events and proves nothing.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use tidewatch_api::{
    identity::{Epoch, Instance, RuntimeId},
    plan::{Plan, PlannedWatch},
};
use tidewatch_contract::{
    digest::Digest,
    event::{self, Change, EventId, Reason, Subject, WireData, WireEvent},
    exchange::{EventsResponse, HeartbeatResponse, Settled},
    heartbeat::{Canary, CertificateState, Heartbeat, WatchState},
    signature::Nonce,
};

/// An object of a watch; `None` for the whole watch.
type Target = Option<u32>;

/// See the module.
pub struct ProtocolState {
    runtime: RuntimeId,
    revision: String,
    watches: BTreeMap<String, Watched>,
    random: u64,
    epoch: Epoch,
    sequence: u64,
    accepted: u64,
    nonces: u64,
    heartbeats: u64,
    instance: Option<Instance>,
    in_flight: Vec<InFlight>,
    refused: u64,
}

struct Watched {
    planned: PlannedWatch,
    digest: Digest,
    waiting: BTreeSet<Target>,
    /// The newest sequence number that was sent for each target.
    unsettled: BTreeMap<Target, u64>,
}

struct InFlight {
    watch: String,
    target: Target,
    sequence: u64,
    text: String,
}

/// A request to send.
pub(super) struct Batch {
    /// Its epoch.
    pub(super) epoch: Epoch,
    /// Its nonce.
    pub(super) nonce: Nonce,
    /// Its body.
    pub(super) body: Bytes,
    /// Events in it.
    pub(super) events: usize,
}

impl Watched {
    /// A watch that has just been listed.
    fn listed(planned: &PlannedWatch) -> Self {
        Self {
            planned: planned.clone(),
            digest: Digest::ZERO,
            waiting: BTreeSet::from([None]),
            unsettled: BTreeMap::new(),
        }
    }
}

impl ProtocolState {
    /// The state of an agent that has just listed all watches of its plan. The seed is any number, different for each
    /// agent.
    pub fn new(runtime: RuntimeId, plan: &Plan, seed: u64) -> Self {
        let watches = plan.watches().iter().map(|planned| (planned.name.clone(), Watched::listed(planned))).collect();
        let mut this = Self {
            runtime,
            revision: plan.revision().to_owned(),
            watches,
            random: seed,
            epoch: Epoch::new(0),
            sequence: 0,
            accepted: 0,
            nonces: 0,
            heartbeats: 0,
            instance: None,
            in_flight: Vec::new(),
            refused: 0,
        };
        this.epoch = Epoch::new(this.draw());
        this
    }

    /// Follows another plan from now on: a watch that the plan adds is listed, and one that it lacks ends. Returns false if
    /// the state follows this plan already.
    pub fn follow(&mut self, plan: &Plan) -> bool {
        if self.revision == plan.revision() {
            return false;
        }
        plan.revision().clone_into(&mut self.revision);
        self.watches.retain(|name, _| plan.watches().iter().any(|planned| planned.name == *name));
        for planned in plan.watches() {
            self.watches.entry(planned.name.clone()).or_insert_with(|| Watched::listed(planned));
        }
        true
    }

    /// The body of a first request with so many events of the watch `kyma` and no others.
    pub fn sample_body(runtime: RuntimeId, plan: &Plan, events: u32) -> Bytes {
        let mut this = Self::new(runtime, plan, 0);
        this.watches.retain(|name, _| name == "kyma");
        this.watches.values_mut().for_each(|watched| watched.waiting = (0..events).map(Some).collect());
        this.request(usize::try_from(events).unwrap_or(usize::MAX)).map(|batch| batch.body).unwrap_or_default()
    }

    /// Marks an object of a watch as changed. A watch that the plan does not have is ignored.
    pub fn mark(&mut self, watch: &str, object: u32) {
        if let Some(watched) = self.watches.get_mut(watch) {
            watched.waiting.insert(Some(object));
        }
    }

    /// Marks all watches as changed in ways that no event of an object names, as after a list.
    pub fn mark_lists(&mut self) {
        self.watches.values_mut().for_each(|watched| _ = watched.waiting.insert(None));
    }

    /// Returns true if events are pending or in flight.
    pub fn has_pending(&self) -> bool {
        !self.in_flight.is_empty() || self.watches.values().any(|watched| !watched.waiting.is_empty())
    }

    /// Number of targets that are pending, in flight, or sent and not settled.
    pub fn unsettled(&self) -> usize {
        let of = |watched: &Watched| {
            let waiting = watched.waiting.iter().filter(|target| !watched.unsettled.contains_key(*target)).count();
            waiting + watched.unsettled.len()
        };
        self.watches.values().map(of).sum()
    }

    /// Events that were refused one by one.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// The next request with at most so many events, or the one in flight with a new nonce.
    pub(super) fn request(&mut self, limit: usize) -> Option<Batch> {
        if self.in_flight.is_empty() {
            self.fill_request(limit);
        }
        if self.in_flight.is_empty() {
            return None;
        }
        let texts: Vec<&str> = self.in_flight.iter().map(|event| event.text.as_str()).collect();
        let body = format!("[{}]", texts.join(",")).into();
        let events = texts.len();
        Some(Batch { epoch: self.epoch, nonce: self.nonce(), body, events })
    }

    fn fill_request(&mut self, limit: usize) {
        let names: Vec<String> = self.watches.keys().cloned().collect();
        for name in names {
            while self.in_flight.len() < limit {
                let delta = Digest::new(u128::from(self.draw()) << 64 | u128::from(self.draw()));
                let Some(watched) = self.watches.get_mut(&name) else { break };
                let Some(target) = watched.waiting.pop_first() else { break };
                watched.digest += delta;
                self.sequence += 1;
                watched.unsettled.insert(target, self.sequence);
                let id = EventId { epoch: self.epoch, sequence: self.sequence };
                let wire = wire(&self.runtime, id, &watched.planned, target, delta);
                let text = serde_json::to_string(&wire).expect("strings and numbers have a JSON form");
                self.in_flight.push(InFlight { watch: name.clone(), target, sequence: self.sequence, text });
            }
        }
    }

    /// Applies the answer to a request of that epoch.
    pub(super) fn events_answered(&mut self, epoch: Epoch, answer: &EventsResponse) {
        self.observe_instance(answer.instance);
        if epoch != self.epoch {
            return;
        }
        let in_flight = std::mem::take(&mut self.in_flight);
        let last = in_flight.last().map_or(0, |event| event.sequence);
        for refused in &answer.refused {
            self.refused += 1;
            let id: Option<EventId> = refused.id.parse().ok();
            let event = in_flight.iter().find(|event| Some(event.sequence) == id.map(|id| id.sequence));
            if let Some(event) = event
                && let Some(watched) = self.watches.get_mut(&event.watch)
            {
                watched.unsettled.remove(&event.target);
                if refused.reason == Reason::UnknownWatch {
                    watched.waiting.insert(event.target);
                }
            }
        }
        let whole = answer.refused.is_empty();
        if answer.accepted < self.accepted || (whole && answer.accepted < last) {
            return self.begin_epoch();
        }
        self.accepted = answer.accepted;
        self.settle(&answer.settled);
    }

    /// The next heartbeat, with the nonce of its request.
    pub(super) fn heartbeat(&mut self, certificate: &CertificateState) -> (Heartbeat, Nonce) {
        self.heartbeats += 1;
        let watch = |(name, watched): (&String, &Watched)| WatchState {
            name: name.clone(),
            objects: 1,
            digest: (!watched.waiting.contains(&None)).then_some(watched.digest),
            listed_seconds_ago: Some(60),
            alive_seconds_ago: Some(5),
            coarse: false,
            not_served: false,
            error: None,
        };
        let heartbeat = Heartbeat {
            epoch: self.epoch,
            sequence: self.sequence,
            counter: self.heartbeats,
            waiting: self.watches.values().map(|watched| watched.waiting.len() as u64).sum(),
            parked: 0,
            plan_revision: Some(self.revision.clone()),
            plan_error: None,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            certificate: certificate.clone(),
            trust_revision: None,
            canary: Some(Canary { age_seconds: 3 }),
            incomplete: false,
            watches: self.watches.iter().map(watch).collect(),
        };
        (heartbeat, self.nonce())
    }

    /// Applies the answer to a heartbeat of that epoch.
    pub(super) fn heartbeat_answered(&mut self, epoch: Epoch, answer: &HeartbeatResponse) {
        self.observe_instance(answer.instance);
        if epoch != self.epoch {
            return;
        }
        self.settle(&answer.settled);
        for watch in &answer.resend {
            if let Some(watched) = self.watches.get_mut(watch) {
                watched.waiting.insert(None);
            }
        }
    }

    /// Begins a new epoch, in which everything that is not settled is sent again.
    pub(super) fn begin_epoch(&mut self) {
        self.epoch = Epoch::new(self.draw());
        (self.sequence, self.accepted, self.nonces, self.heartbeats) = (0, 0, 0, 0);
        self.in_flight.clear();
        for watched in self.watches.values_mut() {
            let unsettled = std::mem::take(&mut watched.unsettled);
            watched.waiting.extend(unsettled.into_keys());
        }
    }

    fn observe_instance(&mut self, instance: Instance) {
        if self.instance.replace(instance).is_some_and(|known| known != instance) {
            self.begin_epoch();
        }
    }

    fn settle(&mut self, settled: &Settled) {
        for (watch, up_to) in settled {
            if let Some(watched) = self.watches.get_mut(watch) {
                watched.unsettled.retain(|_, sequence| *sequence > *up_to);
            }
        }
    }

    fn nonce(&mut self) -> Nonce {
        self.nonces += 1;
        Nonce { epoch: self.epoch, counter: self.nonces }
    }

    /// SplitMix64: different for each agent, reproducible in each run.
    pub(super) fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn wire(runtime: &RuntimeId, id: EventId, planned: &PlannedWatch, target: Target, delta: Digest) -> WireEvent {
    let PlannedWatch { group, version, resource, namespace, .. } = planned;
    let name = match (target, resource.as_str()) {
        (None, _) => String::new(),
        (Some(0), "kymas") => "default".to_owned(),
        (Some(number), _) => format!("object-{number}"),
    };
    let namespace = namespace.clone().filter(|_| target.is_some()).unwrap_or_default();
    let subject =
        Subject { group: group.clone(), version: version.clone(), resource: resource.clone(), namespace, name };
    WireEvent {
        specversion: "1.0".to_owned(),
        kind: if target.is_some() { event::OBJECT_CHANGED } else { event::WATCH_CHANGED }.to_owned(),
        source: format!("/runtimes/{runtime}"),
        subject: subject.to_string(),
        id: id.to_string(),
        sequence: id.sequence.to_string(),
        time: Some("2026-01-01T00:00:00Z".to_owned()),
        traceparent: None,
        data: WireData {
            watch: planned.name.clone(),
            manager: planned.manager.clone(),
            kind: target.map(|_| resource.clone()).unwrap_or_default(),
            uid: target.map(|number| format!("00000000-0000-4000-8000-{number:012}")).unwrap_or_default(),
            resource_version: target.map(|_| id.sequence.to_string()).unwrap_or_default(),
            generation: target.and_then(|_| i64::try_from(id.sequence).ok()),
            change: target.map(|_| Change::Spec),
            delta,
            unnamed: false,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tidewatch_api::Watcher;
    use tidewatch_contract::event::parse_batch;

    use super::*;

    fn state() -> ProtocolState {
        let (plan, ..) = tidewatch_installer::watcher::plan::<Arc<Watcher>>(Vec::new(), &[]);
        ProtocolState::new("r-1".parse().unwrap(), &plan, 7)
    }

    fn answer(instance: u64, accepted: u64, settled: &[(&str, u64)]) -> EventsResponse {
        EventsResponse {
            instance: Instance::new(instance),
            accepted,
            since: 1,
            settled: settled.iter().map(|(watch, n)| ((*watch).to_owned(), *n)).collect(),
            refused: Vec::new(),
            heartbeat_seconds: 30,
        }
    }

    #[test]
    fn events_are_well_formed_and_kept_until_they_are_settled() {
        let mut state = state();
        state.mark("kyma", 0);
        let watches = state.watches.len();
        let batch = state.request(100).unwrap();
        let events = parse_batch(&batch.body).unwrap();
        assert_eq!((events.len(), batch.events), (watches + 1, watches + 1));
        assert!(events.iter().all(Result::is_ok));
        let again = state.request(100).unwrap();
        assert_eq!((again.body, again.nonce.counter), (batch.body, 2), "the same events, signed anew");
        state.events_answered(batch.epoch, &answer(1, watches as u64 + 1, &[]));
        assert!(!state.has_pending());
        assert_eq!(state.unsettled(), watches + 1);
        let all: Vec<_> = state.watches.keys().cloned().collect();
        let all: Vec<_> = all.iter().map(|watch| (watch.as_str(), 100)).collect();
        state.mark("kyma", 0);
        state.settle(&answer(1, 0, &all).settled);
        assert_eq!(state.unsettled(), 1, "it is waiting again");
    }

    #[test]
    fn new_or_reset_instance_receives_all_unsettled_events_again() {
        let mut state = state();
        let watches = state.watches.len();
        let batch = state.request(100).unwrap();
        state.events_answered(batch.epoch, &answer(1, watches as u64, &[("kyma", 100)]));
        state.mark("kyma", 3);
        let next = state.request(100).unwrap();
        state.events_answered(next.epoch, &answer(2, 1, &[]));
        assert_ne!(state.epoch, next.epoch);
        let again = state.request(100).unwrap();
        assert_eq!(again.events, watches, "all but the settled watch, and its new event");
        state.events_answered(again.epoch, &answer(2, 0, &[]));
        assert_ne!(state.epoch, again.epoch, "the instance lost its state");
        state.events_answered(again.epoch, &answer(2, 100, &[]));
        assert!(state.has_pending(), "an answer to an earlier epoch changes nothing");
    }
}
