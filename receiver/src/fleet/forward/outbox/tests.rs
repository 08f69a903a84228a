use std::time::Duration;

use super::*;
use crate::fleet::forward::Service;

const LIMITS: Limits = Limits { per_service: 8, per_watch: 4, parked: 2 };

/// What the hub settles by, as far as these tests go: how many events it has accepted.
struct Room {
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

fn leaf() -> Arc<CertificateDer<'static>> {
    Arc::new(vec![0x30].into())
}

impl Room {
    /// The watch `a` is manager `a`'s, and so on.
    fn new(watches: &[&str]) -> Self {
        let now = Instant::now();
        let mut outbox = Outbox::new(LIMITS, 7);
        outbox.set_routes(Arc::new(watches.iter().map(|name| ((*name).to_owned(), target(name))).collect()));
        Self { outbox, accepted: 0, settled: BTreeMap::new(), started: now, now }
    }

    fn put(&mut self, runtime: &str, watch: &str, name: &str) -> Result<(), Full> {
        self.accepted += 1;
        let put = self.outbox.put(&id(runtime), watch, &leaf(), event(name));
        if put.is_err() {
            self.outbox.freeze(&id(runtime), watch, &leaf(), Epoch::new(1), self.accepted);
        }
        self.progress(runtime, watch);
        put
    }

    fn progress(&mut self, runtime: &str, watch: &str) {
        if let Some(progress) = self.outbox.progress(&id(runtime), watch, || self.accepted)
            && progress.except.is_empty()
        {
            self.settled.insert(format!("{runtime}/{watch}"), progress.accepted);
        }
    }

    fn take(&mut self) -> Option<Delivery> {
        self.outbox.take(self.now)
    }

    fn end(&mut self, delivery: &Delivery, outcome: Outcome) -> Ended {
        let ended = self.outbox.ended(delivery, outcome, self.now);
        self.progress(delivery.runtime().as_str(), delivery.watch());
        ended
    }

    /// Takes one and delivers it; its name.
    fn deliver(&mut self) -> Option<String> {
        let delivery = self.take()?;
        self.end(&delivery, Outcome::Delivered);
        Some(delivery.event.name.clone())
    }

    fn settled(&self, of: &str) -> Option<u64> {
        self.settled.get(of).copied()
    }
}

#[test]
fn an_object_is_sent_once_however_often_it_changes_and_again_if_it_changed_on_the_way() {
    let mut room = Room::new(&["a"]);
    for _ in 0..5 {
        room.put("r", "a", "x").unwrap();
    }
    assert_eq!(room.settled("r/a"), None);
    let delivery = room.take().unwrap();
    assert!(room.take().is_none());
    room.put("r", "a", "x").unwrap();
    assert!(room.take().is_none(), "one object is on its way once");
    room.end(&delivery, Outcome::Delivered);
    assert_eq!(room.settled("r/a"), Some(1), "what was accepted when the first of them was all there was");
    assert_eq!(room.deliver().unwrap(), "x");
    assert_eq!(room.settled("r/a"), Some(6));
    assert!(room.take().is_none() && room.outbox.boxes.is_empty());
    assert_eq!(room.outbox.objects(&target("a")), 0);
}

#[test]
fn a_dead_manager_delays_nobody_else() {
    let mut room = Room::new(&["dead", "well"]);
    for name in ["1", "2", "3", "4"] {
        room.put("r", "dead", name).unwrap();
    }
    for delivery in std::iter::from_fn(|| room.take()).collect::<Vec<_>>() {
        room.end(&delivery, Outcome::Failed(None));
    }
    assert_eq!(room.outbox.health()["dead"].1, Health::Unreachable);
    assert!(room.outbox.wake(room.now).is_some_and(|at| at > room.now && at <= room.now + Duration::from_secs(60)));
    room.put("r", "well", "1").unwrap();
    assert_eq!(room.deliver().unwrap(), "1");
    assert_eq!((room.settled("r/well"), room.settled("r/dead")), (Some(5), None));

    room.now += Duration::from_secs(61);
    let probe = room.take().unwrap();
    assert!(room.take().is_none(), "a probe goes alone");
    assert_eq!(room.outbox.wake(room.now), None, "its end wakes");
    let ended = room.end(&probe, Outcome::Delivered);
    assert!(ended.moved && room.outbox.health()["dead"].1 == Health::Fine);
    let rest: BTreeSet<_> = std::iter::from_fn(|| room.deliver()).collect();
    assert_eq!(rest.len(), 3);
    assert_eq!(room.settled("r/dead"), Some(5));
}

#[test]
fn a_service_may_say_how_long_to_wait() {
    let mut room = Room::new(&["a"]);
    room.put("r", "a", "x").unwrap();
    let delivery = room.take().unwrap();
    room.end(&delivery, Outcome::Failed(Some(Duration::from_secs(120))));
    assert_eq!(room.outbox.wake(room.now), Some(room.now + Duration::from_secs(120)));
    let delivery = {
        room.now += Duration::from_secs(120);
        room.take().unwrap()
    };
    room.end(&delivery, Outcome::Failed(Some(Duration::from_secs(86_400))));
    assert_eq!(room.outbox.wake(room.now), Some(room.now + Duration::from_secs(300)), "and not for longer");
}

