//! Watches on all resources of a group.

use super::*;

const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const GROUP: &str = "/apis/g.example";
const FIRST: &str = "/apis/g.example/v1";
const SECOND: &str = "/apis/g.example/v1alpha1";
const THINGS: &str = "/apis/g.example/v1/things";
const OTHERS: &str = "/apis/g.example/v1alpha1/others";
const SECRETS: &str = "/apis/g.example/v1/secrets";

fn all() -> Plan {
    let watch = json!({"name": "all", "group": "g.example", "version": "*", "resource": "*", "field": "spec",
        "manager": "m", "work": ["kyma"]});
    plan("1", &[watch])
}

fn repeated(reply: impl Fn() -> Reply) -> Vec<Reply> {
    (0..MANY_REPLIES).map(|_| reply()).collect()
}

fn group() -> Reply {
    Reply::Json(
        json!({"preferredVersion": {"version": "v1"}, "versions": [{"version": "v1alpha1"}, {"version": "v1"}]}),
    )
}

fn resources(names: &[&str]) -> Reply {
    let verbs = |name: &str| if name.contains('/') { json!(["get"]) } else { json!(["list", "watch"]) };
    let resources: Vec<_> = names
        .iter()
        .map(|name| json!({"name": name, "kind": "Thing", "namespaced": true, "verbs": verbs(name)}))
        .collect();
    Reply::Json(json!({"resources": resources}))
}

/// A list of one object, and a watch with these lines.
fn watched(lines: mpsc::UnboundedReceiver<Value>) -> Vec<Reply> {
    vec![list(10, &[object("a", 9, 1)]), Reply::Live(lines)]
}

#[tokio::test(start_paused = true)]
async fn group_is_watched_by_its_resources_in_the_versions_that_serve_them() {
    let (things, of_things) = mpsc::unbounded_channel();
    let (others, of_others) = mpsc::unbounded_channel();
    let preferred = || resources(&["things", "things/status", "secrets", "tokenreviews", "no_name", "../x"]);
    let fixture = start(
        vec![
            (THINGS, watched(of_things)),
            (OTHERS, watched(of_others)),
            (SECRETS, vec![list(10, &[])]),
            (SECOND, repeated(|| resources(&["things", "others"]))),
            (FIRST, repeated(preferred)),
            (GROUP, repeated(group)),
            (CRDS, vec![list(10, &[])]),
        ],
        all(),
    );
    fixture.until("both are listed", |core| core.figures().objects == 2).await;
    fixture.expect_accepted(&["all whole"]).await;
    things.send(event("ADDED", object("new", 11, 1))).unwrap();
    others.send(event("ADDED", object("new", 11, 1))).unwrap();
    fixture.until("both are new", |core| core.figures().objects == 4).await;
    let state = fixture.state("all");
    assert_eq!((state.error, state.listed_seconds_ago.is_some(), state.not_served), (None, true, false));
    assert_eq!(fixture.unused(SECRETS), 1);
    let mut created = fixture.expect_accepted(&["all created new"]).await;
    created.retain(|text| text == "all created new");
    assert_eq!(created.len(), 2, "one event for each resource");
}

#[tokio::test(start_paused = true)]
async fn failed_lookup_is_no_absence() {
    let (send, lines) = mpsc::unbounded_channel();
    let fixture = start(
        vec![
            (THINGS, watched(lines)),
            (SECOND, repeated(|| resources(&[]))),
            (FIRST, repeated(|| resources(&["things"]))),
            (GROUP, repeated(group)),
            (CRDS, vec![list(10, &[])]),
        ],
        all(),
    );
    fixture.until("listed", |core| core.figures().objects == 1).await;
    for (version, (route, failures)) in (11..).zip([(GROUP, 500), (SECOND, 503), (FIRST, 403)]) {
        fixture.reply_from_now_on(route, repeated(|| Reply::Status(failures)));
        fixture.until("reported", |core| core.figures().failing == 1).await;
        assert!(fixture.state("all").error.is_some_and(|error| error.contains(&failures.to_string())));
        assert_eq!(fixture.state("all").objects, 1, "the last answer holds");
        send.send(event("MODIFIED", object("a", version, version as i64))).unwrap();
        fixture.expect_accepted(&["all spec a"]).await;
        let answer =
            || if route == GROUP { group() } else { resources(if route == FIRST { &["things"] } else { &[] }) };
        fixture.reply_from_now_on(route, repeated(answer));
        fixture.until("recovered", |core| core.figures().failing == 0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn definition_of_a_group_causes_a_lookup_at_once() {
    let (send, lines) = mpsc::unbounded_channel();
    let (_things, of_things) = mpsc::unbounded_channel();
    let fixture = start(
        vec![
            (THINGS, watched(of_things)),
            (FIRST, repeated(|| resources(&["things"]))),
            (SECOND, repeated(|| Reply::Status(404))),
            (GROUP, missing_for_long()),
            (CRDS, vec![list(10, &[]), Reply::Live(lines)]),
        ],
        all(),
    );
    fixture.expect_accepted(&["all whole"]).await;
    let state = fixture.state("all");
    assert_eq!((state.not_served, state.error, state.listed_seconds_ago.is_some()), (true, None, true));
    let definition = |name: &str, version: u64| {
        event("ADDED", json!({"metadata": {"name": name, "uid": name, "resourceVersion": version.to_string()}}))
    };
    for version in 11..71 {
        send.send(definition("things.elsewhere.example", version)).unwrap();
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    assert!(failing(&[fixture.state("all")]).is_none(), "it stays healthy");
    let lookups = MANY_REPLIES - fixture.unused(GROUP);
    assert!((15..50).contains(&lookups), "{lookups} within an hour");
    fixture.reply_from_now_on(GROUP, repeated(group));
    send.send(definition("things.g.example", 71)).unwrap();
    let begun = Instant::now();
    fixture.until("listed", |core| core.figures().objects == 1).await;
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(!fixture.state("all").not_served);
}
