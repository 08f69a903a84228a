//! Catalog sync against a fake runtime.

mod fake;
mod faults;
mod history;

use kube::runtime::{
    reflector::{self, Lookup, ObjectRef, Store, store::Writer},
    watcher::Event,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{Kyma, ModuleReleaseMeta, ModuleTemplate},
    event::{Change, Object, Subject},
};

use self::fake::Fake;
use super::*;

/// A control plane's catalog, a runtime, and the sync between them.
struct Bed {
    stores: Stores,
    templates: Writer<ModuleTemplate>,
    metas: Writer<ModuleReleaseMeta>,
    kymas: Writer<Kyma>,
    catalog: Catalog,
    runtime: Fake,
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

impl Bed {
    /// Two modules: `alpha` with the channels fast and regular, `omega` with regular.
    fn new() -> Self {
        let mut bed = Self::empty(BTreeSet::new());
        for (module, version) in [("alpha", "1.0.0"), ("alpha", "2.0.0"), ("omega", "1.0.0")] {
            bed.template(module, version);
        }
        bed.meta("alpha", &[("regular", "1.0.0"), ("fast", "2.0.0")]);
        bed.meta("omega", &[("regular", "1.0.0")]);
        bed
    }

    fn empty(restricted_modules: BTreeSet<String>) -> Self {
        let ((templates, templates_writer), (metas, metas_writer)) = (store(), store());
        let (kymas, kymas_writer) = store();
        let stores = Stores {
            kymas,
            templates,
            release_metas: metas,
            manifests: store().0,
            watchers: store().0,
            secrets: store().0,
        };
        let settings = Settings { restricted_modules, ..Settings::default() };
        let catalog = Catalog::new(settings, Metrics::default());
        let key = KymaKey::new("kcp-system", "k");
        let (templates, metas, kymas) = (templates_writer, metas_writer, kymas_writer);
        Self { stores, templates, metas, kymas, catalog, runtime: Fake::default(), key }
    }

    /// So many Kymas in KCP.
    fn kymas(&mut self, count: usize) {
        for n in 0..count {
            let kyma = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": format!("k{n}"), "namespace": "kcp-system"}, "spec": {"channel": "regular"}}));
            self.kymas.apply_watcher_event(&Event::Apply(kyma));
        }
    }

    fn delete_template(&mut self, name: &str) {
        let template = self.stores.templates.get(&ObjectRef::new(name).within("kcp-system")).unwrap();
        self.templates.apply_watcher_event(&Event::Delete((*template).clone()));
        drop(self.catalog.renew(&self.stores));
    }

    fn delete_meta(&mut self, name: &str) -> Renewed {
        let meta = self.stores.release_metas.get(&ObjectRef::new(name).within("kcp-system")).unwrap();
        self.metas.apply_watcher_event(&Event::Delete((*meta).clone()));
        self.catalog.renew(&self.stores)
    }

    fn template(&mut self, module: &str, version: &str) {
        let template = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
            "metadata": {"name": format!("{module}-{version}"), "namespace": "kcp-system", "resourceVersion": "5", "uid": "kcp",
                         "labels": {"team": "x"}, "finalizers": ["kcp/only"], "generation": 3},
            "spec": {"moduleName": module, "version": version, "mandatory": false, "descriptor": {"any": [1, null]}}}));
        self.templates.apply_watcher_event(&Event::Apply(template));
        drop(self.catalog.renew(&self.stores));
    }

    fn meta(&mut self, module: &str, channels: &[(&str, &str)]) {
        let channels: Vec<_> =
            channels.iter().map(|(channel, version)| json!({"channel": channel, "version": version})).collect();
        let meta = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"name": module, "namespace": "kcp-system", "resourceVersion": "5"},
            "spec": {"moduleName": module, "channels": channels, "ocmComponentName": format!("kyma-project.io/module/{module}")}}));
        self.metas.apply_watcher_event(&Event::Apply(meta));
        drop(self.catalog.renew(&self.stores));
    }

    async fn try_sync(&self, drift: Drift) -> Result<Synced, SyncError> {
        self.catalog.sync(&self.key, &self.runtime.client(), &BTreeMap::new(), &self.stores, &drift).await
    }

    /// Syncs and tells the calls, sorted within nothing: in the order they were made.
    async fn sync(&self, drift: Drift) -> Vec<String> {
        self.try_sync(drift).await.unwrap();
        self.runtime.calls()
    }

    /// A bed whose first sync is over.
    async fn synced() -> Self {
        let bed = Self::new();
        bed.sync(Drift::None).await;
        bed
    }

    /// The event that the runtime's agent would send of an object as it is now.
    fn event(&self, id: &str, change: Change) -> Drift {
        let object = self.runtime.object(id).unwrap_or_default();
        let text = |member: &str| object["metadata"][member].as_str().unwrap_or_default();
        let (resource, name) = id.split_once('/').unwrap();
        Drift::of(told_of(resource, name, text("uid"), text("resourceVersion"), change))
    }

    fn spec(&self, id: &str) -> Value {
        self.runtime.object(id).unwrap()["spec"].clone()
    }
}

