//! The module catalog of each runtime: the templates and release metas that it may see, as KCP has them.
//!
//! `visibility` says who sees what, `snapshot` what a class of Kymas has of KCP's catalog, `desired` what that looks like in a
//! runtime, `inventory` what a runtime has of us, `diff` what is to be done, `facts` whether a change may be and when it reaches
//! whom; all of these are pure. `sync` does it, `releases` writes down what is accepted. What shall be is computed once per
//! visibility class and kept until KCP's catalog changes; what is there is remembered per runtime, so that a pass without news
//! makes no call at all.

pub mod check;
pub mod desired;
pub mod diff;
mod error;
mod events;
pub mod facts;
mod flags;
pub mod inventory;
mod metrics;
pub mod preview;
mod releases;
mod runtime;
pub mod selector;
pub mod snapshot;
mod sync;
#[cfg(test)]
mod tests;
mod turn;
pub mod view;
pub mod visibility;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Client, ResourceExt};

pub use error::{Attempt, Failure, Failures, SyncError, Target};
pub use flags::Flags;
pub use metrics::{Metrics, Operation};
pub use sync::Synced;

pub(crate) use releases::write as write_releases;
pub(crate) use turn::Turn;

use self::{
    facts::{Held, Pointer, Ruling, Terms},
    inventory::Inventory,
    releases::Ledger,
    runtime::Runtime,
    snapshot::{LeftOut, Snapshot},
    sync::Look,
};
use crate::{
    base::{key::KymaKey, stores::Stores},
    fleet::queue::Drift,
};

/// What catalog sync is told at start.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--restricted-default-modules`: modules that only the Kymas selected by their release meta see.
    pub restricted_modules: BTreeSet<String>,
    /// See [`Flags`].
    pub flags: Flags,
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

/// KCP's catalog as last read, and what of it is accepted.
#[derive(Default)]
struct Source {
    ledger: Ledger,
    snapshot: Option<Arc<Snapshot>>,
    /// Modules of which something moved that is not ruled on yet.
    unruled: BTreeSet<String>,
    held: Option<Held>,
    /// A confirmation let something through, and is to be taken off its ConfigMap: it is good for once.
    spent: bool,
    /// What [`Catalog::renew`] has told of.
    told: Told,
}

impl Source {
    fn pointer(&self, module: &str, channel: &str) -> Option<&Pointer> {
        self.ledger.accepted.as_ref()?.get(module)?.channels.get(channel)
    }
}

#[derive(Default)]
struct Told {
    left_out: BTreeSet<LeftOut>,
    held: Option<String>,
}

#[derive(Default)]
struct Runtimes {
    /// Tells one stay of a runtime here from the next.
    passes: u64,
    slots: HashMap<KymaKey, Slot>,
}

/// The memory of one runtime. While a pass has it, it is not here: a pass that is dropped half-way leaves no memory, and the
/// next one reads what is written down.
struct Slot {
    pass: u64,
    inventory: Option<Inventory>,
}

/// What a change of KCP's catalog came to.
pub struct Renewed {
    /// What was before; nothing in a process that has just begun.
    before: Option<Arc<Snapshot>>,
    now: Arc<Snapshot>,
    /// A removal that waits for a confirmation, and of which nothing was told yet.
    pub held: Option<Held>,
    /// Modules whose removal was held before and is not any more: it was confirmed, or taken back.
    pub released: BTreeSet<String>,
    /// What is left out, and of which nothing was told yet.
    pub left_out: Vec<LeftOut>,
}

impl Renewed {
    /// Whether a Kyma with these labels shall have something else in its runtime than before.
    #[must_use]
    pub fn concerns(&self, kyma_labels: &BTreeMap<String, String>) -> bool {
        let content = |snapshot: &Snapshot| snapshot.wanted(&snapshot.class(kyma_labels)).content().to_owned();
        self.before.as_deref().is_some_and(|before| content(before) != content(&self.now))
    }
}

impl Catalog {
    /// Knows no runtime yet.
    #[must_use]
    pub fn new(settings: Settings, metrics: Metrics) -> Self {
        Self(Arc::new(Inner { settings, metrics, source: Mutex::default(), runtimes: Mutex::default() }))
    }

    /// What catalog sync counts.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// See [`Settings::restricted_modules`].
    pub(crate) fn restricted_modules(&self) -> &BTreeSet<String> {
        &self.0.settings.restricted_modules
    }

    /// What the flags say.
    #[must_use]
    pub fn flags(&self) -> &Flags {
        &self.0.settings.flags
    }

