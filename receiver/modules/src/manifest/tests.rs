//! Reconciles of a Manifest with fake API servers of the control plane and of a runtime cluster.

mod adoption;
mod aggregated;
mod distance;
mod jobs;
mod keeping;
mod pull_secret;
mod reduced;
mod removal;
mod reported;
mod second_ways;
mod secrets;
mod sharing;
mod store;
mod stored_versions;
mod successor;

use std::{sync::Arc, time::Duration};

use futures::{FutureExt as _, future::ready};
use kube::{
    ResourceExt as _,
    runtime::{reflector, watcher},
};
use serde_json::{Value, json};
use tidewatch_api::{State, names::annotation};
use tidewatch_cluster::{WriteBudgets, kinds::KindCache, runtime_access::RuntimeAccessError, testing::FakeApiServer};
use tidewatch_engine::{Store, inventory_of};
use tidewatch_fleet::{
    queue::{Priority, WorkSet},
    stores::manifests::CachedManifest,
};
use tidewatch_kit::metrics::Registry;

use super::*;

const NAMESPACE: &str = "kcp-system";
const DIGEST: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";
const NEXT: &str = "sha256:2222222222222222222222222222222222222222222222222222222222222222";

/// Both clusters, and the reconcile of the Manifest `m` of the Kyma `k`.
struct Fixture {
    kcp: FakeApiServer,
    runtime: FakeApiServer,
    layer: Arc<parking_lot::Mutex<ModuleObjects>>,
    ctx: Context,
    kymas: reflector::store::Writer<CachedKyma>,
    manifests: reflector::store::Writer<CachedManifest>,
    /// Names of the Manifests that a reconcile of another one enqueued.
    woken: Arc<parking_lot::Mutex<Vec<String>>>,
}

/// Other Manifests of the cluster; `None` for those of the cache.
type Others<'a> = Box<dyn Fn() -> Option<Vec<Arc<Manifest>>> + Send + Sync + 'a>;

/// A store whose other Manifests change during a reconcile.
struct StoreWithOthers<'a> {
    store: KcpStore<'a>,
    others: Others<'a>,
}

impl Store for StoreWithOthers<'_> {
    fn patch_metadata<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: &'a Value,
    ) -> BoxFuture<'a, Result<Option<Manifest>, StoreError>> {
        self.store.patch_metadata(manifest, members)
    }

    fn patch_status<'a>(
        &'a self,
        manifest: &'a Manifest,
        members: &'a Value,
    ) -> BoxFuture<'a, Result<Manifest, StoreError>> {
        self.store.patch_status(manifest, members)
    }

    fn delete<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Option<Manifest>, StoreError>> {
        self.store.delete(manifest)
    }

    fn others<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, Result<Vec<Arc<Manifest>>, StoreError>> {
        match (self.others)() {
            Some(others) => ready(Ok(others)).boxed(),
            None => self.store.others(manifest),
        }
    }

    fn wake(&self, other: &ManifestKey) {
        self.store.wake(other);
    }
}

fn object(api_version: &str, kind: &str, name: &str) -> Value {
    json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": "kyma-system"}})
}

fn definition() -> Value {
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "samples.example.test"}, "spec": {"group": "example.test", "scope": "Namespaced",
            "names": {"kind": "Sample", "plural": "samples"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {}}]}})
}

fn manager() -> Value {
    let mut manager = object("apps/v1", "Deployment", "d");
    manager["spec"] = json!({"replicas": 1, "selector": {"matchLabels": {"app": "d"}},
        "template": {"metadata": {"labels": {"app": "d"}}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}});
    manager
}

fn objects() -> Vec<Value> {
    vec![manager(), object("v1", "ConfigMap", "a"), definition()]
}

