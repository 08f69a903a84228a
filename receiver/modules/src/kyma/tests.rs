//! Reconciles against a fake KCP and a fake runtime cluster: requests and resulting objects.

mod contested;
mod deletion;
mod distance;
mod first_reconcile;
mod halves;
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

use std::{
    future, io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use jiff::Timestamp;
use kube::{
    client::Body,
    runtime::reflector::{self, Lookup, Store, store::Writer},
};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tidewatch_api::{
    ModuleReleaseMeta, ModuleTemplate,
    names::{annotation, label},
    plan::Plan,
};
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
/// Time without an access Secret after which a runtime cluster counts as gone, unless a test sets another one.
const RUNTIME_GONE_AFTER: Duration = Duration::from_secs(600);

/// A KCP with one Kyma and a module `keda`, a runtime, and passes between them.
struct Fixture {
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

impl Fixture {
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
            catalog: Catalog::deciding(
                catalog::Settings::default(),
                catalog::Metrics::default(),
                WriteBudgets::default(),
            ),
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
            pause: Pause::default(),
            takeover: Takeover::default(),
            runtime_gone_after: RUNTIME_GONE_AFTER,
            metrics: Metrics::default(),
            budgets: WriteBudgets::default(),
            caches: Caches::default(),
        };
        let key = KymaKey::new("kcp-system", "k");
        Self { ctx, kcp, runtime, manifests: writer, kymas: kyma_writer, key, unavailable }
    }

    /// A fixture whose first reconcile has ended.
    async fn settled() -> Self {
        let mut fixture = Self::new();
        let works = WorkSet::of(&[Work::Kyma, Work::Catalog]);
        assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
        fixture.forget_calls();
        fixture
    }

    /// One where `keda` is installed.
    async fn with_keda() -> Self {
        let mut fixture = Self::settled().await;
        fixture.enable();
        assert!(fixture.kyma().await.failed.is_empty());
        fixture.forget_calls();
        fixture
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
        self.ctx.catalog = Catalog::deciding(settings, catalog::Metrics::default(), WriteBudgets::default());
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

    /// Lets all requests to the runtime cluster fail without an answer, and returns their number. Results of earlier reconciles
    /// stay valid.
    fn lose_runtime(&mut self, error: fn() -> io::Error) -> Arc<AtomicUsize> {
        let requests = Arc::<AtomicUsize>::default();
        let counter = requests.clone();
        let service = tower::service_fn(move |_: http::Request<Body>| {
            counter.fetch_add(1, Relaxed);
            future::ready(Err::<http::Response<Body>, _>(error()))
        });
        let client = Client::new(service, "kcp-system");
        self.ctx.clients = Box::new(move |_| Ok((client.clone(), 1)));
        requests
    }

    /// As [`Self::lose_runtime`], but for the requests for Kymas.
    fn lose_all_but_kymas(&mut self) {
        let runtime = self.runtime.client();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let runtime = runtime.clone();
            async move {
                if request.uri().path().contains("/kymas") {
                    runtime.send(request).await.map_err(io::Error::other)
                } else {
                    Err(io::Error::from(io::ErrorKind::ConnectionReset))
                }
            }
        });
        let client = Client::new(service, "kcp-system");
        self.ctx.clients = Box::new(move |_| Ok((client.clone(), 1)));
    }
}

fn watch(name: &str, resource: &str, namespace: Option<&str>) -> Value {
    json!({"name": name, "group": "apps", "version": "v1", "resource": resource, "namespace": namespace,
           "field": "spec", "manager": "lifecycle-manager", "work": ["kyma"]})
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
    let mut fixture = Fixture::new();
    let works = WorkSet::of(&[Work::Kyma, Work::Catalog]);
    assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    let kcp = fixture.kcp.object("kymas/k").unwrap();
    assert_eq!(kcp["metadata"]["finalizers"], json!(["operator.kyma-project.io/Kyma"]));
    assert_eq!(kcp["metadata"]["labels"]["operator.kyma-project.io/managed-by"], "lifecycle-manager");
    assert_eq!(
        kcp["metadata"]["annotations"]["operator.kyma-project.io/tidewatch-accepted-spec"],
        r#"{"channel":"regular"}"#
    );
    assert_eq!(fixture.status()["state"], "Ready");
    for kind in ["CRDsSync", "Modules", "ModuleCatalog"] {
        assert_eq!(fixture.condition(kind)["status"], "True", "{kind}");
    }
    let labels = &fixture.runtime.object("namespaces/kyma-system").unwrap()["metadata"]["labels"];
    assert_eq!(
        labels,
        &json!({"istio-injection": "enabled", "namespaces.warden.kyma-project.io/validate": "enabled",
        "operator.kyma-project.io/managed-by": "kyma"})
    );
    assert_eq!(fixture.runtime.all("customresourcedefinitions").len(), 3);
    assert_eq!(fixture.runtime.all("moduletemplates").len() + fixture.runtime.all("modulereleasemetas").len(), 2);
    let kyma = fixture.runtime.object("kymas/default").unwrap();
    assert_eq!(kyma["metadata"]["labels"]["kyma-project.io/runtime-id"], "r-1");
    assert_eq!(kyma["metadata"]["annotations"]["deprecated-operator.kyma-project.io/owned-by"], "kcp-system/k");
    assert_eq!(fixture.shown()["state"], "Ready");
    fixture.forget_calls();
    assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    assert_eq!(fixture.kcp.calls(), ["GET kymas/k"]);
    assert_eq!(fixture.runtime.calls(), ["GET kymas/default"]);
}

