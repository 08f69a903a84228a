//! Shards with ready work, and due times: the workers find the next Kyma without a look at each shard.

use std::collections::{BTreeMap, BTreeSet};

use tidewatch_api::{key::KymaKey, shard::ShardId};
use tokio::time::Instant;

use crate::queue::{Heads, Lane, Lanes, Priority, Queue};

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

/// Index of all queues. Every change of a queue updates it under the lock of its shard.
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
