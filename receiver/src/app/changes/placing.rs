//! Who is placed, with which plan. Kymas and Watchers are followed by tasks of their own, and both come here: one at a time, so that no
//! Kyma is placed as it was before it changed or went, nor with the plan that was before.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::{ResourceExt as _, runtime::reflector::Store};
use tidewatch_shared::{
    api::Kyma,
    names::label,
    plan::{Plan, Work},
};

use super::essence::key_of;
use crate::base::stores::CurrentPlan;
use crate::{
    base::key::KymaKey,
    fleet::{
        hub::Hub,
        queue::{Priority, Works},
    },
};

/// See the module. Clones share the turn.
#[derive(Clone)]
pub(super) struct Placing {
    hub: Hub,
    plan: CurrentPlan,
    /// It has what the watch of Kymas has seen before that is told here.
    kymas: Store<Kyma>,
    turn: Arc<Mutex<()>>,
}

impl Placing {
    pub(super) fn new(hub: Hub, plan: CurrentPlan, kymas: Store<Kyma>) -> Self {
        Self { hub, plan, kymas, turn: Arc::default() }
    }

    /// Places a Kyma that the watch has seen, new or changed.
    pub(super) fn place(&self, key: KymaKey, kyma: &Kyma) {
        let _turn = self.turn();
        self.place_in_turn(key, kyma);
    }

    /// Forgets a Kyma that the watch has seen go.
    pub(super) fn remove(&self, key: &KymaKey) {
        let _turn = self.turn();
        self.hub.remove(key);
    }

    /// Replaces the plan of all runtimes; an equal one changes nothing.
    pub(super) fn replan(&self, plan: Plan) {
        let _turn = self.turn();
        if *self.plan.load_full() == plan {
            return;
        }
        self.plan.store(Arc::new(plan));
        // What the watch tells after this is placed after this.
        for kyma in self.kymas.state() {
            let key = key_of(kyma.as_ref());
            self.place_in_turn(key.clone(), &kyma);
            self.hub.want(&key, Works::of(&[Work::Kyma]), Priority::Catalog);
        }
    }

    fn place_in_turn(&self, key: KymaKey, kyma: &Kyma) {
        let runtime = kyma.labels().get(label::RUNTIME_ID).and_then(|id| id.parse().ok());
        self.hub.place(key, runtime, self.plan.load_full());
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use arc_swap::ArcSwap;
    use kube::runtime::{reflector::store::Writer, watcher::Event};
    use serde_json::json;
    use tidewatch_shared::{
        identity::{Epoch, Instance, RuntimeId},
        metrics::Registry,
    };
    use tokio::time::Instant;

    use super::*;
    use crate::fleet::hub::{self, Unplaced};

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

    /// Whether events of a runtime find a Kyma.
    fn found(hub: &Hub, runtime: &str) -> Result<(), Unplaced> {
        let runtime: RuntimeId = runtime.parse().unwrap();
        hub.events(&runtime, Epoch::new(1), 1, Vec::new()).map(drop)
    }

    #[test]
    fn a_new_plan_brings_nobody_back_and_moves_nobody_back() {
        let counters = hub::Metrics::register(&mut Registry::default());
        let hub = Hub::new(Instance::new(1), hub::Settings::default(), counters, Instant::now());
        hub.set_synced();
        let mut writer = Writer::<Kyma>::default();
        let current = Arc::new(ArcSwap::from_pointee(plan(0)));
        let placing = Placing::new(hub.clone(), current, writer.as_reader());
        for round in 0..ROUNDS {
            // As the watch does: first the cache, then the sink.
            let (here, there) = (format!("here-{round}"), format!("there-{round}"));
            let known: Vec<_> =
                (0..KYMAS).map(|n| kyma(n, &format!("r-{round}-{n}"))).chain([kyma(KYMAS, &here)]).collect();
            for kyma in &known {
                writer.apply_watcher_event(&Event::Apply(kyma.clone()));
                placing.place(key_of(kyma), kyma);
            }
            let (gone, moved) = (&known[KYMAS / 2], kyma(KYMAS, &there));
            let together = Barrier::new(2);
            thread::scope(|scope| {
                scope.spawn(|| {
                    together.wait();
                    placing.replan(plan(round + 1));
                });
                together.wait();
                writer.apply_watcher_event(&Event::Delete(gone.clone()));
                placing.remove(&key_of(gone));
                writer.apply_watcher_event(&Event::Apply(moved.clone()));
                placing.place(key_of(&moved), &moved);
            });
            assert_eq!(found(&hub, &format!("r-{round}-{}", KYMAS / 2)), Err(Unplaced::Unknown), "round {round}");
            assert_eq!(found(&hub, &here), Err(Unplaced::Unknown), "round {round}");
            assert_eq!(found(&hub, &there), Ok(()), "round {round}");
        }
    }
}
