//! What the receiver sees of KCP: caches of the custom resources and access Secrets, and who wakes when one changes.
//!
//! `follow` keeps one cache and tells of each change, `essence` says what of an object matters, `concern` says whom a
//! change concerns, `wakes` acts on it, `placing` keeps who is placed. Our own status writes move no essence, so they wake nobody.

mod concern;
mod essence;
mod owners;
mod placing;
mod settle;
mod wakes;
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

pub use wakes::Rooms;

use crate::{
    base::{pause::CONFIG_MAP, stores::Stores},
    ingress::enrolment,
    kube::{Metrics, follow, record::Record},
    telemetry::Readiness,
};

/// The writing ends of [`Stores`], each for exactly one watch.
pub struct Writers {
    kymas: Writer<Kyma>,
    templates: Writer<ModuleTemplate>,
    release_metas: Writer<ModuleReleaseMeta>,
    manifests: Writer<Manifest>,
    watchers: Writer<Watcher>,
    secrets: Writer<Secret>,
}

/// Makes empty caches and the ends that fill them.
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

/// What the watches of KCP need to start.
pub struct Follow {
    /// Client of KCP.
    pub client: Client,
    /// Namespace of everything.
    pub namespace: String,
    /// Whom changes wake.
    pub rooms: Rooms,
    /// Counts what cannot be read; [`Rooms::record`] tells of it.
    pub metrics: Metrics,
}

impl Follow {
    /// Starts one watch per kind and the upkeep of Watchers. Each runs until the set is dropped; each holds a readiness guard until it
    /// has listed. `synced` is cancelled when all have.
    pub fn start(
        self,
        writers: Writers,
        readiness: &Readiness,
        synced: CancellationToken,
        tasks: &mut JoinSet<&'static str>,
    ) {
        let Self { client, namespace, rooms, metrics } = self;
        let record = rooms.record.clone();
        let place = Place { client: client.clone(), namespace: namespace.clone(), metrics, record };
        let settle = Arc::new(settle::Settle::default());
        let wakes = wakes::Wakes::new(rooms.clone(), settle.clone(), Arc::new(Notify::new()));
        let whole = synced.clone();
        let gate = follow::Gate::new(readiness, {
            let hub = rooms.hub.clone();
            move || {
                hub.set_synced();
                synced.cancel();
            }
        });
        let Writers { kymas, templates, release_metas, manifests, watchers, secrets } = writers;
        let everything = watcher::Config::default();
        // Whether all are paused must be known before anything is worked on.
        let pausing = everything.clone().fields(&format!("metadata.name={CONFIG_MAP}"));
        let maps = Writer::<ConfigMap>::default();
        place.follow("configmaps", maps, pausing, gate.guard("configmaps"), wakes.pause(), tasks);
        // Before anybody is served, it is known who is revoked.
        let revoked = everything.clone().fields(&format!("metadata.name={}", enrolment::CONFIG_MAP));
        let maps = Writer::<ConfigMap>::default();
        place.follow("revocations", maps, revoked, gate.guard("revocations"), wakes.revocations(), tasks);
        // Before anything is compared, it is known what was accepted.
        let releases = everything.clone().fields(&format!("metadata.name={RELEASES}"));
        let maps = Writer::<ConfigMap>::default();
        place.follow("releases", maps, releases, gate.guard("releases"), wakes.releases(), tasks);
        // Watchers and Secrets first: a Kyma that is placed finds its plan and its access.
        place.follow("watchers", watchers, everything.clone(), gate.guard("watchers"), wakes.watchers(), tasks);
        let labelled = everything.clone().labels(label::KYMA_NAME);
        place.follow("secrets", secrets, labelled, gate.guard("secrets"), wakes.secrets(), tasks);
        place.follow(
            "moduletemplates",
            templates,
            everything.clone(),
            gate.guard("moduletemplates"),
            wakes.templates(),
            tasks,
        );
        let guard = gate.guard("modulereleasemetas");
        place.follow("modulereleasemetas", release_metas, everything.clone(), guard, wakes.release_metas(), tasks);
        place.follow("manifests", manifests, everything.clone(), gate.guard("manifests"), wakes.manifests(), tasks);
        let selected = everything.labels(&rooms.takeover.query());
        place.follow("kymas", kymas, selected, gate.guard("kymas"), wakes.kymas(), tasks);
        let planned = gate.guard("plan");
        let of = (rooms.clone(), wakes.placing());
        tasks.spawn(watchers::run(client.clone(), namespace.clone(), of, wakes.watchers_changed(), planned));
        tasks.spawn(async move { settle.run(&rooms, (&client, &namespace), whole).await });
    }
}

struct Place {
    client: Client,
    namespace: String,
    metrics: Metrics,
    record: Record,
}

impl Place {
    fn follow<K>(
        &self,
        kind: &'static str,
        writer: Writer<K>,
        config: watcher::Config,
        gate: follow::Guard,
        sink: impl FnMut(follow::Change<'_, K>) + Send + 'static,
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
        tasks.spawn(follow::follow(
            follow::Watch { kind, api, config, gate, metrics: self.metrics.clone(), record: self.record.clone() },
            writer,
            sink,
        ));
    }
}
