//! Several active replicas that share the runtimes, with simulated agents and fake API servers of the runtimes.
//!
//! * `relay`: all agents connect to one of two replicas, which holds the runtimes of one half of them and relays the requests of
//!   the other half. The floor is the same load with each agent connected to the holder of its runtime. First with the changes of
//!   users, then with requests at a higher rate and hardly a reconcile, beside bare exchanges at that rate.
//! * `kill`: one of three replicas is killed under load and started again, several times.
//! * `rolling`: all three are restarted under load, one after the other.
//! * `memory`: all three together, with connected agents, and the time until events are accepted. The floor is one receiver
//!   without a relay; for the times it has 5,000 agents at most. Compared with it are also the agents
//!   of the three that are connected to the holders of their runtimes, and the least times if two thirds of these requests took a hop.
//! * `kcp`: the load of each of three on KCP: open watches, lists at its start and when another is lost, writes while nothing
//!   changes and for each change. The floor is one receiver without a relay.
//!
//! A change is a channel that the user of a runtime sets: its reconcile writes the status of both Kymas and nothing else. It
//! is accepted when the agent has the answer to its event, and settled when the status in the runtime shows it.

use anyhow::Result;
use clap::ValueEnum;

use super::{Figure, Network};

mod busy;
mod hop;
mod kcp;
mod memory;
mod outage;
mod relay;
mod setup;
mod users;

/// Extent of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Parts of the measurement
    #[arg(long = "part", value_enum, default_values_t = Part::value_variants().to_vec())]
    pub parts: Vec<Part>,
    /// Agents of all parts but `memory`
    #[arg(long, default_value_t = 200)]
    pub agents: u32,
    /// Changes per second of all runtimes together
    #[arg(long, default_value_t = 20)]
    pub rate: u32,
    /// Seconds of each run of `relay`, and of the load before the first outage
    #[arg(long, default_value_t = 30)]
    pub seconds: u32,
    /// Requests per second of all agents in the second half of `relay`
    #[arg(long, default_value_t = 400)]
    pub busy_rate: u32,
    /// Runs of `relay` each way
    #[arg(long, default_value_t = 3)]
    pub runs: u32,
    /// Ends of a replica in `kill`, one replica after the other
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub kills: u32,
    /// Duration of a Lease in seconds
    #[arg(long, default_value_t = 15)]
    pub lease: u16,
    /// Agents of `memory`; its bar is for 20,000
    #[arg(long, default_value_t = 2_000)]
    pub memory_agents: u32,
    #[command(flatten)]
    pub(super) network: Network,
}

/// One part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Relayed beside direct events.
    Relay,
    /// A killed replica.
    Kill,
    /// A rolling restart.
    Rolling,
    /// Memory of all replicas.
    Memory,
    /// Load of each replica on KCP.
    Kcp,
}

/// Runs the measurement and emits each figure.
///
/// # Errors
/// When the setup cannot be started, or, in `relay`, a change is lost.
pub async fn measure(settings: &Settings, emit: &mut impl FnMut(&Figure)) -> Result<()> {
    if settings.parts.contains(&Part::Relay) {
        relay::measure(settings, emit).await?;
    }
    if settings.parts.contains(&Part::Kill) {
        outage::kill(settings, emit).await?;
    }
    if settings.parts.contains(&Part::Rolling) {
        outage::rolling(settings, emit).await?;
    }
    if settings.parts.contains(&Part::Memory) {
        memory::measure(settings, emit).await?;
    }
    if settings.parts.contains(&Part::Kcp) {
        kcp::measure(settings, emit).await?;
    }
    Ok(())
}

fn number(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}
