//! Finalizer of the release metas of mandatory modules: it is set before the first runtime gets the module, and removed
//! after the module is gone from every runtime. The Kyma reconcile installs and removes the module. Of several replicas the one with
//! the fleet role sets and removes it, by the caches of KCP, which have the Manifests of the whole fleet.

mod action;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
};
use parking_lot::Mutex;
use serde_json::json;
use tidewatch_api::{
    Manifest, ModuleReleaseMeta,
    labels::is_true,
    names::{field_manager, finalizer, label},
};
use tidewatch_cluster::{leader::FleetRole, runtime_access::describe};
use tidewatch_fleet::{
    recorder::{EventRecorder, PendingEvent, Regarding},
    stores::{Stores, manifests::CachedManifest},
};
use tidewatch_select::kyma::mandatory::{is_protected, is_wanted};
use tokio::{
    sync::Notify,
    time::{self, Instant},
};
use tokio_util::sync::CancellationToken;

use self::action::{Action, Use, action};
use super::catalog::Catalog;

/// Delay from the first change until all changes received so far are acted on together.
const DEBOUNCE: Duration = Duration::from_millis(300);
/// Delay of the next attempt after a failed request, or while KCP has a Manifest that the cache lacks.
const RETRY: Duration = Duration::from_secs(15);

/// Wakes the task of the finalizers, and reports faults of mandatory modules, which are in no status. Clones share one
/// state.
#[derive(Clone)]
pub struct MandatoryModules(Arc<Shared>);

struct Shared {
    namespace: String,
    recorder: EventRecorder,
    changed: Notify,
    /// By module; bounded by the modules.
    faults: Mutex<BTreeMap<String, String>>,
}

impl MandatoryModules {
    /// `namespace` is that of the release metas in KCP.
    pub fn new(namespace: &str, recorder: EventRecorder) -> Self {
        let namespace = namespace.to_owned();
        let changed = Notify::new();
        let faults = Mutex::default();
        Self(Arc::new(Shared { namespace, recorder, changed, faults }))
    }

    /// Reports that a release meta changed, that a Manifest was deleted or is no longer mandatory, or that the removal guard has decided.
    pub fn notify_changed(&self) {
        self.0.changed.notify_one();
    }

    /// Reports that a module cannot be installed, with the fault, or that it can. Each change is logged and becomes an
    /// Event of its release meta once, whichever runtime it was observed for.
    pub(crate) fn report(&self, module: &str, fault: Option<String>) {
        // Each change is a single insertion or removal.
        let mut faults = self.0.faults.lock();
        if faults.get(module) == fault.as_ref() {
            return;
        }
        match fault {
            Some(fault) => {
                tracing::warn!(module, fault, "Mandatory module cannot be installed");
                let regarding = Regarding::release_meta(&self.0.namespace, module, "");
                let event = PendingEvent::warning(regarding, "MandatoryModuleFailed", fault.clone());
                self.0.recorder.publish(vec![event]);
                faults.insert(module.to_owned(), fault);
            }
            None => {
                tracing::info!(module, "Mandatory module can be installed again");
                faults.remove(module);
            }
        }
    }
}

/// Task of the finalizers.
pub struct Finalizers {
    client: Client,
    stores: Stores,
    catalog: Catalog,
    modules: MandatoryModules,
    role: FleetRole,
    /// By the uid of the release meta; bounded by the release metas.
    removals: HashMap<String, Removal>,
}

/// Removal of a module from all runtimes.
#[derive(Clone, Copy)]
struct Removal {
    observed: Instant,
    /// An Event has reported it.
    is_reported: bool,
}

impl Finalizers {
    /// `client` is that of KCP.
    pub fn new(client: Client, stores: Stores, catalog: Catalog, modules: MandatoryModules, role: FleetRole) -> Self {
        Self { client, stores, catalog, modules, role, removals: HashMap::new() }
    }

    /// Runs forever, once all caches are synced: a Manifest missing from the cache would look removed.
    pub async fn run(mut self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let modules = self.modules.0.clone();
        let role = self.role.clone();
        let mut role_changes = role.changes();
        loop {
            let reconciled = role.run(self.reconcile()).await;
            let again = reconciled.unwrap_or_else(|| {
                // A removal is observed from the acquisition of the role on.
                self.removals.clear();
                None
            });
            let changed = async {
                tokio::select! {
                    () = modules.changed.notified() => {}
                    () = role_changes.next() => {}
                }
                time::sleep(DEBOUNCE).await;
            };
            match again {
                // A change or the delay, whichever comes first.
                Some(delay) => drop(time::timeout(delay, changed).await),
                None => changed.await,
            }
        }
    }

    /// Reconciles the finalizers of all release metas. Returns the delay until the next reconcile without a change.
    async fn reconcile(&mut self) -> Option<Duration> {
        // Holds are those of the last snapshot.
        drop(self.catalog.snapshot(&self.stores));
        let metas = self.stores.release_metas.state();
        let is_leaving = |uid: &String| metas.iter().any(|meta| meta.uid().as_ref() == Some(uid) && !is_wanted(meta));
        self.removals.retain(|uid, _| is_leaving(uid));
        let mut again: Option<Duration> = None;
        for meta in &metas {
            let delay = self.reconcile_one(meta).await;
            again = again.into_iter().chain(delay).min();
        }
        again
    }

