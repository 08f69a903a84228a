//! Passes that install the agent.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use strum::VariantArray as _;
use tidewatch_api::names::{annotation, label};
use tidewatch_fleet::{PathState, Unproven};
use tidewatch_installer::{Component, Installer, upgrade::UpgradeHandle, watcher};
use tidewatch_trust::{CA_VALIDITY, Ca, Trust};

use super::*;

/// Objects of a runtime cluster after the first reconcile, as `<plural>/<name>`. A removal deletes them in the opposite order.
const OBJECTS: [&str; 14] = [
    "serviceaccounts/tidewatch-agent",
    "clusterroles/tidewatch-agent",
    "clusterrolebindings/tidewatch-agent",
    "roles/tidewatch-agent",
    "rolebindings/tidewatch-agent",
    "leases/tidewatch-agent",
    "secrets/skr-webhook-tls",
    "configmaps/tidewatch-agent",
    "priorityclasses/skr-webhook-priority",
    "networkpolicies/kyma-project.io--watcher-to-apiserver",
    "networkpolicies/kyma-project.io--watcher-to-dns",
    "networkpolicies/kyma-project.io--metrics-to-watcher",
    "services/skr-webhook-metrics",
    "deployments/skr-webhook",
];

/// Objects that are written after all others, in waves.
const LATER: [&[&str]; 2] =
    [&["configmaps/tidewatch-agent", "networkpolicies/kyma-project.io--watcher-to-dns"], &["deployments/skr-webhook"]];

const INSTALLER: [Work; 1] = [Work::Installer];
const WEBHOOKS: &str = "validatingwebhookconfigurations/skr-webhook";
const DEPLOYMENT: &str = "deployments/skr-webhook";

impl Fixture {
    pub(super) fn installing(path: PathState) -> Self {
        Self::installing_with(path, &[])
    }

    fn installing_with(path: PathState, flags: &[&str]) -> Self {
        Self::installing_on(UpgradeHandle::fixed("i:1"), path, flags)
    }

    fn installing_on(upgrade: UpgradeHandle, path: PathState, flags: &[&str]) -> Self {
        Self::installing_at(upgrade, move || path.clone(), flags)
    }

    fn installing_at(
        upgrade: UpgradeHandle,
        path: impl Fn() -> PathState + Send + Sync + 'static,
        flags: &[&str],
    ) -> Self {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            flags: tidewatch_installer::Flags,
            #[arg(long)]
            skr_image_pull_secret: Option<String>,
        }
        let line = ["x", "--agent-image", "i:1", "--receiver-url", "https://k:1", "--enrolment-url", "https://k:2"];
        let line = <Line as clap::Parser>::parse_from(line.iter().chain(flags));
        let settings = line.flags.settings(&"kyma.local".parse().unwrap()).unwrap();
        let settings = settings.with_modules_pull_secret(line.skr_image_pull_secret.as_ref());
        let roots = Ca::generate("a", 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle();
        let trust = Arc::new(Trust { agents: roots.clone(), clients: roots, issuer: None });
        let trusted = Box::new(move || trust.clone());
        let path = Box::new(move |_: &KymaKey| Some(path()));
        let installer = Installer::new(settings, trusted, path, upgrade, tidewatch_installer::Metrics::default());
        let mut fixture = Self::new();
        fixture.ctx.installer = Some(installer);
        fixture.replan(&[]);
        fixture
    }

    /// Continues with the clusters of another receiver.
    fn succeeding(mut self, before: &Self) -> Self {
        let client = before.runtime.client();
        self.ctx.kcp = before.kcp.client();
        self.ctx.clients = Box::new(move |_| Ok((client.clone(), 1)));
        (self.runtime, self.kcp) = (before.runtime.clone(), before.kcp.clone());
        self
    }

    pub(super) fn replan(&self, more: &[Value]) {
        let watches = more.iter().map(|watch| serde_json::from_value(watch.clone()).unwrap());
        let watches = tidewatch_installer::watches().into_iter().chain(watches).collect();
        let (plan, ..) = watcher::plan::<Arc<tidewatch_api::Watcher>>(watches, &[]);
        self.ctx.plans.set_base(plan);
    }

    async fn install(&mut self, drift: Drift) -> ReconcileOutcome {
        self.reconcile(WorkSet::of(&INSTALLER), drift).await
    }

    /// The Deployment as its controller leaves it.
    fn available(&self) {
        self.runtime.edit("deployments/skr-webhook", |deployment| {
            deployment["status"] = json!({"observedGeneration": 9, "availableReplicas": 1, "updatedReplicas": 1});
        });
    }

    pub(super) async fn installed(path: PathState) -> Self {
        let mut fixture = Self::installing(path);
        assert!(fixture.reconcile(WorkSet::RUNTIME, Drift::None).await.failed.is_empty());
        fixture.available();
        fixture.install(Drift::All).await;
        fixture.forget_calls();
        fixture
    }

    /// Last operation of the status.
    pub(super) fn operation(&self) -> String {
        self.status()["lastOperation"]["operation"].as_str().unwrap_or_default().to_owned()
    }

    /// Reconciles until the Kyma is deleted or handed back; returns the deletions in the runtime cluster in order.
    /// `after` runs after each reconcile.
    pub(super) async fn leaves(&mut self, mut after: impl FnMut(&Self, &[String])) -> Vec<String> {
        let mut deleted = Vec::new();
        for _ in 0..20 {
            let outcome = self.kyma().await;
            assert!(outcome.failed.is_empty(), "{}", self.operation());
            let writes = self.runtime.writes();
            deleted.extend(writes.iter().filter_map(|write| write.strip_prefix("DELETE ").map(str::to_owned)));
            if outcome.requeue_after.is_none() {
                return deleted;
            }
            after(self, &deleted);
        }
        panic!("{}: {deleted:?}", self.operation());
    }

    fn webhook(&self) -> (Value, Value, Value) {
        let condition = self.condition("SKRWebhook");
        (condition["status"].clone(), condition["reason"].clone(), condition["message"].clone())
    }
}

