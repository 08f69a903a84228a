//! Hand-over of shards: registers the Kymas and Manifests of a shard that is acquired, and drops the state of one that is
//! released.

use futures::{FutureExt as _, future::BoxFuture};
use tidewatch_api::{identity::Instance, key::KymaKey, shard::ShardId};
use tidewatch_cluster::leader::WriteFence;
use tidewatch_fleet::{manifest_queue::ManifestQueue, stores::manifests::Manifests};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{bodies::CacheBodies, components::Components, manifests, placer::KymaPlacer};

/// Acquires and releases shards. Clones share the state of the components.
#[derive(Clone)]
pub struct ShardHandover {
    pub(super) components: Components,
    pub(super) placer: KymaPlacer,
    /// Bodies of the cached objects: those of other replicas' shards are reduced.
    pub(super) bodies: CacheBodies,
    /// Cancelled when the caches are synced.
    pub(super) synced: CancellationToken,
}

impl ShardHandover {
    /// Waits until the caches have synced and have the whole objects of a shard, which they keep from now on until its release.
    pub fn prepare(&self, shard: ShardId) -> BoxFuture<'static, ()> {
        let synced = self.synced.clone();
        let bodies = self.bodies.clone();
        bodies.keep(shard);
        async move {
            synced.cancelled().await;
            bodies.are_complete(shard).await;
        }
        .boxed()
    }

    /// Drops the bodies of objects in the shards of other replicas from now on.
    pub(crate) fn reduce_others(&self) {
        self.bodies.reduce_others();
    }

    /// Begins to serve a shard that is prepared, once the caches have synced: places its Kymas, registers their Manifests, and accepts
    /// requests of its runtimes. Enqueues the Manifests that the holder before left unfinished; returns the Kymas, which may have
    /// changed while no replica served them.
    pub async fn acquire(&self, shard: ShardId, instance: Instance, fence: &WriteFence) -> Vec<KymaKey> {
        let Components { stores, fleet, manifest_queue: queue, recorder, .. } = &self.components;
        self.synced.cancelled().await;
        // Before the watch finds the shard held: Events report what changes from now on.
        for kyma in self.placer.of_shard(shard).iter().filter_map(|kyma| kyma.whole()) {
            recorder.initial_kyma(&KymaKey::of(kyma.as_ref()), kyma);
        }
        fleet.acquire(shard, instance, fence, Instant::now());
        // Before requests are accepted: a report of changes in the objects of an unknown Manifest settles them.
        for kyma in self.placer.of_shard(shard) {
            register(queue, &stores.manifests, &kyma.key());
        }
        let placed = self.placer.place_shard(shard);
        for kyma in &placed {
            manifests::enqueue_unfinished(queue, &stores.manifests, kyma);
        }
        placed
    }

    /// Waits until no reconcile of the shard's Kymas and Manifests is in progress; no other one begins.
    pub async fn drain(&self, shard: ShardId) {
        self.components.fleet.drain(shard).await;
    }

    /// Ends the service of a shard. When this returns, no reconcile of its Kymas and Manifests writes any more; their work is
    /// dropped, and so are the results of earlier reconciles: another replica writes from now on. Returns the Kymas.
    pub fn release(&self, shard: ShardId) -> Vec<KymaKey> {
        let Components { stores, fleet, manifest_queue, manifest_memories, catalog, kinds, recorder, .. } =
            &self.components;
        let released = fleet.release(shard);
        manifest_queue.remove_kymas(&released);
        for kyma in &released {
            for manifest in stores.manifests.find_of_kyma(kyma, None) {
                manifest_memories.forget(&manifest.key());
            }
            stores.manifests.forget_writes(kyma);
            catalog.forget(kyma);
            kinds.forget(kyma);
            recorder.forget_kyma(kyma);
        }
        self.bodies.release(shard);
        released
    }
}

/// Registers the Manifests of a Kyma in their queue.
pub(super) fn register(queue: &ManifestQueue, manifests: &Manifests, kyma: &KymaKey) {
    for manifest in manifests.find_of_kyma(kyma, None) {
        queue.insert(manifest.key(), kyma.clone());
    }
}

#[cfg(test)]
pub(in crate::app) mod tests {
    use std::sync::Arc;

