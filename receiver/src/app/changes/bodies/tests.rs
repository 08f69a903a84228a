use futures::FutureExt as _;
use kube::runtime::{
    reflector::{self, store::Writer},
    watcher::Event,
};
use serde_json::{Value, json};
use tidewatch_api::{Manifest, key::Key, names::label};
use tidewatch_cluster::{body_missing::BodyMissingError, testing::FakeApiServer};
use tidewatch_fleet::stores::manifests::{CachedManifest, Manifests};
use tidewatch_kit::metrics::Registry;
use tokio::{task::JoinHandle, time::timeout};

use super::*;

mod kinds;
mod kymas;
mod model;
mod secrets;

use self::kinds::TestKind;

const NAMESPACE: &str = "ns";

/// Bodies of the objects of the Kymas `k0`, `k1`, …, whose runtimes have ids of the same names, and the write halves of
/// the caches.
struct FixtureOf<C: TestKind> {
    bodies: Bodies<C>,
    probe: C::Probe,
    shards: ShardCount,
    kymas: Writer<CachedKyma>,
    registry: Registry,
}

type Fixture = FixtureOf<ManifestCache>;

fn key<K>(name: &str) -> Key<K> {
    Key::new(NAMESPACE, name)
}

fn kyma(name: &str, runtime: Option<&str>) -> CachedKyma {
    let labels = runtime.map(|runtime| json!({label::RUNTIME_ID: runtime}));
    serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": name, "labels": labels}, "spec": {"channel": "regular"}}))
    .unwrap()
}

fn manifest(name: &str, kyma: &str, version: u64) -> Value {
    json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Manifest",
        "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": version.to_string(),
            "labels": {label::KYMA_NAME: kyma, label::MODULE_NAME: "keda"}},
        "spec": {"remote": true, "version": version.to_string(), "install": {"name": "i", "source": {"ref": "r"}}},
        "status": {"state": "Ready", "synced": [
            {"group": "", "version": "v1", "kind": "ConfigMap", "name": name, "namespace": "kyma-system"}]}})
}

impl<C: TestKind> FixtureOf<C> {
    fn new(kymas: usize) -> Self {
        let shards = ShardCount::new(3).unwrap();
        let mut registry = Registry::default();
        let mut kyma_writer = Writer::<CachedKyma>::default();
        for name in (0..kymas).map(|n| format!("k{n}")) {
            kyma_writer.apply_watcher_event(&Event::Apply(kyma(&name, Some(&name))));
        }
        let (cache, writer) = reflector::store();
        let metrics = Metrics::register(&mut registry);
        let (objects, probe) = C::of(cache);
        let bodies = Bodies::new(Arc::new(objects), writer.into(), kyma_writer.as_reader(), shards, metrics);
        Self { bodies, probe, shards, kymas: kyma_writer, registry }
    }

    /// As [`Self::new`], with one object `m<n>` of each Kyma, all of which are reduced.
    async fn reduced(kymas: usize) -> (Self, FakeApiServer) {
        let fixture = Self::new(kymas);
        let kcp = FakeApiServer::default();
        for n in 0..kymas {
            let id = format!("{}/m{n}", C::KIND.kind);
            let kyma = format!("k{n}");
            kcp.edit(&id, |object| *object = C::object(&format!("m{n}"), &kyma, 1));
        }
        fixture.bodies.reduce_others();
        fixture.watch(&kcp);
        kcp.calls();
        (fixture, kcp)
    }

    /// The Kyma of an object with facts alone has come into a kept shard, and its handler is late. Returns the task that fetches
    /// bodies, and that shard as well.
    async fn with_late_handler() -> (Self, JoinHandle<&'static str>, ShardId) {
        let (mut fixture, kcp) = Self::reduced(1).await;
        let (task, _) = fixture.start(&kcp);
        let mine = fixture.shard("k0");
        fixture.bodies.keep(mine);
        soon(fixture.bodies.are_complete(mine)).await;
        let other = (0..50).map(|n| format!("r{n}")).find(|runtime| fixture.shard(runtime) != mine).unwrap();
        fixture.kymas.apply_watcher_event(&Event::Apply(kyma("k0", Some(&other))));
        fixture.watch(&kcp);
        fixture.kymas.apply_watcher_event(&Event::Apply(kyma("k0", Some("k0"))));
        (fixture, task, mine)
    }

