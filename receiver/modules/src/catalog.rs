//! Module catalog sync: copies the templates and release metas of KCP that a Kyma may see into its runtime.
//!
//! [`tidewatch_select::catalog`] has the rules: visibility, the catalog of each visibility class, removal guard, roll-outs. Here,
//! `inventory` is the record of the objects written to one runtime, and `diff` compares desired and observed state; both are pure.
//! `sync` executes the difference, `releases` persists the accepted state.
//!
//! The desired state is computed once per visibility class and cached until KCP's catalog changes; the observed state is cached per
//! runtime. A sync without changes therefore makes no call.

mod diff;
mod error;
mod events;
mod flags;
mod inventory;
mod metrics;
mod releases;
mod runtime;
mod sync;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    sync::Arc,
    time::Duration,
};

use jiff::{Timestamp, civil::Date};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Client, ResourceExt};
use parking_lot::Mutex;
use tidewatch_api::{ModuleReleaseMeta, key::KymaKey};
use tidewatch_cluster::{WriteBudgets, leader::FleetRole};
use tidewatch_fleet::{queue::Drift, stores::Stores};
use tidewatch_select::catalog::{
    ChannelTarget, RolloutBoard, RolloutSlot, VersionSource, VisibilityLabels,
    holds::Holds,
    releases::{Ledger, Observed},
    removal_guard::{self, GuardDecision, HeldRemoval, HeldRemovals, LostReleases, RemovalPolicy},
    retirement,
    rollout::{self, InvalidPolicyError, RolloutKey, RolloutPolicy},
    snapshot::{Omission, Snapshot},
};
use tokio::time::timeout;

pub use error::{Attempt, CallError, SyncError};
pub use flags::Flags;
pub use metrics::{Metrics, Operation};

use self::{inventory::Inventory, runtime::Runtime};

/// Configuration of catalog sync.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--restricted-default-modules`: modules that only the Kymas selected by their release meta see.
    pub restricted_modules: BTreeSet<String>,
    /// See [`Flags`].
    pub flags: Flags,
}

/// Catalog sync of all runtimes. Clones share all state.
#[derive(Clone)]
pub struct Catalog(Arc<Inner>);

struct Inner {
    settings: Settings,
    metrics: Metrics,
    budgets: WriteBudgets,
    role: FleetRole,
    kcp: Mutex<KcpState>,
    /// Cached inventory of each runtime. A running sync takes the inventory out, so a sync that is dropped half-way leaves none and
    /// the next one loads the inventory from the runtime.
    inventories: Mutex<HashMap<KymaKey, Option<Inventory>>>,
    rollouts: RolloutBoard,
}

/// KCP's catalog as last read, and its accepted state.
#[derive(Default)]
struct KcpState {
    ledger: Ledger,
    /// The last snapshot was decided by this replica.
    has_decided: bool,
    snapshot: Option<Arc<Snapshot>>,
    /// Modules that changed since the removal guard last decided.
    undecided: BTreeSet<String>,
    /// Modules of the first snapshot that no replica has decided on so far; `None` before it.
    undecided_at_start: Option<BTreeSet<String>>,
    held: HeldRemovals,
    /// Hold of every removal, because the accepted state is lost.
    lost: Option<LostReleases>,
    /// Confirmations that were used and must be removed from their ConfigMap: each is valid once.
    used: BTreeSet<String>,
    /// Rules of the modules with a ring rollout.
    policies: BTreeMap<String, Result<Arc<RolloutPolicy>, InvalidPolicyError>>,
    reported: Reported,
}

impl KcpState {
    /// Modules that changed while no receiver ran, if they have been decided on since the last call. No change marks their users.
    fn decided_since_start(&mut self) -> BTreeSet<String> {
        let Self { undecided, undecided_at_start, .. } = self;
        let at_start = undecided_at_start.iter_mut();
        at_start.flat_map(|modules| modules.extract_if(.., |module| !undecided.contains(module))).collect()
    }

    /// Returns whether the removal of a module as a whole waits for a confirmation.
    fn holds(&self, module: &str) -> bool {
        self.lost.is_some() || self.held.holds(module)
    }

    fn target(&self, module: &str, source: VersionSource<'_>) -> Option<&ChannelTarget> {
        self.ledger.accepted.as_ref()?.get(module)?.target(source)
    }
}

