//! Signed input of a runtime, as the gateway hands it to the fleet.

use rustls_pki_types::CertificateDer;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::{certificate::KeyId, event::Received, signature::VerifiedSignature};

/// Input that a runtime signed. The constructor consumes a [`VerifiedSignature`], which only signature verification
/// creates, so the type proves that the input was verified. The gateway constructs it after the certificate, the
/// signature, the nonce and the sender were checked, and passes it on unchanged to the runtime table.
#[derive(Debug, PartialEq, Eq)]
pub struct Verified<T> {
    pub(super) runtime: RuntimeId,
    pub(super) signature: VerifiedSignature,
    pub(super) payload: T,
    pub(super) leaf: Option<CertificateDer<'static>>,
    pub(super) authority: Option<KeyId>,
}

impl<T> Verified<T> {
    /// Combines the runtime of the verified certificate, its signature, and the payload that was signed.
    #[must_use]
    pub const fn new(runtime: RuntimeId, signature: VerifiedSignature, payload: T) -> Self {
        Self { runtime, signature, payload, leaf: None, authority: None }
    }

    /// Adds the certificate of the signature. Other managers receive it with forwarded events; without it nothing is
    /// forwarded.
    #[must_use]
    pub fn with_leaf(self, leaf: CertificateDer<'static>) -> Self {
        Self { leaf: Some(leaf), ..self }
    }

    /// Adds the id of the key that issued that certificate.
    #[must_use]
    pub fn with_authority(self, authority: Option<KeyId>) -> Self {
        Self { authority, ..self }
    }

    /// Runtime that signed.
    #[must_use]
    pub const fn runtime(&self) -> &RuntimeId {
        &self.runtime
    }

    /// The signed payload.
    #[must_use]
    pub const fn payload(&self) -> &T {
        &self.payload
    }
}

/// Events of one request, all of the epoch of the signature's nonce.
#[derive(Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// At least one; each an event, or the id of a refused event and the reason.
    pub events: Vec<Received>,
    /// `traceparent` of the request; `None` in builds without trace export.
    pub traceparent: Option<String>,
}

#[cfg(any(test, feature = "testing"))]
impl<T> Verified<T> {
    /// Stands for input that was not verified.
    pub fn unchecked(runtime: &RuntimeId, epoch: tidewatch_api::identity::Epoch, created: i64, payload: T) -> Self {
        let nonce = tidewatch_contract::signature::Nonce { epoch, counter: 0 };
        Self::new(runtime.clone(), VerifiedSignature::unchecked(created, nonce), payload)
    }
}
