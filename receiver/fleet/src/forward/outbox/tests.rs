use std::time::Duration;

use super::*;
use crate::forward::Service;

const LIMITS: Limits = Limits { per_service: 80, per_watch: 4, parked: 2 };

/// An outbox and its settlements; the watermark is the number of accepted events.
struct Fixture {
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

impl Fixture {
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
            self.outbox.block(&key(runtime, watch), &leaf(), Epoch::new(1), self.accepted);
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
    let mut fixture = Fixture::new(&["a"]);
    for _ in 0..5 {
        fixture.put("r", "a", "x").unwrap();
    }
    assert_eq!(fixture.settled("r/a"), None);
    let delivery = fixture.take().unwrap();
    assert!(fixture.take().is_none());
    fixture.put("r", "a", "x").unwrap();
    assert!(fixture.take().is_none(), "one object is on its way once");
    fixture.end(&delivery, DeliveryOutcome::Delivered);
    assert_eq!(fixture.settled("r/a"), Some(1), "the watermark of the first delivery");
    assert_eq!(fixture.deliver().unwrap(), "x");
    assert_eq!(fixture.settled("r/a"), Some(6));
    assert!(fixture.take().is_none() && fixture.outbox.queues.is_empty());
    assert_eq!(fixture.outbox.objects(&target("a")), 0);
}

#[test]
fn unreachable_service_delays_no_other() {
    let mut fixture = Fixture::new(&["dead", "well"]);
    for name in ["1", "2", "3", "4"] {
        fixture.put("r", "dead", name).unwrap();
    }
    for delivery in std::iter::from_fn(|| fixture.take()).collect::<Vec<_>>() {
        fixture.end(&delivery, DeliveryOutcome::Failed(None));
    }
    // Requests that were in flight together are one failure.
    assert_eq!(fixture.outbox.health(fixture.now)["dead"], Health::Healthy);
    for bound in [1, 2] {
        let probe_at = fixture.outbox.wake(fixture.now).unwrap();
        assert!(probe_at > fixture.now && probe_at <= fixture.now + Duration::from_secs(bound), "{bound}");
        fixture.now = probe_at;
        let probe = fixture.take().unwrap();
        fixture.end(&probe, DeliveryOutcome::Failed(None));
    }
    assert_eq!(fixture.outbox.health(fixture.now)["dead"], Health::Unreachable);
    fixture.put("r", "well", "1").unwrap();
    assert_eq!(fixture.deliver().unwrap(), "1");
    assert_eq!((fixture.settled("r/well"), fixture.settled("r/dead")), (Some(5), None));

    fixture.now += Duration::from_secs(61);
    let probe = fixture.take().unwrap();
    assert!(fixture.take().is_none(), "a probe goes alone");
    assert_eq!(fixture.outbox.wake(fixture.now), None, "its completion wakes the sender");
    let ended = fixture.end(&probe, DeliveryOutcome::Delivered);
    assert!(ended.health_changed && fixture.outbox.health(fixture.now)["dead"] == Health::Healthy);
    let rest: BTreeSet<_> = std::iter::from_fn(|| fixture.deliver()).collect();
    assert_eq!(rest.len(), 3);
    assert_eq!(fixture.settled("r/dead"), Some(5));
}

#[test]
fn retry_after_is_honoured_up_to_its_bound() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.put("r", "a", "x").unwrap();
    let delivery = fixture.take().unwrap();
    fixture.end(&delivery, DeliveryOutcome::Failed(Some(Duration::from_secs(120))));
    assert_eq!(fixture.outbox.wake(fixture.now), Some(fixture.now + Duration::from_secs(120)));
    let delivery = {
        fixture.now += Duration::from_secs(120);
        fixture.take().unwrap()
    };
    fixture.end(&delivery, DeliveryOutcome::Failed(Some(Duration::from_secs(86_400))));
    assert_eq!(fixture.outbox.wake(fixture.now), Some(fixture.now + Duration::from_secs(300)), "bounded");
}

