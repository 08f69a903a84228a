//! One runtime of a fake API server, as its user, its watches and the tests see it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::sync::Notify;

use super::store::{Shelf, Store};

/// One runtime. Clones are the same runtime.
#[derive(Clone)]
pub struct FakeCluster(Arc<Inner>);

struct Inner {
    store: Mutex<Store>,
    changed: Notify,
}

impl FakeCluster {
    pub(super) fn new(shelf: Arc<Shelf>) -> Self {
        Self(Arc::new(Inner { store: Mutex::new(Store::new(shelf)), changed: Notify::new() }))
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
