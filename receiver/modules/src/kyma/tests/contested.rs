//! A competing writer in the runtime cluster that changes back every repair.

use tokio::time::advance;

use super::*;

const CRD: &str = "customresourcedefinitions/kymas.operator.kyma-project.io";
const KYMA: &str = "kymas/default";

type Change = fn(&mut Value);

/// Reconciles once per second for ten minutes, after `change` by the competing writer each time. Returns the number of
/// repairs, and the last outcome.
async fn fight(fixture: &mut Fixture, id: &str, subject: &str, change: Change) -> (usize, ReconcileOutcome) {
    let mut repairs = 0;
    let mut outcome = ReconcileOutcome::default();
    for _ in 0..600 {
        fixture.runtime.edit(id, change);
        outcome = fixture.reconcile(WorkSet::of(&[Work::Kyma]), drift(subject)).await;
        repairs += fixture.runtime.writes().iter().filter(|write| **write == format!("PATCH {id}")).count();
        advance(Duration::from_secs(1)).await;
    }
    (repairs, outcome)
}

#[tokio::test(start_paused = true)]
async fn contested_objects_are_repaired_ever_more_slowly_and_reported() {
    let works = WorkSet::of(&[Work::Kyma]);
    let watched_by = |kyma: &mut Value| kyma["metadata"]["labels"]["operator.kyma-project.io/watched-by"] = "me".into();
    // Repairs at 0 to 4 s, 60 s, 180 s and 420 s, less the first write where the receiver created the object at 0 s.
    let cases: [(&str, &str, Change, usize, &str); 4] = [
        (
            CRD,
            "apiextensions.k8s.io/v1/customresourcedefinitions//kymas.operator.kyma-project.io",
            |crd| crd["spec"]["names"]["categories"] = json!(["all"]),
            7,
            "the CRD kymas.operator.kyma-project.io is changed again and again in the runtime",
        ),
        (
            KYMA,
            "operator.kyma-project.io/v1beta2/kymas/kyma-system/default",
            watched_by,
            8,
            "the Kyma is changed again and again in the runtime",
        ),
        (
            "namespaces/kyma-system",
            "/v1/namespaces//kyma-system",
            |namespace| namespace["metadata"]["labels"] = json!({}),
            7,
            "the namespace kyma-system is changed again and again in the runtime",
        ),
        (
            "configmaps/tidewatch-agent",
            "/v1/configmaps/kyma-system/tidewatch-agent",
            |map| map["data"]["more"] = "1".into(),
            7,
            "the agent's ConfigMap is changed again and again in the runtime",
        ),
    ];
    for (id, subject, change, expected, line) in cases {
        let mut fixture = Fixture::settled().await;
        let (repairs, outcome) = fight(&mut fixture, id, subject, change).await;
        assert_eq!(repairs, expected, "{id}");
        assert_eq!((outcome.failed, outcome.deferred), (WorkSet::EMPTY, works), "{id}");
        assert_eq!(outcome.class, Some(ErrorClass::Refused), "{id}");
        assert_eq!(fixture.status()["lastOperation"]["operation"], line);
        assert_eq!(fixture.condition("CRDsSync")["status"], if id == CRD { "False" } else { "True" }, "{id}");

        fixture.enable();
        assert_eq!(fixture.kyma().await.deferred, works, "{id}");
        assert!(fixture.manifest().is_some(), "{id}: the rest of the reconcile goes on");

        fixture.runtime.writes();
        advance(Duration::from_secs(600)).await;
        assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(works), "{id}: the competing writer is gone");
        assert!(fixture.runtime.writes().contains(&format!("PATCH {id}")), "{id}");
        assert_eq!(
            (&fixture.condition("CRDsSync")["status"], &fixture.status()["state"]),
            (&json!("True"), &json!("Processing"))
        );
    }
}

#[tokio::test(start_paused = true)]
async fn failing_catalog_keeps_the_retry_of_a_contested_object() {
    let mut fixture = Fixture::settled().await;
    for _ in 0..6 {
        fixture.runtime.edit(KYMA, |kyma| kyma["metadata"]["labels"] = json!({}));
        fixture.kyma().await;
    }
    fixture.runtime.remove("moduletemplates/keda-1.0.0");
    fixture.runtime.refuse("WRITE moduletemplates", 403);
    let works = WorkSet::of(&[Work::Kyma, Work::Catalog]);
    let outcome = fixture.reconcile(works, Drift::All).await;
    assert_eq!((outcome.ended, outcome.failed, outcome.deferred), (WorkSet::EMPTY, WorkSet::EMPTY, works));
}
