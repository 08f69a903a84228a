//! Kymas that come from lifecycle-manager, or go back to it.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kube::ResourceExt as _;
use tidewatch_api::{facts::KymaFacts, names::label};
use tidewatch_fleet::PathState;

use super::*;

const QUIET: Duration = Duration::from_secs(60);

impl Bed {
    fn labelled(&self, label: &str, value: &str) {
        self.kcp.edit("kymas/k", |kyma| kyma["metadata"]["labels"][label] = value.into());
    }

    fn read(&self) -> Kyma {
        serde_json::from_value(self.kcp.object("kymas/k").unwrap()).unwrap()
    }

    /// Passes until nothing is to be waited for.
    async fn hands_back(&mut self) -> Vec<String> {
        self.labelled(label::HAND_BACK, "true");
        self.watch_kymas();
        let mut writes = Vec::new();
        for _ in 0..20 {
            let outcome = self.reconcile(WorkSet::RUNTIME, Drift::None).await;
            assert_eq!((outcome.failed, outcome.ended), (WorkSet::EMPTY, WorkSet::RUNTIME));
            writes.extend(self.runtime.writes());
            if outcome.requeue_after.is_none() {
                break;
            }
        }
        writes
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_before_lifecycle_manager_is_idle() {
    let mut bed = Bed::new();
    bed.ctx.settings.takeover = Takeover::new("", QUIET);
    bed.kcp.edit("kymas/k", |kyma| kyma["metadata"]["finalizers"] = json!(["operator.kyma-project.io/Kyma"]));
    bed.ctx.settings.takeover.selected(&bed.key, &bed.read(), false, Instant::now());
    for delete in [false, true] {
        let outcome = bed.kyma().await;
        assert_eq!((outcome.ended, outcome.failed), (WorkSet::EMPTY, WorkSet::of(&[Work::Kyma])), "it settles nothing");
        assert!(outcome.min_backoff.is_some_and(|rest| rest > QUIET / 2), "{outcome:?}");
        assert_eq!((bed.kcp.writes(), bed.runtime.calls()), (vec![], vec![]), "{delete}");
        tokio::time::advance(QUIET / 4).await;
    }
    tokio::time::advance(QUIET).await;
    assert!(bed.reconcile(WorkSet::RUNTIME, Drift::None).await.failed.is_empty());
    assert_eq!(bed.status()["state"], "Ready");
}

#[tokio::test]
async fn hand_back_removes_our_objects_and_confirms_last() {
    let mut bed = Bed::installed(PathState::Proven).await;
    bed.enable();
    bed.kyma().await;
    bed.kcp.edit("kymas/k", |kyma| {
        let conditions = kyma["status"]["conditions"].as_array_mut().unwrap();
        conditions.push(json!({"type": "Paused", "status": "True", "reason": "Label", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}));
    });
    bed.forget_calls();
    let writes = bed.hands_back().await;
    assert_eq!(writes[0], "DELETE deployments/skr-webhook");
    for (gone, others) in
        [("configmaps/tidewatch-agent", "kymas/default"), ("secrets/skr-webhook-tls", "namespaces/kyma-system")]
    {
        assert!(bed.runtime.object(gone).is_none() && bed.runtime.object(others).is_some());
    }
    assert!(writes.iter().all(|write| !write.contains("kymas") && !write.contains("module")), "{writes:?}");
    let calls = bed.kcp.writes();
    assert_eq!(calls, ["PATCH kymas/k/status", "PATCH kymas/k"]);
    let kyma = bed.read();
    assert_eq!(kyma.labels()[label::HAND_BACK], "done");
    assert!(!KymaFacts::from(&kyma).is_managed() && kyma.finalizers() == ["operator.kyma-project.io/Kyma"]);
    let status = kyma.status.unwrap();
    let kinds: Vec<_> = status.conditions().iter().map(|condition| condition.type_.as_str()).collect();
    assert_eq!(kinds, ["CRDsSync", "Modules", "ModuleCatalog"]);
    assert_eq!(bed.kcp.all("manifests").len(), 1, "they are lifecycle-manager's from now on");
    assert_eq!(bed.ctx.metrics.requeues.counted("kyma_deletion", "intended"), 0, "a hand-back is no deletion");

    // Whatever comes late finds no Kyma of ours.
    bed.forget_calls();
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    bed.delete();
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!((bed.kcp.writes(), bed.runtime.calls()), (vec![], vec![]));
}

/// A reconcile of a Manifest in progress goes on writing, and one may begin while the cache does not show the request.
#[tokio::test]
async fn hand_back_waits_for_the_reconciles_of_the_modules() {
    let mut bed = Bed::with_keda().await;
    let is_working = Arc::new(AtomicBool::new(false));
    let working = is_working.clone();
    bed.ctx.modules_in_progress = Box::new(move |_| working.load(Relaxed));
    bed.watch_kymas();
    bed.labelled(label::HAND_BACK, "true");
    for (is_shown, in_progress) in [(false, false), (true, true), (false, true)] {
        if is_shown {
            bed.watch_kymas();
        } else {
            fill(&mut bed.kymas, &[]);
        }
        is_working.store(in_progress, Relaxed);
        let outcome = bed.kyma().await;
        assert_eq!((outcome.failed, outcome.requeue_after), (WorkSet::EMPTY, Some(Duration::from_secs(1))));
        assert_eq!(bed.read().labels()[label::HAND_BACK], "true", "{is_shown} {in_progress}");
        assert_eq!(bed.operation(), "waiting for the reconciles of the modules to end");
    }
    is_working.store(false, Relaxed);
    bed.watch_kymas();
    assert_eq!(bed.kyma().await.requeue_after, None);
    assert_eq!(bed.read().labels()[label::HAND_BACK], "done");
}

/// Manifests are labelled whatever is decided on their modules: also those of modules that cannot be resolved.
#[tokio::test]
async fn manifests_have_the_skip_label_until_the_hand_back() {
    let mut bed = Bed::with_keda().await;
    let (id, _) = bed.manifest().unwrap();
    let skip = |bed: &Bed| bed.manifest().unwrap().1["metadata"]["labels"][label::SKIP_RECONCILIATION].clone();
    assert_eq!(skip(&bed), Value::Null);
    bed.ctx.settings.takeover = Takeover::new(&format!("{}=true", label::SKIP_RECONCILIATION), QUIET);
    bed.labelled(label::SKIP_RECONCILIATION, "true");
    bed.runtime.edit("kymas/default", |kyma| {
        kyma["spec"]["modules"] = json!([{"name": "keda", "channel": "unknown", "managed": true}]);
    });
    bed.kyma().await;
    assert_eq!(skip(&bed), json!("true"));
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!(bed.kcp.writes(), Vec::<String>::new());

    bed.hands_back().await;
    assert_eq!((skip(&bed), bed.read().labels()[label::HAND_BACK].as_str()), (Value::Null, "done"));
    let writes = bed.kcp.writes();
    assert_eq!(writes.last().unwrap(), "PATCH kymas/k");
    assert_eq!(writes.iter().filter(|write| **write == format!("PATCH {id}")).count(), 1, "{writes:?}");
}

#[tokio::test]
async fn unmanaged_objects_are_not_removed() {
    let mut bed = Bed::installing(PathState::Proven);
    bed.runtime.edit("deployments/skr-webhook", |deployment| {
        *deployment = json!({"metadata": {"name": "skr-webhook", "labels": {label::MANAGED_BY: "kyma"}}});
    });
    assert_eq!(bed.hands_back().await, Vec::<String>::new());
    assert_eq!(bed.read().labels()[label::HAND_BACK], "done");
}

#[tokio::test]
async fn blocked_hand_back_is_reported_and_not_confirmed() {
    let mut bed = Bed::installed(PathState::Proven).await;
    bed.runtime.refuse("DELETE deployments/skr-webhook", 403);
    bed.labelled(label::HAND_BACK, "true");
    let outcome = bed.kyma().await;
    assert_eq!(outcome.failed, WorkSet::of(&[Work::Kyma]));
    assert_eq!((&bed.status()["state"], bed.read().labels()[label::HAND_BACK].as_str()), (&json!("Error"), "true"));
}

#[tokio::test]
async fn skipped_kyma_is_reconciled_if_the_selector_names_that_label() {
    let mut bed = Bed::settled().await;
    bed.ctx.settings.takeover = Takeover::new(&format!("{}=true", label::SKIP_RECONCILIATION), QUIET);
    bed.enable();
    bed.labelled(label::SKIP_RECONCILIATION, "true");
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(bed.manifest().unwrap().1["metadata"]["labels"][label::SKIP_RECONCILIATION], "true");
}

#[tokio::test]
async fn deselected_kyma_counts_as_absent() {
    let mut bed = Bed::settled().await;
    bed.ctx.settings.takeover = Takeover::new("lifecycle=tidewatch", QUIET);
    bed.enable();
    bed.labelled("lifecycle", "lifecycle-manager");
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!((bed.kcp.calls(), bed.runtime.calls()), (vec!["GET kymas".to_owned()], vec![]));
}
