//! Kymas that come from lifecycle-manager, or go back to it.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kube::ResourceExt as _;
use tidewatch_api::{facts::KymaFacts, names::label};
use tidewatch_fleet::PathState;

use super::*;

const QUIET: Duration = Duration::from_secs(60);

impl Fixture {
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
    let mut fixture = Fixture::new();
    fixture.ctx.takeover = Takeover::new("", QUIET);
    fixture.kcp.edit("kymas/k", |kyma| kyma["metadata"]["finalizers"] = json!(["operator.kyma-project.io/Kyma"]));
    fixture.ctx.takeover.selected(&fixture.key, &fixture.read(), false, Instant::now());
    for delete in [false, true] {
        let outcome = fixture.kyma().await;
        assert_eq!((outcome.ended, outcome.failed), (WorkSet::EMPTY, WorkSet::of(&[Work::Kyma])), "it settles nothing");
        assert!(outcome.min_backoff.is_some_and(|rest| rest > QUIET / 2), "{outcome:?}");
        assert_eq!((fixture.kcp.writes(), fixture.runtime.calls()), (vec![], vec![]), "{delete}");
        tokio::time::advance(QUIET / 4).await;
    }
    tokio::time::advance(QUIET).await;
    assert!(fixture.reconcile(WorkSet::RUNTIME, Drift::None).await.failed.is_empty());
    assert_eq!(fixture.status()["state"], "Ready");
}

#[tokio::test]
async fn hand_back_removes_our_objects_and_confirms_last() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.enable();
    fixture.kyma().await;
    fixture.kcp.edit("kymas/k", |kyma| {
        let conditions = kyma["status"]["conditions"].as_array_mut().unwrap();
        conditions.push(json!({"type": "Paused", "status": "True", "reason": "Label", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}));
    });
    fixture.forget_calls();
    let writes = fixture.hands_back().await;
    assert_eq!(writes[0], "DELETE deployments/skr-webhook");
    for (gone, others) in
        [("configmaps/tidewatch-agent", "kymas/default"), ("secrets/skr-webhook-tls", "namespaces/kyma-system")]
    {
        assert!(fixture.runtime.object(gone).is_none() && fixture.runtime.object(others).is_some());
    }
    assert!(writes.iter().all(|write| !write.contains("kymas") && !write.contains("module")), "{writes:?}");
    let calls = fixture.kcp.writes();
    assert_eq!(calls, ["PATCH kymas/k/status", "PATCH kymas/k"]);
    let kyma = fixture.read();
    assert_eq!(kyma.labels()[label::HAND_BACK], "done");
    assert!(!KymaFacts::from(&kyma).is_managed() && kyma.finalizers() == ["operator.kyma-project.io/Kyma"]);
    let status = kyma.status.unwrap();
    let kinds: Vec<_> = status.conditions().iter().map(|condition| condition.type_.as_str()).collect();
    assert_eq!(kinds, ["CRDsSync", "Modules", "ModuleCatalog"]);
    assert_eq!(fixture.kcp.all("manifests").len(), 1, "they are lifecycle-manager's from now on");
    assert_eq!(fixture.ctx.metrics.requeues.counted("kyma_deletion", "intended"), 0, "a hand-back is no deletion");

    // Whatever comes late finds no Kyma of ours.
    fixture.forget_calls();
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    fixture.delete();
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!((fixture.kcp.writes(), fixture.runtime.calls()), (vec![], vec![]));
}

