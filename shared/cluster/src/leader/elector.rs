//! Acquires, renews and releases the Lease of the one process that is active.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use thiserror::Error;
use tidewatch_api::identity::Instance;
use tidewatch_kit::{error_levels, metrics::OutcomeLabel, variant::VariantName as _};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::{
    Flags, Metrics, Timings,
    election::{Decision, Election},
    fence::WriteFence,
    lease::{LeaseApi, LeaseError, acquired, holder, host, record, released, renewed},
};

/// Attempts to release the Lease: one, and one more for each own write that may have come in between.
const RELEASE_ATTEMPTS: usize = 3;

/// Reason for which this receiver is no longer the active one. All work must stop at once.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LeadershipLostError {
    /// The Lease was not renewed in time.
    #[error("the lease could not be renewed in time")]
    Expired,
    /// Another identity holds the Lease.
    #[error("the lease was taken by {0}")]
    Taken(String),
    /// The Lease was deleted, or its holder was cleared.
    #[error("the lease was taken away")]
    Gone,
}

/// Result of an attempt to acquire the Lease.
enum AcquireOutcome {
    Ours,
    Conflict,
    Held { by: String, expires: Instant },
}

/// This process as a candidate, and then as the Lease holder.
pub struct LeaderElector {
    api: LeaseApi,
    name: String,
    timings: Timings,
    election: Election,
    fence: WriteFence,
    metrics: Metrics,
    /// The Lease as last read or written; `None` when it must be read.
    lease: Option<Lease>,
    /// Time of the next renewal.
    due: Instant,
    /// Time at which all work must have stopped.
    until: Instant,
    /// True if the last call failed, so that a series of failures is logged once.
    failing: bool,
}

