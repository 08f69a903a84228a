//! The rules of events, proved on the product's own code without a cluster.
//!
//! * `schedules`: agent core and receiver hub as a game of random moves, thousands of them in each run.
//! * `simulation`: the same two, with link and gateway between them, over a simulated network.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by a panic, in its helpers too")]

mod agent;
mod cluster;
mod game;
mod receiver;
mod schedules;
mod simulation;