/// `acceptance.md` C2 38 and 46.
#[tokio::test]
async fn enabled_module_gets_a_manifest_and_appears_in_both_statuses() {
    let mut fixture = Fixture::settled().await;
    fixture.enable();
    assert!(fixture.kyma().await.failed.is_empty());
    let (id, manifest) = fixture.manifest().unwrap();
    assert_eq!(
        fixture.kcp.object("kymas/k").unwrap()["spec"],
        json!({"channel": "regular"}),
        "the selection is not copied"
    );
    let mut writes = fixture.kcp.writes();
    // The first two are concurrent.
    writes[..2].sort();
    assert_eq!(writes, ["PATCH kymas/k".to_owned(), format!("PATCH {id}"), "PATCH kymas/k/status".to_owned()]);
    assert_eq!(fixture.runtime.calls(), ["GET kymas/default", "PUT kymas/default/status"]);
    assert_eq!(manifest["spec"]["version"], "1.0.0");
    assert_eq!(
        (&fixture.status()["state"], &fixture.status()["modules"][0]["state"]),
        (&json!("Processing"), &json!("Processing"))
    );
    assert_eq!(fixture.shown()["modules"][0]["template"]["metadata"]["namespace"], "kyma-system");
    assert!(fixture.shown()["modules"][0]["manifest"].is_null());
    fixture.kyma().await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]), "our own writes need no work");
    fixture.kcp.edit(&id, |manifest| manifest["status"] = json!({"state": "Ready"}));
    fixture.kyma().await;
    assert_eq!(fixture.kcp.writes(), ["PATCH kymas/k/status"]);
    assert_eq!((&fixture.status()["state"], &fixture.shown()["state"]), (&json!("Ready"), &json!("Ready")));
}

/// `acceptance.md` C2 50: a Manifest follows its template, and edits are reset.
#[tokio::test]
async fn surplus_fields_of_a_manifest_are_removed_once() {
    let mut fixture = Fixture::with_keda().await;
    let with = |spec: Value| {
        let manager =
            json!({"group": "apps", "version": "v1", "kind": "Deployment", "namespace": spec["of"], "name": "m"});
        let whole = json!({"moduleName": "keda", "version": "1.0.0", "descriptor": {}, "manager": manager,
                           "data": {"apiVersion": "a/v1", "kind": "Keda", "spec": spec}});
        filled::<ModuleTemplate>(&[of_kyma_group("ModuleTemplate", "keda-1.0.0", whole)]).0
    };
    // Edits take effect at once.
    fixture.set_rollout_window(Duration::ZERO);
    fixture.set_templates(with(json!({"replicas": 2, "logging": {"level": "debug"}, "of": "kyma-system"})));
    fixture.kyma().await;
    fixture.forget_calls();
    // Its template defines fewer fields for the same version.
    fixture.set_templates(with(json!({"replicas": 2})));
    fixture.kyma().await;
    let (id, manifest) = fixture.manifest().unwrap();
    assert_eq!(manifest["spec"]["resource"]["spec"], json!({"replicas": 2}));
    assert!(manifest["spec"]["manager"]["name"] == "m" && manifest["spec"]["manager"]["namespace"].is_null());
    // An apply removes the fields of an earlier one by itself.
    let writes = fixture.kcp.writes();
    assert!(writes[0] == format!("PATCH {id}") && !writes.contains(&format!("PUT {id}")), "{writes:?}");
    // Another writer adds a field.
    fixture.kcp.edit(&id, |manifest| manifest["spec"]["resource"]["spec"]["evil"] = json!(true));
    fixture.kyma().await;
    assert!(fixture.kcp.writes().contains(&format!("PUT {id}")));
    assert_eq!(fixture.manifest().unwrap().1["spec"], manifest["spec"]);
    fixture.forget_calls();
    // The user pins the version that it has.
    fixture.pin("1.0.0").await;
    let labels = fixture.manifest().unwrap().1["metadata"]["labels"].clone();
    assert!(labels["operator.kyma-project.io/channel"].is_null(), "{labels}");
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
}

#[tokio::test]
async fn disabled_module_is_deleting_until_its_manifest_is_gone() {
    let mut fixture = Fixture::with_keda().await;
    let (id, _) = fixture.manifest().unwrap();
    fixture
        .kcp
        .edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(["declarative.kyma-project.io/finalizer"]));
    fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    fixture.kyma().await;
    assert!(fixture.kcp.writes().contains(&format!("DELETE {id}")));
    assert_eq!(
        (&fixture.status()["modules"][0]["state"], &fixture.status()["state"]),
        (&json!("Deleting"), &json!("Processing"))
    );
    fixture.kyma().await;
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new(), "it is deleted once and waited for");
    fixture.kcp.remove(&id);
    fixture.kyma().await;
    assert_eq!((&fixture.status()["modules"], &fixture.status()["state"]), (&json!([]), &json!("Ready")));
}

