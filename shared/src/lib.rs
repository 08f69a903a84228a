//! The vocabulary of Tidewatch: custom resources, names and identities as types, the wire contract between
//! agent and receiver, signing and verifying, TLS configurations built from bytes.
//!
//! Nothing here does IO, spawns a task, reads the environment or asks for the time, but the exporter of [`trace`] with the feature `otlp`:
//! callers pass bytes and clocks in.

#[cfg(feature = "api")]
pub mod api;
pub mod certificate;
pub mod digest;
pub mod enrolment;
pub mod event;
pub mod exchange;
pub mod forwarded;
pub mod heartbeat;
pub mod hex;
pub mod identity;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod names;
pub mod plan;
pub mod problem;
pub mod signature;
pub mod table;
pub mod tls;
pub mod trace;
pub mod v2;
