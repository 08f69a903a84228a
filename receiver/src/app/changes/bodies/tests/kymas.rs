//! Kymas: each is in the shard of its own label or uid.

use kube::{Client, runtime::reflector::Store};
use tidewatch_api::{Kyma, facts::KymaFacts, names::annotation};

use super::{kinds::Expected, *};

type Fixture = FixtureOf<KymaCache>;

impl TestKind for KymaCache {
    type Probe = Store<CachedKyma>;

    const MOVES_ALONE: bool = true;

    fn of(cache: Store<CachedKyma>) -> (Self, Store<CachedKyma>) {
        (cache.clone().into(), cache)
    }

    fn api(kcp: Client) -> Api<DeserializeGuard<Kyma>> {
        Api::namespaced(kcp, NAMESPACE)
    }

    /// A Kyma whose runtime has the id `kyma`.
    fn object(name: &str, kyma: &str, version: u64) -> Value {
        json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma",
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": name, "resourceVersion": version.to_string(),
                "generation": version, "labels": {label::RUNTIME_ID: kyma}, "annotations": {annotation::INPUTS: "-.-"}},
            "spec": {"channel": "regular", "modules": [{"name": "keda", "managed": true}]},
            "status": {"state": "Ready", "activeChannel": "unread"}})
    }

    fn index(&self, _cached: &CachedKyma) {}

    fn unindex(&self, _cached: &CachedKyma) {}

    /// The readers of the Kymas with this runtime.
    fn finds(&self, kyma: &KymaKey, expected: &Expected) -> Result<bool, BodyMissingError> {
        let all = [true, false].into_iter().flat_map(|reduced| self.all(reduced));
        let mut found: Vec<_> =
            all.filter(|found| found.facts().labels().get(label::RUNTIME_ID) == Some(&kyma.name)).collect();
        found.sort_by_key(|found| found.key());
        let body = |found: Arc<CachedKyma>| {
            let missing = BodyMissingError { kind: "Kyma", key: found.key().to_string() };
            found.whole().cloned().ok_or(missing)
        };
        let found = found.into_iter().map(body).collect::<Result<Vec<_>, _>>()?;
        let object = |(name, version): &(String, u64)| {
            let whole = self.whole(Self::parsed(Self::object(name, &kyma.name, *version)));
            whole.whole().unwrap().clone()
        };
        Ok(found == expected.iter().map(object).collect::<Vec<_>>())
    }
}

impl Fixture {
    fn whole(&self, name: &str) -> Option<Arc<Kyma>> {
        self.bodies.0.objects.find(&key(name)).unwrap().whole().cloned()
    }

    /// Shard of a Kyma without a runtime.
    fn shard_of(&self, name: &str) -> ShardId {
        let kyma = self.bodies.0.objects.find(&key(name)).unwrap();
        assert_eq!(kyma.facts().runtime(), None);
        self.shards.of_kyma(kyma.facts().uid())
    }

