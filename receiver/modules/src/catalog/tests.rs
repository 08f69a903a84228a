//! Catalog sync against a fake runtime.

mod fake;
mod faults;
mod history;
mod hostile;

use kube::runtime::{
    reflector::{self, Lookup, ObjectRef, Store, store::Writer},
    watcher::Event,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tidewatch_api::{
    ModuleReleaseMeta, ModuleTemplate,
    names::{RELEASES, annotation},
};
use tidewatch_cluster::{leader::WriteFence, testing::FakeApiServer};
use tidewatch_contract::event::{Change, Object, Subject};
use tidewatch_fleet::stores::kymas::CachedKyma;
use tidewatch_select::catalog::{desired, removal_guard::Part};
use tokio::time::Instant;

use self::fake::FakeRuntime;
use super::*;

/// Catalog of a control plane, a runtime, and the sync between them.
struct Fixture {
    stores: Stores,
    templates: Writer<ModuleTemplate>,
    metas: Writer<ModuleReleaseMeta>,
    kymas: Writer<CachedKyma>,
    catalog: Catalog,
    runtime: FakeRuntime,
    key: KymaKey,
}

fn store<K>() -> (Store<K>, Writer<K>)
where
    K: Lookup + Clone + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
{
    reflector::store()
}

fn read<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

impl Catalog {
    /// Creates catalog sync of a process that decides on changes of the releases itself, and whose decisions count as stored.
    pub(crate) fn deciding(settings: Settings, metrics: Metrics, budgets: WriteBudgets) -> Self {
        let catalog = Self::new(settings, metrics, budgets, FleetRole::held(WriteFence::default()));
        let hold = BTreeMap::from([("lost".to_owned(), String::new())]);
        catalog.observe_releases(Some(&ConfigMap { data: Some(hold), ..ConfigMap::default() }));
        catalog.observe_releases(None);
        catalog
    }
}

impl Fixture {
    /// Creates two modules: `alpha` with the channels fast and regular, `omega` with regular.
    fn new() -> Self {
        let mut fixture = Self::empty(BTreeSet::new());
        for (module, version) in [("alpha", "1.0.0"), ("alpha", "2.0.0"), ("omega", "1.0.0")] {
            fixture.template(module, version);
        }
        fixture.meta("alpha", &[("regular", "1.0.0"), ("fast", "2.0.0")]);
        fixture.meta("omega", &[("regular", "1.0.0")]);
        fixture
    }

    fn empty(restricted_modules: BTreeSet<String>) -> Self {
        let ((templates, templates_writer), (metas, metas_writer)) = (store(), store());
        let (kymas, kymas_writer) = store();
        let stores =
            Stores { kymas, templates, release_metas: metas, manifests: store().0.into(), watchers: store().0 };
        let settings = Settings { restricted_modules, ..Settings::default() };
        let catalog = Catalog::deciding(settings, Metrics::default(), WriteBudgets::default());
        let key = KymaKey::new("kcp-system", "k");
        let templates = templates_writer;
        let metas = metas_writer;
        let kymas = kymas_writer;
        Self { stores, templates, metas, kymas, catalog, runtime: FakeRuntime::default(), key }
    }

    /// Adds `count` Kymas to KCP.
    fn kymas(&mut self, count: usize) {
        self.kymas_with(count, json!({}), json!({}));
    }

    /// Adds `count` Kymas that a receiver has reconciled.
    fn managed_kymas(&mut self, count: usize) {
        self.kymas_with(count, json!({}), json!({annotation::INPUTS: "-.-"}));
    }

    fn kymas_with(&mut self, count: usize, labels: Value, annotations: Value) {
        for n in 0..count {
            let kyma = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": format!("k{n}"), "namespace": "kcp-system", "labels": labels, "annotations": annotations},
                "spec": {"channel": "regular"}}));
            self.kymas.apply_watcher_event(&Event::Apply(kyma));
        }
    }

    fn delete_template(&mut self, name: &str) {
        let template = self.stores.templates.get(&ObjectRef::new(name).within("kcp-system")).unwrap();
        self.templates.apply_watcher_event(&Event::Delete((*template).clone()));
        drop(self.catalog.refresh(&self.stores));
    }

    fn delete_meta(&mut self, name: &str) -> CatalogUpdate {
        let meta = self.stores.release_metas.get(&ObjectRef::new(name).within("kcp-system")).unwrap();
        self.metas.apply_watcher_event(&Event::Delete((*meta).clone()));
        self.catalog.refresh(&self.stores)
    }

    fn template(&mut self, module: &str, version: &str) {
        let template = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": format!("{module}-{version}"), "namespace": "kcp-system", "resourceVersion": "5", "uid": "kcp",
                         "labels": {"team": "x"}, "finalizers": ["kcp/only"], "generation": 3},
            "spec": {"moduleName": module, "version": version, "mandatory": false, "descriptor": {"any": [1, null]}}}));
        self.templates.apply_watcher_event(&Event::Apply(template));
        drop(self.catalog.refresh(&self.stores));
    }

    fn meta(&mut self, module: &str, channels: &[(&str, &str)]) {
        let channels: Vec<_> =
            channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
        let meta = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": module, "namespace": "kcp-system", "resourceVersion": "5"},
            "spec": {"moduleName": module, "channels": channels, "ocmComponentName": format!("kyma-project.io/module/{module}")}}));
        self.metas.apply_watcher_event(&Event::Apply(meta));
        drop(self.catalog.refresh(&self.stores));
    }

    async fn try_sync(&self, drift: Drift) -> Result<(), SyncError> {
        self.catalog.sync(&self.key, &self.runtime.client(), &BTreeMap::new(), &self.stores, &drift).await
    }

    /// Syncs and returns the calls in the order in which they were made.
    async fn sync(&self, drift: Drift) -> Vec<String> {
        self.try_sync(drift).await.unwrap();
        self.runtime.calls()
    }

    /// Creates a fixture and completes the first sync.
    async fn synced() -> Self {
        let fixture = Self::new();
        fixture.sync(Drift::None).await;
        fixture
    }

    /// Event that the runtime's agent would send for the current state of an object.
    fn event(&self, id: &str, change: Change) -> Drift {
        let object = self.runtime.object(id).unwrap_or_default();
        let text = |member: &str| object["metadata"][member].as_str().unwrap_or_default();
        let (resource, name) = id.split_once('/').unwrap();
        Drift::of(agent_event(resource, name, text("uid"), text("resourceVersion"), change))
    }

    fn spec(&self, id: &str) -> Value {
        self.runtime.object(id).unwrap()["spec"].clone()
    }
}

/// Creates an event of the runtime's agent.
fn agent_event(resource: &str, name: &str, uid: &str, resource_version: &str, change: Change) -> Object {
    Object {
        subject: Subject {
            group: "operator.kyma-project.io".to_owned(),
            version: "v1beta2".to_owned(),
            resource: resource.to_owned(),
            namespace: "kyma-system".to_owned(),
            name: name.to_owned(),
        },
        kind: String::new(),
        uid: uid.to_owned(),
        resource_version: resource_version.to_owned(),
        generation: Some(1),
        change,
    }
}

