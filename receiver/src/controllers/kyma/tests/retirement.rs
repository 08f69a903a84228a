//! Deprecated versions: announced before their day, a warning from then on.

use jiff::{SignedDuration, Timestamp};

use super::*;
use crate::controllers::catalog::retirement;

/// A day relative to today, as a release meta names it.
fn day(offset: i64) -> String {
    retirement::day(Timestamp::now() + SignedDuration::from_hours(24 * offset)).to_string()
}

#[tokio::test]
async fn announced_deprecation_takes_effect_on_its_day_without_polling() {
    let mut bed = Bed::with_keda().await;
    bed.set_manifest_state("Ready");
    let (regular, later) = ([("regular", "1.0.0")], day(2));
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