/// Refuses the next event until one is parked for the whole period; returns the number of refusals.
fn refuse_until_parked(fixture: &mut Fixture, status: u16) -> u32 {
    let start = fixture.now;
    for count in 1.. {
        let delivery = fixture.take().unwrap();
        assert!(!fixture.end(&delivery, DeliveryOutcome::Refused(status)).gave_up);
        fixture.now = fixture.outbox.wake(fixture.now).unwrap();
        if fixture.now >= start + PARK_PERIOD {
            return count;
        }
    }
    unreachable!()
}

#[test]
fn refused_event_is_parked_unsettled_and_others_continue() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.put("r", "a", "bad").unwrap();
    fixture.put("r", "a", "bad").unwrap();
    let start = fixture.now;
    assert_eq!(refuse_until_parked(&mut fixture, 404), 3);
    assert!(fixture.now <= start + PARK_PERIOD.mul_f32(1.1) + Duration::from_secs(3));
    assert_eq!(
        (fixture.outbox.parked(&target("a")), fixture.outbox.health(fixture.now)["a"]),
        (1, Health::Refusing(404))
    );

    let due = std::mem::replace(&mut fixture.now, start + Duration::from_secs(10));
    fixture.put("r", "a", "bad").unwrap();
    assert!(fixture.take().is_none(), "a new event of its object does not shorten the delay");
    fixture.put("r", "a", "good").unwrap();
    fixture.put("other", "a", "good").unwrap();
    assert_eq!([fixture.deliver().unwrap(), fixture.deliver().unwrap()], ["good", "good"]);
    assert_eq!((fixture.settled("r/a"), fixture.settled("other/a")), (None, Some(5)));
    assert!(fixture.take().is_none());

    fixture.now = due;
    for _ in 0..20 {
        assert_eq!(refuse_until_parked(&mut fixture, 401), 1, "one refusal per period");
        assert_eq!(fixture.outbox.health(fixture.now)["a"], Health::Refusing(401));
    }
    assert_eq!((fixture.deliver().unwrap().as_str(), fixture.settled("r/a")), ("bad", Some(5)));
    assert_eq!((fixture.outbox.parked(&target("a")), fixture.outbox.objects(&target("a"))), (0, 0));
    assert!(fixture.outbox.wake(fixture.now).is_none() && fixture.outbox.queues.is_empty());
    assert_eq!(fixture.outbox.health(fixture.now)["a"], Health::Refusing(401), "shown for a period");
    fixture.now += Duration::from_secs(600);
    assert_eq!(fixture.outbox.health(fixture.now)["a"], Health::Healthy, "and not after it, without a further event");
    fixture.put("r", "a", "good").unwrap();
    let delivery = fixture.take().unwrap();
    assert!(fixture.end(&delivery, DeliveryOutcome::Delivered).health_changed);
    assert_eq!(fixture.outbox.health(fixture.now)["a"], Health::Healthy);
}

#[test]
fn event_refused_as_unprocessable_for_the_park_period_is_given_up() {
    for (statuses, gives_up) in [
        ([400, 413, 422, 400].as_slice(), true),
        (&[400, 400, 400, 404], false),
        (&[404, 400, 400, 400], true),
        (&[404, 404, 404, 400], false),
    ] {
        let mut fixture = Fixture::new(&["a"]);
        fixture.put("r", "a", "bad").unwrap();
        for (at, status) in statuses.iter().enumerate() {
            let delivery = fixture.take().unwrap();
            let gave_up = fixture.end(&delivery, DeliveryOutcome::Refused(*status)).gave_up;
            assert_eq!(gave_up, gives_up && at == 3, "{statuses:?}");
            fixture.now = fixture.outbox.wake(fixture.now).unwrap_or(fixture.now);
        }
        assert_eq!(fixture.settled("r/a"), gives_up.then_some(1), "{statuses:?}");
        assert_eq!(fixture.outbox.objects(&target("a")), usize::from(!gives_up));
    }
}