    /// Delivers the present form of one Kyma.
    fn deliver(&self, kcp: &FakeApiServer, name: &str) {
        self.apply(kcp.object(&format!("kymas/{name}")).unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn acquired_shard_gets_its_whole_kymas_and_others_stay_reduced() {
    let (fixture, kcp) = Fixture::reduced(6).await;
    let (task, fetched) = fixture.start(&kcp);
    let mine = fixture.shard("k0");
    let (own, others): (Vec<_>, Vec<_>) = (0..6).partition(|n| fixture.shard(&format!("k{n}")) == mine);
    assert!(!others.is_empty(), "the test needs Kymas of other shards");
    assert!((0..6).all(|n| fixture.is_reduced(&format!("m{n}"))));

    fixture.bodies.keep(mine);
    assert!(!fixture.is_complete(mine));
    soon(fixture.bodies.are_complete(mine)).await;
    for n in &own {
        let kyma = fixture.whole(&format!("m{n}")).unwrap();
        assert_eq!((kyma.spec.modules().len(), kyma.metadata.resource_version.is_some()), (1, true));
        assert_eq!(kyma.status.as_ref().unwrap().active_channel, None, "without unread parts");
    }
    assert!(others.iter().all(|n| fixture.is_reduced(&format!("m{n}"))));
    assert_eq!(*fetched.lock(), own.iter().map(|n| key(&format!("m{n}"))).collect());
    assert_eq!(kcp.calls(), ["GET kymas"], "one list by the runtime ids");
    assert!(fixture.registry.encode().unwrap().contains(r#"kcp_bodies_fetched_total{kind="kymas"}"#));

    fixture.bodies.release(mine);
    soon(async {
        while own.iter().any(|n| !fixture.is_reduced(&format!("m{n}"))) {
            time::sleep(Duration::from_secs(1)).await;
        }
    })
    .await;
    assert_eq!(kcp.calls(), [""; 0], "a release needs no request");
    task.abort();
}

/// A new Kyma gets its runtime id later, and its shard follows from its uid until then.
#[tokio::test(start_paused = true)]
async fn kyma_without_a_runtime_is_read_with_all_others_of_its_kind() {
    let (fixture, kcp) = Fixture::reduced(2).await;
    kcp.edit("kymas/m0", |kyma| kyma["metadata"]["labels"] = json!({"a": "b"}));
    fixture.deliver(&kcp, "m0");
    let mine = fixture.shard_of("m0");
    let runtime = (0..50).map(|n| format!("r{n}")).find(|runtime| fixture.shard(runtime) != mine).unwrap();
    let theirs = fixture.shard(&runtime);
    kcp.edit("kymas/m1", |kyma| kyma["metadata"]["labels"][label::RUNTIME_ID] = json!(runtime));
    fixture.deliver(&kcp, "m1");
    assert!(fixture.is_reduced("m0") && fixture.is_reduced("m1"));
    let (task, _) = fixture.start(&kcp);
    fixture.bodies.keep(mine);
    soon(fixture.bodies.are_complete(mine)).await;
    assert_eq!(fixture.whole("m0").unwrap().metadata.labels.as_ref().unwrap()["a"], "b");
    assert_eq!(kcp.calls(), ["GET kymas", "GET kymas"], "without the label, and with an empty one");
    fixture.bodies.keep(theirs);
    soon(fixture.bodies.are_complete(theirs)).await;
    assert_eq!(kcp.calls(), ["GET kymas"]);
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn kyma_that_is_gone_when_it_is_read_holds_the_shard_up_until_the_watch_reports_it() {
    let (fixture, kcp) = Fixture::reduced(1).await;
    kcp.edit("kymas/m0", |kyma| kyma["metadata"]["labels"] = Value::Null);
    fixture.deliver(&kcp, "m0");
    kcp.remove("kymas/m0");
    let (task, _) = fixture.start(&kcp);
    let mine = fixture.shard_of("m0");
    fixture.bodies.keep(mine);
    assert!(timeout(Duration::from_secs(60), fixture.bodies.are_complete(mine)).await.is_err());
    let failures = r#"kcp_body_fetch_failures_total{kind="kymas"}"#;
    assert!(!fixture.registry.encode().unwrap().contains(failures), "that is no failure");
    let inner = &fixture.bodies.0;
    let known = inner.objects.find(&key("m0")).unwrap();
    inner.writer.lock().apply(&Event::Delete(known));
    soon(fixture.bodies.are_complete(mine)).await;
    assert!(inner.objects.find(&key("m0")).is_none());
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn body_of_another_version_or_of_a_deleted_kyma_is_not_taken() {
    let (fixture, kcp) = Fixture::reduced(2).await;
    let mine = fixture.shard("k0");
    let of = |name: &str| serde_json::from_value(kcp.object(&format!("kymas/{name}")).unwrap()).unwrap();
    let missing = fixture.bodies.missing(|_| true).unwrap();
    fixture.bodies.keep(mine);
    fixture.bodies.keep(fixture.shard("k1"));
    let deleted = of("m1");
    let inner = &fixture.bodies.0;
    let known = inner.objects.find(&key("m1")).unwrap();
    inner.writer.lock().apply(&Event::Delete(known));
    kcp.edit("kymas/m0", |kyma| kyma["spec"]["channel"] = json!("fast"));
    assert_eq!(fixture.bodies.add(vec![of("m0"), deleted], &missing), BTreeSet::new());
    assert!(fixture.is_reduced("m0") && inner.objects.find(&key("m1")).is_none());
    // The watch brings the body of its version itself.
    fixture.deliver(&kcp, "m0");
    assert_eq!(fixture.whole("m0").unwrap().spec.channel, "fast");
    assert!(fixture.is_complete(mine));
}

#[tokio::test(start_paused = true)]
async fn kyma_that_changes_its_shard_gets_the_form_that_is_due_there_by_its_own_event() {
    let (fixture, kcp) = Fixture::reduced(1).await;
    let mine = fixture.shard("k0");
    fixture.bodies.keep(mine);
    let other = (0..50).map(|n| format!("r{n}")).find(|runtime| fixture.shard(runtime) != mine).unwrap();
    for (runtime, is_reduced) in [(&*other, true), ("k0", false), (&*other, true)] {
        kcp.edit("kymas/m0", |kyma| kyma["metadata"]["labels"][label::RUNTIME_ID] = json!(runtime));
        fixture.deliver(&kcp, "m0");
        assert_eq!(fixture.is_reduced("m0"), is_reduced, "{runtime}");
        assert!(fixture.is_complete(mine), "nothing is to be fetched");
    }
}

#[tokio::test(start_paused = true)]
async fn invalid_kyma_stays_reduced_and_holds_up_no_shard() {
    let (fixture, kcp) = Fixture::reduced(1).await;
    kcp.edit("kymas/m0", |kyma| kyma["spec"]["channel"] = json!(1));
    let (task, _) = fixture.start(&kcp);
    let mine = fixture.shard("k0");
    fixture.bodies.keep(mine);
    soon(fixture.bodies.are_complete(mine)).await;
    assert!(fixture.is_reduced("m0"));
    kcp.edit("kymas/m0", |kyma| kyma["spec"]["channel"] = json!("fast"));
    fixture.deliver(&kcp, "m0");
    assert_eq!(fixture.whole("m0").unwrap().spec.channel, "fast");
    task.abort();
}

/// Each replica alone decides by the facts of the whole fleet.
#[tokio::test(start_paused = true)]
async fn reduced_kyma_keeps_its_facts() {
    let (fixture, kcp) = Fixture::reduced(1).await;
    let facts = |kyma: KymaFacts<'_>| {
        (kyma.labels().clone(), kyma.uid().to_owned(), kyma.runtime(), kyma.is_managed(), kyma.is_deleting())
    };
    let cached = fixture.bodies.0.objects.find(&key("m0")).unwrap();
    let listed: Kyma = serde_json::from_value(kcp.object("kymas/m0").unwrap()).unwrap();
    assert!(cached.is_reduced());
    assert_eq!(facts(cached.facts()), facts((&listed).into()));
    assert_eq!(fixture.probe.len(), 1);
}
