//! The link to the receiver: one task, one connection, one request at a time, for ever.
//!
//! Events leave at once when anything waits and no request is under way; there is no batch timer. Heartbeats go over the same
//! connection. Renewals of the certificate go beside it, see [`renewal`]: nothing waits for an issuer. What an answer means is decided in
//! [`verdict`] and in the outbox; here it is only carried out. Since there is one request at a time, none is under way when another
//! identity takes over.

mod client;
mod dial;
mod endpoint;
mod gate;
mod renewal;
mod v2;
mod verdict;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::StatusCode;
use serde::de::DeserializeOwned;
use tidewatch_shared::{
    event::BATCH_CONTENT_TYPE,
    exchange::{EVENTS_PATH, EventsAnswer, HEARTBEAT_PATH, HeartbeatAnswer},
    heartbeat::CertificateState,
    identity::Epoch,
};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

pub use client::Answer;
pub(crate) use client::{Fault, enrol};
pub use dial::Dial;
pub use endpoint::{Endpoint, ParseEndpoint};
pub(crate) use gate::Gate;
pub(crate) use v2::Poster;
pub(crate) use verdict::date;
pub use verdict::{Verdict, judge};

pub use crate::outbox::Announced;

use crate::{
    canary::Sightings,
    clock,
    core::{Core, Surroundings},
    identity::{Credentials, Current, Order, Renewals},
    random,
    telemetry::{Guard, Metrics, Outcome, Route, chain},
};
use client::{Client, Post};
use renewal::Carrier;

/// The receiver may ask for any heartbeat interval between these, in seconds.
const HEARTBEAT_SECONDS: (u32, u32) = (1, 3_600);
/// An epoch is drawn for a refused signature or nonce no more often.
const NEW_EPOCH: Duration = Duration::from_secs(60);

/// Everything that the link is made of.
pub struct Parts {
    /// How it is reached.
    pub dial: Dial,
    /// What there is to say.
    pub core: Core,
    /// As whom, and to which receiver.
    pub credentials: Current,
    /// For heartbeats.
    pub sightings: Sightings,
    /// The interval of heartbeats, as it begins and as the receiver changes it.
    pub interval: watch::Sender<Duration>,
    /// Readiness waits for the first answer that is not a refusal.
    pub pending: Guard,
    /// Counters.
    pub metrics: Metrics,
}

/// See the module.
pub struct Link {
    dial: Dial,
    core: Core,
    credentials: Current,
    /// Whoever renews the identity; nobody does when it comes from files.
    renewals: Option<Renewals>,
    /// The renewal that is under way, which ends with the link.
    carried: JoinSet<()>,
    sightings: Sightings,
    interval: watch::Sender<Duration>,
    pending: Option<Guard>,
    metrics: Metrics,
    events: Gate,
    heartbeats: Gate,
    heartbeat_due: Instant,
    /// The clock was set by the last answer: a second refusal is not about the clock alone.
    offset_tried: bool,
    epoch_drawn: Option<Instant>,
    /// An epoch was drawn for a refusal, and nothing was taken since: another one would not help.
    epoch_tried: bool,
}

impl Link {
    /// The first heartbeat is due at once: it opens the connection.
    pub fn new(parts: Parts) -> Self {
        let Parts { dial, core, credentials, sightings, interval, pending, metrics } = parts;
        Self {
            dial,
            core,
            credentials,
            renewals: None,
            carried: JoinSet::new(),
            sightings,
            interval,
            pending: Some(pending),
            metrics,
            events: Gate::default(),
            heartbeats: Gate::default(),
            heartbeat_due: Instant::now(),
            offset_tried: false,
            epoch_drawn: None,
            epoch_tried: false,
        }
    }

    /// Has renewals carried too.
    #[must_use]
    pub(crate) fn renewing(self, renewals: Renewals) -> Self {
        Self { renewals: Some(renewals), ..self }
    }

    /// Runs until it is told to stop; a request that is under way is finished first, under its own deadline.
    pub async fn run(mut self, stop: CancellationToken) {
        while let Some(credentials) = current(&mut self.credentials, &stop).await {
            self.events.renewed();
            self.heartbeats.renewed();
            // What certificate and roots we have now is told at once: a rotation waits for it.
            self.heartbeat_due = Instant::now();
            let client = Client::new(&self.dial, credentials);
            while !stop.is_cancelled() && !self.credentials.has_changed().unwrap_or(false) {
                self.step(&client, &stop).await;
            }
        }
    }

