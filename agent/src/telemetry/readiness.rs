//! Readiness as a set of named guards: the agent is ready when all are dropped.

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::Mutex;

/// The pending conditions; clones share the same set.
#[derive(Clone, Default)]
pub struct Readiness(Arc<Mutex<BTreeSet<&'static str>>>);

/// A pending condition; dropping the guard fulfils it.
pub struct Guard {
    name: &'static str,
    list: Readiness,
}

impl Readiness {
    /// Adds a condition. Each name is used once.
    pub fn guard(&self, name: &'static str) -> Guard {
        self.with(|pending| pending.insert(name));
        Guard { name, list: self.clone() }
    }

    /// Names of the pending conditions, in alphabetical order.
    pub(crate) fn pending(&self) -> Vec<&'static str> {
        self.with(|pending| pending.iter().copied().collect())
    }

    fn with<R>(&self, work: impl FnOnce(&mut BTreeSet<&'static str>) -> R) -> R {
        work(&mut self.0.lock())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.list.with(|pending| pending.remove(self.name));
    }
}
