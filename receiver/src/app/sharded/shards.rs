//! Work of the shards that this replica holds, in the runtime table, and of the fleet role.

use futures::{
    FutureExt as _,
    future::{self, BoxFuture},
};
use tidewatch_api::{identity::Instance, key::KymaKey, leases::Unit};
use tidewatch_cluster::leader::WriteFence;
use tidewatch_fleet::shards::Consumer;

use super::Followers;

impl Consumer for Followers {
    fn prepare(&mut self, unit: Unit) -> BoxFuture<'static, ()> {
        match unit {
            Unit::Shard(shard) => {
                self.held.send_modify(|held| held.has_claim = true);
                self.handover.prepare(shard)
            }
            Unit::Fleet => future::ready(()).boxed(),
        }
    }

    async fn acquire(&mut self, unit: Unit, instance: Instance, fence: WriteFence) -> Vec<KymaKey> {
        match unit {
            Unit::Shard(shard) => {
                let acquired = self.handover.acquire(shard, instance, &fence).await;
                self.held.send_modify(|held| held.has_shard = true);
                self.serves_shard.cancel();
                acquired
            }
            Unit::Fleet => {
                self.role.acquire(fence);
                self.held.send_modify(|held| held.has_role = true);
                Vec::new()
            }
        }
    }

    fn enqueue(&mut self, acquired: &[KymaKey]) {
        (self.enqueue)(acquired);
    }

    fn drain(&self, unit: Unit) -> BoxFuture<'static, ()> {
        let handover = self.handover.clone();
        let role = self.role.clone();
        async move {
            match unit {
                Unit::Shard(shard) => handover.drain(shard).await,
                Unit::Fleet => role.release().await,
            }
        }
        .boxed()
    }

    fn release(&mut self, unit: Unit) {
        match unit {
            Unit::Shard(shard) => {
                self.handover.release(shard).iter().for_each(&self.forget);
                self.held.send_modify(|held| held.has_lost_shard = true);
            }
            Unit::Fleet => {
                self.role.end();
                self.held.send_modify(|held| held.has_role = false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, mem, sync::Arc};

    use parking_lot::Mutex;
    use tidewatch_cluster::leader::FleetRole;
    use tokio::sync::watch;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::app::changes::testing::Fixture;

    type Seen = Arc<Mutex<Vec<KymaKey>>>;

    /// Followers, and the Kymas that they have enqueued and forgotten.
    fn followers(fixture: &Fixture) -> (Followers, [Seen; 2]) {
        let seen = [Seen::default(), Seen::default()];
        let [enqueued, forgotten] = seen.clone();
        let followers = Followers {
            handover: fixture.handover.clone(),
            role: FleetRole::released(),
            enqueue: Box::new(move |kymas| enqueued.lock().extend_from_slice(kymas)),
            forget: Box::new(move |kyma| forgotten.lock().push(kyma.clone())),
            held: watch::Sender::default(),
            serves_shard: CancellationToken::new(),
        };
        (followers, seen)
    }

    #[tokio::test]
    async fn fleet_role_is_held_until_it_is_lost_or_handed_over() {
        let (mut followers, _) = followers(&Fixture::new());
        let role = followers.role.clone();
        let no_kyma: [KymaKey; 0] = [];
        for is_lost in [true, false] {
            assert_eq!(followers.acquire(Unit::Fleet, Instance::new(1), WriteFence::default()).await, no_kyma);
            assert!(role.is_held());
            if !is_lost {
                let mut decision = Box::pin(role.run(pending::<()>()));
                assert!(decision.as_mut().now_or_never().is_none());
                let mut drain = followers.drain(Unit::Fleet);
                assert!(drain.as_mut().now_or_never().is_none(), "a decision is in progress");
                assert!(!role.is_held(), "no other one begins");
                drop(decision);
                assert!(drain.now_or_never().is_some());
            }
            followers.release(Unit::Fleet);
            assert!(!role.is_held());
        }
    }

    #[tokio::test]
    async fn kymas_of_a_released_shard_are_forgotten_and_the_role_stays() {
        let fixture = Fixture::new();
        fixture.synced.cancel();
        let (mut followers, [enqueued, forgotten]) = followers(&fixture);
        let taken = |kymas: &Mutex<Vec<KymaKey>>| mem::take(&mut *kymas.lock());
        followers.acquire(Unit::Fleet, Instance::new(1), WriteFence::default()).await;
        for shard in [fixture.mine, fixture.theirs] {
            let acquired = followers.acquire(Unit::Shard(shard), Instance::new(1), WriteFence::default()).await;
            followers.enqueue(&acquired);
            assert_eq!((acquired.len(), taken(&enqueued)), (1, acquired));
        }
        assert!(followers.drain(Unit::Shard(fixture.mine)).now_or_never().is_some());
        assert_eq!((fixture.fleet.held().len(), taken(&forgotten).len()), (2, 0), "until the release");
        followers.release(Unit::Shard(fixture.mine));
        assert_eq!((fixture.fleet.held(), taken(&forgotten)), (vec![fixture.theirs], vec![KymaKey::new("ns", "a")]));
        assert!(followers.role.is_held());
    }
}
