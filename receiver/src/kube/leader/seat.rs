//! Reads and writes the Lease. Every write carries the resource version that was read, so that of two candidates one wins.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use thiserror::Error;
use tidewatch_shared::identity::Instance;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::{
    Flags, Metrics, Timings,
    election::{Election, Record, Step},
    fence::Fence,
};

/// How often the Lease is tried to be given back: once, and again for each write of our own that may have come in between.
const RELEASES: usize = 3;

/// Why this receiver is not the active one any more. All work must stop at once.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Lost {
    /// It could not be renewed in time.
    #[error("the lease could not be renewed in time")]
    Expired,
    /// Somebody else is written in it.
    #[error("the lease was taken by {0}")]
    Taken(String),
    /// Somebody emptied or deleted it.
    #[error("the lease was taken away")]
    Gone,
}

/// Why the Lease was not read or written.
#[derive(Debug, Error)]
enum Call {
    #[error("the control plane refused")]
    Api(#[source] Box<kube::Error>),
    #[error("the control plane did not answer within {0:?}")]
    Late(Duration),
}

/// What a write that was answered came to.
enum Written {
    Ours(Box<Lease>),
    /// It is not as it was read.
    Conflict,
}

/// What an attempt to take it came to.
enum Taking {
    Ours,
    Conflict,
    Held { by: String, expires: Instant },
}

/// This process as a candidate, and then as the holder.
pub struct Seat {
    api: Api<Lease>,
    name: String,
    timings: Timings,
    election: Election,
    fence: Fence,
    metrics: Metrics,
    /// The Lease as last read or written; `None` when it must be read.
    known: Option<Lease>,
    /// When it is to be renewed.
    due: Instant,
    /// When all work must have stopped.
    until: Instant,
    /// The last call failed; so that it is said once.
    failing: bool,
}

impl Seat {
    /// Nothing is asked yet. The client must not be behind the fence; `instance` is this process's own.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        flags: &Flags,
        instance: Instance,
        fence: Fence,
        metrics: Metrics,
    ) -> Self {
        let timings = Timings::of(Duration::from_secs(flags.lease_seconds.into()));
        let place = flags.lease_place.as_deref();
        let election = Election::new(&instance.to_string(), place, &host(), timings.lease);
        Self {
            api: Api::namespaced(client, namespace),
            name: flags.lease_name.clone(),
            timings,
            election,
            fence,
            metrics,
            known: None,
            due: Instant::now(),
            until: Instant::now(),
            failing: false,
        }
    }

    /// The identity by which the Lease names this process.
    #[must_use]
    pub fn identity(&self) -> &str {
        self.election.me()
    }

    /// Waits until this receiver is the active one, and opens the fence. Dropping the future loses nothing.
    pub async fn acquire(&mut self) {
        let mut told = None;
        loop {
            let mut wait = jittered(self.timings.look);
            match self.try_take().await {
                Ok(Taking::Ours) => return self.failing = false,
                Ok(Taking::Conflict) => {}
                Ok(Taking::Held { by, expires }) => {
                    self.failing = false;
                    wait = wait.min(expires.saturating_duration_since(Instant::now()));
                    if told.as_ref() != Some(&by) {
                        tracing::info!(holder = by, "Another receiver is active");
                        told = Some(by);
                    }
                }
                Err(error) => self.failed(&error),
            }
            sleep(wait).await;
        }
    }

    async fn try_take(&mut self) -> Result<Taking, Call> {
        let lease = self.read().await?;
        let why = match self.election.look(lease.as_ref().map(record), Instant::now()) {
            Step::Take(why) => why,
            Step::Wait(expires) => {
                let by = lease.as_ref().and_then(holder).unwrap_or_default();
                return Ok(Taking::Held { by, expires });
            }
        };
        let began = Instant::now();
        let Written::Ours(lease) = self.write(self.taken(lease)).await? else { return Ok(Taking::Conflict) };
        if !self.extend(began) {
            return Err(Call::Late(self.timings.valid));
        }
        self.known = Some(*lease);
        self.metrics.active.set(1);
        tracing::info!(identity = self.election.me(), ?why, "This receiver is active");
        Ok(Taking::Ours)
    }

    /// A write that began then has succeeded. False when that comes too late.
    fn extend(&mut self, began: Instant) -> bool {
        (self.due, self.until) = (began + self.timings.renew, began + self.timings.valid);
        self.fence.extend(self.until.into_std())
    }

    /// Renews the Lease until that fails for good; then the fence is closed. Dropping the future loses nothing, but nobody renews
    /// until it is called again.
    pub async fn hold(&mut self) -> Lost {
        let lost = loop {
            sleep_until(self.due).await;
            let (began, until) = (Instant::now(), self.until);
            // A Lease that has lapsed is not touched any more: it may be another's by now.
            if began >= until || !self.fence.holds() {
                break Lost::Expired;
            }
            match timeout_at(until, self.renew(began)).await {
                Err(_) => break Lost::Expired,
                Ok(Ok(Some(lost))) => break lost,
                Ok(Ok(None)) => self.failing = false,
                Ok(Err(error)) => {
                    self.failed(&error);
                    self.due = Instant::now() + jittered(self.timings.retry);
                }
            }
        };
        self.fence.close();
        self.metrics.active.set(0);
        lost
    }

