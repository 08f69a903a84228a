//! Contract v2: one request for each event to the incumbent's listeners, with our outbox and our patience. There are no heartbeats;
//! the canary is only a sign of life of the watches.
//!
//! Each manager has a listener of its own behind the one address, so each is told by itself: one event at a time, with its own waits, and
//! one that fails or hangs delays no other. Only that no connection can be opened concerns all of them.

mod gates;

use std::time::Duration;

use futures::{
    StreamExt as _,
    future::{BoxFuture, FutureExt as _},
    stream::FuturesUnordered,
};
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
    outbox::Single,
    telemetry::{Metrics, Route, chain},
};
use gates::Gates;

/// Managers that are told something at the same time. So many less one may hang and still delay no other.
const AT_ONCE: usize = 8;

/// See the module.
pub(crate) struct Poster {
    dial: Dial,
    core: Core,
    credentials: Current,
    metrics: Metrics,
    /// Shut while no connection can be opened.
    gate: Gate,
    managers: Gates,
}

/// A request that has ended.
struct Ended {
    manager: String,
    answer: Result<Answer, Fault>,
}

/// Requests that are under way, at most one for each manager.
type Asked<'a> = FuturesUnordered<BoxFuture<'a, Ended>>;

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
        Self { dial, core, credentials, metrics, gate: Gate::default(), managers: Gates::default() }
    }

    /// Runs until it is told to stop; requests that are under way are finished first, under their own deadlines.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        while let Some(credentials) = current(&mut self.credentials, &stop).await {
            self.gate.renewed();
            self.managers.renewed();
            let client = Client::new(&self.dial, credentials);
            let mut asked = Asked::new();
            while !stop.is_cancelled() && !self.credentials.has_changed().unwrap_or(false) {
                self.step(&client, &mut asked, &stop).await;
            }
            while let Some(ended) = asked.next().await {
                self.react(ended);
            }
        }
    }

    /// One request more, or one wait.
    async fn step<'a>(&mut self, client: &'a Client, asked: &mut Asked<'a>, stop: &CancellationToken) {
        let now = Instant::now();
        let due = self.due(now, asked.len());
        if due.is_some_and(|due| due <= now) {
            let managers = &self.managers;
            if let Some(single) = self.core.single(now, &|manager, due| managers.opens(manager, due)) {
                asked.push(ask(client, self.metrics.clone(), single).boxed());
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
            Some(ended) = asked.next() => self.react(ended),
            () = wake => {}
            () = self.core.stirred() => {}
            _ = self.credentials.changed() => self.credentials.mark_changed(),
            () = stop.cancelled() => {}
        }
    }

    /// When the next request may leave, beside those that are under way. Whether there is a connection again, one is enough to find out.
    fn due(&self, now: Instant, asked: usize) -> Option<Instant> {
        let most = if self.gate.is_shut() { 1 } else { AT_ONCE };
        if asked >= most {
            return None;
        }
        let managers = &self.managers;
        let due = self.core.single_due(now, &|manager, due| managers.opens(manager, due))?;
        Some(self.gate.opens(due))
    }

    fn react(&mut self, Ended { manager, answer }: Ended) {
        let now = Instant::now();
        match answer {
            Ok(answer) => self.answered(manager, &answer, now),
            Err(fault) => {
                tracing::warn!(manager, error = chain(&fault), "The listener could not be asked");
                self.core.single_failed(&manager);
                if fault.is_connect() {
                    return self.unconnected(now);
                }
                self.gate.open();
                self.failed(manager, now, None);
            }
        }
    }

    fn answered(&mut self, manager: String, answer: &Answer, now: Instant) {
        self.gate.open();
        let status = answer.status.as_u16();
        match meaning(answer.status) {
            Meaning::Taken => {
                self.managers.open(&manager);
                self.core.single_taken(&manager);
            }
            Meaning::Refused => {
                tracing::warn!(manager, status, "The listener refuses an event");
                self.metrics.refused("v2");
                self.core.single_refused(&manager, now);
                self.failed(manager, now, None);
            }
            Meaning::Later => {
                tracing::warn!(manager, status, "The listener does not take events now");
                self.core.single_failed(&manager);
                self.failed(manager, now, verdict::wait(&answer.headers, clock::unix_seconds()));
            }
        }
    }

    fn failed(&mut self, manager: String, now: Instant, told: Option<Duration>) {
        self.managers.close(manager, now, told);
        self.managers.retain(|manager| self.core.is_manager(manager));
    }

    /// Those who failed together are one failure.
    fn unconnected(&mut self, now: Instant) {
        if self.gate.opens(now) == now {
            self.gate.fail(now, true);
        }
    }
}

async fn ask(client: &Client, metrics: Metrics, single: Single) -> Ended {
    let Single { manager, event, again } = single;
    if again {
        metrics.retried(Route::V2);
    }
    let begun = Instant::now();
    let answer = client.post_plain(&v2::path(&manager), event.to_body().into()).await;
    metrics.requested(Route::V2, Outcome::of(&answer), begun.elapsed());
    Ended { manager, answer }
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