    /// One request, or one wait.
    async fn step(&mut self, client: &Client, stop: &CancellationToken) {
        // Before anything else: whoever is never at a loss for events has to renew too.
        if let Some(order) = self.renewals.as_mut().and_then(Renewals::order) {
            self.renew(client, order);
        }
        let now = Instant::now();
        let heartbeat = self.heartbeats.opens(self.heartbeat_due);
        if heartbeat <= now {
            return self.send_heartbeat(client).await;
        }
        let events = self.core.due(now).map(|due| self.events.opens(due));
        if events.is_some_and(|events| events <= now) {
            return self.send_events(client).await;
        }
        let wake = events.map_or(heartbeat, |events| events.min(heartbeat));
        tokio::select! {
            () = sleep_until(wake) => {}
            () = self.core.stirred() => {}
            order = ordered(self.renewals.as_mut()) => self.renew(client, order),
            Some(_) = self.carried.join_next() => {}
            _ = self.credentials.changed() => self.credentials.mark_changed(),
            () = stop.cancelled() => {}
        }
    }

    async fn send_events(&mut self, client: &Client) {
        let Some(batch) = self.core.batch(Instant::now()) else { return };
        if batch.again {
            self.metrics.retried(Route::Events);
        }
        let request =
            Post { path: EVENTS_PATH, content_type: BATCH_CONTENT_TYPE, body: batch.body, nonce: batch.nonce };
        let answer = post(client, &self.metrics, Route::Events, request).await;
        let answer = self.react::<EventsAnswer>(client, Route::Events, StatusCode::ACCEPTED, batch.epoch, answer);
        let Some(answer) = answer else { return };
        tracing::debug!(events = batch.events, accepted = answer.accepted, "Events were taken");
        self.core.answered(Instant::now(), batch.epoch, &answer);
        self.follow_interval(answer.heartbeat_seconds);
    }

    async fn send_heartbeat(&mut self, client: &Client) {
        let now = Instant::now();
        let credentials = client.credentials();
        let renewal_failed_since = self.renewals.as_ref().and_then(Renewals::failed_since);
        let surroundings = Surroundings {
            certificate: CertificateState { renewal_failed_since, ..credentials.certificate.clone() },
            trust_revision: Some(credentials.trust_revision.clone()),
            canary: self.sightings.canary(now),
            incomplete: self.sightings.is_missing() || self.renewals.as_ref().is_some_and(Renewals::is_unkept),
        };
        let (heartbeat, nonce) = self.core.heartbeat(now, surroundings);
        let epoch = heartbeat.epoch;
        let body: Bytes = serde_json::to_vec(&heartbeat).expect("strings and numbers have a JSON form").into();
        let request = Post { path: HEARTBEAT_PATH, content_type: "application/json", body, nonce };
        let answer = post(client, &self.metrics, Route::Heartbeat, request).await;
        let answer = self.react::<HeartbeatAnswer>(client, Route::Heartbeat, StatusCode::OK, epoch, answer);
        let Some(answer) = answer else { return };
        self.core.heartbeat_answered(Instant::now(), epoch, &answer);
        if answer.renew {
            self.demand(client, Renewals::wanted);
        }
        self.follow_interval(answer.heartbeat_seconds);
        let interval = *self.interval.borrow();
        self.heartbeat_due = Instant::now() + jittered(interval);
    }

    /// Has a renewal carried while everything else goes on.
    fn renew(&mut self, client: &Client, order: Order) {
        if order.is_given_up() {
            return;
        }
        let carrier = Carrier::new(client.another(&self.dial), self.core.clone(), self.metrics.clone());
        // Whoever orders another one no longer waits for the one before.
        self.carried = JoinSet::new();
        self.carried.spawn(carrier.carry(order));
    }

    /// Tells whoever renews the identity what the receiver says of it.
    fn demand(&self, client: &Client, what: impl FnOnce(&Renewals, &str)) {
        if let Some(renewals) = &self.renewals {
            what(renewals, &client.credentials().certificate.fingerprint);
        }
    }

    /// Carries out what an answer means for this side; gives back what a taken request was answered with.
    fn react<T: DeserializeOwned>(
        &mut self,
        client: &Client,
        route: Route,
        success: StatusCode,
        epoch: Epoch,
        answer: Result<Answer, Fault>,
    ) -> Option<T> {
        let answer = match answer {
            Ok(answer) if answer.status == success => match serde_json::from_slice(&answer.body) {
                Ok(body) => {
                    self.taken(route);
                    return Some(body);
                }
                Err(error) => Err(Fault::Unreadable(error)),
            },
            answer => answer,
        };
        let now = Instant::now();
        match answer {
            Ok(answer) => self.refused(client, route, epoch, &answer, now),
            Err(fault) => {
                tracing::warn!(error = chain(&fault), "The receiver could not be asked");
                if fault.is_about_certificate() {
                    self.demand(client, Renewals::refused);
                }
                self.gate(route).fail(now, fault.is_connect());
            }
        }
        None
    }

