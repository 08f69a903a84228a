//! Simulated agents by the thousand: real keys, real mTLS, real signatures, and the contract as agents keep it, in a
//! few KiB each.
//!
//! * [`Agent`] is one simulated agent: its connection and its protocol state.
//! * [`EnrolmentClient`] obtains an identity as agents do, by a token of its runtime.
//! * [`SimulatedFleet`] registers any number of agents at a landscape's KCP, with runtimes on a [`crate::fake::FakeApiServer`],
//!   and runs them.
//! * [`Flooder`] sends at a fixed rate without waiting for answers.
//! * [`Attacks`] are those of hostile runtimes, and [`toggle_module`] is the user of a well-behaved one.
//! * [`Coexistence`] lets both act at the same time.
//! * [`ChangingRuntime`] is a runtime whose modules, agent and certificate change for ever.
//! * [`PlainServer`] only reads, hashes and verifies, as the floor of a measurement, or refuses every request.
//!
//! A simulated agent has no runtime to watch: its objects are numbers, and their digests are drawn at random.

mod agent;
mod churn;
mod client;
mod coexistence;
mod enrolment;
mod fleet;
mod flood;
mod hostile;
mod plain_server;
mod protocol;
mod user;

pub use agent::{Agent, AgentHandle, RequestOutcome};
pub use churn::{ChangingRuntime, ChurnCounters};
pub use client::{BufferedResponse, RequestError, SignedClient};
pub use coexistence::{Coexistence, CoexistenceReport, installed_endpoint};
pub use enrolment::{EnrolmentClient, EnrolmentEndpoint, IssuedIdentity};
pub use fleet::{FleetCounters, FleetMember, SimulatedFleet, queue, until_within};
pub use flood::{Flood, FloodReport, Flooder};
pub use hostile::{Attack, Attacks};
pub use plain_server::{PlainServer, ServerMode, THREADS};
pub use protocol::ProtocolState;
pub use user::{ChangeTimes, Pace, switch_channel, switch_channel_once, toggle_module};