/// State that [`Catalog::refresh`] has already reported.
#[derive(Default)]
struct Reported {
    omissions: BTreeSet<Omission>,
    held_changes: BTreeSet<String>,
    lost_change: Option<String>,
}

/// Result of recomputing KCP's catalog after a change.
pub struct CatalogUpdate {
    /// Snapshot before the change; `None` right after start.
    before: Option<Arc<Snapshot>>,
    now: Arc<Snapshot>,
    /// Removals that wait for a confirmation and were not reported before.
    pub held: Vec<HeldRemoval>,
    /// Hold of every removal, if it was not reported before.
    pub lost: Option<LostReleases>,
    /// Modules with a held removal, of the module or of a part, that this change confirmed or reverted, and those that changed while no
    /// receiver ran and have been decided on now.
    pub no_longer_held: BTreeSet<String>,
    /// Omissions that were not reported before.
    pub left_out: Vec<Omission>,
    /// This replica has decided, and reports it.
    pub is_decision: bool,
}

impl CatalogUpdate {
    /// Returns whether the desired catalog of a Kyma with these labels changed.
    pub fn affects(&self, kyma_labels: &BTreeMap<String, String>) -> bool {
        self.before.as_ref().is_some_and(|before| before.fingerprint(kyma_labels) != self.now.fingerprint(kyma_labels))
    }
}

impl Catalog {
    /// Creates catalog sync without any runtime. While another replica has the fleet role, this one follows the decisions that are
    /// stored: until one is, no runtime loses anything, and no new version reaches a runtime.
    pub fn new(settings: Settings, metrics: Metrics, budgets: WriteBudgets, role: FleetRole) -> Self {
        let (kcp, inventories, rollouts) = Default::default();
        Self(Arc::new(Inner { settings, metrics, budgets, role, kcp, inventories, rollouts }))
    }

    /// Ring rollouts.
    pub fn rollouts(&self) -> &RolloutBoard {
        &self.0.rollouts
    }

    /// Accepted targets of the modules with a ring rollout, and the rules of each module.
    pub(crate) fn ring_targets(
        &self,
    ) -> Vec<(RolloutKey, ChannelTarget, Result<Arc<RolloutPolicy>, InvalidPolicyError>)> {
        let kcp = self.0.kcp.lock();
        let accepted = kcp.ledger.accepted.iter().filter(|_| kcp.lost.is_none()).flatten();
        let with_rings = accepted.filter_map(|(module, state)| Some((module, state, kcp.policies.get(module)?)));
        let targets = with_rings.flat_map(|(module, state, policy)| {
            state.targets().map(|(source, target)| (RolloutKey::new(module, source), target.clone(), policy.clone()))
        });
        targets.collect()
    }

    /// Metrics of catalog sync.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// See [`Settings::restricted_modules`].
    pub fn restricted_modules(&self) -> &BTreeSet<String> {
        &self.0.settings.restricted_modules
    }

    /// Values of the command-line flags.
    pub fn flags(&self) -> &Flags {
        &self.0.settings.flags
    }

    /// Recomputes KCP's catalog after a template, a release meta or a confirmation changed.
    #[must_use]
    pub fn refresh(&self, stores: &Stores) -> CatalogUpdate {
        let mut kcp = self.0.kcp.lock();
        // Cleared before the caches are read: a change from here on marks its module again.
        kcp.undecided.clear();
        let before = kcp.snapshot.take();
        let held_before = mem::take(&mut kcp.held).removals;
        let was_lost = kcp.lost.take().is_some();
        let now = self.read(&mut kcp, stores);
        let is_held = |before: &HeldRemoval| {
            kcp.held.removals.iter().any(|held| (&held.module, &held.part) == (&before.module, &before.part))
        };
        let ended = held_before.into_iter().filter(|before| !is_held(before)).map(|before| before.module);
        let all = kcp.ledger.accepted.iter().filter(|_| was_lost).flat_map(|accepted| accepted.keys().cloned());
        let mut no_longer_held: BTreeSet<_> = ended.chain(all.filter(|module| !kcp.holds(module))).collect();
        no_longer_held.append(&mut kcp.decided_since_start());
        let reported = Reported {
            omissions: now.omissions().iter().cloned().collect(),
            held_changes: kcp.held.removals.iter().map(|held| held.change.clone()).collect(),
            lost_change: kcp.lost.as_ref().map(|lost| lost.change.clone()),
        };
        let left_out = reported.omissions.difference(&kcp.reported.omissions).cloned().collect();
        let is_new = |held: &&HeldRemoval| !kcp.reported.held_changes.contains(&held.change);
        let held = kcp.held.removals.iter().filter(is_new).cloned().collect();
        let lost = kcp.lost.clone().filter(|_| reported.lost_change != kcp.reported.lost_change);
        let is_decision = kcp.has_decided;
        if is_decision {
            kcp.reported = reported;
        }
        CatalogUpdate { before, now, held, lost, no_longer_held, left_out, is_decision }
    }

