//! Watches of KCP: caches of its objects, and the event handlers that enqueue affected runtimes.
//!
//! [`watch`](tidewatch_fleet::watch) keeps one cache and reports each change, `fingerprint` reduces an object to the fields that matter,
//! `users` finds the Kymas that use a module, `affected` those that a change affects, `handlers` and `manifests` enqueue
//! them, `placer` keeps the runtime table's entries current, `handover` acquires and releases shards, and `bodies` reduces the
//! cached objects of other replicas' shards and fetches those of acquired ones. The receiver's own status writes change no
//! fingerprint, so they enqueue nothing.

mod affected;
mod bodies;
mod components;
mod debounce;
mod fingerprint;
mod handlers;
mod handover;
mod manifests;
mod owners;
mod placer;
mod users;
mod watchers;

use std::sync::Arc;

use kube::{
    Api, Client,
    core::{DeserializeGuard, NamespaceResourceScope, Resource},
    runtime::{
        reflector::{Lookup, store::Writer},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use tidewatch_api::{
    ModuleReleaseMeta, ModuleTemplate, Watcher,
    key::KymaKey,
    names::{PAUSE, RELEASES, label},
    plan::Work,
    shard::ShardCount,
};
use tidewatch_cluster::{Metrics, runtime_access::AccessSecret};
use tidewatch_fleet::{
    queue::{Priority, WorkSet},
    recorder::{EventRecorder, Regarding},
    stores::{Stores, kymas::CachedKyma, manifests::CachedManifest},
    watch,
};
use tidewatch_gateway::enrolment;
use tidewatch_installer::watcher::ForwardHealth;
use tidewatch_kit::readiness::Readiness;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use components::Components;
pub use handover::ShardHandover;
#[cfg(test)]
pub(super) use handover::tests as testing;

use self::{
    bodies::{Bodies, CacheBodies, KymaCache, ManifestCache, ObjectCache, SecretCache},
    owners::SecretOwners,
};

/// Write halves of [`Stores`] and of the access Secrets, each for exactly one watch.
#[derive(Default)]
pub struct Writers {
    kymas: Writer<CachedKyma>,
    templates: Writer<ModuleTemplate>,
    release_metas: Writer<ModuleReleaseMeta>,
    manifests: Writer<CachedManifest>,
    watchers: Writer<Watcher>,
    secrets: Writer<AccessSecret>,
}

/// Makes empty caches and their write halves.
pub fn stores() -> (Stores, Writers) {
    let writers = Writers::default();
    let stores = Stores {
        kymas: writers.kymas.as_reader(),
        templates: writers.templates.as_reader(),
        release_metas: writers.release_metas.as_reader(),
        manifests: writers.manifests.as_reader().into(),
        watchers: writers.watchers.as_reader(),
    };
    (stores, writers)
}

/// Watches of KCP, not started yet.
pub struct Watches {
    /// Client of KCP.
    pub client: Client,
    /// Namespace of all watched objects and of the receiver's Leases.
    pub namespace: String,
    /// Components that react to changes.
    pub components: Components,
    /// Health of forwarding in all replicas.
    pub forward_health: ForwardHealth,
    /// Write halves of the caches.
    pub writers: Writers,
    /// Number of shards. The caches have only facts of objects in the shards of other replicas.
    pub shards: ShardCount,
    /// Metrics of the watches.
    pub metrics: Metrics,
}

impl Watches {
    /// Spawns one watch per kind, the task of the Watchers, and the debouncer of the catalog. Each watch is pending in
    /// `readiness` until its first list is complete; `synced` is cancelled when all lists and the first plan are. Returns the
    /// hand-over of shards that are acquired or released from then on.
    pub fn start(
        self,
        readiness: &Readiness,
        synced: CancellationToken,
        tasks: &mut JoinSet<&'static str>,
    ) -> ShardHandover {
        let Self { client, namespace, components, forward_health, writers, shards, metrics } = self;
        let Writers { kymas, templates, release_metas, manifests, watchers, secrets } = writers;
        let kymas = watch::SharedWriter::from(kymas);
        let manifests = watch::SharedWriter::from(manifests);
        let secrets = watch::SharedWriter::from(secrets);
        let owners = Arc::new(SecretOwners::from(secrets.reader()));
        let kyma_cache = Arc::new(KymaCache::from(kymas.reader()));
        let manifest_cache = Arc::new(ManifestCache::from(components.stores.manifests.clone()));
        let secret_cache = Arc::new(SecretCache::new(owners.clone(), components.access.clone(), {
            let components = components.clone();
            let owners = owners.clone();
            move |kyma: &KymaKey| components.refresh_access(kyma, &owners)
        }));
        let known = || kymas.reader();
        let bodies = CacheBodies {
            kymas: Bodies::new(kyma_cache, kymas.clone(), known(), shards, metrics.clone()),
            manifests: Bodies::new(manifest_cache, manifests.clone(), known(), shards, metrics.clone()),
            secrets: Bodies::new(secret_cache, secrets.clone(), known(), shards, metrics.clone()),
        };
        let recorder = components.recorder.clone();
        let debouncer = Arc::new(debounce::CatalogDebouncer::default());
        let handlers = handlers::EventHandlers::new(components.clone(), debouncer.clone(), owners, bodies.clone());
        let caches_synced = synced.clone();
        let handover = ShardHandover {
            components: components.clone(),
            placer: handlers.placer.clone(),
            bodies: bodies.clone(),
            synced: synced.clone(),
        };
        let gate = watch::SyncGate::new(readiness, {
            let fleet = components.fleet.clone();
            move || {
                fleet.set_synced();
                synced.cancel();
            }
        });
        let lease = Regarding::lease(&namespace);
        let monitor = watch::CacheMonitor::new(readiness, metrics.clone(), recorder.clone(), lease);
        let mut start = WatchStarter {
            client: client.clone(),
            namespace: namespace.clone(),
            metrics,
            recorder,
            gate,
            monitor,
            tasks,
        };
        let everything = watcher::Config::default;
        let named = |name| everything().fields(&format!("metadata.name={name}"));
        // A pause must be known before the first reconcile.
        start.watch("configmaps", Writer::default(), named(PAUSE), handlers.pause());
        // Revocations must be known before the first connection.
        start.watch("revocations", Writer::default(), named(enrolment::CONFIG_MAP), handlers.revocations());
        // The accepted releases must be known before the catalog is compared with them.
        start.watch("releases", Writer::default(), named(RELEASES), handlers.releases());
        // Watchers and Secrets before Kymas: a Kyma that is placed mostly finds its plan and its access.
        start.watch("watchers", watchers, everything(), handlers.watchers());
        let compact = compact(&bodies.secrets);
        start.watch_compactly("secrets", secrets, compact, everything().labels(label::KYMA_NAME), handlers.secrets());
        start.watch("moduletemplates", templates, everything(), handlers.templates());
        start.watch("modulereleasemetas", release_metas, everything(), handlers.release_metas());
        let compact = self::compact(&bodies.manifests);
        start.watch_compactly("manifests", manifests, compact, everything(), handlers.manifests());
        let selected = everything().labels(&components.takeover.selector().query());
        let compact = self::compact(&bodies.kymas);
        start.watch_compactly("kymas", kymas, compact, selected, handlers.kymas());
        let WatchStarter { gate, monitor, tasks, .. } = start;
        tasks.spawn(monitor.run());
        tasks.spawn(placer::follow(handlers.placer.clone(), components.manifest_memories.clone()));
        let changed = handlers.watchers_changed.clone();
        let planned = gate.guard("plan");
        tasks.spawn(watchers::run(
            client.clone(),
            namespace.clone(),
            components.clone(),
            handlers.placer.clone(),
            forward_health,
            changed,
            planned,
        ));
        let fleet = components.fleet.clone();
        let queue = components.manifest_queue.clone();
        let on_fetched = move |kyma: &KymaKey| {
            // Reconciles that needed the bodies have failed. A shard that is being acquired has none yet.
            queue.enqueue_kyma(kyma, Priority::User, false);
            fleet.enqueue(kyma, WorkSet::of(&[Work::Kyma]), Priority::User);
        };
        // No reconcile needs the cached body of its Kyma.
        tasks.spawn(bodies.kymas.run(Api::namespaced(client.clone(), &namespace), |_| ()));
        tasks.spawn(bodies.secrets.run(Api::namespaced(client.clone(), &namespace), on_fetched.clone()));
        tasks.spawn(bodies.manifests.run(Api::namespaced(client.clone(), &namespace), on_fetched));
        tasks.spawn(async move { debouncer.run(&components, &client, &namespace, caches_synced).await });
        handover
    }
}

/// Compaction of objects that are reduced if they concern runtimes in the shards of other replicas.
fn compact<C: ObjectCache>(bodies: &Bodies<C>) -> watch::Compact<C::Listed, C::Cached> {
    let bodies = bodies.clone();
    Box::new(move |listed| bodies.compact(listed))
}

/// Parameters of all watches.
struct WatchStarter<'a> {
    client: Client,
    namespace: String,
    metrics: Metrics,
    recorder: EventRecorder,
    gate: watch::SyncGate,
    monitor: watch::CacheMonitor,
    tasks: &'a mut JoinSet<&'static str>,
}

impl WatchStarter<'_> {
    fn watch<K>(
        &mut self,
        kind: &'static str,
        writer: Writer<K>,
        config: watcher::Config,
        handler: impl FnMut(watch::Change<'_, K>) + Send + 'static,
    ) where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug
            + Send
            + Sync
            + 'static,
    {
        self.watch_compactly(kind, writer.into(), Box::new(|object| object), config, handler);
    }

    /// As [`Self::watch`], with a function that reduces the memory of each object.
    fn watch_compactly<K, S>(
        &mut self,
        kind: &'static str,
        writer: watch::SharedWriter<S>,
        compact: watch::Compact<K, S>,
        config: watcher::Config,
        handler: impl FnMut(watch::Change<'_, S>) + Send + 'static,
    ) where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug
            + Send
            + Sync
            + 'static,
        S: Lookup<DynamicType = ()> + Clone + Send + Sync + 'static,
    {
        let freshness = watch::Freshness::new();
        self.monitor.add(kind, freshness.clone());
        let api: Api<DeserializeGuard<K>> = Api::namespaced(freshness.observe(self.client.clone()), &self.namespace);
        let gate = self.gate.guard(kind);
        let metrics = self.metrics.clone();
        let recorder = self.recorder.clone();
        let reader = writer.reader();
        let cache = watch::Cache { kind, reader, writer, compact, gate: Some(gate), freshness, metrics, recorder };
        self.tasks.spawn(watch::run(api, config, cache, handler));
    }
}