    /// Computes anew what KCP's catalog comes to, after a template, a release meta or a confirmation moved.
    #[must_use]
    pub fn renew(&self, stores: &Stores) -> Renewed {
        let mut source = lock(&self.0.source);
        // Before the caches are read: what moves from here on is told again.
        source.unruled.clear();
        let before = source.snapshot.take();
        let held_before = source.held.take().map(|held| held.modules).unwrap_or_default();
        let now = self.read(&mut source, stores);
        let is_held = |module: &String| source.held.as_ref().is_some_and(|held| held.modules.contains(module));
        let released = held_before.into_iter().filter(|module| !is_held(module)).collect();
        let told = Told {
            left_out: now.left_out().iter().cloned().collect(),
            held: source.held.as_ref().map(|held| held.change.clone()),
        };
        let left_out = told.left_out.difference(&source.told.left_out).cloned().collect();
        let held = source.held.clone().filter(|_| told.held != source.told.held);
        source.told = told;
        Renewed { before, now, held, released, left_out }
    }

    /// Forgets what is in a runtime, because its client was replaced or its Kyma is gone. The next sync reads what is written down
    /// there.
    pub fn forget(&self, key: &KymaKey) {
        lock(&self.0.runtimes).slots.remove(key);
    }

    /// KCP's catalog as it is now, with what each class sees.
    #[must_use]
    pub fn snapshot(&self, stores: &Stores) -> Arc<Snapshot> {
        let mut source = lock(&self.0.source);
        match &source.snapshot {
            Some(snapshot) => Arc::clone(snapshot),
            None => self.read(&mut source, stores),
        }
    }

    /// Stands for what a Kyma with these labels shall have: the same content has the same text.
    #[must_use]
    pub fn content(&self, kyma_labels: &BTreeMap<String, String>, stores: &Stores) -> String {
        let snapshot = self.snapshot(stores);
        snapshot.wanted(&snapshot.class(kyma_labels)).content().to_owned()
    }

    /// Something of a module moved. Until [`Catalog::renew`] has ruled on it, nobody loses the module, or has the turn of a channel that is
    /// new.
    pub(crate) fn moved(&self, module: &str) {
        lock(&self.0.source).unruled.insert(module.to_owned());
    }

    /// Whether the removal of a module, or of a part of it, waits for a ruling or for a confirmation: then nobody loses it.
    #[must_use]
    pub fn holds(&self, module: &str) -> bool {
        let source = lock(&self.0.source);
        source.unruled.contains(module) || source.held.as_ref().is_some_and(|held| held.modules.contains(module))
    }

    /// The removal that waits for a confirmation.
    #[must_use]
    pub fn held(&self) -> Option<Held> {
        lock(&self.0.source).held.clone()
    }

    /// Where a channel of a module points, as it is accepted.
    #[must_use]
    pub fn pointer(&self, module: &str, channel: &str) -> Option<Pointer> {
        lock(&self.0.source).pointer(module, channel).cloned()
    }

    /// When the version that a channel of a module points to in KCP's caches is a Kyma's to have.
    pub(crate) fn turn(&self, kyma_uid: &str, module: &str, channel: &str, version: &str) -> Turn {
        let source = lock(&self.0.source);
        let pointer = source.pointer(module, channel);
        if pointer.is_none() && source.unruled.contains(module) {
            // The channel may be new: nobody has said yet since when it points there.
            return Turn::Undecided;
        }
        Turn::of((kyma_uid, module, version), pointer, self.window(), Timestamp::now())
    }

    /// How long a Kyma waits after a channel moved just now, wherever it points.
    #[must_use]
    pub fn roll_out_delay(&self, kyma_uid: &str, module: &str, channel: &str) -> Duration {
        let to = self.pointer(module, channel).map_or_else(|| channel.to_owned(), |pointer| pointer.version);
        facts::delay(kyma_uid, module, &to, self.window())
    }

    /// Within which everybody has the version to which a channel moved.
    fn window(&self) -> Duration {
        Duration::from_secs(self.0.settings.flags.module_upgrade_rollout_max_delay_seconds.into())
    }

    /// Takes the ConfigMap of releases as KCP has it. Whether somebody confirmed something.
    pub(crate) fn take_releases(&self, map: Option<&ConfigMap>) -> bool {
        lock(&self.0.source).ledger.take(map)
    }

    /// What the ConfigMap of releases should hold, if that is not what it holds.
    pub(crate) fn unwritten_releases(&self) -> Option<BTreeMap<String, String>> {
        let source = lock(&self.0.source);
        source.ledger.unwritten(source.held.as_ref())
    }

    /// Whether a confirmation is to be taken off the ConfigMap of releases, because it was used.
    pub(crate) fn is_spent(&self) -> bool {
        lock(&self.0.source).spent
    }

