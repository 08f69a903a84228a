//! Flags of the upgrade of agents.

use std::time::Duration;

use clap::Args;
use tidewatch_cluster::flags::seconds;
use tidewatch_rollout::{Rings, Share};

/// Flags of the stages of an upgrade.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Upgrade of agents")]
pub struct Flags {
    /// Shares of the runtimes that get a new agent image, stage after stage: growing percentages up to 100%; a stage
    /// has at least one runtime
    #[arg(long, env = "TIDEWATCH_AGENT_UPGRADE_STAGES", default_value = "1%,10%,50%,100%")]
    pub agent_upgrade_stages: Rings,

    /// Minimum duration of an upgrade stage, in seconds
    #[arg(long = "agent-upgrade-pause-seconds", env = "TIDEWATCH_AGENT_UPGRADE_PAUSE_SECONDS", default_value = "3600", value_name = "SECONDS", value_parser = seconds(0..=2_592_000))]
    pub agent_upgrade_pause: Duration,

    /// Time in seconds after which an upgraded runtime without a proven event path has failed; longer than three
    /// heartbeat intervals plus the pull of the image
    #[arg(long = "agent-upgrade-deadline-seconds", env = "TIDEWATCH_AGENT_UPGRADE_DEADLINE_SECONDS", default_value = "600", value_name = "SECONDS", value_parser = seconds(1..=86_400))]
    pub agent_upgrade_deadline: Duration,

    /// Percentage of upgraded runtimes whose failure halts the upgrade; at least one runtime
    #[arg(long, env = "TIDEWATCH_AGENT_UPGRADE_MAX_FAILURES", default_value = "2%")]
    pub agent_upgrade_max_failures: Share,
}
