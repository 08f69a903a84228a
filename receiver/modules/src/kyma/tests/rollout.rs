//! A new version of a channel is installed in the rollout slot of the Kyma, whatever triggered the reconcile.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use tidewatch_select::catalog::content_id;

use super::*;

/// One day, so that no rollout slot begins during a test.
const WINDOW: Duration = Duration::from_secs(86_400);

/// A fixture with `keda` 1.0.0 whose channel moved to 1.1.0 `since` seconds ago, according to KCP's releases.
async fn moved(since: Option<i64>) -> Fixture {
    let mut fixture = Fixture::with_keda().await;
    let version = |version: &str| {
        let spec = json!({"moduleName": "keda", "version": version, "descriptor": {}});
        of_kyma_group("ModuleTemplate", &format!("keda-{version}"), spec)
    };
    let meta = of_kyma_group(
        "ModuleReleaseMeta",
        "keda",
        json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda", "channels": [
            {"channel": "regular", "version": "1.1.0"}, {"channel": "fast", "version": "1.1.0"}]}),
    );
    fixture.ctx.stores.templates = filled::<ModuleTemplate>(&[version("1.0.0"), version("1.1.0")]).0;
    fixture.ctx.stores.release_metas = filled::<ModuleReleaseMeta>(&[meta]).0;
    let flags = catalog::Flags { module_upgrade_rollout_max_delay: WINDOW, ..catalog::Flags::default() };
    let settings = catalog::Settings { flags, ..catalog::Settings::default() };
    fixture.ctx.catalog = Catalog::deciding(settings, catalog::Metrics::default(), WriteBudgets::default());
    let pointer = match since {
        Some(since) => json!({"version": "1.1.0", "since": Timestamp::now().as_second() - since}),
        None => json!({"version": "1.0.0"}),
    };
    let accepted =
        json!({"keda": {"whom": "everyone", "channels": {"regular": pointer, "fast": {"version": "1.1.0"}}}});
    let map: ConfigMap = serde_json::from_value(json!({"data": {"accepted": accepted.to_string()}})).unwrap();
    fixture.ctx.catalog.observe_releases(Some(&map));
    fixture
}

fn installed(fixture: &Fixture) -> String {
    fixture.manifest().unwrap().1["spec"]["version"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn unrelated_reconcile_keeps_the_version_and_requeues_for_the_slot() {
    // Without a recorded time the window begins with this process.
    for since in [None, Some(0)] {
        let mut fixture = moved(since).await;
        let outcome = fixture.kyma().await;
        assert_eq!((outcome.ended, outcome.failed), (WorkSet::of(&[Work::Kyma]), WorkSet::EMPTY));
        let turn = outcome.rollout_after.unwrap();
        assert!(turn > Duration::ZERO && turn <= WINDOW, "{turn:?}");
        assert_eq!(outcome.requeue_after, None);
        assert_eq!(installed(&fixture), "1.0.0");
        fixture.forget_calls();
        // As a verification does, or a start.
        fixture.reconcile(WorkSet::RUNTIME, Drift::All).await;
        assert_eq!(installed(&fixture), "1.0.0");
        assert_eq!(fixture.status()["modules"][0]["version"], "1.0.0");
        assert_eq!(fixture.status()["modules"][0]["template"]["metadata"]["name"], "keda-1.0.0");
    }
}

#[tokio::test]
async fn version_is_installed_in_its_rollout_slot() {
    let mut fixture = moved(Some(WINDOW.as_secs().try_into().unwrap())).await;
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(installed(&fixture), "1.1.0");
}

#[tokio::test]
async fn channel_change_by_the_user_takes_effect_at_once() {
    let mut fixture = moved(Some(0)).await;
    fixture.runtime.edit("kymas/default", |kyma| {
        kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true, "channel": "fast"}]);
    });
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(installed(&fixture), "1.1.0");
}

fn template_with(data: Value) -> Value {
    let manager = json!({"group": "apps", "version": "v1", "kind": "Deployment", "name": "other"});
    json!({"moduleName": "keda", "version": "1.0.0", "descriptor": {}, "manager": manager, "data": data})
}

