//! Work of the shards that this replica holds, in the runtime table, and of the fleet role.

use futures::{FutureExt as _, future::BoxFuture};
use tidewatch_shared::identity::Instance;

use super::Followers;
use crate::{
    base::key::KymaKey,
    kube::{
        leader::WriteFence,
        shards::{Consumer, Unit},
    },
};

impl Consumer for Followers {
    async fn acquire(&mut self, unit: Unit, instance: Instance, fence: WriteFence) -> Vec<KymaKey> {
        match unit {
            Unit::Shard(shard) => self.handover.acquire(shard, instance, &fence).await,
            Unit::Fleet => {
                self.role.acquire(fence);
                Vec::new()
            }
        }
    }

    fn enqueue(&mut self, acquired: &[KymaKey]) {
        self.acquired.enqueue(acquired);
    }

    fn drain(&self, unit: Unit) -> BoxFuture<'static, ()> {
        let (handover, role) = (self.handover.clone(), self.role.clone());
        async move {
            match unit {
                Unit::Shard(shard) => handover.drain(shard).await,
                Unit::Fleet => role.release().await,
            }
        }
        .boxed()
    }

    fn release(&mut self, unit: Unit) {
        let Self { handover, context, role, .. } = self;
        match unit {
            Unit::Shard(shard) => handover.release(shard).iter().for_each(|kyma| context.forget(kyma)),
            Unit::Fleet => role.end(),
        }
    }
}
