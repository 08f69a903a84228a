//! Simulated agents by the thousand: real keys, real mTLS, real signatures, and the contract as agents keep it, in a few KiB each.
//!
//! * [`Agent`] is one of them: its connection, and what the contract makes it remember.
//! * [`Applicant`] comes by an identity as agents do, by a token of its runtime.
//! * [`Crowd`] registers any number of them at a landscape's KCP, with runtimes on a [`crate::fake::Fake`], and runs them.
//! * [`Flooder`] is one of them that does not wait for anything.
//! * [`Plain`] is a server that only reads, hashes and verifies, as a floor, or refuses everything.
//!
//! What a simulated agent does not have is a runtime to watch: its objects are numbers, and their digests are drawn at random.

mod agent;
mod applicant;
mod contract;
mod crowd;
mod flood;
mod plain;
mod voice;

pub use agent::{Agent, Memory, Outcome};
pub use applicant::{Applicant, Enrolled, Office};
pub use contract::Contract;
pub use crowd::{Crowd, Member, Tally, queue, until_within};
pub use flood::{Flood, Flooder, Sum};
pub use plain::{Plain, THREADS, Work};
pub use voice::{Answer, Fault, Voice};