/// A fixture with `keda` 1.0.0 installed, whose template was edited in place: `since` that many seconds according to KCP's
/// releases, or while no receiver was running.
async fn edited(since: Option<i64>) -> Fixture {
    let mut fixture = Fixture::with_keda().await;
    let id = |spec: &Value| content_id(&serde_json::from_value(spec.clone()).unwrap());
    let old = json!({"moduleName": "keda", "version": "1.0.0", "descriptor": {}});
    let new = template_with(json!({"apiVersion": "a/v1", "kind": "Keda", "spec": {"replicas": 2}}));
    let (content, edited) = match since {
        Some(since) => (id(&new), json!({"1.0.0": Timestamp::now().as_second() - since})),
        None => (id(&old), json!({})),
    };
    fixture.ctx.stores.templates = filled::<ModuleTemplate>(&[of_kyma_group("ModuleTemplate", "keda-1.0.0", new)]).0;
    fixture.set_rollout_window(WINDOW);
    let accepted = json!({"keda": {"whom": "everyone", "component": "kyma-project.io/module/keda",
        "channels": {"regular": {"version": "1.0.0"}}, "versions": {"1.0.0": {}},
        "contents": {"1.0.0": content}, "edited": edited}});
    let map: ConfigMap = serde_json::from_value(json!({"data": {"accepted": accepted.to_string()}})).unwrap();
    fixture.ctx.catalog.observe_releases(Some(&map));
    fixture
}

#[tokio::test]
async fn edited_template_is_installed_in_the_rollout_slot() {
    for since in [None, Some(0)] {
        let mut fixture = edited(since).await;
        let (id, before) = fixture.manifest().unwrap();
        let outcome = fixture.kyma().await;
        let turn = outcome.rollout_after.unwrap();
        assert!(turn > Duration::ZERO && turn <= WINDOW, "{turn:?}");
        assert_eq!(fixture.manifest().unwrap().1["spec"], before["spec"]);
        // What the user changes meanwhile takes effect.
        fixture.runtime.edit("kymas/default", |kyma| {
            kyma["spec"]["modules"] = json!([{"name": "keda", "managed": true, "customResourcePolicy": "Ignore"}]);
        });
        fixture.kyma().await;
        let spec = fixture.manifest().unwrap().1["spec"].clone();
        assert_eq!((&spec["customResourcePolicy"], &spec["resource"]), (&json!("Ignore"), &Value::Null));
        // A new Manifest has the new content.
        fixture.kcp.remove(&id);
        fixture.kyma().await;
        let spec = fixture.manifest().unwrap().1["spec"].clone();
        assert_eq!((&spec["resource"]["spec"]["replicas"], &spec["manager"]["name"]), (&json!(2), &json!("other")));
    }
    let mut fixture = edited(Some(WINDOW.as_secs().try_into().unwrap())).await;
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(fixture.manifest().unwrap().1["spec"]["resource"]["spec"]["replicas"], 2);
}

#[tokio::test]
async fn edit_is_not_installed_before_it_is_decided_on() {
    let mut fixture = edited(None).await;
    drop(fixture.ctx.catalog.snapshot(&fixture.ctx.stores));
    let new = template_with(json!({"apiVersion": "a/v1", "kind": "Keda", "spec": {"replicas": 3}}));
    fixture.ctx.stores.templates = filled::<ModuleTemplate>(&[of_kyma_group("ModuleTemplate", "keda-1.0.0", new)]).0;
    // As from the event of the template until the guard has decided.
    fixture.ctx.catalog.mark_undecided("keda");
    fixture.kyma().await;
    assert_eq!(fixture.manifest().unwrap().1["spec"]["resource"], Value::Null);
}

#[tokio::test]
async fn failing_catalog_is_retried_before_the_rollout_slot() {
    let mut fixture = moved(Some(0)).await;
    fixture.runtime.refuse("GET configmaps/tidewatch-catalog", 503);
    let outcome = fixture.reconcile(WorkSet::of(&[Work::Kyma, Work::Catalog]), Drift::None).await;
    assert_eq!((outcome.failed, outcome.requeue_after), (WorkSet::of(&[Work::Catalog]), None));
    assert!(outcome.rollout_after.is_some());
    assert_eq!(installed(&fixture), "1.0.0");
}
