//! Tests of single steps with fixed runtimes, and of whole rollouts under random schedules.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;
use tidewatch_api::{ModuleReleaseMeta, key::KymaKey, names::annotation};
use tokio::time::Instant;

use super::*;
use crate::{
    catalog::{
        ChannelTarget, RolloutMark, VisibilityLabels,
        rollout::{RolloutFlags, RolloutKey, RolloutPolicy},
    },
    module_rollout::members::{Observation, Times},
};

const NOW: i64 = 1_800_000_000;
const PAUSE: i64 = 100;
/// Rank of the first runtime of the rings.
const FIRST: u64 = LAST_FIRST + 1;

use Standing::{Blocked, Failing, Lost, Proven, Unfit, Upgrading, Waiting};

const WAITING: Standing = Waiting { healthy: true };

fn policy(rings: &str, max_failures: &str) -> RolloutPolicy {
    let meta: ModuleReleaseMeta = serde_json::from_value(json!({
        "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta", "spec": {"moduleName": "keda"},
        "metadata": {"name": "keda", "annotations": {
            annotation::ROLLOUT_RINGS: rings, annotation::ROLLOUT_PAUSE: PAUSE.to_string(),
            annotation::ROLLOUT_DEADLINE: "30", annotation::ROLLOUT_MAX_FAILURES: max_failures,
        }},
    }))
    .unwrap();
    RolloutPolicy::of(&meta, &RolloutFlags::default()).unwrap().unwrap()
}

fn member(n: u64, standing: Standing) -> Member {
    Member { kyma: KymaKey::new("ns", format!("k{n}")), uid: format!("u{n:03}"), rank: FIRST + n, standing }
}

/// Runtimes in their order, by standing.
fn members(groups: &[(usize, Standing)]) -> Vec<Member> {
    let all = groups.iter().flat_map(|(count, standing)| std::iter::repeat_n(*standing, *count));
    (0..).zip(all).map(|(n, standing)| member(n, standing)).collect()
}

fn target(version: &str, since: i64) -> ChannelTarget {
    let labels = VisibilityLabels::default();
    ChannelTarget { version: version.to_owned(), labels, since: Some(since), from: Some("1.0.0".to_owned()) }
}

fn key() -> RolloutKey {
    RolloutKey { module: "keda".to_owned(), channel: Some("fast".to_owned()) }
}

/// Rollout in a ring that contains this number of runtimes.
fn rollout(ring: Option<(u32, u64)>) -> Rollout {
    let mut rollout = Rollout::of_move(&key(), None, &target("1.1.0", NOW), false);
    let ring = ring.map(|(number, count)| Ring { number, through: FIRST + count - 1 });
    rollout.progress = Some(Progress { ring, since: NOW, ..Progress::default() });
    rollout
}

fn last_ring() -> Rollout {
    let ring = Some(Ring { number: 2, through: u64::MAX });
    rollout(None).with(Some(Progress { ring, since: NOW, ..Progress::default() }))
}

fn at(rollout: &Rollout, members: &[Member], policy: &RolloutPolicy, now: i64) -> Step {
    step(rollout, members, &BTreeSet::new(), Criteria { rules: &policy.rules, is_confirmed: false, now })
}

fn progress(step: &Step) -> Progress {
    step.next.as_ref().expect("a next state").progress.clone().expect("progress")
}

#[test]
fn first_ring_is_that_of_the_first_runtimes_or_of_the_first_share() {
    let policy = policy("10%,100%", "10%");
    let mut all = members(&[(40, WAITING)]);
    let first = at(&rollout(None), &all, &policy, NOW + 5);
    assert_eq!(progress(&first).ring, Some(Ring { number: 1, through: FIRST + 3 }));
    assert_eq!((progress(&first).since, first.admitted.len()), (NOW + 5, 0), "it is stored first");
    all[7].rank = 7;
    let first = at(&rollout(None), &all, &policy, NOW);
    assert_eq!(progress(&first).ring, Some(Ring { number: 0, through: LAST_FIRST }));
    let none = at(&rollout(None), &[], &policy, NOW);
    assert_eq!(none.next.unwrap().progress, None, "no runtime follows the channel");
}

