//! The status of both Kymas: computed purely, written only if it differs.

mod concurrent;
mod condition;
mod show;
mod write;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;
use tidewatch_api::{Condition, KymaStatus, LastOperation, ModuleStatus, Other, State, names::SKR_NAMESPACE};
use tidewatch_installer::Readiness;
use tidewatch_kit::{foreign_text, hash::hash};

pub(super) use concurrent::{CONFLICT_RETRIES, reread};
pub(super) use condition::{Conditions, Observation, unreachable_since};
pub(super) use write::{ShownStatus, in_runtime, update_runtime, write_runtime};

/// Maximum length in characters of a text that can quote the runtime: of a condition's message, of the last operation,
/// and of a module's message.
const MAX_TEXT_CHARS: usize = 1_024;
/// Precedes the text of an error of the control plane's API server. It names accounts and objects there, so the status in
/// the runtime cluster ends before it.
pub(super) const CONTROL_PLANE_CAUSE: &str = "; the control plane reports: ";
/// Last operation of a Kyma that is being deleted, while it has modules.
pub(super) const WAITING_FOR_MODULES: &str = "waiting for modules to be deleted";
/// Last operation of a Kyma that is being deleted, after its modules.
const WAITING_FOR_OBJECTS: &str = "waiting for the objects in the runtime to be deleted";

/// The observations of a reconcile. Unobserved parts keep their current status.
#[derive(Clone, Debug, Default)]
pub(super) struct Findings {
    /// Channel of the Kyma.
    pub(super) channel: Option<String>,
    /// Status of all its modules, sorted by name.
    pub(super) modules: Option<Vec<ModuleStatus>>,
    /// See [`Conditions`].
    pub(super) conditions: Conditions,
    /// Failure that ended the reconcile; the Kyma's state is Error.
    pub(super) failure: Option<String>,
    /// Objects that block a removal, as one sentence.
    pub(super) waits: Option<String>,
    /// The Kyma is being deleted.
    pub(super) deleting: bool,
}

impl Findings {
    /// Returns true if the reconcile looked at the modules, or failed before it could.
    pub(super) const fn covers_modules(&self) -> bool {
        self.modules.is_some() || self.failure.is_some() || self.deleting
    }
}

/// Computes the status of the KCP Kyma from the current one and the findings.
pub(super) fn compute(old: &KymaStatus, findings: &Findings, now: &Time) -> KymaStatus {
    let bounded = |text: &Option<String>| text.as_deref().map(|text| foreign_text::shortened(text, MAX_TEXT_CHARS));
    let failure = bounded(&findings.failure);
    let waits = bounded(&findings.waits);
    let mut modules = findings.modules.clone().unwrap_or_else(|| old.modules().to_vec());
    if let (Some(message), Some(Readiness::Not { .. }), false) =
        (&failure, &findings.conditions.access, findings.deleting)
    {
        for module in &mut modules {
            module.state = State::Error;
            module.message = Some(message.clone());
        }
    }
    modules.sort_by(|a, b| a.name.cmp(&b.name));
    let all_ready = modules.iter().all(|module| matches!(module.state, State::Ready | State::Unmanaged));
    let is_well = all_ready && (failure.is_none() || findings.deleting);
    let conditions = findings.conditions.merge(old, Some(is_well), now);
    let (state, usual) = match &failure {
        _ if findings.deleting && modules.is_empty() => (State::Deleting, WAITING_FOR_OBJECTS),
        _ if findings.deleting => (State::Deleting, WAITING_FOR_MODULES),
        Some(_) => (State::Error, ""),
        None => aggregate(&modules, &conditions),
    };
    let operation = failure.as_deref().or(waits.as_deref()).unwrap_or(usual);
    let active_channel = match (&findings.channel, state) {
        (Some(channel), State::Ready | State::Warning) => Some(channel.clone()),
        _ => old.active_channel.clone(),
    };
    KymaStatus {
        state: Some(state),
        last_operation: Some(last_operation(old, state, operation, now)),
        conditions: Some(conditions),
        modules: Some(modules),
        active_channel,
        ..KymaStatus::default()
    }
}

/// The status after a reconcile that looked at the given conditions but not at the modules. As long as `Modules` is False, state and
/// last operation stay: they explain a failure that only a reconcile of the modules can find resolved.
pub(super) fn compute_conditions(old: &KymaStatus, conditions: &Conditions, now: &Time) -> KymaStatus {
    let conditions = conditions.merge(old, None, now);
    let mut new = KymaStatus { modules: Some(old.modules().to_vec()), other: Other::new(), ..old.clone() };
    if !condition::modules_failed(&conditions) {
        let (state, operation) = aggregate(old.modules(), &conditions);
        new.state = Some(state);
        new.last_operation = Some(last_operation(old, state, operation, now));
    }
    KymaStatus { conditions: Some(conditions), ..new }
}

