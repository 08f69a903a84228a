//! Deletions that wait: for blocking objects, and for a runtime cluster that does not come back.

use super::*;

const FINALIZERS: [&str; 2] = ["declarative.kyma-project.io/finalizer", "label-removal-finalizer"];

impl Fixture {
    fn deletions(&self) -> u64 {
        self.ctx.metrics.requeues.counted("kyma_deletion", "intended")
    }

    fn waits(&self) -> String {
        self.status()["lastOperation"]["operation"].as_str().unwrap().to_owned()
    }

    /// One whose access Secret is gone, with a Manifest that keeps its finalizers.
    async fn lost() -> (Self, String) {
        let mut fixture = Self::with_keda().await;
        let (id, _) = fixture.manifest().unwrap();
        fixture.kcp.edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(FINALIZERS));
        fixture.ctx.runtime_gone_after = Duration::from_secs(5);
        fixture.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
        fixture.delete();
        (fixture, id)
    }

    fn outlast(&self) {
        self.hold_since("2026-01-01T00:00:00Z".into());
    }

    /// All conditions have held since this time.
    fn hold_since(&self, time: Value) {
        self.kcp.edit("kymas/k", |kyma| {
            for condition in kyma["status"]["conditions"].as_array_mut().unwrap() {
                condition["lastTransitionTime"] = time.clone();
            }
        });
    }

    /// All conditions have held for this long.
    fn hold_for(&self, seconds: i64) {
        let begin = Timestamp::from_second(Timestamp::now().as_second() - seconds).unwrap();
        self.hold_since(begin.to_string().into());
    }
}

#[tokio::test]
async fn blocked_deletion_is_checked_ever_less_often_and_counted_once() {
    let mut fixture = Fixture::settled().await;
    let id = "customresourcedefinitions/moduletemplates.operator.kyma-project.io";
    fixture
        .runtime
        .edit(id, |crd| crd["metadata"]["finalizers"] = json!(["customresourcecleanup.apiextensions.k8s.io"]));
    fixture.delete();
    let mut delays = Vec::new();
    for _ in 0..12 {
        delays.extend(fixture.kyma().await.requeue_after);
    }
    assert_eq!(
        fixture.waits(),
        "waiting for the CRD moduletemplates.operator.kyma-project.io to be deleted in the runtime"
    );
    assert!(delays[0] <= Duration::from_secs(1), "{delays:?}");
    let last = delays[11];
    assert!((30..=60).contains(&last.as_secs()), "{delays:?}");
    assert_eq!(fixture.deletions(), 1);

    fixture.runtime.remove(id);
    let mut steps = 0;
    while fixture.kcp.object("kymas/k").is_some() {
        let outcome = fixture.kyma().await;
        assert!(outcome.requeue_after.is_none_or(|after| after <= Duration::from_secs(2)), "progress: {outcome:?}");
        steps += 1;
        assert!(steps < 10);
    }
    assert_eq!(fixture.deletions(), 1);
}

#[tokio::test]
async fn waiting_deletion_names_the_objects_in_the_runtime_once_no_module_is_left() {
    let mut fixture = Fixture::with_keda().await;
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(FINALIZERS));
    fixture.delete();
    fixture.kyma().await;
    assert_eq!(fixture.waits(), "waiting for modules to be deleted");
    fixture.kcp.remove(&id);
    fixture.kyma().await;
    assert_eq!(fixture.waits(), "waiting for the objects in the runtime to be deleted");
}

#[tokio::test]
async fn manifests_of_a_runtime_that_is_gone_lose_their_finalizers() {
    let (mut fixture, id) = Fixture::lost().await;
    let outcome = fixture.kyma().await;
    assert!(outcome.requeue_after.is_some_and(|wait| wait <= Duration::from_secs(5)), "{outcome:?}");
    let waits = "waiting for an access Secret; without one for 5 s the runtime counts as gone";
    assert_eq!((fixture.waits().as_str(), &fixture.status()["modules"][0]["state"]), (waits, &json!("Deleting")));
    assert_eq!(fixture.manifest().unwrap().1["metadata"]["finalizers"], json!(FINALIZERS));

    fixture.outlast();
    fixture.kcp.edit("secrets/access", |secret| {
        *secret = json!({"metadata": {"name": "access", "labels": {"operator.kyma-project.io/kyma-name": "k"}}})
    });
    fixture.kyma().await;
    assert_eq!(
        fixture.manifest().unwrap().1["metadata"]["finalizers"],
        json!(FINALIZERS),
        "the cache of Secrets is behind"
    );
    assert_eq!(fixture.waits(), waits);

    fixture.kcp.remove("secrets/access");
    fixture.forget_calls();
    fixture.kyma().await;
    assert!(fixture.manifest().is_none() && fixture.kcp.object("kymas/k").is_none());
    assert_eq!(fixture.kcp.writes(), [format!("PATCH {id}"), "PATCH kymas/k".to_owned()]);
}

