//! The task against a fake KCP.

use kube::runtime::reflector::{self, store::Writer};
use serde_json::Value;
use tidewatch_cluster::{
    WriteBudgets,
    leader::WriteFence,
    testing::{FakeApiServer, fill},
};
use tidewatch_fleet::recorder;

use super::*;
use crate::catalog;

const META: &str = "modulereleasemetas/warden";
const MANIFEST: &str = "manifests/k-warden-1";

/// A KCP with the release meta of the mandatory module `warden`.
struct Fixture {
    kcp: FakeApiServer,
    metas: Writer<ModuleReleaseMeta>,
    manifests: Writer<CachedManifest>,
    catalog: Catalog,
    finalizers: Finalizers,
}

fn object(kind: &str, labels: &Value, spec: &Value) -> Value {
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": kind,
        "metadata": {"namespace": "kcp-system", "labels": labels}, "spec": spec})
}

impl Fixture {
    fn new() -> Self {
        let kcp = FakeApiServer::default();
        kcp.edit(META, |meta| {
            let spec = json!({"moduleName": "warden", "mandatory": {"version": "1.0.0"}});
            *meta = object("ModuleReleaseMeta", &json!({}), &spec);
        });
        let metas = Writer::default();
        let manifests = Writer::default();
        let stores = Stores {
            kymas: reflector::store().0,
            templates: reflector::store().0,
            release_metas: metas.as_reader(),
            manifests: manifests.as_reader().into(),
            watchers: reflector::store().0,
        };
        let catalog =
            Catalog::deciding(catalog::Settings::default(), catalog::Metrics::default(), WriteBudgets::default());
        let recorder = EventRecorder::new(recorder::Metrics::default());
        let modules = MandatoryModules::new("kcp-system", recorder);
        let role = FleetRole::held(WriteFence::default());
        let finalizers = Finalizers::new(kcp.client(), stores, catalog.clone(), modules, role);
        Self { kcp, metas, manifests, catalog, finalizers }
    }

    fn install(&self) {
        self.kcp.edit(MANIFEST, |manifest| {
            let labels = json!({label::MODULE_NAME: "warden", label::MANDATORY_MODULE: "true"});
            let spec = json!({"remote": true, "install": {"name": "raw-manifest", "source": {}}});
            *manifest = object("Manifest", &labels, &spec);
        });
    }

    fn delete(&self) {
        self.kcp.edit(META, |meta| meta["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    }

    /// Updates the caches, as the watches do.
    fn watch(&mut self) {
        fill(&mut self.metas, &self.kcp.all("modulereleasemetas"));
        fill(&mut self.manifests, &self.kcp.all("manifests"));
    }

    /// Reconciles with current caches.
    async fn reconcile(&mut self) -> Option<Duration> {
        self.watch();
        self.finalizers.reconcile().await
    }

    fn finalizers(&self) -> Value {
        self.kcp.object(META).map_or(Value::Null, |meta| meta["metadata"]["finalizers"].clone())
    }
}

/// `acceptance.md` C2 56: the finalizer is set first, and removed after the last Manifest is gone.
#[tokio::test(start_paused = true)]
async fn finalizer_stays_until_every_manifest_is_gone() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.reconcile().await, None);
    assert_eq!(fixture.finalizers(), json!([finalizer::MANDATORY_MODULE]));
    fixture.install();
    fixture.kcp.calls();
    assert_eq!(fixture.reconcile().await, None);
    fixture.delete();
    assert_eq!(fixture.reconcile().await, None);
    time::advance(Duration::from_secs(60)).await;
    assert_eq!(fixture.reconcile().await, None);
    assert_eq!(fixture.kcp.calls(), Vec::<String>::new(), "nothing to do while a Manifest exists");
    fixture.kcp.remove(MANIFEST);
    assert_eq!(fixture.reconcile().await, None);
    assert_eq!(fixture.kcp.object(META), None);
    assert_eq!(fixture.reconcile().await, None);
    assert!(fixture.finalizers.removals.is_empty());
}

#[tokio::test(start_paused = true)]
async fn finalizer_outlives_requests_that_may_still_create_a_manifest() {
    let mut fixture = Fixture::new();
    fixture.reconcile().await;
    fixture.delete();
    let rest = fixture.reconcile().await.unwrap();
    assert!(rest > Duration::from_secs(10), "{rest:?}");
    time::advance(rest).await;
    // Created after the last event that the cache received.
    fixture.watch();
    fixture.install();
    assert_eq!(fixture.finalizers.reconcile().await, Some(RETRY));
    assert_eq!(fixture.finalizers(), json!([finalizer::MANDATORY_MODULE]));
    fixture.kcp.remove(MANIFEST);
    assert_eq!(fixture.reconcile().await, None);
    assert_eq!(fixture.kcp.object(META), None);
}

#[tokio::test(start_paused = true)]
async fn held_removal_keeps_the_finalizer() {
    let mut fixture = Fixture::new();
    fixture.reconcile().await;
    fixture.delete();
    // As from the event of the release meta until the guard has decided.
    fixture.catalog.mark_undecided("warden");
    assert_eq!(fixture.reconcile().await, None);
    time::advance(Duration::from_secs(60)).await;
    assert_eq!(fixture.reconcile().await, None);
    assert_eq!(fixture.finalizers(), json!([finalizer::MANDATORY_MODULE]));
    let _ = fixture.catalog.refresh(&fixture.finalizers.stores);
    assert_eq!(fixture.reconcile().await, None);
    assert_eq!(fixture.kcp.object(META), None);
}

#[tokio::test(start_paused = true)]
async fn optional_module_loses_the_finalizer_although_users_select_it() {
    let mut fixture = Fixture::new();
    fixture.reconcile().await;
    fixture.install();
    fixture.kcp.edit(META, |meta| meta["spec"] = json!({"moduleName": "warden", "channels": []}));
    assert_eq!(fixture.reconcile().await, None);
    time::advance(Duration::from_secs(60)).await;
    assert_eq!(
        fixture.finalizers(),
        json!([finalizer::MANDATORY_MODULE]),
        "a Manifest is still that of a mandatory module"
    );
    fixture.kcp.edit(MANIFEST, |manifest| {
        drop(manifest["metadata"]["labels"].as_object_mut().unwrap().remove(label::MANDATORY_MODULE))
    });
    assert_eq!(fixture.reconcile().await, None);
    assert_eq!(fixture.finalizers(), json!([]));
}

#[tokio::test(start_paused = true)]
async fn failed_or_conflicting_request_is_tried_again() {
    let mut fixture = Fixture::new();
    fixture.kcp.refuse(&format!("PATCH {META}"), 403);
    assert_eq!(fixture.reconcile().await, Some(RETRY));
    fixture.kcp.refuse_nothing();
    fixture.kcp.edit(META, |meta| meta["metadata"]["labels"] = json!({"written": "meanwhile"}));
    assert_eq!(fixture.finalizers.reconcile().await, Some(RETRY), "the cache is older");
    assert_eq!(fixture.reconcile().await, None);
    assert_eq!(fixture.finalizers(), json!([finalizer::MANDATORY_MODULE]));
    fixture.delete();
    fixture.reconcile().await;
    time::advance(Duration::from_secs(60)).await;
    fixture.kcp.refuse("GET manifests", 500);
    assert_eq!(fixture.reconcile().await, Some(RETRY), "a failed list is no empty list");
    assert_eq!(fixture.finalizers(), json!([finalizer::MANDATORY_MODULE]));
}
