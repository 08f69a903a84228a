//! Events that wait to be sent.

use tidewatch_contract::{digest::Digest, event::Change};
use tidewatch_kit::variant::VariantName as _;

use crate::index::ObjectState;

/// Subject of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    /// The watch as a whole: any of its objects may have changed.
    Watch,
    /// The watch as a whole, including objects with unknown names. Only for forwarded watches.
    Unnamed,
    /// One object.
    Object {
        /// Newest state; the last one if the object is deleted.
        seen: ObjectState,
        /// Most significant change since the last settled one.
        change: Change,
        /// The object's current contribution to the digest.
        part: Digest,
    },
}

/// Event that waits.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) update: Update,
    /// The object's contribution to the digest as of the last event sent of it.
    pub(super) base: Digest,
    /// Time at which the agent first observed the change, in Unix milliseconds.
    pub(super) since: i64,
    /// The object was created while the watch was running and no event has been sent of it, so its deletion need not be
    /// sent either.
    pub(super) unannounced: bool,
}

impl Update {
    /// Label of the change in metrics.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Watch => "whole",
            Self::Unnamed => "unnamed",
            Self::Object { change, .. } => change.as_str(),
        }
    }
}

impl Entry {
    /// Creates an entry that has not been sent.
    pub(super) fn new(update: Update, base: Digest, since: i64) -> Self {
        Self { update, base, since, unannounced: false }
    }

    pub(super) fn is_deleted(&self) -> bool {
        matches!(self.update, Update::Object { change: Change::Deleted, .. })
    }
}
