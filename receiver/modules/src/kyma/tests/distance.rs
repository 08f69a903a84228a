//! Runtime clusters that are far: round trips in a row, counted by a clock that is paused.

use tidewatch_fleet::PathState;

use super::*;

/// Round trip to the runtime cluster. The pause between two looks at a new CRD is far shorter.
const ROUND_TRIP: Duration = Duration::from_secs(1);

/// Requests to one API server, each with the number of round trips before it.
struct Calls(Vec<(u128, String)>);

impl Calls {
    fn since(begun: Instant, calls: Vec<(Instant, String)>) -> Self {
        let calls = calls.into_iter().filter(|(at, _)| *at >= begun);
        Self(calls.map(|(at, call)| (round_trips(at.duration_since(begun)), call)).collect())
    }

    /// Round trips before each request that is selected.
    fn before(&self, selects: impl Fn(&str) -> bool) -> Vec<u128> {
        self.0.iter().filter(|(_, call)| selects(call)).map(|(before, _)| *before).collect()
    }

    fn reads(&self, object: &str) -> Vec<u128> {
        self.before(|call| call.strip_prefix("GET ") == Some(object))
    }

    fn writes(&self, object: &str) -> Vec<u128> {
        self.before(|call| call.split_once(' ').is_some_and(|(verb, of)| verb != "GET" && of == object))
    }
}

/// Requests and times of a reconcile while the runtime cluster was far.
struct Trips {
    outcome: ReconcileOutcome,
    /// Round trips in a row.
    taken: u128,
    runtime: Calls,
    kcp: Calls,
}

fn round_trips(time: Duration) -> u128 {
    time.as_millis() / ROUND_TRIP.as_millis()
}

impl Fixture {
    /// Reconciles while the runtime cluster is far.
    async fn trips(&mut self, works: WorkSet, drift: Drift) -> Trips {
        self.forget_calls();
        self.runtime.set_round_trip(ROUND_TRIP);
        let begun = Instant::now();
        let outcome = self.reconcile(works, drift).await;
        let taken = round_trips(begun.elapsed());
        self.runtime.set_round_trip(Duration::ZERO);
        let runtime = Calls::since(begun, self.runtime.timed_calls());
        let kcp = Calls::since(begun, self.kcp.timed_calls());
        Trips { outcome, taken, runtime, kcp }
    }
}

#[tokio::test(start_paused = true)]
async fn changed_selection_is_applied_after_one_round_trip_whatever_else_is_verified() {
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.enable();
    let trips = fixture.trips(WorkSet::RUNTIME, Drift::All).await;
    assert_eq!(trips.outcome, ReconcileOutcome::ended(WorkSet::RUNTIME));
    assert_eq!(trips.kcp.before(|call| call.starts_with("PATCH manifests/")), [1]);
    assert_eq!(trips.runtime.reads("namespaces/kyma-system"), [0]);
    assert_eq!(trips.runtime.reads("deployments/skr-webhook"), [1]);
    assert_eq!(trips.runtime.reads("configmaps/tidewatch-catalog"), [1]);
    assert_eq!(trips.kcp.writes("kymas/k/status").len(), 1, "{:?}", trips.kcp.0);
    assert_eq!((trips.runtime.writes("kymas/default/status"), trips.taken), (vec![3], 4));
}

#[tokio::test(start_paused = true)]
async fn new_runtime_gets_its_default_modules_after_four_round_trips_and_everything_after_ten() {
    let mut fixture = Fixture::installing(PathState::Proven);
    fixture.runtime.establish_late();
    fixture.enable_default();
    let trips = fixture.trips(WorkSet::RUNTIME, Drift::None).await;
    assert!(trips.outcome.failed.is_empty(), "{:?}", trips.outcome);
    assert_eq!(trips.runtime.before(|call| call == "POST kymas"), [3]);
    assert_eq!(trips.kcp.before(|call| call.starts_with("PATCH manifests/")), [4]);
    assert_eq!(trips.runtime.reads("kymas/default"), [0], "the new CRD proves that there is none");
    assert_eq!(trips.kcp.writes("kymas/k/status").len(), 1, "{:?}", trips.kcp.0);
    assert_eq!((trips.runtime.writes("kymas/default/status"), trips.taken), (vec![9], 10));
    for kind in ["CRDsSync", "ModuleCatalog", "RuntimeAccess"] {
        assert_eq!(fixture.condition(kind)["status"], "True", "{kind}");
    }
    assert_eq!(fixture.status()["modules"][0]["name"], "keda");
}

