//! Requests in a row to a runtime cluster at a distance.

use tokio::time::Instant;

use super::*;

const ROUND_TRIP: Duration = Duration::from_millis(100);

impl Fixture {
    /// A reconcile at a distance, in a runtime cluster that establishes CRDs after the write. Returns its requests in order,
    /// each with the number of round trips before it.
    async fn reconcile_at_a_distance(&mut self) -> Vec<(u128, String)> {
        self.runtime.establish_late();
        self.runtime.set_round_trip(ROUND_TRIP);
        self.runtime.calls();
        let start = Instant::now();
        self.reconcile().await;
        let rounds = |at: Instant| (at - start).as_millis() / ROUND_TRIP.as_millis();
        let calls = self.runtime.timed_calls();
        let mut calls: Vec<_> = calls.into_iter().map(|(at, call)| (rounds(at), call)).collect();
        // Those that arrive together do so in any order.
        calls.sort();
        calls
    }
}

/// Numbers of round trips before the requests that begin so.
fn rounds_of(calls: &[(u128, String)], start: &str) -> Vec<u128> {
    let mut rounds: Vec<_> =
        calls.iter().filter(|(_, call)| call.starts_with(start)).map(|(rounds, _)| *rounds).collect();
    rounds.dedup();
    rounds
}

#[tokio::test(start_paused = true)]
async fn configuration_of_a_new_module_is_applied_while_its_crd_is_awaited() {
    let mut fixture = Fixture::new();
    let calls = fixture.reconcile_at_a_distance().await;
    let expected: [(u128, &str); 7] = [
        (0, "GET deployments/d"),
        (1, "PATCH customresourcedefinitions/samples.example.test"),
        (2, "GET customresourcedefinitions/samples.example.test"),
        (2, "PATCH configmaps/a"),
        (3, "PATCH deployments/d"),
        (4, "GET samples/default"),
        (5, "PATCH samples/default"),
    ];
    assert_eq!(calls, expected.map(|(rounds, call)| (rounds, call.to_owned())));
}

#[tokio::test(start_paused = true)]
async fn crds_are_applied_together_and_read_together() {
    let other = |n: usize| {
        let mut other = definition();
        other["metadata"]["name"] = json!(format!("samples{n}.example.test"));
        other["spec"]["names"] = json!({"kind": format!("Sample{n}"), "plural": format!("samples{n}")});
        other
    };
    let mut fixture = Fixture::new();
    let mut objects = vec![manager(), object("v1", "ConfigMap", "a"), definition()];
    objects.extend((1..40).map(other));
    fixture.set_layer(ModuleObjects::Ready(Arc::new(objects)));
    let calls = fixture.reconcile_at_a_distance().await;
    let rounds_of = |start: &str| rounds_of(&calls, start);
    assert_eq!(rounds_of("PATCH customresourcedefinitions"), [1, 2], "32 at a time");
    assert_eq!(rounds_of("GET customresourcedefinitions"), [3, 4]);
    assert_eq!(rounds_of("PATCH configmaps/a"), [5], "the reads of the CRDs leave it no request");
    assert_eq!(rounds_of("PATCH deployments/d"), [6]);
}