#[tokio::test]
async fn unknown_module_is_a_user_error_and_ends_the_work() {
    let mut fixture = Fixture::with_keda().await;
    fixture.runtime.edit("kymas/default", |kyma| {
        kyma["spec"]["modules"] = json!([{"name": "keda", "channel": "rapid"}, {"name": "serverless"}, {"name": "x", "version": "1.0.0"}]);
    });
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    let modules = fixture.status()["modules"].clone();
    let message = |n: usize| modules[n]["message"].as_str().unwrap().to_owned();
    assert_eq!(message(0), "no versions found for channel: rapid in module keda");
    assert_eq!(message(1), "no ModuleReleaseMeta found for module \"serverless\" in namespace \"kcp-system\"");
    assert_eq!(message(2), "no ModuleReleaseMeta found for module \"x\" in namespace \"kcp-system\"");
    let states: Vec<_> = modules.as_array().unwrap().iter().map(|module| module["state"].as_str().unwrap()).collect();
    assert_eq!((states, fixture.status()["state"].as_str()), (vec!["Error", "Warning", "Warning"], Some("Error")));
    assert!(fixture.manifest().is_some(), "a lookup error deletes nothing");
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
}

/// A status with hundreds of entries costs the control plane as much as many small writes.
#[tokio::test]
async fn status_shows_the_first_of_many_unknown_modules() {
    let mut fixture = Fixture::with_keda().await;
    let unknown = |from: usize| (from..430).map(|n| json!({"name": format!("a{n:03}")}));
    let keda = json!({"name": "keda"});
    let select = |fixture: &mut Fixture, from| {
        fixture.runtime.edit("kymas/default", |kyma| {
            kyma["spec"]["modules"] = unknown(from).chain([keda.clone()]).collect();
        });
    };
    select(&mut fixture, 0);
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    let text = "430 of the selected modules cannot be installed; the status shows the first 50 of them";
    for status in [fixture.status(), fixture.shown()] {
        let modules = status["modules"].as_array().unwrap().clone();
        assert_eq!((modules.len(), &modules[0]["name"], &modules[50]["name"]), (51, &json!("a000"), &json!("keda")));
        assert_eq!((&status["state"], &status["lastOperation"]["operation"]), (&json!("Error"), &json!(text)));
    }
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
    select(&mut fixture, 380);
    fixture.kyma().await;
    assert_eq!(fixture.status()["modules"].as_array().unwrap().len(), 51);
    assert_eq!(fixture.status()["lastOperation"]["operation"], "waiting for all modules to become ready");
}