    /// Delivers all objects of the server to the watch.
    fn watch(&self, kcp: &FakeApiServer) {
        kcp.all(C::KIND.kind).into_iter().for_each(|object| self.apply(object));
    }

    /// Applies an object as the watch does: to the cache, then to the index.
    fn apply(&self, object: Value) {
        let inner = &self.bodies.0;
        let mut cache = inner.writer.lock();
        let cached = self.bodies.compact(C::parsed(object));
        cache.apply(&Event::Apply(cached.clone()));
        drop(cache);
        inner.objects.index(&cached);
    }

    fn shard(&self, runtime: &str) -> ShardId {
        self.shards.of_runtime(&runtime.parse().unwrap())
    }

    fn is_complete(&self, shard: ShardId) -> bool {
        self.bodies.are_complete(shard).now_or_never().is_some()
    }

    /// Runs the task; returns it and the Kymas that got bodies.
    fn start(&self, kcp: &FakeApiServer) -> (JoinHandle<&'static str>, Arc<Mutex<BTreeSet<KymaKey>>>) {
        let fetched = Arc::<Mutex<BTreeSet<_>>>::default();
        let bodies = self.bodies.clone();
        let seen = fetched.clone();
        let api = C::api(kcp.client());
        let on_fetched = move |kyma: &KymaKey| seen.lock().extend([kyma.clone()]);
        (tokio::spawn(bodies.run(api, on_fetched)), fetched)
    }

    fn is_reduced(&self, object: &str) -> bool {
        self.bodies.0.objects.find(&key(object)).unwrap().is_reduced()
    }
}

impl Fixture {
    fn manifests(&self) -> &Manifests {
        &self.bodies.0.objects.manifests
    }

    fn read(&self, manifest: &str) -> Result<Option<Arc<Manifest>>, BodyMissingError> {
        self.manifests().get(&key(manifest))
    }
}

/// Waits within a long time of a paused clock.
async fn soon(future: impl Future<Output = ()>) {
    timeout(Duration::from_secs(600), future).await.expect("in time");
}

#[tokio::test(start_paused = true)]
async fn shard_that_is_acquired_during_a_list_is_complete_after_it() {
    let fixture = Fixture::new(1);
    let kcp = FakeApiServer::default();
    let shard = fixture.shard("k0");
    let _ = fixture.start(&kcp);
    fixture.apply(manifest("m0", "k0", 1));
    fixture.bodies.keep(shard);
    // Its round ends before the list begins.
    time::sleep(Duration::from_secs(1)).await;
    let list = |event| fixture.bodies.0.writer.lock().apply(&event);
    list(Event::Init);
    let bodies = fixture.bodies.clone();
    let waiting = tokio::spawn(async move { bodies.are_complete(shard).await });
    time::sleep(Duration::from_secs(1)).await;
    assert!(!waiting.is_finished(), "objects of the list may be missing");
    list(Event::InitApply(fixture.bodies.compact(ManifestCache::parsed(manifest("m0", "k0", 1)))));
    list(Event::InitDone);
    soon(async { waiting.await.unwrap() }).await;
}

