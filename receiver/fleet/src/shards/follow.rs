//! Carries out the changes of the held shards: the order of acquisition, drain, release and acknowledgement is that of every
//! consumer.

use std::{collections::BTreeMap, mem};

use futures::{
    FutureExt as _, StreamExt as _,
    future::{self, BoxFuture},
    stream::FuturesUnordered,
};
use tidewatch_api::{identity::Instance, key::KymaKey, leases::Unit};
use tidewatch_cluster::leader::WriteFence;

use super::{ShardChange, ShardChanges};

/// Components that work for the held shards, and for the fleet role.
pub trait Consumer: Send {
    /// Prepares the work for a unit, without any of it. A release of the unit ends it.
    fn prepare(&mut self, _unit: Unit) -> BoxFuture<'static, ()> {
        future::ready(()).boxed()
    }

    /// Begins to work for a unit that is prepared, whose fence was opened. Returns the Kymas to enqueue.
    fn acquire(
        &mut self,
        unit: Unit,
        instance: Instance,
        fence: WriteFence,
    ) -> impl Future<Output = Vec<KymaKey>> + Send;

    /// Enqueues the Kymas of shards that were acquired one after the other.
    fn enqueue(&mut self, acquired: &[KymaKey]);

    /// Begins no work for a unit any more, and waits until the work in progress has ended, with the answers to all of its
    /// requests.
    fn drain(&self, unit: Unit) -> BoxFuture<'static, ()>;

    /// Ends all work for a unit: when this returns, none of it writes.
    fn release(&mut self, unit: Unit);
}

/// Runs until the elector has ended and every change is carried out.
pub async fn follow(changes: ShardChanges, consumer: impl Consumer) {
    let preparing = BTreeMap::new();
    let preparations = FuturesUnordered::new();
    let draining = BTreeMap::new();
    let drains = FuturesUnordered::new();
    Follower { consumer, changes, preparing, preparations, draining, drains }.run().await;
}

/// End of a preparation or a drain, for one acquisition of a unit.
type Ended = BoxFuture<'static, (Unit, Instance)>;

/// The acquisitions and hand-overs in progress.
struct Follower<C> {
    consumer: C,
    changes: ShardChanges,
    /// Units that are acquired once they are prepared, with instance and fence.
    preparing: BTreeMap<Unit, (Instance, WriteFence)>,
    preparations: FuturesUnordered<Ended>,
    /// Units that are handed over, by the instance of their acquisition.
    draining: BTreeMap<Unit, Instance>,
    drains: FuturesUnordered<Ended>,
}

impl<C: Consumer> Follower<C> {
    async fn run(mut self) {
        // Kymas of shards that were acquired one after the other are enqueued together.
        let mut acquired = Vec::new();
        loop {
            if !acquired.is_empty() {
                match self.changes.next().now_or_never() {
                    Some(Some(change)) => self.carry_out(change, &mut acquired).await,
                    Some(None) => return,
                    None => match self.preparations.next().now_or_never().flatten() {
                        Some((unit, instance)) => self.prepared(unit, instance, &mut acquired).await,
                        None => self.consumer.enqueue(&mem::take(&mut acquired)),
                    },
                }
                continue;
            }
            tokio::select! {
                change = self.changes.next() => match change {
                    Some(change) => self.carry_out(change, &mut acquired).await,
                    None => return,
                },
                Some((unit, instance)) = self.preparations.next() => {
                    self.prepared(unit, instance, &mut acquired).await;
                }
                Some((unit, instance)) = self.drains.next() => self.drained(unit, instance),
            }
        }
    }

    async fn carry_out(&mut self, change: ShardChange, acquired: &mut Vec<KymaKey>) {
        match change {
            ShardChange::Acquired { unit, instance, fence } => {
                self.preparing.insert(unit, (instance, fence));
                let mut prepare = self.consumer.prepare(unit).map(move |()| (unit, instance)).boxed();
                match prepare.as_mut().now_or_never() {
                    Some((unit, instance)) => self.prepared(unit, instance, acquired).await,
                    None => self.preparations.push(prepare),
                }
            }
            ShardChange::HandOver { unit, instance } => {
                if self.preparing.remove(&unit).is_some() {
                    // None of its work has begun.
                    self.consumer.release(unit);
                    self.changes.stopped(unit, instance);
                    return;
                }
                self.draining.insert(unit, instance);
                let mut drain = self.consumer.drain(unit).map(move |()| (unit, instance)).boxed();
                // It begins at once: later the unit may be that of a later acquisition.
                match drain.as_mut().now_or_never() {
                    Some((unit, instance)) => self.drained(unit, instance),
                    None => self.drains.push(drain),
                }
            }
            ShardChange::Lost { unit, .. } => {
                self.preparing.remove(&unit);
                self.draining.remove(&unit);
                self.consumer.release(unit);
            }
        }
    }

