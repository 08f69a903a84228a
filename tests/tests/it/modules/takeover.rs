//! Take-over and hand-back of running modules.

use std::collections::BTreeMap;

use super::*;
use crate::takeover::{request_hand_back, take_over, takeover_options};

/// The parts of a Manifest that neither direction may change.
fn kept(manifest: &Manifest) -> Result<Value> {
    let mut metadata = serde_json::to_value(&manifest.metadata)?;
    for field in ["managedFields", "resourceVersion"] {
        metadata.as_object_mut().context("metadata")?.remove(field);
    }
    let synced = manifest.status.as_ref().map(|status| json!(status.synced()));
    Ok(json!({"metadata": metadata, "spec": manifest.spec, "synced": synced}))
}

impl ModuleRuntime {
    /// Version and uid of each object of a module in the runtime.
    async fn versions(&self, manifest: &Manifest) -> Result<BTreeMap<String, (Option<String>, Option<String>)>> {
        let client = self.client().await?;
        let mut versions = BTreeMap::new();
        for entry in manifest.status.iter().flat_map(|status| status.synced()) {
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(&entry.group, &entry.version, &entry.kind));
            let api = match entry.namespace.as_str() {
                "" => Api::<DynamicObject>::all_with(client.clone(), &resource),
                namespace => Api::namespaced_with(client.clone(), namespace, &resource),
            };
            let object = api.get(&entry.name).await?;
            versions.insert(format!("{} {}", entry.kind, entry.name), (object.uid(), object.resource_version()));
        }
        Ok(versions)
    }
}

#[tokio::test]
async fn a_running_module_is_handed_back_and_taken_over_without_a_write() -> TestResult {
    let versions: &[(&str, &[&str])] = &[("sample", &["1.0.0"])];
    let modules = ModuleRuntime::without_agent("module-takeover", versions, takeover_options()).await?;
    let landscape = &modules.setup.landscape;
    let runtime = &modules.setup.runtime;
    take_over(landscape, runtime).await?;
    modules.start_agent().await?;
    runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.setup.becomes_idle().await?;
    let manifest = modules.manifest("sample").await?;
    let running = modules.versions(&manifest).await?;
    let recorded = kept(&manifest)?;
    assert_eq!(running.len(), 5, "{running:?}");

    // A hand-back removes the agent. Without a managed Kyma the receiver refuses its requests for 60 to 90 s.
    runtime.with_agent(async |agent| agent.kill9()).await?;
    request_hand_back(landscape, runtime).await?;
    assert_eq!(kept(&modules.manifest("sample").await?)?, recorded);
    assert_eq!(modules.versions(&manifest).await?, running);

    // A receiver that has never seen the module.
    modules.setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    modules.setup.landscape.start_receiver().await?;
    take_over(landscape, runtime).await?;
    modules.start_agent().await?;
    let is_proven = |status: &KymaStatus| status.condition("EventPath").is_some_and(Condition::is_true);
    modules.setup.kcp_status("a proven event path", is_proven).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.setup.becomes_idle().await?;
    assert_eq!(kept(&modules.manifest("sample").await?)?, recorded);
    assert_eq!(modules.versions(&manifest).await?, running);

    // From here on its objects are watched again.
    let roles = Api::<ClusterRole>::all(modules.client().await?);
    roles.delete("sample-manager", &DeleteParams::default()).await?;
    until("the ClusterRole to be restored", async || Ok(roles.get_opt("sample-manager").await?)).await?;
    modules.leave().await?;
    Ok(())
}
