//! State of the runtimes: sequences per epoch, settled watermarks, digests, and the state of the event path.
//!
//! Pure and in memory: it keeps watermarks, not events, so memory is bounded by the number of runtimes. The [runtime
//! table](table) holds it and the work queue of each shard under one lock, so that an event is recorded and its work
//! enqueued in one step. Events and heartbeats of contract v3 enter as [`Verified`] input only.

mod compare;
mod due;
pub mod forward;
mod ledger;
pub mod manifests;
mod path;
mod plan_index;
pub mod queue;
mod report;
mod runtime;
mod sequences;
mod shares;
pub mod table;
mod tenure;
mod verified;

pub use ledger::EpochView;
pub use path::{Contract, PathState, Unproven};
pub use report::{ModuleReport, ReportTicket};
pub use shares::ShareMetrics;
pub(crate) use tenure::WorkInProgress;
pub use tenure::{Tenure, Tenures};
pub use verified::{EventBatch, Verified};

pub(crate) use path::{Inherited, LastHeartbeat, PathThresholds, USED_V3_SUFFIX, condition_shows_v3};
pub(crate) use plan_index::PlanIndex;
pub(crate) use runtime::{EventsRecord, ForwardedEvent, HeartbeatRecord, HeartbeatStatus, Runtime, Snapshot};
#[cfg(test)]
pub(crate) use shares::WRITES;
pub(crate) use shares::{Cost, Shares};
