use std::time::Duration;

use super::*;
use crate::forward::Service;

const LIMITS: Limits = Limits { per_service: 80, per_watch: 4, parked: 2 };

/// An outbox and its settlements; the watermark is the number of accepted events.
struct Harness {
    outbox: Outbox<u64>,
    accepted: u64,
    settled: BTreeMap<String, u64>,
    started: Instant,
    now: Instant,
}

fn target(manager: &str) -> Target {
    Target::new(manager, Service::new("s", "n", 1).unwrap()).unwrap()
}

fn event(name: &str) -> Event {
    Event { name: name.into(), ..Event::default() }
}

fn id(runtime: &str) -> RuntimeId {
    runtime.parse().unwrap()
}

fn key(runtime: &str, watch: &str) -> QueueKey {
    (id(runtime), watch.into())
}

fn leaf() -> Arc<CertificateDer<'static>> {
    Arc::new(vec![0x30].into())
}

impl Harness {
    /// Routes watch `a` to manager `a`, and so on.
    fn new(watches: &[&str]) -> Self {
        let now = Instant::now();
        let mut outbox = Outbox::new(LIMITS, 7);
        outbox.set_routes(Arc::new(watches.iter().map(|name| ((*name).to_owned(), target(name))).collect()));
        Self { outbox, accepted: 0, settled: BTreeMap::new(), started: now, now }
    }

    fn put(&mut self, runtime: &str, watch: &str, name: &str) -> Result<(), NoRoomError> {
        self.accepted += 1;
        let put = self.outbox.put(&key(runtime, watch), &leaf(), event(name));
        if put.is_err() {
            self.outbox.block(key(runtime, watch), &leaf(), Epoch::new(1), self.accepted);
        }
        self.progress(runtime, watch);
        put
    }

    fn progress(&mut self, runtime: &str, watch: &str) {
        if let Some(progress) = self.outbox.progress(&key(runtime, watch), || self.accepted)
            && progress.except.is_empty()
        {
            self.settled.insert(format!("{runtime}/{watch}"), progress.accepted);
        }
    }

    fn take(&mut self) -> Option<Delivery> {
        self.outbox.take(self.now)
    }

    fn end(&mut self, delivery: &Delivery, outcome: DeliveryOutcome) -> DeliveryResult {
        let ended = self.outbox.complete(delivery, outcome, self.now);
        self.progress(delivery.runtime().as_str(), delivery.watch());
        ended
    }

    /// Delivers the next event and returns its name.
    fn deliver(&mut self) -> Option<String> {
        let delivery = self.take()?;
        self.end(&delivery, DeliveryOutcome::Delivered);
        Some(delivery.event.name.clone())
    }

    fn settled(&self, of: &str) -> Option<u64> {
        self.settled.get(of).copied()
    }
}

#[test]
fn changes_of_an_object_coalesce_and_a_change_in_flight_is_sent_again() {
    let mut harness = Harness::new(&["a"]);
    for _ in 0..5 {
        harness.put("r", "a", "x").unwrap();
    }
    assert_eq!(harness.settled("r/a"), None);
    let delivery = harness.take().unwrap();
    assert!(harness.take().is_none());
    harness.put("r", "a", "x").unwrap();
    assert!(harness.take().is_none(), "one object is on its way once");
    harness.end(&delivery, DeliveryOutcome::Delivered);
    assert_eq!(harness.settled("r/a"), Some(1), "the watermark of the first delivery");
    assert_eq!(harness.deliver().unwrap(), "x");
    assert_eq!(harness.settled("r/a"), Some(6));
    assert!(harness.take().is_none() && harness.outbox.queues.is_empty());
    assert_eq!(harness.outbox.objects(&target("a")), 0);
}

#[test]
fn unreachable_service_delays_no_other() {
    let mut harness = Harness::new(&["dead", "well"]);
    for name in ["1", "2", "3", "4"] {
        harness.put("r", "dead", name).unwrap();
    }
    for delivery in std::iter::from_fn(|| harness.take()).collect::<Vec<_>>() {
        harness.end(&delivery, DeliveryOutcome::Failed(None));
    }
    // Requests that were in flight together are one failure.
    assert_eq!(harness.outbox.health(harness.now)["dead"], Health::Healthy);
    for bound in [1, 2] {
        let probe_at = harness.outbox.wake(harness.now).unwrap();
        assert!(probe_at > harness.now && probe_at <= harness.now + Duration::from_secs(bound), "{bound}");
        harness.now = probe_at;
        let probe = harness.take().unwrap();
        harness.end(&probe, DeliveryOutcome::Failed(None));
    }
    assert_eq!(harness.outbox.health(harness.now)["dead"], Health::Unreachable);
    harness.put("r", "well", "1").unwrap();
    assert_eq!(harness.deliver().unwrap(), "1");
    assert_eq!((harness.settled("r/well"), harness.settled("r/dead")), (Some(5), None));

    harness.now += Duration::from_secs(61);
    let probe = harness.take().unwrap();
    assert!(harness.take().is_none(), "a probe goes alone");
    assert_eq!(harness.outbox.wake(harness.now), None, "its completion wakes the sender");
    let ended = harness.end(&probe, DeliveryOutcome::Delivered);
    assert!(ended.health_changed && harness.outbox.health(harness.now)["dead"] == Health::Healthy);
    let rest: BTreeSet<_> = std::iter::from_fn(|| harness.deliver()).collect();
    assert_eq!(rest.len(), 3);
    assert_eq!(harness.settled("r/dead"), Some(5));
}

