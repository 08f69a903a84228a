//! Runtimes with a lost connection or an incomplete installation.

use std::time::Duration;

use tidewatch_shared::identity::RuntimeId;
use tokio::time::Instant;

use super::{RuntimeTable, state::State};
use crate::base::key::KymaKey;

/// An agent with a missing object of its own.
#[derive(Default)]
pub(super) struct Incomplete {
    /// A heartbeat reported it since the last [`RuntimeTable::incomplete`].
    pub(super) reported: bool,
    taken: Option<Instant>,
}

impl RuntimeTable {
    /// Notes that a runtime closed or lost its last connection, or that a heartbeat over one is overdue; nothing
    /// arrived over it after `since`.
    pub fn connection_lost(&self, runtime: &RuntimeId, since: Instant) {
        let mut state = self.lock();
        if let Ok(key) = state.key_of(runtime) {
            // A connection used later may have been lost earlier.
            let last = state.lost_connections.entry(key).or_insert(since);
            *last = since.max(*last);
        }
    }

    /// Kymas with a connection lost for this long and no request since; each lost connection is reported once.
    #[must_use]
    pub fn lost(&self, after: Duration) -> Vec<KymaKey> {
        let now = Instant::now();
        let State { kymas, lost_connections, .. } = &mut *self.lock();
        let mut lost = Vec::new();
        lost_connections.retain(|key, at| {
            let is_silent = kymas.get(key).is_some_and(|entry| entry.runtime.last_request <= *at);
            let waits = is_silent && now < *at + after;
            if is_silent && !waits {
                lost.push(key.clone());
            }
            waits
        });
        lost
    }

    /// Kymas with agents that reported, since the last call that returned them, that an object of their installation is
    /// missing: a Lease or a Secret. Each is returned at most once per `again`.
    #[must_use]
    pub fn incomplete(&self, again: Duration) -> Vec<KymaKey> {
        let now = Instant::now();
        let mut taken = Vec::new();
        for (key, incomplete) in &mut self.lock().incomplete {
            if incomplete.reported && incomplete.taken.is_none_or(|at| now >= at + again) {
                *incomplete = Incomplete { reported: false, taken: Some(now) };
                taken.push(key.clone());
            }
        }
        taken
    }
}
