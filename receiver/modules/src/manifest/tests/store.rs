//! The Manifests of KCP keep the contract of the engine's stores.

use tidewatch_engine::testing::check_store;

use super::*;

/// Creates a Manifest in KCP, like the reconcile of its Kyma.
fn create(kcp: &FakeApiServer, name: &str) -> Manifest {
    let id = format!("manifests/{name}");
    kcp.edit(&id, |manifest| {
        *manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {label::KYMA_NAME: "k"}},
            "spec": {"remote": true, "install": {"name": "raw-manifest", "source": {}}}});
    });
    serde_json::from_value(kcp.object(&id).unwrap()).unwrap()
}

#[tokio::test]
async fn manifests_of_kcp_keep_the_contract() {
    let Fixture { kcp, ctx, mut manifests, .. } = Fixture::new();
    kcp.remove("manifests/m");
    let [first, second, third] = ["first", "second", "third"].map(|name| create(&kcp, name));
    let mut refresh = || {
        manifests.apply_watcher_event(&watcher::Event::Init);
        for manifest in kcp.all("manifests") {
            let manifest: CachedManifest = serde_json::from_value(manifest).unwrap();
            ctx.stores.manifests.apply(&manifest);
            manifests.apply_watcher_event(&watcher::Event::InitApply(manifest));
        }
        manifests.apply_watcher_event(&watcher::Event::InitDone);
    };
    refresh();
    check_store(&KcpStore { ctx: &ctx }, first, second, third, refresh).await;
}
