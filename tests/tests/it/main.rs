//! The integration tests, one binary for all: they share one test bed, and each landscape has a namespace of its own in KCP.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by a panic, in its helpers too")]

mod access;
mod catalog;
mod crds;
mod faults;
mod kyma;
mod refusals;
mod support;
mod takeover;
mod test_bed;