#[test]
fn as_many_runtimes_are_upgraded_at_once_as_may_fail() {
    let policy = policy("50%,100%", "10%");
    let admitted = |groups: &[(usize, Standing)]| {
        let step = at(&rollout(Some((1, 20))), &members(groups), &policy, NOW);
        (step.next.is_none(), step.admitted.into_iter().collect::<Vec<_>>().len())
    };
    // Four of forty may fail.
    assert_eq!(admitted(&[(40, WAITING)]), (true, 4));
    assert_eq!(admitted(&[(3, Upgrading), (37, WAITING)]), (true, 1));
    assert_eq!(admitted(&[(2, Failing), (1, Upgrading), (9, Proven), (28, WAITING)]), (true, 1));
    assert_eq!(admitted(&[(3, Failing), (1, Upgrading), (36, WAITING)]), (true, 0));
    assert_eq!(admitted(&[(3, Lost), (37, WAITING)]), (true, 1), "they may have failed");
    assert_eq!(admitted(&[(6, Waiting { healthy: false }), (34, WAITING)]), (true, 10), "those cannot be harmed");
    let unhealthy = [(6, WAITING), (6, Waiting { healthy: false }), (28, WAITING)];
    assert_eq!(admitted(&unhealthy), (true, 10), "nor do they wait behind those without a place");
    assert_eq!(admitted(&[(17, Proven), (23, WAITING)]), (true, 3), "the others are outside the ring");
    let blocked = Blocked(Block::Window);
    assert_eq!(admitted(&[(2, blocked), (38, WAITING)]), (true, 4), "a window opens later");
}

#[test]
fn admitted_runtimes_keep_their_place() {
    let policy = policy("50%,100%", "5%");
    let all = members(&[(40, WAITING)]);
    let before = BTreeSet::from(["u009".to_owned()]);
    let criteria = Criteria { rules: &policy.rules, is_confirmed: false, now: NOW };
    let step = step(&rollout(Some((1, 20))), &all, &before, criteria);
    assert_eq!(step.admitted, ["u000", "u009"].map(str::to_owned).into());
}

#[test]
fn ring_ends_with_evidence_after_the_pause() {
    let policy = policy("10%,50%,100%", "10%");
    let next = |groups: &[(usize, Standing)], now: i64| {
        let step = at(&rollout(Some((1, 4))), &members(groups), &policy, now);
        (step.next.and_then(|next| next.progress?.ring), step.waits_for)
    };
    let second = Some(Ring { number: 2, through: FIRST + 19 });
    let proven = [(4, Proven), (36, WAITING)];
    assert_eq!(next(&proven, NOW + PAUSE), (second, None));
    let (none, waits) = next(&proven, NOW + PAUSE - 1);
    assert!(none.is_none() && waits.unwrap().starts_with("the end of the pause at 2027-01-15T"));
    assert_eq!(next(&[(3, Proven), (1, Upgrading), (36, WAITING)], NOW + PAUSE), (None, None));
    let blocked = [(2, Proven), (2, Blocked(Block::Access)), (36, WAITING)];
    assert_eq!(next(&blocked, NOW + PAUSE), (second, None), "they do not hold up the others");
    let no_evidence = [(2, Unfit), (2, Blocked(Block::Paused)), (3, Blocked(Block::Late)), (33, WAITING)];
    assert_eq!(next(&no_evidence, NOW), (Some(Ring { number: 1, through: FIRST + 7 }), None), "the ring is extended");
    let (none, waits) = next(&[(2, Unfit), (30, Blocked(Block::Window)), (8, Blocked(Block::Access))], NOW);
    assert_eq!(none, None);
    assert_eq!(waits.unwrap(), "runtimes: 8 that cannot be reached, 30 that wait for a maintenance window");
    let lost = at(&rollout(Some((1, 20))), &members(&[(4, Lost), (36, WAITING)]), &policy, NOW);
    assert_eq!(
        (lost.next, lost.waits_for.unwrap().as_str()),
        (None, "runtimes: 4 upgraded ones that cannot be reached")
    );
}

