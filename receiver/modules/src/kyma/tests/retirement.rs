//! Deprecated and withdrawn versions: announced before their day, a warning to their users from then on.

use jiff::{SignedDuration, Timestamp};
use tidewatch_select::catalog::retirement;

use super::{
    mandatory::{keda, warden},
    *,
};

/// A day relative to today, as a release meta names it.
fn day(offset: i64) -> String {
    retirement::day(Timestamp::now() + SignedDuration::from_hours(24 * offset)).to_string()
}

#[tokio::test]
async fn announced_deprecation_takes_effect_on_its_day_without_polling() {
    let mut fixture = Fixture::with_keda().await;
    fixture.set_manifest_state("Ready");
    let regular = [("regular", "1.0.0")];
    let later = day(2);
    fixture.release(&regular, json!([{"version": "1.0.0", "deprecationDate": later, "deprecationMessage": "leave"}]));
    let begin = || retirement::until(later.parse().unwrap(), Timestamp::now());
    let latest = begin() + fixture.ctx.catalog.flags().module_upgrade_rollout_max_delay;
    let after = fixture.kyma().await.rollout_after.unwrap();
    assert!(after >= begin() && after <= latest, "{after:?}");
    let said = format!("version 1.0.0 of module keda will be deprecated on {later}: leave");
    assert_eq!(fixture.module(), ("Ready".to_owned(), said));
    fixture.forget_calls();
    assert!(
        fixture.kyma().await.rollout_after.is_some(),
        "each reconcile renews the delay, the first after a start too"
    );
    fixture.reconcile(WorkSet::STATUS, Drift::None).await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]), "no status changes by the clock");

    // The day has begun.
    let today = day(0);
    fixture.release(&regular, json!([{"version": "1.0.0", "deprecationDate": today, "deprecationMessage": "leave"}]));
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    let said = format!("version 1.0.0 of module keda is deprecated as of {today}: leave");
    assert_eq!((fixture.module(), fixture.status()["state"].as_str()), (("Warning".to_owned(), said), Some("Warning")));
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
}

fn withdrawn(version: &str, replacement: &str, date: &str) -> Value {
    json!([{"version": version, "withdrawal": {"date": date, "replacement": replacement, "message": "it loses data"}}])
}

#[tokio::test]
async fn withdrawn_version_stays_where_it_is_and_is_installed_nowhere_else() {
    let today = day(0);
    let notice = format!("version 1.0.0 of module keda is withdrawn as of {today}, use version 1.1.0: it loses data");
    let mut fixture = Fixture::with_keda().await;
    fixture.publish(&["1.0.0", "1.1.0"]);
    fixture.set_manifest_state("Ready");
    fixture.release(&[("regular", "1.0.0")], withdrawn("1.0.0", "1.1.0", &today));
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(fixture.module(), ("Warning".to_owned(), notice.clone()));
    // A repair still works, and so does a removal.
    fixture
        .kcp
        .edit(&fixture.manifest().unwrap().0, |manifest| manifest["spec"]["install"]["source"]["ref"] = json!("evil"));
    fixture.kyma().await;
    assert_ne!(fixture.manifest().unwrap().1["spec"]["install"]["source"]["ref"], "evil");
    fixture.select(json!([]));
    fixture.kyma().await;
    fixture.release_manifest();
    // Who has removed it is a new user.
    fixture.select(json!([{"name": "keda"}]));
    let of_pin = "; version 1.0.0 is pinned by the annotation version.operator.kyma-project.io/keda";
    for (pin, addition, channel) in [(None, "", ("regular", "1.0.0")), (Some("1.0.0"), of_pin, ("fast", "1.1.0"))] {
        fixture.release(&[channel], withdrawn("1.0.0", "1.1.0", &today));
        fixture.pin(pin).await;
        let message = format!("module version not available: {notice}{addition}");
        assert_eq!(fixture.module(), ("Error".to_owned(), message));
        assert!(fixture.manifest().is_none());
    }
    fixture.forget_calls();
    fixture.kyma().await;
    assert_eq!((fixture.kcp.writes(), fixture.runtime.writes()), (vec![], vec![]));
    fixture.pin("1.1.0").await;
    assert_eq!(fixture.manifest().unwrap().1["spec"]["version"], "1.1.0");
}

#[tokio::test]
async fn upgrade_into_a_withdrawn_version_is_refused() {
    let mut fixture = Fixture::with_keda().await;
    fixture.roll_out_at_once();
    fixture.publish(&["1.0.0", "1.1.0", "1.2.0"]);
    fixture.set_manifest_state("Ready");
    let today = day(0);
    fixture.release(&[("regular", "1.1.0")], withdrawn("1.1.0", "1.2.0", &today));
    fixture.kyma().await;
    let message = format!(
        "module template update not allowed: version 1.1.0 of module keda is withdrawn as of {today}, use version 1.2.0: it \
         loses data; version 1.0.0 stays installed"
    );
    assert_eq!(fixture.module(), ("Warning".to_owned(), message));
    assert_eq!(fixture.manifest().unwrap().1["spec"]["version"], "1.0.0");
    assert_eq!(fixture.status()["modules"][0]["version"], "1.0.0");
    fixture.release(&[("regular", "1.2.0")], withdrawn("1.1.0", "1.2.0", &today));
    fixture.kyma().await;
    assert_eq!(fixture.manifest().unwrap().1["spec"]["version"], "1.2.0");
}

#[tokio::test]
async fn unmanaged_module_of_a_withdrawn_version_stays_unmanaged() {
    let mut fixture = Fixture::with_keda().await;
    fixture.select(json!([{"name": "keda", "managed": false}]));
    fixture.kyma().await;
    fixture.kcp.remove(&fixture.manifest().unwrap().0);
    fixture.release(&[("regular", "1.0.0")], withdrawn("1.0.0", "1.1.0", &day(0)));
    fixture.kyma().await;
    assert_eq!(fixture.module(), ("Unmanaged".to_owned(), String::new()));
}

/// A mandatory version that is withdrawn stays where it is. The Kyma, whose status shows no mandatory module, stays Ready.
#[tokio::test]
async fn withdrawn_mandatory_version_stays_where_it_is() {
    let mut fixture = Fixture::with_mandatory().await;
    fixture.kyma().await;
    let (id, _) = fixture.manifest_of("warden").unwrap();
    let mut meta = warden();
    meta["spec"]["versions"] = withdrawn("1.0.0", "1.1.0", &day(0));
    fixture.set_metas(&[keda(), meta]);
    fixture.forget_calls();
    assert_eq!(fixture.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!((fixture.kcp.writes(), fixture.status()["state"].as_str()), (vec![], Some("Ready")));
    // It is repaired.
    fixture.kcp.edit(&id, |manifest| manifest["spec"]["install"]["source"]["ref"] = json!("evil"));
    fixture.kyma().await;
    assert_ne!(fixture.manifest_of("warden").unwrap().1["spec"]["install"]["source"]["ref"], "evil");
    // One that was removed does not come back.
    fixture.kcp.remove(&id);
    fixture.kyma().await;
    assert_eq!((fixture.manifest_of("warden"), fixture.status()["state"].as_str()), (None, Some("Ready")));
}
