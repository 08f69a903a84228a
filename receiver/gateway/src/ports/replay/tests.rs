use std::collections::BTreeSet;

use proptest::prelude::*;
use rustls_pki_types::CertificateDer;

use super::*;

fn verified(epoch: u64, counter: u64, created: i64) -> VerifiedSignature {
    VerifiedSignature::unchecked(created, Nonce { epoch: Epoch::new(epoch), counter })
}

#[test]
fn nonce_is_taken_once_in_any_order() {
    let mut nonces = ReplayWindows::default();
    for (counter, taken) in [(5, true), (5, false), (3, true), (3, false), (7, true), (6, true), (0, true), (0, false)]
    {
        assert_eq!(nonces.take(&verified(1, counter, 100), 100).is_ok(), taken, "{counter}");
    }
    assert_eq!(nonces.take(&verified(2, 5, 100), 100), Ok(()), "another epoch has counters of its own");
}

#[test]
fn counter_below_the_window_is_refused() {
    let mut nonces = ReplayWindows::default();
    for (counter, taken) in [(1_024, true), (1, true), (0, false), (2_048, true), (1_024, false), (1_025, true)] {
        assert_eq!(nonces.take(&verified(1, counter, 100), 100).is_ok(), taken, "{counter}");
    }
    assert!(nonces.take(&verified(1, u64::MAX, 100), 100).is_ok());
    assert!(nonces.take(&verified(1, u64::MAX, 100), 100).is_err());
}

#[test]
fn epoch_expires_once_it_cannot_be_replayed() {
    let mut nonces = ReplayWindows::default();
    for epoch in 0..16 {
        assert_eq!(nonces.take(&verified(epoch, 1, 100), 100), Ok(()));
    }
    assert_eq!(nonces.take(&verified(16, 1, 100), 100), Err(Refusal::Epochs));
    assert_eq!(nonces.take(&verified(0, 1, 100), 160), Err(Refusal::Replay));
    assert_eq!(nonces.take(&verified(16, 1, 161), 161), Ok(()));
    nonces.expire(222);
    assert!(nonces.is_empty());
}

proptest! {
    #[test]
    fn bitmap_agrees_with_a_set(counters in prop::collection::vec(prop_oneof![0u64..3_000, 0u64..64], 1..400)) {
        let mut nonces = ReplayWindows::default();
        let mut set = BTreeSet::new();
        for counter in counters {
            let highest = set.last().copied().unwrap_or(counter);
            let expected = !set.contains(&counter) && counter.saturating_add(COUNTERS) > highest;
            prop_assert_eq!(nonces.take(&verified(1, counter, 100), 100).is_ok(), expected);
            if expected {
                set.insert(counter);
            }
        }
    }
}

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
    let mut forks = (10..1_000).filter_map(|epoch| requests.send(8, 1, "a").or_else(|| requests.send(1, epoch, "a")));
    assert!(forks.next().is_some());
}
