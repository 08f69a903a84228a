//! Handler of the Kymas of a replica among others, whose Kymas are whole or reduced.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use futures::FutureExt as _;
use kube::{
    Api,
    runtime::{
        reflector::{self, Store, store::Writer},
        watcher::Event,
    },
};
use serde_json::{Value, json};
use tidewatch_api::{
    identity::Instance,
    names::{annotation, finalizer, label},
    shard::{ShardCount, ShardId},
};
use tidewatch_cluster::{
    error_class::ErrorClass,
    leader::{FleetRole, WriteFence},
    runtime_access::{ListedSecret, RuntimeAccessError},
    testing::{FakeApiServer, fill},
};
use tidewatch_fleet::{
    manifest_queue::ManifestQueue,
    queue::ReconcileOutcome,
    table::{self, RuntimeTable},
    takeover::Takeover,
    watch::SharedWriter,
};
use tidewatch_kit::metrics::Registry;
use tidewatch_modules::mandatory::Finalizers;
use tidewatch_trust::{CA_VALIDITY, Ca};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::app::changes::{
    bodies::{Bodies, KymaCache, ManifestCache, SecretCache},
    handover::ShardHandover,
};

const NAMESPACE: &str = "kcp-system";

type Handler<K> = Box<dyn FnMut(Change<'_, K>)>;

/// A replica that keeps the whole Kymas of its shards, with the Kyma `k`, whose runtime has the same id.
struct Fixture {
    kcp: FakeApiServer,
    components: Components,
    bodies: CacheBodies,
    handover: ShardHandover,
    handle: Handler<CachedKyma>,
    handle_manifest: Handler<CachedManifest>,
    handle_secret: Handler<AccessSecret>,
    kymas: SharedWriter<CachedKyma>,
    manifests: SharedWriter<CachedManifest>,
    secrets: SharedWriter<AccessSecret>,
    metas: Writer<ModuleReleaseMeta>,
    shards: ShardCount,
}

fn key() -> KymaKey {
    KymaKey::new(NAMESPACE, "k")
}

fn condition(kind: &str, status: &str, reason: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": "words",
        "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

impl Fixture {
    fn new() -> Self {
        Self::taking_over(Duration::ZERO)
    }

    /// Kymas of other controllers are taken over after this period.
    fn taking_over(quiet: Duration) -> Self {
        let kcp = FakeApiServer::default();
        let shards = ShardCount::new(8).unwrap();
        let mut registry = Registry::default();
        kcp.edit("kymas/k", |kyma| {
            *kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
                "metadata": {"name": "k", "namespace": NAMESPACE, "generation": 1, "labels": {label::RUNTIME_ID: "k"},
                    "annotations": {}},
                "spec": {"channel": "regular"},
                "status": {"state": "Ready", "modules": [{"name": "keda", "state": "Ready"}],
                    "conditions": [condition("EventPath", "False", "StaleCanary")]}});
        });
        let (stores, writers) = crate::app::changes::stores();
        let kymas = SharedWriter::from(writers.kymas);
        let manifests = SharedWriter::from(writers.manifests);
        let secrets = SharedWriter::from(writers.secrets);
        let metrics = tidewatch_fleet::manifest_queue::Metrics::register(&mut registry);
        let table = RuntimeTable::new(shards, table::Settings::default(), table::Metrics::register(&mut registry));
        let manifest_queue =
            ManifestQueue::new(tidewatch_fleet::manifest_queue::Settings::default(), metrics, table.tenures());
        let components = Components::around(stores, table, manifest_queue, Takeover::new("", quiet));
        let owners = Arc::new(SecretOwners::from(secrets.reader()));
        let metrics = tidewatch_cluster::Metrics::register(&mut Registry::default());
        let known = || kymas.reader();
        let kyma_cache = Arc::new(KymaCache::from(known()));
        let manifest_cache = Arc::new(ManifestCache::from(components.stores.manifests.clone()));
        let secret_cache = Arc::new(SecretCache::new(owners.clone(), components.access.clone(), |_| ()));
        let bodies = CacheBodies {
            kymas: Bodies::new(kyma_cache, kymas.clone(), known(), shards, metrics.clone()),
            manifests: Bodies::new(manifest_cache, manifests.clone(), known(), shards, metrics.clone()),
            secrets: Bodies::new(secret_cache, secrets.clone(), known(), shards, metrics),
        };
        let handlers = EventHandlers::new(components.clone(), Arc::default(), owners, bodies.clone());
        let synced = CancellationToken::new();
        synced.cancel();
        let handover = ShardHandover {
            components: components.clone(),
            placer: handlers.placer.clone(),
            bodies: bodies.clone(),
            synced,
        };
        tokio::spawn(bodies.kymas.clone().run(Api::namespaced(kcp.client(), NAMESPACE), |_| ()));
        let handle = Box::new(handlers.kymas());
        let handle_manifest = Box::new(handlers.manifests());
        let handle_secret = Box::new(handlers.secrets());
        let metas = writers.release_metas;
        let mut fixture = Self {
            kcp,
            components,
            bodies,
            handover,
            handle,
            handle_manifest,
            handle_secret,
            kymas,
            manifests,
            secrets,
            metas,
            shards,
        };
        fixture.deliver_as(true);
        fixture.handover.reduce_others();
        fixture
    }

    /// Changes the Kyma as another writer does, which the watch reports.
    fn edit(&mut self, change: impl FnOnce(&mut Value)) {
        self.kcp.edit("kymas/k", change);
        self.deliver_as(false);
    }

    /// Reports the present Kyma as its watch does: first to the cache, then to the handler.
    fn deliver_as(&mut self, initial: bool) {
        let listed = serde_json::from_value(self.kcp.object("kymas/k").unwrap()).unwrap();
        let mut cache = self.kymas.lock();
        let cached = self.bodies.kymas.compact(listed);
        cache.apply(&Event::Apply(cached.clone()));
        drop(cache);
        (self.handle)(if initial { Change::Initial(&cached) } else { Change::Applied(&cached) });
    }

    /// Reports a Manifest with these labels.
    fn deliver_manifest(&mut self, labels: &Value) {
        let manifest = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
            "metadata": {"name": "m", "namespace": NAMESPACE, "labels": labels},
            "spec": {"remote": true, "install": {"name": "i", "source": {}}}});
        let manifest: CachedManifest = serde_json::from_value(manifest).unwrap();
        self.manifests.lock().apply(&Event::Apply(manifest.clone()));
        (self.handle_manifest)(Change::Applied(&manifest));
    }

    /// Reports the access Secret with this kubeconfig.
    fn deliver_secret(&mut self, kubeconfig: Option<&str>) {
        let secret = secret(kubeconfig);
        self.secrets.lock().apply(&Event::Apply(secret.clone()));
        (self.handle_secret)(Change::Applied(&secret));
    }

    /// Reports the deletion of the access Secret.
    fn delete_secret(&mut self) {
        let secret = secret(None);
        self.secrets.lock().apply(&Event::Delete(secret.clone()));
        (self.handle_secret)(Change::Deleted(&secret));
    }

    fn cached(&self) -> Arc<CachedKyma> {
        let store: &Store<CachedKyma> = &self.components.stores.kymas;
        store.get(&reflector::ObjectRef::new("k").within(NAMESPACE)).unwrap()
    }

    fn shard(&self, runtime: &str) -> ShardId {
        self.shards.of_runtime(&runtime.parse().unwrap())
    }

    /// A runtime id of another shard than that of `k`.
    fn other_runtime(&self) -> String {
        (0..50).map(|n| format!("r{n}")).find(|runtime| self.shard(runtime) != self.shard("k")).unwrap()
    }

    async fn acquire(&self) -> Vec<KymaKey> {
        let shard = self.shard("k");
        timeout(Duration::from_secs(600), self.handover.prepare(shard)).await.unwrap();
        self.handover.acquire(shard, Instance::new(1), &WriteFence::default()).await
    }

    /// Releases the shard, and waits until the Kyma is reduced.
    async fn release(&self) {
        self.handover.release(self.shard("k"));
        self.reduced().await;
    }

    async fn reduced(&self) {
        let is_reduced = async {
            while !self.cached().is_reduced() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        timeout(Duration::from_secs(600), is_reduced).await.unwrap();
    }

    /// Takes the work of the Kyma, if it is enqueued.
    fn job(&self) -> Option<WorkSet> {
        let job = self.components.fleet.next().now_or_never()?;
        assert_eq!(job.key, key());
        let work = job.queued.work;
        self.components.fleet.done(job, ReconcileOutcome::ended(work));
        Some(work)
    }

    fn notes(&self) -> Vec<String> {
        self.components.recorder.pending_notes()
    }
}

