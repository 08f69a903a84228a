//! The link to the receiver: one task, one connection, one request at a time, for ever.
//!
//! Events leave at once when anything waits and no request is under way; there is no batch timer. Heartbeats go over the same
//! connection. What an answer means is decided in [`verdict`] and in the outbox; here it is only carried out.

mod client;
mod endpoint;
mod gate;
mod verdict;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::StatusCode;
use serde::de::DeserializeOwned;
use tidewatch_shared::{
    event::BATCH_CONTENT_TYPE,
    exchange::{EVENTS_PATH, EventsAnswer, HEARTBEAT_PATH, HeartbeatAnswer},
    identity::Epoch,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

pub use endpoint::{Endpoint, ParseEndpoint};

use crate::{
    canary::Sightings,
    core::{Core, Surroundings},
    identity::{Credentials, Current},
    random,
    telemetry::{Guard, Metrics, Outcome, Route, chain},
};
use client::{Answer, Client, Fault, Post};
use gate::Gate;
use verdict::{Verdict, judge};

/// The receiver may ask for any heartbeat interval between these, in seconds.
const HEARTBEAT_SECONDS: (u32, u32) = (1, 3_600);
/// An epoch is drawn for a refused signature or nonce no more often.
const NEW_EPOCH: Duration = Duration::from_secs(60);

/// Everything that the link is made of.
pub(crate) struct Parts {
    /// Where the receiver is.
    pub(crate) endpoint: Endpoint,
    /// What there is to say.
    pub(crate) core: Core,
    /// As whom.
    pub(crate) credentials: Current,
    /// For heartbeats.
    pub(crate) sightings: Sightings,
    /// The interval of heartbeats, as it begins and as the receiver changes it.
    pub(crate) interval: watch::Sender<Duration>,
    /// Readiness waits for the first answer that is not a refusal.
    pub(crate) pending: Guard,
    /// Counters.
    pub(crate) metrics: Metrics,
}

/// See the module.
pub(crate) struct Link {
    endpoint: Endpoint,
    core: Core,
    credentials: Current,
    sightings: Sightings,
    interval: watch::Sender<Duration>,
    pending: Option<Guard>,
    metrics: Metrics,
    events: Gate,
    heartbeats: Gate,
    heartbeat_due: Instant,
    /// Added to our clock when signing, in seconds.
    offset: i64,
    /// The clock was set by the last answer: a second refusal is not about the clock alone.
    offset_tried: bool,
    epoch_drawn: Option<Instant>,
}

impl Link {
    /// The first heartbeat is due at once: it opens the connection.
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { endpoint, core, credentials, sightings, interval, pending, metrics } = parts;
        Self {
            endpoint,
            core,
            credentials,
            sightings,
            interval,
            pending: Some(pending),
            metrics,
            events: Gate::default(),
            heartbeats: Gate::default(),
            heartbeat_due: Instant::now(),
            offset: 0,
            offset_tried: false,
            epoch_drawn: None,
        }
    }

    /// Runs until it is told to stop; a request that is under way is finished first, under its own deadline.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        while let Some(credentials) = self.current(&stop).await {
            let client = Client::new(&self.endpoint, credentials);
            while !stop.is_cancelled() && !self.credentials.has_changed().unwrap_or(false) {
                self.step(&client, &stop).await;
            }
        }
    }

    /// The credentials to use from now on; `None` when it is time to stop.
    async fn current(&mut self, stop: &CancellationToken) -> Option<Arc<Credentials>> {
        loop {
            if stop.is_cancelled() {
                return None;
            }
            if let Some(credentials) = self.credentials.borrow_and_update().clone() {
                return Some(credentials);
            }
            tokio::select! {
                changed = self.credentials.changed() => changed.ok()?,
                () = stop.cancelled() => return None,
            }
        }
    }

    /// One request, or one wait.
    async fn step(&mut self, client: &Client, stop: &CancellationToken) {
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
            _ = self.credentials.changed() => self.credentials.mark_changed(),
            () = stop.cancelled() => {}
        }
    }

    async fn send_events(&mut self, client: &Client) {
        let Some(batch) = self.core.batch(Instant::now()) else { return };
        if batch.again {
            self.metrics.retried(Route::Events);
        }
        let post = Post { path: EVENTS_PATH, content_type: BATCH_CONTENT_TYPE, body: batch.body, nonce: batch.nonce };
        let answer = self.post(client, Route::Events, post).await;
        let Some(answer) = self.react::<EventsAnswer>(Route::Events, StatusCode::ACCEPTED, batch.epoch, answer) else {
            return;
        };
        tracing::debug!(events = batch.events, accepted = answer.accepted, "Events were taken");
        self.core.answered(Instant::now(), batch.epoch, &answer);
        self.follow_interval(answer.heartbeat_seconds);
    }

    async fn send_heartbeat(&mut self, client: &Client) {
        let now = Instant::now();
        let Credentials { certificate, trust_revision, .. } = client.credentials();
        let surroundings = Surroundings {
            certificate: certificate.clone(),
            trust_revision: Some(trust_revision.clone()),
            canary: self.sightings.canary(now),
        };
        let (heartbeat, nonce) = self.core.heartbeat(now, surroundings);
        let epoch = heartbeat.epoch;
        let body: Bytes = serde_json::to_vec(&heartbeat).expect("strings and numbers have a JSON form").into();
        let post = Post { path: HEARTBEAT_PATH, content_type: "application/json", body, nonce };
        let answer = self.post(client, Route::Heartbeat, post).await;
        let Some(answer) = self.react::<HeartbeatAnswer>(Route::Heartbeat, StatusCode::OK, epoch, answer) else {
            return;
        };
        self.core.heartbeat_answered(Instant::now(), epoch, &answer);
        self.follow_interval(answer.heartbeat_seconds);
        let interval = *self.interval.borrow();
        // A tenth of jitter, so that thousands of agents that began together do not stay together.
        self.heartbeat_due = Instant::now() + interval.mul_f64(0.9) + random::up_to(interval.mul_f64(0.2));
    }

    async fn post(&self, client: &Client, route: Route, post: Post) -> Result<Answer, Fault> {
        let answer = client.post(post, random::unix_millis() / 1_000 + self.offset).await;
        let outcome = match &answer {
            Ok(answer) if answer.status.is_success() => Outcome::Taken,
            Ok(answer) => Outcome::Refused(answer.status),
            Err(fault) if fault.is_connect() => Outcome::Connect,
            Err(_) => Outcome::Fault,
        };
        self.metrics.requested(route, outcome);
        answer
    }

    /// Carries out what an answer means for this side; gives back what a taken request was answered with.
    fn react<T: DeserializeOwned>(
        &mut self,
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
            Ok(answer) => self.refused(route, epoch, &answer, now),
            Err(fault) => {
                tracing::warn!(error = chain(&fault), "The receiver could not be asked");
                self.gate(route).fail(now, fault.is_connect());
            }
        }
        None
    }

    fn taken(&mut self, route: Route) {
        self.offset_tried = false;
        self.pending = None;
        self.gate(route).open();
        // The connection works: what waits only because it did not need not wait any longer.
        self.events.connected();
        self.heartbeats.connected();
    }

    fn refused(&mut self, route: Route, epoch: Epoch, answer: &Answer, now: Instant) {
        let verdict = judge(answer, random::unix_millis() / 1_000);
        tracing::warn!(status = answer.status.as_u16(), ?verdict, "The receiver refuses");
        match verdict {
            Verdict::Split if route == Route::Events => self.core.refused_whole(epoch),
            Verdict::Clock { offset } if !self.offset_tried => {
                tracing::warn!(offset, "Signing with the receiver's clock from now on");
                (self.offset, self.offset_tried) = (offset, true);
                self.metrics.clock_offset.set(offset);
            }
            Verdict::NewEpoch if self.epoch_drawn.is_none_or(|drawn| now.duration_since(drawn) > NEW_EPOCH) => {
                self.epoch_drawn = Some(now);
                self.core.start_over();
            }
            Verdict::Told(wait) => self.gate(route).told(now, wait),
            Verdict::Split | Verdict::Clock { .. } | Verdict::NewEpoch | Verdict::BackOff => {
                self.gate(route).fail(now, false)
            }
        }
    }

    const fn gate(&mut self, route: Route) -> &mut Gate {
        match route {
            Route::Events => &mut self.events,
            Route::Heartbeat => &mut self.heartbeats,
        }
    }

    fn follow_interval(&self, seconds: u32) {
        let (least, most) = HEARTBEAT_SECONDS;
        let interval = Duration::from_secs(seconds.clamp(least, most).into());
        self.interval.send_if_modified(|current| std::mem::replace(current, interval) != interval);
    }
}

#[cfg(test)]
mod tests;
