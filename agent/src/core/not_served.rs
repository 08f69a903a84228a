//! Watches of kinds that the API server does not serve.

use tokio::time::Instant;

use super::{Core, WatchId};

impl Core {
    /// The API server does not serve the kind of a watch: it counts as listed and empty until the kind appears. If that
    /// is not confirmed, a watch that was listed stays as it is. True if the state changed.
    pub(crate) fn not_served(&self, id: WatchId, is_confirmed: bool, now: Instant) -> bool {
        self.with_wake(|state| {
            let Some(watched) = state.watched(id) else { return false };
            watched.attempted = true;
            if watched.not_served {
                (watched.error, watched.alive) = (None, Some(now));
                return false;
            }
            if watched.listed.is_some() && !is_confirmed {
                return false;
            }
            watched.not_served = true;
            // Unnamed objects are reported with their kind, so they wait for the first list of a kind that is unknown yet.
            let lost = !watched.described && std::mem::take(&mut watched.lost);
            watched.index.begin_list();
            state.list_complete(id, now);
            if let Some(watched) = state.watched(id) {
                watched.lost |= lost;
            }
            true
        })
    }
}
