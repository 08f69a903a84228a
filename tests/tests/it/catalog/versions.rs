//! Pinned versions, and deprecated ones (`acceptance.md` C2 44).

use tidewatch_api::names::SKR_KYMA;

use super::*;

const PIN: &str = "version.operator.kyma-project.io/keda";

#[tokio::test]
async fn a_pinned_version_stays_and_its_deprecation_is_reported() -> TestResult {
    let setup = SingleRuntime::start("fixed", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    let pin = |version: &str| json!({"metadata": {"annotations": {PIN: version}}});
    setup.runtime.patch_kyma(&pin("1.0.0")).await?;
    setup.runtime.select(&["keda"]).await?;
    version_becomes(&setup, "1.0.0").await?;
    let manifest = setup.manifests().await?.remove(0);
    assert!(!manifest.labels().contains_key(label::CHANNEL));
    let mut body = release_meta("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]);
    body["spec"]["versions"] = json!([
        {"version": "1.0.0", "deprecationDate": "2999-01-31", "deprecationMessage": "use 1.1.0"}]);
    apply::<ModuleReleaseMeta>(&setup, "keda", &body).await?;
    let metas = user_api::<ModuleReleaseMeta>(&setup).await?;
    until("the deprecation in the runtime", async || {
        let meta = metas.get("keda").await?;
        let is_deprecated =
            meta.spec.versions().iter().any(|it| it.deprecation_message.as_deref() == Some("use 1.1.0"));
        Ok((is_deprecated && meta.spec.version_of("regular") == Some("1.1.0")).then_some(()))
    })
    .await?;
    let says = |message: &str| {
        let message = format!("{message}; version 1.0.0 is pinned by the annotation {PIN}");
        move |status: &KymaStatus| module(status, "keda").is_some_and(|it| it.message.as_ref() == Some(&message))
    };
    // The Kyma is unchanged: the deprecation alone enqueued the runtime that has this version.
    let announced = says("version 1.0.0 of module keda will be deprecated on 2999-01-31: use 1.1.0");
    let status = setup.skr_status("the announced deprecation", announced).await?;
    let keda = module(&status, "keda").cloned().context("the module")?;
    assert_eq!((keda.version.as_deref(), keda.channel), (Some("1.0.0"), Some("regular".to_owned())));
    assert_ne!(keda.state, State::Warning);
    body["spec"]["versions"][0]["withdrawal"] = json!({"date": "2026-01-31", "replacement": "1.1.0"});
    apply::<ModuleReleaseMeta>(&setup, "keda", &body).await?;
    let withdrawn = says("version 1.0.0 of module keda is withdrawn as of 2026-01-31, use version 1.1.0");
    let status = setup.skr_status("the withdrawal", withdrawn).await?;
    assert_eq!(module(&status, "keda").map(|keda| keda.state), Some(State::Warning));
    // It stays installed, and in the catalog.
    version_becomes(&setup, "1.0.0").await?;
    user_api::<ModuleTemplate>(&setup).await?.get("keda-1.0.0").await?;
    let synced = metas.get("keda").await?;
    assert_eq!(synced.spec.versions()[0].withdrawal.as_ref().and_then(|it| it.replacement.as_deref()), Some("1.1.0"));

    // The annotation alone changes.
    setup.runtime.patch_kyma(&pin("1.1.0")).await?;
    version_becomes(&setup, "1.1.0").await?;
    setup.runtime.patch_kyma(&pin("latest")).await?;
    let status =
        setup.skr_status("the error", |status| module(status, "keda").is_some_and(|it| it.state == State::Error));
    let message = module(&status.await?, "keda").and_then(|keda| keda.message.clone()).context("a message")?;
    assert_eq!(message, format!("invalid annotation {PIN}: \"latest\" is not a semantic version"));
    version_becomes(&setup, "1.1.0").await?;
    Ok(())
}

/// Busola writes `version` beside `channel`, and the Kyma CLI replaces the Kyma by what its own type has of it.
#[tokio::test]
async fn programs_that_know_no_pins_break_nothing() -> TestResult {
    let setup = SingleRuntime::start("programs", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    setup.runtime.select(&["keda"]).await?;
    version_becomes(&setup, "1.0.0").await?;
    let kymas = user_api::<Kyma>(&setup).await?;
    let written = async |patch: Value| {
        let patch = Patch::Json::<()>(serde_json::from_value(patch)?);
        let kyma = kymas.patch(SKR_KYMA, &PatchParams::default(), &patch).await?;
        anyhow::Ok(serde_json::to_value(&kyma.spec.modules()[0])?)
    };
    let fast = json!([{"op": "add", "path": "/spec/modules/0/channel", "value": "fast"},
        {"op": "add", "path": "/spec/modules/0/version", "value": "1.1.0"}]);
    let pruned = json!({"name": "keda", "channel": "fast", "customResourcePolicy": "CreateAndDelete", "managed": true});
    assert_eq!(written(fast).await?, pruned, "the API server prunes the version");
    version_becomes(&setup, "1.1.0").await?;
    let whole = json!([{"op": "replace", "path": "/spec/modules",
        "value": [{"name": "keda", "channel": "fast", "version": "1.0.0"}]}]);
    assert_eq!(written(whole).await?, pruned);
    setup.runtime.patch_kyma(&json!({"metadata": {"annotations": {PIN: "1.1.0"}}})).await?;
    written(json!([{"op": "remove", "path": "/spec/modules/0/channel"}])).await?;
    let shows = |channel: &'static str| {
        move |status: &KymaStatus| {
            let notice = format!("version 1.1.0 is pinned by the annotation {PIN}");
            module(status, "keda").is_some_and(|it| {
                let is_pinned = it.message.as_ref().is_some_and(|message| message.ends_with(&notice));
                is_pinned && it.channel.as_deref() == Some(channel)
            })
        }
    };
    setup.skr_status("the pin and the channel of the Kyma", shows("regular")).await?;

    let cli = async |modules: Value| {
        until("the write of the Kyma CLI", async || {
            let mut kyma = serde_json::to_value(kymas.get(SKR_KYMA).await?)?;
            kyma["spec"] = json!({"channel": kyma["spec"]["channel"], "modules": modules});
            kyma["status"] = json!({"modules": [{"name": "keda", "state": "Processing"}]});
            match kymas.replace(SKR_KYMA, &PostParams::default(), &serde_json::from_value(kyma)?).await {
                Err(kube::Error::Api(status)) if status.is_conflict() => Ok(None),
                replaced => Ok(Some(replaced?.annotations().get(PIN).cloned().unwrap_or_default())),
            }
        })
        .await
    };
    assert_eq!(cli(json!([{"name": "keda", "channel": "fast", "managed": true}])).await?, "1.1.0");
    setup.skr_status("the channel of the entry", shows("fast")).await?;
    assert_eq!(cli(json!([])).await?, "1.1.0");
    setup.skr_status("no module", |status| status.modules().is_empty()).await?;
    assert_eq!(setup.manifests().await?.len(), 0);
    Ok(())
}
