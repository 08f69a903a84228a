//! Waiting for work that is due.

use std::pin::pin;

use tokio::{
    sync::Notify,
    time::{self, Instant},
};

/// Waits until `check` returns something due. It is called at once, after each notification, and at the time that it
/// returned last.
pub(super) async fn next_due<T>(notify: &Notify, check: impl Fn() -> (Option<T>, Option<Instant>)) -> T {
    loop {
        let mut wakeup = pin!(notify.notified());
        // Registered before the check, so that nothing that becomes due in between is missed.
        wakeup.as_mut().enable();
        match check() {
            (Some(due), _) => return due,
            (None, None) => wakeup.await,
            (None, Some(at)) => {
                // Check again after a timeout as well as after a notification.
                let _ = time::timeout_at(at, wakeup).await;
            }
        }
    }
}
