//! Changes in the runtime that its agent reported.

use tidewatch_contract::event::{Change, Object};
use tidewatch_engine::testing::WATCH_PODS_AFTER;

use super::{drift::affected, *};

impl Fixture {
    pub(super) async fn report(&mut self, objects: &[(&str, &str, Change)]) -> ReconcileOutcome {
        let drift = self.reported(objects);
        match affected(self.manifest().map(Arc::new), &drift, &self.ctx.memories, |_| false).pop() {
            Some((_, drift)) => self.run(drift).await,
            None => ended(),
        }
    }

    /// The report of objects as they are now.
    fn reported(&self, objects: &[(&str, &str, Change)]) -> Drift {
        let object = |(subject, kind, change): &(&str, &str, Change)| {
            let id = format!("{}/{}", subject.split('/').nth(2).unwrap(), subject.rsplit('/').next().unwrap());
            let version = self.runtime.object(&id).map(|found| found["metadata"]["resourceVersion"].clone());
            Object {
                subject: subject.parse().unwrap(),
                kind: (*kind).to_owned(),
                uid: String::new(),
                resource_version: version.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned(),
                generation: None,
                change: *change,
            }
        };
        Drift::Objects(objects.iter().map(object).collect())
    }

    /// Replaces the metadata of the Kyma in the cache.
    fn put_kyma(&mut self, metadata: Value) {
        let mut kyma = json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "Kyma", "metadata": metadata,
            "spec": {"channel": "regular"}});
        kyma["metadata"]["name"] = json!("k");
        kyma["metadata"]["namespace"] = json!(NAMESPACE);
        self.kymas.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(kyma).unwrap()));
    }
}

const MAP: (&str, &str, Change) = ("/v1/configmaps/kyma-system/a", "ConfigMap", Change::Spec);

