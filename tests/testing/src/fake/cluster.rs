//! One runtime of a fake API server: access for its user, its watches and the tests.

use std::sync::{Arc, OnceLock};

use aws_lc_rs::error::Unspecified;
use bytes::Bytes;
use http::{Method, StatusCode};
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use tokio::sync::Notify;

use super::{
    calls::Calls,
    hostile::{self, HostileOwner},
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
    hostile: OnceLock<HostileOwner>,
}

impl FakeCluster {
    /// A cluster without a port, for [`FakeCluster::respond`].
    pub fn in_memory() -> Self {
        Self::new(Arc::default())
    }

    pub(super) fn new(texts: Arc<TextPool>) -> Self {
        let store = Mutex::new(Store::new(texts));
        let calls = Mutex::default();
        Self(Arc::new(Inner {
            store,
            calls,
            changed: Notify::new(),
            issuer: OnceLock::new(),
            hostile: OnceLock::new(),
        }))
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
    pub fn delivered_version(&self) -> Option<u64> {
        self.read().slowest_position()
    }

    /// An object.
    pub fn object(&self, key: &str) -> Option<Value> {
        self.read().value(key)
    }

    /// Authenticated requests so far.
    pub fn calls(&self) -> Calls {
        self.0.calls.lock().clone()
    }

    pub(super) fn record(&self, method: &Method, path: &str, is_watch: bool) {
        self.0.calls.lock().record(method, path, is_watch);
    }

    /// A projected token of its agent for the receiver's audience, valid for an hour.
    ///
    /// # Errors
    /// When no key can be generated, or signing fails.
    pub fn token(&self) -> Result<String, Unspecified> {
        self.issuer()?.token()
    }

    /// Makes the runtime hostile from now on: of its responses to reads some are overlong lists of tiny elements, and its
    /// token keys are as costly to verify as a receiver accepts. See [`FakeCluster::contest`] as well.
    ///
    /// # Errors
    /// When no random bytes are available.
    pub fn turn_hostile(&self) -> Result<(), Unspecified> {
        let owner = HostileOwner::new()?;
        // Of two owners made concurrently, one is kept.
        let _ = self.0.hostile.set(owner);
        Ok(())
    }

    /// Changes all objects but the Kyma as a controller does that competes with the receiver, and holds them by a
    /// finalizer; those that still bear its change are left alone. Returns the number of changed objects.
    pub fn contest(&self) -> usize {
        self.write(hostile::contest)
    }

    /// A token that looks like one of [`FakeCluster::token`], with a random signature of one of the hostile keys.
    ///
    /// # Errors
    /// When no random bytes are available.
    pub fn forged_token(number: usize) -> Result<String, Unspecified> {
        hostile::forged_token(number)
    }

    /// The response of a hostile runtime to a read of objects, if it is not the real one.
    pub(super) fn hostile_response(&self) -> Option<Bytes> {
        self.0.hostile.get()?.response()
    }

    /// The response to a request for token keys or a token review; `None` for other paths.
    pub(super) fn answer_token_request(&self, path: &str, body: &[u8]) -> Option<(StatusCode, Value)> {
        if !tokens::is_token_path(path) {
            return None;
        }
        match self.0.hostile.get() {
            Some(owner) if path == tokens::KEYS => Some((StatusCode::OK, owner.keys().clone())),
            _ => self.issuer().ok()?.answer(path, body),
        }
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
        self.0.store.lock()
    }

    pub(super) fn write<T>(&self, step: impl FnOnce(&mut Store) -> T) -> T {
        let result = step(&mut self.read());
        self.0.changed.notify_waiters();
        result
    }

    /// Notified at each write.
    pub(crate) fn changed(&self) -> &Notify {
        &self.0.changed
    }
}
