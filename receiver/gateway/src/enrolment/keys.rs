//! Cache of the keys of each runtime's token issuer, fetched from the runtime itself.
//!
//! Forged tokens must cost a runtime nothing. A token with a cached key is verified locally; one with an unknown key
//! id triggers a fetch, because keys are rotated, but for each runtime at most once a minute, regardless of the number
//! of clients.

use std::{collections::HashMap, sync::Arc, time::Duration};

use http_body_util::{BodyExt as _, Limited};
use kube::{Client, client::Body};
use parking_lot::Mutex;
use thiserror::Error;
use tidewatch_api::key::KymaKey;
use tidewatch_cluster::runtime_access::{ClientError, describe};
use tidewatch_kit::log_error;
use tokio::time::Instant;

use super::{
    CALL_DEADLINE, EnrolmentError, RuntimeCalls, RuntimeClients,
    jwks::{KeySet, MAX_BYTES, ParseKeySetError},
    token::{Token, TokenError},
};

/// Path of the key set of an API server.
pub(super) const PATH: &str = "/openid/v1/jwks";
/// Minimum interval to the next fetch after a response.
const MIN_REFETCH_INTERVAL: Duration = Duration::from_secs(60);
/// Backoff after a first failure; doubled with each further one, up to [`MIN_REFETCH_INTERVAL`].
const RETRY: Duration = Duration::from_secs(5);
/// Capacity of the cache, in runtimes.
const MAX_RUNTIMES: usize = 50_000;

/// Failure to fetch the keys.
#[derive(Debug, Error)]
enum FetchKeysError {
    #[error("the call to the runtime failed: {}", describe(.0))]
    Call(#[source] kube::Error),
    #[error("the runtime responded with status {0}")]
    Status(http::StatusCode),
    #[error("the runtime's response broke off or is too large")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the runtime did not respond within {CALL_DEADLINE:?}")]
    Timeout,
    #[error("the runtime's keys are not usable")]
    Parse(#[from] ParseKeySetError),
}

/// The cache; one entry per existing runtime that a token was presented for.
#[derive(Default)]
pub(super) struct KeyCache(Mutex<HashMap<KymaKey, Arc<Entry>>>);

struct Entry {
    /// Revision of the client: another kubeconfig is another cluster with other keys.
    revision: u64,
    keys: Mutex<Arc<KeySet>>,
    /// Locked during a fetch, so that concurrent callers share one.
    fetching: tokio::sync::Mutex<FetchState>,
}

#[derive(Default)]
struct FetchState {
    /// Earliest time of the next fetch, and whether the last one succeeded.
    next: Option<(Instant, bool)>,
    failures: u32,
}

impl KeyCache {
    /// Verifies a token with the keys of a runtime, and returns the client that they were fetched with, and its
    /// revision. `calls` limits concurrent calls to runtimes.
    pub(super) async fn verify(
        &self,
        runtimes: &RuntimeClients,
        kyma: &KymaKey,
        token: &Token<'_>,
        calls: &RuntimeCalls,
    ) -> Result<(Client, u64), EnrolmentError> {
        let (client, revision) = runtimes(kyma).map_err(|unusable| {
            tracing::debug!(%kyma, %unusable, "No access to the runtime of a token");
            match unusable {
                ClientError::Access(_) => EnrolmentError::NoAccess,
                ClientError::Body(_) => EnrolmentError::Unreachable,
            }
        })?;
        let entry = self.entry(kyma, revision);
        let mut keys = entry.keys();
        if !keys.has(&token.kid) {
            keys = self.refresh(&entry, kyma, &client, &token.kid, calls).await?;
        }
        keys.verify(token)?;
        Ok((client, revision))
    }

    /// Verifies a token if its key is cached, on the executor of the caller: forged tokens with a known key id must not
    /// reach the executor of the reconciles. `None` if the key has to be fetched.
    pub(super) fn verify_cached(
        &self,
        runtimes: &RuntimeClients,
        kyma: &KymaKey,
        token: &Token<'_>,
    ) -> Option<Result<(), TokenError>> {
        let (_, revision) = runtimes(kyma).ok()?;
        let entries = self.0.lock();
        let keys = entries.get(kyma).filter(|entry| entry.revision == revision)?.keys();
        drop(entries);
        keys.has(&token.kid).then(|| keys.verify(token))
    }

    fn entry(&self, kyma: &KymaKey, revision: u64) -> Arc<Entry> {
        let mut entries = self.0.lock();
        if let Some(entry) = entries.get(kyma).filter(|entry| entry.revision == revision) {
            return entry.clone();
        }
        if entries.len() >= MAX_RUNTIMES {
            // Runtimes come and go; evicted keys are fetched again.
            entries.clear();
        }
        let entry = Arc::new(Entry { revision, keys: Mutex::default(), fetching: tokio::sync::Mutex::default() });
        entries.insert(kyma.clone(), entry.clone());
        entry
    }

    /// Fetches the keys, unless a concurrent caller has just done so or the next fetch is not due.
    async fn refresh(
        &self,
        entry: &Entry,
        kyma: &KymaKey,
        client: &Client,
        kid: &str,
        calls: &RuntimeCalls,
    ) -> Result<Arc<KeySet>, EnrolmentError> {
        let mut fetch_state = entry.fetching.lock().await;
        let keys = entry.keys();
        let now = Instant::now();
        if keys.has(kid) {
            return Ok(keys);
        }
        if let Some((next, was_answered)) = fetch_state.next
            && now < next
        {
            // Without a response it is unknown whether the key belongs to the runtime, and it may be newer than the last one.
            let error = EnrolmentError::Token(TokenError::RecentKey);
            return Err(if was_answered { error } else { EnrolmentError::Unreachable });
        }
        match calls.make("keys", fetch(client)).await.unwrap_or(Err(FetchKeysError::Timeout)) {
            Ok(keys) => {
                *fetch_state = FetchState { next: Some((Instant::now() + MIN_REFETCH_INTERVAL, true)), failures: 0 };
                let keys = Arc::new(keys);
                *entry.keys.lock() = keys.clone();
                Ok(keys)
            }
            Err(error) => {
                let wait = (RETRY * 2_u32.saturating_pow(fetch_state.failures.min(8))).min(MIN_REFETCH_INTERVAL);
                *fetch_state = FetchState {
                    next: Some((Instant::now() + wait, false)),
                    failures: fetch_state.failures.saturating_add(1),
                };
                log_error!(warn, &error, %kyma, "The keys of a runtime's tokens could not be read");
                Err(EnrolmentError::Unreachable)
            }
        }
    }
}

impl Entry {
    fn keys(&self) -> Arc<KeySet> {
        self.keys.lock().clone()
    }
}

async fn fetch(client: &Client) -> Result<KeySet, FetchKeysError> {
    let request = http::Request::get(PATH).body(Body::empty());
    let request = request.map_err(|error| FetchKeysError::Call(kube::Error::HttpError(error)))?;
    let response = client.send(request).await.map_err(FetchKeysError::Call)?;
    if response.status() != http::StatusCode::OK {
        return Err(FetchKeysError::Status(response.status()));
    }
    let body = Limited::new(response.into_body(), MAX_BYTES).collect().await.map_err(FetchKeysError::Body)?;
    Ok(KeySet::parse(&body.to_bytes())?)
}
