//! The integration tests, one binary for all: they share one test bed, and each landscape has a namespace of its own in KCP.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by a panic, in its helpers too")]

mod access;
mod active;
mod admin;
mod catalog;
mod clock;
mod crds;
mod deploy;
mod enrolment;
mod faults;
mod forward;
mod installer;
mod issuer;
mod kubelet;
mod kyma;
mod load;
mod network;
mod nothing;
mod path;
mod privilege;
mod record;
mod refusals;
mod repair;
mod rotation;
mod store;
mod storms;
mod support;
mod sync;
mod takeover;
mod test_bed;
mod upgrade;
mod v2;
mod watches;
