use std::num::NonZeroI64;

use serde_json::{Value, json};
use tidewatch_api::{identity::Instance, plan::Plan};
use tidewatch_contract::{
    event::{Event, Payload, parse_batch},
    exchange::{EventsResponse, HeartbeatResponse, Settled},
};
use tidewatch_kit::variant::VariantName as _;

use super::*;
use crate::{
    core::{ObjectState, Stats, Version},
    telemetry::Metrics,
};

const GROUP: &str = "example.com";

/// A core that follows one watch on a group, and what a receiver knows of it.
struct Fixture {
    core: Core,
    group: WatchId,
    /// Sum of the deltas of all events.
    expected: Digest,
    now: Instant,
}

fn planned(work: &str) -> Value {
    json!({"name": "all", "group": GROUP, "version": "*", "resource": "*", "field": "spec", "manager": "m", "work": [work]})
}

fn plan(revision: &str, watches: &[Value]) -> Plan {
    Plan::parse(&json!({"revision": revision, "watches": watches}).to_string()).unwrap()
}

fn names(resources: &[&str]) -> BTreeSet<String> {
    resources.iter().map(|&resource| resource.to_owned()).collect()
}

fn seen(version: u64) -> ObjectState {
    let generation = NonZeroI64::new(i64::try_from(version).unwrap());
    ObjectState { uid: "u".into(), version: Version::Number(version), generation, metadata: 0 }
}

impl Fixture {
    fn new(work: &str) -> Self {
        let core = Core::new("r-1".parse().unwrap(), 100, Metrics::default());
        // Its neighbours in the order of names.
        let neighbour = |name: &str| json!({"name": name, "version": "v1", "resource": "pods", "field": "spec", "manager": "m", "work": ["kyma"]});
        let started = core.follow(&plan("1", &[neighbour("al"), planned(work), neighbour("all-1")])).started;
        let group = started.iter().find(|started| started.planned.is_of_group()).unwrap().id;
        Self { core, group, expected: Digest::ZERO, now: Instant::now() }
    }

    /// A lookup finds these resources, and each new one is listed with one object, named by the resource.
    fn serves(&mut self, resources: &[&str]) -> Vec<WatchId> {
        let started = self.core.expand(self.group, &names(resources), self.now).started;
        started.iter().for_each(|started| self.list(started.id, &[&started.planned.resource]));
        started.into_iter().map(|started| started.id).collect()
    }

    fn list(&self, id: WatchId, objects: &[&str]) {
        self.core.described(id, "v1", "Thing", false);
        self.core.list_begun(id);
        let objects = objects.iter().map(|name| (format!("ns/{name}").into(), seen(1))).collect();
        self.core.listed(id, objects, self.now);
        self.core.list_complete(id, self.now);
    }

    /// Sends everything that waits; settles it if `settles`.
    fn deliver_and(&mut self, settles: bool) -> Vec<String> {
        let mut texts = Vec::new();
        while self.core.due(self.now).is_some_and(|due| due <= self.now) {
            let batch = self.core.batch(self.now).unwrap();
            let events: Vec<Event> = parse_batch(&batch.body).unwrap().into_iter().map(Result::unwrap).collect();
            let accepted = events.last().unwrap().id.sequence;
            let settled: Settled = settles.then(|| ("all".to_owned(), accepted)).into_iter().collect();
            let instance = Instance::new(1);
            let refused = Vec::new();
            let response = EventsResponse { instance, accepted, since: 1, settled, refused, heartbeat_seconds: 30 };
            self.core.apply_response(self.now, batch.epoch, &response);
            let wire: Value = serde_json::from_slice(&batch.body).unwrap();
            for (event, wire) in events.iter().zip(wire.as_array().unwrap()).filter(|(event, _)| event.watch == "all") {
                self.expected += event.delta;
                let subject = wire["subject"].as_str().unwrap();
                texts.push(match &event.payload {
                    Payload::Object(object) => format!("{} {subject}", object.change.as_str()),
                    Payload::Watch => format!("whole {subject}"),
                    Payload::Unnamed { .. } => format!("unnamed {subject}"),
                });
            }
        }
        texts
    }

    fn deliver(&mut self) -> Vec<String> {
        self.deliver_and(true)
    }

    /// State in the heartbeat; its digest is what the receiver expects.
    fn state(&self) -> WatchState {
        let mut watches = self.core.plain_heartbeat().watches;
        assert!(watches.iter().all(|watch| ["al", "all", "all-1"].contains(&&*watch.name)), "{watches:?}");
        let state = watches.remove(watches.iter().position(|watch| watch.name == "all").unwrap());
        assert!(state.digest.is_none_or(|digest| digest == self.expected), "{state:?} {:?}", self.expected);
        state
    }
}

