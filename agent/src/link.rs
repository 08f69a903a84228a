//! The link to the receiver: one task, one connection, one request at a time.
//!
//! Events are sent as soon as any is waiting and no request is in flight; there is no batch timer. Heartbeats share the
//! connection. The enroller sends renewals over connections of its own, so nothing waits for an issuer.
//! `receiver` classifies refusals, the outbox processes responses; the link only executes. Since there is one request
//! at a time, none is in flight when the identity changes.

mod evidence;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::StatusCode;
use serde::de::DeserializeOwned;
use tidewatch_api::identity::Epoch;
use tidewatch_contract::{
    event::BATCH_CONTENT_TYPE,
    exchange::{EVENTS_PATH, EventsResponse, HEARTBEAT_PATH, HeartbeatResponse},
    heartbeat::{CertificateState, EVIDENCE_INTERVALS, aligned},
};
use tidewatch_kit::variant::VariantName as _;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{
    canary::CanaryState,
    clock,
    core::{Core, Evidence, HeartbeatContext},
    identity::{
        CertificateNotice, Client, Credentials, CurrentCredentials, EnrollerHandle, PostRequest, correct_clock,
    },
    random,
    receiver::{BufferedResponse, Dialer, RefusalAction, RequestError, RetryTimer, classify_refusal},
    telemetry::{Metrics, Pending, Route, error_chain},
};
use evidence::ExtraHeartbeats;

/// Bounds of the heartbeat interval that the receiver may set, in seconds.
const HEARTBEAT_SECONDS: (u32, u32) = (1, 3_600);
/// Time over which the agents of a receiver that has ended open new connections, each at random. The receiver regards an
/// agent as silent that is not back within five seconds.
const RECONNECT: Duration = Duration::from_secs(3);
/// Minimum time between new epochs caused by refused signatures or nonces.
const EPOCH_INTERVAL: Duration = Duration::from_secs(60);

/// Dependencies of the link.
pub struct LinkParts {
    /// Connects to the receiver.
    pub dial: Dialer,
    /// Source of events and heartbeats.
    pub core: Core,
    /// Identity of the agent, and address of the receiver.
    pub credentials: CurrentCredentials,
    /// Gets the receiver's demands concerning the certificate; `None` if the identity comes from files.
    pub enroller: Option<EnrollerHandle>,
    /// State of the canary, for heartbeats.
    pub canary_state: CanaryState,
    /// Heartbeat interval; the receiver may change it.
    pub interval: watch::Sender<Duration>,
    /// Readiness guard until the first accepted request.
    pub pending: Pending,
    /// Metrics.
    pub metrics: Metrics,
}

/// Sends events and heartbeats.
pub struct Link {
    dial: Dialer,
    core: Core,
    credentials: CurrentCredentials,
    enroller: Option<EnrollerHandle>,
    canary_state: CanaryState,
    interval: watch::Sender<Duration>,
    pending: Option<Pending>,
    metrics: Metrics,
    events: RetryTimer,
    heartbeats: RetryTimer,
    heartbeat_due: Instant,
    extra_heartbeats: ExtraHeartbeats,
    /// The last response corrected the clock: a second refusal has another cause.
    offset_tried: bool,
    epoch_begun: Option<Instant>,
    /// A refusal caused a new epoch, and no request was accepted since: another epoch would not help.
    epoch_tried: bool,
}

impl Link {
    /// A link with its first heartbeat due at once, which opens the connection.
    pub fn new(parts: LinkParts) -> Self {
        let LinkParts { dial, core, credentials, enroller, canary_state, interval, pending, metrics } = parts;
        Self {
            dial,
            core,
            credentials,
            enroller,
            canary_state,
            interval,
            pending: Some(pending),
            metrics,
            events: RetryTimer::default(),
            heartbeats: RetryTimer::default(),
            heartbeat_due: Instant::now(),
            extra_heartbeats: ExtraHeartbeats::default(),
            offset_tried: false,
            epoch_begun: None,
            epoch_tried: false,
        }
    }

    /// Runs until `stop` is cancelled; a request in flight ends first, under its own deadline.
    pub async fn run(mut self, stop: CancellationToken) {
        while let Some(credentials) = current(&mut self.credentials, &stop).await {
            self.events.credentials_changed();
            self.heartbeats.credentials_changed();
            // Announce certificate and trust revision at once: a CA rotation waits for them.
            self.heartbeat_due = Instant::now();
            let client = Client::new(&self.dial, credentials);
            while !stop.is_cancelled() && !self.credentials.has_changed().unwrap_or(false) {
                self.step(&client, &stop).await;
            }
        }
    }

