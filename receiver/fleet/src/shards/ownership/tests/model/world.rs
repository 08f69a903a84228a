//! One schedule: messages and faults in the order of time, and the invariants.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
};

use tidewatch_api::{leases::Unit, shard::ShardCount};
use tidewatch_kit::random::Random;
use tokio::time::Instant;

use super::{
    super::super::{Effect, LeaseId, Outcome, Settings, Write},
    api::ApiServer,
    node::{Clock, Fence, Millis, Node, Process, timings},
};

/// Longest way of a request after it passed a fence. The timings reserve 3 s, less the difference of the clocks.
const FLIGHT: Millis = 2_500;
/// Timeout of a write.
const CALL: Millis = 3_000;
/// Interval in which each replica decides without an event.
const TICK: Millis = 1_000;
/// Longest time without a holder after the last fault: the Lease's duration and 5 s.
const RECOVERY: Millis = 20_000;
/// Time after the last fault at which shares are equal.
const STABLE: Millis = 50_000;

#[derive(Clone, Debug)]
enum Fault {
    Start(usize),
    Kill(usize),
    Terminate(usize),
    Pause(usize, Millis),
    Resume(usize),
    Partition(usize, bool),
    WallClock(usize, i64),
    /// Requests and responses take up to this time, and one in five is lost.
    SlowNetwork(Millis),
    /// The watch takes up to this time.
    SlowWatch(Millis),
}

#[derive(Clone, Debug)]
enum Event {
    Tick(usize, u64),
    Deliver(usize, u64, usize),
    Arrive(usize, u64, Write, u64, jiff::Timestamp),
    Respond(usize, u64, LeaseId, u64, Outcome),
    Stopped(usize, u64, Unit),
    Fault(Fault),
}

pub(super) struct World {
    seed: u64,
    random: Random,
    shards: ShardCount,
    api: ApiServer,
    /// The replicas, and the rival as the last one.
    nodes: Vec<Node>,
    rival: usize,
    rival_was_active: bool,
    queue: BinaryHeap<Reverse<(Millis, u64)>>,
    events: BTreeMap<u64, Event>,
    sequence: u64,
    now: Millis,
    /// Time after which nothing fails any more.
    calm: Millis,
    slow_network: Millis,
    slow_watch: Millis,
    resumes: BTreeMap<usize, Millis>,
    /// Time at which the last request of a killed holder has arrived.
    dead: BTreeMap<(usize, Unit), Millis>,
    acquired: u64,
    ended: u64,
    acquired_when_calm: u64,
    held_when_calm: BTreeMap<Unit, Millis>,
}

impl World {
    /// Runs a schedule to its end.
    pub(super) fn run(seed: u64) -> Self {
        let mut world = Self::new(seed);
        world.schedule_faults();
        let end = world.calm + STABLE;
        while let Some(Reverse((time, sequence))) = world.queue.pop()
            && time <= end
        {
            let event = world.events.remove(&sequence).unwrap();
            world.now = world.now.max(time);
            world.handle(event);
        }
        world.check_end();
        world
    }

    pub(super) fn acquired(&self) -> u64 {
        self.acquired
    }

    pub(super) fn ended(&self) -> u64 {
        self.ended
    }

    pub(super) fn rival_was_active(&self) -> bool {
        self.rival_was_active
    }

    fn new(seed: u64) -> Self {
        // Neighbouring seeds differ from the first draw.
        let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let count = |number: u64| ShardCount::new(u16::try_from(number).unwrap()).unwrap();
        let is_alone = random.up_to(3) == 0;
        let shards = if is_alone { ShardCount::ONE } else { count(1 + random.up_to(7)) };
        let base = Instant::now();
        let mut clock = || Clock::new(base, 990 + random.up_to(20));
        let clocks: Vec<_> = std::iter::repeat_with(&mut clock).take(6).collect();
        let rival = usize::try_from(1 + random.up_to(4)).unwrap();
        let settings = Settings { identity: String::new(), place: None, shards, is_alone, timings: timings() };
        let mut nodes: Vec<_> =
            clocks.into_iter().take(rival + 1).map(|clock| Node::new(settings.clone(), clock)).collect();
        nodes[rival].settings = if random.up_to(1) == 0 {
            Settings { shards: count(u64::from(shards.get()) + 1), is_alone: false, ..settings }
        } else {
            Settings { is_alone: true, ..settings }
        };
        Self {
            seed,
            random,
            shards,
            api: ApiServer::new(nodes[rival].settings.shards.max(shards)),
            nodes,
            rival,
            rival_was_active: false,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            sequence: 0,
            now: 0,
            calm: 0,
            slow_network: 0,
            slow_watch: 0,
            resumes: BTreeMap::new(),
            dead: BTreeMap::new(),
            acquired: 0,
            ended: 0,
            acquired_when_calm: 0,
            held_when_calm: BTreeMap::new(),
        }
    }

