//! Tests of single steps with fixed fleets, and of whole upgrades with random ones. Each step is decided on the merged
//! summaries of three replicas, and compared with the decision on the list of all runtimes.

mod reference;

use std::time::Duration;

use proptest::prelude::*;
use tidewatch_api::key::KymaKey;
use tidewatch_rollout::{Candidate, MAX_NAMED, Order, Ring, Rules};

use super::*;
use crate::upgrade::{
    ImageDecision,
    members::{Fleet, Member, Standing},
    state::tests::upgrade,
};

const NOW: i64 = 1_800_000_000;
const PAUSE: i64 = 100;

fn criteria(rules: &Rules, now: i64) -> Criteria<'_> {
    Criteria { rules, is_confirmed: false, now }
}

fn rules(rings: &str) -> Rules {
    let seconds = |seconds: i64| Duration::from_secs(seconds.unsigned_abs());
    Rules {
        rings: rings.parse().unwrap(),
        pause: seconds(PAUSE),
        deadline: seconds(0),
        max_failures: "2%".parse().unwrap(),
    }
}

fn member(rank: u64, image: &str, standing: Standing) -> Member {
    Member { kyma: KymaKey::new("ns", format!("k{rank}")), rank, image: Some(image.into()), standing }
}

/// Members with ascending ranks and image `a`.
fn with_a(standings: &[Standing]) -> Vec<Member> {
    (1..).zip(standings).map(|(rank, standing)| member(rank * 10, "a", *standing)).collect()
}

fn fleet(members: Vec<Member>) -> Fleet {
    Fleet { members, excluded: Vec::new() }
}

/// Divides a fleet between so many replicas.
fn divided(fleet: &Fleet, replicas: usize) -> Vec<Fleet> {
    let mut parts = vec![Fleet::default(); replicas];
    fleet.members.iter().enumerate().for_each(|(at, it)| parts[at * 7 % replicas].members.push(it.clone()));
    fleet.excluded.iter().enumerate().for_each(|(at, it)| parts[at % replicas].excluded.push(it.clone()));
    parts
}

/// Decides on the merged summaries of replicas.
fn step_of(parts: &[Fleet], state: &UpgradeState, criteria: Criteria<'_>) -> Option<UpgradeState> {
    let summary = |with_order| {
        let parts = parts.iter().map(|part| serde_json::to_vec(&Summary::of(state, part, with_order)).unwrap());
        Summary::merged(parts.map(|part| serde_json::from_slice(&part).unwrap())).unwrap()
    };
    let next = match super::step(state, &summary(false), criteria) {
        Step::NeedsOrder => super::step(state, &summary(true), criteria),
        next => next,
    };
    match next {
        Step::Wait => None,
        Step::Become(next) => Some(next),
        Step::NeedsOrder => panic!("the order is known"),
    }
}

fn step(state: &UpgradeState, fleet: &Fleet, criteria: Criteria<'_>) -> Option<UpgradeState> {
    let next = step_of(&divided(fleet, 3), state, criteria);
    assert_eq!(next, reference::step(state, fleet, criteria));
    next
}

fn ring(state: &UpgradeState) -> (u32, u64) {
    let ring = state.ongoing.as_ref().unwrap().ring.unwrap();
    (ring.number, ring.through)
}

use Standing::{Failing, Pending, Proven, Unfit};

#[test]
fn first_ring_begins_once_no_runtime_is_pending() {
    let rules = rules("1%,50%,100%");
    let step = |members| step(&upgrade(None), &fleet(members), criteria(&rules, NOW));
    assert_eq!(step(with_a(&[Pending, Proven, Proven])), None);
    assert_eq!(ring(&step(with_a(&[Proven, Proven, Proven])).unwrap()), (1, 10));
    assert_eq!(
        ring(&step(with_a(&[Failing, Unfit, Proven])).unwrap()),
        (1, 30),
        "unfit and failing runtimes are no evidence"
    );
    assert_eq!(ring(&step(with_a(&[Failing, Failing])).unwrap()), (1, 10), "it may be the cure");
}

