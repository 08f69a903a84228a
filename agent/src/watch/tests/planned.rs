//! Planned watches against an API server with scripted replies for each resource.

mod group;

use tidewatch_api::{identity::Instance, plan::Plan};
use tidewatch_contract::{
    digest::Digest,
    event::{Event, Payload, parse_batch},
    exchange::EventsResponse,
    heartbeat::{WatchState, failing},
};
use tidewatch_kit::variant::VariantName as _;

use super::*;
use crate::{core::Core, watch::supervisor::supervise};

/// Replies in their order, by the first matching part of the path. When they are used up, the server is silent.
#[derive(Clone)]
struct Server(Arc<Mutex<Routes>>);

type Routes = Vec<(&'static str, VecDeque<Reply>)>;

impl Transport for Server {
    fn send(&self, request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, Error>> {
        let path = request.uri().to_string();
        let mut routes = self.0.lock();
        let replies = routes.iter_mut().find(|(part, _)| path.contains(part)).map(|(_, replies)| replies);
        let reply = replies.and_then(VecDeque::pop_front).unwrap_or(Reply::Silence(Vec::new()));
        Box::pin(ready(carry_out(reply)))
    }
}

struct Fixture {
    core: Core,
    server: Server,
    plans: watch::Sender<PlanState>,
    running: JoinHandle<()>,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.running.abort();
    }
}

fn start(routes: Vec<(&'static str, Vec<Reply>)>, plan: Plan) -> Fixture {
    let routes = routes.into_iter().map(|(part, replies)| (part, replies.into())).collect();
    let server = Server(Arc::new(Mutex::new(routes)));
    let client = ApiClient::new(server.clone());
    let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
    let plans = watch::Sender::new(PlanState { plan: Some(Arc::new(plan)), error: None });
    let following = core.clone();
    let subscribed = plans.subscribe();
    let (rebuild, rebuilds) = watch::channel(0);
    let shared = shared(rebuilds);
    let running = tokio::spawn(async move {
        let _rebuild = rebuild;
        supervise(|_| client.clone(), shared, following, subscribed).await;
    });
    Fixture { core, server, plans, running }
}

fn planned(resource: &str, group: &str) -> Value {
    json!({"name": resource, "group": group, "version": "v1", "resource": resource, "field": "spec", "manager": "m",
           "work": ["kyma"]})
}

fn plan(revision: &str, watches: &[Value]) -> Plan {
    Plan::parse(&json!({"revision": revision, "watches": watches}).to_string()).unwrap()
}

/// One watch, of `things` in the group `g`, with separate replies for discovery and for everything else.
fn things(discovery: Vec<Reply>, rest: Vec<Reply>) -> Fixture {
    start(vec![("/apis/g/v1/things", rest), ("/apis/g/v1", discovery)], plan("1", &[planned("things", "g")]))
}

fn served() -> Reply {
    let names = ["things", "things/status", "others", "others/status", "third", "third/status"];
    let resources: Vec<_> = names.iter().map(|name| json!({"name": name, "kind": "Thing"})).collect();
    Reply::Json(json!({"resources": resources}))
}

/// More replies than a watch uses in the simulated time of a test.
const MANY_REPLIES: usize = 1_000;

/// Discovery without the kind.
fn missing_for_long() -> Vec<Reply> {
    (0..MANY_REPLIES).map(|_| Reply::Status(404)).collect()
}

fn object(name: &str, version: u64, generation: i64) -> Value {
    json!({"metadata": {"namespace": "ns", "name": name, "uid": format!("uid of {name}"),
                        "resourceVersion": version.to_string(), "generation": generation}})
}

fn list(version: u64, items: &[Value]) -> Reply {
    Reply::Json(json!({"metadata": {"resourceVersion": version.to_string()}, "items": items}))
}

fn event(kind: &str, object: Value) -> Value {
    json!({"type": kind, "object": object})
}

impl Fixture {
    /// Waits until a condition holds, for at most an hour of simulated time.
    async fn until(&self, condition: &str, holds: impl Fn(&Core) -> bool) {
        for _ in 0..36_000 {
            if holds(&self.core) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("{condition}: {:?} {:?}", self.core.figures(), self.errors());
    }

    /// Replaces the replies of a route that have not been used.
    fn reply_from_now_on(&self, part: &str, replies: Vec<Reply>) {
        let mut routes = self.server.0.lock();
        let (_, queue) = routes.iter_mut().find(|(route, _)| *route == part).unwrap();
        *queue = replies.into();
    }

    /// Number of unused replies of a route.
    fn unused(&self, part: &str) -> usize {
        self.server.0.lock().iter().find(|(route, _)| *route == part).map_or(0, |(_, replies)| replies.len())
    }

    fn state(&self, name: &str) -> WatchState {
        self.core.plain_heartbeat().watches.into_iter().find(|watch| watch.name == name).unwrap()
    }

    fn errors(&self) -> Vec<(String, String)> {
        let heartbeat = self.core.plain_heartbeat();
        heartbeat.watches.into_iter().filter_map(|watch| Some((watch.name, watch.error?))).collect()
    }

    /// Takes events until all expected ones have been taken.
    async fn expect_accepted(&self, expected: &[&str]) -> Vec<String> {
        let mut seen = Vec::new();
        for _ in 0..36_000 {
            seen.extend(self.take());
            if expected.iter().all(|text| seen.iter().any(|seen| seen == text)) {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("{expected:?} are not all in {seen:?}; {:?}", self.errors());
    }

    /// Takes all waiting events, as if a receiver had accepted and settled them.
    fn take(&self) -> Vec<String> {
        let now = Instant::now();
        let Some(batch) = self.core.batch(now) else { return Vec::new() };
        let events: Vec<Event> = parse_batch(&batch.body).unwrap().into_iter().map(Result::unwrap).collect();
        let accepted = events.last().unwrap().id.sequence;
        let settled = events.iter().map(|event| (event.watch.clone(), accepted)).collect();
        let instance = Instance::new(1);
        let refused = Vec::new();
        let response = EventsResponse { instance, accepted, since: 1, settled, refused, heartbeat_seconds: 30 };
        self.core.apply_response(now, batch.epoch, &response);
        let text = |event: &Event| match &event.payload {
            Payload::Object(object) => format!("{} {} {}", event.watch, object.change.as_str(), object.subject.name),
            Payload::Watch | Payload::Unnamed { .. } => format!("{} whole", event.watch),
        };
        events.iter().map(text).collect()
    }

    fn digest(&self, name: &str) -> Option<Digest> {
        let watches = self.core.plain_heartbeat().watches;
        watches.into_iter().find(|watch| watch.name == name)?.digest
    }
}

#[tokio::test(start_paused = true)]
async fn missing_kind_is_listed_and_empty_until_it_is_installed() {
    let missing = [Reply::Status(404), Reply::Json(json!({"resources": []})), Reply::Status(404), served()];
    let fixture = things(missing.into(), vec![list(10, &[object("a", 9, 1)])]);
    fixture.until("looked up", |core| core.figures().watches == 1 && core.unattempted(9).is_empty()).await;
    assert_eq!(fixture.take(), ["things whole"]);
    let state = fixture.state("things");
    assert_eq!((state.error.as_deref(), state.objects), (None, 0));
    assert!(state.listed_seconds_ago.is_some() && failing(&[state]).is_none());
    assert_eq!(fixture.digest("things"), Some(Digest::ZERO));
    fixture.expect_accepted(&["things whole", "things created a"]).await;
    assert_eq!((fixture.core.figures().objects, fixture.core.figures().failing), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn missing_kind_stays_healthy_and_is_looked_up_seldom() {
    let fixture = things(missing_for_long(), vec![]);
    fixture.until("looked up", |core| core.figures().watches == 1 && core.unattempted(9).is_empty()).await;
    assert_eq!(fixture.take(), ["things whole"]);
    for _ in 0..360 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(failing(&[fixture.state("things")]), None);
    }
    assert_eq!(fixture.take(), Vec::<String>::new(), "one event per transition");
    let lookups = MANY_REPLIES - fixture.unused("/apis/g/v1");
    assert!((15..50).contains(&lookups), "{lookups} within an hour");
}

#[tokio::test(start_paused = true)]
async fn definition_of_a_missing_kind_causes_a_list_at_once() {
    let (send, lines) = mpsc::unbounded_channel();
    let crds = "/apis/apiextensions.k8s.io/v1";
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    let resources = Reply::Json(json!({"resources": [{"name": "customresourcedefinitions", "kind": "CRD"}]}));
    let routes = vec![
        (definitions, vec![list(10, &[]), Reply::Live(lines)]),
        (crds, vec![resources]),
        ("/apis/g/v1/things", vec![list(10, &[object("a", 9, 1)])]),
        ("/apis/g/v1", missing_for_long()),
    ];
    let plan = plan("1", &[planned("things", "g"), planned("customresourcedefinitions", "apiextensions.k8s.io")]);
    let fixture = start(routes, plan);
    fixture.expect_accepted(&["things whole", "customresourcedefinitions whole"]).await;
    let definition = |name: &str, version: u64| {
        let version = version.to_string();
        event("MODIFIED", json!({"metadata": {"name": name, "uid": name, "resourceVersion": version}}))
    };
    let before = fixture.unused("/apis/g/v1");
    for version in 11..60 {
        // The definition of another kind.
        send.send(definition("others.g", version)).unwrap();
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    let lookups = before - fixture.unused("/apis/g/v1");
    assert!(lookups < 40, "{lookups} within an hour");
    fixture.reply_from_now_on("/apis/g/v1", vec![served()]);
    send.send(definition("things.g", 60)).unwrap();
    let begun = Instant::now();
    fixture.expect_accepted(&["things whole", "things created a"]).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn kind_of_kubernetes_is_looked_up_only_if_a_list_does_not_find_it() {
    let document = || Reply::Json(json!({"resources": [{"name": "deployments", "kind": "Deployment"}]}));
    let routes = vec![
        ("/apis/apps/v1/deployments", vec![list(10, &[object("a", 9, 1)]), Reply::Status(404), Reply::Status(404)]),
        ("/apis/apps/v1", vec![Reply::Status(404), document()]),
    ];
    let fixture = start(routes, plan("1", &[planned("deployments", "apps")]));
    fixture.expect_accepted(&["deployments whole"]).await;
    assert_eq!(fixture.unused("/apis/apps/v1"), 2);
    fixture.until("a lookup", |_| fixture.unused("/apis/apps/v1") == 1).await;
    assert_eq!(fixture.core.figures().objects, 1, "one answer is no proof of absence");
    fixture.reply_from_now_on("/apis/apps/v1/deployments", vec![list(20, &[object("b", 20, 1)])]);
    fixture.expect_accepted(&["deployments deleted a", "deployments created b"]).await;
}

#[tokio::test(start_paused = true)]
async fn objects_of_a_removed_kind_are_reported_as_deleted() {
    let changed = Reply::Lines(vec![event("MODIFIED", object("a", 11, 2))]);
    let rest = vec![list(10, &[object("a", 9, 1)]), changed, Reply::Status(404), list(30, &[object("b", 20, 1)])];
    let fixture = things([served()].into_iter().chain(missing_for_long()).collect(), rest);
    fixture.expect_accepted(&["things spec a"]).await;
    let mut seen = Vec::new();
    while fixture.core.figures().objects > 0 {
        assert_eq!(fixture.errors(), [], "its absence is no error");
        seen.extend(fixture.take());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    seen.extend(fixture.take());
    assert_eq!(seen, ["things whole", "things deleted a"]);
    assert_eq!(fixture.digest("things"), Some(Digest::ZERO));
    fixture.reply_from_now_on("/apis/g/v1", vec![served()]);
    fixture.expect_accepted(&["things whole", "things created b"]).await;
}

#[tokio::test(start_paused = true)]
async fn kind_without_the_verb_watch_is_an_error_without_events() {
    let list_only =
        || Reply::Json(json!({"resources": [{"name": "things", "kind": "T", "verbs": ["create", "get", "list"]}]}));
    let rest = (0..MANY_REPLIES).map(|n| if n % 2 == 0 { list(10, &[]) } else { Reply::Status(405) });
    let fixture = things((0..MANY_REPLIES).map(|_| list_only()).collect(), rest.collect());
    fixture.until("reported", |core| core.figures().failing == 1).await;
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    assert_eq!(fixture.errors(), [("things".to_owned(), "the API server cannot list and watch g/things".to_owned())]);
    assert_eq!((fixture.take(), fixture.unused("/apis/g/v1/things")), (vec![], MANY_REPLIES));
    let lookups = MANY_REPLIES - fixture.unused("/apis/g/v1");
    assert!((10..40).contains(&lookups), "{lookups} within an hour");
}

#[tokio::test(start_paused = true)]
async fn refused_method_is_no_loop_of_lists() {
    let rest = (0..MANY_REPLIES).map(|n| if n % 2 == 0 { list(10, &[]) } else { Reply::Status(405) });
    let fixture = things((0..MANY_REPLIES).map(|_| served()).collect(), rest.collect());
    let mut events = 0;
    for _ in 0..3_600 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        events += fixture.take().len();
    }
    assert!((10..40).contains(&events), "{events} within an hour");
}

#[tokio::test(start_paused = true)]
async fn deleted_kind_is_reported_and_only_a_list_removes_its_objects() {
    let rest = vec![
        list(10, &[object("a", 9, 1)]),
        Reply::Lines(vec![event("MODIFIED", object("a", 11, 2))]),
        Reply::Status(404),
        list(30, &[]),
    ];
    let deleted = [Reply::Status(404), Reply::Status(500), Reply::Refused];
    let again = served();
    let fixture = things([served()].into_iter().chain(deleted).chain([again]).collect(), rest);
    fixture.expect_accepted(&["things spec a"]).await;
    fixture.until("reported", |core| core.figures().failing == 1).await;
    assert_eq!((fixture.core.figures().objects, fixture.take()), (1, vec![]), "an error does not count as absence");
    fixture.expect_accepted(&["things deleted a"]).await;
    assert_eq!(fixture.core.figures().objects, 0);
}

#[tokio::test(start_paused = true)]
async fn forbidden_kind_does_not_affect_other_watches() {
    let (send, lines) = mpsc::unbounded_channel();
    let forbidden = (0..1_000).map(|_| Reply::Status(403)).collect();
    let routes = vec![
        ("/things", forbidden),
        ("/others", vec![list(10, &[]), Reply::Live(lines)]),
        ("/apis/g/v1", (0..1_000).map(|_| served()).collect()),
    ];
    let fixture = start(routes, plan("1", &[planned("things", "g"), planned("others", "g")]));
    fixture.expect_accepted(&["others whole"]).await;
    fixture.until("reported", |core| core.figures().failing == 1).await;
    for version in 11..20 {
        send.send(event("MODIFIED", object("a", version, version as i64))).unwrap();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(fixture.take().len(), 1);
    }
    assert_eq!(fixture.errors(), [("things".to_owned(), "the API server responded with 403 Forbidden".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn every_version_counts_without_a_meaningful_generation() {
    let with_status = || json!([{"name": "things", "kind": "T"}, {"name": "things/status", "kind": "T"}]);
    let without = || json!([{"name": "things", "kind": "T"}]);
    for (resources, generation, counts) in [(with_status(), 1, false), (without(), 1, true), (with_status(), 0, true)] {
        let changes = vec![event("MODIFIED", object("a", 11, generation)), event("ADDED", object("z", 12, 1))];
        let rest = vec![list(10, &[object("a", 9, generation)]), Reply::Silence(changes)];
        let fixture = things(vec![Reply::Json(json!({"resources": resources}))], rest);
        let seen = fixture.expect_accepted(&["things created z"]).await;
        assert_eq!(seen.contains(&"things spec a".to_owned()), counts, "{resources} {generation} {seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn objects_enter_and_leave_a_selection() {
    let (send, lines) = mpsc::unbounded_channel();
    let mut selecting = planned("things", "g");
    selecting["labelSelector"] = json!("watched=true");
    let rest = vec![list(10, &[object("a", 9, 1)]), Reply::Live(lines)];
    // Only a request with the selector matches this reply.
    let fixture =
        start(vec![("labelSelector=watched%3Dtrue", rest), ("/apis/g/v1", vec![served()])], plan("1", &[selecting]));
    fixture.expect_accepted(&["things whole"]).await;
    let before = fixture.digest("things");
    send.send(event("ADDED", object("b", 11, 5))).unwrap();
    fixture.expect_accepted(&["things created b"]).await;
    assert_ne!(fixture.digest("things"), before);
    send.send(event("DELETED", object("b", 12, 5))).unwrap();
    fixture.expect_accepted(&["things deleted b"]).await;
    assert_eq!(fixture.digest("things"), before, "equal sets have equal digests");
    send.send(event("ADDED", object("b", 13, 5))).unwrap();
    fixture.expect_accepted(&["things created b"]).await;
}

#[tokio::test(start_paused = true)]
async fn spec_watch_reports_changes_merged_by_a_relist() {
    let rest = vec![
        list(10, &[object("a", 9, 1), object("b", 8, 1), object("c", 7, 1)]),
        Reply::Status(410),
        list(50, &[object("a", 40, 1), object("b", 8, 1), object("c", 41, 3)]),
    ];
    let fixture = things(vec![served(), served()], rest);
    let seen = fixture.expect_accepted(&["things whole", "things status a", "things spec c"]).await;
    assert!(seen.iter().all(|text| !text.ends_with(" b")), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn oversized_metadata_fails_its_own_watch_only() {
    let annotated = |size: usize, version| {
        let mut large = object("large", version, 2);
        large["metadata"]["annotations"] = json!({"large": "x".repeat(size)});
        large["metadata"]["managedFields"] = json!([{"manager": "y".repeat(1 << 18)}]);
        large
    };
    let too_large = || Reply::Lines(vec![event("MODIFIED", annotated(3 << 20, 12))]);
    let mut rest = vec![list(10, &[]), Reply::Lines(vec![event("ADDED", annotated(1 << 20, 11))])];
    rest.extend((0..UNUSABLE_LIMIT).map(|_| too_large()));
    // The relist halves the page down to one object, which exceeds the limit as well.
    rest.extend((0..7).map(|_| Reply::Large));
    let (send, lines) = mpsc::unbounded_channel();
    let routes = vec![
        ("/things", rest),
        ("/others", vec![list(10, &[]), Reply::Live(lines)]),
        ("/apis/g/v1", (0..1_000).map(|_| served()).collect()),
    ];
    let fixture = start(routes, plan("1", &[planned("things", "g"), planned("others", "g")]));
    fixture.expect_accepted(&["things created large"]).await;
    let limited = "the API server's response exceeds 2097152 bytes";
    let reported = |core: &Core| {
        let watches = core.plain_heartbeat().watches;
        watches.iter().any(|watch| watch.name == "things" && watch.error.as_deref() == Some(limited))
    };
    fixture.until("reported", reported).await;
    send.send(event("ADDED", object("a", 11, 1))).unwrap();
    fixture.expect_accepted(&["others created a"]).await;
    assert_eq!(fixture.core.figures().objects, 2, "known objects are kept");
}

/// Number of failures with enough total delay for [`Fixture::until`] to observe them, even at the shortest delay.
const OFTEN: usize = 4;

#[tokio::test(start_paused = true)]
async fn oversized_names_are_refused() {
    for (member, most) in [("namespace", 253), ("name", 1_024), ("uid", 128), ("resourceVersion", 128)] {
        let with = |bytes: usize| {
            let mut object = object("a", 9, 1);
            object["metadata"][member] = json!("x".repeat(bytes));
            object
        };
        let mut lists: Vec<_> = (0..OFTEN).map(|_| list(10, &[with(most + 1)])).collect();
        lists.push(list(20, &[with(most)]));
        let fixture = things((0..=OFTEN).map(|_| served()).collect(), lists);
        fixture.until("reported", |core| core.figures().failing == 1).await;
        assert_eq!(fixture.errors(), [("things".to_owned(), "failed to parse the API server's response".to_owned())]);
        assert_eq!(fixture.core.figures().objects, 0, "{member}");
        fixture.until("recovered", |core| core.figures().objects == 1).await;
    }
    let of_kind = |bytes: usize| Reply::Json(json!({"resources": [{"name": "things", "kind": "K".repeat(bytes)}]}));
    let kinds = (0..OFTEN).map(|_| of_kind(254)).chain([of_kind(253)]).collect();
    let fixture = things(kinds, vec![list(10, &[object("a", 9, 1)])]);
    fixture.until("reported", |core| core.figures().failing == 1).await;
    assert_eq!(fixture.errors(), [("things".to_owned(), "failed to parse the API server's response".to_owned())]);
    fixture.until("recovered", |core| core.figures().objects == 1).await;
}

#[tokio::test(start_paused = true)]
async fn oversized_versions_are_refused() {
    let long = "7".repeat(129);
    let listed = || Reply::Json(json!({"metadata": {"resourceVersion": long}, "items": []}));
    let bookmark = || Reply::Lines(vec![event("BOOKMARK", json!({"metadata": {"resourceVersion": long}}))]);
    let lists = (0..OFTEN).map(|_| listed()).collect();
    let watches = [list(10, &[])].into_iter().chain((0..OFTEN).map(|_| bookmark())).collect();
    for rest in [lists, watches] {
        let fixture = things((0..OFTEN).map(|_| served()).collect(), rest);
        let unreadable = ("things".to_owned(), "failed to parse the API server's response".to_owned());
        fixture.until("reported", |_| fixture.errors().contains(&unreadable)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn watches_kept_by_a_new_plan_lose_no_changes() {
    let (send, lines) = mpsc::unbounded_channel();
    let routes = vec![
        ("/things", vec![list(10, &[object("a", 9, 1)]), Reply::Live(lines)]),
        ("/others", vec![list(10, &[]), Reply::Silence(vec![]), list(20, &[object("x", 19, 1)])]),
        ("/third", vec![list(10, &[object("y", 9, 1)])]),
        ("/apis/g/v1", (0..10).map(|_| served()).collect()),
    ];
    let stays = planned("things", "g");
    let leaves = planned("others", "g");
    let comes = planned("third", "g");
    let fixture = start(routes, plan("1", &[stays.clone(), leaves.clone()]));
    fixture.expect_accepted(&["things whole", "others whole"]).await;
    for (version, watches) in [(11, [&stays, &comes]), (12, [&stays, &leaves]), (13, [&stays, &comes])] {
        // One change before the new plan and one after it; neither is sent before both are pending.
        send.send(event("MODIFIED", object("a", version * 2, version as i64 * 2))).unwrap();
        let plan = plan(&version.to_string(), &watches.map(Value::clone));
        fixture.plans.send_replace(PlanState { plan: Some(Arc::new(plan)), error: None });
        fixture.until("followed", |core| core.plain_heartbeat().plan_revision == Some(version.to_string())).await;
        send.send(event("ADDED", object(&format!("new {version}"), version * 2 + 1, 1))).unwrap();
        fixture.until("both", |core| core.figures().objects >= version as usize - 9).await;
        let seen = fixture.expect_accepted(&["things spec a", &format!("things created new {version}")]).await;
        assert!(!seen.contains(&"things whole".to_owned()), "its loop was not restarted");
    }
    assert_eq!(fixture.core.figures().watches, 2);
}

#[tokio::test(start_paused = true)]
async fn renewals_of_the_agents_own_lease_are_not_reported() {
    let lease = |name: &str, namespace: &str, version: u64| json!({"metadata": {"namespace": namespace, "name": name, "uid": name, "resourceVersion": version.to_string()}});
    let listed = [lease("tidewatch-agent", "kyma-system", 8), lease("tidewatch-agent", "elsewhere", 9)];
    let changes = vec![
        event("MODIFIED", lease("tidewatch-agent", "kyma-system", 11)),
        event("MODIFIED", lease("tidewatch-agent", "elsewhere", 12)),
    ];
    let resources = Reply::Json(json!({"resources": [{"name": "leases", "kind": "Lease"}]}));
    let routes = vec![
        ("/coordination.k8s.io/v1/leases", vec![list(10, &listed), Reply::Silence(changes)]),
        ("/coordination.k8s.io/v1", vec![resources]),
    ];
    let fixture = start(routes, plan("1", &[planned("leases", "coordination.k8s.io")]));
    let seen = fixture.expect_accepted(&["leases whole", "leases spec tidewatch-agent"]).await;
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert_eq!(fixture.core.figures().objects, 1);
}

#[tokio::test(start_paused = true)]
async fn object_recreated_during_an_outage_is_reported() {
    let mut anew = object("a", 40, 1);
    anew["metadata"]["uid"] = json!("another");
    let rest = vec![list(10, &[object("a", 9, 1)]), Reply::Status(410), list(50, &[anew])];
    let fixture = things(vec![served(), served()], rest);
    fixture.expect_accepted(&["things created a"]).await;
    assert_eq!(fixture.core.figures().objects, 1);
}