impl Fixture {
    fn new() -> Self {
        let kcp = FakeApiServer::default();
        let runtime = FakeApiServer::runtime();
        let (kyma_store, kymas) = reflector::store();
        let (manifest_store, manifests) = reflector::store();
        let stores = Stores {
            kymas: kyma_store,
            templates: reflector::store().0,
            release_metas: reflector::store().0,
            manifests: manifest_store.into(),
            watchers: reflector::store().0,
        };
        let layer = Arc::new(parking_lot::Mutex::new(ModuleObjects::Ready(Arc::new(objects()))));
        let client = runtime.client();
        let found = layer.clone();
        let woken = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let wakes = woken.clone();
        let ctx = Context {
            kcp: kcp.client(),
            stores,
            clients: Box::new(move |_| Ok((client.clone(), 1))),
            layers: Box::new(move |_, _| {
                let found = found.lock().clone();
                async move { found }.boxed()
            }),
            wake: Box::new(move |key| wakes.lock().push(key.name.clone())),
            secrets: None,
            settings: Settings::default(),
            kinds: KindCache::default(),
            budgets: WriteBudgets::default(),
            memories: Memories::default(),
            metrics: Metrics::register(&mut Registry::default()),
        };
        let mut fixture = Self { kcp, runtime, layer, ctx, kymas, manifests, woken };
        let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "namespace": NAMESPACE}, "spec": {"channel": "regular"}});
        fixture.kymas.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(kyma).unwrap()));
        fixture.create_manifest();
        fixture
    }

    /// Creates the Manifest like the reconcile of its Kyma.
    fn create_manifest(&mut self) {
        self.edit(|manifest| {
            *manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
                "metadata": {"name": "m", "namespace": NAMESPACE, "labels": {label::KYMA_NAME: "k"}},
                "spec": {"remote": true, "version": "1.0.0",
                    "install": {"name": "raw-manifest", "source": {"repo": "r/component-descriptors", "name": "n", "ref": DIGEST, "type": "oci-ref"}},
                    "resource": {"apiVersion": "example.test/v1", "kind": "Sample", "metadata": {"name": "default", "namespace": "kyma-system"}}}});
        });
    }

    /// Changes the Manifest like the reconcile of its Kyma, or a user.
    fn edit(&mut self, change: impl FnOnce(&mut Value)) {
        self.kcp.edit("manifests/m", change);
        self.kcp.calls();
    }

    fn set_layer(&self, objects: ModuleObjects) {
        *self.layer.lock() = objects;
    }

    async fn reconcile(&mut self) -> ReconcileOutcome {
        self.run(Drift::None).await
    }

    async fn verify(&mut self) -> ReconcileOutcome {
        self.run(Drift::All).await
    }

    /// Reconciles a Manifest beside others of its module that are gone once the reconcile has begun.
    async fn reconcile_beside(&self, heirs: Vec<Arc<Manifest>>, manifest: Manifest) -> Outcome {
        let heirs = parking_lot::Mutex::new(Some(heirs));
        self.reconcile_among(Box::new(move || heirs.lock().take()), manifest).await
    }

    async fn reconcile_among(&self, others: Others<'_>, manifest: Manifest) -> Outcome {
        let key = key();
        let store = StoreWithOthers { store: KcpStore { ctx: &self.ctx }, others };
        let cluster = Cluster { key: KymaKey::new(NAMESPACE, "k"), client: self.runtime.client(), revision: 1 };
        let content = KcpContent { ctx: &self.ctx, key: &key };
        self.ctx.engine().reconcile(Request::new(manifest, &cluster, &store, &content)).await.unwrap()
    }

    /// Reconciles with a current cache.
    async fn run(&mut self, drift: Drift) -> ReconcileOutcome {
        if let Some(manifest) = self.manifest() {
            self.manifests.apply_watcher_event(&watcher::Event::Apply(manifest.into()));
        } else if let Some(gone) = self.ctx.stores.manifests.find(&key()) {
            self.manifests.apply_watcher_event(&watcher::Event::Delete(gone));
        }
        let queued = QueuedWork { work: WorkSet::MANIFEST, priority: Priority::User, drift };
        run_within(&self.ctx, &key(), &queued, Duration::from_secs(60)).await
    }

    fn manifest(&self) -> Option<Manifest> {
        self.kcp.object("manifests/m").map(|manifest| serde_json::from_value(manifest).unwrap())
    }

    fn state(&self) -> (State, String) {
        let status = self.manifest().unwrap().status.unwrap();
        (status.state, status.last_operation.unwrap().operation)
    }

    fn synced(&self) -> Vec<String> {
        inventory_of(&self.manifest().unwrap()).keys().map(ToString::to_string).collect()
    }

    fn make_available(&self) {
        self.runtime.edit("deployments/d", |deployment| {
            deployment["status"] = json!({"observedGeneration": 9, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1,
                "availableReplicas": 1, "conditions": [{"type": "Available", "status": "True"},
                    {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]});
        });
    }

    /// A Manifest whose module is ready.
    async fn installed() -> Self {
        let mut fixture = Self::new();
        fixture.reconcile().await;
        fixture.make_available();
        assert_eq!(fixture.reconcile().await, ended());
        assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
        fixture.runtime.calls();
        fixture.kcp.calls();
        fixture
    }

    fn delete_manifest(&mut self) {
        self.edit(|manifest| manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    }
}

fn key() -> ManifestKey {
    ManifestKey::new(NAMESPACE, "m")
}

fn ended() -> ReconcileOutcome {
    ReconcileOutcome::ended(WorkSet::MANIFEST)
}

#[tokio::test(start_paused = true)]
async fn module_is_installed_in_stages_and_becomes_ready_with_its_manager() {
    let mut fixture = Fixture::new();
    let outcome = fixture.reconcile().await;
    assert!(outcome.failed.is_empty() && outcome.requeue_after.is_some(), "{outcome:?}");
    let calls = fixture.runtime.calls();
    assert_eq!(
        calls,
        [
            "GET deployments/d",
            "PATCH customresourcedefinitions/samples.example.test",
            "PATCH configmaps/a",
            "PATCH deployments/d",
            "GET samples/default",
            "PATCH samples/default",
        ],
        "the response to the apply shows the manager; a POST would take 2 s while the kind is new"
    );
    let (state, operation) = fixture.state();
    assert_eq!(state, State::Processing, "{operation}");
    assert!(operation.starts_with("waiting for resources to become ready: Deployment kyma-system/d"), "{operation}");
    let expected =
        ["ConfigMap kyma-system/a", "CustomResourceDefinition samples.example.test", "Deployment kyma-system/d"];
    let mut synced = fixture.synced();
    synced.sort();
    assert_eq!(synced, expected);
    let deployment = fixture.runtime.object("deployments/d").unwrap();
    assert_eq!(deployment["metadata"]["labels"]["operator.kyma-project.io/managed-by"], "kyma");
    assert_eq!(deployment["metadata"]["annotations"][annotation::OWNED_BY], "kcp-system/m");

    fixture.make_available();
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
    let manifest = fixture.manifest().unwrap();
    assert_eq!(manifest.annotations()[annotation::SYNC_OCI_REF], DIGEST);
    assert_eq!(manifest.finalizers().len(), 3);
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new(), "nothing was applied again");
}

