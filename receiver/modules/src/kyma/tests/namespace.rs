//! The namespace of the modules in the runtime.

use super::*;

/// `acceptance.md` C2 37: our labels of the namespace are restored, and those of others stay.
#[tokio::test]
async fn labels_of_the_namespace_are_restored() {
    let mut fixture = Fixture::settled().await;
    fixture.runtime.edit("namespaces/kyma-system", |namespace| {
        let labels = namespace["metadata"]["labels"].as_object_mut().unwrap();
        labels.remove("namespaces.warden.kyma-project.io/validate");
        labels.insert("istio-injection".into(), "disabled".into());
        labels.insert("mine".into(), "x".into());
    });
    let works = WorkSet::of(&[Work::Kyma]);
    let outcome = fixture.reconcile(works, drift("/v1/namespaces//kyma-system")).await;
    assert_eq!(outcome, ReconcileOutcome::ended(works));
    assert_eq!(
        fixture.runtime.object("namespaces/kyma-system").unwrap()["metadata"]["labels"],
        json!({"istio-injection": "enabled", "namespaces.warden.kyma-project.io/validate": "enabled",
        "operator.kyma-project.io/managed-by": "kyma", "mine": "x"})
    );
}