/// The state that the worst module and the conditions amount to, with the text of the last operation.
fn aggregate(modules: &[ModuleStatus], conditions: &[Condition]) -> (State, &'static str) {
    let is = |state| modules.iter().any(|module| module.state.known() == state);
    let all_true = conditions.iter().filter(|condition| condition::counts(condition)).all(Condition::is_true);
    match [State::Error, State::Warning, State::Processing].into_iter().find(|state| is(*state)) {
        None if all_true => (State::Ready, "kyma is ready"),
        state => (state.unwrap_or(State::Processing), "waiting for all modules to become ready"),
    }
}

fn last_operation(old: &KymaStatus, state: State, operation: &str, now: &Time) -> LastOperation {
    let same = old.last_operation.as_ref().filter(|before| before.operation == operation && old.state == Some(state));
    let since = same.and_then(|before| before.last_update_time.clone()).unwrap_or_else(|| now.clone());
    LastOperation { operation: operation.to_owned(), last_update_time: Some(since), ..LastOperation::default() }
}

/// The status in the form of the runtime cluster's Kyma: templates are in its own namespace, Manifests do not exist
/// there, and texts of the control plane's API server are not for its users.
pub(super) fn for_runtime(mut status: KymaStatus) -> KymaStatus {
    if let Some(operation) = &mut status.last_operation {
        withhold_control_plane_cause(&mut operation.operation);
    }
    // They change without a reconcile, and would be outdated there most of the time.
    status
        .conditions
        .iter_mut()
        .for_each(|conditions| conditions.retain(|condition| !condition::is_anothers(condition)));
    for module in status.modules.iter_mut().flatten() {
        module.message.as_mut().map(withhold_control_plane_cause);
        module.manifest = None;
        if let Some(metadata) = module.template.as_mut().and_then(|template| template.metadata.as_mut()) {
            metadata.namespace = Some(SKR_NAMESPACE.to_owned());
        }
    }
    status
}

fn withhold_control_plane_cause(text: &mut String) {
    if let Some(end) = text.find(CONTROL_PLANE_CAUSE) {
        text.truncate(end);
    }
}

/// Returns true if two statuses are equal except for values that API servers add or omit.
pub(super) fn same(a: &KymaStatus, b: &KymaStatus) -> bool {
    essence(a) == essence(b)
}

/// Hash of a status within this process, equal for statuses that are the [`same`].
pub(super) fn fingerprint(status: &KymaStatus) -> u64 {
    hash(&essence(status).map(|value| value.to_string()))
}

fn essence(status: &KymaStatus) -> Option<Value> {
    let mut value = serde_json::to_value(status).ok()?;
    strip(&mut value);
    Some(value)
}

