//! Fail-stop Leases and write fences, for the election of one process of several.
//!
//! A holder renews its Lease, and stops all work when a renewal is late. `election` decides purely when a Lease has
//! expired; `lease` reads and writes Leases; `fence` refuses every write of a process with an expired Lease. Clocks of
//! different machines are never compared: a Lease has expired when its record has not changed for its duration on the
//! clock of the observer.
//!
//! A write that was sent before the expiry may still arrive after it.

mod election;
mod fence;
mod lease;
mod role;

use std::time::Duration;

use clap::Args;

use crate::flags::seconds;
pub use fence::{NotLeaderError, WriteFence};
pub use fence::{fenced, reconcile_fence};
pub use role::{FleetRole, RoleChanges};

pub use self::{
    election::{LeaseRecord, Observation, ran_in},
    lease::{LeaseApi, LeaseError, acquired, host, record, released, renewed},
};

/// Flags of Leases.
#[derive(Clone, Debug, Args)]
#[group(skip)]
#[command(next_help_heading = "Lease")]
pub struct Flags {
    /// Duration of the Leases in seconds; another replica takes over from a killed receiver only after it
    #[arg(long = "lease-seconds", env = "TIDEWATCH_LEASE_SECONDS", default_value = "15", value_name = "SECONDS", value_parser = seconds(3..=300))]
    pub lease_duration: Duration,

    /// Name of a place that never runs two receivers concurrently, such as the pod's uid; a Lease whose holder ran in
    /// the same place is taken over without waiting
    #[arg(long, env = "TIDEWATCH_LEASE_PLACE")]
    pub lease_place: Option<String>,
}

/// Durations derived from the Lease's duration.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// Duration in the Lease.
    pub lease: Duration,
    /// From the start of a successful write to the end of all work, unless another write succeeds. The rest up to
    /// `lease` is for requests that were sent at the last moment.
    pub valid: Duration,
    /// From the start of a successful write to the next.
    pub renew: Duration,
    /// From a failed write to the next.
    pub retry: Duration,
    /// Timeout of one call.
    pub call: Duration,
}

impl Timings {
    /// Timings for the duration of a Lease.
    pub fn of(lease: Duration) -> Self {
        Self { lease, valid: lease * 4 / 5, renew: lease / 3, retry: lease / 15, call: lease / 5 }
    }
}
