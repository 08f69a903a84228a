//! What the conditions of a Kyma shall say. Texts hold no number that moves, so that only transitions are written.

use tidewatch_shared::api::{Condition, ConditionStatus, Kyma};

use crate::base::pause::Why;
use crate::{
    fleet::{PathState, SPOKE_V3, Unproven},
    pki::Follows,
};

/// Whether the way from the runtime to here is proven.
pub(super) const EVENT_PATH: &str = "EventPath";
/// Whether the runtime is left alone.
pub(super) const PAUSED: &str = "Paused";

/// Whether the rotation of the CA goes on for all that this runtime does.
pub(super) const CA_ROTATION: &str = "CARotation";

/// What one condition shall say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// This.
    Is {
        /// Its type.
        kind: &'static str,
        /// Whether it holds.
        status: ConditionStatus,
        /// A CamelCase word of a closed set.
        reason: &'static str,
        /// One sentence.
        message: String,
        /// Only the sentence is another one than before.
        only_words: bool,
    },
    /// It shall not be there.
    Gone(&'static str),
}

impl Said {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Is { kind, .. } | Self::Gone(kind) => kind,
        }
    }

    /// Whether only the words are others than before.
    pub(super) fn only_words(&self) -> bool {
        matches!(self, Self::Is { only_words: true, .. })
    }
}

/// What the condition `EventPath` shall say, if it says something else. Nothing is said while nobody can know. `spoke_v3` is asked of those
/// whose agent is not heard of.
pub(super) fn event_path(path: Option<&PathState>, spoke_v3: impl FnOnce() -> bool, kyma: &Kyma) -> Option<Said> {
    let path = path?;
    let message = match path {
        PathState::Unknown => return None,
        PathState::Proven => "events arrive: the agent's canary comes through, and every watch stands".to_owned(),
        PathState::Unproven(flaw) => words(flaw),
    };
    let memory = if !path.is_heard() && spoke_v3() { SPOKE_V3 } else { "" };
    news(kyma, EVENT_PATH, path.status(), path.as_str(), message + memory)
}

fn words(flaw: &Unproven) -> String {
    match flaw {
        Unproven::NoHeartbeat => "no heartbeat of the agent came for three intervals".to_owned(),
        Unproven::Away => {
            "nothing was heard of the runtime for long, and its API server does not answer: it seems to be switched off"
                .to_owned()
        }
        Unproven::LegacyAgent => "the agent speaks the old contract, which cannot prove that events arrive".to_owned(),
        Unproven::OldPlan { refused: None } => "the agent does not follow the newest plan yet".to_owned(),
        Unproven::OldPlan { refused: Some(why) } => format!("the agent refused the newest plan: {why}"),
        Unproven::FailingWatch { watch, error: None } => format!("the watch {watch:?} is not listed yet"),
        Unproven::FailingWatch { watch, error: Some(error) } => format!("the watch {watch:?} fails: {error}"),
        Unproven::Diverged { watch } => {
            format!("what was told of the watch {watch:?} does not add up: it is being told anew")
        }
        Unproven::StaleCanary { came_back: true } => {
            "the agent's canary did not come back through its watch for three intervals".to_owned()
        }
        Unproven::StaleCanary { came_back: false } => "the agent's canary never came back through its watch".to_owned(),
    }
}

/// What the condition `Paused` shall say, if it says something else. Without a pause it is not there.
pub(super) fn paused(why: Option<Why>, kyma: &Kyma) -> Option<Said> {
    match why {
        Some(why) => {
            let message = format!("{}: nothing is written to the runtime, and its events wait", why.words());
            news(kyma, PAUSED, ConditionStatus::True, why.reason(), message)
        }
        None => shown(kyma, PAUSED).map(|_| Said::Gone(PAUSED)),
    }
}

/// What the condition `CARotation` shall say, if it says something else. It is there while a rotation waits for the runtime for longer than
/// it should take; what is shown stays while nobody can know.
pub(super) fn rotation(follows: Option<Follows>, kyma: &Kyma) -> Option<Said> {
    match follows? {
        Follows::NotYet => None,
        Follows::Late(behind) => {
            let message = format!("the rotation of the CA waits for the runtime: its agent {}", behind.as_str());
            news(kyma, CA_ROTATION, ConditionStatus::False, behind.reason(), message)
        }
        Follows::Well => shown(kyma, CA_ROTATION).map(|_| Said::Gone(CA_ROTATION)),
    }
}