#[test]
fn rollout_ends_once_every_runtime_has_the_version() {
    let policy = policy("10%,100%", "10%");
    let last = |groups: &[(usize, Standing)]| at(&last_ring(), &members(groups), &policy, NOW);
    let ended = last(&[(36, Proven), (2, Unfit), (2, Failing)]);
    assert_eq!(ended.next.unwrap().progress, None);
    let waits = last(&[(36, Proven), (4, Blocked(Block::Paused))]);
    assert_eq!((waits.next, waits.waits_for.unwrap().as_str()), (None, "runtimes: 4 that are paused"));
}

#[test]
fn failures_halt_the_rollout_until_a_confirmation_that_permits_as_many_again() {
    let policy = policy("10%,100%", "10%");
    let failing = |count| members(&[(count, Failing), (4, Proven), (36 - count, WAITING)]);
    let halted = at(&last_ring(), &failing(4), &policy, NOW);
    assert_eq!(
        progress(&halted).halted.unwrap(),
        "4 of 8 upgraded runtimes are no longer healthy: ns/k0, ns/k1, ns/k2, ns/k3"
    );
    assert!(halted.admitted.is_empty());
    let halted = halted.next.unwrap();
    let waits = at(&halted, &failing(4), &policy, NOW + 9 * PAUSE);
    assert_eq!(waits.waits_for.unwrap(), format!("the confirmation {}-1", halted.change));
    assert!(waits.next.is_none() && waits.admitted.is_empty());
    let criteria = Criteria { rules: &policy.rules, is_confirmed: true, now: NOW + 7 };
    let resumed = step(&halted, &failing(4), &BTreeSet::new(), criteria).next.unwrap();
    let after = resumed.progress.clone().unwrap();
    assert_eq!((after.halted, after.confirmations, after.confirmed_failures, after.since), (None, 1, 4, NOW + 7));
    assert_eq!(at(&resumed, &failing(4), &policy, NOW).admitted.len(), 4);
    assert_eq!(at(&resumed, &failing(7), &policy, NOW).admitted.len(), 1);
    let again = at(&resumed, &failing(8), &policy, NOW).next.unwrap();
    assert_eq!(again.confirmation().unwrap(), format!("{}-2", again.change), "another halt needs another confirmation");
}

#[test]
fn halt_names_the_first_failing_runtimes() {
    let policy = policy("10%,100%", "10%");
    for (count, names) in [(5, "ns/k0, ns/k1, ns/k2, ns/k3, ns/k4"), (6, "ns/k0, ns/k1, ns/k2, ns/k3, ns/k4, …")] {
        let halted = at(&last_ring(), &members(&[(count, Failing), (40 - count, WAITING)]), &policy, NOW);
        let said = format!("{count} of {count} upgraded runtimes are no longer healthy: {names}");
        assert_eq!(progress(&halted).halted.unwrap(), said);
    }
}

#[test]
fn confirmation_covers_the_failures_at_the_halt_in_a_process_that_does_not_know_them() {
    let policy = policy("10%,100%", "10%");
    let halted = at(&last_ring(), &members(&[(4, Failing), (4, Proven), (32, WAITING)]), &policy, NOW).next.unwrap();
    // As after a restart: each runtime has the whole deadline again.
    let upgrading = members(&[(4, Upgrading), (4, Proven), (32, WAITING)]);
    let criteria = Criteria { rules: &policy.rules, is_confirmed: true, now: NOW + 7 };
    let resumed = step(&halted, &upgrading, &BTreeSet::new(), criteria).next.unwrap();
    assert_eq!(resumed.progress.as_ref().unwrap().confirmed_failures, 4);
    let failing = |count| members(&[(count, Failing), (4, Proven), (36 - count, WAITING)]);
    assert_eq!(at(&resumed, &failing(4), &policy, NOW + 8).admitted.len(), 4);
    assert!(progress(&at(&resumed, &failing(8), &policy, NOW + 8)).halted.is_some());
}