#[test]
fn service_that_refuses_more_than_can_be_parked_backs_off() {
    let mut fixture = Fixture::new(&["a", "well"]);
    for (runtime, name) in [("r1", "1"), ("r1", "2"), ("r1", "3"), ("r2", "1"), ("r2", "2")] {
        fixture.put(runtime, "a", name).unwrap();
    }
    let mut requests = 0;
    while fixture.now < fixture.started + Duration::from_secs(3_600) {
        let Some(delivery) = fixture.take() else {
            fixture.now = fixture.outbox.wake(fixture.now).unwrap();
            continue;
        };
        requests += 1;
        assert!(!fixture.end(&delivery, DeliveryOutcome::Refused(403)).gave_up);
        assert!(fixture.outbox.parked(&target("a")) <= LIMITS.parked);
    }
    // At most one request per half minute, as with an unreachable service, and at least one per hold of a queue.
    assert!((12..240).contains(&requests), "{requests} in an hour");
    assert_eq!(
        (fixture.outbox.objects(&target("a")), fixture.outbox.health(fixture.now)["a"]),
        (5, Health::Refusing(403))
    );
    fixture.put("r1", "well", "1").unwrap();
    assert_eq!(fixture.deliver().unwrap(), "1", "other services are unaffected");

    let mut delivered = BTreeSet::new();
    while fixture.outbox.objects(&target("a")) > 0 {
        let Some(delivery) = fixture.take() else {
            fixture.now = fixture.outbox.wake(fixture.now).unwrap();
            continue;
        };
        fixture.end(&delivery, DeliveryOutcome::Delivered);
        delivered.insert((delivery.runtime().clone(), delivery.event.name.clone()));
    }
    assert_eq!((delivered.len(), fixture.outbox.parked(&target("a"))), (5, 0));
    assert_eq!((fixture.settled("r1/a"), fixture.settled("r2/a")), (Some(6), Some(6)));
}

#[test]
fn runtime_that_a_service_refuses_delays_no_other() {
    let mut fixture = Fixture::new(&["a"]);
    for name in ["1", "2", "3", "4"] {
        fixture.put("refused", "a", name).unwrap();
    }
    let mut refusals = 0;
    for second in 0..3_600 {
        let now = fixture.started + Duration::from_secs(second);
        // A change of the other runtime every second, each delivered at once.
        fixture.put("served", "a", &second.to_string()).unwrap();
        let mut is_delivered = false;
        loop {
            fixture.now = fixture.now.max(now);
            let Some(delivery) = fixture.take() else { break };
            if delivery.runtime().as_str() == "served" {
                fixture.end(&delivery, DeliveryOutcome::Delivered);
                is_delivered = true;
            } else {
                refusals += 1;
                fixture.end(&delivery, DeliveryOutcome::Refused(404));
                assert_ne!(fixture.outbox.health(fixture.now)["a"], Health::Unreachable);
            }
        }
        assert!(is_delivered, "in second {second}");
    }
    // Two of its four objects in five minutes at most: the parked one, and the one that ends a hold.
    assert!((10..60).contains(&refusals), "{refusals} in an hour");
    let mut delivered = BTreeSet::new();
    while let Some(next) = fixture.outbox.wake(fixture.now) {
        fixture.now = next;
        delivered.extend(fixture.deliver());
    }
    assert_eq!(
        (delivered.len(), fixture.settled("served/a"), fixture.settled("refused/a")),
        (4, Some(3_604), Some(3_604))
    );
}

#[test]
fn parked_event_is_sent_to_a_new_service_at_once() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.put("r", "a", "1").unwrap();
    refuse_until_parked(&mut fixture, 404);
    fixture.now = fixture.started + Duration::from_secs(5);
    assert!(fixture.take().is_none());
    fixture.put("r", "a", "2").unwrap();
    let late = fixture.take().unwrap();
    let elsewhere = Target::new("a", Service::new("new", "n", 1).unwrap()).unwrap();
    fixture.outbox.set_routes(Arc::new([("a".to_owned(), elsewhere.clone())].into_iter().collect()));
    assert_eq!((fixture.outbox.parked(&elsewhere), fixture.outbox.objects(&elsewhere)), (0, 2));
    let first = fixture.take().unwrap();
    assert_eq!((first.event.name.as_str(), &*first.target), ("1", &elsewhere));
    fixture.end(&first, DeliveryOutcome::Delivered);
    for _ in 0..3 {
        fixture.end(&late, DeliveryOutcome::Refused(404));
    }
    assert_eq!(fixture.deliver().unwrap(), "2", "a late refusal by the former service is ignored");
    assert_eq!((fixture.settled("r/a"), fixture.outbox.objects(&elsewhere)), (Some(2), 0));
}