#[tokio::test(start_paused = true)]
async fn acquired_shard_is_complete_once_its_bodies_are_fetched_and_loses_them_with_its_release() {
    let (fixture, kcp) = Fixture::reduced(6).await;
    let (task, fetched) = fixture.start(&kcp);
    let mine = fixture.shard("k0");
    let is_mine = |n: &usize| fixture.shard(&format!("k{n}")) == mine;
    let (own, others): (Vec<_>, Vec<_>) = (0..6).partition(is_mine);
    assert!(!others.is_empty(), "the test needs Kymas of other shards");
    assert_eq!(
        fixture.read("m0"),
        Err(BodyMissingError { kind: "Manifest", key: format!("{NAMESPACE}/m0") }),
        "it exists"
    );
    assert_eq!(fixture.read("none"), Ok(None));

    fixture.bodies.keep(mine);
    assert!(!fixture.is_complete(mine));
    soon(fixture.bodies.are_complete(mine)).await;
    for n in &own {
        assert_eq!(fixture.read(&format!("m{n}")).unwrap().unwrap().status.as_ref().unwrap().synced().len(), 1);
    }
    for n in &others {
        assert!(fixture.read(&format!("m{n}")).is_err(), "of another shard");
    }
    let kymas: BTreeSet<_> = own.iter().map(|n| key(&format!("k{n}"))).collect();
    assert_eq!(*fetched.lock(), kymas);
    assert_eq!(kcp.calls(), ["GET manifests"], "one list of all of them");

    fixture.bodies.release(mine);
    time::sleep(Duration::from_secs(50)).await;
    assert!(fixture.read("m0").is_ok(), "it may be acquired again soon");
    soon(async {
        while fixture.read("m0").is_ok() {
            time::sleep(Duration::from_secs(1)).await;
        }
    })
    .await;
    assert!(own.iter().all(|n| fixture.read(&format!("m{n}")).is_err()));
    assert_eq!(kcp.calls(), [""; 0], "a release needs no request");
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn failed_fetch_is_repeated_and_the_shard_is_not_complete_before() {
    let (fixture, kcp) = Fixture::reduced(1).await;
    kcp.refuse("GET manifests", 500);
    let (task, _) = fixture.start(&kcp);
    let mine = fixture.shard("k0");
    fixture.bodies.keep(mine);
    assert!(timeout(Duration::from_secs(60), fixture.bodies.are_complete(mine)).await.is_err());
    let calls = kcp.calls().len();
    // With full jitter about 28, at least the 12 of the longest delays; without a growing delay hundreds.
    assert!((12..60).contains(&calls), "{calls}");
    assert!(fixture.registry.encode().unwrap().contains(r#"kcp_body_fetch_failures_total{kind="manifests"}"#));
    kcp.refuse_nothing();
    soon(fixture.bodies.are_complete(mine)).await;
    task.abort();
}

/// The fetch may be answered from a cache that is behind or ahead of the watch.
#[tokio::test(start_paused = true)]
async fn body_of_another_version_is_not_taken() {
    let (fixture, kcp) = Fixture::reduced(1).await;
    let mine = fixture.shard("k0");
    kcp.edit("manifests/m0", |manifest| manifest["spec"]["version"] = json!("newer"));
    let (task, _) = fixture.start(&kcp);
    fixture.bodies.keep(mine);
    assert!(timeout(Duration::from_secs(60), fixture.bodies.are_complete(mine)).await.is_err());
    assert!(fixture.read("m0").is_err());
    fixture.watch(&kcp);
    soon(fixture.bodies.are_complete(mine)).await;
    assert_eq!(fixture.read("m0").unwrap().unwrap().spec.version.as_deref(), Some("newer"));
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn deleted_manifest_stays_deleted() {
    let (fixture, kcp) = Fixture::reduced(1).await;
    let missing = fixture.bodies.missing(|_| true).unwrap();
    let listed = kcp.all("manifests").into_iter().map(|object| serde_json::from_value(object).unwrap()).collect();
    let inner = &fixture.bodies.0;
    let mine = fixture.shard("k0");
    fixture.bodies.keep(mine);
    let known = inner.objects.find(&key("m0")).unwrap();
    inner.writer.lock().apply(&Event::Delete(known.clone()));
    inner.objects.unindex(&known);
    assert_eq!(fixture.bodies.add(listed, &missing), BTreeSet::new());
    assert_eq!(fixture.read("m0"), Ok(None));
    assert!(fixture.is_complete(mine), "nothing is missing");
}

#[tokio::test(start_paused = true)]
async fn invalid_manifest_stays_reduced_and_holds_up_no_shard() {
    let (fixture, kcp) = Fixture::reduced(1).await;
    kcp.edit("manifests/m0", |manifest| manifest["spec"]["remote"] = json!("no boolean"));
    let (task, _) = fixture.start(&kcp);
    let mine = fixture.shard("k0");
    fixture.bodies.keep(mine);
    soon(fixture.bodies.are_complete(mine)).await;
    assert!(fixture.read("m0").is_err(), "never that it does not exist");
    // Its correction arrives by the watch.
    kcp.edit("manifests/m0", |manifest| manifest["spec"]["remote"] = json!(true));
    fixture.watch(&kcp);
    assert!(fixture.read("m0").unwrap().is_some());
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn kyma_that_comes_into_a_kept_shard_gets_its_bodies() {
    let (mut fixture, kcp) = Fixture::reduced(2).await;
    let runtimes: Vec<_> = (0..50).map(|n| format!("r{n}")).collect();
    let mine = fixture.shard("k0");
    let other = runtimes.iter().find(|runtime| fixture.shard(runtime) != mine).unwrap();
    let own = runtimes.iter().find(|runtime| fixture.shard(runtime) == mine).unwrap();
    let set_runtime = |fixture: &mut Fixture, runtime: &str| {
        fixture.kymas.apply_watcher_event(&Event::Apply(kyma("k1", Some(runtime))));
        fixture.bodies.kyma_moved(&key("k1"));
    };
    set_runtime(&mut fixture, other);
    let (task, fetched) = fixture.start(&kcp);
    fixture.bodies.keep(mine);
    soon(fixture.bodies.are_complete(mine)).await;
    assert!(fixture.read("m1").is_err());

    set_runtime(&mut fixture, own);
    assert!(!fixture.is_complete(mine));
    soon(fixture.bodies.are_complete(mine)).await;
    assert!(fixture.read("m1").unwrap().is_some());
    assert!(fetched.lock().contains(&key("k1")));
    set_runtime(&mut fixture, other);
    soon(async {
        while fixture.read("m1").is_ok() {
            time::sleep(Duration::from_secs(1)).await;
        }
    })
    .await;
    task.abort();
}

/// Otherwise a reader that was too early would wait for another change.
#[tokio::test(start_paused = true)]
async fn reader_that_misses_a_body_causes_its_fetch() {
    let (fixture, task, mine) = Fixture::with_late_handler().await;
    let of_kyma = || fixture.manifests().of_kyma(&key("k0"), None);
    assert!(of_kyma().is_err());
    soon(fixture.bodies.are_complete(mine)).await;
    assert_eq!(of_kyma().unwrap().len(), 1);
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn body_of_an_unknown_or_another_owner_is_kept() {
    let fixture = Fixture::new(2);
    fixture.bodies.reduce_others();
    fixture.apply(manifest("unknown", "k9", 1));
    let mut of_two = manifest("of-two", "k0", 1);
    of_two["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "name": "k1", "uid": "k1"}]);
    fixture.apply(of_two.clone());
    of_two["metadata"]["name"] = json!("of-one");
    of_two["metadata"]["ownerReferences"][0]["uid"] = json!("k0");
    fixture.apply(of_two);
    assert!(fixture.read("unknown").unwrap().is_some());
    assert!(fixture.read("of-two").unwrap().is_some(), "a reader by the uid of k1 needs it");
    assert!(fixture.read("of-one").is_err());
    let found = fixture.manifests().find_of_kyma(&key("none"), Some("k0"));
    assert_eq!(found.iter().map(CachedManifest::key).collect::<Vec<_>>(), [key("of-one")], "by its owner alone");
}

#[tokio::test(start_paused = true)]
async fn wait_ends_with_the_release_of_the_shard() {
    let (fixture, _) = Fixture::reduced(1).await;
    let mine = fixture.shard("k0");
    fixture.bodies.keep(mine);
    let complete = fixture.bodies.are_complete(mine);
    tokio::pin!(complete);
    assert!(complete.as_mut().now_or_never().is_none());
    fixture.bodies.release(mine);
    assert!(complete.now_or_never().is_some());
}