    /// Drops the cached inventory of a runtime because its client was replaced or its Kyma is gone. The next sync loads the inventory
    /// from the runtime.
    pub fn forget(&self, key: &KymaKey) {
        self.0.inventories.lock().remove(key);
    }

    /// Current snapshot of KCP's catalog, with the desired catalog of each visibility class.
    pub fn snapshot(&self, stores: &Stores) -> Arc<Snapshot> {
        let mut kcp = self.0.kcp.lock();
        match &kcp.snapshot {
            Some(snapshot) => Arc::clone(snapshot),
            None => self.read(&mut kcp, stores),
        }
    }

    /// Fingerprint of the desired catalog of a Kyma with these labels: equal catalogs have equal fingerprints.
    pub fn fingerprint(&self, kyma_labels: &BTreeMap<String, String>, stores: &Stores) -> String {
        self.snapshot(stores).fingerprint(kyma_labels)
    }

    /// Marks a module as changed. Until [`Catalog::refresh`] has decided on the change, no runtime loses the module, and the roll-out
    /// of a new channel stays undecided.
    pub fn mark_undecided(&self, module: &str) {
        self.0.kcp.lock().undecided.insert(module.to_owned());
    }

    /// Returns whether a change of the module has not been decided on yet.
    pub(crate) fn is_undecided(&self, module: &str) -> bool {
        self.0.kcp.lock().undecided.contains(module)
    }

    /// Returns whether this replica waits for the decision of another one.
    pub fn awaits_decision(&self) -> bool {
        let kcp = self.0.kcp.lock();
        !kcp.has_decided && !kcp.undecided.is_empty()
    }

    /// Returns whether a Kyma may be marked as reconciled; see [`Ledger::was_stored`].
    pub fn permits_first_reconcile(&self) -> bool {
        self.0.kcp.lock().ledger.was_stored()
    }

    /// Returns whether the removal of a module waits for a decision or a confirmation. No runtime loses the module while it does.
    pub fn is_held(&self, module: &str) -> bool {
        let kcp = self.0.kcp.lock();
        kcp.undecided.contains(module) || kcp.holds(module)
    }

    /// Removals that wait for a confirmation.
    pub fn held(&self) -> HeldRemovals {
        self.0.kcp.lock().held.clone()
    }

    /// Hold of every removal, because the accepted state is lost.
    pub fn lost(&self) -> Option<LostReleases> {
        self.0.kcp.lock().lost.clone()
    }

    /// What waits for a confirmation, for the condition of a runtime cluster that has its catalog.
    pub(crate) fn held_notice(&self) -> Option<String> {
        let kcp = self.0.kcp.lock();
        let held = (!kcp.held.is_empty()).then(|| kcp.held.to_string());
        kcp.lost.as_ref().map(ToString::to_string).or(held)
    }

    /// Accepted target of a module's channel or mandatory version.
    pub fn target(&self, module: &str, source: VersionSource<'_>) -> Option<ChannelTarget> {
        self.0.kcp.lock().target(module, source).cloned()
    }

    /// Roll-out slot in which a Kyma gets the version that a module's release meta points to in KCP's caches.
    pub(crate) fn rollout_slot(
        &self,
        kyma_uid: &str,
        module: &str,
        source: VersionSource<'_>,
        version: &str,
    ) -> RolloutSlot {
        let kcp = self.0.kcp.lock();
        let target = kcp.target(module, source);
        if kcp.lost.is_some() || target.is_none() && kcp.undecided.contains(module) {
            // The source may be new: the time since when it points there is recorded with the decision.
            return RolloutSlot::Undecided;
        }
        if let (Some(target), true) = (target, kcp.policies.contains_key(module)) {
            return self.0.rollouts.slot(kyma_uid, module, source, version, target);
        }
        RolloutSlot::of(kyma_uid, module, version, target, self.rollout_window(), Timestamp::now())
    }