fn secret(kubeconfig: Option<&str>) -> AccessSecret {
    let data = kubeconfig.map(|text| json!({"config": STANDARD.encode(text)}));
    let metadata = json!({"name": "access", "namespace": NAMESPACE, "uid": "u", "labels": {label::KYMA_NAME: "k"}});
    serde_json::from_value::<ListedSecret>(json!({"metadata": metadata, "data": data})).unwrap().into()
}

/// A kubeconfig that can be used.
fn kubeconfig() -> String {
    let ca = Ca::generate("a", 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle().to_pem();
    format!(
        "clusters: [{{name: a, cluster: {{server: 'https://runtime', certificate-authority-data: {}}}}}]\n\
         users: [{{name: b, user: {{token: t}}}}]\ncontexts: [{{name: c, context: {{cluster: a, user: b}}}}]\n",
        STANDARD.encode(ca)
    )
}

fn set_state(state: &str) -> impl FnOnce(&mut Value) {
    let state = state.to_owned();
    move |kyma| {
        kyma["status"]["state"] = json!(state);
        kyma["status"]["lastOperation"] = json!({"operation": format!("is {state}")});
    }
}

fn annotate(value: &str) -> impl FnOnce(&mut Value) {
    let value = value.to_owned();
    move |kyma| kyma["metadata"]["annotations"]["a"] = json!(value)
}

#[tokio::test(start_paused = true)]
async fn acquired_kyma_is_placed_with_its_body_and_continues_its_path() {
    let fixture = Fixture::new();
    fixture.reduced().await;
    assert_eq!(fixture.acquire().await, [key()]);
    assert!(fixture.cached().whole().is_some());
    assert!(fixture.components.fleet.kyma_has_used_v3(&key()), "inherited from the condition in the body");
}

#[tokio::test(start_paused = true)]
async fn deletion_of_a_secret_is_recorded_only_while_its_kyma_is_being_deleted() {
    let mut fixture = Fixture::new();
    fixture.acquire().await;
    let access = |fixture: &Fixture| fixture.components.access.client(&key()).err();
    fixture.deliver_secret(None);
    fixture.delete_secret();
    assert_eq!(access(&fixture), Some(RuntimeAccessError::Missing.into()));
    fixture.deliver_secret(None);
    fixture.edit(|kyma| {
        kyma["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        kyma["metadata"]["finalizers"] = json!([finalizer::KYMA]);
    });
    fixture.job();
    fixture.delete_secret();
    assert_eq!(access(&fixture), Some(RuntimeAccessError::SecretDeleted("access".into()).into()));
    assert!(fixture.job().is_some());
    fixture.deliver_secret(None);
    assert_ne!(access(&fixture), Some(RuntimeAccessError::SecretDeleted("access".into()).into()));
}

/// The broker creates the Kyma when a cluster is ordered; infrastructure-manager writes the Secret when it is there.
#[tokio::test(start_paused = true)]
async fn secret_that_comes_twenty_minutes_late_ends_the_backoff_at_once() {
    let mut fixture = Fixture::new();
    fixture.acquire().await;
    fixture.edit(annotate("ordered"));
    let ordered = Instant::now();
    while ordered.elapsed() < Duration::from_secs(20 * 60) {
        let job = fixture.components.fleet.next().await;
        let work = job.queued.work;
        fixture.components.fleet.done(job, ReconcileOutcome::failed(work, ErrorClass::Auth));
    }
    // An event on a Kyma in backoff waits until five seconds after its last attempt.
    let soon = Duration::from_secs(6);
    assert!(timeout(soon, fixture.components.fleet.next()).await.is_err(), "the next attempt is minutes away");
    fixture.deliver_secret(Some(&kubeconfig()));
    let job = timeout(soon, fixture.components.fleet.next()).await.unwrap();
    assert!(job.queued.work.contains(Work::Kyma));
}

#[tokio::test(start_paused = true)]
async fn kyma_whose_secret_loses_its_kubeconfig_is_reconciled_and_keeps_its_access() {
    let mut fixture = Fixture::new();
    fixture.acquire().await;
    fixture.deliver_secret(Some(&kubeconfig()));
    fixture.job();
    let (_, revision) = fixture.components.access.client_and_revision(&key()).unwrap();
    fixture.deliver_secret(None);
    assert_eq!(fixture.job(), Some(WorkSet::of(&[Work::Kyma])), "its condition changes");
    assert_eq!(fixture.components.access.client_and_revision(&key()).unwrap().1, revision);
}

#[tokio::test(start_paused = true)]
async fn finalizers_of_a_kyma_matter_once_it_is_being_deleted() {
    let mut fixture = Fixture::new();
    fixture.acquire().await;
    fixture.job();
    fixture.edit(|kyma| kyma["metadata"]["finalizers"] = json!([finalizer::KYMA, "a", "b"]));
    assert_eq!(fixture.job(), None, "a reconcile adds ours");
    fixture.edit(|kyma| kyma["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    fixture.job();
    fixture.edit(|kyma| kyma["metadata"]["finalizers"] = json!(["a"]));
    assert_eq!(fixture.job(), Some(WorkSet::of(&[Work::Kyma])), "its status names them");
}

#[tokio::test(start_paused = true)]
async fn another_form_is_no_change_and_hides_none() {
    let mut fixture = Fixture::new();
    fixture.acquire().await;
    assert_eq!(fixture.job(), None, "the acquisition enqueues it");
    fixture.edit(annotate("1"));
    assert_eq!(fixture.job(), Some(WorkSet::of(&[Work::Kyma])));
    fixture.release().await;
    fixture.edit(set_state("Warning"));
    assert!(fixture.cached().is_reduced());
    fixture.acquire().await;
    assert!(!fixture.cached().is_reduced());
    fixture.edit(set_state("Ready"));
    assert_eq!(fixture.job(), None, "a status is no change, whatever the form before");

    // The change is seen by facts alone, and is reverted after the acquisition.
    fixture.release().await;
    fixture.edit(annotate("2"));
    assert!(fixture.cached().is_reduced());
    fixture.acquire().await;
    fixture.edit(annotate("1"));
    assert_eq!(fixture.job(), Some(WorkSet::of(&[Work::Kyma])));
    fixture.edit(|kyma| kyma["spec"]["channel"] = json!("fast"));
    fixture.edit(|kyma| kyma["metadata"]["labels"]["team"] = json!("a"));
    assert_eq!(fixture.job(), Some(WorkSet::RUNTIME), "its visibility");
}

#[tokio::test(start_paused = true)]
async fn events_after_an_acquisition_report_what_changes_from_then_on() {
    let mut fixture = Fixture::new();
    fixture.edit(set_state("Processing"));
    fixture.edit(set_state("Ready"));
    fixture.reduced().await;
    fixture.edit(set_state("Error"));
    assert_eq!(fixture.notes(), [""; 0], "the replica that holds it posts them");
    fixture.acquire().await;
    fixture.deliver_as(false);
    assert_eq!(fixture.notes(), [""; 0], "nothing has changed since");
    fixture.edit(set_state("Warning"));
    assert_eq!(fixture.notes(), ["is Warning"], "neither of its modules nor of its conditions");
    fixture.release().await;
    assert!(!fixture.components.recorder.has_observed(&key()));
    fixture.edit(set_state("Error"));
    fixture.edit(set_state("Ready"));
    fixture.acquire().await;
    fixture.edit(set_state("Error"));
    assert_eq!(fixture.notes(), ["is Warning", "is Error"]);
}

#[tokio::test(start_paused = true)]
async fn kyma_that_moves_into_a_held_shard_has_events_from_then_on() {
    let mut fixture = Fixture::new();
    let other = fixture.other_runtime();
    fixture.edit(|kyma| kyma["metadata"]["labels"][label::RUNTIME_ID] = json!(other));
    fixture.acquire().await;
    assert!(fixture.components.fleet.is_elsewhere(&key()));
    fixture.edit(|kyma| {
        kyma["metadata"]["labels"][label::RUNTIME_ID] = json!("k");
        set_state("Error")(kyma);
    });
    assert!(fixture.cached().whole().is_some() && !fixture.components.fleet.is_elsewhere(&key()));
    assert_eq!(fixture.job(), Some(WorkSet::RUNTIME));
    assert_eq!(fixture.notes(), [""; 0]);
    fixture.edit(set_state("Ready"));
    assert_eq!(fixture.notes(), ["is Ready"]);
    fixture.edit(|kyma| kyma["metadata"]["labels"][label::RUNTIME_ID] = json!(other));
    assert!(fixture.cached().is_reduced() && fixture.components.fleet.is_elsewhere(&key()));
    assert!(!fixture.components.recorder.has_observed(&key()), "another replica posts its Events");
}

/// Its body could not be decoded when its shard was acquired.
#[tokio::test(start_paused = true)]
async fn corrected_kyma_has_no_events_about_its_unchanged_state() {
    let mut fixture = Fixture::new();
    fixture.reduced().await;
    fixture.kcp.edit("kymas/k", |kyma| kyma["spec"]["channel"] = json!(1));
    fixture.acquire().await;
    assert!(fixture.cached().is_reduced());
    fixture.edit(|kyma| kyma["spec"]["channel"] = json!("fast"));
    assert!(!fixture.cached().is_reduced());
    assert_eq!(fixture.notes(), [""; 0]);
    fixture.edit(set_state("Error"));
    assert_eq!(fixture.notes(), ["is Error"]);
}

/// It was deleted and created again, equal, while the watch was interrupted: the next list has the new one.
#[tokio::test(start_paused = true)]
async fn recreated_kyma_is_a_new_one() {
    let mut fixture = Fixture::new();
    fixture.acquire().await;
    assert!(fixture.components.fleet.kyma_has_used_v3(&key()) && fixture.job().is_none());
    fixture.edit(|kyma| kyma["metadata"]["uid"] = json!("another"));
    assert_eq!(fixture.job(), Some(WorkSet::RUNTIME));
    assert!(!fixture.components.fleet.kyma_has_used_v3(&key()), "its runtime is another one");
    fixture.edit(set_state("Warning"));
    assert_eq!(fixture.notes().last().map(String::as_str), Some("is Warning"));
}

#[tokio::test(start_paused = true)]
async fn takeover_that_another_replica_completes_is_not_pending() {
    let mut fixture = Fixture::taking_over(Duration::from_secs(60));
    fixture.reduced().await;
    fixture.edit(|kyma| {
        kyma["metadata"]["uid"] = json!("another");
        kyma["metadata"]["finalizers"] = json!([finalizer::KYMA]);
    });
    let takeover = fixture.components.takeover.clone();
    assert!(fixture.cached().is_reduced() && fixture.components.fleet.is_elsewhere(&key()));
    assert!(takeover.is_pending(&key()));
    fixture.edit(annotate("1"));
    fixture.edit(set_state("Warning"));
    assert!(takeover.is_pending(&key()), "lifecycle-manager writes it");
    fixture.edit(|kyma| kyma["metadata"]["annotations"][annotation::INPUTS] = json!("-.-"));
    assert!(!takeover.is_pending(&key()));
    fixture.acquire().await;
    fixture.edit(set_state("Ready"));
    assert!(!takeover.is_pending(&key()), "another holder begins no quiet period");
}

/// Its module became optional, and the user selects it.
#[tokio::test(start_paused = true)]
async fn manifest_that_loses_the_label_of_mandatory_modules_releases_the_finalizer() {
    let mut fixture = Fixture::new();
    fixture.kcp.edit("modulereleasemetas/warden", |meta| {
        *meta = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": {"namespace": NAMESPACE, "finalizers": [finalizer::MANDATORY_MODULE]},
            "spec": {"moduleName": "warden", "channels": []}});
    });
    fill(&mut fixture.metas, &fixture.kcp.all("modulereleasemetas"));
    fixture.deliver_manifest(&json!({label::MODULE_NAME: "warden", label::MANDATORY_MODULE: "true"}));
    let Components { stores, catalog, mandatory, .. } = fixture.components.clone();
    let role = FleetRole::held(WriteFence::default());
    let synced = CancellationToken::new();
    synced.cancel();
    tokio::spawn(Finalizers::new(fixture.kcp.client(), stores, catalog, mandatory, role).run(synced));
    let finalizers =
        |fixture: &Fixture| fixture.kcp.object("modulereleasemetas/warden").unwrap()["metadata"]["finalizers"].clone();
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(finalizers(&fixture), json!([finalizer::MANDATORY_MODULE]), "its Manifests are not relabelled yet");
    fixture.deliver_manifest(&json!({label::MODULE_NAME: "warden"}));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(finalizers(&fixture), json!([]));
}