#[test]
fn small_ring_with_too_many_failures_halts_at_its_end() {
    // Twenty of a thousand may fail, and two in a hundred of those upgraded.
    let policy = policy("1%,100%", "2%");
    let ring = |groups: &[(usize, Standing)]| at(&rollout(Some((1, 10))), &members(groups), &policy, NOW);
    assert!(ring(&[(1, Failing), (8, Proven), (991, WAITING)]).next.is_none(), "one is not upgraded yet");
    let halted = ring(&[(1, Failing), (9, Proven), (990, WAITING)]);
    assert!(progress(&halted).halted.unwrap().starts_with("1 of 10 upgraded runtimes"));
    assert!(ring(&[(1, Unfit), (9, Proven), (990, WAITING)]).next.is_none(), "it was unhealthy before");
}

/// Runtime of a model.
#[derive(Clone, Debug)]
struct Model {
    is_first: bool,
    is_healthy: bool,
    /// The new version fails in it.
    fails: bool,
    /// Ticks from its admission to the upgrade, and from the upgrade to the result.
    slow: (u8, u8),
}

/// Disturbance of a schedule.
#[derive(Clone, Debug)]
enum Disturbance {
    /// Another receiver takes over, with the stored state only.
    Takeover,
    /// The write of the next state fails.
    FailedWrite,
    /// An operator confirms, if the rollout has halted.
    Confirm,
    /// A runtime cannot be reached, or can be again.
    Toggle(usize),
    /// The window of a runtime opens or closes.
    Window(usize),
    /// The channel moves back.
    Revert,
}

fn runtimes() -> impl Strategy<Value = Vec<Model>> {
    let one = (prop::bool::weighted(0.05), prop::bool::weighted(0.9), prop::bool::weighted(0.2), (0u8..4, 0u8..4));
    let one = one.prop_map(|(is_first, is_healthy, fails, slow)| Model { is_first, is_healthy, fails, slow });
    prop::collection::vec(one, 1..80)
}

fn schedule(reverts: bool) -> impl Strategy<Value = Vec<Option<Disturbance>>> {
    let disturbance = prop_oneof![
        2 => Just(Disturbance::Takeover),
        2 => Just(Disturbance::FailedWrite),
        2 => Just(Disturbance::Confirm),
        3 => (0usize..80).prop_map(Disturbance::Toggle),
        3 => (0usize..80).prop_map(Disturbance::Window),
        u32::from(reverts) => Just(Disturbance::Revert),
    ];
    prop::collection::vec(prop::option::weighted(0.4, disturbance), 0..60)
}

/// State of a runtime in a run.
#[derive(Clone, Debug)]
struct Run {
    version: &'static str,
    mark: Option<RolloutMark>,
    /// Ticks since the admission, or since the upgrade.
    age: u8,
    is_away: bool,
    is_window_closed: bool,
}

/// World of a run: the stored rollout, the runtimes, and the memory of the receiver.
struct World<'a> {
    models: &'a [Model],
    runs: Vec<Run>,
    stored: Rollout,
    times: Times,
    admitted: BTreeSet<String>,
    start: Instant,
    tick: u32,
    waits_for: Option<String>,
}

impl<'a> World<'a> {
    fn new(models: &'a [Model]) -> Self {
        let run = Run { version: "1.0.0", mark: None, age: 0, is_away: false, is_window_closed: false };
        Self {
            models,
            runs: vec![run; models.len()],
            stored: Rollout::of_move(&key(), None, &target("1.1.0", NOW), false),
            times: Times::default(),
            admitted: BTreeSet::new(),
            start: Instant::now(),
            tick: 0,
            waits_for: None,
        }
    }

    /// Number of runtimes that the move to the new version harms now.
    fn harmed(&self) -> usize {
        let is_harmed = |(model, run): &(&Model, &Run)| run.version == "1.1.0" && model.fails && model.is_healthy;
        self.models.iter().zip(&self.runs).filter(is_harmed).count()
    }

