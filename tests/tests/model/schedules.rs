//! Random schedules of everything that can go wrong.

use std::{
    hash::{BuildHasher as _, RandomState},
    str::FromStr,
};

use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestError, TestRunner},
};
use tidewatch_shared::metrics::Registry;
use tokio::runtime::Builder;

use crate::game::{
    Checked, Game, Metrics,
    moves::{Move, a_move, an_exchange},
};

/// Schedules of all tests of this module together, unless `TIDEWATCH_SCHEDULES` names another number.
const SCHEDULES: u32 = 12_000;
/// Moves of one schedule, at most: before everything comes to rest for the first time; after that; and when all changes are told. What
/// goes wrong last is what nothing else sets right on its way.
const MOVES: [usize; 3] = [100, 20, 50];

pub(crate) fn from_environment<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

type Schedule = (Vec<Move>, Vec<Move>, Vec<Move>);

/// Plays a twelfth of all schedules so many times. A failure names its seed, for `TIDEWATCH_SEED`, and the shortest schedule that fails.
fn play(twelfths: u32, instances: usize, finish: impl AsyncFn(&mut Game) -> Checked) {
    let cases = from_environment("TIDEWATCH_SCHEDULES").unwrap_or(SCHEDULES) * twelfths / 12;
    let seed = from_environment("TIDEWATCH_SEED").unwrap_or_else(|| RandomState::new().hash_one(instances));
    let config = Config { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(seed), ..Config::default() };
    let [first, second, last] = MOVES;
    let act = |most| prop::collection::vec(a_move(instances), 0..most);
    let schedule = (act(first), act(second), prop::collection::vec(an_exchange(instances), 0..last));
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let mut registry = Registry::default();
    let metrics = Metrics {
        agent: tidewatch_agent::telemetry::Metrics::default(),
        hub: tidewatch_receiver::hub::Metrics::register(&mut registry),
    };
    let play = |schedule: Schedule| {
        // Its clocks are those of the runtime: they stand still but when a move says so.
        runtime.block_on(one(&registry, || Game::new(instances, metrics.clone()), schedule, &finish))
    };
    match TestRunner::new(config).run(&schedule, play) {
        Ok(()) => {}
        Err(TestError::Fail(why, schedule)) => panic!("TIDEWATCH_SEED={seed}: {why}\nafter {schedule:#?}"),
        Err(TestError::Abort(why)) => panic!("TIDEWATCH_SEED={seed}: {why}"),
    }
}

async fn one(
    registry: &Registry,
    game: impl FnOnce() -> Game,
    (first, second, last): Schedule,
    finish: &impl AsyncFn(&mut Game) -> Checked,
) -> Checked {
    let (mut game, before) = (game(), differences(registry));
    for step in first {
        game.play(step).await?;
    }
    game.rest().await?;
    for step in second {
        game.play(step).await?;
    }
    game.hush().await?;
    for step in last {
        game.play(step).await?;
    }
    game.rest().await?;
    let found = differences(registry) - before;
    prop_assert_eq!(found, 0, "digests that differ without cause");
    finish(&mut game).await
}

/// Digests that were ever found to differ.
fn differences(registry: &Registry) -> u64 {
    let page = registry.encode().unwrap();
    let line = page.lines().find_map(|line| line.strip_prefix("fleet_digest_differences_total "));
    line.unwrap().parse().unwrap()
}

#[test]
fn one_receiver_that_restarts_loses_no_change_and_comes_to_rest() {
    play(5, 1, async |_| Ok(()));
}

#[test]
fn receivers_that_alternate_lose_no_change_and_come_to_rest() {
    play(5, 2, async |_| Ok(()));
}

#[test]
fn a_change_that_was_lost_is_found_by_its_digest() {
    play(1, 1, async |game| game.lose_a_change(2).await);
}

#[test]
fn a_deletion_that_was_forgotten_is_told_again_although_a_heartbeat_calls_more_settled() {
    play(1, 1, async |game| game.forget_a_deletion(3).await);
}