    fn push(&mut self, time: Millis, event: Event) {
        self.sequence += 1;
        self.queue.push(Reverse((time, self.sequence)));
        self.events.insert(self.sequence, event);
    }

    fn fault(&mut self, time: Millis, fault: Fault) {
        self.calm = self.calm.max(time);
        self.push(time, Event::Fault(fault));
    }

    fn pick(&mut self) -> usize {
        let last = u64::try_from(self.rival - 1).unwrap();
        usize::try_from(self.random.up_to(last)).unwrap()
    }

    fn schedule_faults(&mut self) {
        let rival = self.rival;
        for index in 0..rival {
            let at = self.random.up_to(3_000);
            self.fault(at, Fault::Start(index));
        }
        // Another number of shards: the rival starts before the replicas, or with them.
        let mut has_rival = self.random.up_to(3) == 0;
        if has_rival {
            let begin = self.random.up_to(1) * self.random.up_to(3_000);
            self.fault(begin, Fault::Start(rival));
            let end = begin + self.random.up_to(30_000);
            self.end_rival(end);
        }
        for _ in 0..self.random.up_to(6) {
            let index = self.pick();
            let at = 4_000 + self.random.up_to(50_000);
            let end = at + 500 + self.random.up_to(35_000);
            match self.random.up_to(8) {
                0 => {
                    self.fault(at, Fault::Kill(index));
                    self.fault(end, Fault::Start(index));
                }
                1 => {
                    self.fault(at, Fault::Terminate(index));
                    // The kubelet kills it in the end.
                    self.fault(at + 30_000, Fault::Kill(index));
                    self.fault(at + 30_000 + self.random.clone().up_to(9_000), Fault::Start(index));
                }
                2 | 3 => {
                    self.fault(at, Fault::Pause(index, end));
                    self.calm = self.calm.max(end);
                }
                4 => {
                    self.fault(at, Fault::Partition(index, true));
                    self.fault(end, Fault::Partition(index, false));
                }
                5 => {
                    let jump = i64::try_from(self.random.up_to(200_000_000)).unwrap() - 100_000_000;
                    self.fault(at, Fault::WallClock(index, jump));
                }
                6 => {
                    let delay = self.random.up_to(9_000);
                    self.fault(at, Fault::SlowNetwork(delay));
                    self.fault(end, Fault::SlowNetwork(0));
                }
                7 => {
                    let delay = self.random.up_to(20_000);
                    self.fault(at, Fault::SlowWatch(delay));
                    self.fault(end, Fault::SlowWatch(0));
                }
                _ if has_rival => {}
                // A mistake: the rival starts, and stops.
                _ => {
                    has_rival = true;
                    self.fault(at, Fault::Start(rival));
                    self.end_rival(end);
                }
            }
        }
        // A change of the number: all replicas stop while the rival waits.
        if has_rival && self.random.up_to(1) == 0 {
            let at = 10_000 + self.random.up_to(20_000);
            for index in 0..rival {
                self.fault(at + self.random.clone().up_to(5_000), Fault::Kill(index));
                self.fault(at + 40_000, Fault::Start(index));
            }
            self.fault(at, Fault::Start(rival));
            self.end_rival(at + 38_000);
        }
        // All processes run in the end, but for some.
        let calm = self.calm + 1;
        for index in 0..rival {
            self.fault(calm, Fault::Partition(index, false));
            if index == 0 || self.random.up_to(4) > 0 {
                self.fault(calm, Fault::Start(index));
            }
        }
        self.fault(calm, Fault::SlowNetwork(0));
        self.fault(calm, Fault::SlowWatch(0));
        self.fault(calm, Fault::Kill(rival));
    }

    /// Ends the rival, in order or not; now and then it is paused before.
    fn end_rival(&mut self, at: Millis) {
        let rival = self.rival;
        if self.random.up_to(3) == 0 {
            let end = at + self.random.up_to(35_000);
            self.fault(at.saturating_sub(5_000), Fault::Pause(rival, end));
            self.calm = self.calm.max(end);
        } else if self.random.up_to(1) == 0 {
            self.fault(at, Fault::Terminate(rival));
        } else {
            self.fault(at, Fault::Kill(rival));
        }
    }

    /// Delay of a message; `None` if it is lost.
    fn delay(&mut self) -> Option<Millis> {
        if self.slow_network > 0 && self.now < self.calm && self.random.up_to(4) == 0 {
            return None;
        }
        // No message of a fault arrives after its end.
        let delay = 1 + self.random.up_to(50) + self.random.up_to(self.slow_network);
        Some(if self.now < self.calm { delay.min(self.calm - self.now) } else { delay })
    }

