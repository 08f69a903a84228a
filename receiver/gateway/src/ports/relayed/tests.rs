//! Two replicas in one process, over real TLS: each with an event port, an enrolment port, a port of contract v2 and a
//! relay port.

mod answers;
mod bodies;
mod faults;
mod identities;
mod isolation;
mod pools;
mod questions;
mod testing;
