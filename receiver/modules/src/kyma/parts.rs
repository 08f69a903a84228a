//! The parts of a reconcile in the runtime cluster that its work needs. Pure.

use tidewatch_api::{ConditionStatus, Kyma, plan::Work};
use tidewatch_fleet::queue::WorkSet;

/// Parts of one reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Namespace, CRDs, image pull secret, and plan or agent.
    pub(super) base: bool,
    /// The catalog.
    pub(super) catalog: bool,
    /// The user's selection with its modules.
    pub(super) selection: Selecting,
}

/// When a reconcile reads the user's selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Selecting {
    /// At once, beside the surroundings.
    AtOnce,
    /// After the surroundings, if the agent has become ready, which may change the state of the Kyma.
    OnceReady,
    /// Not at all.
    Never,
}

impl Parts {
    /// Selects the parts for a Kyma as in KCP.
    pub(super) fn of(works: WorkSet, kyma: &Kyma) -> Self {
        let prepares = works.minus(WorkSet::of(&[Work::Catalog]) | WorkSet::STATUS);
        let installs_alone = prepares.minus(WorkSet::INSTALLER).is_empty();
        let selection = if prepares.is_empty() {
            Selecting::Never
        } else if installs_alone && !failed_on_runtime(kyma) {
            Selecting::OnceReady
        } else {
            Selecting::AtOnce
        };
        Self { base: !prepares.is_empty(), catalog: works.contains(Work::Catalog), selection }
    }
}

/// Returns true if the last reconcile failed on the runtime cluster itself: then state and modules report that failure, and
/// only a reconcile of the modules resolves it.
fn failed_on_runtime(kyma: &Kyma) -> bool {
    let is_false = |kind| {
        let condition = kyma.status.as_ref().and_then(|status| status.condition(kind));
        condition.is_some_and(|condition| condition.status == ConditionStatus::False)
    };
    is_false("RuntimeAccess") || is_false("CRDsSync")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kyma(failed: Option<&str>) -> Kyma {
        let condition = |kind: &str| {
            json!({"type": kind, "status": "False", "reason": "Ready", "message": "m",
                "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let conditions: Vec<_> = failed.into_iter().map(condition).collect();
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k"}, "spec": {"channel": "regular"}, "status": {"conditions": conditions}}))
        .unwrap()
    }

    #[test]
    fn work_of_the_agent_alone_reads_the_selection_only_if_that_may_change_the_state() {
        use Selecting::{AtOnce, Never, OnceReady};
        let kyma_work = WorkSet::of(&[Work::Kyma]);
        let catalog_work = WorkSet::of(&[Work::Catalog]);
        for (works, failed, expected) in [
            (kyma_work, None, (true, false, AtOnce)),
            (WorkSet::RUNTIME, None, (true, true, AtOnce)),
            (kyma_work | WorkSet::INSTALLER, None, (true, false, AtOnce)),
            (WorkSet::INSTALLER, None, (true, false, OnceReady)),
            (WorkSet::INSTALLER | catalog_work | WorkSet::STATUS, None, (true, true, OnceReady)),
            (WorkSet::INSTALLER, Some("SKRWebhook"), (true, false, OnceReady)),
            (WorkSet::INSTALLER, Some("RuntimeAccess"), (true, false, AtOnce)),
            (WorkSet::INSTALLER, Some("CRDsSync"), (true, false, AtOnce)),
            (catalog_work, Some("CRDsSync"), (false, true, Never)),
            (catalog_work | WorkSet::STATUS, None, (false, true, Never)),
            (WorkSet::STATUS, None, (false, false, Never)),
        ] {
            let Parts { base, catalog, selection } = Parts::of(works, &kyma(failed));
            assert_eq!((base, catalog, selection), expected, "{works:?} {failed:?}");
        }
    }
}
