//! What must still happen before this process is ready.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// A list of named things that are pending. Ready means: none. Take all guards before the probes are served.
#[derive(Clone, Default)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, usize>>>);

/// One thing that is pending, until dropped.
#[must_use = "what is dropped is no longer pending"]
pub struct Pending {
    list: Readiness,
    name: &'static str,
}

impl Readiness {
    /// Adds a thing that must happen; dropping the guard says that it has.
    pub fn pending(&self, name: &'static str) -> Pending {
        *self.lock().entry(name).or_default() += 1;
        Pending { list: self.clone(), name }
    }

    /// What is pending, each name once, in the order of the alphabet.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        self.lock().keys().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pending {
    /// Says that it has happened.
    pub fn done(self) {}
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut list = self.list.lock();
        if let Some(count) = list.get_mut(self.name) {
            *count -= 1;
            if *count == 0 {
                list.remove(self.name);
            }
        }
    }
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Readiness").field(&self.missing()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pending_is_named_until_the_last_guard_goes() {
        let readiness = Readiness::default();
        let (kcp, tls, tls_again) =
            (readiness.pending("kcp caches"), readiness.pending("tls"), readiness.pending("tls"));
        assert_eq!(readiness.missing(), ["kcp caches", "tls"]);
        drop(tls);
        kcp.done();
        assert_eq!(readiness.missing(), ["tls"]);
        drop(tls_again);
        assert!(readiness.missing().is_empty());
    }
}
