//! Passes against a fake KCP and a fake runtime: which calls are made, and what is there afterwards.

mod fake;
mod installer;
mod takeover;
mod turn;

use std::sync::Arc;

use arc_swap::ArcSwap;
use kube::runtime::{
    reflector::{self, Lookup, Store, store::Writer},
    watcher::Event,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{Manifest, ModuleReleaseMeta, ModuleTemplate},
    event::{Change, Object},
    metrics::Registry,
    plan::Plan,
};

use self::fake::Fake;
use super::*;
use crate::{
    controllers::catalog,
    fleet::queue::{Drift, Priority},
};

/// How long a pass may take.
const PATIENCE: Duration = Duration::from_secs(45);

/// A KCP with one Kyma and a module `keda`, a runtime, and passes between them.
struct Bed {
    ctx: Context,
    kcp: Fake,
    runtime: Fake,
    manifests: Writer<Manifest>,
    key: KymaKey,
}

fn store<K>() -> (Store<K>, Writer<K>)
where
    K: Lookup + Clone + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
{
    reflector::store()
}

fn filled<K>(objects: &[Value]) -> (Store<K>, Writer<K>)
where
    K: Lookup + Clone + DeserializeOwned + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
{
    let (reader, mut writer) = store();
    fill(&mut writer, objects);
    (reader, writer)
}

fn fill<K>(writer: &mut Writer<K>, objects: &[Value])
where
    K: Lookup + Clone + DeserializeOwned + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
{
    writer.apply_watcher_event(&Event::Init);
    for object in objects {
        writer.apply_watcher_event(&Event::InitApply(serde_json::from_value(object.clone()).unwrap()));
    }
    writer.apply_watcher_event(&Event::InitDone);
}

fn of_kyma_group(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind,
           "metadata": {"name": name, "namespace": "kcp-system"}, "spec": spec})
}

