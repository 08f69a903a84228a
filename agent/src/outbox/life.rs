//! One life of the sequences, and why another one begins.

use tidewatch_shared::identity::Epoch;

use super::Outbox;

/// One life of the sequences.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) epoch: Epoch,
    /// The last sequence given to an event.
    pub(super) sequence: u64,
    /// Every event up to here was accepted.
    pub(super) accepted: u64,
    /// Signed requests.
    pub(super) nonces: u64,
    pub(super) heartbeats: u64,
}

impl Life {
    pub(super) const fn new(epoch: Epoch) -> Self {
        Self { epoch, sequence: 0, accepted: 0, nonces: 0, heartbeats: 0 }
    }
}

impl Outbox {
    /// Every event up to here was accepted.
    pub(crate) const fn accepted(&self) -> u64 {
        self.life.accepted
    }

    /// Times that the receiver lacked something that had been sent.
    pub(crate) fn gaps(&self) -> u64 {
        self.metrics.epochs(Renewal::Forgotten)
    }
}

/// Why a new epoch was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewal {
    /// Another instance of the receiver answered.
    Instance,
    /// The receiver does not know what it had accepted.
    Forgotten,
    /// An event that was parked left a hole in the sequence.
    Parked,
    /// The receiver refused the signature or the nonce.
    Refused,
    /// Too many names of watches were remembered.
    Names,
}

impl Renewal {
    /// As metrics and logs name it.
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