/// An event of the runtime's agent.
fn told_of(resource: &str, name: &str, uid: &str, resource_version: &str, change: Change) -> Object {
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
async fn the_first_sync_brings_templates_before_release_metas() {
    let bed = Bed::new();
    let calls = bed.sync(Drift::None).await;
    assert_eq!(calls[..2], ["list moduletemplates", "list modulereleasemetas"]);
    let puts = &calls[2..];
    assert_eq!(puts.len(), 5);
    assert!(puts[..3].iter().all(|call| call.starts_with("apply moduletemplates/")), "{puts:?}");
    assert!(puts[3..].iter().all(|call| call.starts_with("apply modulereleasemetas/")), "{puts:?}");
    assert_eq!(bed.runtime.ids(), ALL);
    let template = bed.runtime.object("moduletemplates/alpha-1.0.0").unwrap();
    assert_eq!(template["metadata"]["labels"], json!({"team": "x", "operator.kyma-project.io/managed-by": "kyma"}));
    assert!(template["metadata"].get("finalizers").is_none());
    assert_ne!(template["metadata"]["uid"], "kcp");
    assert_eq!(template["spec"]["descriptor"], json!({"any": [1, null]}));
}

#[tokio::test]
async fn a_pass_without_news_makes_no_call_and_a_new_life_only_reads() {
    let bed = Bed::synced().await;
    assert!(bed.sync(Drift::None).await.is_empty());
    drop(bed.catalog.renew(&bed.stores));
    assert!(bed.sync(Drift::None).await.is_empty());
    assert_eq!(bed.runtime.inventory_calls(), ["get", "create", "replace"], "of the first sync");
    bed.catalog.forget(&bed.key);
    assert!(bed.sync(Drift::None).await.is_empty(), "what is written down is enough");
    assert_eq!(bed.runtime.inventory_calls(), ["get"]);
    assert!(bed.sync(Drift::None).await.is_empty());
    assert!(bed.runtime.inventory_calls().is_empty());
    assert!(bed.sync(Drift::All).await.iter().all(|call| call.starts_with("list ")));
}

#[tokio::test]
async fn a_moved_channel_is_exactly_one_apply_and_its_echo_is_nothing() {
    let mut bed = Bed::synced().await;
    bed.meta("alpha", &[("regular", "2.0.0"), ("fast", "2.0.0")]);
    bed.runtime.inventory_calls();
    assert_eq!(bed.sync(Drift::None).await, ["apply modulereleasemetas/alpha"]);
    assert_eq!(bed.runtime.inventory_calls(), ["replace"]);
    assert!(bed.sync(bed.event("modulereleasemetas/alpha", Change::Spec)).await.is_empty());
    // The version that no channel points to any more can be installed until its template goes.
    bed.delete_template("alpha-1.0.0");
    assert_eq!(bed.sync(Drift::None).await, ["delete moduletemplates/alpha-1.0.0"]);
    assert!(bed.sync(bed.event("moduletemplates/alpha-1.0.0", Change::Deleted)).await.is_empty());

    bed.template("omega", "1.1.0");
    assert_eq!(bed.sync(Drift::None).await, ["apply moduletemplates/omega-1.1.0"]);
    bed.meta("alpha", &[("regular", "2.0.0"), ("fast", "2.0.0"), ("rapid", "2.0.0")]);
    assert_eq!(bed.sync(Drift::None).await, ["apply modulereleasemetas/alpha"]);
    bed.meta("alpha", &[("rapid", "2.0.0")]);
    assert_eq!(bed.sync(Drift::None).await, ["apply modulereleasemetas/alpha"]);
    assert_eq!(bed.spec("modulereleasemetas/alpha")["channels"], json!([{"channel": "rapid", "version": "2.0.0"}]));
}

#[tokio::test]
async fn edits_are_undone_by_an_apply() {
    let bed = Bed::synced().await;
    let before = bed.spec("modulereleasemetas/alpha");
    bed.runtime.edit("modulereleasemetas/alpha", |object| object["spec"]["channels"][0]["version"] = json!("9.9.9"));
    let calls = bed.sync(bed.event("modulereleasemetas/alpha", Change::Spec)).await;
    assert_eq!(calls, ["get modulereleasemetas/alpha", "apply modulereleasemetas/alpha"]);
    assert_eq!(bed.spec("modulereleasemetas/alpha"), before);
    assert!(bed.sync(bed.event("modulereleasemetas/alpha", Change::Spec)).await.is_empty());

    bed.runtime.edit("moduletemplates/alpha-1.0.0", |object| {
        object["metadata"]["labels"].as_object_mut().unwrap().remove("operator.kyma-project.io/managed-by");
    });
    // An agent that selects by that label sees the object leave.
    let calls = bed.sync(bed.event("moduletemplates/alpha-1.0.0", Change::Deleted)).await;
    assert_eq!(calls, ["get moduletemplates/alpha-1.0.0", "apply moduletemplates/alpha-1.0.0"]);
    let labels = bed.runtime.object("moduletemplates/alpha-1.0.0").unwrap()["metadata"]["labels"].clone();
    assert_eq!(labels["operator.kyma-project.io/managed-by"], "kyma");
}

#[tokio::test]
async fn additions_are_removed_by_a_put_and_others_annotations_stay() {
    let bed = Bed::synced().await;
    let before = bed.spec("modulereleasemetas/alpha");
    bed.runtime.edit("modulereleasemetas/alpha", |object| {
        object["spec"]["channels"].as_array_mut().unwrap().push(json!({"channel": "mine", "version": "1.0.0"}));
        object["metadata"]["labels"]["mine"] = json!("1");
        object["metadata"]["annotations"] = json!({"mine": "1"});
    });
    let calls = bed.sync(bed.event("modulereleasemetas/alpha", Change::Spec)).await;
    let repair = ["get modulereleasemetas/alpha", "apply modulereleasemetas/alpha", "put modulereleasemetas/alpha"];
    assert_eq!(calls, repair);
    let object = bed.runtime.object("modulereleasemetas/alpha").unwrap();
    assert_eq!(object["spec"], before);
    assert!(object["metadata"]["labels"].get("mine").is_none());
    assert_eq!(object["metadata"]["annotations"]["mine"], "1");
    assert!(bed.sync(bed.event("modulereleasemetas/alpha", Change::Spec)).await.is_empty());
}

#[tokio::test]
async fn what_was_deleted_comes_back() {
    let bed = Bed::synced().await;
    bed.runtime.remove("modulereleasemetas/omega");
    let calls = bed.sync(bed.event("modulereleasemetas/omega", Change::Deleted)).await;
    assert_eq!(calls, ["get modulereleasemetas/omega", "apply modulereleasemetas/omega"]);
    bed.runtime.remove("moduletemplates/omega-1.0.0");
    let calls = bed.sync(Drift::All).await;
    assert_eq!(
        calls.iter().filter(|call| !call.starts_with("list ")).collect::<Vec<_>>(),
        ["apply moduletemplates/omega-1.0.0"]
    );
}

#[tokio::test]
async fn ours_and_unwanted_goes_and_the_users_own_stays() {
    let bed = Bed::new();
    let incumbents = |object: &mut Value| object["metadata"]["managedFields"] = json!([{"manager": "catalog-sync"}]);
    bed.runtime.edit("moduletemplates/old-1.0.0", incumbents);
    bed.runtime.edit("modulereleasemetas/old", incumbents);
    bed.runtime.edit("moduletemplates/users-1.0.0", |object| object["spec"] = json!({"own": true}));
    let calls = bed.sync(Drift::None).await;
    let deletes: Vec<_> = calls.iter().filter(|call| call.starts_with("delete ")).collect();
    assert_eq!(deletes, ["delete modulereleasemetas/old", "delete moduletemplates/old-1.0.0"]);
    assert!(bed.runtime.object("moduletemplates/users-1.0.0").is_some());

    let calls = bed.sync(bed.event("moduletemplates/users-1.0.0", Change::Spec)).await;
    assert_eq!(calls, ["get moduletemplates/users-1.0.0"]);
    bed.catalog.remove_all(&bed.key, &bed.runtime.client()).await.unwrap();
    assert_eq!(bed.runtime.ids(), ["moduletemplates/users-1.0.0"]);
    let calls = bed.runtime.calls();
    let deletes: Vec<_> = calls.iter().filter(|call| call.starts_with("delete ")).collect();
    assert!(deletes[..2].iter().all(|call| call.starts_with("delete modulereleasemetas/")), "{deletes:?}");
}

#[tokio::test]
async fn an_object_that_took_the_name_of_ours_is_not_deleted() {
    let mut bed = Bed::synced().await;
    bed.runtime.remove("moduletemplates/alpha-1.0.0");
    bed.runtime.edit("moduletemplates/alpha-1.0.0", |object| object["spec"] = json!({"own": true}));
    bed.meta("alpha", &[("regular", "2.0.0")]);
    bed.delete_template("alpha-1.0.0");
    assert_eq!(bed.sync(Drift::None).await, ["apply modulereleasemetas/alpha", "delete moduletemplates/alpha-1.0.0"]);
    assert_eq!(bed.spec("moduletemplates/alpha-1.0.0"), json!({"own": true}));
    assert_eq!(bed.sync(Drift::None).await, ["get moduletemplates/alpha-1.0.0"]);
    assert!(bed.sync(Drift::None).await.is_empty());
}

#[tokio::test]
async fn a_refused_object_stops_only_what_depends_on_it() {
    let bed = Bed::new();
    bed.runtime.refuse("moduletemplates/alpha-2.0.0", true);
    let error = bed.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(error.to_string(), "apply moduletemplates/alpha-2.0.0; 1 wait for them");
    assert_eq!(
        bed.runtime.ids(),
        ["modulereleasemetas/omega", "moduletemplates/alpha-1.0.0", "moduletemplates/omega-1.0.0"]
    );
    bed.runtime.calls();

    bed.runtime.refuse("moduletemplates/alpha-2.0.0", false);
    let calls = bed.sync(Drift::None).await;
    // What failed is read again, and only that.
    assert_eq!(calls.len(), 4, "{calls:?}");
    assert_eq!(calls[2..], ["apply moduletemplates/alpha-2.0.0", "apply modulereleasemetas/alpha"]);
    assert_eq!(bed.runtime.ids(), ALL);
}

#[tokio::test]
async fn a_template_that_is_there_in_an_older_form_holds_nothing_back() {
    let bed = Bed::synced().await;
    bed.runtime.edit("moduletemplates/alpha-2.0.0", |object| object["spec"]["version"] = json!("0.0.1"));
    bed.runtime.edit("modulereleasemetas/alpha", |object| object["spec"]["channels"] = json!([]));
    bed.runtime.refuse("moduletemplates/alpha-2.0.0", true);
    let error = bed.try_sync(Drift::All).await.unwrap_err();
    assert_eq!(error.to_string(), "apply moduletemplates/alpha-2.0.0");
    assert!(bed.runtime.calls().contains(&"apply modulereleasemetas/alpha".to_owned()));
}

#[tokio::test]
async fn templates_stay_while_a_release_meta_may_point_to_them() {
    let mut bed = Bed::synced().await;
    bed.runtime.refuse("modulereleasemetas/alpha", true);
    bed.meta("alpha", &[("regular", "2.0.0")]);
    bed.delete_template("alpha-1.0.0");
    bed.meta("omega", &[]);
    let error = bed.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(error.to_string(), "apply modulereleasemetas/alpha; 1 wait for them");
    let calls = bed.runtime.calls();
    let expected =
        ["apply modulereleasemetas/alpha", "delete modulereleasemetas/omega", "delete moduletemplates/omega-1.0.0"];
    assert_eq!(calls, expected);
    bed.runtime.refuse("modulereleasemetas/alpha", false);
    let calls = bed.sync(Drift::None).await;
    assert_eq!(calls[2..], ["apply modulereleasemetas/alpha", "delete moduletemplates/alpha-1.0.0"]);
}

#[tokio::test]
async fn a_kind_that_is_not_served_yet_is_a_passing_error_and_nothing_is_written() {
    let bed = Bed::new();
    bed.runtime.unserve("modulereleasemetas", true);
    let error = bed.try_sync(Drift::None).await.unwrap_err();
    assert!(matches!(error, SyncError::List { kind: desired::Kind::ReleaseMeta, .. }), "{error:?}");
    assert!(bed.runtime.ids().is_empty());
    bed.runtime.calls();
    bed.runtime.unserve("modulereleasemetas", false);
    assert_eq!(bed.sync(Drift::None).await.len(), 7);
    // The definition is deleted under our feet: all of it is looked at again.
    bed.runtime.unserve("modulereleasemetas", true);
    bed.runtime.remove("modulereleasemetas/alpha");
    bed.try_sync(bed.event("modulereleasemetas/alpha", Change::Deleted)).await.unwrap_err();
    bed.runtime.unserve("modulereleasemetas", false);
    bed.runtime.calls();
    assert_eq!(bed.sync(Drift::None).await.last().unwrap(), "apply modulereleasemetas/alpha");
}

#[tokio::test]
async fn a_sync_that_was_forgotten_meanwhile_leaves_no_memory() {
    let bed = Bed::synced().await;
    let (pass, inventory) = bed.catalog.begin(&bed.key);
    bed.catalog.forget(&bed.key);
    bed.catalog.end(&bed.key, pass, inventory.unwrap(), Ok(Synced::default())).unwrap();
    bed.runtime.inventory_calls();
    assert!(bed.sync(Drift::None).await.is_empty());
    assert_eq!(bed.runtime.inventory_calls(), ["get"]);
}

#[tokio::test]
async fn a_lost_inventory_is_made_anew_of_what_is_there() {
    let bed = Bed::synced().await;
    let before = bed.runtime.inventory();
    assert_eq!(before.len(), 5);
    bed.runtime.remove("configmaps/tidewatch-catalog");
    bed.catalog.forget(&bed.key);
    bed.runtime.inventory_calls();
    assert!(bed.sync(Drift::None).await.iter().all(|call| call.starts_with("list ")));
    assert_eq!((bed.runtime.inventory_calls(), bed.runtime.inventory()), (vec!["get", "create"], before.clone()));

    bed.runtime.edit("configmaps/tidewatch-catalog", |map| map["data"]["objects"] = json!("nonsense"));
    assert!(bed.sync(Drift::All).await.iter().all(|call| call.starts_with("list ")));
    assert_eq!(bed.runtime.inventory(), before);
}

#[tokio::test]
async fn what_the_incumbent_made_is_taken_over_as_it_is() {
    let old = Bed::synced().await;
    let new = Bed::new();
    for (id, object) in old.runtime.objects() {
        new.runtime.edit(&id, |copy| *copy = object);
    }
    let uids = |bed: &Bed| -> Vec<_> {
        bed.runtime.objects().into_values().map(|object| object["metadata"]["uid"].clone()).collect()
    };
    let before = uids(&new);
    assert!(new.sync(Drift::None).await.iter().all(|call| call.starts_with("list ")));
    assert_eq!((uids(&new), new.runtime.inventory().len()), (before, 5));
}

#[tokio::test]
async fn who_finds_another_one_at_work_begins_anew() {
    let mut bed = Bed::synced().await;
    bed.runtime.edit("configmaps/tidewatch-catalog", |map| map["metadata"]["labels"] = json!({"another": "receiver"}));
    bed.template("omega", "1.1.0");
    let error = bed.try_sync(Drift::None).await.unwrap_err();
    assert!(matches!(error, SyncError::Inventory(_)) && error.is_of_catalog_alone(), "{error:?}");
    assert!(bed.runtime.calls().is_empty(), "it grows before anything is made");
    assert_eq!(bed.sync(Drift::None).await, ["apply moduletemplates/omega-1.1.0"]);
}

#[tokio::test]
async fn a_runtime_that_takes_no_inventory_gets_its_catalog_all_the_same() {
    let bed = Bed::new();
    bed.runtime.refuse("configmaps", true);
    let error = bed.try_sync(Drift::None).await.unwrap_err();
    assert_eq!(error.words(), "apply the inventory: Forbidden (403 Forbidden)");
    assert!(error.is_of_catalog_alone());
    assert_eq!(bed.runtime.ids(), ALL);
}

#[tokio::test]
async fn a_removal_from_too_many_waits_until_it_is_confirmed() {
    let mut bed = Bed::synced().await;
    bed.kymas(4);
    let renewed = bed.delete_meta("omega");
    let held = renewed.held.clone().unwrap();
    assert_eq!((held.runtimes, held.of), (4, 4));
    assert!(bed.catalog.holds("omega") && !bed.catalog.holds("alpha"));
    bed.catalog.moved("alpha");
    assert!(bed.catalog.holds("alpha"), "nobody has ruled on it");
    let renewed = bed.catalog.renew(&bed.stores);
    assert_eq!((renewed.held, renewed.released), (None, BTreeSet::new()), "that was told, and holds");
    assert!(bed.catalog.holds("omega") && !bed.catalog.holds("alpha") && !bed.catalog.is_spent());
    assert!(bed.sync(Drift::None).await.is_empty());
    // Nobody writes to what is held, and what is not goes on.
    bed.runtime.edit("moduletemplates/omega-1.0.0", |object| object["spec"]["info"] = json!({"edited": true}));
    let calls = bed.sync(bed.event("moduletemplates/omega-1.0.0", Change::Spec)).await;
    assert_eq!(calls, ["get moduletemplates/omega-1.0.0"]);
    bed.meta("alpha", &[("regular", "2.0.0"), ("fast", "2.0.0")]);
    assert_eq!(bed.sync(Drift::None).await, ["apply modulereleasemetas/alpha"]);
    assert!(bed.sync(Drift::All).await.iter().all(|call| call.starts_with("list ")));
    assert_eq!(bed.catalog.held(), Some(held.clone()), "it is the same change");

    // Another process knows of it by what is written down.
    let data = bed.catalog.unwritten_releases().unwrap();
    assert!(data["held"].contains(&held.change));
    let mut map = ConfigMap { data: Some(data), ..ConfigMap::default() };
    let next = Catalog::new(Settings::default(), Metrics::default());
    next.take_releases(Some(&map));
    drop(next.snapshot(&bed.stores));
    assert_eq!(next.held().map(|held| held.change), Some(held.change.clone()));

    let confirm = "operator.kyma-project.io/tidewatch-confirm".to_owned();
    map.metadata.annotations = Some(BTreeMap::from([(confirm, held.change)]));
    assert!(bed.catalog.take_releases(Some(&map)));
    let renewed = bed.catalog.renew(&bed.stores);
    assert_eq!((renewed.held, renewed.released), (None, BTreeSet::from(["omega".to_owned()])));
    let calls = bed.sync(Drift::None).await;
    assert_eq!(calls, ["delete modulereleasemetas/omega", "delete moduletemplates/omega-1.0.0"]);
    let data = bed.catalog.unwritten_releases().unwrap();
    assert!(!data.contains_key("held") && bed.catalog.is_spent());
    bed.catalog.wrote_releases(data);
    assert!(!bed.catalog.is_spent(), "it is taken off");
}

#[tokio::test]
async fn a_change_concerns_those_alone_who_see_it() {
    let mut bed = Bed::new();
    let beta = BTreeMap::from([("operator.kyma-project.io/beta".to_owned(), "true".to_owned())]);
    let template = read(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleTemplate",
        "metadata": {"name": "alpha-3.0.0", "namespace": "kcp-system", "labels": beta},
        "spec": {"moduleName": "alpha", "version": "3.0.0", "descriptor": {}}}));
    bed.templates.apply_watcher_event(&Event::Apply(template));
    let renewed = bed.catalog.renew(&bed.stores);
    assert!(renewed.concerns(&beta) && !renewed.concerns(&BTreeMap::new()));
    let nothing = bed.catalog.renew(&bed.stores);
    assert!(!nothing.concerns(&beta) && nothing.left_out.is_empty());
}

