//! Minimal agent that follows the rules of contract v3.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use tidewatch_api::identity::Epoch;
use tidewatch_contract::{
    digest::Digest,
    event::{Change, Event, EventId, Object, Payload, Reason, Received},
    exchange::Settled,
    heartbeat::Heartbeat,
};

/// `None` stands for the whole watch.
pub(super) type Subject = (&'static str, Option<u8>);

/// Objects, and a version per watch that increases with every change.
#[derive(Default)]
pub(super) struct World {
    pub(super) versions: BTreeMap<&'static str, u64>,
    pub(super) objects: BTreeMap<(&'static str, u8), u64>,
}

pub(super) struct Sent {
    pub(super) watch: &'static str,
    pub(super) subject: Option<u8>,
    pub(super) delta: Digest,
    /// Version of the watch at the time of sending.
    pub(super) version: u64,
    pub(super) accepted: bool,
}

#[derive(Clone)]
pub(super) struct Request {
    pub(super) epoch: Epoch,
    pub(super) created: i64,
    pub(super) accepted: u64,
    pub(super) number: u64,
    pub(super) body: Body,
}

#[derive(Clone)]
pub(super) enum Body {
    Events(Vec<Received>),
    Heartbeat(Box<Heartbeat>),
}

pub(super) struct Response {
    pub(super) epoch: Epoch,
    pub(super) accepted: u64,
    pub(super) number: u64,
    pub(super) instance: u64,
    pub(super) settled: Settled,
    pub(super) run: Option<(u64, u64)>,
    pub(super) refused: Vec<(EventId, Reason)>,
    pub(super) resend: Vec<String>,
}

pub(super) struct Agent {
    pub(super) epoch: Epoch,
    pub(super) instance: Option<u64>,
    pub(super) sequence: u64,
    pub(super) accepted: u64,
    pub(super) counter: u64,
    pub(super) sent: BTreeMap<u64, Sent>,
    pub(super) waiting: BTreeSet<Subject>,
    /// Number of the request in flight; the response to an abandoned request is ignored.
    pub(super) in_flight: Option<u64>,
    pub(super) requests: u64,
    pub(super) watches: Vec<&'static str>,
    pub(super) reported: BTreeMap<(&'static str, u8), u64>,
}

pub(super) fn hash(subject: (&'static str, u8), version: u64) -> Digest {
    Digest::new(u128::from(version) << 32 | u128::from(subject.1) << 8 | u128::from(subject.0.as_bytes()[0]))
}

impl Agent {
    pub(super) fn new(epoch: u64, watches: &[&'static str]) -> Self {
        Self {
            epoch: Epoch::new(epoch),
            instance: None,
            sequence: 0,
            accepted: 0,
            counter: 0,
            sent: BTreeMap::new(),
            waiting: watches.iter().map(|watch| (*watch, None)).collect(),
            in_flight: None,
            requests: 0,
            watches: watches.to_vec(),
            reported: BTreeMap::new(),
        }
    }

    pub(super) fn digest(&self, watch: &str) -> Digest {
        let mine = self.reported.iter().filter(|((name, _), _)| *name == watch);
        mine.fold(Digest::ZERO, |sum, (subject, version)| sum + hash(*subject, *version))
    }

    /// Marks the watch, or one object, as sent and returns the delta of the digest.
    pub(super) fn send(&mut self, world: &World, watch: &'static str, object: Option<u8>) -> Digest {
        let before = self.digest(watch);
        for (subject, version) in &world.objects {
            if subject.0 == watch && object.is_none_or(|object| object == subject.1) {
                self.reported.insert(*subject, *version);
            }
        }
        self.digest(watch) - before
    }

    pub(super) fn request(&mut self, world: &World, tick: u64) -> Option<Request> {
        if self.in_flight.is_some() {
            return None;
        }
        for (watch, subject) in std::mem::take(&mut self.waiting) {
            if !self.watches.contains(&watch) {
                continue;
            }
            let delta = self.send(world, watch, subject);
            self.sequence += 1;
            let version = world.versions.get(watch).copied().unwrap_or(0);
            self.sent.insert(self.sequence, Sent { watch, subject, delta, version, accepted: false });
        }
        let events: Vec<_> =
            self.sent.iter().filter(|(_, sent)| !sent.accepted).map(|(n, sent)| self.event(*n, sent)).collect();
        if events.is_empty() {
            return None;
        }
        self.in_flight = Some(self.requests);
        Some(self.signed(tick, Body::Events(events)))
    }

    pub(super) fn signed(&mut self, tick: u64, body: Body) -> Request {
        self.requests += 1;
        Request { epoch: self.epoch, created: tick as i64, accepted: self.accepted, number: self.requests - 1, body }
    }

    pub(super) fn event(&self, sequence: u64, sent: &Sent) -> Received {
        let object = |name: u8| Object {
            subject: format!("g/v1/{}//{name}", sent.watch).parse().unwrap(),
            kind: String::new(),
            uid: String::new(),
            resource_version: sent.version.to_string(),
            generation: None,
            change: Change::Spec,
        };
        Ok(Event {
            id: EventId { epoch: self.epoch, sequence },
            source: "r-1".parse().unwrap(),
            watch: sent.watch.to_owned(),
            payload: sent.subject.map_or(Payload::Watch, |name| Payload::Object(object(name))),
            delta: sent.delta,
            time: None,
            traceparent: None,
        })
    }

    pub(super) fn heartbeat(&mut self, tick: u64) -> Request {
        self.counter += 1;
        let watches: Vec<_> =
            self.watches.iter().map(|w| json!({"name": w, "objects": 1, "digest": self.digest(w)})).collect();
        let heartbeat = json!({"epoch": self.epoch, "sequence": self.sequence, "counter": self.counter, "waiting": 0, "parked": 0,
            "agentVersion": "1", "certificate": {"notAfter": "", "fingerprint": ""}, "watches": watches});
        self.signed(tick, Body::Heartbeat(Box::new(serde_json::from_value(heartbeat).unwrap())))
    }

    pub(super) fn renew(&mut self, epoch: u64) {
        self.waiting.extend(std::mem::take(&mut self.sent).into_values().map(|sent| (sent.watch, sent.subject)));
        (self.epoch, self.sequence, self.accepted, self.counter) = (Epoch::new(epoch), 0, 0, 0);
        self.in_flight = None;
    }

    /// Processes a response; returns the events that the agent forgets.
    pub(super) fn receive(&mut self, response: Response, next_epoch: u64) -> Vec<Sent> {
        if response.epoch != self.epoch || (response.run.is_some() && self.in_flight != Some(response.number)) {
            return Vec::new();
        }
        if *self.instance.get_or_insert(response.instance) != response.instance {
            self.instance = Some(response.instance);
            self.renew(next_epoch);
            return Vec::new();
        }
        if let Some((accepted, since)) = response.run {
            self.in_flight = None;
            let below = self.sent.iter().any(|(n, sent)| sent.accepted && *n < since);
            if accepted < response.accepted || below {
                self.renew(next_epoch);
                return Vec::new();
            }
            self.accepted = self.accepted.max(accepted);
            for (id, reason) in &response.refused {
                let Some(sent) = self.sent.get_mut(&id.sequence).filter(|sent| !sent.accepted) else { continue };
                if *reason == Reason::UnknownWatch {
                    let again = (sent.watch, sent.subject);
                    self.sent.remove(&id.sequence);
                    self.waiting.insert(again);
                } else {
                    sent.subject = None;
                }
            }
            // A refused event is not accepted, even if its sequence already is.
            let refused = |n: u64| response.refused.iter().any(|(id, _)| id.sequence == n);
            self.sent.range_mut(..=accepted).for_each(|(n, sent)| sent.accepted |= !refused(*n));
        }
        for watch in response.resend {
            if let Some(watch) = self.watches.iter().find(|known| **known == watch) {
                self.waiting.insert((watch, None));
            }
        }
        let done = |n: &u64, sent: &Sent| {
            sent.accepted && response.settled.get(sent.watch).is_some_and(|settled| n <= settled)
        };
        let done: Vec<_> = self.sent.iter().filter(|(n, sent)| done(n, sent)).map(|(n, _)| *n).collect();
        done.into_iter().filter_map(|n| self.sent.remove(&n)).collect()
    }
}
