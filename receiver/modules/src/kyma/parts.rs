//! The parts of a reconcile in the runtime cluster that its work needs. Pure.

use tidewatch_api::{ConditionStatus, Kyma, plan::Work};
use tidewatch_fleet::queue::WorkSet;

/// Parts of one reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// The user's selection with its modules, and namespace, CRDs, image pull secret, and plan or agent beside it; `None` for
    /// neither.
    pub(super) selection: Option<Selecting>,
    /// The work that this selection and its surroundings carry out.
    pub(super) works: WorkSet,
    /// The catalog.
    pub(super) catalog: bool,
}

/// When a reconcile reads the user's selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Selecting {
    /// At once, beside the surroundings.
    AtOnce,
    /// After the surroundings, if the agent has become ready, which may change the state of the Kyma.
    OnceReady,
}

impl Parts {
    /// Selects the parts for a Kyma as in KCP.
    pub(super) fn of(works: WorkSet, kyma: &Kyma) -> Self {
        let catalog = works.contains(Work::Catalog);
        let works = works.minus(WorkSet::of(&[Work::Catalog]) | WorkSet::STATUS);
        let installs_alone = works.minus(WorkSet::INSTALLER).is_empty();
        let selecting =
            if installs_alone && !failed_on_runtime(kyma) { Selecting::OnceReady } else { Selecting::AtOnce };
        Self { selection: (!works.is_empty()).then_some(selecting), works, catalog }
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
        use Selecting::{AtOnce, OnceReady};
        let kyma_work = WorkSet::of(&[Work::Kyma]);
        let catalog_work = WorkSet::of(&[Work::Catalog]);
        for (works, failed, expected) in [
            (kyma_work, None, (false, Some(AtOnce))),
            (WorkSet::RUNTIME, None, (true, Some(AtOnce))),
            (kyma_work | WorkSet::INSTALLER, None, (false, Some(AtOnce))),
            (WorkSet::INSTALLER, None, (false, Some(OnceReady))),
            (WorkSet::INSTALLER | catalog_work | WorkSet::STATUS, None, (true, Some(OnceReady))),
            (WorkSet::INSTALLER, Some("SKRWebhook"), (false, Some(OnceReady))),
            (WorkSet::INSTALLER, Some("RuntimeAccess"), (false, Some(AtOnce))),
            (WorkSet::INSTALLER, Some("CRDsSync"), (false, Some(AtOnce))),
            (catalog_work, Some("CRDsSync"), (true, None)),
            (catalog_work | WorkSet::STATUS, None, (true, None)),
            (WorkSet::STATUS, None, (false, None)),
        ] {
            let Parts { selection, works: carried_out, catalog } = Parts::of(works, &kyma(failed));
            assert_eq!((catalog, selection), expected, "{works:?} {failed:?}");
            assert_eq!(carried_out.is_empty(), selection.is_none(), "{works:?}");
        }
    }
}
