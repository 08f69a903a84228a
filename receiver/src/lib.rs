//! The receiver: verifies the agents' events and reconciles the runtimes they come from.
//!
//! A change passes `gateway` → `hub` (`fleet` and `queue` in one lock) → `kyma` and `catalog` → `runtime_access`; `kcp` tells
//! what changes on the other side, `watcher` makes the plans, `app` connects them all.

pub mod active;
pub mod admin;
pub mod app;
mod bearer;
pub mod catalog;
pub mod command;
pub mod config;
pub mod enrolment;
pub mod fleet;
pub mod forward;
pub mod gateway;
pub mod hub;
pub mod installer;
pub mod kcp;
pub mod key;
pub mod kyma;
pub mod path;
pub mod pki;
pub mod queue;
pub mod record;
pub mod rights;
pub mod runtime_access;
pub mod short_map;
mod stored_form;
pub mod takeover;
pub mod telemetry;
#[cfg(test)]
mod testing;
pub mod watcher;
