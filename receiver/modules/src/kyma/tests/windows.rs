//! Upgrades that require a downtime wait for a maintenance window.

use tidewatch_select::windows::NoWindowError;

use super::*;

/// Versions of `keda`: 1.1.0 requires a downtime, 1.0.1 does not. The channel `regular` names `version`, `fast` 1.1.0.
fn release(fixture: &mut Fixture, version: &str, versions: &[&str]) {
    let template = |version: &&str| {
        let spec = json!({"moduleName": "keda", "version": version, "descriptor": {}, "requiresDowntime": *version == "1.1.0"});
        of_kyma_group("ModuleTemplate", &format!("keda-{version}"), spec)
    };
    let channels = json!([{"channel": "regular", "version": version}, {"channel": "fast", "version": "1.1.0"}]);
    let spec = json!({"moduleName": "keda", "ocmComponentName": "kyma-project.io/module/keda", "channels": channels});
    fixture.set_templates(filled(&versions.iter().map(template).collect::<Vec<_>>()).0);
    fixture.set_release_metas(filled(&[of_kyma_group("ModuleReleaseMeta", "keda", spec)]).0);
}

const ALL: [&str; 3] = ["1.0.0", "1.0.1", "1.1.0"];

/// Start of a window that begins after this many hours.
fn opens_after(hours: i64) -> Timestamp {
    let now = Timestamp::now().as_second();
    Timestamp::from_second(now + hours * 3_600).unwrap()
}

/// A policy with one window of four hours.
fn once(begin: Timestamp) -> Value {
    let end = Timestamp::from_second(begin.as_second() + 4 * 3_600).unwrap();
    json!({"default": {"begin": begin.to_string(), "end": end.to_string()}})
}

/// A fixture with `keda` 1.0.0 ready and a window that opens at the returned time.
async fn ready() -> (Fixture, Timestamp) {
    let mut fixture = Fixture::with_keda().await;
    // Moved channels are followed at once.
    let flags = catalog::Flags { module_upgrade_rollout_max_delay: Duration::ZERO, ..catalog::Flags::default() };
    let settings = catalog::Settings { flags, ..catalog::Settings::default() };
    fixture.ctx.catalog = Catalog::deciding(settings, catalog::Metrics::default(), WriteBudgets::default());
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.edit(&id, |manifest| manifest["status"] = json!({"state": "Ready"}));
    release(&mut fixture, "1.0.0", &ALL);
    let opens = opens_after(2);
    fixture.ctx.windows.set_policy(&once(opens));
    fixture.reconcile(WorkSet::of(&[Work::Kyma, Work::Catalog]), Drift::None).await;
    assert_eq!(fixture.shown_module()["state"], "Ready");
    fixture.forget_calls();
    (fixture, opens)
}

impl Fixture {
    fn shown_module(&self) -> Value {
        self.status()["modules"][0].clone()
    }

    /// Installed version with the channel that it came from.
    fn installed_version(&self) -> (String, String) {
        let manifest = self.manifest().unwrap().1;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&manifest["spec"]["version"]), text(&manifest["metadata"]["labels"]["operator.kyma-project.io/channel"]))
    }

    fn select_one(&self, module: Value) {
        self.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([module]));
    }

    /// Value of the annotation with the inputs of the last reconcile.
    fn noted(&self) -> Value {
        self.kcp.object("kymas/k").unwrap()["metadata"]["annotations"]["operator.kyma-project.io/tidewatch-inputs"]
            .clone()
    }
}

fn message(opens: Timestamp) -> String {
    format!("waiting for next maintenance window to update module version to 1.1.0: it starts at {opens}")
}