const ALL: [&str; 5] = [
    "modulereleasemetas/alpha",
    "modulereleasemetas/omega",
    "moduletemplates/alpha-1.0.0",
    "moduletemplates/alpha-2.0.0",
    "moduletemplates/omega-1.0.0",
];

#[tokio::test]
async fn first_sync_writes_templates_before_release_metas() {
    let fixture = Fixture::new();
    let calls = fixture.sync(Drift::None).await;
    assert_eq!(calls[..2], ["list moduletemplates", "list modulereleasemetas"]);
    let puts = &calls[2..];
    assert_eq!(puts.len(), 5);
    assert!(puts[..3].iter().all(|call| call.starts_with("apply moduletemplates/")), "{puts:?}");
    assert!(puts[3..].iter().all(|call| call.starts_with("apply modulereleasemetas/")), "{puts:?}");
    assert_eq!(fixture.runtime.ids(), ALL);
    let template = fixture.runtime.object("moduletemplates/alpha-1.0.0").unwrap();
    assert_eq!(
        template["metadata"]["labels"],
        json!({"team": "x", "operator.kyma-project.io/managed-by": "kyma", "operator.kyma-project.io/module-name": "alpha"})
    );
    assert!(template["metadata"].get("finalizers").is_none());
    assert_ne!(template["metadata"]["uid"], "kcp");
    assert_eq!(template["spec"]["descriptor"], json!({"any": [1, null]}));
}

/// The inventory is read, and written before and after the objects; templates come before release metas.
#[tokio::test(start_paused = true)]
async fn first_sync_of_sixteen_modules_takes_six_round_trips() {
    const ROUND_TRIP: Duration = Duration::from_millis(100);
    let mut fixture = Fixture::empty(BTreeSet::new());
    for module in (0..16).map(|n| format!("m{n}")) {
        fixture.template(&module, "1.0.0");
        fixture.meta(&module, &[("regular", "1.0.0")]);
    }
    let runtime = FakeApiServer::default();
    runtime.set_round_trip(ROUND_TRIP);
    let client = runtime.client();
    let begun = Instant::now();
    fixture.catalog.sync(&fixture.key, &client, &BTreeMap::new(), &fixture.stores, &Drift::None).await.unwrap();
    assert_eq!(begun.elapsed(), 6 * ROUND_TRIP);
    assert_eq!(runtime.all("moduletemplates").len() + runtime.all("modulereleasemetas").len(), 32);
}

#[tokio::test]
async fn unchanged_sync_makes_no_call_and_a_restart_only_reads() {
    let fixture = Fixture::synced().await;
    assert!(fixture.sync(Drift::None).await.is_empty());
    drop(fixture.catalog.refresh(&fixture.stores));
    assert!(fixture.sync(Drift::None).await.is_empty());
    assert_eq!(fixture.runtime.inventory_calls(), ["get", "create", "replace"], "calls of the first sync");
    fixture.catalog.forget(&fixture.key);
    assert!(fixture.sync(Drift::None).await.is_empty(), "the stored inventory suffices");
    assert_eq!(fixture.runtime.inventory_calls(), ["get"]);
    assert!(fixture.sync(Drift::None).await.is_empty());
    assert!(fixture.runtime.inventory_calls().is_empty());
    assert!(fixture.sync(Drift::All).await.iter().all(|call| call.starts_with("list ")));
}

#[tokio::test]
async fn moved_channel_is_one_apply_and_its_echo_is_ignored() {
    let mut fixture = Fixture::synced().await;
    fixture.meta("alpha", &[("regular", "2.0.0"), ("fast", "2.0.0")]);
    fixture.runtime.inventory_calls();
    assert_eq!(fixture.sync(Drift::None).await, ["apply modulereleasemetas/alpha"]);
    assert_eq!(fixture.runtime.inventory_calls(), ["replace"]);
    assert!(fixture.sync(fixture.event("modulereleasemetas/alpha", Change::Spec)).await.is_empty());
    // A version without a channel stays installable until its template is deleted.
    fixture.delete_template("alpha-1.0.0");
    assert_eq!(fixture.sync(Drift::None).await, ["delete moduletemplates/alpha-1.0.0"]);
    assert!(fixture.sync(fixture.event("moduletemplates/alpha-1.0.0", Change::Deleted)).await.is_empty());

    fixture.template("omega", "1.1.0");
    assert_eq!(fixture.sync(Drift::None).await, ["apply moduletemplates/omega-1.1.0"]);
    fixture.meta("alpha", &[("regular", "2.0.0"), ("fast", "2.0.0"), ("rapid", "2.0.0")]);
    assert_eq!(fixture.sync(Drift::None).await, ["apply modulereleasemetas/alpha"]);
    fixture.meta("alpha", &[("rapid", "2.0.0")]);
    assert_eq!(fixture.sync(Drift::None).await, ["apply modulereleasemetas/alpha"]);
    assert_eq!(fixture.spec("modulereleasemetas/alpha")["channels"], json!([{"channel": "rapid", "version": "2.0.0"}]));
}

#[tokio::test]
async fn edits_are_reverted_by_an_apply() {
    let fixture = Fixture::synced().await;
    let before = fixture.spec("modulereleasemetas/alpha");
    fixture
        .runtime
        .edit("modulereleasemetas/alpha", |object| object["spec"]["channels"][0]["version"] = json!("9.9.9"));
    let calls = fixture.sync(fixture.event("modulereleasemetas/alpha", Change::Spec)).await;
    assert_eq!(calls, ["get modulereleasemetas/alpha", "apply modulereleasemetas/alpha"]);
    assert_eq!(fixture.spec("modulereleasemetas/alpha"), before);
    assert!(fixture.sync(fixture.event("modulereleasemetas/alpha", Change::Spec)).await.is_empty());

    fixture.runtime.edit("moduletemplates/alpha-1.0.0", |object| {
        object["metadata"]["labels"].as_object_mut().unwrap().remove("operator.kyma-project.io/managed-by");
    });
    // An agent that selects by that label observes a deletion.
    let calls = fixture.sync(fixture.event("moduletemplates/alpha-1.0.0", Change::Deleted)).await;
    assert_eq!(calls, ["get moduletemplates/alpha-1.0.0", "apply moduletemplates/alpha-1.0.0"]);
    let labels = fixture.runtime.object("moduletemplates/alpha-1.0.0").unwrap()["metadata"]["labels"].clone();
    assert_eq!(labels["operator.kyma-project.io/managed-by"], "kyma");
}

