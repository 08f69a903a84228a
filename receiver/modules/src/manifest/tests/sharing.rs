//! Objects that another module of the Kyma contains, too.

use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use tidewatch_api::names::field_manager;

use super::*;

const MAP: &str = "configmaps/a";
const SHARED: &str = "operator.kyma-project.io/tidewatch-shared/beta";

impl Fixture {
    /// A Manifest of the module `beta`, whose ConfigMap has these data.
    fn beta(data: Value) -> Self {
        let mut fixture = Self::new();
        fixture.edit(|manifest| manifest["metadata"]["labels"][label::MODULE_NAME] = json!("beta"));
        fixture.set_map(data);
        fixture
    }

    /// Changes the layer as another version does.
    fn set_map(&mut self, data: Value) {
        let mut map = object("v1", "ConfigMap", "a");
        map["data"] = data;
        self.set_layer(ModuleObjects::Ready(Arc::new(vec![definition(), map, manager()])));
    }

    fn upgrade(&mut self, objects: Vec<Value>) {
        self.set_layer(ModuleObjects::Ready(Arc::new(objects)));
        self.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    }

    /// Applies the ConfigMap as the module `alpha` does.
    async fn alpha_applies(&mut self, data: Value) {
        let map = GroupVersionKind::gvk("", "v1", "ConfigMap");
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.runtime.client(), "kyma-system", &ApiResource::from_gvk(&map));
        let mut body = object("v1", "ConfigMap", "a");
        body["data"] = data;
        body["metadata"]["labels"] =
            json!({label::MANAGED_BY: "kyma", label::COMPONENT: "alpha", label::PART_OF: "Kyma"});
        body["metadata"]["annotations"] = json!({annotation::OWNED_BY: "kcp-system/alpha"});
        api.patch("a", &PatchParams::apply(field_manager::MODULE).force(), &Patch::Apply(body)).await.unwrap();
        self.put_alpha(|_| ());
        self.runtime.calls();
    }

    /// Puts the Manifest of the module `alpha` with the ConfigMap in its inventory.
    fn put_alpha(&mut self, change: impl FnOnce(&mut Value)) {
        let mut alpha = alpha();
        change(&mut alpha);
        let alpha: CachedManifest = serde_json::from_value(alpha).unwrap();
        self.manifests.apply_watcher_event(&watcher::Event::Apply(alpha.clone()));
        self.ctx.stores.manifests.apply(&alpha);
    }

    /// Reconciles until the manager is ready.
    async fn installs(&mut self) {
        self.reconcile().await;
        self.make_available();
        self.reconcile().await;
    }

    fn map(&self) -> Value {
        self.runtime.object(MAP).unwrap()
    }

    fn owner(&self) -> Value {
        self.map()["metadata"]["annotations"][annotation::OWNED_BY].clone()
    }

    fn managers(&self) -> Vec<Value> {
        let entries = self.map()["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
        entries.into_iter().map(|entry| entry["manager"].clone()).collect()
    }

    /// Writes of the ConfigMap since the last call.
    fn map_writes(&self) -> Vec<String> {
        self.runtime.writes().into_iter().filter(|write| write.ends_with(MAP)).collect()
    }
}

/// The Manifest of the module `alpha` with the ConfigMap in its inventory.
fn alpha() -> Value {
    let map = json!({"group": "", "version": "v1", "kind": "ConfigMap", "name": "a", "namespace": "kyma-system"});
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
        "metadata": {"name": "alpha", "namespace": NAMESPACE,
            "labels": {label::KYMA_NAME: "k", label::MODULE_NAME: "alpha"}},
        "spec": {"remote": true, "install": {"name": "raw-manifest", "source": {}}},
        "status": {"state": "Ready", "synced": [map]}})
}

