//! The product's own receiver, for what an agent sends after it has read whatever it has read.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use rustls::pki_types::CertificateDer;
use tidewatch_agent::core::{Batch, Core, Surroundings};
use tidewatch_receiver::{
    forward::{Routes, Service, Target},
    hub::{Beside, Hub, Metrics, Settings},
    key::KymaKey,
};
use tidewatch_shared::{
    event::{self, MAX_BODY_BYTES, MAX_EVENTS, Received},
    exchange::{HeartbeatAnswer, Settled},
    heartbeat::{CertificateState, Heartbeat, WatchState},
    identity::{Instance, RuntimeId},
    metrics::Registry,
    plan::{Plan, Work},
};
use tokio::time::Instant;

use crate::fuzz::seeds::NOW;

/// Requests after which an agent that is told nothing new has nothing left to say.
const ROUNDS: usize = 64;

/// Longer than anything that an agent waits for by itself.
pub(super) const LATER: Duration = Duration::from_secs(600);
/// Counters of nobody.
static METRICS: LazyLock<Metrics> = LazyLock::new(|| Metrics::register(&mut Registry::default()));

pub(super) static RUNTIME: LazyLock<RuntimeId> = LazyLock::new(|| "r-1".parse().expect("this is a runtime id"));

/// A receiver that knows the agent's plan.
pub(super) struct Reception {
    hub: Hub,
    core: Core,
    now: Instant,
}

/// What the agent sends is a batch: bounded, of one epoch, and in its order. Holes are what was taken already.
pub(super) fn read(batch: &Batch) -> Vec<Received> {
    assert!(batch.events <= MAX_EVENTS && (batch.body.len() <= MAX_BODY_BYTES || batch.events == 1));
    let events = event::parse_batch(&batch.body).expect("what the agent sends is a batch");
    assert!(batch.events > 0 && events.len() == batch.events);
    let ids = events.iter().map(|event| match event {
        Ok(event::Event { id, .. }) | Err((id, _)) => *id,
    });
    assert!(
        ids.clone().all(|id| id.epoch == batch.epoch) && ids.is_sorted_by(|one, next| one.sequence < next.sequence)
    );
    events
}

/// A heartbeat of the agent, which the receiver can read.
pub(super) fn heartbeat(core: &Core, now: Instant) -> Heartbeat {
    let (not_after, fingerprint) = Default::default();
    let certificate = CertificateState { not_after, fingerprint, renewal_failed_since: None };
    let surroundings = Surroundings { certificate, trust_revision: None, canary: None, incomplete: false };
    let (heartbeat, _) = core.heartbeat(now, surroundings);
    let written = serde_json::to_vec(&heartbeat).expect("a heartbeat is JSON");
    assert_eq!(Heartbeat::parse(&written).ok().as_ref(), Some(&heartbeat));
    heartbeat
}

/// What a heartbeat says of the watches, apart from times.
pub(super) fn watches(core: &Core, now: Instant) -> Vec<WatchState> {
    let timeless = |watch| WatchState { listed_seconds_ago: None, alive_seconds_ago: None, ..watch };
    heartbeat(core, now).watches.into_iter().map(timeless).collect()
}

/// Where the events of forwarded watches go.
fn routes(plan: &Plan) -> Routes {
    let service = Service::new("service", "namespace", 443).expect("this is a service");
    let target = Target::new("m", service).expect("this is the name of a manager");
    let forwarded = plan.watches().iter().filter(|watch| watch.work.contains(&Work::Forward));
    forwarded.map(|watch| (watch.name.clone(), target.clone())).collect()
}

/// What an agent still has to say, or to hear that it is done.
pub(super) fn dirty(core: &Core) -> usize {
    let figures = core.figures();
    figures.waiting + figures.parked + figures.unsettled
}

impl Reception {
    pub(super) fn new(instance: Instance, core: Core, plan: Plan, now: Instant) -> Self {
        let hub = Hub::new(instance, Settings::default(), METRICS.clone(), Instant::now());
        hub.set_synced();
        hub.set_routes(routes(&plan));
        hub.place(KymaKey::new("ns", "kyma"), Some(RUNTIME.clone()), Arc::new(plan));
        Self { hub, core, now }
    }

    /// Takes and settles everything that the agent has to say, however long it waits before it says it, and has its digests compared.
    /// What is not taken in the end, or does not agree, is a broken promise.
    pub(super) fn take(&mut self) {
        let ended = (0..ROUNDS).any(|_| {
            self.now += LATER;
            !self.events() && self.agrees() && dirty(&self.core) == 0
        });
        assert!(ended, "there is no end of what the agent has to say: {:?}", self.core.figures());
    }

    fn events(&self) -> bool {
        let Some(batch) = self.core.batch(self.now) else { return false };
        let leaf = CertificateDer::from(vec![0x30]);
        let beside = Beside { leaf: Some(&leaf), ..Beside::default() };
        let answer = self.hub.events_with(&RUNTIME, batch.epoch, NOW, read(&batch), beside);
        let answer = answer.expect("the runtime is known");
        self.core.answered(self.now, batch.epoch, &answer);
        true
    }

    /// Takes a heartbeat of an agent whose events are answered, and settles them; true if it asks for none again.
    fn agrees(&self) -> bool {
        let heartbeat = heartbeat(&self.core, self.now);
        let (epoch, sequence) = (heartbeat.epoch, heartbeat.sequence);
        let settled: Settled = heartbeat.watches.iter().map(|watch| (watch.name.clone(), sequence)).collect();
        let answer = self.hub.heartbeat(&RUNTIME, NOW, heartbeat, NOW).expect("the runtime is known");
        let answer = HeartbeatAnswer { settled, ..answer };
        self.core.heartbeat_answered(self.now, epoch, &answer);
        answer.resend.is_empty()
    }
}
