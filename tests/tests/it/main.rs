//! The integration tests in one binary, so that they share one test bed; each landscape has its own namespace in KCP.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by a panic, in its helpers too")]

mod access;
mod active;
mod admin;
mod bootstrap;
mod catalog;
mod clock;
mod crds;
mod deploy;
mod docs;
mod enrolment;
mod faults;
mod forward;
mod install;
mod installer;
mod ipv6;
mod issuer;
mod journeys;
mod kubelet;
mod kyma;
mod load;
mod module_rollout;
mod modules;
mod network;
mod path;
mod policies;
mod privilege;
mod record;
mod refusals;
mod registry;
mod repair;
mod replicas;
mod rotation;
mod sample;
mod shards;
mod store;
mod storms;
mod support;
mod sync;
mod takeover;
mod test_bed;
mod upgrade;
mod v2;
mod watches;
mod yaml;
