//! Mandatory modules beside the user's selection.

use tidewatch_api::names::{finalizer, label};
use tidewatch_select::kyma::build;

use super::*;

/// The release meta of the module `keda`, which users select.
pub(super) fn keda() -> Value {
    let spec = json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda",
        "channels": [{"channel": "regular", "version": "1.0.0"}]});
    of_kyma_group("ModuleReleaseMeta", "keda", spec)
}

/// The release meta of the mandatory module `warden`.
pub(super) fn warden() -> Value {
    let spec = json!({"moduleName": "warden", "ocmComponentName": "kyma-project.io/module/warden",
        "mandatory": {"version": "1.0.0"}});
    let mut meta = of_kyma_group("ModuleReleaseMeta", "warden", spec);
    meta["metadata"]["finalizers"] = json!([finalizer::MANDATORY_MODULE]);
    meta
}

fn deleting(mut meta: Value) -> Value {
    meta["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    meta
}

impl Fixture {
    /// A fixture whose first reconcile has ended, and where `warden` is mandatory since.
    pub(super) async fn with_mandatory() -> Self {
        let mut fixture = Self::settled().await;
        let template = |module: &str| {
            let spec = json!({"moduleName": module, "version": "1.0.0", "descriptor": {}});
            of_kyma_group("ModuleTemplate", &format!("{module}-1.0.0"), spec)
        };
        fixture.ctx.stores.templates = filled::<ModuleTemplate>(&[template("keda"), template("warden")]).0;
        fixture.set_metas(&[keda(), warden()]);
        fixture
    }

    pub(super) fn set_metas(&mut self, metas: &[Value]) {
        self.set_release_metas(filled::<ModuleReleaseMeta>(metas).0);
    }

    /// Id and content of the Manifest of a module.
    pub(super) fn manifest_of(&self, module: &str) -> Option<(String, Value)> {
        let found = self.kcp.all("manifests").into_iter();
        let mut found = found.filter(|found| found["metadata"]["labels"][label::MODULE_NAME] == module);
        found.next().map(|found| (format!("manifests/{}", found["metadata"]["name"].as_str().unwrap()), found))
    }
}

/// `acceptance.md` C2 54: installed with an owner reference, and in no status; the Kyma is Ready at once.
#[tokio::test]
async fn mandatory_module_is_installed_and_in_no_status_or_catalog() {
    let mut fixture = Fixture::with_mandatory().await;
    let works = WorkSet::of(&[Work::Kyma, Work::Catalog]);
    assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome::ended(works));
    let (id, manifest) = fixture.manifest_of("warden").unwrap();
    let labels = json!({
        label::MANAGED_BY: "lifecycle-manager", label::KYMA_NAME: "k", label::MODULE_NAME: "warden",
        label::MANDATORY_MODULE: "true"
    });
    assert_eq!(manifest["metadata"]["labels"], labels);
    assert_eq!(manifest["metadata"]["ownerReferences"][0]["kind"], "Kyma");
    assert_eq!(
        (&manifest["spec"]["version"], &manifest["spec"]["customResourcePolicy"]),
        (&json!("1.0.0"), &json!("CreateAndDelete"))
    );
    let is_shown = |fixture: &Fixture| {
        let texts = [fixture.status(), fixture.shown()].map(|status| status.to_string());
        texts.iter().any(|text| text.contains("warden"))
    };
    assert!(!is_shown(&fixture));
    assert_eq!((&fixture.status()["state"], &fixture.shown()["state"]), (&json!("Ready"), &json!("Ready")));
    assert!(fixture.runtime.objects().keys().all(|id| !id.contains("warden")));
    fixture.forget_calls();
    fixture.reconcile(works, Drift::None).await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));

    fixture.kcp.edit(&id, |manifest| manifest["status"] = json!({"state": "Error"}));
    fixture.kyma().await;
    assert_eq!(
        (&fixture.status()["state"], is_shown(&fixture)),
        (&json!("Ready"), false),
        "its state is not the Kyma's"
    );
}

/// `acceptance.md` C2 55.
#[tokio::test]
async fn skipped_kyma_gets_no_mandatory_module() {
    let mut fixture = Fixture::with_mandatory().await;
    let set = |fixture: &Fixture, value: Value| {
        fixture.kcp.edit("kymas/k", |kyma| kyma["metadata"]["labels"][label::SKIP_RECONCILIATION] = value)
    };
    set(&fixture, json!("true"));
    fixture.kyma().await;
    assert_eq!(fixture.manifest_of("warden"), None);
    set(&fixture, json!("false"));
    fixture.kyma().await;
    assert!(fixture.manifest_of("warden").is_some());
}

#[tokio::test]
async fn mandatory_modules_and_the_selection_do_not_affect_each_other() {
    let mut fixture = Fixture::with_mandatory().await;
    let kyma = WorkSet::of(&[Work::Kyma]);
    fixture.enable();
    let name = build::name("k", "kyma-project.io/module/warden", "warden");
    fixture.kcp.refuse(&format!("PATCH manifests/{name}"), 500);
    let outcome = fixture.kyma().await;
    assert_eq!((outcome.failed, outcome.ended), (kyma, WorkSet::EMPTY), "it is tried again");
    assert_eq!(fixture.manifest_of("warden"), None);
    assert!(fixture.manifest_of("keda").is_some());
    assert_eq!(
        (&fixture.status()["state"], &fixture.status()["modules"][0]["name"]),
        (&json!("Processing"), &json!("keda"))
    );
    fixture.kcp.refuse_nothing();
    fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["channel"] = json!("none"));
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(kyma));
    assert_eq!(fixture.status()["state"], "Error");
    assert!(fixture.manifest_of("warden").is_some(), "an invalid selection holds up no mandatory module");
    fixture.kyma().await;
    assert!(!fixture.manifest_of("keda").unwrap().1["metadata"]["deletionTimestamp"].is_string());
}

