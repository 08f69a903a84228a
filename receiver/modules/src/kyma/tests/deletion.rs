//! Deletions that wait: for blocking objects, and for a runtime cluster that does not come back.

use super::*;

const FINALIZERS: [&str; 2] = ["declarative.kyma-project.io/finalizer", "label-removal-finalizer"];

impl Bed {
    fn deletions(&self) -> u64 {
        self.ctx.metrics.requeues.counted("kyma_deletion", "intended")
    }

    fn waits(&self) -> String {
        self.status()["lastOperation"]["operation"].as_str().unwrap().to_owned()
    }

    /// One whose access Secret is gone, with a Manifest that keeps its finalizers.
    async fn lost() -> (Self, String) {
        let mut bed = Self::with_keda().await;
        let (id, _) = bed.manifest().unwrap();
        bed.kcp.edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(FINALIZERS));
        bed.ctx.settings.runtime_gone_after = Duration::from_secs(5);
        bed.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
        bed.delete();
        (bed, id)
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
    let mut bed = Bed::settled().await;
    let id = "customresourcedefinitions/moduletemplates.operator.kyma-project.io";
    bed.runtime.edit(id, |crd| crd["metadata"]["finalizers"] = json!(["customresourcecleanup.apiextensions.k8s.io"]));
    bed.delete();
    let mut delays = Vec::new();
    for _ in 0..12 {
        delays.extend(bed.kyma().await.requeue_after);
    }
    assert_eq!(
        bed.waits(),
        "waiting for the CRD moduletemplates.operator.kyma-project.io to be deleted in the runtime"
    );
    assert!(delays[0] <= Duration::from_secs(1), "{delays:?}");
    let last = delays[11];
    assert!((30..=60).contains(&last.as_secs()), "{delays:?}");
    assert_eq!(bed.deletions(), 1);

    bed.runtime.remove(id);
    let mut steps = 0;
    while bed.kcp.object("kymas/k").is_some() {
        let outcome = bed.kyma().await;
        assert!(outcome.requeue_after.is_none_or(|after| after <= Duration::from_secs(2)), "progress: {outcome:?}");
        steps += 1;
        assert!(steps < 10);
    }
    assert_eq!(bed.deletions(), 1);
}

#[tokio::test]
async fn waiting_deletion_names_the_objects_in_the_runtime_once_no_module_is_left() {
    let mut bed = Bed::with_keda().await;
    let (id, _) = bed.manifest().unwrap();
    bed.kcp.edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(FINALIZERS));
    bed.delete();
    bed.kyma().await;
    assert_eq!(bed.waits(), "waiting for modules to be deleted");
    bed.kcp.remove(&id);
    bed.kyma().await;
    assert_eq!(bed.waits(), "waiting for the objects in the runtime to be deleted");
}

#[tokio::test]
async fn manifests_of_a_runtime_that_is_gone_lose_their_finalizers() {
    let (mut bed, id) = Bed::lost().await;
    let outcome = bed.kyma().await;
    assert!(outcome.requeue_after.is_some_and(|wait| wait <= Duration::from_secs(5)), "{outcome:?}");
    let waits = "waiting for an access Secret; without one for 5 s the runtime counts as gone";
    assert_eq!((bed.waits().as_str(), &bed.status()["modules"][0]["state"]), (waits, &json!("Deleting")));
    assert_eq!(bed.manifest().unwrap().1["metadata"]["finalizers"], json!(FINALIZERS));

    bed.outlast();
    bed.kcp.edit("secrets/access", |secret| {
        *secret = json!({"metadata": {"name": "access", "labels": {"operator.kyma-project.io/kyma-name": "k"}}})
    });
    bed.kyma().await;
    assert_eq!(
        bed.manifest().unwrap().1["metadata"]["finalizers"],
        json!(FINALIZERS),
        "the cache of Secrets is behind"
    );
    assert_eq!(bed.waits(), waits);

    bed.kcp.remove("secrets/access");
    bed.forget_calls();
    bed.kyma().await;
    assert!(bed.manifest().is_none() && bed.kcp.object("kymas/k").is_none());
    assert_eq!(bed.kcp.writes(), [format!("PATCH {id}"), "PATCH kymas/k".to_owned()]);
}

fn seen_deleted() -> Clients {
    Box::new(|_| Err(RuntimeAccessError::SecretDeleted("access".into()).into()))
}