/// `acceptance.md` C1 24.
#[tokio::test]
async fn upgrade_waits_for_its_window_and_first_installation_does_not() {
    let mut new = Fixture::settled().await;
    release(&mut new, "1.1.0", &ALL);
    new.enable();
    assert_eq!(new.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])), "without a policy");
    assert_eq!((new.installed_version().0.as_str(), &new.shown_module()["maintenance"]), ("1.1.0", &Value::Null));

    let (mut fixture, opens) = ready().await;
    let before = fixture.noted();
    release(&mut fixture, "1.1.0", &ALL);
    let outcome = fixture.kyma().await;
    assert_eq!((outcome.ended, outcome.failed), (WorkSet::of(&[Work::Kyma]), WorkSet::EMPTY));
    let rest = outcome.rollout_after.unwrap();
    assert!(rest <= Duration::from_secs(7_200) && rest > Duration::from_secs(7_000), "{rest:?}");
    let module = fixture.shown_module();
    assert_eq!(
        (&module["state"], &module["version"], &module["maintenance"]),
        (&json!("Ready"), &json!("1.0.0"), &json!(true))
    );
    assert_eq!(module["message"], json!(message(opens)));
    assert_eq!(module["template"]["metadata"]["name"], "keda-1.0.0");
    assert_eq!(
        (&fixture.status()["state"], &fixture.shown()["modules"][0]["maintenance"]),
        (&json!("Ready"), &json!(true))
    );
    assert_eq!(fixture.installed_version(), ("1.0.0".into(), "regular".into()));
    assert_ne!(fixture.noted(), before, "a start finds the window in the inputs");
    fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
    fixture.forget_calls();
    for work in [WorkSet::of(&[Work::Kyma]), WorkSet::RUNTIME] {
        fixture.reconcile(work, Drift::All).await;
        assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]), "nothing changes until then");
    }

    // The policy is rewritten.
    fixture.ctx.windows.set_policy(&once(opens_after(-1)));
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(fixture.installed_version(), ("1.1.0".into(), "regular".into()));
    assert_eq!(
        (&fixture.shown_module()["maintenance"], &fixture.shown_module()["message"]),
        (&Value::Null, &Value::Null)
    );
}

#[tokio::test]
async fn kyma_that_skips_windows_is_upgraded_at_once() {
    let (mut fixture, _) = ready().await;
    fixture.kcp.edit("kymas/k", |kyma| kyma["spec"]["skipMaintenanceWindows"] = json!(true));
    release(&mut fixture, "1.1.0", &ALL);
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(fixture.installed_version().0, "1.1.0");
}

#[tokio::test]
async fn upgrade_without_downtime_does_not_wait() {
    let (mut fixture, _) = ready().await;
    release(&mut fixture, "1.0.1", &ALL);
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(
        (fixture.installed_version().0.as_str(), &fixture.shown_module()["maintenance"]),
        ("1.0.1", &Value::Null)
    );
}

#[tokio::test]
async fn users_change_of_channel_or_pin_waits_too() {
    let of_pin = "version 1.1.0 is pinned by the annotation version.operator.kyma-project.io/keda; ";
    for (channel, pin, notice) in [("fast", None, ""), ("regular", Some("1.1.0"), of_pin)] {
        let (mut fixture, opens) = ready().await;
        fixture.select_one(json!({"name": "keda", "managed": true, "channel": channel}));
        fixture.pin(pin).await;
        let module = fixture.shown_module();
        let said = format!("{notice}{}", message(opens));
        assert_eq!((&module["maintenance"], &module["message"]), (&json!(true), &json!(said)), "{channel}");
        assert_eq!(module["channel"], "regular", "that of the installed version");
        assert_eq!(fixture.installed_version(), ("1.0.0".into(), "regular".into()));
        fixture.forget_calls();
        fixture.kyma().await;
        assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
        // Back again.
        fixture.select_one(json!({"name": "keda", "managed": true}));
        fixture.pin(None).await;
        assert_eq!(
            (&fixture.shown_module()["maintenance"], &fixture.shown_module()["message"]),
            (&Value::Null, &Value::Null)
        );
    }
}

#[tokio::test]
async fn waiting_module_is_released_or_removed_at_once() {
    let (mut fixture, _) = ready().await;
    release(&mut fixture, "1.1.0", &ALL);
    fixture.kyma().await;
    fixture.select_one(json!({"name": "keda", "managed": false}));
    fixture.kyma().await;
    assert_eq!(
        (&fixture.shown_module()["state"], &fixture.shown_module()["maintenance"]),
        (&json!("Unmanaged"), &Value::Null)
    );

    let (mut fixture, _) = ready().await;
    release(&mut fixture, "1.1.0", &ALL);
    fixture.kyma().await;
    fixture.runtime.edit("kymas/default", |kyma| kyma["spec"]["modules"] = json!([]));
    fixture.kyma().await;
    assert!(fixture.is_manifest_deleted());
    assert_eq!(
        (&fixture.shown_module()["state"], &fixture.shown_module()["maintenance"]),
        (&json!("Deleting"), &Value::Null)
    );
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!(fixture.installed_version().0, "1.0.0", "a Manifest that is being deleted waits as well");
}

