//! Indexes over all shards: the agenda, by which the workers find the next Kyma without a look at each shard, and the
//! directory of the fleet's Kymas. Each has a lock of its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tidewatch_api::{
    key::KymaKey,
    shard::{ShardCount, ShardId},
};
use tokio::time::Instant;

use crate::{
    Tenure,
    queue::{Heads, Lane, Lanes, Priority, Queue},
};

/// Summary of one shard's queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct QueueSummary {
    heads: Heads,
    earliest: Option<Instant>,
}

impl QueueSummary {
    pub(super) fn of(queue: &Queue<KymaKey>) -> Self {
        Self { heads: queue.heads(), earliest: queue.earliest() }
    }
}

/// Next step of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// Delayed work of this shard is due.
    Due(ShardId),
    /// This shard has the entry to serve next, at the head of this lane and priority.
    Ready(ShardId, Lane, Priority),
}

/// Index of all queues: shards with ready work, and due times. Every change of a queue updates it under the lock of its shard.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    /// Shards by the ticket of their first entry, for each lane and priority.
    ready: [[BTreeMap<u64, ShardId>; 3]; 2],
    /// Shards with delayed work, by the earliest due time.
    due: BTreeSet<(Instant, ShardId)>,
}

impl Agenda {
    /// Replaces the summary of a shard. Returns true if a waiting worker has to look again.
    pub(super) fn update(&mut self, shard: ShardId, before: &QueueSummary, now: &QueueSummary, lanes: &Lanes) -> bool {
        let earliest = self.earliest();
        let heads = before.heads.iter().flatten().zip(now.heads.iter().flatten());
        for ((before, now), ready) in heads.zip(self.ready.iter_mut().flatten()) {
            if before != now {
                before.map(|ticket| ready.remove(&ticket));
                now.map(|ticket| ready.insert(ticket, shard));
            }
        }
        if before.earliest != now.earliest {
            before.earliest.map(|at| self.due.remove(&(at, shard)));
            now.earliest.map(|at| self.due.insert((at, shard)));
        }
        let is_sooner = self.earliest().is_some_and(|at| earliest.is_none_or(|before| at < before));
        is_sooner || self.has_ready(lanes)
    }

    /// Chooses over all shards as the queue of one shard would over its entries: all that is due becomes ready, and of the
    /// priority whose turn it is the entry that has waited longest is served.
    pub(super) fn choose(&self, lanes: &Lanes, now: Instant) -> Option<Choice> {
        if let Some((_, shard)) = self.due.first().filter(|(at, _)| *at <= now) {
            return Some(Choice::Due(*shard));
        }
        let (lane, priority, ticket) =
            lanes.choose(|lane, priority| Some(*self.of(lane, priority).first_key_value()?.0))?;
        let shard = self.of(lane, priority).get(&ticket)?;
        Some(Choice::Ready(*shard, lane, priority))
    }

    /// True if an entry with a free slot is ready.
    pub(super) fn has_ready(&self, lanes: &Lanes) -> bool {
        lanes.choose(|lane, priority| Some(*self.of(lane, priority).first_key_value()?.0)).is_some()
    }

    /// Earliest due time of delayed work.
    pub(super) fn earliest(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    fn of(&self, lane: Lane, priority: Priority) -> &BTreeMap<u64, ShardId> {
        &self.ready[lane as usize][priority as usize]
    }
}

/// Directory of the fleet's Kymas: the shard of each, the shards that this process holds, and the Kymas with a reconcile in
/// progress. Its lock is a leaf: no other is acquired while it is held.
pub(super) struct Directory {
    kymas: HashMap<KymaKey, Placed>,
    /// Number of Kymas with a runtime id.
    runtimes: usize,
    /// Kymas with a reconcile in progress; bounded by the number of workers.
    jobs: HashMap<KymaKey, JobState>,
    /// Tenure of each shard that is held.
    held: Vec<Option<Tenure>>,
}

/// Place of a Kyma, in a shard that is held or not.
#[derive(Clone, Copy)]
struct Placed {
    shard: ShardId,
    has_runtime: bool,
}

#[derive(Clone, Copy, Default)]
struct JobState {
    /// The Kyma was placed anew since the reconcile began: its queue keeps it back until the reconcile ends.
    is_awaited: bool,
}

impl Directory {
    pub(super) fn new(shards: ShardCount) -> Self {
        let held = vec![None; usize::from(shards.get())];
        Self { kymas: HashMap::new(), runtimes: 0, jobs: HashMap::new(), held }
    }

