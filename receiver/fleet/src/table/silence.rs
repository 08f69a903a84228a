//! Runtimes with a lost connection or an incomplete installation.

use std::time::Duration;

use tidewatch_api::{identity::RuntimeId, key::KymaKey};
use tokio::time::Instant;

use super::{
    RuntimeTable,
    state::{Incomplete, State},
};
use crate::PathState;

impl RuntimeTable {
    /// Notes that a runtime closed or lost its last connection, or that a heartbeat over one is overdue; nothing
    /// arrived over it after `since`.
    pub fn connection_lost(&self, runtime: &RuntimeId, since: Instant) {
        let mut slot = self.lock(self.shard_of(Some(runtime), ""));
        let Some(state) = slot.as_mut() else { return };
        if let Ok(key) = state.key_of(runtime) {
            state.lose_connection(key, since);
        }
    }

    /// Kymas with a connection lost for this long and no request since; each lost connection is reported once.
    pub fn lost(&self, after: Duration) -> Vec<KymaKey> {
        let mut lost = Vec::new();
        for shard in self.held() {
            let Some(connections) = self.with(shard, |state, _| std::mem::take(&mut state.lost_connections)) else {
                continue;
            };
            self.each_in_chunks(shard, connections, |state, connections, now| {
                for (key, at) in connections {
                    let is_silent = state.kymas.get(&key).is_some_and(|entry| entry.runtime.last_request <= at);
                    if is_silent && now >= at + after {
                        lost.push(key);
                    } else if is_silent {
                        state.lose_connection(key, at);
                    }
                }
            });
        }
        lost
    }

    /// Returns whether the installation of an agent that was suspect since this time still needs a repair: it has sent
    /// no request since, or reports a missing object, or its path is not proven although it sends heartbeats.
    pub fn needs_repair(&self, key: &KymaKey, suspect_since: Instant) -> bool {
        let needs_repair = |state: &mut State, now| {
            let Some(entry) = state.kymas.get(key) else { return false };
            let path = entry.runtime.path(state.thresholds(state.started), now);
            let is_silent = entry.runtime.last_request <= suspect_since;
            let has_flaw = matches!(path, PathState::Unproven(_)) && path.receives_heartbeats();
            is_silent || has_flaw || state.incomplete.contains_key(key)
        };
        self.with_kyma(key, needs_repair).unwrap_or(false)
    }

    /// Kymas with agents that reported, since the last call that returned them, that an object of their installation is
    /// missing: a Lease or a Secret. Each is returned at most once per `again`.
    pub fn incomplete(&self, again: Duration) -> Vec<KymaKey> {
        let mut taken = Vec::new();
        for shard in self.held() {
            self.with(shard, |state, now| {
                for (key, incomplete) in &mut state.incomplete {
                    if incomplete.reported && incomplete.taken.is_none_or(|at| now >= at + again) {
                        *incomplete = Incomplete { reported: false, taken: Some(now) };
                        taken.push(key.clone());
                    }
                }
            });
        }
        taken
    }
}

impl State {
    fn lose_connection(&mut self, key: KymaKey, since: Instant) {
        // A connection used later may have been lost earlier.
        let last = self.lost_connections.entry(key).or_insert(since);
        *last = since.max(*last);
    }
}
