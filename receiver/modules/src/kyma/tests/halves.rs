//! The two halves of a reconcile: a failure of one does not stop the other.

use tidewatch_fleet::PathState;

use super::*;

const NAMESPACE: &str = "GET namespaces/kyma-system";
const KYMA: &str = "GET kymas/default";

fn count(calls: &[String], call: &str) -> usize {
    calls.iter().filter(|made| *made == call).count()
}

#[tokio::test]
async fn changed_selection_takes_effect_although_the_surroundings_fail() {
    let mut fixture = Fixture::settled().await;
    fixture.enable();
    fixture.runtime.refuse(NAMESPACE, 503);
    let outcome = fixture.reconcile(WorkSet::RUNTIME, Drift::All).await;
    assert_eq!(outcome, ReconcileOutcome::failed(WorkSet::RUNTIME, ErrorClass::Transport));
    assert!(fixture.manifest().is_some());
    let failure = "the runtime's API server cannot be reached";
    for status in [fixture.status(), fixture.shown()] {
        let operation = &status["lastOperation"]["operation"];
        assert_eq!((&status["state"], operation), (&json!("Error"), &json!(failure)));
        assert_eq!(status["modules"][0]["name"], "keda");
    }
    assert_eq!(count(&fixture.kcp.calls(), "PATCH kymas/k/status"), 1, "both in one status");

    fixture.runtime.refuse_nothing();
    assert_eq!(fixture.reconcile(WorkSet::RUNTIME, Drift::All).await, ReconcileOutcome::ended(WorkSet::RUNTIME));
    assert_eq!(fixture.status()["modules"][0]["state"], "Processing");
}

#[tokio::test]
async fn no_kyma_is_created_before_namespace_and_definitions() {
    let mut fixture = Fixture::new();
    fixture.enable_default();
    fixture.runtime.refuse(NAMESPACE, 503);
    let works = WorkSet::of(&[Work::Kyma]);
    let failed = ReconcileOutcome::failed(works, ErrorClass::Transport);
    assert_eq!(fixture.kyma().await, ReconcileOutcome { unreached: true, ..failed });
    assert_eq!(count(&fixture.runtime.calls(), "POST kymas"), 0);
    assert!(fixture.manifest().is_none());
    fixture.runtime.refuse_nothing();
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(works));
    let calls = fixture.runtime.calls();
    let place = |call: &str| calls.iter().position(|made| made == call).unwrap_or_else(|| panic!("{call}: {calls:?}"));
    assert!(place("PATCH namespaces/kyma-system") < place("POST kymas"), "{calls:?}");
    assert!(fixture.manifest().is_some());
}

#[tokio::test]
async fn surroundings_are_repaired_and_known_although_the_selection_cannot_be_read() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    let lost = ["deployments/skr-webhook", "moduletemplates/keda-1.0.0"];
    lost.iter().for_each(|object| drop(fixture.runtime.remove(object)));
    fixture.runtime.refuse(KYMA, 503);
    let outcome = fixture.reconcile(WorkSet::RUNTIME, Drift::All).await;
    assert_eq!((outcome.failed, outcome.class), (WorkSet::RUNTIME, Some(ErrorClass::Transport)));
    assert!(lost.iter().all(|object| fixture.runtime.object(object).is_some()));
    assert_eq!(fixture.condition("RuntimeAccess")["reason"], "Unreachable");
    assert_eq!(fixture.condition("ModuleCatalog")["status"], "True");

    fixture.runtime.refuse_nothing();
    fixture.forget_calls();
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    let calls = fixture.runtime.calls();
    for read in [NAMESPACE, "GET serviceaccounts/tidewatch-agent", "GET moduletemplates"] {
        assert_eq!(count(&calls, read), 0, "{calls:?}");
    }
    assert_eq!(fixture.condition("RuntimeAccess")["status"], "True");
}

