//! The network of a measurement.

use std::time::Duration;

/// Conditions of the network, the same for every measurement.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Network {
    /// Round-trip time in milliseconds between the receiver and the runtimes with their agents. Floors that write to runtimes
    /// are as far; KCP and users are near
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=300))]
    pub rtt: u16,
}

impl Network {
    /// Round-trip time between the receiver and the runtimes: to their API servers, and from their agents.
    pub fn distance(self) -> Duration {
        Duration::from_millis(self.rtt.into())
    }
}
