//! Refused applies and their second ways, cut at each of their steps.

use std::collections::BTreeMap;

use tidewatch_api::facts::ManifestFacts;
use tidewatch_cluster::{
    object::Fallback,
    testing::{Admit, Cause},
};
use tidewatch_engine::ObjectKey;

use super::*;

const OTHER: &str = "sha256:3333333333333333333333333333333333333333333333333333333333333333";
const FORBIDDEN: &str = "FieldValueForbidden";

/// An upgrade whose plain apply is refused, or that has something to correct before it.
struct Case {
    /// Objects of both versions besides the CRD and the ConfigMap.
    before: Vec<Value>,
    after: Vec<Value>,
    admit: (&'static str, Admit),
    /// What others do in between.
    meanwhile: fn(&FakeApiServer),
    fallback: Fallback,
}

fn layer(objects: &[Value]) -> ModuleObjects {
    let mut all = vec![definition(), object("v1", "ConfigMap", "a")];
    for object in objects {
        all.retain(|other| ObjectKey::of(other) != ObjectKey::of(object));
        all.push(object.clone());
    }
    ModuleObjects::Ready(Arc::new(all))
}

fn point(fixture: &mut Fixture, reference: &str) {
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(reference));
}

/// Objects of the runtime, without what differs between equal histories.
fn objects_of(fixture: &Fixture) -> BTreeMap<String, Value> {
    let mut objects = fixture.runtime.objects();
    for object in objects.values_mut() {
        for member in ["resourceVersion", "uid", "generation"] {
            object["metadata"].as_object_mut().unwrap().remove(member);
        }
    }
    objects
}

impl Case {
    /// A Manifest with the first version, after the changes of others.
    async fn installed(&self) -> Fixture {
        let mut fixture = Fixture::new();
        let (plural, admit) = self.admit;
        fixture.runtime.admit(plural, admit);
        fixture.set_layer(layer(&self.before));
        fixture.reconcile().await;
        fixture.make_available_if_there();
        fixture.reconcile().await;
        assert_eq!(
            fixture.manifest().unwrap().annotations().get(annotation::SYNC_OCI_REF).map(String::as_str),
            Some(DIGEST)
        );
        (self.meanwhile)(&fixture.runtime);
        fixture.set_layer(layer(&self.after));
        point(&mut fixture, OTHER);
        fixture.runtime.calls();
        fixture
    }

    /// Upgrades, cut after each number of writes, and by a process that starts then. All reach the same end.
    async fn holds(&self) {
        let mut fixture = self.installed().await;
        fixture.reconcile().await;
        let state = fixture.state();
        let end = objects_of(&fixture);
        assert_eq!(fixture.manifest().unwrap().annotations()[annotation::SYNC_OCI_REF], OTHER, "{state:?}");
        assert_eq!(fixture.ctx.metrics.fallbacks.counted(self.fallback), 1, "{:?}", self.fallback);
        fixture.runtime.calls();
        fixture.verify().await;
        assert_eq!(fixture.runtime.writes(), Vec::<String>::new(), "{:?}: nothing is left to do", self.fallback);
        let mut cuts = 0;
        loop {
            let mut fixture = self.installed().await;
            fixture.runtime.cut_after(cuts);
            fixture.reconcile().await;
            let is_cut = fixture.runtime.is_cut();
            fixture.runtime.cut_after(None);
            fixture.ctx.memories = Memories::default();
            fixture.reconcile().await;
            fixture.reconcile().await;
            assert_eq!(objects_of(&fixture), end, "{:?} after {cuts} writes", self.fallback);
            if !is_cut {
                break;
            }
            cuts += 1;
        }
        assert!(cuts >= 2, "{:?} has several steps: {cuts}", self.fallback);
    }
}

impl Fixture {
    fn make_available_if_there(&self) {
        if self.runtime.object("deployments/d").is_some() {
            self.make_available();
        }
    }
}

fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[name] = value;
    object
}

/// Defaults of the strategy, and the union of its members.
fn strategy(_: &Value, deployment: &mut Value) -> Vec<Cause> {
    let strategy = &mut deployment["spec"]["strategy"];
    if strategy["type"].is_null() {
        strategy["type"] = "RollingUpdate".into();
    }
    if strategy["type"] == "RollingUpdate" && strategy["rollingUpdate"].is_null() {
        strategy["rollingUpdate"] = json!({"maxSurge": "25%"});
    }
    let is_excluded = strategy["type"] == "Recreate" && !strategy["rollingUpdate"].is_null();
    let cause = (FORBIDDEN, "spec.strategy.rollingUpdate", "may not be specified when strategy `type` is 'Recreate'");
    is_excluded.then_some(cause).into_iter().collect()
}

