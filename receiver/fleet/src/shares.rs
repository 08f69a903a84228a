//! Share of each runtime in the control plane: writes, and reconciles of its Kyma. A runtime whose events cause more than its
//! share has its reconciles delayed, so that a few hostile runtimes occupy neither the control plane's API server nor
//! etcd's history; the last state is still reconciled.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tidewatch_api::key::KymaKey;
use tidewatch_kit::metric_set;
use tokio::time::Instant;

/// Writes to the control plane: all modules of a large runtime are installed without a delay. A write costs 1, and every
/// full 4 KiB of its body 1 more.
pub const WRITES: Share = Share { burst: 1_000, interval: Duration::from_millis(250) };
/// Reconciles of a Kyma that reports of its agent cause: a user who changes it by hand or by a script notices no
/// delay. Retries, and reconciles that our own writes or changes in KCP cause, cost nothing: their number is bounded by
/// that of their causes.
pub(crate) const RECONCILES: Share = Share { burst: 100, interval: Duration::from_secs(3) };
/// Entries without debt are dropped when there are this many, or twice as many as after the last time.
const PRUNE_AT: usize = 1_024;

/// Cost that a runtime may cause without a delay.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Cost that is free at once.
    pub burst: u32,
    /// Time in which a cost of 1 is worked off.
    pub interval: Duration,
}

metric_set! {
    /// Metrics of the shares.
    #[derive(Debug)]
    pub struct ShareMetrics {
        /// Reconciles after which the next one is delayed, because the runtime has used up its share of the writes to the
        /// control plane.
        writes: Counter = "control_plane_write_delays",
        /// Reconciles after which the next one is delayed, because the runtime's events have caused more reconciles of its
        /// Kyma than its share.
        reconciles: Counter = "reconcile_delays",
    }
}

/// Shares of all runtimes. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    metrics: ShareMetrics,
    state: Arc<Mutex<State>>,
}

/// Cost of a reconcile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// See [`WRITES`].
    pub writes: u64,
    /// True for a reconcile that [`RECONCILES`] limits.
    pub counts_as_reconcile: bool,
}

/// Delay of a runtime's next reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// Its duration.
    pub rest: Duration,
    /// The runtime has used up its share of the writes.
    pub is_for_writes: bool,
}

#[derive(Debug, Default)]
struct State {
    debts: HashMap<KymaKey, Debts>,
    prune_at: usize,
}

/// Instants at which all costs so far are worked off.
#[derive(Clone, Copy, Debug)]
struct Debts {
    writes: Instant,
    reconciles: Instant,
}

impl Share {
    /// Adds a cost to a debt. Returns the time by which it exceeds the burst.
    fn charge(self, debt: &mut Instant, cost: u64, now: Instant) -> Duration {
        let cost = self.interval.saturating_mul(u32::try_from(cost).unwrap_or(u32::MAX));
        *debt = (*debt).max(now) + cost;
        (*debt - now).saturating_sub(self.interval * self.burst)
    }
}

impl Shares {
    /// Creates shares that no runtime has used.
    pub fn new(metrics: ShareMetrics) -> Self {
        Self { metrics, ..Self::default() }
    }

    /// Charges a reconcile of a Kyma or of one of its Manifests. Returns the delay of the next one: several Manifests of a
    /// runtime share its debt, and together converge to the rate of one runtime.
    pub fn charge(&self, kyma: &KymaKey, cost: Cost, now: Instant) -> Option<Delay> {
        if cost == Cost::default() {
            return None;
        }
        let [writes, reconciles] = self.debts(kyma, cost, now);
        for (excess, delayed) in [(writes, &self.metrics.writes), (reconciles, &self.metrics.reconciles)] {
            if !excess.is_zero() {
                delayed.inc();
            }
        }
        let rest = writes.max(reconciles);
        (!rest.is_zero()).then_some(Delay { rest, is_for_writes: !writes.is_zero() })
    }

