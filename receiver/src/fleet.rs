//! What is known of each runtime: its sequences per epoch, what is settled, its digests, and whether its path is proven.
//!
//! Pure and in memory: no events are kept, only watermarks, so memory is bounded by the number of
//! runtimes. `hub` holds it in one lock with the queue, so that recording an event and wanting its work is one step.

mod compare;
pub mod forward;
pub mod hub;
mod ledger;
mod path;
mod planned;
pub mod queue;
mod run;
mod runtime;

pub use ledger::EpochView;
pub use path::{Contract, PathState, Unproven};

pub(crate) use path::{Inherited, Pulse, SPOKE_V3, Terms, has_spoken_v3};
pub(crate) use planned::Planned;
pub(crate) use runtime::{Beat, Counted, Forward, Recorded, Runtime, Snapshot};