#[test]
fn a_channel_that_nobody_has_ruled_on_is_nobodys_turn() {
    let mut bed = Bed::new();
    let turn = |bed: &Bed| bed.catalog.turn("uid", "alpha", "rapid", "2.0.0");
    assert_eq!(turn(&bed), Turn::Now, "there is none");
    bed.catalog.moved("omega");
    assert_eq!(turn(&bed), Turn::Now, "that is another one's");
    // As a release meta comes: caches know of it before it is ruled on.
    bed.catalog.moved("alpha");
    assert_eq!(turn(&bed), Turn::Undecided);
    bed.meta("alpha", &[("regular", "1.0.0"), ("fast", "2.0.0"), ("rapid", "2.0.0")]);
    assert!(matches!(turn(&bed), Turn::After(_)));
    bed.catalog.moved("alpha");
    assert!(matches!(turn(&bed), Turn::After(_)), "that is decided");
}

#[test]
fn who_follows_a_moved_channel_has_a_time_of_its_own_wherever_it_points() {
    let bed = Bed::new();
    let window = Duration::from_secs(bed.catalog.flags().module_upgrade_rollout_max_delay_seconds.into());
    // The second one leads nowhere: its template comes later.
    for channel in ["regular", "nowhere"] {
        let [one, other] = ["uid", "other"].map(|uid| bed.catalog.roll_out_delay(uid, "alpha", channel));
        assert!(one != other && one.max(other) < window, "{one:?} {other:?}");
    }
}