#[tokio::test(start_paused = true)]
async fn default_that_excludes_a_field_is_removed() {
    let recreate = with(manager(), "/spec/strategy", json!({"type": "Recreate"}));
    let case = Case {
        before: vec![manager()],
        after: vec![recreate],
        admit: ("deployments", strategy),
        meanwhile: |_| (),
        fallback: Fallback::Union,
    };
    case.holds().await;
    let mut fixture = case.installed().await;
    fixture.reconcile().await;
    let deployment = fixture.runtime.object("deployments/d").unwrap();
    assert_eq!(deployment["spec"]["strategy"], json!({"type": "Recreate"}));
}

fn conversion(_: &Value, crd: &mut Value) -> Vec<Cause> {
    let conversion = &mut crd["spec"]["conversion"];
    if conversion["strategy"].is_null() {
        conversion["strategy"] = "None".into();
    }
    let is_excluded = conversion["strategy"] == "None" && !conversion["webhook"].is_null();
    let cause = (FORBIDDEN, "spec.conversion.webhookClientConfig", "should not be set");
    is_excluded.then_some(cause).into_iter().collect()
}

#[tokio::test(start_paused = true)]
async fn conversion_that_a_version_drops_goes_with_what_was_injected() {
    let webhook = json!({"clientConfig": {"service": {"name": "s", "namespace": "kyma-system"}}});
    let converting = with(definition(), "/spec/conversion", json!({"strategy": "Webhook", "webhook": webhook}));
    let case = Case {
        before: vec![converting, manager()],
        after: vec![definition(), manager()],
        admit: ("customresourcedefinitions", conversion),
        meanwhile: |server| {
            server.edit("customresourcedefinitions/samples.example.test", |crd| {
                crd["spec"]["conversion"]["webhook"]["clientConfig"]["caBundle"] = json!("Cg==");
                let set = json!({"f:spec": {"f:conversion": {"f:webhook": {"f:clientConfig": {"f:caBundle": {}}}}}});
                let entry = json!({"manager": "injector", "operation": "Update", "apiVersion": "v1", "fieldsV1": set});
                crd["metadata"]["managedFields"].as_array_mut().unwrap().push(entry);
            });
        },
        fallback: Fallback::Conversion,
    };
    case.holds().await;
}

fn immutable(before: &Value, map: &mut Value) -> Vec<Cause> {
    let is_changed = before["immutable"] == true && before["data"] != map["data"];
    let cause = (FORBIDDEN, "data", "field is immutable when `immutable` is set");
    is_changed.then_some(cause).into_iter().collect()
}

fn frozen(value: &str, annotations: Value) -> Value {
    let mut map = object("v1", "ConfigMap", "frozen");
    map["metadata"]["annotations"] = annotations;
    map["immutable"] = json!(true);
    map["data"] = json!({"a": value});
    map
}

#[tokio::test(start_paused = true)]
async fn object_with_an_immutable_field_is_recreated_only_with_permission() {
    let permitted = || json!({annotation::RECREATE: "true"});
    let mut case = Case {
        before: vec![frozen("1", json!({})), manager()],
        after: vec![frozen("2", permitted()), manager()],
        admit: ("configmaps", immutable),
        meanwhile: |_| (),
        fallback: Fallback::Recreated,
    };
    case.holds().await;
    case.after = vec![frozen("2", json!({})), manager()];
    let mut fixture = case.installed().await;
    let outcome = fixture.reconcile().await;
    let (state, operation) = fixture.state();
    assert!(state == State::Error && operation.contains("field is immutable"), "{operation}");
    assert_eq!(fixture.runtime.object("configmaps/frozen").unwrap()["data"]["a"], "1");
    // The same object would be refused again.
    assert!(outcome.min_backoff.is_some_and(|delay| delay >= Duration::from_secs(30)), "{outcome:?}");
    fixture.runtime.calls();
    fixture.reconcile().await;
    assert_eq!(fixture.state(), (State::Error, operation));
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    // Somebody deletes it.
    fixture.runtime.remove("configmaps/frozen");
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.object("configmaps/frozen").unwrap()["data"]["a"], "2");
}