impl LeaderElector {
    /// Makes no call yet. The client must not be behind the write fence; `instance` is this process's own.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        name: &str,
        flags: &Flags,
        instance: Instance,
        fence: WriteFence,
        metrics: Metrics,
    ) -> Self {
        let timings = Timings::of(flags.lease_duration);
        let place = flags.lease_place.as_deref();
        let election = Election::new(&instance.to_string(), place, &host(), timings.lease);
        Self {
            api: LeaseApi::new(Api::namespaced(client, namespace), timings.call),
            name: name.to_owned(),
            timings,
            election,
            fence,
            metrics,
            lease: None,
            due: Instant::now(),
            until: Instant::now(),
            failing: false,
        }
    }

    /// Waits until this receiver is the active one, and opens the write fence. Cancel safe.
    pub async fn acquire(&mut self) {
        let mut reported = None;
        loop {
            let mut wait = jittered(self.timings.poll);
            match self.try_acquire().await {
                Ok(AcquireOutcome::Ours) => return self.failing = false,
                Ok(AcquireOutcome::Conflict) => {}
                Ok(AcquireOutcome::Held { by, expires }) => {
                    self.failing = false;
                    wait = wait.min(expires.saturating_duration_since(Instant::now()));
                    if reported.as_ref() != Some(&by) {
                        tracing::info!(holder = by, "Another receiver is active");
                        reported = Some(by);
                    }
                }
                Err(error) => self.record_failure(&error),
            }
            sleep(wait).await;
        }
    }

    async fn try_acquire(&mut self) -> Result<AcquireOutcome, LeaseError> {
        let lease = self.api.read(&self.name).await?;
        let decision = self.election.observe(lease.as_ref().map(record), Instant::now());
        if let Decision::Wait(expires) = decision {
            let by = lease.as_ref().and_then(holder).unwrap_or_default();
            return Ok(AcquireOutcome::Held { by, expires });
        }
        let began = Instant::now();
        let Some(lease) = self.write(self.acquired_lease(lease)).await? else { return Ok(AcquireOutcome::Conflict) };
        if !self.extend(began) {
            return Err(LeaseError::Timeout(self.timings.valid));
        }
        self.lease = Some(lease);
        self.metrics.active.set(1);
        tracing::info!(identity = self.election.identity, reason = decision.as_str(), "This receiver is active");
        Ok(AcquireOutcome::Ours)
    }

    /// Records a successful write that began at `began`. False when it succeeded too late.
    fn extend(&mut self, began: Instant) -> bool {
        (self.due, self.until) = (began + self.timings.renew, began + self.timings.valid);
        self.fence.extend(self.until.into_std())
    }

    /// Renews the Lease until that fails for good, and then closes the write fence. Cancel safe, but renewals pause
    /// until it is called again.
    pub async fn hold(&mut self) -> LeadershipLostError {
        let lost = loop {
            sleep_until(self.due).await;
            let began = Instant::now();
            let until = self.until;
            // An expired Lease is not written any more: another receiver may hold it by now.
            if began >= until || !self.fence.is_open() {
                break LeadershipLostError::Expired;
            }
            match timeout_at(until, self.renew(began)).await {
                Err(_) => break LeadershipLostError::Expired,
                Ok(Ok(Some(lost))) => break lost,
                Ok(Ok(None)) => self.failing = false,
                Ok(Err(error)) => {
                    self.record_failure(&error);
                    self.due = Instant::now() + jittered(self.timings.retry);
                }
            }
        };
        self.fence.close();
        self.metrics.active.set(0);
        lost
    }

    async fn renew(&mut self, began: Instant) -> Result<Option<LeadershipLostError>, LeaseError> {
        let lease = match self.lease.take() {
            Some(lease) => lease,
            // The response to a write was lost, or another writer changed the Lease: read its holder.
            None => match self.api.read(&self.name).await?.and_then(|lease| Some((holder(&lease)?, lease))) {
                Some((holder, lease)) if holder == self.election.identity => lease,
                Some((holder, _)) => return Ok(Some(LeadershipLostError::Taken(holder))),
                None => return Ok(Some(LeadershipLostError::Gone)),
            },
        };
        // After a conflict the Lease is read at once, because `due` has passed.
        if let Some(lease) = self.write(renewed(lease)).await? {
            if !self.extend(began) {
                return Ok(Some(LeadershipLostError::Expired));
            }
            self.lease = Some(lease);
        }
        Ok(None)
    }

    /// Closes the write fence and releases the Lease if this process holds it, so that the next receiver need not wait.
    /// All work must have ended.
    pub async fn release(&mut self) {
        self.fence.close();
        self.metrics.active.set(0);
        for _ in 0..RELEASE_ATTEMPTS {
            match self.try_release().await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => return self.record_failure(&error),
            }
        }
    }

    /// Returns true when nothing is left to release.
    async fn try_release(&mut self) -> Result<bool, LeaseError> {
        let Some(lease) = self.api.read(&self.name).await? else { return Ok(true) };
        if holder(&lease).as_deref() != Some(&*self.election.identity) {
            return Ok(true);
        }
        let done = self.write(released(lease)).await?.is_some();
        if done {
            tracing::info!("The lease is given back");
        }
        Ok(done)
    }

    fn acquired_lease(&self, lease: Option<Lease>) -> Lease {
        let mut lease = lease.unwrap_or_default();
        lease.metadata.name = Some(self.name.clone());
        acquired(lease, &self.election.identity, self.timings.lease)
    }

    /// Writes the Lease, and counts the outcome; `None` on a conflict.
    async fn write(&self, lease: Lease) -> Result<Option<Lease>, LeaseError> {
        let written = self.api.write(&self.name, &lease).await;
        let outcome = match &written {
            Ok(Some(_)) => "written",
            Ok(None) => "conflict",
            Err(_) => "failed",
        };
        self.metrics.writes.get_or_create(&OutcomeLabel { outcome }).inc();
        written
    }

    fn record_failure(&mut self, error: &LeaseError) {
        if !std::mem::replace(&mut self.failing, true) {
            tracing::warn!(
                error = error_levels::own(error),
                cause = error_levels::cause(error),
                "The lease could not be read or written"
            );
        }
    }
}

/// Jitters a duration to between 80 and 120 %.
fn jittered(wait: Duration) -> Duration {
    let spread = u32::try_from(RandomState::new().hash_one(()) % 41).unwrap_or(20);
    wait * (80 + spread) / 100
}

#[cfg(test)]
mod tests;