#[tokio::test]
async fn additions_are_removed_by_a_put_and_foreign_annotations_stay() {
    let fixture = Fixture::synced().await;
    let before = fixture.spec("modulereleasemetas/alpha");
    fixture.runtime.edit("modulereleasemetas/alpha", |object| {
        object["spec"]["channels"].as_array_mut().unwrap().push(json!({"channel": "mine", "version": "1.0.0"}));
        object["metadata"]["labels"]["mine"] = json!("1");
        object["metadata"]["annotations"] = json!({"mine": "1"});
    });
    let calls = fixture.sync(fixture.event("modulereleasemetas/alpha", Change::Spec)).await;
    let repair = ["get modulereleasemetas/alpha", "apply modulereleasemetas/alpha", "put modulereleasemetas/alpha"];
    assert_eq!(calls, repair);
    let object = fixture.runtime.object("modulereleasemetas/alpha").unwrap();
    assert_eq!(object["spec"], before);
    assert!(object["metadata"]["labels"].get("mine").is_none());
    assert_eq!(object["metadata"]["annotations"]["mine"], "1");
    assert!(fixture.sync(fixture.event("modulereleasemetas/alpha", Change::Spec)).await.is_empty());
}

#[tokio::test]
async fn deleted_objects_are_recreated() {
    let fixture = Fixture::synced().await;
    fixture.runtime.remove("modulereleasemetas/omega");
    let calls = fixture.sync(fixture.event("modulereleasemetas/omega", Change::Deleted)).await;
    assert_eq!(calls, ["get modulereleasemetas/omega", "apply modulereleasemetas/omega"]);
    fixture.runtime.remove("moduletemplates/omega-1.0.0");
    let calls = fixture.sync(Drift::All).await;
    assert_eq!(
        calls.iter().filter(|call| !call.starts_with("list ")).collect::<Vec<_>>(),
        ["apply moduletemplates/omega-1.0.0"]
    );
}

#[tokio::test]
async fn managed_undesired_objects_are_deleted_and_user_objects_stay() {
    let fixture = Fixture::new();
    let as_lifecycle_manager_left_it =
        |object: &mut Value| object["metadata"]["managedFields"] = json!([{"manager": "catalog-sync"}]);
    fixture.runtime.edit("moduletemplates/old-1.0.0", as_lifecycle_manager_left_it);
    fixture.runtime.edit("modulereleasemetas/old", as_lifecycle_manager_left_it);
    fixture.runtime.edit("moduletemplates/users-1.0.0", |object| object["spec"] = json!({"own": true}));
    let calls = fixture.sync(Drift::None).await;
    let deletes: Vec<_> = calls.iter().filter(|call| call.starts_with("delete ")).collect();
    assert_eq!(deletes, ["delete modulereleasemetas/old", "delete moduletemplates/old-1.0.0"]);
    assert!(fixture.runtime.object("moduletemplates/users-1.0.0").is_some());

    let calls = fixture.sync(fixture.event("moduletemplates/users-1.0.0", Change::Spec)).await;
    assert_eq!(calls, ["get moduletemplates/users-1.0.0"]);
    fixture.catalog.remove_all(&fixture.key, &fixture.runtime.client()).await.unwrap();
    assert_eq!(fixture.runtime.ids(), ["moduletemplates/users-1.0.0"]);
    let calls = fixture.runtime.calls();
    let deletes: Vec<_> = calls.iter().filter(|call| call.starts_with("delete ")).collect();
    assert!(deletes[..2].iter().all(|call| call.starts_with("delete modulereleasemetas/")), "{deletes:?}");
}

#[tokio::test]
async fn object_that_took_over_a_name_is_not_deleted() {
    let mut fixture = Fixture::synced().await;
    fixture.runtime.remove("moduletemplates/alpha-1.0.0");
    fixture.runtime.edit("moduletemplates/alpha-1.0.0", |object| object["spec"] = json!({"own": true}));
    fixture.meta("alpha", &[("regular", "2.0.0")]);
    fixture.delete_template("alpha-1.0.0");
    assert_eq!(
        fixture.sync(Drift::None).await,
        ["apply modulereleasemetas/alpha", "delete moduletemplates/alpha-1.0.0"]
    );
    assert_eq!(fixture.spec("moduletemplates/alpha-1.0.0"), json!({"own": true}));
    assert_eq!(fixture.sync(Drift::None).await, ["get moduletemplates/alpha-1.0.0"]);
    assert!(fixture.sync(Drift::None).await.is_empty());
}

#[tokio::test]
async fn refused_object_blocks_only_its_dependents() {
    let fixture = Fixture::new();
    fixture.runtime.refuse("moduletemplates/alpha-2.0.0", true);
    let error = fixture.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(error.to_string(), "apply moduletemplates/alpha-2.0.0; 1 wait for them");
    assert_eq!(
        fixture.runtime.ids(),
        ["modulereleasemetas/omega", "moduletemplates/alpha-1.0.0", "moduletemplates/omega-1.0.0"]
    );
    fixture.runtime.calls();

    fixture.runtime.refuse("moduletemplates/alpha-2.0.0", false);
    let calls = fixture.sync(Drift::None).await;
    // Only the failed objects are read again.
    assert_eq!(calls.len(), 4, "{calls:?}");
    assert_eq!(calls[2..], ["apply moduletemplates/alpha-2.0.0", "apply modulereleasemetas/alpha"]);
    assert_eq!(fixture.runtime.ids(), ALL);
}

#[tokio::test]
async fn outdated_template_blocks_nothing() {
    let fixture = Fixture::synced().await;
    fixture.runtime.edit("moduletemplates/alpha-2.0.0", |object| object["spec"]["version"] = json!("0.0.1"));
    fixture.runtime.edit("modulereleasemetas/alpha", |object| object["spec"]["channels"] = json!([]));
    fixture.runtime.refuse("moduletemplates/alpha-2.0.0", true);
    let error = fixture.try_sync(Drift::All).await.unwrap_err();
    assert_eq!(error.to_string(), "apply moduletemplates/alpha-2.0.0");
    assert!(fixture.runtime.calls().contains(&"apply modulereleasemetas/alpha".to_owned()));
}

/// Also `acceptance.md` C1 25: the deletion of a template and of a release meta in KCP reaches the runtime.
#[tokio::test]
async fn templates_stay_while_a_release_meta_may_reference_them() {
    let mut fixture = Fixture::synced().await;
    fixture.runtime.refuse("modulereleasemetas/alpha", true);
    fixture.meta("alpha", &[("regular", "2.0.0")]);
    fixture.delete_template("alpha-1.0.0");
    fixture.meta("omega", &[]);
    let error = fixture.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(error.to_string(), "apply modulereleasemetas/alpha; 1 wait for them");
    let calls = fixture.runtime.calls();
    let expected =
        ["apply modulereleasemetas/alpha", "delete modulereleasemetas/omega", "delete moduletemplates/omega-1.0.0"];
    assert_eq!(calls, expected);
    fixture.runtime.refuse("modulereleasemetas/alpha", false);
    let calls = fixture.sync(Drift::None).await;
    assert_eq!(calls[2..], ["apply modulereleasemetas/alpha", "delete moduletemplates/alpha-1.0.0"]);
}

