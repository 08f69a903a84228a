//! Retry timers per manager, so a failing manager does not delay the others.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use crate::receiver::RetryTimer;

/// Timers of the managers whose last event failed.
#[derive(Debug, Default)]
pub(super) struct ManagerTimers(BTreeMap<String, RetryTimer>);

impl ManagerTimers {
    /// Earliest time at or after `due` for a request to a manager.
    pub(super) fn not_before(&self, manager: &str, due: Instant) -> Instant {
        self.0.get(manager).map_or(due, |timer| timer.not_before(due))
    }

    /// A manager accepted its event.
    pub(super) fn accepted(&mut self, manager: &str) {
        self.0.remove(manager);
    }

    /// A manager's event failed, perhaps with a `Retry-After`.
    pub(super) fn failed(&mut self, manager: String, now: Instant, retry_after: Option<Duration>) {
        let timer = self.0.entry(manager).or_default();
        match retry_after {
            Some(retry_after) => timer.retry_after(now, retry_after),
            None => timer.fail(now, false),
        }
    }

    /// Removes managers that have left the plan, which bounds the number of timers.
    pub(super) fn retain(&mut self, is_manager: impl Fn(&str) -> bool) {
        self.0.retain(|manager, _| is_manager(manager));
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// See [`RetryTimer::credentials_changed`].
    pub(super) fn credentials_changed(&mut self) {
        self.0.values_mut().for_each(RetryTimer::credentials_changed);
    }
}
