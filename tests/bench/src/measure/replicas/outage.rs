//! A killed replica, and a rolling restart of all, under the load of all users.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use tidewatch_testing::{landscape::DEADLINE, progress::Step};
use tokio::time::sleep;

use super::{
    super::{Figure, figure::quantile},
    Settings, number,
    setup::ReplicaSetup,
    users::{Change, Users},
};

const REPLICAS: [&str; 3] = ["a", "b", "c"];
/// A runtime may still process a write that the killed replica sent before its end, but not for so long.
const IN_FLIGHT: Duration = Duration::from_secs(1);

/// Replicas with running agents, whose first events are settled.
async fn start(settings: &Settings) -> Result<ReplicaSetup> {
    let mut setup = ReplicaSetup::start(&REPLICAS, settings.agents, settings).await?;
    setup.fleet.start();
    let step = Step::begin("waiting for the first events to be settled");
    let unsettled = setup.unsettled(DEADLINE).await;
    ensure!(unsettled == 0, "{unsettled} events are not settled");
    step.done();
    Ok(setup)
}

/// Changes around the end of a replica.
#[derive(Default)]
struct Kills {
    /// Longest time from an end until all shards of the replica settled a change again, in seconds.
    recovered: f64,
    /// Longest wait of a user whose shard had lost its holder, in seconds.
    waited: f64,
    /// Times of the changes in other shards until then, in milliseconds.
    during: Vec<f64>,
    /// The same before.
    calm: Vec<f64>,
    changes: usize,
    lost: usize,
}

pub(super) async fn kill(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut setup = start(settings).await?;
    let mut kills = Kills::default();
    for (number, replica) in (1..=settings.kills).zip(REPLICAS.iter().cycle()) {
        let step = Step::begin(format!("end {number} of {}", settings.kills));
        one_kill(&mut setup, settings, replica, &mut kills).await?;
        setup.launch(replica).await?;
        setup.are_ready().await?;
        setup.share_equally().await?;
        step.done();
    }
    let Kills { recovered, waited, mut during, mut calm, changes, lost } = kills;
    let bar = f64::from(settings.lease) + 5.0;
    emit(&Figure::new("replicas_kill_settles_again", recovered, "s").at_most(bar));
    emit(&Figure::new("replicas_kill_longest_wait", waited, "s"));
    emit(&Figure::new("replicas_kill_others_samples", number(during.len()), "changes").with_floor(number(calm.len())));
    let mut of = |q: f64| (quantile(&mut during, q), quantile(&mut calm, q));
    let (p50, floor) = of(0.5);
    emit(&Figure::new("replicas_kill_others_p50", p50, "ms").with_floor(floor));
    let (p99, floor) = of(0.99);
    emit(&Figure::new("replicas_kill_others_p99", p99, "ms").ratio_at_most(floor, p99 / floor, 1.5));
    emit(&Figure::new("replicas_kill_changes", number(changes), "changes"));
    emit(&Figure::new("replicas_kill_lost", number(lost), "changes").at_most(0.0));
    Ok(())
}

/// Kills a replica under load.
async fn one_kill(setup: &mut ReplicaSetup, settings: &Settings, replica: &str, kills: &mut Kills) -> Result<()> {
    let users = Users::start(&setup.fleet, settings.rate)?;
    let before = Duration::from_secs(settings.seconds.into());
    // The first of each agent's changes is not part of the comparison: its connections are new.
    let round = Duration::from_secs(settings.agents.into()) / settings.rate.max(1);
    sleep(round + before).await;
    let held = setup.shards_of(replica).await?;
    let killed_replica = setup.remove(replica)?;
    killed_replica.process.kill9();
    let killed = Instant::now();
    setup.share_equally().await?;
    // Every user has made another change by then.
    sleep(round * 2).await;
    let changes = users.end().await?;
    kills.lost += lost(setup, &changes).await;
    kills.changes += changes.len();

    let is_held = |change: &&Change| held.contains(&change.shard);
    let mut again = BTreeMap::new();
    let is_after = |change: &&Change| change.shown.is_none_or(|shown| shown >= killed + IN_FLIGHT);
    for change in changes.iter().filter(is_held).filter(is_after) {
        let shown = change.shown.map_or(f64::INFINITY, |shown| shown.duration_since(killed).as_secs_f64());
        let first = again.entry(change.shard).or_insert(shown);
        *first = shown.min(*first);
    }
    ensure!(!again.is_empty(), "the killed replica held no runtime, or none of its users made a change");
    let recovered = again.values().copied().fold(0.0, f64::max);
    kills.recovered = kills.recovered.max(recovered);
    let end = killed + Duration::try_from_secs_f64(recovered).context("a shard did not settle again")?;
    let held_changes = changes.iter().filter(is_held).filter(|change| change.begun < end);
    kills.waited = held_changes.filter_map(Change::seconds).fold(kills.waited, f64::max);
    let others = |from: Instant, to: Instant| {
        let others = changes.iter().filter(|change| !held.contains(&change.shard));
        let within = others.filter(move |change| change.begun >= from && change.begun < to);
        within.map(|change| change.seconds().unwrap_or(f64::INFINITY) * 1e3).collect::<Vec<_>>()
    };
    kills.during.extend(others(killed, end));
    kills.calm.extend(others(killed - before, killed));
    Ok(())
}

pub(super) async fn rolling(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut setup = start(settings).await?;
    let users = Users::start(&setup.fleet, settings.rate)?;
    let round = Duration::from_secs(settings.agents.into()) / settings.rate.max(1);
    sleep(round).await;
    let begun = Instant::now();
    for name in REPLICAS {
        let step = Step::begin(format!("restarting the replica {name}"));
        let stopped = setup.remove(name)?;
        let status = stopped.process.sigterm(DEADLINE).await?;
        ensure!(status.success(), "the replica {name} ended with {status}");
        setup.launch(name).await?;
        setup.are_ready().await?;
        step.done();
    }
    let took = begun.elapsed();
    setup.share_equally().await?;
    sleep(round).await;
    let changes = users.end().await?;
    let lost = lost(&setup, &changes).await;

    let waited = changes.iter().filter(|change| change.begun >= begun).filter_map(Change::seconds);
    emit(&Figure::new("replicas_rolling_longest_wait", waited.fold(0.0, f64::max), "s").at_most(10.0));
    let mut shown: Vec<_> = changes.iter().filter_map(|change| change.shown).filter(|shown| *shown >= begun).collect();
    shown.sort();
    let gaps = shown.windows(2).map(|pair| pair[1].duration_since(pair[0]).as_secs_f64());
    emit(&Figure::new("replicas_rolling_longest_gap", gaps.fold(0.0, f64::max), "s"));
    emit(&Figure::new("replicas_rolling_took", took.as_secs_f64(), "s"));
    emit(&Figure::new("replicas_rolling_changes", number(changes.len()), "changes"));
    emit(&Figure::new("replicas_rolling_lost", number(lost), "changes").at_most(0.0));
    Ok(())
}

/// Changes that were not shown in time, and events that no agent knows to be settled.
async fn lost(setup: &ReplicaSetup, changes: &[Change]) -> usize {
    changes.iter().filter(|change| change.shown.is_none()).count() + setup.unsettled(DEADLINE).await
}
