//! Random schedules of writes, watch events, lists, acquisitions, releases, moves of Kymas and fetches that are answered from
//! any earlier state: readers of a placed shard find exactly what the watch has reported, with bodies.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

const KYMAS: u8 = 5;
const OBJECTS: u8 = 6;

/// Kyma and version of each object that exists.
type Objects = BTreeMap<u8, (u8, u64)>;

#[derive(Clone, Debug)]
enum Step {
    /// Another writer creates or changes an object, perhaps of another Kyma.
    Write {
        object: u8,
        kyma: u8,
    },
    Delete(u8),
    /// The watch delivers the next change.
    Deliver,
    BeginList,
    EndList,
    Keep(u8),
    Release(u8),
    /// A Kyma gets another runtime.
    Move {
        kyma: u8,
        runtime: u8,
    },
    /// The time of the released shards ends.
    Expire,
    /// The task reduces what is not kept.
    Reduce,
    /// The API server answers a fetch with the state of so many changes ago.
    Answer(usize),
    /// The answer arrives.
    Arrive,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..OBJECTS, 0..KYMAS).prop_map(|(object, kyma)| Step::Write { object, kyma }),
        2 => (0..OBJECTS).prop_map(Step::Delete),
        8 => Just(Step::Deliver),
        1 => Just(Step::BeginList),
        2 => Just(Step::EndList),
        3 => (0..3u8).prop_map(Step::Keep),
        2 => (0..3u8).prop_map(Step::Release),
        1 => (0..KYMAS, 0..9u8).prop_map(|(kyma, runtime)| Step::Move { kyma, runtime }),
        1 => Just(Step::Expire),
        3 => Just(Step::Reduce),
        4 => (0..4usize).prop_map(Step::Answer),
        4 => Just(Step::Arrive),
    ]
}

struct World<C: TestKind> {
    fixture: FixtureOf<C>,
    version: u64,
    /// States of the server, the last one is the present.
    history: Vec<Objects>,
    /// Changes that the watch has not delivered: the object, and what it is now.
    log: VecDeque<(u8, Option<(u8, u64)>)>,
    /// What the watch has reported.
    reported: Objects,
    /// State of the list that is incomplete.
    list: Option<Objects>,
    answers: VecDeque<Objects>,
    runtimes: Vec<u8>,
    /// Kymas of placed shards, which have not moved since.
    placed: BTreeSet<u8>,
}

impl<C: TestKind> World<C> {
    fn new() -> Self {
        let fixture = FixtureOf::<C>::new(KYMAS.into());
        fixture.bodies.reduce_others();
        let runtimes = (0..KYMAS).collect();
        let placed = BTreeSet::new();
        let (log, reported, list, answers) = Default::default();
        Self { fixture, version: 0, history: vec![Objects::new()], log, reported, list, answers, runtimes, placed }
    }

    fn object(number: u8, now: (u8, u64)) -> Value {
        let (kyma, version) = now;
        C::object(&format!("m{number}"), &format!("k{kyma}"), version)
    }

    fn change(&mut self, object: u8, kyma: Option<u8>) {
        self.version += 1;
        let now = kyma.map(|kyma| (kyma, self.version));
        let mut objects = self.history.last().unwrap().clone();
        match now {
            Some(now) => drop(objects.insert(object, now)),
            None if objects.remove(&object).is_none() => return,
            None => {}
        }
        self.history.push(objects);
        self.log.push_back((object, now));
    }

    fn deliver(&mut self) {
        if self.list.is_some() {
            return;
        }
        let Some((object, now)) = self.log.pop_front() else { return };
        match now {
            Some(now) => {
                self.reported.insert(object, now);
                self.fixture.apply(Self::object(object, now));
            }
            None => {
                self.reported.remove(&object);
                let inner = &self.fixture.bodies.0;
                let Some(known) = inner.objects.find(&key(&format!("m{object}"))) else { return };
                inner.writer.lock().apply(&Event::Delete(known.clone()));
                inner.objects.unindex(&known);
            }
        }
    }

    fn begin_list(&mut self) {
        let objects = self.history.last().unwrap().clone();
        let inner = &self.fixture.bodies.0;
        inner.writer.lock().apply(&Event::Init);
        for (object, now) in &objects {
            let mut cache = inner.writer.lock();
            let listed = self.fixture.bodies.compact(C::parsed(Self::object(*object, *now)));
            cache.apply(&Event::InitApply(listed));
        }
        self.log.clear();
        self.list = Some(objects);
    }

    fn end_list(&mut self) {
        let Some(objects) = self.list.take() else { return };
        let inner = &self.fixture.bodies.0;
        let all = || [true, false].into_iter().flat_map(|reduced| inner.objects.all(reduced));
        let before: Vec<_> = all().collect();
        inner.writer.lock().apply(&Event::InitDone);
        all().for_each(|object| inner.objects.index(&object));
        for object in before.iter().filter(|object| inner.objects.find(&object.key()).is_none()) {
            inner.objects.unindex(object);
        }
        self.reported = objects;
    }

    fn shard_of(&self, kyma: u8) -> ShardId {
        self.fixture.shard(&format!("k{}", self.runtimes[usize::from(kyma)]))
    }

    fn of_shard(&self, shard: ShardId) -> impl Iterator<Item = u8> {
        (0..KYMAS).filter(move |kyma| self.shard_of(*kyma) == shard)
    }

