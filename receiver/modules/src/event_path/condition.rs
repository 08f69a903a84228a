//! Computes the conditions of a Kyma. Messages contain no moving numbers, so that only transitions are written.

use tidewatch_api::{Condition, ConditionStatus, Kyma};
use tidewatch_fleet::{PathState, USED_V3_SUFFIX, Unproven, pause::PauseReason};
use tidewatch_kit::variant::VariantName as _;
use tidewatch_trust::FollowState;

/// The events of the runtime arrive.
pub(super) const EVENT_PATH: &str = "EventPath";
/// Reconciles of the runtime are paused.
pub(super) const PAUSED: &str = "Paused";

/// The CA rotation does not wait for the runtime.
pub(super) const CA_ROTATION: &str = "CARotation";
/// No rollout of a module that the runtime failed in is halted.
pub(super) const MODULE_ROLLOUT: &str = "ModuleRollout";

/// Change of one condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Sets the condition.
    Set {
        /// Type of the condition.
        kind: &'static str,
        /// Status of the condition.
        status: ConditionStatus,
        /// CamelCase word of a closed set.
        reason: &'static str,
        /// One sentence.
        message: String,
        /// Only the message differs from the current condition.
        message_only: bool,
    },
    /// Removes the condition of this type.
    Remove(&'static str),
}

impl Change {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Set { kind, .. } | Self::Remove(kind) => kind,
        }
    }

    /// Returns whether only the message changes.
    pub(super) fn message_only(&self) -> bool {
        matches!(self, Self::Set { message_only: true, .. })
    }
}

/// Computes the change of `EventPath`, if any; an unknown path changes nothing. `used_v3` is evaluated only for a path
/// without heartbeats.
pub(super) fn event_path(path: Option<&PathState>, used_v3: impl FnOnce() -> bool, kyma: &Kyma) -> Option<Change> {
    let path = path?;
    let message = match path {
        PathState::Unknown => return None,
        PathState::Proven => "events arrive: the agent's canary comes through, and every watch stands".to_owned(),
        PathState::Unproven(flaw) => message(flaw),
    };
    let suffix = if !path.receives_heartbeats() && used_v3() { USED_V3_SUFFIX } else { "" };
    change(kyma, EVENT_PATH, path.status(), path.as_str(), message + suffix)
}

/// Returns whether the condition of the path depends on nothing but the path: only that of a path without heartbeats contains
/// whether events have arrived.
pub(super) fn is_independent_of_events(path: &PathState) -> bool {
    matches!(path, PathState::Unknown) || path.receives_heartbeats()
}

fn message(flaw: &Unproven) -> String {
    match flaw {
        Unproven::NoHeartbeat => "no heartbeat of the agent came for three intervals".to_owned(),
        Unproven::Away => {
            "the runtime has been silent for long, and its API server does not answer: it seems to be switched off"
                .to_owned()
        }
        Unproven::LegacyAgent => "the agent speaks the old contract, which cannot prove that events arrive".to_owned(),
        Unproven::OldPlan { error: None } => "the agent does not follow the newest plan yet".to_owned(),
        Unproven::OldPlan { error: Some(error) } => {
            format!("the agent cannot apply the newest plan or settings: {error}")
        }
        Unproven::FailingWatch { watch, error: None } => format!("the watch {watch:?} is not listed yet"),
        Unproven::FailingWatch { watch, error: Some(error) } => format!("the watch {watch:?} fails: {error}"),
        Unproven::Diverged { watch } => {
            format!("the digest of the watch {watch:?} does not match its events: a resend was requested")
        }
        Unproven::StaleCanary { came_back: true } => {
            "the agent's canary did not come back through its watch for three intervals".to_owned()
        }
        Unproven::StaleCanary { came_back: false } => "the agent's canary never came back through its watch".to_owned(),
    }
}

