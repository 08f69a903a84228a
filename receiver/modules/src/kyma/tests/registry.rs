//! Modules while the registry of their layers is slow or unavailable.

use super::*;

#[tokio::test]
async fn module_waits_for_its_component_descriptor_and_reports_a_failing_registry() {
    let mut fixture = Fixture::settled().await;
    let shown = |fixture: &Fixture| {
        let kcp = fixture.status();
        let runtime = fixture.shown();
        assert_eq!(kcp["modules"][0]["state"], runtime["modules"][0]["state"]);
        assert_eq!(kcp["modules"][0]["message"], runtime["modules"][0]["message"]);
        (kcp["modules"][0]["state"].clone(), kcp["modules"][0]["message"].clone(), kcp["state"].clone())
    };
    fixture.set_layers(Some(LayerLookup::Pending));
    fixture.enable();
    assert_eq!(fixture.kyma().await, ReconcileOutcome::default(), "the event that enabled it is not settled");
    assert!(fixture.manifest().is_none());
    assert_eq!(shown(&fixture), (json!("Processing"), Value::Null, json!("Processing")));

    fixture.set_layers(Some(LayerLookup::Failed("the registry refuses the connection".into())));
    let ended = ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma]));
    assert_eq!(fixture.kyma().await, ended, "a change of the lookup reconciles again, not a backoff");
    let inputs = |fixture: &Fixture| {
        let kyma = fixture.kcp.object("kymas/k").unwrap();
        kyma["metadata"]["annotations"]["operator.kyma-project.io/tidewatch-inputs"].as_str().unwrap().to_owned()
    };
    assert!(inputs(&fixture).starts_with("-."), "the next process reconciles the Kyma when it starts");
    assert!(fixture.manifest().is_none());
    let message = json!("the registry refuses the connection");
    assert_eq!(shown(&fixture), (json!("Error"), message, json!("Error")));

    fixture.set_layers(None);
    fixture.kyma().await;
    assert!(!inputs(&fixture).starts_with("-."));
    let (id, manifest) = fixture.manifest().unwrap();
    let source = &manifest["spec"]["install"]["source"];
    assert_eq!(source["ref"], Digest::of(b"1.0.0").to_string());
    assert_eq!(shown(&fixture), (json!("Processing"), Value::Null, json!("Processing")));

    // An installed version is kept, repaired and removed without the registry.
    fixture.set_layers(Some(LayerLookup::Failed("the registry refuses the connection".into())));
    fixture
        .kcp
        .edit(&id, |manifest| manifest["metadata"]["labels"]["operator.kyma-project.io/managed-by"] = "x".into());
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!(fixture.kcp.writes(), [format!("PATCH {id}")]);
    let repaired = fixture.manifest().unwrap().1;
    assert_eq!((&repaired["spec"], shown(&fixture).0), (&manifest["spec"], json!("Processing")));
    fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    fixture.kyma().await;
    fixture.release_manifest();
}

/// The Manifest of `keda` as lifecycle-manager writes it.
fn lifecycle_managers_manifest(owner: &Value) -> Value {
    let mut manifest = of_kyma_group(
        "Manifest",
        "k-keda-1095022605",
        json!({
            "customResourcePolicy": "CreateAndDelete",
            "install": {"name": "raw-manifest", "source": {
                "name": "kyma-project.io/module/keda", "ref": Digest::of(b"1.0.0").to_string(),
                "repo": "registry.example/component-descriptors", "type": "oci-dir"
            }},
            "remote": true,
            "version": "1.0.0",
        }),
    );
    let metadata = &mut manifest["metadata"];
    metadata["labels"] = json!({
        "operator.kyma-project.io/channel": "regular", "operator.kyma-project.io/kyma-name": "k",
        "operator.kyma-project.io/managed-by": "lifecycle-manager", "operator.kyma-project.io/module-name": "keda"
    });
    metadata["annotations"] = json!({
        "operator.kyma-project.io/fqdn": "kyma-project.io/module/keda",
        "operator.kyma-project.io/ocm-component-name": "kyma-project.io/module/keda",
        "sync-oci-ref": Digest::of(b"1.0.0").to_string()
    });
    metadata["finalizers"] = json!(["declarative.kyma-project.io/finalizer", "label-removal-finalizer"]);
    metadata["ownerReferences"] = json!([{
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "name": "k", "uid": owner,
        "blockOwnerDeletion": true, "controller": true
    }]);
    manifest["status"] = json!({"state": "Ready", "synced": [
        {"group": "apps", "version": "v1", "kind": "Deployment", "name": "keda", "namespace": "kyma-system"}
    ]});
    manifest
}

#[tokio::test]
async fn manifest_of_lifecycle_manager_is_not_written_if_its_version_is_current() {
    for layers in [None, Some(LayerLookup::Pending), Some(LayerLookup::Failed("unavailable".into()))] {
        let mut fixture = Fixture::settled().await;
        let owner = fixture.kcp.object("kymas/k").unwrap()["metadata"]["uid"].clone();
        let manifest = lifecycle_managers_manifest(&owner);
        let id = format!("manifests/{}", manifest["metadata"]["name"].as_str().unwrap());
        fixture.kcp.edit(&id, |stored| *stored = manifest.clone());
        let before = fixture.kcp.object(&id).unwrap();
        fixture.set_layers(layers);
        fixture.enable();
        fixture.forget_calls();
        assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
        assert_eq!(fixture.kcp.object(&id).unwrap(), before);
        assert!(fixture.kcp.writes().iter().all(|write| !write.contains("manifests")));
        assert_eq!(
            (&fixture.status()["state"], &fixture.status()["modules"][0]["state"]),
            (&json!("Ready"), &json!("Ready"))
        );
    }
}