#[tokio::test(start_paused = true)]
async fn reported_object_is_read_and_repaired_and_no_other() {
    let mut fixture = Fixture::installed().await;
    fixture.verify().await;
    fixture.runtime.calls();
    fixture.runtime.remove("configmaps/a");
    assert_eq!(fixture.report(&[MAP]).await, ended());
    let calls = fixture.runtime.calls();
    assert_eq!(calls, ["GET configmaps/a", "PATCH configmaps/a", "GET deployments/d"]);
    assert_eq!(fixture.kcp.calls(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn reported_object_is_repaired_later_if_an_earlier_stage_ends_the_reconcile() {
    let mut fixture = Fixture::installed().await;
    let mut next = objects();
    next[2]["spec"]["versions"][0]["schema"] = json!({"openAPIV3Schema": {"type": "object"}});
    fixture.set_layer(ModuleObjects::Ready(Arc::new(next)));
    fixture.edit(|manifest| manifest["spec"]["install"]["source"]["ref"] = json!(NEXT));
    fixture.runtime.refuse("WRITE customresourcedefinitions", 500);
    fixture.reconcile().await;
    fixture.runtime.remove("configmaps/a");
    fixture.report(&[MAP]).await;
    fixture.runtime.refuse_nothing();
    fixture.runtime.calls();
    assert_eq!(fixture.reconcile().await, ended());
    let definition = "PATCH customresourcedefinitions/samples.example.test";
    assert_eq!(fixture.runtime.writes(), [definition, "PATCH configmaps/a"]);
}

/// The end of the hand-back enqueues the parked work without another report.
#[tokio::test(start_paused = true)]
async fn report_while_a_hand_back_is_requested_is_parked_unless_the_kyma_is_being_deleted() {
    let mut fixture = Fixture::installed().await;
    let labels = json!({label::HAND_BACK: label::HAND_BACK_REQUESTED});
    fixture.runtime.remove("configmaps/a");
    fixture.put_kyma(json!({"labels": labels}));
    assert_eq!(fixture.report(&[MAP]).await, ReconcileOutcome::default());
    assert_eq!(fixture.runtime.calls(), Vec::<String>::new());
    fixture.put_kyma(json!({"labels": labels, "deletionTimestamp": "2026-01-01T00:00:00Z"}));
    assert_eq!(fixture.report(&[MAP]).await, ended());
    assert_eq!(fixture.runtime.writes(), ["PATCH configmaps/a"]);
}

#[tokio::test(start_paused = true)]
async fn echo_of_our_own_write_causes_no_reconcile_once() {
    let mut fixture = Fixture::installed().await;
    fixture.report(&[MAP]).await;
    assert_eq!(fixture.runtime.calls(), Vec::<String>::new());
    fixture.report(&[MAP]).await;
    assert_eq!(fixture.runtime.calls(), ["GET configmaps/a", "GET deployments/d"], "another change");
}

/// The agent may report a write before the response to it has arrived.
#[tokio::test(start_paused = true)]
async fn report_that_overtook_the_response_of_our_own_write_causes_no_request() {
    let mut fixture = Fixture::installed().await;
    let before = fixture.reported(&[MAP]);
    assert_eq!(fixture.run(before.as_only_cause()).await, ended());
    assert_eq!(fixture.runtime.calls(), Vec::<String>::new());

    fixture.runtime.remove("configmaps/a");
    fixture.verify().await;
    fixture.runtime.calls();
    let before = fixture.reported(&[MAP]);
    fixture.run(before).await;
    assert_eq!(fixture.runtime.calls(), ["GET deployments/d"], "the work has another cause");
}

#[tokio::test(start_paused = true)]
async fn unhealthy_manager_is_shown_when_it_is_reported() {
    let mut fixture = Fixture::installed().await;
    fixture.runtime.edit("deployments/d", |deployment| {
        deployment["status"]["availableReplicas"] = json!(0);
        deployment["status"]["readyReplicas"] = json!(0);
        deployment["status"]["conditions"][0]["status"] = json!("False");
    });
    fixture.run(Drift::None).await;
    assert_eq!(fixture.state().0, State::Processing);
    fixture.make_available();
    fixture.run(Drift::None).await;
    assert_eq!(fixture.state().0, State::Ready);
    assert_eq!(fixture.runtime.writes(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn pods_of_a_manager_are_watched_once_it_was_not_ready_for_a_while_and_until_it_is() {
    let mut fixture = Fixture::installed().await;
    let watched = |fixture: &Fixture| {
        let pods = fixture.ctx.memories.pods(&key());
        let replanned = fixture.ctx.memories.next_replanned().now_or_never();
        (pods.map(|pods| (pods.namespace, pods.selector)), replanned.map(|kyma| kyma.name.clone()))
    };
    fixture.runtime.edit("deployments/d", |deployment| {
        deployment["status"]["availableReplicas"] = json!(0);
        deployment["status"]["readyReplicas"] = json!(0);
        deployment["status"]["conditions"][0]["status"] = json!("False");
    });
    let kyma = || Some("k".to_owned());
    let pods = || Some(("kyma-system".to_owned(), "app=d".to_owned()));
    fixture.run(Drift::None).await;
    assert_eq!(watched(&fixture), (None, None), "most managers are ready soon");
    tokio::time::advance(WATCH_PODS_AFTER).await;
    fixture.run(Drift::None).await;
    assert_eq!(watched(&fixture), (pods(), kyma()));
    fixture.run(Drift::None).await;
    assert_eq!(watched(&fixture), (pods(), None));
    fixture.make_available();
    fixture.run(Drift::None).await;
    assert_eq!(watched(&fixture), (None, kyma()));
    // The time begins anew.
    fixture.runtime.edit("deployments/d", |deployment| deployment["status"] = json!({}));
    fixture.run(Drift::None).await;
    assert_eq!(watched(&fixture), (None, None));
}

#[tokio::test(start_paused = true)]
async fn reconcile_begins_with_our_last_write_while_the_cache_is_older() {
    let mut fixture = Fixture::new();
    fixture.set_layer(ModuleObjects::Pending);
    fixture.reconcile().await;
    let old = fixture.ctx.stores.manifests.get(&key()).unwrap().unwrap();
    fixture.set_layer(ModuleObjects::Ready(Arc::new(objects())));
    // The watch has not delivered the first status.
    assert_eq!(
        old.metadata.resource_version,
        fixture.ctx.stores.manifests.get(&key()).unwrap().unwrap().metadata.resource_version
    );
    let queued = QueuedWork { work: WorkSet::MANIFEST, priority: Priority::User, drift: Drift::None };
    let outcome = run_within(&fixture.ctx, &key(), &queued, Duration::from_secs(60)).await;
    assert!(outcome.failed.is_empty(), "{outcome:?}");
    assert!(!fixture.synced().is_empty());
    // A version of another writer is taken from the cache.
    fixture.edit(|manifest| manifest["metadata"]["labels"]["theirs"] = json!("x"));
    fixture.make_available();
    fixture.reconcile().await;
    assert_eq!(fixture.state().0, State::Ready);
}
