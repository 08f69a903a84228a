//! Condition of the event path by the agent's own evidence: its heartbeats and their responses.

use tidewatch_api::ConditionStatus;
use tidewatch_contract::{
    admin::{EventPath, agent::Runtime},
    heartbeat::{EVIDENCE_INTERVALS, failing},
};

/// Evaluates the evidence in the receiver's order and returns the first finding; `canary` is the age of the canary
/// in seconds. Reports at once where the receiver waits for better evidence.
pub(super) fn evaluate(runtime: &Runtime, heartbeat_sent: bool, canary: Option<u64>) -> EventPath {
    let Some(response) = &runtime.heartbeat else {
        return if heartbeat_sent {
            broken("NoHeartbeat", Some("none was answered yet".to_owned()))
        } else {
            unknown()
        };
    };
    let allowed = u64::from(response.interval_seconds.max(1)) * u64::from(EVIDENCE_INTERVALS);
    if response.seconds_ago > allowed {
        return broken("NoHeartbeat", None);
    }
    if response.plan_revision.is_some() && runtime.plan_revision != response.plan_revision {
        return broken("OldPlan", runtime.plan_error.as_deref().map(not_applied));
    }
    if let Some((watch, error)) = failing(&runtime.watches) {
        let message = error.map_or_else(|| format!("{watch} is not listed"), |error| format!("{watch}: {error}"));
        return broken("FailingWatch", Some(message));
    }
    if let Some(error) = &runtime.plan_error {
        return broken("OldPlan", Some(not_applied(error)));
    }
    if let Some(watch) = response.resend.iter().flatten().next() {
        return broken("Diverged", Some(watch.clone()));
    }
    match canary {
        None => broken("StaleCanary", Some("the canary never came back".to_owned())),
        Some(age) if age > allowed => broken("StaleCanary", None),
        Some(_) => EventPath { state: ConditionStatus::True, reason: "Proven".to_owned(), message: None },
    }
}

/// The condition before a heartbeat was sent.
pub(super) fn unknown() -> EventPath {
    EventPath { state: ConditionStatus::Unknown, reason: "Unknown".to_owned(), message: None }
}

fn broken(reason: &str, message: Option<String>) -> EventPath {
    EventPath { state: ConditionStatus::False, reason: reason.to_owned(), message }
}

fn not_applied(error: &str) -> String {
    format!("the agent cannot apply the newest plan or settings: {error}")
}

#[cfg(test)]
mod tests {
    use tidewatch_api::identity::Epoch;
    use tidewatch_contract::{admin::agent::LastHeartbeat, heartbeat::WatchState};

    use super::*;

    fn snapshot() -> Runtime {
        Runtime {
            id: "r-1".to_owned(),
            epoch: Epoch::new(1),
            sequence: 7,
            accepted: 7,
            instance: None,
            path: unknown(),
            heartbeat: Some(LastHeartbeat {
                seconds_ago: 90,
                interval_seconds: 30,
                plan_revision: Some("p".into()),
                settled: None,
                resend: Some(Vec::new()),
            }),
            plan_revision: Some("p".into()),
            plan_error: None,
            waiting: 0,
            parked: 0,
            unsettled: 0,
            gaps: 0,
            resends: 0,
            watches: vec![WatchState {
                name: "pods".into(),
                objects: 1,
                digest: None,
                listed_seconds_ago: Some(5),
                alive_seconds_ago: Some(5),
                coarse: false,
                not_served: false,
                error: None,
            }],
        }
    }

    fn evaluate(change: impl FnOnce(&mut Runtime), canary: Option<u64>) -> String {
        let mut snapshot = snapshot();
        change(&mut snapshot);
        super::evaluate(&snapshot, true, canary).to_string()
    }

    #[test]
    fn first_finding_is_reported() {
        assert_eq!(evaluate(|_| {}, Some(90)), "True, Proven");
        assert_eq!(evaluate(|_| {}, Some(91)), "False, StaleCanary");
        assert_eq!(evaluate(|_| {}, None), "False, StaleCanary: the canary never came back");
        let resend = |snapshot: &mut Runtime| {
            snapshot.heartbeat.as_mut().unwrap().resend = Some(vec!["pods".into()]);
        };
        assert_eq!(evaluate(resend, None), "False, Diverged: pods");
        let fails = |snapshot: &mut Runtime| snapshot.watches[0].error = Some("403".into());
        let both = |snapshot: &mut Runtime| (resend(snapshot), fails(snapshot)).0;
        assert_eq!(evaluate(both, Some(0)), "False, FailingWatch: pods: 403");
        let unlisted = |snapshot: &mut Runtime| snapshot.watches[0].listed_seconds_ago = None;
        assert_eq!(evaluate(unlisted, Some(0)), "False, FailingWatch: pods is not listed");
        let old = |snapshot: &mut Runtime| snapshot.plan_revision = None;
        assert_eq!(evaluate(|snapshot| (old(snapshot), fails(snapshot)).0, Some(0)), "False, OldPlan");
        let refused = |snapshot: &mut Runtime| (old(snapshot), snapshot.plan_error = Some("no".into())).0;
        let message = "False, OldPlan: the agent cannot apply the newest plan or settings: no";
        assert_eq!(evaluate(refused, Some(0)), message);
        // The plan is the newest, but the agent would not learn of another one.
        let blind = |snapshot: &mut Runtime| snapshot.plan_error = Some("no".into());
        assert_eq!(evaluate(blind, Some(0)), message);
        assert_eq!(
            evaluate(|snapshot| (blind(snapshot), fails(snapshot)).0, Some(0)),
            "False, FailingWatch: pods: 403"
        );
        let silent = |snapshot: &mut Runtime| snapshot.heartbeat.as_mut().unwrap().seconds_ago = 91;
        assert_eq!(evaluate(|snapshot| (silent(snapshot), old(snapshot)).0, Some(0)), "False, NoHeartbeat");
    }

    #[test]
    fn path_is_unproven_without_a_response_and_unknown_without_a_heartbeat() {
        let unanswered = |snapshot: &mut Runtime| snapshot.heartbeat = None;
        assert_eq!(evaluate(unanswered, Some(0)), "False, NoHeartbeat: none was answered yet");
        let mut unsent = snapshot();
        unanswered(&mut unsent);
        assert_eq!(super::evaluate(&unsent, false, Some(0)).to_string(), "Unknown, Unknown");
    }

    #[test]
    fn missing_plan_revision_of_the_receiver_is_no_mismatch() {
        let unnamed = |snapshot: &mut Runtime| snapshot.heartbeat.as_mut().unwrap().plan_revision = None;
        assert_eq!(evaluate(unnamed, Some(0)), "True, Proven");
    }
}
