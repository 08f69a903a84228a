//! The flags of catalog sync.

use clap::Args;

/// How changes of the catalog reach the runtimes.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Flags {
    /// Runtimes whose catalog a change of the catalog wakes in one second, at most.
    #[arg(long, env = "TIDEWATCH_CATALOG_SYNC_RATE", default_value_t = Flags::default().catalog_sync_rate, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub catalog_sync_rate: u32,

    /// A moved channel reaches the Kymas that follow it within so many seconds, each at its own time.
    #[arg(long = "module-upgrade-rollout-max-delay", value_name = "SECONDS", env = "TIDEWATCH_MODULE_UPGRADE_ROLLOUT_MAX_DELAY", default_value_t = Flags::default().module_upgrade_rollout_max_delay_seconds, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub module_upgrade_rollout_max_delay_seconds: u32,

    /// A change of the catalog that takes a module, a channel or a version from more than so many per cent of the runtimes (and from
    /// more than three) waits until somebody confirms it; 100 never waits.
    #[arg(long, env = "TIDEWATCH_REMOVAL_LIMIT_PERCENT", default_value_t = Flags::default().removal_limit_percent, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub removal_limit_percent: u8,
}

impl Default for Flags {
    fn default() -> Self {
        Self { catalog_sync_rate: 200, module_upgrade_rollout_max_delay_seconds: 300, removal_limit_percent: 5 }
    }
}
