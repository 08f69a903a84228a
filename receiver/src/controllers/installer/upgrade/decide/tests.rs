//! Steps of upgrades of fleets that are drawn, and of small ones that are written out.

use proptest::prelude::*;

use super::*;
use crate::controllers::installer::upgrade::rollout::tests::upgrade;

const NOW: i64 = 1_800_000_000;
const PAUSE: i64 = 100;

fn terms(stages: &Stages, now: i64) -> Terms<'_> {
    Terms { stages, pause: PAUSE, max_failures: "2%".parse().unwrap(), confirmed: false, now }
}

fn stages(text: &str) -> Stages {
    text.parse().unwrap()
}

fn member(rank: u64, image: &str, standing: Standing) -> Member {
    Member { kyma: KymaKey::new("ns", format!("k{rank}")), rank, image: Some(image.into()), standing }
}

/// Members of these ranks, standing so with `a`.
fn with_a(standings: &[Standing]) -> Vec<Member> {
    (1..).zip(standings).map(|(rank, standing)| member(rank * 10, "a", *standing)).collect()
}

fn fleet(members: Vec<Member>) -> Fleet {
    Fleet { members, others: 0 }
}

fn stage(rollout: &Rollout) -> (u32, u64) {
    match &rollout.progress {
        Progress::Under(Under { stage: Some(stage), .. }) => (stage.number, stage.through),
        other => panic!("{other:?}"),
    }
}

use Standing::{Failing, Pending, Proven, Unfit};

#[test]
fn it_begins_when_it_is_known_who_is_well_with_one_of_them() {
    let stages = stages("1%,50%,100%");
    let step = |members| step(&upgrade(None), &fleet(members), terms(&stages, NOW));
    assert_eq!(step(with_a(&[Pending, Proven, Proven])), None);
    assert_eq!(stage(&step(with_a(&[Proven, Proven, Proven])).unwrap()), (1, 10));
    assert_eq!(stage(&step(with_a(&[Failing, Unfit, Proven])).unwrap()), (1, 30), "who is not well tells nothing");
    assert_eq!(stage(&step(with_a(&[Failing, Failing])).unwrap()), (1, 10), "it may be the cure");
}

#[test]
fn a_stage_goes_on_when_all_in_it_are_proven_and_it_has_lasted() {
    let stages = stages("1%,10%,50%,100%");
    let one = upgrade(Some((1, 10)));
    let at = |standing, now| {
        let mut members = with_a(&[Proven; 4]);
        members[0] = member(10, "b", standing);
        step(&one, &fleet(members), terms(&stages, now))
    };
    assert_eq!(at(Proven, NOW + PAUSE - 1), None);
    assert_eq!(stage(&at(Proven, NOW + PAUSE).unwrap()), (3, 20), "10% of four is the one again");
    assert_eq!(at(Pending, NOW + 9 * PAUSE), None);
    let waiting = step(&one, &fleet(with_a(&[Pending, Proven])), terms(&stages, NOW + PAUSE));
    assert_eq!(waiting, None, "it lacks the image yet");
    let unfit = at(Unfit, NOW).unwrap();
    assert_eq!((stage(&unfit), unfit.since), ((1, 20), NOW), "another one has to tell");

    let last = upgrade(Some((4, u64::MAX)));
    let all: Vec<_> = (1..=4).map(|rank| member(rank, "b", if rank == 4 { Unfit } else { Proven })).collect();
    assert!(step(&last, &fleet(all), terms(&stages, NOW)).unwrap().is_done(), "nothing is left to pause for");
}

#[test]
fn it_halts_when_the_upgraded_do_worse_and_waits_when_all_do_badly() {
    let stages = stages("1%,100%");
    let one = upgrade(Some((1, 10)));
    let at = |others: Standing, confirmed| {
        let mut members = with_a(&[others; 4]);
        members[0] = member(10, "b", Failing);
        step(&one, &fleet(members), Terms { confirmed, ..terms(&stages, NOW + PAUSE) })
    };
    let halted = at(Proven, false).unwrap();
    assert_eq!(halted.halted(), Some("1 of 1 upgraded runtimes are not proven: ns/k10"));
    assert_eq!(stage(&halted), (1, 10));
    assert_eq!(at(Failing, false), None, "it is not the image");
    assert_eq!(stage(&at(Proven, true).unwrap()), (2, u64::MAX), "an operator wants it so");

    let members = || fleet(with_a(&[Proven; 4]));
    assert_eq!(step(&halted, &members(), terms(&stages, NOW + 9 * PAUSE)), None, "it does not go on by itself");
    let confirmed = Terms { confirmed: true, ..terms(&stages, NOW) };
    assert_eq!(step(&halted, &members(), confirmed).unwrap().halted(), None);

    let many = |failing: u64| {
        let standing = |rank| if rank <= failing { Failing } else { Proven };
        let members = (1..=400).map(|rank| member(rank, if rank <= 200 { "b" } else { "a" }, standing(rank))).collect();
        step(&upgrade(Some((1, 200))), &fleet(members), terms(&stages, NOW + PAUSE)).unwrap()
    };
    assert_eq!(stage(&many(3)), (2, u64::MAX), "less than 2% of them");
    let text = many(6).halted().unwrap().to_owned();
    assert_eq!(text, "6 of 200 upgraded runtimes are not proven: ns/k1, ns/k2, ns/k3, ns/k4, ns/k5, …");
}