    fn taken(&mut self, route: Route) {
        (self.offset_tried, self.epoch_tried) = (false, false);
        self.pending = None;
        self.gate(route).open();
        // The connection works: what waits only because it did not need not wait any longer.
        self.events.connected();
        self.heartbeats.connected();
    }

    fn refused(&mut self, client: &Client, route: Route, epoch: Epoch, answer: &Answer, now: Instant) {
        let verdict = judge(answer, clock::unix_seconds());
        tracing::warn!(status = answer.status.as_u16(), ?verdict, "The receiver refuses");
        match verdict {
            Verdict::Split if route == Route::Events => {
                if self.core.refused_whole(now, epoch) {
                    // The one is found. If it is not the one, but all of them are, this goes on for as long as it takes.
                    self.gate(route).fail(now, false);
                }
            }
            Verdict::TooLarge(announced) if route == Route::Events => {
                if self.core.too_large(now, epoch, announced) {
                    self.gate(route).fail(now, false);
                }
            }
            Verdict::Clock { offset } => self.set_clock(route, offset, now),
            Verdict::NewEpoch if !self.epoch_tried && self.epoch_rests(now) => {
                (self.epoch_drawn, self.epoch_tried) = (Some(now), true);
                self.core.start_over();
            }
            Verdict::Told(wait) => self.gate(route).told(now, wait),
            Verdict::Certificate => {
                self.demand(client, Renewals::refused);
                self.gate(route).fail(now, false);
            }
            Verdict::Split | Verdict::TooLarge(_) | Verdict::NewEpoch | Verdict::BackOff => {
                self.gate(route).fail(now, false);
            }
        }
    }

    fn epoch_rests(&self, now: Instant) -> bool {
        self.epoch_drawn.is_none_or(|drawn| now.duration_since(drawn) > NEW_EPOCH)
    }

    /// The receiver's clock counts each time that it is told, ours may have been set meanwhile; at once only the first time.
    fn set_clock(&mut self, route: Route, offset: i64, now: Instant) {
        take_clock(&self.metrics, offset);
        if std::mem::replace(&mut self.offset_tried, true) {
            self.gate(route).fail(now, false);
        }
    }

    const fn gate(&mut self, route: Route) -> &mut Gate {
        match route {
            Route::Heartbeat => &mut self.heartbeats,
            Route::Events | Route::Renewal | Route::Enrolment | Route::V2 => &mut self.events,
        }
    }

    fn follow_interval(&mut self, seconds: u32) {
        let (least, most) = HEARTBEAT_SECONDS;
        let interval = Duration::from_secs(seconds.clamp(least, most).into());
        if self.interval.send_if_modified(|current| std::mem::replace(current, interval) != interval) {
            // A shorter interval holds from now on, not from the end of the longer one.
            self.heartbeat_due = self.heartbeat_due.min(Instant::now() + jittered(interval));
        }
    }
}

/// Signs a request by the receiver's clock, as far as that is known, and has it answered.
async fn post(client: &Client, metrics: &Metrics, route: Route, request: Post) -> Result<Answer, Fault> {
    let begun = Instant::now();
    let answer = client.post(request, clock::unix_seconds() + metrics.clock_offset.get()).await;
    metrics.requested(route, Outcome::of(&answer), begun.elapsed());
    answer
}

/// The metric is where the offset stands: whoever judges certificates reads it as well.
fn take_clock(metrics: &Metrics, offset: i64) {
    tracing::warn!(offset, "Signing with the receiver's clock from now on");
    metrics.clock_offset.set(offset);
}

/// The credentials to use from now on; `None` when it is time to stop.
async fn current(credentials: &mut Current, stop: &CancellationToken) -> Option<Arc<Credentials>> {
    loop {
        if stop.is_cancelled() {
            return None;
        }
        if let Some(credentials) = credentials.borrow_and_update().clone() {
            return Some(credentials);
        }
        tokio::select! {
            changed = credentials.changed() => changed.ok()?,
            () = stop.cancelled() => return None,
        }
    }
}

/// The next renewal; never, when nobody renews.
async fn ordered(renewals: Option<&mut Renewals>) -> Order {
    match renewals {
        Some(renewals) => renewals.ordered().await,
        None => std::future::pending().await,
    }
}

impl Outcome {
    /// As metrics count it.
    pub(crate) fn of(answer: &Result<Answer, Fault>) -> Self {
        match answer {
            Ok(answer) if answer.status.is_success() => Self::Taken,
            Ok(answer) => Self::Refused(answer.status),
            Err(fault) if fault.is_connect() => Self::Connect,
            Err(Fault::Sign(_) | Fault::Request(_)) => Self::Setup,
            Err(_) => Self::Fault,
        }
    }
}

/// A tenth of jitter, so that thousands of agents that began together do not stay together.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(0.9) + random::up_to(interval.mul_f64(0.2))
}

#[cfg(test)]
mod tests;