#[tokio::test]
async fn unserved_kind_is_a_transient_error_without_writes() {
    let fixture = Fixture::new();
    fixture.runtime.unserve("modulereleasemetas", true);
    let error = fixture.try_sync(Drift::None).await.unwrap_err();
    assert!(matches!(error, SyncError::List { kind: desired::Kind::ReleaseMeta, .. }), "{error:?}");
    assert!(fixture.runtime.ids().is_empty());
    fixture.runtime.calls();
    fixture.runtime.unserve("modulereleasemetas", false);
    assert_eq!(fixture.sync(Drift::None).await.len(), 7);
    // The CRD is deleted during the sync: all objects are read again.
    fixture.runtime.unserve("modulereleasemetas", true);
    fixture.runtime.remove("modulereleasemetas/alpha");
    fixture.try_sync(fixture.event("modulereleasemetas/alpha", Change::Deleted)).await.unwrap_err();
    fixture.runtime.unserve("modulereleasemetas", false);
    fixture.runtime.calls();
    assert_eq!(fixture.sync(Drift::None).await.last().unwrap(), "apply modulereleasemetas/alpha");
}

#[tokio::test]
async fn sync_of_a_forgotten_runtime_caches_nothing() {
    let fixture = Fixture::synced().await;
    let inventory = fixture.catalog.begin(&fixture.key);
    fixture.catalog.forget(&fixture.key);
    fixture.catalog.end(&fixture.key, inventory.unwrap());
    fixture.runtime.inventory_calls();
    assert!(fixture.sync(Drift::None).await.is_empty());
    assert_eq!(fixture.runtime.inventory_calls(), ["get"]);
}

#[tokio::test]
async fn lost_inventory_is_rebuilt_from_the_runtime() {
    let fixture = Fixture::synced().await;
    let before = fixture.runtime.inventory();
    assert_eq!(before.len(), 5);
    fixture.runtime.remove("configmaps/tidewatch-catalog");
    fixture.catalog.forget(&fixture.key);
    fixture.runtime.inventory_calls();
    assert!(fixture.sync(Drift::None).await.iter().all(|call| call.starts_with("list ")));
    assert_eq!(
        (fixture.runtime.inventory_calls(), fixture.runtime.inventory()),
        (vec!["get", "create"], before.clone())
    );

    fixture.runtime.edit("configmaps/tidewatch-catalog", |map| map["data"]["objects"] = json!("nonsense"));
    assert!(fixture.sync(Drift::All).await.iter().all(|call| call.starts_with("list ")));
    assert_eq!(fixture.runtime.inventory(), before);
}

#[tokio::test]
async fn objects_of_lifecycle_manager_are_adopted_unchanged() {
    let old = Fixture::synced().await;
    let new = Fixture::new();
    for (id, object) in old.runtime.objects() {
        new.runtime.edit(&id, |copy| *copy = object);
    }
    let uids = |fixture: &Fixture| -> Vec<_> {
        fixture.runtime.objects().into_values().map(|object| object["metadata"]["uid"].clone()).collect()
    };
    let before = uids(&new);
    assert!(new.sync(Drift::None).await.iter().all(|call| call.starts_with("list ")));
    assert_eq!((uids(&new), new.runtime.inventory().len()), (before, 5));
}

#[tokio::test]
async fn concurrent_inventory_write_aborts_the_sync() {
    let mut fixture = Fixture::synced().await;
    fixture
        .runtime
        .edit("configmaps/tidewatch-catalog", |map| map["metadata"]["labels"] = json!({"another": "receiver"}));
    fixture.template("omega", "1.1.0");
    let error = fixture.try_sync(Drift::None).await.unwrap_err();
    assert!(matches!(error, SyncError::Inventory(_)) && error.is_catalog_only(), "{error:?}");
    assert!(fixture.runtime.calls().is_empty(), "the inventory is written before any object");
    assert_eq!(fixture.sync(Drift::None).await, ["apply moduletemplates/omega-1.1.0"]);
}

#[tokio::test]
async fn refused_inventory_does_not_block_the_catalog() {
    let fixture = Fixture::new();
    fixture.runtime.refuse("configmaps", true);
    let error = fixture.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(error.describe(), "apply the inventory: Forbidden (403 Forbidden)");
    assert!(error.is_catalog_only());
    assert_eq!(fixture.runtime.ids(), ALL);
}

#[tokio::test]
async fn removal_above_the_limit_waits_for_a_confirmation() {
    let mut fixture = Fixture::synced().await;
    fixture.kymas(4);
    let update = fixture.delete_meta("omega");
    let held = update.held[0].clone();
    assert_eq!((update.held.len(), held.runtimes, held.of, &held.part), (1, 4, 4, &Part::Module));
    assert!(fixture.catalog.is_held("omega") && !fixture.catalog.is_held("alpha"));
    fixture.catalog.mark_undecided("alpha");
    assert!(fixture.catalog.is_held("alpha"), "the change is undecided");
    let update = fixture.catalog.refresh(&fixture.stores);
    assert_eq!((update.held, update.no_longer_held), (Vec::new(), BTreeSet::new()), "reported before and still held");
    assert!(
        fixture.catalog.is_held("omega")
            && !fixture.catalog.is_held("alpha")
            && fixture.catalog.confirmations_left().is_none()
    );
    assert!(fixture.sync(Drift::None).await.is_empty());
    // Held objects are not written, and other changes continue.
    fixture.runtime.edit("moduletemplates/omega-1.0.0", |object| object["spec"]["info"] = json!({"edited": true}));
    let calls = fixture.sync(fixture.event("moduletemplates/omega-1.0.0", Change::Spec)).await;
    assert_eq!(calls, ["get moduletemplates/omega-1.0.0"]);
    fixture.meta("alpha", &[("regular", "2.0.0"), ("fast", "2.0.0")]);
    assert_eq!(fixture.sync(Drift::None).await, ["apply modulereleasemetas/alpha"]);
    assert!(fixture.sync(Drift::All).await.iter().all(|call| call.starts_with("list ")));
    assert_eq!(fixture.catalog.held().removals, std::slice::from_ref(&held), "the removal is the same");

    // Another process restores the held removal from the ConfigMap.
    let data = fixture.catalog.pending_releases().unwrap();
    assert!(data["held"].contains(&held.change));
    let mut map = ConfigMap { data: Some(data), ..ConfigMap::default() };
    let next = Catalog::deciding(Settings::default(), Metrics::default(), WriteBudgets::default());
    next.observe_releases(Some(&map));
    drop(next.snapshot(&fixture.stores));
    assert_eq!(next.held().removals, std::slice::from_ref(&held));

    let confirm = "operator.kyma-project.io/tidewatch-confirm".to_owned();
    map.metadata.annotations = Some(BTreeMap::from([(confirm, held.change)]));
    assert!(fixture.catalog.observe_releases(Some(&map)));
    let update = fixture.catalog.refresh(&fixture.stores);
    assert_eq!((update.held, update.no_longer_held), (Vec::new(), BTreeSet::from(["omega".to_owned()])));
    let calls = fixture.sync(Drift::None).await;
    assert_eq!(calls, ["delete modulereleasemetas/omega", "delete moduletemplates/omega-1.0.0"]);
    let data = fixture.catalog.pending_releases().unwrap();
    assert!(!data.contains_key("held"));
    assert_eq!(fixture.catalog.confirmations_left(), Some(BTreeSet::new()));
    fixture.catalog.releases_written(data);
    assert_eq!(fixture.catalog.confirmations_left(), None, "the confirmation was removed");
}

