//! Upgrades of Manifests with a blocked removal.

use super::*;

#[tokio::test]
async fn manifest_whose_removal_is_blocked_is_upgraded_and_never_created_again() {
    let mut bed = Bed::with_keda().await;
    bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    bed.kyma().await;
    assert!(bed.is_manifest_deleted());
    let point = |bed: &mut Bed, version: &str| {
        let name = format!("keda-{version}");
        let spec = json!({"moduleName": "keda", "version": version, "descriptor": {}});
        bed.set_templates(filled::<ModuleTemplate>(&[of_kyma_group("ModuleTemplate", &name, spec)]).0);
        let spec = json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda",
                          "channels": [{"channel": "regular", "version": version}]});
        let meta = of_kyma_group("ModuleReleaseMeta", "keda", spec);
        bed.ctx.stores.release_metas = filled::<ModuleReleaseMeta>(&[meta]).0;
        let _ = bed.ctx.catalog.refresh(&bed.ctx.stores);
    };
    let version = |bed: &Bed| bed.manifest().map(|(_, manifest)| manifest["spec"]["version"].clone());
    bed.set_layers(Some(LayerLookup::Pending));
    point(&mut bed, "1.1.0");
    assert!(bed.kyma().await.failed.is_empty());
    assert_eq!(version(&bed), Some(json!("1.0.0")));
    bed.set_layers(None);
    bed.forget_calls();
    assert!(bed.kyma().await.failed.is_empty());
    let (id, manifest) = bed.manifest().unwrap();
    assert_eq!(manifest["spec"]["version"], "1.1.0");
    assert_eq!(manifest["metadata"]["finalizers"].as_array().unwrap().len(), 2, "{manifest}");
    assert!(bed.is_manifest_deleted() && bed.kcp.writes().contains(&format!("PATCH {id}")));
    // The event of the Manifest shows its version.
    bed.kyma().await;
    assert_eq!(bed.kcp.writes(), ["PATCH kymas/k/status"]);
    let shown = &bed.status()["modules"][0];
    assert_eq!((&shown["state"], &shown["version"]), (&json!("Deleting"), &json!("1.1.0")));
    bed.kyma().await;
    assert_eq!(bed.kcp.writes(), Vec::<String>::new());

    // It goes while the cache still has it.
    point(&mut bed, "1.2.0");
    bed.watch_manifests();
    bed.release_manifest();
    let queued = QueuedWork { work: WorkSet::of(&[Work::Kyma]), priority: Priority::User, drift: Drift::None };
    assert!(!run_within(&bed.ctx, &bed.key, &queued, TIME_LIMIT).await.failed.is_empty());
    assert!(bed.manifest().is_none());
    assert!(bed.kyma().await.failed.is_empty());
    assert!(bed.manifest().is_none());
}

#[tokio::test]
async fn module_that_is_listed_again_upgrades_its_manifest_and_gets_a_new_one_afterwards() {
    let mut bed = Bed::with_keda().await;
    bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    bed.kyma().await;
    let templates = ["1.0.0", "1.1.0"].map(|version| {
        let spec = json!({"moduleName": "keda", "version": version, "descriptor": {}});
        of_kyma_group("ModuleTemplate", &format!("keda-{version}"), spec)
    });
    bed.set_templates(filled::<ModuleTemplate>(&templates).0);
    bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([{"name": "keda"}]));
    bed.pin("1.1.0").await;
    let upgraded = bed.manifest().unwrap().1;
    assert_eq!((&upgraded["spec"]["version"], bed.is_manifest_deleted()), (&json!("1.1.0"), true));
    bed.release_manifest();
    bed.kyma().await;
    let new = bed.manifest().unwrap().1;
    assert_eq!((&new["spec"]["version"], bed.is_manifest_deleted()), (&json!("1.1.0"), false));
    assert_ne!(new["metadata"]["uid"], upgraded["metadata"]["uid"]);
}