#[tokio::test(start_paused = true)]
async fn recreation_waits_for_finalizers() {
    let case = Case {
        before: vec![frozen("1", json!({})), manager()],
        after: vec![frozen("2", json!({annotation::RECREATE: "true"})), manager()],
        admit: ("configmaps", immutable),
        meanwhile: |server| {
            server.edit("configmaps/frozen", |map| map["metadata"]["finalizers"] = json!(["example.test/held"]));
        },
        fallback: Fallback::Recreated,
    };
    let mut fixture = case.installed().await;
    for _ in 0..2 {
        fixture.reconcile().await;
        assert_eq!(fixture.state().0, State::Error, "{:?}", fixture.state());
    }
    let (_, operation) = fixture.state();
    assert!(operation.contains("ConfigMap kyma-system/frozen"), "{operation}");
    fixture.runtime.remove("configmaps/frozen");
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.object("configmaps/frozen").unwrap()["data"]["a"], "2");
}

fn anything(_: &Value, _: &mut Value) -> Vec<Cause> {
    Vec::new()
}

#[tokio::test(start_paused = true)]
async fn custom_resource_takes_its_entries_to_its_next_version() {
    let sample = |version: &str, spec: Value| {
        let mut sample = object(&format!("example.test/{version}"), "Sample", "own");
        sample["spec"] = spec;
        sample
    };
    let mut both = definition();
    both["spec"]["versions"] = json!([{"name": "v1", "served": true, "storage": true, "schema": {}},
        {"name": "v2", "served": true, "storage": false, "schema": {}}]);
    let case = Case {
        before: vec![both.clone(), manager(), sample("v1", json!({"kept": 1, "dropped": 1}))],
        after: vec![both, manager(), sample("v2", json!({"kept": 1}))],
        admit: ("samples", anything),
        meanwhile: |_| (),
        fallback: Fallback::FieldVersion,
    };
    case.holds().await;
    let mut fixture = case.installed().await;
    fixture.reconcile().await;
    let own = fixture.runtime.object("samples/own").unwrap();
    assert_eq!(own["spec"], json!({"kept": 1}), "the field that the version drops is gone");
    let entries = own["metadata"]["managedFields"].as_array().unwrap();
    assert!(entries.iter().all(|entry| entry["apiVersion"] == "example.test/v2"), "{entries:?}");
}

