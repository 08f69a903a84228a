//! Placement of Kymas and their plan in the runtime table. The tasks of Kymas and of Watchers run concurrently, so this
//! serializes them: otherwise a Kyma could be placed in a state from before its change or deletion, or with a previous
//! plan.

use std::sync::Arc;

use kube::runtime::reflector::Store;
use parking_lot::Mutex;
use tidewatch_api::{
    facts::KymaFacts,
    key::KymaKey,
    plan::{Plan, Work},
    shard::ShardId,
};
use tidewatch_fleet::{
    plans::Plans,
    queue::{Priority, WorkSet},
    stores::kymas::{self, CachedKyma},
    table::RuntimeTable,
};
use tidewatch_modules::manifest::Memories;

/// See the module documentation. Clones share the lock.
#[derive(Clone)]
pub(super) struct KymaPlacer {
    fleet: RuntimeTable,
    plans: Plans,
    /// The watch of Kymas updates this cache before it calls [`KymaPlacer::place`] or [`KymaPlacer::remove`].
    kymas: Store<CachedKyma>,
    lock: Arc<Mutex<()>>,
}

/// Runtimes per second that get a changed plan. Waiting changes of users go first in any case.
const PLANS_PER_SECOND: u32 = 200;

impl KymaPlacer {
    pub(super) fn new(fleet: RuntimeTable, plans: Plans, kymas: Store<CachedKyma>) -> Self {
        Self { fleet, plans, kymas, lock: Arc::default() }
    }

    /// Places a new or changed Kyma.
    pub(super) fn place<'a>(&self, key: KymaKey, kyma: impl Into<KymaFacts<'a>>) {
        let _lock = self.lock.lock();
        self.place_locked(key, kyma.into());
    }

    /// Removes a deleted or deselected Kyma.
    pub(super) fn remove(&self, key: &KymaKey) {
        let _lock = self.lock.lock();
        self.fleet.remove(key);
    }

    /// Replaces the base plan of all runtimes and enqueues them; an equal plan changes nothing.
    pub(super) fn replan(&self, plan: Plan) {
        let _lock = self.lock.lock();
        if *self.plans.base() == plan {
            return;
        }
        self.plans.set_base(plan);
        // A Kyma that changes during this loop is in the cache already, or its event waits for the lock and is placed
        // afterwards.
        let mut keys = Vec::new();
        for kyma in self.kymas.state() {
            let key = kyma.key();
            self.place_locked(key.clone(), kyma.facts());
            keys.push(key);
        }
        self.fleet.enqueue_paced(keys, WorkSet::of(&[Work::Kyma]), PLANS_PER_SECOND);
    }

    /// Replaces the plan of one runtime after a change of its Manifests, and enqueues it; an equal plan changes nothing.
    pub(super) fn replan_runtime(&self, key: &KymaKey) {
        let _lock = self.lock.lock();
        if self.fleet.has_plan(key, &self.plans.of(key)) != Some(false) {
            return;
        }
        let Some(kyma) = kymas::find(&self.kymas, key) else { return };
        self.place_locked(key.clone(), kyma.facts());
        self.fleet.enqueue(key, WorkSet::of(&[Work::Kyma]), Priority::Catalog);
    }

    /// Places the Kymas of a shard that was acquired, continues their paths from their conditions, and returns them. From now
    /// on other runtimes of the shard are unknown.
    pub(super) fn place_shard(&self, shard: ShardId) -> Vec<KymaKey> {
        let _lock = self.lock.lock();
        let mut placed = Vec::new();
        for kyma in self.of_shard(shard) {
            let key = kyma.key();
            self.place_locked(key.clone(), kyma.facts());
            inherit(&self.fleet, &key, &kyma);
            placed.push(key);
        }
        self.fleet.set_shard_synced(shard);
        placed
    }

    /// Kymas of a shard in the cache.
    pub(super) fn of_shard(&self, shard: ShardId) -> Vec<Arc<CachedKyma>> {
        let shard_of = |kyma: KymaFacts<'_>| self.fleet.shard_of(kyma.runtime().as_ref(), kyma.uid());
        let mut kymas = self.kymas.state();
        kymas.retain(|kyma| shard_of(kyma.facts()) == shard);
        kymas
    }

    /// Places all Kymas again, with the plans that follow from the first list of Manifests.
    pub(super) fn place_all(&self) {
        let _lock = self.lock.lock();
        for kyma in self.kymas.state() {
            self.place_locked(kyma.key(), kyma.facts());
        }
    }

    fn place_locked(&self, key: KymaKey, kyma: KymaFacts<'_>) {
        let plan = self.plans.of(&key);
        self.fleet.place(key, kyma.uid(), kyma.runtime(), plan);
    }
}

/// Continues the path of a Kyma from the condition that the holder of its shard before wrote. A reduced one has none.
pub(super) fn inherit(fleet: &RuntimeTable, key: &KymaKey, kyma: &CachedKyma) {
    let path = kyma.whole().and_then(|kyma| kyma.status.as_ref()?.condition("EventPath"));
    path.into_iter().for_each(|path| fleet.inherit(key, &path.reason, &path.message));
}

