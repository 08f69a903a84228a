//! Watches of KCP: caches of its objects, and the event handlers that enqueue affected runtimes.
//!
//! `kube::watch` keeps one cache and reports each change, `fingerprint` reduces an object to the fields that matter,
//! `affected` computes the Kymas that a change affects, `handlers` enqueues them, `placer` keeps the runtime table's
//! entries current. The receiver's own status writes change no fingerprint, so they enqueue nothing.

mod affected;
mod debounce;
mod fingerprint;
mod handlers;
mod owners;
mod placer;
mod watchers;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{
    Api, Client,
    core::{DeserializeGuard, NamespaceResourceScope, Resource},
    runtime::{reflector::store::Writer, watcher},
};
use serde::de::DeserializeOwned;
use tidewatch_shared::{
    api::{Kyma, Manifest, ModuleReleaseMeta, ModuleTemplate, Watcher},
    names::{RELEASES, label},
};
use tokio::{sync::Notify, task::JoinSet};
use tokio_util::sync::CancellationToken;

pub use handlers::Components;

use crate::{
    base::{pause::CONFIG_MAP, stores::Stores},
    ingress::enrolment,
    kube::{Metrics, recorder::EventRecorder, watch},
    telemetry::Readiness,
};

/// Write halves of [`Stores`], each for exactly one watch.
pub struct Writers {
    kymas: Writer<Kyma>,
    templates: Writer<ModuleTemplate>,
    release_metas: Writer<ModuleReleaseMeta>,
    manifests: Writer<Manifest>,
    watchers: Writer<Watcher>,
    secrets: Writer<Secret>,
}

/// Makes empty caches and their write halves.
#[must_use]
pub fn stores() -> (Stores, Writers) {
    let writers = Writers {
        kymas: Writer::default(),
        templates: Writer::default(),
        release_metas: Writer::default(),
        manifests: Writer::default(),
        watchers: Writer::default(),
        secrets: Writer::default(),
    };
    let stores = Stores {
        kymas: writers.kymas.as_reader(),
        templates: writers.templates.as_reader(),
        release_metas: writers.release_metas.as_reader(),
        manifests: writers.manifests.as_reader(),
        watchers: writers.watchers.as_reader(),
        secrets: writers.secrets.as_reader(),
    };
    (stores, writers)
}

/// Watches of KCP, not started yet.
pub struct Watches {
    /// Client of KCP.
    pub client: Client,
    /// Namespace of all watched objects.
    pub namespace: String,
    /// Components that react to changes.
    pub components: Components,
    /// Metrics of the watches.
    pub metrics: Metrics,
}

impl Watches {
    /// Spawns one watch per kind, the task of the Watchers, and the debouncer of the catalog. Each watch is pending in
    /// `readiness` until its first list is complete; `synced` is cancelled when all lists and the first plan are.
    pub fn start(
        self,
        writers: Writers,
        readiness: &Readiness,
        synced: CancellationToken,
        tasks: &mut JoinSet<&'static str>,
    ) {
        let Self { client, namespace, components, metrics } = self;
        let recorder = components.recorder.clone();
        let start = WatchStarter { client: client.clone(), namespace: namespace.clone(), metrics, recorder };
        let debouncer = Arc::new(debounce::CatalogDebouncer::default());
        let handlers = handlers::EventHandlers::new(components.clone(), debouncer.clone(), Arc::new(Notify::new()));
        let caches_synced = synced.clone();
        let gate = watch::SyncGate::new(readiness, {
            let fleet = components.fleet.clone();
            move || {
                fleet.set_synced();
                synced.cancel();
            }
        });
        let Writers { kymas, templates, release_metas, manifests, watchers, secrets } = writers;
        let everything = watcher::Config::default();
        // A pause must be known before the first reconcile.
        let pausing = everything.clone().fields(&format!("metadata.name={CONFIG_MAP}"));
        let maps = Writer::<ConfigMap>::default();
        start.watch("configmaps", maps, pausing, gate.guard("configmaps"), handlers.pause(), tasks);
        // Revocations must be known before the first connection.
        let revoked = everything.clone().fields(&format!("metadata.name={}", enrolment::CONFIG_MAP));
        let maps = Writer::<ConfigMap>::default();
        start.watch("revocations", maps, revoked, gate.guard("revocations"), handlers.revocations(), tasks);
        // The accepted releases must be known before the catalog is compared with them.
        let releases = everything.clone().fields(&format!("metadata.name={RELEASES}"));
        let maps = Writer::<ConfigMap>::default();
        start.watch("releases", maps, releases, gate.guard("releases"), handlers.releases(), tasks);
        // Watchers and Secrets before Kymas: a Kyma that is placed mostly finds its plan and its access.
        start.watch("watchers", watchers, everything.clone(), gate.guard("watchers"), handlers.watchers(), tasks);
        let labelled = everything.clone().labels(label::KYMA_NAME);
        start.watch("secrets", secrets, labelled, gate.guard("secrets"), handlers.secrets(), tasks);
        start.watch(
            "moduletemplates",
            templates,
            everything.clone(),
            gate.guard("moduletemplates"),
            handlers.templates(),
            tasks,
        );
        let guard = gate.guard("modulereleasemetas");
        start.watch("modulereleasemetas", release_metas, everything.clone(), guard, handlers.release_metas(), tasks);
        start.watch("manifests", manifests, everything.clone(), gate.guard("manifests"), handlers.manifests(), tasks);
        let selected = everything.labels(&components.takeover.query());
        start.watch("kymas", kymas, selected, gate.guard("kymas"), handlers.kymas(), tasks);
        let planned = gate.guard("plan");
        let targets = (components.clone(), handlers.placer());
        tasks.spawn(watchers::run(client.clone(), namespace.clone(), targets, handlers.watchers_changed(), planned));
        tasks.spawn(async move { debouncer.run(&components, (&client, &namespace), caches_synced).await });
    }
}

/// Parameters of all watches.
struct WatchStarter {
    client: Client,
    namespace: String,
    metrics: Metrics,
    recorder: EventRecorder,
}

impl WatchStarter {
    fn watch<K>(
        &self,
        kind: &'static str,
        writer: Writer<K>,
        config: watcher::Config,
        gate: watch::SyncGuard,
        sink: impl FnMut(watch::Change<'_, K>) + Send + 'static,
        tasks: &mut JoinSet<&'static str>,
    ) where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug
            + Send
            + Sync
            + 'static,
    {
        let api: Api<DeserializeGuard<K>> = Api::namespaced(self.client.clone(), &self.namespace);
        tasks.spawn(watch::run(
            watch::Watch { kind, api, config, gate, metrics: self.metrics.clone(), recorder: self.recorder.clone() },
            writer,
            sink,
        ));
    }
}
