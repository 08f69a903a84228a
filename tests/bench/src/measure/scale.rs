//! Cost and speed of one receiver with thousands of runtimes and all their Manifests, in one run: CPU while nothing changes,
//! a channel that moves in KCP, and a restart during which users change modules.
//!
//! The receiver has its default flags, so the pacing of its work is part of each figure. No rollout is delayed, and no module
//! has rings. Runtimes have fake API servers; their agents, KCP and the receiver share one machine.
//!
//! * Idle: all work is done, the connections to the runtimes are closed, and every agent sends heartbeats at its interval.
//! * Moved channel: as in `cargo measure catalog`, with the default rate. The floor is a bare apply of one release meta to
//!   every runtime.
//! * Restart: as in `cargo measure restart`, from the start of the process until a request of every agent has arrived and every
//!   change is settled. The floor is a restart during which no user changed anything.

use std::time::Duration;

use anyhow::{Result, ensure};
use tidewatch_testing::{fake::Calls, load::until_within, progress::Step};
use tokio::time::sleep;

use super::{
    Figure, Network,
    catalog::{self, MoveSample, VERSIONS},
    figure::{mebibytes, median},
    fleet_setup::{FleetSetup, WAIT_LIMIT, metric, sample},
    module_fleet::ModuleFleet,
    restart::{self, CpuTimes, Restart, Round},
};

/// One of the times.
type CpuOf = fn(&CpuTimes) -> f64;

/// Extent of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Number of runtimes
    #[arg(long, default_value_t = 5_000)]
    pub runtimes: usize,
    /// Modules of each runtime
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=26))]
    pub modules: u8,
    /// Seconds over which the CPU time of the idle receiver is measured
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub idle_seconds: u32,
    /// Moves of the channel, and restarts
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Percentage of runtimes that change while the receiver is down
    #[arg(long, default_value_t = 5)]
    pub percent: usize,
    /// Downtime of the receiver, in seconds
    #[arg(long, default_value_t = 20)]
    pub away: u32,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Runs the measurement and emits each figure.
///
/// # Errors
/// When the setup cannot be started, a runtime does not reach its desired state, or a change is lost.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut measured = ModuleFleet::start(settings.modules, settings.network, &[]).await?;
    measured.install(settings.runtimes, emit).await?;
    let ModuleFleet { setup, modules, .. } = &measured;
    let modules: Vec<_> = modules.iter().map(String::as_str).collect();
    idle(setup, settings.idle_seconds, emit).await?;
    moves(setup, settings.rounds, emit).await?;
    restarts(setup, settings, &modules, emit).await
}

/// CPU time of the receiver while nothing changes, in percent of a core.
async fn idle(setup: &FleetSetup, seconds: u32, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    setup.proven(setup.fleet.members().len()).await?;
    setup.fleet.at_rest(WAIT_LIMIT).await?;
    until_within("the Kubernetes Events of the installation to be published", WAIT_LIMIT, async || {
        let waiting = sample(&setup.metrics().await?, "tidewatch_kubernetes_events_waiting")?;
        ensure!(waiting == 0.0, "{waiting} are pending");
        Ok(Some(()))
    })
    .await?;
    setup.disconnected().await?;
    let before = (setup.receiver_cpu().await?, setup.gateway_cpu().await?);
    let heartbeats = setup.fleet.counters().heartbeats();
    let step = Step::begin(format!("no changes for {seconds} s"));
    sleep(Duration::from_secs(seconds.into())).await;
    step.done();
    let after = (setup.receiver_cpu().await?, setup.gateway_cpu().await?);
    let heartbeats = setup.fleet.counters().heartbeats() - heartbeats;
    let percent = |spent: f64| spent * 100.0 / f64::from(seconds);
    let all = percent(after.0 - before.0);
    let gateway = percent(after.1 - before.1);
    let open = metric(&setup.metrics().await?, "tidewatch_gateway_connections");
    emit(&Figure::new("scale_idle_cpu", all, "%").at_most(3.0));
    emit(&Figure::new("scale_idle_gateway_cpu", gateway, "%"));
    emit(&Figure::new("scale_idle_reconcile_cpu", all - gateway, "%"));
    emit(&Figure::new("scale_idle_heartbeats", number(heartbeats) / f64::from(seconds), "1/s"));
    emit(&Figure::new("scale_open_connections", open, "connections"));
    emit(&Figure::new("scale_receiver_pss", mebibytes(setup.receiver_memory().await?.pss_kib), "MiB"));
    Ok(())
}