    fn members(&mut self) -> Vec<Member> {
        let now = self.start + Duration::from_secs(u64::from(self.tick) * 10);
        let mut members = Vec::new();
        for (n, (model, run)) in self.models.iter().zip(&self.runs).enumerate() {
            let kyma = KymaKey::new("ns", format!("k{n}"));
            let uid = format!("u{n}");
            let has_version = run.version == self.stored.version;
            let is_failed = run.version == "1.1.0" && model.fails;
            let is_settled = run.age >= model.slow.1;
            let block = run.is_away.then_some(Block::Access);
            let observation = Observation {
                has_version,
                mark: run.mark.clone(),
                is_synced: is_settled,
                is_healthy: if has_version && is_settled { !is_failed } else { model.is_healthy },
                is_error: has_version && is_settled && is_failed,
                is_skipped: false,
                block: block.or_else(|| (!has_version && run.is_window_closed).then_some(Block::Window)),
            };
            let change = self.stored.change.as_str();
            let is_admitted = self.admitted.contains(&uid);
            let deadline = Duration::from_secs(100);
            let standing = self.times.assess(&kyma, change, is_admitted, &observation, deadline, now);
            let rank = super::super::members::rank("keda", &self.stored.version, &uid, model.is_first);
            members.push(Member { kyma, uid, rank, standing });
        }
        members
    }

    /// One tick: a step, its write, and the reconciles that follow.
    fn tick(&mut self, policy: &RolloutPolicy, disturbance: Option<&Disturbance>) {
        self.tick += 1;
        let toggled = |runs: &mut Vec<Run>, n: usize, flag: fn(&mut Run) -> &mut bool| {
            if let Some(run) = runs.get_mut(n) {
                let flag = flag(run);
                *flag = !*flag;
            }
        };
        match disturbance {
            Some(Disturbance::Takeover) => (self.times, self.admitted) = (Times::default(), BTreeSet::new()),
            Some(Disturbance::Toggle(n)) => toggled(&mut self.runs, *n, |run| &mut run.is_away),
            Some(Disturbance::Window(n)) => toggled(&mut self.runs, *n, |run| &mut run.is_window_closed),
            Some(Disturbance::Revert) if self.stored.version == "1.1.0" => {
                let since = NOW + i64::from(self.tick);
                self.stored = Rollout::of_move(&key(), Some(&self.stored), &target("1.0.0", since), false);
                (self.times, self.admitted) = (Times::default(), BTreeSet::new());
            }
            _ => {}
        }
        let members = self.members();
        let is_confirmed = matches!(disturbance, Some(Disturbance::Confirm)) && self.stored.halted().is_some();
        let criteria = Criteria { rules: &policy.rules, is_confirmed, now: NOW + i64::from(self.tick) * 30 };
        let step = step(&self.stored, &members, &self.admitted, criteria);
        self.waits_for = step.waits_for;
        self.admitted = if self.stored.halted().is_some() { BTreeSet::new() } else { step.admitted };
        if let (Some(next), false) = (step.next, matches!(disturbance, Some(Disturbance::FailedWrite))) {
            self.stored = next;
        }
        self.reconcile();
    }

    /// The Kymas whose slot has come get the version.
    fn reconcile(&mut self) {
        let is_reverted =
            |mark: &Option<RolloutMark>| mark.as_ref().is_some_and(|mark| self.stored.reverts.contains(&mark.change));
        for (n, (model, run)) in self.models.iter().zip(&mut self.runs).enumerate() {
            let is_new = self.stored.version == "1.1.0";
            let has_version = (run.version == "1.1.0") == is_new;
            run.age = run.age.saturating_add(1);
            if has_version || run.is_away || run.is_window_closed {
                continue;
            }
            let is_admitted = self.stored.progress.is_none() || self.admitted.contains(&format!("u{n}"));
            if !is_admitted {
                run.age = 0;
            } else if run.age >= model.slow.0 && (is_new || is_reverted(&run.mark)) {
                run.version = if is_new { "1.1.0" } else { "1.0.0" };
                let change = self.stored.change.clone();
                run.mark = is_new.then_some(RolloutMark { change, healthy: model.is_healthy });
                run.age = 0;
            }
        }
    }
}