#[test]
fn resources_of_a_group_are_one_watch_to_the_receiver() {
    let mut fixture = Fixture::new("kyma");
    assert_eq!(fixture.state().listed_seconds_ago, None);
    assert_eq!(fixture.serves(&["secrets", "things", "others", "tokenreviews"]).len(), 2, "secrets stay out");
    let mut lists = fixture.deliver();
    lists.sort();
    assert_eq!(lists, ["whole example.com/*/*//", "whole example.com/v1/others//", "whole example.com/v1/things//"]);
    let state = fixture.state();
    assert_eq!((state.objects, state.listed_seconds_ago, state.error.as_deref()), (2, Some(0), None));
    assert!(state.digest.is_some() && !state.not_served && !state.coarse);
    assert_eq!(fixture.core.figures(), Stats { watches: 3, objects: 2, ..fixture.core.figures() });
    assert_eq!(fixture.core.figures().unsettled, 0, "the watch of the plan settles those of all resources");
    let objects = fixture.core.objects().into_iter().map(|(name, count)| (name.to_string(), count));
    assert_eq!(objects.collect::<Vec<_>>(), [("al", 0), ("all", 2), ("all-1", 0)].map(|(n, c)| (n.to_owned(), c)));
    assert!(fixture.serves(&["others", "things"]).is_empty() && fixture.deliver().is_empty(), "nothing is new");
}

#[test]
fn objects_of_the_same_name_are_told_apart_by_their_resource() {
    let mut fixture = Fixture::new("kyma");
    let parts = fixture.serves(&["others", "things"]);
    fixture.deliver();
    for part in &parts {
        fixture.core.present(*part, "ns/same", seen(5), fixture.now);
    }
    let created = fixture.deliver();
    assert_eq!(created, ["created example.com/v1/others/ns/same", "created example.com/v1/things/ns/same"]);
    fixture.core.gone(parts[0], "ns/same", seen(6), fixture.now);
    assert_eq!(fixture.deliver(), ["deleted example.com/v1/others/ns/same"]);
    assert!(fixture.state().digest.is_some_and(|digest| digest != Digest::ZERO));
}

#[test]
fn later_resource_does_not_take_back_that_the_watch_is_listed() {
    let mut fixture = Fixture::new("forward");
    fixture.serves(&["others"]);
    assert_eq!(fixture.deliver().len(), 3, "two lists and an object");
    let started = fixture.core.expand(fixture.group, &names(&["others", "things"]), fixture.now).started;
    let state = fixture.state();
    assert_eq!((state.listed_seconds_ago, state.digest, fixture.core.unattempted(9).len()), (Some(0), None, 2));
    assert!(!fixture.core.evidence(true, false).is_listed, "because of the neighbours");
    fixture.core.set_error(started[0].id, Some("403".to_owned()));
    assert_eq!(fixture.state().error.as_deref(), Some("things: 403"));
    assert_eq!(fixture.core.figures().failing, 1);
    fixture.list(started[0].id, &["a"]);
    let delivered = fixture.deliver();
    assert_eq!(delivered, ["whole example.com/v1/things//", "status example.com/v1/things/ns/a"]);
    assert_eq!((fixture.state().error, fixture.state().objects), (None, 2));
}

#[test]
fn group_that_is_not_served_is_empty_and_no_error() {
    let mut fixture = Fixture::new("forward");
    assert!(fixture.serves(&[]).is_empty());
    let state = fixture.state();
    assert_eq!((state.not_served, state.error, state.listed_seconds_ago), (true, None, Some(0)));
    assert_eq!(fixture.deliver(), ["whole example.com/*/*//"]);
    assert_eq!(fixture.state().digest, Some(Digest::ZERO));
    fixture.serves(&["things"]);
    assert!(!fixture.state().not_served);
    assert_eq!(fixture.deliver().len(), 2);
}

#[test]
fn failed_lookup_keeps_the_resources() {
    let mut fixture = Fixture::new("forward");
    let parts = fixture.serves(&["things"]);
    fixture.deliver();
    fixture.core.set_error(fixture.group, Some("500".to_owned()));
    assert_eq!((fixture.state().error.as_deref(), fixture.state().objects), (Some("500"), 1));
    fixture.core.present(parts[0], "ns/new", seen(2), fixture.now);
    assert_eq!(fixture.deliver(), ["created example.com/v1/things/ns/new"]);
    fixture.serves(&["things"]);
    assert_eq!(fixture.state().error, None);
}

