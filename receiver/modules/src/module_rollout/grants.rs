//! Admissions of runtimes that the replica with the fleet role grants. It decides for the whole fleet, and each replica lets the Kymas
//! of its shards have a version only while they are granted.
//!
//! A grant ends by itself unless it is renewed, so that nothing is admitted any more that no replica counts.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tidewatch_select::catalog::rollout::RolloutKey;
use tokio::{sync::Notify, time::Instant};

/// Validity of a grant; the replica with the role renews it once a second.
const VALID: Duration = Duration::from_secs(30);
/// Maximum number of Kymas in one question, whose size is limited.
const MAX_NAMED: usize = 1_000;

/// Question by which Kymas are granted a version: all of one rollout, in one or more parts of the same round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Question {
    module: String,
    /// `None` for a mandatory module.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    channel: Option<String>,
    /// Move of the rollout.
    change: String,
    /// Distinguishes this evaluation from the one before.
    round: i64,
    /// Uids of Kymas.
    admitted: Vec<String>,
}

impl Question {
    /// Questions that grant these Kymas, and no others, the version of a rollout.
    pub(super) fn of(key: &RolloutKey, change: &str, round: i64, admitted: &BTreeSet<String>) -> Vec<Self> {
        let question = |part: &[&String]| Self {
            module: key.module.clone(),
            channel: key.channel.clone(),
            change: change.to_owned(),
            round,
            admitted: part.iter().copied().cloned().collect(),
        };
        let all: Vec<_> = admitted.iter().collect();
        if all.is_empty() { vec![question(&[])] } else { all.chunks(MAX_NAMED).map(question).collect() }
    }
}

/// Grants that this replica has received. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Grants(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// By rollout; bounded by the rollouts in progress.
    grants: Mutex<HashMap<RolloutKey, Grant>>,
    changed: Notify,
}

#[derive(Debug)]
struct Grant {
    change: String,
    round: i64,
    admitted: BTreeSet<String>,
    until: Instant,
}

impl Grants {
    /// Takes over what the replica with the role grants.
    pub(super) fn receive(&self, question: Question, now: Instant) {
        let Question { module, channel, change, round, admitted } = question;
        let admitted: BTreeSet<_> = admitted.into_iter().collect();
        let mut grants = self.0.grants.lock();
        let until = now + VALID;
        let grant = grants.entry(RolloutKey { module, channel }).or_insert_with(|| Grant {
            change: change.clone(),
            round,
            admitted: BTreeSet::new(),
            until,
        });
        let mut is_changed = !admitted.is_subset(&grant.admitted);
        if (&grant.change, grant.round) == (&change, round) {
            grant.admitted.extend(admitted);
        } else {
            is_changed |= grant.change != change || grant.admitted != admitted;
            (grant.change, grant.round, grant.admitted) = (change, round, admitted);
        }
        grant.until = until;
        if is_changed {
            self.0.changed.notify_one();
        }
    }

    /// Uids of the Kymas that may have the version of a move now.
    pub(super) fn of(&self, key: &RolloutKey, change: &str, now: Instant) -> BTreeSet<String> {
        let grants = self.0.grants.lock();
        let grant = grants.get(key).filter(|grant| grant.change == change && now < grant.until);
        grant.map(|grant| grant.admitted.clone()).unwrap_or_default()
    }

    /// Retains only the grants of these rollouts.
    pub(super) fn retain(&self, keep: impl Fn(&RolloutKey) -> bool) {
        self.0.grants.lock().retain(|key, _| keep(key));
    }

    /// Waits for other grants. Cancel safe.
    pub(super) async fn changed(&self) {
        self.0.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn uids(range: std::ops::Range<usize>) -> BTreeSet<String> {
        range.map(|n| format!("uid-{n:04}")).collect()
    }

    #[test]
    fn round_replaces_the_one_before_in_any_number_of_parts() {
        let grants = Grants::default();
        let now = Instant::now();
        let key = RolloutKey { module: "keda".to_owned(), channel: Some("fast".to_owned()) };
        let receive = |change: &str, round, admitted: &BTreeSet<String>| {
            let questions = Question::of(&key, change, round, admitted);
            for question in &questions {
                let json = serde_json::to_vec(question).unwrap();
                assert!(json.len() <= 60 * 1_024, "{} bytes", json.len());
                grants.receive(serde_json::from_slice(&json).unwrap(), now);
            }
            questions.len()
        };
        let is_changed = || grants.changed().now_or_never().is_some();
        assert_eq!(grants.of(&key, "a", now), uids(0..0));
        assert_eq!(receive("a", 1, &uids(0..2_500)), 3);
        assert_eq!((grants.of(&key, "a", now), is_changed()), (uids(0..2_500), true));
        receive("a", 2, &uids(0..2_500));
        assert_eq!(receive("a", 3, &uids(7..9)), 1);
        assert_eq!((grants.of(&key, "a", now), is_changed()), (uids(7..9), true));
        receive("a", 4, &uids(7..9));
        assert!(!is_changed(), "it is only renewed");
        assert_eq!(grants.of(&key, "b", now), uids(0..0), "another move");
        let other = RolloutKey { channel: None, ..key.clone() };
        assert_eq!(grants.of(&other, "a", now), uids(0..0));
        assert_eq!(receive("a", 5, &uids(0..0)), 1);
        assert_eq!((grants.of(&key, "a", now), is_changed()), (uids(0..0), true), "taken back");
        receive("b", 6, &uids(1..2));
        assert_eq!(grants.of(&key, "b", now + VALID - Duration::from_millis(1)), uids(1..2));
        assert_eq!(grants.of(&key, "b", now + VALID), uids(0..0), "not renewed");
        grants.retain(|_| false);
        assert_eq!(grants.of(&key, "b", now), uids(0..0));
    }
}
