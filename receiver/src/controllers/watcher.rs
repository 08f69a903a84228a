//! Watches of the agents: builds the plan from the Watchers in KCP, writes it to each runtime, and writes the status of
//! each Watcher.

mod apply;
mod plan;
mod status;

pub use apply::ApplyError;
pub(crate) use apply::apply;
pub(crate) use plan::extend;
pub use plan::{WatcherError, plan, watch_name};
pub use status::{ServingMode, WriteStatusError, write_status};