    /// Acquires a prepared unit, unless it was lost or handed over meanwhile.
    async fn prepared(&mut self, unit: Unit, instance: Instance, acquired: &mut Vec<KymaKey>) {
        if self.preparing.get(&unit).is_none_or(|(current, _)| *current != instance) {
            return;
        }
        if let Some((_, fence)) = self.preparing.remove(&unit) {
            acquired.extend(self.consumer.acquire(unit, instance, fence).await);
        }
    }

    /// Acknowledges the hand-over of a unit, unless it was lost meanwhile.
    fn drained(&mut self, unit: Unit, instance: Instance) {
        if self.draining.get(&unit) == Some(&instance) {
            self.draining.remove(&unit);
            self.consumer.release(unit);
            self.changes.stopped(unit, instance);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::{Mutex, MutexGuard};
    use tidewatch_api::shard::ShardCount;
    use tokio::sync::{oneshot, watch};

    use super::*;
    use crate::shards::changes::{HeldShard, HeldShards, Stopped};

    /// Runs with a drain of a unit, when it begins.
    type OnDrain = Box<dyn FnMut() + Send>;

    /// Records calls, in words.
    #[derive(Default)]
    struct Recorded {
        calls: Vec<String>,
        /// Ends of the drains, in the order of their beginnings.
        drains: Vec<oneshot::Sender<()>>,
        on_drain: Option<OnDrain>,
        /// Ends of the preparations of these units, in the order of their beginnings; others need none.
        slow: Vec<Unit>,
        preparations: Vec<oneshot::Sender<()>>,
    }

    /// Consumer with one Kyma in each shard. The test ends its drains.
    #[derive(Clone, Default)]
    struct Fake(Arc<Mutex<Recorded>>);

    impl Fake {
        fn recorded(&self) -> MutexGuard<'_, Recorded> {
            self.0.lock()
        }

        fn record(&self, call: String) {
            self.recorded().calls.push(call);
        }

        /// The calls since the last time.
        fn calls(&self) -> Vec<String> {
            mem::take(&mut self.recorded().calls)
        }
    }

    impl Consumer for Fake {
        fn prepare(&mut self, unit: Unit) -> BoxFuture<'static, ()> {
            let mut recorded = self.recorded();
            if !recorded.slow.contains(&unit) {
                return future::ready(()).boxed();
            }
            let (end, ended) = oneshot::channel();
            recorded.calls.push(format!("prepare {unit}"));
            recorded.preparations.push(end);
            ended.map(|_| ()).boxed()
        }

        async fn acquire(&mut self, unit: Unit, instance: Instance, fence: WriteFence) -> Vec<KymaKey> {
            self.record(format!("acquire {unit} {}{}", name(instance), if fence.is_open() { "" } else { ", closed" }));
            if unit == Unit::Fleet { Vec::new() } else { vec![KymaKey::new("ns", unit.to_string())] }
        }

        fn enqueue(&mut self, acquired: &[KymaKey]) {
            let names: Vec<_> = acquired.iter().map(|kyma| &*kyma.name).collect();
            self.record(format!("enqueue {}", names.join(", ")));
        }

        fn drain(&self, unit: Unit) -> BoxFuture<'static, ()> {
            let this = self.clone();
            let (end, ended) = oneshot::channel();
            if let Some(on_drain) = &mut self.recorded().on_drain {
                on_drain();
            }
            async move {
                this.record(format!("drain {unit}"));
                this.recorded().drains.push(end);
                let _ = ended.await;
            }
            .boxed()
        }