    /// Takes note that this stands in the ConfigMap of releases, and that a confirmation that was used does not any more.
    pub(crate) fn wrote_releases(&self, data: BTreeMap<String, String>) {
        let mut source = lock(&self.0.source);
        source.ledger.wrote(data);
        source.spent = false;
    }

    /// Brings the catalog of one runtime to what its Kyma may see.
    ///
    /// The first sync, and one after [`Catalog::forget`], goes by the inventory that stands in the runtime; where that is lost, or
    /// with [`Drift::All`], it lists the runtime's catalog and compares. Any other reads only the objects that `drift` tells
    /// something new of, and writes those whose desired content has changed since, one apply each. Without either it makes no call.
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
        let wanted = snapshot.wanted(&snapshot.class(kyma_labels));
        let (pass, remembered) = self.begin(key);
        let runtime = Runtime::new(client.clone(), self.0.metrics.clone());
        let (mut inventory, is_whole) = match (remembered, drift) {
            (Some(inventory), Drift::None | Drift::Objects(_)) => (inventory, true),
            (remembered, _) => load(&runtime, remembered).await?,
        };
        let look = match drift {
            Drift::All => Look::Everywhere,
            _ if !is_whole => Look::Everywhere,
            Drift::None => Look::At(&[]),
            Drift::Objects(events) => Look::At(events),
        };
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
        let (mut inventory, _) = load(&runtime, remembered).await?;
        sync::remove_all(&runtime, &mut inventory).await
    }

    /// Deletes the inventory from a runtime, after all that it tells of.
    ///
    /// # Errors
    /// [`SyncError::Inventory`].
    pub async fn remove_inventory(&self, client: &Client) -> Result<(), SyncError> {
        let runtime = Runtime::new(client.clone(), self.0.metrics.clone());
        runtime.delete_inventory().await.map_err(SyncError::Inventory)
    }

    /// Reads KCP's catalog from its caches, and rules on what changed.
    fn read(&self, source: &mut Source, stores: &Stores) -> Arc<Snapshot> {
        let restricted = &self.0.settings.restricted_modules;
        let of = |held| Snapshot::new(stores.templates.state(), stores.release_metas.state(), restricted, held);
        let free = of(BTreeSet::new());
        let kymas = stores.kymas.state();
        let terms = Terms {
            percent: self.0.settings.flags.removal_limit_percent,
            confirmed: source.ledger.confirmed.as_deref(),
            now: Timestamp::now().as_second(),
        };
        let labels = kymas.iter().map(|kyma| kyma.labels());
        let ruling = facts::rule(source.ledger.accepted.as_ref(), free.facts(), labels, terms);
        let Ruling { accepted, held, spent } = ruling;
        if spent {
            (source.ledger.confirmed, source.spent) = (None, true);
        }
        let snapshot = Arc::new(match &held {
            Some(held) => of(held.modules.clone()),
            None => free,
        });
        self.0.metrics.renewed(snapshot.left_out(), held.as_ref());
        (source.ledger.accepted, source.held) = (Some(accepted), held);
        source.snapshot = Some(Arc::clone(&snapshot));
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
        let keeps = matches!(&result, Ok(_) | Err(SyncError::Objects(_)));
        let mut runtimes = lock(&self.0.runtimes);
        // Forgotten meanwhile, or taken over by a later pass: then this memory is nobody's.
        if let Some(slot) = runtimes.slots.get_mut(key).filter(|slot| slot.pass == pass && keeps) {
            slot.inventory = Some(inventory);
        }
        result
    }
}

/// What is written down in the runtime, and whether that is all there is to know. What is remembered is newer than what is
/// written down.
async fn load(runtime: &Runtime, remembered: Option<Inventory>) -> Result<(Inventory, bool), SyncError> {
    let written = runtime.inventory().await.map_err(SyncError::Inventory)?;
    let read = written.as_ref().and_then(Inventory::read);
    let is_whole = read.is_some();
    let mut inventory = match (remembered, &read) {
        (Some(remembered), Some(read)) if remembered.version() == read.version() => return Ok((remembered, true)),
        (Some(remembered), _) => remembered,
        (None, _) => return Ok((read.unwrap_or_else(|| anew(written.as_ref())), is_whole)),
    };
    match &written {
        Some(written) => inventory.replaces(written),
        None => inventory.is_lost(),
    }
    Ok((inventory, false))
}

fn anew(written: Option<&ConfigMap>) -> Inventory {
    let mut inventory = Inventory::default();
    if let Some(written) = written {
        inventory.replaces(written);
    }
    inventory
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic elsewhere leaves half done here is computed again.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
