//! One pass that is to be made.

use std::{fmt, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Hub, traces::Waiting};
use crate::{
    base::{class::Class, key::KymaKey},
    fleet::{
        Snapshot,
        queue::{Outcome, Wanted},
    },
};

/// What a pass began from, for when it ends.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) generation: u64,
    pub(super) snapshot: Snapshot,
    /// When the oldest event that it began with was accepted.
    pub(super) accepted: Option<Instant>,
    pub(super) at: Instant,
    /// How long it may take.
    pub(super) patience: Duration,
    /// The traces of what it began with.
    pub(super) traces: Waiting,
    /// Cancelled when the Kyma is removed.
    pub(super) gone: CancellationToken,
}

/// A Kyma in work, until it is given to [`Hub::done`]. One that is dropped instead counts as failed, so that no Kyma stays in work for
/// ever.
pub struct Job {
    /// Which Kyma.
    pub key: KymaKey,
    /// What is wanted of it.
    pub wanted: Wanted,
    /// Absent once it has ended.
    begun: Option<(Hub, Begun)>,
    traceparent: Option<String>,
    gone: CancellationToken,
    patience: Duration,
}

impl Job {
    pub(super) fn new(hub: Hub, (key, wanted, begun): (KymaKey, Wanted, Begun)) -> Self {
        let (traceparent, gone, patience) = (begun.traces.end(), begun.gone.clone(), begun.patience);
        Self { key, wanted, begun: Some((hub, begun)), traceparent, gone, patience }
    }

    /// A job that no hub knows, to try a pass with.
    #[must_use]
    pub fn detached(key: KymaKey, wanted: Wanted) -> Self {
        let gone = CancellationToken::new();
        Self { key, wanted, begun: None, traceparent: None, gone, patience: Duration::MAX }
    }

    /// The `traceparent` of its wait in the queue, if events caused it and traces are exported.
    pub(crate) fn traceparent(&self) -> Option<&str> {
        self.traceparent.as_deref()
    }

    /// How long the pass may take, before it counts as one whose runtime does not answer.
    #[must_use]
    pub const fn patience(&self) -> Duration {
        self.patience
    }

    /// Cancelled when its Kyma is deleted or not selected any more: then nothing may be written for it.
    #[must_use]
    pub fn gone(&self) -> CancellationToken {
        self.gone.clone()
    }

    pub(super) fn take(&mut self) -> Option<Begun> {
        self.begun.take().map(|(_, begun)| begun)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some((hub, begun)) = self.begun.take() {
            hub.finish(&self.key, &self.wanted, &begun, &Outcome::failed(self.wanted.works, Class::Ours));
        }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("key", &self.key).field("wanted", &self.wanted).finish_non_exhaustive()
    }
}