#[tokio::test(start_paused = true)]
async fn default_object_of_a_new_kind_is_posted_if_its_apply_is_refused_and_left_alone_if_it_exists() {
    let mut fixture = Fixture::new();
    fixture.runtime.refuse("PATCH samples/default", 500);
    fixture.reconcile().await;
    assert!(fixture.runtime.calls().contains(&"POST samples".to_owned()));

    let mut fixture = Fixture::new();
    fixture.runtime.edit("samples/default", |sample| {
        *sample = json!({"apiVersion": "example.test/v1", "kind": "Sample", "spec": {"mine": true},
            "metadata": {"name": "default", "namespace": "kyma-system"}});
    });
    fixture.runtime.calls();
    fixture.reconcile().await;
    let writes = fixture.runtime.writes();
    assert!(!writes.iter().any(|write| write.contains("samples/default") || write == "POST samples"), "{writes:?}");
    let status = fixture.manifest().unwrap().status.unwrap();
    let mut conditions = status.conditions().iter();
    assert!(conditions.any(|it| it.type_ == "ModuleCR" && it.is_true()), "as if it had been created");
}

/// Its body cannot be decoded, or another replica has served it until a moment ago: it exists, and decides by its labels.
#[tokio::test(start_paused = true)]
async fn reduced_kyma_permits_and_parks_its_manifests_as_a_whole_one() {
    let fixture_of = |labels: Value, is_reduced: bool| {
        let mut fixture = Fixture::new();
        let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "namespace": NAMESPACE, "labels": labels}, "spec": {"channel": "regular"}});
        let mut kyma: CachedKyma = serde_json::from_value(kyma).unwrap();
        if is_reduced {
            kyma = CachedKyma::reduced(kyma.whole().unwrap());
        }
        fixture.kymas.apply_watcher_event(&watcher::Event::Apply(kyma));
        fixture
    };
    let none: (Value, Permission) = (json!({}), Permission::Granted);
    for (labels, expected) in [
        none,
        (json!({label::PAUSE: "true"}), Permission::Parked),
        (json!({label::SKIP_RECONCILIATION: "true"}), Permission::Parked),
        (json!({label::HAND_BACK: "true"}), Permission::Parked),
    ] {
        for is_reduced in [false, true] {
            let fixture = fixture_of(labels.clone(), is_reduced);
            let manifest = fixture.manifest().unwrap();
            let permission = fixture.ctx.permission(&KymaKey::new(NAMESPACE, "k"), &manifest);
            assert_eq!(permission, expected, "{labels} {is_reduced}");
        }
    }
}

