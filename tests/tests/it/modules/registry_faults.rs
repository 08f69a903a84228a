//! A registry that fails, and a content store that cannot be used.

use super::*;

#[tokio::test]
async fn a_failing_registry_stops_neither_a_removal_nor_an_installed_module() -> TestResult {
    let versions: &[(&str, &[&str])] = &[("sample", &["1.0.0"]), ("own-resource", &["1.0.0"])];
    let modules = ModuleRuntime::start("registry-down", versions).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.registry.process().kill();
    modules.setup.runtime.select(&["own-resource", "sample"]).await?;
    modules.says("own-resource", State::Error, "registry").await?;
    let status = modules.setup.skr_status("the installed module", |status| module(status, "sample").is_some()).await?;
    assert_eq!(module(&status, "sample").map(|it| it.state), Some(State::Ready));
    // Neither does a new process without the layer in its content store.
    modules.setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    modules.setup.landscape.start_receiver().await?;
    modules.setup.runtime.select(&[]).await?;
    modules.is_clean().await?;
    Ok(())
}

#[tokio::test]
async fn an_upgrade_continues_when_the_registry_returns_even_without_a_content_store() -> TestResult {
    // A file in place of the folder: no content can be stored, as on a full disk.
    let unusable = tempfile::NamedTempFile::new()?;
    let options = Options { content_dir: Some(unusable.path().to_owned()), ..quick_options() };
    let versions: &[(&str, &[&str])] = &[("sample", &["1.0.0", "1.1.0"])];
    let mut modules = ModuleRuntime::without_agent("registry-returns", versions, options).await?;
    modules.start_agent().await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.setup.receiver_metric_reaches("tidewatch_oci_store_errors_total", &["open"], 1).await?;

    modules.registry.process().kill();
    modules.point("sample", "1.1.0").await?;
    let says = |status: &KymaStatus| {
        let message = |it: &str| it.contains("registry");
        module(status, "sample").is_some_and(|it| it.message.as_deref().is_some_and(message))
    };
    modules.setup.skr_status("the failure of the registry", says).await?;
    // The installed version is still repaired.
    let accounts = Api::<ServiceAccount>::namespaced(modules.client().await?, SKR_NAMESPACE);
    accounts.delete("sample-manager", &DeleteParams::default()).await?;
    until("the account to be restored", async || Ok(accounts.get_opt("sample-manager").await?)).await?;

    modules.registry.restart().await?;
    modules.becomes("sample", "1.1.0", State::Ready).await?;
    modules.leave().await?;
    Ok(())
}