#[tokio::test]
async fn lost_request_of_the_agent_delays_its_installation_alone() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.replan(&[watch("a", "statefulsets", None)]);
    fixture.enable();
    fixture.lose_all_but_kymas();
    let outcome = fixture.reconcile(WorkSet::of(&[Work::Kyma, Work::Installer]), Drift::None).await;
    assert_eq!((outcome.failed, outcome.class), (WorkSet::INSTALLER, Some(ErrorClass::Transport)));
    assert!(!outcome.unreached && fixture.manifest().is_some());
    assert_eq!(fixture.condition("RuntimeAccess")["status"], "True");
    assert_eq!(fixture.status()["modules"][0]["state"], "Processing");
}

#[tokio::test]
async fn access_is_shown_although_the_surroundings_fail() {
    let mut fixture = Fixture::settled().await;
    fixture.runtime.refuse(KYMA, 503);
    fixture.reconcile(WorkSet::RUNTIME, Drift::All).await;
    assert_eq!(fixture.condition("RuntimeAccess")["reason"], "Unreachable");
    fixture.runtime.refuse_nothing();
    fixture.runtime.refuse("GET customresourcedefinitions/kymas.operator.kyma-project.io", 403);
    let outcome = fixture.reconcile(WorkSet::RUNTIME, Drift::All).await;
    assert!(!outcome.failed.is_empty());
    assert_eq!(fixture.condition("RuntimeAccess")["status"], "True");
}

#[tokio::test]
async fn refused_pull_secret_keeps_neither_agent_nor_catalog_nor_modules_back() {
    let mut fixture = Fixture::installing(PathState::Proven);
    let secret = PullSecret::fixed(json!({"type": "t", "data": {"k": "v"}}));
    fixture.ctx.pull_secret = Some(ModulePullSecret { name: "pull".into(), secret });
    fixture.runtime.refuse("WRITE secrets/pull", 403);
    fixture.enable_default();
    let outcome = fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    assert_eq!(outcome.failed, WorkSet::RUNTIME);
    assert_eq!(fixture.condition("SKRImagePullSecretSync")["status"], "False");
    for object in ["deployments/skr-webhook", "moduletemplates/keda-1.0.0"] {
        assert!(fixture.runtime.object(object).is_some(), "{object}");
    }
    assert!(fixture.manifest().is_some());
}

/// A CRD of lifecycle-manager may lack our version. That the API server serves no Kyma of it proves nothing.
#[tokio::test]
async fn kyma_is_read_again_once_its_definition_has_our_version() {
    let mut fixture = Fixture::with_keda().await;
    let name = "kymas.operator.kyma-project.io";
    let id = format!("customresourcedefinitions/{name}");
    fixture.runtime.edit(&id, |crd| crd["spec"]["versions"][0]["name"] = "v1beta1".into());
    let subject = format!("apiextensions.k8s.io/v1/customresourcedefinitions//{name}");
    let works = WorkSet::of(&[Work::Kyma]);
    assert_eq!(fixture.reconcile(works, drift(&subject)).await, ReconcileOutcome::ended(works));
    let calls = fixture.runtime.calls();
    assert_eq!((count(&calls, KYMA), count(&calls, "POST kymas")), (2, 0), "{calls:?}");
    assert!(!fixture.is_manifest_deleted());
}

#[tokio::test]
async fn catalog_is_shown_before_the_full_reconcile_that_a_changed_manifest_needs() {
    let mut fixture = Fixture::with_keda().await;
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.edit(&id, |manifest| manifest["spec"]["customResourcePolicy"] = "Ignore".into());
    fixture.runtime.remove("moduletemplates/keda-1.0.0");
    fixture.runtime.refuse("PATCH moduletemplates/keda-1.0.0", 422);
    let outcome = fixture.reconcile(WorkSet::STATUS | WorkSet::of(&[Work::Catalog]), Drift::All).await;
    assert_eq!(outcome.follow_up, WorkSet::of(&[Work::Kyma]));
    assert_eq!(fixture.condition("ModuleCatalog")["status"], "False");
}
