//! Conditions that are pending before the process is ready.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;

/// Pending conditions by name; the process is ready when there are none. Take all guards before the probes are served,
/// otherwise the process is ready too early.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, usize>>>);

/// Guard of one pending condition, met when dropped.
#[must_use = "the condition is met as soon as its guard is dropped"]
pub struct Pending {
    list: Readiness,
    name: &'static str,
}

impl Readiness {
    /// Adds a condition, which is pending until the guard is dropped. Guards of the same name are counted.
    pub fn pending(&self, name: &'static str) -> Pending {
        *self.0.lock().entry(name).or_default() += 1;
        Pending { list: self.clone(), name }
    }

    /// Names of the pending conditions, in alphabetical order, without duplicates.
    pub fn missing(&self) -> Vec<&'static str> {
        self.0.lock().keys().copied().collect()
    }
}

impl Pending {
    /// Marks the condition as met.
    pub fn done(self) {}
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut list = self.list.0.lock();
        if let Some(count) = list.get_mut(self.name) {
            *count -= 1;
            if *count == 0 {
                list.remove(self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn condition_is_pending_until_its_last_guard_is_dropped() {
        let readiness = Readiness::default();
        let kcp = readiness.pending("kcp caches");
        let tls = readiness.pending("tls");
        let tls_again = readiness.pending("tls");
        assert_eq!(readiness.missing(), ["kcp caches", "tls"]);
        drop(tls);
        kcp.done();
        assert_eq!(readiness.missing(), ["tls"]);
        drop(tls_again);
        assert!(readiness.missing().is_empty());
    }
}