    use serde_json::json;
    use tidewatch_api::{Kyma, Manifest, key::Key, names::label, shard::ShardCount};
    use tidewatch_fleet::{
        queue::{Priority, ReconcileOutcome, WorkSet},
        stores::{kymas::CachedKyma, manifests::CachedManifest},
        table::{self, PlacementError, RuntimeTable},
        takeover::Takeover,
    };
    use tidewatch_kit::metrics::Registry;

    use super::*;
    use crate::app::changes::{
        Writers,
        bodies::{Bodies, KymaCache, ManifestCache, SecretCache},
        owners::SecretOwners,
        stores,
    };

    fn key<K>(name: &str) -> Key<K> {
        Key::new("ns", name)
    }

    fn kyma(name: &str) -> Kyma {
        let condition = json!({"type": "EventPath", "status": "False", "reason": "StaleCanary", "message": "words",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": name, "namespace": "ns", "uid": name, "labels": {label::RUNTIME_ID: name}},
            "spec": {"channel": "regular"}, "status": {"state": "Ready", "conditions": [condition]}}))
        .unwrap()
    }

    fn manifest(kyma: &str) -> Manifest {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": format!("{kyma}-m"), "namespace": "ns", "labels": {label::KYMA_NAME: kyma}},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}, "status": {"state": "Ready"}}))
        .unwrap()
    }

    /// Two Kymas with a Manifest each, in different shards of a table that holds none.
    pub(in crate::app) struct Fixture {
        pub(in crate::app) fleet: RuntimeTable,
        queue: ManifestQueue,
        pub(in crate::app) handover: ShardHandover,
        pub(in crate::app) synced: CancellationToken,
        /// Name of the Kyma that is not `a`.
        other: String,
        pub(in crate::app) mine: ShardId,
        pub(in crate::app) theirs: ShardId,
    }

    impl Fixture {
        pub(in crate::app) fn new() -> Self {
            let shards = ShardCount::new(8).unwrap();
            let shard = |name: &str| shards.of_runtime(&name.parse().unwrap());
            let other = (0..).map(|n| format!("b-{n}")).find(|name| shard(name) != shard("a")).unwrap();
            let metrics = table::Metrics::register(&mut Registry::default());
            let fleet = RuntimeTable::new(shards, table::Settings::default(), metrics);
            let metrics = tidewatch_fleet::manifest_queue::Metrics::register(&mut Registry::default());
            let queue =
                ManifestQueue::new(tidewatch_fleet::manifest_queue::Settings::default(), metrics, fleet.tenures());
            let (stores, writers) = stores();
            let Writers { kymas: mut writer, manifests: mut manifest_writer, secrets, .. } = writers;
            let kymas = stores.kymas.clone();
            let manifests = stores.manifests.clone();
            for name in ["a", &other] {
                writer.apply_watcher_event(&kube::runtime::watcher::Event::Apply(CachedKyma::from(kyma(name))));
                let manifest = CachedManifest::from(manifest(name));
                manifest_writer.apply_watcher_event(&kube::runtime::watcher::Event::Apply(manifest.clone()));
                manifests.apply(&manifest);
            }
            let components = Components::around(stores, fleet.clone(), queue.clone(), Takeover::default());
            let owners = Arc::new(SecretOwners::from(secrets.as_reader()));
            let metrics = || tidewatch_cluster::Metrics::register(&mut Registry::default());
            let kyma_cache = Arc::new(KymaCache::from(kymas.clone()));
            let manifest_cache = Arc::new(ManifestCache::from(manifests));
            let secret_cache = Arc::new(SecretCache::new(owners, components.access.clone(), |_| ()));
            let bodies = CacheBodies {
                kymas: Bodies::new(kyma_cache, writer.into(), kymas.clone(), shards, metrics()),
                manifests: Bodies::new(manifest_cache, manifest_writer.into(), kymas.clone(), shards, metrics()),
                secrets: Bodies::new(secret_cache, secrets.into(), kymas.clone(), shards, metrics()),
            };
            let placer = KymaPlacer::new(fleet.clone(), components.plans.clone(), kymas);
            let synced = CancellationToken::new();
            let handover = ShardHandover { components, placer, bodies, synced: synced.clone() };
            let mine = shard("a");
            let theirs = shard(&other);
            Self { fleet, queue, handover, synced, other, mine, theirs }
        }

        fn enqueue(&self) {
            for name in ["a", &self.other] {
                self.fleet.enqueue(&key(name), WorkSet::RUNTIME, Priority::User);
                self.queue.enqueue(&key(&format!("{name}-m")), Priority::User, false);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn drain_waits_for_work_in_progress_and_lets_no_other_begin() {
        let fixture = Fixture::new();
        let Fixture { fleet, queue, handover, mine, theirs, .. } = &fixture;
        fixture.synced.cancel();
        for shard in [mine, theirs] {
            handover.acquire(*shard, Instance::new(1), &WriteFence::default()).await;
        }
        fixture.enqueue();
        let mut jobs = vec![fleet.next().await, fleet.next().await];
        let mut modules = vec![queue.next().await, queue.next().await];
        jobs.sort_by_key(|job| job.key != key("a"));
        modules.sort_by_key(|job| job.kyma != key("a"));
        let mut drain = Box::pin(handover.drain(*mine));
        assert!(drain.as_mut().now_or_never().is_none());
        // Those of the other shard go on.
        fixture.enqueue();
        fleet.done(jobs.pop().unwrap(), ReconcileOutcome::ended(WorkSet::RUNTIME));
        queue.done(modules.pop().unwrap(), ReconcileOutcome::ended(WorkSet::MANIFEST));
        assert_eq!((&fleet.next().await.key, &queue.next().await.kyma), (&key(&fixture.other), &key(&fixture.other)));
        assert!(drain.as_mut().now_or_never().is_none());

        let fence = jobs[0].start.tenure.fence.clone();
        fleet.done(jobs.pop().unwrap(), ReconcileOutcome::ended(WorkSet::RUNTIME));
        assert!(drain.as_mut().now_or_never().is_none(), "a Manifest is in progress");
        assert!(fleet.next().now_or_never().is_none(), "its next work is that of the next holder");
        queue.done(modules.pop().unwrap(), ReconcileOutcome::ended(WorkSet::MANIFEST));
        assert!(queue.next().now_or_never().is_none());
        assert!(drain.as_mut().now_or_never().is_some());
        assert!(fence.is_open(), "until the release");
        handover.release(*mine);
        assert!(!fence.is_open());
        assert!(handover.drain(*mine).now_or_never().is_some(), "not held");
    }

    #[tokio::test(start_paused = true)]
    async fn released_shard_is_left_and_acquired_again_from_the_caches() {
        let fixture = Fixture::new();
        let Fixture { fleet, queue, handover, synced, other, .. } = &fixture;
        let mine = fixture.mine;
        let theirs = fixture.theirs;
        let fence = WriteFence::default();
        assert!(handover.acquire(mine, Instance::new(1), &fence).now_or_never().is_none(), "the caches are empty");
        synced.cancel();
        assert_eq!(handover.acquire(mine, Instance::new(1), &fence).await, [key("a")]);
        assert_eq!(handover.acquire(theirs, Instance::new(1), &fence).await, [key(other)]);
        assert!(fleet.has_used_v3(&"a".parse().unwrap()), "inherited from the condition");

        fixture.enqueue();
        let jobs = [fleet.next().await, fleet.next().await];
        let modules = [queue.next().await, queue.next().await];
        handover.release(mine);
        for (job, is_released) in jobs.iter().map(|job| (job, job.key == key("a"))) {
            assert_eq!(
                (job.start.tenure.fence.is_open(), job.start.cancellation.is_cancelled()),
                (!is_released, is_released)
            );
        }
        for (job, is_released) in modules.iter().map(|job| (job, job.kyma == key("a"))) {
            assert_eq!((job.tenure.fence.is_open(), job.cancellation.is_cancelled()), (!is_released, is_released));
        }
        jobs.into_iter().for_each(|job| fleet.done(job, ReconcileOutcome::ended(WorkSet::RUNTIME)));
        modules.into_iter().for_each(|job| queue.done(job, ReconcileOutcome::ended(WorkSet::MANIFEST)));
        fixture.enqueue();
        assert_eq!((&fleet.next().await.key, &queue.next().await.kyma), (&key(other), &key(other)));
        assert!(fleet.next().now_or_never().is_none() && queue.next().now_or_never().is_none());
        assert_eq!(fleet.kyma_of(&"a".parse().unwrap()), Err(PlacementError::Elsewhere));

        handover.acquire(mine, Instance::new(2), &fence).await;
        fixture.enqueue();
        let job = fleet.next().await;
        let module = queue.next().await;
        assert_eq!((&job.key, &module.kyma), (&key("a"), &key("a")));
        assert!(job.start.tenure.fence.is_open() && module.tenure.fence.is_open());
    }
}
