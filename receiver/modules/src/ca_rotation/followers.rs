//! Runtimes that follow a rotation: a summary of those of a replica, which are merged into that of the fleet.

use serde::{Deserialize, Serialize};
use tidewatch_contract::admin::rotation::{MAX_NAMED_STRAGGLERS, Straggler, StragglerReason};
use tidewatch_fleet::{
    evidence::Replicas,
    peers::{AskError, Topic},
    table::{RuntimeReport, RuntimeTable},
};
use tidewatch_kit::variant::VariantName as _;
use tidewatch_trust::{Flags, TlsState, ca_state::CaState, store::CaSecret, tls_state::CaSecretStatus};
use tokio::sync::watch;

use super::{decide, unix};

/// Question about the runtimes of each replica. A replica that has other roots cannot answer it: it would neither serve nor judge
/// its runtimes by those of the question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Question {
    /// resourceVersion of the CA's Secret.
    version: String,
    /// Revision of the bundle that agents confirm.
    revision: String,
}

impl Question {
    pub(super) fn new(secret: &CaSecret, revision: &str) -> Self {
        Self { version: secret.version().to_owned(), revision: revision.to_owned() }
    }
}

/// Answer to a [`Question`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Answer {
    /// Runtimes of the shards that the replica holds.
    Followers(FollowerSummary),
    /// The replica has observed another state of the CA.
    OtherState,
}

/// Summary of the runtimes that follow a rotation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FollowerSummary {
    /// Number of runtimes.
    pub(super) runtimes: usize,
    /// Number of runtimes that the phase waits for.
    pub(super) waiting_for: usize,
    /// Their names, sorted by Kyma; at most [`MAX_NAMED_STRAGGLERS`].
    pub(super) stragglers: Vec<Straggler>,
}

impl FollowerSummary {
    /// Summarizes the runtimes that the phase waits for, of so many runtimes.
    pub(super) fn of(behind: &[(RuntimeReport, StragglerReason)], runtimes: usize) -> Self {
        let stragglers = behind.iter().map(|(follower, reason)| straggler(follower, *reason)).collect();
        let mut summary = Self { runtimes, waiting_for: behind.len(), stragglers };
        summary.limit();
        summary
    }

    /// Merges the answers of all replicas. `None` if one has observed another state, and without any answer.
    pub(super) fn merged(answers: Vec<Answer>) -> Option<Self> {
        let mut merged = (!answers.is_empty()).then(Self::default)?;
        for answer in answers {
            let Answer::Followers(part) = answer else { return None };
            merged.runtimes += part.runtimes;
            merged.waiting_for += part.waiting_for;
            merged.stragglers.extend(part.stragglers);
        }
        merged.limit();
        Some(merged)
    }

    fn limit(&mut self) {
        // By namespace, then by name, neither of which contains a slash.
        self.stragglers.sort_by(|one, other| one.kyma.split('/').cmp(other.kyma.split('/')));
        self.stragglers.truncate(MAX_NAMED_STRAGGLERS);
    }
}

/// Returns the runtimes that the phase waits for.
pub(super) fn behind(
    state: &CaState,
    flags: &Flags,
    revision: &str,
    followers: Vec<RuntimeReport>,
) -> Vec<(RuntimeReport, StragglerReason)> {
    let now = unix();
    let reason = |follower| {
        let reason = decide::straggler_reason(state, flags.certificate_validity, revision, &follower, now)?;
        Some((follower, reason))
    };
    followers.into_iter().filter_map(reason).collect()
}

/// Answers the questions of the replica that decides.
pub(super) fn respond(replicas: &Replicas, tls_state: &TlsState, fleet: RuntimeTable, flags: Flags) {
    let status = tls_state.secret_status();
    let trust = tls_state.trust();
    replicas.respond(Topic::CaRotation, move |question: Question| {
        let revision = trust.borrow().agents.revision().to_owned();
        answer(&status, &revision, &question, &fleet, &flags)
    });
}

fn answer(
    status: &watch::Receiver<CaSecretStatus>,
    revision: &str,
    question: &Question,
    fleet: &RuntimeTable,
    flags: &Flags,
) -> Result<Answer, AskError> {
    let CaSecretStatus::Good(secret) = status.borrow().clone() else { return Ok(Answer::OtherState) };
    if Question::new(&secret, revision) != *question {
        return Ok(Answer::OtherState);
    }
    // A shard that was acquired just now may lack runtimes that have not followed.
    if !fleet.is_synced() {
        return Err(AskError::Unavailable);
    }
    let behind = behind(&secret.state, flags, revision, fleet.runtime_reports());
    Ok(Answer::Followers(FollowerSummary::of(&behind, fleet.runtimes())))
}

fn straggler(follower: &RuntimeReport, behind: StragglerReason) -> Straggler {
    Straggler {
        kyma: follower.kyma.to_string(),
        runtime_id: follower.runtime.as_str().to_owned(),
        path: follower.path.as_str().to_owned(),
        behind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(numbers: std::ops::Range<usize>, namespace: &str) -> FollowerSummary {
        let name = |n| Straggler {
            kyma: format!("{namespace}/k-{n:04}"),
            runtime_id: format!("r-{n}"),
            path: "Proven".into(),
            behind: StragglerReason::Bundle,
        };
        let mut summary =
            FollowerSummary { runtimes: 200, waiting_for: numbers.len(), stragglers: numbers.map(name).collect() };
        summary.limit();
        summary
    }

    #[test]
    fn summary_of_the_fleet_is_the_merge_of_its_parts() {
        let merged = |parts: &[FollowerSummary]| {
            let parts = parts.iter().map(|part| serde_json::to_vec(&Answer::Followers(part.clone())).unwrap());
            FollowerSummary::merged(parts.map(|part| serde_json::from_slice(&part).unwrap()).collect()).unwrap()
        };
        let all = merged(&[summary(150..170, "a"), summary(0..60, "a"), summary(60..150, "a")]);
        assert_eq!((all.runtimes, all.waiting_for), (600, 170));
        assert_eq!(all.stragglers, summary(0..100, "a").stragglers);
        let namespaces = merged(&[summary(0..1, "a-b"), summary(0..1, "a")]);
        let names: Vec<_> = namespaces.stragglers.iter().map(|straggler| straggler.kyma.as_str()).collect();
        assert_eq!(names, ["a/k-0000", "a-b/k-0000"], "by namespace");
        let answers = vec![Answer::Followers(all), Answer::OtherState];
        assert_eq!(FollowerSummary::merged(answers), None);
        assert_eq!(FollowerSummary::merged(Vec::new()), None, "nothing is known");
    }
}