#[tokio::test]
async fn state_of_a_waiting_module_is_that_of_its_manifest() {
    let (mut fixture, opens) = ready().await;
    release(&mut fixture, "1.1.0", &ALL);
    fixture.kyma().await;
    let (id, _) = fixture.manifest().unwrap();
    let status = json!({"state": "Error", "lastOperation": {"operation": "quota exceeded", "lastUpdateTime": "2026-01-01T00:00:00Z"}});
    fixture.kcp.edit(&id, |manifest| manifest["status"] = status);
    fixture.reconcile(WorkSet::STATUS, Drift::None).await;
    let module = fixture.shown_module();
    assert_eq!((&module["state"], &module["maintenance"]), (&json!("Error"), &json!(true)));
    assert_eq!(module["message"], json!(format!("quota exceeded; {}", message(opens))));
}

#[tokio::test]
async fn installed_version_that_left_the_catalog_waits_as_well() {
    let (mut fixture, opens) = ready().await;
    release(&mut fixture, "1.1.0", &["1.1.0"]);
    let (_, before) = fixture.manifest().unwrap();
    fixture.kyma().await;
    let module = fixture.shown_module();
    assert_eq!(
        (&module["state"], &module["version"], &module["maintenance"]),
        (&json!("Ready"), &json!("1.0.0"), &json!(true))
    );
    assert_eq!(module["message"], json!(message(opens)));
    assert_eq!(fixture.manifest().unwrap().1, before, "its Manifest stays as it is");
    fixture.ctx.windows.set_policy(&once(opens_after(-1)));
    fixture.kyma().await;
    assert_eq!(
        (fixture.installed_version().0.as_str(), &fixture.shown_module()["maintenance"]),
        ("1.1.0", &Value::Null)
    );
}

#[tokio::test]
async fn undeterminable_window_is_an_error_and_keeps_the_version() {
    let (mut fixture, _) = ready().await;
    release(&mut fixture, "1.1.0", &ALL);
    for (policy, cause) in [
        (None, NoWindowError::NoPolicy),
        (Some(json!({"rules": []})), NoWindowError::NoneFound),
        (Some(once(opens_after(-5))), NoWindowError::NoneFound),
    ] {
        match &policy {
            None => fixture.ctx.windows = MaintenanceWindows::new(Duration::ZERO, Default::default()),
            Some(policy) => fixture.ctx.windows.set_policy(policy),
        }
        let outcome = fixture.kyma().await;
        assert_eq!(outcome, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])), "a change of the policy ends it");
        let module = fixture.shown_module();
        assert_eq!(
            (&module["state"], &module["version"], &module["maintenance"]),
            (&json!("Error"), &json!("1.0.0"), &Value::Null)
        );
        assert_eq!(module["message"], json!(format!("failed to determine if maintenance window is active: {cause}")));
        assert_eq!((&fixture.status()["state"], fixture.installed_version().0.as_str()), (&json!("Error"), "1.0.0"));
        fixture.forget_calls();
        fixture.kyma().await;
        assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
    }
    // The module is Ready again as soon as its window is known.
    let opens = opens_after(3);
    fixture.ctx.windows.set_policy(&once(opens));
    fixture.kyma().await;
    assert_eq!(
        (&fixture.shown_module()["state"], &fixture.shown_module()["message"]),
        (&json!("Ready"), &json!(message(opens)))
    );
}

#[tokio::test]
async fn refusals_come_before_the_window() {
    let (mut fixture, _) = ready().await;
    let (id, _) = fixture.manifest().unwrap();
    fixture.kcp.edit(&id, |manifest| manifest["spec"]["version"] = json!("1.2.0"));
    release(&mut fixture, "1.1.0", &ALL);
    fixture.kyma().await;
    let module = fixture.shown_module();
    let text = module["message"].as_str().unwrap();
    assert!(module["state"] == "Warning" && text.starts_with("module template update not allowed"), "{text}");
    assert_eq!(module["maintenance"], Value::Null);
}