#[tokio::test]
async fn agent_is_installed_after_its_rbac_and_verified_once() {
    let mut fixture = Fixture::installing(PathState::Proven);
    let outcome = fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    assert!(outcome.failed.is_empty() && outcome.requeue_after.is_some(), "its pod does not run yet: {outcome:?}");
    let of_agent = |call: &String| OBJECTS.iter().any(|object| call.ends_with(object));
    let mut writes: Vec<_> = fixture.runtime.writes().into_iter().filter(of_agent).collect();
    let wave = |call: &String| LATER.iter().position(|wave| wave.iter().any(|object| call.ends_with(object)));
    assert!(writes.iter().map(wave).is_sorted(), "{writes:?}");
    let mut expected = OBJECTS.map(|object| format!("PATCH {object}"));
    writes.sort_unstable();
    expected.sort_unstable();
    assert_eq!(writes, expected);
    let map = fixture.runtime.object("configmaps/tidewatch-agent").unwrap();
    assert_eq!((&map["data"]["runtime-id"], &map["data"]["enrolment-url"]), (&json!("r-1"), &json!("https://k:2")));
    assert_eq!(Plan::parse(map["data"]["plan.json"].as_str().unwrap()).unwrap(), *fixture.ctx.plans.base());
    assert_eq!((fixture.webhook().0, fixture.webhook().1), (json!("False"), json!("NoCertificate")));
    assert_eq!(fixture.status()["state"], "Processing");

    fixture.available();
    assert_eq!(fixture.install(Drift::None).await, ReconcileOutcome::ended(WorkSet::of(&INSTALLER)));
    assert_eq!(fixture.webhook(), (json!("True"), json!("Ready"), json!("skrwebhook is synchronized")));
    assert_eq!(fixture.status()["state"], "Ready");
    fixture.forget_calls();
    assert_eq!(fixture.reconcile(WorkSet::RUNTIME | WorkSet::of(&INSTALLER), Drift::None).await.requeue_after, None);
    assert_eq!(
        (fixture.kcp.calls(), fixture.runtime.calls()),
        (vec!["GET kymas/k".to_owned()], vec!["GET kymas/default".to_owned()])
    );
}

#[tokio::test]
async fn verification_reads_everything_and_writes_nothing() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.install(Drift::All).await;
    let calls = fixture.runtime.calls();
    assert!(OBJECTS.iter().all(|object| calls.contains(&format!("GET {object}"))), "{calls:?}");
    assert!(calls.iter().all(|call| call.starts_with("GET")), "{calls:?}");
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new());
}

#[tokio::test]
async fn edited_extended_and_deleted_objects_are_restored() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    for object in OBJECTS {
        let group = object.split('/').next().map(|plural| {
            Component::VARIANTS.iter().copied().find(|component| object == format!("{plural}/{}", component.name()))
        });
        let component = group.unwrap().unwrap();
        let subject = format!("g/v1/{}/kyma-system/{}", object.split('/').next().unwrap(), component.name());
        let before = fixture.runtime.object(object).unwrap();
        let content = |object: &Value| {
            let mut object = object.clone();
            for member in ["status", "metadata"] {
                object.as_object_mut().unwrap().remove(member);
            }
            object
        };
        fixture.runtime.remove(object);
        fixture.install(drift(&subject)).await;
        assert_eq!(content(&fixture.runtime.object(object).unwrap()), content(&before), "{object} deleted");

        fixture.runtime.edit(object, |found| {
            found["metadata"]["labels"].as_object_mut().unwrap().remove(label::MANAGED_BY);
        });
        fixture.install(drift(&subject)).await;
        let labels = fixture.runtime.object(object).unwrap()["metadata"]["labels"].clone();
        assert_eq!(labels[label::MANAGED_BY], "kyma", "{object} unmarked");

        if !["leases", "secrets"].contains(&object.split('/').next().unwrap()) {
            fixture.runtime.edit(object, |found| found["added"] = json!({"by": "a user"}));
            fixture.forget_calls();
            fixture.install(drift(&subject)).await;
            assert_eq!(content(&fixture.runtime.object(object).unwrap()), content(&before), "{object} added to");
            assert!(fixture.runtime.writes().contains(&format!("PUT {object}")));
        }
        fixture.available();
    }
    // The agent owns its data.
    fixture.runtime.edit("secrets/skr-webhook-tls", |secret| secret["data"] = json!({"tls.key": "x"}));
    fixture.install(Drift::All).await;
    assert_eq!(fixture.runtime.object("secrets/skr-webhook-tls").unwrap()["data"]["tls.key"], "x");
}

fn image(fixture: &Fixture) -> Value {
    fixture.runtime.object("deployments/skr-webhook").unwrap()["spec"]["template"]["spec"]["containers"][0]["image"]
        .clone()
}

fn give(fixture: &Fixture, image: &str) {
    fixture.runtime.edit("deployments/skr-webhook", |deployment| {
        deployment["spec"]["template"]["spec"]["containers"][0]["image"] = image.into();
    });
}

#[tokio::test]
async fn runtime_gets_exactly_the_image_decided_for_it() {
    let upgrade = UpgradeHandle::fixed("i:1");
    let mut fixture = Fixture::installing_on(upgrade.clone(), PathState::Proven, &[]);
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    fixture.available();
    fixture.install(Drift::All).await;
    fixture.forget_calls();
    upgrade.set_image("i:2");
    fixture.install(Drift::None).await;
    assert_eq!((fixture.runtime.calls()[0].as_str(), image(&fixture)), ("GET deployments/skr-webhook", json!("i:2")));
    give(&fixture, "mine");
    fixture.install(drift("apps/v1/deployments/kyma-system/skr-webhook")).await;
    assert_eq!(image(&fixture), "i:2");
    upgrade.set_image("i:1");
    fixture.install(Drift::None).await;
    assert_eq!(image(&fixture), "i:1");
}

