//! The status of the modules after a change of a Manifest.

use super::*;

impl Bed {
    async fn states(&mut self) -> ReconcileOutcome {
        self.reconcile(WorkSet::STATUS, Drift::None).await
    }

    fn report(&self, state: &str) -> String {
        let (id, _) = self.manifest().unwrap();
        self.kcp.edit(&id, |manifest| manifest["status"] = json!({"state": state}));
        id
    }
}

fn requested() -> ReconcileOutcome {
    ReconcileOutcome { follow_up: WorkSet::of(&[Work::Kyma]), ..ReconcileOutcome::ended(WorkSet::STATUS) }
}

#[tokio::test]
async fn changed_state_of_a_manifest_reaches_both_statuses_with_one_write_each() {
    let mut bed = Bed::with_keda().await;
    for state in ["Ready", "Error"] {
        bed.report(state);
        assert_eq!(bed.states().await, ReconcileOutcome::ended(WorkSet::STATUS));
        assert_eq!(bed.kcp.calls(), ["GET kymas/k", "PATCH kymas/k/status"]);
        assert_eq!(bed.runtime.calls(), ["PATCH kymas/default/status"]);
        for status in [bed.status(), bed.shown()] {
            assert_eq!((&status["state"], &status["modules"][0]["state"]), (&json!(state), &json!(state)));
        }
        assert_eq!(bed.condition("Modules")["status"] == "True", state == "Ready");
        assert_eq!(bed.states().await, ReconcileOutcome::ended(WorkSet::STATUS));
        assert_eq!((bed.kcp.calls(), bed.runtime.calls()), (vec!["GET kymas/k".to_owned()], vec![]));
    }
}

#[tokio::test]
async fn kyma_that_its_user_changed_is_read_before_its_status_is_written() {
    let mut bed = Bed::with_keda().await;
    bed.runtime.edit("kymas/default", |kyma| kyma["metadata"]["labels"]["mine"] = "x".into());
    bed.report("Ready");
    assert_eq!(bed.states().await, ReconcileOutcome::ended(WorkSet::STATUS));
    let expected = ["PATCH kymas/default/status", "GET kymas/default", "PUT kymas/default/status"];
    assert_eq!(bed.runtime.calls(), expected);
    assert_eq!(bed.shown()["state"], "Ready");
    bed.report("Error");
    bed.states().await;
    assert_eq!(bed.runtime.calls(), ["PATCH kymas/default/status"]);
}

#[tokio::test]
async fn manifest_that_must_be_written_requests_a_full_reconcile() {
    let mut bed = Bed::with_keda().await;
    let id = bed.report("Ready");
    bed.kcp.edit(&id, |manifest| manifest["spec"]["customResourcePolicy"] = "Ignore".into());
    assert_eq!(bed.states().await, requested());
    assert_eq!((bed.kcp.writes(), bed.runtime.calls()), (vec![], vec![]));
    bed.kyma().await;
    assert_eq!(bed.manifest().unwrap().1["spec"]["customResourcePolicy"], "CreateAndDelete");
    bed.forget_calls();
    assert_eq!(bed.states().await, ReconcileOutcome::ended(WorkSet::STATUS));
    assert_eq!((bed.kcp.writes(), bed.runtime.calls()), (vec![], vec![]));
}

#[tokio::test]
async fn failure_of_the_kyma_stays_until_a_full_reconcile() {
    for invalid in [true, false] {
        let mut bed = Bed::with_keda().await;
        if invalid {
            bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["channel"] = "none".into());
        } else {
            bed.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
        }
        bed.kyma().await;
        let failed = bed.status();
        assert_eq!(failed["state"], "Error");
        bed.report("Ready");
        assert_eq!(bed.states().await, requested());
        assert_eq!(bed.status(), failed);
    }
}

#[tokio::test]
async fn status_that_did_not_reach_the_runtime_is_written_by_the_next_full_reconcile() {
    let mut bed = Bed::with_keda().await;
    bed.report("Ready");
    bed.runtime.refuse("PATCH kymas/default/status", 503);
    assert_eq!(bed.states().await.failed, WorkSet::STATUS);
    bed.runtime.refuse_nothing();
    assert_eq!(bed.states().await, requested());
    bed.kyma().await;
    assert_eq!(bed.shown()["state"], "Ready");
}

#[tokio::test]
async fn condition_of_the_catalog_that_did_not_reach_the_runtime_is_written_by_the_retry() {
    let mut bed = Bed::settled().await;
    let works = WorkSet::of(&[Work::Catalog]);
    bed.runtime.remove("moduletemplates/keda-1.0.0");
    bed.runtime.refuse("PATCH moduletemplates/keda-1.0.0", 422);
    bed.reconcile(works, Drift::All).await;
    assert_eq!((&bed.status()["state"], &bed.shown()["state"]), (&json!("Processing"), &json!("Processing")));
    bed.runtime.refuse_nothing();
    bed.runtime.refuse("PATCH kymas/default/status", 503);
    assert_eq!(bed.reconcile(works, Drift::All).await.failed, works);
    assert_eq!((&bed.status()["state"], &bed.shown()["state"]), (&json!("Ready"), &json!("Processing")));
    bed.runtime.refuse_nothing();
    assert_eq!(bed.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    assert_eq!(bed.shown()["state"], "Ready");
    bed.forget_calls();
    assert_eq!(bed.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    assert_eq!(bed.runtime.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn first_change_after_a_start_requests_a_full_reconcile() {
    let mut bed = Bed::with_keda().await;
    bed.ctx.caches = Caches::default();
    bed.report("Ready");
    assert_eq!(bed.states().await, requested());
    assert_eq!(bed.kcp.writes(), Vec::<String>::new());
}