/// lifecycle-manager evaluates the label of the Manifest alone, and the reconcile of the Kyma adds it.
#[tokio::test(start_paused = true)]
async fn manifest_waits_for_its_label_if_the_selector_names_it() {
    let permission = |labels: Value, is_labelled: bool, selector: &str, is_deleting: bool| {
        let mut fixture = Fixture::new();
        fixture.ctx.settings.takeover = Takeover::new(selector, Duration::ZERO);
        let deleted = is_deleting.then_some("2026-01-01T00:00:00Z");
        let kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": "k", "namespace": NAMESPACE, "labels": labels, "deletionTimestamp": deleted},
            "spec": {"channel": "regular"}});
        fixture.kymas.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(kyma).unwrap()));
        if is_labelled {
            fixture.edit(|manifest| manifest["metadata"]["labels"][label::SKIP_RECONCILIATION] = json!("true"));
        }
        fixture.ctx.permission(&KymaKey::new(NAMESPACE, "k"), &fixture.manifest().unwrap())
    };
    let selector = format!("{}=true", label::SKIP_RECONCILIATION);
    let skipped = json!({label::SKIP_RECONCILIATION: "true"});
    for (labels, is_labelled, selector, is_deleting, expected) in [
        (skipped.clone(), false, selector.as_str(), false, Permission::Later),
        (skipped.clone(), true, selector.as_str(), false, Permission::Granted),
        (skipped.clone(), false, selector.as_str(), true, Permission::Granted),
        (skipped, true, "a=b", false, Permission::Parked),
        (json!({}), true, "a=b", false, Permission::Parked),
        (json!({}), false, "a=b", false, Permission::Granted),
    ] {
        let found = permission(labels.clone(), is_labelled, selector, is_deleting);
        assert_eq!(found, expected, "{labels} {is_labelled} {selector} {is_deleting}");
    }
}

