//! Pinned versions, and deprecated ones (`acceptance.md` C2 44).

use super::*;

#[tokio::test]
async fn a_pinned_version_stays_and_its_deprecation_is_reported() -> TestResult {
    let setup = SingleRuntime::start("fixed", &[KEDA]).await?;
    catalog_is_synced(&setup).await?;
    setup.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "version": "1.0.0"}]}})).await?;
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
    let says = |message: &'static str| {
        move |status: &KymaStatus| module(status, "keda").is_some_and(|it| it.message.as_deref() == Some(message))
    };
    // The Kyma is unchanged: the deprecation alone enqueued the runtime that has this version.
    let announced = says("version 1.0.0 of module keda will be deprecated on 2999-01-31: use 1.1.0");
    let status = setup.skr_status("the announced deprecation", announced).await?;
    let keda = module(&status, "keda").cloned().context("the module")?;
    assert_eq!((keda.version.as_deref(), keda.channel), (Some("1.0.0"), None));
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

    setup.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "version": "1.1.0"}]}})).await?;
    version_becomes(&setup, "1.1.0").await?;
    let both = json!({"spec": {"modules": [{"name": "keda", "version": "1.1.0", "channel": "fast"}]}});
    setup.runtime.patch_kyma(&both).await?;
    let status =
        setup.skr_status("the error", |status| module(status, "keda").is_some_and(|it| it.state == State::Error));
    let message = module(&status.await?, "keda").and_then(|keda| keda.message.clone()).context("a message")?;
    assert_eq!(message, "invalid module in spec: version and channel are mutually exclusive");
    version_becomes(&setup, "1.1.0").await?;
    Ok(())
}