fn any_policy() -> impl Strategy<Value = RolloutPolicy> {
    let rings = prop::collection::btree_set(1u16..100, 0..4);
    (rings, 1u8..40).prop_map(|(shares, failures)| {
        let shares: String = shares.iter().map(|share| format!("{share}%,")).collect();
        policy(&format!("{shares}100%"), &format!("{failures}%"))
    })
}

proptest! {
    #[test]
    fn change_harms_no_more_runtimes_than_the_limit_and_each_confirmation_allow(
        models in runtimes(), policy in any_policy(), schedule in schedule(true),
    ) {
        let mut world = World::new(&models);
        let limit = policy.rules.max_failures.ceiling_of(models.len());
        let mut confirmations = 0;
        let quiet = std::iter::repeat_n(&None, 300);
        for disturbance in schedule.iter().chain(quiet) {
            world.tick(&policy, disturbance.as_ref());
            if let Some(progress) = &world.stored.progress {
                confirmations = confirmations.max(progress.confirmations as usize);
            }
            prop_assert!(world.harmed() <= limit * (1 + confirmations), "{:?}", world.stored);
        }
    }

    #[test]
    fn rollout_ends_or_states_what_it_waits_for(
        models in runtimes(), policy in any_policy(), schedule in schedule(true),
    ) {
        let mut world = World::new(&models);
        schedule.iter().for_each(|disturbance| world.tick(&policy, disturbance.as_ref()));
        // The confirmation of a halt lets it continue: in the end it has none left.
        for _ in 0..3_000 {
            world.tick(&policy, None);
            if world.stored.progress.is_none() || world.waits_for.is_some() && world.stored.halted().is_none() {
                let until_pause = world.waits_for.as_ref().is_some_and(|it| it.starts_with("the end of the pause"));
                if !until_pause {
                    break;
                }
            }
            if world.stored.halted().is_some() {
                world.tick(&policy, Some(&Disturbance::Confirm));
            }
        }
        // A move back after the end is a downgrade, which the Kymas refuse.
        let is_refused = world.stored.version == "1.0.0";
        let is_blocked = is_refused || world.runs.iter().any(|run| run.is_away || run.is_window_closed);
        let waits = world.waits_for.clone().unwrap_or_default();
        if world.stored.progress.is_some() {
            prop_assert!(is_blocked && waits.starts_with("runtimes: "), "{:?} {waits}", world.stored);
        } else {
            let version = world.stored.version.clone();
            let has = |run: &Run| run.version == version || run.is_away || run.is_window_closed;
            prop_assert!(world.runs.iter().all(has) || world.stored.version == "1.0.0");
        }
    }

    #[test]
    fn good_version_reaches_every_runtime_without_a_halt(
        mut models in runtimes(), policy in any_policy(), schedule in schedule(false),
    ) {
        models.iter_mut().for_each(|model| model.fails = false);
        let mut world = World::new(&models);
        for disturbance in &schedule {
            world.tick(&policy, disturbance.as_ref());
            prop_assert_eq!(world.stored.halted(), None);
        }
        world.runs.iter_mut().for_each(|run| (run.is_away, run.is_window_closed) = (false, false));
        for _ in 0..3_000 {
            world.tick(&policy, None);
            if world.stored.progress.is_none() {
                break;
            }
        }
        prop_assert!(world.runs.iter().all(|run| run.version == "1.1.0"), "{:?} {:?}", world.stored, world.waits_for);
    }

    #[test]
    fn move_back_returns_every_upgraded_runtime(models in runtimes(), policy in any_policy(), schedule in schedule(false)) {
        let mut world = World::new(&models);
        schedule.iter().for_each(|disturbance| world.tick(&policy, disturbance.as_ref()));
        prop_assume!(world.stored.progress.is_some());
        world.tick(&policy, Some(&Disturbance::Revert));
        world.runs.iter_mut().for_each(|run| (run.is_away, run.is_window_closed) = (false, false));
        (0..10).for_each(|_| world.tick(&policy, None));
        prop_assert!(world.runs.iter().all(|run| run.version == "1.0.0"));
    }
}
