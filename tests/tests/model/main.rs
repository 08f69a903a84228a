//! The rules of events, proved on the product's own code without a cluster.
//!
//! * `schedules`: agent core and receiver hub as a game of random moves, tens of thousands of them in a minute.
//! * `simulation`: the same two, with link and gateway between them, over a simulated network.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by a panic, in its helpers too")]

mod agent;
mod cluster;
mod game;
mod receiver;
mod schedules;
mod simulation;
