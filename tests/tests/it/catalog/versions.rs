//! Versions that users fix, and those that should not be used any more.

use super::*;

#[tokio::test]
async fn a_fixed_version_stays_and_a_deprecated_one_is_told_of() -> Tested {
    let one = One::start("fixed", &[KEDA]).await?;
    synced(&one).await?;
    one.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "version": "1.0.0"}]}})).await?;
    comes_to_run(&one, "1.0.0").await?;
    let manifest = one.manifests().await?.remove(0);
    assert!(!manifest.labels().contains_key(label::CHANNEL));
    let mut body = release_meta("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]);
    body["spec"]["versions"] = json!([
        {"version": "1.0.0", "deprecationDate": "2031-01-31", "deprecationMessage": "use 1.1.0"}]);
    apply::<ModuleReleaseMeta>(&one, "keda", &body).await?;
    let metas = user_api::<ModuleReleaseMeta>(&one).await?;
    until("the deprecation in the runtime", async || {
        let meta = metas.get("keda").await?;
        let told = meta.spec.versions().iter().any(|it| it.deprecation_message.as_deref() == Some("use 1.1.0"));
        Ok((told && meta.spec.version_of("regular") == Some("1.1.0")).then_some(()))
    })
    .await?;
    let said = "version 1.0.0 of module keda is deprecated as of 2031-01-31: use 1.1.0";
    // Nobody has touched the Kyma: the deprecation alone has woken who runs that version.
    let status = one.skr_status("the deprecation", |status| {
        module(status, "keda").is_some_and(|it| it.message.as_deref() == Some(said))
    });
    let keda = module(&status.await?, "keda").cloned().context("the module")?;
    assert_eq!((keda.state, keda.version.as_deref(), keda.channel), (State::Processing, Some("1.0.0"), None));

    one.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "version": "1.1.0"}]}})).await?;
    comes_to_run(&one, "1.1.0").await?;
    let both = json!({"spec": {"modules": [{"name": "keda", "version": "1.1.0", "channel": "fast"}]}});
    one.runtime.patch_kyma(&both).await?;
    let status =
        one.skr_status("the error", |status| module(status, "keda").is_some_and(|it| it.state == State::Error));
    let message = module(&status.await?, "keda").and_then(|keda| keda.message.clone()).context("a message")?;
    assert_eq!(message, "invalid module in spec: version and channel are mutually exclusive");
    comes_to_run(&one, "1.1.0").await?;
    Ok(())
}
