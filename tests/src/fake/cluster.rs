//! One runtime of a fake API server, as its user, its watches and the tests see it.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use aws_lc_rs::error::Unspecified;
use http::{Method, StatusCode};
use serde_json::Value;
use tokio::sync::Notify;

use super::{
    calls::Calls,
    store::{Shelf, Store},
    tokens::{self, Issuer},
};

/// One runtime. Clones are the same runtime.
#[derive(Clone)]
pub struct FakeCluster(Arc<Inner>);

struct Inner {
    store: Mutex<Store>,
    calls: Mutex<Calls>,
    changed: Notify,
    /// Most runtimes of most tests are never asked for a token.
    issuer: OnceLock<Issuer>,
}

impl FakeCluster {
    pub(super) fn new(shelf: Arc<Shelf>) -> Self {
        let (store, calls) = (Mutex::new(Store::new(shelf)), Mutex::default());
        Self(Arc::new(Inner { store, calls, changed: Notify::new(), issuer: OnceLock::new() }))
    }

    /// Changes an object as its user would, or makes it (from `null`). The key is `<group>/<plural>/<namespace>/<name>` with
    /// empty parts kept: `operator.kyma-project.io/kymas/kyma-system/default`. Returns the runtime's newest resource version.
    pub fn edit(&self, key: &str, change: impl FnOnce(&mut Value)) -> u64 {
        self.write(|store| {
            let mut object = store.value(key).unwrap_or_default();
            change(&mut object);
            store.put(key, object);
            store.version()
        })
    }

    /// Up to which resource version all open watches have been told of everything; `None` when none is open.
    #[must_use]
    pub fn seen(&self) -> Option<u64> {
        self.read().slowest()
    }

    /// An object.
    #[must_use]
    pub fn object(&self, key: &str) -> Option<Value> {
        self.read().value(key)
    }

    /// What it was asked so far by those who had its token.
    #[must_use]
    pub fn calls(&self) -> Calls {
        self.0.calls.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn note(&self, method: &Method, path: &str, is_watch: bool) {
        self.0.calls.lock().unwrap_or_else(PoisonError::into_inner).note(method, path, is_watch);
    }

    /// A projected token of its agent for the receiver's audience, good for an hour.
    ///
    /// # Errors
    /// When there is no key to be had, or nothing can be signed with it.
    pub fn token(&self) -> Result<String, Unspecified> {
        self.issuer()?.token()
    }

    /// What it answers to a question about tokens; `None` if it is none.
    pub(super) fn about_tokens(&self, path: &str, body: &[u8]) -> Option<(StatusCode, Value)> {
        if !tokens::concern(path) {
            return None;
        }
        self.issuer().ok()?.answer(path, body)
    }

    fn issuer(&self) -> Result<&Issuer, Unspecified> {
        if let Some(issuer) = self.0.issuer.get() {
            return Ok(issuer);
        }
        // Of two that make one at the same time, one is taken.
        let made = Issuer::new()?;
        Ok(self.0.issuer.get_or_init(|| made))
    }

    pub(super) fn read(&self) -> MutexGuard<'_, Store> {
        // Each step leaves it whole.
        self.0.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write<T>(&self, step: impl FnOnce(&mut Store) -> T) -> T {
        let result = step(&mut self.read());
        self.0.changed.notify_waiters();
        result
    }

    /// Told at each write.
    pub(super) fn changed(&self) -> &Notify {
        &self.0.changed
    }
}
