//! The agent of one runtime: it watches what its plan names, keeps a few bytes of each object, and tells the receiver what
//! moved, until the receiver says that the work is done.
//!
//! | room | what it owns |
//! |---|---|
//! | [`app`] | which tasks there are, and how they end |
//! | [`config`] | flags and environment, read once |
//! | `plan` | the ConfigMap that names the watches |
//! | `watch` | list and watch loops, one for each watch |
//! | `index` | what was last seen of each object, and the digest (pure) |
//! | `outbox` | what waits, flies, is accepted or parked (pure) |
//! | `core` | index and outbox of all watches under one lock |
//! | `link` | the one connection to the receiver |
//! | `identity` | key, chain and trust bundle |
//! | `canary` | the Lease that proves writing and watching |
//! | `kubernetes` | the connection to the runtime's API server |
//! | [`telemetry`] | logs, metrics and probes |

pub mod app;
mod backoff;
mod canary;
pub mod config;
mod core;
mod identity;
mod index;
mod kubernetes;
mod link;
mod outbox;
mod plan;
mod random;
pub mod telemetry;
mod watch;