    async fn reconcile_one(&mut self, meta: &ModuleReleaseMeta) -> Option<Duration> {
        let action = action(meta, self.use_of(meta));
        let mut finalizers = meta.finalizers().to_vec();
        match action {
            Action::None => return None,
            Action::Wait(rest) => return Some(rest),
            Action::Add => finalizers.push(finalizer::MANDATORY_MODULE.to_owned()),
            Action::Remove => finalizers.retain(|name| name != finalizer::MANDATORY_MODULE),
        }
        let result = if action == Action::Remove
            && self.has_manifest(meta).await.unwrap_or_else(|error| {
                self.failed(meta, "list the Manifests of the module", &error);
                true
            }) {
            return Some(RETRY);
        } else {
            self.patch(meta, finalizers).await
        };
        match result {
            Ok(()) => None,
            Err(error) => {
                self.failed(meta, "set or remove the finalizer of the ModuleReleaseMeta", &error);
                Some(RETRY)
            }
        }
    }

    /// Use of the module of a release meta. Reports the begin of a removal once.
    fn use_of(&mut self, meta: &ModuleReleaseMeta) -> Use {
        let module = meta.name_any();
        let is_held = self.catalog.is_held(&meta.name_any());
        if is_wanted(meta) || !is_protected(meta) {
            return Use { has_manifests: true, is_held, leaving_for: Duration::ZERO };
        }
        let manifests = self.stores.manifests.of_module(&module);
        let holds = |manifest: &CachedManifest| meta.spec.mandatory.is_some() || manifest.is_mandatory();
        let manifests = manifests.iter().filter(|manifest| holds(manifest)).count();
        let started = Removal { observed: Instant::now(), is_reported: false };
        let removal = self.removals.entry(meta.uid().unwrap_or_default()).or_insert(started);
        let leaving_for = removal.observed.elapsed();
        if manifests > 0 && !is_held && !removal.is_reported {
            removal.is_reported = true;
            tracing::info!(module, manifests, "Mandatory module is being removed from the runtimes");
            let note = format!("the module is being removed from {manifests} runtimes; the finalizer stays until then");
            self.publish(meta, "MandatoryModuleRemoval", false, note);
        }
        Use { has_manifests: manifests > 0, is_held, leaving_for }
    }

    /// Returns true if KCP has a Manifest that holds the finalizer, by a quorum read.
    async fn has_manifest(&self, meta: &ModuleReleaseMeta) -> kube::Result<bool> {
        let api = Api::<Manifest>::namespaced(self.client.clone(), &self.modules.0.namespace);
        let of_module = ListParams::default().labels(&format!("{}={}", label::MODULE_NAME, meta.name_any()));
        Ok(api.list_metadata(&of_module).await?.items.iter().any(|manifest| is_of(meta, manifest)))
    }

    /// Replaces the finalizers; fails with a conflict if the release meta was written since the cache received it.
    async fn patch(&self, meta: &ModuleReleaseMeta, finalizers: Vec<String>) -> kube::Result<()> {
        let api = Api::<ModuleReleaseMeta>::namespaced(self.client.clone(), &self.modules.0.namespace);
        let metadata = json!({"resourceVersion": meta.resource_version(), "finalizers": finalizers});
        let params = PatchParams::apply(field_manager::LIFECYCLE_OPERATOR);
        api.patch_metadata(&meta.name_any(), &params, &Patch::Merge(json!({"metadata": metadata}))).await.map(drop)
    }

    fn failed(&self, meta: &ModuleReleaseMeta, doing: &str, error: &kube::Error) {
        let cause = describe(error);
        tracing::warn!(module = meta.name_any(), doing, cause, "Finalizer of a mandatory module is not as desired");
        // lifecycle-manager's reason.
        let reason = "SettingMandatoryModuleTemplateFinalizerError";
        self.publish(meta, reason, true, format!("failed to {doing}: {cause}"));
    }

    fn publish(&self, meta: &ModuleReleaseMeta, reason: &'static str, warning: bool, note: String) {
        let Shared { namespace, recorder, .. } = &*self.modules.0;
        let uid = meta.uid().unwrap_or_default();
        let regarding = Regarding::release_meta(namespace, &meta.name_any(), &uid);
        recorder.publish(vec![PendingEvent { regarding, warning, reason, note }]);
    }
}

/// Returns true if a Manifest of the module holds the finalizer: every one of a mandatory module. One that is optional by
/// now may also have Manifests of users who select it.
fn is_of(meta: &ModuleReleaseMeta, manifest: &impl kube::ResourceExt) -> bool {
    meta.spec.mandatory.is_some() || is_true(Some(manifest.labels()), label::MANDATORY_MODULE)
}
