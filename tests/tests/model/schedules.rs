//! Random schedules of actions and faults.

use std::{
    hash::{BuildHasher as _, RandomState},
    str::FromStr,
};

use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestError, TestRunner},
};
use tidewatch_kit::metrics::Registry;
use tokio::runtime::Builder;

use crate::world::{
    CheckResult, Metrics, World,
    actions::{Action, any_action, exchange_action},
};

/// Number of schedules of all tests of this module together; `TIDEWATCH_SCHEDULES` overrides it.
const SCHEDULES: u32 = 12_000;
/// Maximum number of actions of each phase of a schedule: before the world converges for the first time, after that,
/// and once all watch events are delivered. In the last phase no later change masks a fault.
const ACTION_LIMITS: [usize; 3] = [100, 20, 50];

pub(crate) fn env_override<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

type Schedule = (Vec<Action>, Vec<Action>, Vec<Action>);

/// Runs this many twelfths of all schedules. A failure prints its seed, for `TIDEWATCH_SEED`, and the shortest schedule
/// that fails.
fn run_schedules(twelfths: u32, instances: usize, finish: impl AsyncFn(&mut World) -> CheckResult) {
    let cases = env_override("TIDEWATCH_SCHEDULES").unwrap_or(SCHEDULES) * twelfths / 12;
    let seed = env_override("TIDEWATCH_SEED").unwrap_or_else(|| RandomState::new().hash_one(instances));
    let config = Config { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(seed), ..Config::default() };
    let [first, second, last] = ACTION_LIMITS;
    let actions = |max| prop::collection::vec(any_action(instances), 0..max);
    let schedule = (actions(first), actions(second), prop::collection::vec(exchange_action(instances), 0..last));
    let executor = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let mut registry = Registry::default();
    let metrics = Metrics {
        agent: tidewatch_agent::telemetry::Metrics::default(),
        fleet: tidewatch_fleet::table::Metrics::register(&mut registry),
    };
    let run = |schedule: Schedule| {
        // The executor's clock is paused; only the world advances it.
        executor.block_on(run_schedule(&registry, || World::new(instances, metrics.clone()), schedule, &finish))
    };
    match TestRunner::new(config).run(&schedule, run) {
        Ok(()) => {}
        Err(TestError::Fail(reason, schedule)) => panic!("TIDEWATCH_SEED={seed}: {reason}\nafter {schedule:#?}"),
        Err(TestError::Abort(reason)) => panic!("TIDEWATCH_SEED={seed}: {reason}"),
    }
}

async fn run_schedule(
    registry: &Registry,
    world: impl FnOnce() -> World,
    (first, second, last): Schedule,
    finish: &impl AsyncFn(&mut World) -> CheckResult,
) -> CheckResult {
    let mut world = world();
    let before = digest_differences(registry);
    for action in first {
        world.apply(action).await?;
    }
    world.converge().await?;
    for action in second {
        world.apply(action).await?;
    }
    world.drain_watches().await?;
    for action in last {
        world.apply(action).await?;
    }
    world.converge().await?;
    let found = digest_differences(registry) - before;
    prop_assert_eq!(found, 0, "digest differences without a lost change");
    finish(&mut world).await
}

/// Returns the number of digest differences that were ever found.
fn digest_differences(registry: &Registry) -> u64 {
    let page = registry.encode().unwrap();
    let line = page.lines().find_map(|line| line.strip_prefix("fleet_digest_differences_total "));
    line.unwrap().parse().unwrap()
}

#[test]
fn restarting_receiver_loses_no_change_and_converges() {
    run_schedules(5, 1, async |_| Ok(()));
}

#[test]
fn alternating_receivers_lose_no_change_and_converge() {
    run_schedules(5, 2, async |_| Ok(()));
}

#[test]
fn lost_change_is_found_by_digest() {
    run_schedules(1, 1, async |world| world.lose_event_content(2).await);
}

#[test]
fn forgotten_deletion_is_resent_although_heartbeat_settles_later_event() {
    run_schedules(1, 1, async |world| world.lose_accepted_deletion(3).await);
}
