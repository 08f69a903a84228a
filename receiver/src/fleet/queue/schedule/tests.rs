use proptest::prelude::*;

use super::*;
use crate::fleet::queue::Drift;

const S: Duration = Duration::from_secs(1);

fn kyma() -> Works {
    Works::of(&[Work::Kyma])
}

fn catalog() -> Works {
    Works::of(&[Work::Catalog])
}

fn wanted(priority: Priority) -> Wanted {
    Wanted::new(kyma(), priority)
}

fn queue(keys: u32, slots: usize) -> (Queue<u32>, Instant) {
    let mut queue = Queue::new(slots, 1);
    (0..keys).for_each(|key| queue.insert(key));
    (queue, Instant::now())
}

fn keys(queue: &mut Queue<u32>, now: Instant) -> Vec<u32> {
    std::iter::from_fn(|| queue.take(now).map(|(key, _)| key)).collect()
}

#[test]
fn each_is_in_work_at_most_once_and_what_comes_meanwhile_follows() {
    let (mut queue, now) = queue(1, 4);
    queue.want(&0, wanted(Priority::User), now);
    queue.want(&0, Wanted::new(catalog(), Priority::Verification), now);
    let (key, job) = queue.take(now).unwrap();
    assert_eq!((key, job.works, job.priority), (0, kyma() | catalog(), Priority::User));
    queue.want(&0, wanted(Priority::Catalog), now);
    assert!(queue.take(now).is_none() && queue.in_work(&0) && !queue.has_ready());
    queue.finish(&0, &job, &Outcome::ended(job.works), now);
    assert_eq!(queue.take(now).unwrap().1, wanted(Priority::Catalog));
}

#[test]
fn a_pause_that_ends_while_its_pass_is_in_work_leaves_nothing_parked() {
    let (mut queue, now) = queue(1, 4);
    let whole = Wanted { drift: Drift::All, ..Wanted::new(kyma() | catalog(), Priority::User) };
    queue.want(&0, whole.clone(), now);
    let (_, job) = queue.take(now).unwrap();
    // The label goes after the pass has read it: one wake, of which the pass knows nothing.
    queue.want(&0, wanted(Priority::User), now);
    queue.finish(&0, &job, &Outcome::default(), now);
    let (_, next) = queue.take(now).unwrap();
    assert_eq!((next.works, &next.drift), (whole.works, &Drift::All));
    // All are unpaused while it runs.
    queue.unpark_all(now);
    queue.finish(&0, &next, &Outcome::default(), now);
    let (_, last) = queue.take(now).unwrap();
    assert_eq!((last.works, &last.drift), (whole.works, &Drift::All));
    // Nobody wakes it now: it was paused all the time.
    queue.finish(&0, &last, &Outcome::default(), now);
    assert!(queue.take(now).is_none() && queue.parked(&0) == whole.works);
}

