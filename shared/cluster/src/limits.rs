//! Limits that several layers share.

use std::time::Duration;

/// Deadline of one request to a runtime or to KCP.
pub const REQUEST_DEADLINE: Duration = Duration::from_secs(20);

/// TCP keepalive starts on a connection that received nothing for this long.
pub const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// Interval between two keepalive probes.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Consecutive unanswered keepalive probes after which the connection is closed.
pub const KEEPALIVE_PROBES: u32 = 2;
/// Time after which a connection is closed if its peer disappeared without a FIN or RST.
pub const CONNECTION_LOST_AFTER: Duration =
    Duration::from_secs(KEEPALIVE_IDLE.as_secs() + KEEPALIVE_INTERVAL.as_secs() * KEEPALIVE_PROBES as u64);