    fn handle(&mut self, event: Event) {
        let (index, incarnation) = match &event {
            Event::Tick(index, incarnation)
            | Event::Deliver(index, incarnation, _)
            | Event::Respond(index, incarnation, ..)
            | Event::Stopped(index, incarnation, _) => (*index, *incarnation),
            Event::Arrive(..) => return self.arrive(event),
            Event::Fault(fault) => return self.apply(fault.clone()),
        };
        if self.nodes[index].incarnation != incarnation {
            return;
        }
        match self.nodes[index].process {
            Process::Down => return,
            Process::Running => {}
            // Waits until the process resumes.
            Process::Paused => return self.push(self.resumes[&index], event),
        }
        let now = self.now;
        let node = &mut self.nodes[index];
        let at = node.clock.at(now);
        match event {
            Event::Tick(..) => self.push(now + TICK, event),
            Event::Deliver(.., upto) => {
                if node.is_partitioned {
                    return self.push(now + TICK, event);
                }
                if node.cursor == 0 && upto > 0 {
                    // The first list.
                    node.cursor = self.api.log.len();
                    node.ownership.observe_all(self.api.all(), at);
                }
                while node.cursor < upto {
                    let (id, record) = self.api.log[node.cursor].clone();
                    node.cursor += 1;
                    node.ownership.observe(id, Some(record), at);
                }
            }
            Event::Respond(_, _, id, serial, outcome) => {
                if node.in_flight.get(&id) != Some(&serial) {
                    return;
                }
                node.in_flight.remove(&id);
                node.ownership.finished(id, outcome, at);
            }
            Event::Stopped(.., unit) => node.ownership.stopped(unit),
            _ => {}
        }
        self.decide(index);
    }

    fn decide(&mut self, index: usize) {
        let now = self.now;
        let node = &mut self.nodes[index];
        let incarnation = node.incarnation;
        let at = node.clock.at(now);
        let step = node.ownership.step(at);
        let opened = node.apply(&step.effects, step.until, now);
        let has_left = node.ownership.has_left();
        let wall = node.wall(now);
        for effect in &step.effects {
            match effect {
                Effect::HandOver(unit) => {
                    let longest = if now < self.calm { 12_000 } else { 1_000 };
                    let takes = self.random.up_to(longest);
                    self.push(now + takes, Event::Stopped(index, incarnation, *unit));
                }
                Effect::Acquired(_) => {
                    self.acquired += 1;
                    self.rival_was_active |= index == self.rival;
                    self.acquired_when_calm += u64::from(now > self.calm);
                }
                Effect::Ended(..) => self.ended += 1,
            }
        }
        self.check_overlaps(index, &opened);
        for write in step.writes {
            let node = &mut self.nodes[index];
            node.serial += 1;
            let serial = node.serial;
            let id = write.id;
            let is_partitioned = node.is_partitioned;
            let before = node.in_flight.insert(id, serial);
            assert_eq!(before, None, "seed {}: two writes of one Lease", self.seed);
            self.push(now + CALL, Event::Respond(index, incarnation, id, serial, Outcome::Failed));
            if let Some(delay) = self.delay().filter(|_| !is_partitioned) {
                self.push(now + delay, Event::Arrive(index, incarnation, write, serial, wall));
            }
        }
        if has_left {
            self.kill(index);
        }
    }

    /// The API server executes a write.
    fn arrive(&mut self, event: Event) {
        let Event::Arrive(index, incarnation, write, serial, wall) = event else { return };
        let before = self.api.log.len();
        let mut settings = self.nodes[index].settings.clone();
        settings.identity = format!("replica-{index}_{incarnation}");
        let outcome = self.api.write(&write, &settings, wall);
        if let Some(delay) = self.delay().filter(|_| !self.nodes[index].is_partitioned) {
            self.push(self.now + delay, Event::Respond(index, incarnation, write.id, serial, outcome));
        }
        self.notify(before);
    }

    /// Delivers new changes to all watches, in order.
    fn notify(&mut self, before: usize) {
        let upto = self.api.log.len();
        if upto == before {
            return;
        }
        for index in 0..self.nodes.len() {
            let slow = if self.now < self.calm { self.slow_watch } else { 0 };
            let delay = 1 + self.random.up_to(80) + self.random.up_to(slow);
            let delay = if self.now < self.calm { delay.min(self.calm - self.now) } else { delay };
            self.push(self.now + delay, Event::Deliver(index, self.nodes[index].incarnation, upto));
        }
    }

