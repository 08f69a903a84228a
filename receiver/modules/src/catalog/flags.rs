//! Command-line flags of catalog sync.

use std::time::Duration;

use clap::Args;
use tidewatch_cluster::flags::seconds;
use tidewatch_select::catalog::{
    removal_guard::DEFAULT_LIMIT_PERCENT,
    rollout::{DEFAULT_MAX_DELAY, DEFAULT_SYNC_RATE, RolloutFlags},
};

/// Roll-out of catalog changes to the runtimes.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Catalog")]
pub struct Flags {
    /// Maximum number of runtimes per second that a change of the catalog enqueues
    #[arg(long, env = "TIDEWATCH_CATALOG_SYNC_RATE", default_value_t = Flags::default().catalog_sync_rate, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub catalog_sync_rate: u32,

    /// Time in seconds within which a moved channel reaches the Kymas that follow it, each after its own stable delay
    #[arg(long, value_name = "SECONDS", env = "TIDEWATCH_MODULE_UPGRADE_ROLLOUT_MAX_DELAY", default_value = "300", value_parser = seconds(0..=86_400))]
    pub module_upgrade_rollout_max_delay: Duration,

    /// Percentage of the runtimes above which a change of the catalog that removes a module, channel or version from
    /// them waits for a confirmation, if they are also more than three; 100 disables the limit
    #[arg(long, env = "TIDEWATCH_REMOVAL_LIMIT_PERCENT", default_value_t = Flags::default().removal_limit_percent, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub removal_limit_percent: u8,

    /// Rings of the rollout of modules.
    #[command(flatten)]
    pub rollout: RolloutFlags,
}

impl Default for Flags {
    fn default() -> Self {
        Self {
            catalog_sync_rate: DEFAULT_SYNC_RATE,
            module_upgrade_rollout_max_delay: DEFAULT_MAX_DELAY,
            removal_limit_percent: DEFAULT_LIMIT_PERCENT,
            rollout: RolloutFlags::default(),
        }
    }
}
