//! Guard of the fences of all held shards, on a thread of its own that no blocked executor can delay.
//!
//! A fence refuses writes from its end on by itself; the guard closes it for good and takes the shard out of the metric,
//! so that a replica whose executor hangs does not report shards that another one holds by then.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, PoisonError, Weak},
    thread,
    time::Duration,
};

use prometheus_client::metrics::gauge::Gauge;

use crate::{base::shard::ShardId, kube::leader::WriteFence};

/// Interval of the checks.
const INTERVAL: Duration = Duration::from_millis(250);

/// Fences of the held shards.
type Fences = Mutex<BTreeMap<ShardId, WriteFence>>;

#[derive(Debug)]
pub(super) struct FenceGuard {
    fences: Arc<Fences>,
    held: Gauge,
}

impl FenceGuard {
    /// Starts the thread, which ends when the guard is dropped.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(held: Gauge) -> io::Result<Self> {
        let fences = Arc::new(Fences::default());
        let (watched, gauge): (Weak<Fences>, _) = (Arc::downgrade(&fences), held.clone());
        let watch = move || {
            while let Some(fences) = watched.upgrade() {
                close_ended(&fences, &gauge);
                drop(fences);
                thread::sleep(INTERVAL);
            }
        };
        thread::Builder::new().name("shards".to_owned()).spawn(watch)?;
        Ok(Self { fences, held })
    }

    /// Watches an open fence until [`FenceGuard::remove`].
    pub(super) fn insert(&self, shard: ShardId, fence: WriteFence) {
        update(&self.fences, &self.held, |fences| drop(fences.insert(shard, fence)));
    }

    pub(super) fn remove(&self, shard: ShardId) {
        update(&self.fences, &self.held, |fences| drop(fences.remove(&shard)));
    }
}

/// Closes and forgets the fences that have ended.
fn close_ended(fences: &Fences, held: &Gauge) {
    update(fences, held, |fences| {
        fences.retain(|_, fence| {
            let is_open = fence.is_open();
            if !is_open {
                fence.close();
            }
            is_open
        });
    });
}

fn update(fences: &Fences, held: &Gauge, change: impl FnOnce(&mut BTreeMap<ShardId, WriteFence>)) {
    let mut fences = fences.lock().unwrap_or_else(PoisonError::into_inner);
    change(&mut fences);
    held.set(i64::try_from(fences.len()).unwrap_or(i64::MAX));
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::base::shard::ShardCount;

    #[test]
    fn ended_fence_closes_without_the_executor_and_an_extended_one_stays() {
        let gauge = Gauge::default();
        let guard = FenceGuard::start(gauge.clone()).unwrap();
        let shards: Vec<_> = ShardCount::new(2).unwrap().shards().collect();
        let fences = [WriteFence::closed(), WriteFence::closed()];
        let later = Instant::now() + Duration::from_secs(3_600);
        for (shard, fence) in shards.iter().zip(&fences) {
            fence.extend(later);
            guard.insert(*shard, fence.clone());
        }
        assert_eq!(gauge.get(), 2);
        fences[0].extend(Instant::now());
        // No executor runs in this test: the thread does it.
        while gauge.get() == 2 {
            thread::yield_now();
        }
        assert!(!fences[0].is_open() && fences[1].is_open());
        assert!(!fences[0].extend(later), "closed for good");
        guard.remove(shards[1]);
        assert_eq!(gauge.get(), 0);
    }
}