#[test]
fn ring_ends_when_all_are_proven_and_its_pause_has_passed() {
    let rules = rules("1%,10%,50%,100%");
    let one = upgrade(Some((1, 10)));
    let at = |standing, now| {
        let mut members = with_a(&[Proven; 4]);
        members[0] = member(10, "b", standing);
        step(&one, &fleet(members), criteria(&rules, now))
    };
    assert_eq!(at(Proven, NOW + PAUSE - 1), None);
    assert_eq!(ring(&at(Proven, NOW + PAUSE).unwrap()), (3, 20), "10% of four is the one again");
    assert_eq!(at(Pending, NOW + 9 * PAUSE), None);
    let waiting = step(&one, &fleet(with_a(&[Pending, Proven])), criteria(&rules, NOW + PAUSE));
    assert_eq!(waiting, None, "it lacks the image yet");
    let unfit = at(Unfit, NOW).unwrap();
    assert_eq!((ring(&unfit), unfit.since), ((1, 20), NOW), "the share grows by a runtime");

    let last = upgrade(Some((4, u64::MAX)));
    let all: Vec<_> = (1..=4).map(|rank| member(rank, "b", if rank == 4 { Unfit } else { Proven })).collect();
    assert!(step(&last, &fleet(all), criteria(&rules, NOW)).unwrap().is_done(), "nothing is left to pause for");
}

#[test]
fn upgrade_halts_only_when_upgraded_runtimes_fare_worse_than_the_others() {
    let rules = rules("1%,100%");
    let one = upgrade(Some((1, 10)));
    let at = |others: Standing, confirmed| {
        let mut members = with_a(&[others; 4]);
        members[0] = member(10, "b", Failing);
        step(&one, &fleet(members), Criteria { is_confirmed: confirmed, ..criteria(&rules, NOW + PAUSE) })
    };
    let halted = at(Proven, false).unwrap();
    assert_eq!(halted.halted(), Some("1 of 1 upgraded runtimes are not proven: ns/k10"));
    assert_eq!(ring(&halted), (1, 10));
    assert_eq!(at(Failing, false), None, "it is not the image");
    assert_eq!(ring(&at(Proven, true).unwrap()), (2, u64::MAX), "an operator wants it so");

    let members = || fleet(with_a(&[Proven; 4]));
    assert_eq!(step(&halted, &members(), criteria(&rules, NOW + 9 * PAUSE)), None, "it does not go on by itself");
    let confirmed = Criteria { is_confirmed: true, ..criteria(&rules, NOW) };
    assert_eq!(step(&halted, &members(), confirmed).unwrap().halted(), None);

    let many = |failing: u64| {
        let standing = |rank| if rank <= failing { Failing } else { Proven };
        let members = (1..=400).map(|rank| member(rank, if rank <= 200 { "b" } else { "a" }, standing(rank))).collect();
        step(&upgrade(Some((1, 200))), &fleet(members), criteria(&rules, NOW + PAUSE)).unwrap()
    };
    assert_eq!(ring(&many(3)), (2, u64::MAX), "less than 2% of them");
    let few = |failing: u64| {
        let standing = |rank| if rank <= failing { Failing } else { Proven };
        let members = (1..=400).map(|rank| member(rank, if rank <= 50 { "b" } else { "a" }, standing(rank))).collect();
        step(&upgrade(Some((1, 50))), &fleet(members), criteria(&rules, NOW + PAUSE)).unwrap()
    };
    assert_eq!(few(2).halted(), None, "a hostile runtime or two cannot halt the fleet's upgrade");
    assert!(few(3).halted().is_some());
    let text = many(6).halted().unwrap().to_owned();
    assert_eq!(text, "6 of 200 upgraded runtimes are not proven: ns/k1, ns/k2, ns/k3, ns/k4, ns/k5, …");
}

