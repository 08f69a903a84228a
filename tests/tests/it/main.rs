//! The integration tests, one binary for all: they share one test bed, and each landscape has a namespace of its own in KCP.

mod access;
mod catalog;
mod crds;
mod faults;
mod kyma;
mod refusals;
mod support;
mod takeover;
mod test_bed;