#[test]
fn retry_after_is_honoured_up_to_its_bound() {
    let mut harness = Harness::new(&["a"]);
    harness.put("r", "a", "x").unwrap();
    let delivery = harness.take().unwrap();
    harness.end(&delivery, DeliveryOutcome::Failed(Some(Duration::from_secs(120))));
    assert_eq!(harness.outbox.wake(harness.now), Some(harness.now + Duration::from_secs(120)));
    let delivery = {
        harness.now += Duration::from_secs(120);
        harness.take().unwrap()
    };
    harness.end(&delivery, DeliveryOutcome::Failed(Some(Duration::from_secs(86_400))));
    assert_eq!(harness.outbox.wake(harness.now), Some(harness.now + Duration::from_secs(300)), "bounded");
}

/// Refuses the next event until one is parked for the whole period; returns the number of refusals.
fn refuse_until_parked(harness: &mut Harness, status: u16) -> u32 {
    let start = harness.now;
    for count in 1.. {
        let delivery = harness.take().unwrap();
        assert!(!harness.end(&delivery, DeliveryOutcome::Refused(status)).gave_up);
        harness.now = harness.outbox.wake(harness.now).unwrap();
        if harness.now >= start + PARK_PERIOD {
            return count;
        }
    }
    unreachable!()
}

#[test]
fn refused_event_is_parked_unsettled_and_others_continue() {
    let mut harness = Harness::new(&["a"]);
    harness.put("r", "a", "bad").unwrap();
    harness.put("r", "a", "bad").unwrap();
    let start = harness.now;
    assert_eq!(refuse_until_parked(&mut harness, 404), 3);
    assert!(harness.now <= start + PARK_PERIOD.mul_f32(1.1) + Duration::from_secs(3));
    assert_eq!(
        (harness.outbox.parked(&target("a")), harness.outbox.health(harness.now)["a"]),
        (1, Health::Refusing(404))
    );

    let due = std::mem::replace(&mut harness.now, start + Duration::from_secs(10));
    harness.put("r", "a", "bad").unwrap();
    assert!(harness.take().is_none(), "a new event of its object does not shorten the delay");
    harness.put("r", "a", "good").unwrap();
    harness.put("other", "a", "good").unwrap();
    assert_eq!([harness.deliver().unwrap(), harness.deliver().unwrap()], ["good", "good"]);
    assert_eq!((harness.settled("r/a"), harness.settled("other/a")), (None, Some(5)));
    assert!(harness.take().is_none());

    harness.now = due;
    for _ in 0..20 {
        assert_eq!(refuse_until_parked(&mut harness, 401), 1, "one refusal per period");
        assert_eq!(harness.outbox.health(harness.now)["a"], Health::Refusing(401));
    }
    assert_eq!((harness.deliver().unwrap().as_str(), harness.settled("r/a")), ("bad", Some(5)));
    assert_eq!((harness.outbox.parked(&target("a")), harness.outbox.objects(&target("a"))), (0, 0));
    assert!(harness.outbox.wake(harness.now).is_none() && harness.outbox.queues.is_empty());
    assert_eq!(harness.outbox.health(harness.now)["a"], Health::Refusing(401), "shown for a period");
    harness.now += Duration::from_secs(600);
    assert_eq!(harness.outbox.health(harness.now)["a"], Health::Healthy, "and not after it, without a further event");
    harness.put("r", "a", "good").unwrap();
    let delivery = harness.take().unwrap();
    assert!(harness.end(&delivery, DeliveryOutcome::Delivered).health_changed);
    assert_eq!(harness.outbox.health(harness.now)["a"], Health::Healthy);
}