    /// Sends one request, or waits once.
    async fn step(&mut self, client: &Client, stop: &CancellationToken) {
        let now = Instant::now();
        let evidence = self.evidence(now);
        let due = self.extra_heartbeats.due(&evidence, self.heartbeat_due, now);
        let heartbeat = self.heartbeats.not_before(due);
        if heartbeat <= now {
            return self.send_heartbeat(client).await;
        }
        let events = self.core.due(now).map(|due| self.events.not_before(due));
        if events.is_some_and(|events| events <= now) {
            return self.send_events(client).await;
        }
        let wake = events.map_or(heartbeat, |events| events.min(heartbeat));
        tokio::select! {
            () = sleep_until(wake) => {}
            () = self.core.woken() => {}
            () = self.canary_state.came_back() => {}
            () = client.lost() => self.extra_heartbeats.connection_lost(Instant::now() + random::up_to(RECONNECT)),
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
            PostRequest { path: EVENTS_PATH, content_type: BATCH_CONTENT_TYPE, body: batch.body, nonce: batch.nonce };
        let response = client.post(&self.metrics, Route::Events, request).await;
        let response = self.react::<EventsResponse>(client, Route::Events, StatusCode::ACCEPTED, batch.epoch, response);
        let Some(response) = response else { return };
        tracing::debug!(events = batch.events, accepted = response.accepted, "Events accepted");
        self.core.apply_response(Instant::now(), batch.epoch, &response);
        self.follow_interval(response.heartbeat_seconds);
    }

    async fn send_heartbeat(&mut self, client: &Client) {
        let now = Instant::now();
        let credentials = &client.credentials;
        let identity = self.enroller.as_ref().map(|enroller| enroller.identity_status.report()).unwrap_or_default();
        let certificate = credentials.certificate.clone();
        let surroundings = HeartbeatContext {
            certificate: CertificateState { renewal_failed_since: identity.failing_since, ..certificate },
            trust_revision: Some(credentials.trust_revision.clone()),
            canary: self.canary_state.canary(now),
            incomplete: self.canary_state.is_missing() || identity.unsaved,
        };
        // Collected before the heartbeat: a change in between causes another one.
        let evidence = self.evidence(now);
        let (heartbeat, nonce) = self.core.heartbeat(now, surroundings);
        let epoch = heartbeat.epoch;
        let body: Bytes = serde_json::to_vec(&heartbeat).expect("strings and numbers have a JSON form").into();
        let request = PostRequest { path: HEARTBEAT_PATH, content_type: "application/json", body, nonce };
        let response = client.post(&self.metrics, Route::Heartbeat, request).await;
        let response = self.react::<HeartbeatResponse>(client, Route::Heartbeat, StatusCode::OK, epoch, response);
        let Some(response) = response else { return };
        self.extra_heartbeats.accepted(evidence, self.heartbeat_due, now);
        self.core.apply_heartbeat_response(Instant::now(), epoch, &response);
        if response.renew {
            self.notify_enroller(client, CertificateNotice::Renew);
        }
        self.follow_interval(response.heartbeat_seconds);
        let interval = *self.interval.borrow();
        self.heartbeat_due = Instant::now() + pause(interval);
    }

    /// The current evidence about the event path.
    fn evidence(&self, now: Instant) -> Evidence {
        let lifetime = self.interval.borrow().saturating_mul(EVIDENCE_INTERVALS).as_secs();
        let canary = self.canary_state.canary(now);
        let is_unsaved = self.enroller.as_ref().is_some_and(|enroller| enroller.identity_status.is_unsaved());
        let is_incomplete = self.canary_state.is_missing() || is_unsaved;
        self.core.evidence(canary.is_some_and(|canary| canary.age_seconds <= lifetime), is_incomplete)
    }

    /// Notifies the enroller of the receiver's statements about the certificate.
    fn notify_enroller(&self, client: &Client, notice: CertificateNotice) {
        if let Some(enroller) = &self.enroller {
            enroller.notify(notice, &client.credentials.certificate.fingerprint);
        }
    }

    /// Processes the outcome of a request; returns the body of a successful response.
    fn react<T: DeserializeOwned>(
        &mut self,
        client: &Client,
        route: Route,
        success: StatusCode,
        epoch: Epoch,
        response: Result<BufferedResponse, RequestError>,
    ) -> Option<T> {
        let response = match response {
            Ok(response) if response.status == success => match serde_json::from_slice(&response.body) {
                Ok(body) => {
                    self.accepted(route);
                    return Some(body);
                }
                Err(error) => Err(RequestError::Unreadable(error)),
            },
            response => response,
        };
        let now = Instant::now();
        match response {
            Ok(response) => self.refused(client, route, epoch, &response, now),
            Err(error) => {
                tracing::warn!(error = error_chain(&error), "Request to the receiver failed");
                if error.is_about_certificate() {
                    self.notify_enroller(client, CertificateNotice::Refused);
                }
                self.timer(route).fail(now, error.is_connect());
            }
        }
        None
    }

    fn accepted(&mut self, route: Route) {
        (self.offset_tried, self.epoch_tried) = (false, false);
        self.pending = None;
        self.timer(route).reset();
        // The connection works: routes that only waited for a connection need not wait any longer.
        self.events.connected();
        self.heartbeats.connected();
        self.extra_heartbeats.connected();
    }

    fn refused(&mut self, client: &Client, route: Route, epoch: Epoch, response: &BufferedResponse, now: Instant) {
        let action = classify_refusal(response, clock::unix_seconds());
        let status = response.status.as_u16();
        let retry_after_seconds = action.retry_after().map(|wait| wait.as_secs());
        tracing::warn!(status, action = action.as_str(), retry_after_seconds, "Request refused by the receiver");
        match action {
            RefusalAction::Split if route == Route::Events => {
                if self.core.refused_whole(now, epoch) {
                    // The offending event is isolated. If every event is refused, the backoff limits the rate.
                    self.timer(route).fail(now, false);
                }
            }
            RefusalAction::TooLarge(announced) if route == Route::Events => {
                if self.core.too_large(now, epoch, announced) {
                    self.timer(route).fail(now, false);
                }
            }
            RefusalAction::Clock { offset } => self.set_clock(route, offset, now),
            RefusalAction::NewEpoch if !self.epoch_tried && self.may_begin_epoch(now) => {
                (self.epoch_begun, self.epoch_tried) = (Some(now), true);
                self.core.restart_epoch();
            }
            RefusalAction::RetryAfter(wait) => self.timer(route).retry_after(now, wait),
            RefusalAction::Certificate => {
                self.notify_enroller(client, CertificateNotice::Refused);
                self.timer(route).fail(now, false);
            }
            RefusalAction::Split | RefusalAction::TooLarge(_) | RefusalAction::NewEpoch | RefusalAction::BackOff => {
                self.timer(route).fail(now, false);
            }
        }
    }

    fn may_begin_epoch(&self, now: Instant) -> bool {
        self.epoch_begun.is_none_or(|drawn| now.duration_since(drawn) > EPOCH_INTERVAL)
    }

    /// Applies every clock offset of the receiver, because the local clock may have been set meanwhile; retries without
    /// delay only once.
    fn set_clock(&mut self, route: Route, offset: i64, now: Instant) {
        correct_clock(&self.metrics, offset);
        if std::mem::replace(&mut self.offset_tried, true) {
            self.timer(route).fail(now, false);
        }
    }

    const fn timer(&mut self, route: Route) -> &mut RetryTimer {
        match route {
            Route::Heartbeat => &mut self.heartbeats,
            Route::Events | Route::Renewal | Route::Enrolment => &mut self.events,
        }
    }

    fn follow_interval(&mut self, seconds: u32) {
        let (least, most) = HEARTBEAT_SECONDS;
        let interval = Duration::from_secs(seconds.clamp(least, most).into());
        if self.interval.send_if_modified(|current| std::mem::replace(current, interval) != interval) {
            // A shorter interval applies from now on, not from the end of the longer one.
            self.heartbeat_due = self.heartbeat_due.min(Instant::now() + pause(interval));
        }
    }
}

/// The credentials to use; `None` once `stop` is cancelled.
async fn current(credentials: &mut CurrentCredentials, stop: &CancellationToken) -> Option<Arc<Credentials>> {
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

/// Returns the pause from now until the next heartbeat.
fn pause(interval: Duration) -> Duration {
    pause_after(interval, Duration::from_millis(u64::try_from(clock::unix_millis()).unwrap_or_default()))
}

/// Returns the pause until the next heartbeat: with jitter of ten percent, so thousands of agents that started together
/// spread out, and until a step of the wall clock.
fn pause_after(interval: Duration, since_unix_epoch: Duration) -> Duration {
    aligned(interval.mul_f64(0.9) + random::up_to(interval.mul_f64(0.2)), since_unix_epoch)
}

#[cfg(test)]
mod tests;
