//! The first reconcile of a Kyma in a new installation.

use tidewatch_cluster::leader::{FleetRole, WriteFence};

use super::*;

/// A replica acquires the fleet role after its shard, and decides a moment later.
#[tokio::test]
async fn no_kyma_of_a_new_installation_is_marked_before_the_first_decision_is_stored() {
    let mut bed = Bed::new();
    let role = FleetRole::released();
    let metrics = catalog::Metrics::default();
    bed.ctx.catalog = Catalog::of_replica(catalog::Settings::default(), metrics, WriteBudgets::default(), role.clone());
    bed.ctx.catalog.observe_releases(None);
    for _ in 0..2 {
        let outcome = bed.reconcile(WorkSet::RUNTIME, Drift::None).await;
        assert_eq!((outcome.ended, outcome.failed), (WorkSet::EMPTY, WorkSet::RUNTIME), "it settles nothing");
        assert_eq!((bed.kcp.writes(), bed.runtime.calls()), (vec![], vec![]));
        role.acquire(WriteFence::default());
        bed.watch_kymas();
        let _ = bed.ctx.catalog.refresh(&bed.ctx.stores);
    }
    assert!(bed.ctx.catalog.persist_releases(&bed.kcp.client(), "kcp-system").await);
    assert_eq!(bed.reconcile(WorkSet::RUNTIME, Drift::None).await, ReconcileOutcome::ended(WorkSet::RUNTIME));
    bed.watch_kymas();
    let _ = bed.ctx.catalog.refresh(&bed.ctx.stores);
    assert_eq!((bed.ctx.catalog.lost(), bed.status()["state"].as_str()), (None, Some("Ready")));
}
