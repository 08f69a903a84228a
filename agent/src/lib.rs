//! The agent of one runtime: it watches what its plan names, keeps a few bytes of each object, and tells the receiver what
//! moved, until the receiver says that the work is done.
//!
//! | room | what it owns |
//! |---|---|
//! | [`app`] | which tasks there are, and how they end |
//! | [`command`] | what the process is to do: run, or ask one that runs |
//! | [`config`] | flags and environment, read once |
//! | `backoff` | how long to wait after failures (pure) |
//! | `clock` | the wall clock, read in one place |
//! | `random` | random numbers, drawn in one place |
//! | [`reading`] | what an API server's bytes come to, for whoever wants to see |
//! | `connection` | HTTP over one connection, for the receiver and for the API server |
//! | `plan` | the ConfigMap that names the watches, and where the receiver is |
//! | `settings` | what it says beside the plan (pure) |
//! | `watch` | list and watch loops, one for each watch |
//! | `index` | what was last seen of each object, and the digest (pure) |
//! | `outbox` | what waits, flies, is accepted or parked (pure) |
//! | [`core`] | index and outbox of all watches under one lock |
//! | [`link`] | the one connection to the receiver |
//! | [`identity`] | key, chain and trust bundle: from files, or asked for, renewed and kept |
//! | [`canary`] | the Lease that proves writing and watching |
//! | `kubernetes` | the connection to the runtime's API server |
//! | [`status`] | what `status` shows |
//! | [`telemetry`] | logs, metrics, probes, and the admin listener |

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
pub mod link;
mod outbox;
mod plan;
mod random;
pub mod reading;
mod settings;
pub mod status;
pub mod telemetry;
mod watch;

/// Whether a text is a kubeconfig, in JSON, that the agent would use. Client certificates that it names as files are read.
#[must_use]
pub fn is_kubeconfig(text: &[u8]) -> bool {
    kubernetes::is_kubeconfig(text)
}