#[test]
fn resource_that_is_gone_leaves_when_its_deletions_are_settled() {
    let mut fixture = Fixture::new("forward");
    let parts = fixture.serves(&["others", "things"]);
    fixture.deliver();
    let expand = |fixture: &Fixture| fixture.core.expand(fixture.group, &names(&["others"]), fixture.now).stopped;
    // A lookup that lacks the resource is no proof: its own lookups confirm that.
    assert!(expand(&fixture).is_empty());
    assert_eq!(fixture.state().objects, 2);
    assert!(fixture.core.not_served(parts[1], true, fixture.now));
    assert!(expand(&fixture).is_empty(), "its events wait");
    let gone = fixture.deliver_and(false);
    assert_eq!(gone, ["whole example.com/v1/things//", "deleted example.com/v1/things/ns/things"]);
    assert!(expand(&fixture).is_empty(), "its events are not settled");
    let heartbeat = fixture.core.plain_heartbeat();
    let response = json!({"instance": "0000000000000001", "settled": {"all": heartbeat.sequence}, "since": 1,
        "heartbeatSeconds": 30, "serverTime": ""});
    let response: HeartbeatResponse = serde_json::from_value(response).unwrap();
    fixture.core.apply_heartbeat_response(fixture.now, heartbeat.epoch, &response);
    assert_eq!(expand(&fixture), ["all things".into()]);
    let state = fixture.state();
    assert_eq!((state.objects, state.not_served, state.digest.is_some()), (1, false, true));
    fixture.serves(&["others", "things"]);
    assert_eq!(fixture.deliver().len(), 2, "it is back");
    assert_eq!(fixture.state().objects, 2);
}

#[test]
fn resend_concerns_all_resources() {
    let mut fixture = Fixture::new("forward");
    fixture.serves(&["others", "things"]);
    fixture.deliver();
    let heartbeat = fixture.core.plain_heartbeat();
    let response = json!({"instance": "0000000000000001", "settled": {}, "since": 1, "heartbeatSeconds": 30,
        "serverTime": "", "resend": ["all"]});
    let response: HeartbeatResponse = serde_json::from_value(response).unwrap();
    fixture.core.apply_heartbeat_response(fixture.now, heartbeat.epoch, &response);
    let mut resent = fixture.deliver();
    resent.sort();
    let objects = ["status example.com/v1/others/ns/others", "status example.com/v1/things/ns/things"];
    assert_eq!(resent[..2], objects);
    assert_eq!(resent.len(), 5);
    assert_eq!(fixture.core.snapshot(fixture.now, None).resends, 1);
}

#[test]
fn group_with_too_many_resources_is_coarse() {
    let mut fixture = Fixture::new("forward");
    let many: Vec<String> = (0..MAX_RESOURCES + 20).map(|n| format!("things{n:03}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert_eq!(fixture.serves(&many).len(), MAX_RESOURCES);
    let state = fixture.state();
    assert_eq!((state.coarse, state.digest, state.objects), (true, None, MAX_RESOURCES as u64));
    let unnamed = |sent: &[String]| sent.iter().filter(|text| text.starts_with("unnamed example.com/*/*//")).count();
    assert_eq!(unnamed(&fixture.deliver()), 1, "changes of the other resources cannot be named");
    fixture.now += std::time::Duration::from_secs(240);
    assert!(fixture.serves(&many).is_empty());
    assert_eq!(unnamed(&fixture.deliver()), 1, "again with each lookup");
    // Two of the parts end, which leaves no room for all others.
    assert_eq!(fixture.core.figures().coarse, 1);
    fixture.serves(&many[..MAX_RESOURCES]);
    assert!(!fixture.state().coarse);
    fixture.now += std::time::Duration::from_secs(240);
    assert_eq!(unnamed(&fixture.deliver()), 1, "what changed while it was coarse");
    assert!(fixture.state().digest.is_some());
}

#[test]
fn changed_watch_on_the_same_group_reports_possible_deletions_of_each_resource() {
    let mut fixture = Fixture::new("forward");
    fixture.serves(&["others", "things"]);
    fixture.deliver();
    let mut selecting = planned("forward");
    selecting["labelSelector"] = json!("a=b");
    let changes = fixture.core.follow(&plan("2", &[selecting]));
    assert_eq!(changes.started.len(), 3, "{changes:?}");
    fixture.group = changes.started[0].id;
    assert!(changes.started[0].planned.is_of_group());
    for started in &changes.started[1..] {
        fixture.list(started.id, &["other"]);
    }
    fixture.serves(&["others", "things"]);
    let mut sent = fixture.deliver();
    sent.sort();
    let unnamed = ["unnamed example.com/v1/others//", "unnamed example.com/v1/things//", "whole example.com/*/*//"];
    assert_eq!(sent[2..], unnamed);
    assert!(fixture.state().digest.is_some());
}

#[test]
fn digest_still_covers_resources_of_a_group_that_a_watch_has_left() {
    for resource in ["*", "things"] {
        let mut fixture = Fixture::new("kyma");
        fixture.serves(&["others", "things"]);
        fixture.deliver();
        let mut other = planned("kyma");
        (other["group"], other["resource"]) = (json!("other.example"), json!(resource));
        let started = fixture.core.follow(&plan("2", &[other])).started.remove(0);
        if started.planned.is_of_group() {
            fixture.group = started.id;
            fixture.serves(&["things"]);
        } else {
            fixture.list(started.id, &["a"]);
        }
        fixture.deliver();
        assert!(fixture.state().digest.is_some(), "{resource}");
        fixture.core.restart_epoch();
        assert_eq!(fixture.core.plain_heartbeat().watches[0].objects, 1);
    }
}
