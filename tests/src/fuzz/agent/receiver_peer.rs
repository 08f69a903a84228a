//! The product's own receiver as the peer of an agent that has read arbitrary input.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use tidewatch_agent::core::{Batch, Core, HeartbeatContext};
use tidewatch_api::{
    identity::{Epoch, Instance, RuntimeId},
    key::KymaKey,
    plan::{Plan, Work},
};
use tidewatch_cluster::leader::WriteFence;
use tidewatch_contract::{
    event::{self, MAX_BODY_BYTES, MAX_EVENTS, Received},
    exchange::{HeartbeatResponse, Settled},
    heartbeat::{CertificateState, Heartbeat, WatchState},
    signature::{Nonce, VerifiedSignature},
};
use tidewatch_fleet::{
    EventBatch, Verified,
    forward::{Routes, Service, Target},
    table::{Metrics, RuntimeTable, Settings},
};
use tidewatch_kit::metrics::Registry;
use tokio::time::Instant;

use crate::fuzz::seeds::NOW;

/// Requests after which an agent without new input must have nothing left to send.
const ROUNDS: usize = 64;

/// Longer than any backoff or interval of an agent.
pub(super) const LONG_WAIT: Duration = Duration::from_secs(600);
/// Unregistered counters.
static METRICS: LazyLock<Metrics> = LazyLock::new(|| Metrics::register(&mut Registry::default()));

pub(super) static RUNTIME: LazyLock<RuntimeId> = LazyLock::new(|| "r-1".parse().expect("this is a runtime id"));

/// Input of the runtime, as the gateway verifies it.
fn verified<T>(epoch: Epoch, payload: T) -> Verified<T> {
    Verified::new(RUNTIME.clone(), VerifiedSignature::unchecked(NOW, Nonce { epoch, counter: 0 }), payload)
}

/// A receiver with the agent's plan.
pub(super) struct ReceiverPeer {
    fleet: RuntimeTable,
    core: Core,
    now: Instant,
}

/// Checks a batch of the agent: bounded, of one epoch, and in ascending order. Gaps are events that were accepted
/// already.
pub(super) fn read(batch: &Batch) -> Vec<Received> {
    assert!(batch.events <= MAX_EVENTS && (batch.body.len() <= MAX_BODY_BYTES || batch.events == 1));
    let events = event::parse_batch(&batch.body).expect("the agent's request is a batch");
    assert!(batch.events > 0 && events.len() == batch.events);
    let ids = events.iter().map(|event| match event {
        Ok(event::Event { id, .. }) | Err((id, _)) => *id,
    });
    assert!(
        ids.clone().all(|id| id.epoch == batch.epoch) && ids.is_sorted_by(|one, next| one.sequence < next.sequence)
    );
    events
}

/// A heartbeat of the agent that the receiver can parse.
pub(super) fn heartbeat(core: &Core, now: Instant) -> Heartbeat {
    let (not_after, fingerprint) = Default::default();
    let certificate = CertificateState { not_after, fingerprint, renewal_failed_since: None };
    let surroundings = HeartbeatContext { certificate, trust_revision: None, canary: None, incomplete: false };
    let (heartbeat, _) = core.heartbeat(now, surroundings);
    let written = serde_json::to_vec(&heartbeat).expect("a heartbeat is JSON");
    assert_eq!(Heartbeat::parse(&written).as_ref(), Some(&heartbeat));
    heartbeat
}

/// The watches of a heartbeat, without times.
pub(super) fn watches(core: &Core, now: Instant) -> Vec<WatchState> {
    let timeless = |watch| WatchState { listed_seconds_ago: None, alive_seconds_ago: None, ..watch };
    heartbeat(core, now).watches.into_iter().map(timeless).collect()
}

/// Routes of the forwarded watches.
fn routes(plan: &Plan) -> Routes {
    let service = Service::new("service", "namespace", 443).expect("this is a service");
    let target = Target::new("m", service).expect("this is the name of a manager");
    let forwarded = plan.watches().iter().filter(|watch| watch.work.contains(&Work::Forward));
    forwarded.map(|watch| (watch.name.clone(), target.clone())).collect()
}

/// Number of the agent's events that are waiting, parked or unsettled.
pub(super) fn unfinished(core: &Core) -> usize {
    let figures = core.figures();
    figures.waiting + figures.parked + figures.unsettled
}

impl ReceiverPeer {
    pub(super) fn new(instance: Instance, core: Core, plan: Plan, now: Instant) -> Self {
        let fleet = RuntimeTable::holding_all(
            Settings::default(),
            METRICS.clone(),
            instance,
            &WriteFence::default(),
            Instant::now(),
        );
        fleet.set_synced();
        fleet.set_routes(routes(&plan));
        fleet.place(KymaKey::new("ns", "kyma"), "", Some(RUNTIME.clone()), Arc::new(plan));
        Self { fleet, core, now }
    }

    /// Accepts and settles everything that the agent sends, whatever its backoff, and compares its digests. Panics if
    /// events remain, or a digest does not agree.
    pub(super) fn accept_all(&mut self) {
        let ended = (0..ROUNDS).any(|_| {
            self.now += LONG_WAIT;
            !self.events() && self.heartbeat_agrees() && unfinished(&self.core) == 0
        });
        assert!(ended, "the agent never runs out of events: {:?}", self.core.figures());
    }

    fn events(&self) -> bool {
        let Some(batch) = self.core.batch(self.now) else { return false };
        let events = verified(batch.epoch, EventBatch { events: read(&batch), traceparent: None });
        let response = self.fleet.events(events.with_leaf(vec![0x30].into()), NOW).expect("the runtime is known");
        self.core.apply_response(self.now, batch.epoch, &response);
        true
    }

    /// Answers a heartbeat of an agent whose events are answered, and settles them; true if no watch must be resent.
    fn heartbeat_agrees(&self) -> bool {
        let heartbeat = heartbeat(&self.core, self.now);
        let epoch = heartbeat.epoch;
        let sequence = heartbeat.sequence;
        let settled: Settled = heartbeat.watches.iter().map(|watch| (watch.name.clone(), sequence)).collect();
        let response = self.fleet.heartbeat(verified(epoch, heartbeat), NOW).expect("the runtime is known");
        let response = HeartbeatResponse { settled, ..response };
        self.core.apply_heartbeat_response(self.now, epoch, &response);
        response.resend.is_empty()
    }
}
