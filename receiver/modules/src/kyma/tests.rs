//! Reconciles against a fake KCP and a fake runtime cluster: requests and resulting objects.

mod contested;
mod deletion;
mod first_reconcile;
mod installer;
mod leaving;
mod mandatory;
mod namespace;
mod pins;
mod pull_secret;
mod reduced;
mod registry;
mod releases;
mod reset;
mod retirement;
mod rollout;
mod selection;
mod states;
mod takeover;
mod windows;

use std::sync::Arc;

use kube::runtime::reflector::{self, Lookup, Store, store::Writer};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tidewatch_api::{ModuleReleaseMeta, ModuleTemplate, names::annotation, plan::Plan};
use tidewatch_cluster::{
    runtime_access::RuntimeAccessError,
    testing::{FakeApiServer, Fault, fill},
};
use tidewatch_contract::event::{Change, Object};
use tidewatch_fleet::{
    queue::{Drift, Priority},
    recorder::{self, EventRecorder},
    stores::{kymas::CachedKyma, manifests::CachedManifest},
};
use tidewatch_installer::{SECRET_MISSING, pull_secret::PullSecret};
use tidewatch_oci::digest::Digest;
use tidewatch_select::kyma::layer::ModuleLayer;

use super::*;
use crate::catalog;

/// Time limit of a reconcile in these tests.
const TIME_LIMIT: Duration = Duration::from_secs(45);

/// A KCP with one Kyma and a module `keda`, a runtime, and passes between them.
struct Bed {
    ctx: Context,
    kcp: FakeApiServer,
    runtime: FakeApiServer,
    manifests: Writer<CachedManifest>,
    kymas: Writer<CachedKyma>,
    key: KymaKey,
    /// Availability of every component descriptor; `None` if all can be read.
    unavailable: Arc<Mutex<Option<LayerLookup>>>,
}

fn layer_of(found: &Resolved) -> ModuleLayer {
    let digest = Digest::of(found.version.as_bytes()).to_string();
    let source = json!({"repo": "registry.example/component-descriptors", "name": found.component, "ref": digest, "type": "oci-dir"});
    ModuleLayer::new(&source, Vec::new())
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

fn of_kyma_group(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind,
           "metadata": {"name": name, "namespace": "kcp-system"}, "spec": spec})
}

impl Bed {
    fn new() -> Self {
        let kcp = FakeApiServer::default();
        let runtime = FakeApiServer::runtime();
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
        let (manifests, writer) = filled::<CachedManifest>(&[]);
        let (kymas, kyma_writer) = store();
        let stores = Stores { kymas, templates, release_metas, manifests: manifests.into(), watchers: store().0 };
        let client = runtime.client();
        let unavailable = Arc::<Mutex<Option<LayerLookup>>>::default();
        let lookup = unavailable.clone();
        let ctx = Context {
            kcp: kcp.client(),
            stores,
            clients: Box::new(move |_| Ok((client.clone(), 1))),
            access_remark: Box::new(|_| None),
            catalog: Catalog::new(catalog::Settings::default(), catalog::Metrics::default(), WriteBudgets::default()),
            layers: Box::new(move |_, found| match &*lookup.lock() {
                None => LayerLookup::Ready(layer_of(found)),
                Some(unavailable) => unavailable.clone(),
            }),
            modules_in_progress: Box::new(|_| false),
            plans: Plans::fixed(Plan::new("1".into(), Vec::new()).unwrap()),
            installer: None,
            mandatory: MandatoryModules::new("kcp-system", EventRecorder::new(recorder::Metrics::default())),
            windows: MaintenanceWindows::new(Duration::from_secs(1_200), Default::default()),
            pull_secret: None,
            settings: Settings::default(),
            metrics: Metrics::default(),
            budgets: WriteBudgets::default(),
            caches: Caches::default(),
        };
        let key = KymaKey::new("kcp-system", "k");
        Self { ctx, kcp, runtime, manifests: writer, kymas: kyma_writer, key, unavailable }
    }

