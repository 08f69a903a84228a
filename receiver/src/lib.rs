//! The receiver: verifies the agents' events and reconciles the Kymas of their runtime clusters.
//!
//! The crates `trust`, `fleet`, `gateway`, `installer` and `modules` beside it do the work. This one has logs, flags, and the
//! wiring of all of them in [`app`].
//!
//! # Example
//!
//! The configuration is parsed from flags and environment, then [`app::run`] runs the receiver until it is stopped.
//!
//! ```
//! use clap::Parser as _;
//! use tidewatch_receiver::config::Config;
//!
//! let flags = ["--authority", "kcp.example.com:8443", "--oci-registry-host", "registry.example.com"];
//! let config = Config::try_parse_from(["tidewatch-receiver"].into_iter().chain(flags))?;
//! assert_eq!(config.namespace, "kcp-system");
//! # Ok::<_, clap::Error>(())
//! ```

pub mod app;
pub mod config;
#[cfg(test)]
mod layers;
pub mod rights;
pub mod telemetry;