    /// Times at which a fence of another replica ends that must not be open beside one of a unit of this replica, and at which
    /// its last request has arrived.
    fn others(&self, index: usize, unit: Unit) -> impl Iterator<Item = (usize, Millis, Millis)> {
        let is_rival = move |other: usize| (index == self.rival) != (other == self.rival);
        let nodes = self.nodes.iter().enumerate().filter(move |(other, _)| *other != index);
        let fences =
            nodes.flat_map(|(other, node)| node.fences.iter().map(move |(unit, fence)| (other, *unit, *fence)));
        let collides = move |(other, of): (usize, Unit)| of == unit || is_rival(other);
        let living = fences.filter(move |(other, of, _)| collides((*other, *of)));
        let living = living
            .map(|(other, _, Fence { until, is_quiet })| (other, until, until + if is_quiet { 0 } else { FLIGHT }));
        let dead = self.dead.iter().filter(move |(key, _)| collides(**key));
        living.chain(dead.map(|((other, _), end)| (*other, 0, *end)))
    }

    /// At most one fence of each shard is open, none opens before the last request of the one before has arrived, and none
    /// is open beside one of a rival.
    fn check_overlaps(&mut self, index: usize, opened: &[Unit]) {
        let seed = self.seed;
        let now = self.now;
        let open: Vec<_> =
            self.nodes[index].fences.iter().filter(|(_, fence)| now < fence.until).map(|(unit, _)| *unit).collect();
        for unit in open {
            for (other, until, last) in self.others(index, unit) {
                assert!(until <= now, "seed {seed}: at {now} {index} and {other} hold {unit}, until {until}");
                let is_late = opened.contains(&unit) && last > now;
                assert!(!is_late, "seed {seed}: at {now} {index} opens {unit}, requests of {other} until {last}");
            }
            if now > self.calm {
                self.held_when_calm.entry(unit).or_insert(now);
            }
        }
    }

    fn kill(&mut self, index: usize) {
        let now = self.now;
        let node = &mut self.nodes[index];
        if node.process == Process::Down {
            return;
        }
        node.kill(now);
        for (unit, fence) in std::mem::take(&mut node.fences) {
            let end = fence.until + if fence.is_quiet { 0 } else { FLIGHT };
            let last = self.dead.entry((index, unit)).or_default();
            *last = end.max(*last);
        }
    }

    fn apply(&mut self, fault: Fault) {
        let now = self.now;
        match fault {
            Fault::Start(index) => {
                if self.nodes[index].process == Process::Down {
                    self.nodes[index].start(index, now);
                    let incarnation = self.nodes[index].incarnation;
                    self.push(now + 1, Event::Deliver(index, incarnation, self.api.log.len()));
                    self.push(now + 2, Event::Tick(index, incarnation));
                }
            }
            Fault::Kill(index) => self.kill(index),
            Fault::Terminate(index) => {
                let node = &mut self.nodes[index];
                if node.process == Process::Running {
                    node.ownership.leave(node.clock.at(now));
                }
            }
            Fault::Pause(index, end) => {
                if self.nodes[index].process == Process::Running {
                    self.nodes[index].process = Process::Paused;
                    self.resumes.insert(index, end);
                    // Before the events that wait for it.
                    self.push(end, Event::Fault(Fault::Resume(index)));
                }
            }
            Fault::Resume(index) => {
                if self.nodes[index].process == Process::Paused {
                    self.nodes[index].process = Process::Running;
                }
            }
            Fault::Partition(index, is_partitioned) => self.nodes[index].is_partitioned = is_partitioned,
            Fault::WallClock(index, jump) => self.nodes[index].wall += jump,
            Fault::SlowNetwork(delay) => self.slow_network = delay,
            Fault::SlowWatch(delay) => self.slow_watch = delay,
        }
    }

    fn check_end(&self) {
        let seed = self.seed;
        let calm = self.calm;
        for unit in Unit::all(self.shards) {
            let held = self.held_when_calm.get(&unit).map(|held| held - calm);
            assert!(held.is_some_and(|after| after <= RECOVERY), "seed {seed}: {unit} held after {held:?}");
        }
        let running: Vec<_> = self.nodes.iter().filter(|node| node.process == Process::Running).collect();
        let open = |node: &Node| node.fences.values().filter(|fence| self.now < fence.until).count();
        let mut shares: Vec<_> = running.iter().map(|node| open(node)).collect();
        if self.nodes[0].settings.is_alone {
            // One of them holds all.
            shares.retain(|share| *share > 0);
        }
        let least = shares.iter().min().copied();
        let most = shares.iter().max().copied();
        assert!(most.unwrap_or(0) - least.unwrap_or(0) <= 1, "seed {seed}: shares {shares:?}");
        assert_eq!(shares.iter().sum::<usize>(), usize::from(self.shards.get()) + 1, "seed {seed}: shares {shares:?}");
        let moves = self.acquired_when_calm;
        assert!(moves <= 2 * u64::from(self.shards.get() + 1) + 5, "seed {seed}: {moves} moves");
    }
}