    /// A fixture whose first reconcile has ended.
    async fn settled() -> Self {
        let mut bed = Self::new();
        let works = WorkSet::of(&[Work::Kyma, Work::Catalog]);
        assert_eq!(bed.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
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

    /// Sets the availability of every component descriptor; `None` for all readable.
    fn set_layers(&self, unavailable: Option<LayerLookup>) {
        *self.unavailable.lock() = unavailable;
    }

    /// Replaces the release metas of KCP.
    fn set_release_metas(&mut self, metas: Store<ModuleReleaseMeta>) {
        self.ctx.stores.release_metas = metas;
        let _ = self.ctx.catalog.refresh(&self.ctx.stores);
    }

    /// Replaces the templates of KCP.
    fn set_templates(&mut self, templates: Store<ModuleTemplate>) {
        self.ctx.stores.templates = templates;
        let _ = self.ctx.catalog.refresh(&self.ctx.stores);
    }

    /// Replaces the catalog by one with this roll-out delay, as after a restart.
    fn set_rollout_window(&mut self, window: Duration) {
        let flags = catalog::Flags { module_upgrade_rollout_max_delay: window, ..catalog::Flags::default() };
        let settings = catalog::Settings { flags, ..catalog::Settings::default() };
        self.ctx.catalog = Catalog::new(settings, catalog::Metrics::default(), WriteBudgets::default());
    }

    fn enable(&self) {
        self.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true}]));
    }

    async fn reconcile(&mut self, works: WorkSet, drift: Drift) -> ReconcileOutcome {
        self.watch_manifests();
        let queued = QueuedWork { work: works, priority: Priority::User, drift };
        let outcome = run_within(&self.ctx, &self.key, &queued, TIME_LIMIT).await;
        self.ctx.caches.inputs.write_all(&self.ctx.kcp).await;
        outcome
    }

    /// Updates cache and index of the Manifests, as the watch does.
    fn watch_manifests(&mut self) {
        let cache = self.manifests.as_reader();
        let index = &self.ctx.stores.manifests;
        let before = cache.state();
        fill(&mut self.manifests, &self.kcp.all("manifests"));
        cache.state().iter().for_each(|manifest| drop(index.apply(manifest)));
        let present: Vec<_> = cache.state().iter().map(|manifest| manifest.key()).collect();
        let gone = before.iter().filter(|manifest| !present.contains(&manifest.key()));
        gone.for_each(|manifest| drop(index.delete(manifest)));
    }

    /// Updates the cache of the Kymas, as the watch does.
    fn watch_kymas(&mut self) {
        fill(&mut self.kymas, &self.kcp.all("kymas"));
    }

    async fn kyma(&mut self) -> ReconcileOutcome {
        self.reconcile(WorkSet::of(&[Work::Kyma]), Drift::None).await
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

    fn is_manifest_deleted(&self) -> bool {
        self.manifest().is_some_and(|(_, manifest)| manifest["metadata"]["deletionTimestamp"].is_string())
    }

    /// Removes the only Manifest, which is being deleted, as its own controller does.
    fn release_manifest(&self) {
        assert!(self.is_manifest_deleted());
        self.kcp.remove(&self.manifest().unwrap().0);
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

/// `acceptance.md` C2 37 and 38: namespace, CRDs, catalog and Kyma with their labels, and the conditions.
#[tokio::test]
async fn new_runtime_gets_all_objects_and_an_idle_reconcile_makes_two_reads() {
    let mut bed = Bed::new();
    let works = WorkSet::of(&[Work::Kyma, Work::Catalog]);
    assert_eq!(bed.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    let kcp = bed.kcp.object("kymas/k").unwrap();
    assert_eq!(kcp["metadata"]["finalizers"], json!(["operator.kyma-project.io/Kyma"]));
    assert_eq!(kcp["metadata"]["labels"]["operator.kyma-project.io/managed-by"], "lifecycle-manager");
    assert_eq!(
        kcp["metadata"]["annotations"]["operator.kyma-project.io/tidewatch-accepted-spec"],
        r#"{"channel":"regular"}"#
    );
    assert_eq!(bed.status()["state"], "Ready");
    for kind in ["CRDsSync", "Modules", "ModuleCatalog"] {
        assert_eq!(bed.condition(kind)["status"], "True", "{kind}");
    }
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
    assert_eq!(bed.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    assert_eq!(bed.kcp.calls(), ["GET kymas/k"]);
    assert_eq!(bed.runtime.calls(), ["GET kymas/default"]);
}

/// `acceptance.md` C2 38 and 46.
#[tokio::test]
async fn enabled_module_gets_a_manifest_and_appears_in_both_statuses() {
    let mut bed = Bed::settled().await;
    bed.enable();
    assert!(bed.kyma().await.failed.is_empty());
    let (id, manifest) = bed.manifest().unwrap();
    assert_eq!(
        bed.kcp.object("kymas/k").unwrap()["spec"],
        json!({"channel": "regular"}),
        "the selection is not copied"
    );
    let mut writes = bed.kcp.writes();
    // The first two are concurrent.
    writes[..2].sort();
    assert_eq!(writes, ["PATCH kymas/k".to_owned(), format!("PATCH {id}"), "PATCH kymas/k/status".to_owned()]);
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

/// `acceptance.md` C2 50: a Manifest follows its template, and edits are reset.
#[tokio::test]
async fn surplus_fields_of_a_manifest_are_removed_once() {
    let mut bed = Bed::with_keda().await;
    let with = |spec: Value| {
        let manager =
            json!({"group": "apps", "version": "v1", "kind": "Deployment", "namespace": spec["of"], "name": "m"});
        let whole = json!({"moduleName": "keda", "version": "1.0.0", "descriptor": {}, "manager": manager,
                           "data": {"apiVersion": "a/v1", "kind": "Keda", "spec": spec}});
        filled::<ModuleTemplate>(&[of_kyma_group("ModuleTemplate", "keda-1.0.0", whole)]).0
    };
    // Edits take effect at once.
    bed.set_rollout_window(Duration::ZERO);
    bed.set_templates(with(json!({"replicas": 2, "logging": {"level": "debug"}, "of": "kyma-system"})));
    bed.kyma().await;
    bed.forget_calls();
    // Its template defines fewer fields for the same version.
    bed.set_templates(with(json!({"replicas": 2})));
    bed.kyma().await;
    let (id, manifest) = bed.manifest().unwrap();
    assert_eq!(manifest["spec"]["resource"]["spec"], json!({"replicas": 2}));
    assert!(manifest["spec"]["manager"]["name"] == "m" && manifest["spec"]["manager"]["namespace"].is_null());
    // An apply removes the fields of an earlier one by itself.
    let writes = bed.kcp.writes();
    assert!(writes[0] == format!("PATCH {id}") && !writes.contains(&format!("PUT {id}")), "{writes:?}");
    // Another writer adds a field.
    bed.kcp.edit(&id, |manifest| manifest["spec"]["resource"]["spec"]["evil"] = json!(true));
    bed.kyma().await;
    assert!(bed.kcp.writes().contains(&format!("PUT {id}")));
    assert_eq!(bed.manifest().unwrap().1["spec"], manifest["spec"]);
    bed.forget_calls();
    // The user pins the version that it has.
    bed.pin("1.0.0").await;
    let labels = bed.manifest().unwrap().1["metadata"]["labels"].clone();
    assert!(labels["operator.kyma-project.io/channel"].is_null(), "{labels}");
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]));
}

#[tokio::test]
async fn disabled_module_is_deleting_until_its_manifest_is_gone() {
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
async fn unknown_module_is_a_user_error_and_ends_the_work() {
    let mut bed = Bed::with_keda().await;
    bed.runtime.edit("kymas/default", |kyma| {
        kyma["spec"]["modules"] = json!([{"name": "keda", "channel": "rapid"}, {"name": "serverless"}, {"name": "x", "version": "1.0.0"}]);
    });
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    let modules = bed.status()["modules"].clone();
    let message = |n: usize| modules[n]["message"].as_str().unwrap().to_owned();
    assert_eq!(message(0), "no versions found for channel: rapid in module keda");
    assert_eq!(message(1), "no ModuleReleaseMeta found for module \"serverless\" in namespace \"kcp-system\"");
    assert_eq!(message(2), "no ModuleReleaseMeta found for module \"x\" in namespace \"kcp-system\"");
    let states: Vec<_> = modules.as_array().unwrap().iter().map(|module| module["state"].as_str().unwrap()).collect();
    assert_eq!((states, bed.status()["state"].as_str()), (vec!["Error", "Warning", "Warning"], Some("Error")));
    assert!(bed.manifest().is_some(), "a lookup error deletes nothing");
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]));
}

