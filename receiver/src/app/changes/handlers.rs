//! Event handlers, one per kind: each keeps the indexes of other components current, and enqueues the Kymas that a
//! change affects.

use std::{collections::HashSet, slice, sync::Arc};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{ResourceExt as _, runtime::reflector::ObjectRef};
use tidewatch_api::{Kyma, ModuleReleaseMeta, ModuleTemplate, Watcher, key::KymaKey, plan::Work};
use tidewatch_cluster::runtime_access::AccessSecret;
use tidewatch_fleet::{
    queue::{Priority, WorkSet},
    stores::{
        kymas::{self, CachedKyma},
        manifests::CachedManifest,
    },
    watch::Change,
};
use tidewatch_modules::catalog::CatalogUpdate;
use tokio::{sync::Notify, time::Instant};

use super::{
    affected::{self, Affected, Follower},
    bodies::CacheBodies,
    components::Components,
    debounce::CatalogDebouncer,
    fingerprint::{
        FingerprintChange, Fingerprints, KymaFingerprint, MandatoryFingerprint, ObjectFingerprint, ReleaseFingerprint,
    },
    handover, manifests,
    owners::SecretOwners,
    placer::{self, KymaPlacer},
    users::{self, Users},
};

/// Factory of the handlers, and the state that they share.
pub(super) struct EventHandlers {
    components: Components,
    debouncer: Arc<CatalogDebouncer>,
    /// Notified when a Watcher changed.
    pub(super) watchers_changed: Arc<Notify>,
    owners: Arc<SecretOwners>,
    pub(super) placer: KymaPlacer,
    /// Bodies of the cached objects: those of other replicas' shards are reduced.
    bodies: CacheBodies,
}

impl EventHandlers {
    pub(super) fn new(
        components: Components,
        debouncer: Arc<CatalogDebouncer>,
        owners: Arc<SecretOwners>,
        bodies: CacheBodies,
    ) -> Self {
        let placer =
            KymaPlacer::new(components.fleet.clone(), components.plans.clone(), components.stores.kymas.clone());
        Self { components, debouncer, watchers_changed: Arc::default(), owners, placer, bodies }
    }

