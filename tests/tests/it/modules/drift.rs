//! Changes of a module's objects by users, which the agent reports.

use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::api::ListParams;

use super::*;

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
    let quotas = Api::<ResourceQuota>::namespaced(client.clone(), SKR_NAMESPACE);
    let pods = Api::<Pod>::namespaced(client, SKR_NAMESPACE);
    let none = json!({"pods": "0"});
    let quota = serde_json::from_value(json!({"metadata": {"name": "none"}, "spec": {"hard": none}}))?;
    quotas.create(&PostParams::default(), &quota).await?;
    // No quota controller runs here.
    let counted = Patch::Merge(json!({"status": {"hard": none, "used": none}}));
    quotas.patch_status("none", &PatchParams::default(), &counted).await?;
    let probe = json!({"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "probe", "image": "probe"}]}});
    let (probe, dry) = (serde_json::from_value(probe)?, PostParams { dry_run: true, ..PostParams::default() });
    until("the quota to hold", async || {
        let refused = pods.create(&dry, &probe).await.err();
        Ok(refused.filter(|error| error.to_string().contains("exceeded quota")).map(drop))
    })
    .await?;
    for pod in pods.list(&ListParams::default()).await?.items {
        pods.delete(&pod.name_any(), &DeleteParams::default()).await?;
    }
    modules.says("sample", State::Error, "a resource quota of the namespace refuses its pods: none").await?;
    quotas.delete("none", &DeleteParams::default()).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    Ok(())
}