/// Image of which the Deployment records that the event path was not proven before.
fn unproven_before(fixture: &Fixture) -> Value {
    fixture.runtime.object(DEPLOYMENT).unwrap()["metadata"]["annotations"][annotation::UNPROVEN_BEFORE].clone()
}

#[tokio::test]
async fn unproven_path_before_an_upgrade_is_recorded_until_it_is_proven() {
    let upgrade = UpgradeHandle::fixed("i:1");
    let lost = Arc::new(AtomicBool::new(false));
    let path = |lost: &Arc<AtomicBool>| {
        let lost = lost.clone();
        move || if lost.load(Relaxed) { PathState::Unproven(Unproven::NoHeartbeat) } else { PathState::Proven }
    };
    let mut fixture = Fixture::installing_at(upgrade.clone(), path(&lost), &[]);
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    fixture.available();
    lost.store(true, Relaxed);
    fixture.install(Drift::All).await;
    assert_eq!((image(&fixture), unproven_before(&fixture)), (json!("i:1"), Value::Null), "lost with the same image");
    upgrade.set_image("i:2");
    fixture.install(Drift::None).await;
    assert_eq!((image(&fixture), unproven_before(&fixture)), (json!("i:2"), json!("i:2")));
    assert!(upgrade.unproven_before(&fixture.key));

    // A replica that acquires the shard reads it, and does not write the Deployment.
    let writes_it = |fixture: &Fixture| fixture.runtime.writes().iter().any(|write| write.ends_with(DEPLOYMENT));
    let successor = UpgradeHandle::fixed("i:2");
    let mut next = Fixture::installing_at(successor.clone(), path(&lost), &[]).succeeding(&fixture);
    next.forget_calls();
    next.install(Drift::None).await;
    assert!(successor.unproven_before(&next.key));
    assert!(!writes_it(&next));

    lost.store(false, Relaxed);
    next.install(Drift::None).await;
    assert_eq!((unproven_before(&next), successor.unproven_before(&next.key)), (Value::Null, false));
    next.forget_calls();
    lost.store(true, Relaxed);
    next.install(Drift::All).await;
    assert!(!writes_it(&next) && !successor.unproven_before(&next.key));

    // A mark of another image does not apply.
    next.runtime.edit(DEPLOYMENT, |deployment| {
        deployment["metadata"]["annotations"] = json!({annotation::UNPROVEN_BEFORE: "i:1"});
    });
    let successor = UpgradeHandle::fixed("i:2");
    let mut last = Fixture::installing_at(successor.clone(), path(&lost), &[]).succeeding(&next);
    last.install(Drift::None).await;
    assert!(!successor.unproven_before(&last.key));
    lost.store(false, Relaxed);
    successor.set_image("i:3");
    last.install(Drift::None).await;
    assert_eq!((image(&last), successor.unproven_before(&last.key)), (json!("i:3"), false), "proven before");
}

#[tokio::test]
async fn unknown_rollout_state_keeps_the_current_image() {
    let ours = json!([{"manager": "tidewatch", "operation": "Apply", "fieldsV1": {"f:spec": {"f:template": {"f:spec": {
        "f:containers": {"k:{\"name\":\"server\"}": {"f:image": {}}}}}}}}]);
    let others = json!([{"manager": "kubectl", "operation": "Update", "fieldsV1": ours[0]["fieldsV1"]}]);
    for (noted, expected) in [(Some(ours), "i:0"), (Some(others), "i:1"), (None, "i:1")] {
        let mut first = Fixture::installing(PathState::Proven);
        first.reconcile(WorkSet::RUNTIME, Drift::None).await;
        assert_eq!(image(&first), "i:1", "a new one gets the wanted one");
        give(&first, "i:0");
        first.runtime.edit(DEPLOYMENT, |deployment| deployment["metadata"]["managedFields"] = noted.into());
        let mut fixture =
            Fixture::installing_on(UpgradeHandle::unknown("i:1"), PathState::Proven, &[]).succeeding(&first);
        fixture.install(Drift::None).await;
        assert_eq!(image(&fixture), expected);
        give(&fixture, "mine");
        fixture.install(drift("apps/v1/deployments/kyma-system/skr-webhook")).await;
        assert_eq!(image(&fixture), expected, "what it keeps is what it had");
    }
}

#[tokio::test]
async fn rbac_is_granted_before_and_revoked_after_a_plan() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    let written = |fixture: &Fixture| -> Vec<String> {
        let writes = fixture.runtime.writes();
        let objects = writes.iter().filter_map(|write| Some(write.split_once(' ')?.1.to_owned()));
        objects.filter(|object| OBJECTS.contains(&object.as_str())).collect()
    };
    let role = "clusterroles/tidewatch-agent";
    let map = "configmaps/tidewatch-agent";
    fixture.replan(&[watch("a", "statefulsets", None)]);
    fixture.install(Drift::None).await;
    assert_eq!(written(&fixture), [role, map]);
    fixture.replan(&[watch("b", "daemonsets", None)]);
    fixture.install(Drift::None).await;
    assert_eq!(written(&fixture), [role, map, role]);
    let rules = fixture.runtime.object(role).unwrap()["rules"].to_string();
    assert!(rules.contains("daemonsets") && !rules.contains("statefulsets"), "{rules}");
    fixture.replan(&[]);
    fixture.install(Drift::None).await;
    assert_eq!(written(&fixture), [map, role]);

    // Written without a read, until that fails.
    fixture.replan(&[watch("c", "replicasets", None)]);
    fixture.runtime.refuse(&format!("PATCH {map}"), 422);
    fixture.runtime.calls();
    let reads =
        |fixture: &Fixture| fixture.runtime.calls().iter().filter(|call| **call == format!("GET {map}")).count();
    fixture.install(Drift::None).await;
    assert_eq!(reads(&fixture), 0);
    fixture.runtime.refuse_nothing();
    fixture.install(Drift::None).await;
    assert_eq!(reads(&fixture), 1);
    fixture.replan(&[]);
    fixture.install(Drift::None).await;
    fixture.runtime.calls();

    fixture.replan(&[watch("a", "statefulsets", None)]);
    for method in ["PATCH", "PUT"] {
        fixture.runtime.refuse(&format!("{method} {role}"), 403);
    }
    fixture.install(Drift::None).await;
    assert_eq!(written(&fixture), [role], "a plan without its rights is held back");
}