#[test]
fn runtimes_are_served_round_robin_within_their_limits() {
    let mut fixture = Fixture::new(&["a"]);
    for name in ["1", "2", "3", "4"] {
        fixture.put("r1", "a", name).unwrap();
    }
    assert_eq!(fixture.put("r1", "a", "5"), Err(NoRoomError));
    fixture.put("r1", "a", "4").unwrap();
    fixture.put("r2", "a", "1").unwrap();
    let order: Vec<_> = std::iter::from_fn(|| fixture.take()).map(|delivery| delivery.runtime().to_string()).collect();
    assert_eq!(order, ["r1", "r2", "r1", "r1", "r1"]);
    for (runtime, name) in [("r2", "2"), ("r2", "3"), ("r3", "1")] {
        fixture.put(runtime, "a", name).unwrap();
    }
    for runtime in 10..82 {
        fixture.put(&format!("r{runtime}"), "a", "1").unwrap();
    }
    assert_eq!(fixture.put("r4", "a", "1"), Err(NoRoomError), "the service has a limit as well");
    assert_eq!(fixture.put("r2", "a", "4"), Err(NoRoomError));
}

#[test]
fn event_without_room_blocks_its_epoch_until_the_agent_saw_the_refusal() {
    let mut fixture = Fixture::new(&["a"]);
    for name in ["1", "2", "3", "4", "5"] {
        assert_eq!(fixture.put("r", "a", name).is_err(), name == "5");
    }
    while fixture.deliver().is_some() {}
    assert_eq!(fixture.settled("r/a"), Some(1), "the watermark before the refusal");
    assert!(fixture.outbox.answered_below(&id("r"), Epoch::new(1), 5).is_empty(), "the same request again");
    assert!(fixture.outbox.answered_below(&id("r"), Epoch::new(2), 9).is_empty(), "another epoch proves nothing");
    assert!(fixture.outbox.answered_below(&id("s"), Epoch::new(1), 9).is_empty(), "nor does another runtime");
    assert_eq!(fixture.outbox.answered_below(&id("r"), Epoch::new(1), 6), [key("r", "a")]);
    fixture.progress("r", "a");
    assert_eq!(fixture.settled("r/a"), Some(5));
    assert!(fixture.outbox.queues.is_empty());
}

#[test]
fn queues_follow_changed_routes_and_end_with_removed_ones() {
    let mut fixture = Fixture::new(&["a", "b"]);
    fixture.put("r", "a", "1").unwrap();
    fixture.put("r", "b", "1").unwrap();
    let on_its_way = fixture.take().unwrap();
    assert_eq!(on_its_way.watch(), "a");
    let elsewhere = Target::new("a", Service::new("new", "n", 1).unwrap()).unwrap();
    fixture.outbox.set_routes(Arc::new([("a".to_owned(), elsewhere.clone())].into_iter().collect()));
    fixture.put("r", "a", "2").unwrap();
    assert_eq!(fixture.outbox.objects(&elsewhere), 2);
    fixture.end(&on_its_way, DeliveryOutcome::Failed(None));
    let next = fixture.take().unwrap();
    assert_eq!((&*next.target, next.watch()), (&elsewhere, "a"));
    fixture.end(&next, DeliveryOutcome::Delivered);
    assert!(fixture.deliver().is_some());
    assert!(fixture.take().is_none(), "b has no route any more");
    assert_eq!(fixture.put("r", "b", "1"), Err(NoRoomError));
    assert_eq!(fixture.outbox.objects(&elsewhere), 0);
}

#[test]
fn forgotten_runtime_leaves_no_queue_and_its_late_response_settles_nothing() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.put("r", "a", "1").unwrap();
    fixture.put("r", "a", "2").unwrap();
    let last = fixture.take().unwrap();
    fixture.outbox.forget(&id("r"));
    assert!(fixture.take().is_none());
    assert_eq!(fixture.outbox.objects(&target("a")), 0);
    fixture.put("r", "a", "1").unwrap();
    fixture.end(&last, DeliveryOutcome::Delivered);
    assert_eq!(fixture.deliver().unwrap(), "1", "a response to an earlier generation settles nothing of this one");
    assert_eq!(fixture.settled("r/a"), Some(3));
}
