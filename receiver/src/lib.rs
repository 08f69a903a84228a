//! The receiver: verifies the agents' events and reconciles the Kymas of their runtime clusters.
//!
//! Layers, lowest first; a layer imports only from those before it:
//!
//! | layer | responsibility |
//! |---|---|
//! | [`versions`], [`telemetry`] | versions of modules, logs |
//! | [`controllers`] | reconcilers: Kyma, catalog, modules, event path, CA rotation, forwarding |
//! | [`app`] | wiring, configuration |
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
pub mod controllers;
#[cfg(test)]
mod layers;
pub mod rights;
pub mod telemetry;