#[test]
fn unknown_previous_image_is_derived_from_the_runtimes() {
    let rules = rules("1%,100%");
    let unknown = UpgradeState::unknown("b", NOW);
    let step = |members, excluded| {
        let excluded = vec![KymaKey::new("ns", "away"); excluded];
        step(&unknown, &Fleet { members, excluded }, criteria(&rules, NOW))
    };
    assert!(step(Vec::new(), 0).unwrap().is_done(), "there are none");
    assert_eq!(step(Vec::new(), 3), None, "all are away");
    assert!(step(vec![member(1, "b", Proven), member(2, "b", Failing)], 0).unwrap().is_done());
    let not_looked_at = Member { image: None, ..member(1, "", Pending) };
    assert_eq!(step(vec![not_looked_at, member(2, "b", Proven)], 0), None);
    let previous = |state: Option<UpgradeState>| {
        let ongoing = state.unwrap().ongoing.unwrap();
        assert!(ongoing.ring.is_some(), "{ongoing:?}");
        ongoing.previous
    };
    assert_eq!(previous(step(with_a(&[Proven, Proven]), 0)), Some("a".into()));
    assert_eq!(previous(step(vec![member(1, "a", Proven), member(2, "c", Proven)], 0)), None, "each keeps its own");
}

/// `count` members, of which the first `pending` are pending.
fn many(count: u64, pending: u64, image: &str) -> Vec<Member> {
    (1..=count).map(|rank| member(rank, image, if rank <= pending { Pending } else { Proven })).collect()
}

#[test]
fn few_pending_runtimes_do_not_block_a_ring() {
    let rules = rules("1%,50%,100%");
    let begun = |members| step(&upgrade(None), &fleet(members), criteria(&rules, NOW));
    assert_eq!(ring(&begun(many(400, 1, "a")).unwrap()), (1, 4));
    assert_eq!(ring(&begun(many(400, 7, "a")).unwrap()), (1, 8), "a share includes a proven runtime");
    assert_eq!(begun(many(400, 8, "a")), None, "2% of 400");

    let at = |number, through, pending| {
        let members = many(400, pending, "b");
        let members = members.into_iter().map(|it| if it.rank > through { member(it.rank, "a", Proven) } else { it });
        step(&upgrade(Some((number, through))), &fleet(members.collect()), criteria(&rules, NOW + PAUSE))
    };
    assert_eq!(ring(&at(1, 4, 0).unwrap()), (2, 200));
    assert_eq!(ring(&at(1, 4, 2).unwrap()), (2, 200), "one or two runtimes cannot block an upgrade");
    assert_eq!(at(1, 4, 3), None);
    assert_eq!(ring(&at(2, 200, 3).unwrap()), (3, u64::MAX));
    assert_eq!(at(2, 200, 4), None, "2% of 200");
    assert!(at(3, u64::MAX, 1).unwrap().is_done());
    assert_eq!(at(3, u64::MAX, 8), None);

    // The last ring assigns the target to all, so a runtime that still lacks it does not block the end.
    let mut members = many(400, 0, "b");
    members[0] = member(1, "a", Pending);
    let last = step(&upgrade(Some((3, u64::MAX))), &fleet(members), criteria(&rules, NOW)).unwrap();
    assert!(last.is_done());
    assert_eq!(last.image_for_rank(1), ImageDecision::Use("b".into()));

    // Even if every runtime may fail, one must be proven before the next ring.
    let all = Rules { max_failures: "100%".parse().unwrap(), ..rules };
    let mut members = many(4, 1, "b");
    members[1] = member(2, "b", Failing);
    members[2..].iter_mut().for_each(|it| *it = member(it.rank, "a", Proven));
    assert_eq!(step(&upgrade(Some((1, 2))), &fleet(members), criteria(&all, NOW + PAUSE)), None);
}