/// infrastructure-manager deletes the Secret right before the cluster.
#[tokio::test]
async fn runtime_whose_secret_was_seen_being_deleted_is_gone_after_a_minute() {
    let (mut bed, id) = Bed::lost().await;
    bed.ctx.settings = Settings::default();
    bed.ctx.clients = seen_deleted();
    let is_minute =
        |outcome: &ReconcileOutcome| outcome.requeue_after.is_some_and(|wait| (50..=60).contains(&wait.as_secs()));
    let outcome = bed.kyma().await;
    assert!(is_minute(&outcome), "{outcome:?}");
    let access = bed.condition("RuntimeAccess");
    let text = "the access Secret access was deleted after the deletion of this Kyma began";
    assert_eq!((&access["reason"], &access["message"]), (&json!("AccessSecretDeleted"), &json!(text)));
    assert_eq!(bed.waits(), "waiting for an access Secret; without one for 60 s the runtime counts as gone");
    // Another process did not see it.
    bed.ctx.clients = Box::new(|_| Err(RuntimeAccessError::Missing.into()));
    bed.forget_calls();
    let outcome = bed.kyma().await;
    assert!(is_minute(&outcome), "{outcome:?}");
    assert_eq!(bed.kcp.writes(), Vec::<String>::new());
    bed.hold_for(61);
    bed.kcp.edit("secrets/new", |secret| {
        *secret = json!({"metadata": {"name": "new", "labels": {"operator.kyma-project.io/kyma-name": "k"}}})
    });
    bed.kyma().await;
    assert_eq!(bed.manifest().unwrap().1["metadata"]["finalizers"], json!(FINALIZERS), "the cache is behind");
    bed.kcp.remove("secrets/new");
    bed.kyma().await;
    assert!(bed.manifest().is_none() && bed.kcp.object("kymas/k").is_none(), "{id}");
}

#[tokio::test]
async fn minute_is_too_short_for_a_secret_that_was_not_seen_being_deleted_or_exists() {
    for is_seen in [false, true] {
        let (mut bed, _) = Bed::lost().await;
        bed.ctx.settings = Settings::default();
        if is_seen {
            bed.ctx.clients = seen_deleted();
            // It lost its label.
            bed.kcp.edit("secrets/access", |secret| *secret = json!({"metadata": {"name": "access"}}));
        }
        bed.kyma().await;
        assert_eq!(bed.condition("RuntimeAccess")["reason"], SECRET_MISSING);
        bed.hold_for(61);
        let outcome = bed.kyma().await;
        assert!(outcome.requeue_after.is_some_and(|wait| wait > Duration::from_secs(500)), "{outcome:?}");
        assert!(bed.manifest().is_some());
    }
}

#[tokio::test]
async fn secret_that_comes_back_ends_the_minute() {
    let mut bed = Bed::settled().await;
    let usable = std::mem::replace(&mut bed.ctx.clients, seen_deleted());
    bed.delete();
    bed.kyma().await;
    assert_eq!(bed.condition("RuntimeAccess")["reason"], "AccessSecretDeleted");
    bed.ctx.clients = usable;
    bed.kyma().await;
    assert_eq!(bed.condition("RuntimeAccess")["status"], "True");
}

#[tokio::test]
async fn kyma_shows_a_manifest_until_it_is_really_gone() {
    let (mut bed, id) = Bed::lost().await;
    bed.kyma().await;
    bed.outlast();
    bed.kcp.meanwhile(&format!("PATCH {id}"), &id, |manifest| manifest["metadata"]["labels"]["other"] = json!("here"));
    assert_eq!(bed.kyma().await.failed, WorkSet::of(&[Work::Kyma]), "a concurrent write is not overwritten");
    assert_eq!(bed.status()["modules"][0]["name"], "keda");
    bed.kyma().await;
    assert!(bed.manifest().is_none() && bed.kcp.object("kymas/k").is_none());
}

#[tokio::test]
async fn manifest_without_its_label_is_deleted_and_waited_for_as_well() {
    let mut bed = Bed::with_keda().await;
    let (id, _) = bed.manifest().unwrap();
    bed.kcp.edit(&id, |manifest| {
        manifest["metadata"]["finalizers"] = json!(FINALIZERS);
        manifest["metadata"]["labels"].as_object_mut().unwrap().remove("operator.kyma-project.io/kyma-name");
    });
    bed.delete();
    for _ in 0..2 {
        bed.kyma().await;
        assert!(!bed.manifest().unwrap().1["metadata"]["deletionTimestamp"].is_null());
        assert_eq!(
            (bed.waits().as_str(), bed.runtime.object("kymas/default").is_some()),
            ("waiting for modules to be deleted", true)
        );
    }
}

