//! Modules that the user installed by hand before listing them.

use super::*;

/// A manager that the user installed by hand, with this version.
pub(super) fn by_hand(fixture: &Fixture, version: Option<&str>) {
    let mut deployment = manager();
    deployment["metadata"]["labels"] =
        version.map_or(json!({}), |version| json!({"app.kubernetes.io/version": version}));
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = json!("theirs:1");
    fixture.runtime.edit("deployments/d", |object| *object = deployment);
    fixture.runtime.calls();
}

fn permit(fixture: &Fixture) {
    fixture.runtime.edit("deployments/d", |object| {
        object["metadata"]["annotations"] = json!({"operator.kyma-project.io/adopt": "true"});
    });
}

#[tokio::test(start_paused = true)]
async fn older_module_is_adopted_after_a_message() {
    let mut fixture = Fixture::new();
    by_hand(&fixture, Some("0.9.0"));
    // The message comes before any change: here no change follows.
    fixture.runtime.refuse("WRITE customresourcedefinitions", 500);
    fixture.kcp.refuse("PATCH manifests/m/status", 500);
    assert!(!fixture.reconcile().await.failed.is_empty());
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new(), "not without the message");
    fixture.kcp.refuse_nothing();
    fixture.runtime.refuse_nothing();
    fixture.kcp.calls();
    fixture.reconcile().await;
    assert_eq!(
        fixture.runtime.object("deployments/d").unwrap()["metadata"]["annotations"][annotation::OWNED_BY],
        "kcp-system/m"
    );
    let status_writes = fixture.kcp.writes().iter().filter(|write| *write == "PATCH manifests/m/status").count();
    assert!(status_writes >= 3, "the message, the inventory, the state: {status_writes}");
    fixture.make_available();
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn newer_module_and_one_without_version_are_left_alone_until_the_user_permits_it() {
    for (version, reason) in [
        (Some("1.0.1"), "has the version 1.0.1, newer than 1.0.0;"),
        (Some("main"), "has the version main;"),
        (None, "has no version;"),
    ] {
        let mut fixture = Fixture::new();
        by_hand(&fixture, version);
        let outcome = fixture.reconcile().await;
        assert!(outcome.failed.is_empty() && outcome.requeue_after.is_some(), "{outcome:?}");
        let (state, operation) = fixture.state();
        assert!(state == State::Warning && operation.contains(reason), "{state:?} {operation}");
        assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
        fixture.kcp.calls();
        fixture.verify().await;
        assert_eq!((fixture.runtime.writes(), fixture.kcp.writes()), (vec![], vec![]), "nothing changes");
        permit(&fixture);
        fixture.reconcile().await;
        assert_eq!(fixture.state().0, State::Processing);
        let containers =
            fixture.runtime.object("deployments/d").unwrap()["spec"]["template"]["spec"]["containers"].clone();
        assert_eq!(containers[0]["image"], "i:1");
    }
}

#[tokio::test(start_paused = true)]
async fn module_that_was_not_adopted_survives_its_removal_and_an_unmanage() {
    let edits: [fn(&mut Value); 2] = [
        |manifest| manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"),
        |manifest| manifest["metadata"]["annotations"][annotation::UNMANAGED] = json!("true"),
    ];
    for edit in edits {
        let mut fixture = Fixture::new();
        by_hand(&fixture, Some("2.0.0"));
        fixture.runtime.edit("customresourcedefinitions/samples.example.test", |object| *object = definition());
        fixture
            .runtime
            .edit("samples/default", |sample| *sample = super::object("example.test/v1", "Sample", "default"));
        fixture.reconcile().await;
        assert_eq!(fixture.state().0, State::Warning);
        fixture.edit(edit);
        assert_eq!(fixture.reconcile().await, ended());
        assert!(fixture.manifest().is_none(), "the user's resources do not block it");
        assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn manager_that_cannot_be_read_is_no_absent_one() {
    let mut fixture = Fixture::new();
    by_hand(&fixture, Some("2.0.0"));
    fixture.runtime.refuse("GET deployments/d", 403);
    let outcome = fixture.reconcile().await;
    assert_eq!((outcome.failed, outcome.class), (WorkSet::MANIFEST, Some(ErrorClass::Auth)));
    assert_eq!((fixture.state().0, fixture.runtime.writes()), (State::Error, vec![]));
}