#[test]
fn previous_image_is_derived_only_when_every_image_is_observed() {
    let rules = rules("1%,100%");
    let mut members = many(400, 1, "a");
    let begun = |state: &UpgradeState, members: &[Member]| step(state, &fleet(members.to_vec()), criteria(&rules, NOW));
    let unknown = UpgradeState::unknown("b", NOW);
    assert!(begun(&unknown, &members).is_some());
    members[0].image = None;
    assert_eq!(begun(&unknown, &members), None, "not observed");
    assert!(begun(&upgrade(None), &members).is_some(), "the previous image is known");
}

fn fleet_of(members: &[Member]) -> Fleet {
    fleet(members.to_vec())
}

/// Random runtime.
#[derive(Clone, Debug)]
struct RandomRuntime {
    rank: u64,
    fails: bool,
    /// Ticks until it gets an assigned image.
    slow: u8,
}

fn random_fleet(most: usize) -> impl Strategy<Value = Vec<RandomRuntime>> {
    let one = (any::<u64>(), prop::bool::weighted(0.1), 0u8..4);
    let one = one.prop_map(|(rank, fails, slow)| RandomRuntime { rank, fails, slow });
    prop::collection::vec(one, 1..most)
}

fn any_rules() -> impl Strategy<Value = Rules> {
    prop::collection::btree_set(1u16..100, 0..4).prop_map(|shares| {
        let texts = shares.iter().map(|share| format!("{share}%,"));
        rules(&format!("{}100%", texts.collect::<String>()))
    })
}

/// Members in any state, also in those that no upgrade leads to. Few ranks, so that some are within a ring.
fn any_members() -> impl Strategy<Value = Vec<Member>> {
    let image = prop::sample::select(vec![None, Some("a"), Some("b"), Some("c"), Some("d")]);
    let standing = prop::sample::select(vec![Proven, Proven, Proven, Pending, Failing, Unfit]);
    let one = (0u64..400, image, standing)
        .prop_map(|(rank, image, standing)| Member { image: image.map(Into::into), ..member(rank, "", standing) });
    let few = prop::collection::btree_map(0u64..400, one, 0..40);
    few.prop_map(|members| {
        members
            .into_iter()
            .map(|(rank, one)| Member { kyma: KymaKey::new("ns", format!("k{rank}")), rank, ..one })
            .collect()
    })
}

fn any_state() -> impl Strategy<Value = UpgradeState> {
    let ring = prop::option::of((1u32..4, prop_oneof![0u64..400, Just(u64::MAX)]));
    let previous = prop::option::of(Just("a"));
    (ring, previous, prop::bool::weighted(0.2)).prop_map(|(ring, previous, is_halted)| {
        let mut state = UpgradeState { since: NOW, ..upgrade(ring) };
        if let Some(ongoing) = &mut state.ongoing {
            ongoing.previous = previous.map(Into::into);
            ongoing.halted = (is_halted && ongoing.ring.is_some()).then(|| "3 of 9".to_owned());
        }
        state
    })
}

/// Runs an upgrade of initially proven runtimes to its end, and calls `check` after each step.
fn run(fleet: &[RandomRuntime], rules: &Rules, mut check: impl FnMut(&UpgradeState, usize, i64)) -> UpgradeState {
    let mut members: Vec<_> = fleet.iter().map(|runtime| member(runtime.rank, "a", Proven)).collect();
    let mut slow: Vec<_> = fleet.iter().map(|runtime| runtime.slow).collect();
    let mut state = UpgradeState { since: NOW, ..upgrade(None) };
    for tick in 0..200 {
        let now = NOW + tick * PAUSE / 4;
        for ((member, runtime), slow) in members.iter_mut().zip(fleet).zip(&mut slow) {
            let gets = state.image_for_rank(member.rank) == ImageDecision::Use("b".into());
            let has = member.image.as_deref() == Some("b");
            member.standing = match (gets, has, *slow) {
                (false, false, _) => Proven,
                (false, true, _) => panic!("no runtime is downgraded"),
                (true, false, 0) => {
                    member.image = Some("b".into());
                    Pending
                }
                (true, false, _) => {
                    *slow -= 1;
                    Pending
                }
                (true, true, _) if runtime.fails => Failing,
                (true, true, _) => Proven,
            };
        }
        let fleet = fleet_of(&members);
        if let Some(next) = step(&state, &fleet, criteria(rules, now)) {
            state = next;
        }
        let upgraded = members.iter().filter(|member| member.image.as_deref() == Some("b")).count();
        check(&state, upgraded, now);
    }
    state
}