/// Refuses the next event until one is held for long; how often that was.
fn refuse_until_parked(room: &mut Room, status: u16) -> u32 {
    let begun = room.now;
    for count in 1.. {
        let delivery = room.take().unwrap();
        assert!(!room.end(&delivery, Outcome::Refused(status)).gave_up);
        room.now = room.outbox.wake(room.now).unwrap();
        if room.now >= begun + PARKED {
            return count;
        }
    }
    unreachable!()
}

#[test]
fn what_a_manager_refuses_waits_unsettled_and_the_others_go_on() {
    let mut room = Room::new(&["a"]);
    room.put("r", "a", "bad").unwrap();
    room.put("r", "a", "bad").unwrap();
    let begun = room.now;
    assert_eq!(refuse_until_parked(&mut room, 404), 3);
    assert!(room.now <= begun + PARKED.mul_f32(1.1) + Duration::from_secs(3));
    assert_eq!((room.outbox.parked(&target("a")), room.outbox.health()["a"].1), (1, Health::Refusing(404)));

    let due = std::mem::replace(&mut room.now, begun + Duration::from_secs(10));
    room.put("r", "a", "bad").unwrap();
    assert!(room.take().is_none(), "no event of its object hurries it");
    room.put("r", "a", "good").unwrap();
    room.put("other", "a", "good").unwrap();
    assert_eq!([room.deliver().unwrap(), room.deliver().unwrap()], ["good", "good"]);
    assert_eq!((room.settled("r/a"), room.settled("other/a")), (None, Some(5)));
    assert!(room.take().is_none());

    room.now = due;
    for _ in 0..20 {
        assert_eq!(refuse_until_parked(&mut room, 401), 1, "once each time");
        assert_eq!(room.outbox.health()["a"].1, Health::Refusing(401));
    }
    assert_eq!((room.deliver().unwrap().as_str(), room.settled("r/a")), ("bad", Some(5)));
    assert_eq!((room.outbox.parked(&target("a")), room.outbox.objects(&target("a"))), (0, 0));
    assert!(room.outbox.wake(room.now).is_none() && room.outbox.boxes.is_empty());
    room.now += Duration::from_secs(600);
    room.put("r", "a", "good").unwrap();
    let delivery = room.take().unwrap();
    assert!(room.end(&delivery, Outcome::Delivered).moved);
    assert_eq!(room.outbox.health()["a"].1, Health::Fine);
}

#[test]
fn what_is_refused_for_what_it_is_is_given_up_after_minutes() {
    for (statuses, gives_up) in [
        ([400, 413, 422, 400].as_slice(), true),
        (&[400, 400, 400, 404], false),
        (&[404, 400, 400, 400], true),
        (&[404, 404, 404, 400], false),
    ] {
        let mut room = Room::new(&["a"]);
        room.put("r", "a", "bad").unwrap();
        for (at, status) in statuses.iter().enumerate() {
            let delivery = room.take().unwrap();
            let gave_up = room.end(&delivery, Outcome::Refused(*status)).gave_up;
            assert_eq!(gave_up, gives_up && at == 3, "{statuses:?}");
            room.now = room.outbox.wake(room.now).unwrap_or(room.now);
        }
        assert_eq!(room.settled("r/a"), gives_up.then_some(1), "{statuses:?}");
        assert_eq!(room.outbox.objects(&target("a")), usize::from(!gives_up));
    }
}

#[test]
fn who_refuses_more_than_can_be_parked_is_asked_as_one_that_fails() {
    let mut room = Room::new(&["a", "well"]);
    for (runtime, name) in [("r1", "1"), ("r1", "2"), ("r1", "3"), ("r2", "1"), ("r2", "2")] {
        room.put(runtime, "a", name).unwrap();
    }
    let mut asked = 0;
    while room.now < room.started + Duration::from_secs(3_600) {
        let Some(delivery) = room.take() else {
            room.now = room.outbox.wake(room.now).unwrap();
            continue;
        };
        asked += 1;
        assert!(!room.end(&delivery, Outcome::Refused(403)).gave_up);
        assert!(room.outbox.parked(&target("a")) <= LIMITS.parked);
    }
    // One in half a minute, as of one that cannot be reached.
    assert!((60..240).contains(&asked), "{asked} in an hour");
    assert_eq!((room.outbox.objects(&target("a")), room.outbox.health()["a"].1), (5, Health::Refusing(403)));
    room.put("r1", "well", "1").unwrap();
    assert_eq!(room.deliver().unwrap(), "1", "the others are not his");

    let mut delivered = BTreeSet::new();
    while room.outbox.objects(&target("a")) > 0 {
        let Some(delivery) = room.take() else {
            room.now = room.outbox.wake(room.now).unwrap();
            continue;
        };
        room.end(&delivery, Outcome::Delivered);
        delivered.insert((delivery.runtime().clone(), delivery.event.name.clone()));
    }
    assert_eq!((delivered.len(), room.outbox.parked(&target("a"))), (5, 0));
    assert_eq!((room.settled("r1/a"), room.settled("r2/a")), (Some(6), Some(6)));
}