fn seen_deleted() -> Clients {
    Box::new(|_| Err(RuntimeAccessError::SecretDeleted("access".into()).into()))
}

/// infrastructure-manager deletes the Secret right before the cluster.
#[tokio::test]
async fn runtime_whose_secret_was_seen_being_deleted_is_gone_after_a_minute() {
    let (mut fixture, id) = Fixture::lost().await;
    fixture.ctx.runtime_gone_after = RUNTIME_GONE_AFTER;
    fixture.ctx.clients = seen_deleted();
    let is_minute =
        |outcome: &ReconcileOutcome| outcome.requeue_after.is_some_and(|wait| (50..=60).contains(&wait.as_secs()));
    let outcome = fixture.kyma().await;
    assert!(is_minute(&outcome), "{outcome:?}");
    let access = fixture.condition("RuntimeAccess");
    let text = "the access Secret access was deleted after the deletion of this Kyma began";
    assert_eq!((&access["reason"], &access["message"]), (&json!("AccessSecretDeleted"), &json!(text)));
    assert_eq!(fixture.waits(), "waiting for an access Secret; without one for 60 s the runtime counts as gone");
    // Another process did not see it.
    fixture.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
    fixture.forget_calls();
    let outcome = fixture.kyma().await;
    assert!(is_minute(&outcome), "{outcome:?}");
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new());
    fixture.hold_for(61);
    fixture.kcp.edit("secrets/new", |secret| {
        *secret = json!({"metadata": {"name": "new", "labels": {"operator.kyma-project.io/kyma-name": "k"}}})
    });
    fixture.kyma().await;
    assert_eq!(fixture.manifest().unwrap().1["metadata"]["finalizers"], json!(FINALIZERS), "the cache is behind");
    fixture.kcp.remove("secrets/new");
    fixture.kyma().await;
    assert!(fixture.manifest().is_none() && fixture.kcp.object("kymas/k").is_none(), "{id}");
}

#[tokio::test]
async fn minute_is_too_short_for_a_secret_that_was_not_seen_being_deleted_or_exists() {
    for is_seen in [false, true] {
        let (mut fixture, _) = Fixture::lost().await;
        fixture.ctx.runtime_gone_after = RUNTIME_GONE_AFTER;
        if is_seen {
            fixture.ctx.clients = seen_deleted();
            // It lost its label.
            fixture.kcp.edit("secrets/access", |secret| *secret = json!({"metadata": {"name": "access"}}));
        }
        fixture.kyma().await;
        assert_eq!(fixture.condition("RuntimeAccess")["reason"], SECRET_MISSING);
        fixture.hold_for(61);
        let outcome = fixture.kyma().await;
        assert!(outcome.requeue_after.is_some_and(|wait| wait > Duration::from_secs(500)), "{outcome:?}");
        assert!(fixture.manifest().is_some());
    }
}

#[tokio::test]
async fn secret_that_comes_back_ends_the_minute() {
    let mut fixture = Fixture::settled().await;
    let usable = std::mem::replace(&mut fixture.ctx.clients, seen_deleted());
    fixture.delete();
    fixture.kyma().await;
    assert_eq!(fixture.condition("RuntimeAccess")["reason"], "AccessSecretDeleted");
    fixture.ctx.clients = usable;
    fixture.kyma().await;
    assert_eq!(fixture.condition("RuntimeAccess")["status"], "True");
}

#[tokio::test]
async fn kyma_shows_a_manifest_until_it_is_really_gone() {
    let (mut fixture, id) = Fixture::lost().await;
    fixture.kyma().await;
    fixture.outlast();
    fixture
        .kcp
        .meanwhile(&format!("PATCH {id}"), &id, |manifest| manifest["metadata"]["labels"]["other"] = json!("here"));
    assert_eq!(fixture.kyma().await.failed, WorkSet::of(&[Work::Kyma]), "a concurrent write is not overwritten");
    assert_eq!(fixture.status()["modules"][0]["name"], "keda");
    fixture.kyma().await;
    assert!(fixture.manifest().is_none() && fixture.kcp.object("kymas/k").is_none());
}

#[tokio::test]
async fn manifest_without_its_label_is_deleted_and_waited_for_as_well() {
    let mut fixture = Fixture::with_keda().await;
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.edit(&id, |manifest| {
        manifest["metadata"]["finalizers"] = json!(FINALIZERS);
        manifest["metadata"]["labels"].as_object_mut().unwrap().remove("operator.kyma-project.io/kyma-name");
    });
    fixture.delete();
    for _ in 0..2 {
        fixture.kyma().await;
        assert!(!fixture.manifest().unwrap().1["metadata"]["deletionTimestamp"].is_null());
        assert_eq!(
            (fixture.waits().as_str(), fixture.runtime.object("kymas/default").is_some()),
            ("waiting for modules to be deleted", true)
        );
    }
}

