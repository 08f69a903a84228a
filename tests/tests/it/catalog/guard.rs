//! What would be taken from too many runtimes at once waits until somebody confirms it: of catalogs and of modules.

use super::*;

/// Four more Kymas, and with that too many. They have no runtime that could be reached, and count.
async fn crowd(one: &One) -> Result<()> {
    for n in 0..4 {
        let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": format!("more-{n}")}, "spec": {"channel": "regular"}});
        apply::<Kyma>(one, &format!("more-{n}"), &kyma).await?;
    }
    let admin = one.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    until("the receiver to know of all of them", async || {
        let (_, report) = http::get(admin, "/fleet", DEADLINE).await?;
        let report: Value = serde_json::from_str(&report)?;
        Ok((report["summary"]["kymas"] == 5).then_some(()))
    })
    .await
}

/// Waits until a removal is held, and returns what stands of it in KCP.
async fn held(one: &One) -> Result<Value> {
    let releases = Api::<ConfigMap>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let held = until("the removal to be held", async || {
        let data = releases.get(RELEASES).await?.data.unwrap_or_default();
        Ok(data.get("held").cloned())
    });
    Ok(serde_json::from_str(&held.await?)?)
}

/// Confirms a change, as an operator does.
async fn confirm(one: &One, change: &str) -> Result<()> {
    let releases = Api::<ConfigMap>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let confirmed = Patch::Merge(json!({"metadata": {"annotations": {annotation::CONFIRM: change}}}));
    releases.patch(RELEASES, &PatchParams::default(), &confirmed).await?;
    Ok(())
}

#[tokio::test]
async fn a_removal_from_many_waits_until_it_is_confirmed() -> Tested {
    let one = One::without_agent("guard", &[KEDA, ("warden", "1.0.0", "1.0.0")]).await?;
    synced(&one).await?;
    crowd(&one).await?;
    let metas = Api::<ModuleReleaseMeta>::namespaced(one.landscape.operator(), one.landscape.namespace());
    metas.delete("warden", &DeleteParams::default()).await?;
    let held = held(&one).await?;
    assert_eq!((&held["modules"], held["of"].as_u64()), (&json!(["warden"]), Some(5)), "{held}");
    let status = one.kcp_status("the condition", |status| {
        status.condition("ModuleCatalog").is_some_and(|said| said.message.contains("waits until"))
    });
    let change = held["change"].as_str().context("a name")?;
    let (holds, message) = condition(&status.await?, "ModuleCatalog")?;
    assert!(holds && message.contains("a removal of warden") && message.contains(change), "{message}");
    let note = told(&one, "RemovalHeld", ("ModuleReleaseMeta", "warden")).await?;
    assert!(note.contains("from 5 of 5 runtimes") && note.contains(change), "{note}");
    measured(&one, "catalog_held_modules", 1).await?;
    measured(&one, "catalog_held_runtimes", 5).await?;
    assert!(names::<ModuleReleaseMeta>(&one).await?.contains("warden"));
    // A new process holds it too, and what is not held goes on.
    one.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    one.landscape.write_template("keda", "1.2.0").await?;
    one.landscape.start_receiver().await?;
    until("the new version", async || Ok(names::<ModuleTemplate>(&one).await?.contains("keda-1.2.0").then_some(())))
        .await?;
    assert!(names::<ModuleReleaseMeta>(&one).await?.contains("warden"));

    confirm(&one, change).await?;
    until("the module to go", async || {
        let metas = names::<ModuleReleaseMeta>(&one).await?;
        let templates = names::<ModuleTemplate>(&one).await?;
        Ok((!metas.contains("warden") && !templates.contains("warden-1.0.0")).then_some(()))
    })
    .await?;
    let releases = Api::<ConfigMap>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let confirmation =
        async || anyhow::Ok(releases.get(RELEASES).await?.annotations().get(annotation::CONFIRM).cloned());
    until("the confirmation to be used up", async || Ok(confirmation().await?.is_none().then_some(()))).await?;
    until("the condition as it was", async || {
        let status = one.runtime.kcp_kyma().await?.and_then(|kyma| kyma.status).context("a status")?;
        Ok((condition(&status, "ModuleCatalog")?.1 == "module templates are synchronized").then_some(()))
    })
    .await?;
    measured(&one, "catalog_held_modules", 0).await?;
    measured(&one, "catalog_held_runtimes", 0).await?;
    Ok(())
}

#[tokio::test]
async fn a_module_that_too_many_would_lose_goes_when_that_is_confirmed_and_not_before() -> Tested {
    let one = One::start("guard-modules", &[KEDA]).await?;
    synced(&one).await?;
    one.runtime.select(&["keda"]).await?;
    comes_to_run(&one, "1.0.0").await?;
    crowd(&one).await?;
    let beta = Patch::Merge(json!({"metadata": {"labels": {label::BETA: "true"}}}));
    let templates = Api::<ModuleTemplate>::namespaced(one.landscape.operator(), one.landscape.namespace());
    templates.patch("keda-1.0.0", &PatchParams::default(), &beta).await?;
    let held = held(&one).await?;
    assert_eq!((&held["modules"], held["runtimes"].as_u64()), (&json!(["keda"]), Some(5)), "{held}");
    let is_refused = |status: &tidewatch_shared::api::KymaStatus| {
        module(status, "keda").is_some_and(|keda| keda.state == State::Error)
    };
    one.kcp_status("what the Kyma may not have", is_refused).await?;
    one.quiet().await?;
    assert_eq!(runs(&one).await?.as_deref(), Some("1.0.0"), "it is kept meanwhile");

    confirm(&one, held["change"].as_str().context("a name")?).await?;
    until("the Manifest to go", async || Ok(one.manifests().await?.is_empty().then_some(()))).await?;
    Ok(())
}
