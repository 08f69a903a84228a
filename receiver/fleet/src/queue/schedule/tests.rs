use proptest::prelude::*;
use tidewatch_contract::event::{Change, Object};

use super::*;
use crate::queue::Drift;

const S: Duration = Duration::from_secs(1);

fn kyma() -> WorkSet {
    WorkSet::of(&[Work::Kyma])
}

fn catalog() -> WorkSet {
    WorkSet::of(&[Work::Catalog])
}

fn queued(priority: Priority) -> QueuedWork {
    QueuedWork::new(kyma(), priority)
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
fn rest_delays_a_users_change_too_and_ends() {
    let mut queue = Queue::<&str>::new(4, 0);
    let start = Instant::now();
    queue.insert("a");
    queue.enqueue(&"a", QueuedWork::new(kyma(), Priority::User), start);
    let (key, taken) = queue.take(start).unwrap();
    let outcome = ReconcileOutcome { rest: Some(30 * S), ..ReconcileOutcome::ended(kyma()) };
    queue.finish(&key, &taken, &outcome, start);
    queue.enqueue(&"a", QueuedWork::new(kyma(), Priority::User), start);
    assert!(queue.take(start + 29 * S).is_none());
    assert_eq!(queue.earliest(), Some(start + 30 * S));
    let (key, taken) = queue.take(start + 30 * S).unwrap();
    queue.finish(&key, &taken, &ReconcileOutcome::ended(kyma()), start + 30 * S);
    queue.enqueue(&"a", QueuedWork::new(kyma(), Priority::User), start + 30 * S);
    assert!(queue.take(start + 30 * S).is_some());
}

#[test]
fn rest_holds_beyond_the_backoff_of_a_failure() {
    let (mut queue, now) = queue(1, 4);
    queue.enqueue(&0, queued(Priority::User), now);
    let (key, taken) = queue.take(now).unwrap();
    let outcome = ReconcileOutcome { rest: Some(30 * S), ..ReconcileOutcome::failed(kyma(), ErrorClass::Ours) };
    assert!(queue.finish(&key, &taken, &outcome, now).unwrap() <= S);
    assert!(queue.take(now + 29 * S).is_none());
    assert!(queue.take(now + 30 * S).is_some());
}

/// Or the report of our own write, which replaces the reported object, would end the retry.
#[test]
fn retry_has_another_cause_than_the_reports_of_the_failed_work() {
    let (mut queue, now) = queue(1, 4);
    let object = Object {
        subject: "/v1/configmaps/ns/a".parse().unwrap(),
        kind: "ConfigMap".into(),
        uid: String::new(),
        resource_version: "1".into(),
        generation: None,
        change: Change::Spec,
    };
    let drift = Drift::of(object).as_only_cause();
    queue.enqueue(&0, QueuedWork { drift: drift.clone(), ..QueuedWork::new(kyma(), Priority::User) }, now);
    let (key, taken) = queue.take(now).unwrap();
    assert_eq!(taken.drift, drift);
    queue.finish(&key, &taken, &ReconcileOutcome::failed(kyma(), ErrorClass::Refused), now);
    let (_, again) = queue.take(now + 3_600 * S).unwrap();
    assert_eq!(again.drift, drift.with_other_cause());
}

#[test]
fn end_of_one_deferred_kind_of_work_keeps_the_retry_of_another() {
    let (mut queue, now) = queue(1, 4);
    let both = kyma() | catalog();
    let deferring = |deferred: WorkSet, ended: WorkSet| ReconcileOutcome {
        deferred,
        class: Some(ErrorClass::Refused),
        ..ReconcileOutcome::ended(ended)
    };
    let mut change = |work: WorkSet, outcome: &ReconcileOutcome| {
        queue.enqueue(&0, QueuedWork::new(work, Priority::User), now);
        let (key, taken) = queue.take(now).unwrap();
        queue.finish(&key, &taken, outcome, now);
        queue.earliest()
    };
    assert!(change(both, &deferring(both, WorkSet::EMPTY)).is_some());
    assert!(change(kyma(), &ReconcileOutcome::ended(kyma())).is_some(), "the catalog is due");
    assert!(change(both, &deferring(catalog(), kyma())).is_some());
    let retry = change(kyma(), &ReconcileOutcome::ended(kyma())).expect("the catalog is due");
    assert_eq!(change(catalog(), &ReconcileOutcome::ended(catalog())), None);
    assert!(retry > now);
}

#[test]
fn work_enqueued_during_a_reconcile_follows_it() {
    let (mut queue, now) = queue(1, 4);
    queue.enqueue(&0, queued(Priority::User), now);
    queue.enqueue(&0, QueuedWork::new(catalog(), Priority::Verification), now);
    let (key, job) = queue.take(now).unwrap();
    assert_eq!((key, job.work, job.priority), (0, kyma() | catalog(), Priority::User));
    queue.enqueue(&0, queued(Priority::Catalog), now);
    assert!(queue.take(now).is_none() && queue.in_progress(&0) && !queue.has_ready());
    queue.finish(&0, &job, &ReconcileOutcome::ended(job.work), now);
    assert_eq!(queue.take(now).unwrap().1, queued(Priority::Catalog));
}

#[test]
fn follow_up_is_enqueued_at_once_at_the_same_priority() {
    let (mut queue, now) = queue(1, 4);
    queue.enqueue(&0, QueuedWork::new(WorkSet::STATUS, Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    let outcome = ReconcileOutcome { follow_up: kyma(), ..ReconcileOutcome::ended(job.work) };
    queue.finish(&0, &job, &outcome, now);
    let (_, next) = queue.take(now).unwrap();
    assert_eq!(next, queued(Priority::User));
    queue.finish(&0, &next, &ReconcileOutcome::ended(next.work), now);
    assert!(queue.take(now).is_none() && queue.parked(&0).is_empty());
}

#[test]
fn pause_that_ends_during_a_reconcile_leaves_nothing_parked() {
    let (mut queue, now) = queue(1, 4);
    let whole = QueuedWork { drift: Drift::All, ..QueuedWork::new(kyma() | catalog(), Priority::User) };
    queue.enqueue(&0, whole.clone(), now);
    let (_, job) = queue.take(now).unwrap();
    // The pause label is removed after the reconcile read it: one enqueue, unseen by the reconcile.
    queue.enqueue(&0, queued(Priority::User), now);
    queue.finish(&0, &job, &ReconcileOutcome::default(), now);
    let (_, next) = queue.take(now).unwrap();
    assert_eq!((next.work, &next.drift), (whole.work, &Drift::All));
    // All Kymas are unpaused while it runs.
    queue.unpark_all(now);
    queue.finish(&0, &next, &ReconcileOutcome::default(), now);
    let (_, last) = queue.take(now).unwrap();
    assert_eq!((last.work, &last.drift), (whole.work, &Drift::All));
    // Without another enqueue the work stays parked.
    queue.finish(&0, &last, &ReconcileOutcome::default(), now);
    assert!(queue.take(now).is_none() && queue.parked(&0) == whole.work);
}

#[test]
fn deferred_work_backs_off_without_delaying_other_work() {
    let (mut queue, mut now) = queue(1, 4);
    let mut longest = Duration::ZERO;
    for _ in 0..20 {
        queue.enqueue(&0, QueuedWork::new(kyma() | catalog(), Priority::User), now);
        let (_, job) = queue.take(now).unwrap();
        let outcome = ReconcileOutcome {
            deferred: catalog(),
            class: Some(ErrorClass::Refused),
            ..ReconcileOutcome::ended(kyma())
        };
        assert_eq!(queue.finish(&0, &job, &outcome, now), None);
        assert!(queue.parked(&0).is_empty() && queue.failures(&0) == 0);
        queue.enqueue(&0, queued(Priority::User), now);
        let (_, other) = queue.take(now).unwrap();
        assert_eq!(other.work, kyma(), "other work is not delayed");
        queue.finish(&0, &other, &ReconcileOutcome::ended(kyma()), now);
        let due = queue.earliest().unwrap();
        longest = longest.max(due - now);
        now = due;
        let (_, again) = queue.take(now).unwrap();
        assert_eq!((again.work, again.priority), (catalog(), Priority::Catalog));
        queue.finish(
            &0,
            &again,
            &ReconcileOutcome { deferred: catalog(), class: Some(ErrorClass::Refused), ..ReconcileOutcome::default() },
            now,
        );
    }
    assert!(longest > 30 * S, "{longest:?}");
    queue.enqueue(&0, QueuedWork::new(catalog(), Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    queue.finish(&0, &job, &ReconcileOutcome::ended(catalog()), now);
    assert_eq!(queue.earliest(), None, "a success ends the backoff");
    queue.enqueue(&0, QueuedWork::new(catalog(), Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    queue.finish(
        &0,
        &job,
        &ReconcileOutcome { deferred: catalog(), class: Some(ErrorClass::Refused), ..ReconcileOutcome::default() },
        now,
    );
    assert!(queue.earliest().unwrap() <= now + S, "and resets it");
}

#[test]
fn order_is_fifo_within_a_priority_and_follows_the_most_urgent() {
    let (mut queue, now) = queue(4, 4);
    for key in [2, 0, 1, 2] {
        queue.enqueue(&key, queued(Priority::Catalog), now);
    }
    queue.enqueue(&3, queued(Priority::Verification), now);
    queue.enqueue(&1, queued(Priority::User), now);
    assert_eq!(keys(&mut queue, now), [1, 2, 0, 3]);
}

#[test]
fn lower_priorities_have_a_guaranteed_share() {
    let (mut queue, now) = queue(1_000, 4);
    for key in 0..1_000 {
        let priority = [Priority::User, Priority::Catalog, Priority::Verification][key as usize % 3];
        queue.enqueue(&key, queued(priority), now);
    }
    let taken: Vec<_> = (0..80).map(|_| queue.take(now).unwrap().1.priority).collect();
    for chunk in taken.chunks(8) {
        let count = |priority| chunk.iter().filter(|taken| **taken == priority).count();
        assert_eq!((count(Priority::User), count(Priority::Catalog), count(Priority::Verification)), (6, 1, 1));
    }
}

#[test]
fn unreachable_runtimes_get_a_quarter_of_the_slots() {
    let (mut queue, start) = queue(20, 8);
    for key in 0..10 {
        queue.enqueue(&key, queued(Priority::User), start);
        let (key, job) = queue.take(start).unwrap();
        queue.finish(&key, &job, &ReconcileOutcome::failed(kyma(), ErrorClass::Transport), start);
    }
    let now = start + 10 * S;
    (10..20).for_each(|key| queue.enqueue(&key, queued(Priority::User), now));
    let taken = keys(&mut queue, now);
    assert_eq!(taken.iter().filter(|key| **key < 10).count(), 2);
    assert_eq!(taken.iter().filter(|key| **key >= 10).count(), 10);
    assert!(!queue.has_ready());
    let slow = *taken.iter().find(|key| **key < 10).unwrap();
    queue.finish(&slow, &queued(Priority::User), &ReconcileOutcome::ended(kyma()), now);
    assert_eq!(keys(&mut queue, now).len(), 1, "a freed slot is used");
    queue.enqueue(&slow, queued(Priority::User), now);
    assert_eq!(keys(&mut queue, now), [slow], "a success leaves the lane");
}

/// It says nothing about the runtime: a pause, for example.
#[test]
fn reconcile_without_a_result_leaves_the_runtime_in_its_lane() {
    let (mut queue, start) = queue(1, 4);
    queue.enqueue(&0, queued(Priority::User), start);
    let (_, job) = queue.take(start).unwrap();
    queue.finish(&0, &job, &ReconcileOutcome::failed(kyma(), ErrorClass::Transport), start);
    let now = start + 600 * S;
    let (_, job) = queue.take(now).unwrap();
    assert_eq!(queue.time_limit(&0), SLOW_TIME_LIMIT);
    queue.finish(&0, &job, &ReconcileOutcome::default(), now);
    queue.enqueue(&0, queued(Priority::User), now);
    queue.take(now).unwrap();
    assert_eq!(queue.time_limit(&0), SLOW_TIME_LIMIT);
}

#[test]
fn few_workers_serve_slow_runtimes_too() {
    for slots in 1..4 {
        let (mut queue, start) = queue(1, slots);
        queue.enqueue(&0, queued(Priority::User), start);
        let (_, job) = queue.take(start).unwrap();
        queue.finish(&0, &job, &ReconcileOutcome::failed(kyma(), ErrorClass::Transport), start);
        assert!(queue.take(start + 600 * S).is_some(), "{slots}");
    }
}

/// Thirty users change their Kymas all the time, and each reconcile takes a second. A hundred others change theirs every six
/// seconds; they wait only while the former have not used up their shares.
#[test]
fn busy_runtimes_do_not_make_others_wait() {
    const STEP: Duration = Duration::from_millis(100);
    let slots = 16;
    let hostile = 30;
    let others = 100;
    let (mut queue, start) = queue(hostile + others, slots);
    let mut running = Vec::<(Instant, u32, QueuedWork)>::new();
    let mut waits = Vec::new();
    let mut since: HashMap<u32, Instant> = HashMap::new();
    for step in 0..1_800 {
        let now = start + STEP * step;
        let (ended, rest) = running.into_iter().partition(|(end, ..)| *end <= now);
        running = rest;
        for (_, key, job) in ended {
            queue.finish(&key, &job, &ReconcileOutcome::ended(job.work), now);
        }
        (0..hostile).for_each(|key| queue.enqueue(&key, queued(Priority::User), now));
        for key in (hostile..hostile + others).filter(|key| key % 60 == step % 60) {
            queue.enqueue(&key, queued(Priority::User), now);
            since.insert(key, now);
        }
        while running.len() < slots {
            let Some((key, job)) = queue.take(now) else { break };
            let duration = if key < hostile { S } else { STEP };
            running.push((now + duration, key, job));
            if let Some(began) = since.remove(&key) {
                waits.push((step, now - began));
            }
        }
    }
    // 30 users use up 600 s with 16 workers in less than 50 s.
    let late: Vec<_> = waits.iter().filter(|(step, wait)| *step > 600 && *wait > 2 * STEP).collect();
    assert!(waits.len() > 2_900 && late.is_empty(), "{} changes, {} of them late: {late:?}", waits.len(), late.len());
    assert!(queue.busy() > 0);
}

#[test]
fn slow_runtimes_get_a_quarter_of_the_slots_and_a_longer_time_limit() {
    let (mut queue, start) = queue(20, 8);
    for key in 0..10 {
        queue.enqueue(&key, queued(Priority::User), start);
        let (key, job) = queue.take(start).unwrap();
        assert_eq!(queue.time_limit(&key), TIME_LIMIT);
        // It succeeds, but late.
        queue.finish(&key, &job, &ReconcileOutcome::ended(job.work), start + SLOW);
    }
    let now = start + SLOW;
    (0..20).for_each(|key| queue.enqueue(&key, queued(Priority::User), now));
    let taken = keys(&mut queue, now);
    let (slow, others): (Vec<_>, Vec<_>) = taken.into_iter().partition(|key| *key < 10);
    assert_eq!((slow.len(), others.len()), (2, 10));
    assert_eq!(queue.time_limit(&slow[0]), SLOW_TIME_LIMIT);
    assert_eq!(queue.time_limit(&others[0]), TIME_LIMIT);
    queue.finish(&slow[0], &queued(Priority::User), &ReconcileOutcome::ended(kyma()), now + S);
    queue.enqueue(&slow[0], queued(Priority::User), now + S);
    assert_eq!(keys(&mut queue, now + S).len(), 2, "a fast reconcile leaves the lane and frees a slot");
}

#[test]
fn backoff_grows_with_failures_and_a_success_resets_it() {
    let (mut queue, mut now) = queue(1, 4);
    queue.enqueue(&0, queued(Priority::Catalog), now);
    for failures in 1..12u32 {
        let (_, job) = queue.take(now).unwrap();
        let wait = queue.finish(&0, &job, &ReconcileOutcome::failed(kyma(), ErrorClass::Ours), now).unwrap();
        assert!(wait <= (S * 2u32.pow(failures - 1)).min(60 * S));
        assert_eq!(queue.earliest(), Some(now + wait));
        queue.enqueue(&0, QueuedWork::new(catalog(), Priority::Catalog), now);
        assert!(queue.take(now).is_none(), "less urgent work does not end a backoff");
        now += wait;
    }
    let (_, job) = queue.take(now).unwrap();
    assert_eq!(job.work, kyma() | catalog());
    assert_eq!(queue.finish(&0, &job, &ReconcileOutcome::ended(job.work), now), None);
    queue.enqueue(&0, queued(Priority::Catalog), now);
    let (_, job) = queue.take(now).unwrap();
    assert!(queue.finish(&0, &job, &ReconcileOutcome::failed(kyma(), ErrorClass::Ours), now).unwrap() <= S);
}

#[test]
fn user_change_shortens_a_backoff_to_five_seconds() {
    let (mut queue, mut now) = queue(1, 4);
    let minute = ReconcileOutcome { min_backoff: Some(60 * S), ..ReconcileOutcome::failed(kyma(), ErrorClass::User) };
    queue.enqueue(&0, queued(Priority::Catalog), now);
    let (_, job) = queue.take(now).unwrap();
    assert_eq!(queue.finish(&0, &job, &minute, now), Some(60 * S));
    for _ in 0..3 {
        for _ in 0..4 {
            queue.enqueue(&0, queued(Priority::User), now + S);
            assert!(queue.take(now + USER_SPACING - S).is_none());
        }
        now += USER_SPACING;
        let (_, job) = queue.take(now).unwrap();
        assert_eq!(queue.finish(&0, &job, &minute, now), Some(60 * S));
    }
    queue.enqueue(&0, queued(Priority::User), now + 20 * S);
    let (_, job) = queue.take(now + 20 * S).unwrap();
    queue.enqueue(&0, queued(Priority::User), now + 21 * S);
    let wait = queue.finish(&0, &job, &minute, now + 22 * S);
    assert_eq!(wait, Some(USER_SPACING), "it was enqueued while the failing reconcile ran");
}

#[test]
fn paused_work_resumes_with_the_next_enqueue_and_keeps_its_drift() {
    let (mut queue, now) = queue(1, 4);
    queue.enqueue(&0, QueuedWork { work: kyma() | catalog(), priority: Priority::User, drift: Drift::All }, now);
    let (_, job) = queue.take(now).unwrap();
    queue.finish(&0, &job, &ReconcileOutcome::ended(kyma()), now);
    assert!(queue.take(now + 3_600 * S).is_none());
    queue.enqueue(&0, queued(Priority::Verification), now);
    let (_, job) = queue.take(now).unwrap();
    assert_eq!(job, QueuedWork { work: kyma() | catalog(), priority: Priority::Verification, drift: Drift::All });
}

#[test]
fn delayed_work_is_due_in_time_and_merges() {
    let (mut queue, now) = queue(1, 4);
    queue.enqueue_after(&0, DelayReason::StartupGrace, now + 20 * S, queued(Priority::Catalog), now);
    queue.enqueue_after(&0, DelayReason::Requeue, now + 5 * S, QueuedWork::new(catalog(), Priority::Verification), now);
    assert_eq!(queue.earliest(), Some(now + 5 * S));
    let (_, job) = queue.take(now + 5 * S).unwrap();
    assert_eq!(job.work, catalog());
    let again = ReconcileOutcome { requeue_after: Some(7 * S), ..ReconcileOutcome::ended(job.work) };
    queue.finish(&0, &job, &again, now + 30 * S);
    let (_, job) = queue.take(now + 30 * S).unwrap();
    assert_eq!(job, queued(Priority::Catalog), "it fell due while another reconcile ran");
    queue.finish(&0, &job, &ReconcileOutcome::ended(job.work), now + 30 * S);
    assert_eq!(queue.earliest(), Some(now + 37 * S));
}

#[test]
fn recheck_of_ended_work_is_due_despite_other_failures_and_delays_none() {
    let (mut queue, now) = queue(1, 4);
    queue.enqueue(&0, QueuedWork::new(kyma() | catalog(), Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    let failed = ReconcileOutcome {
        ended: kyma(),
        requeue_after: Some(60 * S),
        ..ReconcileOutcome::failed(catalog(), ErrorClass::Ours)
    };
    let backoff = queue.finish(&0, &job, &failed, now).unwrap();
    assert!(backoff <= S, "{backoff:?}");
    let (_, job) = queue.take(now + S).unwrap();
    assert_eq!(job.work, catalog());
    queue.finish(&0, &job, &ReconcileOutcome::ended(catalog()), now + S);
    assert_eq!(queue.earliest(), Some(now + 60 * S));
    let (_, job) = queue.take(now + 60 * S).unwrap();
    assert_eq!(job, QueuedWork::new(kyma(), Priority::Verification));
}

#[test]
fn rollout_is_due_despite_other_failures() {
    let (mut queue, now) = queue(1, 4);
    queue.enqueue(&0, QueuedWork::new(kyma() | catalog(), Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    let failed = ReconcileOutcome {
        failed: catalog(),
        class: Some(ErrorClass::Ours),
        rollout_after: Some(60 * S),
        ..ReconcileOutcome::ended(kyma())
    };
    let wait = queue.finish(&0, &job, &failed, now).unwrap();
    let (_, job) = queue.take(now + wait).unwrap();
    assert_eq!(job.work, catalog());
    queue.finish(&0, &job, &ReconcileOutcome::ended(catalog()), now + wait);
    assert!(queue.take(now + 59 * S).is_none());
    assert_eq!(queue.take(now + 60 * S).unwrap().1, queued(Priority::Catalog));
}

#[test]
fn paced_keys_that_already_wait_take_no_turn_of_others() {
    let (mut queue, now) = queue(4, 4);
    queue.enqueue_paced(&[0, 1, 2], &queued(Priority::Catalog), 1, now);
    assert_eq!(keys(&mut queue, now), [0]);
    queue.enqueue_paced(&[1, 2, 3], &queued(Priority::Catalog), 1, now);
    for (after, key) in [(1, 1), (2, 2), (3, 3)] {
        assert_eq!(keys(&mut queue, now + S * after), [key]);
    }
}

#[test]
fn step_of_the_clock_brings_its_delays_forward_and_no_others() {
    let (mut queue, now) = queue(2, 4);
    queue.enqueue_after(&0, DelayReason::Rollout, now + 60 * S, queued(Priority::Catalog), now);
    queue.enqueue_after(&1, DelayReason::Requeue, now + 60 * S, queued(Priority::Catalog), now);
    queue.advance(&[0, 1], DelayReason::Rollout, 20 * S, now);
    assert_eq!(queue.earliest(), Some(now + 40 * S));
    queue.advance(&[0, 1], DelayReason::Rollout, Duration::MAX, now);
    assert_eq!(keys(&mut queue, now), [0], "due at once");
    assert_eq!(queue.earliest(), Some(now + 60 * S));
}

#[test]
fn removed_kyma_that_returns_is_not_reconciled_concurrently() {
    let (mut queue, now) = queue(1, 4);
    queue.enqueue(&0, queued(Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    queue.enqueue(&0, queued(Priority::User), now);
    queue.remove(&0);
    queue.enqueue(&0, queued(Priority::User), now);
    queue.insert(0);
    assert!(queue.queued(&0).is_empty());
    queue.enqueue(&0, queued(Priority::User), now);
    assert!(queue.take(now).is_none());
    queue.finish(&0, &job, &ReconcileOutcome::ended(job.work), now);
    assert_eq!(keys(&mut queue, now), [0]);
    queue.remove(&0);
    queue.finish(&0, &job, &ReconcileOutcome::failed(job.work, ErrorClass::Ours), now);
    assert!(queue.entries.is_empty() && queue.earliest().is_none() && queue.running() == 0);
}

#[test]
fn key_is_taken_only_while_it_is_the_first() {
    let (mut queue, now) = queue(2, 4);
    queue.enqueue(&0, queued(Priority::Catalog), now);
    assert_eq!(queue.first(now), Some(0));
    queue.enqueue_after(&1, DelayReason::Requeue, now + S, queued(Priority::User), now);
    let now = now + S;
    assert_eq!(queue.take_first(&0, now), None, "another one is more urgent");
    assert_eq!(queue.take_first(&1, now), Some(queued(Priority::User)));
    assert_eq!(queue.take_first(&1, now), None, "another worker was faster");
    assert_eq!(queue.take_first(&0, now), Some(queued(Priority::Catalog)));
    assert_eq!(queue.first(now), None);
}

#[test]
fn worker_is_needed_for_ready_work_and_for_an_earlier_due_time() {
    let (mut queue, now) = queue(3, 4);
    assert!(!queue.needs_worker());
    let delay = |queue: &mut Queue<u32>, key, after| {
        queue.enqueue_after(&key, DelayReason::Requeue, now + after, queued(Priority::User), now);
        [queue.needs_worker(), queue.needs_worker()]
    };
    assert_eq!(delay(&mut queue, 0, 3 * S), [true, false]);
    assert_eq!(delay(&mut queue, 1, 4 * S), [false, false], "one waits for the first");
    assert_eq!(delay(&mut queue, 2, 2 * S), [true, false]);
    queue.enqueue(&1, queued(Priority::User), now);
    assert!(queue.needs_worker() && queue.needs_worker(), "until it is taken");
    queue.take(now).unwrap();
    assert!(!queue.needs_worker());
}

#[test]
fn discarded_reconcile_frees_its_slot_and_has_no_other_effect() {
    let (mut queue, now) = queue(2, 4);
    for key in 0..2 {
        queue.enqueue(&key, queued(Priority::User), now);
        let (_, job) = queue.take(now).unwrap();
        queue.finish(&key, &job, &ReconcileOutcome::failed(kyma(), ErrorClass::Transport), now);
    }
    let now = now + 3_600 * S;
    let (slow, _) = queue.take(now).unwrap();
    assert_eq!(queue.time_limit(&slow), SLOW_TIME_LIMIT);
    assert!(queue.take(now).is_none(), "one slot for slow runtimes");
    queue.remove(&slow);
    queue.insert(slow);
    queue.enqueue(&slow, queued(Priority::User), now);
    assert_eq!((queue.first(now), queue.running()), (None, 1));
    queue.discard(&slow, now);
    assert_eq!((queue.running(), queue.failures(&slow)), (0, 0));
    assert_eq!(keys(&mut queue, now).len(), 2);
    assert_eq!(queue.time_limit(&slow), TIME_LIMIT, "nothing is known of it");
}

#[test]
fn entry_that_backs_off_leaves_its_slot_to_others_of_its_group() {
    let mut queue = Queue::<u32>::with_groups(4, 1, 1);
    let now = Instant::now();
    (0..2).for_each(|key| queue.insert_into(key, 9, now));
    queue.enqueue(&0, QueuedWork::new(kyma() | catalog(), Priority::User), now);
    let (_, job) = queue.take(now).unwrap();
    // More urgent than the other one, and ready until the failure is known.
    queue.enqueue(&0, queued(Priority::User), now);
    queue.enqueue(&1, queued(Priority::Verification), now);
    assert_eq!((queue.held(), queue.has_ready()), (1, false));
    let outcome = ReconcileOutcome { deferred: catalog(), ..ReconcileOutcome::failed(kyma(), ErrorClass::Ours) };
    queue.finish(&0, &job, &outcome, now);
    assert_eq!(keys(&mut queue, now), [1]);
}

#[test]
fn entry_that_is_ready_goes_into_the_lane_of_its_group() {
    let mut queue = Queue::<u32>::with_groups(4, 2, 1);
    let now = Instant::now();
    (0..2).for_each(|key| queue.insert_into(key, 9, now));
    (0..2).for_each(|key| queue.enqueue(&key, queued(Priority::User), now));
    let (key, job) = queue.take(now).unwrap();
    queue.finish(&key, &job, &ReconcileOutcome::failed(kyma(), ErrorClass::Transport), now);
    assert_eq!(keys(&mut queue, now), [1]);
    assert_eq!(queue.time_limit(&1), SLOW_TIME_LIMIT);
}

#[derive(Clone, Debug)]
enum Step {
    Enqueue(u32, Priority),
    Delay(u32, u64),
    Take,
    Finish(usize, u8),
    Insert(u32),
    InsertInto(u32, u32),
    Remove(u32),
    Advance(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let priority = prop_oneof![Just(Priority::User), Just(Priority::Catalog), Just(Priority::Verification)];
    prop_oneof![
        4 => (0u32..5, priority).prop_map(|(key, priority)| Step::Enqueue(key, priority)),
        1 => (0u32..5, 0u64..9).prop_map(|(key, after)| Step::Delay(key, after)),
        4 => Just(Step::Take),
        4 => (0usize..5, 0u8..6).prop_map(|(at, how)| Step::Finish(at, how)),
        1 => (0u32..5).prop_map(Step::Insert),
        2 => (0u32..5, 0u32..2).prop_map(|(key, group)| Step::InsertInto(key, group)),
        1 => (0u32..5).prop_map(Step::Remove),
        2 => (0u64..9).prop_map(Step::Advance),
    ]
}

proptest! {
    /// No key is reconciled concurrently, no group exceeds its slots or leaves one free, every entry is where its position
    /// states, and no queued work is forgotten.
    #[test]
    fn invariants_hold_for_any_sequence_of_steps(steps in prop::collection::vec(step(), 1..200)) {
        let mut queue = Queue::<u32>::with_groups(4, 2, 1);
        let mut now = Instant::now();
        (0..5).for_each(|key| queue.insert(key));
        let mut work: Vec<(u32, QueuedWork)> = Vec::new();
        for step in steps {
            match step {
                Step::Enqueue(key, priority) => {
                    queue.enqueue(&key, QueuedWork::new(kyma() | catalog(), priority), now);
                }
                Step::Delay(key, after) => queue.enqueue_after(&key, DelayReason::Requeue, now + S * after as u32, queued(Priority::Catalog), now),
                Step::Take => {
                    if let Some((key, queued)) = queue.take(now) {
                        prop_assert!(work.iter().all(|(other, _)| *other != key));
                        work.push((key, queued));
                    }
                }
                Step::Finish(at, how) if at < work.len() => {
                    let (key, queued) = work.remove(at);
                    let outcome = match how {
                        0 => ReconcileOutcome::failed(queued.work, ErrorClass::Transport),
                        1 => ReconcileOutcome::default(),
                        2 => ReconcileOutcome { requeue_after: Some(S), ..ReconcileOutcome::ended(queued.work) },
                        3 => ReconcileOutcome { deferred: queued.work, ..ReconcileOutcome::default() },
                        4 => ReconcileOutcome {
                            deferred: catalog(),
                            ..ReconcileOutcome::failed(kyma(), ErrorClass::Ours)
                        },
                        _ => ReconcileOutcome::ended(queued.work),
                    };
                    queue.finish(&key, &queued, &outcome, now);
                }
                Step::Finish(..) => {}
                Step::Insert(key) => queue.insert(key),
                Step::InsertInto(key, group) => queue.insert_into(key, group, now),
                Step::Remove(key) => queue.remove(&key),
                Step::Advance(seconds) => now += S * seconds as u32,
            }
            prop_assert_eq!(queue.running(), work.len());
            let positioned: usize = queue.ready.iter().flatten().map(BTreeMap::len).sum::<usize>() + queue.delayed.len();
            let idle = queue.entries.values().filter(|entry| matches!(entry.position, Position::Idle)).count();
            prop_assert_eq!(positioned + idle + queue.held(), queue.entries.len());
            for group in 0..2 {
                let runs = |entry: &&Entry<u32>| entry.running.as_ref().is_some_and(|running| running.group == Some(group));
                let running = queue.entries.values().filter(runs).count();
                let of = queue.entries.values().filter(|entry| entry.group == Some(group));
                let (held, others): (Vec<_>, Vec<_>) = of.partition(|entry| matches!(entry.position, Position::Held(..)));
                let ready: Vec<_> = others.iter().filter(|entry| matches!(entry.position, Position::Ready(..))).collect();
                prop_assert!(running + ready.len() <= 2);
                prop_assert!(held.is_empty() || running + ready.len() == 2);
                let priority = |entry: &Entry<u32>| entry.queued.as_ref().map(|queued| queued.priority);
                let first = held.iter().map(|entry| priority(entry)).min();
                prop_assert!(first.is_none_or(|first| ready.iter().all(|entry| priority(entry) <= first)));
            }
            for entry in queue.entries.values().filter(|entry| matches!(entry.position, Position::Idle)) {
                let nothing = entry.queued.is_none() && entry.first_due().is_none();
                prop_assert!(entry.running.is_some() || nothing);
            }
        }
        for (key, queued) in work {
            queue.finish(&key, &queued, &ReconcileOutcome::ended(queued.work), now);
        }
        now += 3_600 * S;
        while let Some((key, queued)) = queue.take(now) {
            queue.finish(&key, &queued, &ReconcileOutcome::ended(queued.work), now);
        }
        prop_assert!(queue.delayed.is_empty());
        prop_assert_eq!((queue.held(), queue.running()), (0, 0));
        (0..5).for_each(|key| queue.remove(&key));
        prop_assert!(queue.is_empty());
    }
}