#[test]
fn event_refused_as_unprocessable_for_the_park_period_is_given_up() {
    for (statuses, gives_up) in [
        ([400, 413, 422, 400].as_slice(), true),
        (&[400, 400, 400, 404], false),
        (&[404, 400, 400, 400], true),
        (&[404, 404, 404, 400], false),
    ] {
        let mut harness = Harness::new(&["a"]);
        harness.put("r", "a", "bad").unwrap();
        for (at, status) in statuses.iter().enumerate() {
            let delivery = harness.take().unwrap();
            let gave_up = harness.end(&delivery, DeliveryOutcome::Refused(*status)).gave_up;
            assert_eq!(gave_up, gives_up && at == 3, "{statuses:?}");
            harness.now = harness.outbox.wake(harness.now).unwrap_or(harness.now);
        }
        assert_eq!(harness.settled("r/a"), gives_up.then_some(1), "{statuses:?}");
        assert_eq!(harness.outbox.objects(&target("a")), usize::from(!gives_up));
    }
}

#[test]
fn service_that_refuses_more_than_can_be_parked_backs_off() {
    let mut harness = Harness::new(&["a", "well"]);
    for (runtime, name) in [("r1", "1"), ("r1", "2"), ("r1", "3"), ("r2", "1"), ("r2", "2")] {
        harness.put(runtime, "a", name).unwrap();
    }
    let mut requests = 0;
    while harness.now < harness.started + Duration::from_secs(3_600) {
        let Some(delivery) = harness.take() else {
            harness.now = harness.outbox.wake(harness.now).unwrap();
            continue;
        };
        requests += 1;
        assert!(!harness.end(&delivery, DeliveryOutcome::Refused(403)).gave_up);
        assert!(harness.outbox.parked(&target("a")) <= LIMITS.parked);
    }
    // At most one request per half minute, as with an unreachable service, and at least one per hold of a queue.
    assert!((12..240).contains(&requests), "{requests} in an hour");
    assert_eq!(
        (harness.outbox.objects(&target("a")), harness.outbox.health(harness.now)["a"]),
        (5, Health::Refusing(403))
    );
    harness.put("r1", "well", "1").unwrap();
    assert_eq!(harness.deliver().unwrap(), "1", "other services are unaffected");

    let mut delivered = BTreeSet::new();
    while harness.outbox.objects(&target("a")) > 0 {
        let Some(delivery) = harness.take() else {
            harness.now = harness.outbox.wake(harness.now).unwrap();
            continue;
        };
        harness.end(&delivery, DeliveryOutcome::Delivered);
        delivered.insert((delivery.runtime().clone(), delivery.event.name.clone()));
    }
    assert_eq!((delivered.len(), harness.outbox.parked(&target("a"))), (5, 0));
    assert_eq!((harness.settled("r1/a"), harness.settled("r2/a")), (Some(6), Some(6)));
}

#[test]
fn runtime_that_a_service_refuses_delays_no_other() {
    let mut harness = Harness::new(&["a"]);
    for name in ["1", "2", "3", "4"] {
        harness.put("refused", "a", name).unwrap();
    }
    let mut refusals = 0;
    for second in 0..3_600 {
        let now = harness.started + Duration::from_secs(second);
        // A change of the other runtime every second, each delivered at once.
        harness.put("served", "a", &second.to_string()).unwrap();
        let mut is_delivered = false;
        loop {
            harness.now = harness.now.max(now);
            let Some(delivery) = harness.take() else { break };
            if delivery.runtime().as_str() == "served" {
                harness.end(&delivery, DeliveryOutcome::Delivered);
                is_delivered = true;
            } else {
                refusals += 1;
                harness.end(&delivery, DeliveryOutcome::Refused(404));
                assert_ne!(harness.outbox.health(harness.now)["a"], Health::Unreachable);
            }
        }
        assert!(is_delivered, "in second {second}");
    }
    // Two of its four objects in five minutes at most: the parked one, and the one that ends a hold.
    assert!((10..60).contains(&refusals), "{refusals} in an hour");
    let mut delivered = BTreeSet::new();
    while let Some(next) = harness.outbox.wake(harness.now) {
        harness.now = next;
        delivered.extend(harness.deliver());
    }
    assert_eq!(
        (delivered.len(), harness.settled("served/a"), harness.settled("refused/a")),
        (4, Some(3_604), Some(3_604))
    );
}

#[test]
fn parked_event_is_sent_to_a_new_service_at_once() {
    let mut harness = Harness::new(&["a"]);
    harness.put("r", "a", "1").unwrap();
    refuse_until_parked(&mut harness, 404);
    harness.now = harness.started + Duration::from_secs(5);
    assert!(harness.take().is_none());
    harness.put("r", "a", "2").unwrap();
    let late = harness.take().unwrap();
    let elsewhere = Target::new("a", Service::new("new", "n", 1).unwrap()).unwrap();
    harness.outbox.set_routes(Arc::new([("a".to_owned(), elsewhere.clone())].into_iter().collect()));
    assert_eq!((harness.outbox.parked(&elsewhere), harness.outbox.objects(&elsewhere)), (0, 2));
    let first = harness.take().unwrap();
    assert_eq!((first.event.name.as_str(), &*first.target), ("1", &elsewhere));
    harness.end(&first, DeliveryOutcome::Delivered);
    for _ in 0..3 {
        harness.end(&late, DeliveryOutcome::Refused(404));
    }
    assert_eq!(harness.deliver().unwrap(), "2", "a late refusal by the former service is ignored");
    assert_eq!((harness.settled("r/a"), harness.outbox.objects(&elsewhere)), (Some(2), 0));
}

