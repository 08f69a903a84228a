//! The status of the modules after a change of a Manifest.

use super::*;

impl Fixture {
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
    let mut fixture = Fixture::with_keda().await;
    for state in ["Ready", "Error"] {
        fixture.report(state);
        assert_eq!(fixture.states().await, ReconcileOutcome::ended(WorkSet::STATUS));
        assert_eq!(fixture.kcp.calls(), ["GET kymas/k", "PATCH kymas/k/status"]);
        assert_eq!(fixture.runtime.calls(), ["PATCH kymas/default/status"]);
        for status in [fixture.status(), fixture.shown()] {
            assert_eq!((&status["state"], &status["modules"][0]["state"]), (&json!(state), &json!(state)));
        }
        assert_eq!(fixture.condition("Modules")["status"] == "True", state == "Ready");
        assert_eq!(fixture.states().await, ReconcileOutcome::ended(WorkSet::STATUS));
        assert_eq!((fixture.kcp.calls(), fixture.runtime.calls()), (vec!["GET kymas/k".to_owned()], vec![]));
    }
}

#[tokio::test]
async fn kyma_that_its_user_changed_is_read_before_its_status_is_written() {
    let mut fixture = Fixture::with_keda().await;
    fixture.runtime.edit("kymas/default", |kyma| kyma["metadata"]["labels"]["mine"] = "x".into());
    fixture.report("Ready");
    assert_eq!(fixture.states().await, ReconcileOutcome::ended(WorkSet::STATUS));
    let expected = ["PATCH kymas/default/status", "GET kymas/default", "PUT kymas/default/status"];
    assert_eq!(fixture.runtime.calls(), expected);
    assert_eq!(fixture.shown()["state"], "Ready");
    fixture.report("Error");
    fixture.states().await;
    assert_eq!(fixture.runtime.calls(), ["PATCH kymas/default/status"]);
}

#[tokio::test]
async fn manifest_that_must_be_written_requests_a_full_reconcile() {
    let mut fixture = Fixture::with_keda().await;
    let id = fixture.report("Ready");
    fixture.kcp.edit(&id, |manifest| manifest["spec"]["customResourcePolicy"] = "Ignore".into());
    assert_eq!(fixture.states().await, requested());
    assert_eq!((fixture.kcp.writes(), fixture.runtime.calls()), (vec![], vec![]));
    fixture.kyma().await;
    assert_eq!(fixture.manifest().unwrap().1["spec"]["customResourcePolicy"], "CreateAndDelete");
    fixture.forget_calls();
    assert_eq!(fixture.states().await, ReconcileOutcome::ended(WorkSet::STATUS));
    assert_eq!((fixture.kcp.writes(), fixture.runtime.calls()), (vec![], vec![]));
}

#[tokio::test]
async fn failure_of_the_kyma_stays_until_a_full_reconcile() {
    for invalid in [true, false] {
        let mut fixture = Fixture::with_keda().await;
        if invalid {
            fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["channel"] = "none".into());
        } else {
            fixture.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
        }
        fixture.kyma().await;
        let failed = fixture.status();
        assert_eq!(failed["state"], "Error");
        fixture.report("Ready");
        assert_eq!(fixture.states().await, requested());
        assert_eq!(fixture.status(), failed);
    }
}

#[tokio::test]
async fn status_that_did_not_reach_the_runtime_is_written_by_the_next_full_reconcile() {
    let mut fixture = Fixture::with_keda().await;
    fixture.report("Ready");
    fixture.runtime.refuse("PATCH kymas/default/status", 503);
    assert_eq!(fixture.states().await.failed, WorkSet::STATUS);
    fixture.runtime.refuse_nothing();
    assert_eq!(fixture.states().await, requested());
    fixture.kyma().await;
    assert_eq!(fixture.shown()["state"], "Ready");
}

#[tokio::test]
async fn condition_of_the_catalog_that_did_not_reach_the_runtime_is_written_by_the_retry() {
    let mut fixture = Fixture::settled().await;
    let works = WorkSet::of(&[Work::Catalog]);
    fixture.runtime.remove("moduletemplates/keda-1.0.0");
    fixture.runtime.refuse("PATCH moduletemplates/keda-1.0.0", 422);
    fixture.reconcile(works, Drift::All).await;
    assert_eq!((&fixture.status()["state"], &fixture.shown()["state"]), (&json!("Processing"), &json!("Processing")));
    fixture.runtime.refuse_nothing();
    fixture.runtime.refuse("PATCH kymas/default/status", 503);
    assert_eq!(fixture.reconcile(works, Drift::All).await.failed, works);
    assert_eq!((&fixture.status()["state"], &fixture.shown()["state"]), (&json!("Ready"), &json!("Processing")));
    fixture.runtime.refuse_nothing();
    assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    assert_eq!(fixture.shown()["state"], "Ready");
    fixture.forget_calls();
    assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    assert_eq!(fixture.runtime.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn first_change_after_a_start_requests_a_full_reconcile() {
    let mut fixture = Fixture::with_keda().await;
    fixture.ctx.caches = Caches::default();
    fixture.report("Ready");
    assert_eq!(fixture.states().await, requested());
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new());
}
