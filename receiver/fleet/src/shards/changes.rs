//! Changes of the shards that this replica holds, for the consumer that runs their work.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use parking_lot::Mutex;
use tidewatch_api::{identity::Instance, leases::Unit};
use tidewatch_cluster::leader::WriteFence;
use tokio::sync::{Notify, watch};

/// One acquisition of a shard.
#[derive(Clone, Debug)]
pub struct HeldShard {
    /// Instance of the shard's receiver: new at each acquisition.
    pub instance: Instance,
    /// Fence of all writes for this shard: new at each acquisition.
    pub fence: WriteFence,
    /// The shard is to be handed over: its fence closes soon, even if its work has not stopped.
    pub hand_over: bool,
}

/// All shards that are held.
pub(super) type HeldShards = BTreeMap<Unit, HeldShard>;

/// A change of the shards that this replica holds.
#[derive(Clone, Debug)]
pub enum ShardChange {
    /// The shard is held from now on.
    Acquired {
        /// The shard, or the fleet role.
        unit: Unit,
        /// Its instance.
        instance: Instance,
        /// Its fence, which is open.
        fence: WriteFence,
    },
    /// All work of the shard is to stop: no request may be on its way when it is acknowledged by [`ShardChanges::stopped`].
    HandOver {
        /// The shard, or the fleet role.
        unit: Unit,
        /// Its instance.
        instance: Instance,
    },
    /// The shard is no longer held, and its fence is closed.
    Lost {
        /// The shard, or the fleet role.
        unit: Unit,
        /// Its instance.
        instance: Instance,
    },
}

/// Acknowledged hand-overs, until the elector takes them.
#[derive(Debug, Default)]
pub(super) struct Stopped {
    shards: Mutex<BTreeSet<(Unit, Instance)>>,
    changed: Notify,
}

impl Stopped {
    /// Waits for acknowledgements. Cancel safe.
    pub(super) async fn wait(&self) {
        self.changed.notified().await;
    }

    pub(super) fn take(&self) -> BTreeSet<(Unit, Instance)> {
        std::mem::take(&mut *self.shards.lock())
    }
}

/// Changes of the held shards in an order that is safe for the consumer: losses, hand-overs, acquisitions.
///
/// The elector publishes a state and never waits for the consumer. One that is slow sees several changes as one: a shard
/// that was lost and acquired again is lost, and acquired with another instance.
#[derive(Debug)]
pub struct ShardChanges {
    state: watch::Receiver<HeldShards>,
    known: BTreeMap<Unit, (Instance, bool)>,
    stopped: Arc<Stopped>,
}

impl ShardChanges {
    pub(super) fn new(state: watch::Receiver<HeldShards>, stopped: Arc<Stopped>) -> Self {
        Self { state, known: BTreeMap::new(), stopped }
    }

    /// Waits for the next change; `None` when the elector has ended and every change has been returned. Cancel safe.
    pub async fn next(&mut self) -> Option<ShardChange> {
        loop {
            if let Some(change) = self.difference() {
                return Some(change);
            }
            if self.state.changed().await.is_err() {
                return self.difference();
            }
        }
    }

    /// Acknowledges a hand-over: all work of the shard has ended, and each request of its reconciles is answered or was
    /// never sent.
    pub fn stopped(&self, unit: Unit, instance: Instance) {
        self.stopped.shards.lock().insert((unit, instance));
        self.stopped.changed.notify_one();
    }

    /// First difference between the known shards and the current ones, which is known from then on.
    fn difference(&mut self) -> Option<ShardChange> {
        let state = self.state.borrow_and_update();
        let is_held = |unit, instance| state.get(&unit).is_some_and(|held: &HeldShard| held.instance == instance);
        let lost = self.known.iter().find(|(unit, (instance, _))| !is_held(**unit, *instance));
        if let Some((&unit, &(instance, _))) = lost {
            self.known.remove(&unit);
            return Some(ShardChange::Lost { unit, instance });
        }
        for (unit, known) in &mut self.known {
            if let Some(HeldShard { instance, hand_over: true, .. }) = state.get(unit)
                && !std::mem::replace(&mut known.1, true)
            {
                return Some(ShardChange::HandOver { unit: *unit, instance: *instance });
            }
        }
        let (&unit, held) = state.iter().find(|(unit, _)| !self.known.contains_key(unit))?;
        self.known.insert(unit, (held.instance, false));
        Some(ShardChange::Acquired { unit, instance: held.instance, fence: held.fence.clone() })
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tidewatch_api::shard::ShardCount;

    use super::*;

    fn held(instance: u64) -> HeldShard {
        HeldShard { instance: Instance::new(instance), fence: WriteFence::closed(), hand_over: false }
    }

    fn next(changes: &mut ShardChanges) -> Option<String> {
        Some(match changes.next().now_or_never()?? {
            ShardChange::Acquired { unit, instance, .. } => format!("acquired {unit} {instance}"),
            ShardChange::HandOver { unit, .. } => format!("hand over {unit}"),
            ShardChange::Lost { unit, instance } => format!("lost {unit} {instance}"),
        })
    }

    #[test]
    fn slow_consumer_sees_losses_first_and_each_instance() {
        let shards: Vec<_> = Unit::all(ShardCount::new(2).unwrap()).collect();
        let (sender, receiver) = watch::channel(HeldShards::new());
        let mut changes = ShardChanges::new(receiver, Arc::default());
        assert_eq!(next(&mut changes), None);
        sender.send_modify(|held_shards| *held_shards = shards[..2].iter().map(|unit| (*unit, held(1))).collect());
        let [one, two, three] = [1, 2, 3].map(Instance::new);
        let mut all = || std::iter::from_fn(|| next(&mut changes)).collect::<Vec<_>>();
        assert_eq!(all(), [format!("acquired shard 0 {one}"), format!("acquired shard 1 {one}")]);
        // Lost and acquired again, handed over, and a new one.
        sender.send_modify(|state| {
            state.insert(shards[0], held(2));
            state.get_mut(&shards[1]).unwrap().hand_over = true;
            state.insert(shards[2], held(3));
        });
        let wanted = [
            format!("lost shard 0 {one}"),
            "hand over shard 1".to_owned(),
            format!("acquired shard 0 {two}"),
            format!("acquired fleet role {three}"),
        ];
        assert_eq!(all(), wanted);
        drop(sender);
        assert!(changes.next().now_or_never().unwrap().is_none());
    }
}