fn news(
    kyma: &Kyma,
    kind: &'static str,
    status: ConditionStatus,
    reason: &'static str,
    message: String,
) -> Option<Said> {
    let shown = shown(kyma, kind);
    let only_words = shown.is_some_and(|shown| shown.status == status && shown.reason == reason);
    let same = only_words && shown.is_some_and(|shown| shown.message == message);
    (!same).then_some(Said::Is { kind, status, reason, message, only_words })
}

/// The condition as the cache has it.
pub(super) fn shown<'a>(kyma: &'a Kyma, kind: &str) -> Option<&'a Condition> {
    kyma.status.as_ref()?.condition(kind)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pki::Behind;

    fn kyma(conditions: serde_json::Value) -> Kyma {
        serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "metadata": {"name": "k"},
            "spec": {"channel": "regular"}, "status": {"conditions": conditions}
        }))
        .unwrap()
    }

    fn shows(kind: &str, said: &Said) -> Kyma {
        let Said::Is { status, reason, message, .. } = said else { panic!("gone") };
        kyma(json!([{"type": kind, "status": status, "reason": reason, "message": message,
                     "lastTransitionTime": "2026-01-01T00:00:00Z"}]))
    }

    #[test]
    fn a_transition_is_said_once_and_ignorance_never() {
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
            let said = event_path(Some(&path), || false, &nothing).unwrap();
            let Said::Is { status, reason, only_words, .. } = &said else { panic!("gone") };
            assert_eq!((*status, *reason, *only_words), (expected, path.as_str(), false));
            let shown = shows(EVENT_PATH, &said);
            assert_eq!(event_path(Some(&path), || false, &shown), None, "said already");
            assert_eq!(event_path(Some(&PathState::Unknown), || false, &shown), None, "what is shown stays");
            assert!(
                event_path(Some(&PathState::Unproven(Unproven::OldPlan { refused: None })), || false, &shown).is_some()
            );
        }
    }

    #[test]
    fn that_an_agent_has_spoken_v3_is_said_while_it_is_silent() {
        for (flaw, remembers) in
            [(Unproven::NoHeartbeat, true), (Unproven::Away, true), (Unproven::OldPlan { refused: None }, false)]
        {
            let path = PathState::Unproven(flaw);
            let said = event_path(Some(&path), || true, &kyma(json!([]))).unwrap();
            let Said::Is { message, .. } = &said else { panic!("gone") };
            assert_eq!(message.ends_with(SPOKE_V3), remembers, "{message}");
            let shown = shows(EVENT_PATH, &said);
            assert_eq!(event_path(Some(&path), || true, &shown), None, "said already");
            assert_eq!(event_path(Some(&path), || false, &shown).is_some_and(|said| said.only_words()), remembers);
        }
    }

    #[test]
    fn other_words_of_the_same_reason_are_told_apart() {
        let fails =
            |error: &str| PathState::Unproven(Unproven::FailingWatch { watch: "w".into(), error: Some(error.into()) });
        let said = event_path(Some(&fails("a")), || false, &kyma(json!([]))).unwrap();
        assert!(event_path(Some(&fails("b")), || false, &shows(EVENT_PATH, &said)).unwrap().only_words());
    }

    #[test]
    fn a_pause_is_told_and_its_end_takes_the_condition_away() {
        let nothing = kyma(json!([]));
        assert_eq!(paused(None, &nothing), None);
        let said = paused(Some(Why::ConfigMap), &nothing).unwrap();
        let shown = shows(PAUSED, &said);
        assert_eq!(paused(Some(Why::ConfigMap), &shown), None);
        assert!(!paused(Some(Why::Label), &shown).unwrap().only_words());
        assert_eq!(paused(None, &shown), Some(Said::Gone(PAUSED)));
    }

    #[test]
    fn a_straggler_of_a_rotation_is_named_until_it_has_followed() {
        let nothing = kyma(json!([]));
        for unsaid in [None, Some(Follows::Well), Some(Follows::NotYet)] {
            assert_eq!(rotation(unsaid, &nothing), None, "{unsaid:?}");
        }
        let late = |behind| Some(Follows::Late(behind));
        let said = rotation(late(Behind::Bundle), &nothing).unwrap();
        let Said::Is { status: ConditionStatus::False, reason: "RootsNotConfirmed", .. } = &said else {
            panic!("{said:?}")
        };
        let shown = shows(CA_ROTATION, &said);
        for kept in [None, Some(Follows::NotYet), late(Behind::Bundle)] {
            assert_eq!(rotation(kept, &shown), None, "{kept:?}");
        }
        assert!(!rotation(late(Behind::Certificate), &shown).unwrap().only_words());
        assert_eq!(rotation(Some(Follows::Well), &shown), Some(Said::Gone(CA_ROTATION)));
    }
}
