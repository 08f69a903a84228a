//! What the receiver knows of each runtime, and what it does next.
//!
//! | Modules | Content |
//! |---|---|
//! | [`table`] | the runtime table: per shard one lock over sequences per epoch, settled watermarks, digests and the state of the event path; one queue of all shards |
//! | [`queue`], [`manifest_queue`] | lanes, priorities, delays and backoff of the work on Kymas; the queue of the Manifests |
//! | [`forward`] | pending events of other managers |
//! | [`shards`], [`peers`], [`evidence`] | the owner of each shard; questions to all replicas, and their answers |
//! | [`Services`] | what the tasks that decide for the whole fleet have in common |
//! | [`watch`], [`stores`] | watches of the control plane, and the caches that they fill |
//! | [`plans`], [`pause`], [`takeover`] | the plan of each runtime; which Kymas are paused, and which are managed |
//! | [`recorder`] | Kubernetes Events |
//!
//! The state of the runtimes is pure and in memory: it keeps watermarks, not events, so memory is bounded by the number of
//! runtimes. An event is recorded and its work enqueued in one step. Events and heartbeats of contract v3 enter as
//! [`Verified`] input only.

mod compare;
mod due;
pub mod evidence;
pub mod forward;
#[cfg(test)]
mod layers;
mod ledger;
pub mod manifest_queue;
mod path;
pub mod pause;
pub mod peers;
mod plan_index;
pub mod plans;
pub mod queue;
pub mod recorder;
mod report;
mod runtime;
mod sequences;
mod services;
pub mod shards;
mod shares;
pub mod staged;
pub mod stores;
pub mod table;
pub mod takeover;
mod tenure;
mod verified;
pub mod watch;

pub use path::{Contract, PathState, USED_V3_SUFFIX, Unproven};
pub use report::{ModuleReport, ReportedEvents};
pub use services::Services;
pub use shares::{Cost, Share, ShareMetrics, Shares, WRITES};
pub use tenure::{Tenure, Tenures};
pub use verified::{EventBatch, Verified};
pub use watch::{CommonKymaParts, CommonParts};

pub(crate) use path::{Inherited, LastHeartbeat, PathThresholds, condition_shows_v3};
pub(crate) use plan_index::PlanIndex;
pub(crate) use runtime::{EventsRecord, ForwardedEvent, HeartbeatRecord, HeartbeatStatus, Runtime, Snapshot};
pub(crate) use tenure::WorkInProgress;
