//! Model tests of the event protocol: they run the product's own code without a cluster.
//!
//! * `schedules`: agent core and receiver runtime table under random schedules of actions, thousands in each run.
//! * `simulation`: the same two with link and gateway between them, over a simulated network.
//! * `replicas`: several active replicas that share the runtimes by Leases and relay requests, over a simulated network.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by a panic, in its helpers too")]

mod agent;
mod cluster;
mod receiver;
mod replicas;
mod schedules;
mod simulation;
mod world;