/// `acceptance.md` C2 38 and 39. Unlike with lifecycle-manager, a Kyma that is deleted comes back with the user's selection; the
/// label restores the defaults.
#[tokio::test]
async fn deleted_kyma_is_recreated_with_the_users_spec_and_a_reset_restores_the_defaults() {
    let mut fixture = Fixture::with_keda().await;
    fixture.runtime.remove("kymas/default");
    fixture.kyma().await;
    let modules = |fixture: &Fixture| fixture.runtime.object("kymas/default").unwrap()["spec"]["modules"].clone();
    assert_eq!(modules(&fixture)[0]["name"], "keda");
    assert!(fixture.manifest().is_some());
    fixture
        .kcp
        .edit("kymas/k", |kyma| kyma["metadata"]["labels"]["operator.kyma-project.io/reset-modules"] = "true".into());
    fixture.kyma().await;
    assert_eq!((modules(&fixture), fixture.is_manifest_deleted()), (Value::Null, true));
    let metadata = fixture.kcp.object("kymas/k").unwrap()["metadata"].clone();
    assert!(metadata["labels"]["operator.kyma-project.io/reset-modules"].is_null());
    assert_eq!(metadata["annotations"]["operator.kyma-project.io/tidewatch-accepted-spec"], r#"{"channel":"regular"}"#);
}

/// `acceptance.md` C2 40.
#[tokio::test]
async fn only_reported_objects_are_read_again_and_surplus_fields_are_removed() {
    let mut fixture = Fixture::settled().await;
    let id = "customresourcedefinitions/kymas.operator.kyma-project.io";
    let works = WorkSet::of(&[Work::Kyma]);
    let subject = "apiextensions.k8s.io/v1/customresourcedefinitions//kymas.operator.kyma-project.io";
    fixture.reconcile(works, drift(subject)).await;
    let mut calls = fixture.runtime.calls();
    calls.sort_unstable();
    assert_eq!(calls, [format!("GET {id}"), "GET kymas/default".to_owned()], "an echo writes nothing");
    fixture.runtime.edit(id, |crd| crd["spec"]["names"]["categories"] = json!(["all"]));
    fixture.reconcile(works, drift(subject)).await;
    assert_eq!(fixture.runtime.writes(), [format!("PATCH {id}"), format!("PUT {id}")]);
    assert!(fixture.runtime.object(id).unwrap()["spec"]["names"]["categories"].is_null());
}

/// `acceptance.md` C2 40.
#[tokio::test]
async fn deleted_crd_is_reported_and_recreated_once_it_is_gone() {
    let mut fixture = Fixture::settled().await;
    let id = "customresourcedefinitions/moduletemplates.operator.kyma-project.io";
    let works = WorkSet::of(&[Work::Kyma]);
    let subject = "apiextensions.k8s.io/v1/customresourcedefinitions//moduletemplates.operator.kyma-project.io";
    fixture.runtime.edit(id, |crd| {
        crd["metadata"]["finalizers"] = json!(["customresourcecleanup.apiextensions.k8s.io"]);
        crd["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    });
    assert_eq!(fixture.reconcile(works, drift(subject)).await, ReconcileOutcome::failed(works, ErrorClass::Transport));
    let said = fixture.condition("CRDsSync");
    let line = "the CRD moduletemplates.operator.kyma-project.io is being deleted in the runtime";
    let words = format!("CRDs are not synchronized to the SKR: {line}");
    assert_eq!((&said["status"], &said["message"]), (&json!("False"), &json!(words)));
    assert_eq!(fixture.status()["lastOperation"]["operation"], line);
    fixture.runtime.remove(id);
    assert_eq!(fixture.reconcile(works, drift(subject)).await, ReconcileOutcome::ended(works));
    assert!(fixture.runtime.object(id).is_some());
    assert_eq!(fixture.condition("CRDsSync")["status"], "True");

    // The namespace is no definition.
    fixture.runtime.edit("namespaces/kyma-system", |namespace| {
        namespace["metadata"]["finalizers"] = json!(["kubernetes"]);
        namespace["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    });
    assert_eq!(fixture.reconcile(works, drift("/v1/namespaces//kyma-system")).await.class, Some(ErrorClass::Transport));
    assert_eq!(fixture.condition("CRDsSync")["status"], "True");
    assert_eq!(fixture.status()["lastOperation"]["operation"], "kyma-system is being deleted in the runtime");
}

#[tokio::test]
async fn objects_are_rewritten_before_lifecycle_managers_versions_are_dropped() {
    let mut fixture = Fixture::settled().await;
    let id = "customresourcedefinitions/kymas.operator.kyma-project.io";
    fixture.runtime.edit(id, |crd| {
        let ours = crd["spec"]["versions"][0].take();
        let version = |name: &str, storage: bool| {
            let mut version = ours.clone();
            (version["name"], version["storage"]) = (name.into(), storage.into());
            version
        };
        crd["spec"]["versions"] = json!([version("v1beta1", true), version("v1beta2", false)]);
        crd["status"]["storedVersions"] = json!(["v1beta1", "v1beta2"]);
    });
    fixture.forget_calls();
    let works = WorkSet::of(&[Work::Kyma]);
    let seen = drift("apiextensions.k8s.io/v1/customresourcedefinitions//kymas.operator.kyma-project.io");
    assert_eq!(fixture.reconcile(works, seen).await, ReconcileOutcome::ended(works));
    let calls = fixture.runtime.calls();
    let position = |call: &str| calls.iter().position(|it| *it == call).unwrap_or_else(|| panic!("{call}: {calls:?}"));
    let order =
        ["GET ID", "PATCH ID", "PATCH kymas/default", "PATCH ID/status"].map(|call| position(&call.replace("ID", id)));
    assert!(order.is_sorted(), "{calls:?}");
    let crd = fixture.runtime.object(id).unwrap();
    assert_eq!(crd["status"]["storedVersions"], json!(["v1beta2"]));
    assert_eq!(crd["spec"]["versions"].as_array().map(Vec::len), Some(1), "ours is applied");
}

#[tokio::test]
async fn missing_access_is_explained_by_the_condition() {
    let mut fixture = Fixture::with_keda().await;
    let usable = std::mem::replace(&mut fixture.ctx.clients, Box::new(|_| Err(RuntimeAccessError::Missing.into())));
    let outcome = fixture.kyma().await;
    assert_eq!(outcome, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Auth));
    let sentence = "no access Secret is labelled with this Kyma's name";
    let access = fixture.condition("RuntimeAccess");
    assert_eq!(
        (&access["status"], &access["reason"], &access["message"]),
        (&json!("False"), &json!(SECRET_MISSING), &json!(sentence))
    );
    assert_eq!(
        (&fixture.status()["state"], &fixture.status()["lastOperation"]["operation"]),
        (&json!("Error"), &json!(sentence))
    );
    assert_eq!(fixture.status()["modules"][0]["message"], sentence);
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new(), "said once");
    fixture.ctx.clients = usable;
    fixture.kyma().await;
    assert_eq!(fixture.condition("RuntimeAccess")["status"], "True");
    assert_eq!(fixture.status()["modules"][0]["state"], "Processing");
}

/// A forced rotation of infrastructure-manager removes the kubeconfig from the Secret for a while.
#[tokio::test]
async fn last_kubeconfig_is_named_by_the_condition_and_the_end_of_its_use_is_awaited() {
    let mut fixture = Fixture::with_keda().await;
    fixture.ctx.access_remark = Box::new(|_| Some(AccessRemark::LastKubeconfig(Duration::from_secs(90))));
    let outcome = fixture.kyma().await;
    assert_eq!((outcome.class, outcome.requeue_after), (None, Some(Duration::from_secs(90))));
    let access = fixture.condition("RuntimeAccess");
    assert_eq!((&access["status"], &access["reason"]), (&json!("True"), &json!("LastKubeconfig")));
    assert_eq!(
        access["message"],
        "the runtime can be reached with the last kubeconfig of the access Secret, which has none now; it is used for up to 10 minutes"
    );
    assert_eq!(fixture.status()["modules"][0]["state"], "Processing", "no module is in Error");
    fixture.ctx.access_remark = Box::new(|_| None);
    fixture.kyma().await;
    let access = fixture.condition("RuntimeAccess");
    assert_eq!((&access["status"], &access["reason"]), (&json!("True"), &json!("Ready")));
}

#[tokio::test]
async fn errors_are_never_read_as_absence() {
    let mut fixture = Fixture::with_keda().await;
    fixture.runtime.refuse("GET kymas/default", 404);
    let outcome = fixture.kyma().await;
    assert_eq!(
        (outcome.class, outcome.unreached, fixture.runtime.writes()),
        (Some(ErrorClass::Transport), false, vec![]),
        "a 404 that names nothing"
    );
    assert!(fixture.manifest().is_some());
    fixture.runtime.refuse("GET kymas/default", 503);
    let outcome = fixture.kyma().await;
    assert_eq!((outcome.class, outcome.unreached), (Some(ErrorClass::Transport), true));
    assert_eq!(fixture.condition("RuntimeAccess")["reason"], "Unreachable");
    fixture.runtime.refuse("GET kymas/default", 401);
    let outcome = fixture.kyma().await;
    assert_eq!((outcome.class, outcome.unreached), (Some(ErrorClass::Auth), false));
    assert_eq!(fixture.condition("RuntimeAccess")["reason"], "Unauthorized");
}

#[tokio::test]
async fn untrusted_server_is_named_with_a_fixed_text() {
    let mut fixture = Fixture::with_keda().await;
    fixture.lose_runtime(|| io::Error::other(rustls::Error::InvalidCertificate(rustls::CertificateError::Expired)));
    let outcome = fixture.kyma().await;
    let failed = ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Transport);
    assert_eq!(outcome, ReconcileOutcome { unreached: true, ..failed });
    let access = fixture.condition("RuntimeAccess");
    let text = "the certificate of the runtime's API server is not trusted: it has expired";
    assert_eq!((&access["reason"], &access["message"]), (&json!("UntrustedServer"), &json!(text)));
    assert_eq!(fixture.status()["lastOperation"]["operation"], text);
}

#[tokio::test]
async fn conflict_restarts_the_reconcile_without_a_status() {
    let mut fixture = Fixture::settled().await;
    fixture.enable();
    fixture.kcp.refuse("PATCH kymas/k/status", 409);
    let before = fixture.status();
    assert_eq!(fixture.kyma().await, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Conflict));
    assert_eq!((fixture.status(), fixture.runtime.writes()), (before, vec![]));
}

#[tokio::test]
async fn concurrent_writes_are_not_overwritten() {
    // Another receiver that still thinks it is the active one, for example: the fence's other half.
    let other: fn(&mut Value) = |kyma| kyma["metadata"]["labels"]["other"] = json!("was here");
    let mut fixture = Fixture::settled().await;
    fixture.enable();
    let before = fixture.status();
    fixture.kcp.meanwhile("PATCH kymas/k/status", "kymas/k", other);
    assert_eq!(fixture.kyma().await, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Conflict));
    assert_eq!(fixture.status(), before);
    assert_eq!(fixture.kyma().await.class, None, "the next reconcile has read the concurrent write");
    assert_ne!(fixture.status(), before);

    let mut fixture = Fixture::new();
    fixture.enable_default();
    fixture.kcp.meanwhile("PATCH kymas/k", "kymas/k", other);
    assert_eq!(fixture.kyma().await, ReconcileOutcome::failed(WorkSet::of(&[Work::Kyma]), ErrorClass::Conflict));
    let finalizers = |fixture: &Fixture| fixture.kcp.object("kymas/k").unwrap()["metadata"]["finalizers"].clone();
    assert_eq!(finalizers(&fixture), Value::Null);
    fixture.kyma().await;
    assert_ne!(finalizers(&fixture), Value::Null);
}

/// The task of the inputs and that of the event path write while a reconcile is in progress; a user's next change must not
/// wait for the backoff of a conflict with them.
#[tokio::test]
async fn concurrent_writes_of_our_own_conflict_with_no_reconcile() {
    for write in ["PATCH kymas/k/status", "PATCH kymas/k"] {
        let mut fixture = Fixture::settled().await;
        fixture.enable();
        fixture.kcp.meanwhile(write, "kymas/k", |kyma| {
            kyma["metadata"]["annotations"][annotation::INPUTS] = json!("a.b");
            let conditions = kyma["status"]["conditions"].as_array_mut().unwrap();
            conditions.push(json!({"type": "EventPath", "status": "True", "reason": "Alive", "message": "alive",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}));
        });
        assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])), "{write}");
        assert_eq!(fixture.condition("EventPath")["reason"], "Alive", "{write}");
        assert_eq!(fixture.status()["modules"][0]["name"], "keda", "{write}");
        fixture.forget_calls();
        fixture.kyma().await;
        assert_eq!(fixture.kcp.writes(), Vec::<String>::new(), "{write}");
    }
    let mut fixture = Fixture::settled().await;
    fixture.enable();
    fixture.kcp.meanwhile("PATCH kymas/k/status", "kymas/k", |kyma| kyma["status"]["activeChannel"] = json!("theirs"));
    assert_eq!(fixture.kyma().await.class, Some(ErrorClass::Conflict), "another process wrote our part of the status");
    assert_eq!(fixture.status()["activeChannel"], "theirs");
}

