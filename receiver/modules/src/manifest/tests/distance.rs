//! Requests in a row to a runtime cluster at a distance.

use tokio::time::Instant;

use super::{adoption::by_hand, *};

const ROUND_TRIP: Duration = Duration::from_millis(100);

impl Fixture {
    /// A module with an object of a kind that another module defines.
    fn with_foreign_kind() -> Self {
        let fixture = Self::new();
        let spec = json!({"group": "other.test", "scope": "Namespaced", "names": {"kind": "Other", "plural": "others"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {}}]});
        fixture.runtime.edit("customresourcedefinitions/others.other.test", |other| other["spec"] = spec);
        let mut objects = objects();
        objects.push(object("other.test/v1", "Other", "x"));
        fixture.set_layer(ModuleObjects::Ready(Arc::new(objects)));
        fixture
    }

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
async fn installation_by_hand_is_looked_for_while_kinds_are_discovered() {
    let mut fixture = Fixture::with_foreign_kind();
    let calls = fixture.reconcile_at_a_distance().await;
    let rounds_of = |start: &str| rounds_of(&calls, start);
    assert_eq!((rounds_of("GET /apis/other.test/v1"), rounds_of("GET deployments/d")), (vec![0], vec![0]), "{calls:?}");
    assert_eq!(rounds_of("PATCH deployments/d"), [3]);

    let mut fixture = Fixture::with_foreign_kind();
    by_hand(&fixture, Some("2.0.0"));
    let calls = fixture.reconcile_at_a_distance().await;
    assert!(calls.iter().all(|(_, call)| call.starts_with("GET")), "{calls:?}");
    assert_eq!(fixture.state().0, State::Warning);
}

#[tokio::test(start_paused = true)]
async fn failed_look_is_repeated_and_no_absent_manager() {
    let mut fixture = Fixture::with_foreign_kind();
    by_hand(&fixture, Some("2.0.0"));
    fixture.runtime.refuse("GET deployments/d", 403);
    let calls = fixture.reconcile_at_a_distance().await;
    assert_eq!(rounds_of(&calls, "GET deployments/d"), [0, 1]);
    assert!(calls.iter().all(|(_, call)| call.starts_with("GET")), "{calls:?}");
    assert_eq!(fixture.state().0, State::Error);
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
