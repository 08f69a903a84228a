//! One sink per kind: keeps the other rooms' indexes current and wakes whom a change concerns.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::ResourceExt;
use tidewatch_shared::{
    api::{Kyma, Manifest, ModuleReleaseMeta, ModuleTemplate, Watcher},
    names::label,
    plan::{PlannedWatch, Work},
};
use tokio::{sync::Notify, time::Instant};

use super::{
    concern::{self, Concerned, Follower},
    essence::{Decided, Essences, Moved, Release, key_of},
    owners::Owners,
    placing::Placing,
    settle::Settle,
};
use crate::{
    base::{
        key::KymaKey,
        pause::Pause,
        stores::{CurrentPlan, Stores},
        takeover::Takeover,
    },
    controllers::catalog::{Catalog, Renewed},
    fleet::{
        hub::Hub,
        queue::{Priority, Works},
    },
    ingress::{enrolment::Revocations, gateway::v2},
    kube::{follow::Change, record::Record, runtime_access::RuntimeAccess},
};

/// The rooms that changes of KCP reach.
#[derive(Clone)]
pub struct Rooms {
    /// Caches of KCP.
    pub stores: Stores,
    /// Who is placed, and who is wanted.
    pub hub: Hub,
    /// Clients of the runtimes.
    pub access: RuntimeAccess,
    /// Catalogs per visibility class.
    pub catalog: Catalog,
    /// The plan of all runtimes.
    pub plan: CurrentPlan,
    /// What a plan has besides, where agents are installed.
    pub installed: Arc<[PlannedWatch]>,
    /// Whose runtimes are left alone.
    pub pause: Pause,
    /// Whose Kymas are ours, and since when.
    pub takeover: Takeover,
    /// Runtimes that may speak v2 again.
    pub allowed: v2::Allowed,
    /// Whose certificates hold no longer.
    pub revocations: Revocations,
    /// Tells operators what becomes of Kymas and Watchers.
    pub record: Record,
}

/// Makes the sinks.
pub(super) struct Wakes {
    rooms: Rooms,
    settle: Arc<Settle>,
    watchers_changed: Arc<Notify>,
    owners: Arc<Owners>,
    placing: Placing,
}

impl Wakes {
    pub(super) fn new(rooms: Rooms, settle: Arc<Settle>, watchers_changed: Arc<Notify>) -> Self {
        let placing = Placing::new(rooms.hub.clone(), rooms.plan.clone(), rooms.stores.kymas.clone());
        Self { rooms, settle, watchers_changed, owners: Arc::default(), placing }
    }

    /// For whoever makes the plan.
    pub(super) fn placing(&self) -> Placing {
        self.placing.clone()
    }

