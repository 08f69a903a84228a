//! Contract v2: one request for each event to the incumbent's listener, with our outbox and our patience. There are no heartbeats;
//! the canary is only a sign of life of the watches.

use http::StatusCode;
use tidewatch_shared::v2;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{
    Client, Dial, Outcome, Parts,
    client::{Answer, Fault},
    current,
    gate::Gate,
    verdict,
};
use crate::{
    clock,
    core::Core,
    identity::Current,
    telemetry::{Metrics, Route, chain},
};

/// See the module.
pub(crate) struct Poster {
    dial: Dial,
    core: Core,
    credentials: Current,
    metrics: Metrics,
    gate: Gate,
}

/// What an answer of the incumbent's listener means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// The event is settled: nothing more is ever heard of it.
    Taken,
    /// This event is refused, or the listener is set up badly; nobody can tell.
    Refused,
    /// Not now.
    Later,
}

impl Poster {
    /// Readiness does not wait for the receiver: a quiet runtime sends nothing that could be answered.
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { dial, core, credentials, metrics, .. } = parts;
        Self { dial, core, credentials, metrics, gate: Gate::default() }
    }

    /// Runs until it is told to stop; a request that is under way is finished first, under its own deadline.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        while let Some(credentials) = current(&mut self.credentials, &stop).await {
            self.gate.renewed();
            let client = Client::new(&self.dial, credentials);
            while !stop.is_cancelled() && !self.credentials.has_changed().unwrap_or(false) {
                self.step(&client, &stop).await;
            }
        }
    }

    /// One request, or one wait.
    async fn step(&mut self, client: &Client, stop: &CancellationToken) {
        let now = Instant::now();
        let due = self.core.single_due(now).map(|due| self.gate.opens(due));
        if due.is_some_and(|due| due <= now) {
            return self.send(client).await;
        }
        let wake = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = wake => {}
            () = self.core.stirred() => {}
            _ = self.credentials.changed() => self.credentials.mark_changed(),
            () = stop.cancelled() => {}
        }
    }

    async fn send(&mut self, client: &Client) {
        let Some(single) = self.core.single(Instant::now()) else { return };
        if single.again {
            self.metrics.retried(Route::V2);
        }
        let begun = Instant::now();
        let answer = client.post_plain(&v2::path(&single.manager), single.event.to_body().into()).await;
        self.metrics.requested(Route::V2, Outcome::of(&answer), begun.elapsed());
        self.react(answer);
    }

    fn react(&mut self, answer: Result<Answer, Fault>) {
        let now = Instant::now();
        match answer {
            Ok(answer) => match meaning(answer.status) {
                Meaning::Taken => {
                    self.gate.open();
                    self.core.single_taken();
                }
                Meaning::Refused => {
                    tracing::warn!(status = answer.status.as_u16(), "The listener refuses an event");
                    self.metrics.refused("v2");
                    self.core.single_refused(now);
                    self.gate.fail(now, false);
                }
                Meaning::Later => {
                    tracing::warn!(status = answer.status.as_u16(), "The listener does not take events now");
                    match verdict::wait(&answer.headers, clock::unix_seconds()) {
                        Some(told) => self.gate.told(now, told),
                        None => self.gate.fail(now, false),
                    }
                }
            },
            Err(fault) => {
                tracing::warn!(error = chain(&fault), "The listener could not be asked");
                self.gate.fail(now, fault.is_connect());
            }
        }
    }
}

fn meaning(status: StatusCode) -> Meaning {
    match status {
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => Meaning::Later,
        status if status.is_success() => Meaning::Taken,
        status if status.is_client_error() => Meaning::Refused,
        _ => Meaning::Later,
    }
}

#[cfg(test)]
mod tests;