        fn release(&mut self, unit: Unit) {
            self.record(format!("release {unit}"));
        }
    }

    fn name(instance: Instance) -> &'static str {
        if instance == Instance::new(1) { "first" } else { "later" }
    }

    fn held(instance: u64) -> HeldShard {
        HeldShard { instance: Instance::new(instance), fence: WriteFence::default(), hand_over: false }
    }

    fn handed_over(instance: u64) -> HeldShard {
        HeldShard { hand_over: true, ..held(instance) }
    }

    struct Fixture {
        /// The two shards, and the fleet role.
        units: [Unit; 3],
        state: watch::Sender<HeldShards>,
        stopped: Arc<Stopped>,
        fake: Fake,
        follow: BoxFuture<'static, ()>,
    }

    impl Fixture {
        fn new() -> Self {
            let (state, receiver) = watch::channel(HeldShards::new());
            let stopped = Arc::<Stopped>::default();
            let fake = Fake::default();
            let follow = follow(ShardChanges::new(receiver, stopped.clone()), fake.clone()).boxed();
            let units: Vec<_> = Unit::all(ShardCount::new(2).unwrap()).collect();
            Self { units: units.try_into().unwrap(), state, stopped, fake, follow }
        }

        /// Holds these units; returns the calls that follow.
        fn hold<const N: usize>(&mut self, held: [(usize, HeldShard); N]) -> Vec<String> {
            let units = self.units;
            self.state.send_replace(held.into_iter().map(|(unit, held)| (units[unit], held)).collect());
            self.go_on()
        }

        /// Carries out the pending changes; returns the calls.
        fn go_on(&mut self) -> Vec<String> {
            assert!(self.follow.as_mut().now_or_never().is_none(), "the elector has not ended");
            self.fake.calls()
        }

        /// Ends the work that a drain waits for; returns the calls that follow.
        fn end_drain(&mut self, drain: usize) -> Vec<String> {
            let drain = self.fake.recorded().drains.remove(drain);
            // A drain that is not waited for any more has no receiver.
            let _ = drain.send(());
            self.go_on()
        }

        /// Makes the preparation of a unit slow.
        fn slow_down(&self, unit: usize) {
            self.fake.recorded().slow.push(self.units[unit]);
        }

        /// Ends the first preparation; returns the calls that follow.
        fn end_preparation(&mut self) -> Vec<String> {
            let preparation = self.fake.recorded().preparations.remove(0);
            let _ = preparation.send(());
            self.go_on()
        }

        fn acknowledged(&self) -> Vec<(Unit, Instance)> {
            self.stopped.take().into_iter().collect()
        }
    }

    #[test]
    fn shards_that_are_acquired_in_a_burst_are_enqueued_together() {
        let mut fixture = Fixture::new();
        let calls = fixture.hold([(0, held(1)), (1, held(1)), (2, held(1))]);
        let acquired = ["acquire shard 0 first", "acquire shard 1 first", "acquire fleet role first"];
        assert_eq!(
            (&calls[..3], &calls[3..]),
            (&acquired.map(str::to_owned)[..], &["enqueue shard 0, shard 1".to_owned()][..])
        );
        assert_eq!(
            fixture.hold([(0, held(1)), (1, held(2)), (2, held(1))]),
            ["release shard 1", "acquire shard 1 later", "enqueue shard 1"]
        );
        assert_eq!(fixture.go_on(), [""; 0], "once");
    }

    #[test]
    fn shard_is_acquired_once_it_is_prepared_and_delays_no_other_change() {
        let mut fixture = Fixture::new();
        fixture.slow_down(0);
        let calls = fixture.hold([(0, held(1)), (1, held(1))]);
        assert_eq!(calls, ["prepare shard 0", "acquire shard 1 first", "enqueue shard 1"]);
        assert_eq!(fixture.hold([(0, held(1))]), ["release shard 1"]);
        assert_eq!(fixture.end_preparation(), ["acquire shard 0 first", "enqueue shard 0"]);
        assert_eq!(fixture.go_on(), [""; 0], "once");
    }

    #[test]
    fn shards_that_are_prepared_together_are_enqueued_together() {
        let mut fixture = Fixture::new();
        fixture.slow_down(0);
        fixture.slow_down(1);
        fixture.hold([(0, held(1)), (1, held(1))]);
        let preparations = mem::take(&mut fixture.fake.recorded().preparations);
        preparations.into_iter().for_each(|preparation| preparation.send(()).unwrap());
        let mut calls = fixture.go_on();
        let last = calls.pop().unwrap();
        calls.sort();
        assert_eq!(calls, ["acquire shard 0 first", "acquire shard 1 first"]);
        assert!(["enqueue shard 0, shard 1", "enqueue shard 1, shard 0"].contains(&&*last), "{last}");
    }

    #[test]
    fn shard_that_is_lost_while_it_is_prepared_is_not_acquired() {
        let mut fixture = Fixture::new();
        fixture.slow_down(0);
        fixture.hold([(0, held(1))]);
        assert_eq!(fixture.hold([]), ["release shard 0"]);
        assert_eq!(fixture.hold([(0, held(2))]), ["prepare shard 0"]);
        assert_eq!(fixture.end_preparation(), [""; 0], "that of the earlier acquisition");
        assert_eq!(fixture.end_preparation(), ["acquire shard 0 later", "enqueue shard 0"]);
    }

    #[test]
    fn shard_that_is_handed_over_while_it_is_prepared_is_acknowledged_at_once() {
        let mut fixture = Fixture::new();
        fixture.slow_down(0);
        fixture.hold([(0, held(1))]);
        assert_eq!(fixture.hold([(0, handed_over(1))]), ["release shard 0"]);
        assert_eq!(fixture.acknowledged(), [(fixture.units[0], Instance::new(1))]);
        assert_eq!(fixture.end_preparation(), [""; 0]);
    }

    #[test]
    fn hand_over_is_acknowledged_when_its_work_has_ended_and_it_is_released() {
        for unit in 0..3 {
            let mut fixture = Fixture::new();
            fixture.hold([(unit, held(1))]);
            let name = fixture.units[unit];
            assert_eq!(fixture.hold([(unit, handed_over(1))]), [format!("drain {name}")]);
            assert_eq!(fixture.acknowledged(), [], "its work is in progress");
            assert_eq!(fixture.end_drain(0), [format!("release {name}")]);
            assert_eq!(fixture.acknowledged(), [(name, Instance::new(1))]);
        }
    }

    #[test]
    fn shard_that_is_lost_while_it_is_drained_is_not_acknowledged() {
        for unit in 0..3 {
            let mut fixture = Fixture::new();
            fixture.hold([(unit, held(1))]);
            fixture.hold([(unit, handed_over(1))]);
            assert_eq!(fixture.hold([]), [format!("release {}", fixture.units[unit])]);
            assert_eq!(fixture.end_drain(0), [""; 0]);
            assert_eq!(fixture.acknowledged(), []);
        }
    }

    #[test]
    fn drain_of_an_earlier_acquisition_releases_no_later_one() {
        let mut fixture = Fixture::new();
        fixture.hold([(0, held(1))]);
        fixture.hold([(0, handed_over(1))]);
        let again = ["release shard 0", "acquire shard 0 later", "enqueue shard 0"];
        assert_eq!(fixture.hold([(0, held(2))]), again);
        // Both are drained at once, and the earlier one ends first.
        assert_eq!(fixture.hold([(0, handed_over(2))]), ["drain shard 0"]);
        assert_eq!(fixture.end_drain(0), [""; 0]);
        assert_eq!(fixture.acknowledged(), []);
        assert_eq!(fixture.end_drain(0), ["release shard 0"]);
        assert_eq!(fixture.acknowledged(), [(fixture.units[0], Instance::new(2))]);
    }

    /// Otherwise it would drain the later acquisition, whose work would never begin.
    #[test]
    fn drain_begins_before_the_shard_is_acquired_again() {
        // The order of changes and ends of drains is random.
        for _ in 0..50 {
            let mut fixture = Fixture::new();
            fixture.hold([(0, held(1))]);
            let state = fixture.state.clone();
            let unit = fixture.units[0];
            fixture.fake.recorded().on_drain = Some(Box::new(move || {
                state.send_replace([(unit, held(2))].into());
            }));
            let calls = fixture.hold([(0, handed_over(1))]);
            assert_eq!(calls, ["drain shard 0", "release shard 0", "acquire shard 0 later", "enqueue shard 0"]);
        }
    }

    #[test]
    fn all_units_are_released_when_the_elector_ends() {
        let mut fixture = Fixture::new();
        fixture.hold([(0, held(1)), (1, held(1)), (2, held(1))]);
        fixture.hold([(0, held(1)), (1, handed_over(1)), (2, held(1))]);
        fixture.state.send_replace(HeldShards::new());
        let Fixture { state, follow, fake, stopped, .. } = fixture;
        drop(state);
        assert!(follow.now_or_never().is_some());
        assert_eq!(fake.calls(), ["release shard 0", "release shard 1", "release fleet role"]);
        assert!(stopped.take().is_empty());
    }
}
