//! Helpers of Tidewatch's programs, without types of Kubernetes or Kyma.
//!
//! | Modules | Content |
//! |---|---|
//! | `metrics`, [`trace`] | metrics and traces |
//! | [`table`], [`error_levels`], [`variant`] | output of the command lines, errors in log lines, names of enum variants |
//! | [`hex`], [`digest`], [`json`], [`foreign_text`] | hexadecimal, short digests, JSON in its stored form, bounds on the text of others |
//! | [`last_good`], [`clock`], [`short_map`] | polled files, steps of the clock, small maps |
//! | [`tls`], `system_roots` | TLS configurations, and root certificates of the system |
//! | [`addresses`], `bind` | networks of permitted hosts, and TCP listeners for both address families |
//! | [`frame_limiter`] | rate limit of HTTP/2 frames |
//! | [`readiness`], [`random`], [`hash`] | conditions before a process is ready, jitter, hashes within a process |
//!
//! The crate performs no IO and spawns no tasks. The exceptions are [`last_good::read_file`], the exporter of [`trace`] with
//! the feature `otlp`, and the features `bind`, `roots` and `testing`.
//!
//! # Features
//!
//! * `bind`: binds listeners (module `bind`).
//! * `metrics`: the metric registry and the macro `metric_set!` (module `metrics`).
//! * `otlp`: exports spans over OTLP (gRPC); without it, [`trace`] does nothing.
//! * `roots`: reads the root certificates of the system (module `system_roots`).
//! * `testing`: test support for the other crates.

pub mod addresses;
#[cfg(feature = "bind")]
pub mod bind;
pub mod clock;
pub mod digest;
pub mod error_levels;
pub mod foreign_text;
pub mod frame_limiter;
pub mod hash;
pub mod hex;
pub mod json;
pub mod last_good;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod random;
pub mod readiness;
pub mod short_map;
#[cfg(feature = "roots")]
pub mod system_roots;
pub mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tls;
pub mod trace;
pub mod variant;
