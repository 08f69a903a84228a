//! Carries out the changes of the held shards: the order of acquisition, drain, release and acknowledgement is that of every
//! consumer.

use std::{collections::BTreeMap, mem};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tidewatch_shared::identity::Instance;

use super::{ShardChange, ShardChanges, Unit};
use crate::{base::key::KymaKey, kube::leader::WriteFence};

/// Components that work for the held shards, and for the fleet role.
pub trait Consumer: Send {
    /// Begins to work for a unit, whose fence is open. Returns the Kymas to enqueue.
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
    Follower { consumer, changes, draining: BTreeMap::new(), drains: FuturesUnordered::new() }.run().await;
}

/// The held units, and the hand-overs in progress.
struct Follower<C> {
    consumer: C,
    changes: ShardChanges,
    /// Units that are handed over, by the instance of their acquisition.
    draining: BTreeMap<Unit, Instance>,
    drains: FuturesUnordered<BoxFuture<'static, (Unit, Instance)>>,
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
                    None => self.consumer.enqueue(&mem::take(&mut acquired)),
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
            ShardChange::Acquired { unit, instance, fence } => {
                acquired.extend(self.consumer.acquire(unit, instance, fence).await);
            }
            ShardChange::HandOver { unit, instance, .. } => {
                self.draining.insert(unit, instance);
                let drain = self.consumer.drain(unit);
                self.drains.push(drain.map(move |()| (unit, instance)).boxed());
            }
            ShardChange::Lost { unit, .. } => {
                self.draining.remove(&unit);
                self.consumer.release(unit);
            }
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
