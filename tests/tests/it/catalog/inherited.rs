//! A catalog that the incumbent has synced goes on as it is.

use super::*;

/// Writes an object to the runtime's catalog as the incumbent does, and returns its uid.
async fn synced_by_the_incumbent<K>(one: &One, object: &Value) -> Result<String>
where
    K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug,
{
    let name = object["metadata"]["name"].as_str().context("a name")?;
    let api = Api::<K>::namespaced(one.runtime.cluster().client().await?, SKR_NAMESPACE);
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
async fn what_the_incumbent_has_synced_is_neither_deleted_nor_made_anew() -> Tested {
    let one = One::start("inherited", &[KEDA]).await?;
    synced(&one).await?;
    one.quiet().await?;
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;

    // What the incumbent leaves: objects without an inventory; of a module that is gone, too; and of a channel before it moved.
    let maps = Api::<ConfigMap>::namespaced(one.runtime.cluster().client().await?, SKR_NAMESPACE);
    maps.delete(CATALOG_INVENTORY, &DeleteParams::default()).await?;
    let mut kept = Vec::new();
    for version in ["1.0.0", "1.1.0"] {
        kept.push(synced_by_the_incumbent::<ModuleTemplate>(&one, &template("keda", version)).await?);
    }
    let before = release_meta("keda", &[("regular", "1.0.0"), ("fast", "1.0.0")]);
    kept.push(synced_by_the_incumbent::<ModuleReleaseMeta>(&one, &before).await?);
    synced_by_the_incumbent::<ModuleTemplate>(&one, &template("gone", "1.0.0")).await?;
    synced_by_the_incumbent::<ModuleReleaseMeta>(&one, &release_meta("gone", &[("regular", "1.0.0")])).await?;
    let (metas, templates) = (user_api::<ModuleReleaseMeta>(&one).await?, user_api::<ModuleTemplate>(&one).await?);
    templates.create(&PostParams::default(), &serde_json::from_value(template("mine", "1.0.0"))?).await?;

    let mark = one.runtime.cluster().audit_mark()?;
    one.landscape.start_receiver().await?;
    until("the inventory of what is wanted", async || {
        let objects = inventory(&one).await?.and_then(|map| map.data).unwrap_or_default();
        Ok(objects.get("objects").filter(|objects| objects.lines().count() == 3).map(drop))
    })
    .await?;
    one.quiet().await?;
    let writes = one.after_canaries(mark, 2).await?;
    assert_eq!(calls(&writes), [("patch", "keda"), ("delete", "gone"), ("delete", "gone-1.0.0")]);
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