#[tokio::test(start_paused = true)]
async fn reconcile_beyond_its_time_limit_is_aborted_and_the_next_one_reads_everything() {
    let mut fixture = Fixture::settled().await;
    let works = WorkSet::of(&[Work::Kyma, Work::Catalog]);
    fixture.runtime.set_fault(Fault::Unresponsive);
    let begun = Instant::now();
    assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome::failed(works, ErrorClass::Transport));
    assert_eq!(begun.elapsed(), TIME_LIMIT);
    fixture.runtime.set_fault(Fault::None);
    fixture.forget_calls();
    assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    let calls = fixture.runtime.calls();
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
    let mut fixture = Fixture::new();
    fixture.runtime.refuse("PATCH moduletemplates/keda-1.0.0", 422);
    fixture.enable_default();
    let outcome = fixture.reconcile(WorkSet::of(&[Work::Kyma, Work::Catalog]), Drift::None).await;
    let kyma = WorkSet::of(&[Work::Kyma]);
    let catalog = WorkSet::of(&[Work::Catalog]);
    assert_eq!((outcome.ended, outcome.failed, outcome.deferred), (kyma, WorkSet::EMPTY, catalog));
    assert_eq!(fixture.condition("ModuleCatalog")["status"], "False");
    let message = fixture.condition("ModuleCatalog")["message"].as_str().unwrap().to_owned();
    assert!(message.contains(": apply moduletemplates/keda-1.0.0; 1 wait for them: "), "{message}");
    assert!(fixture.manifest().is_some(), "modules do not wait for the catalog");
}