    /// The ConfigMap that pauses all. The end of a pause wakes at once who waited for it.
    pub(super) fn pause(&self) -> impl FnMut(Change<'_, ConfigMap>) + Send + 'static + use<> {
        let rooms = self.rooms.clone();
        move |change| {
            let map = match change {
                Change::Found(map) | Change::Applied(map) => Some(map),
                Change::Deleted(_) => None,
                Change::Listed => return,
            };
            if rooms.pause.set(map) {
                rooms.hub.unpause();
            }
        }
    }

    /// The ConfigMap of releases. A confirmation is acted on at once.
    pub(super) fn releases(&self) -> impl FnMut(Change<'_, ConfigMap>) + Send + 'static + use<> {
        let (catalog, settle) = (self.rooms.catalog.clone(), self.settle.clone());
        move |change| {
            let map = match change {
                Change::Found(map) | Change::Applied(map) => Some(map),
                Change::Deleted(_) => None,
                Change::Listed => return,
            };
            // One that was deleted is written again.
            if catalog.take_releases(map) || map.is_none() {
                settle.moved(Concerned::default());
            }
        }
    }

    /// The list of revocations.
    pub(super) fn revocations(&self) -> impl FnMut(Change<'_, ConfigMap>) + Send + 'static + use<> {
        let revocations = self.rooms.revocations.clone();
        move |change| match change {
            Change::Found(map) | Change::Applied(map) => revocations.set(Some(map)),
            Change::Deleted(_) => revocations.set(None),
            Change::Listed => {}
        }
    }

    /// Told when a Watcher changed.
    pub(super) fn watchers_changed(&self) -> Arc<Notify> {
        self.watchers_changed.clone()
    }

    pub(super) fn kymas(&self) -> impl FnMut(Change<'_, Kyma>) + Send + 'static + use<> {
        let (rooms, owners, placing) = (self.rooms.clone(), self.owners.clone(), self.placing.clone());
        let mut essences = Essences::new();
        move |change| {
            let found = matches!(change, Change::Found(_));
            // Before anything else: statuses are what operators look at, and they wake nobody.
            match change {
                Change::Found(kyma) => rooms.record.found_kyma(&key_of(kyma), kyma),
                Change::Applied(kyma) => rooms.record.kyma(&key_of(kyma), kyma),
                Change::Deleted(kyma) => rooms.record.lost_kyma(&key_of(kyma), kyma),
                Change::Listed => {}
            }
            match change {
                Change::Found(kyma) | Change::Applied(kyma) => {
                    let (key, now) = (key_of(kyma), Decided::of(kyma));
                    let Some(moved) = essences.apply(key.clone(), now.clone()) else { return };
                    if moved == Moved::New {
                        rooms.takeover.entered(&key, kyma, found, Instant::now());
                    }
                    rooms.allowed.apply(&key, kyma);
                    placing.place(key.clone(), kyma);
                    if matches!(&moved, Moved::From(old) if now.labels_moved(old)) {
                        // Perhaps it was another runtime before, whose connections end.
                        rooms.revocations.moved();
                    }
                    if moved == Moved::New {
                        // Its Secrets may have come before it.
                        rooms.set_secrets(&key, &owners);
                    }
                    if found {
                        // It is nothing new, this process is: who goes first is said when all caches are whole.
                        let path = kyma.status.as_ref().and_then(|status| status.condition("EventPath"));
                        path.into_iter().for_each(|path| rooms.hub.inherit(&key, &path.reason, &path.message));
                        return;
                    }
                    let works = match concern::kyma(&now, &moved) {
                        concern::KymaMoved::Reconcile => Works::of(&[Work::Kyma]),
                        concern::KymaMoved::Everything => Works::of(&[Work::Kyma, Work::Catalog]),
                    };
                    rooms.hub.want(&key, works, Priority::User);
                }
                Change::Deleted(kyma) => {
                    let key = key_of(kyma);
                    essences.delete(&key);
                    placing.remove(&key);
                    rooms.takeover.left(&key);
                    rooms.revocations.moved();
                    rooms.allowed.remove(&key);
                    rooms.access.remove(&key);
                    rooms.catalog.forget(&key);
                }
                Change::Listed => {}
            }
        }
    }

    pub(super) fn templates(&self) -> impl FnMut(Change<'_, ModuleTemplate>) + Send + 'static + use<> {
        let (rooms, settle) = (self.rooms.clone(), self.settle.clone());
        let mut essences = Essences::new();
        move |change| {
            let template = match change {
                Change::Found(template) => {
                    essences.apply(key_of(template), Decided::of(template));
                    return;
                }
                Change::Applied(template) if essences.apply(key_of(template), Decided::of(template)).is_some() => {
                    template
                }
                Change::Deleted(template) if essences.delete(&key_of(template)).is_some() => template,
                _ => return,
            };
            let module = template.spec.module_name.clone().unwrap_or_default();
            rooms.catalog.moved(&module);
            settle.moved(concern::template(&rooms.stores.kymas.state(), &module, &template.name_any()));
        }
    }

    pub(super) fn release_metas(&self) -> impl FnMut(Change<'_, ModuleReleaseMeta>) + Send + 'static + use<> {
        let (rooms, settle) = (self.rooms.clone(), self.settle.clone());
        let mut essences = Essences::new();
        move |change| {
            let of = |meta| Release::of(meta, rooms.catalog.restricted_modules());
            let (meta, now, old) = match change {
                Change::Found(meta) => {
                    essences.apply(key_of(meta), of(meta));
                    return;
                }
                Change::Applied(meta) => match essences.apply(key_of(meta), of(meta)) {
                    Some(Moved::From(old)) => (meta, Some(of(meta)), Some(old)),
                    Some(Moved::New) => (meta, Some(of(meta)), None),
                    None => return,
                },
                Change::Deleted(meta) => (meta, None, essences.delete(&key_of(meta))),
                Change::Listed => return,
            };
            rooms.catalog.moved(&meta.name_any());
            let kymas = rooms.stores.kymas.state();
            settle.moved(concern::release(&kymas, &meta.name_any(), now.as_ref(), old.as_ref()));
        }
    }

    pub(super) fn manifests(&self) -> impl FnMut(Change<'_, Manifest>) + Send + 'static + use<> {
        let rooms = self.rooms.clone();
        let mut essences = Essences::new();
        move |change| {
            let manifest = match change {
                Change::Found(manifest) => {
                    essences.apply(key_of(manifest), manifest.resource_version());
                    return;
                }
                Change::Applied(manifest) => {
                    // Status is what a Kyma waits for, so here every version counts.
                    essences.apply(key_of(manifest), manifest.resource_version()).map(|_| manifest)
                }
                Change::Deleted(manifest) => essences.delete(&key_of(manifest)).map(|_| manifest),
                Change::Listed => None,
            };
            let Some(manifest) = manifest else { return };
            if let Some(kyma) = manifest.labels().get(label::KYMA_NAME) {
                let key = KymaKey::new(manifest.namespace().unwrap_or_default(), kyma);
                rooms.hub.want(&key, Works::of(&[Work::Kyma]), Priority::User);
            }
        }
    }

    pub(super) fn secrets(&self) -> impl FnMut(Change<'_, Secret>) + Send + 'static + use<> {
        let rooms = self.rooms.clone();
        let owners = self.owners.clone();
        move |change| {
            let found = matches!(change, Change::Found(_));
            let concerned = match change {
                Change::Found(secret) | Change::Applied(secret) => owners.apply(secret),
                Change::Deleted(secret) => owners.delete(secret),
                Change::Listed => return,
            };
            for kyma in concerned {
                if rooms.set_secrets(&kyma, &owners) && !found {
                    rooms.hub.want(&kyma, Works::of(&[Work::Kyma, Work::Catalog]), Priority::User);
                }
            }
        }
    }

    pub(super) fn watchers(&self) -> impl FnMut(Change<'_, Watcher>) + Send + 'static + use<> {
        let (changed, record) = (self.watchers_changed.clone(), self.rooms.record.clone());
        let mut essences = Essences::new();
        move |change| {
            match change {
                Change::Found(watcher) => record.found_watcher(&key_of(watcher), watcher),
                Change::Applied(watcher) => record.watcher(&key_of(watcher), watcher),
                Change::Deleted(watcher) => record.lost_watcher(&key_of(watcher)),
                Change::Listed => {}
            }
            let moved = match change {
                Change::Found(watcher) | Change::Applied(watcher) => {
                    essences.apply(key_of(watcher), Decided::of(watcher)).is_some()
                }
                Change::Deleted(watcher) => essences.delete(&key_of(watcher)).is_some(),
                Change::Listed => true,
            };
            if moved {
                changed.notify_one();
            }
        }
    }
}

impl Rooms {
    /// Templates or release metas moved, or a removal was confirmed: who uses them is reconciled, whoever shall see something else gets
    /// it, and who follows a channel that moved has time.
    /// `namespace` is that of KCP's catalog.
    pub(super) fn catalog_moved(&self, namespace: &str, renewed: &Renewed, mut concerned: Concerned) {
        let per_second = self.catalog.flags().catalog_sync_rate;
        self.record.publish(renewed.events(namespace));
        let kymas = self.stores.kymas.state();
        let seers = kymas.iter().filter(|kyma| renewed.concerns(kyma.labels()));
        let seers: Vec<_> = seers.map(|kyma| key_of(kyma.as_ref())).collect();
        self.catalog.metrics().woken(seers.len());
        self.hub.want_paced(seers, Works::of(&[Work::Catalog]), per_second);
        renewed.released.iter().for_each(|module| concerned.add(concern::released(&kymas, module)));
        let Concerned { users, followers } = concerned;
        self.hub.want_paced(users.into_iter().collect(), Works::of(&[Work::Kyma]), per_second);
        for Follower { key, uid, module, channel } in followers {
            self.hub.roll_out(&key, self.catalog.roll_out_delay(&uid, &module, &channel));
        }
    }

    /// Gives a Kyma its access Secrets as the cache has them, and tells whether that changed its access. A changed access replaces
    /// the client at once, and everything that was known about that runtime is read again.
    fn set_secrets(&self, key: &KymaKey, owners: &Owners) -> bool {
        // Kymas and Secrets are followed by tasks of their own, and both come here.
        let changed = self.access.follow_secrets(key, || owners.read(key, &self.stores.secrets));
        if changed {
            self.catalog.forget(key);
        }
        changed
    }
}
