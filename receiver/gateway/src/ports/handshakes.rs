//! Limits the CPU that TLS handshakes take. Clients decide how many there are, and each costs asymmetric cryptography;
//! a limited share of the threads keeps the others free for requests on open connections.

use std::{future::poll_fn, pin::pin, sync::Arc, task::ready, time::Duration};

use tokio::sync::Semaphore;
use tokio_util::sync::PollSemaphore;

/// Drives a future and holds a permit during each poll, so that at most as many polls run concurrently as there are
/// permits. A future that waits for its peer holds none; a stalled peer therefore delays no other.
pub(super) async fn with_permits<F: Future>(permits: Arc<Semaphore>, future: F) -> F::Output {
    let mut permits = PollSemaphore::new(permits);
    let mut future = pin!(future);
    poll_fn(|context| {
        let _permit = ready!(permits.poll_acquire(context));
        future.as_mut().poll(context)
    })
    .await
}

/// Returns the deadline of a handshake by the number of places that are free for its network: the full deadline while at
/// least half of all places are, then linearly down to a fifth when none is, so that stalled handshakes free their places
/// sooner under load.
pub(super) fn adaptive_deadline(deadline: Duration, free: usize, slots: usize) -> Duration {
    let half = (slots / 2).max(1);
    let share = free.min(half) as f64 / half as f64;
    deadline.mul_f64(0.2 + 0.8 * share)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        thread,
    };

    use tokio::task::{JoinSet, yield_now};

    use super::*;

    #[test]
    fn deadline_shrinks_as_slots_fill() {
        let deadline = Duration::from_secs(5);
        for (free, seconds) in [(100, 5), (50, 5), (25, 3), (0, 1)] {
            assert_eq!(adaptive_deadline(deadline, free, 100), Duration::from_secs(seconds), "{free}");
        }
        assert_eq!(adaptive_deadline(deadline, 0, 1), Duration::from_secs(1));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn polls_run_within_the_permits_and_pending_futures_hold_none() {
        let permits = Arc::new(Semaphore::new(1));
        let running = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        let (release, hold) = tokio::sync::oneshot::channel::<()>();
        tasks.spawn(with_permits(permits.clone(), async move {
            let _ = hold.await;
        }));
        for _ in 0..8 {
            let running = running.clone();
            tasks.spawn(with_permits(permits.clone(), async move {
                for _ in 0..50 {
                    assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0, "one step at a time");
                    thread::yield_now();
                    running.fetch_sub(1, Ordering::SeqCst);
                    yield_now().await;
                }
            }));
        }
        for _ in 0..8 {
            tasks.join_next().await.unwrap().unwrap();
        }
        release.send(()).unwrap();
        tasks.join_next().await.unwrap().unwrap();
    }
}