/// Moves a channel to and fro. No Kyma selects the module, so the catalog of each runtime is all that changes.
async fn moves(setup: &FleetSetup, rounds: u32, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    let mut moves = Vec::new();
    for (round, version) in (1..=rounds).zip(VERSIONS.iter().rev().cycle()) {
        let step = Step::begin(format!("move {round} of {rounds}"));
        moves.push(catalog::one_move(setup, version).await?);
        step.done();
    }
    let of = |pick: fn(&MoveSample) -> f64| median(moves.iter().map(pick).collect());
    let runtimes = number(setup.fleet.members().len() as u64);
    let patches = || moves.iter().flat_map(|moved| &moved.calls).map(catalog::patches);
    let moved = Figure::new("scale_catalog_moved", of(|moved| moved.all), "s");
    emit(&moved.with_floor(of(|moved| moved.floor.seconds)).at_most(30.0));
    let most = patches().max().unwrap_or_default();
    let fewest = patches().min().unwrap_or_default();
    emit(&Figure::new("scale_catalog_patches_per_runtime_most", number(most), "patches").at_most(1.0));
    emit(&Figure::new("scale_catalog_patches_per_runtime_fewest", number(fewest), "patches").at_least(1.0));
    let calls = Calls::sum(moves.iter().flat_map(|moved| &moved.calls)).total();
    emit(&Figure::new("scale_catalog_calls_per_runtime", number(calls) / runtimes / f64::from(rounds), "calls"));
    let cpu = Figure::new("scale_catalog_receiver_cpu_per_runtime", of(|moved| moved.cpu) * 1e3 / runtimes, "ms");
    emit(&cpu.with_floor(of(|moved| moved.floor.cpu) * 1e3 / runtimes));
    let others = of(|moved| moved.others) * 1e3 / runtimes;
    emit(&Figure::new("scale_catalog_agents_and_runtimes_cpu_per_runtime", others, "ms"));
    Ok(())
}

/// A restart without changes, then restarts with changes.
async fn restarts(
    setup: &FleetSetup,
    settings: &Settings,
    modules: &[&str],
    emit: &mut impl FnMut(&Figure),
) -> Result<()> {
    let unchanged = Round { percent: None, away: settings.away, others: modules };
    let changed = Round { percent: Some(settings.percent), ..unchanged };
    let step = Step::begin("restart without changes");
    let floor = restart::round(setup, &unchanged).await?;
    step.done();
    let mut rounds = Vec::new();
    for number in 1..=settings.rounds {
        let step = Step::begin(format!("restart {number} of {}", settings.rounds));
        rounds.push(restart::round(setup, &changed).await?);
        step.done();
    }
    let of = |pick: fn(&Restart) -> f64| median(rounds.iter().map(pick).collect());
    emit(&Figure::new("scale_restart_ready", of(|round| round.ready), "s").with_floor(floor.ready));
    emit(&Figure::new("scale_restart_shown_p50", of(|round| round.shown), "s"));
    emit(&Figure::new("scale_restart_changes_settled", of(|round| round.changes), "s"));
    let settled = Figure::new("scale_restart_settled", of(|round| round.settled), "s");
    emit(&settled.with_floor(floor.settled).at_most(10.0));
    let cpu: [([&'static str; 2], CpuOf); 4] = [
        (["scale_restart_gateway_cpu_until_ready", "scale_restart_gateway_cpu"], |cpu| cpu.gateway),
        (["scale_restart_reconcile_cpu_until_ready", "scale_restart_reconcile_cpu"], |cpu| cpu.reconciles),
        (["scale_restart_kcp_cpu_until_ready", "scale_restart_kcp_cpu"], |cpu| cpu.kcp),
        (["scale_restart_fleet_cpu_until_ready", "scale_restart_fleet_cpu"], |cpu| cpu.fleet),
    ];
    for ([until_ready, all], pick) in cpu {
        let ready = median(rounds.iter().map(|round| pick(&round.cpu_until_ready)).collect());
        emit(&Figure::new(until_ready, ready, "s").with_floor(pick(&floor.cpu_until_ready)));
        let settled = median(rounds.iter().map(|round| pick(&round.cpu)).collect());
        emit(&Figure::new(all, settled, "s").with_floor(pick(&floor.cpu)));
    }
    Ok(())
}

fn number(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}