#[tokio::test(start_paused = true)]
async fn workloads_are_upgraded_although_the_webhook_of_the_module_is_down() {
    let service = object("v1", "Service", "hooks");
    let hooked = |image: &str| {
        let mut map = object("v1", "ConfigMap", "a");
        map["data"] = json!({"image": image});
        let pointer = "/spec/template/spec/containers/0/image";
        vec![definition(), map, service.clone(), with(manager(), pointer, json!(image))]
    };
    let mut fixture = Fixture::new();
    fixture.set_layer(ModuleObjects::Ready(Arc::new(hooked("i:1"))));
    fixture.reconcile().await;
    fixture.make_available();
    assert_eq!(fixture.reconcile().await, ended());
    for (host, is_own) in [("hooks.kyma-system.svc", true), ("policy.theirs.svc", false)] {
        let message = format!(
            "Internal error occurred: failed calling webhook \"w.test\": failed to call webhook: Post \"https://{host}:443/\": refused"
        );
        fixture.runtime.refuse_saying("PATCH configmaps/a", 500, &message);
        let image = if is_own { "i:2" } else { "i:3" };
        fixture.set_layer(ModuleObjects::Ready(Arc::new(hooked(image))));
        point(&mut fixture, &format!("sha256:{}", if is_own { "4" } else { "5" }.repeat(64)));
        let outcome = fixture.reconcile().await;
        assert_eq!((outcome.failed, outcome.class), (WorkSet::MANIFEST, Some(ErrorClass::Refused)));
        let workload = fixture.runtime.object("deployments/d").unwrap();
        let live = &workload["spec"]["template"]["spec"]["containers"][0]["image"];
        assert_eq!(*live == image, is_own, "{host}: {live}");
        let (state, operation) = fixture.state();
        assert_eq!(state, State::Error);
        assert!(operation.contains("failed calling webhook"), "{operation}");
        let says = operation.starts_with("the module's own webhook does not answer, its other objects are applied");
        assert_eq!(says, is_own, "{operation}");
        assert_eq!(fixture.manifest().unwrap().annotations()[annotation::SYNC_OCI_REF], DIGEST);
    }
    assert_eq!(fixture.ctx.metrics.fallbacks.counted(Fallback::OwnWebhook), 1);
    fixture.runtime.refuse_nothing();
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn webhook_that_a_version_drops_goes_although_it_refuses_objects_of_the_version() {
    let service = object("v1", "Service", "hooks");
    let mut webhook = object("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "w");
    webhook["metadata"] = json!({"name": "w"});
    let mut map = object("v1", "ConfigMap", "a");
    let mut fixture = Fixture::new();
    fixture.set_layer(layer(&[service, webhook, manager()]));
    fixture.reconcile().await;
    fixture.make_available();
    assert_eq!(fixture.reconcile().await, ended());
    let message = "failed calling webhook \"w.test\": failed to call webhook: Post \"https://hooks.kyma-system.svc:443/\": refused";
    fixture.runtime.refuse_saying("PATCH configmaps/a", 500, message);
    map["data"] = json!({"a": "2"});
    fixture.set_layer(layer(&[map, manager()]));
    point(&mut fixture, OTHER);
    fixture.reconcile().await;
    assert!(fixture.runtime.object("validatingwebhookconfigurations/w").is_none());
    assert!(fixture.runtime.object("services/hooks").is_some(), "all else goes once the version is applied");
    fixture.runtime.refuse_nothing();
    fixture.reconcile().await;
    assert!(fixture.runtime.object("services/hooks").is_none());
    assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
}

/// A controller that changes a field back half a minute after each write: too seldom for the write budget to notice.
#[tokio::test(start_paused = true)]
async fn field_of_a_slow_writer_is_left_to_it_until_the_next_version() {
    let limited = |image: &str| {
        let manager = with(manager(), "/spec/revisionHistoryLimit", json!(2));
        layer(&[with(manager, "/spec/template/spec/containers/0/image", json!(image))])
    };
    let mut fixture = Fixture::new();
    fixture.set_layer(limited("i:1"));
    fixture.reconcile().await;
    fixture.make_available();
    assert_eq!(fixture.reconcile().await, ended());
    let fight = async |fixture: &mut Fixture| {
        for reverts in 0..40 {
            fixture.runtime.edit("deployments/d", |deployment| {
                deployment["spec"]["revisionHistoryLimit"] = json!(9);
                deployment["status"]["observedGeneration"] = json!(1_000);
                let entries = deployment["metadata"]["managedFields"].as_array_mut().unwrap();
                entries[0]["fieldsV1"]["f:spec"].as_object_mut().unwrap().remove("f:revisionHistoryLimit");
                let set = json!({"f:spec": {"f:revisionHistoryLimit": {}}});
                entries.truncate(1);
                entries
                    .push(json!({"manager": "rival", "operation": "Update", "apiVersion": "apps/v1", "fieldsV1": set}));
            });
            fixture.runtime.calls();
            fixture.verify().await;
            if fixture.runtime.writes().is_empty() {
                return reverts;
            }
            tokio::time::advance(Duration::from_secs(29)).await;
        }
        panic!("it never yields");
    };
    assert_eq!(fight(&mut fixture).await, 20);
    let said = "rival changes spec.revisionHistoryLimit of Deployment kyma-system/d again and again; it is left as it is for now";
    assert_eq!(fixture.state(), (State::Warning, said.to_owned()));
    assert!(ManifestFacts::from(&fixture.manifest().unwrap()).is_healthy());
    let outcome = fixture.reconcile().await;
    assert!(outcome.requeue_after.is_some_and(|after| after <= Duration::from_secs(3_600)), "{outcome:?}");
    // Its time is over.
    tokio::time::advance(Duration::from_secs(3_600)).await;
    fixture.runtime.calls();
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.writes(), ["PATCH deployments/d"]);
    assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
    // Another version asserts it at once.
    fight(&mut fixture).await;
    fixture.set_layer(limited("i:2"));
    point(&mut fixture, OTHER);
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.object("deployments/d").unwrap()["spec"]["revisionHistoryLimit"], 2);
}
