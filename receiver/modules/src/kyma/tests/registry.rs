//! Modules while the registry of their layers is slow or unavailable.

use super::*;

#[tokio::test]
async fn module_waits_for_its_component_descriptor_and_reports_a_failing_registry() {
    let mut bed = Bed::settled().await;
    let shown = |bed: &Bed| {
        let kcp = bed.status();
        let runtime = bed.shown();
        assert_eq!(kcp["modules"][0]["state"], runtime["modules"][0]["state"]);
        assert_eq!(kcp["modules"][0]["message"], runtime["modules"][0]["message"]);
        (kcp["modules"][0]["state"].clone(), kcp["modules"][0]["message"].clone(), kcp["state"].clone())
    };
    bed.set_layers(Some(LayerLookup::Pending));
    bed.enable();
    assert_eq!(bed.kyma().await, ReconcileOutcome::default(), "the event that enabled it is not settled");
    assert!(bed.manifest().is_none());
    assert_eq!(shown(&bed), (json!("Processing"), Value::Null, json!("Processing")));

    bed.set_layers(Some(LayerLookup::Failed("the registry refuses the connection".into())));
    let ended = ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma]));
    assert_eq!(bed.kyma().await, ended, "a change of the lookup reconciles again, not a backoff");
    let inputs = |bed: &Bed| {
        let kyma = bed.kcp.object("kymas/k").unwrap();
        kyma["metadata"]["annotations"]["operator.kyma-project.io/tidewatch-inputs"].as_str().unwrap().to_owned()
    };
    assert!(inputs(&bed).starts_with("-."), "the next process reconciles the Kyma when it starts");
    assert!(bed.manifest().is_none());
    let message = json!("the registry refuses the connection");
    assert_eq!(shown(&bed), (json!("Error"), message, json!("Error")));

    bed.set_layers(None);
    bed.kyma().await;
    assert!(!inputs(&bed).starts_with("-."));
    let (id, manifest) = bed.manifest().unwrap();
    let source = &manifest["spec"]["install"]["source"];
    assert_eq!(source["ref"], Digest::of(b"1.0.0").to_string());
    assert_eq!(shown(&bed), (json!("Processing"), Value::Null, json!("Processing")));

    // An installed version is kept, repaired and removed without the registry.
    bed.set_layers(Some(LayerLookup::Failed("the registry refuses the connection".into())));
    bed.kcp.edit(&id, |manifest| manifest["metadata"]["labels"]["operator.kyma-project.io/managed-by"] = "x".into());
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!(bed.kcp.writes(), [format!("PATCH {id}")]);
    let repaired = bed.manifest().unwrap().1;
    assert_eq!((&repaired["spec"], shown(&bed).0), (&manifest["spec"], json!("Processing")));
    bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    bed.kyma().await;
    bed.release_manifest();
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
        let mut bed = Bed::settled().await;
        let owner = bed.kcp.object("kymas/k").unwrap()["metadata"]["uid"].clone();
        let manifest = lifecycle_managers_manifest(&owner);
        let id = format!("manifests/{}", manifest["metadata"]["name"].as_str().unwrap());
        bed.kcp.edit(&id, |stored| *stored = manifest.clone());
        let before = bed.kcp.object(&id).unwrap();
        bed.set_layers(layers);
        bed.enable();
        bed.forget_calls();
        assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
        assert_eq!(bed.kcp.object(&id).unwrap(), before);
        assert!(bed.kcp.writes().iter().all(|write| !write.contains("manifests")));
        assert_eq!((&bed.status()["state"], &bed.status()["modules"][0]["state"]), (&json!("Ready"), &json!("Ready")));
    }
}