#[tokio::test]
async fn refused_object_is_reported_and_stops_no_other() {
    let mut fixture = Fixture::installing(PathState::Unknown);
    fixture.runtime.refuse("PATCH leases/tidewatch-agent", 403);
    let works = WorkSet::RUNTIME | WorkSet::of(&INSTALLER);
    let outcome = fixture.reconcile(works, Drift::None).await;
    assert_eq!((outcome.ended, outcome.failed), (works, WorkSet::EMPTY), "a status shows it");
    assert!(outcome.requeue_after.is_some());
    let (status, reason, message) = fixture.webhook();
    assert_eq!((status, reason), (json!("False"), json!("Refused")));
    assert!(message.as_str().unwrap().contains("Lease tidewatch-agent"), "{message}");
    assert!(fixture.runtime.object("deployments/skr-webhook").is_some());
    assert!(fixture.runtime.object("moduletemplates/keda-1.0.0").is_some());

    let mut fixture = Fixture::installing(PathState::Unknown);
    fixture.runtime.refuse("GET services/skr-webhook-metrics", 503);
    let outcome = fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    assert_eq!((outcome.failed, outcome.class), (WorkSet::of(&INSTALLER), Some(ErrorClass::Transport)));
    assert!(fixture.runtime.object("kymas/default").is_some(), "the other steps of the reconcile were carried out");
}

#[tokio::test]
async fn unanswered_installation_ends_the_reconcile() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.replan(&[watch("a", "statefulsets", None)]);
    let before = fixture.webhook();
    let requests = fixture.lose_runtime(|| io::ErrorKind::ConnectionRefused.into());
    let works = WorkSet::of(&[Work::Kyma, Work::Installer]);
    let failed = ReconcileOutcome::failed(works, ErrorClass::Transport);
    assert_eq!(fixture.reconcile(works, Drift::None).await, ReconcileOutcome { unreached: true, ..failed });
    assert_eq!(requests.load(Relaxed), 2, "one of each half, and none follows");
    assert_eq!(fixture.condition("RuntimeAccess")["reason"], "Unreachable");
    assert_eq!(fixture.webhook(), before);
}

#[tokio::test]
async fn upgraded_agent_runs_although_an_object_is_refused() {
    let upgrade = UpgradeHandle::fixed("i:1");
    let mut fixture = Fixture::installing_on(upgrade.clone(), PathState::Proven, &[]);
    fixture.runtime.refuse("PATCH services/skr-webhook-metrics", 403);
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    assert!(!upgrade.is_running(&fixture.key));
    fixture.available();
    fixture.install(Drift::None).await;
    assert!(upgrade.is_running(&fixture.key));
    upgrade.set_image("i:2");
    fixture.install(Drift::None).await;
    assert!(upgrade.is_running(&fixture.key), "the fake runtime replaces its pod at once");
    assert!(fixture.webhook().2.as_str().unwrap().contains("Service skr-webhook-metrics"), "{:?}", fixture.webhook());
}

/// Objects that the agent does not need, as `<plural>/<name>`.
const ADDITIONAL: [&str; 5] = [
    "priorityclasses/skr-webhook-priority",
    "networkpolicies/kyma-project.io--watcher-to-apiserver",
    "networkpolicies/kyma-project.io--watcher-to-dns",
    "networkpolicies/kyma-project.io--metrics-to-watcher",
    "services/skr-webhook-metrics",
];

#[tokio::test]
async fn refused_additional_object_keeps_no_kyma_from_ready_and_is_named() {
    for object in ADDITIONAL {
        let mut fixture = Fixture::installing(PathState::Proven);
        fixture.runtime.refuse(&format!("WRITE {object}"), 422);
        assert!(fixture.reconcile(WorkSet::RUNTIME, Drift::None).await.failed.is_empty());
        fixture.available();
        let outcome = fixture.install(Drift::None).await;
        let (status, reason, message) = fixture.webhook();
        assert_eq!((status, reason), (json!("True"), json!("Ready")), "{object}");
        let text = message.as_str().unwrap();
        let name = object.split_once('/').unwrap().1;
        let begin =
            "skrwebhook is synchronized, except for an object that the agent does not need: failed to write the ";
        assert!(text.starts_with(begin) && text.contains(name), "{text}");
        assert_eq!(fixture.status()["state"], "Ready", "{object}");
        assert_eq!(outcome.requeue_after, Some(Duration::from_secs(600)), "{object}");
        let priority = |fixture: &Fixture| {
            fixture.runtime.object(DEPLOYMENT).unwrap()["spec"]["template"]["spec"]["priorityClassName"].clone()
        };
        let is_class = object == ADDITIONAL[0];
        assert_eq!(priority(&fixture).is_null(), is_class, "a pod that names a missing class is refused");

        fixture.runtime.refuse_nothing();
        fixture.install(Drift::None).await;
        fixture.available();
        fixture.install(Drift::None).await;
        assert_eq!(fixture.webhook().2, "skrwebhook is synchronized", "{object}");
        assert_eq!(priority(&fixture), "skr-webhook-priority", "{object}");
        assert!(fixture.runtime.object(object).is_some(), "{object}");
    }
}

#[tokio::test]
async fn fault_of_the_agent_names_the_refused_additional_object_too() {
    let mut fixture = Fixture::installing(PathState::Unknown);
    fixture.runtime.refuse(&format!("WRITE {}", ADDITIONAL[1]), 422);
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    fixture.available();
    fixture.install(Drift::None).await;
    let (_, reason, message) = fixture.webhook();
    assert_eq!(reason, "PathNotProven");
    assert!(message.as_str().unwrap().contains("NetworkPolicy kyma-project.io--watcher-to-apiserver"), "{message}");
}

