//! State of one epoch, and the causes for which a new epoch begins.

use tidewatch_shared::identity::Epoch;

use super::Outbox;

/// Counters of one epoch; all of them start at zero.
#[derive(Debug)]
pub(super) struct EpochState {
    pub(super) epoch: Epoch,
    /// Last sequence assigned to an event.
    pub(super) sequence: u64,
    /// Highest sequence up to which the receiver has accepted every event.
    pub(super) accepted: u64,
    /// Number of signed requests.
    pub(super) nonces: u64,
    pub(super) heartbeats: u64,
}

impl EpochState {
    pub(super) const fn new(epoch: Epoch) -> Self {
        Self { epoch, sequence: 0, accepted: 0, nonces: 0, heartbeats: 0 }
    }
}

impl Outbox {
    /// Highest sequence up to which the receiver has accepted every event of this epoch.
    pub(crate) const fn accepted(&self) -> u64 {
        self.epoch_state.accepted
    }

    /// Number of times that the receiver lacked an event that had been sent.
    pub(crate) fn gaps(&self) -> u64 {
        self.metrics.epochs(EpochReason::Forgotten.as_str())
    }
}

/// Cause of a new epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

impl EpochReason {
    /// Label value in metrics and logs.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Instance => "instance",
            Self::Forgotten => "forgotten",
            Self::Parked => "parked",
            Self::Refused => "refused",
            Self::Names => "names",
        }
    }
}