#[tokio::test(start_paused = true)]
async fn namespace_and_definitions_are_read_written_and_awaited_together() {
    let mut fixture = Fixture::new();
    fixture.runtime.establish_late();
    let Trips { runtime, .. } = fixture.trips(WorkSet::of(&[Work::Kyma]), Drift::None).await;
    let namespace = "namespaces/kyma-system";
    assert_eq!((runtime.reads(namespace), runtime.writes(namespace)), (vec![0], vec![1]));
    for kind in ["kymas", "moduletemplates", "modulereleasemetas"] {
        let id = format!("customresourcedefinitions/{kind}.operator.kyma-project.io");
        assert_eq!((runtime.reads(&id), runtime.writes(&id)), (vec![0, 2], vec![1]), "{kind}");
    }
    let plan = "configmaps/tidewatch-agent";
    assert_eq!((runtime.reads(plan), runtime.writes(plan)), (vec![3], vec![4]));
    assert_eq!((runtime.reads("leases/tidewatch-agent"), runtime.writes("leases")), (vec![3], vec![4]));
}

#[tokio::test(start_paused = true)]
async fn agent_is_read_written_in_three_waves_and_looked_at() {
    let mut fixture = Fixture::installing(PathState::Proven);
    let Trips { runtime, .. } = fixture.trips(WorkSet::INSTALLER, Drift::None).await;
    let deployment = runtime.reads("deployments/skr-webhook");
    let begun = deployment[0];
    assert_eq!(deployment, [begun, begun + 4]);
    assert_eq!(runtime.reads("serviceaccounts/tidewatch-agent"), [begun]);
    assert_eq!(runtime.reads("validatingwebhookconfigurations/skr-webhook"), [begun], "also what is obsolete");
    for (object, wave) in [
        ("serviceaccounts/tidewatch-agent", 1),
        ("clusterroles/tidewatch-agent", 1),
        ("networkpolicies/kyma-project.io--watcher-to-apiserver", 1),
        ("networkpolicies/kyma-project.io--watcher-to-dns", 2),
        ("configmaps/tidewatch-agent", 2),
        ("deployments/skr-webhook", 3),
    ] {
        assert_eq!(runtime.writes(object), [begun + wave], "{object}");
    }
    assert_eq!(runtime.reads("pods"), [begun + 5]);
    assert_eq!(runtime.reads("secrets/skr-webhook-tls"), [begun, begun + 5]);
}

#[tokio::test(start_paused = true)]
async fn changed_plan_takes_four_round_trips() {
    let here = Some("kyma-system");
    let mut fixture = Fixture::installed(PathState::Proven).await;
    fixture.replan(&[watch("a", "statefulsets", None), watch("b", "replicasets", here)]);
    fixture.reconcile(WorkSet::INSTALLER, Drift::None).await;
    fixture.replan(&[watch("c", "daemonsets", None), watch("d", "controllerrevisions", here)]);
    let Trips { outcome, taken, runtime, .. } = fixture.trips(WorkSet::INSTALLER, Drift::None).await;
    assert_eq!((outcome, taken), (ReconcileOutcome::ended(WorkSet::INSTALLER), 4), "{:?}", runtime.0);
    for role in ["clusterroles/tidewatch-agent", "roles/tidewatch-agent"] {
        assert_eq!(runtime.writes(role), [1, 3], "{role}: {:?}", runtime.0);
    }
    assert_eq!(runtime.writes("configmaps/tidewatch-agent"), [2]);
}
