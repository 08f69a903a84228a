//! A module whose component was renamed: two Manifests of one Kyma for the same module.

use super::*;

impl Fixture {
    /// Adds the Manifest of the new component, whose layer is or is not applied.
    fn add_successor(&mut self, created: &str) {
        let successor = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "successor", "namespace": NAMESPACE, "creationTimestamp": created,
                "labels": {label::KYMA_NAME: "k", label::MODULE_NAME: "sample"}},
            "spec": {"remote": true, "install": {"name": "raw-manifest", "source": {}}}});
        let successor: CachedManifest = serde_json::from_value(successor).unwrap();
        self.manifests.apply_watcher_event(&watcher::Event::Apply(successor.clone()));
        self.ctx.stores.manifests.apply(&successor);
    }

    /// The Manifest of an installed module, created at noon.
    async fn installed_at_noon() -> Self {
        let mut fixture = Self::installed().await;
        fixture.edit(|manifest| {
            manifest["metadata"]["creationTimestamp"] = json!("2026-01-01T12:00:00Z");
            manifest["metadata"]["labels"][label::MODULE_NAME] = json!("sample");
        });
        fixture
    }
}

#[tokio::test(start_paused = true)]
async fn manifest_with_a_successor_writes_nothing_any_more() {
    for (created, is_superseded) in [("2026-01-01T12:00:01Z", true), ("2026-01-01T11:59:59Z", false)] {
        let mut fixture = Fixture::installed_at_noon().await;
        fixture.add_successor(created);
        fixture.runtime.edit("configmaps/a", |map| {
            map["metadata"]["annotations"][annotation::OWNED_BY] = json!("kcp-system/successor");
        });
        assert_eq!(fixture.verify().await, ended());
        assert_eq!(fixture.runtime.writes().is_empty(), is_superseded, "{created}");
    }
}

#[tokio::test(start_paused = true)]
async fn removal_of_a_superseded_manifest_keeps_the_custom_resources_and_the_objects_taken_over() {
    let mut fixture = Fixture::installed_at_noon().await;
    fixture.add_successor("2026-01-01T12:00:01Z");
    fixture.runtime.edit("samples/mine", |sample| *sample = object("example.test/v1", "Sample", "mine"));
    for id in ["customresourcedefinitions/samples.example.test", "deployments/d"] {
        fixture.runtime.edit(id, |object| {
            object["metadata"]["annotations"][annotation::OWNED_BY] = json!("kcp-system/successor");
        });
    }
    fixture.delete_manifest();
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.runtime.writes(), ["DELETE configmaps/a"]);
    assert!(fixture.manifest().is_none());
}
