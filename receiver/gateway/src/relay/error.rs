//! Reasons for which a request is not relayed.

use thiserror::Error;

/// Reason for which a request is not relayed. The name is the metric label. All are temporary.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum RelayError {
    /// The holder of the shard is not known.
    #[error("the holder of the runtime's shard is not known")]
    Unknown,
    /// The request was relayed to this replica, which does not hold the shard (any more).
    #[error("the runtime's shard is not held here")]
    NotHere,
    /// There is no connection to the holder.
    #[error("the holder of the runtime's shard is not reachable")]
    Gone,
    /// Too many requests to the holder are in flight.
    #[error("too many requests to the holder are in flight")]
    Full,
    /// Too many requests of the runtime to the holder are in flight.
    #[error("too many requests of the runtime to the holder are in flight")]
    Share,
    /// The holder did not respond in time.
    #[error("the holder did not respond in time")]
    Late,
    /// The exchange with the holder failed after it began, so the request may have been processed.
    #[error("the exchange with the holder failed")]
    Broken,
}