impl Bed {
    fn new() -> Self {
        let (kcp, runtime) = (Fake::default(), Fake::runtime());
        kcp.edit("kymas/k", |kyma| {
            *kyma = of_kyma_group("Kyma", "k", json!({"channel": "regular"}));
            kyma["metadata"]["labels"] = json!({"kyma-project.io/runtime-id": "r-1"});
        });
        let (templates, _) = filled::<ModuleTemplate>(&[of_kyma_group(
            "ModuleTemplate",
            "keda-1.0.0",
            json!({"moduleName": "keda", "version": "1.0.0", "descriptor": {}}),
        )]);
        let (release_metas, _) = filled::<ModuleReleaseMeta>(&[of_kyma_group(
            "ModuleReleaseMeta",
            "keda",
            json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda",
                   "channels": [{"channel": "regular", "version": "1.0.0"}]}),
        )]);
        let (manifests, writer) = filled::<Manifest>(&[]);
        let stores =
            Stores { kymas: store().0, templates, release_metas, manifests, watchers: store().0, secrets: store().0 };
        let client = runtime.client();
        let ctx = Context {
            kcp: kcp.client(),
            stores,
            clients: Box::new(move |_| Ok((client.clone(), 1))),
            catalog: Catalog::new(catalog::Settings::default(), catalog::Metrics::default()),
            plan: Arc::new(ArcSwap::from_pointee(Plan::new("1".into(), Vec::new()).unwrap())),
            installer: None,
            settings: Settings { registry: "registry.example".into(), ..Settings::default() },
            metrics: Metrics::register(&mut Registry::default(), Requeues::default()),
            memory: Memory::default(),
            written: Written::default(),
        };
        Self { ctx, kcp, runtime, manifests: writer, key: KymaKey::new("kcp-system", "k") }
    }

    /// One whose first pass is over.
    async fn settled() -> Self {
        let mut bed = Self::new();
        let works = Works::of(&[Work::Kyma, Work::Catalog]);
        assert_eq!(bed.pass(works, Drift::None).await, Outcome::ended(works));
        bed.forget_calls();
        bed
    }

    /// One where `keda` is installed.
    async fn with_keda() -> Self {
        let mut bed = Self::settled().await;
        bed.enable();
        assert!(bed.kyma().await.failed.is_empty());
        bed.forget_calls();
        bed
    }

    fn enable(&self) {
        self.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true}]));
    }

    async fn pass(&mut self, works: Works, drift: Drift) -> Outcome {
        fill(&mut self.manifests, &self.kcp.all("manifests"));
        work(&self.ctx, &self.key, &Wanted { works, priority: Priority::User, drift }, PATIENCE).await
    }

    async fn kyma(&mut self) -> Outcome {
        self.pass(Works::of(&[Work::Kyma]), Drift::None).await
    }

    fn forget_calls(&self) {
        self.kcp.calls();
        self.runtime.calls();
    }

    fn status(&self) -> Value {
        self.kcp.object("kymas/k").unwrap()["status"].clone()
    }

    fn shown(&self) -> Value {
        self.runtime.object("kymas/default").unwrap()["status"].clone()
    }

    fn manifest(&self) -> Option<(String, Value)> {
        self.kcp
            .all("manifests")
            .pop()
            .map(|found| (format!("manifests/{}", found["metadata"]["name"].as_str().unwrap()), found))
    }

    fn condition(&self, kind: &str) -> Value {
        let status = self.status();
        status["conditions"]
            .as_array()
            .unwrap()
            .iter()
            .find(|condition| condition["type"] == kind)
            .cloned()
            .unwrap_or_default()
    }

    fn delete(&self) {
        self.kcp.edit("kymas/k", |kyma| kyma["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into());
    }
}

fn drift(subject: &str) -> Drift {
    Drift::of(Object {
        subject: subject.parse().unwrap(),
        kind: String::new(),
        uid: String::new(),
        resource_version: String::new(),
        generation: None,
        change: Change::Spec,
    })
}

#[tokio::test]
async fn a_new_runtime_gets_everything_and_an_idle_pass_makes_two_reads() {
    let mut bed = Bed::new();
    let works = Works::of(&[Work::Kyma, Work::Catalog]);
    assert_eq!(bed.pass(works, Drift::None).await, Outcome::ended(works));
    let kcp = bed.kcp.object("kymas/k").unwrap();
    assert_eq!(kcp["metadata"]["finalizers"], json!(["operator.kyma-project.io/Kyma"]));
    assert_eq!(kcp["metadata"]["labels"]["operator.kyma-project.io/managed-by"], "lifecycle-manager");
    assert_eq!(
        kcp["metadata"]["annotations"]["operator.kyma-project.io/tidewatch-accepted-spec"],
        r#"{"channel":"regular"}"#
    );
    assert_eq!(bed.status()["state"], "Ready");
    let labels = &bed.runtime.object("namespaces/kyma-system").unwrap()["metadata"]["labels"];
    assert_eq!(
        labels,
        &json!({"istio-injection": "enabled", "namespaces.warden.kyma-project.io/validate": "enabled",
        "operator.kyma-project.io/managed-by": "kyma"})
    );
    assert_eq!(bed.runtime.all("customresourcedefinitions").len(), 3);
    assert_eq!(bed.runtime.all("moduletemplates").len() + bed.runtime.all("modulereleasemetas").len(), 2);
    let kyma = bed.runtime.object("kymas/default").unwrap();
    assert_eq!(kyma["metadata"]["labels"]["kyma-project.io/runtime-id"], "r-1");
    assert_eq!(kyma["metadata"]["annotations"]["deprecated-operator.kyma-project.io/owned-by"], "kcp-system/k");
    assert_eq!(bed.shown()["state"], "Ready");
    bed.forget_calls();
    assert_eq!(bed.pass(works, Drift::None).await, Outcome::ended(works));
    assert_eq!(bed.kcp.calls(), ["GET kymas/k"]);
    assert_eq!(bed.runtime.calls(), ["GET kymas/default"]);
}

#[tokio::test]
async fn an_enabled_module_gets_its_manifest_and_both_statuses_tell() {
    let mut bed = Bed::settled().await;
    bed.enable();
    assert!(bed.kyma().await.failed.is_empty());
    let (id, manifest) = bed.manifest().unwrap();
    assert_eq!(
        bed.kcp.writes(),
        ["PATCH kymas/k".to_owned(), format!("PATCH {id}"), "PATCH kymas/k/status".to_owned()]
    );
    assert_eq!(bed.runtime.calls(), ["GET kymas/default", "PUT kymas/default/status"]);
    assert_eq!(manifest["spec"]["version"], "1.0.0");
    assert_eq!(
        (&bed.status()["state"], &bed.status()["modules"][0]["state"]),
        (&json!("Processing"), &json!("Processing"))
    );
    assert_eq!(bed.shown()["modules"][0]["template"]["metadata"]["namespace"], "kyma-system");
    assert!(bed.shown()["modules"][0]["manifest"].is_null());
    bed.kyma().await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]), "our own writes need no work");
    bed.kcp.edit(&id, |manifest| manifest["status"] = json!({"state": "Ready"}));
    bed.kyma().await;
    assert_eq!(bed.kcp.writes(), ["PATCH kymas/k/status"]);
    assert_eq!((&bed.status()["state"], &bed.shown()["state"]), (&json!("Ready"), &json!("Ready")));
}

