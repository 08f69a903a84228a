//! Objects that a version does not contain any more, or whose module is removed, with data of users in them.

use tidewatch_contract::event::{Change, Object};

use super::*;

const CRD: &str = "customresourcedefinitions/samples.example.test";

fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
}

fn claim() -> Value {
    object("v1", "PersistentVolumeClaim", "c")
}

/// An object that another one in its namespace owns.
fn owned(api_version: &str, kind: &str, name: &str, owner: &str) -> Value {
    let mut owned = inside(api_version, kind, name);
    owned["metadata"]["ownerReferences"] = json!([{"apiVersion": owner, "kind": "K", "name": "n", "uid": "u"}]);
    owned
}

/// An object in the namespace `own`.
fn inside(api_version: &str, kind: &str, name: &str) -> Value {
    json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": "own"}})
}

impl Fixture {
    /// A Manifest without a default CR whose module has these objects.
    async fn with(objects: &[Value]) -> Self {
        let mut fixture = Self::new();
        fixture.edit(|manifest| manifest["spec"]["resource"] = Value::Null);
        let mut layer = vec![manager()];
        layer.extend_from_slice(objects);
        fixture.set_layer(ModuleObjects::Ready(Arc::new(layer)));
        fixture.reconcile().await;
        fixture.make_available();
        fixture.reconcile().await;
        assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
        fixture.runtime.calls();
        fixture
    }

    fn put(&self, id: &str, object: Value) {
        self.runtime.edit(id, |live| *live = object);
    }

    /// Reconciles a version that has none of the objects.
    async fn drop_all(&mut self) -> ReconcileOutcome {
        self.set_layer(ModuleObjects::Ready(Arc::new(vec![manager()])));
        self.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
        self.reconcile().await
    }
}

#[tokio::test(start_paused = true)]
async fn definition_that_a_version_drops_stays_until_no_resource_is_left() {
    let mut fixture = Fixture::with(&[definition()]).await;
    fixture.put("samples/mine", object("example.test/v1", "Sample", "mine"));
    let outcome = fixture.drop_all().await;
    let said = "CustomResourceDefinition samples.example.test is not part of this version any more, and stays because of Sample \
                kyma-system/mine: it is deleted once none of its resources is left, or let it stay with the annotation \
                operator.kyma-project.io/tidewatch-keep=true";
    assert_eq!(fixture.state(), (State::Warning, said.to_owned()));
    assert!(outcome.failed.is_empty() && outcome.requeue_after.is_some());
    assert!(
        fixture.manifest().unwrap().is_synced()
            && fixture.synced().iter().any(|it| it.ends_with("samples.example.test"))
    );
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    let mut delays = Vec::new();
    for _ in 0..14 {
        delays.push(fixture.reconcile().await.requeue_after.unwrap());
    }
    assert!(delays[13] >= Duration::from_secs(300) && delays[13] <= Duration::from_secs(600), "{delays:?}");
    fixture.runtime.calls();
    fixture.reconcile().await;
    assert_eq!(
        fixture.runtime.calls(),
        [format!("GET {CRD}"), format!("GET {CRD}"), "GET samples".into(), "GET deployments/d".into()]
    );
    fixture.runtime.remove("samples/mine");
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.runtime.writes(), [format!("DELETE {CRD}")]);
    assert_eq!(fixture.state().0, State::Ready);
}