/// A status with hundreds of entries costs the control plane as much as many small writes.
#[tokio::test]
async fn status_shows_the_first_of_many_unknown_modules() {
    let mut bed = Bed::with_keda().await;
    let unknown = |from: usize| (from..430).map(|n| json!({"name": format!("a{n:03}")}));
    let keda = json!({"name": "keda"});
    let select = |bed: &mut Bed, from| {
        bed.runtime.edit("kymas/default", |kyma| {
            kyma["spec"]["modules"] = unknown(from).chain([keda.clone()]).collect();
        });
    };
    select(&mut bed, 0);
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    let text = "430 of the selected modules cannot be installed; the status shows the first 50 of them";
    for status in [bed.status(), bed.shown()] {
        let modules = status["modules"].as_array().unwrap().clone();
        assert_eq!((modules.len(), &modules[0]["name"], &modules[50]["name"]), (51, &json!("a000"), &json!("keda")));
        assert_eq!((&status["state"], &status["lastOperation"]["operation"]), (&json!("Error"), &json!(text)));
    }
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]));
    select(&mut bed, 380);
    bed.kyma().await;
    assert_eq!(bed.status()["modules"].as_array().unwrap().len(), 51);
    assert_eq!(bed.status()["lastOperation"]["operation"], "waiting for all modules to become ready");
}