#[tokio::test]
async fn what_a_manifest_has_besides_is_taken_away_and_then_nothing_is_written() {
    let mut bed = Bed::with_keda().await;
    let with = |spec: Value| {
        let manager =
            json!({"group": "apps", "version": "v1", "kind": "Deployment", "namespace": spec["of"], "name": "m"});
        let whole = json!({"moduleName": "keda", "version": "1.0.0", "descriptor": {}, "manager": manager,
                           "data": {"apiVersion": "a/v1", "kind": "Keda", "spec": spec}});
        filled::<ModuleTemplate>(&[of_kyma_group("ModuleTemplate", "keda-1.0.0", whole)]).0
    };
    bed.ctx.stores.templates = with(json!({"replicas": 2, "logging": {"level": "debug"}, "of": "kyma-system"}));
    bed.kyma().await;
    bed.forget_calls();
    // Its template says less of the same version.
    bed.ctx.stores.templates = with(json!({"replicas": 2}));
    bed.kyma().await;
    let (id, manifest) = bed.manifest().unwrap();
    assert_eq!(manifest["spec"]["resource"]["spec"], json!({"replicas": 2}));
    assert!(manifest["spec"]["manager"]["name"] == "m" && manifest["spec"]["manager"]["namespace"].is_null());
    assert_eq!(bed.kcp.writes()[..2], [format!("PATCH {id}"), format!("PUT {id}")]);
    // Somebody adds to it.
    bed.kcp.edit(&id, |manifest| manifest["spec"]["resource"]["spec"]["evil"] = json!(true));
    bed.kyma().await;
    assert_eq!(bed.manifest().unwrap().1["spec"], manifest["spec"]);
    bed.forget_calls();
    // The user fixes the version that it has.
    bed.runtime.edit("kymas/default", |kyma| {
        kyma["spec"]["modules"] = json!([{"name": "keda", "version": "1.0.0", "managed": true}]);
    });
    bed.kyma().await;
    let labels = bed.manifest().unwrap().1["metadata"]["labels"].clone();
    assert!(labels["operator.kyma-project.io/channel"].is_null(), "{labels}");
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]));
}

#[tokio::test]
async fn a_disabled_module_loses_its_manifest_and_says_so_until_it_is_gone() {
    let mut bed = Bed::with_keda().await;
    let (id, _) = bed.manifest().unwrap();
    bed.kcp.edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(["declarative.kyma-project.io/finalizer"]));
    bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    bed.kyma().await;
    assert!(bed.kcp.writes().contains(&format!("DELETE {id}")));
    assert_eq!(
        (&bed.status()["modules"][0]["state"], &bed.status()["state"]),
        (&json!("Deleting"), &json!("Processing"))
    );
    bed.kyma().await;
    assert_eq!(bed.kcp.writes(), Vec::<String>::new(), "it is deleted once and waited for");
    bed.kcp.remove(&id);
    bed.kyma().await;
    assert_eq!((&bed.status()["modules"], &bed.status()["state"]), (&json!([]), &json!("Ready")));
}