/// Computes the change of `Paused`, if any; the condition is absent without a pause.
pub(super) fn paused(reason: Option<PauseReason>, kyma: &Kyma) -> Option<Change> {
    match reason {
        Some(reason) => {
            let message = format!("{}: nothing is written to the runtime, and its events wait", reason.message());
            change(kyma, PAUSED, ConditionStatus::True, reason.as_str(), message)
        }
        None => shown(kyma, PAUSED).map(|_| Change::Remove(PAUSED)),
    }
}

/// Computes the change of `ModuleRollout`, if any. The condition is present while a rollout that the runtime failed in is
/// halted; without evidence the current one stays.
pub(super) fn module_rollout(halted: Option<Option<&String>>, kyma: &Kyma) -> Option<Change> {
    match halted? {
        Some(message) => change(kyma, MODULE_ROLLOUT, ConditionStatus::False, "Halted", message.clone()),
        None => shown(kyma, MODULE_ROLLOUT).map(|_| Change::Remove(MODULE_ROLLOUT)),
    }
}

/// Computes the change of `CARotation`, if any. The condition is present while a rotation waits for the runtime for
/// longer than expected; without evidence the current one stays.
pub(super) fn rotation(follows: Option<FollowState>, kyma: &Kyma) -> Option<Change> {
    match follows? {
        FollowState::Pending => None,
        FollowState::Overdue(behind) => {
            let message = format!("the rotation of the CA waits for the runtime: its agent {}", behind.as_str());
            change(kyma, CA_ROTATION, ConditionStatus::False, behind.reason(), message)
        }
        FollowState::UpToDate => shown(kyma, CA_ROTATION).map(|_| Change::Remove(CA_ROTATION)),
    }
}

fn change(
    kyma: &Kyma,
    kind: &'static str,
    status: ConditionStatus,
    reason: &'static str,
    message: String,
) -> Option<Change> {
    let shown = shown(kyma, kind);
    let message_only = shown.is_some_and(|shown| shown.status == status && shown.reason == reason);
    let same = message_only && shown.is_some_and(|shown| shown.message == message);
    (!same).then_some(Change::Set { kind, status, reason, message, message_only })
}