/// A process that starts with the catalog of [`Fixture::new`], less a module, and with this accepted state in KCP.
fn started(fixture: &mut Fixture, accepted: Option<&str>) -> CatalogUpdate {
    let _ = fixture.delete_meta("omega");
    fixture.catalog = Catalog::deciding(Settings::default(), Metrics::default(), WriteBudgets::default());
    let data = accepted.map(|text| BTreeMap::from([("accepted".to_owned(), text.to_owned())]));
    fixture.catalog.observe_releases(data.map(|data| ConfigMap { data: Some(data), ..ConfigMap::default() }).as_ref());
    fixture.catalog.refresh(&fixture.stores)
}

#[tokio::test]
async fn lost_accepted_state_holds_every_removal_until_it_is_confirmed_or_restored() {
    for (accepted, cause) in [(None, "missing"), (Some("{"), "unreadable")] {
        let mut fixture = Fixture::synced().await;
        fixture.managed_kymas(4);
        let stored = fixture.catalog.pending_releases().unwrap();
        let update = started(&mut fixture, accepted);
        let lost = update.lost.unwrap();
        assert!(lost.to_string().contains(&format!("are {cause}: every removal waits")), "{lost}");
        assert!(fixture.catalog.is_held("omega") && fixture.catalog.is_held("alpha"));
        assert!(fixture.sync(Drift::All).await.iter().all(|call| call.starts_with("list ")), "nothing is deleted");
        let slot = fixture.catalog.rollout_slot("uid", "alpha", VersionSource::Channel("fast"), "2.0.0");
        assert_eq!(slot, RolloutSlot::Undecided, "it is not known since when the channel points there");
        assert_eq!(fixture.catalog.refresh(&fixture.stores).lost, None, "it was reported");
        let data = fixture.catalog.pending_releases().unwrap();
        assert_eq!((data.get("accepted").map(String::as_str), data.contains_key("lost")), (accepted, true));

        // A later process finds the same, and the state that an operator restores has an effect.
        let mut map = ConfigMap { data: Some(data), ..ConfigMap::default() };
        let next = Catalog::deciding(Settings::default(), Metrics::default(), WriteBudgets::default());
        next.observe_releases(Some(&map));
        assert_eq!(next.refresh(&fixture.stores).lost, Some(lost.clone()));
        assert!(next.observe_releases(Some(&ConfigMap { data: Some(stored), ..ConfigMap::default() })));
        let update = next.refresh(&fixture.stores);
        assert_eq!((next.lost(), update.no_longer_held), (None, BTreeSet::from(["alpha".to_owned()])));
        assert!(next.is_held("omega"), "its removal is known now");

        let confirm = |change: &str| Some(BTreeMap::from([(annotation::CONFIRM.to_owned(), change.to_owned())]));
        map.metadata.annotations = confirm("another");
        fixture.catalog.observe_releases(Some(&map));
        let _ = fixture.catalog.refresh(&fixture.stores);
        assert!(fixture.catalog.lost().is_some());
        map.metadata.annotations = confirm(&lost.change);
        assert!(fixture.catalog.observe_releases(Some(&map)));
        let update = fixture.catalog.refresh(&fixture.stores);
        assert_eq!((fixture.catalog.lost(), update.no_longer_held.len()), (None, 1));
        assert!(fixture.catalog.confirmations_left().is_some() && !fixture.catalog.is_held("alpha"));
        let slot = fixture.catalog.rollout_slot("uid", "alpha", VersionSource::Channel("fast"), "2.0.0");
        assert!(matches!(slot, RolloutSlot::After(_)), "a version that came meanwhile is rolled out");
        let calls = fixture.sync(Drift::None).await;
        assert_eq!(calls, ["delete modulereleasemetas/omega", "delete moduletemplates/omega-1.0.0"]);
        let data = fixture.catalog.pending_releases().unwrap();
        assert!(data["accepted"].contains("alpha") && !data.contains_key("lost"));
    }
}

#[tokio::test]
async fn new_installation_accepts_its_catalog_at_once() {
    // Kymas exist, maybe of lifecycle-manager, but none was ever reconciled.
    let mut fixture = Fixture::synced().await;
    fixture.kymas(4);
    let update = started(&mut fixture, None);
    assert_eq!((update.lost, fixture.catalog.lost(), fixture.catalog.is_held("alpha")), (None, None, false));
    fixture.managed_kymas(4);
    assert_eq!(fixture.catalog.refresh(&fixture.stores).lost, None, "the state is in memory");
}

/// Most Kymas are in the shards of other replicas.
#[tokio::test]
async fn reduced_kymas_count_for_the_removal_guard_and_show_that_the_state_is_lost() {
    let mut fixture = Fixture::synced().await;
    fixture.managed_kymas(4);
    for kyma in fixture.stores.kymas.state() {
        let reduced = CachedKyma::reduced(kyma.whole().unwrap());
        fixture.kymas.apply_watcher_event(&Event::Apply(reduced));
    }
    assert!(fixture.stores.kymas.state().iter().all(|kyma| kyma.is_reduced()));
    fixture.meta("alpha", &[("regular", "1.0.0")]);
    let held = fixture.catalog.held().removals;
    assert_eq!((held.len(), &*held[0].module, &held[0].part), (1, "alpha", &Part::Channel("fast".to_owned())));
    assert_eq!(held[0].runtimes, 4);
    let update = started(&mut fixture, None);
    assert!(update.lost.is_some() && fixture.catalog.lost().is_some());
}