    async fn renew(&mut self, began: Instant) -> Result<Option<Lost>, Call> {
        let mut lease = match self.known.clone() {
            Some(lease) => lease,
            // A write whose answer we do not know, or a stranger's: who holds it now?
            None => match self.read().await? {
                None => return Ok(Some(Lost::Gone)),
                Some(lease) => match holder(&lease) {
                    Some(holder) if holder == self.election.me() => lease,
                    Some(holder) => return Ok(Some(Lost::Taken(holder))),
                    None => return Ok(Some(Lost::Gone)),
                },
            },
        };
        self.known = None;
        lease.spec.get_or_insert_default().renew_time = Some(MicroTime(Timestamp::now()));
        // On a conflict it is read at once: `due` has passed.
        if let Written::Ours(lease) = self.write(lease).await? {
            if !self.extend(began) {
                return Ok(Some(Lost::Expired));
            }
            self.known = Some(*lease);
        }
        Ok(None)
    }

    /// Closes the fence and gives the Lease back, if it is ours, so that the next receiver need not wait. Everything else must have
    /// ended.
    pub async fn release(&mut self) {
        self.fence.close();
        self.metrics.active.set(0);
        for _ in 0..RELEASES {
            match self.try_release().await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => return self.failed(&error),
            }
        }
    }

    /// Whether there is nothing left to give back.
    async fn try_release(&mut self) -> Result<bool, Call> {
        let Some(mut lease) = self.read().await? else { return Ok(true) };
        if holder(&lease).as_deref() != Some(self.election.me()) {
            return Ok(true);
        }
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = None;
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        let done = matches!(self.write(lease).await?, Written::Ours(_));
        if done {
            tracing::info!("The lease is given back");
        }
        Ok(done)
    }

    fn taken(&self, lease: Option<Lease>) -> Lease {
        let named = || ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
        let mut lease = lease.unwrap_or_else(|| Lease { metadata: named(), spec: None });
        let before = record(&lease);
        let now = MicroTime(Timestamp::now());
        let seconds = i32::try_from(self.timings.lease.as_secs()).unwrap_or(i32::MAX);
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(self.election.me().to_owned()),
            lease_duration_seconds: Some(seconds),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(before.transitions.saturating_add(1)),
            ..lease.spec.unwrap_or_default()
        });
        lease
    }

    async fn read(&self) -> Result<Option<Lease>, Call> {
        self.call(self.api.get_opt(&self.name)).await
    }

    async fn write(&self, lease: Lease) -> Result<Written, Call> {
        let parameters = PostParams::default();
        let written = if lease.metadata.resource_version.is_some() {
            self.call(self.api.replace(&self.name, &parameters, &lease)).await
        } else {
            self.call(self.api.create(&parameters, &lease)).await
        };
        match written {
            Ok(lease) => {
                self.metrics.wrote("written");
                Ok(Written::Ours(Box::new(lease)))
            }
            Err(Call::Api(error)) if is_conflict(&error) => {
                self.metrics.wrote("conflict");
                Ok(Written::Conflict)
            }
            Err(error) => {
                self.metrics.wrote("failed");
                Err(error)
            }
        }
    }

    async fn call<T>(&self, call: impl Future<Output = kube::Result<T>>) -> Result<T, Call> {
        let answer = timeout(self.timings.call, call).await.map_err(|_| Call::Late(self.timings.call))?;
        answer.map_err(|error| Call::Api(Box::new(error)))
    }

    fn failed(&mut self, error: &Call) {
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!(error = error as &dyn std::error::Error, "The lease could not be read or written");
        }
    }
}

/// Another wrote first, or deleted what we read.
fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409 || (status.code == 404 && status.reason == "NotFound"))
}

fn record(lease: &Lease) -> Record {
    let spec = lease.spec.as_ref();
    let seconds = spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
    Record {
        holder: holder(lease),
        duration: seconds.map(Duration::from_secs),
        renewed: spec.and_then(|spec| spec.renew_time.as_ref()).map(|time| time.0),
        transitions: spec.and_then(|spec| spec.lease_transitions).unwrap_or(0),
    }
}

fn holder(lease: &Lease) -> Option<String> {
    lease.spec.as_ref()?.holder_identity.clone().filter(|holder| !holder.is_empty())
}

/// For people who read the Lease.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "receiver".to_owned(),
        name => name.to_owned(),
    }
}

/// Between 80 and 120 %.
fn jittered(wait: Duration) -> Duration {
    let spread = u32::try_from(RandomState::new().hash_one(()) % 41).unwrap_or(20);
    wait * (80 + spread) / 100
}

#[cfg(test)]
mod tests;