const OURS: &str = "operator.kyma-project.io/Kyma";
const PURGE: &str = "operator.kyma-project.io/purge-finalizer";
const MONITORING: &str = "operator.kyma-project.io/runtime-monitoring-finalizer";

impl Fixture {
    fn set_finalizers(&self, finalizers: &[&str]) {
        self.kcp.edit("kymas/k", |kyma| kyma["metadata"]["finalizers"] = json!(finalizers));
    }

    fn finalizers(&self) -> Option<Value> {
        self.kcp.object("kymas/k").map(|kyma| kyma["metadata"]["finalizers"].clone())
    }
}

/// `neighbours.md`: lifecycle-manager before 1.21 puts it on every Kyma, and later versions leave it there.
#[tokio::test]
async fn purge_finalizer_goes_with_ours_in_one_write_and_not_earlier() {
    let mut fixture = Fixture::with_keda().await;
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(FINALIZERS));
    fixture.set_finalizers(&[PURGE, OURS]);
    fixture.kyma().await;
    assert_eq!(fixture.finalizers(), Some(json!([PURGE, OURS])), "a Kyma that is not deleted keeps it");
    fixture.delete();
    fixture.kyma().await;
    assert_eq!(fixture.finalizers(), Some(json!([PURGE, OURS])), "a module blocks the deletion");
    fixture.kcp.remove(&id);
    let mut written = Vec::new();
    for _ in 0..10 {
        fixture.kyma().await;
        written = fixture.kcp.writes();
        match fixture.finalizers() {
            Some(left) => assert_eq!(left, json!([PURGE, OURS])),
            None => break,
        }
    }
    assert_eq!(fixture.finalizers(), None, "the Kyma is gone");
    assert_eq!(written, ["PATCH kymas/k"]);
}

#[tokio::test]
async fn finalizers_of_others_are_named_before_ours_goes_and_until_they_are_gone() {
    let mut fixture = Fixture::settled().await;
    fixture.set_finalizers(&["example.test/billing", OURS, MONITORING, PURGE]);
    fixture.delete();
    for _ in 0..10 {
        fixture.kyma().await;
    }
    assert_eq!(fixture.finalizers(), Some(json!(["example.test/billing", MONITORING])));
    let waits = format!("waiting for others to remove their finalizers: example.test/billing, {MONITORING}");
    assert_eq!((fixture.waits(), &fixture.status()["state"]), (waits, &json!("Deleting")));
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new(), "said once");
    // An earlier version left the finalizer of the purge.
    fixture.set_finalizers(&[MONITORING, PURGE]);
    fixture.kyma().await;
    assert_eq!(fixture.finalizers(), Some(json!([MONITORING])));
    assert_eq!(fixture.waits(), format!("waiting for others to remove their finalizers: {MONITORING}"));
}

#[tokio::test]
async fn deletion_without_our_finalizer_leaves_what_is_not_cleaned_up_or_not_ours() {
    let mut fixture = Fixture::with_keda().await;
    fixture.set_finalizers(&[PURGE]);
    fixture.delete();
    fixture.kyma().await;
    assert_eq!(fixture.finalizers(), Some(json!([PURGE])), "a user removed our finalizer while a module is left");

    let mut fixture = Fixture::new();
    fixture.set_finalizers(&[PURGE]);
    fixture.delete();
    fixture.kyma().await;
    assert_eq!(fixture.finalizers(), Some(json!([PURGE])), "lifecycle-manager's Kyma");
}

/// The access Secret may outlive its cluster.
#[tokio::test]
async fn deletion_without_access_says_how_it_ends_if_the_cluster_is_gone() {
    let remedy = "; if the cluster no longer exists, delete its access Secret";
    for has_module in [true, false] {
        let mut fixture = if has_module { Fixture::with_keda().await } else { Fixture::settled().await };
        if let Some((id, _)) = fixture.manifest() {
            fixture.kcp.edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(FINALIZERS));
        }
        fixture.delete();
        for plural in ["customresourcedefinitions/kymas.operator.kyma-project.io", "kymas/default"] {
            fixture.runtime.refuse(&format!("GET {plural}"), 503);
        }
        assert_eq!(fixture.kyma().await.class, Some(ErrorClass::Transport));
        assert_eq!(fixture.waits(), format!("the runtime's API server cannot be reached{remedy}"));
        assert_eq!(fixture.condition("RuntimeAccess")["message"], "the runtime's API server cannot be reached");
        let several = || RuntimeAccessError::Several(vec!["a".into(), "b".into()]);
        fixture.ctx.clients = Box::new(move |_| Err(several().into()));
        fixture.kyma().await;
        assert_eq!(fixture.waits(), format!("{}{remedy}", several()));
        // A Kyma that stays is never told so.
        let mut fixture = Fixture::settled().await;
        fixture.runtime.refuse("GET kymas/default", 503);
        fixture.kyma().await;
        assert_eq!(fixture.waits(), "the runtime's API server cannot be reached");
    }
}
