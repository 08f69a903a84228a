//! Changes of templates and release metas that come together are taken together: a release meta that the cache sees before its new
//! template would else take a channel away for a moment.

use std::{
    mem,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kube::Client;
use tokio::{sync::Notify, time};
use tokio_util::sync::CancellationToken;

use super::{concern::Concerned, wakes::Rooms};
use crate::controllers::catalog;

/// From the first change until all that came meanwhile is acted on.
const SETTLE: Duration = Duration::from_millis(300);
/// How soon what could not be written down is tried again.
const RETRY: Duration = Duration::from_secs(15);
/// A write takes no longer: what it is about goes on without it.
const DEADLINE: Duration = Duration::from_secs(5);

/// Whom changes of the catalog concern that are not acted on yet; bounded by the number of Kymas and their modules.
#[derive(Default)]
pub(super) struct Settle {
    concerned: Mutex<Concerned>,
    told: Notify,
}

impl Settle {
    /// Something in the catalog moved, which concerns these Kymas besides those who see it.
    pub(super) fn moved(&self, concerned: Concerned) {
        self.concerned.lock().unwrap_or_else(PoisonError::into_inner).add(concerned);
        self.told.notify_one();
    }

    /// Runs for ever, from when all caches are whole: what is missing in one of them would look as if it had been removed.
    pub(super) async fn run(&self, rooms: &Rooms, kcp: (&Client, &str), synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        // What moved while nobody looked is ruled on as well.
        self.told.notify_one();
        loop {
            self.told.notified().await;
            time::sleep(SETTLE).await;
            let concerned = mem::take(&mut *self.concerned.lock().unwrap_or_else(PoisonError::into_inner));
            let renewed = rooms.catalog.renew(&rooms.stores);
            // First, so that a process that comes after this one knows since when channels point where they do.
            let written = write(rooms, kcp).await;
            rooms.catalog_moved(kcp.1, &renewed, concerned);
            if !written {
                // Whichever comes first: a change, or the time to try again.
                let _ = time::timeout(RETRY, self.told.notified()).await;
                self.told.notify_one();
            }
        }
    }
}

/// Writes down what is accepted. Whether it stands there.
async fn write(rooms: &Rooms, (client, namespace): (&Client, &str)) -> bool {
    let Some(data) = rooms.catalog.unwritten_releases() else { return true };
    let cause = match time::timeout(
        DEADLINE,
        catalog::write_releases(client, namespace, &data, rooms.catalog.is_spent()),
    )
    .await
    {
        Ok(Ok(())) => {
            rooms.catalog.wrote_releases(data);
            return true;
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer in time".to_owned(),
    };
    tracing::warn!(cause, "What is accepted of the releases could not be written down");
    false
}
