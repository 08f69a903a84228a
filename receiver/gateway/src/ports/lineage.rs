//! Detects two agent processes that use the identity of one runtime.
//!
//! An agent draws an epoch when it starts, and another one when another receiver process answers; it never returns to
//! an earlier one. A request of an earlier epoch that arrives long after the first of a later one is therefore from a
//! second process: a copied key, or a pod that the runtime's API server believes to be gone. All times are those of
//! arrival at this receiver.

use std::time::Duration;

use tidewatch_api::identity::Epoch;
use tidewatch_contract::{certificate::Leaf, signature::WINDOW_SECONDS};
use tokio::time::Instant;

/// Time in which requests of an earlier epoch may still arrive: a signature is valid for a minute, from at most a
/// minute in the future.
const GRACE: Duration = Duration::from_secs(2 * WINDOW_SECONDS.unsigned_abs() + 30);
/// Earlier epochs at most; beyond it the one without a request for longest is forgotten.
const MAX_EARLIER: usize = 16;

/// A certificate in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UsedLeaf {
    pub(super) fingerprint: String,
    /// End of validity, in Unix seconds.
    pub(super) not_after: i64,
}

impl UsedLeaf {
    pub(super) fn of(leaf: &Leaf) -> Self {
        Self { fingerprint: leaf.fingerprint.clone(), not_after: leaf.not_after }
    }
}

/// The certificates of two processes, which are equal if one of them was copied and not renewed since.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fork(pub(super) [UsedLeaf; 2]);

/// Epochs of one runtime, in the order of their first requests.
#[derive(Debug, Default)]
pub(super) struct Lineage {
    current: Option<(Epoch, UsedLeaf)>,
    earlier: Vec<EarlierEpoch>,
}

#[derive(Debug)]
struct EarlierEpoch {
    epoch: Epoch,
    /// First request of a later epoch.
    replaced: Instant,
    /// Last request of this one.
    seen: Instant,
}

impl Lineage {
    /// Observes a verified request. After a fork it starts anew.
    pub(super) fn observe(&mut self, epoch: Epoch, leaf: &Leaf, now: Instant) -> Result<(), Fork> {
        match &mut self.current {
            Some((current, used)) if *current == epoch => {
                if used.fingerprint != leaf.fingerprint {
                    *used = UsedLeaf::of(leaf);
                }
                return Ok(());
            }
            None => {
                self.current = Some((epoch, UsedLeaf::of(leaf)));
                return Ok(());
            }
            Some(_) => {}
        }
        if let Some(earlier) = self.earlier.iter_mut().find(|earlier| earlier.epoch == epoch) {
            earlier.seen = now;
            if now.saturating_duration_since(earlier.replaced) <= GRACE {
                return Ok(());
            }
            let other = self.current.take().map(|(_, leaf)| leaf);
            self.earlier.clear();
            let leaf = UsedLeaf::of(leaf);
            return Err(Fork([other.unwrap_or_else(|| leaf.clone()), leaf]));
        }
        if let Some((replaced, _)) = self.current.replace((epoch, UsedLeaf::of(leaf))) {
            if self.earlier.len() >= MAX_EARLIER {
                let oldest = self.earlier.iter().enumerate().min_by_key(|(_, earlier)| earlier.seen);
                oldest.map(|(at, _)| at).map(|at| self.earlier.swap_remove(at));
            }
            self.earlier.push(EarlierEpoch { epoch: replaced, replaced: now, seen: now });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rustls_pki_types::CertificateDer;

    use super::*;

    fn leaf(name: &str) -> Leaf {
        Leaf {
            der: CertificateDer::from(Vec::new()),
            fingerprint: name.to_owned(),
            public_key: Vec::new(),
            not_after: 5,
            not_before: 0,
            authority: None,
        }
    }

    struct Requests(Lineage, Instant);

    impl Requests {
        /// A request of an epoch after some seconds; the fingerprints in case of a fork.
        fn send(&mut self, wait: u64, epoch: u64, name: &str) -> Option<[String; 2]> {
            self.1 += Duration::from_secs(wait);
            let fork = self.0.observe(Epoch::new(epoch), &leaf(name), self.1).err();
            fork.map(|Fork(leaves)| leaves.map(|leaf| leaf.fingerprint))
        }
    }

    fn requests() -> Requests {
        Requests(Lineage::default(), Instant::now())
    }

    #[test]
    fn restarts_and_requests_under_way_are_no_fork() {
        let mut requests = requests();
        for epoch in 1..=100 {
            assert_eq!(requests.send(3, epoch, "a"), None);
            // Sent before the restart.
            assert_eq!(requests.send(1, epoch.saturating_sub(1).max(1), "a"), None);
        }
        assert_eq!(requests.send(100_000, 100, "b"), None, "renewed");
        assert_eq!(requests.send(100_000, 101, "b"), None);
        assert!(requests.0.earlier.len() <= MAX_EARLIER);
    }

    #[test]
    fn two_processes_with_one_certificate_are_a_fork() {
        let mut requests = requests();
        let forks = (0..20).find_map(|_| requests.send(15, 1, "a").or_else(|| requests.send(15, 2, "a")));
        assert_eq!(forks, Some(["a".to_owned(), "a".to_owned()]));
        assert!(requests.0.current.is_none(), "both enrol again");
    }

    #[test]
    fn both_certificates_of_two_processes_are_named() {
        let mut requests = requests();
        assert_eq!(requests.send(0, 1, "stolen"), None);
        assert_eq!(requests.send(10, 2, "renewed"), None);
        assert_eq!(requests.send(1_000, 1, "stolen"), Some(["renewed".to_owned(), "stolen".to_owned()]));
    }

    #[test]
    fn a_process_with_ever_new_epochs_does_not_hide_the_other() {
        let mut requests = requests();
        let mut forks =
            (10..1_000).filter_map(|epoch| requests.send(8, 1, "a").or_else(|| requests.send(1, epoch, "a")));
        assert!(forks.next().is_some());
    }
}
