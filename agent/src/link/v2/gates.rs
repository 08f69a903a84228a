//! When each manager may be told again: that one takes nothing is no reason that another waits.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use crate::link::Gate;

/// The gates of those managers whose last event was not taken.
#[derive(Debug, Default)]
pub(super) struct Gates(BTreeMap<String, Gate>);

impl Gates {
    /// The first moment at or after `due` at which a manager may be told.
    pub(super) fn opens(&self, manager: &str, due: Instant) -> Instant {
        self.0.get(manager).map_or(due, |gate| gate.opens(due))
    }

    /// A manager took its event.
    pub(super) fn open(&mut self, manager: &str) {
        self.0.remove(manager);
    }

    /// A manager did not; it may have said how long to wait.
    pub(super) fn close(&mut self, manager: String, now: Instant, told: Option<Duration>) {
        let gate = self.0.entry(manager).or_default();
        match told {
            Some(told) => gate.told(now, told),
            None => gate.fail(now, false),
        }
    }

    /// Forgets managers that are none any more, so that there are never more than in a plan.
    pub(super) fn retain(&mut self, is_manager: impl Fn(&str) -> bool) {
        self.0.retain(|manager, _| is_manager(manager));
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// See [`Gate::renewed`].
    pub(super) fn renewed(&mut self) {
        self.0.values_mut().for_each(Gate::renewed);
    }
}
