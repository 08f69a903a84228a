//! Status of a Manifest, computed from the current one and the findings of a reconcile. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tidewatch_api::{Condition, ConditionStatus, LastOperation, Manifest, ManifestStatus, State};
use tidewatch_kit::foreign_text;

use super::inventory::Inventory;

/// Condition that the objects of the version are known.
pub(super) const RESOURCES: &str = "Resources";
/// Condition that the objects were applied and the manager is ready.
pub(super) const INSTALLATION: &str = "Installation";
/// Condition that the default module CR was created. It is never created again while this is true.
pub(super) const MODULE_CR: &str = "ModuleCR";

/// Longest text of an operation, in characters.
const MAX_OPERATION_CHARS: usize = 1_024;

/// Findings of a reconcile.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Findings {
    pub(super) state: State,
    /// Cause of the wait, or the fault of the module; one sentence that stays the same while the cause does.
    pub(super) operation: String,
    /// The version was rendered; `None` keeps the condition.
    pub(super) rendered: Option<bool>,
    /// All objects are applied and the manager is ready; `None` keeps the condition.
    pub(super) installed: Option<bool>,
    /// The default module CR was created; `None` if the Manifest has none, or keeps the condition.
    pub(super) default_created: Option<bool>,
    pub(super) inventory: Inventory,
}

/// Type, reason and texts of a condition, as lifecycle-manager writes them.
struct Kind {
    name: &'static str,
    reason: &'static str,
    met: &'static str,
    unmet: &'static str,
}

const KINDS: [Kind; 3] = [
    Kind {
        name: RESOURCES,
        reason: "ResourcesAvailable",
        met: "resources are parsed and ready for use",
        unmet: "resources not parsed",
    },
    Kind {
        name: INSTALLATION,
        reason: Condition::READY,
        met: "installation is ready and resources can be used",
        unmet: "installation not finished",
    },
    Kind {
        name: MODULE_CR,
        reason: "ModuleCRCreated",
        met: "module CR was deployed",
        unmet: "module CR has not been deployed to SKR",
    },
];

/// Computes the status. Times and texts move only with the state that they describe.
pub(super) fn compute(manifest: &Manifest, findings: &Findings, now: &Time) -> ManifestStatus {
    let old = manifest.status.clone().unwrap_or_default();
    let generation = manifest.metadata.generation;
    let mut conditions = old.conditions().to_vec();
    let met = [findings.rendered, findings.installed, findings.default_created];
    for (kind, met) in KINDS.iter().zip(met) {
        set(&mut conditions, kind, met, generation, now);
    }
    let operation = foreign_text::shortened(&findings.operation, MAX_OPERATION_CHARS);
    let unchanged =
        old.last_operation.clone().filter(|last| old.state == findings.state && last.operation == operation);
    let last = || LastOperation { operation, last_update_time: Some(now.clone()), ..LastOperation::default() };
    ManifestStatus {
        state: findings.state,
        conditions: Some(conditions),
        synced: Some(findings.inventory.write().into()),
        last_operation: Some(unchanged.unwrap_or_else(last)),
        other: old.other,
    }
}

/// True if the default module CR was created in this Manifest's life.
pub(super) fn is_default_created(manifest: &Manifest) -> bool {
    let mut conditions = manifest.status.iter().flat_map(ManifestStatus::conditions);
    conditions.any(|condition| condition.type_ == MODULE_CR && condition.is_true())
}

fn set(conditions: &mut Vec<Condition>, kind: &Kind, met: Option<bool>, generation: Option<i64>, now: &Time) {
    let Some(met) = met else { return };
    let status = ConditionStatus::from(met);
    let message = if met { kind.met } else { kind.unmet };
    let fresh = Condition {
        reason: kind.reason.to_owned(),
        observed_generation: generation,
        ..Condition::new(kind.name, status, message, now.clone())
    };
    match conditions.iter_mut().find(|condition| condition.type_ == kind.name) {
        Some(known) if known.status == status => {}
        Some(known) => *known = fresh,
        None => conditions.push(fresh),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn time(second: i64) -> Time {
        Time(jiff::Timestamp::from_second(second).unwrap())
    }

    fn findings(state: State, operation: &str) -> Findings {
        Findings {
            state,
            operation: operation.to_owned(),
            rendered: Some(true),
            installed: Some(state == State::Ready),
            default_created: None,
            inventory: Inventory::default(),
        }
    }

    fn manifest(status: Option<ManifestStatus>) -> Manifest {
        let mut manifest: Manifest = serde_json::from_value(json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "namespace": "ns", "generation": 3},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}}))
        .unwrap();
        manifest.status = status;
        manifest
    }

    #[test]
    fn the_same_findings_change_nothing_at_a_later_time() {
        let first = compute(&manifest(None), &findings(State::Processing, "waiting"), &time(1));
        let again = compute(&manifest(Some(first.clone())), &findings(State::Processing, "waiting"), &time(2));
        assert_eq!(first, again);
        let other = compute(&manifest(Some(first.clone())), &findings(State::Processing, "other"), &time(2));
        assert_eq!(other.last_operation.unwrap().last_update_time, Some(time(2)));
        let ready = compute(&manifest(Some(first)), &findings(State::Ready, "waiting"), &time(3));
        assert_eq!(ready.last_operation.unwrap().last_update_time, Some(time(3)));
        let times: Vec<_> = ready.conditions.unwrap().into_iter().map(|c| (c.type_, c.last_transition_time)).collect();
        assert_eq!(times, [(RESOURCES.to_owned(), time(1)), (INSTALLATION.to_owned(), time(3))]);
    }

    #[test]
    fn the_default_object_stays_recorded_as_created() {
        let created = Findings { default_created: Some(true), ..findings(State::Ready, "") };
        let status = compute(&manifest(None), &created, &time(1));
        let kept = compute(&manifest(Some(status)), &findings(State::Error, "e"), &time(2));
        assert!(is_default_created(&manifest(Some(kept))));
        assert!(!is_default_created(&manifest(None)));
    }

    #[test]
    fn members_and_conditions_of_others_stay_and_texts_are_bounded() {
        let status = serde_json::from_value(json!({"state": "Ready", "more": {"a": 1}, "conditions": [
            {"type": "Theirs", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}));
        let status = compute(&manifest(Some(status.unwrap())), &findings(State::Error, &"x".repeat(5_000)), &time(1));
        assert_eq!(status.other["more"], json!({"a": 1}));
        assert_eq!(status.conditions()[0].type_, "Theirs");
        assert_eq!(status.last_operation.as_ref().unwrap().operation.chars().count(), MAX_OPERATION_CHARS);
        let again = compute(&manifest(Some(status.clone())), &findings(State::Error, &"x".repeat(5_000)), &time(2));
        assert_eq!(again, status, "the same text is no change, however long it is");
    }
}