    /// Roll-out slot in which a Kyma with a version of a module gets the content of the version's template, if that was edited.
    /// `content` is its identifier.
    pub(crate) fn edit_slot(&self, kyma_uid: &str, module: &str, version: &str, content: &str) -> RolloutSlot {
        let kcp = self.0.kcp.lock();
        if kcp.lost.is_some() {
            return RolloutSlot::Undecided;
        }
        let state = kcp.ledger.accepted.as_ref().and_then(|accepted| accepted.get(module));
        let Some((state, accepted)) = state.and_then(|state| Some((state, state.contents.get(version)?))) else {
            return if kcp.undecided.contains(module) { RolloutSlot::Undecided } else { RolloutSlot::Now };
        };
        let edition = |content: &str| format!("{version} {content}");
        let target = ChannelTarget {
            version: edition(accepted),
            labels: VisibilityLabels::default(),
            since: state.edited.get(version).copied(),
            from: None,
        };
        let now = Timestamp::now();
        RolloutSlot::of(kyma_uid, module, &edition(content), Some(&target), self.rollout_window(), now)
    }

    /// Delay of a Kyma after a channel or mandatory version moved just now, counted from the move; `None` if it gets the
    /// version with its ring.
    pub fn rollout_delay(&self, kyma_uid: &str, module: &str, source: VersionSource<'_>) -> Option<Duration> {
        if self.0.kcp.lock().policies.contains_key(module) {
            return None;
        }
        // A source without an accepted target still gets a stable delay of its own.
        let to = self.target(module, source).map_or_else(|| source.as_str().to_owned(), |target| target.version);
        Some(rollout::delay(kyma_uid, module, &to, self.rollout_window()))
    }

    /// Delay until a Kyma is reconciled because a day begins: as for a roll-out, the Kymas are spread over time.
    pub(crate) fn day_delay(&self, kyma_uid: &str, day: Date, now: Timestamp) -> Duration {
        retirement::until(day, now) + rollout::delay(kyma_uid, "", &day.to_string(), self.rollout_window())
    }

    /// Time within which a moved channel reaches all Kymas that follow it.
    fn rollout_window(&self) -> Duration {
        self.0.settings.flags.module_upgrade_rollout_max_delay
    }

    /// Observes the ConfigMap of releases, `None` if there is none. Returns whether [`Catalog::refresh`] may decide otherwise now: the
    /// accepted state was adopted, there is a new confirmation, or the content is none that this replica wrote: the decision of another
    /// one, or what the holder of the fleet role then writes over.
    pub fn observe_releases(&self, map: Option<&ConfigMap>) -> bool {
        let Observed { is_input, is_other } = self.0.kcp.lock().ledger.observe(map);
        is_input || is_other
    }

