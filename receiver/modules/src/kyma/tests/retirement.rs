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
    let mut bed = Bed::with_keda().await;
    bed.set_manifest_state("Ready");
    let regular = [("regular", "1.0.0")];
    let later = day(2);
    bed.release(&regular, json!([{"version": "1.0.0", "deprecationDate": later, "deprecationMessage": "leave"}]));
    let begin = || retirement::until(later.parse().unwrap(), Timestamp::now());
    let latest = begin() + bed.ctx.catalog.flags().module_upgrade_rollout_max_delay;
    let after = bed.kyma().await.rollout_after.unwrap();
    assert!(after >= begin() && after <= latest, "{after:?}");
    let said = format!("version 1.0.0 of module keda will be deprecated on {later}: leave");
    assert_eq!(bed.module(), ("Ready".to_owned(), said));
    bed.forget_calls();
    assert!(bed.kyma().await.rollout_after.is_some(), "each reconcile renews the delay, the first after a start too");
    bed.reconcile(WorkSet::STATUS, Drift::None).await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]), "no status changes by the clock");

    // The day has begun.
    let today = day(0);
    bed.release(&regular, json!([{"version": "1.0.0", "deprecationDate": today, "deprecationMessage": "leave"}]));
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    let said = format!("version 1.0.0 of module keda is deprecated as of {today}: leave");
    assert_eq!((bed.module(), bed.status()["state"].as_str()), (("Warning".to_owned(), said), Some("Warning")));
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]));
}

fn withdrawn(version: &str, replacement: &str, date: &str) -> Value {
    json!([{"version": version, "withdrawal": {"date": date, "replacement": replacement, "message": "it loses data"}}])
}

#[tokio::test]
async fn withdrawn_version_stays_where_it_is_and_is_installed_nowhere_else() {
    let today = day(0);
    let notice = format!("version 1.0.0 of module keda is withdrawn as of {today}, use version 1.1.0: it loses data");
    let mut bed = Bed::with_keda().await;
    bed.publish(&["1.0.0", "1.1.0"]);
    bed.set_manifest_state("Ready");
    bed.release(&[("regular", "1.0.0")], withdrawn("1.0.0", "1.1.0", &today));
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!(bed.module(), ("Warning".to_owned(), notice.clone()));
    // A repair still works, and so does a removal.
    bed.kcp.edit(&bed.manifest().unwrap().0, |manifest| manifest["spec"]["install"]["source"]["ref"] = json!("evil"));
    bed.kyma().await;
    assert_ne!(bed.manifest().unwrap().1["spec"]["install"]["source"]["ref"], "evil");
    bed.select(json!([]));
    bed.kyma().await;
    bed.release_manifest();
    // Who has removed it is a new user.
    bed.select(json!([{"name": "keda"}]));
    let of_pin = "; version 1.0.0 is pinned by the annotation version.operator.kyma-project.io/keda";
    for (pin, addition, channel) in [(None, "", ("regular", "1.0.0")), (Some("1.0.0"), of_pin, ("fast", "1.1.0"))] {
        bed.release(&[channel], withdrawn("1.0.0", "1.1.0", &today));
        bed.pin(pin).await;
        let message = format!("module version not available: {notice}{addition}");
        assert_eq!(bed.module(), ("Error".to_owned(), message));
        assert!(bed.manifest().is_none());
    }
    bed.forget_calls();
    bed.kyma().await;
    assert_eq!((bed.kcp.writes(), bed.runtime.writes()), (vec![], vec![]));
    bed.pin("1.1.0").await;
    assert_eq!(bed.manifest().unwrap().1["spec"]["version"], "1.1.0");
}

#[tokio::test]
async fn upgrade_into_a_withdrawn_version_is_refused() {
    let mut bed = Bed::with_keda().await;
    bed.roll_out_at_once();
    bed.publish(&["1.0.0", "1.1.0", "1.2.0"]);
    bed.set_manifest_state("Ready");
    let today = day(0);
    bed.release(&[("regular", "1.1.0")], withdrawn("1.1.0", "1.2.0", &today));
    bed.kyma().await;
    let message = format!(
        "module template update not allowed: version 1.1.0 of module keda is withdrawn as of {today}, use version 1.2.0: it \
         loses data; version 1.0.0 stays installed"
    );
    assert_eq!(bed.module(), ("Warning".to_owned(), message));
    assert_eq!(bed.manifest().unwrap().1["spec"]["version"], "1.0.0");
    assert_eq!(bed.status()["modules"][0]["version"], "1.0.0");
    bed.release(&[("regular", "1.2.0")], withdrawn("1.1.0", "1.2.0", &today));
    bed.kyma().await;
    assert_eq!(bed.manifest().unwrap().1["spec"]["version"], "1.2.0");
}

#[tokio::test]
async fn unmanaged_module_of_a_withdrawn_version_stays_unmanaged() {
    let mut bed = Bed::with_keda().await;
    bed.select(json!([{"name": "keda", "managed": false}]));
    bed.kyma().await;
    bed.kcp.remove(&bed.manifest().unwrap().0);
    bed.release(&[("regular", "1.0.0")], withdrawn("1.0.0", "1.1.0", &day(0)));
    bed.kyma().await;
    assert_eq!(bed.module(), ("Unmanaged".to_owned(), String::new()));
}

/// A mandatory version that is withdrawn stays where it is. The Kyma, whose status shows no mandatory module, stays Ready.
#[tokio::test]
async fn withdrawn_mandatory_version_stays_where_it_is() {
    let mut bed = Bed::with_mandatory().await;
    bed.kyma().await;
    let (id, _) = bed.manifest_of("warden").unwrap();
    let mut meta = warden();
    meta["spec"]["versions"] = withdrawn("1.0.0", "1.1.0", &day(0));
    bed.set_metas(&[keda(), meta]);
    bed.forget_calls();
    assert_eq!(bed.kyma().await, ReconcileOutcome::ended(WorkSet::of(&[Work::Kyma])));
    assert_eq!((bed.kcp.writes(), bed.status()["state"].as_str()), (vec![], Some("Ready")));
    // It is repaired.
    bed.kcp.edit(&id, |manifest| manifest["spec"]["install"]["source"]["ref"] = json!("evil"));
    bed.kyma().await;
    assert_ne!(bed.manifest_of("warden").unwrap().1["spec"]["install"]["source"]["ref"], "evil");
    // One that was removed does not come back.
    bed.kcp.remove(&id);
    bed.kyma().await;
    assert_eq!((bed.manifest_of("warden"), bed.status()["state"].as_str()), (None, Some("Ready")));
}
