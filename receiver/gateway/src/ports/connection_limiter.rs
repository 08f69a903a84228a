//! Limits the connections of each runtime, and closes those of a revoked runtime or certificate. An agent uses its
//! newest connection; older ones beyond the limit are remnants of a network partition or hoarded, and the oldest
//! closes.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use parking_lot::{Mutex, MutexGuard};
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::certificate::RuntimeCertificate;
use tokio::sync::SetOnce;

/// Open connections by runtime. Bounded by the number of connections.
#[derive(Default)]
pub(super) struct ConnectionLimiter(Mutex<Table>);

#[derive(Default)]
struct Table {
    next: u64,
    connections: HashMap<RuntimeId, VecDeque<OpenConnection>>,
}

struct OpenConnection {
    number: u64,
    certificate: Arc<RuntimeCertificate>,
    closing: Closing,
}

/// Order to close a connection at once, with the reason as metrics label it. The first order is kept.
pub(super) type Closing = Arc<SetOnce<&'static str>>;

/// Slot of one connection, released on drop.
pub(super) struct ConnectionSlot {
    limiter: Arc<ConnectionLimiter>,
    runtime: RuntimeId,
    number: u64,
    /// Ordered when the runtime has opened too many later connections, or when it or its certificate is revoked.
    pub(super) closing: Closing,
}

impl ConnectionLimiter {
    /// Registers a connection by its client's certificate, and evicts the oldest one of the runtime beyond `max`.
    pub(super) fn acquire(self: &Arc<Self>, certificate: &Arc<RuntimeCertificate>, max: usize) -> ConnectionSlot {
        let runtime = &certificate.runtime;
        let mut table = self.lock();
        table.next += 1;
        let number = table.next;
        let closing = Closing::default();
        let open = table.connections.entry(runtime.clone()).or_default();
        // Nearly always the only one.
        open.reserve_exact(1);
        open.push_back(OpenConnection { number, certificate: certificate.clone(), closing: closing.clone() });
        if open.len() > max.max(1)
            && let Some(oldest) = open.pop_front()
        {
            let _ = oldest.closing.set("crowded");
        }
        ConnectionSlot { limiter: self.clone(), runtime: runtime.clone(), number, closing }
    }

    /// Closes the connections that the predicate selects by their certificates.
    pub(super) fn close(&self, is_revoked: impl Fn(&RuntimeCertificate) -> bool) {
        for connection in self.lock().connections.values().flatten() {
            if is_revoked(&connection.certificate) {
                let _ = connection.closing.set("out");
            }
        }
    }

    /// Closes the connections of one runtime.
    pub(super) fn close_of(&self, runtime: &RuntimeId) {
        for connection in self.lock().connections.get(runtime).into_iter().flatten() {
            let _ = connection.closing.set("out");
        }
    }

    /// Runtimes with open connections.
    pub(super) fn runtimes(&self) -> Vec<RuntimeId> {
        self.lock().connections.keys().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock()
    }
}

impl ConnectionSlot {
    /// Releases the slot; returns true if it was the last one of its runtime.
    pub(super) fn release(self) -> bool {
        self.remove()
    }

    fn remove(&self) -> bool {
        let mut table = self.limiter.lock();
        let Some(open) = table.connections.get_mut(&self.runtime) else { return true };
        open.retain(|connection| connection.number != self.number);
        let was_last = open.is_empty();
        if was_last {
            table.connections.remove(&self.runtime);
        }
        was_last
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::enrolment::tests::testing::certificate;

    #[test]
    fn oldest_connection_is_evicted_and_released_slots_are_forgotten() {
        let limiter = Arc::<ConnectionLimiter>::default();
        let [a, b] = ["r-1", "r-2"].map(|runtime| Arc::new(certificate(runtime, "x")));
        let is_evicted = |slot: &ConnectionSlot| slot.closing.get() == Some(&"crowded");
        let first = limiter.acquire(&a, 2);
        let second = limiter.acquire(&a, 2);
        let other = limiter.acquire(&b, 2);
        assert!(!is_evicted(&first));
        let third = limiter.acquire(&a, 2);
        assert!(is_evicted(&first) && !is_evicted(&second) && !is_evicted(&other));
        drop(first);
        drop(third);
        let fourth = limiter.acquire(&a, 2);
        assert!(!is_evicted(&second), "a released slot is free");
        assert!(!second.release() && fourth.release(), "the last release is reported");
        drop(other);
        assert!(limiter.lock().connections.is_empty());
    }

    #[test]
    fn revoked_connections_are_selected_by_runtime_and_by_certificate() {
        let limiter = Arc::<ConnectionLimiter>::default();
        let [old, new, other] = [("r-1", "x"), ("r-1", "y"), ("r-2", "z")]
            .map(|(runtime, fingerprint)| limiter.acquire(&Arc::new(certificate(runtime, fingerprint)), 4));
        let revoked = || [&old, &new, &other].map(|slot| slot.closing.get() == Some(&"out"));
        limiter.close(|certificate| certificate.leaf.fingerprint == "x");
        assert_eq!(revoked(), [true, false, false]);
        limiter.close(|certificate| certificate.runtime.as_str() == "r-2");
        assert_eq!(revoked(), [true, false, true]);
        assert_ne!(old.closing.get(), Some(&"crowded"));
    }
}
