//! What the agents watch: Watcher objects of KCP made into the plan, the plan written to each runtime, and each Watcher told
//! in its status whether it is served.

mod apply;
mod plan;
mod status;

pub use apply::{Applied, ApplyError, apply};
pub use plan::{Rejected, Why, builtin, plan, plan_with, routes, watch_name};
pub use status::{ReportError, Serving, report};
