//! Contract v2: one request per event to lifecycle-manager's listeners, with the same outbox and backoff. There are no
//! heartbeats; the canary only proves that the watches are alive.
//!
//! Each manager has its own listener behind the one address and therefore its own queue and retry timer: one event at a
//! time, and a listener that fails or hangs delays no other. Only failed connects affect all of them.

mod manager_timers;

use std::time::Duration;

use futures::{
    StreamExt as _,
    future::{BoxFuture, FutureExt as _},
    stream::FuturesUnordered,
};
use http::StatusCode;
use tidewatch_contract::v2;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{Client, LinkParts, current};
use crate::{
    clock,
    core::Core,
    identity::CurrentCredentials,
    outbox::SingleEvent,
    receiver::{BufferedResponse, Dialer, RequestError, RetryTimer, wait},
    telemetry::{Metrics, RequestOutcome, Route, error_chain},
};
use manager_timers::ManagerTimers;

/// Requests in flight at the same time, each to another manager. One less may hang without delaying the rest.
const AT_ONCE: usize = 8;

/// Sends single events of contract v2.
pub(crate) struct V2Sender {
    dial: Dialer,
    core: Core,
    credentials: CurrentCredentials,
    metrics: Metrics,
    /// Retry timer of connects, common to all managers.
    timer: RetryTimer,
    managers: ManagerTimers,
}

/// A completed request.
struct CompletedRequest {
    manager: String,
    response: Result<BufferedResponse, RequestError>,
}

/// Requests in flight, at most one per manager.
type Requests<'a> = FuturesUnordered<BoxFuture<'a, CompletedRequest>>;

/// Classification of a listener's response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disposition {
    /// The event is settled: contract v2 has no later acknowledgement.
    Accepted,
    /// The event is refused, or the listener is misconfigured; contract v2 does not distinguish them.
    Rejected,
    /// To be retried later.
    Retry,
}

impl V2Sender {
    /// Drops the readiness guard: an idle runtime sends nothing that could be acknowledged.
    pub(crate) fn new(parts: LinkParts) -> Self {
        let LinkParts { dial, core, credentials, metrics, .. } = parts;
        Self { dial, core, credentials, metrics, timer: RetryTimer::default(), managers: ManagerTimers::default() }
    }

    /// Runs until `stop` is cancelled; requests in flight end first, under their own deadlines.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        while let Some(credentials) = current(&mut self.credentials, &stop).await {
            self.timer.credentials_changed();
            self.managers.credentials_changed();
            let client = Client::new(&self.dial, credentials);
            let mut requests = Requests::new();
            while !stop.is_cancelled() && !self.credentials.has_changed().unwrap_or(false) {
                self.step(&client, &mut requests, &stop).await;
            }
            while let Some(ended) = requests.next().await {
                self.react(ended);
            }
        }
    }

    /// Starts one request, or waits once.
    async fn step<'a>(&mut self, client: &'a Client, requests: &mut Requests<'a>, stop: &CancellationToken) {
        let now = Instant::now();
        let due = self.due(now, requests.len());
        if due.is_some_and(|due| due <= now) {
            let managers = &self.managers;
            if let Some(single) = self.core.single(now, &|manager, due| managers.not_before(manager, due)) {
                requests.push(send(client, self.metrics.clone(), single).boxed());
            }
            return;
        }
        let wake = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(ended) = requests.next() => self.react(ended),
            () = wake => {}
            () = self.core.woken() => {}
            _ = self.credentials.changed() => self.credentials.mark_changed(),
            () = stop.cancelled() => {}
        }
    }

    /// Earliest time of another request. After a failed connect, a single request probes the connection.
    fn due(&self, now: Instant, requests: usize) -> Option<Instant> {
        let most = if self.timer.is_waiting() { 1 } else { AT_ONCE };
        if requests >= most {
            return None;
        }
        let managers = &self.managers;
        let due = self.core.single_due(now, &|manager, due| managers.not_before(manager, due))?;
        Some(self.timer.not_before(due))
    }

    fn react(&mut self, CompletedRequest { manager, response }: CompletedRequest) {
        let now = Instant::now();
        match response {
            Ok(response) => self.apply_response(manager, &response, now),
            Err(error) => {
                tracing::warn!(manager, error = error_chain(&error), "Request to the listener failed");
                self.core.single_failed(&manager);
                if !error.is_connect() {
                    self.timer.reset();
                    self.failed(manager, now, None);
                } else if self.timer.not_before(now) == now {
                    // Concurrent connect failures count as one.
                    self.timer.fail(now, true);
                }
            }
        }
    }

    fn apply_response(&mut self, manager: String, response: &BufferedResponse, now: Instant) {
        self.timer.reset();
        let status = response.status.as_u16();
        match disposition(response.status) {
            Disposition::Accepted => {
                self.managers.accepted(&manager);
                self.core.single_accepted(&manager);
            }
            Disposition::Rejected => {
                tracing::warn!(manager, status, "Event refused by the listener");
                self.metrics.refused("v2");
                self.core.single_refused(&manager, now);
                self.failed(manager, now, None);
            }
            Disposition::Retry => {
                tracing::warn!(manager, status, "Listener temporarily unavailable");
                self.core.single_failed(&manager);
                self.failed(manager, now, wait(&response.headers, clock::unix_seconds()));
            }
        }
    }

    fn failed(&mut self, manager: String, now: Instant, retry_after: Option<Duration>) {
        self.managers.failed(manager, now, retry_after);
        self.managers.retain(|manager| self.core.is_manager(manager));
    }
}

async fn send(client: &Client, metrics: Metrics, single: SingleEvent) -> CompletedRequest {
    let SingleEvent { manager, event, again } = single;
    if again {
        metrics.retried(Route::V2);
    }
    let begun = Instant::now();
    let response = client.post_plain(&v2::path(&manager), event.to_body().into()).await;
    metrics.requested(Route::V2, RequestOutcome::of(&response), begun.elapsed());
    CompletedRequest { manager, response }
}

fn disposition(status: StatusCode) -> Disposition {
    match status {
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => Disposition::Retry,
        status if status.is_success() => Disposition::Accepted,
        status if status.is_client_error() => Disposition::Rejected,
        _ => Disposition::Retry,
    }
}

#[cfg(test)]
mod tests;
