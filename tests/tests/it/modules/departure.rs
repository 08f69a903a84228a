//! Modules that the receiver may not touch: their Kyma or Manifest is skipped, or their runtime is gone.

use k8s_openapi::api::core::v1::Secret;
use kube::api::ListParams;

use super::*;

/// Finalizer of another controller.
const FOREIGN: &str = "example.test/backup";

#[tokio::test]
async fn modules_of_a_lost_runtime_go_with_their_kyma() -> TestResult {
    let options = Options { receiver: vec!["--runtime-gone-after-seconds=5".to_owned()], ..quick_options() };
    let modules = ModuleRuntime::without_agent("lost-runtime", &[("sample", &["1.0.0"])], options).await?;
    modules.start_agent().await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.create_sample("mine").await?;
    let manifests = modules.manifests().await?;
    let manifest = modules.manifest("sample").await?;
    let finalizers = [manifest.finalizers(), &[FOREIGN.to_owned()]].concat();
    let held = Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
    manifests.patch(&manifest.name_any(), &PatchParams::default(), &held).await?;

    // User resources and a foreign finalizer hold the Kyma as long as its runtime can be reached.
    let kymas = modules.setup.kcp_kymas().await?;
    kymas.delete(modules.setup.runtime.name(), &DeleteParams::default()).await?;
    let blocked = |status: &KymaStatus| {
        let named = |message: &str| message.contains("Sample kyma-system/mine");
        module(status, "sample").is_some_and(|it| it.message.as_deref().is_some_and(named))
    };
    modules.setup.kcp_status("the user's resource", blocked).await?;
    let mark = modules.setup.runtime.cluster().audit_mark()?;
    let secrets = Api::<Secret>::namespaced(modules.setup.landscape.operator(), modules.setup.landscape.namespace());
    let mine = ListParams::default().labels(&format!("{}={}", label::KYMA_NAME, modules.setup.runtime.name()));
    for secret in secrets.list_metadata(&mine).await?.items {
        secrets.delete(&secret.name_any(), &DeleteParams::default()).await?;
    }
    until("the Kyma to go", async || Ok(modules.setup.runtime.kcp_kyma().await?.is_none().then_some(()))).await?;
    assert_eq!(modules.setup.manifests().await?.len(), 0);
    let writes = modules.setup.runtime.cluster().writes_since(mark)?;
    let deleted: Vec<_> = writes.iter().filter(|write| write.verb.starts_with("delete")).collect();
    assert!(deleted.is_empty(), "{deleted:?}");
    modules.samples("v1alpha1", "Sample").await?.get("mine").await?;
    Ok(())
}

#[tokio::test]
async fn a_skipped_manifest_is_repaired_once_its_label_is_removed() -> TestResult {
    let modules = ModuleRuntime::start("skipped-manifest", &[("sample", &["1.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.setup.becomes_idle().await?;
    let manifests = modules.manifests().await?;
    let name = modules.manifest("sample").await?.name_any();
    let skip = async |value: Value| {
        let patch = Patch::Merge(json!({"metadata": {"labels": {label::SKIP_RECONCILIATION: value}}}));
        manifests.patch(&name, &PatchParams::default(), &patch).await
    };
    skip(json!("true")).await?;
    let deployments = Api::<Deployment>::namespaced(modules.client().await?, SKR_NAMESPACE);
    deployments.delete("sample-manager", &DeleteParams::default()).await?;
    // The receiver has the agent's event, and keeps it unsettled.
    modules.setup.agent_metric_reaches("tidewatch_agent_events_unsettled", &[], 1).await?;
    modules.setup.becomes_idle().await?;
    assert!(deployments.get_opt("sample-manager").await?.is_none());
    skip(Value::Null).await?;
    until("the Deployment to be restored", async || Ok(deployments.get_opt("sample-manager").await?)).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    Ok(())
}

#[tokio::test]
async fn user_resources_block_the_removal_under_the_policy_ignore_too() -> TestResult {
    let modules = ModuleRuntime::start("policy-ignore", &[("sample", &["1.0.0"])]).await?;
    let ignoring = json!({"spec": {"modules": [{"name": "sample", "customResourcePolicy": "Ignore"}]}});
    modules.setup.runtime.patch_kyma(&ignoring).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    let samples = modules.samples("v1alpha1", "Sample").await?;
    assert!(samples.get_opt("default").await?.is_none());
    // A resource of the user, even with the name of the default one.
    modules.create_sample("default").await?;
    modules.setup.runtime.select(&[]).await?;
    modules.says("sample", State::Deleting, "Sample kyma-system/default").await?;
    samples.delete("default", &DeleteParams::default()).await?;
    modules.is_clean().await?;
    Ok(())
}
