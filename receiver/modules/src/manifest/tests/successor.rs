//! A module whose component was renamed: two Manifests of one Kyma for the same module.

use tidewatch_engine::{PodSelection, precedence};

use super::*;

impl Fixture {
    /// Adds the Manifest of the new component.
    fn add_successor(&mut self, created: &str) {
        self.put_other(created, |_| ());
    }

    /// Adds or replaces the Manifest of the other component.
    fn put_other(&mut self, created: &str, change: impl FnOnce(&mut Value)) {
        let mut other = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "successor", "namespace": NAMESPACE, "creationTimestamp": created,
                "labels": {label::KYMA_NAME: "k", label::MODULE_NAME: "sample"}},
            "spec": {"remote": true, "install": {"name": "raw-manifest", "source": {}}}});
        change(&mut other);
        let other: CachedManifest = serde_json::from_value(other).unwrap();
        self.manifests.apply_watcher_event(&watcher::Event::Apply(other.clone()));
        self.ctx.stores.manifests.apply(&other);
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

impl Fixture {
    /// Verifies the Manifest while an object is marked as that of the other one; returns whether it wrote.
    async fn writes_beside(&mut self) -> bool {
        self.runtime.edit("configmaps/a", |map| {
            map["metadata"]["annotations"][annotation::OWNED_BY] = json!("kcp-system/successor");
        });
        assert_eq!(self.verify().await, ended());
        !self.runtime.writes().is_empty()
    }
}

#[tokio::test(start_paused = true)]
async fn number_of_the_succession_counts_before_the_creation() {
    let older = "2026-01-01T11:59:59Z";
    let newer = "2026-01-01T12:00:01Z";
    for (own, other, created, writes) in [
        ("1", None, newer, true),
        ("2", Some("1"), newer, true),
        ("2", Some("10"), older, false),
        ("1", Some("1"), newer, false),
        ("first", Some("1"), older, false),
        ("1", Some("first"), newer, true),
    ] {
        let mut fixture = Fixture::installed_at_noon().await;
        fixture.edit(|manifest| manifest["metadata"]["annotations"][annotation::SUCCESSION] = json!(own));
        fixture.put_other(created, |manifest| {
            if let Some(number) = other {
                manifest["metadata"]["annotations"] = json!({annotation::SUCCESSION: number});
            }
        });
        assert_eq!(fixture.writes_beside().await, writes, "{own} {other:?}");
    }
}

/// Creation times have whole seconds.
#[tokio::test(start_paused = true)]
async fn of_two_manifests_created_at_the_same_time_exactly_one_writes() {
    for (uid, writes) in [("a", true), ("z", false)] {
        let mut fixture = Fixture::installed_at_noon().await;
        fixture.put_other("2026-01-01T12:00:00Z", |other| other["metadata"]["uid"] = json!(uid));
        assert_eq!(fixture.writes_beside().await, writes, "{uid}");
        let other = fixture.ctx.stores.manifests.get(&ManifestKey::new(NAMESPACE, "successor")).unwrap().unwrap();
        let manifest = fixture.manifest().unwrap();
        assert_eq!(precedence(&manifest) > precedence(&other), writes);
        assert_eq!(precedence(&other) > precedence(&manifest), !writes);
    }
}

#[tokio::test(start_paused = true)]
async fn pods_of_a_superseded_manifest_are_not_watched_any_more() {
    let mut fixture = Fixture::installed_at_noon().await;
    let pods = PodSelection { namespace: "kyma-system".to_owned(), selector: "app=d".to_owned() };
    fixture.ctx.memories.put_pods(&key(), &KymaKey::new(NAMESPACE, "k"), Some(pods));
    fixture.add_successor("2026-01-01T12:00:01Z");
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.ctx.memories.pods(&key()), None);
}