proptest! {
    #[test]
    fn rings_respect_their_share_and_pause(fleet in random_fleet(80), rules in any_rules()) {
        let mut before: Option<(u32, i64)> = None;
        run(&fleet, &rules, |state, upgraded, now| {
            let Some(Ongoing { ring: Some(ring), halted, .. }) = &state.ongoing else { return };
            let (_, share) = rules.rings.from(ring.number).next().unwrap();
            assert!(upgraded <= share.floor_of(fleet.len()), "{upgraded} of {} in {ring:?}", fleet.len());
            if let Some((number, since)) = before {
                assert!(ring.number >= number);
                assert!(ring.number == number || now >= since + PAUSE);
            }
            if halted.is_none() && before.is_none_or(|(number, _)| number < ring.number) {
                before = Some((ring.number, now));
            }
        });
    }

    #[test]
    fn good_image_reaches_every_runtime(mut fleet in random_fleet(80), rules in any_rules()) {
        fleet.iter_mut().for_each(|runtime| runtime.fails = false);
        prop_assert!(run(&fleet, &rules, |_, _, _| ()).is_done());
    }

    #[test]
    fn bad_image_stays_within_the_first_ring(mut fleet in random_fleet(80), rules in any_rules()) {
        fleet.iter_mut().for_each(|runtime| runtime.fails = true);
        let (_, first) = rules.rings.from(1).next().unwrap();
        let end = run(&fleet, &rules, |_, upgraded, _| assert!(upgraded <= first.floor_of(fleet.len())));
        prop_assert!(end.halted().is_some());
    }

    #[test]
    fn halted_upgrade_admits_no_further_runtime(fleet in random_fleet(80), rules in any_rules()) {
        let mut halted: Option<(UpgradeState, usize)> = None;
        run(&fleet, &rules, |state, upgraded, _| {
            if state.halted().is_some() {
                let (first, before) = halted.get_or_insert((state.clone(), upgraded));
                // Runtimes assigned before the halt may still get the image.
                assert!(state == first && upgraded >= *before);
                let through = ring(first).1;
                assert!(upgraded <= fleet.iter().filter(|runtime| runtime.rank <= through).count());
            }
        });
    }
    #[test]
    fn decision_on_merged_summaries_is_that_on_all_runtimes(
        members in any_members(),
        excluded in 0usize..2,
        state in any_state(),
        replicas in 1usize..6,
        rules in any_rules(),
        confirmed: bool,
        later in 0i64..2 * PAUSE,
        max_failures in prop::sample::select(vec!["1%", "20%", "100%"]),
    ) {
        let fleet = Fleet { members, excluded: vec![KymaKey::new("ns", "away"); excluded] };
        let rules = Rules { max_failures: max_failures.parse().unwrap(), ..rules };
        let criteria = Criteria { is_confirmed: confirmed, ..criteria(&rules, NOW + later) };
        let parts = divided(&fleet, replicas);
        prop_assert_eq!(step_of(&parts, &state, criteria), reference::step(&state, &fleet, criteria));
        let merged = Summary::merged(parts.iter().map(|part| Summary::of(&state, part, true)));
        prop_assert_eq!(merged, Some(Summary::of(&state, &fleet, true)));
    }
}