    /// Writes the ConfigMap of releases if it is out of date. Returns false if that failed, or if the ConfigMap has changed: then
    /// [`Catalog::refresh`] decides again.
    pub async fn persist_releases(&self, kcp: &Client, namespace: &str) -> bool {
        let Some(data) = self.pending_releases() else { return true };
        let is_lost = self.lost().is_some();
        let left = self.confirmations_left();
        let write = async {
            // The watch may lag behind: the hold of a state that only looks lost must not replace it.
            if is_lost && self.observe_releases(releases::read(kcp, namespace).await?.as_ref()) {
                return Ok(false);
            }
            releases::write(kcp, namespace, &data, left.as_ref()).await.map(|()| true)
        };
        let cause = match timeout(releases::WRITE_DEADLINE, write).await {
            Ok(Ok(is_written)) => {
                if is_written {
                    self.releases_written(data);
                }
                return is_written;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no response in time".to_owned(),
        };
        tracing::warn!(
            cause,
            "Accepted releases are not persisted; no Kyma is reconciled for the first time before they were"
        );
        false
    }

    /// Data to write to the ConfigMap of releases; `None` if it is up to date.
    fn pending_releases(&self) -> Option<BTreeMap<String, String>> {
        let kcp = self.0.kcp.lock();
        // The role may have come after the last snapshot: what that found lost is no decision.
        kcp.has_decided.then(|| kcp.ledger.pending(&kcp.held, kcp.lost.as_ref()))?
    }

    /// Confirmations that stay in the ConfigMap of releases; `None` if none was used.
    fn confirmations_left(&self) -> Option<BTreeSet<String>> {
        let kcp = self.0.kcp.lock();
        (!kcp.used.is_empty()).then(|| kcp.ledger.confirmed.difference(&kcp.used).cloned().collect())
    }

    /// Records that the ConfigMap of releases holds this data, and that used confirmations were removed from it.
    fn releases_written(&self, data: BTreeMap<String, String>) {
        let mut kcp = self.0.kcp.lock();
        kcp.ledger.mark_written(data);
        kcp.used.clear();
    }

    /// Reconciles the catalog of one runtime with the desired catalog of its Kyma's visibility class.
    ///
    /// The first sync, and one after [`Catalog::forget`], loads the inventory from the runtime. If that is missing or unreadable, or
    /// with [`Drift::All`], it lists both kinds and compares. Any other sync reads only the objects that `drift` reports, except for
    /// echoes of its own writes, and applies the objects with changed desired content, one call each. Without either it makes no
    /// call.
    ///
    /// A sync that is dropped before its end, or that fails in a list, has the effect of [`Catalog::forget`].
    ///
    /// # Errors
    /// [`SyncError`]; one failing object stops no other. The next sync reads failed objects again.
    pub async fn sync(
        &self,
        key: &KymaKey,
        client: &Client,
        kyma_labels: &BTreeMap<String, String>,
        stores: &Stores,
        drift: &Drift,
    ) -> Result<(), SyncError> {
        let snapshot = self.snapshot(stores);
        let desired = snapshot.desired(&snapshot.class(kyma_labels));
        let cached = self.begin(key);
        let runtime = Runtime::new(client.clone(), self.0.metrics.clone()).with_budgets(key, &self.0.budgets);
        let (mut inventory, is_complete) = match (cached, drift) {
            (Some(inventory), Drift::None | Drift::Objects(_) | Drift::Reported(_)) => (inventory, true),
            (cached, _) => load(&runtime, cached).await?,
        };
        let drift = if is_complete { drift } else { &Drift::All };
        let result = sync::run(&runtime, &desired, &mut inventory, drift).await;
        if let Ok(()) | Err(SyncError::Objects { .. }) = &result {
            self.end(key, inventory);
        }
        result
    }

    /// Deletes the managed objects from the runtime of a Kyma that is being deleted, release metas before templates.
    ///
    /// # Errors
    /// [`SyncError`], as [`Catalog::sync`].
    pub async fn remove_all(&self, key: &KymaKey, client: &Client) -> Result<(), SyncError> {
        let cached = self.begin(key);
        self.forget(key);
        let runtime = Runtime::new(client.clone(), self.0.metrics.clone());
        let (mut inventory, _) = load(&runtime, cached).await?;
        sync::remove_all(&runtime, &mut inventory).await
    }

    /// Deletes the inventory from a runtime; to be called after all objects listed in it are gone.
    ///
    /// # Errors
    /// [`SyncError::Inventory`].
    pub async fn remove_inventory(&self, client: &Client) -> Result<(), SyncError> {
        let runtime = Runtime::new(client.clone(), self.0.metrics.clone());
        runtime.delete_inventory().await.map_err(SyncError::Inventory)
    }

    /// Computes the snapshot from KCP's caches and lets the removal guard decide on the changes, or follows the decisions of another
    /// replica.
    fn read(&self, kcp: &mut KcpState, stores: &Stores) -> Arc<Snapshot> {
        let restricted = &self.0.settings.restricted_modules;
        let with_holds =
            |holds| Snapshot::new(stores.templates.state(), stores.release_metas.state(), restricted, holds);
        let unheld = with_holds(Holds::default());
        let kymas = stores.kymas.state();
        let decides = self.0.role.is_held();
        let no_confirmation = BTreeSet::new();
        if !decides {
            kcp.used.clear();
        }
        // Also before the first decision: the replica that decided before may have stored another one since.
        if !decides || !kcp.has_decided {
            kcp.ledger.follow();
        }
        kcp.has_decided = decides;
        let policy = RemovalPolicy {
            percent: self.0.settings.flags.removal_limit_percent,
            confirmed: if decides { &kcp.ledger.confirmed } else { &no_confirmation },
            now: Timestamp::now().as_second(),
        };
        // A new installation accepts the catalog as it is: no Kyma was ever reconciled by a receiver, since the first reconciles wait
        // for a stored decision.
        let is_lost = kcp.ledger.accepted.is_none() && kymas.iter().any(|kyma| kyma.facts().is_managed());
        let labels = kymas.iter().map(|kyma| kyma.facts().labels());
        let decision = if let (false, Some(accepted)) = (decides, &kcp.ledger.accepted) {
            Ok(removal_guard::hold_all(accepted, unheld.releases(), labels, policy.now))
        } else if is_lost || !decides {
            LostReleases::decide(unheld.releases(), kcp.ledger.loss(), policy)
        } else {
            Ok(removal_guard::evaluate(kcp.ledger.accepted.as_ref(), unheld.releases(), labels, policy))
        };
        let snapshot = match decision {
            Ok(decision) => {
                if !decides {
                    kcp.undecided.extend(kcp.ledger.undecided(&decision));
                }
                let GuardDecision { accepted, held, used } = decision;
                let snapshot = if held.is_empty() { unheld } else { with_holds(Holds::of(&held, &accepted)) };
                if decides {
                    kcp.ledger.confirmed.retain(|change| !used.contains(change));
                    kcp.used.extend(used);
                    kcp.ledger.accepted = Some(accepted);
                }
                (kcp.held, kcp.lost) = (held, None);
                snapshot
            }
            Err(lost) => {
                (kcp.held, kcp.lost) = (HeldRemovals::default(), Some(lost));
                with_holds(Holds::everything())
            }
        };
        kcp.undecided_at_start.get_or_insert_with(|| kcp.undecided.clone());
        let policy = |meta: &ModuleReleaseMeta| {
            let policy = RolloutPolicy::of(meta, &self.0.settings.flags.rollout).transpose()?;
            Some((meta.name_any(), policy.map(Arc::new)))
        };
        kcp.policies = stores.release_metas.state().iter().filter_map(|meta| policy(meta)).collect();
        let snapshot = Arc::new(snapshot);
        self.0.metrics.update_gauges(snapshot.omissions(), &kcp.held, kcp.lost.as_ref());
        kcp.snapshot = Some(Arc::clone(&snapshot));
        snapshot
    }

    /// Takes the cached inventory of a runtime out. One sync of a runtime runs at a time.
    fn begin(&self, key: &KymaKey) -> Option<Inventory> {
        self.0.inventories.lock().insert(key.clone(), None).flatten()
    }

    /// Puts the inventory back after a sync, unless the runtime was forgotten meanwhile.
    fn end(&self, key: &KymaKey, inventory: Inventory) {
        if let Some(cached) = self.0.inventories.lock().get_mut(key) {
            // Without it the next sync loads the inventory, and refuses it if the stored form has too many objects as well.
            *cached = (!inventory.is_too_large()).then_some(inventory);
        }
    }
}

/// Loads the inventory from the runtime. Returns it with whether it is complete, so that no list is needed. A cached inventory is newer
/// than the stored one, but incomplete once another writer has changed that.
async fn load(runtime: &Runtime, cached: Option<Inventory>) -> Result<(Inventory, bool), SyncError> {
    let stored = runtime.inventory().await.map_err(SyncError::Inventory)?;
    let read = stored.as_ref().and_then(|stored| match Inventory::read(stored) {
        Ok(read) => Some(read),
        Err(error) => {
            tracing::warn!(%error, "Inventory of the catalog in the runtime is ignored and rebuilt");
            runtime.metrics.unreadable_inventory(error);
            None
        }
    });
    let mut inventory = match (cached, read) {
        (Some(cached), Some(read)) if cached.version() == read.version() => return Ok((cached, true)),
        (None, Some(read)) => return Ok((read, true)),
        (cached, _) => cached.unwrap_or_default(),
    };
    inventory.mark_foreign(stored.as_ref());
    Ok((inventory, false))
}