#[tokio::test]
async fn edited_mandatory_manifest_is_reset_by_a_full_reconcile() {
    let mut fixture = Fixture::with_mandatory().await;
    fixture.kyma().await;
    let (id, manifest) = fixture.manifest_of("warden").unwrap();
    assert!(fixture.reconcile(WorkSet::STATUS, Drift::None).await.follow_up.is_empty());
    fixture.kcp.edit(&id, |manifest| manifest["spec"]["version"] = json!("0.0.1"));
    let kyma = WorkSet::of(&[Work::Kyma]);
    assert_eq!(fixture.reconcile(WorkSet::STATUS, Drift::None).await.follow_up, kyma);
    fixture.kyma().await;
    assert_eq!(fixture.manifest_of("warden").unwrap().1["spec"], manifest["spec"]);
}

#[tokio::test]
async fn no_manifest_is_created_after_the_release_meta_began_to_go() {
    let mut fixture = Fixture::with_mandatory().await;
    // The catalog has not been computed again yet.
    fixture.ctx.stores.release_metas = filled::<ModuleReleaseMeta>(&[keda(), deleting(warden())]).0;
    fixture.kyma().await;
    assert_eq!(fixture.manifest_of("warden"), None);
}

/// `acceptance.md` C2 56, in the control plane: the Manifest is deleted; the finalizer is the business of `mandatory`.
#[tokio::test]
async fn deleted_release_meta_uninstalls_the_module() {
    let mut fixture = Fixture::with_mandatory().await;
    fixture.kyma().await;
    let (id, _) = fixture.manifest_of("warden").unwrap();
    fixture.set_metas(&[keda(), deleting(warden())]);
    fixture.ctx.catalog.mark_undecided("warden");
    fixture.kyma().await;
    let is_deleting = |fixture: &Fixture| fixture.kcp.object(&id).unwrap()["metadata"]["deletionTimestamp"].is_string();
    assert!(!is_deleting(&fixture), "the guard has not decided");
    let _ = fixture.ctx.catalog.refresh(&fixture.ctx.stores);
    fixture.kyma().await;
    assert!(is_deleting(&fixture));
    assert_eq!(fixture.status()["state"], "Ready");
}

#[tokio::test]
async fn deletion_of_a_kyma_waits_for_its_mandatory_modules_and_names_them() {
    let mut fixture = Fixture::with_mandatory().await;
    fixture.kyma().await;
    let (id, _) = fixture.manifest_of("warden").unwrap();
    let operation = "waiting for module crs deletion: Warden kyma-system/mine";
    fixture.kcp.edit(&id, |manifest| {
        manifest["status"] = json!({"state": "Deleting", "lastOperation": {"operation": operation}})
    });
    fixture.delete();
    fixture.kyma().await;
    assert!(fixture.kcp.object(&id).unwrap()["metadata"]["deletionTimestamp"].is_string());
    let said = format!("waiting for modules to be deleted: warden ({operation})");
    for status in [fixture.status(), fixture.shown()] {
        assert_eq!((&status["state"], &status["lastOperation"]["operation"]), (&json!("Deleting"), &json!(said)));
        assert!(status["modules"].as_array().is_none_or(Vec::is_empty), "{status}");
    }
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new());
    fixture.kcp.remove(&id);
    fixture.kyma().await;
    assert_eq!(fixture.status()["lastOperation"]["operation"], "waiting for the objects in the runtime to be deleted");
}

#[tokio::test]
async fn optional_module_passes_to_the_user_who_selects_it() {
    let mut fixture = Fixture::with_mandatory().await;
    fixture.kyma().await;
    let (id, manifest) = fixture.manifest_of("warden").unwrap();
    let mut optional = warden();
    optional["spec"]["mandatory"] = Value::Null;
    optional["spec"]["channels"] = json!([]);
    fixture.set_metas(&[keda(), optional]);
    // With a pinned version the two Manifests differ in the label alone.
    let selected = json!([{"name": "warden", "managed": true}]);
    fixture.runtime.edit("kymas/default", |kyma| {
        kyma["spec"]["modules"] = selected;
        kyma["metadata"]["annotations"]["version.operator.kyma-project.io/warden"] = "1.0.0".into();
    });
    fixture.kyma().await;
    let now = fixture.kcp.object(&id).unwrap();
    assert_eq!(now["metadata"]["uid"], manifest["metadata"]["uid"]);
    assert_eq!(now["metadata"]["labels"].get(label::MANDATORY_MODULE), None);
    assert_eq!(fixture.status()["modules"][0]["name"], "warden");
    fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    fixture.kyma().await;
    assert!(fixture.kcp.object(&id).unwrap()["metadata"]["deletionTimestamp"].is_string());
}