#[test]
fn what_is_put_off_has_a_backoff_of_its_own_and_holds_up_nothing_else() {
    let (mut queue, mut now) = queue(1, 4);
    let mut longest = Duration::ZERO;
    for _ in 0..20 {
        queue.want(&0, Wanted::new(kyma() | catalog(), Priority::User), now);
        let (_, job) = queue.take(now).unwrap();
        let outcome = Outcome { put_off: catalog(), class: Some(Class::Refused), ..Outcome::ended(kyma()) };
        assert_eq!(queue.finish(&0, &job, &outcome, now), None);
        assert!(queue.parked(&0).is_empty() && queue.failures(&0) == 0);
        queue.want(&0, wanted(Priority::User), now);
        let (_, other) = queue.take(now).unwrap();
        assert_eq!(other.works, kyma(), "it does not wait");
        queue.finish(&0, &other, &Outcome::ended(kyma()), now);
        let due = queue.earliest().unwrap();
        longest = longest.max(due - now);
        now = due;
        let (_, again) = queue.take(now).unwrap();
        assert_eq!((again.works, again.priority), (catalog(), Priority::Catalog));
        queue.finish(
            &0,
            &again,
            &Outcome { put_off: catalog(), class: Some(Class::Refused), ..Outcome::default() },
            now,
        );
    }
    assert!(longest > 30 * S, "{longest:?}");
    queue.want(&0, Wanted::new(catalog(), Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    queue.finish(&0, &job, &Outcome::ended(catalog()), now);
    assert_eq!(queue.earliest(), None, "it is well again");
    queue.want(&0, Wanted::new(catalog(), Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    queue.finish(&0, &job, &Outcome { put_off: catalog(), class: Some(Class::Refused), ..Outcome::default() }, now);
    assert!(queue.earliest().unwrap() <= now + S, "and begins anew");
}

#[test]
fn those_of_one_priority_go_in_turn_and_a_more_urgent_want_moves_one_up() {
    let (mut queue, now) = queue(4, 4);
    for key in [2, 0, 1, 2] {
        queue.want(&key, wanted(Priority::Catalog), now);
    }
    queue.want(&3, wanted(Priority::Verification), now);
    queue.want(&1, wanted(Priority::User), now);
    assert_eq!(keys(&mut queue, now), [1, 2, 0, 3]);
}

#[test]
fn lower_priorities_have_a_share() {
    let (mut queue, now) = queue(1_000, 4);
    for key in 0..1_000 {
        let priority = [Priority::User, Priority::Catalog, Priority::Verification][key as usize % 3];
        queue.want(&key, wanted(priority), now);
    }
    let taken: Vec<_> = (0..80).map(|_| queue.take(now).unwrap().1.priority).collect();
    for chunk in taken.chunks(8) {
        let count = |priority| chunk.iter().filter(|taken| **taken == priority).count();
        assert_eq!((count(Priority::User), count(Priority::Catalog), count(Priority::Verification)), (6, 1, 1));
    }
}

#[test]
fn runtimes_that_could_not_be_reached_have_a_quarter_of_the_slots() {
    let (mut queue, start) = queue(20, 8);
    for key in 0..10 {
        queue.want(&key, wanted(Priority::User), start);
        let (key, job) = queue.take(start).unwrap();
        queue.finish(&key, &job, &Outcome::failed(kyma(), Class::Transport), start);
    }
    let now = start + 10 * S;
    (10..20).for_each(|key| queue.want(&key, wanted(Priority::User), now));
    let taken = keys(&mut queue, now);
    assert_eq!(taken.iter().filter(|key| **key < 10).count(), 2);
    assert_eq!(taken.iter().filter(|key| **key >= 10).count(), 10);
    assert!(!queue.has_ready());
    let slow = *taken.iter().find(|key| **key < 10).unwrap();
    queue.finish(&slow, &wanted(Priority::User), &Outcome::ended(kyma()), now);
    assert_eq!(keys(&mut queue, now).len(), 1, "one ended, one more goes");
    queue.want(&slow, wanted(Priority::User), now);
    assert_eq!(keys(&mut queue, now), [slow], "a success leaves the lane");
}

#[test]
fn runtimes_that_answer_slowly_have_a_quarter_of_the_slots_and_more_time() {
    let (mut queue, start) = queue(20, 8);
    for key in 0..10 {
        queue.want(&key, wanted(Priority::User), start);
        let (key, job) = queue.take(start).unwrap();
        assert_eq!(queue.patience(&key), PATIENCE);
        // It ends well, but late.
        queue.finish(&key, &job, &Outcome::ended(job.works), start + SLOW);
    }
    let now = start + SLOW;
    (0..20).for_each(|key| queue.want(&key, wanted(Priority::User), now));
    let taken = keys(&mut queue, now);
    let (slow, others): (Vec<_>, Vec<_>) = taken.into_iter().partition(|key| *key < 10);
    assert_eq!((slow.len(), others.len()), (2, 10));
    assert_eq!(queue.patience(&slow[0]), PATIENCE_WITH_SLOW);
    assert_eq!(queue.patience(&others[0]), PATIENCE);
    queue.finish(&slow[0], &wanted(Priority::User), &Outcome::ended(kyma()), now + S);
    queue.want(&slow[0], wanted(Priority::User), now + S);
    assert_eq!(
        keys(&mut queue, now + S).len(),
        2,
        "whoever is quick again leaves the lane, and its place is another's"
    );
}

#[test]
fn failures_wait_longer_each_time_and_a_success_forgets_them() {
    let (mut queue, mut now) = queue(1, 4);
    queue.want(&0, wanted(Priority::Catalog), now);
    for failures in 1..12u32 {
        let (_, job) = queue.take(now).unwrap();
        let wait = queue.finish(&0, &job, &Outcome::failed(kyma(), Class::Ours), now).unwrap();
        assert!(wait <= (S * 2u32.pow(failures - 1)).min(60 * S));
        assert_eq!(queue.earliest(), Some(now + wait));
        queue.want(&0, Wanted::new(catalog(), Priority::Catalog), now);
        assert!(queue.take(now).is_none(), "less urgent wants do not end a backoff");
        now += wait;
    }
    let (_, job) = queue.take(now).unwrap();
    assert_eq!(job.works, kyma() | catalog());
    assert_eq!(queue.finish(&0, &job, &Outcome::ended(job.works), now), None);
    queue.want(&0, wanted(Priority::Catalog), now);
    let (_, job) = queue.take(now).unwrap();
    assert!(queue.finish(&0, &job, &Outcome::failed(kyma(), Class::Ours), now).unwrap() <= S);
}

#[test]
fn a_users_change_of_one_in_backoff_runs_once_in_five_seconds() {
    let (mut queue, mut now) = queue(1, 4);
    let minute = Outcome { again_in: Some(60 * S), ..Outcome::failed(kyma(), Class::User) };
    queue.want(&0, wanted(Priority::Catalog), now);
    let (_, job) = queue.take(now).unwrap();
    assert_eq!(queue.finish(&0, &job, &minute, now), Some(60 * S));
    for _ in 0..3 {
        for _ in 0..4 {
            queue.want(&0, wanted(Priority::User), now + S);
            assert!(queue.take(now + USER_SPACING - S).is_none());
        }
        now += USER_SPACING;
        let (_, job) = queue.take(now).unwrap();
        assert_eq!(queue.finish(&0, &job, &minute, now), Some(60 * S));
    }
    queue.want(&0, wanted(Priority::User), now + 20 * S);
    let (_, job) = queue.take(now + 20 * S).unwrap();
    queue.want(&0, wanted(Priority::User), now + 21 * S);
    let wait = queue.finish(&0, &job, &minute, now + 22 * S);
    assert_eq!(wait, Some(USER_SPACING), "it came while the failing pass ran");
}

#[test]
fn what_was_paused_waits_for_any_wake_with_its_drift() {
    let (mut queue, now) = queue(1, 4);
    queue.want(&0, Wanted { works: kyma() | catalog(), priority: Priority::User, drift: Drift::All }, now);
    let (_, job) = queue.take(now).unwrap();
    queue.finish(&0, &job, &Outcome::ended(kyma()), now);
    assert!(queue.take(now + 3_600 * S).is_none());
    queue.want(&0, wanted(Priority::Verification), now);
    let (_, job) = queue.take(now).unwrap();
    assert_eq!(job, Wanted { works: kyma() | catalog(), priority: Priority::Verification, drift: Drift::All });
}

#[test]
fn later_wants_come_in_time_and_merge() {
    let (mut queue, now) = queue(1, 4);
    queue.want_later(&0, Later::Restart, now + 20 * S, wanted(Priority::Catalog), now);
    queue.want_later(&0, Later::Again, now + 5 * S, Wanted::new(catalog(), Priority::Verification), now);
    assert_eq!(queue.earliest(), Some(now + 5 * S));
    let (_, job) = queue.take(now + 5 * S).unwrap();
    assert_eq!(job.works, catalog());
    let again = Outcome { again_in: Some(7 * S), ..Outcome::ended(job.works) };
    queue.finish(&0, &job, &again, now + 30 * S);
    let (_, job) = queue.take(now + 30 * S).unwrap();
    assert_eq!(job, wanted(Priority::Catalog), "it fell due while another pass ran");
    queue.finish(&0, &job, &Outcome::ended(job.works), now + 30 * S);
    assert_eq!(queue.earliest(), Some(now + 37 * S));
}

#[test]
fn a_turn_comes_whatever_failed_besides() {
    let (mut queue, now) = queue(1, 4);
    queue.want(&0, Wanted::new(kyma() | catalog(), Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    let failed = Outcome { failed: catalog(), class: Some(Class::Ours), turn: Some(60 * S), ..Outcome::ended(kyma()) };
    let wait = queue.finish(&0, &job, &failed, now).unwrap();
    let (_, job) = queue.take(now + wait).unwrap();
    assert_eq!(job.works, catalog());
    queue.finish(&0, &job, &Outcome::ended(catalog()), now + wait);
    assert!(queue.take(now + 59 * S).is_none());
    assert_eq!(queue.take(now + 60 * S).unwrap().1, wanted(Priority::Catalog));
}

#[test]
fn a_removed_one_is_not_worked_on_twice_when_it_returns() {
    let (mut queue, now) = queue(1, 4);
    queue.want(&0, wanted(Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    queue.want(&0, wanted(Priority::User), now);
    queue.remove(&0);
    queue.want(&0, wanted(Priority::User), now);
    queue.insert(0);
    assert!(queue.wanted(&0).is_empty());
    queue.want(&0, wanted(Priority::User), now);
    assert!(queue.take(now).is_none());
    queue.finish(&0, &job, &Outcome::ended(job.works), now);
    assert_eq!(keys(&mut queue, now), [0]);
    queue.remove(&0);
    queue.finish(&0, &job, &Outcome::failed(job.works, Class::Ours), now);
    assert!(queue.entries.is_empty() && queue.earliest().is_none() && queue.running() == 0);
}

#[derive(Clone, Debug)]
enum Step {
    Want(u32, Priority),
    Later(u32, u64),
    Take,
    Finish(usize, u8),
    Insert(u32),
    Remove(u32),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let priority = prop_oneof![Just(Priority::User), Just(Priority::Catalog), Just(Priority::Verification)];
    prop_oneof![
        4 => (0u32..5, priority).prop_map(|(key, priority)| Step::Want(key, priority)),
        1 => (0u32..5, 0u64..9).prop_map(|(key, after)| Step::Later(key, after)),
        4 => Just(Step::Take),
        4 => (0usize..5, 0u8..4).prop_map(|(at, how)| Step::Finish(at, how)),
        1 => (0u32..5).prop_map(Step::Insert),
        1 => (0u32..5).prop_map(Step::Remove),
        2 => (0u64..9).prop_map(Step::Pass),
    ]
}

proptest! {
    /// Whatever happens: nobody is in work twice, every entry stands where it says, and nothing that is wanted is forgotten.
    #[test]
    fn the_queue_holds_together(steps in prop::collection::vec(step(), 1..200)) {
        let (mut queue, mut now) = queue(5, 4);
        let mut work: Vec<(u32, Wanted)> = Vec::new();
        for step in steps {
            match step {
                Step::Want(key, priority) => queue.want(&key, wanted(priority), now),
                Step::Later(key, after) => queue.want_later(&key, Later::Again, now + S * after as u32, wanted(Priority::Catalog), now),
                Step::Take => {
                    if let Some((key, wanted)) = queue.take(now) {
                        prop_assert!(work.iter().all(|(other, _)| *other != key));
                        work.push((key, wanted));
                    }
                }
                Step::Finish(at, how) if at < work.len() => {
                    let (key, wanted) = work.remove(at);
                    let outcome = match how {
                        0 => Outcome::failed(wanted.works, Class::Transport),
                        1 => Outcome::default(),
                        2 => Outcome { again_in: Some(S), ..Outcome::ended(wanted.works) },
                        3 => Outcome { put_off: wanted.works, ..Outcome::default() },
                        _ => Outcome::ended(wanted.works),
                    };
                    queue.finish(&key, &wanted, &outcome, now);
                }
                Step::Finish(..) => {}
                Step::Insert(key) => queue.insert(key),
                Step::Remove(key) => queue.remove(&key),
                Step::Pass(seconds) => now += S * seconds as u32,
            }
            prop_assert_eq!(queue.running(), work.len());
            let placed: usize = queue.ready.iter().flatten().map(BTreeMap::len).sum::<usize>() + queue.delayed.len();
            let idle = queue.entries.values().filter(|entry| matches!(entry.place, Place::Idle)).count();
            prop_assert_eq!(placed + idle, queue.entries.len());
            for entry in queue.entries.values().filter(|entry| matches!(entry.place, Place::Idle)) {
                let nothing = entry.wanted.is_none() && entry.later.iter().all(Option::is_none);
                prop_assert!(entry.running.is_some() || nothing);
            }
        }
        for (key, wanted) in work {
            queue.finish(&key, &wanted, &Outcome::ended(wanted.works), now);
        }
        now += 3_600 * S;
        while let Some((key, wanted)) = queue.take(now) {
            queue.finish(&key, &wanted, &Outcome::ended(wanted.works), now);
        }
        prop_assert!(queue.delayed.is_empty());
    }
}
