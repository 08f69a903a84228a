//! The first reconcile of a Kyma in a new installation.

use tidewatch_cluster::leader::{FleetRole, WriteFence};

use super::*;

/// A replica acquires the fleet role after its shard, and decides a moment later.
#[tokio::test]
async fn no_kyma_of_a_new_installation_is_marked_before_the_first_decision_is_stored() {
    let mut fixture = Fixture::new();
    let role = FleetRole::released();
    let metrics = catalog::Metrics::default();
    fixture.ctx.catalog = Catalog::new(catalog::Settings::default(), metrics, WriteBudgets::default(), role.clone());
    fixture.ctx.catalog.observe_releases(None);
    for _ in 0..2 {
        let outcome = fixture.reconcile(WorkSet::RUNTIME, Drift::None).await;
        assert_eq!((outcome.ended, outcome.failed), (WorkSet::EMPTY, WorkSet::RUNTIME), "it settles nothing");
        assert_eq!((fixture.kcp.writes(), fixture.runtime.calls()), (vec![], vec![]));
        role.acquire(WriteFence::default());
        fixture.watch_kymas();
        let _ = fixture.ctx.catalog.refresh(&fixture.ctx.stores);
    }
    assert!(fixture.ctx.catalog.persist_releases(&fixture.kcp.client(), "kcp-system").await);
    assert_eq!(fixture.reconcile(WorkSet::RUNTIME, Drift::None).await, ReconcileOutcome::ended(WorkSet::RUNTIME));
    fixture.watch_kymas();
    let _ = fixture.ctx.catalog.refresh(&fixture.ctx.stores);
    assert_eq!((fixture.ctx.catalog.lost(), fixture.status()["state"].as_str()), (None, Some("Ready")));
}