/// Policies add up, and the first one of a direction denies what no other allows.
#[tokio::test]
async fn policy_for_dns_never_stands_alone() {
    let all = ADDITIONAL[1];
    let dns = ADDITIONAL[2];
    let mut fixture = Fixture::installing(PathState::Proven);
    fixture.runtime.refuse(&format!("WRITE {all}"), 422);
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    assert!(fixture.runtime.object(dns).is_none());

    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.runtime.remove(all);
    fixture.runtime.refuse(&format!("WRITE {all}"), 422);
    fixture
        .install(drift("networking.k8s.io/v1/networkpolicies/kyma-system/kyma-project.io--watcher-to-apiserver"))
        .await;
    assert!(fixture.runtime.object(dns).is_none());
    fixture.runtime.refuse_nothing();
    fixture.install(Drift::None).await;
    assert!(fixture.runtime.object(all).is_some() && fixture.runtime.object(dns).is_some());
}

#[tokio::test]
async fn policy_without_rules_of_an_earlier_version_is_deleted() {
    let id = "networkpolicies/kyma-project.io--watcher-deny-all";
    for (labels, stays) in [(json!({"operator.kyma-project.io/managed-by": "kyma"}), false), (json!({}), true)] {
        let mut fixture = Fixture::installing(PathState::Unknown);
        fixture.runtime.edit(id, |object| {
            *object = json!({"kind": "NetworkPolicy", "metadata": {"name": "kyma-project.io--watcher-deny-all", "labels": labels}});
        });
        // Another object that is refused keeps none of the obsolete ones.
        fixture.runtime.refuse(&format!("WRITE {}", ADDITIONAL[4]), 422);
        fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
        assert_eq!(fixture.runtime.object(id).is_some(), stays);
    }
}

/// Warden refuses images of registries that it does not list.
#[tokio::test]
async fn refused_agent_leaves_the_one_of_lifecycle_manager() {
    let mut fixture = Fixture::installing(PathState::Unknown);
    lifecycle_manager(&fixture);
    let theirs = [WEBHOOKS, DEPLOYMENT, "secrets/skr-webhook-tls", "services/skr-webhook"];
    let before = theirs.map(|id| fixture.runtime.object(id));
    fixture.runtime.refuse("POST pods", 403);
    let outcome = fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    assert_eq!(theirs.map(|id| fixture.runtime.object(id)), before);
    assert_eq!(fixture.runtime.all("pods").len(), 1, "a dry run creates nothing");
    let (status, reason, message) = fixture.webhook();
    assert_eq!((status, reason), (json!("False"), json!("Refused")));
    let text =
        "failed to start the agent in a dry run, so the one of lifecycle-manager stays: Forbidden (403 Forbidden)";
    assert_eq!(message, text);
    assert_eq!(outcome.requeue_after, Some(REFUSED_AGAIN));
    assert!(fixture.runtime.object("moduletemplates/keda-1.0.0").is_some(), "the other steps were carried out");

    fixture.runtime.refuse("POST pods", 503);
    assert_eq!(fixture.install(Drift::None).await.class, Some(ErrorClass::Transport));
    assert_eq!(theirs.map(|id| fixture.runtime.object(id)), before);

    fixture.runtime.refuse_nothing();
    fixture.forget_calls();
    fixture.install(Drift::None).await;
    let writes = fixture.runtime.writes();
    let at = |call: &str| writes.iter().position(|write| write == call);
    assert!(at("POST pods") < at(&format!("DELETE {WEBHOOKS}")) && at("POST pods").is_some(), "{writes:?}");
    let template = fixture.runtime.object(DEPLOYMENT).unwrap()["spec"]["template"].clone();
    assert_eq!(template["spec"]["containers"][0]["image"], "i:1");
    // Our own agent is tried no more.
    fixture.available();
    fixture.install(Drift::All).await;
    assert!(!fixture.runtime.writes().contains(&"POST pods".to_owned()));
}

/// Objects of lifecycle-manager in a runtime cluster.
pub(super) fn lifecycle_manager(fixture: &Fixture) {
    let marked = json!({"operator.kyma-project.io/managed-by": "kyma"});
    for (id, kind) in [
        (WEBHOOKS, "ValidatingWebhookConfiguration"),
        ("services/skr-webhook", "Service"),
        ("networkpolicies/kyma-project.io--seed-to-watcher", "NetworkPolicy"),
        ("secrets/skr-webhook-tls", "Secret"),
        (DEPLOYMENT, "Deployment"),
    ] {
        fixture.runtime.edit(id, |object| {
            *object = json!({"kind": kind, "metadata": {"name": id.split('/').nth(1).unwrap(), "labels": marked}});
        });
    }
    fixture.runtime.edit("secrets/skr-webhook-tls", |secret| secret["data"] = json!({"ca.crt": "x", "tls.key": "y"}));
    fixture.runtime.edit(DEPLOYMENT, |deployment| {
        deployment["spec"] = json!({"selector": {"matchLabels": {"app": "skr-webhook"}}, "template": {"spec": {
            "containers": [{"name": "server", "image": "theirs", "env": [{"name": "KCP_ADDR"}]}]}}});
    });
    fixture.runtime.edit("pods/skr-webhook-5d4-x", |pod| {
        *pod = json!({"metadata": {"name": "skr-webhook-5d4-x", "labels": {"app": "skr-webhook", "pod-template-hash": "5d4"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "skr-webhook-5d4", "uid": "u"}]}});
    });
}