/// `acceptance.md` C2 38 and 39. Unlike with lifecycle-manager, a Kyma that is deleted comes back with the user's selection; the
/// label restores the defaults.
#[tokio::test]
async fn deleted_kyma_is_recreated_with_the_users_spec_and_a_reset_restores_the_defaults() {
    let mut bed = Bed::with_keda().await;
    bed.runtime.remove("kymas/default");
    bed.kyma().await;
    let modules = |bed: &Bed| bed.runtime.object("kymas/default").unwrap()["spec"]["modules"].clone();
    assert_eq!(modules(&bed)[0]["name"], "keda");
    assert!(bed.manifest().is_some());
    bed.kcp
        .edit("kymas/k", |kyma| kyma["metadata"]["labels"]["operator.kyma-project.io/reset-modules"] = "true".into());
    bed.kyma().await;
    assert_eq!((modules(&bed), bed.is_manifest_deleted()), (Value::Null, true));
    let metadata = bed.kcp.object("kymas/k").unwrap()["metadata"].clone();
    assert!(metadata["labels"]["operator.kyma-project.io/reset-modules"].is_null());
    assert_eq!(metadata["annotations"]["operator.kyma-project.io/tidewatch-accepted-spec"], r#"{"channel":"regular"}"#);
}

/// `acceptance.md` C2 40.
#[tokio::test]
async fn only_reported_objects_are_read_again_and_surplus_fields_are_removed() {
    let mut bed = Bed::settled().await;
    let id = "customresourcedefinitions/kymas.operator.kyma-project.io";
    let works = WorkSet::of(&[Work::Kyma]);
    let subject = "apiextensions.k8s.io/v1/customresourcedefinitions//kymas.operator.kyma-project.io";
    bed.reconcile(works, drift(subject)).await;
    assert_eq!(bed.runtime.calls(), [format!("GET {id}"), "GET kymas/default".to_owned()], "an echo writes nothing");
    bed.runtime.edit(id, |crd| crd["spec"]["names"]["categories"] = json!(["all"]));
    bed.reconcile(works, drift(subject)).await;
    assert_eq!(bed.runtime.writes(), [format!("PATCH {id}"), format!("PUT {id}")]);
    assert!(bed.runtime.object(id).unwrap()["spec"]["names"]["categories"].is_null());
}

/// `acceptance.md` C2 40.
#[tokio::test]
async fn deleted_crd_is_reported_and_recreated_once_it_is_gone() {
    let mut bed = Bed::settled().await;
    let id = "customresourcedefinitions/moduletemplates.operator.kyma-project.io";
    let works = WorkSet::of(&[Work::Kyma]);
    let subject = "apiextensions.k8s.io/v1/customresourcedefinitions//moduletemplates.operator.kyma-project.io";
    bed.runtime.edit(id, |crd| {
        crd["metadata"]["finalizers"] = json!(["customresourcecleanup.apiextensions.k8s.io"]);
        crd["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    });
    assert_eq!(bed.reconcile(works, drift(subject)).await, ReconcileOutcome::failed(works, ErrorClass::Transport));
    let said = bed.condition("CRDsSync");
    let line = "the CRD moduletemplates.operator.kyma-project.io is being deleted in the runtime";
    let words = format!("CRDs are not synchronized to the SKR: {line}");
    assert_eq!((&said["status"], &said["message"]), (&json!("False"), &json!(words)));
    assert_eq!(bed.status()["lastOperation"]["operation"], line);
    bed.runtime.remove(id);
    assert_eq!(bed.reconcile(works, drift(subject)).await, ReconcileOutcome::ended(works));
    assert!(bed.runtime.object(id).is_some());
    assert_eq!(bed.condition("CRDsSync")["status"], "True");

    // The namespace is no definition.
    bed.runtime.edit("namespaces/kyma-system", |namespace| {
        namespace["metadata"]["finalizers"] = json!(["kubernetes"]);
        namespace["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    });
    assert_eq!(bed.reconcile(works, drift("/v1/namespaces//kyma-system")).await.class, Some(ErrorClass::Transport));
    assert_eq!(bed.condition("CRDsSync")["status"], "True");
    assert_eq!(bed.status()["lastOperation"]["operation"], "kyma-system is being deleted in the runtime");
}

#[tokio::test]
async fn objects_are_rewritten_before_lifecycle_managers_versions_are_dropped() {
    let mut bed = Bed::settled().await;
    let id = "customresourcedefinitions/kymas.operator.kyma-project.io";
    bed.runtime.edit(id, |crd| {
        let ours = crd["spec"]["versions"][0].take();
        let version = |name: &str, storage: bool| {
            let mut version = ours.clone();
            (version["name"], version["storage"]) = (name.into(), storage.into());
            version
        };
        crd["spec"]["versions"] = json!([version("v1beta1", true), version("v1beta2", false)]);
        crd["status"]["storedVersions"] = json!(["v1beta1", "v1beta2"]);
    });
    bed.forget_calls();
    let works = WorkSet::of(&[Work::Kyma]);
    let seen = drift("apiextensions.k8s.io/v1/customresourcedefinitions//kymas.operator.kyma-project.io");
    assert_eq!(bed.reconcile(works, seen).await, ReconcileOutcome::ended(works));
    let calls = bed.runtime.calls();
    let position = |call: &str| calls.iter().position(|it| *it == call).unwrap_or_else(|| panic!("{call}: {calls:?}"));
    let order =
        ["GET ID", "PATCH ID", "PATCH kymas/default", "PATCH ID/status"].map(|call| position(&call.replace("ID", id)));
    assert!(order.is_sorted(), "{calls:?}");
    let crd = bed.runtime.object(id).unwrap();
    assert_eq!(crd["status"]["storedVersions"], json!(["v1beta2"]));
    assert_eq!(crd["spec"]["versions"].as_array().map(Vec::len), Some(1), "ours is applied");
}

#[tokio::test]
async fn missing_access_is_explained_by_the_condition() {
    let mut bed = Bed::with_keda().await;
    let usable = std::mem::replace(&mut bed.ctx.clients, Box::new(|_| Err(RuntimeAccessError::Missing.into())));
    let outcome = bed.kyma().await;
    assert_eq!(outcome, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Auth));
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

/// A forced rotation of infrastructure-manager removes the kubeconfig from the Secret for a while.
#[tokio::test]
async fn last_kubeconfig_is_named_by_the_condition_and_the_end_of_its_use_is_awaited() {
    let mut bed = Bed::with_keda().await;
    bed.ctx.access_remark = Box::new(|_| Some(AccessRemark::LastKubeconfig(Duration::from_secs(90))));
    let outcome = bed.kyma().await;
    assert_eq!((outcome.class, outcome.requeue_after), (None, Some(Duration::from_secs(90))));
    let access = bed.condition("RuntimeAccess");
    assert_eq!((&access["status"], &access["reason"]), (&json!("True"), &json!("LastKubeconfig")));
    assert_eq!(
        access["message"],
        "the runtime can be reached with the last kubeconfig of the access Secret, which has none now; it is used for up to 10 minutes"
    );
    assert_eq!(bed.status()["modules"][0]["state"], "Processing", "no module is in Error");
    bed.ctx.access_remark = Box::new(|_| None);
    bed.kyma().await;
    let access = bed.condition("RuntimeAccess");
    assert_eq!((&access["status"], &access["reason"]), (&json!("True"), &json!("Ready")));
}

#[tokio::test]
async fn errors_are_never_read_as_absence() {
    let mut bed = Bed::with_keda().await;
    bed.runtime.refuse("GET kymas/default", 404);
    let outcome = bed.kyma().await;
    assert_eq!(
        (outcome.class, bed.runtime.writes()),
        (Some(ErrorClass::Transport), vec![]),
        "a 404 that names nothing"
    );
    assert!(bed.manifest().is_some());
    bed.runtime.refuse("GET kymas/default", 503);
    assert_eq!(bed.kyma().await.class, Some(ErrorClass::Transport));
    assert_eq!(bed.condition("RuntimeAccess")["reason"], "Unreachable");
    bed.runtime.refuse("GET kymas/default", 401);
    assert_eq!(bed.kyma().await.class, Some(ErrorClass::Auth));
    assert_eq!(bed.condition("RuntimeAccess")["reason"], "Unauthorized");
}

#[tokio::test]
async fn conflict_restarts_the_reconcile_without_a_status() {
    let mut bed = Bed::settled().await;
    bed.enable();
    bed.kcp.refuse("PATCH kymas/k/status", 409);
    let before = bed.status();
    assert_eq!(bed.kyma().await, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Conflict));
    assert_eq!((bed.status(), bed.runtime.writes()), (before, vec![]));
}

#[tokio::test]
async fn concurrent_writes_are_not_overwritten() {
    // Another receiver that still thinks it is the active one, for example: the fence's other half.
    let other: fn(&mut Value) = |kyma| kyma["metadata"]["labels"]["other"] = json!("was here");
    let mut bed = Bed::settled().await;
    bed.enable();
    let before = bed.status();
    bed.kcp.meanwhile("PATCH kymas/k/status", "kymas/k", other);
    assert_eq!(bed.kyma().await, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Conflict));
    assert_eq!(bed.status(), before);
    assert_eq!(bed.kyma().await.class, None, "the next reconcile has read the concurrent write");
    assert_ne!(bed.status(), before);

    let mut bed = Bed::new();
    bed.enable_default();
    bed.kcp.meanwhile("PATCH kymas/k", "kymas/k", other);
    assert_eq!(bed.kyma().await, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Conflict));
    let finalizers = |bed: &Bed| bed.kcp.object("kymas/k").unwrap()["metadata"]["finalizers"].clone();
    assert_eq!(finalizers(&bed), Value::Null);
    bed.kyma().await;
    assert_ne!(finalizers(&bed), Value::Null);
}

/// The task of the inputs and that of the event path write while a reconcile is in progress; a user's next change must not
/// wait for the backoff of a conflict with them.
#[tokio::test]
async fn concurrent_writes_of_our_own_conflict_with_no_reconcile() {
    for write in ["PATCH kymas/k/status", "PATCH kymas/k"] {
        let mut bed = Bed::settled().await;
        bed.enable();
        bed.kcp.meanwhile(write, "kymas/k", |kyma| {
            kyma["metadata"]["annotations"][annotation::INPUTS] = json!("a.b");
            let conditions = kyma["status"]["conditions"].as_array_mut().unwrap();
            conditions.push(json!({"type": "EventPath", "status": "True", "reason": "Alive", "message": "alive",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}));
        });
        assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])), "{write}");
        assert_eq!(bed.condition("EventPath")["reason"], "Alive", "{write}");
        assert_eq!(bed.status()["modules"][0]["name"], "keda", "{write}");
        bed.forget_calls();
        bed.kyma().await;
        assert_eq!(bed.kcp.writes(), Vec::<String>::new(), "{write}");
    }
    let mut bed = Bed::settled().await;
    bed.enable();
    bed.kcp.meanwhile("PATCH kymas/k/status", "kymas/k", |kyma| kyma["status"]["activeChannel"] = json!("theirs"));
    assert_eq!(bed.kyma().await.class, Some(ErrorClass::Conflict), "another process wrote our part of the status");
    assert_eq!(bed.status()["activeChannel"], "theirs");
}