#[test]
fn without_a_past_the_runtimes_tell() {
    let stages = stages("1%,100%");
    let unknown = Rollout::unknown("b", NOW);
    let step = |members, others| step(&unknown, &Fleet { members, others }, terms(&stages, NOW));
    assert!(step(Vec::new(), 0).unwrap().is_done(), "there are none");
    assert_eq!(step(Vec::new(), 3), None, "all are away");
    assert!(step(vec![member(1, "b", Proven), member(2, "b", Failing)], 0).unwrap().is_done());
    let not_looked_at = Member { image: None, ..member(1, "", Pending) };
    assert_eq!(step(vec![not_looked_at, member(2, "b", Proven)], 0), None);
    let previous = |rollout: Option<Rollout>| match rollout.unwrap().progress {
        Progress::Under(Under { previous, stage: Some(_), .. }) => previous,
        other => panic!("{other:?}"),
    };
    assert_eq!(previous(step(with_a(&[Proven, Proven]), 0)), Some("a".into()));
    assert_eq!(previous(step(vec![member(1, "a", Proven), member(2, "c", Proven)], 0)), None, "each keeps its own");
}

/// So many of these, of which the first ones are pending.
fn many(count: u64, pending: u64, image: &str) -> Vec<Member> {
    (1..=count).map(|rank| member(rank, image, if rank <= pending { Pending } else { Proven })).collect()
}

#[test]
fn a_few_who_are_awaited_hold_up_nobody() {
    let stages = stages("1%,50%,100%");
    let begun = |members| step(&upgrade(None), &fleet(members), terms(&stages, NOW));
    assert_eq!(stage(&begun(many(400, 1, "a")).unwrap()), (1, 4));
    assert_eq!(stage(&begun(many(400, 7, "a")).unwrap()), (1, 8), "one of them must be able to tell");
    assert_eq!(begun(many(400, 8, "a")), None, "2% of 400");

    let at = |number, through, pending| {
        let members = many(400, pending, "b");
        let members = members.into_iter().map(|it| if it.rank > through { member(it.rank, "a", Proven) } else { it });
        step(&upgrade(Some((number, through))), &fleet(members.collect()), terms(&stages, NOW + PAUSE))
    };
    assert_eq!(stage(&at(1, 4, 0).unwrap()), (2, 200));
    assert_eq!(at(1, 4, 1), None, "one of four may be a quarter of all");
    assert_eq!(stage(&at(2, 200, 3).unwrap()), (3, u64::MAX));
    assert_eq!(at(2, 200, 4), None, "2% of 200");
    assert!(at(3, u64::MAX, 1).unwrap().is_done());
    assert_eq!(at(3, u64::MAX, 8), None);

    // It lacks the image yet: it gets it in the end, as this one is everybody's.
    let mut members = many(400, 0, "b");
    members[0] = member(1, "a", Pending);
    let last = step(&upgrade(Some((3, u64::MAX))), &fleet(members), terms(&stages, NOW)).unwrap();
    assert!(last.is_done());
    assert_eq!(last.image_at_rank(1), Decided::Is("b".into()));

    // Whatever may fail, somebody has to be well before others get it.
    let all = Terms { max_failures: "100%".parse().unwrap(), ..terms(&stages, NOW + PAUSE) };
    let mut members = many(4, 1, "b");
    members[1] = member(2, "b", Failing);
    members[2..].iter_mut().for_each(|it| *it = member(it.rank, "a", Proven));
    assert_eq!(step(&upgrade(Some((1, 2))), &fleet(members), all), None);
}

#[test]
fn what_others_have_is_known_of_everybody_before_it_decides() {
    let stages = stages("1%,100%");
    let mut members = many(400, 1, "a");
    let begun = |rollout: &Rollout, members: &[Member]| step(rollout, &fleet(members.to_vec()), terms(&stages, NOW));
    let unknown = Rollout::unknown("b", NOW);
    assert!(begun(&unknown, &members).is_some());
    members[0].image = None;
    assert_eq!(begun(&unknown, &members), None, "nobody has looked");
    assert!(begun(&upgrade(None), &members).is_some(), "it is known what they are to have");
}

