//! Watches of the agents: builds the plan from the Watchers in KCP, writes it to each runtime, and writes the status of
//! each Watcher, with the health of its forwarding in all replicas.

mod apply;
mod health;
mod plan;
mod status;

pub use apply::ApplyError;
pub use apply::{apply, replace};
pub use health::{ForwardHealth, HealthByWatch};
pub use plan::extend;
pub use plan::{WatcherError, plan, watch_name};
pub use status::{ServingMode, WriteStatusError, write_status};