    /// Handler of the ConfigMap that pauses all runtimes. The end of a pause enqueues the paused Kymas at once.
    pub(super) fn pause(&self) -> impl FnMut(Change<'_, ConfigMap>) + Send + 'static + use<> {
        let components = self.components.clone();
        of_config_map(move |map| {
            if components.pause.set(map) {
                components.fleet.unpause();
                components.manifest_queue.unpause();
            }
        })
    }

    /// Handler of the ConfigMap of releases. A confirmation takes effect at once.
    pub(super) fn releases(&self) -> impl FnMut(Change<'_, ConfigMap>) + Send + 'static + use<> {
        let catalog = self.components.catalog.clone();
        let debouncer = self.debouncer.clone();
        of_config_map(move |map| {
            // A deleted ConfigMap is created again.
            if catalog.observe_releases(map) || map.is_none() {
                debouncer.record(Affected::default());
            }
        })
    }

    /// Handler of the ConfigMap of revocations.
    pub(super) fn revocations(&self) -> impl FnMut(Change<'_, ConfigMap>) + Send + 'static + use<> {
        let revocations = self.components.revocations.clone();
        of_config_map(move |map| revocations.set(map))
    }

    /// Handler of the Kymas. Those of other replicas may be reduced; their changes keep the tables of the whole fleet current.
    pub(super) fn kymas(&self) -> impl FnMut(Change<'_, CachedKyma>) + Send + 'static + use<> {
        let components = self.components.clone();
        let owners = self.owners.clone();
        let kyma_placer = self.placer.clone();
        let bodies = self.bodies.clone();
        let mut fingerprints = Fingerprints::new();
        move |change| {
            let initial = matches!(change, Change::Initial(_));
            match change {
                Change::Initial(kyma) | Change::Applied(kyma) => {
                    let key = kyma.key();
                    let now = KymaFingerprint::of(kyma, &components.takeover);
                    // No fingerprint has the annotation that ends a takeover.
                    components.takeover.observed(&key, kyma);
                    let mut change = fingerprints.apply(key.clone(), now.clone());
                    if matches!(&change, Some(FingerprintChange::Changed(old)) if now.is_of_another(old)) {
                        components.recorder.forget_kyma(&key);
                        components.forget_kyma(&key, &kyma_placer);
                        change = Some(FingerprintChange::New);
                    }
                    let is_new = change == Some(FingerprintChange::New);
                    let was_elsewhere = components.fleet.is_elsewhere(&key);
                    // Events record status changes as well, which change no fingerprint and are skipped below. The replica that
                    // holds the Kyma posts them.
                    if let Some(kyma) = kyma.whole().filter(|_| !was_elsewhere) {
                        components.observe(&key, kyma, is_new && !initial);
                    }
                    let Some(change) = change else { return };
                    let is_relabelled = matches!(
                        &change,
                        FingerprintChange::Changed(old) if now.object.labels != old.object.labels
                    );
                    if is_new {
                        components.takeover.selected(&key, kyma, initial, Instant::now());
                    }
                    components.v2_allowed.apply(&key, kyma);
                    kyma_placer.place(key.clone(), kyma);
                    let is_elsewhere = components.fleet.is_elsewhere(&key);
                    if let Some(kyma) = kyma.whole().filter(|_| was_elsewhere && !is_elsewhere) {
                        components.recorder.initial_kyma(&key, kyma);
                    }
                    if is_elsewhere {
                        // Its new runtime is in a shard of another replica.
                        components.manifest_queue.remove_kymas(slice::from_ref(&key));
                        components.recorder.forget_kyma(&key);
                        if !components.fleet.is_elsewhere(&key) {
                            // The shard was acquired, and the Manifests registered, between the two.
                            let queue = &components.manifest_queue;
                            let cached = &components.stores.manifests;
                            handover::register(queue, cached, &key);
                            manifests::enqueue_unfinished(queue, cached, &key);
                        }
                    } else if is_relabelled || (is_new && !initial) {
                        handover::register(&components.manifest_queue, &components.stores.manifests, &key);
                    }
                    if is_new || is_relabelled {
                        // It may have come into another shard.
                        bodies.kyma_moved(&key);
                    }
                    if is_new {
                        // Its Secrets may have been applied before it.
                        components.set_secrets(&key, &owners);
                    }
                    if initial {
                        // Unchanged since the previous process; enqueued in order of priority when all caches are
                        // synced.
                        placer::inherit(&components.fleet, &key, kyma);
                        return;
                    }
                    // The visibility of modules to a new or relabelled Kyma may have changed.
                    let work = if is_new || is_relabelled { WorkSet::RUNTIME } else { WorkSet::of(&[Work::Kyma]) };
                    components.fleet.enqueue(&key, work, Priority::User);
                    manifests::enqueue_released(&components.manifest_queue, &key, &now, &change);
                }
                Change::Deleted(kyma) => {
                    let key = kyma.key();
                    let is_elsewhere = components.fleet.is_elsewhere(&key);
                    components.recorder.deleted_kyma(&key, kyma, !is_elsewhere);
                    fingerprints.delete(&key);
                    components.forget_kyma(&key, &kyma_placer);
                }
                Change::Listed => {}
            }
        }
    }

    pub(super) fn templates(&self) -> impl FnMut(Change<'_, ModuleTemplate>) + Send + 'static + use<> {
        let components = self.components.clone();
        let debouncer = self.debouncer.clone();
        let mut fingerprints = Fingerprints::new();
        move |change| {
            let Some((template, _)) = fingerprints.observe(&change, ObjectFingerprint::of) else { return };
            let module = template.spec.module_name.clone().unwrap_or_default();
            components.catalog.mark_undecided(&module);
            let stores = &components.stores;
            // Named `<module>-<version>`.
            let name = template.name_any();
            let version = name.strip_prefix(&module).and_then(|rest| rest.strip_prefix('-')).unwrap_or_default();
            let namespace = template.namespace().unwrap_or_default();
            let meta = stores.release_metas.get(&ObjectRef::new(&module).within(&namespace));
            let target = |channel: &str| Some(meta.as_ref()?.spec.version_of(channel)?.to_owned());
            let mut affected = affected::template(&Users::of(stores, &module), version, target);
            let mandatory = meta.as_deref().and_then(MandatoryFingerprint::of);
            if mandatory.is_some_and(|mandatory| mandatory.version == version) {
                affected.add(affected::every(&stores.kymas.state()));
            }
            debouncer.record(affected);
        }
    }

    pub(super) fn release_metas(&self) -> impl FnMut(Change<'_, ModuleReleaseMeta>) + Send + 'static + use<> {
        let components = self.components.clone();
        let debouncer = self.debouncer.clone();
        let mut fingerprints = Fingerprints::new();
        move |change| {
            components.mandatory.notify_changed();
            let of = |meta: &ModuleReleaseMeta| ReleaseFingerprint::of(meta, components.catalog.restricted_modules());
            let Some((meta, old)) = fingerprints.observe(&change, of) else { return };
            let now = of(meta);
            components.catalog.mark_undecided(&meta.name_any());
            let module = meta.name_any();
            let users = Users::of(&components.stores, &module);
            let mut affected = affected::release(&users, &now, old.as_ref());
            let before = old.as_ref().and_then(|old| old.mandatory.as_ref());
            affected.add(affected::mandatory(
                &components.stores.kymas.state(),
                &module,
                now.mandatory.as_ref(),
                before,
            ));
            debouncer.record(affected);
        }
    }

    pub(super) fn manifests(&self) -> impl FnMut(Change<'_, CachedManifest>) + Send + 'static + use<> {
        let placer = self.placer.clone();
        let components = self.components.clone();
        let mandatory = components.mandatory.clone();
        let Components { stores, fleet, manifest_queue, manifest_memories, .. } = components;
        let mut handler = manifests::handler(stores.manifests, fleet, manifest_queue, manifest_memories, placer);
        // Manifests with the label of mandatory modules.
        let mut labelled = HashSet::new();
        move |change| {
            let may_release = match &change {
                Change::Initial(manifest) | Change::Applied(manifest) if manifest.is_mandatory() => {
                    labelled.insert(manifest.key());
                    false
                }
                // The module became optional, and the user selects it.
                Change::Initial(manifest) | Change::Applied(manifest) => labelled.remove(&manifest.key()),
                Change::Deleted(manifest) => {
                    labelled.remove(&manifest.key());
                    true
                }
                Change::Listed => false,
            };
            handler(change);
            if may_release {
                mandatory.notify_changed();
            }
        }
    }

    pub(super) fn secrets(&self) -> impl FnMut(Change<'_, AccessSecret>) + Send + 'static + use<> {
        let components = self.components.clone();
        let owners = self.owners.clone();
        move |change| {
            let initial = matches!(change, Change::Initial(_));
            let affected = match change {
                Change::Initial(secret) | Change::Applied(secret) => owners.apply(secret),
                Change::Deleted(secret) => {
                    let affected = owners.delete(secret);
                    for kyma in affected.iter().filter(|kyma| components.is_deleting(kyma)) {
                        components.access.secret_deleted(kyma, secret.key());
                    }
                    affected
                }
                Change::Listed => return,
            };
            for kyma in affected {
                if initial {
                    components.set_secrets(&kyma, &owners);
                } else {
                    components.refresh_access(&kyma, &owners);
                }
            }
        }
    }

    pub(super) fn watchers(&self) -> impl FnMut(Change<'_, Watcher>) + Send + 'static + use<> {
        let changed = self.watchers_changed.clone();
        let recorder = self.components.recorder.clone();
        let role = self.components.role.clone();
        let mut fingerprints = Fingerprints::new();
        move |change| {
            match change {
                Change::Initial(watcher) => recorder.initial_watcher(&KymaKey::of(watcher), watcher),
                Change::Applied(watcher) if !role.is_held() => recorder.initial_watcher(&KymaKey::of(watcher), watcher),
                Change::Applied(watcher) => recorder.watcher(&KymaKey::of(watcher), watcher),
                Change::Deleted(watcher) => recorder.deleted_watcher(&KymaKey::of(watcher)),
                Change::Listed => {}
            }
            // The first list is reported as a whole.
            let is_listed = matches!(change, Change::Listed);
            let is_changed = is_listed || fingerprints.observe(&change, ObjectFingerprint::of).is_some();
            if is_changed {
                changed.notify_one();
            }
        }
    }
}

/// Handler of one ConfigMap. `apply` gets its current state, `None` if it does not exist.
fn of_config_map(mut apply: impl FnMut(Option<&ConfigMap>)) -> impl FnMut(Change<'_, ConfigMap>) {
    move |change| match change {
        Change::Initial(map) | Change::Applied(map) => apply(Some(map)),
        Change::Deleted(_) => apply(None),
        Change::Listed => {}
    }
}

impl Components {
    /// Drops the state of a deleted Kyma.
    fn forget_kyma(&self, key: &KymaKey, placer: &KymaPlacer) {
        placer.remove(key);
        self.manifest_queue.cancel_kyma(key);
        self.takeover.deselected(key);
        self.v2_allowed.remove(key);
        self.access.remove(key);
        self.catalog.forget(key);
        self.kinds.forget(key);
    }

    /// Enqueues the Kymas whose first reconcile waited for the first decision on the catalog.
    pub(super) fn enqueue_first_reconciles(&self) {
        let kymas = self.stores.kymas.state();
        let waiting = kymas.iter().filter(|kyma| !kyma.facts().is_managed()).map(|kyma| kyma.key()).collect();
        self.fleet.enqueue_paced(waiting, WorkSet::RUNTIME, self.catalog.flags().catalog_sync_rate);
    }

    /// Applies a changed catalog: enqueues the catalog of all Kymas that see the change, and the reconcile of the
    /// affected users, rate limited, and schedules the followers of moved channels within the roll-out delay.
    /// `namespace` is that of the catalog in KCP.
    pub(super) fn apply_catalog_update(&self, namespace: &str, update: &CatalogUpdate, mut affected: Affected) {
        let per_second = self.catalog.flags().catalog_sync_rate;
        self.mandatory.notify_changed();
        self.catalog.rollouts().notify_moved();
        if update.is_decision {
            self.recorder.publish(update.events(namespace));
        }
        let kymas = self.stores.kymas.state();
        let viewers = kymas.iter().filter(|kyma| update.affects(kyma.facts().labels()));
        let viewers: Vec<_> = viewers.map(|kyma| kyma.key()).collect();
        self.catalog.metrics().count_enqueued(viewers.len());
        self.fleet.enqueue_paced(viewers, WorkSet::of(&[Work::Catalog]), per_second);
        for module in &update.no_longer_held {
            affected.add(affected::hold_ended(&Users::of(&self.stores, module)));
            affected.users.append(&mut users::of_mandatory(&self.stores, module));
        }
        let Affected { users, followers } = affected;
        self.fleet.enqueue_paced(users.into_iter().collect(), WorkSet::of(&[Work::Kyma]), per_second);
        for follower in followers {
            let Follower { key, uid, module, .. } = &follower;
            if let Some(delay) = self.catalog.rollout_delay(uid, module, follower.source()) {
                self.fleet.roll_out(key, delay);
            }
        }
    }

    /// Observes a Kyma that this replica serves, for Events about its changes since the last observation. All of a Kyma
    /// counts as changed if it `is_new` to this process; without a last observation nothing does, because its body was missing
    /// until now.
    fn observe(&self, key: &KymaKey, kyma: &Kyma, is_new: bool) {
        if is_new || self.recorder.has_observed(key) {
            self.recorder.kyma(key, kyma);
        } else {
            self.recorder.initial_kyma(key, kyma);
        }
    }

    /// Returns true if the cache shows that a Kyma is being deleted.
    fn is_deleting(&self, kyma: &KymaKey) -> bool {
        let cached = kymas::find(&self.stores.kymas, kyma);
        cached.is_some_and(|kyma| kyma.facts().is_deleting())
    }

    /// Updates the access to the runtime of a Kyma from the cache, and enqueues the Kyma and its Manifests if it changed.
    pub(super) fn refresh_access(&self, kyma: &KymaKey, owners: &SecretOwners) {
        if self.set_secrets(kyma, owners) {
            self.fleet.enqueue(kyma, WorkSet::of(&[Work::Kyma, Work::Catalog]), Priority::User);
            self.manifest_queue.enqueue_kyma(kyma, Priority::User, false);
        } else if self.access.kept_for(kyma).is_some() {
            // A condition says that the Secret has no kubeconfig.
            self.fleet.enqueue(kyma, WorkSet::of(&[Work::Kyma]), Priority::User);
        }
    }

    /// Updates the access Secrets of a Kyma from the cache, and returns true if its access changed. A changed access
    /// replaces the client at once and invalidates the cached state of the runtime.
    fn set_secrets(&self, key: &KymaKey, owners: &SecretOwners) -> bool {
        // Called concurrently by the watches of Kymas and of Secrets, and when bodies are fetched or dropped.
        let changed = self.access.refresh_secrets(key, || owners.read(key));
        if changed {
            self.catalog.forget(key);
        }
        changed
    }
}

#[cfg(test)]
mod tests;
