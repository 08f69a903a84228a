//! Raises the process's limit of open files, and divides it between accepted connections and everything else.

use prometheus_client::metrics::gauge::Gauge;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidewatch_kit::metric_set;

/// File descriptors for everything but accepted connections: the Lease, watches of KCP, two idle connections to each
/// runtime cluster that was reconciled in the last half minute, managers, the registry, files.
const OWN: u64 = 8_192;

/// The own descriptors' share of a limit that is too low for all, as a divisor: without them no runtime cluster would be
/// reconciled, and the Lease could not be renewed.
const OWN_SHARE: u64 = 4;

metric_set! {
    /// Metrics of the process's limits.
    pub(super) struct Metrics {
        /// Open files that the process may have; 0 if unlimited.
        limit: Gauge = "open_files_limit",
    }
}

/// The process's limit of open files (`RLIMIT_NOFILE`, getrlimit(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpenFiles {
    /// `None` if unlimited.
    limit: Option<u64>,
}

impl OpenFiles {
    /// Raises the soft limit to the hard limit. The usual soft limit of 1024 exists for programs that use select(2);
    /// it would stop a receiver at about a thousand agents. On an error the soft limit stays.
    pub(super) fn raise() -> Self {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        if current == maximum {
            return Self { limit: current };
        }
        match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
            Ok(()) => Self { limit: maximum },
            Err(error) => {
                tracing::warn!(%error, current, "Could not raise the limit of open files");
                Self { limit: current }
            }
        }
    }

    /// Divides the limit among listeners that each accept at most so many connections. If it is too low, all of them get
    /// the same fraction, so that connections of agents never use up the descriptors of the Lease and of reconciles.
    pub(super) fn divide(self, connections: &[u32], metrics: &Metrics) -> ConnectionShare {
        let accepted: u64 = connections.iter().copied().map(u64::from).sum();
        metrics.limit.set(self.limit.map_or(0, |limit| i64::try_from(limit).unwrap_or(i64::MAX)));
        let share = ConnectionShare::new(self.limit, accepted);
        if let Some(limit) = self.limit.filter(|_| share.granted < accepted) {
            tracing::warn!(
                limit,
                needed = accepted + OWN,
                connections = share.granted,
                "Limit of open files is too low, accepting fewer connections"
            );
        }
        share
    }
}

/// Fraction of the listeners' connections that the limit of open files permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionShare {
    granted: u64,
    wanted: u64,
}

impl ConnectionShare {
    fn new(limit: Option<u64>, wanted: u64) -> Self {
        let granted = limit.map_or(wanted, |limit| limit.saturating_sub(OWN.min(limit / OWN_SHARE)).min(wanted));
        Self { granted, wanted }
    }

    /// Connections at most of a listener that would accept `max`; at least one.
    pub(super) fn of(self, max: u32) -> u32 {
        if self.granted >= self.wanted {
            return max;
        }
        let scaled = u128::from(self.granted) * u128::from(max) / u128::from(self.wanted);
        u32::try_from(scaled).unwrap_or(max).clamp(1, max.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: u32 = 20_000;
    const ENROLMENT: u32 = 4_096;
    const WANTED: u64 = (EVENTS + ENROLMENT) as u64;

    #[test]
    fn a_sufficient_limit_reduces_no_listener() {
        for limit in [None, Some(WANTED + OWN), Some(1 << 20)] {
            let share = ConnectionShare::new(limit, WANTED);
            assert_eq!((share.of(EVENTS), share.of(ENROLMENT)), (EVENTS, ENROLMENT), "{limit:?}");
        }
    }

    #[test]
    fn a_low_limit_is_divided_and_leaves_descriptors_for_the_receiver_itself() {
        for limit in [64, 1_024, 4_096, 20_000, WANTED + OWN - 1] {
            let share = ConnectionShare::new(Some(limit), WANTED);
            let accepted = u64::from(share.of(EVENTS) + share.of(ENROLMENT));
            assert!(accepted + OWN.min(limit / OWN_SHARE) <= limit, "{limit}: {accepted} connections");
            assert!(
                accepted + 2 >= limit * 3 / 4 || accepted + 2 + OWN >= limit,
                "{limit}: only {accepted} connections"
            );
            assert!(share.of(EVENTS) > 4 * share.of(ENROLMENT), "{limit}: in proportion");
        }
        assert_eq!(ConnectionShare::new(Some(0), WANTED).of(EVENTS), 1);
    }

    #[test]
    fn the_soft_limit_becomes_the_hard_limit() {
        let raised = OpenFiles::raise();
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        assert_eq!((raised.limit, current), (maximum, maximum));
    }
}
