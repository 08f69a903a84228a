//! Follows the shards that this replica holds: acquires and releases them in the runtime table, and the fleet role.

use std::{collections::BTreeMap, mem};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tidewatch_shared::identity::Instance;

use super::Followers;
use crate::{
    base::key::KymaKey,
    kube::shards::{ShardChange, ShardChanges, Unit},
};

/// The held shards, and the hand-overs in progress.
pub(super) struct HeldShards {
    followers: Followers,
    changes: ShardChanges,
    /// Units that are handed over, by the instance of their acquisition.
    draining: BTreeMap<Unit, Instance>,
    drains: FuturesUnordered<BoxFuture<'static, (Unit, Instance)>>,
}

impl HeldShards {
    pub(super) fn new(followers: Followers, changes: ShardChanges) -> Self {
        Self { followers, changes, draining: BTreeMap::new(), drains: FuturesUnordered::new() }
    }

    /// Runs until the elector has ended and every change is carried out.
    pub(super) async fn run(mut self) {
        // Kymas of shards that were acquired one after the other are enqueued together.
        let mut acquired = Vec::new();
        loop {
            if !acquired.is_empty() {
                match self.changes.next().now_or_never() {
                    Some(Some(change)) => self.carry_out(change, &mut acquired).await,
                    Some(None) => return,
                    None => self.followers.acquired.enqueue(&mem::take(&mut acquired)),
                }
                continue;
            }
            tokio::select! {
                change = self.changes.next() => match change {
                    Some(change) => self.carry_out(change, &mut acquired).await,
                    None => return,
                },
                Some((unit, instance)) = self.drains.next() => self.drained(unit, instance),
            }
        }
    }

    async fn carry_out(&mut self, change: ShardChange, acquired: &mut Vec<KymaKey>) {
        match change {
            ShardChange::Acquired { unit: Unit::Shard(shard), instance, fence } => {
                acquired.extend(self.followers.handover.acquire(shard, instance, &fence).await);
            }
            ShardChange::Acquired { unit: Unit::Fleet, fence, .. } => self.followers.role.acquire(fence),
            ShardChange::HandOver { unit, instance, .. } => self.drain(unit, instance),
            ShardChange::Lost { unit, .. } => {
                self.draining.remove(&unit);
                self.release(unit);
            }
        }
    }

    /// Begins to hand a unit over: its work in progress ends first, with the answers to all of its requests.
    fn drain(&mut self, unit: Unit, instance: Instance) {
        self.draining.insert(unit, instance);
        let (handover, role) = (self.followers.handover.clone(), self.followers.role.clone());
        let drain = async move {
            match unit {
                Unit::Shard(shard) => handover.drain(shard).await,
                Unit::Fleet => role.release().await,
            }
            (unit, instance)
        };
        self.drains.push(drain.boxed());
    }

    /// Acknowledges the hand-over of a unit, unless it was lost meanwhile.
    fn drained(&mut self, unit: Unit, instance: Instance) {
        if self.draining.get(&unit) == Some(&instance) {
            self.draining.remove(&unit);
            self.release(unit);
            self.changes.stopped(unit, instance);
        }
    }

    fn release(&self, unit: Unit) {
        let Followers { handover, context, role, .. } = &self.followers;
        match unit {
            Unit::Shard(shard) => handover.release(shard).iter().for_each(|kyma| context.forget(kyma)),
            Unit::Fleet => role.end(),
        }
    }
}