#[tokio::test]
async fn catalog_that_does_not_reach_the_server_asks_nothing_more() {
    let read = "GET configmaps/tidewatch-catalog";
    let catalog = WorkSet::of(&[Work::Catalog]);
    let mut fixture = Fixture::settled().await;
    fixture.runtime.refuse(read, 503);
    let outcome = fixture.reconcile(catalog, Drift::All).await;
    assert_eq!((outcome.failed, outcome.unreached), (catalog, true));
    assert_eq!(fixture.runtime.calls(), [read], "the status is not shown there");
    assert_eq!(fixture.condition("ModuleCatalog")["status"], "False");

    // Beside a Kyma that was read, it proves nothing.
    let outcome = fixture.reconcile(WorkSet::RUNTIME, Drift::All).await;
    assert_eq!((outcome.ended, outcome.failed), (WorkSet::of(&[Work::Kyma]), catalog));
    assert!(!outcome.unreached);
}

impl Fixture {
    fn enable_default(&self) {
        self.kcp.edit("kymas/k", |kyma| kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true}]));
    }
}

#[tokio::test]
async fn catalog_only_reconcile_reads_only_the_kyma() {
    let mut fixture = Fixture::settled().await;
    let works = WorkSet::of(&[Work::Catalog]);
    assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    assert_eq!((fixture.kcp.calls(), fixture.runtime.calls()), (vec!["GET kymas/k".to_owned()], vec![]));
}

/// Review finding D4: a Kyma in error was reported Ready by a reconcile that had not looked at the modules.
#[tokio::test]
async fn catalog_or_installation_reconcile_keeps_the_error_of_the_kyma() {
    for works in [WorkSet::of(&[Work::Catalog]), WorkSet::INSTALLER, WorkSet::INSTALLER | WorkSet::of(&[Work::Catalog])]
    {
        let mut fixture = Fixture::settled().await;
        fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["channel"] = "none".into());
        fixture.kyma().await;
        let failed = fixture.status();
        assert_eq!(failed["state"], "Error");
        fixture.runtime.remove("moduletemplates/keda-1.0.0");
        fixture.runtime.refuse("PATCH moduletemplates/keda-1.0.0", 422);
        fixture.reconcile(works, Drift::All).await;
        let status = fixture.status();
        assert_eq!(
            (&status["state"], &status["lastOperation"]),
            (&failed["state"], &failed["lastOperation"]),
            "{works:?}"
        );
        let is_synced = !works.contains(Work::Catalog);
        assert_eq!(fixture.condition("ModuleCatalog")["status"] == "True", is_synced, "{works:?}");
        assert_eq!(fixture.condition("Modules")["status"], "False");
        fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["channel"] = "regular".into());
        fixture.kyma().await;
        assert_eq!(fixture.status()["state"], if is_synced { "Ready" } else { "Processing" });
    }
}

