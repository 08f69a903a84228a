//! Access Secrets: what the access to the runtimes shows of them.

use std::sync::atomic::{AtomicUsize, Ordering};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use kube::{Client, runtime::reflector::Store};
use tidewatch_api::names::KUBECONFIG_KEY;
use tidewatch_cluster::runtime_access::{
    self, AccessSecret, ClientError, KubeconfigError, ListedSecret, RuntimeAccess, RuntimeAccessError, Settings,
};

use super::{kinds::Expected, *};
use crate::app::changes::owners::SecretOwners;

type Fixture = FixtureOf<SecretCache>;

/// Numbers of the refreshes of the access, and of those that changed it.
#[derive(Default)]
pub(super) struct Refreshes {
    all: AtomicUsize,
    changed: AtomicUsize,
}

impl Refreshes {
    fn refreshed(&self) -> usize {
        self.all.load(Ordering::Relaxed)
    }

    fn changed(&self) -> usize {
        self.changed.load(Ordering::Relaxed)
    }
}

/// Contexts in the kubeconfig of a version: it is refused for their number, by which readers of the access show the version.
fn contexts(version: u64) -> usize {
    usize::try_from(version).unwrap() + 2
}

impl TestKind for SecretCache {
    type Probe = Arc<Refreshes>;

    fn of(cache: Store<AccessSecret>) -> (Self, Arc<Refreshes>) {
        let access = RuntimeAccess::new(Settings::default(), runtime_access::Metrics::default());
        let owners = Arc::new(SecretOwners::from(cache));
        let refreshes = Arc::<Refreshes>::default();
        let cache = Self::new(owners.clone(), access.clone(), {
            let refreshes = refreshes.clone();
            move |kyma: &KymaKey| {
                let is_changed = access.refresh_secrets(kyma, || owners.read(kyma));
                refreshes.all.fetch_add(1, Ordering::Relaxed);
                refreshes.changed.fetch_add(usize::from(is_changed), Ordering::Relaxed);
            }
        });
        (cache, refreshes)
    }

    fn api(kcp: Client) -> Api<DeserializeGuard<ListedSecret>> {
        Api::namespaced(kcp, NAMESPACE)
    }

    fn object(name: &str, kyma: &str, version: u64) -> Value {
        let kubeconfig = format!("contexts: [{}]", vec!["{}"; contexts(version)].join(", "));
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE,
            "resourceVersion": version.to_string(), "labels": {label::KYMA_NAME: kyma}},
            "data": {KUBECONFIG_KEY: STANDARD.encode(kubeconfig)}})
    }

    fn index(&self, cached: &AccessSecret) {
        self.owners.apply(cached).iter().for_each(&self.refresh);
    }

    fn unindex(&self, cached: &AccessSecret) {
        self.owners.delete(cached).iter().for_each(&self.refresh);
    }

    fn finds(&self, kyma: &KymaKey, expected: &Expected) -> Result<bool, BodyMissingError> {
        match self.access.client(kyma).map(drop) {
            Err(ClientError::Body(missing)) => Err(missing),
            Err(ClientError::Access(RuntimeAccessError::Missing)) => Ok(expected.is_empty()),
            Err(ClientError::Access(RuntimeAccessError::Several(names))) => {
                let expected = expected.iter().map(|(name, _)| name).take(5);
                Ok(names.len() > 1 && names.iter().eq(expected))
            }
            Err(ClientError::Access(RuntimeAccessError::Kubeconfig(KubeconfigError::SeveralContexts(number)))) => {
                Ok(expected.len() == 1 && contexts(expected[0].1) == number)
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn access_of_an_acquired_shard_is_complete_once_its_secrets_are_fetched_and_is_dropped_with_its_release() {
    let (fixture, kcp) = Fixture::reduced(6).await;
    let (task, fetched) = fixture.start(&kcp);
    let mine = fixture.shard("k0");
    let is_mine = |n: &usize| fixture.shard(&format!("k{n}")) == mine;
    let (own, others): (Vec<_>, Vec<_>) = (0..6).partition(is_mine);
    assert!(!others.is_empty(), "the test needs Kymas of other shards");
    let secrets = &fixture.bodies.0.objects;
    let reads = |n: usize| secrets.finds(&key(&format!("k{n}")), &[(format!("m{n}"), 1)]);
    assert_eq!(
        reads(0),
        Err(BodyMissingError { kind: "access Secret", key: format!("{NAMESPACE}/m0") }),
        "never that there is none"
    );

    fixture.bodies.keep(mine);
    soon(fixture.bodies.are_complete(mine)).await;
    // With nothing in between: the access is as complete as the cache.
    assert!(own.iter().all(|n| reads(*n) == Ok(true)));
    assert!(others.iter().all(|n| reads(*n).is_err()), "of another shard");
    let kymas: BTreeSet<_> = own.iter().map(|n| key(&format!("k{n}"))).collect();
    assert_eq!(*fetched.lock(), kymas);
    assert_eq!(kcp.calls(), ["GET secrets"], "one list of all of them");
    assert_eq!(fixture.probe.refreshed(), own.len() + 6, "each once by the watch, those of the shard by the fetch");
    assert_eq!(fixture.probe.changed(), 6, "a body that comes back is no change of the access");

    fixture.bodies.release(mine);
    soon(async {
        while own.iter().any(|n| reads(*n).is_ok()) {
            time::sleep(Duration::from_secs(1)).await;
        }
    })
    .await;
    assert!(own.iter().all(|n| fixture.is_reduced(&format!("m{n}"))));
    assert_eq!(fixture.probe.changed(), 6);
    task.abort();
}

/// The client of a runtime that is asked for too early causes the fetch, as the body of a Manifest does.
#[tokio::test(start_paused = true)]
async fn reader_that_misses_the_access_causes_its_fetch() {
    let (fixture, task, mine) = Fixture::with_late_handler().await;
    let reads = || fixture.bodies.0.objects.finds(&key("k0"), &[("m0".to_owned(), 1)]);
    assert!(reads().is_err());
    soon(fixture.bodies.are_complete(mine)).await;
    assert_eq!(reads(), Ok(true));
    task.abort();
}

/// The fetch may bring a version that the watch has stored and not yet reported: that change must not get lost.
#[tokio::test(start_paused = true)]
async fn changed_secret_counts_as_changed_access_when_its_fetch_comes_before_its_handler() {
    let fixture = Fixture::new(1);
    let inner = &fixture.bodies.0;
    fixture.bodies.reduce_others();
    fixture.apply(SecretCache::object("m0", "k0", 1));
    let changed = fixture.probe.changed();
    let version = SecretCache::object("m0", "k0", 2);
    let mut cache = inner.writer.lock();
    let cached = fixture.bodies.compact(SecretCache::parsed(version.clone()));
    cache.apply(&Event::Apply(cached.clone()));
    drop(cache);
    fixture.bodies.keep(fixture.shard("k0"));
    fixture.bodies.add(vec![serde_json::from_value(version).unwrap()], &BTreeMap::new());
    assert_eq!(fixture.probe.changed(), changed + 1);
    inner.objects.index(&cached);
    assert_eq!(fixture.probe.changed(), changed + 1, "once");
    assert_eq!(inner.objects.finds(&key("k0"), &[("m0".to_owned(), 2)]), Ok(true));
}