#[tokio::test(start_paused = true)]
async fn installed_module_causes_no_write_and_one_read() {
    let mut fixture = Fixture::installed().await;
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.runtime.calls(), ["GET deployments/d"]);
    assert_eq!(fixture.kcp.calls(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn verification_repairs_drift_and_keeps_fields_of_others() {
    let mut fixture = Fixture::installed().await;
    fixture.runtime.edit("deployments/d", |deployment| {
        deployment["spec"]["replicas"] = json!(0);
        deployment["spec"]["paused"] = json!(false);
    });
    fixture.runtime.remove("configmaps/a");
    fixture.verify().await;
    let writes = fixture.runtime.writes();
    assert_eq!(writes, ["PATCH configmaps/a", "PATCH deployments/d"]);
    let deployment = fixture.runtime.object("deployments/d").unwrap();
    assert_eq!((&deployment["spec"]["replicas"], &deployment["spec"]["paused"]), (&json!(1), &json!(false)));
    fixture.verify().await;
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn upgrade_prunes_dropped_objects_and_never_touches_the_default_cr() {
    let mut fixture = Fixture::installed().await;
    fixture.runtime.remove("samples/default");
    let mut next = vec![definition(), object("v1", "ConfigMap", "b"), manager()];
    next[2]["spec"]["template"]["spec"]["containers"][0]["image"] = json!("i:2");
    fixture.set_layer(ModuleObjects::Ready(Arc::new(next)));
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    assert_eq!(fixture.reconcile().await, ended());
    let calls = fixture.runtime.calls();
    let expected = [
        "GET configmaps/b",
        "PATCH configmaps/b",
        "GET deployments/d",
        "PATCH deployments/d",
        "GET configmaps/a",
        "DELETE configmaps/a",
    ];
    assert_eq!(calls, expected, "the CRD stays the same, and is not read; a new object may be somebody's");
    assert!(!fixture.synced().contains(&"ConfigMap kyma-system/a".to_owned()));
    assert_eq!(fixture.manifest().unwrap().annotations()[annotation::SYNC_OCI_REF], NEXT);
    assert!(fixture.runtime.object("samples/default").is_none(), "the user deleted it");
}

#[tokio::test(start_paused = true)]
async fn field_that_a_version_drops_is_removed_and_those_of_others_stay() {
    let mut fixture = Fixture::installed().await;
    let layer = |data: Value| {
        let mut map = object("v1", "ConfigMap", "a");
        map["data"] = data;
        ModuleObjects::Ready(Arc::new(vec![definition(), map, manager()]))
    };
    let upgrade = |fixture: &mut Fixture, layer, reference: &str| {
        fixture.set_layer(layer);
        fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(reference));
    };
    upgrade(&mut fixture, layer(json!({"kept": "1", "dropped": "1"})), NEXT);
    assert_eq!(fixture.reconcile().await, ended());
    fixture.runtime.edit("configmaps/a", |map| map["data"]["other"] = "1".into());
    upgrade(&mut fixture, layer(json!({"kept": "1"})), &format!("sha256:{}", "3".repeat(64)));
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.runtime.object("configmaps/a").unwrap()["data"], json!({"kept": "1", "other": "1"}));
}

#[tokio::test(start_paused = true)]
async fn user_crs_block_the_removal_until_the_last_is_gone() {
    let mut fixture = Fixture::installed().await;
    fixture.runtime.edit("samples/mine", |sample| *sample = object("example.test/v1", "Sample", "mine"));
    fixture.delete_manifest();
    fixture.reconcile().await;
    assert_eq!(
        fixture.state(),
        (State::Deleting, "waiting for module crs deletion: Sample kyma-system/mine".to_owned())
    );
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    fixture.runtime.remove("samples/mine");
    assert_eq!(fixture.reconcile().await, ended());
    let writes = fixture.runtime.writes();
    assert_eq!(
        writes,
        [
            "DELETE samples/default",
            "DELETE deployments/d",
            "DELETE configmaps/a",
            "DELETE customresourcedefinitions/samples.example.test",
        ]
    );
    assert!(fixture.manifest().is_none());
}

#[tokio::test(start_paused = true)]
async fn repeated_removal_and_installation_is_no_repair() {
    let mut fixture = Fixture::new();
    for _ in 0..20 {
        fixture.reconcile().await;
        fixture.make_available();
        fixture.reconcile().await;
        assert_eq!(fixture.state(), (State::Ready, "resources are ready".to_owned()));
        fixture.delete_manifest();
        assert_eq!(fixture.reconcile().await, ended());
        assert!(fixture.manifest().is_none());
        fixture.create_manifest();
    }
}

#[tokio::test(start_paused = true)]
async fn transitions_are_counted_with_lifecycle_managers_reasons() {
    let mut fixture = Fixture::new();
    let counted = |fixture: &Fixture| {
        let reasons =
            ["add_finalizer", "sync_resources_enqueue_required", "reconcile_finished", "pre_delete_enqueue_required"];
        let requeues = fixture.ctx.metrics.requeues.clone();
        reasons.map(|reason| requeues.counted(format!("manifest_{reason}").leak(), "intended"))
    };
    fixture.reconcile().await;
    assert_eq!(counted(&fixture), [1, 1, 0, 0]);
    fixture.make_available();
    fixture.reconcile().await;
    fixture.reconcile().await;
    assert_eq!(counted(&fixture), [1, 1, 1, 0]);
    fixture.runtime.edit("samples/default", |sample| sample["metadata"]["finalizers"] = json!(["f"]));
    fixture.delete_manifest();
    fixture.reconcile().await;
    assert_eq!(counted(&fixture), [1, 1, 1, 1]);
    let failed = |fixture: &Fixture| fixture.ctx.metrics.requeues.counted("manifest_pre_delete", "unexpected");
    assert_eq!(failed(&fixture), 0);
    fixture.runtime.refuse("GET samples", 500);
    fixture.reconcile().await;
    assert_eq!(failed(&fixture), 1);
}

#[tokio::test(start_paused = true)]
async fn lost_inventory_is_rebuilt_before_anything_is_deleted() {
    let mut fixture = Fixture::installed().await;
    fixture.runtime.edit("samples/mine", |sample| *sample = object("example.test/v1", "Sample", "mine"));
    fixture.runtime.edit("configmaps/theirs", |map| *map = object("v1", "ConfigMap", "theirs"));
    let inventory = fixture.synced();
    // Without a default CR only the CRD leads to the kind of the user CRs.
    fixture.runtime.remove("samples/default");
    fixture.edit(|manifest| {
        manifest["status"]["synced"] = json!([]);
        manifest["spec"]["resource"] = Value::Null;
    });
    fixture.delete_manifest();
    fixture.runtime.refuse("GET roles", 500);
    assert!(!fixture.reconcile().await.failed.is_empty());
    assert_eq!(fixture.state().0, State::Deleting);
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new(), "the search was not complete");
    fixture.runtime.refuse_nothing();
    fixture.reconcile().await;
    assert_eq!(fixture.synced(), inventory);
    assert!(fixture.state().1.contains("Sample kyma-system/mine"), "the kind of a CRD that the inventory lacked");
    assert!(fixture.runtime.writes().iter().all(|write| write.starts_with("PATCH")), "kept as rendered");
    fixture.runtime.remove("samples/mine");
    assert_eq!(fixture.reconcile().await, ended());
    let calls = fixture.runtime.calls();
    assert!(!calls.contains(&"GET roles".to_owned()), "once is enough: {calls:?}");
    assert!(fixture.manifest().is_none());
    let gone = ["deployments/d", "configmaps/a", "customresourcedefinitions/samples.example.test"];
    assert!(gone.iter().all(|id| fixture.runtime.object(id).is_none()));
    assert!(fixture.runtime.object("configmaps/theirs").is_some());
}

