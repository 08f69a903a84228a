//! Share of each runtime in the writes to the control plane. A runtime whose events cause more writes than its share has its
//! reconciles delayed, so that a few hostile runtimes cannot fill etcd's history; the last state is still reconciled.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use prometheus_client::metrics::counter::Counter;
use tidewatch_shared::metric_set;
use tokio::time::Instant;

use crate::base::key::KymaKey;

/// Cost that a runtime may cause at once: all modules of a large runtime are installed without a delay. One is a write
/// with a body below 4 KiB.
pub(crate) const BURST: u64 = 1_000;
/// Cost per second beyond it.
pub(crate) const PER_SECOND: u64 = 4;
/// Entries without debt are dropped when there are this many, or twice as many as after the last time.
const PRUNE_AT: usize = 1_024;

metric_set! {
    /// Metrics of the shares.
    #[derive(Debug)]
    pub struct WriteShareMetrics {
        /// Reconciles after which the next one is delayed, because the runtime has used up its share of the writes to the
        /// control plane.
        delayed: Counter = "control_plane_write_delays",
    }
}

/// Shares of all runtimes. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(crate) struct WriteShares {
    metrics: WriteShareMetrics,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    debts: HashMap<KymaKey, Debt>,
    prune_at: usize,
}

/// Cost that the runtime has not worked off yet.
#[derive(Clone, Copy, Debug)]
struct Debt {
    cost: u64,
    at: Instant,
}

impl Debt {
    /// The debt at a later time.
    fn at(self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.at).as_millis();
        let paid = u64::try_from(passed).unwrap_or(u64::MAX).saturating_mul(PER_SECOND) / 1_000;
        self.cost.saturating_sub(paid)
    }
}

impl WriteShares {
    /// Creates shares that no runtime has used.
    pub(crate) fn new(metrics: WriteShareMetrics) -> Self {
        Self { metrics, ..Self::default() }
    }

    /// Charges a reconcile of a Kyma or of one of its Manifests. Returns the delay of the next one: several Manifests of a
    /// runtime share its debt, and together converge to the rate of one runtime.
    pub(crate) fn charge(&self, kyma: &KymaKey, cost: u64, now: Instant) -> Option<Duration> {
        if cost == 0 {
            return None;
        }
        // No change panics half-way.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.debts.len() >= state.prune_at.max(PRUNE_AT) {
            state.debts.retain(|_, debt| debt.at(now) > 0);
            state.prune_at = state.debts.len().saturating_mul(2);
        }
        let before = state.debts.get(kyma).map_or(0, |debt| debt.at(now));
        let debt = before.saturating_add(cost);
        state.debts.insert(kyma.clone(), Debt { cost: debt, at: now });
        let excess = debt.saturating_sub(BURST);
        if excess == 0 {
            return None;
        }
        self.metrics.delayed.inc();
        Some(Duration::from_millis(excess.saturating_mul(1_000) / PER_SECOND))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kyma(name: &str) -> KymaKey {
        KymaKey::new("ns", name)
    }

    #[test]
    fn burst_is_free_and_then_the_rate_applies_to_each_runtime_alone() {
        let (shares, start) = (WriteShares::default(), Instant::now());
        assert_eq!(shares.charge(&kyma("a"), BURST, start), None);
        assert_eq!(shares.charge(&kyma("a"), 0, start), None);
        assert_eq!(shares.charge(&kyma("a"), 5 * PER_SECOND, start), Some(Duration::from_secs(5)));
        assert_eq!(shares.charge(&kyma("b"), 10, start), None);
        let later = start + Duration::from_secs(5);
        assert_eq!(shares.charge(&kyma("a"), PER_SECOND, later), Some(Duration::from_secs(1)));
        let recovered = later + Duration::from_secs(2 * BURST / PER_SECOND);
        assert_eq!(shares.charge(&kyma("a"), BURST, recovered), None);
    }

    #[test]
    fn many_objects_of_one_runtime_converge_to_its_rate() {
        let (shares, start) = (WriteShares::default(), Instant::now());
        let mut due = [start; 50];
        let (mut writes, end) = (0, start + Duration::from_secs(3_600));
        while let Some(next) = due.iter_mut().min().filter(|due| **due < end) {
            let now = *next;
            writes += 6;
            *next = now + shares.charge(&kyma("a"), 6, now).unwrap_or(Duration::from_millis(10));
        }
        let allowed = BURST + 3_600 * PER_SECOND;
        assert!(writes <= allowed + 50 * 6 && writes > allowed / 2, "{writes} of {allowed}");
    }

    #[test]
    fn runtimes_without_debt_are_dropped() {
        let (shares, start) = (WriteShares::default(), Instant::now());
        let number = || shares.state.lock().unwrap().debts.len();
        for n in 0..PRUNE_AT {
            shares.charge(&kyma(&n.to_string()), 1, start);
        }
        assert_eq!(number(), PRUNE_AT);
        shares.charge(&kyma("late"), 1, start + Duration::from_secs(1));
        assert_eq!(number(), 1);
    }
}