    /// Shard of a Kyma.
    pub(super) fn shard_of(&self, key: &KymaKey) -> Option<ShardId> {
        self.kymas.get(key).map(|placed| placed.shard)
    }

    /// Records the shard of a Kyma. Returns true if a reconcile of it is in progress, in any shard.
    pub(super) fn place(&mut self, key: &KymaKey, shard: ShardId, has_runtime: bool) -> bool {
        let before = self.kymas.insert(key.clone(), Placed { shard, has_runtime });
        self.runtimes -= usize::from(before.is_some_and(|before| before.has_runtime));
        self.runtimes += usize::from(has_runtime);
        match self.jobs.get_mut(key) {
            Some(job) => {
                job.is_awaited = true;
                true
            }
            None => false,
        }
    }

    pub(super) fn remove(&mut self, key: &KymaKey) {
        let removed = self.kymas.remove(key);
        self.runtimes -= usize::from(removed.is_some_and(|removed| removed.has_runtime));
    }

    /// Records that a reconcile of a Kyma begins.
    pub(super) fn begins(&mut self, key: &KymaKey) {
        self.jobs.insert(key.clone(), JobState::default());
    }

    /// Records the end of a Kyma's reconcile. Returns the shard whose queue may keep the Kyma back.
    pub(super) fn ended(&mut self, key: &KymaKey) -> Option<ShardId> {
        self.jobs.remove(key).filter(|job| job.is_awaited).and_then(|_| self.shard_of(key))
    }

    /// True while a reconcile of the Kyma is in progress.
    pub(super) fn is_running(&self, key: &KymaKey) -> bool {
        self.jobs.contains_key(key)
    }

    /// Number of Kymas of the fleet, in all shards.
    pub(super) fn kymas(&self) -> usize {
        self.kymas.len()
    }

    /// Number of Kymas of the fleet with a runtime id, in all shards.
    pub(super) fn runtimes(&self) -> usize {
        self.runtimes
    }

    /// Number of Kymas with a runtime id in shards that are not held.
    pub(super) fn runtimes_elsewhere(&self) -> usize {
        if self.held.iter().all(Option::is_some) {
            return 0;
        }
        self.kymas.values().filter(|placed| placed.has_runtime && self.tenure(placed.shard).is_none()).count()
    }

    /// Number of Kymas of each shard, in order.
    pub(super) fn kymas_by_shard(&self) -> Vec<usize> {
        let mut kymas = vec![0; self.held.len()];
        for placed in self.kymas.values() {
            if let Some(count) = kymas.get_mut(placed.shard.index()) {
                *count += 1;
            }
        }
        kymas
    }

    /// Sets the tenure of a shard. Returns the one before.
    pub(super) fn hold(&mut self, shard: ShardId, tenure: Option<Tenure>) -> Option<Tenure> {
        self.held.get_mut(shard.index()).and_then(|held| std::mem::replace(held, tenure))
    }

    /// Shards that are held, in order.
    pub(super) fn held(&self) -> Vec<ShardId> {
        self.held.iter().flatten().filter_map(|tenure| tenure.shard).collect()
    }

    /// Tenure of a shard; `None` if it is not held.
    pub(super) fn tenure(&self, shard: ShardId) -> Option<&Tenure> {
        self.held.get(shard.index())?.as_ref()
    }

    /// Tenure of the shard of a Kyma; `None` if the Kyma is unknown, or its shard is not held.
    pub(super) fn tenure_of(&self, key: &KymaKey) -> Option<&Tenure> {
        self.tenure(self.shard_of(key)?)
    }
}
