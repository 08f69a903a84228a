//! Memory that the receiver needs for each agent that is connected and sends heartbeats.

use std::time::Duration;

use anyhow::{Result, ensure};
use tidewatch_contract::admin::fleet::RuntimeView;
use tidewatch_testing::{load::until_within, product::Memory, progress::Step};
use tokio::time::sleep;

use super::{
    Figure, Network,
    figure::{line, mebibytes},
    fleet_setup::{FleetSetup, WAIT_LIMIT, metric},
    plain_connections,
};

/// Number of agents for which the bar is defined.
const TARGET: f64 = 5_000.0;

/// Extent of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Numbers of agents, one measurement each, ascending; at least two, for the projection
    #[arg(long, value_delimiter = ',', default_values_t = [500, 1_000, 2_000])]
    pub agents: Vec<usize>,
    /// Seconds to wait at each number: idle connections to runtimes close after a minute
    #[arg(long, default_value_t = 100)]
    pub seconds: u32,
    /// Connections of the plain server whose memory is the floor
    #[arg(long, default_value_t = 1_000)]
    pub plain_connections: usize,
    #[command(flatten)]
    pub(super) network: Network,
}

/// Runs the measurement and emits each figure. The projection is the least-squares line through all points.
///
/// # Errors
/// When the setup cannot be started.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(
        settings.agents.is_sorted() && settings.agents.len() > 1,
        "at least two ascending numbers of agents are required"
    );
    let mut setup = FleetSetup::start(settings.network, &[]).await?;
    let plain = plain_connections::kib_per_connection(&setup, settings.plain_connections).await?;
    let mut points = [Vec::new(), Vec::new(), Vec::new()];
    // Memory for the connections of agents from earlier steps, in MiB.
    let mut earlier = 0.0;
    for agents in &settings.agents {
        setup.register(*agents).await?;
        rest(settings).await;
        let silent = setup.receiver_memory().await?;
        setup.grow(*agents).await?;
        let count = f64::from(u32::try_from(*agents)?);
        let (memory, open) = connected(&setup, *agents, settings).await?;
        let pss = mebibytes(memory.pss_kib);
        let peak = mebibytes(memory.peak_rss_kib);
        // The floor is the same receiver with as many runtimes and no agent connected.
        let floor = mebibytes(silent.pss_kib) - earlier;
        earlier = pss - floor;
        for (points, value) in points.iter_mut().zip([pss, peak, floor]) {
            points.push((count, value));
        }
        emit(&Figure::new("fleet_agents", count, "agents"));
        emit(&Figure::new("fleet_open_connections", open, "connections"));
        emit(&Figure::new("fleet_receiver_pss", pss, "MiB").with_floor(floor));
        emit(&Figure::new("fleet_receiver_peak_rss", peak, "MiB"));
    }
    let [connected, peak, unconnected] = points;
    let ((full, agent), (silent, runtime)) = (line(&connected, TARGET), line(&unconnected, TARGET));
    // The part of a runtime without a connected agent has no floor: it is the receiver's own.
    emit(&Figure::new("fleet_receiver_pss_per_agent", agent * 1024.0, "KiB").with_floor(plain));
    emit(&Figure::new("fleet_receiver_pss_per_runtime_without_agent", runtime * 1024.0, "KiB"));
    emit(&Figure::new("fleet_receiver_pss_at_5000", full, "MiB").with_floor(silent).at_most(256.0));
    emit(&Figure::new("fleet_receiver_peak_rss_at_5000", line(&peak, TARGET).0, "MiB"));
    Ok(())
}

/// A period without any activity but heartbeats.
async fn rest(settings: &Settings) {
    let step = Step::begin(format!("idle for {} s", settings.seconds));
    sleep(Duration::from_secs(settings.seconds.into())).await;
    step.done();
}

/// The receiver's memory and its open connections after a quiet period in which so many agents send heartbeats. Not all of
/// them are connected at any time: after its connection ended by its age, an agent opens another with its next heartbeat.
async fn connected(setup: &FleetSetup, agents: usize, settings: &Settings) -> Result<(Memory, f64)> {
    setup.proven(agents).await?;
    let before = setup.fleet.counters().heartbeats();
    rest(settings).await;
    let beats = setup.fleet.counters().heartbeats() - before;
    // Measured before the report, which takes memory itself.
    let memory = setup.receiver_memory().await?;
    let open = metric(&setup.metrics().await?, "tidewatch_gateway_connections");
    let report = until_within("a heartbeat of every agent within two intervals", WAIT_LIMIT, async || {
        let report = setup.report().await?;
        let is_heard = |runtime: &&RuntimeView| {
            runtime.last_seen_seconds.is_some_and(|seconds| seconds <= 2 * runtime.heartbeat_seconds)
        };
        let heard = report.runtimes.iter().filter(is_heard).count();
        ensure!(heard >= agents, "{heard} of {agents} agents were heard");
        Ok(Some(report))
    })
    .await?;
    let intervals = report.runtimes.iter().map(|runtime| runtime.heartbeat_seconds);
    let due = intervals.map(|interval| due_heartbeats(settings.seconds, interval)).sum::<u64>();
    ensure!(beats >= due, "{beats} heartbeats of {agents} agents, expected at least {due}");
    Ok((memory, open))
}

/// Heartbeats of an agent at least: the longest time between two is the interval, a tenth of it, and a quarter of a second.
fn due_heartbeats(seconds: u32, interval_seconds: u64) -> u64 {
    u64::from(seconds) * 1_000 / (interval_seconds * 1_100 + 250)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_are_due_by_the_interval_that_the_receiver_sets() {
        for (seconds, interval, due) in [(100, 30, 3), (100, 33, 2), (100, 84, 1), (100, 91, 0), (66, 30, 1)] {
            assert_eq!(due_heartbeats(seconds, interval), due, "{interval} s");
        }
    }
}
