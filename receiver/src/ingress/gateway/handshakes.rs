//! Handshakes are asymmetric crypto, and whoever connects decides how many there are. They get a share of the threads, so that
//! requests on open connections are answered whoever knocks.

use std::{future::poll_fn, pin::pin, sync::Arc, task::ready, time::Duration};

use tokio::sync::Semaphore;
use tokio_util::sync::PollSemaphore;

/// Drives a future, each step of it with a permit: at most as many steps run at the same time as there are permits. Whoever
/// waits for its peer holds none, so that those who stall hold nobody up.
pub(super) async fn within<F: Future>(share: Arc<Semaphore>, future: F) -> F::Output {
    let (mut share, mut future) = (PollSemaphore::new(share), pin!(future));
    poll_fn(|context| {
        let _permit = ready!(share.poll_acquire(context));
        future.as_mut().poll(context)
    })
    .await
}

/// How long a handshake may take when so many of the places are free: the whole deadline while half of them are, down to a
/// fifth of it when none is, so that those who stall make room for those who do not.
pub(super) fn patience(deadline: Duration, free: usize, places: usize) -> Duration {
    let half = (places / 2).max(1);
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
    fn the_deadline_shrinks_as_places_are_taken() {
        let deadline = Duration::from_secs(5);
        for (free, seconds) in [(100, 5), (50, 5), (25, 3), (0, 1)] {
            assert_eq!(patience(deadline, free, 100), Duration::from_secs(seconds), "{free}");
        }
        assert_eq!(patience(deadline, 0, 1), Duration::from_secs(1));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn steps_run_within_the_share_and_waiting_takes_none_of_it() {
        let (share, running) = (Arc::new(Semaphore::new(1)), Arc::new(AtomicUsize::new(0)));
        let mut tasks = JoinSet::new();
        let (release, hold) = tokio::sync::oneshot::channel::<()>();
        tasks.spawn(within(share.clone(), async move {
            let _ = hold.await;
        }));
        for _ in 0..8 {
            let running = running.clone();
            tasks.spawn(within(share.clone(), async move {
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