#[tokio::test(start_paused = true)]
async fn reconcile_beyond_its_time_limit_is_aborted_and_the_next_one_reads_everything() {
    let mut bed = Bed::settled().await;
    let works = WorkSet::of(&[Work::Kyma, Work::Catalog]);
    bed.runtime.set_fault(Fault::Unresponsive);
    let begun = Instant::now();
    assert_eq!(bed.reconcile(works, Drift::None).await, ReconcileOutcome::failed(works, ErrorClass::Transport));
    assert_eq!(begun.elapsed(), TIME_LIMIT);
    bed.runtime.set_fault(Fault::None);
    bed.forget_calls();
    assert_eq!(bed.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
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
async fn failing_catalog_stops_no_other_work() {
    let mut bed = Bed::new();
    bed.runtime.refuse("PATCH moduletemplates/keda-1.0.0", 422);
    bed.enable_default();
    let outcome = bed.reconcile(WorkSet::of(&[Work::Kyma, Work::Catalog]), Drift::None).await;
    let kyma = WorkSet::of(&[Work::Kyma]);
    let catalog = WorkSet::of(&[Work::Catalog]);
    assert_eq!((outcome.ended, outcome.failed, outcome.deferred), (kyma, WorkSet::EMPTY, catalog));
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
async fn catalog_only_reconcile_reads_only_the_kyma() {
    let mut bed = Bed::settled().await;
    let works = WorkSet::of(&[Work::Catalog]);
    assert_eq!(bed.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    assert_eq!((bed.kcp.calls(), bed.runtime.calls()), (vec!["GET kymas/k".to_owned()], vec![]));
}

/// Review finding D4: a Kyma in error was reported Ready by a reconcile that had not looked at the modules.
#[tokio::test]
async fn catalog_or_installation_reconcile_keeps_the_error_of_the_kyma() {
    for works in [WorkSet::of(&[Work::Catalog]), WorkSet::INSTALLER, WorkSet::INSTALLER | WorkSet::of(&[Work::Catalog])]
    {
        let mut bed = Bed::settled().await;
        bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["channel"] = "none".into());
        bed.kyma().await;
        let failed = bed.status();
        assert_eq!(failed["state"], "Error");
        bed.runtime.remove("moduletemplates/keda-1.0.0");
        bed.runtime.refuse("PATCH moduletemplates/keda-1.0.0", 422);
        bed.reconcile(works, Drift::All).await;
        let status = bed.status();
        assert_eq!(
            (&status["state"], &status["lastOperation"]),
            (&failed["state"], &failed["lastOperation"]),
            "{works:?}"
        );
        let is_synced = !works.contains(Work::Catalog);
        assert_eq!(bed.condition("ModuleCatalog")["status"] == "True", is_synced, "{works:?}");
        assert_eq!(bed.condition("Modules")["status"], "False");
        bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["channel"] = "regular".into());
        bed.kyma().await;
        assert_eq!(bed.status()["state"], if is_synced { "Ready" } else { "Processing" });
    }
}

/// `acceptance.md` C2 48: the label skip-reconciliation stops changes, and not a deletion.
#[tokio::test]
async fn skipped_and_paused_kymas_are_not_reconciled() {
    for (label, value) in [("skip-reconciliation", "TRUE"), ("tidewatch-pause", "true")] {
        let mut bed = Bed::settled().await;
        bed.enable();
        bed.kcp.edit("kymas/k", |kyma| {
            kyma["metadata"]["labels"][format!("operator.kyma-project.io/{label}")] = value.into()
        });
        assert_eq!(bed.kyma().await, ReconcileOutcome::default(), "neither ended nor failed");
        assert_eq!((bed.kcp.writes(), bed.runtime.calls()), (vec![], vec![]));
        bed.delete();
        bed.kyma().await;
        assert_eq!(bed.kcp.writes().is_empty(), label == "tidewatch-pause", "a deletion goes on under skip alone");
    }
}

#[tokio::test]
async fn changed_inputs_are_recorded_once_reconciled() {
    let mut bed = Bed::new();
    let noted = |bed: &Bed| {
        let kyma = bed.kcp.object("kymas/k").unwrap();
        let noted = kyma["metadata"]["annotations"]["operator.kyma-project.io/tidewatch-inputs"].as_str().unwrap();
        noted.split_once('.').map(|(kyma, catalog)| (kyma.to_owned(), catalog.to_owned())).unwrap()
    };
    bed.kyma().await;
    let (first, never) = noted(&bed);
    assert_eq!((first.len(), never.as_str()), (16, "-"), "nobody has looked at the catalog");
    bed.reconcile(WorkSet::of(&[Work::Catalog]), Drift::None).await;
    let (same, catalog) = noted(&bed);
    assert_eq!((same, catalog.len()), (first.clone(), 16));
    bed.reconcile(WorkSet::RUNTIME, Drift::All).await;
    bed.forget_calls();
    bed.reconcile(WorkSet::RUNTIME, Drift::All).await;
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
    assert_eq!(noted(&bed), second, "that reconcile failed");
}

#[tokio::test]
async fn missing_kyma_ends_its_work() {
    let mut bed = Bed::settled().await;
    bed.kcp.remove("kymas/k");
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(bed.runtime.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn cache_behind_our_own_writes_is_bypassed() {
    let mut bed = Bed::with_keda().await;
    // As `Bed::reconcile`, but with an outdated cache: the watch of Manifests hangs.
    let behind = async |bed: &Bed| {
        let wanted = QueuedWork { work: WorkSet::of(&[Work::Kyma]), priority: Priority::User, drift: Drift::None };
        assert!(run_within(&bed.ctx, &bed.key, &wanted, TIME_LIMIT).await.failed.is_empty());
    };
    let disable = |bed: &Bed| bed.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    disable(&bed);
    behind(&bed).await;
    assert!(bed.is_manifest_deleted(), "the cache was empty when keda came, and no work began without its Manifest");
    bed.release_manifest();

    bed.enable();
    bed.kyma().await;
    bed.watch_manifests();
    disable(&bed);
    behind(&bed).await;
    bed.release_manifest();
    bed.enable();
    behind(&bed).await;
    assert!(bed.manifest().is_some(), "the cache still shows the one that was deleted");
}

/// A list by label costs the API server time for the Manifests of all Kymas.
#[tokio::test]
async fn only_manifests_with_writes_that_the_cache_lacks_are_read() {
    let mut bed = Bed::with_keda().await;
    let (_, written) = bed.manifest().unwrap();
    bed.kcp.edit("manifests/other", |other| {
        *other = written.clone();
        other["metadata"]["name"] = "other".into();
        other["metadata"]["labels"][label::MODULE_NAME] = "other".into();
    });
    bed.forget_calls();
    let wanted = QueuedWork { work: WorkSet::of(&[Work::Kyma]), priority: Priority::User, drift: Drift::None };
    assert!(run_within(&bed.ctx, &bed.key, &wanted, TIME_LIMIT).await.failed.is_empty());
    let calls = bed.kcp.calls();
    assert_eq!(calls.iter().filter(|call| *call == "GET manifests").count(), 1, "{calls:?}");
    assert!(calls.iter().all(|call| !call.contains("manifests/")), "neither is written: {calls:?}");
    bed.watch_manifests();
    assert!(run_within(&bed.ctx, &bed.key, &wanted, TIME_LIMIT).await.failed.is_empty());
    let calls = bed.kcp.calls();
    assert!(calls.contains(&"DELETE manifests/other".to_owned()), "the cache has it now: {calls:?}");
}

/// `acceptance.md` C2 38: the deletion of a Kyma in KCP removes that in the runtime for good.
#[tokio::test]
async fn deletion_removes_manifests_first_and_the_finalizer_last() {
    let mut bed = Bed::with_keda().await;
    let (id, _) = bed.manifest().unwrap();
    bed.kcp.edit(&id, |manifest| {
        manifest["metadata"]["finalizers"] = json!(["declarative.kyma-project.io/finalizer"]);
        manifest["status"] =
            json!({"state": "Deleting", "lastOperation": {"operation": "waiting for module crs deletion"}});
    });
    bed.delete();
    let outcome = bed.kyma().await;
    assert!(outcome.requeue_after.is_some() && outcome.failed.is_empty());
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
async fn runtime_counts_as_gone_only_after_its_secret_was_missing_long_enough() {
    let mut bed = Bed::settled().await;
    bed.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
    bed.delete();
    let outcome = bed.kyma().await;
    assert!(outcome.requeue_after.is_some_and(|wait| wait > Duration::from_secs(590)), "{outcome:?}");
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
    assert!(outcome.requeue_after.is_some_and(|wait| wait > Duration::from_secs(590)), "{outcome:?}");
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
async fn unreachable_runtime_blocks_a_deletion_and_is_reported() {
    let mut bed = Bed::settled().await;
    bed.delete();
    bed.runtime.refuse("GET customresourcedefinitions/kymas.operator.kyma-project.io", 503);
    assert_eq!(bed.kyma().await.class, Some(ErrorClass::Transport));
    assert_eq!(
        (&bed.status()["state"], &bed.condition("RuntimeAccess")["reason"]),
        (&json!("Deleting"), &json!("Unreachable"))
    );
    assert!(bed.kcp.object("kymas/k").is_some());
}