/// Replaces the plans of runtimes in which other pods are to be watched. Runs for ever.
pub(super) async fn follow(placer: KymaPlacer, memories: Memories) -> &'static str {
    loop {
        let kyma = memories.next_replanned().await;
        placer.replan_runtime(&kyma);
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use futures::FutureExt as _;
    use kube::runtime::{reflector::store::Writer, watcher::Event};
    use serde_json::json;
    use tidewatch_api::{
        Kyma,
        identity::{Epoch, RuntimeId},
        names::label,
    };
    use tidewatch_fleet::{
        EventBatch, Verified,
        table::{self, PlacementError},
    };
    use tidewatch_kit::metrics::Registry;

    use super::*;

    const KYMAS: usize = 400;
    const ROUNDS: usize = 40;

    fn kyma(n: usize, runtime: &str) -> Kyma {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": format!("kyma-{n}"), "namespace": "kcp-system", "labels": {label::RUNTIME_ID: runtime}},
            "spec": {"channel": "regular"}}))
        .unwrap()
    }

    fn plan(revision: usize) -> Plan {
        let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["kyma"]});
        Plan::parse(&json!({"revision": revision.to_string(), "watches": [watch]}).to_string()).unwrap()
    }

    /// Returns an error unless the table has a Kyma for the runtime's events.
    fn accepts_events(fleet: &RuntimeTable, runtime: &str) -> Result<(), PlacementError> {
        let runtime: RuntimeId = runtime.parse().unwrap();
        let batch = EventBatch { events: Vec::new(), traceparent: None };
        fleet.events(Verified::unchecked(&runtime, Epoch::new(1), 1, batch), 1).map(drop)
    }

    #[test]
    fn concurrent_plan_change_neither_restores_nor_reverts_a_kyma() {
        let counters = table::Metrics::register(&mut Registry::default());
        let fleet = RuntimeTable::alone(1, table::Settings::default(), counters);
        fleet.set_synced();
        let mut writer = Writer::<CachedKyma>::default();
        let current = Plans::fixed(plan(0));
        let placer = KymaPlacer::new(fleet.clone(), current, writer.as_reader());
        for round in 0..ROUNDS {
            // As the watch does: first the cache, then the handler.
            let here = format!("here-{round}");
            let there = format!("there-{round}");
            let known: Vec<_> =
                (0..KYMAS).map(|n| kyma(n, &format!("r-{round}-{n}"))).chain([kyma(KYMAS, &here)]).collect();
            for kyma in &known {
                writer.apply_watcher_event(&Event::Apply(kyma.clone().into()));
                placer.place(KymaKey::of(kyma), kyma);
            }
            let gone = &known[KYMAS / 2];
            let moved = kyma(KYMAS, &there);
            let together = Barrier::new(2);
            thread::scope(|scope| {
                scope.spawn(|| {
                    together.wait();
                    placer.replan(plan(round + 1));
                });
                together.wait();
                writer.apply_watcher_event(&Event::Delete(gone.clone().into()));
                placer.remove(&KymaKey::of(gone));
                writer.apply_watcher_event(&Event::Apply(moved.clone().into()));
                placer.place(KymaKey::of(&moved), &moved);
            });
            assert_eq!(
                accepts_events(&fleet, &format!("r-{round}-{}", KYMAS / 2)),
                Err(PlacementError::Unknown),
                "round {round}"
            );
            assert_eq!(accepts_events(&fleet, &here), Err(PlacementError::Unknown), "round {round}");
            assert_eq!(accepts_events(&fleet, &there), Ok(()), "round {round}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn runtime_with_another_plan_is_placed_and_enqueued_once() {
        let (store, mut writer) = kube::runtime::reflector::store();
        let kyma = kyma(0, "r-0");
        writer.apply_watcher_event(&Event::Apply(kyma.clone().into()));
        let more = Arc::new(Mutex::new(Vec::new()));
        let additional = more.clone();
        let plans =
            Plans::new(plan(0), Box::new(move |_| additional.lock().clone()), tidewatch_installer::watcher::extend);
        let metrics = table::Metrics::register(&mut Registry::default());
        let fleet = RuntimeTable::alone(1, table::Settings::default(), metrics);
        let placer = KymaPlacer::new(fleet.clone(), plans.clone(), store);
        let key = KymaKey::of(&kyma);
        placer.replan_runtime(&key);
        assert_eq!(fleet.has_plan(&key, &plans.of(&key)), None, "not placed yet");
        placer.place(key.clone(), &kyma);
        placer.replan_runtime(&key);
        let next = async || fleet.next().now_or_never().map(|job| job.queued.work);
        assert_eq!(next().await, None);

        let watch = json!({"name": "more", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["manifest"]});
        more.lock().push(serde_json::from_value(watch).unwrap());
        placer.replan_runtime(&key);
        assert_eq!(fleet.has_plan(&key, &plans.of(&key)), Some(true));
        assert_eq!(next().await, Some(WorkSet::of(&[Work::Kyma])));
    }
}
