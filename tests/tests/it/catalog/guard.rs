//! The removal guard: a change that would take a module from too many runtimes waits for confirmation, both for
//! catalogs and for Manifests.

use super::*;

/// Creates four more Kymas, enough for the guard to apply. They count although their runtimes cannot be reached.
pub(crate) async fn create_more_kymas(setup: &SingleRuntime) -> Result<()> {
    for n in 0..4 {
        let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": format!("more-{n}")}, "spec": {"channel": "regular"}});
        apply::<Kyma>(setup, &format!("more-{n}"), &kyma).await?;
    }
    let admin =
        setup.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    until("the receiver to have all Kymas", async || {
        let (_, report) = http::get(admin, "/fleet", DEADLINE).await?;
        let report: Value = serde_json::from_str(&report)?;
        Ok((report["summary"]["kymas"] == 5).then_some(()))
    })
    .await
}

/// Waits until one removal is held back, and returns its record in KCP.
pub(crate) async fn removal_is_held(setup: &SingleRuntime) -> Result<Value> {
    let releases = Api::<ConfigMap>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    let held = until("the removal to be held", async || {
        let data = releases.get(RELEASES).await?.data.unwrap_or_default();
        Ok(data.get("held").cloned())
    });
    let held: Vec<Value> = serde_json::from_str(&held.await?)?;
    let [held] = <[Value; 1]>::try_from(held).map_err(|held| anyhow::anyhow!("{held:?}"))?;
    Ok(held)
}

/// Confirms a change as the operator does.
pub(crate) async fn confirm(setup: &SingleRuntime, change: &str) -> Result<()> {
    let releases = Api::<ConfigMap>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    let confirmed = Patch::Merge(json!({"metadata": {"annotations": {annotation::CONFIRM: change}}}));
    releases.patch(RELEASES, &PatchParams::default(), &confirmed).await?;
    Ok(())
}

#[tokio::test]
async fn a_removal_from_many_runtimes_waits_for_confirmation() -> TestResult {
    let setup = SingleRuntime::without_agent("guard", &[KEDA, ("warden", "1.0.0", "1.0.0")]).await?;
    catalog_is_synced(&setup).await?;
    create_more_kymas(&setup).await?;
    let metas = Api::<ModuleReleaseMeta>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    metas.delete("warden", &DeleteParams::default()).await?;
    let held = removal_is_held(&setup).await?;
    assert_eq!((&held["module"], held["of"].as_u64()), (&json!("warden"), Some(5)), "{held}");
    let status = setup.kcp_status("the condition", |status| {
        status.condition("ModuleCatalog").is_some_and(|condition| condition.message.contains("waits until"))
    });
    let change = held["change"].as_str().context("a name")?;
    let (holds, message) = condition(&status.await?, "ModuleCatalog")?;
    assert!(holds && message.contains("a removal of warden") && message.contains(change), "{message}");
    let note = event_note(&setup, "RemovalHeld", ("ModuleReleaseMeta", "warden")).await?;
    assert!(note.contains("from 5 of 5 runtimes") && note.contains(change), "{note}");
    metric_becomes(&setup, "catalog_held_modules", 1).await?;
    metric_becomes(&setup, "catalog_held_runtimes", 5).await?;
    assert!(names::<ModuleReleaseMeta>(&setup).await?.contains("warden"));
    // A new process holds back the removal as well, and other changes go on.
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.landscape.write_template("keda", "1.2.0").await?;
    setup.landscape.start_receiver().await?;
    until("the new version", async || Ok(names::<ModuleTemplate>(&setup).await?.contains("keda-1.2.0").then_some(())))
        .await?;
    assert!(names::<ModuleReleaseMeta>(&setup).await?.contains("warden"));

    confirm(&setup, change).await?;
    until("the module to go", async || {
        let metas = names::<ModuleReleaseMeta>(&setup).await?;
        let templates = names::<ModuleTemplate>(&setup).await?;
        Ok((!metas.contains("warden") && !templates.contains("warden-1.0.0")).then_some(()))
    })
    .await?;
    let releases = Api::<ConfigMap>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    let confirmation =
        async || anyhow::Ok(releases.get(RELEASES).await?.annotations().get(annotation::CONFIRM).cloned());
    until("the confirmation to be removed", async || Ok(confirmation().await?.is_none().then_some(()))).await?;
    until("the condition to recover", async || {
        let status = setup.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status).context("a status")?;
        Ok((condition(&status, "ModuleCatalog")?.1 == "module templates are synchronized").then_some(()))
    })
    .await?;
    metric_becomes(&setup, "catalog_held_modules", 0).await?;
    metric_becomes(&setup, "catalog_held_runtimes", 0).await?;
    Ok(())
}

#[tokio::test]
async fn an_uninstallation_from_many_runtimes_waits_for_confirmation() -> TestResult {
    let setup = SingleRuntime::start("guard-modules", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    setup.runtime.select(&["keda"]).await?;
    version_becomes(&setup, "1.0.0").await?;
    create_more_kymas(&setup).await?;
    let beta = Patch::Merge(json!({"metadata": {"labels": {label::BETA: "true"}}}));
    let templates = Api::<ModuleTemplate>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    templates.patch("keda-1.0.0", &PatchParams::default(), &beta).await?;
    let held = removal_is_held(&setup).await?;
    assert_eq!((&held["module"], &held["part"]), (&json!("keda"), &json!({"channel": "regular"})), "{held}");
    setup.becomes_idle().await?;
    assert_eq!(installed_version(&setup).await?.as_deref(), Some("1.0.0"), "the module stays installed meanwhile");
    // The other channel goes on.
    setup.landscape.write_template("keda", "1.2.0").await?;
    setup.landscape.write_channels("keda", &[("regular", "1.0.0"), ("fast", "1.2.0")]).await?;
    let metas = user_api::<ModuleReleaseMeta>(&setup).await?;
    until("the moved channel in the runtime", async || {
        let spec = metas.get("keda").await?.spec;
        let channels = ["fast", "regular"].map(|channel| spec.version_of(channel));
        Ok((channels == [Some("1.2.0"), Some("1.0.0")]).then_some(()))
    })
    .await?;

    confirm(&setup, held["change"].as_str().context("a name")?).await?;
    let is_refused =
        |status: &tidewatch_api::KymaStatus| module(status, "keda").is_some_and(|keda| keda.state == State::Error);
    setup.kcp_status("the refused module", is_refused).await?;
    until("the Manifest to go", async || Ok(setup.manifests().await?.is_empty().then_some(()))).await?;
    Ok(())
}