/// `acceptance.md` C2 48: the label skip-reconciliation stops changes, and not a deletion.
#[tokio::test]
async fn skipped_and_paused_kymas_are_not_reconciled() {
    for (label, value) in [("skip-reconciliation", "TRUE"), ("tidewatch-pause", "true")] {
        let mut fixture = Fixture::settled().await;
        fixture.enable();
        fixture.kcp.edit("kymas/k", |kyma| {
            kyma["metadata"]["labels"][format!("operator.kyma-project.io/{label}")] = value.into()
        });
        assert_eq!(fixture.kyma().await, ReconcileOutcome::default(), "neither ended nor failed");
        assert_eq!((fixture.kcp.writes(), fixture.runtime.calls()), (vec![], vec![]));
        fixture.delete();
        fixture.kyma().await;
        assert_eq!(fixture.kcp.writes().is_empty(), label == "tidewatch-pause", "a deletion goes on under skip alone");
    }
}

#[tokio::test]
async fn changed_inputs_are_recorded_once_reconciled() {
    let mut fixture = Fixture::new();
    let noted = |fixture: &Fixture| {
        let kyma = fixture.kcp.object("kymas/k").unwrap();
        let noted = kyma["metadata"]["annotations"]["operator.kyma-project.io/tidewatch-inputs"].as_str().unwrap();
        noted.split_once('.').map(|(kyma, catalog)| (kyma.to_owned(), catalog.to_owned())).unwrap()
    };
    fixture.kyma().await;
    let (first, never) = noted(&fixture);
    assert_eq!((first.len(), never.as_str()), (16, "-"), "nobody has looked at the catalog");
    fixture.reconcile(WorkSet::of(&[Work::Catalog]), Drift::None).await;
    let (same, catalog) = noted(&fixture);
    assert_eq!((same, catalog.len()), (first.clone(), 16));
    fixture.reconcile(WorkSet::RUNTIME, Drift::All).await;
    fixture.forget_calls();
    fixture.reconcile(WorkSet::RUNTIME, Drift::All).await;
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new());

    fixture.kcp.edit("kymas/k", |kyma| kyma["metadata"]["labels"]["team"] = "a".into());
    fixture.kyma().await;
    assert!(fixture.kcp.writes().contains(&"PATCH kymas/k".to_owned()));
    let second = noted(&fixture);
    assert_ne!(second.0, first);
    assert_eq!(second.1, catalog);
    fixture.kcp.edit("kymas/k", |kyma| kyma["metadata"]["labels"]["team"] = "b".into());
    fixture.runtime.refuse("GET kymas/default", 500);
    fixture.kyma().await;
    assert_eq!(noted(&fixture), second, "that reconcile failed");
}

#[tokio::test]
async fn missing_kyma_ends_its_work() {
    let mut fixture = Fixture::settled().await;
    fixture.kcp.remove("kymas/k");
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(fixture.runtime.calls(), Vec::<String>::new());
}

#[tokio::test]
async fn cache_behind_our_own_writes_is_bypassed() {
    let mut fixture = Fixture::with_keda().await;
    // As `Fixture::reconcile`, but with an outdated cache: the watch of Manifests hangs.
    let behind = async |fixture: &Fixture| {
        let wanted = QueuedWork { work: WorkSet::of(&[Work::Kyma]), priority: Priority::User, drift: Drift::None };
        assert!(run_within(&fixture.ctx, &fixture.key, &wanted, TIME_LIMIT).await.failed.is_empty());
    };
    let disable = |fixture: &Fixture| fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    disable(&fixture);
    behind(&fixture).await;
    assert!(
        fixture.is_manifest_deleted(),
        "the cache was empty when keda came, and no work began without its Manifest"
    );
    fixture.release_manifest();

    fixture.enable();
    fixture.kyma().await;
    fixture.watch_manifests();
    disable(&fixture);
    behind(&fixture).await;
    fixture.release_manifest();
    fixture.enable();
    behind(&fixture).await;
    assert!(fixture.manifest().is_some(), "the cache still shows the one that was deleted");
}