/// Removes the members that equal an absent one. Returns true if the value itself equals an absent one.
fn strip(value: &mut Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(elements) => {
            for element in elements.iter_mut() {
                strip(element);
            }
            elements.is_empty()
        }
        Value::Object(members) => {
            members.retain(|_, member| !strip(member));
            members.is_empty()
        }
        Value::Bool(true) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tidewatch_kit::variant::VariantName as _;

    use super::*;

    fn now(second: i64) -> Time {
        Time(jiff::Timestamp::from_second(second).unwrap())
    }

    fn findings(states: &[State]) -> Findings {
        let module = |(n, state): (usize, &State)| ModuleStatus {
            name: format!("m{n}"),
            state: *state,
            ..ModuleStatus::default()
        };
        Findings {
            channel: Some("fast".into()),
            modules: Some(states.iter().enumerate().map(module).collect()),
            conditions: Conditions {
                crds: Some(Ok(None)),
                catalog: Some(Ok(None)),
                access: Some(Readiness::Ready),
                webhook: None,
                pull_secret: None,
            },
            ..Findings::default()
        }
    }

    fn first(findings: &Findings) -> KymaStatus {
        compute(&KymaStatus::default(), findings, &now(0))
    }

    fn operation(status: &KymaStatus) -> (&str, i64) {
        let operation = status.last_operation.as_ref().unwrap();
        (&operation.operation, operation.last_update_time.as_ref().unwrap().0.as_second())
    }

    /// Status, message and transition time of a condition.
    fn condition<'a>(status: &'a KymaStatus, kind: &str) -> (&'a str, &'a str, i64) {
        let condition = status.condition(kind).unwrap();
        (condition.status.as_str(), &condition.message, condition.last_transition_time.0.as_second())
    }

    #[test]
    fn the_worst_module_decides() {
        use State::{Deleting, Error, Processing, Ready, Unmanaged, Unset, Warning};
        for (states, state, text) in [
            (vec![], Ready, "kyma is ready"),
            (vec![Ready, Unmanaged], Ready, "kyma is ready"),
            (vec![Ready, Processing], Processing, "waiting for all modules to become ready"),
            (vec![Ready, Unset], Processing, "waiting for all modules to become ready"),
            (vec![Ready, Deleting], Processing, "waiting for all modules to become ready"),
            (vec![Warning, Processing], Warning, "waiting for all modules to become ready"),
            (vec![Warning, Error], Error, "waiting for all modules to become ready"),
        ] {
            let status = first(&findings(&states));
            assert_eq!((status.state(), operation(&status).0), (state, text), "{states:?}");
            assert_eq!(condition(&status, "Modules").0, if state == Ready { "True" } else { "False" }, "{states:?}");
            assert_eq!(status.active_channel.as_deref(), matches!(state, Ready | Warning).then_some("fast"));
        }
    }

    #[test]
    fn conditions_count_but_the_access_does_not() {
        let mut catalog_failed = findings(&[State::Ready]);
        catalog_failed.conditions.catalog = Some(Err("apply moduletemplates/x: no (403 Forbidden)".into()));
        let status = first(&catalog_failed);
        assert_eq!(status.state(), State::Processing);
        assert_eq!(
            condition(&status, "ModuleCatalog").1,
            "module templates are out of sync and need to be resynchronized: apply moduletemplates/x: no (403 Forbidden)"
        );
        let nobody_looked = Conditions { crds: Some(Ok(None)), ..Conditions::default() };
        let again = compute(&status, &Findings { conditions: nobody_looked, ..findings(&[]) }, &now(1));
        assert_eq!(condition(&again, "ModuleCatalog"), condition(&status, "ModuleCatalog"), "the words stay");
        assert_eq!(status.condition("ModuleCatalog").unwrap().reason, "Ready");
        let status = first(&Findings {
            conditions: Conditions { crds: Some(Ok(None)), ..Conditions::default() },
            ..findings(&[])
        });
        assert_eq!(
            condition(&status, "ModuleCatalog"),
            ("Unknown", "module templates synchronization state is unknown", 0)
        );
        assert_eq!(status.state(), State::Processing);
        assert!(status.condition("RuntimeAccess").is_none(), "what nobody looked at is not claimed");
    }

    #[test]
    fn times_change_only_with_their_state() {
        let before = compute(&KymaStatus::default(), &findings(&[State::Ready]), &now(10));
        assert!(same(&compute(&before, &findings(&[State::Ready]), &now(20)), &before));
        let worse = compute(&before, &findings(&[State::Processing]), &now(30));
        assert_eq!(operation(&worse).1, 30);
        assert_eq!((condition(&worse, "Modules").2, condition(&worse, "CRDsSync").2), (30, 10));
        assert_eq!(worse.active_channel.as_deref(), Some("fast"), "what was active stays named");
        assert_eq!(operation(&compute(&worse, &findings(&[State::Error]), &now(40))).1, 40, "the state moved");
    }

    #[test]
    fn without_access_every_module_is_in_error_with_the_sentence() {
        let old = first(&findings(&[State::Ready, State::Ready]));
        let access = Readiness::Not { reason: "AccessSecretMissing", message: "no access Secret".into() };
        let lost = Findings {
            conditions: Conditions { access: Some(access), ..Conditions::default() },
            failure: Some("no access Secret".into()),
            ..Findings::default()
        };
        let status = compute(&old, &lost, &now(5));
        assert_eq!((status.state(), operation(&status)), (State::Error, ("no access Secret", 5)));
        for module in status.modules() {
            assert_eq!((module.state, module.message.as_deref()), (State::Error, Some("no access Secret")));
        }
        assert_eq!(condition(&status, "RuntimeAccess"), ("False", "no access Secret", 5));
        assert_eq!(condition(&status, "CRDsSync").0, "True", "what was not looked at stays");
        assert_eq!(unreachable_since(&status, "AccessSecretMissing"), Some(now(5).0));
        assert_eq!(unreachable_since(&status, "Unreachable"), None);
    }

    #[test]
    fn remark_on_the_access_is_the_message_of_its_condition() {
        let reached = |access| Findings {
            conditions: Conditions { access: Some(access), ..Conditions::default() },
            ..findings(&[State::Ready])
        };
        let status = compute(
            &KymaStatus::default(),
            &reached(Readiness::ReadyWith { reason: "Ready", message: "reached, but".into() }),
            &now(1),
        );
        assert_eq!(condition(&status, "RuntimeAccess"), ("True", "reached, but", 1));
        let status = compute(&status, &reached(Readiness::Ready), &now(2));
        assert_eq!(condition(&status, "RuntimeAccess"), ("True", "the runtime can be reached", 1));
    }

    #[test]
    fn deleting_wins_over_everything() {
        let status = first(&Findings { deleting: true, ..findings(&[State::Error]) });
        assert_eq!((status.state(), operation(&status).0), (State::Deleting, "waiting for modules to be deleted"));
        let empty = compute(&status, &Findings { deleting: true, ..findings(&[]) }, &now(1));
        assert_eq!(operation(&empty), ("waiting for the objects in the runtime to be deleted", 1), "no module is left");
        let access = Readiness::Not { reason: "Unreachable", message: "away".into() };
        let held = |failure: Option<&str>| Findings {
            conditions: Conditions { access: failure.map(|_| access.clone()), ..Conditions::default() },
            failure: failure.map(str::to_owned),
            waits: Some("waiting for x".into()),
            deleting: true,
            ..findings(&[State::Deleting])
        };
        for (failure, expected) in [(None, "waiting for x"), (Some("away"), "away")] {
            let status = compute(&status, &held(failure), &now(1));
            assert_eq!((status.state(), operation(&status)), (State::Deleting, (expected, 1)));
            assert_eq!(status.modules()[0].state, State::Deleting, "they go as they do");
        }
    }

    #[test]
    fn text_of_a_runtime_is_one_short_line_everywhere() {
        let hostile = format!("a\u{1b}[2J\nb\u{202e}{}", "x".repeat(100_000));
        let access = Readiness::Not { reason: "Unreachable", message: hostile.clone() };
        let conditions = Conditions {
            crds: Some(Err(hostile.clone())),
            catalog: Some(Err(hostile.clone())),
            access: Some(access.clone()),
            webhook: Some(access),
            pull_secret: Some(Err(hostile.clone())),
        };
        let failed = Findings { conditions, failure: Some(hostile.clone()), ..findings(&[State::Ready]) };
        let failed = first(&failed);
        let waiting = first(&Findings { waits: Some(hostile), ..findings(&[State::Ready]) });
        let mut texts =
            vec![operation(&failed).0, operation(&waiting).0, failed.modules()[0].message.as_deref().unwrap()];
        texts.extend(failed.conditions.iter().flatten().map(|condition| &*condition.message));
        assert_eq!(texts.len(), 9);
        for text in texts {
            assert!(text.chars().count() <= MAX_TEXT_CHARS, "{text:.40}");
            assert!(!text.contains(|char: char| char.is_control() || char == '\u{202e}'), "{text:.80?}");
        }
        assert!(operation(&failed).0.starts_with("a [2J b xxx"));
    }

    #[test]
    fn blocking_objects_change_no_state() {
        let status = first(&Findings { waits: Some("waiting for x".into()), ..findings(&[State::Ready]) });
        assert_eq!((status.state(), operation(&status).0), (State::Ready, "waiting for x"));
    }

    #[test]
    fn causes_in_the_control_plane_stay_there() {
        let cause = "User \"system:serviceaccount:kcp-system:receiver\" cannot patch (403 Forbidden)";
        let failure = Some(format!("failed to apply the Manifest{CONTROL_PLANE_CAUSE}{cause}"));
        let not_ready = Readiness::Not { reason: "SecretMissing", message: String::new() };
        let conditions = Conditions { access: Some(not_ready), ..Conditions::default() };
        let status = first(&Findings { failure, conditions, ..findings(&[State::Ready]) });
        let texts =
            |status: &KymaStatus| [operation(status).0.to_owned(), status.modules()[0].message.clone().unwrap()];
        assert!(texts(&status).iter().all(|text| text.contains("serviceaccount")), "{status:?}");
        assert_eq!(texts(&for_runtime(status)), ["failed to apply the Manifest"; 2]);
    }

    #[test]
    fn the_runtime_sees_no_manifest_and_its_own_namespace() {
        let status: KymaStatus = serde_json::from_value(json!({"state": "Ready", "modules": [{"name": "a", "state": "Ready",
            "manifest": {"metadata": {"name": "k-a-1"}}, "template": {"metadata": {"name": "a-1", "namespace": "kcp-system"}}
        }]}))
        .unwrap();
        assert_eq!(
            serde_json::to_value(for_runtime(status)).unwrap(),
            json!({"state": "Ready", "modules": [{
                "name": "a", "state": "Ready", "template": {"metadata": {"name": "a-1", "namespace": "kyma-system"}}
            }]})
        );
    }

    #[test]
    fn defaults_and_empty_members_say_nothing() {
        let status = |json| serde_json::from_value::<KymaStatus>(json).unwrap();
        let full = status(
            json!({"activeChannel": "", "modules": [{"name": "a", "state": "Ready", "maintenance": false, "message": ""}]}),
        );
        let bare = status(json!({"modules": [{"name": "a", "state": "Ready"}], "conditions": []}));
        assert!(same(&full, &bare));
        assert!(!same(&full, &status(json!({"modules": [{"name": "a", "state": "Error"}]}))));
    }
}