/// A runtime that is drawn.
#[derive(Clone, Debug)]
struct Drawn {
    rank: u64,
    fails: bool,
    /// Looks until it gets an image that it is to have.
    slow: u8,
}

fn drawn(most: usize) -> impl Strategy<Value = Vec<Drawn>> {
    let one = (any::<u64>(), prop::bool::weighted(0.1), 0u8..4);
    let one = one.prop_map(|(rank, fails, slow)| Drawn { rank, fails, slow });
    prop::collection::vec(one, 1..most)
}

fn any_stages() -> impl Strategy<Value = Stages> {
    prop::collection::btree_set(1u16..100, 0..4).prop_map(|shares| {
        let texts = shares.iter().map(|share| format!("{share}%,"));
        stages(&format!("{}100%", texts.collect::<String>()))
    })
}

/// Runs an upgrade of runtimes that are all well at first, until nothing moves any more; looks at it after each step.
fn run(fleet: &[Drawn], stages: &Stages, mut look: impl FnMut(&Rollout, usize, i64)) -> Rollout {
    let mut members: Vec<_> = fleet.iter().map(|drawn| member(drawn.rank, "a", Proven)).collect();
    let mut slow: Vec<_> = fleet.iter().map(|drawn| drawn.slow).collect();
    let mut rollout = Rollout { since: NOW, ..upgrade(None) };
    for tick in 0..200 {
        let now = NOW + tick * PAUSE / 4;
        for ((member, drawn), slow) in members.iter_mut().zip(fleet).zip(&mut slow) {
            let gets = rollout.image_at_rank(member.rank) == Decided::Is("b".into());
            let has = member.image.as_deref() == Some("b");
            member.standing = match (gets, has, *slow) {
                (false, false, _) => Proven,
                (false, true, _) => panic!("nobody goes back"),
                (true, false, 0) => {
                    member.image = Some("b".into());
                    Pending
                }
                (true, false, _) => {
                    *slow -= 1;
                    Pending
                }
                (true, true, _) if drawn.fails => Failing,
                (true, true, _) => Proven,
            };
        }
        let fleet = Fleet { members: members.clone(), others: 0 };
        if let Some(next) = step(&rollout, &fleet, terms(stages, now)) {
            rollout = next;
        }
        let upgraded = members.iter().filter(|member| member.image.as_deref() == Some("b")).count();
        look(&rollout, upgraded, now);
    }
    rollout
}

proptest! {
    #[test]
    fn no_stage_has_more_than_its_share_or_less_than_its_pause(fleet in drawn(80), stages in any_stages()) {
        let mut before: Option<(u32, i64)> = None;
        run(&fleet, &stages, |rollout, upgraded, now| {
            let Progress::Under(Under { stage: Some(stage), halted, .. }) = &rollout.progress else { return };
            let (_, share) = stages.from(stage.number).next().unwrap();
            assert!(upgraded <= share.floor_of(fleet.len()), "{upgraded} of {} in {stage:?}", fleet.len());
            if let Some((number, since)) = before {
                assert!(stage.number >= number);
                assert!(stage.number == number || now >= since + PAUSE);
            }
            if halted.is_none() && before.is_none_or(|(number, _)| number < stage.number) {
                before = Some((stage.number, now));
            }
        });
    }

    #[test]
    fn what_is_good_reaches_everybody(mut fleet in drawn(80), stages in any_stages()) {
        fleet.iter_mut().for_each(|drawn| drawn.fails = false);
        prop_assert!(run(&fleet, &stages, |_, _, _| ()).is_done());
    }

    #[test]
    fn what_is_bad_reaches_nobody_after_the_first_stage(mut fleet in drawn(80), stages in any_stages()) {
        fleet.iter_mut().for_each(|drawn| drawn.fails = true);
        let (_, first) = stages.from(1).next().unwrap();
        let end = run(&fleet, &stages, |_, upgraded, _| assert!(upgraded <= first.floor_of(fleet.len())));
        prop_assert!(end.halted().is_some());
    }

    #[test]
    fn a_halt_moves_nobody(fleet in drawn(80), stages in any_stages()) {
        let mut halted: Option<(Rollout, usize)> = None;
        run(&fleet, &stages, |rollout, upgraded, _| {
            if rollout.halted().is_some() {
                let (first, before) = halted.get_or_insert((rollout.clone(), upgraded));
                // Who was to get it when it halted may still have got it.
                assert!(rollout == first && upgraded >= *before);
                let through = stage(first).1;
                assert!(upgraded <= fleet.iter().filter(|drawn| drawn.rank <= through).count());
            }
        });
    }
}
