//! How much memory the receiver needs for each agent that is connected and sends heartbeats.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::sleep;

use super::{
    Figure,
    crowded::{Crowded, PATIENCE, metric},
    figure::{line, mebibytes},
};
use crate::{load::until_within, product::Memory, progress::Step};

/// What the bar is meant for.
const FULL: f64 = 5_000.0;
/// The longest time between two heartbeats of an agent that is told the interval of 30 s, in seconds.
const HEARTBEAT: u32 = 33;

/// How much is measured.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// How many agents, one measurement each, upwards; two numbers at least, or there is nothing to project from.
    #[arg(long, value_delimiter = ',', default_values_t = [500, 1_000, 2_000])]
    pub agents: Vec<usize>,
    /// How long to wait at each, in seconds: connections to runtimes that nobody needs close after a minute.
    #[arg(long, default_value_t = 100)]
    pub seconds: u32,
}

/// Runs the measurement and tells each figure. The projection is the line through all points by least squares.
///
/// # Errors
/// When the setting does not stand.
pub async fn measure(settings: &Settings, tell: &mut impl FnMut(&Figure)) -> Result<()> {
    ensure!(
        settings.agents.is_sorted() && settings.agents.len() > 1,
        "two numbers of agents at least, and they must rise"
    );
    let mut crowded = Crowded::start(&[]).await?;
    let mut points = [Vec::new(), Vec::new(), Vec::new()];
    // What the connections of those who came earlier cost, in MiB.
    let mut earlier = 0.0;
    for agents in &settings.agents {
        crowded.register(*agents).await?;
        rest(settings).await;
        let silent = crowded.receiver_memory().await?;
        crowded.grow(*agents).await?;
        let count = f64::from(u32::try_from(*agents)?);
        let memory = connected(&crowded, *agents, settings).await?;
        let (pss, peak) = (mebibytes(memory.pss_kib), mebibytes(memory.peak_rss_kib));
        // The floor is the same receiver with as many runtimes of which no agent is connected.
        let floor = mebibytes(silent.pss_kib) - earlier;
        earlier = pss - floor;
        for (points, value) in points.iter_mut().zip([pss, peak, floor]) {
            points.push((count, value));
        }
        tell(&Figure::new("fleet_agents", count, "agents"));
        tell(&Figure::new("fleet_receiver_pss", pss, "MiB").beside(floor));
        tell(&Figure::new("fleet_receiver_peak_rss", peak, "MiB"));
    }
    let [connected, peak, unconnected] = points;
    let (full, slope) = line(&connected, FULL);
    tell(&Figure::new("fleet_receiver_pss_per_agent", slope * 1024.0, "KiB"));
    tell(&Figure::new("fleet_receiver_pss_at_5000", full, "MiB").beside(line(&unconnected, FULL).0).at_most(256.0));
    tell(&Figure::new("fleet_receiver_peak_rss_at_5000", line(&peak, FULL).0, "MiB"));
    Ok(())
}

/// A while in which nothing happens but heartbeats.
async fn rest(settings: &Settings) {
    let step = Step::begin(format!("at rest for {} s", settings.seconds));
    sleep(Duration::from_secs(settings.seconds.into())).await;
    step.done();
}

/// The receiver's memory after such a while, with so many agents connected, each of which is heard of.
async fn connected(crowded: &Crowded, agents: usize, settings: &Settings) -> Result<Memory> {
    crowded.proven(agents).await?;
    let before = crowded.crowd.tally().heartbeats();
    rest(settings).await;
    let (beats, due) =
        (crowded.crowd.tally().heartbeats() - before, agents * usize::try_from(settings.seconds / HEARTBEAT)?);
    ensure!(usize::try_from(beats)? >= due, "{beats} heartbeats came of {agents} agents, and not {due}");
    // Whose connection was old comes again with the next heartbeat.
    until_within("every agent to be connected", PATIENCE, async || {
        let open = metric(&crowded.metrics().await?, "tidewatch_gateway_connections");
        ensure!(open >= f64::from(u32::try_from(agents)?), "{open} of {agents} agents are connected");
        Ok(Some(()))
    })
    .await?;
    crowded.receiver_memory().await
}
