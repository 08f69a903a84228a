//! Guard of the fences of all held shards, on a thread of its own that no blocked executor can delay.
//!
//! A fence refuses writes from its end on by itself; the guard closes it for good and takes the shard out of the metric,
//! so that a replica whose executor hangs does not report shards that another one holds by then.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use tidewatch_api::leases::Unit;
use tidewatch_cluster::leader::WriteFence;

use super::Metrics;

/// Interval of the checks.
const INTERVAL: Duration = Duration::from_millis(250);

/// Fences of the held shards.
type Fences = Mutex<BTreeMap<Unit, WriteFence>>;

#[derive(Debug)]
pub(super) struct FenceGuard {
    fences: Arc<Fences>,
    metrics: Metrics,
}

impl FenceGuard {
    /// Starts the thread, which ends when the guard is dropped.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(metrics: Metrics) -> io::Result<Self> {
        let fences = Arc::new(Fences::default());
        let (watched, shown): (Weak<Fences>, _) = (Arc::downgrade(&fences), metrics.clone());
        let watch = move || {
            while let Some(fences) = watched.upgrade() {
                close_ended(&fences, &shown);
                drop(fences);
                thread::sleep(INTERVAL);
            }
        };
        thread::Builder::new().name("shards".to_owned()).spawn(watch)?;
        Ok(Self { fences, metrics })
    }

    /// Watches an open fence until [`FenceGuard::remove`].
    pub(super) fn insert(&self, unit: Unit, fence: WriteFence) {
        update(&self.fences, &self.metrics, |fences| drop(fences.insert(unit, fence)));
    }

    pub(super) fn remove(&self, unit: Unit) {
        update(&self.fences, &self.metrics, |fences| drop(fences.remove(&unit)));
    }
}

/// Closes and forgets the fences that have ended.
fn close_ended(fences: &Fences, metrics: &Metrics) {
    update(fences, metrics, |fences| {
        fences.retain(|_, fence| {
            let is_open = fence.is_open();
            if !is_open {
                fence.close();
            }
            is_open
        });
    });
}

fn update(fences: &Fences, metrics: &Metrics, change: impl FnOnce(&mut BTreeMap<Unit, WriteFence>)) {
    let mut fences = fences.lock();
    change(&mut fences);
    let has_role = fences.contains_key(&Unit::Fleet);
    metrics.held.set(i64::try_from(fences.len() - usize::from(has_role)).unwrap_or(i64::MAX));
    metrics.fleet_role.set(i64::from(has_role));
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tidewatch_api::shard::ShardCount;

    use super::*;

    #[test]
    fn ended_fence_closes_without_the_executor_and_an_extended_one_stays() {
        let metrics = Metrics::default();
        let guard = FenceGuard::start(metrics.clone()).unwrap();
        let shown = || (metrics.held.get(), metrics.fleet_role.get());
        let shards: Vec<_> = Unit::all(ShardCount::ONE).collect();
        let fences = [WriteFence::closed(), WriteFence::closed()];
        let later = Instant::now() + Duration::from_secs(3_600);
        for (unit, fence) in shards.iter().zip(&fences) {
            fence.extend(later);
            guard.insert(*unit, fence.clone());
        }
        assert_eq!(shown(), (1, 1));
        fences[0].extend(Instant::now());
        // No executor runs in this test: the thread does it.
        while shown() == (1, 1) {
            thread::yield_now();
        }
        assert!(!fences[0].is_open() && fences[1].is_open());
        assert!(!fences[0].extend(later), "closed for good");
        guard.remove(shards[1]);
        assert_eq!(shown(), (0, 0));
    }
}
