//! One runtime of a fake API server: access for its user, its watches and the tests.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use aws_lc_rs::error::Unspecified;
use http::{Method, StatusCode};
use serde_json::Value;
use tokio::sync::Notify;

use super::{
    calls::Calls,
    store::{Store, TextPool},
    tokens::{self, Issuer},
};

/// One runtime. Clones refer to the same runtime.
#[derive(Clone)]
pub struct FakeCluster(Arc<Inner>);

struct Inner {
    store: Mutex<Store>,
    calls: Mutex<Calls>,
    changed: Notify,
    /// Made with the first token, because most runtimes of most tests issue none.
    issuer: OnceLock<Issuer>,
}

impl FakeCluster {
    pub(super) fn new(texts: Arc<TextPool>) -> Self {
        let (store, calls) = (Mutex::new(Store::new(texts)), Mutex::default());
        Self(Arc::new(Inner { store, calls, changed: Notify::new(), issuer: OnceLock::new() }))
    }

    /// Changes an object as its user, or creates it (from `null`). The key is `<group>/<plural>/<namespace>/<name>`
    /// with empty parts kept: `operator.kyma-project.io/kymas/kyma-system/default`. Returns the runtime's newest
    /// resource version.
    pub fn edit(&self, key: &str, change: impl FnOnce(&mut Value)) -> u64 {
        self.write(|store| {
            let mut object = store.value(key).unwrap_or_default();
            change(&mut object);
            store.put(key, object);
            store.version()
        })
    }

    /// The resource version up to which all open watches have received every change; `None` when none is open.
    #[must_use]
    pub fn delivered_version(&self) -> Option<u64> {
        self.read().slowest_position()
    }

    /// An object.
    #[must_use]
    pub fn object(&self, key: &str) -> Option<Value> {
        self.read().value(key)
    }

    /// Authenticated requests so far.
    #[must_use]
    pub fn calls(&self) -> Calls {
        self.0.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn record(&self, method: &Method, path: &str, is_watch: bool) {
        self.0.calls.lock().unwrap_or_else(PoisonError::into_inner).record(method, path, is_watch);
    }

    /// A projected token of its agent for the receiver's audience, valid for an hour.
    ///
    /// # Errors
    /// When no key can be generated, or signing fails.
    pub fn token(&self) -> Result<String, Unspecified> {
        self.issuer()?.token()
    }

    /// The response to a request for token keys or a token review; `None` for other paths.
    pub(super) fn answer_token_request(&self, path: &str, body: &[u8]) -> Option<(StatusCode, Value)> {
        if !tokens::is_token_path(path) {
            return None;
        }
        self.issuer().ok()?.answer(path, body)
    }

    fn issuer(&self) -> Result<&Issuer, Unspecified> {
        if let Some(issuer) = self.0.issuer.get() {
            return Ok(issuer);
        }
        // Of two issuers made concurrently, one is kept.
        let made = Issuer::new()?;
        Ok(self.0.issuer.get_or_init(|| made))
    }

    pub(super) fn read(&self) -> MutexGuard<'_, Store> {
        // Each step leaves the store consistent, so a poisoned lock is usable.
        self.0.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write<T>(&self, step: impl FnOnce(&mut Store) -> T) -> T {
        let result = step(&mut self.read());
        self.0.changed.notify_waiters();
        result
    }

    /// Notified at each write.
    pub(super) fn changed(&self) -> &Notify {
        &self.0.changed
    }
}
