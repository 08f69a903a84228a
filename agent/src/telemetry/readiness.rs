//! Readiness as a list of named guards: ready when all are dropped, and until then it says which are not.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

/// Clones share the same list.
#[derive(Clone, Default)]
pub struct Readiness(Arc<Mutex<BTreeSet<&'static str>>>);

/// Something that is pending; dropping it says that it is done.
pub struct Guard {
    name: &'static str,
    list: Readiness,
}

impl Readiness {
    /// Adds something that must be done first. Each name is used once.
    pub fn guard(&self, name: &'static str) -> Guard {
        self.with(|pending| pending.insert(name));
        Guard { name, list: self.clone() }
    }

    /// What is not done yet, in alphabetical order.
    pub(crate) fn pending(&self) -> Vec<&'static str> {
        self.with(|pending| pending.iter().copied().collect())
    }

    fn with<R>(&self, work: impl FnOnce(&mut BTreeSet<&'static str>) -> R) -> R {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.list.with(|pending| pending.remove(self.name));
    }
}
