//! Changes of a module's objects by users, which the agent reports.

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;

use super::*;
use crate::support::{QUOTA, refuse_pods};

#[tokio::test]
async fn changes_of_a_modules_objects_are_reverted_when_they_are_reported() -> TestResult {
    let modules = ModuleRuntime::start("module-drift", &[("sample", &["1.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.setup.becomes_idle().await?;
    let client = modules.client().await?;
    let deployments = Api::<Deployment>::namespaced(client.clone(), SKR_NAMESPACE);
    let manager = async || anyhow::Ok(deployments.get("sample-manager").await?);
    let before = manager().await?.spec.context("a spec")?;

    // Edited, scaled, without our label, and deleted.
    let image = json!([{"name": "manager", "image": "tidewatch.local/sample-operator:another"}]);
    let edited = json!({"spec": {"template": {"spec": {"containers": image}}}});
    for patch in [edited, json!({"spec": {"replicas": 0}}), json!({"metadata": {"labels": {label::MANAGED_BY: null}}})]
    {
        deployments.patch("sample-manager", &PatchParams::default(), &Patch::Strategic(&patch)).await?;
        until(&format!("{patch} to be reverted"), async || {
            let now = manager().await?;
            let is_same = now
                .spec
                .as_ref()
                .is_some_and(|spec| spec.replicas == before.replicas && spec.template == before.template);
            Ok((is_same && now.labels().contains_key(label::MANAGED_BY)).then_some(()))
        })
        .await?;
    }
    let roles = Api::<ClusterRole>::all(client.clone());
    let deleted = roles.get("sample-manager").await?.uid();
    roles.delete("sample-manager", &DeleteParams::default()).await?;
    until("the ClusterRole to come back", async || {
        Ok(roles.get_opt("sample-manager").await?.filter(|role| role.uid() != deleted).map(drop))
    })
    .await?;

    // A field that the module does not set is the user's.
    let note = json!({"metadata": {"annotations": {"example.test/note": "mine"}}});
    deployments.patch("sample-manager", &PatchParams::default(), &Patch::Merge(&note)).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.setup.becomes_idle().await?;
    assert_eq!(manager().await?.annotations()["example.test/note"], "mine");
    Ok(())
}

#[tokio::test]
async fn a_manager_that_becomes_unavailable_is_shown_and_its_return_too() -> TestResult {
    let modules = ModuleRuntime::start("module-health", &[("sample", &["1.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    let client = modules.client().await?;
    let quotas = refuse_pods(&client).await?;
    let pods = Api::<Pod>::namespaced(client, SKR_NAMESPACE);
    for pod in pods.list(&ListParams::default()).await?.items {
        pods.delete(&pod.name_any(), &DeleteParams::default()).await?;
    }
    modules.says("sample", State::Error, "a resource quota of the namespace refuses its pods: none").await?;
    quotas.delete(QUOTA, &DeleteParams::default()).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    Ok(())
}
