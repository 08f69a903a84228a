//! A catalog that lifecycle-manager synced is adopted in place.

use super::*;

/// Applies an object to the runtime's catalog as lifecycle-manager does, and returns its uid.
async fn synced_by_lifecycle_manager<K>(setup: &SingleRuntime, object: &Value) -> Result<String>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let name = object["metadata"]["name"].as_str().context("a name")?;
    let api = Api::<K>::namespaced(setup.runtime.cluster().client().await?, SKR_NAMESPACE);
    if api.get_opt(name).await?.is_some() {
        api.delete(name, &DeleteParams::default()).await?;
    }
    let mut copy = object.clone();
    copy["metadata"]["namespace"] = SKR_NAMESPACE.into();
    copy["metadata"]["labels"]["operator.kyma-project.io/managed-by"] = "kyma".into();
    let applied = api.patch(name, &PatchParams::apply("catalog-sync").force(), &Patch::Apply(&copy)).await?;
    applied.uid().context("a uid")
}

#[tokio::test]
async fn objects_synced_by_lifecycle_manager_are_neither_deleted_nor_recreated() -> TestResult {
    let setup = SingleRuntime::start("inherited", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    setup.becomes_idle().await?;
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;

    // The state that lifecycle-manager leaves: objects without an inventory, among them those of a removed module and a
    // channel before its move.
    let maps = Api::<ConfigMap>::namespaced(setup.runtime.cluster().client().await?, SKR_NAMESPACE);
    maps.delete(CATALOG_INVENTORY, &DeleteParams::default()).await?;
    let mut kept = Vec::new();
    for version in ["1.0.0", "1.1.0"] {
        kept.push(synced_by_lifecycle_manager::<ModuleTemplate>(&setup, &template("keda", version)).await?);
    }
    let before = release_meta("keda", &[("regular", "1.0.0"), ("fast", "1.0.0")]);
    kept.push(synced_by_lifecycle_manager::<ModuleReleaseMeta>(&setup, &before).await?);
    synced_by_lifecycle_manager::<ModuleTemplate>(&setup, &template("gone", "1.0.0")).await?;
    synced_by_lifecycle_manager::<ModuleReleaseMeta>(&setup, &release_meta("gone", &[("regular", "1.0.0")])).await?;
    let metas = user_api::<ModuleReleaseMeta>(&setup).await?;
    let templates = user_api::<ModuleTemplate>(&setup).await?;
    templates.create(&PostParams::default(), &serde_json::from_value(template("mine", "1.0.0"))?).await?;

    let mark = setup.runtime.cluster().audit_mark()?;
    setup.landscape.start_receiver().await?;
    until("the inventory of the desired objects", async || {
        let objects = inventory(&setup).await?.and_then(|map| map.data).unwrap_or_default();
        Ok(objects.get("objects").filter(|objects| objects.lines().count() == 3).map(drop))
    })
    .await?;
    setup.becomes_idle().await?;
    let writes = setup.after_canaries(mark, 2).await?;
    assert_eq!(catalog_requests(&writes), [("patch", "keda"), ("delete", "gone"), ("delete", "gone-1.0.0")]);
    let meta = metas.get("keda").await?;
    assert_eq!(meta.spec.version_of("fast"), Some("1.1.0"));
    let mut now = Vec::new();
    for version in ["1.0.0", "1.1.0"] {
        now.push(templates.get(&format!("keda-{version}")).await?.uid().context("a uid")?);
    }
    now.push(meta.uid().context("a uid")?);
    assert_eq!(now, kept);
    templates.get("mine-1.0.0").await.context("the user's own template")?;
    Ok(())
}
