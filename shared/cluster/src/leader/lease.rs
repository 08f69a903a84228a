//! Reads and writes Leases. Every write carries the resourceVersion that was read (compare-and-swap), so that one of
//! several writers wins.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{Api, api::PostParams};
use thiserror::Error;
use tokio::time::timeout;

use super::election::LeaseRecord;

/// Failure to read or write a Lease.
#[derive(Debug, Error)]
pub enum LeaseError {
    /// The request failed.
    #[error("the control plane refused")]
    Api(#[source] Box<kube::Error>),
    /// There was no response in time.
    #[error("the control plane did not answer within {0:?}")]
    Timeout(Duration),
}

/// The Leases of one namespace, with a timeout for each call.
#[derive(Clone)]
pub struct LeaseApi {
    api: Api<Lease>,
    timeout: Duration,
}

impl LeaseApi {
    /// Limits each request to `timeout`.
    pub fn new(api: Api<Lease>, timeout: Duration) -> Self {
        Self { api, timeout }
    }

    /// Reads a Lease from the API server's store, never from its cache.
    pub async fn read(&self, name: &str) -> Result<Option<Lease>, LeaseError> {
        self.call(self.api.get_opt(name)).await
    }

    /// Writes a Lease at the resourceVersion that it carries, or creates it if it carries none; `None` if another
    /// writer changed, created or deleted it in between.
    pub async fn write(&self, name: &str, lease: &Lease) -> Result<Option<Lease>, LeaseError> {
        let parameters = PostParams::default();
        let written = if lease.metadata.resource_version.is_some() {
            self.call(self.api.replace(name, &parameters, lease)).await
        } else {
            self.call(self.api.create(&parameters, lease)).await
        };
        match written {
            Ok(lease) => Ok(Some(lease)),
            Err(LeaseError::Api(error)) if is_conflict(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn call<T>(&self, call: impl Future<Output = kube::Result<T>>) -> Result<T, LeaseError> {
        let response = timeout(self.timeout, call).await.map_err(|_| LeaseError::Timeout(self.timeout))?;
        response.map_err(|error| LeaseError::Api(Box::new(error)))
    }
}

/// True if another writer changed or deleted the Lease since it was read.
fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409 || (status.code == 404 && status.reason == "NotFound"))
}

/// The relevant fields of a Lease.
pub fn record(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.as_ref();
    let seconds = spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
    LeaseRecord {
        holder: holder(lease),
        duration: seconds.map(Duration::from_secs),
        renewed: spec.and_then(|spec| spec.renew_time.as_ref()).map(|time| time.0),
        transitions: spec.and_then(|spec| spec.lease_transitions).unwrap_or(0),
    }
}

/// The holder of a Lease, if it has one.
fn holder(lease: &Lease) -> Option<String> {
    lease.spec.as_ref()?.holder_identity.clone().filter(|holder| !holder.is_empty())
}

/// The Lease with a new holder.
pub fn acquired(mut lease: Lease, identity: &str, duration: Duration) -> Lease {
    let before = record(&lease);
    let now = MicroTime(Timestamp::now());
    lease.spec = Some(LeaseSpec {
        holder_identity: Some(identity.to_owned()),
        lease_duration_seconds: Some(seconds(duration)),
        acquire_time: Some(now.clone()),
        renew_time: Some(now),
        lease_transitions: Some(before.transitions.saturating_add(1)),
        ..lease.spec.unwrap_or_default()
    });
    lease
}

/// The Lease with a new time of renewal.
pub fn renewed(mut lease: Lease) -> Lease {
    lease.spec.get_or_insert_default().renew_time = Some(MicroTime(Timestamp::now()));
    lease
}

fn seconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_secs()).unwrap_or(i32::MAX)
}

/// The Lease without a holder.
pub fn released(lease: Lease) -> Lease {
    let mut lease = renewed(lease);
    lease.spec.get_or_insert_default().holder_identity = None;
    lease
}

/// Host name, which makes an identity readable for operators.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "receiver".to_owned(),
        name => name.to_owned(),
    }
}
