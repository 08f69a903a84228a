//! Runtime clusters that are far: round trips in a row, counted by a clock that is paused.

use tidewatch_fleet::PathState;

use super::*;

/// Round trip to the runtime cluster. The pause between two looks at a new CRD is far shorter.
const ROUND_TRIP: Duration = Duration::from_secs(1);

/// Requests of a reconcile to a runtime cluster that is far.
struct Trips {
    /// Round trips in a row.
    taken: u128,
    /// Each request, with the number of round trips before it.
    calls: Vec<(u128, String)>,
}

impl Trips {
    /// Round trips before each request of this kind.
    fn before(&self, call: &str) -> Vec<u128> {
        self.calls.iter().filter(|(_, made)| made == call).map(|(before, _)| *before).collect()
    }

    /// Round trips before each write of an object.
    fn before_writes(&self, object: &str) -> Vec<u128> {
        let is_write = |call: &str| call.split_once(' ').is_some_and(|(verb, of)| verb != "GET" && of == object);
        self.calls.iter().filter(|(_, made)| is_write(made)).map(|(before, _)| *before).collect()
    }
}

impl Fixture {
    /// Reconciles while the runtime cluster is far.
    async fn trips(&mut self, works: WorkSet, drift: Drift) -> (ReconcileOutcome, Trips) {
        self.runtime.timed_calls();
        self.runtime.set_round_trip(ROUND_TRIP);
        let begun = Instant::now();
        let trips = |time: Duration| time.as_millis() / ROUND_TRIP.as_millis();
        let outcome = self.reconcile(works, drift).await;
        let taken = trips(begun.elapsed());
        self.runtime.set_round_trip(Duration::ZERO);
        let calls = self.runtime.timed_calls().into_iter();
        let calls = calls.map(|(at, call)| (trips(at.duration_since(begun)), call)).collect();
        (outcome, Trips { taken, calls })
    }
}

fn watch(name: &str, resource: &str, namespace: Option<&str>) -> Value {
    json!({"name": name, "group": "apps", "version": "v1", "resource": resource, "namespace": namespace,
           "field": "spec", "manager": "lifecycle-manager", "work": ["kyma"]})
}

#[tokio::test(start_paused = true)]
async fn namespace_and_definitions_are_read_written_and_awaited_together() {
    let mut fixture = Fixture::new();
    fixture.runtime.establish_late();
    let (_, trips) = fixture.trips(WorkSet::of(&[Work::Kyma]), Drift::None).await;
    let reads = |id: &str| trips.before(&format!("GET {id}"));
    assert_eq!((reads("namespaces/kyma-system"), trips.before_writes("namespaces/kyma-system")), (vec![0], vec![1]));
    for kind in ["kymas", "moduletemplates", "modulereleasemetas"] {
        let id = format!("customresourcedefinitions/{kind}.operator.kyma-project.io");
        assert_eq!((reads(&id), trips.before_writes(&id)), (vec![0, 2], vec![1]), "{kind}");
    }
    let plan = "configmaps/tidewatch-agent";
    assert_eq!((reads(plan), trips.before_writes(plan)), (vec![3], vec![4]));
    assert_eq!((reads("leases/tidewatch-agent"), trips.before("POST leases")), (vec![3], vec![4]));
}

#[tokio::test(start_paused = true)]
async fn agent_is_read_written_in_three_waves_and_looked_at() {
    let mut fixture = Fixture::installing(PathState::Proven);
    let (_, trips) = fixture.trips(WorkSet::INSTALLER, Drift::None).await;
    let deployment = trips.before("GET deployments/skr-webhook");
    let begun = deployment[0];
    assert_eq!(deployment, [begun, begun + 4]);
    assert_eq!(trips.before("GET serviceaccounts/tidewatch-agent"), [begun]);
    assert_eq!(trips.before("GET validatingwebhookconfigurations/skr-webhook"), [begun], "also what is obsolete");
    for (object, wave) in [
        ("serviceaccounts/tidewatch-agent", 1),
        ("clusterroles/tidewatch-agent", 1),
        ("networkpolicies/kyma-project.io--watcher-to-apiserver", 1),
        ("networkpolicies/kyma-project.io--watcher-to-dns", 2),
        ("configmaps/tidewatch-agent", 2),
        ("deployments/skr-webhook", 3),
    ] {
        assert_eq!(trips.before_writes(object), [begun + wave], "{object}");
    }
    assert_eq!(trips.before("GET pods"), [begun + 5]);
    assert_eq!(trips.before("GET secrets/skr-webhook-tls"), [begun, begun + 5]);
}

#[tokio::test(start_paused = true)]
async fn changed_plan_takes_four_round_trips() {
    let here = Some("kyma-system");
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.replan(&[watch("a", "statefulsets", None), watch("b", "replicasets", here)]);
    fixture.reconcile(WorkSet::INSTALLER, Drift::None).await;
    fixture.replan(&[watch("c", "daemonsets", None), watch("d", "controllerrevisions", here)]);
    let (outcome, trips) = fixture.trips(WorkSet::INSTALLER, Drift::None).await;
    assert_eq!((outcome, trips.taken), (ReconcileOutcome::ended(WorkSet::INSTALLER), 4), "{:?}", trips.calls);
    for role in ["clusterroles/tidewatch-agent", "roles/tidewatch-agent"] {
        assert_eq!(trips.before_writes(role), [1, 3], "{role}: {:?}", trips.calls);
    }
    assert_eq!(trips.before_writes("configmaps/tidewatch-agent"), [2]);
}