#[tokio::test]
async fn held_channel_stays_and_the_rest_of_its_module_goes_on() {
    let mut fixture = Fixture::synced().await;
    fixture.kymas(4);
    // The channel fast goes, and regular moves.
    fixture.template("alpha", "1.5.0");
    fixture.meta("alpha", &[("regular", "1.5.0")]);
    let held = fixture.catalog.held().removals;
    assert_eq!((held.len(), &*held[0].module, &held[0].part), (1, "alpha", &Part::Channel("fast".to_owned())));
    assert!(!fixture.catalog.is_held("alpha"), "no Kyma loses the module");
    assert_eq!(
        fixture.sync(Drift::None).await,
        ["apply moduletemplates/alpha-1.5.0", "apply modulereleasemetas/alpha"]
    );
    let both = json!([{"channel": "regular", "version": "1.5.0"}, {"channel": "fast", "version": "2.0.0"}]);
    assert_eq!(fixture.spec("modulereleasemetas/alpha")["channels"], both);
    // A change by the user is reverted, and a new runtime gets the same.
    fixture.runtime.edit("modulereleasemetas/alpha", |object| object["spec"]["channels"] = json!([]));
    fixture.sync(fixture.event("modulereleasemetas/alpha", Change::Spec)).await;
    let new = FakeRuntime::default();
    let key = KymaKey::new("kcp-system", "new");
    fixture.catalog.sync(&key, &new.client(), &BTreeMap::new(), &fixture.stores, &Drift::None).await.unwrap();
    for runtime in [&fixture.runtime, &new] {
        assert_eq!(runtime.object("modulereleasemetas/alpha").unwrap()["spec"]["channels"], both);
    }
    let slot = fixture.catalog.rollout_slot("uid", "alpha", VersionSource::Channel("regular"), "1.5.0");
    assert!(matches!(slot, RolloutSlot::After(_)), "it is rolled out");

    // Another process holds the same, and a removal of another module changes nothing of it.
    let data = fixture.catalog.pending_releases().unwrap();
    let mut map = ConfigMap { data: Some(data), ..ConfigMap::default() };
    fixture.catalog = Catalog::deciding(Settings::default(), Metrics::default(), WriteBudgets::default());
    fixture.catalog.observe_releases(Some(&map));
    let update = fixture.delete_meta("omega");
    assert_eq!(update.held.len(), 2);
    assert_eq!(fixture.catalog.held().removals[0], held[0]);
    assert!(fixture.sync(Drift::All).await.iter().all(|call| call.starts_with("list ")));
    let confirmed = format!("{} other", held[0].change);
    map.metadata.annotations = Some(BTreeMap::from([(annotation::CONFIRM.to_owned(), confirmed)]));
    fixture.catalog.observe_releases(Some(&map));
    let update = fixture.catalog.refresh(&fixture.stores);
    assert_eq!((update.no_longer_held, update.held), (BTreeSet::from(["alpha".to_owned()]), Vec::new()));
    assert!(fixture.catalog.is_held("omega"));
    assert_eq!(fixture.catalog.confirmations_left(), Some(BTreeSet::from(["other".to_owned()])));
    assert_eq!(fixture.sync(Drift::None).await, ["apply modulereleasemetas/alpha"]);
    assert_eq!(
        fixture.spec("modulereleasemetas/alpha")["channels"],
        json!([{"channel": "regular", "version": "1.5.0"}])
    );
}

#[tokio::test]
async fn held_version_stays_selectable() {
    let mut fixture = Fixture::synced().await;
    fixture.kymas(4);
    fixture.meta("alpha", &[("regular", "2.0.0"), ("fast", "2.0.0")]);
    fixture.sync(Drift::None).await;
    // Its template gets a label that hides it, and goes.
    let beta = json!({"operator.kyma-project.io/beta": "true", "team": "x"});
    let template = fixture.stores.templates.get(&ObjectRef::new("alpha-1.0.0").within("kcp-system")).unwrap();
    let mut labelled = (*template).clone();
    labelled.metadata.labels = serde_json::from_value(beta).unwrap();
    fixture.templates.apply_watcher_event(&Event::Apply(labelled));
    let held = fixture.catalog.refresh(&fixture.stores).held;
    assert_eq!((held.len(), &held[0].part), (1, &Part::Version("1.0.0".to_owned())));
    assert!(fixture.sync(Drift::None).await.is_empty(), "it has the labels that were accepted");
    fixture.delete_template("alpha-1.0.0");
    assert!(fixture.sync(Drift::None).await.is_empty());
    fixture.meta("alpha", &[("regular", "2.0.0"), ("fast", "2.0.0"), ("rapid", "2.0.0")]);
    assert_eq!(fixture.sync(Drift::None).await, ["apply modulereleasemetas/alpha"], "channels go on");
    assert_eq!(fixture.runtime.ids(), ALL);
}

#[tokio::test]
async fn module_of_a_held_channel_without_a_template_stays_as_it_is() {
    let mut fixture = Fixture::synced().await;
    fixture.kymas(4);
    fixture.delete_template("alpha-2.0.0");
    assert_eq!(fixture.catalog.held().removals[0].part, Part::Channel("fast".to_owned()));
    assert!(fixture.sync(Drift::All).await.iter().all(|call| call.starts_with("list ")));
    assert_eq!(fixture.runtime.ids(), ALL);
    // A new runtime gets what KCP has, and no channel that points to nothing.
    let new = FakeRuntime::default();
    let key = KymaKey::new("kcp-system", "new");
    new.watch(true);
    fixture.catalog.sync(&key, &new.client(), &BTreeMap::new(), &fixture.stores, &Drift::None).await.unwrap();
    let channels = new.object("modulereleasemetas/alpha").unwrap()["spec"]["channels"].clone();
    assert_eq!(channels, json!([{"channel": "regular", "version": "1.0.0"}]));
    // The template comes back.
    fixture.template("alpha", "2.0.0");
    assert!(fixture.catalog.held().is_empty());
    fixture.catalog.sync(&key, &new.client(), &BTreeMap::new(), &fixture.stores, &Drift::None).await.unwrap();
    assert_eq!(new.ids(), ALL);
}

#[tokio::test]
async fn runtime_that_lacks_a_held_module_gets_it() {
    let mut fixture = Fixture::synced().await;
    fixture.kymas(4);
    let renamed = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
        "metadata": {"name": "omega", "namespace": "kcp-system"},
        "spec": {"moduleName": "omega", "channels": [{"channel": "regular", "version": "1.0.0"}],
                 "ocmComponentName": "kyma-project.io/module/other"}});
    fixture.metas.apply_watcher_event(&Event::Apply(read(renamed)));
    let _ = fixture.catalog.refresh(&fixture.stores);
    assert!(fixture.catalog.is_held("omega"));
    let before = fixture.spec("modulereleasemetas/omega");
    assert!(fixture.sync(Drift::None).await.is_empty());
    assert_eq!(fixture.spec("modulereleasemetas/omega"), before, "the runtime keeps what it has");

    let new = FakeRuntime::default();
    let key = KymaKey::new("kcp-system", "new");
    fixture.catalog.sync(&key, &new.client(), &BTreeMap::new(), &fixture.stores, &Drift::None).await.unwrap();
    let omega: Vec<_> = new.ids().into_iter().filter(|id| id.contains("omega")).collect();
    assert_eq!(omega, ["modulereleasemetas/omega", "moduletemplates/omega-1.0.0"]);
    new.remove("modulereleasemetas/omega");
    let deleted = agent_event("modulereleasemetas", "omega", "", "", Change::Deleted);
    fixture.catalog.sync(&key, &new.client(), &BTreeMap::new(), &fixture.stores, &Drift::of(deleted)).await.unwrap();
    assert!(new.ids().contains(&"modulereleasemetas/omega".to_owned()));
}

