//! Command-line flags of maintenance windows.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use tidewatch_cluster::flags::seconds;

/// Times of the upgrades that require a downtime of their module.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Maintenance windows")]
pub struct Flags {
    /// File with the maintenance windows, reloaded when it changes. Without one, installed modules keep their version where
    /// the next one requires a downtime
    #[arg(
        long,
        env = "TIDEWATCH_MAINTENANCE_WINDOW_POLICY",
        default_value = "/etc/maintenance-policy/policy.json",
        value_name = "FILE"
    )]
    pub maintenance_window_policy: PathBuf,

    /// Time in seconds that a maintenance window must still last for an upgrade to begin; shorter windows never open
    #[arg(long, value_name = "SECONDS", env = "TIDEWATCH_MIN_MAINTENANCE_WINDOW_SIZE", default_value = "1200", value_parser = seconds(0..=86_400))]
    pub min_maintenance_window_size: Duration,
}
