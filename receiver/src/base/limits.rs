//! Limits that several layers share.

use std::time::Duration;

/// One request to a runtime or to KCP takes no longer.
pub const REQUEST_DEADLINE: Duration = Duration::from_secs(20);

/// TCP keepalive starts on a connection that received nothing for this long.
pub(crate) const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// Interval between two keepalive probes.
pub(crate) const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Consecutive unanswered keepalive probes after which the connection is closed.
pub(crate) const KEEPALIVE_PROBES: u32 = 2;
/// A connection whose peer disappeared without a FIN or RST is closed after this long.
pub(crate) const CONNECTION_LOST_AFTER: Duration =
    Duration::from_secs(KEEPALIVE_IDLE.as_secs() + KEEPALIVE_INTERVAL.as_secs() * KEEPALIVE_PROBES as u64);