    /// Adds the cost to both debts of the runtime, and returns the time by which each exceeds its burst.
    fn debts(&self, kyma: &KymaKey, cost: Cost, now: Instant) -> [Duration; 2] {
        let mut state = self.state.lock();
        if state.debts.len() >= state.prune_at.max(PRUNE_AT) {
            state.debts.retain(|_, debts| debts.writes.max(debts.reconciles) > now);
            state.prune_at = state.debts.len().saturating_mul(2);
        }
        let debts = state.debts.entry(kyma.clone()).or_insert(Debts { writes: now, reconciles: now });
        [
            WRITES.charge(&mut debts.writes, cost.writes, now),
            RECONCILES.charge(&mut debts.reconciles, cost.counts_as_reconcile.into(), now),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kyma(name: &str) -> KymaKey {
        KymaKey::new("ns", name)
    }

    fn writes(writes: u32) -> Cost {
        Cost { writes: writes.into(), counts_as_reconcile: false }
    }

    fn delayed(seconds: u64) -> Option<Delay> {
        Some(Delay { rest: Duration::from_secs(seconds), is_for_writes: true })
    }

    #[test]
    fn burst_is_free_and_then_the_rate_applies_to_each_runtime_alone() {
        let shares = Shares::default();
        let start = Instant::now();
        assert_eq!(shares.charge(&kyma("a"), writes(WRITES.burst), start), None);
        assert_eq!(shares.charge(&kyma("a"), writes(0), start), None);
        assert_eq!(shares.charge(&kyma("a"), writes(20), start), delayed(5));
        assert_eq!(shares.charge(&kyma("b"), writes(10), start), None);
        let later = start + Duration::from_secs(5);
        assert_eq!(shares.charge(&kyma("a"), writes(4), later), delayed(1));
        let recovered = later + WRITES.interval * (2 * WRITES.burst);
        assert_eq!(shares.charge(&kyma("a"), writes(WRITES.burst), recovered), None);
    }

    #[test]
    fn many_objects_of_one_runtime_converge_to_its_rate() {
        let shares = Shares::default();
        let start = Instant::now();
        let mut due = [start; 50];
        let mut written = 0;
        let end = start + Duration::from_secs(3_600);
        while let Some(next) = due.iter_mut().min().filter(|due| **due < end) {
            let now = *next;
            written += 6;
            let delay = shares.charge(&kyma("a"), writes(6), now);
            *next = now + delay.map_or(Duration::from_millis(10), |delay| delay.rest);
        }
        let allowed = WRITES.burst + 3_600 * 4;
        assert!(written <= allowed + 50 * 6 && written > allowed / 2, "{written} of {allowed}");
    }

    /// A user who toggles modules twice a second, without a single write.
    #[test]
    fn reconciles_of_a_kyma_have_a_rate_of_their_own() {
        let shares = Shares::default();
        let start = Instant::now();
        let cost = Cost { writes: 0, counts_as_reconcile: true };
        let mut now = start;
        let mut reconciles = 0;
        let end = start + Duration::from_secs(600);
        while now < end {
            reconciles += 1;
            let delay = shares.charge(&kyma("a"), cost, now);
            assert!(delay.is_none_or(|delay| delay.rest <= RECONCILES.interval && !delay.is_for_writes), "{delay:?}");
            now += delay.map_or(Duration::ZERO, |delay| delay.rest).max(Duration::from_millis(500));
        }
        let allowed = RECONCILES.burst + 200;
        assert!(reconciles <= allowed + 1 && reconciles > allowed * 9 / 10, "{reconciles} of {allowed}");
        assert_eq!(shares.metrics.writes.get(), 0);
        assert_eq!(shares.charge(&kyma("b"), cost, start), None, "other runtimes are unaffected");
    }

    #[test]
    fn runtimes_without_debt_are_dropped() {
        let shares = Shares::default();
        let start = Instant::now();
        let number = || shares.state.lock().debts.len();
        for n in 0..PRUNE_AT {
            shares.charge(&kyma(&n.to_string()), writes(1), start);
        }
        assert_eq!(number(), PRUNE_AT);
        shares.charge(&kyma("late"), writes(1), start + Duration::from_secs(1));
        assert_eq!(number(), 1);
    }
}