#[tokio::test(start_paused = true)]
async fn removal_of_a_superseded_manifest_keeps_the_custom_resources_and_the_objects_taken_over() {
    let mut fixture = Fixture::installed_at_noon().await;
    let mut synced = fixture.kcp.object("manifests/m").unwrap()["status"]["synced"].clone();
    synced.as_array_mut().unwrap().retain(|object| object["kind"] != "ConfigMap");
    fixture.put_other("2026-01-01T12:00:01Z", |other| other["status"] = json!({"state": "Ready", "synced": synced}));
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

/// Its layer cannot be fetched, or its first reconcile has yet to come.
#[tokio::test(start_paused = true)]
async fn removal_beside_a_successor_without_objects_is_blocked_by_user_resources_and_leaves_the_default_cr() {
    let mut fixture = Fixture::installed_at_noon().await;
    let resource = fixture.kcp.object("manifests/m").unwrap()["spec"]["resource"].clone();
    fixture.put_other("2026-01-01T12:00:01Z", |other| other["spec"]["resource"] = resource);
    fixture.runtime.edit("samples/mine", |sample| *sample = object("example.test/v1", "Sample", "mine"));
    fixture.delete_manifest();
    fixture.reconcile().await;
    let blocked = "waiting for module crs deletion: Sample kyma-system/mine";
    assert_eq!(fixture.state(), (State::Deleting, blocked.to_owned()));
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    fixture.runtime.remove("samples/mine");
    assert_eq!(fixture.reconcile().await, ended());
    assert!(fixture.manifest().is_none());
    assert!(fixture.runtime.object("samples/default").is_some() && fixture.runtime.object("deployments/d").is_none());
}

/// The rename of the component is reverted before the newer Manifest is applied completely.
#[tokio::test(start_paused = true)]
async fn removal_of_a_newer_manifest_leaves_the_module_to_the_older_one() {
    let definition = "PATCH customresourcedefinitions/samples.example.test";
    let all = vec!["PATCH deployments/d", "PATCH configmaps/a", definition];
    for (not_inherited, has_user_cr, writes) in [
        (None, false, all.clone()),
        (None, true, all),
        (Some("ConfigMap"), true, vec!["PATCH deployments/d", "DELETE configmaps/a", definition]),
    ] {
        let mut fixture = Fixture::installed_at_noon().await;
        let mut synced = fixture.kcp.object("manifests/m").unwrap()["status"]["synced"].clone();
        synced.as_array_mut().unwrap().retain(|object| not_inherited.is_none_or(|kind| object["kind"] != kind));
        fixture.put_other("2026-01-01T11:59:59Z", |other| {
            other["status"] = json!({"state": "Ready", "synced": synced});
        });
        if has_user_cr {
            fixture.runtime.edit("samples/mine", |sample| *sample = object("example.test/v1", "Sample", "mine"));
        }
        fixture.delete_manifest();
        assert_eq!(fixture.reconcile().await, ended());
        assert_eq!(fixture.runtime.writes(), writes);
        assert!(fixture.manifest().is_none());
        let deployment = fixture.runtime.object("deployments/d").unwrap();
        assert_eq!(deployment["metadata"]["annotations"][annotation::OWNED_BY], "kcp-system/successor");
        assert!(fixture.woken.lock().iter().all(|woken| woken == "successor"));
        assert!(!fixture.woken.lock().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn manifest_whose_successor_leaves_takes_the_objects_over_again() {
    let mut fixture = Fixture::installed_at_noon().await;
    let created = "2026-01-01T12:00:01Z";
    fixture.add_successor(created);
    fixture.runtime.edit("configmaps/a", |map| {
        map["metadata"]["annotations"][annotation::OWNED_BY] = json!("kcp-system/successor");
    });
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    fixture.put_other(created, |other| other["metadata"]["deletionTimestamp"] = json!("2026-01-01T12:00:02Z"));
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.runtime.writes(), ["PATCH configmaps/a"]);
    let map = fixture.runtime.object("configmaps/a").unwrap();
    assert_eq!(map["metadata"]["annotations"][annotation::OWNED_BY], "kcp-system/m");
}

#[tokio::test(start_paused = true)]
async fn manifest_with_a_successor_reports_nothing_of_a_runtime_without_access() {
    let mut fixture = Fixture::installed_at_noon().await;
    fixture.add_successor("2026-01-01T12:00:01Z");
    fixture.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new());
}

/// The cache shows the deletion of the other Manifest after the reconcile has begun.
#[tokio::test(start_paused = true)]
async fn manifest_leaves_no_objects_to_one_that_is_deleted_at_the_same_time() {
    let mut fixture = Fixture::installed_at_noon().await;
    fixture.delete_manifest();
    let manifest = fixture.manifest().unwrap();
    let mut heir = manifest.clone();
    heir.metadata.name = Some("successor".to_owned());
    heir.metadata.deletion_timestamp = None;
    let outcome = fixture.reconcile_beside(vec![Arc::new(heir)], manifest).await;
    assert!(matches!(outcome.next, Next::After(_)), "{outcome:?}");
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    assert_eq!(fixture.reconcile().await, ended());
    assert!(fixture.manifest().is_none());
    for id in ["samples/default", "deployments/d", "configmaps/a"] {
        assert!(fixture.runtime.object(id).is_none(), "{id}");
    }
}