/// Returns the condition in the cache.
pub(super) fn shown<'a>(kyma: &'a Kyma, kind: &str) -> Option<&'a Condition> {
    kyma.status.as_ref()?.condition(kind)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_contract::admin::rotation::StragglerReason;

    use super::*;

    fn kyma(conditions: serde_json::Value) -> Kyma {
        serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "metadata": {"name": "k"},
            "spec": {"channel": "regular"}, "status": {"conditions": conditions}
        }))
        .unwrap()
    }

    fn showing(kind: &str, change: &Change) -> Kyma {
        let Change::Set { status, reason, message, .. } = change else { panic!("gone") };
        kyma(json!([{"type": kind, "status": status, "reason": reason, "message": message,
                     "lastTransitionTime": "2026-01-01T00:00:00Z"}]))
    }

    #[test]
    fn transition_is_written_once_and_an_unknown_path_never() {
        let nothing = kyma(json!([]));
        assert_eq!(event_path(None, || false, &nothing), None);
        assert_eq!(event_path(Some(&PathState::Unknown), || false, &nothing), None);
        for (path, expected) in [
            (PathState::Proven, ConditionStatus::True),
            (PathState::Unproven(Unproven::NoHeartbeat), ConditionStatus::False),
            (PathState::Unproven(Unproven::Away), ConditionStatus::Unknown),
            (PathState::Unproven(Unproven::LegacyAgent), ConditionStatus::Unknown),
            (PathState::Unproven(Unproven::Diverged { watch: "w".into() }), ConditionStatus::False),
        ] {
            let change = event_path(Some(&path), || false, &nothing).unwrap();
            let Change::Set { status, reason, message_only, .. } = &change else { panic!("gone") };
            assert_eq!((*status, *reason, *message_only), (expected, path.as_str(), false));
            let shown = showing(EVENT_PATH, &change);
            assert_eq!(event_path(Some(&path), || false, &shown), None, "already written");
            assert_eq!(event_path(Some(&PathState::Unknown), || false, &shown), None, "the current condition stays");
            assert!(
                event_path(Some(&PathState::Unproven(Unproven::OldPlan { error: None })), || false, &shown).is_some()
            );
        }
    }

    #[test]
    fn message_of_a_silent_agent_states_its_use_of_v3() {
        for (flaw, has_suffix) in
            [(Unproven::NoHeartbeat, true), (Unproven::Away, true), (Unproven::OldPlan { error: None }, false)]
        {
            let path = PathState::Unproven(flaw);
            let change = event_path(Some(&path), || true, &kyma(json!([]))).unwrap();
            let Change::Set { message, .. } = &change else { panic!("gone") };
            assert_eq!(message.ends_with(USED_V3_SUFFIX), has_suffix, "{message}");
            let shown = showing(EVENT_PATH, &change);
            assert_eq!(event_path(Some(&path), || true, &shown), None, "already written");
            assert_eq!(
                event_path(Some(&path), || false, &shown).is_some_and(|change| change.message_only()),
                has_suffix
            );
        }
    }

    #[test]
    fn change_of_the_message_alone_is_marked() {
        let fails =
            |error: &str| PathState::Unproven(Unproven::FailingWatch { watch: "w".into(), error: Some(error.into()) });
        let change = event_path(Some(&fails("a")), || false, &kyma(json!([]))).unwrap();
        assert!(event_path(Some(&fails("b")), || false, &showing(EVENT_PATH, &change)).unwrap().message_only());
    }

    #[test]
    fn pause_sets_its_condition_and_its_end_removes_it() {
        let nothing = kyma(json!([]));
        assert_eq!(paused(None, &nothing), None);
        let change = paused(Some(PauseReason::ConfigMap), &nothing).unwrap();
        let shown = showing(PAUSED, &change);
        assert_eq!(paused(Some(PauseReason::ConfigMap), &shown), None);
        assert!(!paused(Some(PauseReason::Label), &shown).unwrap().message_only());
        assert_eq!(paused(None, &shown), Some(Change::Remove(PAUSED)));
    }

    #[test]
    fn halted_rollout_sets_its_condition_where_the_module_failed() {
        let nothing = kyma(json!([]));
        assert_eq!(module_rollout(Some(None), &nothing), None);
        let halted = "the rollout has halted".to_owned();
        let change = module_rollout(Some(Some(&halted)), &nothing).unwrap();
        let shown = showing(MODULE_ROLLOUT, &change);
        assert_eq!(module_rollout(Some(Some(&halted)), &shown), None);
        assert_eq!(module_rollout(None, &shown), None, "without evidence it stays");
        assert_eq!(module_rollout(Some(None), &shown), Some(Change::Remove(MODULE_ROLLOUT)));
    }

    #[test]
    fn straggler_has_its_condition_until_it_follows() {
        let nothing = kyma(json!([]));
        for absent in [None, Some(FollowState::UpToDate), Some(FollowState::Pending)] {
            assert_eq!(rotation(absent, &nothing), None, "{absent:?}");
        }
        let late = |behind| Some(FollowState::Overdue(behind));
        let change = rotation(late(StragglerReason::Bundle), &nothing).unwrap();
        let Change::Set { status: ConditionStatus::False, reason: "RootsNotConfirmed", .. } = &change else {
            panic!("{change:?}")
        };
        let shown = showing(CA_ROTATION, &change);
        for unchanged in [None, Some(FollowState::Pending), late(StragglerReason::Bundle)] {
            assert_eq!(rotation(unchanged, &shown), None, "{unchanged:?}");
        }
        assert!(!rotation(late(StragglerReason::Certificate), &shown).unwrap().message_only());
        assert_eq!(rotation(Some(FollowState::UpToDate), &shown), Some(Change::Remove(CA_ROTATION)));
    }
}