#[tokio::test(start_paused = true)]
async fn objects_that_were_taken_over_or_are_not_ours_survive_the_removal() {
    let mut fixture = Fixture::installed().await;
    fixture.runtime.edit("configmaps/a", |map| {
        map["metadata"]["annotations"][annotation::OWNED_BY] = json!("kcp-system/successor")
    });
    fixture.runtime.edit("deployments/d", |deployment| {
        deployment["metadata"].as_object_mut().unwrap().remove("annotations");
    });
    fixture.delete_manifest();
    assert_eq!(fixture.reconcile().await, ended());
    assert!(fixture.manifest().is_none());
    assert!(fixture.runtime.object("configmaps/a").is_some() && fixture.runtime.object("deployments/d").is_some());
}

#[tokio::test(start_paused = true)]
async fn foreign_finalizer_keeps_the_manifest_and_is_named() {
    let mut fixture = Fixture::installed().await;
    fixture.edit(|manifest| {
        manifest["metadata"]["finalizers"].as_array_mut().unwrap().push(json!("example.test/foreign"));
    });
    fixture.delete_manifest();
    fixture.reconcile().await;
    let text = "waiting as other finalizers are present: [example.test/foreign]";
    assert_eq!(fixture.state(), (State::Deleting, text.to_owned()));
    assert_eq!(fixture.manifest().unwrap().finalizers(), ["example.test/foreign"]);
}

