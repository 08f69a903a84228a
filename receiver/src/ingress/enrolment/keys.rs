//! The keys of each runtime's issuer of tokens, fetched from the runtime itself and kept.
//!
//! Forged tokens must cost a runtime nothing. A token whose key is known is judged here alone; one that names an unknown key makes
//! this receiver ask again, because keys are replaced, but for each runtime at most once a minute, whoever and how many ask.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http_body_util::{BodyExt as _, Limited};
use kube::{Client, client::Body};
use thiserror::Error;
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};

use super::{
    Refused, Runtimes,
    jwks::{Keys, MAX_BYTES, ParseKeys},
    metrics::Metrics,
    token::Token,
};
use crate::{base::key::KymaKey, kube::runtime_access::describe};

/// Where an API server tells the keys of its tokens.
pub(super) const PATH: &str = "/openid/v1/jwks";
/// From the call to the last byte of the answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// After an answer, the next question comes no sooner.
const PAUSE: Duration = Duration::from_secs(60);
/// After a first failure; doubled with each further one, up to [`PAUSE`].
const RETRY: Duration = Duration::from_secs(5);
/// Runtimes whose keys are kept.
const MOST: usize = 50_000;

/// Why there are no keys.
#[derive(Debug, Error)]
enum Fetch {
    #[error("the runtime could not be asked: {}", describe(.0))]
    Call(#[source] kube::Error),
    #[error("the runtime answered with the status {0}")]
    Status(http::StatusCode),
    #[error("the runtime's answer broke off or is too large")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the runtime did not answer within {DEADLINE:?}")]
    Late,
    #[error("the runtime's keys are not usable")]
    Parse(#[from] ParseKeys),
}

/// All that is known; one entry per runtime that was claimed and exists.
pub(super) struct KeyCache {
    entries: Mutex<HashMap<KymaKey, Arc<Entry>>>,
    metrics: Metrics,
}

struct Entry {
    /// Of the client that was asked: another kubeconfig is another cluster, whose keys are others.
    revision: u64,
    keys: Mutex<Arc<Keys>>,
    /// Held by the one who asks, so that all who wait get one answer.
    asking: tokio::sync::Mutex<Asked>,
}

#[derive(Default)]
struct Asked {
    /// Not before this time, and whether the last question was answered.
    next: Option<(Instant, bool)>,
    failures: u32,
}

impl KeyCache {
    pub(super) fn new(metrics: Metrics) -> Self {
        Self { entries: Mutex::default(), metrics }
    }

    /// Verifies a token by the keys of a runtime, and returns the client whose keys they are, with its revision. `calls` bounds the
    /// questions to runtimes at the same time.
    pub(super) async fn verify(
        &self,
        runtimes: &dyn Runtimes,
        kyma: &KymaKey,
        token: &Token<'_>,
        calls: &Semaphore,
    ) -> Result<(Client, u64), Refused> {
        let (client, revision) = runtimes.client(kyma).map_err(|unusable| {
            tracing::debug!(%kyma, %unusable, "A runtime cannot be asked about a token");
            Refused::NoAccess
        })?;
        let entry = self.entry(kyma, revision);
        let mut keys = entry.keys();
        if !keys.has(&token.kid) {
            keys = self.ask(&entry, kyma, &client, &token.kid, calls).await?;
        }
        keys.verify(token)?;
        Ok((client, revision))
    }

    fn entry(&self, kyma: &KymaKey, revision: u64) -> Arc<Entry> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get(kyma).filter(|entry| entry.revision == revision) {
            return entry.clone();
        }
        if entries.len() >= MOST {
            // Runtimes come and go, and what is forgotten is asked again.
            entries.clear();
        }
        let entry = Arc::new(Entry { revision, keys: Mutex::default(), asking: tokio::sync::Mutex::default() });
        entries.insert(kyma.clone(), entry.clone());
        entry
    }

    /// Asks the runtime, unless somebody has just done so.
    async fn ask(
        &self,
        entry: &Entry,
        kyma: &KymaKey,
        client: &Client,
        kid: &str,
        calls: &Semaphore,
    ) -> Result<Arc<Keys>, Refused> {
        let mut asked = entry.asking.lock().await;
        let (keys, now) = (entry.keys(), Instant::now());
        if keys.has(kid) {
            return Ok(keys);
        }
        match asked.next {
            Some((next, answered)) if now < next => {
                // Without an answer nobody knows whether the key is the runtime's.
                return if answered { Ok(keys) } else { Err(Refused::Unreachable) };
            }
            _ => {}
        }
        let fetched = timeout(DEADLINE, async {
            // Nobody closes the semaphore.
            let _call = calls.acquire().await;
            fetch(client).await
        });
        match fetched.await.unwrap_or(Err(Fetch::Late)) {
            Ok(keys) => {
                self.metrics.called("keys", "answered");
                *asked = Asked { next: Some((Instant::now() + PAUSE, true)), failures: 0 };
                let keys = Arc::new(keys);
                *entry.keys.lock().unwrap_or_else(PoisonError::into_inner) = keys.clone();
                Ok(keys)
            }
            Err(error) => {
                self.metrics.called("keys", "failed");
                let wait = (RETRY * 2_u32.saturating_pow(asked.failures.min(8))).min(PAUSE);
                *asked =
                    Asked { next: Some((Instant::now() + wait, false)), failures: asked.failures.saturating_add(1) };
                tracing::warn!(%kyma, error = &error as &dyn std::error::Error, "The keys of a runtime's tokens could not be read");
                Err(Refused::Unreachable)
            }
        }
    }
}

impl Entry {
    fn keys(&self) -> Arc<Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn fetch(client: &Client) -> Result<Keys, Fetch> {
    let request = http::Request::get(PATH).body(Body::empty());
    let answer =
        client.send(request.map_err(|error| Fetch::Call(kube::Error::HttpError(error)))?).await.map_err(Fetch::Call)?;
    if answer.status() != http::StatusCode::OK {
        return Err(Fetch::Status(answer.status()));
    }
    let body = Limited::new(answer.into_body(), MAX_BYTES).collect().await.map_err(Fetch::Body)?;
    Ok(Keys::parse(&body.to_bytes())?)
}
