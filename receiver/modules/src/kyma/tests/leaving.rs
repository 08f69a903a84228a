//! Upgrades of Manifests with a blocked removal.

use super::*;

#[tokio::test]
async fn manifest_whose_removal_is_blocked_is_upgraded_and_never_created_again() {
    let mut fixture = Fixture::with_keda().await;
    fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    fixture.kyma().await;
    assert!(fixture.is_manifest_deleted());
    let point = |fixture: &mut Fixture, version: &str| {
        let name = format!("keda-{version}");
        let spec = json!({"moduleName": "keda", "version": version, "descriptor": {}});
        fixture.set_templates(filled::<ModuleTemplate>(&[of_kyma_group("ModuleTemplate", &name, spec)]).0);
        let spec = json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda",
                          "channels": [{"channel": "regular", "version": version}]});
        let meta = of_kyma_group("ModuleReleaseMeta", "keda", spec);
        fixture.ctx.stores.release_metas = filled::<ModuleReleaseMeta>(&[meta]).0;
        let _ = fixture.ctx.catalog.refresh(&fixture.ctx.stores);
    };
    let version = |fixture: &Fixture| fixture.manifest().map(|(_, manifest)| manifest["spec"]["version"].clone());
    fixture.set_layers(Some(LayerLookup::Pending));
    point(&mut fixture, "1.1.0");
    assert!(fixture.kyma().await.failed.is_empty());
    assert_eq!(version(&fixture), Some(json!("1.0.0")));
    fixture.set_layers(None);
    fixture.forget_calls();
    assert!(fixture.kyma().await.failed.is_empty());
    let (id, manifest) = fixture.manifest().unwrap();
    assert_eq!(manifest["spec"]["version"], "1.1.0");
    assert_eq!(manifest["metadata"]["finalizers"].as_array().unwrap().len(), 2, "{manifest}");
    assert!(fixture.is_manifest_deleted() && fixture.kcp.writes().contains(&format!("PATCH {id}")));
    // The event of the Manifest shows its version.
    fixture.kyma().await;
    assert_eq!(fixture.kcp.writes(), ["PATCH kymas/k/status"]);
    let shown = &fixture.status()["modules"][0];
    assert_eq!((&shown["state"], &shown["version"]), (&json!("Deleting"), &json!("1.1.0")));
    fixture.kyma().await;
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new());

    // It goes while the cache still has it.
    point(&mut fixture, "1.2.0");
    fixture.watch_manifests();
    fixture.release_manifest();
    let queued = QueuedWork { work: WorkSet::of(&[Work::Kyma]), priority: Priority::User, drift: Drift::None };
    assert!(!run_within(&fixture.ctx, &fixture.key, &queued, TIME_LIMIT).await.failed.is_empty());
    assert!(fixture.manifest().is_none());
    assert!(fixture.kyma().await.failed.is_empty());
    assert!(fixture.manifest().is_none());
}

#[tokio::test]
async fn module_that_is_listed_again_upgrades_its_manifest_and_gets_a_new_one_afterwards() {
    let mut fixture = Fixture::with_keda().await;
    fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    fixture.kyma().await;
    let templates = ["1.0.0", "1.1.0"].map(|version| {
        let spec = json!({"moduleName": "keda", "version": version, "descriptor": {}});
        of_kyma_group("ModuleTemplate", &format!("keda-{version}"), spec)
    });
    fixture.set_templates(filled::<ModuleTemplate>(&templates).0);
    fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([{"name": "keda"}]));
    fixture.pin("1.1.0").await;
    let upgraded = fixture.manifest().unwrap().1;
    assert_eq!((&upgraded["spec"]["version"], fixture.is_manifest_deleted()), (&json!("1.1.0"), true));
    fixture.release_manifest();
    fixture.kyma().await;
    let new = fixture.manifest().unwrap().1;
    assert_eq!((&new["spec"]["version"], fixture.is_manifest_deleted()), (&json!("1.1.0"), false));
    assert_ne!(new["metadata"]["uid"], upgraded["metadata"]["uid"]);
}