#[tokio::test]
async fn a_module_that_does_not_exist_is_the_users_error_and_ends_the_work() {
    let mut bed = Bed::with_keda().await;
    bed.runtime.edit("kymas/default", |kyma| {
        kyma["spec"]["modules"] = json!([{"name": "keda", "channel": "rapid"}, {"name": "serverless"}, {"name": "x", "version": "1.0.0"}]);
    });
    assert_eq!(bed.kyma().await, Outcome::ended(Works::of(&[Work::Kyma])));
    let modules = bed.status()["modules"].clone();
    let message = |n: usize| modules[n]["message"].as_str().unwrap().to_owned();
    assert_eq!(message(0), "no versions found for channel: rapid in module keda");
    assert_eq!(message(1), "no ModuleReleaseMeta found for module \"serverless\" in namespace \"kcp-system\"");
    assert_eq!(message(2), "no ModuleReleaseMeta found for module \"x\" in namespace \"kcp-system\"");
    assert!(modules.as_array().unwrap().iter().all(|module| module["state"] == "Error"));
    assert!(bed.manifest().is_some(), "a lookup error deletes nothing");
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]));
}

#[tokio::test]
async fn a_deleted_kyma_comes_back_as_the_user_had_it_and_a_reset_restores_the_defaults() {
    let mut bed = Bed::with_keda().await;
    bed.runtime.remove("kymas/default");
    bed.kyma().await;
    let modules = |bed: &Bed| bed.runtime.object("kymas/default").unwrap()["spec"]["modules"].clone();
    assert_eq!(modules(&bed)[0]["name"], "keda");
    assert!(bed.manifest().is_some());
    bed.kcp
        .edit("kymas/k", |kyma| kyma["metadata"]["labels"]["operator.kyma-project.io/reset-modules"] = "true".into());
    bed.kyma().await;
    assert_eq!((modules(&bed), bed.manifest()), (Value::Null, None));
    let metadata = bed.kcp.object("kymas/k").unwrap()["metadata"].clone();
    assert!(metadata["labels"]["operator.kyma-project.io/reset-modules"].is_null());
    assert_eq!(metadata["annotations"]["operator.kyma-project.io/tidewatch-accepted-spec"], r#"{"channel":"regular"}"#);
}

#[tokio::test]
async fn only_what_the_agent_speaks_of_is_read_again_and_additions_are_undone() {
    let mut bed = Bed::settled().await;
    let id = "customresourcedefinitions/kymas.operator.kyma-project.io";
    let works = Works::of(&[Work::Kyma]);
    let subject = "apiextensions.k8s.io/v1/customresourcedefinitions//kymas.operator.kyma-project.io";
    bed.pass(works, drift(subject)).await;
    assert_eq!(bed.runtime.calls(), [format!("GET {id}"), "GET kymas/default".to_owned()], "an echo writes nothing");
    bed.runtime.edit(id, |crd| crd["spec"]["names"]["categories"] = json!(["all"]));
    bed.pass(works, drift(subject)).await;
    assert_eq!(bed.runtime.writes(), [format!("PATCH {id}"), format!("PUT {id}")]);
    assert!(bed.runtime.object(id).unwrap()["spec"]["names"]["categories"].is_null());
}

#[tokio::test]
async fn a_definition_that_somebody_deletes_is_told_and_made_again_when_it_is_gone() {
    let mut bed = Bed::settled().await;
    let id = "customresourcedefinitions/moduletemplates.operator.kyma-project.io";
    let works = Works::of(&[Work::Kyma]);
    let subject = "apiextensions.k8s.io/v1/customresourcedefinitions//moduletemplates.operator.kyma-project.io";
    bed.runtime.edit(id, |crd| {
        crd["metadata"]["finalizers"] = json!(["customresourcecleanup.apiextensions.k8s.io"]);
        crd["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    });
    assert_eq!(bed.pass(works, drift(subject)).await, Outcome::failed(works, Class::Transport));
    let said = bed.condition("CRDsSync");
    let line = "the CRD moduletemplates.operator.kyma-project.io is being deleted in the runtime";
    let words = format!("CRDs are not synchronized to the SKR: {line}");
    assert_eq!((&said["status"], &said["message"]), (&json!("False"), &json!(words)));
    assert_eq!(bed.status()["lastOperation"]["operation"], line);
    bed.runtime.remove(id);
    assert_eq!(bed.pass(works, drift(subject)).await, Outcome::ended(works));
    assert!(bed.runtime.object(id).is_some());
    assert_eq!(bed.condition("CRDsSync")["status"], "True");

    // The namespace is no definition.
    bed.runtime.edit("namespaces/kyma-system", |namespace| {
        namespace["metadata"]["finalizers"] = json!(["kubernetes"]);
        namespace["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    });
    assert_eq!(bed.pass(works, drift("/v1/namespaces//kyma-system")).await.class, Some(Class::Transport));
    assert_eq!(bed.condition("CRDsSync")["status"], "True");
    assert_eq!(bed.status()["lastOperation"]["operation"], "kyma-system is being deleted in the runtime");
}

#[tokio::test]
async fn old_stored_versions_go_before_the_incumbents_definition_is_replaced() {
    let mut bed = Bed::new();
    let id = "customresourcedefinitions/kymas.operator.kyma-project.io";
    bed.runtime.edit(id, |crd| {
        *crd = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": "kymas.operator.kyma-project.io"},
            "spec": {"versions": [{"name": "v1beta1"}, {"name": "v1beta2"}]}, "status": {"storedVersions": ["v1beta1", "v1beta2"]}});
    });
    bed.kyma().await;
    let calls: Vec<_> = bed.runtime.calls().into_iter().filter(|call| call.contains(id)).collect();
    assert_eq!(calls, [format!("GET {id}"), format!("PATCH {id}/status"), format!("PATCH {id}")]);
    assert_eq!(bed.runtime.object(id).unwrap()["status"]["storedVersions"], json!(["v1beta2"]));
}

#[tokio::test]
async fn without_access_the_condition_says_why() {
    let mut bed = Bed::with_keda().await;
    let usable = std::mem::replace(&mut bed.ctx.clients, Box::new(|_| Err(Unusable::Missing)));
    let outcome = bed.kyma().await;
    assert_eq!(outcome, Outcome::failed(Works::of(&[Work::Kyma]), Class::Auth));
    let sentence = "no access Secret is labelled with this Kyma's name";
    let access = bed.condition("RuntimeAccess");
    assert_eq!(
        (&access["status"], &access["reason"], &access["message"]),
        (&json!("False"), &json!(SECRET_MISSING), &json!(sentence))
    );
    assert_eq!(
        (&bed.status()["state"], &bed.status()["lastOperation"]["operation"]),
        (&json!("Error"), &json!(sentence))
    );
    assert_eq!(bed.status()["modules"][0]["message"], sentence);
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!(bed.kcp.writes(), Vec::<String>::new(), "said once");
    bed.ctx.clients = usable;
    bed.kyma().await;
    assert_eq!(bed.condition("RuntimeAccess")["status"], "True");
    assert_eq!(bed.status()["modules"][0]["state"], "Processing");
}

#[tokio::test]
async fn an_error_is_never_read_as_absence() {
    let mut bed = Bed::with_keda().await;
    bed.runtime.refuse("GET kymas/default", 404);
    let outcome = bed.kyma().await;
    assert_eq!((outcome.class, bed.runtime.writes()), (Some(Class::Transport), vec![]), "a 404 that names nothing");
    assert!(bed.manifest().is_some());
    bed.runtime.refuse("GET kymas/default", 503);
    assert_eq!(bed.kyma().await.class, Some(Class::Transport));
    assert_eq!(bed.condition("RuntimeAccess")["reason"], "Unreachable");
    bed.runtime.refuse("GET kymas/default", 401);
    assert_eq!(bed.kyma().await.class, Some(Class::Auth));
    assert_eq!(bed.condition("RuntimeAccess")["reason"], "Unauthorized");
}

#[tokio::test]
async fn a_conflict_begins_the_work_anew_and_is_not_shown() {
    let mut bed = Bed::settled().await;
    bed.enable();
    bed.kcp.refuse("PATCH kymas/k/status", 409);
    let before = bed.status();
    assert_eq!(bed.kyma().await, Outcome::failed(Works::of(&[Work::Kyma]), Class::Ours));
    assert_eq!((bed.status(), bed.runtime.writes()), (before, vec![]));
}

#[tokio::test]
async fn what_somebody_else_wrote_while_a_pass_read_is_not_written_over() {
    // Another receiver that still thinks it is the active one, for example: the fence's other half.
    let other: fn(&mut Value) = |kyma| kyma["metadata"]["labels"]["other"] = json!("was here");
    let mut bed = Bed::settled().await;
    bed.enable();
    let before = bed.status();
    bed.kcp.meanwhile("PATCH kymas/k/status", "kymas/k", other);
    assert_eq!(bed.kyma().await, Outcome::failed(Works::of(&[Work::Kyma]), Class::Ours));
    assert_eq!(bed.status(), before);
    assert_eq!(bed.kyma().await.class, None, "the next pass has read what the other wrote");
    assert_ne!(bed.status(), before);

    let mut bed = Bed::new();
    bed.enable_default();
    bed.kcp.meanwhile("PATCH kymas/k", "kymas/k", other);
    assert_eq!(bed.kyma().await, Outcome::failed(Works::of(&[Work::Kyma]), Class::Ours));
    let finalizers = |bed: &Bed| bed.kcp.object("kymas/k").unwrap()["metadata"]["finalizers"].clone();
    assert_eq!(finalizers(&bed), Value::Null);
    bed.kyma().await;
    assert_ne!(finalizers(&bed), Value::Null);
}

#[tokio::test(start_paused = true)]
async fn a_pass_that_takes_too_long_is_cut_and_the_next_one_believes_nothing() {
    let mut bed = Bed::settled().await;
    let works = Works::of(&[Work::Kyma, Work::Catalog]);
    bed.runtime.hang(true);
    let begun = Instant::now();
    assert_eq!(bed.pass(works, Drift::None).await, Outcome::failed(works, Class::Transport));
    assert_eq!(begun.elapsed(), PATIENCE);
    bed.runtime.hang(false);
    bed.forget_calls();
    assert_eq!(bed.pass(works, Drift::None).await, Outcome::ended(works));
    let calls = bed.runtime.calls();
    for read in [
        "namespaces/kyma-system",
        "customresourcedefinitions/kymas.operator.kyma-project.io",
        "configmaps/tidewatch-catalog",
    ] {
        assert!(calls.contains(&format!("GET {read}")), "{read} in {calls:?}");
    }
}

#[tokio::test]
async fn a_failing_catalog_fails_alone() {
    let mut bed = Bed::new();
    bed.runtime.refuse("PATCH moduletemplates/keda-1.0.0", 422);
    bed.enable_default();
    let outcome = bed.pass(Works::of(&[Work::Kyma, Work::Catalog]), Drift::None).await;
    let (kyma, catalog) = (Works::of(&[Work::Kyma]), Works::of(&[Work::Catalog]));
    assert_eq!((outcome.ended, outcome.failed, outcome.put_off), (kyma, Works::EMPTY, catalog));
    assert_eq!(bed.condition("ModuleCatalog")["status"], "False");
    let message = bed.condition("ModuleCatalog")["message"].as_str().unwrap().to_owned();
    assert!(message.contains(": apply moduletemplates/keda-1.0.0; 1 wait for them: "), "{message}");
    assert!(bed.manifest().is_some(), "modules do not wait for the catalog");
}

impl Bed {
    fn enable_default(&self) {
        self.kcp.edit("kymas/k", |kyma| kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true}]));
    }
}

#[tokio::test]
async fn a_pass_for_the_catalog_alone_reads_the_kyma_and_nothing_else() {
    let mut bed = Bed::settled().await;
    let works = Works::of(&[Work::Catalog]);
    assert_eq!(bed.pass(works, Drift::None).await, Outcome::ended(works));
    assert_eq!((bed.kcp.calls(), bed.runtime.calls()), (vec!["GET kymas/k".to_owned()], vec![]));
}

#[tokio::test]
async fn skipped_and_paused_kymas_are_left_alone() {
    for (label, value) in [("skip-reconciliation", "TRUE"), ("tidewatch-pause", "true")] {
        let mut bed = Bed::settled().await;
        bed.enable();
        bed.kcp.edit("kymas/k", |kyma| {
            kyma["metadata"]["labels"][format!("operator.kyma-project.io/{label}")] = value.into()
        });
        assert_eq!(bed.kyma().await, Outcome::default(), "neither ended nor failed");
        assert_eq!((bed.kcp.writes(), bed.runtime.calls()), (vec![], vec![]));
        bed.delete();
        bed.kyma().await;
        assert_eq!(bed.kcp.writes().is_empty(), label == "tidewatch-pause", "a deletion goes on under skip alone");
    }
}

#[tokio::test]
async fn what_passes_worked_from_is_noted_when_it_is_something_else() {
    let mut bed = Bed::new();
    let noted = |bed: &Bed| {
        let kyma = bed.kcp.object("kymas/k").unwrap();
        let noted = kyma["metadata"]["annotations"]["operator.kyma-project.io/tidewatch-inputs"].as_str().unwrap();
        noted.split_once('.').map(|(kyma, catalog)| (kyma.to_owned(), catalog.to_owned())).unwrap()
    };
    bed.kyma().await;
    let (first, never) = noted(&bed);
    assert_eq!((first.len(), never.as_str()), (16, "-"), "nobody has looked at the catalog");
    bed.pass(Works::of(&[Work::Catalog]), Drift::None).await;
    let (same, catalog) = noted(&bed);
    assert_eq!((same, catalog.len()), (first.clone(), 16));
    bed.pass(Works::RUNTIME, Drift::All).await;
    bed.forget_calls();
    bed.pass(Works::RUNTIME, Drift::All).await;
    assert_eq!(bed.kcp.writes(), Vec::<String>::new());

    bed.kcp.edit("kymas/k", |kyma| kyma["metadata"]["labels"]["team"] = "a".into());
    bed.kyma().await;
    assert!(bed.kcp.writes().contains(&"PATCH kymas/k".to_owned()));
    let second = noted(&bed);
    assert_ne!(second.0, first);
    assert_eq!(second.1, catalog);
    bed.kcp.edit("kymas/k", |kyma| kyma["metadata"]["labels"]["team"] = "b".into());
    bed.runtime.refuse("GET kymas/default", 500);
    bed.kyma().await;
    assert_eq!(noted(&bed), second, "that pass failed");
}

#[tokio::test]
async fn a_kyma_that_is_not_there_ends_its_work() {
    let mut bed = Bed::settled().await;
    bed.kcp.remove("kymas/k");
    assert_eq!(bed.kyma().await, Outcome::ended(Works::of(&[Work::Kyma])));
    assert_eq!(bed.runtime.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn a_cache_that_is_behind_our_own_writes_is_not_believed() {
    let mut bed = Bed::with_keda().await;
    // As `Bed::pass`, but the cache stays as it is: the Manifest watch hangs.
    let behind = async |bed: &Bed| {
        let wanted = Wanted { works: Works::of(&[Work::Kyma]), priority: Priority::User, drift: Drift::None };
        assert!(work(&bed.ctx, &bed.key, &wanted, PATIENCE).await.failed.is_empty());
    };
    let disable = |bed: &Bed| bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    disable(&bed);
    behind(&bed).await;
    assert!(bed.manifest().is_none(), "the cache was empty when keda came, and no work began without its Manifest");

    bed.enable();
    bed.kyma().await;
    fill(&mut bed.manifests, &bed.kcp.all("manifests"));
    disable(&bed);
    behind(&bed).await;
    assert!(bed.manifest().is_none());
    bed.enable();
    behind(&bed).await;
    assert!(bed.manifest().is_some(), "the cache still shows the one that was deleted");
}

#[tokio::test]
async fn a_deletion_takes_manifests_first_and_the_finalizer_last() {
    let mut bed = Bed::with_keda().await;
    let (id, _) = bed.manifest().unwrap();
    bed.kcp.edit(&id, |manifest| {
        manifest["metadata"]["finalizers"] = json!(["declarative.kyma-project.io/finalizer"]);
        manifest["status"] =
            json!({"state": "Deleting", "lastOperation": {"operation": "waiting for module crs deletion"}});
    });
    bed.delete();
    let outcome = bed.kyma().await;
    assert!(outcome.again_in.is_some() && outcome.failed.is_empty());
    assert_eq!(bed.kcp.writes(), [format!("DELETE {id}"), "PATCH kymas/k/status".to_owned()]);
    for status in [bed.status(), bed.shown()] {
        assert_eq!(
            (&status["state"], &status["modules"][0]["message"]),
            (&json!("Deleting"), &json!("waiting for module crs deletion"))
        );
        assert_eq!(status["lastOperation"]["operation"], "waiting for modules to be deleted");
    }
    assert_eq!(bed.runtime.writes(), ["PUT kymas/default/status"], "nothing goes while a module blocks");
    bed.kcp.remove(&id);
    let mut writes = Vec::new();
    while bed.kcp.object("kymas/k").is_some() {
        assert!(bed.kyma().await.failed.is_empty());
        writes.extend(bed.runtime.writes().into_iter().filter(|write| write.starts_with("DELETE")));
        assert!(writes.len() < 10, "{writes:?}");
    }
    assert_eq!(
        writes,
        [
            "DELETE modulereleasemetas/keda",
            "DELETE moduletemplates/keda-1.0.0",
            "DELETE customresourcedefinitions/modulereleasemetas.operator.kyma-project.io",
            "DELETE customresourcedefinitions/moduletemplates.operator.kyma-project.io",
            "DELETE kymas/default",
            "DELETE configmaps/tidewatch-catalog",
            "DELETE customresourcedefinitions/kymas.operator.kyma-project.io",
        ]
    );
}

#[tokio::test]
async fn a_lost_runtime_is_gone_only_when_its_secret_was_away_long_enough() {
    let mut bed = Bed::settled().await;
    bed.ctx.clients = Box::new(|_| Err(Unusable::Missing));
    bed.delete();
    let outcome = bed.kyma().await;
    assert!(outcome.again_in.is_some_and(|wait| wait > Duration::from_secs(590)), "{outcome:?}");
    assert_eq!(bed.condition("RuntimeAccess")["reason"], SECRET_MISSING);
    let away = std::mem::replace(&mut bed.ctx.clients, {
        let client = bed.runtime.client();
        Box::new(move |_| Ok((client.clone(), 2)))
    });
    bed.runtime.refuse("GET customresourcedefinitions/kymas.operator.kyma-project.io", 503);
    bed.kyma().await;
    assert_eq!(bed.condition("RuntimeAccess")["reason"], "Unreachable", "a Secret that came back ends the wait");
    bed.ctx.clients = away;
    let outcome = bed.kyma().await;
    assert!(outcome.again_in.is_some_and(|wait| wait > Duration::from_secs(590)), "{outcome:?}");
    let long_ago = |bed: &Bed| {
        bed.kcp.edit("kymas/k", |kyma| {
            for condition in kyma["status"]["conditions"].as_array_mut().unwrap() {
                condition["lastTransitionTime"] = "2026-01-01T00:00:00Z".into();
            }
        })
    };
    long_ago(&bed);
    bed.kcp.edit("secrets/access", |secret| {
        *secret = json!({"metadata": {"name": "access", "labels": {"operator.kyma-project.io/kyma-name": "k"}}})
    });
    bed.kyma().await;
    assert!(bed.kcp.object("kymas/k").is_some(), "the Secret is there, whatever the cache says");
    bed.kcp.remove("secrets/access");
    bed.kyma().await;
    assert!(bed.kcp.object("kymas/k").is_none());
}

#[tokio::test]
async fn an_unreachable_runtime_holds_a_deletion_up_and_is_named() {
    let mut bed = Bed::settled().await;
    bed.delete();
    bed.runtime.refuse("GET customresourcedefinitions/kymas.operator.kyma-project.io", 503);
    assert_eq!(bed.kyma().await.class, Some(Class::Transport));
    assert_eq!(
        (&bed.status()["state"], &bed.condition("RuntimeAccess")["reason"]),
        (&json!("Deleting"), &json!("Unreachable"))
    );
    assert!(bed.kcp.object("kymas/k").is_some());
}