const OURS: &str = "operator.kyma-project.io/Kyma";
const PURGE: &str = "operator.kyma-project.io/purge-finalizer";
const MONITORING: &str = "operator.kyma-project.io/runtime-monitoring-finalizer";

impl Bed {
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
    let mut bed = Bed::with_keda().await;
    let (id, _) = bed.manifest().unwrap();
    bed.kcp.edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(FINALIZERS));
    bed.set_finalizers(&[PURGE, OURS]);
    bed.kyma().await;
    assert_eq!(bed.finalizers(), Some(json!([PURGE, OURS])), "a Kyma that is not deleted keeps it");
    bed.delete();
    bed.kyma().await;
    assert_eq!(bed.finalizers(), Some(json!([PURGE, OURS])), "a module blocks the deletion");
    bed.kcp.remove(&id);
    let mut written = Vec::new();
    for _ in 0..10 {
        bed.kyma().await;
        written = bed.kcp.writes();
        match bed.finalizers() {
            Some(left) => assert_eq!(left, json!([PURGE, OURS])),
            None => break,
        }
    }
    assert_eq!(bed.finalizers(), None, "the Kyma is gone");
    assert_eq!(written, ["PATCH kymas/k"]);
}

#[tokio::test]
async fn finalizers_of_others_are_named_before_ours_goes_and_until_they_are_gone() {
    let mut bed = Bed::settled().await;
    bed.set_finalizers(&["example.test/billing", OURS, MONITORING, PURGE]);
    bed.delete();
    for _ in 0..10 {
        bed.kyma().await;
    }
    assert_eq!(bed.finalizers(), Some(json!(["example.test/billing", MONITORING])));
    let waits = format!("waiting for others to remove their finalizers: example.test/billing, {MONITORING}");
    assert_eq!((bed.waits(), &bed.status()["state"]), (waits, &json!("Deleting")));
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!(bed.kcp.writes(), Vec::<String>::new(), "said once");
    // An earlier version left the finalizer of the purge.
    bed.set_finalizers(&[MONITORING, PURGE]);
    bed.kyma().await;
    assert_eq!(bed.finalizers(), Some(json!([MONITORING])));
    assert_eq!(bed.waits(), format!("waiting for others to remove their finalizers: {MONITORING}"));
}

#[tokio::test]
async fn deletion_without_our_finalizer_leaves_what_is_not_cleaned_up_or_not_ours() {
    let mut bed = Bed::with_keda().await;
    bed.set_finalizers(&[PURGE]);
    bed.delete();
    bed.kyma().await;
    assert_eq!(bed.finalizers(), Some(json!([PURGE])), "a user removed our finalizer while a module is left");

    let mut bed = Bed::new();
    bed.set_finalizers(&[PURGE]);
    bed.delete();
    bed.kyma().await;
    assert_eq!(bed.finalizers(), Some(json!([PURGE])), "lifecycle-manager's Kyma");
}

/// The access Secret may outlive its cluster.
#[tokio::test]
async fn deletion_without_access_says_how_it_ends_if_the_cluster_is_gone() {
    let remedy = "; if the cluster no longer exists, delete its access Secret";
    for has_module in [true, false] {
        let mut bed = if has_module { Bed::with_keda().await } else { Bed::settled().await };
        if let Some((id, _)) = bed.manifest() {
            bed.kcp.edit(&id, |manifest| manifest["metadata"]["finalizers"] = json!(FINALIZERS));
        }
        bed.delete();
        for plural in ["customresourcedefinitions/kymas.operator.kyma-project.io", "kymas/default"] {
            bed.runtime.refuse(&format!("GET {plural}"), 503);
        }
        assert_eq!(bed.kyma().await.class, Some(ErrorClass::Transport));
        assert_eq!(bed.waits(), format!("the runtime's API server cannot be reached{remedy}"));
        assert_eq!(bed.condition("RuntimeAccess")["message"], "the runtime's API server cannot be reached");
        let several = || RuntimeAccessError::Several(vec!["a".into(), "b".into()]);
        bed.ctx.clients = Box::new(move |_| Err(several().into()));
        bed.kyma().await;
        assert_eq!(bed.waits(), format!("{}{remedy}", several()));
        // A Kyma that stays is never told so.
        let mut bed = Bed::settled().await;
        bed.runtime.refuse("GET kymas/default", 503);
        bed.kyma().await;
        assert_eq!(bed.waits(), "the runtime's API server cannot be reached");
    }
}
