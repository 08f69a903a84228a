//! What leaves the gateway, and where it goes.

use rustls_pki_types::CertificateDer;
use tidewatch_shared::{
    certificate::KeyId,
    event::Received,
    exchange::{EventsResponse, HeartbeatResponse},
    heartbeat::Heartbeat,
    identity::{Epoch, RuntimeId},
};
use tokio::time::Instant;

use crate::fleet::hub::{Beside, Hub, Unplaced};

/// Something that a runtime has said and signed. Only the gateway makes it, after certificate, signature and nonce were checked,
/// so whoever holds one holds the proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified<T> {
    runtime: RuntimeId,
    created: i64,
    said: T,
    leaf: Option<CertificateDer<'static>>,
    authority: Option<KeyId>,
}

impl<T> Verified<T> {
    pub(super) const fn new(runtime: RuntimeId, created: i64, said: T) -> Self {
        Self { runtime, created, said, leaf: None, authority: None }
    }

    /// The same with the certificate that it was signed with.
    pub(super) fn with_leaf(self, leaf: CertificateDer<'static>) -> Self {
        Self { leaf: Some(leaf), ..self }
    }

    /// The same with the key that signed that certificate.
    pub(super) fn with_authority(self, authority: Option<KeyId>) -> Self {
        Self { authority, ..self }
    }

    /// The certificate that it was signed with, where somebody may need it.
    #[must_use]
    pub fn leaf(&self) -> Option<&CertificateDer<'static>> {
        self.leaf.as_ref()
    }

    /// Who said it.
    #[must_use]
    pub fn runtime(&self) -> &RuntimeId {
        &self.runtime
    }

    /// Takes it apart: who, when by the signer's clock (Unix seconds), what.
    #[cfg(test)]
    pub(super) fn into_parts(self) -> (RuntimeId, i64, T) {
        (self.runtime, self.created, self.said)
    }
}

/// The events of one request, all of one epoch and one runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The epoch of the signature's nonce and of every event.
    pub epoch: Epoch,
    /// At least one; each an event, or the name and reason of what is refused.
    pub events: Vec<Received>,
    /// The `traceparent` of the request; none in builds that export no traces.
    pub traceparent: Option<String>,
}

/// Who takes what was verified. Answers at once: nothing is awaited between a request and its answer.
pub trait Intake: Send + Sync + 'static {
    /// Records events and marks their work wanted, in one step.
    ///
    /// # Errors
    /// [`Unplaced`].
    fn events(&self, batch: Verified<Batch>) -> Result<EventsResponse, Unplaced>;

    /// Records a heartbeat at a time in Unix seconds. Its epoch is that of the signature's nonce.
    ///
    /// # Errors
    /// [`Unplaced`].
    fn heartbeat(&self, heartbeat: Verified<Heartbeat>, now: i64) -> Result<HeartbeatResponse, Unplaced>;

    /// A runtime let go of its last connection, or lost it, or missed a heartbeat over one: nothing came over it since then.
    fn closed(&self, _: &RuntimeId, _since: Instant) {}

    /// Whether no Kyma has that runtime id, for certain: then nobody may speak for it.
    fn is_gone(&self, _: &RuntimeId) -> bool {
        false
    }
}

impl Intake for Hub {
    fn events(&self, batch: Verified<Batch>) -> Result<EventsResponse, Unplaced> {
        let Verified { runtime, created, said: Batch { epoch, events, traceparent }, leaf, .. } = batch;
        Self::events_with(self, &runtime, epoch, created, events, Beside { leaf: leaf.as_ref(), traceparent })
    }

    fn heartbeat(&self, heartbeat: Verified<Heartbeat>, now: i64) -> Result<HeartbeatResponse, Unplaced> {
        let Verified { runtime, created, said, authority, .. } = heartbeat;
        Self::heartbeat_with(self, &runtime, created, said, authority.as_ref(), now)
    }

    fn closed(&self, runtime: &RuntimeId, since: Instant) {
        Self::closed(self, runtime, since);
    }

    fn is_gone(&self, runtime: &RuntimeId) -> bool {
        self.is_unknown(runtime)
    }
}
