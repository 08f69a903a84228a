//! One active receiver of several, by a fail-stop Lease in KCP.
//!
//! Whoever wants to work takes the Lease, renews it, and stops all work when it could not renew it in time. `election` decides,
//! purely; `seat` reads and writes the Lease; `fence` refuses every write of a receiver whose time is over, and its guard ends
//! the process. No clock is compared with that of another machine: a Lease has expired when its record has not changed for as
//! long as it says, on the clock of whoever watches it.
//!
//! A write that was sent before the end may still land after it; what that could spoil is worked on once more by the
//! successor (`hub`).

mod election;
mod fence;
mod metrics;
mod seat;

use std::time::Duration;

use clap::Args;

pub use fence::{Fence, FenceLayer, Fenced, Lapsed};
pub use metrics::Metrics;
pub use seat::{Lost, Seat};

/// How one receiver of several is the active one.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct Flags {
    /// Name of the Lease, in the receiver's namespace.
    #[arg(long, env = "TIDEWATCH_LEASE_NAME", default_value = "tidewatch-receiver")]
    pub lease_name: String,

    /// How long the Lease holds without a renewal, in seconds: so long nobody takes over from a receiver that was killed.
    #[arg(long, env = "TIDEWATCH_LEASE_SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u16).range(3..=300))]
    pub lease_seconds: u16,

    /// Name of a place that never runs two receivers at a time, such as a pod's uid. A Lease that was taken from the same place is a
    /// dead predecessor's, and is not waited for.
    #[arg(long, env = "TIDEWATCH_LEASE_PLACE")]
    pub lease_place: Option<String>,
}

/// The times that follow from the length of a Lease.
#[derive(Clone, Copy, Debug)]
struct Timings {
    /// What the Lease says.
    lease: Duration,
    /// From the start of a write that succeeded to the end of all work, unless another succeeds. The rest up to `lease` is for
    /// what was sent at the last moment.
    valid: Duration,
    /// From the start of a write that succeeded to the next.
    renew: Duration,
    /// From a write that failed to the next.
    retry: Duration,
    /// One call takes no longer.
    call: Duration,
    /// How often a candidate looks.
    look: Duration,
}

impl Timings {
    fn of(lease: Duration) -> Self {
        Self {
            lease,
            valid: lease * 4 / 5,
            renew: lease / 3,
            retry: lease / 15,
            call: lease / 5,
            look: (lease / 5).min(Duration::from_secs(1)),
        }
    }
}
