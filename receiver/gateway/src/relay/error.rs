//! Reasons for which a request is not relayed.

/// Reason for which a request is not relayed. The name is the metric label. All are temporary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum RelayError {
    /// The holder of the shard is not known.
    Unknown,
    /// The request was relayed to this replica, which does not hold the shard (any more).
    NotHere,
    /// There is no connection to the holder, or it has ended: certainly no byte of the request was sent.
    Gone,
    /// Too many requests to the holder are in flight.
    Full,
    /// Too many requests of the runtime to the holder are in flight.
    Share,
    /// The holder did not respond in time.
    Late,
    /// The exchange with the holder failed after it began, so the request may have been processed.
    Broken,
}
