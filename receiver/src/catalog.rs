//! The module catalog of each runtime: the templates and release metas that it may see, as KCP has them.
//!
//! `visibility` says who sees what, `desired` what that looks like in a runtime, `diff` what is to be done; all three are
//! pure. `sync` does it. What shall be is computed once per visibility class and kept until KCP's catalog changes; what is
//! there is remembered per runtime, so that a pass without news makes no call at all.

pub mod desired;
pub mod diff;
mod error;
mod metrics;
mod runtime;
pub mod selector;
mod snapshot;
mod sync;
#[cfg(test)]
mod tests;
pub mod visibility;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kube::Client;

pub use error::{Attempt, Failure, Failures, SyncError};
pub use metrics::{Metrics, Operation};
pub use sync::Synced;

use self::{diff::Inventory, runtime::Runtime, snapshot::Snapshot, sync::Look};
use crate::{kcp::Stores, key::KymaKey, queue::Drift};

/// What catalog sync is told at start.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--restricted-default-modules`: modules that only the Kymas selected by their release meta see.
    pub restricted_modules: BTreeSet<String>,
}

/// Catalog sync for all runtimes. Clones share everything.
#[derive(Clone)]
pub struct Catalog(Arc<Inner>);

struct Inner {
    settings: Settings,
    metrics: Metrics,
    source: Mutex<Source>,
    runtimes: Mutex<Runtimes>,
}

/// KCP's catalog as last read, and how often it has changed.
#[derive(Default)]
struct Source {
    changes: u64,
    snapshot: Option<Arc<Snapshot>>,
}

#[derive(Default)]
struct Runtimes {
    /// Tells one stay of a runtime here from the next.
    passes: u64,
    slots: HashMap<KymaKey, Slot>,
}

/// The memory of one runtime. While a pass has it, it is not here: a pass that is dropped half-way leaves no memory, and the
/// next one reads everything.
struct Slot {
    pass: u64,
    inventory: Option<Inventory>,
}

impl Catalog {
    /// Knows no runtime yet.
    #[must_use]
    pub fn new(settings: Settings, metrics: Metrics) -> Self {
        Self(Arc::new(Inner { settings, metrics, source: Mutex::default(), runtimes: Mutex::default() }))
    }

    /// Says that a template or release meta in KCP changed: what was computed is computed anew when next asked for.
    pub fn changed(&self) {
        let mut source = lock(&self.0.source);
        source.changes += 1;
        source.snapshot = None;
    }

    /// Forgets what is in a runtime, because its client was replaced or its Kyma is gone. The next sync reads everything.
    pub fn forget(&self, key: &KymaKey) {
        lock(&self.0.runtimes).slots.remove(key);
    }

    /// The visibility class of a Kyma with these labels.
    #[must_use]
    pub fn class(&self, kyma_labels: &BTreeMap<String, String>, stores: &Stores) -> visibility::Class {
        self.snapshot(stores).class(kyma_labels)
    }

    /// Stands for what a Kyma with these labels shall have: the same content has the same text. `None` if it cannot be computed; then
    /// [`Catalog::sync`] says why.
    #[must_use]
    pub fn content(&self, kyma_labels: &BTreeMap<String, String>, stores: &Stores) -> Option<String> {
        let snapshot = self.snapshot(stores);
        let wanted = snapshot.wanted(snapshot.class(kyma_labels)).ok()?;
        Some(wanted.content().to_owned())
    }

    /// Brings the catalog of one runtime to what its Kyma may see.
    ///
    /// The first sync, one after [`Catalog::forget`] and one with [`Drift::All`] list the runtime's catalog and compare.
    /// Any other reads only the objects that `drift` tells something new of, and writes those whose desired content has
    /// changed since, one apply each. Without either it makes no call.
    ///
    /// A sync that is dropped before its end, or that fails in a list, is as good as [`Catalog::forget`].
    ///
    /// # Errors
    /// [`SyncError`]; one object that fails stops no other. What failed is read again by the next sync.
    pub async fn sync(
        &self,
        key: &KymaKey,
        client: &Client,
        kyma_labels: &BTreeMap<String, String>,
        stores: &Stores,
        drift: &Drift,
    ) -> Result<Synced, SyncError> {
        let snapshot = self.snapshot(stores);
        let wanted = snapshot.wanted(snapshot.class(kyma_labels))?;
        let (pass, remembered) = self.begin(key);
        let look = match (&remembered, drift) {
            (None, _) | (_, Drift::All) => Look::Everywhere,
            (Some(_), Drift::None) => Look::At(&[]),
            (Some(_), Drift::Objects(events)) => Look::At(events),
        };
        let mut inventory = remembered.unwrap_or_default();
        let runtime = Runtime::new(client.clone(), self.0.metrics.clone());
        let result = sync::pass(&runtime, &self.0.metrics, &wanted, &mut inventory, look).await;
        self.end(key, pass, inventory, result)
    }

    /// Deletes what is ours from a runtime whose Kyma is being deleted, release metas before templates.
    ///
    /// # Errors
    /// [`SyncError`], as [`Catalog::sync`].
    pub async fn remove_all(&self, key: &KymaKey, client: &Client) -> Result<Synced, SyncError> {
        let (_, remembered) = self.begin(key);
        self.forget(key);
        let runtime = Runtime::new(client.clone(), self.0.metrics.clone());
        sync::remove_all(&runtime, &mut remembered.unwrap_or_default()).await
    }

    fn snapshot(&self, stores: &Stores) -> Arc<Snapshot> {
        let changes = {
            let source = lock(&self.0.source);
            if let Some(snapshot) = &source.snapshot {
                return Arc::clone(snapshot);
            }
            source.changes
        };
        let restricted = &self.0.settings.restricted_modules;
        let snapshot = Arc::new(Snapshot::new(stores.templates.state(), stores.release_metas.state(), restricted));
        let mut source = lock(&self.0.source);
        // A change after the count was read may be missing in what was read: serve it once, do not keep it.
        if source.changes == changes {
            source.snapshot = Some(Arc::clone(&snapshot));
        }
        snapshot
    }

    fn begin(&self, key: &KymaKey) -> (u64, Option<Inventory>) {
        let mut runtimes = lock(&self.0.runtimes);
        runtimes.passes += 1;
        let pass = runtimes.passes;
        let before = runtimes.slots.insert(key.clone(), Slot { pass, inventory: None });
        (pass, before.and_then(|slot| slot.inventory))
    }

    fn end(
        &self,
        key: &KymaKey,
        pass: u64,
        inventory: Inventory,
        result: Result<Synced, SyncError>,
    ) -> Result<Synced, SyncError> {
        let keeps = match &result {
            Ok(_) => true,
            Err(error @ SyncError::Objects(_)) => !error.says_not_found(),
            Err(_) => false,
        };
        let mut runtimes = lock(&self.0.runtimes);
        // Forgotten meanwhile, or taken over by a later pass: then this memory is nobody's.
        if let Some(slot) = runtimes.slots.get_mut(key).filter(|slot| slot.pass == pass && keeps) {
            slot.inventory = Some(inventory);
        }
        result
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is a single assignment: a panic elsewhere leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
