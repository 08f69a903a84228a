//! Conditions of a Kyma: the incumbent's four, which count for its state, and ours, which never do.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tidewatch_shared::api::{Condition, ConditionStatus, KymaStatus};

use crate::controllers::installer::Readiness;

const CRDS: &str = "CRDsSync";
const MODULES: &str = "Modules";
const CATALOG: &str = "ModuleCatalog";
const ACCESS: &str = "RuntimeAccess";
/// The incumbent's name for the installation of the agent.
const WEBHOOK: &str = "SKRWebhook";
/// Conditions that other rooms write, with field managers of their own.
const OTHERS: [&str; 3] = ["EventPath", "Paused", "CARotation"];

/// Whether and why the runtime can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// It answered.
    Usable,
    /// It cannot be.
    Unusable {
        /// A CamelCase word of a closed set.
        reason: &'static str,
        /// One sentence.
        message: String,
    },
}

/// It holds, perhaps with a remark, or it does not hold and why.
pub(crate) type Said = Result<Option<String>, String>;

/// What was found out; `None` is what nobody looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Conditions {
    /// The runtime has our CRDs.
    pub(crate) crds: Option<Said>,
    /// The runtime has its catalog.
    pub(crate) catalog: Option<Said>,
    /// See [`Access`].
    pub(crate) access: Option<Access>,
    /// The runtime has its agent; never found where agents are not installed.
    pub(crate) webhook: Option<Readiness>,
}

/// Whether a condition counts for the Kyma's state.
pub(super) fn counts(condition: &Condition) -> bool {
    [CRDS, MODULES, CATALOG, WEBHOOK].contains(&condition.type_.as_str())
}

/// Whether another room writes this condition.
pub(super) fn is_anothers(condition: &Condition) -> bool {
    OTHERS.contains(&condition.type_.as_str())
}

/// Whether the incumbent would not say this: it knows no such condition, or has no agent of ours to say it of.
pub(super) fn is_ours_alone(condition: &Condition) -> bool {
    is_anothers(condition) || [ACCESS, WEBHOOK].contains(&condition.type_.as_str())
}

impl Conditions {
    /// All conditions of this room. Those of others are not ours to repeat; those of features that do not run are left out.
    pub(super) fn merge(&self, old: &KymaStatus, modules: bool, now: &Time) -> Vec<Condition> {
        let mut conditions = Vec::new();
        let all_modules = if modules { Ok(None) } else { Err(String::new()) };
        for (kind, found) in [(CRDS, &self.crds), (MODULES, &Some(all_modules)), (CATALOG, &self.catalog)] {
            conditions.push(match (found, old.condition(kind)) {
                (Some(found), _) => {
                    let status = ConditionStatus::from(found.is_ok());
                    let words = found.as_ref().map_or_else(Some, Option::as_ref);
                    let words = words.filter(|words| !words.is_empty()).map(|words| format!(": {words}"));
                    let message = format!("{}{}", message(kind, status), words.unwrap_or_default());
                    condition(old, kind, status, Condition::READY, &message, now)
                }
                (None, Some(before)) => condition(old, kind, before.status, Condition::READY, &before.message, now),
                (None, None) => {
                    let status = ConditionStatus::Unknown;
                    condition(old, kind, status, Condition::READY, message(kind, status), now)
                }
            });
        }
        match &self.access {
            Some(Access::Usable) => {
                let message = "the runtime can be reached";
                conditions.push(condition(old, ACCESS, ConditionStatus::True, Condition::READY, message, now));
            }
            Some(Access::Unusable { reason, message }) => {
                conditions.push(condition(old, ACCESS, ConditionStatus::False, reason, message, now));
            }
            None => conditions.extend(old.condition(ACCESS).cloned()),
        }
        match &self.webhook {
            Some(Readiness::Ready) => {
                let message = "skrwebhook is synchronized";
                conditions.push(condition(old, WEBHOOK, ConditionStatus::True, Condition::READY, message, now));
            }
            Some(Readiness::Not { reason, message }) => {
                conditions.push(condition(old, WEBHOOK, ConditionStatus::False, reason, message, now));
            }
            None => conditions.extend(old.condition(WEBHOOK).cloned()),
        }
        conditions
    }
}

/// The time moves with the status or the reason, so that it tells since when this is so.
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
    Condition { reason: reason.to_owned(), ..Condition::new(kind, status, message, since.clone()) }
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
        (_, True) => "module templates are synchronized",
        (_, False) => "module templates are out of sync and need to be resynchronized",
        (_, Unknown) => "module templates synchronization state is unknown",
    }
}

/// The status without what nobody looks after where agents are not installed.
pub(super) fn without_installer(status: &mut KymaStatus) {
    status.conditions.iter_mut().for_each(|conditions| conditions.retain(|condition| condition.type_ != WEBHOOK));
}

/// Since when the runtime has been unreachable for this reason, as the status tells.
pub(crate) fn unreachable_since(status: &KymaStatus, reason: &str) -> Option<Timestamp> {
    let condition = status.condition(ACCESS)?;
    let holds = condition.status == ConditionStatus::False && condition.reason == reason;
    holds.then_some(condition.last_transition_time.0)
}
