//! Installation, readiness and failures.

use super::*;

#[tokio::test]
async fn a_listed_module_runs_and_a_removed_one_leaves_nothing_behind() -> TestResult {
    let modules = ModuleRuntime::start("module", &[("sample", &["1.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    let status = modules.becomes("sample", "1.0.0", State::Ready).await?;
    assert_eq!(status.state(), State::Ready);
    let deployments = Api::<Deployment>::namespaced(modules.client().await?, SKR_NAMESPACE);
    let manager = deployments.get("sample-manager").await?;
    assert_eq!(manager.status.as_ref().and_then(|status| status.available_replicas), Some(1));
    let manifest = modules.manifest("sample").await?;
    let owner = format!("{}/{}", modules.setup.landscape.namespace(), manifest.name_any());
    assert_eq!(manager.annotations()[annotation::OWNED_BY], owner);
    assert_eq!(manager.labels()[label::MANAGED_BY], "kyma");
    assert_eq!(manifest.finalizers().len(), 3);
    let layer = manifest.spec.install.source["ref"].as_str().context("a layer")?;
    assert_eq!(manifest.annotations()[annotation::SYNC_OCI_REF], layer);
    let inventory: Vec<_> = manifest.status.iter().flat_map(|status| status.synced()).map(|it| &it.kind).collect();
    assert_eq!(inventory.len(), 5, "{inventory:?}");
    // The operator runs, and serves the default module CR.
    let samples = modules.samples("v1alpha1", "Sample").await?;
    until("the default module CR to be Ready", async || {
        Ok((samples.get("default").await?.data["status"]["state"] == "Ready").then_some(()))
    })
    .await?;
    modules.leave().await?;
    Ok(())
}

#[tokio::test]
async fn a_deleted_default_module_cr_is_not_created_again_until_the_module_is_listed_again() -> TestResult {
    let modules = ModuleRuntime::start("default-cr", &[("sample", &["1.0.0", "1.1.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    let samples = modules.samples("v1alpha1", "Sample").await?;
    samples.delete("default", &DeleteParams::default()).await?;
    let is_gone = async || Ok(samples.get_opt("default").await?.is_none().then_some(()));
    until("the default module CR to go", is_gone).await?;
    modules.point("sample", "1.1.0").await?;
    modules.becomes("sample", "1.1.0", State::Ready).await?;
    assert!(samples.get_opt("default").await?.is_none());
    modules.leave().await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.1.0", State::Ready).await?;
    samples.get("default").await.context("the default module CR of the new Manifest")?;
    Ok(())
}

#[tokio::test]
async fn a_broken_image_is_named_and_affects_no_other_module() -> TestResult {
    let versions: &[(&str, &[&str])] = &[("sample", &["1.2.0-broken-image"]), ("own-resource", &["1.0.0"])];
    let modules = ModuleRuntime::start("broken-image", versions).await?;
    modules.setup.runtime.select(&["own-resource", "sample"]).await?;
    modules.becomes("own-resource", "1.0.0", State::Ready).await?;
    modules.says("sample", State::Error, "does-not-exist").await?;
    let status = modules.becomes("own-resource", "1.0.0", State::Ready).await?;
    assert_eq!(status.state(), State::Error, "the Kyma has the state of its worst module");
    // The agent watches the pods of the manager until it is ready.
    let pods = &["\"pods/"];
    modules.setup.agent_metric_reaches("tidewatch_agent_watch_objects", pods, 1).await?;
    modules.publish("sample", "2.0.0").await?;
    modules.point("sample", "2.0.0").await?;
    modules.becomes("sample", "2.0.0", State::Ready).await?;
    until("no watch on pods", async || Ok((!modules.setup.agent_page().await?.contains(pods[0])).then_some(())))
        .await?;
    modules.setup.runtime.select(&["own-resource"]).await?;
    modules.setup.skr_status("no sample module", |status| module(status, "sample").is_none()).await?;
    modules.becomes("own-resource", "1.0.0", State::Ready).await?;
    Ok(())
}

#[tokio::test]
async fn every_variant_of_the_sample_module_is_installed_and_removed() -> TestResult {
    let names = ["cluster-scoped", "own-resource", "statefulset", "without-default"];
    let versions = names.map(|name| (name, &["1.0.0"][..]));
    let modules = ModuleRuntime::start("every-variant", &versions).await?;
    modules.setup.runtime.select(&names).await?;
    for name in names {
        modules.becomes(name, "1.0.0", State::Ready).await?;
    }
    modules.leave().await?;
    Ok(())
}