#[tokio::test]
async fn lifecycle_managers_webhook_is_deleted_first_and_the_rest_is_taken_over_in_place() {
    let mut fixture = Fixture::installing(PathState::Unknown);
    lifecycle_manager(&fixture);
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    let writes = fixture.runtime.writes();
    let at =
        |call: &str| writes.iter().position(|write| write == call).unwrap_or_else(|| panic!("{call} in {writes:?}"));
    let gone = at("DELETE validatingwebhookconfigurations/skr-webhook");
    assert!(gone < at("PUT deployments/skr-webhook") && gone < at("DELETE secrets/skr-webhook-tls"));
    assert!(at("DELETE services/skr-webhook") > at("PUT deployments/skr-webhook"));
    at("DELETE networkpolicies/kyma-project.io--seed-to-watcher");
    assert!(fixture.runtime.object("secrets/skr-webhook-tls").unwrap()["data"].is_null(), "their key is not ours");
    let container =
        fixture.runtime.object("deployments/skr-webhook").unwrap()["spec"]["template"]["spec"]["containers"][0].clone();
    assert_eq!((&container["image"], &container["env"]), (&json!("i:1"), &Value::Null));

    let mut fixture = Fixture::installing(PathState::Unknown);
    lifecycle_manager(&fixture);
    fixture.runtime.refuse("DELETE validatingwebhookconfigurations/skr-webhook", 403);
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    let writes = fixture.runtime.writes();
    assert!(
        !writes.iter().any(|write| write.contains("deployments")
            || write.contains("policies")
            || write.contains("DELETE services"))
    );

    let mut fixture = Fixture::installing_with(PathState::Unknown, &["--compat-webhook-configuration"]);
    lifecycle_manager(&fixture);
    fixture
        .runtime
        .edit("validatingwebhookconfigurations/skr-webhook", |found| found["webhooks"] = json!([{"name": "x"}]));
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    let left = fixture.runtime.object("validatingwebhookconfigurations/skr-webhook").unwrap();
    assert!(left["webhooks"].is_null(), "{left}");
    let writes = fixture.runtime.writes();
    let at = |object: &str| {
        let found = writes.iter().position(|write| write == &format!("PUT {object}"));
        found.unwrap_or_else(|| panic!("{object} in {writes:?}"))
    };
    assert!(at(WEBHOOKS) < at(DEPLOYMENT), "no user's write meets a dead webhook: {writes:?}");
}

#[tokio::test]
async fn lifecycle_managers_leftovers_are_deleted_webhooks_first() {
    for hand_back in [false, true] {
        let mut fixture = Fixture::installing(PathState::Unknown);
        lifecycle_manager(&fixture);
        fixture.kcp.edit("kymas/k", |kyma| {
            kyma["metadata"]["finalizers"] = json!(["operator.kyma-project.io/Kyma"]);
            // A reconcile of this receiver began.
            kyma["metadata"]["annotations"] = json!({"operator.kyma-project.io/tidewatch-inputs": "x"});
        });
        if hand_back {
            fixture.kcp.edit("kymas/k", |kyma| kyma["metadata"]["labels"][label::HAND_BACK] = "true".into());
            fixture.watch_kymas();
        } else {
            fixture.delete();
        }
        let mut waited = false;
        let deleted = fixture
            .leaves(|fixture, deleted| match deleted {
                [.., last] if last == DEPLOYMENT && !waited => {
                    assert!(fixture.operation().contains("the Pod skr-webhook-5d4-x"), "{}", fixture.operation());
                    waited = true;
                }
                [.., last] if last == DEPLOYMENT => drop(fixture.runtime.remove("pods/skr-webhook-5d4-x")),
                _ => {}
            })
            .await;
        let expected = [
            WEBHOOKS,
            DEPLOYMENT,
            "services/skr-webhook",
            "networkpolicies/kyma-project.io--seed-to-watcher",
            "secrets/skr-webhook-tls",
        ];
        // A hand-back removes the inventory last.
        let last = hand_back.then_some("configmaps/tidewatch-catalog");
        assert_eq!(deleted, expected.into_iter().chain(last).collect::<Vec<_>>());
    }
    let mut fixture = Fixture::installing(PathState::Unknown);
    lifecycle_manager(&fixture);
    fixture.kcp.edit("kymas/k", |kyma| kyma["metadata"]["finalizers"] = json!(["operator.kyma-project.io/Kyma"]));
    fixture.runtime.refuse(&format!("DELETE {WEBHOOKS}"), 403);
    fixture.delete();
    assert!(!fixture.kyma().await.failed.is_empty());
    assert!(fixture.runtime.object(DEPLOYMENT).is_some(), "somebody must answer the webhook");
    assert!(fixture.operation().contains("ValidatingWebhookConfiguration skr-webhook"), "{}", fixture.operation());
}

#[tokio::test]
async fn foreign_objects_with_lifecycle_managers_names_stay() {
    let mut fixture = Fixture::installing(PathState::Unknown);
    for id in ["validatingwebhookconfigurations/skr-webhook", "services/skr-webhook"] {
        fixture.runtime.edit(id, |object| *object = json!({"metadata": {"name": "skr-webhook"}}));
    }
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    assert!(fixture.runtime.writes().iter().all(|write| !write.starts_with("DELETE")));
}

#[tokio::test]
async fn repeatedly_changed_object_is_reported_and_rate_limited() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    for n in 0..130 {
        fixture.runtime.edit("deployments/skr-webhook", |deployment| deployment["spec"]["replicas"] = (n + 2).into());
        fixture.install(drift("apps/v1/deployments/kyma-system/skr-webhook")).await;
    }
    assert_eq!(fixture.webhook().1, "Contested");
    assert_ne!(fixture.runtime.object("deployments/skr-webhook").unwrap()["spec"]["replicas"], 1);
}

#[tokio::test]
async fn missing_runtime_id_prevents_the_installation_and_is_reported() {
    let mut fixture = Fixture::installing(PathState::Unknown);
    fixture.kcp.edit("kymas/k", |kyma| kyma["metadata"]["labels"] = json!({}));
    assert!(fixture.reconcile(WorkSet::RUNTIME, Drift::None).await.failed.is_empty());
    assert_eq!((fixture.webhook().1, fixture.runtime.object("deployments/skr-webhook")), (json!("NoRuntimeId"), None));
}