#[test]
fn another_service_is_asked_at_once_for_what_the_last_one_refused() {
    let mut room = Room::new(&["a"]);
    room.put("r", "a", "1").unwrap();
    refuse_until_parked(&mut room, 404);
    room.now = room.started + Duration::from_secs(5);
    assert!(room.take().is_none());
    room.put("r", "a", "2").unwrap();
    let late = room.take().unwrap();
    let elsewhere = Target::new("a", Service::new("new", "n", 1).unwrap()).unwrap();
    room.outbox.set_routes(Arc::new([("a".to_owned(), elsewhere.clone())].into_iter().collect()));
    assert_eq!((room.outbox.parked(&elsewhere), room.outbox.objects(&elsewhere)), (0, 2));
    let first = room.take().unwrap();
    assert_eq!((first.event.name.as_str(), &*first.target), ("1", &elsewhere));
    room.end(&first, Outcome::Delivered);
    for _ in 0..3 {
        room.end(&late, Outcome::Refused(404));
    }
    assert_eq!(room.deliver().unwrap(), "2", "a late word of the other one counts for nothing");
    assert_eq!((room.settled("r/a"), room.outbox.objects(&elsewhere)), (Some(2), 0));
}

#[test]
fn runtimes_are_served_in_turn_and_each_has_its_bound() {
    let mut room = Room::new(&["a"]);
    for name in ["1", "2", "3", "4"] {
        room.put("r1", "a", name).unwrap();
    }
    assert_eq!(room.put("r1", "a", "5"), Err(Full));
    room.put("r1", "a", "4").unwrap();
    room.put("r2", "a", "1").unwrap();
    let order: Vec<_> = std::iter::from_fn(|| room.take()).map(|delivery| delivery.runtime().to_string()).collect();
    assert_eq!(order, ["r1", "r2", "r1", "r1", "r1"]);
    for (runtime, name) in [("r2", "2"), ("r2", "3"), ("r3", "1")] {
        room.put(runtime, "a", name).unwrap();
    }
    assert_eq!(room.put("r4", "a", "1"), Err(Full), "all together have one, too");
}

#[test]
fn what_found_no_room_keeps_its_epoch_unsettled_until_the_agent_has_seen_so() {
    let mut room = Room::new(&["a"]);
    for name in ["1", "2", "3", "4", "5"] {
        assert_eq!(room.put("r", "a", name).is_err(), name == "5");
    }
    while room.deliver().is_some() {}
    assert_eq!(room.settled("r/a"), Some(1), "what was accepted before");
    assert!(room.outbox.heard(&id("r"), Epoch::new(1), 5).is_empty(), "the same request again");
    assert!(room.outbox.heard(&id("r"), Epoch::new(2), 9).is_empty(), "another epoch proves nothing");
    assert!(room.outbox.heard(&id("s"), Epoch::new(1), 9).is_empty(), "nor does another runtime");
    assert_eq!(room.outbox.heard(&id("r"), Epoch::new(1), 6), [Arc::from("a")]);
    room.progress("r", "a");
    assert_eq!(room.settled("r/a"), Some(5));
    assert!(room.outbox.boxes.is_empty() && room.outbox.frozen.is_empty());
}

#[test]
fn routes_that_change_take_along_what_waits_and_those_that_go_take_it_away() {
    let mut room = Room::new(&["a", "b"]);
    room.put("r", "a", "1").unwrap();
    room.put("r", "b", "1").unwrap();
    let on_its_way = room.take().unwrap();
    assert_eq!(on_its_way.watch(), "a");
    let elsewhere = Target::new("a", Service::new("new", "n", 1).unwrap()).unwrap();
    room.outbox.set_routes(Arc::new([("a".to_owned(), elsewhere.clone())].into_iter().collect()));
    room.put("r", "a", "2").unwrap();
    assert_eq!(room.outbox.objects(&elsewhere), 2);
    room.end(&on_its_way, Outcome::Failed(None));
    let next = room.take().unwrap();
    assert_eq!((&*next.target, next.watch()), (&elsewhere, "a"));
    room.end(&next, Outcome::Delivered);
    assert!(room.deliver().is_some());
    assert!(room.take().is_none(), "nobody is told of b any more");
    assert_eq!(room.put("r", "b", "1"), Err(Full));
    assert_eq!(room.outbox.objects(&elsewhere), 0);
}

#[test]
fn a_runtime_that_is_forgotten_leaves_nothing_and_its_last_answer_does_no_harm() {
    let mut room = Room::new(&["a"]);
    room.put("r", "a", "1").unwrap();
    room.put("r", "a", "2").unwrap();
    let last = room.take().unwrap();
    room.outbox.forget(&id("r"));
    assert!(room.take().is_none());
    assert_eq!(room.outbox.objects(&target("a")), 0);
    room.put("r", "a", "1").unwrap();
    room.end(&last, Outcome::Delivered);
    assert_eq!(room.deliver().unwrap(), "1", "an answer to an earlier life settles nothing of this one");
    assert_eq!(room.settled("r/a"), Some(3));
}
