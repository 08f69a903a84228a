//! Walks over all Kymas of a runtime table.

use std::thread;

use tidewatch_api::{key::KymaKey, shard::ShardId};
use tokio::time::Instant;

use super::{RuntimeTable, kymas::CHUNK, state::State};

impl RuntimeTable {
    /// Runs a step for all Kymas of the held shards, shard by shard, in the order of their keys within each, a chunk at a
    /// time, and releases the lock after each chunk. Kymas that are added or removed meanwhile are visited or not; one that
    /// moves to another shard may be visited twice.
    pub(super) fn in_chunks(&self, mut visit: impl FnMut(&mut State, &[KymaKey], Instant)) {
        for shard in self.held() {
            let mut last = None;
            while let Some(keys) = self.with(shard, |state, now| {
                let keys = state.kymas.after(last.as_ref());
                if !keys.is_empty() {
                    visit(state, &keys, now);
                }
                keys
            }) {
                if keys.len() < CHUNK {
                    break;
                }
                last = keys.into_iter().next_back();
                // The lock is not fair: the threads that wait for it get it now.
                thread::yield_now();
            }
        }
    }

    /// Runs a step for each of these items of a shard, a chunk at a time, and releases the lock after each chunk.
    pub(super) fn each_in_chunks<T>(
        &self,
        shard: ShardId,
        items: impl IntoIterator<Item = T>,
        mut visit: impl FnMut(&mut State, Vec<T>, Instant),
    ) {
        let mut items = items.into_iter();
        loop {
            let chunk: Vec<_> = items.by_ref().take(CHUNK).collect();
            if chunk.is_empty() || self.with(shard, |state, now| visit(state, chunk, now)).is_none() {
                return;
            }
            thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

    use serde_json::json;
    use tidewatch_api::plan::{Plan, Work};
    use tidewatch_kit::metrics::Registry;

    use super::*;
    use crate::{
        forward::{Routes, Service, Target},
        queue::{Priority, WorkSet},
        table::{Metrics, Settings},
    };

    const FLEET: usize = 5_000;
    const CHUNKS: usize = FLEET / CHUNK + 1;

    fn key(n: usize) -> KymaKey {
        KymaKey::new("kcp-system", format!("kyma-{n}"))
    }

    fn fleet() -> RuntimeTable {
        let metrics = Metrics::register(&mut Registry::default());
        let fleet = RuntimeTable::alone(1, Settings::default(), metrics);
        let watch = json!({"name": "w", "version": "v1", "resource": "things", "field": "spec", "manager": "m", "work": ["forward"]});
        let plan = Plan::parse(&json!({"revision": "1", "watches": [watch]}).to_string()).unwrap();
        let plan = Arc::new(plan);
        for n in 0..FLEET {
            fleet.place(key(n), "", Some(format!("r-{n}").parse().unwrap()), plan.clone());
        }
        fleet.set_synced();
        fleet
    }

    #[tokio::test(start_paused = true)]
    async fn each_walk_over_the_fleet_releases_the_lock_after_a_chunk() {
        let fleet = fleet();
        let locked = || fleet.0.locked.load(Ordering::Relaxed);
        let all = WorkSet::of(&[Work::Kyma]);
        let lose_connections = |fleet: &RuntimeTable| {
            (0..FLEET).for_each(|n| fleet.connection_lost(&format!("r-{n}").parse().unwrap(), Instant::now()));
        };
        let set_routes = |fleet: &RuntimeTable| {
            let target = Target::new("m", Service::new("s", "n", 1).unwrap()).unwrap();
            fleet.set_routes(Routes::default());
            fleet.set_routes([("w".to_owned(), target)].into_iter().collect());
        };
        let nothing = |_: &RuntimeTable| ();
        type Step<'a> = &'a dyn Fn(&RuntimeTable);
        let walks: [(&str, Step<'_>, Step<'_>); 8] = [
            ("paths", &nothing, &|fleet| assert_eq!(fleet.changed_paths().len(), FLEET)),
            ("steady paths", &nothing, &|fleet| assert_eq!(fleet.changed_paths().len(), 0)),
            ("views", &nothing, &|fleet| assert_eq!(fleet.views().len(), FLEET)),
            ("reports", &nothing, &|fleet| assert_eq!(fleet.runtime_reports().len(), FLEET)),
            ("enqueue all", &nothing, &|fleet| fleet.enqueue_all(all, Priority::Catalog, 50)),
            ("enqueue paced", &nothing, &|fleet| fleet.enqueue_paced((0..FLEET).map(key).collect(), all, 200)),
            ("unpause", &nothing, &RuntimeTable::unpause),
            ("lost", &lose_connections, &|fleet| assert_eq!(fleet.lost(Duration::ZERO).len(), FLEET)),
        ];
        for (name, prepare, walk) in walks {
            prepare(&fleet);
            let before = locked();
            walk(&fleet);
            assert!(locked() - before >= CHUNKS, "{name} takes the lock {} times", locked() - before);
        }
        let before = locked();
        set_routes(&fleet);
        assert!(locked() - before >= CHUNKS, "a route returns");
    }

    #[tokio::test(start_paused = true)]
    async fn each_kyma_is_visited_once_although_others_come_and_go() {
        let fleet = fleet();
        let mut visited = Vec::new();
        fleet.in_chunks(|state, keys, _| {
            assert!(keys.len() <= CHUNK);
            visited.extend(keys.iter().cloned());
            // The last one of a chunk is gone when the walk continues after it.
            state.kymas.remove(&keys[keys.len() - 1]);
        });
        let mut all: Vec<_> = (0..FLEET).map(key).collect();
        all.sort();
        visited.sort();
        assert_eq!(visited, all);
    }
}