#[tokio::test(start_paused = true)]
async fn failed_search_for_content_deletes_nothing() {
    for (objects, refused, id) in [
        (vec![definition()], "GET samples", CRD),
        (vec![namespace("own")], "GET secrets", "namespaces/own"),
        (vec![claim()], "GET persistentvolumeclaims/c", "persistentvolumeclaims/c"),
    ] {
        let mut fixture = Fixture::with(&objects).await;
        fixture.runtime.refuse(refused, 500);
        let outcome = fixture.drop_all().await;
        assert!(!outcome.failed.is_empty() && fixture.runtime.object(id).is_some(), "{id}");
        fixture.runtime.refuse_nothing();
        fixture.reconcile().await;
        assert!(fixture.runtime.object(id).is_none(), "{id}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_content_that_nobody_can_make_again_keeps_a_namespace() {
    let custom = "customresourcedefinitions/others.other.test";
    let other = json!({"spec": {"group": "other.test", "scope": "Namespaced", "names": {"kind": "Other", "plural": "others"},
        "versions": [{"name": "v1", "served": true, "storage": true, "schema": {}}]}});
    let mut token = inside("v1", "Secret", "token");
    token["metadata"]["annotations"] = json!({"kubernetes.io/service-account.name": "default"});
    let mut going = inside("v1", "ConfigMap", "going");
    going["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    going["metadata"]["finalizers"] = json!(["f"]);
    for (id, object, keeps) in [
        ("serviceaccounts/default", inside("v1", "ServiceAccount", "default"), false),
        ("configmaps/kube-root-ca.crt", inside("v1", "ConfigMap", "kube-root-ca.crt"), false),
        ("leases/l", inside("coordination.k8s.io/v1", "Lease", "l"), false),
        ("events/e", inside("v1", "Event", "e"), false),
        ("secrets/token", token, false),
        ("configmaps/going", going, false),
        ("pods/p", owned("v1", "Pod", "p", "apps/v1"), false),
        ("persistentvolumeclaims/p", owned("v1", "PersistentVolumeClaim", "p", "apps/v1"), false),
        ("persistentvolumeclaims/p", owned("v1", "PersistentVolumeClaim", "p", "other.test/v1"), true),
        ("persistentvolumeclaims/p", inside("v1", "PersistentVolumeClaim", "p"), true),
        ("pods/p", inside("v1", "Pod", "p"), true),
        ("configmaps/mine", inside("v1", "ConfigMap", "mine"), true),
        ("others/mine", inside("other.test/v1", "Other", "mine"), true),
        ("configmaps/elsewhere", super::object("v1", "ConfigMap", "elsewhere"), false),
    ] {
        let mut fixture = Fixture::with(&[namespace("own"), inside("v1", "Secret", "s")]).await;
        fixture.put(custom, other.clone());
        let name = format!("{} own/{}", object["kind"].as_str().unwrap(), id.split('/').nth(1).unwrap());
        fixture.put(id, object);
        fixture.drop_all().await;
        assert_eq!(fixture.runtime.object("namespaces/own").is_some(), keeps, "{id}");
        assert!(fixture.runtime.object("secrets/s").is_none());
        let (state, operation) = fixture.state();
        let kept = format!("Namespace own is not part of this version any more, and stays because of {name}");
        assert_eq!((state == State::Warning, operation.starts_with(&kept)), (keeps, keeps), "{operation}");
    }
}

/// A version that drops a Namespace but not what is in it.
#[tokio::test(start_paused = true)]
async fn namespace_and_definition_of_objects_that_the_version_has_stay() {
    let own = object("example.test/v1", "Sample", "own");
    let mut fixture = Fixture::with(&[namespace("own"), inside("v1", "Secret", "s"), definition(), own.clone()]).await;
    let next = vec![manager(), inside("v1", "Secret", "s"), own];
    fixture.set_layer(ModuleObjects::Ready(Arc::new(next)));
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    fixture.reconcile().await;
    let (state, operation) = fixture.state();
    assert_eq!(state, State::Warning);
    assert!(
        operation.contains("because of Secret own/s") && operation.contains("because of Sample kyma-system/own"),
        "{operation}"
    );
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn claim_that_a_version_drops_stays_if_it_was_bound() {
    for is_bound in [false, true] {
        let mut fixture = Fixture::with(&[claim()]).await;
        if is_bound {
            fixture.runtime.edit("persistentvolumeclaims/c", |claim| claim["spec"]["volumeName"] = json!("pv"));
        }
        fixture.drop_all().await;
        assert_eq!(fixture.runtime.object("persistentvolumeclaims/c").is_some(), is_bound);
        let (state, operation) = fixture.state();
        assert_eq!(
            state == State::Warning && operation.contains("because of its volume pv: delete it if"),
            is_bound,
            "{operation}"
        );
        // The removal of the whole module takes it along.
        fixture.delete_manifest();
        fixture.reconcile().await;
        assert!(fixture.manifest().is_none() && fixture.runtime.object("persistentvolumeclaims/c").is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn namespace_of_a_claim_that_stays_for_its_data_stays() {
    let mut fixture = Fixture::with(&[namespace("own"), inside("v1", "PersistentVolumeClaim", "c")]).await;
    fixture.runtime.edit("persistentvolumeclaims/c", |claim| claim["spec"]["volumeName"] = json!("pv"));
    fixture.drop_all().await;
    assert_eq!(fixture.state().0, State::Warning);
    for id in ["persistentvolumeclaims/c", "namespaces/own"] {
        assert!(fixture.runtime.object(id).is_some(), "{id}");
    }
}

/// The deletion of the Namespace would delete it.
#[tokio::test(start_paused = true)]
async fn marked_object_of_the_module_keeps_its_namespace() {
    for is_removal in [false, true] {
        let mut fixture = Fixture::with(&[namespace("own"), inside("v1", "Secret", "s")]).await;
        fixture.runtime.edit("secrets/s", |secret| secret["metadata"]["annotations"][annotation::KEEP] = json!("true"));
        if is_removal {
            fixture.delete_manifest();
            assert_eq!(fixture.reconcile().await, ended());
            assert!(fixture.manifest().is_none());
        } else {
            fixture.drop_all().await;
            let operation = fixture.state().1;
            assert!(operation.contains("because of Secret own/s"), "{operation}");
        }
        for id in ["secrets/s", "namespaces/own"] {
            assert!(fixture.runtime.object(id).is_some(), "{id} {is_removal}");
        }
    }
}

/// Others may come after those that are looked at.
#[tokio::test(start_paused = true)]
async fn namespace_with_more_objects_than_are_looked_at_stays() {
    for (count, keeps) in [(99, false), (100, true)] {
        let mut fixture = Fixture::with(&[namespace("own")]).await;
        for name in (0..count).map(|n| format!("p{n:03}")) {
            fixture.put(&format!("pods/{name}"), owned("v1", "Pod", &name, "apps/v1"));
        }
        fixture.drop_all().await;
        assert_eq!(fixture.runtime.object("namespaces/own").is_some(), keeps, "{count}");
        let operation = fixture.state().1;
        assert_eq!(operation.contains("because of many objects of the kind Pod"), keeps, "{operation}");
    }
}

#[tokio::test(start_paused = true)]
async fn marked_object_is_left_to_the_user() {
    for (key, value, stays) in [
        (annotation::KEEP, "true", true),
        (annotation::KEEP, "false", false),
        (annotation::HELM_RESOURCE_POLICY, "keep", true),
        (annotation::HELM_RESOURCE_POLICY, "delete", false),
    ] {
        for is_removal in [false, true] {
            let mut fixture = Fixture::with(&[definition(), object("v1", "ConfigMap", "a")]).await;
            for id in [CRD, "configmaps/a"] {
                fixture.runtime.edit(id, |object| object["metadata"]["annotations"][key] = json!(value));
            }
            if is_removal {
                fixture.delete_manifest();
                assert_eq!(fixture.reconcile().await, ended());
                assert!(fixture.manifest().is_none());
            } else {
                assert_eq!(fixture.drop_all().await, ended());
                assert_eq!((fixture.state().0, fixture.synced().len()), (State::Ready, 1));
            }
            for id in [CRD, "configmaps/a"] {
                let left = fixture.runtime.object(id);
                assert_eq!(left.is_some(), stays, "{key}={value} {id}");
                let is_ours = |left: Value| left["metadata"]["labels"].get(label::MANAGED_BY).is_some();
                assert!(!left.is_some_and(is_ours), "it is the user's");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn marked_resource_blocks_no_removal_and_keeps_its_definition() {
    let mut fixture = Fixture::with(&[definition()]).await;
    let mut mine = object("example.test/v1", "Sample", "mine");
    mine["metadata"]["annotations"] = json!({annotation::KEEP: "true"});
    fixture.put("samples/mine", mine);
    fixture.delete_manifest();
    assert_eq!(fixture.reconcile().await, ended());
    assert!(fixture.manifest().is_none() && fixture.runtime.object("deployments/d").is_none());
    assert!(fixture.runtime.object(CRD).is_some() && fixture.runtime.object("samples/mine").is_some());
}

#[tokio::test(start_paused = true)]
async fn namespace_with_objects_of_others_survives_the_removal() {
    let mut fixture = Fixture::with(&[namespace("own"), inside("v1", "Secret", "s")]).await;
    fixture.put("configmaps/mine", inside("v1", "ConfigMap", "mine"));
    fixture.delete_manifest();
    assert_eq!(fixture.reconcile().await, ended());
    assert!(fixture.manifest().is_none() && fixture.runtime.object("secrets/s").is_none());
    let left = fixture.runtime.object("namespaces/own").unwrap();
    assert!(left["metadata"]["labels"].get(label::MANAGED_BY).is_none());
}

#[tokio::test(start_paused = true)]
async fn definition_of_the_product_is_refused_and_never_deleted() {
    let mut kymas = definition();
    kymas["metadata"]["name"] = json!("kymas.operator.kyma-project.io");
    kymas["spec"]["group"] = json!("operator.kyma-project.io");
    kymas["spec"]["names"] = json!({"kind": "Kyma", "plural": "kymas"});
    let mut fixture = Fixture::new();
    fixture.put("customresourcedefinitions/kymas.operator.kyma-project.io", kymas.clone());
    fixture.put("kymas/default", object("operator.kyma-project.io/v1beta2", "Kyma", "default"));
    fixture.runtime.calls();
    fixture.set_layer(ModuleObjects::Ready(Arc::new(vec![object("v1", "ConfigMap", "a"), kymas.clone(), manager()])));
    fixture.reconcile().await;
    let said =
        "CustomResourceDefinition kymas.operator.kyma-project.io belongs to Kyma itself: a module must not contain it";
    assert_eq!(fixture.state(), (State::Error, said.to_owned()));
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());

    // An earlier receiver has installed it as an object of the module.
    let mut fixture = Fixture::installed().await;
    kymas["metadata"]["annotations"] = json!({annotation::OWNED_BY: "kcp-system/m"});
    fixture.put("customresourcedefinitions/kymas.operator.kyma-project.io", kymas);
    fixture.put("kymas/default", object("operator.kyma-project.io/v1beta2", "Kyma", "default"));
    fixture.edit(|manifest| {
        let entry = json!({"group": "apiextensions.k8s.io", "version": "v1", "kind": "CustomResourceDefinition",
            "namespace": "", "name": "kymas.operator.kyma-project.io"});
        manifest["status"]["synced"].as_array_mut().unwrap().push(entry);
        manifest["spec"]["install"]["source"]["ref"] = json!(NEXT);
    });
    fixture.reconcile().await;
    fixture.delete_manifest();
    fixture.reconcile().await;
    assert!(fixture.manifest().is_none(), "the Kyma does not block it");
    assert!(fixture.runtime.object("customresourcedefinitions/kymas.operator.kyma-project.io").is_some());
}

/// Secrets and custom resources are not watched.
#[tokio::test(start_paused = true)]
async fn what_went_with_a_deleted_namespace_or_definition_returns_at_once() {
    let own = object("example.test/v1", "Sample", "own");
    for (gone, along, path, kind) in [
        ("namespaces/own", "secrets/s", "/v1/namespaces//own", "Namespace"),
        (
            CRD,
            "samples/own",
            "apiextensions.k8s.io/v1/customresourcedefinitions//samples.example.test",
            "CustomResourceDefinition",
        ),
    ] {
        for change in [Some(Change::Deleted), Some(Change::Created), None] {
            let layer = [namespace("own"), inside("v1", "Secret", "s"), definition(), own.clone()];
            let mut fixture = Fixture::with(&layer).await;
            fixture.runtime.remove(along);
            let live = fixture.runtime.remove(gone).unwrap();
            if change == Some(Change::Created) {
                // Somebody has created it again.
                fixture.put(gone, live);
            }
            let reported = Object {
                subject: path.parse().unwrap(),
                kind: kind.to_owned(),
                uid: String::new(),
                resource_version: String::new(),
                generation: None,
                change: change.unwrap_or(Change::Spec),
            };
            fixture.run(Drift::of(reported)).await;
            assert!(
                fixture.runtime.object(gone).is_some() && fixture.runtime.object(along).is_some(),
                "{gone} {change:?}"
            );
        }
    }
}