#[test]
fn runtimes_are_served_round_robin_within_their_limits() {
    let mut harness = Harness::new(&["a"]);
    for name in ["1", "2", "3", "4"] {
        harness.put("r1", "a", name).unwrap();
    }
    assert_eq!(harness.put("r1", "a", "5"), Err(NoRoomError));
    harness.put("r1", "a", "4").unwrap();
    harness.put("r2", "a", "1").unwrap();
    let order: Vec<_> = std::iter::from_fn(|| harness.take()).map(|delivery| delivery.runtime().to_string()).collect();
    assert_eq!(order, ["r1", "r2", "r1", "r1", "r1"]);
    for (runtime, name) in [("r2", "2"), ("r2", "3"), ("r3", "1")] {
        harness.put(runtime, "a", name).unwrap();
    }
    for runtime in 10..82 {
        harness.put(&format!("r{runtime}"), "a", "1").unwrap();
    }
    assert_eq!(harness.put("r4", "a", "1"), Err(NoRoomError), "the service has a limit as well");
    assert_eq!(harness.put("r2", "a", "4"), Err(NoRoomError));
}

#[test]
fn event_without_room_blocks_its_epoch_until_the_agent_saw_the_refusal() {
    let mut harness = Harness::new(&["a"]);
    for name in ["1", "2", "3", "4", "5"] {
        assert_eq!(harness.put("r", "a", name).is_err(), name == "5");
    }
    while harness.deliver().is_some() {}
    assert_eq!(harness.settled("r/a"), Some(1), "the watermark before the refusal");
    assert!(harness.outbox.answered_below(&id("r"), Epoch::new(1), 5).is_empty(), "the same request again");
    assert!(harness.outbox.answered_below(&id("r"), Epoch::new(2), 9).is_empty(), "another epoch proves nothing");
    assert!(harness.outbox.answered_below(&id("s"), Epoch::new(1), 9).is_empty(), "nor does another runtime");
    assert_eq!(harness.outbox.answered_below(&id("r"), Epoch::new(1), 6), [key("r", "a")]);
    harness.progress("r", "a");
    assert_eq!(harness.settled("r/a"), Some(5));
    assert!(harness.outbox.queues.is_empty() && harness.outbox.blocked.is_empty());
}

#[test]
fn queues_follow_changed_routes_and_end_with_removed_ones() {
    let mut harness = Harness::new(&["a", "b"]);
    harness.put("r", "a", "1").unwrap();
    harness.put("r", "b", "1").unwrap();
    let on_its_way = harness.take().unwrap();
    assert_eq!(on_its_way.watch(), "a");
    let elsewhere = Target::new("a", Service::new("new", "n", 1).unwrap()).unwrap();
    harness.outbox.set_routes(Arc::new([("a".to_owned(), elsewhere.clone())].into_iter().collect()));
    harness.put("r", "a", "2").unwrap();
    assert_eq!(harness.outbox.objects(&elsewhere), 2);
    harness.end(&on_its_way, DeliveryOutcome::Failed(None));
    let next = harness.take().unwrap();
    assert_eq!((&*next.target, next.watch()), (&elsewhere, "a"));
    harness.end(&next, DeliveryOutcome::Delivered);
    assert!(harness.deliver().is_some());
    assert!(harness.take().is_none(), "b has no route any more");
    assert_eq!(harness.put("r", "b", "1"), Err(NoRoomError));
    assert_eq!(harness.outbox.objects(&elsewhere), 0);
}

#[test]
fn forgotten_runtime_leaves_no_queue_and_its_late_response_settles_nothing() {
    let mut harness = Harness::new(&["a"]);
    harness.put("r", "a", "1").unwrap();
    harness.put("r", "a", "2").unwrap();
    let last = harness.take().unwrap();
    harness.outbox.forget(&id("r"));
    assert!(harness.take().is_none());
    assert_eq!(harness.outbox.objects(&target("a")), 0);
    harness.put("r", "a", "1").unwrap();
    harness.end(&last, DeliveryOutcome::Delivered);
    assert_eq!(harness.deliver().unwrap(), "1", "a response to an earlier generation settles nothing of this one");
    assert_eq!(harness.settled("r/a"), Some(3));
}