#[tokio::test]
async fn deletion_removes_the_agent_last_and_its_objects_afterwards() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.runtime.edit("pods/skr-webhook-1", |pod| {
        *pod = json!({"metadata": {"name": "skr-webhook-1", "labels": {"app": "skr-webhook", label::PART_OF: "tidewatch"}}});
    });
    fixture.delete();
    let mut deleted = Vec::new();
    for round in 0..12 {
        assert!(fixture.kyma().await.failed.is_empty());
        deleted.extend(
            fixture.runtime.writes().into_iter().filter_map(|write| write.strip_prefix("DELETE ").map(str::to_owned)),
        );
        if round == 8 {
            assert_eq!(deleted.last().unwrap(), "deployments/skr-webhook", "its process still runs: {deleted:?}");
            fixture.runtime.remove("pods/skr-webhook-1");
        }
    }
    assert!(fixture.kcp.object("kymas/k").is_none());
    let agents: Vec<_> = deleted.iter().rev().take(OBJECTS.len()).map(String::as_str).collect();
    assert_eq!(agents, OBJECTS, "in the opposite order: {deleted:?}");
}

#[tokio::test]
async fn deletion_waits_only_for_the_agents_pods_and_not_for_lost_ones() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.runtime.edit("pods/mine", |pod| {
        *pod = json!({"metadata": {"name": "mine", "labels": {"app": "skr-webhook"}}});
    });
    fixture.runtime.edit("pods/skr-webhook-1", |pod| {
        *pod = json!({"metadata": {"name": "skr-webhook-1", "labels": {"app": "skr-webhook", label::PART_OF: "tidewatch"}}});
    });
    fixture.delete();
    let waited =
        |fixture: &Fixture| fixture.operation().contains("the Pod skr-webhook-1 (if its node is lost, for 10 minutes)");
    let mut passes = 0;
    fixture
        .leaves(|fixture, deleted| {
            if deleted.last().is_none_or(|last| last != DEPLOYMENT) {
                return;
            }
            passes += 1;
            assert!(waited(fixture) && !fixture.operation().contains("mine"), "{}", fixture.operation());
            let writes = fixture.kcp.writes();
            assert_eq!(writes.iter().any(|write| write.ends_with("/status")), passes == 1, "said once: {writes:?}");
            if passes == 3 {
                // Its node does not report its end.
                fixture.runtime.edit("pods/skr-webhook-1", |pod| {
                    pod["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z".into();
                    pod["metadata"]["finalizers"] = json!(["example.test/held"]);
                });
            }
        })
        .await;
    assert_eq!(passes, 3);
    assert!(fixture.kcp.object("kymas/k").is_none() && fixture.runtime.object("pods/mine").is_some());
}

#[tokio::test]
async fn refused_removal_is_reported_and_keeps_no_other_object() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.runtime.refuse("DELETE secrets/skr-webhook-tls", 403);
    fixture.delete();
    let refused = "failed to delete the Secret skr-webhook-tls in the runtime";
    for _ in 0..12 {
        fixture.kyma().await;
    }
    assert!(fixture.operation().starts_with(refused), "{}", fixture.operation());
    assert_eq!(fixture.status()["state"], "Deleting");
    for object in OBJECTS {
        assert_eq!(fixture.runtime.object(object).is_some(), object == "secrets/skr-webhook-tls", "{object}");
    }
    fixture.forget_calls();
    assert_eq!(fixture.kyma().await.failed, WorkSet::of(&[Work::Kyma]));
    assert_eq!(fixture.kcp.writes(), Vec::<String>::new(), "it is said once");
}

#[tokio::test]
async fn objects_without_labels_or_with_foreign_finalizers_are_removed() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    for object in OBJECTS {
        fixture.runtime.edit(object, |found| {
            found["metadata"]["labels"] = json!({});
            found["metadata"]["managedFields"] = json!([{"manager": "tidewatch", "operation": "Apply"}]);
            found["metadata"]["finalizers"] = json!(["example.test/held"]);
        });
    }
    // Only the agent's fields remain on it.
    fixture.runtime.edit("leases/tidewatch-agent", |lease| {
        lease["metadata"]["managedFields"] = json!([{"manager": "tidewatch-agent", "operation": "Update"}]);
    });
    fixture
        .runtime
        .edit("priorityclasses/skr-webhook-priority", |found| found["metadata"]["managedFields"] = json!([]));
    fixture.delete();
    fixture.leaves(|_, _| ()).await;
    for object in OBJECTS {
        let left = fixture.runtime.object(object).is_some();
        assert_eq!(left, object == "priorityclasses/skr-webhook-priority", "{object}: nobody knows whose that one is");
    }
}

#[tokio::test]
async fn foreign_owner_references_do_not_delete_our_objects() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.runtime.edit("secrets/skr-webhook-tls", |secret| secret["data"] = json!({"tls.key": "x"}));
    let hold = |found: &mut Value| {
        found["metadata"]["finalizers"] = json!(["example.test/held"]);
        found["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "u"}]);
    };
    OBJECTS.iter().for_each(|object| fixture.runtime.edit(object, hold));
    fixture.install(Drift::All).await;
    for object in OBJECTS {
        let metadata = &fixture.runtime.object(object).unwrap()["metadata"];
        assert!(metadata["finalizers"].is_null() && metadata["ownerReferences"].is_null(), "{object}: {metadata}");
    }
    assert_eq!(fixture.runtime.object("secrets/skr-webhook-tls").unwrap()["data"]["tls.key"], "x", "the agent's");
    fixture.forget_calls();
    fixture.install(Drift::None).await;
    assert_eq!(fixture.runtime.calls(), Vec::<String>::new(), "at rest it costs nothing");

    // Held, and then deleted.
    for object in OBJECTS {
        fixture.runtime.edit(object, |found| {
            hold(found);
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        });
    }
    fixture.install(Drift::All).await;
    for object in OBJECTS {
        let metadata = &fixture.runtime.object(object).unwrap()["metadata"];
        assert!(metadata["deletionTimestamp"].is_null() && metadata["finalizers"].is_null(), "{object}: {metadata}");
    }
}