/// A reconcile of a Manifest in progress goes on writing, and one may begin while the cache does not show the request.
#[tokio::test]
async fn hand_back_waits_for_the_reconciles_of_the_modules() {
    let mut fixture = Fixture::with_keda().await;
    let is_working = Arc::new(AtomicBool::new(false));
    let working = is_working.clone();
    fixture.ctx.modules_in_progress = Box::new(move |_| working.load(Relaxed));
    fixture.watch_kymas();
    fixture.labelled(label::HAND_BACK, "true");
    for (is_shown, in_progress) in [(false, false), (true, true), (false, true)] {
        if is_shown {
            fixture.watch_kymas();
        } else {
            fill(&mut fixture.kymas, &[]);
        }
        is_working.store(in_progress, Relaxed);
        let outcome = fixture.kyma().await;
        assert_eq!((outcome.failed, outcome.requeue_after), (WorkSet::EMPTY, Some(Duration::from_secs(1))));
        assert_eq!(fixture.read().labels()[label::HAND_BACK], "true", "{is_shown} {in_progress}");
        assert_eq!(fixture.operation(), "waiting for the reconciles of the modules to end");
    }
    is_working.store(false, Relaxed);
    fixture.watch_kymas();
    assert_eq!(fixture.kyma().await.requeue_after, None);
    assert_eq!(fixture.read().labels()[label::HAND_BACK], "done");
}

/// Manifests are labelled whatever is decided on their modules: also those of modules that cannot be resolved.
#[tokio::test]
async fn manifests_have_the_skip_label_until_the_hand_back() {
    let mut fixture = Fixture::with_keda().await;
    let (id, _) = fixture.manifest().unwrap();
    let skip =
        |fixture: &Fixture| fixture.manifest().unwrap().1["metadata"]["labels"][label::SKIP_RECONCILIATION].clone();
    assert_eq!(skip(&fixture), Value::Null);
    fixture.ctx.takeover = Takeover::new(&format!("{}=true", label::SKIP_RECONCILIATION), QUIET);
    fixture.labelled(label::SKIP_RECONCILIATION, "true");
    fixture.runtime.edit("kymas/default", |kyma| {
        kyma["spec"]["modules"] = json!([{"name": "keda", "channel": "unknown", "managed": true}]);
    });
    fixture.kyma().await;
    assert_eq!(skip(&fixture), json!("true"));
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new());

    fixture.hands_back().await;
    assert_eq!((skip(&fixture), fixture.read().labels()[label::HAND_BACK].as_str()), (Value::Null, "done"));
    let writes = fixture.kcp.writes();
    assert_eq!(writes.last().unwrap(), "PATCH kymas/k");
    assert_eq!(writes.iter().filter(|write| **write == format!("PATCH {id}")).count(), 1, "{writes:?}");
}

#[tokio::test]
async fn unmanaged_objects_are_not_removed() {
    let mut fixture = Fixture::installing(PathState::Proven);
    fixture.runtime.edit("deployments/skr-webhook", |deployment| {
        *deployment = json!({"metadata": {"name": "skr-webhook", "labels": {label::MANAGED_BY: "kyma"}}});
    });
    assert_eq!(fixture.hands_back().await, Vec::<String>::new());
    assert_eq!(fixture.read().labels()[label::HAND_BACK], "done");
}

#[tokio::test]
async fn blocked_hand_back_is_reported_and_not_confirmed() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.runtime.refuse("DELETE deployments/skr-webhook", 403);
    fixture.labelled(label::HAND_BACK, "true");
    let outcome = fixture.kyma().await;
    assert_eq!(outcome.failed, WorkSet::of(&[Work::Kyma]));
    assert_eq!(
        (&fixture.status()["state"], fixture.read().labels()[label::HAND_BACK].as_str()),
        (&json!("Error"), "true")
    );
}

#[tokio::test]
async fn skipped_kyma_is_reconciled_if_the_selector_names_that_label() {
    let mut fixture = Fixture::settled().await;
    fixture.ctx.takeover = Takeover::new(&format!("{}=true", label::SKIP_RECONCILIATION), QUIET);
    fixture.enable();
    fixture.labelled(label::SKIP_RECONCILIATION, "true");
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(fixture.manifest().unwrap().1["metadata"]["labels"][label::SKIP_RECONCILIATION], "true");
}

#[tokio::test]
async fn deselected_kyma_counts_as_absent() {
    let mut fixture = Fixture::settled().await;
    fixture.ctx.takeover = Takeover::new("lifecycle=tidewatch", QUIET);
    fixture.enable();
    fixture.labelled("lifecycle", "lifecycle-manager");
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!((fixture.kcp.calls(), fixture.runtime.calls()), (vec!["GET kymas".to_owned()], vec![]));
}