    async fn step(&mut self, step: Step) {
        let shard = |number: u8| self.fixture.shards.shard(number.into()).unwrap();
        match step {
            Step::Write { object, kyma } => self.change(object, Some(kyma)),
            Step::Delete(object) => self.change(object, None),
            Step::Deliver => self.deliver(),
            Step::BeginList => self.begin_list(),
            Step::EndList => self.end_list(),
            Step::Keep(number) => self.fixture.bodies.keep(shard(number)),
            Step::Release(number) => {
                let shard = shard(number);
                self.fixture.bodies.release(shard);
                let released: BTreeSet<_> = self.of_shard(shard).collect();
                self.placed.retain(|kyma| !released.contains(kyma));
            }
            Step::Move { .. } if C::MOVES_ALONE => {}
            Step::Move { kyma, runtime } => {
                self.runtimes[usize::from(kyma)] = runtime;
                self.placed.remove(&kyma);
                let name = format!("k{kyma}");
                let moved = super::kyma(&name, Some(&format!("k{runtime}")));
                self.fixture.kymas.apply_watcher_event(&Event::Apply(moved));
                self.fixture.bodies.kyma_moved(&key(&name));
            }
            Step::Expire => self.expire(),
            Step::Reduce => drop(self.fixture.bodies.reduce().await),
            Step::Answer(ago) => {
                let at = self.history.len().saturating_sub(1 + ago);
                self.answers.push_back(self.history[at].clone());
            }
            Step::Arrive => {
                if let Some(objects) = self.answers.pop_front() {
                    let objects = objects.into_iter().map(|(object, now)| Self::object(object, now));
                    let listed = objects.map(|object| serde_json::from_value(object).unwrap()).collect();
                    self.fixture.bodies.add(listed, &BTreeMap::new());
                }
            }
        }
        self.place();
    }

    fn expire(&self) {
        self.fixture.bodies.kept(|kept| kept.expire(Instant::now() + Duration::from_secs(3_600)));
    }

    /// Places the kept shards that are complete.
    fn place(&mut self) {
        for shard in self.fixture.shards.shards().filter(|shard| self.fixture.bodies.is_own(*shard)) {
            if self.fixture.is_complete(shard) {
                let kymas: Vec<_> = self.of_shard(shard).collect();
                self.placed.extend(kymas);
            }
        }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let objects = &self.fixture.bodies.0.objects;
        for object in 0..OBJECTS {
            let found = objects.find(&key(&format!("m{object}")));
            let reported = self.reported.get(&object);
            let version = found.as_ref().and_then(|found| found.object_version()?.parse().ok());
            prop_assert_eq!(version, reported.map(|(_, version)| *version), "what the watch has reported");
            if let (Some(found), Some((kyma, _))) = (found, reported) {
                if !C::MOVES_ALONE {
                    prop_assert_eq!(found.kyma(), Some(key(&format!("k{kyma}"))));
                }
                prop_assert!(
                    !(found.is_reduced() && self.placed.contains(kyma)),
                    "a placed Kyma's objects have bodies"
                );
            }
        }
        for kyma in 0..KYMAS {
            let of_kyma = self.reported.iter().filter(|(_, (of, _))| *of == kyma);
            let expected: Vec<_> = of_kyma.map(|(object, (_, version))| (format!("m{object}"), *version)).collect();
            match objects.finds(&key(&format!("k{kyma}")), &expected) {
                Ok(is_found) => prop_assert!(is_found, "an object without body is not one that is missing"),
                Err(missing) => prop_assert!(!self.placed.contains(&kyma), "{missing}"),
            }
        }
        Ok(())
    }
}

fn check<C: TestKind>(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut world = World::<C>::new();
    for step in steps {
        runtime.block_on(world.step(step));
        world.check()?;
    }
    // Once the watch has caught up, one more fetch completes every kept shard, and a pass reduces all others.
    runtime.block_on(async {
        world.step(Step::EndList).await;
        while !world.log.is_empty() {
            world.step(Step::Deliver).await;
        }
        world.answers.clear();
        world.step(Step::Answer(0)).await;
        world.step(Step::Arrive).await;
        world.step(Step::Expire).await;
        world.step(Step::Reduce).await;
    });
    world.check()?;
    let bodies = &world.fixture.bodies;
    for shard in world.fixture.shards.shards().filter(|shard| bodies.is_own(*shard)) {
        prop_assert!(world.fixture.is_complete(shard));
    }
    for (object, (kyma, _)) in &world.reported {
        let is_own = bodies.is_own(world.shard_of(*kyma));
        prop_assert_eq!(world.fixture.is_reduced(&format!("m{object}")), !is_own);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn placed_shard_has_exactly_the_reported_manifests_with_bodies(steps in proptest::collection::vec(step(), 0..120)) {
        check::<ManifestCache>(steps)?;
    }

    #[test]
    fn placed_shard_has_exactly_the_reported_kymas_with_bodies(steps in proptest::collection::vec(step(), 0..120)) {
        check::<KymaCache>(steps)?;
    }

    #[test]
    fn placed_shard_has_exactly_the_access_of_the_reported_secrets(steps in proptest::collection::vec(step(), 0..120)) {
        check::<SecretCache>(steps)?;
    }
}
