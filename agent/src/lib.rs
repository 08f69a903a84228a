//! The agent of one runtime: watches the resources of its plan, keeps a compact index of their objects, and reports
//! changes to the receiver until the receiver confirms that they are settled.
//!
//! Modules, lowest layer first; each imports lower layers only (checked by a test):
//!
//! | module | responsibility |
//! |---|---|
//! | `clock` | wall clock |
//! | `random` | random numbers |
//! | `memory` | upper bounds of heap memory (pure) |
//! | `backoff` | exponential backoff with jitter (pure) |
//! | [`telemetry`] | logs, metrics, readiness |
//! | `connection` | HTTP over one connection, to the receiver and to the API server |
//! | `kubernetes` | client for the runtime's API server |
//! | `index` | last observed state of each object of a watch, and the digest over it (pure) |
//! | `outbox` | pending, in-flight, accepted and parked events (pure) |
//! | [`core`] | index and outbox of all watches under one lock |
//! | [`receiver`] | address, responses and refusals of the receiver, retry timers |
//! | `settings` | receiver, runtime and trust bundle, parsed from the ConfigMap (pure) |
//! | `watch` | list and watch loops |
//! | `plan` | the ConfigMap with plan and settings |
//! | [`canary`] | the Lease that proves writing and watching |
//! | [`identity`] | key, chain and trust bundle, from files or by enrolment and renewal |
//! | [`link`] | sending of events and heartbeats |
//! | `server` | metrics, probes and admin listener |
//! | [`config`] | flags and environment |
//! | [`command`] | command line |
//! | [`app`] | wiring and supervision of all tasks |
//! | `testing` | decoders of API server responses for tests of other crates, with the feature `testing` |
//!
//! # Example
//!
//! An installed agent needs only its enrolment token: receiver and plan come from its ConfigMap.
//!
//! ```
//! use clap::Parser as _;
//! use tidewatch_agent::config::Config;
//!
//! let config = Config::try_parse_from(["tidewatch-agent", "--token-file", "/var/run/tidewatch/token"])?;
//! assert!(config.receiver_url.is_none() && config.kubeconfig.is_none());
//! # Ok::<_, clap::Error>(())
//! ```

pub mod app;
mod backoff;
pub mod canary;
mod clock;
pub mod command;
pub mod config;
mod connection;
pub mod core;
pub mod identity;
mod index;
mod kubernetes;
#[cfg(test)]
mod layers;
pub mod link;
mod memory;
mod outbox;
mod plan;
mod random;
pub mod receiver;
mod server;
mod settings;
pub mod telemetry;
#[cfg(feature = "testing")]
pub mod testing;
mod watch;

pub use settings::Settings;
pub use watch::{BUILT_IN_KINDS, BuiltIn, ServedResource};