/// A list by label costs the API server time for the Manifests of all Kymas.
#[tokio::test]
async fn only_manifests_with_writes_that_the_cache_lacks_are_read() {
    let mut fixture = Fixture::with_keda().await;
    let (_, written) = fixture.manifest().unwrap();
    fixture.kcp.edit("manifests/other", |other| {
        *other = written.clone();
        other["metadata"]["name"] = "other".into();
        other["metadata"]["labels"][label::MODULE_NAME] = "other".into();
    });
    fixture.forget_calls();
    let wanted = QueuedWork { work: WorkSet::of(&[Work::Kyma]), priority: Priority::User, drift: Drift::None };
    assert!(run_within(&fixture.ctx, &fixture.key, &wanted, TIME_LIMIT).await.failed.is_empty());
    let calls = fixture.kcp.calls();
    assert_eq!(calls.iter().filter(|call| *call == "GET manifests").count(), 1, "{calls:?}");
    assert!(calls.iter().all(|call| !call.contains("manifests/")), "neither is written: {calls:?}");
    fixture.watch_manifests();
    assert!(run_within(&fixture.ctx, &fixture.key, &wanted, TIME_LIMIT).await.failed.is_empty());
    let calls = fixture.kcp.calls();
    assert!(calls.contains(&"DELETE manifests/other".to_owned()), "the cache has it now: {calls:?}");
}

/// `acceptance.md` C2 38: the deletion of a Kyma in KCP removes that in the runtime for good.
#[tokio::test]
async fn deletion_removes_manifests_first_and_the_finalizer_last() {
    let mut fixture = Fixture::with_keda().await;
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.edit(&id, |manifest| {
        manifest["metadata"]["finalizers"] = json!(["declarative.kyma-project.io/finalizer"]);
        manifest["status"] =
            json!({"state": "Deleting", "lastOperation": {"operation": "waiting for module crs deletion"}});
    });
    fixture.delete();
    let outcome = fixture.kyma().await;
    assert!(outcome.requeue_after.is_some() && outcome.failed.is_empty());
    assert_eq!(fixture.kcp.writes(), [format!("DELETE {id}"), "PATCH kymas/k/status".to_owned()]);
    for status in [fixture.status(), fixture.shown()] {
        assert_eq!(
            (&status["state"], &status["modules"][0]["message"]),
            (&json!("Deleting"), &json!("waiting for module crs deletion"))
        );
        assert_eq!(status["lastOperation"]["operation"], "waiting for modules to be deleted");
    }
    assert_eq!(fixture.runtime.writes(), ["PUT kymas/default/status"], "nothing goes while a module blocks");
    fixture.kcp.remove(&id);
    let mut writes = Vec::new();
    while fixture.kcp.object("kymas/k").is_some() {
        assert!(fixture.kyma().await.failed.is_empty());
        writes.extend(fixture.runtime.writes().into_iter().filter(|write| write.starts_with("DELETE")));
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
    let mut fixture = Fixture::settled().await;
    fixture.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
    fixture.delete();
    let outcome = fixture.kyma().await;
    assert!(outcome.requeue_after.is_some_and(|wait| wait > Duration::from_secs(590)), "{outcome:?}");
    assert_eq!(fixture.condition("RuntimeAccess")["reason"], SECRET_MISSING);
    let away = std::mem::replace(&mut fixture.ctx.clients, {
        let client = fixture.runtime.client();
        Box::new(move |_| Ok((client.clone(), 2)))
    });
    fixture.runtime.refuse("GET customresourcedefinitions/kymas.operator.kyma-project.io", 503);
    fixture.kyma().await;
    assert_eq!(fixture.condition("RuntimeAccess")["reason"], "Unreachable", "a Secret that came back ends the wait");
    fixture.ctx.clients = away;
    let outcome = fixture.kyma().await;
    assert!(outcome.requeue_after.is_some_and(|wait| wait > Duration::from_secs(590)), "{outcome:?}");
    let long_ago = |fixture: &Fixture| {
        fixture.kcp.edit("kymas/k", |kyma| {
            for condition in kyma["status"]["conditions"].as_array_mut().unwrap() {
                condition["lastTransitionTime"] = "2026-01-01T00:00:00Z".into();
            }
        })
    };
    long_ago(&fixture);
    fixture.kcp.edit("secrets/access", |secret| {
        *secret = json!({"metadata": {"name": "access", "labels": {"operator.kyma-project.io/kyma-name": "k"}}})
    });
    fixture.kyma().await;
    assert!(fixture.kcp.object("kymas/k").is_some(), "the Secret is there, whatever the cache says");
    fixture.kcp.remove("secrets/access");
    fixture.kyma().await;
    assert!(fixture.kcp.object("kymas/k").is_none());
}

#[tokio::test]
async fn unreachable_runtime_blocks_a_deletion_and_is_reported() {
    let mut fixture = Fixture::settled().await;
    fixture.delete();
    fixture.runtime.refuse("GET customresourcedefinitions/kymas.operator.kyma-project.io", 503);
    assert_eq!(fixture.kyma().await.class, Some(ErrorClass::Transport));
    assert_eq!(
        (&fixture.status()["state"], &fixture.condition("RuntimeAccess")["reason"]),
        (&json!("Deleting"), &json!("Unreachable"))
    );
    assert!(fixture.kcp.object("kymas/k").is_some());
}
