//! State of one epoch, and the causes for which a new epoch begins.

use strum::IntoStaticStr;
use tidewatch_api::identity::Epoch;

/// Counters of one epoch; all of them start at zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EpochState {
    /// The epoch.
    pub(crate) epoch: Epoch,
    /// Last sequence assigned to an event.
    pub(crate) sequence: u64,
    /// Highest sequence up to which the receiver has accepted every event.
    pub(crate) accepted: u64,
    /// Number of signed requests.
    pub(super) nonces: u64,
    /// Number of heartbeats.
    pub(crate) heartbeats: u64,
}

impl EpochState {
    pub(super) const fn new(epoch: Epoch) -> Self {
        Self { epoch, sequence: 0, accepted: 0, nonces: 0, heartbeats: 0 }
    }
}

/// Cause of a new epoch. The name is its label in metrics and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum EpochReason {
    /// Another instance of the receiver answered.
    Instance,
    /// The receiver lost events that it had accepted.
    Forgotten,
    /// A parked event left a gap in the sequence.
    Parked,
    /// The receiver refused the signature or the nonce.
    Refused,
    /// Too many names of watches were remembered.
    Names,
}
