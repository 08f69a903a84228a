//! Conditions of a Kyma: lifecycle-manager's five, which count for its state, and our own, which do not.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tidewatch_api::{Condition, ConditionStatus, KymaStatus};
use tidewatch_installer::{Readiness, SYNCHRONIZED};
use tidewatch_kit::foreign_text;

use super::MAX_TEXT_CHARS;

const CRDS: &str = "CRDsSync";
const MODULES: &str = "Modules";
const CATALOG: &str = "ModuleCatalog";
const ACCESS: &str = "RuntimeAccess";
/// lifecycle-manager's condition type for the agent's installation.
pub(super) const WEBHOOK: &str = "SKRWebhook";
/// lifecycle-manager's condition type for the image pull secret of the modules.
pub(super) const PULL_SECRET: &str = "SKRImagePullSecretSync";
/// Conditions that other controllers write with their own field managers.
const OTHERS: [&str; 4] = ["EventPath", "Paused", "CARotation", "ModuleRollout"];

/// True with an optional remark, or False with its cause.
pub(crate) type Observation = Result<Option<String>, String>;

/// Observed conditions; `None` keeps the current one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Conditions {
    /// The runtime cluster has our CRDs.
    pub(crate) crds: Option<Observation>,
    /// The runtime cluster has its catalog.
    pub(crate) catalog: Option<Observation>,
    /// The runtime cluster has the image pull secret of the modules; always `None` if there is none.
    pub(crate) pull_secret: Option<Observation>,
    /// The API server of the runtime cluster responds.
    pub(crate) access: Option<Readiness>,
    /// The runtime cluster has its agent; always `None` if the receiver does not install agents.
    pub(crate) webhook: Option<Readiness>,
}

/// Returns true for conditions that count for the Kyma's state.
pub(super) fn counts(condition: &Condition) -> bool {
    [CRDS, MODULES, CATALOG, WEBHOOK, PULL_SECRET].contains(&condition.type_.as_str())
}

/// Returns true if a module is not ready, or a failure of the Kyma prevents that.
pub(super) fn modules_failed(conditions: &[Condition]) -> bool {
    conditions.iter().any(|condition| condition.type_ == MODULES && condition.status == ConditionStatus::False)
}

/// Returns true for conditions of other controllers.
pub(super) fn is_anothers(condition: &Condition) -> bool {
    OTHERS.contains(&condition.type_.as_str())
}

/// Returns true for conditions that lifecycle-manager does not write: it does not know them, or they concern our agent.
pub(super) fn is_ours_alone(condition: &Condition) -> bool {
    is_anothers(condition) || [ACCESS, WEBHOOK].contains(&condition.type_.as_str())
}

impl Conditions {
    /// Merges the observations into the current conditions. Conditions of other controllers and of disabled features
    /// are omitted.
    pub(super) fn merge(&self, old: &KymaStatus, modules: Option<bool>, now: &Time) -> Vec<Condition> {
        let mut conditions = Vec::new();
        let all_modules = modules.map(|ready| if ready { Ok(None) } else { Err(String::new()) });
        for (kind, found) in [(CRDS, &self.crds), (MODULES, &all_modules), (CATALOG, &self.catalog)] {
            let (status, text) = match (found, old.condition(kind)) {
                (Some(found), _) => observed(kind, found),
                (None, Some(before)) => (before.status, before.message.clone()),
                (None, None) => (ConditionStatus::Unknown, message(kind, ConditionStatus::Unknown).to_owned()),
            };
            conditions.push(condition(old, kind, status, Condition::READY, &text, now));
        }
        for (kind, found, well) in
            [(ACCESS, &self.access, "the runtime can be reached"), (WEBHOOK, &self.webhook, SYNCHRONIZED)]
        {
            let (status, reason, message) = match found {
                Some(Readiness::Ready) => (ConditionStatus::True, Condition::READY, well),
                Some(Readiness::ReadyWith { reason, message }) => (ConditionStatus::True, *reason, message.as_str()),
                Some(Readiness::Not { reason, message }) => (ConditionStatus::False, *reason, message.as_str()),
                None => {
                    conditions.extend(old.condition(kind).cloned());
                    continue;
                }
            };
            conditions.push(condition(old, kind, status, reason, message, now));
        }
        match &self.pull_secret {
            Some(found) => {
                let (status, text) = observed(PULL_SECRET, found);
                conditions.push(condition(old, PULL_SECRET, status, Condition::READY, &text, now));
            }
            None => conditions.extend(old.condition(PULL_SECRET).cloned()),
        }
        conditions
    }
}

/// Status and message of an observed condition of lifecycle-manager.
fn observed(kind: &str, found: &Observation) -> (ConditionStatus, String) {
    let status = ConditionStatus::from(found.is_ok());
    let words = found.as_ref().map_or_else(Some, Option::as_ref);
    let words = words.filter(|words| !words.is_empty()).map(|words| format!(": {words}"));
    (status, format!("{}{}", message(kind, status), words.unwrap_or_default()))
}

/// Builds a condition; lastTransitionTime changes only with status or reason.
fn condition(
    old: &KymaStatus,
    kind: &str,
    status: ConditionStatus,
    reason: &str,
    message: &str,
    now: &Time,
) -> Condition {
    let same = old.condition(kind).filter(|before| before.status == status && before.reason == reason);
    let since = same.map_or(now, |before| &before.last_transition_time);
    let message = foreign_text::shortened(message, MAX_TEXT_CHARS);
    Condition { reason: reason.to_owned(), ..Condition::new(kind, status, &message, since.clone()) }
}

fn message(kind: &str, status: ConditionStatus) -> &'static str {
    use ConditionStatus::{False, True, Unknown};
    match (kind, status) {
        (CRDS, True) => "CRDs are synchronized to the SKR",
        (CRDS, False) => "CRDs are not synchronized to the SKR",
        (CRDS, Unknown) => "CRDs synchronization state is unknown",
        (MODULES, True) => "all modules are in ready state",
        (MODULES, False) => "not all modules are in ready state",
        (MODULES, Unknown) => "modules state is unknown",
        (PULL_SECRET, True) => "skr image pull secret is synchronized",
        (PULL_SECRET, False | Unknown) => "skr image pull secret is out of sync and needs to be resynchronized",
        (_, True) => "module templates are synchronized",
        (_, False) => "module templates are out of sync and need to be resynchronized",
        (_, Unknown) => "module templates synchronization state is unknown",
    }
}

/// Removes a condition that no controller updates.
pub(super) fn remove(status: &mut KymaStatus, kind: &str) {
    status.conditions.iter_mut().for_each(|conditions| conditions.retain(|condition| condition.type_ != kind));
}

/// Time since when the status reports this reason for the unreachable runtime cluster.
pub(crate) fn unreachable_since(status: &KymaStatus, reason: &str) -> Option<Timestamp> {
    let condition = status.condition(ACCESS)?;
    let holds = condition.status == ConditionStatus::False && condition.reason == reason;
    holds.then_some(condition.last_transition_time.0)
}