#[tokio::test]
async fn change_affects_only_classes_that_see_it() {
    let mut fixture = Fixture::new();
    let beta = BTreeMap::from([("operator.kyma-project.io/beta".to_owned(), "true".to_owned())]);
    let template = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
        "metadata": {"name": "alpha-3.0.0", "namespace": "kcp-system", "labels": beta},
        "spec": {"moduleName": "alpha", "version": "3.0.0", "descriptor": {}}}));
    fixture.templates.apply_watcher_event(&Event::Apply(template));
    let update = fixture.catalog.refresh(&fixture.stores);
    assert!(update.affects(&beta) && !update.affects(&BTreeMap::new()));
    let nothing = fixture.catalog.refresh(&fixture.stores);
    assert!(!nothing.affects(&beta) && nothing.left_out.is_empty());
}

#[test]
fn slot_of_a_new_channel_is_undecided_until_the_refresh() {
    let mut fixture = Fixture::new();
    let slot =
        |fixture: &Fixture| fixture.catalog.rollout_slot("uid", "alpha", VersionSource::Channel("rapid"), "2.0.0");
    assert_eq!(slot(&fixture), RolloutSlot::Now, "the channel does not exist");
    fixture.catalog.mark_undecided("omega");
    assert_eq!(slot(&fixture), RolloutSlot::Now, "another module changed");
    // A new release meta reaches the caches before the guard decides on it.
    fixture.catalog.mark_undecided("alpha");
    assert_eq!(slot(&fixture), RolloutSlot::Undecided);
    fixture.meta("alpha", &[("regular", "1.0.0"), ("fast", "2.0.0"), ("rapid", "2.0.0")]);
    assert!(matches!(slot(&fixture), RolloutSlot::After(_)));
    fixture.catalog.mark_undecided("alpha");
    assert!(matches!(slot(&fixture), RolloutSlot::After(_)), "the target is accepted");
}

#[test]
fn each_follower_of_a_moved_channel_has_its_own_delay() {
    let fixture = Fixture::new();
    let window = fixture.catalog.flags().module_upgrade_rollout_max_delay;
    // The second channel has no template yet.
    for channel in ["regular", "nowhere"] {
        let [one, other] = ["uid", "other"]
            .map(|uid| fixture.catalog.rollout_delay(uid, "alpha", VersionSource::Channel(channel)).unwrap());
        assert!(one != other && one.max(other) < window, "{one:?} {other:?}");
    }
}

#[test]
fn module_with_rings_waits_for_the_recorded_rollout() {
    let mut fixture = Fixture::new();
    let source = VersionSource::Channel("regular");
    let slot = |fixture: &Fixture, version: &str| fixture.catalog.rollout_slot("uid", "alpha", source, version);
    let with_rings = |channels: &[(&str, &str)], rings: &str| {
        let channels: Vec<_> =
            channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
        read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": "alpha", "namespace": "kcp-system", "annotations": {annotation::ROLLOUT_RINGS: rings}},
            "spec": {"moduleName": "alpha", "channels": channels, "ocmComponentName": "kyma-project.io/module/alpha"}}))
    };
    let apply = |fixture: &mut Fixture, meta| {
        fixture.metas.apply_watcher_event(&Event::Apply(meta));
        drop(fixture.catalog.refresh(&fixture.stores));
    };
    assert!(fixture.catalog.ring_targets().is_empty());
    apply(&mut fixture, with_rings(&[("regular", "1.0.0"), ("fast", "2.0.0")], "10%,100%"));
    assert_eq!(slot(&fixture, "1.0.0"), RolloutSlot::Undecided, "the channel is new");
    apply(&mut fixture, with_rings(&[("regular", "2.0.0"), ("fast", "2.0.0")], "10%,100%"));
    assert_eq!(slot(&fixture, "2.0.0"), RolloutSlot::Undecided, "its rollout is not recorded yet");
    assert_eq!(fixture.catalog.rollout_delay("uid", "alpha", source), None);
    let targets = fixture.catalog.ring_targets();
    let (key, target, policy) =
        targets.into_iter().find(|(key, ..)| key.channel.as_deref() == Some("regular")).unwrap();
    assert_eq!((&*target.version, target.from.as_deref(), policy.is_ok()), ("2.0.0", Some("1.0.0"), true));
    let rollout = rollout::Rollout::of_move(&key, None, &target, false);
    let publish = |fixture: &Fixture, admitted: &[&str]| {
        let admitted = Arc::new(admitted.iter().map(|uid| (*uid).to_owned()).collect());
        let entry = rollout::BoardEntry { rollout: rollout.clone(), admitted };
        fixture.catalog.rollouts().publish(BTreeMap::from([(key.clone(), entry)]));
    };
    publish(&fixture, &["other"]);
    assert_eq!(slot(&fixture, "2.0.0"), RolloutSlot::Ring);
    publish(&fixture, &["other", "uid"]);
    assert_eq!(slot(&fixture, "2.0.0"), RolloutSlot::Now);
    assert_eq!(slot(&fixture, "3.0.0"), RolloutSlot::Undecided, "the guard has not decided on it");
    // An invalid annotation admits no further runtime; without rings the delay holds.
    apply(&mut fixture, with_rings(&[("regular", "2.0.0"), ("fast", "2.0.0")], "many"));
    assert!(fixture.catalog.ring_targets().iter().all(|(.., policy)| policy.is_err()));
    publish(&fixture, &[]);
    assert_eq!(slot(&fixture, "2.0.0"), RolloutSlot::Ring);
    apply(&mut fixture, with_rings(&[("regular", "2.0.0"), ("fast", "2.0.0")], "off"));
    assert!(matches!(slot(&fixture, "2.0.0"), RolloutSlot::After(_)));
}

/// Syncs the runtime of a fixture with the catalog of another replica.
async fn sync_with(catalog: &Catalog, fixture: &Fixture) -> Vec<String> {
    let Fixture { key, runtime, stores, .. } = fixture;
    catalog.sync(key, &runtime.client(), &BTreeMap::new(), stores, &Drift::None).await.unwrap();
    runtime.calls()
}

fn releases(data: &BTreeMap<String, String>) -> ConfigMap {
    ConfigMap { data: Some(data.clone()), ..ConfigMap::default() }
}

/// Moves a channel of the module alpha, and returns the data to be stored.
fn moved_channel(fixture: &mut Fixture) -> BTreeMap<String, String> {
    fixture.template("alpha", "1.5.0");
    fixture.meta("alpha", &[("regular", "1.5.0"), ("fast", "2.0.0")]);
    fixture.catalog.pending_releases().unwrap()
}