#[tokio::test(start_paused = true)]
async fn equal_object_of_another_module_is_read_and_not_written() {
    let mut fixture = Fixture::beta(json!({"a": "1"}));
    fixture.alpha_applies(json!({"a": "1", "b": "1"})).await;
    fixture.installs().await;
    assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
    fixture.verify().await;
    assert_eq!(fixture.map_writes(), Vec::<String>::new());
    assert_eq!((fixture.owner(), fixture.managers()), (json!("kcp-system/alpha"), vec![json!(field_manager::MODULE)]));
    assert!(fixture.synced().contains(&"ConfigMap kyma-system/a".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn fields_that_the_owner_lacks_are_added_and_leave_with_the_module_that_added_them() {
    let mut fixture = Fixture::beta(json!({"a": "1", "b": "1"}));
    fixture.alpha_applies(json!({"a": "1"})).await;
    fixture.installs().await;
    assert_eq!(fixture.state().0, State::Ready);
    assert_eq!(fixture.map_writes(), ["PATCH configmaps/a"]);
    assert_eq!(
        (fixture.map()["data"].clone(), fixture.owner()),
        (json!({"a": "1", "b": "1"}), json!("kcp-system/alpha"))
    );
    fixture.verify().await;
    assert_eq!(fixture.map_writes(), Vec::<String>::new());
    // Another version adds another field.
    let mut map = object("v1", "ConfigMap", "a");
    map["data"] = json!({"a": "1", "c": "1"});
    fixture.upgrade(vec![definition(), map, manager()]);
    fixture.reconcile().await;
    assert_eq!(fixture.map()["data"], json!({"a": "1", "c": "1"}));

    fixture.delete_manifest();
    assert_eq!(fixture.reconcile().await, ended());
    assert!(fixture.manifest().is_none());
    assert_eq!(fixture.map()["data"], json!({"a": "1"}));
    assert_eq!((fixture.owner(), fixture.managers()), (json!("kcp-system/alpha"), vec![json!(field_manager::MODULE)]));
}

#[tokio::test(start_paused = true)]
async fn other_value_than_that_of_the_owner_is_a_warning_and_never_written() {
    let mut fixture = Fixture::beta(json!({"a": "2", "b": "1"}));
    fixture.alpha_applies(json!({"a": "1"})).await;
    fixture.installs().await;
    let said = "ConfigMap kyma-system/a is shared with the module alpha, whose values stay; this module has other ones for \
                .data.a, and adds none of its own: all of them need equal values, or the object belongs into one of them";
    assert_eq!(fixture.state(), (State::Warning, said.to_owned()));
    assert_eq!(fixture.map()["data"], json!({"a": "1"}));
    assert!(fixture.manifest().unwrap().is_synced(), "all else is applied");
    // Looked at ever more seldom, and no other object is.
    let mut delays = Vec::new();
    for _ in 0..14 {
        fixture.runtime.calls();
        delays.push(fixture.reconcile().await.requeue_after.unwrap());
        assert_eq!(fixture.runtime.calls(), ["GET configmaps/a", "PATCH configmaps/a", "GET deployments/d"]);
    }
    assert!(delays[13] >= Duration::from_secs(300) && delays[13] <= Duration::from_secs(600), "{delays:?}");
    assert_eq!(fixture.map()["data"], json!({"a": "1"}));

    fixture.alpha_applies(json!({"a": "2"})).await;
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.state().0, State::Ready);
    assert_eq!(fixture.map()["data"], json!({"a": "2", "b": "1"}));
}

#[tokio::test(start_paused = true)]
async fn field_that_a_user_has_changed_is_repaired_unless_the_owner_sets_it() {
    let mut fixture = Fixture::beta(json!({"b": "1"}));
    fixture.alpha_applies(json!({"a": "1"})).await;
    fixture.installs().await;
    let map = GroupVersionKind::gvk("", "v1", "ConfigMap");
    let api: Api<DynamicObject> =
        Api::namespaced_with(fixture.runtime.client(), "kyma-system", &ApiResource::from_gvk(&map));
    let mut edited = object("v1", "ConfigMap", "a");
    edited["data"] = json!({"b": "2"});
    api.patch("a", &PatchParams::apply("kubectl").force(), &Patch::Apply(edited)).await.unwrap();
    fixture.runtime.calls();
    fixture.verify().await;
    assert_eq!(fixture.map_writes(), ["PATCH configmaps/a", "PATCH configmaps/a"], "the second one is forced");
    assert_eq!(fixture.map()["data"], json!({"a": "1", "b": "1"}));
    assert_eq!(fixture.state().0, State::Ready);
}

/// A user has changed a field of both, and the other module was the first one to repair it.
#[tokio::test(start_paused = true)]
async fn owner_owns_its_fields_again_after_another_module_has_repaired_them() {
    let mut fixture = Fixture::beta(json!({"a": "1"}));
    fixture.installs().await;
    fixture.put_alpha(|_| ());
    let map = GroupVersionKind::gvk("", "v1", "ConfigMap");
    let api: Api<DynamicObject> =
        Api::namespaced_with(fixture.runtime.client(), "kyma-system", &ApiResource::from_gvk(&map));
    let alpha = format!("{}alpha", field_manager::SHARED);
    for (manager, value) in [("kubectl", "2"), (&*alpha, "1")] {
        let mut edited = object("v1", "ConfigMap", "a");
        edited["data"] = json!({"a": value});
        api.patch("a", &PatchParams::apply(manager).force(), &Patch::Apply(edited)).await.unwrap();
    }
    fixture.map_writes();
    fixture.verify().await;
    assert_eq!(fixture.map_writes(), ["PATCH configmaps/a"]);
    fixture.verify().await;
    assert_eq!(fixture.map_writes(), Vec::<String>::new());
    assert_eq!(fixture.owner(), "kcp-system/m");
}

#[tokio::test(start_paused = true)]
async fn object_of_an_owner_that_leaves_is_taken_over_with_its_own_fields() {
    let mut fixture = Fixture::beta(json!({"a": "2", "b": "1"}));
    fixture.alpha_applies(json!({"a": "2", "theirs": "1"})).await;
    fixture.installs().await;
    assert_eq!(fixture.map()["data"], json!({"a": "2", "b": "1", "theirs": "1"}));
    assert!(fixture.managers().contains(&json!(SHARED)));
    fixture.put_alpha(|alpha| alpha["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    fixture.verify().await;
    assert_eq!(fixture.map()["data"], json!({"a": "2", "b": "1"}));
    assert_eq!((fixture.owner(), fixture.managers()), (json!("kcp-system/m"), vec![json!(field_manager::MODULE)]));
    fixture.map_writes();
    fixture.verify().await;
    assert_eq!(fixture.map_writes(), Vec::<String>::new());
}

/// By a version that does not contain it, by the removal of the module, and when it becomes unmanaged.
#[tokio::test(start_paused = true)]
async fn object_that_leaves_is_handed_over_to_a_module_that_has_it() {
    for leave in [
        (|fixture: &mut Fixture| fixture.upgrade(vec![definition(), manager()])) as fn(&mut Fixture),
        Fixture::delete_manifest,
        |fixture| fixture.edit(|manifest| manifest["metadata"]["annotations"][annotation::UNMANAGED] = json!("true")),
    ] {
        let mut fixture = Fixture::installed().await;
        fixture.put_alpha(|_| ());
        leave(&mut fixture);
        fixture.reconcile().await;
        let map = fixture.map();
        assert_eq!(fixture.owner(), "kcp-system/alpha");
        assert_eq!(map["metadata"]["labels"][label::MANAGED_BY], "kyma", "it stays an object of a module");
        assert_eq!(*fixture.woken.lock(), ["alpha"]);
        let left = fixture.manifest();
        assert!(left.is_none() || !fixture.synced().contains(&"ConfigMap kyma-system/a".to_owned()));
    }
}

/// The inventory of the other one grows while this one decides.
#[tokio::test(start_paused = true)]
async fn inventories_count_as_they_are_right_before_a_deletion() {
    let mut fixture = Fixture::installed().await;
    fixture.delete_manifest();
    let manifest = fixture.manifest().unwrap();
    fixture.put_alpha(|_| ());
    fixture.reconcile_beside(Vec::new(), manifest).await;
    assert_eq!(fixture.owner(), "kcp-system/alpha");
    assert!(fixture.runtime.object("deployments/d").is_none());
}

/// Its reconcile may have seen the object before.
#[tokio::test(start_paused = true)]
async fn module_that_recorded_an_object_during_its_deletion_is_woken() {
    let mut fixture = Fixture::installed().await;
    fixture.delete_manifest();
    let manifest = fixture.manifest().unwrap();
    let late = Arc::new(serde_json::from_value(alpha()).unwrap());
    let others = || Some(if fixture.runtime.object(MAP).is_some() { Vec::new() } else { vec![Arc::clone(&late)] });
    fixture.reconcile_among(Box::new(others), manifest).await;
    assert!(fixture.manifest().is_none() && fixture.runtime.object(MAP).is_none());
    assert_eq!(*fixture.woken.lock(), ["alpha"]);
}

#[tokio::test(start_paused = true)]
async fn labels_of_the_common_namespace_are_added_beside_those_of_others() {
    let namespace = |labels: Value| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kyma-system", "labels": labels}});
    let mut fixture = Fixture::beta(json!({}));
    fixture.runtime.edit("namespaces/kyma-system", |live| *live = namespace(json!({"theirs": "1", "both": "1"})));
    let mut layer = objects();
    layer.push(namespace(json!({"ours": "1", "both": "2"})));
    fixture.set_layer(ModuleObjects::Ready(Arc::new(layer.clone())));
    fixture.installs().await;
    assert_eq!(fixture.state().0, State::Ready);
    let labels =
        |fixture: &Fixture| fixture.runtime.object("namespaces/kyma-system").unwrap()["metadata"]["labels"].clone();
    assert_eq!(labels(&fixture), json!({"theirs": "1", "both": "1", "ours": "1"}));
    fixture.runtime.calls();
    fixture.verify().await;
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    // Another version changes our label.
    layer[3] = namespace(json!({"ours": "2", "both": "2"}));
    fixture.upgrade(layer);
    fixture.reconcile().await;
    assert_eq!(labels(&fixture), json!({"theirs": "1", "both": "1", "ours": "2"}));
}

#[tokio::test(start_paused = true)]
async fn namespace_with_an_object_of_another_module_stays() {
    let mut fixture = Fixture::beta(json!({}));
    let mut map = object("v1", "ConfigMap", "a");
    map["metadata"]["namespace"] = json!("own");
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "own"}});
    fixture.set_layer(ModuleObjects::Ready(Arc::new(vec![definition(), namespace, map, manager()])));
    fixture.put_alpha(|alpha| alpha["status"]["synced"][0]["namespace"] = json!("own"));
    fixture.installs().await;
    assert_eq!(fixture.state().0, State::Ready);
    fixture.upgrade(vec![definition(), manager()]);
    fixture.reconcile().await;
    assert_eq!(fixture.owner(), json!("kcp-system/alpha"));
    assert!(fixture.runtime.object("namespaces/own").is_some());
}

#[tokio::test(start_paused = true)]
async fn default_cr_of_another_module_and_crs_of_users_stay_with_a_shared_definition() {
    let mut fixture = Fixture::beta(json!({}));
    fixture.put_alpha(|alpha| {
        alpha["status"]["synced"] = json!([{"group": "apiextensions.k8s.io", "version": "v1",
            "kind": "CustomResourceDefinition", "name": "samples.example.test", "namespace": ""}]);
    });
    fixture.installs().await;
    let mut theirs = object("example.test/v1", "Sample", "theirs");
    theirs["metadata"]["managedFields"] = json!([{"manager": field_manager::DEFAULT_OBJECT, "operation": "Update"}]);
    fixture.runtime.edit("samples/theirs", |live| *live = theirs);
    fixture.runtime.edit("samples/mine", |live| *live = object("example.test/v1", "Sample", "mine"));
    fixture.delete_manifest();
    for _ in 0..3 {
        fixture.reconcile().await;
    }
    assert!(fixture.manifest().is_none());
    for id in ["samples/theirs", "samples/mine", "customresourcedefinitions/samples.example.test"] {
        assert!(fixture.runtime.object(id).is_some(), "{id}");
    }
}

#[tokio::test(start_paused = true)]
async fn replicas_of_a_shared_workload_are_left_to_its_autoscaler() {
    let mut fixture = Fixture::beta(json!({}));
    let mut workload = object("apps/v1", "Deployment", "w");
    workload["spec"] = json!({"replicas": 1});
    fixture.set_layer(ModuleObjects::Ready(Arc::new(vec![definition(), manager(), workload.clone()])));
    fixture.put_alpha(|alpha| {
        alpha["status"]["synced"] = json!([{"group": "apps", "version": "v1", "kind": "Deployment", "name": "w",
            "namespace": "kyma-system"}]);
    });
    workload["spec"] = json!({"replicas": 3});
    workload["metadata"]["annotations"] = json!({annotation::OWNED_BY: "kcp-system/alpha"});
    let replicas = json!({"f:spec": {"f:replicas": {}}});
    workload["metadata"]["managedFields"] = json!([{"manager": "kube-controller-manager", "operation": "Update",
        "subresource": "scale", "apiVersion": "apps/v1", "fieldsV1": replicas}]);
    fixture.runtime.edit("deployments/w", |live| *live = workload);
    fixture.runtime.refuse("GET horizontalpodautoscalers", 403);
    fixture.installs().await;
    assert_eq!(fixture.runtime.object("deployments/w").unwrap()["spec"]["replicas"], 3);
    assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
}