/// `acceptance.md` C1 22, in the runtime.
#[tokio::test(start_paused = true)]
async fn unmanaged_module_keeps_its_objects_without_our_label_and_is_managed_again() {
    const MANAGED_BY: &str = "operator.kyma-project.io/managed-by";
    let ids = ["configmaps/a", "deployments/d", "customresourcedefinitions/samples.example.test"];
    let labels =
        |fixture: &Fixture| ids.map(|id| fixture.runtime.object(id).unwrap()["metadata"]["labels"][MANAGED_BY].clone());
    for policy in ["CreateAndDelete", "Ignore"] {
        let mut fixture = Fixture::new();
        fixture.edit(|manifest| manifest["spec"]["customResourcePolicy"] = json!(policy));
        fixture.reconcile().await;
        fixture.make_available();
        fixture.reconcile().await;
        assert_eq!(fixture.state().0, State::Ready, "{policy}");
        fixture.edit(|manifest| {
            manifest["metadata"]["annotations"][annotation::UNMANAGED] = json!("true");
            // Disabled at once, it is unmanaged all the same.
            manifest["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        });
        fixture.runtime.calls();
        assert_eq!(fixture.reconcile().await, ended());
        assert!(fixture.manifest().is_none());
        assert_eq!(labels(&fixture), [Value::Null, Value::Null, Value::Null], "{policy}");
        assert!(fixture.runtime.writes().iter().all(|write| write.starts_with("PATCH")), "nothing is deleted");
        assert_eq!(fixture.runtime.object("samples/default").is_some(), policy == "CreateAndDelete");

        fixture.create_manifest();
        fixture.edit(|manifest| manifest["spec"]["customResourcePolicy"] = json!(policy));
        assert_eq!(fixture.reconcile().await, ended());
        assert_eq!((fixture.state().0, labels(&fixture)), (State::Ready, ["kyma", "kyma", "kyma"].map(Value::from)));
    }
}

#[tokio::test(start_paused = true)]
async fn missing_layer_neither_changes_an_installed_module_nor_its_state() {
    let mut fixture = Fixture::installed().await;
    fixture.ctx.memories.forget(&key());
    for missing in [ModuleObjects::Pending, ModuleObjects::Failed("the registry is down".to_owned())] {
        fixture.set_layer(missing);
        assert_eq!(fixture.reconcile().await, ended());
        assert_eq!(fixture.state().0, State::Ready);
        assert_eq!((fixture.runtime.writes(), fixture.kcp.writes()), (Vec::new(), Vec::new()));
    }
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    fixture.reconcile().await;
    assert_eq!(fixture.state(), (State::Error, "the registry is down".to_owned()));
    // A removal needs no layer.
    fixture.delete_manifest();
    assert_eq!(fixture.reconcile().await, ended());
    assert!(fixture.manifest().is_none());
}

#[tokio::test(start_paused = true)]
async fn refused_object_stops_later_stages_and_is_reported() {
    let mut fixture = Fixture::new();
    fixture.runtime.refuse("WRITE configmaps/a", 403);
    let outcome = fixture.reconcile().await;
    assert_eq!((outcome.failed, outcome.class), (WorkSet::MANIFEST, Some(ErrorClass::Auth)));
    let (state, operation) = fixture.state();
    assert_eq!(state, State::Error);
    assert!(operation.starts_with("failed to apply ConfigMap kyma-system/a"), "{operation}");
    assert!(fixture.runtime.object("deployments/d").is_none());
    assert_eq!(fixture.synced().len(), 3, "the inventory grows before the writes");
    fixture.runtime.refuse_nothing();
    fixture.make_available();
    // The same object waits, since the API server would refuse it again.
    fixture.reconcile().await;
    assert_eq!(fixture.state(), (State::Error, operation));
    tokio::time::advance(outcome.min_backoff.unwrap()).await;
    fixture.reconcile().await;
    assert_eq!(fixture.state().0, State::Ready);
}

#[tokio::test(start_paused = true)]
async fn refused_object_is_not_sent_again_because_its_status_has_changed() {
    let mut fixture = Fixture::installed().await;
    let mut next = objects();
    next[0]["spec"]["template"]["spec"]["containers"][0]["image"] = json!("i:2");
    fixture.set_layer(ModuleObjects::Ready(Arc::new(next)));
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    fixture.runtime.refuse("WRITE deployments/d", 403);
    fixture.reconcile().await;
    assert_eq!(fixture.state().0, State::Error);
    fixture.runtime.refuse_nothing();
    fixture.runtime.edit("deployments/d", |deployment| deployment["status"]["readyReplicas"] = json!(0));
    fixture.runtime.calls();
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
    // Another writer may have changed what the refusal was for.
    fixture.runtime.edit("deployments/d", |deployment| deployment["spec"]["paused"] = json!(true));
    fixture.reconcile().await;
    assert_eq!(fixture.runtime.writes(), ["PATCH deployments/d"]);
}

#[tokio::test(start_paused = true)]
async fn refused_custom_resource_waits_for_the_manager_that_serves_its_webhook() {
    let mut fixture = Fixture::new();
    let mut with_own = objects();
    with_own.push(object("example.test/v1", "Sample", "own"));
    fixture.set_layer(ModuleObjects::Ready(Arc::new(with_own)));
    fixture.runtime.refuse("WRITE samples/own", 500);
    fixture.reconcile().await;
    let (state, operation) = fixture.state();
    assert_eq!(state, State::Processing, "{operation}");
    assert!(operation.starts_with("waiting for resources to become ready: Deployment kyma-system/d"), "{operation}");
    // The manager is ready, so the refusal has another cause.
    fixture.make_available();
    fixture.reconcile().await;
    let (state, operation) = fixture.state();
    assert_eq!(state, State::Error);
    assert!(operation.starts_with("failed to apply Sample kyma-system/own"), "{operation}");
    fixture.runtime.refuse_nothing();
    fixture.reconcile().await;
    assert_eq!(fixture.state().0, State::Ready);
}

#[tokio::test(start_paused = true)]
async fn kinds_that_are_not_served_wait_and_are_named() {
    let mut fixture = Fixture::new();
    let mut with_foreign = objects();
    with_foreign.push(object("monitoring.example/v1", "Monitor", "x"));
    fixture.set_layer(ModuleObjects::Ready(Arc::new(with_foreign)));
    let outcome = fixture.reconcile().await;
    assert!(outcome.failed.is_empty() && outcome.requeue_after.is_some());
    let text = "waiting for kinds that the runtime does not serve: Monitor kyma-system/x (monitoring.example/v1)";
    assert_eq!(fixture.state(), (State::Processing, text.to_owned()));
    assert!(!fixture.synced().iter().any(|name| name.starts_with("Monitor")));
}

#[tokio::test(start_paused = true)]
async fn kind_whose_definition_is_deleted_is_looked_for_again_and_named() {
    let crd = "customresourcedefinitions/others.other.test";
    let other = json!({"spec": {"group": "other.test", "scope": "Namespaced", "names": {"kind": "Other", "plural": "others"},
        "versions": [{"name": "v1", "served": true, "storage": true, "schema": {}}]}});
    let mut fixture = Fixture::new();
    fixture.runtime.edit(crd, |definition| *definition = other);
    let mut with_foreign = objects();
    with_foreign.push(object("other.test/v1", "Other", "x"));
    fixture.set_layer(ModuleObjects::Ready(Arc::new(with_foreign)));
    fixture.reconcile().await;
    fixture.make_available();
    fixture.reconcile().await;
    assert_eq!(fixture.state().0, State::Ready);
    for id in ["others/x", crd] {
        fixture.runtime.remove(id);
    }
    fixture.verify().await;
    fixture.verify().await;
    let text = "waiting for kinds that the runtime does not serve: Other kyma-system/x (other.test/v1)";
    assert_eq!(fixture.state(), (State::Processing, text.to_owned()));
}

#[tokio::test(start_paused = true)]
async fn kind_of_kubernetes_that_the_runtime_does_not_serve_is_an_error() {
    for (api_version, kind) in [("policy/v1beta1", "PodDisruptionBudget"), ("extensions/v1beta1", "Ingress")] {
        let mut fixture = Fixture::new();
        let mut with_removed = objects();
        with_removed.push(object(api_version, kind, "x"));
        fixture.set_layer(ModuleObjects::Ready(Arc::new(with_removed)));
        let outcome = fixture.reconcile().await;
        assert!(outcome.failed.is_empty() && outcome.requeue_after.is_some(), "a newer runtime may serve it");
        let text =
            format!("the runtime does not serve these kinds of Kubernetes: {kind} kyma-system/x ({api_version})");
        assert_eq!(fixture.state(), (State::Error, text));
        assert!(fixture.runtime.object("deployments/d").is_some(), "the other objects are applied");
    }
}

#[tokio::test(start_paused = true)]
async fn lost_runtime_is_reported_and_changes_nothing_else() {
    let mut fixture = Fixture::installed().await;
    fixture.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
    assert_eq!(fixture.reconcile().await, ended());
    assert_eq!(fixture.state().0, State::Error);
    assert_eq!(fixture.synced().len(), 3);
}