#[tokio::test]
async fn holder_of_the_role_writes_over_what_another_writer_stored() {
    let mut fixture = Fixture::synced().await;
    let old = fixture.catalog.pending_releases().unwrap();
    fixture.catalog.releases_written(old.clone());
    let new = moved_channel(&mut fixture);
    fixture.catalog.releases_written(new.clone());
    assert!(!fixture.catalog.observe_releases(Some(&releases(&new))), "its own write");
    assert!(fixture.catalog.observe_releases(Some(&releases(&old))));
    let _ = fixture.catalog.refresh(&fixture.stores);
    assert_eq!(fixture.catalog.pending_releases(), Some(new));
}

#[tokio::test]
async fn first_decision_with_the_role_continues_the_last_one_that_is_stored() {
    let mut fixture = Fixture::synced().await;
    let role = FleetRole::released();
    let next = Catalog::new(Settings::default(), Metrics::default(), WriteBudgets::default(), role.clone());
    next.observe_releases(Some(&releases(&fixture.catalog.pending_releases().unwrap())));
    let _ = next.refresh(&fixture.stores);
    let mut data = moved_channel(&mut fixture);
    let regular = VersionSource::Channel("regular");
    let since = fixture.catalog.target("alpha", regular).unwrap().since.unwrap();
    let accepted = data["accepted"].replace(&since.to_string(), "7");
    data.insert("accepted".to_owned(), accepted);
    next.observe_releases(Some(&releases(&data)));
    role.acquire(WriteFence::default());
    let _ = next.refresh(&fixture.stores);
    assert_eq!(next.target("alpha", regular).unwrap().since, Some(7));
}

#[tokio::test]
async fn module_that_moved_before_the_start_is_reconciled_once_it_is_decided_on() {
    let mut fixture = Fixture::synced().await;
    let stored = fixture.catalog.pending_releases().unwrap();
    let _ = moved_channel(&mut fixture);
    let role = FleetRole::released();
    let next = Catalog::new(Settings::default(), Metrics::default(), WriteBudgets::default(), role.clone());
    next.observe_releases(Some(&releases(&stored)));
    let decided = || next.refresh(&fixture.stores).no_longer_held;
    assert_eq!(decided(), BTreeSet::new());
    role.acquire(WriteFence::default());
    assert_eq!(decided(), BTreeSet::from(["alpha".to_owned()]));
    assert_eq!(decided(), BTreeSet::new());
}

#[tokio::test]
async fn state_that_the_watch_has_not_shown_yet_is_not_replaced() {
    let mut fixture = Fixture::synced().await;
    fixture.managed_kymas(4);
    let stored = fixture.catalog.pending_releases().unwrap();
    let kcp = FakeApiServer::default();
    kcp.edit(&format!("configmaps/{RELEASES}"), |map| {
        *map = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": stored});
    });
    let next = Catalog::deciding(Settings::default(), Metrics::default(), WriteBudgets::default());
    let _ = next.refresh(&fixture.stores);
    assert!(next.lost().is_some());
    assert!(!next.persist_releases(&kcp.client(), "kcp-system").await && kcp.writes().is_empty());
    let _ = next.refresh(&fixture.stores);
    assert_eq!(next.lost(), None);
    assert!(next.persist_releases(&kcp.client(), "kcp-system").await);
}

#[tokio::test]
async fn only_a_decision_is_stored_and_reported() {
    let mut fixture = Fixture::synced().await;
    fixture.managed_kymas(4);
    let role = FleetRole::released();
    let next = Catalog::new(Settings::default(), Metrics::default(), WriteBudgets::default(), role.clone());
    next.observe_releases(None);
    assert!(!next.refresh(&fixture.stores).is_decision && next.lost().is_some());
    role.acquire(WriteFence::default());
    assert_eq!(next.pending_releases(), None, "the role came after the snapshot");
    let update = next.refresh(&fixture.stores);
    assert!(update.is_decision && update.lost.is_some() && next.pending_releases().is_some());
    assert!(next.refresh(&fixture.stores).lost.is_none(), "it is reported");
}

#[tokio::test]
async fn replica_without_the_role_takes_nothing_away_before_the_decision_is_stored() {
    let mut fixture = Fixture::synced().await;
    // So few that the guard accepts every removal at once.
    fixture.kymas(2);
    let role = FleetRole::released();
    let follower = Catalog::new(Settings::default(), Metrics::default(), WriteBudgets::default(), role.clone());
    let observe = |data: &BTreeMap<String, String>| {
        follower.observe_releases(Some(&ConfigMap { data: Some(data.clone()), ..ConfigMap::default() }))
    };
    let _ = follower.refresh(&fixture.stores);
    assert!(follower.lost().is_some() && follower.is_held("alpha"), "nothing is stored yet");
    let stored = fixture.catalog.pending_releases().unwrap();
    assert!(observe(&stored));
    let _ = follower.refresh(&fixture.stores);
    assert_eq!((follower.lost(), follower.is_held("alpha"), follower.awaits_decision()), (None, false, false));
    assert!(!observe(&stored), "it is the same");

    fixture.template("alpha", "1.5.0");
    fixture.meta("alpha", &[("regular", "1.5.0"), ("fast", "2.0.0")]);
    let _ = fixture.delete_meta("omega");
    let _ = follower.refresh(&fixture.stores);
    assert_eq!((fixture.catalog.is_held("omega"), follower.is_held("omega")), (false, true));
    let regular = VersionSource::Channel("regular");
    let slot = || follower.rollout_slot("uid", "alpha", regular, "1.5.0");
    assert_eq!((slot(), follower.awaits_decision()), (RolloutSlot::Undecided, true));
    let calls = sync_with(&follower, &fixture).await;
    assert!(calls.iter().all(|call| !call.starts_with("delete ")), "{calls:?}");

    assert!(observe(&fixture.catalog.pending_releases().unwrap()));
    let update = follower.refresh(&fixture.stores);
    assert_eq!((update.no_longer_held, follower.awaits_decision()), (BTreeSet::from(["omega".to_owned()]), false));
    assert!(matches!(slot(), RolloutSlot::After(_)));
    assert_eq!(follower.target("alpha", regular), fixture.catalog.target("alpha", regular), "with the same time");
    let calls = sync_with(&follower, &fixture).await;
    assert_eq!(calls, ["delete modulereleasemetas/omega", "delete moduletemplates/omega-1.0.0"]);

    // A removal that waits for its confirmation is decided.
    fixture.managed_kymas(4);
    let held = fixture.delete_meta("alpha").held;
    assert_eq!(held.len(), 1);
    let _ = follower.refresh(&fixture.stores);
    assert!(follower.awaits_decision());
    assert!(observe(&fixture.catalog.pending_releases().unwrap()));
    let _ = follower.refresh(&fixture.stores);
    assert_eq!((follower.awaits_decision(), follower.held().removals), (false, held));

    // With the role it decides by the state that it has followed.
    role.acquire(WriteFence::default());
    fixture.meta("alpha", &[("regular", "1.5.0"), ("fast", "2.0.0")]);
    let _ = follower.refresh(&fixture.stores);
    assert!(follower.held().is_empty() && !follower.is_held("alpha"));
    assert_eq!(follower.pending_releases(), fixture.catalog.pending_releases());
}