#[tokio::test]
async fn unready_agent_is_explained_by_its_deployment_and_event_path() {
    let mut fixture = Fixture::installing(PathState::Unproven(Unproven::NoHeartbeat));
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    fixture.runtime.edit(DEPLOYMENT, |deployment| {
        deployment["status"] = json!({"observedGeneration": 9, "conditions": [{"type": "ReplicaFailure", "status": "True",
            "message": "pods \"skr-webhook-5d4-\" is forbidden: violates the policy of this cluster"}]});
    });
    fixture.install(Drift::None).await;
    let (status, reason, message) = fixture.webhook();
    assert_eq!((status, reason), (json!("False"), json!("Refused")));
    assert!(message.as_str().unwrap().contains("violates the policy of this cluster"), "{message}");

    fixture.available();
    fixture.install(Drift::None).await;
    let words = |fixture: &Fixture| fixture.webhook().2.as_str().unwrap().to_owned();
    assert_eq!(fixture.webhook().1, "PathNotProven");
    assert!(words(&fixture).ends_with("has not been proven yet"), "{}", words(&fixture));
    fixture.kcp.edit("kymas/k", |kyma| {
        let conditions = kyma["status"]["conditions"].as_array_mut().unwrap();
        conditions.push(json!({"type": "EventPath", "status": "False", "reason": "NoHeartbeat", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}));
    });
    fixture.install(Drift::None).await;
    assert_eq!(fixture.webhook().1, "PathNotProven");
    assert!(words(&fixture).ends_with("is not proven since 2026-01-01T00:00:00Z"), "{}", words(&fixture));
}

/// lifecycle-manager's Deployment names the Secret of the modules; former releases named a copy of it.
#[tokio::test]
async fn copy_of_the_pull_secret_goes_when_the_deployment_names_that_of_the_modules() {
    const COPY: &str = "secrets/tidewatch-agent-pull";
    let named = |fixture: &Fixture| {
        let pod = fixture.runtime.object(DEPLOYMENT).unwrap()["spec"]["template"]["spec"].take();
        pod["imagePullSecrets"][0]["name"].clone()
    };
    let mut before = Fixture::installing_with(PathState::Proven, &["--agent-image-pull-secret", "pull"]);
    let content = json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": "YQ=="}});
    before.ctx.installer.as_mut().unwrap().pull_secret = PullSecret::fixed(content);
    assert!(before.reconcile(WorkSet::RUNTIME, Drift::None).await.failed.is_empty());
    assert_eq!((named(&before), before.runtime.object(COPY).is_some()), (json!("tidewatch-agent-pull"), true));

    let flags = ["--skr-image-pull-secret", "pull"];
    let mut fixture = Fixture::installing_with(PathState::Proven, &flags).succeeding(&before);
    fixture.forget_calls();
    assert!(fixture.reconcile(WorkSet::RUNTIME, Drift::None).await.failed.is_empty());
    assert_eq!((named(&fixture), fixture.runtime.object(COPY)), (json!("pull"), None));
    let writes = fixture.runtime.writes();
    let position = |name: &str| writes.iter().position(|call| call.contains(name)).unwrap();
    assert!(position(DEPLOYMENT) < position(COPY), "the Deployment names it no longer: {writes:?}");

    // A Secret of the modules that has the name of the copy stays.
    let content = json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": "YQ=="}});
    let flags = ["--skr-image-pull-secret", "tidewatch-agent-pull"];
    let mut fixture = Fixture::installing_with(PathState::Proven, &flags).succeeding(&fixture);
    fixture.ctx.pull_secret =
        Some(ModulePullSecret { name: "tidewatch-agent-pull".into(), secret: PullSecret::fixed(content) });
    for _ in 0..2 {
        assert!(fixture.reconcile(WorkSet::RUNTIME, Drift::All).await.failed.is_empty());
        assert!(fixture.runtime.object(COPY).is_some());
    }
}

#[tokio::test]
async fn condition_is_absent_without_the_installer() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    assert_eq!(fixture.webhook().0, "True");
    fixture.ctx.installer = None;
    fixture.forget_calls();
    fixture.kyma().await;
    assert!(fixture.condition("SKRWebhook").is_null());
    let writes = fixture.runtime.writes();
    assert!(!writes.iter().any(|call| call.contains("deployments")), "{writes:?}");
}

#[tokio::test]
async fn readiness_that_did_not_reach_the_runtime_is_written_by_the_retry() {
    let mut fixture = Fixture::installing(PathState::Proven);
    assert!(fixture.reconcile(WorkSet::RUNTIME, Drift::None).await.failed.is_empty());
    let shown = |fixture: &Fixture| {
        let status = fixture.shown();
        let conditions = status["conditions"].as_array().unwrap();
        let webhook = conditions.iter().find(|condition| condition["type"] == "SKRWebhook").unwrap();
        (webhook["status"].clone(), status["state"].clone())
    };
    assert_eq!(shown(&fixture), (json!("False"), json!("Processing")));
    fixture.available();
    fixture.runtime.refuse("PUT kymas/default/status", 503);
    assert_eq!(fixture.install(Drift::All).await.failed, WorkSet::of(&INSTALLER));
    assert_eq!((fixture.webhook().0, shown(&fixture).0), (json!("True"), json!("False")));
    fixture.runtime.refuse_nothing();
    let ended = ReconcileOutcome::ended(WorkSet::of(&INSTALLER));
    assert_eq!(fixture.install(Drift::None).await, ended);
    assert_eq!(shown(&fixture), (json!("True"), json!("Ready")));
    fixture.forget_calls();
    assert_eq!(fixture.install(Drift::None).await, ended);
    assert_eq!(fixture.runtime.calls(), Vec::<String>::new(), "what the runtime shows is known again");
}
