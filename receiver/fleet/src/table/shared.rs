//! State that all shards of a process share. Each lock is acquired under that of at most one shard, or of the two between
//! which a Kyma moves, and no other is acquired while it is held.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use tidewatch_api::{key::KymaKey, plan::Plan, shard::ShardCount};

use super::{HeartbeatInterval, Settings, agenda::Agenda, stamps::Stamps};
use crate::{
    PlanIndex, Snapshot,
    forward::{self, Outbox},
    queue::Queue,
};

/// See the module documentation.
pub(super) struct Shared {
    pub(super) shards: ShardCount,
    pub(super) interval: HeartbeatInterval,
    /// A Kyma enters and leaves it under the lock of its shard.
    agenda: Mutex<Agenda>,
    /// Does nothing without the feature `stamps`.
    pub(super) stamps: OnceLock<Stamps>,
    /// Events for other managers. Places and requests of a service are limited for the process, hence one outbox; it is
    /// changed only under the lock of the runtime's shard.
    outbox: Mutex<Outbox<Snapshot>>,
    /// A watch has had a route, or an event to forward.
    forwards: AtomicBool,
    /// Indexes of the plans in use, by revision; most runtimes share a few plans.
    plans: Mutex<HashMap<String, Weak<PlanIndex>>>,
    generations: AtomicU64,
}

impl Shared {
    pub(super) fn new(shards: ShardCount, settings: &Settings) -> Self {
        Self {
            shards,
            interval: HeartbeatInterval::new(settings.heartbeat_interval(0)),
            agenda: Mutex::new(Agenda::new(settings)),
            stamps: OnceLock::new(),
            outbox: Mutex::new(Outbox::new(forward::Limits::default(), settings.seed)),
            forwards: AtomicBool::new(false),
            plans: Mutex::default(),
            generations: AtomicU64::new(1),
        }
    }

    /// Number that distinguishes all Kymas and tenures of this process.
    pub(super) fn generation(&self) -> u64 {
        self.generations.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn agenda(&self) -> MutexGuard<'_, Agenda> {
        self.agenda.lock()
    }

    /// Queue of the agenda.
    pub(super) fn queue(&self) -> MappedMutexGuard<'_, Queue<KymaKey>> {
        MutexGuard::map(self.agenda(), |agenda| &mut agenda.queue)
    }

    pub(super) fn outbox(&self) -> MutexGuard<'_, Outbox<Snapshot>> {
        self.outbox.lock()
    }

    /// The outbox, unless it has never had anything to do: most fleets have no other managers.
    pub(super) fn outbox_for(&self, has_forwards: bool) -> Option<MutexGuard<'_, Outbox<Snapshot>>> {
        if has_forwards {
            self.forwards.store(true, Ordering::Relaxed);
        }
        (has_forwards || self.forwards.load(Ordering::Relaxed)).then(|| self.outbox())
    }

    /// Index of a plan.
    pub(super) fn planned(&self, plan: Arc<Plan>) -> Arc<PlanIndex> {
        let mut plans = self.plans.lock();
        let known = plans.get(plan.revision()).and_then(Weak::upgrade);
        if let Some(planned) = known.filter(|it| Arc::ptr_eq(&it.plan, &plan) || it.plan == plan) {
            return planned;
        }
        plans.retain(|_, planned| planned.strong_count() > 0);
        let planned = Arc::new(PlanIndex::new(plan));
        plans.insert(planned.plan.revision().to_owned(), Arc::downgrade(&planned));
        planned
    }
}
